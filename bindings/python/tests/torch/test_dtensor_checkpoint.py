# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint with DTensors: saved by two processes and loaded by four, and the reverse."""
import sys
import unittest

from dtensors import ABSENT
from support import TestCase, child, main, run_save_and_load

if not ABSENT:
    from dtensor_checkpoints import LOAD, SAVE
    CASES = {"save": SAVE, "load": LOAD}


@unittest.skipIf(ABSENT, ABSENT)
class Checkpoints(TestCase):
    def test_four_processes_load_from_two(self):
        run_save_and_load(self, __file__, 2, 4)

    def test_two_processes_load_from_four(self):
        run_save_and_load(self, __file__, 4, 2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        which, ranks = sys.argv[2].split(":")
        child(CASES[which], int(sys.argv[3]), sys.argv[4], int(ranks))
    else:
        main()
