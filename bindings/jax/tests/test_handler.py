# SPDX-License-Identifier: Apache-2.0
"""How the handler library is found and compiled."""

import os
import subprocess
import sys
import tempfile
import unittest

import support  # noqa: F401 - first, it sets up the devices  pylint: disable=unused-import
import dsopt.jax

ASK = "import dsopt.jax; print(dsopt.jax.handler_path()); dsopt.jax.register()"


class Handler(unittest.TestCase):
    def ask(self, **environment):
        return subprocess.run(
            [sys.executable, "-c", ASK],
            env={**os.environ, **environment},
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def test_is_compiled_once(self):
        path = dsopt.jax.handler_path()
        before = os.stat(path).st_mtime_ns
        done = self.ask()
        self.assertEqual((done.returncode, done.stdout.strip()), (0, path), done.stderr)
        self.assertEqual(os.stat(path).st_mtime_ns, before)
        self.assertEqual([name for name in os.listdir(os.path.dirname(path)) if name.startswith("tmp")], [])

    def test_processes_compile_at_the_same_time(self):
        with tempfile.TemporaryDirectory() as cache:
            both = [
                subprocess.Popen(
                    [sys.executable, "-c", ASK],
                    env={**os.environ, "DSOPT_CACHE": cache},
                    text=True,
                    stdout=subprocess.PIPE,
                )
                for _ in range(2)
            ]
            paths = [process.communicate()[0].strip() for process in both]
            self.assertEqual([process.returncode for process in both], [0, 0])
            self.assertEqual(paths[0], paths[1])
            self.assertEqual(os.listdir(cache), [os.path.basename(paths[0])])

    def test_chosen_by_the_environment(self):
        path = dsopt.jax.handler_path()
        with tempfile.TemporaryDirectory() as cache:
            done = self.ask(DSOPT_JAX_HANDLER=path, DSOPT_CACHE=cache, PATH="", CXX="/nothing")
        self.assertEqual((done.returncode, done.stdout.strip()), (0, path), done.stderr)
        done = self.ask(DSOPT_JAX_HANDLER="/nothing.so")
        self.assertIn("MissingError: /nothing.so is no handler of dsopt.jax", done.stderr)

    def test_says_what_is_missing(self):
        with tempfile.TemporaryDirectory() as cache:
            no_compiler = self.ask(DSOPT_CACHE=cache, PATH=cache, CXX="")
            bad_compiler = self.ask(DSOPT_CACHE=cache, CXX="false")
        self.assertIn("there is no C++ compiler. Install one", no_compiler.stderr)
        self.assertIn("could not compile its XLA handler", bad_compiler.stderr)


if __name__ == "__main__":
    unittest.main()
