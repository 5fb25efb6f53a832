#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the library of a wheel needs no name of glibc later than 2.17.

usage: old_glibc.py NAMES MAP CORE.a RUNTIME.a COMPILER...

Links the objects of the library with packaging/wheel/runtime.c as scripts/wheel_link.sh does, but with this system's
linker and without a C library. So the library has the members of libstdc++ and libgcc that it needs, directly or through
others, and of all of them only the sections that are used: for example, random.o of libstdc++ calls arc4random (2.36)
in a function that nothing calls. What is still undefined must be in NAMES (packaging/wheel/glibc_names.sh).
On a later glibc than 2.37, whose headers rename functions, the test is skipped. Prints each check that fails, then `N
passed, N failed`.
"""
import os
import platform
import re
import subprocess
import sys
import tempfile

LATEST = (2, 37)  # the headers of 2.38 make __isoc23_strtol of strtol
ARCHIVES = ("libstdc++.a", "libgcc.a", "libgcc_eh.a")  # in this order: each needs the next ones


def skip(reason):
    print(f"skipped: {reason}")
    return 77


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def known_names(path):
    with open(path, encoding="ascii") as file:
        lines = [line.split() for line in file if not line.startswith("#")]
    return {name for name, *only in lines if only in ([], [platform.machine()])}


def undefined_names(version_map, objects, archives, compiler):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "libdsopt.so")
        subprocess.run([*compiler, "-shared", "-nodefaultlibs", "-o", path, "-Wl,--whole-archive", *objects,
                        "-Wl,--no-whole-archive", *archives, "-Wl,--gc-sections", "-Wl,--version-script=" + version_map],
                       check=True)
        listed = output("nm", "-D", "--undefined-only", path)
    return set(re.findall(r"^ +U ([^\s@]+)", listed, re.MULTILINE))  # a weak one may be missing


def main(names, version_map, core, runtime, *compiler):
    if platform.machine() not in ("x86_64", "aarch64"):
        return skip(f"there are no wheels for {platform.machine()}")
    try:
        glibc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:
        glibc = ""
    version = re.match(r"glibc (\d+)\.(\d+)", glibc)
    if not version:
        return skip("the C library is not glibc")
    if (int(version[1]), int(version[2])) > LATEST:
        return skip(f"the headers of {glibc} rename functions; wheels are built with 2.37 or an earlier one")
    archives = [output(*compiler, "-print-file-name=" + name).strip() for name in ARCHIVES]
    missing = [name for name in archives if not os.path.isabs(name)]
    if missing:
        return skip(f"the compiler has no {' '.join(missing)}")
    known, undefined = known_names(names), undefined_names(version_map, (core, runtime), archives, compiler)
    checks = {name: name in known for name in sorted(undefined)}
    for name, holds in checks.items():
        if not holds:
            print(f"{name}: glibc 2.17 does not have it. Do without it, or add it to packaging/wheel/runtime.c")
    checks["the library has undefined names"] = {"memcpy", "pthread_mutex_lock"} <= undefined
    failed = sum(not holds for holds in checks.values())
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
