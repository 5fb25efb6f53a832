# SPDX-License-Identifier: Apache-2.0
"""Formats of moments and masters of DTensors, over gloo, and their checkpoints."""
import os
import sys
import tempfile
import unittest
from unittest import mock

from dtensors import ABSENT
from support import TestCase, child, main, run_ranks

if not ABSENT:
    from dtensor_formats import LOAD, SAVE, STEPS
    CASES = {"steps": STEPS, "save": SAVE, "load": LOAD}


@unittest.skipIf(ABSENT, ABSENT)
class Formats(TestCase):
    def over(self, saving, loading):
        with tempfile.TemporaryDirectory() as folder:
            with mock.patch.dict(os.environ, {"DSOPT_TEST_CHECKPOINTS": folder}):
                run_ranks(self, __file__, "save:%d" % saving, saving)
                run_ranks(self, __file__, "load:%d" % loading, loading)

    def test_two_processes(self):
        run_ranks(self, __file__, "steps:2", 2)

    def test_four_processes(self):
        run_ranks(self, __file__, "steps:4", 4)

    def test_four_processes_load_from_two(self):
        self.over(2, 4)

    def test_two_processes_load_from_four(self):
        self.over(4, 2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        which, ranks = sys.argv[2].split(":")
        child(CASES[which], int(sys.argv[3]), sys.argv[4], int(ranks))
    else:
        main()
