#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run.py [torch] [--short | MODULE...]: runs the tests of the package, or those of dsopt.torch, or only these modules.
Imports the package next to this folder, or with DSOPT_INSTALLED=1 the installed one. With --short the tests run in one
process: updates, state, masters, rounding, errors, wrappers. The other ones start groups of processes and take minutes.

The last line is `N passed, N failed`. Exits with 77 if NumPy (PyTorch) is missing.
"""

import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SHORT = {
    "numpy": ["test_arrays", "test_caches", "test_compile", "test_double", "test_functional", "test_groups",
              "test_lists", "test_low_precision", "test_muon", "test_optimizer", "test_state", "test_versions"],
    "torch": ["test_adam", "test_default_dtype", "test_errors", "test_masters", "test_muon", "test_rounding", "test_sgd",
              "test_shard_one_process", "test_tensors", "test_wrappers"],
}


def main():
    needed, folder, chosen = "numpy", HERE, sys.argv[1:]
    if chosen[:1] == ["torch"]:
        needed, folder, chosen = "torch", os.path.join(HERE, "torch"), chosen[1:]
    if chosen == ["--short"]:
        chosen = SHORT[needed]
    try:
        __import__(needed)
    except ImportError:
        print("skipped: %s has no module %s" % (sys.executable, needed))
        return 77
    sys.path.insert(0, folder)
    if not os.environ.get("DSOPT_INSTALLED"):
        sys.path.insert(0, os.path.dirname(HERE))
        os.environ["PYTHONPATH"] = os.path.dirname(HERE)  # for processes that tests start
    names = sorted(name[:-3] for name in os.listdir(folder) if name.startswith("test_") and name.endswith(".py"))
    suite = unittest.defaultTestLoader.loadTestsFromNames(chosen or names)
    result = unittest.TextTestRunner(stream=sys.stdout).run(suite)
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    for test, reason in result.skipped:
        print("skipped: %s: %s" % (test, reason))
    skipped = ", %d skipped" % len(result.skipped) if result.skipped else ""
    print("%d passed, %d failed%s" % (result.testsRun - failed - len(result.skipped), failed, skipped))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
