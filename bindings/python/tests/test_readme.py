# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import re
import tempfile
import unittest

from support import python

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


class Readme(unittest.TestCase):
    def test_program_prints_the_documented_output(self):
        """The program prints the output in the README."""
        (found,) = re.findall(
            r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S
        )
        source, expected = found
        with tempfile.TemporaryDirectory() as folder:
            status, said, complaint = python("import os\nos.chdir(%r)\n%s" % (folder, source))
            self.assertTrue(os.path.exists(os.path.join(folder, "run.safetensors")))
        self.assertEqual((status, said, complaint), (0, expected, ""))


if __name__ == "__main__":
    unittest.main()
