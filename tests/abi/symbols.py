#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What dsopt.h declares, dsopt.map lists, and the shared and the static library export must be the same functions.

usage: symbols.py dsopt.h dsopt.map libdsopt.so libdsopt.a

Also: the static library hides them, so that a shared object with a copy of it does not export them; the shared library
needs nothing but the C and C++ runtime; nothing runs when it is loaded. Prints `name: reason` for each check that fails,
then `N passed, N failed`.
"""
import re
import subprocess
import sys

RUNTIME = r"(libstdc\+\+|libgcc_s|libgomp|libomp|libm|libc|libpthread|libdl|librt|ld-linux[-\w]*)\.so\.\d+"


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def declared(header):
    """Functions of the header, and those among them that lack DSOPT_API."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
    names, private = set(), set()
    for statement in text.split(";"):
        match = re.search(r"\b(dsopt_\w+)\s*\(", statement)
        if match:
            names.add(match.group(1))
            if "DSOPT_API" not in statement:
                private.add(match.group(1))
    return names, private


def listed(version_script):
    text = re.sub(r"/\*.*?\*/|#[^\n]*", " ", version_script, flags=re.S)
    return set(re.findall(r"[\w*?]+(?=\s*;)", text.split("global:")[1].split("local:")[0]))


def defined(*nm):
    """Names that nm prints as defined; version nodes are absolute symbols (A) and no functions."""
    rows = [line.split() for line in output(*nm).splitlines()]
    return {row[2].split("@")[0] for row in rows if len(row) == 3 and row[1] != "A"}


def visible(static):
    """Functions of the static library that a shared object with a copy of it would export."""
    rows = re.findall(r"(GLOBAL|WEAK)\s+(\w+)\s+(?!UND)\w+\s+(\S+)$", output("readelf", "-sW", static), flags=re.M)
    return [name for _, visibility, name in rows if visibility != "HIDDEN"]


def difference(have, want):
    parts = [f"lacks {name}" for name in sorted(want - have)] + [f"has {name} too much" for name in sorted(have - want)]
    return ", ".join(parts)


def static_constructors(static):
    """What would run at load. The static library is the one object that the shared one is linked from, without the start
    files of the compiler, so all that it has is ours; but nvcc adds one function a source file that registers kernels."""
    section = r"\]\s+(\.(?:preinit_array|init_array|fini_array|ctors|dtors)\S*)(?:\s+[0-9a-zA-Z_]+){3}\s+([0-9a-f]+)"
    found = re.findall(section, output("readelf", "-SW", static))
    functions = sum(int(size, 16) for _, size in found) // 8
    registering = len(re.findall(r"__sti____cudaRegisterAll", output("nm", static)))
    return f"{functions - registering} in {', '.join(name for name, _ in found)}" if functions != registering else ""


def checks(header, version_script, shared, static):
    functions, private = declared(open(header, encoding="utf-8").read())
    yield "header", "" if len(functions) > 20 else f"found only {len(functions)} functions in it"
    yield "header", ", ".join(f"{name} lacks DSOPT_API" for name in sorted(private))
    yield "map", difference(listed(open(version_script, encoding="utf-8").read()), functions)
    yield "shared library", difference(defined("nm", "-D", "--defined-only", shared), functions)
    yield "static library", difference(defined("nm", "-g", "--defined-only", static), functions)
    yield "static library", ", ".join(f"{name} is not hidden" for name in visible(static))
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", shared))
    yield "needed libraries", "" if needed else "readelf names none"
    yield "needed libraries", ", ".join(name for name in needed if not re.fullmatch(RUNTIME, name))
    yield "static constructors", static_constructors(static)


def main():
    failed = passed = 0
    for name, reason in checks(*sys.argv[1:5]):
        passed += not reason
        failed += bool(reason)
        if reason:
            print(f"{name}: {reason}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
