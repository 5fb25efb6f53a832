# SPDX-License-Identifier: Apache-2.0
import os
import pathlib
import re
import tempfile
import unittest

from support import python

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


class Readme(unittest.TestCase):
    def test_programs_print_the_documented_output(self):
        found = re.findall(
            r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S
        )
        self.assertEqual(len(found), 4)
        with tempfile.TemporaryDirectory() as folder:
            for source, expected in found:
                status, said, complaint = python("import os\nos.chdir(%r)\n%s" % (folder, source))
                self.assertEqual((status, said, complaint), (0, expected, ""))
            self.assertTrue(os.path.exists(os.path.join(folder, "run.safetensors")))


if __name__ == "__main__":
    unittest.main()
