# SPDX-License-Identifier: Apache-2.0
"""Error texts of `import dsopt` if libdsopt cannot be loaded."""

import os
import tempfile
import unittest

from support import python

import dsopt

PROGRAM = """
    try:
        import dsopt
    except ImportError as problem:
        print(type(problem).__name__, problem)
"""


def import_error(library):
    """Returns the error text of the import with this library."""
    status, out, error = python(PROGRAM, library=library, timeout=300)
    if status:
        raise AssertionError(error)
    return out


class Load(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "libdsopt.so")

    def altered(self, before, after):
        """Returns a copy of libdsopt in which `before`, which must occur, is replaced by `after`."""
        self.assertEqual(len(before), len(after))
        with open(dsopt._abi.path, "rb") as file:
            content = file.read()
        self.assertIn(before, content)
        with open(self.path, "wb") as file:
            file.write(content.replace(before, after))
        return self.path

    def test_missing_dependency_is_named(self):
        text = import_error(self.altered(b"\0libc.so.6\0", b"\0libq.so.6\0"))
        self.assertIn(self.path + " was found, but libq.so.6, which it needs, was not", text)
        self.assertIn("Install the package that has libq.so.6", text)
        self.assertIn("LD_LIBRARY_PATH", text)
        self.assertNotIn("DSOPT_LIBRARY", text)

    def test_newer_system_requirement_is_named(self):
        text = import_error(self.altered(b"\0GLIBC_2.17\0", b"\0GLIBC_9.17\0"))
        self.assertIn(self.path + " was found, but this system has no GLIBC_9.17", text)
        self.assertIn("install a wheel of dsopt, or build dsopt on this system", text)
        self.assertNotIn("DSOPT_LIBRARY", text)

    def test_missing_file_is_named(self):
        text = import_error(self.path)
        self.assertIn(self.path + ": cannot open shared object file", text)
        self.assertIn("Set DSOPT_LIBRARY to the path of libdsopt.so", text)

    def test_file_that_is_no_library_is_rejected(self):
        with open(self.path, "wb") as file:
            file.write(b"text")
        text = import_error(self.path)
        self.assertIn("no library of dsopt that this system can load", text)
        self.assertNotIn("DSOPT_LIBRARY", text)

    def test_unrelated_library_is_rejected(self):
        text = import_error("libc.so.6")
        self.assertIn("dsopt_abi_version", text)
        self.assertIn("Set DSOPT_LIBRARY to the path of libdsopt.so", text)


if __name__ == "__main__":
    unittest.main()
