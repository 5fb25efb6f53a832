# SPDX-License-Identifier: Apache-2.0
"""Adapter libraries between libdsopt and a framework: which one is used, and the output while one is compiled."""

import contextlib
import errno
import io
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
from unittest import mock

import dsopt
from dsopt import _compile
from support import PACKAGE

COMPILER = """#!/bin/sh
for word; do
    [ "$before" != -o ] || echo compiled >"$word"
    before=$word
done
"""


class Libraries(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        compiler = os.path.join(self.folder, "compiler")
        with open(compiler, "w", encoding="utf-8") as file:
            file.write(COMPILER)
        os.chmod(compiler, 0o755)
        self.source = os.path.join(self.folder, "source.cc")
        with open(self.source, "w", encoding="utf-8") as file:
            file.write("int answer() { return 42; }\n")
        self.cache = os.path.join(self.folder, "cache")
        environment = mock.patch.dict(os.environ, {"CXX": compiler, "DSOPT_CACHE": self.cache})
        environment.start()
        self.addCleanup(environment.stop)

    def path(self, **options):
        """Returns the path, and the output."""
        with contextlib.redirect_stderr(io.StringIO()) as output:
            path = _compile.Extension(
                module="dsopt.one",
                what="handler",
                framework="Framework",
                framework_version="1.2",
                variable="DSOPT_ONE",
                source=self.source,
                other_sources=[],
                flags=[],
                libraries=[],
                **options,
            ).path()
        return path, output.getvalue()

    def test_first_use_compiles_and_prints_one_line(self):
        path, output = self.path()
        self.assertEqual(output, "dsopt.one: compiling its handler for Framework 1.2, which is kept as %s\n" % path)
        self.assertTrue(os.path.exists(path))
        self.assertEqual(self.path(), (path, ""))

    def test_packaged_library_needs_no_compiler(self):
        with mock.patch.dict(os.environ, {"CXX": "/nothing"}):
            self.assertEqual(self.path(prebuilt="/package/handler.so"), ("/package/handler.so", ""))
        self.assertFalse(os.path.exists(self.cache))

    def test_environment_overrides_the_package(self):
        with mock.patch.dict(os.environ, {"DSOPT_ONE": "/chosen.so"}):
            self.assertEqual(self.path(prebuilt="/package/handler.so"), ("/chosen.so", ""))
            self.assertEqual(self.path(), ("/chosen.so", ""))

    def test_compiler_failure_is_reported(self):
        with mock.patch.dict(os.environ, {"CXX": "false"}), self.assertRaises(dsopt.MissingError) as caught:
            self.path()
        self.assertIn("dsopt.one could not compile its handler for Framework 1.2", str(caught.exception))
        self.assertEqual(os.listdir(self.cache), [".lock"])

    def processes(self, count):
        """Starts processes that need the library."""
        program = """
            import sys
            from dsopt import _compile
            one = _compile.Extension(
                "dsopt.one", "handler", "Framework", "1.2", "DSOPT_ONE", sys.argv[1], [], [], []
            )
            print(one.path())
            """
        return [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program), self.source],
                env={**os.environ, "PYTHONPATH": str(PACKAGE), "DSOPT_LIBRARY": dsopt._abi.path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
            )
            for _ in range(count)
        ]

    def slow_compiler(self):
        """Makes the compiler note each call in a file, and wait for another file, or for the end of the test: the
        compiler of a killed process goes on. Returns both paths."""
        release, calls = os.path.join(self.folder, "release"), os.path.join(self.folder, "calls")
        waits = "echo called >>%s\nwhile [ ! -e %s ] && [ -e %s ]; do sleep 0.05; done\n" % (calls, release, calls)
        with open(os.environ["CXX"], "w", encoding="utf-8") as file:
            file.write(COMPILER.replace("#!/bin/sh\n", "#!/bin/sh\n" + waits))
        return release, calls

    def wait_for(self, path):
        end = time.monotonic() + 60
        while not os.path.exists(path):
            self.assertLess(time.monotonic(), end, "%s does not appear" % path)
            time.sleep(0.02)

    def test_one_of_several_processes_compiles(self):
        release, calls = self.slow_compiler()
        processes = self.processes(4)
        self.wait_for(calls)
        time.sleep(0.5)  # the others reach the lock
        with open(release, "w", encoding="utf-8"):
            pass
        said = [process.communicate(timeout=60) for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * 4, said)
        self.assertEqual(len({path for path, _ in said}), 1)
        self.assertEqual(sum("compiling" in complaint for _, complaint in said), 1)
        with open(calls, encoding="utf-8") as file:
            self.assertEqual(file.read(), "called\n")

    def test_folder_of_a_killed_process_is_removed(self):
        release, calls = self.slow_compiler()
        (process,) = self.processes(1)
        self.wait_for(calls)
        process.kill()
        process.wait(timeout=60)
        self.assertEqual(len(os.listdir(self.cache)), 2)  # the lock and the folder
        with open(release, "w", encoding="utf-8"):
            pass
        process.communicate(timeout=60)  # its compiler ends
        path, output = self.path()
        self.assertIn("compiling", output)
        self.assertEqual(sorted(os.listdir(self.cache)), [".lock", os.path.basename(path)])

    def test_works_where_files_cannot_be_locked(self):
        other = os.path.join(self.cache, "dsopt-building-other")  # perhaps of a process that is compiling
        os.makedirs(other)
        with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "no locks")):
            path, _ = self.path()
        self.assertTrue(os.path.exists(path))
        self.assertTrue(os.path.exists(other))

    def test_user_without_home_is_told_what_to_set(self):
        # As without HOME and without an entry in the list of users.
        nowhere = mock.patch("os.path.expanduser", lambda path: path)
        with mock.patch.dict(os.environ, {"DSOPT_CACHE": "", "XDG_CACHE_HOME": ""}), nowhere:
            with self.assertRaisesRegex(dsopt.MissingError, "has no home folder. Set DSOPT_CACHE to a folder"):
                self.path()
            os.environ["XDG_CACHE_HOME"] = self.folder
            self.assertEqual(os.path.dirname(self.path()[0]), os.path.join(self.folder, "dsopt"))


if __name__ == "__main__":
    unittest.main()
