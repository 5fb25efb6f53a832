# SPDX-License-Identifier: Apache-2.0
"""The programs of dsopt/torch/README.md run and print the output in it."""
import contextlib
import io
import pathlib
import re

from support import TestCase, main

README = pathlib.Path(__file__).resolve().parents[2] / "dsopt" / "torch" / "README.md"


class Readme(TestCase):
    def test_programs_print_the_documented_output(self):
        text = README.read_text(encoding="utf-8")
        found = re.findall(r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", text, flags=re.M | re.S)
        self.assertEqual(len(found), len(re.findall(r"^```python$", text, flags=re.M)))
        self.assertGreaterEqual(len(found), 1)
        for program, expected in found:
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(program, str(README), "exec"), {"__name__": "__main__"})
            self.assertEqual(said.getvalue(), expected)

    def test_lines_of_the_ecosystem_table_run(self):
        """Runs the lines that need only PyTorch."""
        import dsopt.torch
        import torch
        text = (README.parents[4] / "README.md").read_text(encoding="utf-8")
        table = text.split("\n## Ecosystems\n")[1].split("\n## ")[0]
        rows = dict(re.findall(r"^\| (.+?) \| `(.+?)` \|", table, flags=re.M))
        for name in ("PyTorch, training loop", "DDP, ZeroRedundancyOptimizer, FSDP1"):
            model = torch.nn.Linear(3, 1)
            known = {"dsopt": dsopt, "model": model, "ddp_model": model}
            line = rows[name]
            exec(line if "optimizer =" in line else "optimizer = " + line, known)
            before = model.weight.detach().clone()
            model(torch.ones(1, 3)).sum().backward()
            known["optimizer"].step()
            self.assertTrue((model.weight.detach() < before).all())

    def test_every_class_is_named(self):
        import dsopt.torch
        text = README.read_text(encoding="utf-8")
        for name in dsopt.torch.__all__:
            self.assertIn("`%s`" % name, text)


if __name__ == "__main__":
    main()
