#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What dsopt.h declares, dsopt.map lists, and the shared and the static library export must be the same functions.

usage: symbols.py dsopt.h dsopt.map libdsopt.so libdsopt.a

Also: the static library hides them, so that a shared object with a copy of it does not export them; the shared library
needs nothing but the C and C++ runtime; nothing runs when it is loaded; no static of a function is initialized by the
first call; all versions are those of the header. Prints
`name: reason` for each check that fails, then `N passed, N failed`.
"""
import os
import re
import subprocess
import sys

RUNTIME = r"(libstdc\+\+|libgcc_s|libm|libc|libpthread|libdl|librt|ld-linux[-\w]*)\.so\.\d+"


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


def guards(static):
    """Guards of functions' statics: one that a thread holds at the time of a fork() is held in the child for ever. Those
    in the launchers that nvcc generates are left out, because a child cannot use CUDA."""
    names = [line.split(" ", 2)[2] for line in output("nm", "-C", static).splitlines() if "guard variable for" in line]
    own = sorted(name for name in names if "__device_stub__" not in name)
    uses = not names and "__cxa_guard_acquire" in output("nm", static)
    return ", ".join(own) or ("__cxa_guard_acquire" if uses else "")


def versions(header, version_script, shared):
    """The file's name has the version of the header; its soname and the node of its symbols have that of the ABI."""
    number = dict(re.findall(r"#define DSOPT_(\w*VERSION\w*) (\d+)", header))
    abi = number["ABI_VERSION"]
    soname = re.search(r"\(SONAME\).*\[(.*)\]", output("readelf", "-dW", shared)).group(1)
    version = ".".join(number["VERSION_" + part] for part in ("MAJOR", "MINOR", "PATCH"))
    for name, have, want in (
        ("file", os.path.basename(shared), "libdsopt.so." + version),
        ("soname", soname, "libdsopt.so." + abi),
        ("node", re.search(r"\w+(?= \{)", version_script).group(), "DSOPT_" + abi),
    ):
        yield "" if have == want else f"{name} is {have}, by dsopt.h it should be {want}"


def checks(header, version_script, shared, static):
    header, version_script = (open(file, encoding="utf-8").read() for file in (header, version_script))
    functions, private = declared(header)
    yield "header", "" if len(functions) > 20 else f"found only {len(functions)} functions in it"
    yield "header", ", ".join(f"{name} lacks DSOPT_API" for name in sorted(private))
    yield "map", difference(listed(version_script), functions)
    yield "shared library", difference(defined("nm", "-D", "--defined-only", shared), functions)
    yield "static library", difference(defined("nm", "-g", "--defined-only", static), functions)
    yield "static library", ", ".join(f"{name} is not hidden" for name in visible(static))
    for reason in versions(header, version_script, shared):
        yield "version", reason
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", shared))
    yield "needed libraries", "" if needed else "readelf names none"
    yield "needed libraries", ", ".join(name for name in needed if not re.fullmatch(RUNTIME, name))
    yield "static constructors", static_constructors(static)
    yield "statics that are initialized at run time", guards(static)


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
