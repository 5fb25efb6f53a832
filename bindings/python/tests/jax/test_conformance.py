# SPDX-License-Identifier: Apache-2.0
"""The conformance cases, which every language computes."""

import os
import subprocess
import sys
import unittest

CASES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "conformance")


class Conformance(unittest.TestCase):
    def test_prints_the_expected_digest(self):
        with open(os.path.join(CASES, "expected"), encoding="utf-8") as file:
            expected = file.read().split()[-1]
        done = subprocess.run(
            [sys.executable, os.path.join(CASES, "jax_cases.py")], text=True, stdout=subprocess.PIPE, check=True
        )
        self.assertEqual(done.stdout, "jax %s\n" % expected)


if __name__ == "__main__":
    unittest.main()
