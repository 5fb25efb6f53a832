# SPDX-License-Identifier: Apache-2.0
"""run.py [--short]: runs every test of this folder, or with --short those of the handler and of the optax form, and
some with sharded arrays; the last line counts them."""

import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
SHORT = ["test_handler", "test_optax", "test_operands"] + [
    "test_sharding.Updates." + name
    for name in ("test_keeps_placements_and_bits", "test_gradient_placements_match_optax",
                 "test_works_with_the_partitioner_before_shardy")
]
loader = unittest.defaultTestLoader
suite = loader.loadTestsFromNames(SHORT) if sys.argv[1:] == ["--short"] else loader.discover(HERE, "test_*.py")
result = unittest.TextTestRunner(verbosity=2).run(suite)
failed = len({str(test).split(" (")[0] for test, _ in result.failures + result.errors})
for reason in sorted({reason for _, reason in result.skipped}):
    print("skipped: " + reason)
print(
    "%d passed, %d failed, %d skipped" % (result.testsRun - failed - len(result.skipped), failed, len(result.skipped))
)
sys.exit(not result.wasSuccessful())
