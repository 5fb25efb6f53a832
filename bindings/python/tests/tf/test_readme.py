# SPDX-License-Identifier: Apache-2.0
"""The programs of the README run, with the results in the README."""
import os
import re
import subprocess
import sys
import tempfile
import unittest

README = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "dsopt", "tf", "README.md")


class Readme(unittest.TestCase):
    def test_programs_run(self):
        with open(README, encoding="utf-8") as file:
            text = file.read()
        programs = re.findall(r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", text, flags=re.M | re.S)
        self.assertTrue(programs)
        self.assertEqual(len(programs), text.count("```python"))
        for program, wanted in programs:
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run([sys.executable, "-c", program], cwd=folder, text=True, timeout=600, check=False,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"})
                self.assertEqual(done.returncode, 0, done.stderr[-2000:])
                self.assertEqual(done.stdout, wanted)


if __name__ == "__main__":
    unittest.main()
