# SPDX-License-Identifier: Apache-2.0
"""How the handler library is found and compiled."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import support  # noqa: F401 - first, it sets up the devices  pylint: disable=unused-import
import dsopt.jax
from dsopt.jax import _build

PACKAGE = os.path.dirname(os.path.abspath(dsopt.__file__))
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
        self.assertEqual([name for name in os.listdir(os.path.dirname(path)) if "building" in name], [])

    def test_one_of_several_processes_compiles(self):
        with tempfile.TemporaryDirectory() as cache:
            both = [
                subprocess.Popen(
                    [sys.executable, "-c", ASK],
                    env={**os.environ, "DSOPT_CACHE": cache},
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                for _ in range(2)
            ]
            said = [process.communicate() for process in both]
            self.assertEqual([process.returncode for process in both], [0, 0])
            self.assertEqual(sum(complaint.count("compiling its") for _, complaint in said), 1)
            path = said[0][0].strip()
            self.assertEqual(said[1][0].strip(), path)
            self.assertEqual(sorted(os.listdir(cache)), [".lock", os.path.basename(path)])

    def test_environment_selects_the_handler(self):
        path = dsopt.jax.handler_path()
        with tempfile.TemporaryDirectory() as cache:
            done = self.ask(DSOPT_JAX_HANDLER=path, DSOPT_CACHE=cache, PATH="", CXX="/nothing")
        self.assertEqual((done.returncode, done.stdout.strip()), (0, path), done.stderr)
        done = self.ask(DSOPT_JAX_HANDLER="/nothing.so")
        self.assertIn("MissingError: /nothing.so is no handler of dsopt.jax", done.stderr)

    def test_error_names_what_is_missing(self):
        with tempfile.TemporaryDirectory() as cache:
            no_compiler = self.ask(DSOPT_CACHE=cache, PATH=cache, CXX="")
            bad_compiler = self.ask(DSOPT_CACHE=cache, CXX="false")
        self.assertIn("there is no C++ compiler. Install one", no_compiler.stderr)
        self.assertIn("could not compile its XLA handler", bad_compiler.stderr)
        self.assertIn("dsopt.jax: compiling its XLA handler for jaxlib ", bad_compiler.stderr)

    def test_ffi_version_matches_the_header(self):
        major, minor = _build.api_version()
        self.assertEqual(major, 0)
        self.assertGreaterEqual(minor, 2)  # jaxlib 0.8.1

    def test_prebuilt_handler_needs_same_or_earlier_minor_version(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("_handler-0.3.so", "_handler-0.11.so", "_handler-1.2.so", "_handler.cc", "a_handler-0.2.so"):
                with open(os.path.join(folder, name), "wb"):
                    pass
            for version, name in {
                (-1, 0): None,
                (0, 2): None,
                (0, 3): "_handler-0.3.so",
                (0, 10): "_handler-0.3.so",
                (0, 11): "_handler-0.11.so",
                (0, 12): "_handler-0.11.so",
                (1, 1): None,
                (1, 2): "_handler-1.2.so",
            }.items():
                with self.subTest(version=version):
                    path = _build.prebuilt(folder, version)
                    self.assertEqual(path, name and os.path.join(folder, name))

    def test_prebuilt_handler_needs_no_compiler(self):
        path = dsopt.jax.handler_path()
        with tempfile.TemporaryDirectory() as folder:
            package = os.path.join(folder, "dsopt")
            shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_handler-*.so"))
            shutil.copy(dsopt._abi.description_path, package)
            name = "_handler-%d.%d.so" % _build.api_version()
            shutil.copy(path, os.path.join(package, "jax", name))
            cache = os.path.join(folder, "cache")
            done = self.ask(PYTHONPATH=folder, DSOPT_CACHE=cache, DSOPT_LIBRARY=dsopt._abi.path, PATH="",
                            CXX="/nothing")
            self.assertEqual((done.returncode, done.stdout.strip()), (0, os.path.join(package, "jax", name)),
                             done.stderr)
            self.assertNotIn("compiling", done.stderr)
            self.assertFalse(os.path.exists(cache))


if __name__ == "__main__":
    unittest.main()
