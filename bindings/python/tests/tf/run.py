# SPDX-License-Identifier: Apache-2.0
"""run.py [--short | TEST...]: runs all tests in this Python, or only these (test_step), and counts them. With --short:
updates, state and one training run.

dsopt finds the library (DSOPT_LIBRARY). Exits with 77 if TensorFlow is not installed."""
import os
import sys
import time
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SKIPPED = 77
SHORT = ["test_step", "test_state", "test_low_precision", "test_muon"]


def main(names):
    paths = [os.path.join(HERE, "..", ".."), HERE]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths + os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = paths
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import keras
        import tensorflow as tf
    except ImportError as problem:
        print("skipped: %s has no TensorFlow with Keras 3: %s" % (sys.executable, problem))
        return SKIPPED
    if names == ["--short"]:
        names = SHORT
    begin = time.time()
    loader = unittest.defaultTestLoader
    suite = loader.loadTestsFromNames(names) if names else loader.discover(HERE)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(suite)
    for test, reason in result.skipped:
        print("skipped: %s: %s" % (test, reason))
    # Each test counts once, not per subtest.
    failed = len({str(test).split(" (")[0] for test, _ in result.failures + result.errors})
    skipped = len(result.skipped)
    print("TensorFlow %s, Keras %s, Python %s, %.0f s" % (tf.__version__, keras.__version__, sys.version.split()[0],
                                                         time.time() - begin))
    counts = "%d passed, %d failed" % (result.testsRun - failed - skipped, failed)
    print(counts + (", %d skipped" % skipped if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
