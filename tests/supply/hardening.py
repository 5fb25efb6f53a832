#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the run-time hardening of dsopt's code in the ELF files.

usage: hardening.py fortified|plain libdsopt.so libdsopt.a PROGRAM KERNELS.a...

Every function is bound when a file is loaded, and relocated data are then read-only; no stack is executable; the shared
library has no text relocations; functions with arrays check a canary, except the kernels, which would be slower; in
optimized builds (`fortified`) copies and formatted text into objects of known size are checked. Prints `name: reason`
for each check that fails, then `N passed, N failed`.
"""
import re
import subprocess
import sys


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def checks_of_file(path):
    dynamic, segments = output("readelf", "-dW", path), output("readelf", "-lW", path)
    yield "is bound at load", bool(re.search(r"BIND_NOW|FLAGS_1\).*\bNOW\b", dynamic))
    yield "has a read-only segment after relocation", "GNU_RELRO" in segments
    stack = re.search(r"GNU_STACK\s.*?\s([RWE ]{3})\s+0x", segments)
    yield "has a stack without code", bool(stack) and "E" not in stack.group(1)


def imports(*nm):
    return set(re.findall(r"\bU (\w+)", output(*nm)))


def checks(fortified, shared, static, program, *kernels):
    for path in (shared, program):
        for name, holds in checks_of_file(path):
            yield path + " " + name, holds
    # Only the library: programs have the compiler's default. Code with text relocations is modified when it is loaded.
    yield shared + " can be placed anywhere", "TEXTREL" not in output("readelf", "-dW", shared)
    for path, names in ((shared, imports("nm", "-D", shared)), (static, imports("nm", static))):
        yield path + " checks canaries", "__stack_chk_fail" in names
        checked = sorted(name for name in names if name.endswith("_chk"))
        # A build without optimization must not have them.
        yield f"{path}: checked functions are {checked}", ("__vsnprintf_chk" in checked) == fortified
    yield "there are kernels", bool(kernels)
    for path in kernels:
        yield path + " has no canaries", "__stack_chk_fail" not in imports("nm", path)


def main():
    passed = failed = 0
    for name, holds in checks(sys.argv[1] == "fortified", *sys.argv[2:]):
        passed += holds
        failed += not holds
        if not holds:
            print(f"{name}: does not hold")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
