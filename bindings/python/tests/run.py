#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py [-v]: the tests of the package, of the one beside this folder unless dsopt is installed (DSOPT_INSTALLED=1).

The last line is `N passed, N failed`. Exit status 77 where NumPy is missing.
"""
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = ("arrays", "optimizer", "functional", "checkpoints", "lists", "comms", "hooks", "processes", "readme")


def main():
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("skipped: NumPy is not installed for %s" % sys.executable)
        return 77
    sys.path.insert(0, HERE)
    if not os.environ.get("DSOPT_INSTALLED"):
        sys.path.insert(0, os.path.dirname(HERE))
    suite = unittest.TestSuite(unittest.defaultTestLoader.loadTestsFromName("test_" + name) for name in FILES)
    result = unittest.TextTestRunner(verbosity=1 + ("-v" in sys.argv), stream=sys.stdout).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    for test, reason in result.skipped:
        print("skipped: %s: %s" % (test, reason))
    skipped = ", %d skipped" % len(result.skipped) if result.skipped else ""
    print("%d passed, %d failed%s" % (result.testsRun - failed - len(result.skipped), failed, skipped))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
