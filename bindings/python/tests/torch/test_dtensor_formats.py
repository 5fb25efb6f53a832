# SPDX-License-Identifier: Apache-2.0
"""Formats of moments and masters of DTensors, over gloo, and their checkpoints."""
import sys
import unittest

from dtensors import ABSENT
from support import TestCase, child, main, run_ranks, run_save_and_load

if not ABSENT:
    from dtensor_formats import LOAD, SAVE, STEPS
    CASES = {"steps": STEPS, "save": SAVE, "load": LOAD}


@unittest.skipIf(ABSENT, ABSENT)
class Formats(TestCase):
    def test_two_processes(self):
        run_ranks(self, __file__, "steps:2", 2)

    def test_four_processes(self):
        run_ranks(self, __file__, "steps:4", 4)

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
