#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that no file of the engine includes a file of a higher layer, and that devices use no type of a higher layer.

usage: includes.py SOURCE-FOLDER

Prints every include that breaks the order, and `N includes, N wrong`.
"""
import pathlib
import re
import sys

# Low to high. A file may include files of its folder and of lower layers, but not of other folders in the same layer.
LAYERS = [["src/base"], ["src/rules"], ["src/device"], ["src/cpu", "cuda"], ["comm"], ["src/exchange"], ["src/step"],
          ["src/optimizer"], ["src/checkpoint"], ["src/abi"]]
LAYER_OF = {folder: layer for layer, folders in enumerate(LAYERS) for folder in folders}
# Types that code of a device must not use.
FOREIGN = re.compile(r"\b(Comm|CommSet|Context|Optimizer|OneBitSetup)\b *[&*(]")


def folder_of(path):
    """Returns the longest listed folder that contains the file: comm for comm/nccl."""
    parts = path.parts
    for length in (2, 1):
        if "/".join(parts[:length]) in LAYER_OF:
            return "/".join(parts[:length])
    return None


def main():
    root = pathlib.Path(sys.argv[1])
    count = wrong = 0
    for folder in LAYER_OF:
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
                if other != own and LAYER_OF[other] >= LAYER_OF[own]:
                    wrong += 1
                    print(f"{path.relative_to(root)} includes {name}: {own} is below {other}")
            if own in ("src/cpu", "cuda"):
                for number, line in enumerate(text.splitlines(), 1):
                    if FOREIGN.search(line.partition("//")[0]):
                        wrong += 1
                        print(f"{path.relative_to(root)}:{number}: "
                              f"a device must not use comms, contexts or optimizers: {line.strip()}")
    print(f"{count} includes, {wrong} wrong")
    return 1 if wrong or count < 100 else 0


sys.exit(main())
