# SPDX-License-Identifier: Apache-2.0
"""The programs of dsopt/torch/DEEPSPEED.md run in two processes, and rank 0 prints the output on the page."""
import contextlib
import io
import pathlib
import re
import sys
import tempfile
import unittest

import originals
from support import TestCase, child, main, run_ranks, torch

from dsopt.torch import unregister

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
PAGE = pathlib.Path(__file__).resolve().parents[2] / "dsopt" / "torch" / "DEEPSPEED.md"


def programs():
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", text, flags=re.M | re.S)
    assert len(found) == len(re.findall(r"^```python$", text, flags=re.M)) >= 4, len(found)
    return found


def run_all(rank):
    originals.start()
    for program, expected in programs():
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
        if rank == 0:
            assert said.getvalue() == expected, (program, said.getvalue())
        unregister()


@unittest.skipUnless(GLOO, "torch is built without gloo")
class Page(TestCase):
    @originals.needed
    def test_programs_print_the_documented_output(self):
        self.run_programs({})

    @originals.newer_needed
    def test_programs_work_with_the_newer_version(self):
        self.run_programs(originals.newer())

    def run_programs(self, environment):
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(self, __file__, "all", environment={"TMPDIR": folder, **environment})


class Links(TestCase):
    def test_files_and_sections_exist(self):
        text = PAGE.read_text(encoding="utf-8")
        titles = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                  for title in re.findall(r"^## (.*)$", text, flags=re.M)}
        for target in re.findall(r"\]\(([^)]*)\)", text):
            file, _, section = target.partition("#")
            if file.startswith("https:"):
                continue
            if file:
                self.assertTrue((PAGE.parent / file).exists(), target)
            else:
                self.assertIn(section, titles)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child([run_all], int(sys.argv[3]), sys.argv[4])
    else:
        main()
