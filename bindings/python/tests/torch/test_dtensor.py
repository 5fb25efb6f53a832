# SPDX-License-Identifier: Apache-2.0
"""DTensors over two and four processes with gloo: FSDP2, tensor parallelism and both. Each set of processes runs many
cases, because starting it takes longer than the cases."""
import sys
import unittest

from dtensors import ABSENT
from support import TestCase, child, main, run_ranks

if not ABSENT:
    from dtensor_norms import NORMS
    from dtensor_steps import STEPS
    CASES = {"steps": STEPS, "norms": NORMS}


@unittest.skipIf(ABSENT, ABSENT)
class Ranks(TestCase):
    def test_steps_match_on_two_processes(self):
        run_ranks(self, __file__, "steps:2", 2)

    def test_steps_match_on_four_processes(self):
        run_ranks(self, __file__, "steps:4", 4)

    def test_norms_match_on_two_processes(self):
        run_ranks(self, __file__, "norms:2", 2)

    def test_norms_match_on_four_processes(self):
        run_ranks(self, __file__, "norms:4", 4)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        which, ranks = sys.argv[2].split(":")
        child(CASES[which], int(sys.argv[3]), sys.argv[4], int(ranks))
    else:
        main()
