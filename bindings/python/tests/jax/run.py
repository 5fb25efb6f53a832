# SPDX-License-Identifier: Apache-2.0
"""Runs every test of this folder; the last line counts them."""

import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
result = unittest.TextTestRunner(verbosity=2).run(unittest.defaultTestLoader.discover(HERE, "test_*.py"))
failed = len({str(test).split(" (")[0] for test, _ in result.failures + result.errors})
for reason in sorted({reason for _, reason in result.skipped}):
    print("skipped: " + reason)
print(
    "%d passed, %d failed, %d skipped" % (result.testsRun - failed - len(result.skipped), failed, len(result.skipped))
)
sys.exit(not result.wasSuccessful())
