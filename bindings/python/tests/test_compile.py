# SPDX-License-Identifier: Apache-2.0
"""Adapter libraries between libdsopt and a framework: which one is used, and the output while one is compiled."""

import contextlib
import io
import os
import tempfile
import unittest
from unittest import mock

import dsopt
from dsopt import _compile

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


if __name__ == "__main__":
    unittest.main()
