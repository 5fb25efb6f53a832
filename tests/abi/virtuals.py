#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that a new device has few virtual functions to implement.

usage: virtuals.py SOURCE-FOLDER

Counts the virtual functions that the headers in src/device declare, without destructors, and fails above LIMIT.
"""
import pathlib
import re
import sys

LIMIT = 30


def main():
    total = 0
    for path in sorted((pathlib.Path(sys.argv[1]) / "src/device").glob("*.h")):
        names = re.findall(r"^\s*virtual\b[^;{]*?(~?\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
        names = [name for name in names if not name.startswith("~")]
        if names:
            print(f"{path.name}: {len(names)}: {' '.join(names)}")
        total += len(names)
    print(f"{total} virtual functions, at most {LIMIT}")
    return 1 if total > LIMIT or total < 10 else 0


sys.exit(main())
