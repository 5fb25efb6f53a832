# SPDX-License-Identifier: Apache-2.0
"""accelerate with FSDP2, and Lightning's ModelParallelStrategy, over two processes."""
import importlib.util
import sys
import unittest

from dtensors import ABSENT
from support import TestCase, child, main, run_ranks

if not ABSENT:
    from dtensor_trainers import accelerate_with_fsdp2, lightning_with_model_parallel_strategy
    CASES = {"accelerate": [accelerate_with_fsdp2], "lightning": [lightning_with_model_parallel_strategy]}


def absent(module):
    return ABSENT or ("" if importlib.util.find_spec(module) else "%s is not installed" % module)


class Trainers(TestCase):
    @unittest.skipIf(absent("accelerate"), absent("accelerate"))
    def test_works_with_accelerate(self):
        run_ranks(self, __file__, "accelerate")

    @unittest.skipIf(absent("lightning"), absent("lightning"))
    def test_works_with_lightning(self):
        run_ranks(self, __file__, "lightning")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(CASES[sys.argv[2]], int(sys.argv[3]), sys.argv[4])
    else:
        main()
