#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that includes between the engine's folders never point upwards and that devices use nothing of the layers
above.

usage: includes.py SOURCE-FOLDER

Prints every include that breaks the order, and `N includes, N wrong`.
"""
import pathlib
import re
import sys

# Low to high. A file may include files of its folder and of lower layers, but not of other folders in the same layer.
FLOORS = [["src/base"], ["src/rules"], ["src/device"], ["src/cpu", "cuda"], ["comm"], ["src/exchange"], ["src/step"],
          ["src/optimizer"], ["src/checkpoint"], ["src/abi"]]
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
# Words that code of a device has no use for.
FOREIGN = re.compile(r"\b(Comm|CommSet|Context|Optimizer|OneBitSetup)\b *[&*(]")


def folder_of(path):
    """The longest folder of the list that the file is in: comm/nccl is comm."""
    parts = path.parts
    for length in (2, 1):
        if "/".join(parts[:length]) in FLOOR:
            return "/".join(parts[:length])
    return None


def main():
    root = pathlib.Path(sys.argv[1])
    count = wrong = 0
    for folder in FLOOR:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
                continue
            own = folder_of(path.relative_to(root))
            text = path.read_text(encoding="utf-8")
            for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
                target = next((base / name for base in (root / "src", root, path.parent) if (base / name).is_file()),
                              None)
                if target is None:
                    continue  # the public headers
                other = folder_of(target.resolve().relative_to(root.resolve()))
                if other is None:
                    continue
                count += 1
                if other != own and FLOOR[other] >= FLOOR[own]:
                    wrong += 1
                    print(f"{path.relative_to(root)} includes {name}: {own} is below {other}")
            if own in ("src/cpu", "cuda"):
                for number, line in enumerate(text.splitlines(), 1):
                    if FOREIGN.search(line.partition("//")[0]):
                        wrong += 1
                        print(f"{path.relative_to(root)}:{number}: "
                              f"a device sees no comm, context or optimizer: {line.strip()}")
    print(f"{count} includes, {wrong} wrong")
    return 1 if wrong or count < 100 else 0


sys.exit(main())
