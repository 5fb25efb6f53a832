# SPDX-License-Identifier: Apache-2.0
"""The programs of README.md run unchanged."""

import os
import re
import subprocess
import sys
import unittest

README = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "dsopt", "jax", "README.md")


class Readme(unittest.TestCase):
    def test_programs_run(self):
        with open(README, encoding="utf-8") as file:
            programs = re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S)
        self.assertEqual(len(programs), 8)
        for program in programs:
            with self.subTest(program.splitlines()[0]):
                done = subprocess.run([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, check=True)
                self.assertRegex(done.stdout, r"^(loss \d\.\d -> 0\.0\d+|norm of 30 ones: 5\.4772)")


if __name__ == "__main__":
    unittest.main()
