#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scalar_loops.py OBJDUMP LIBRARY: prints the CPU kernels that compute on single floats in a loop and on vectors
nowhere. Every loop over elements has a scalar remainder after its vector part; a loop with only a scalar part was not
vectorised. For aarch64. Exit status 1 if there are any."""
import re
import subprocess
import sys

ARITHMETIC = re.compile(r"^(fadd|fsub|fmul|fdiv|fsqrt|fcvt[a-z0-9]*|fmax|fmin)\b")
VECTOR = re.compile(r"\bv\d+\.(2d|4s|8h|4h|2s)\b")
SCALAR = re.compile(r"^[sdh]\d+$")
BRANCH = re.compile(r"^(b\.\w+|cbn?z|tbn?z|b)\b.*?\b([0-9a-f]+) <")


def functions(objdump, library):
    listing = subprocess.run([objdump, "-d", "-C", "--no-show-raw-insn", library], check=True, stdout=subprocess.PIPE,
                             text=True).stdout
    for block in re.split(r"\n(?=[0-9a-f]{16} <)", listing):
        head = re.match(r"[0-9a-f]{16} <(.*)>:", block)
        if head and head.group(1).startswith("dsopt::cpu::(anonymous namespace)::") and "Step" not in head.group(1):
            lines = re.findall(r"^ *([0-9a-f]+):\t(.*)$", block, re.M)
            yield head.group(1), [(int(address, 16), text.strip()) for address, text in lines]


def kind(text):
    """Returns the operation, and True if it is a vector operation; None unless it is float arithmetic."""
    match = ARITHMETIC.match(text)
    if not match:
        return None
    if VECTOR.search(text):
        return match.group(1), True
    operands = text.split(None, 1)[1].split(",")
    return (match.group(1), False) if all(SCALAR.match(operand.strip()) for operand in operands[:2]) else None


def unvectorised(code):
    vector = {kind(text)[0] for _, text in code if kind(text) and kind(text)[1]}
    vector |= {"fcvt"} if vector & {"fcvtl", "fcvtl2", "fcvtn", "fcvtn2"} else set()
    bad = set()
    jumps = [(int(match.group(2), 16), address) for address, text in code if (match := BRANCH.match(text))]
    loops = [(begin, end) for begin, end in jumps if begin <= end]
    for begin, end in loops:
        # Loops over elements are innermost loops. Others have arithmetic per block of elements.
        if any(begin <= other[0] and other[1] <= end and other != (begin, end) for other in loops):
            continue
        for address, text in code:
            if begin <= address <= end and kind(text) and not kind(text)[1] and kind(text)[0] not in vector:
                bad.add(kind(text)[0])
    return bad


def main():
    count, found = 0, 0
    for name, code in functions(*sys.argv[1:]):
        count += 1
        bad = unvectorised(code)
        if bad:
            found += 1
            print("%s: %s" % (name[:160], ", ".join(sorted(bad))))
    print("%d functions, %d with a loop that is not vectorised" % (count, found))
    sys.exit(found != 0 or count == 0)


if __name__ == "__main__":
    main()
