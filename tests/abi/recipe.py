# SPDX-License-Identifier: Apache-2.0
"""recipe.py HEADER PROGRAM...: the last function of each program must appear line by line in a comment of the
header."""
import pathlib
import sys

header = pathlib.Path(sys.argv[1]).read_text()
for name in sys.argv[2:]:
    text = pathlib.Path(name).read_text()
    lines = text[text.rindex("\nstatic ") + 1:].rstrip("\n").split("\n")
    shown = "\n".join(" *     " + line for line in lines) + "\n"
    if shown not in header:
        sys.exit("%s: its function is not in a comment of %s:\n%s" % (name, sys.argv[1], shown))
