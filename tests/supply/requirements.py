#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that scripts install only pinned packages with hashes from PyPI.

usage: requirements.py ROOT

Every NAME.txt in scripts/requirements has the packages that NAME.in requires, each with one version and with hashes.
Scripts call pip only with such a list, for the project's own packages, or offline. Prints `name: reason` for each check
that fails, then `N passed, N failed`.
"""
import os
import re
import subprocess
import sys

ROOT = sys.argv[1]
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)( ; [^\\]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
                   re.M)


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def lists():
    folder = os.path.join(ROOT, "scripts", "requirements")
    names = sorted(os.path.splitext(name)[0] for name in os.listdir(folder))
    yield "each NAME.in has a NAME.txt", names[::2] == names[1::2] and len(names) >= 10
    for name in names[::2]:
        wanted, text = read(folder, name + ".in"), read(folder, name + ".txt")
        yield f"{name}.in names its oldest Python", bool(re.search(r"^# python 3\.\d+$", wanted, re.M))
        rest = ENTRY.sub("", text)
        yield (f"{name}.txt has no entry without a version or hash: {rest[:200]!r}",
               re.fullmatch(r"(#.*\n)*", rest) is not None)
        have = {normal(entry[0]) for entry in ENTRY.findall(text)}
        asked = {normal(re.match(r"[\w.-]+", line).group()) for line in wanted.splitlines() if line and line[0] != "#"}
        yield f"{name}.txt lacks {asked - have}", asked <= have and asked != set()


def calls():
    """Returns lines of scripts that install from PyPI."""
    tracked = subprocess.run(["git", "-C", ROOT, "ls-files"], stdout=subprocess.PIPE, text=True)
    if tracked.returncode != 0:  # a tree without history: only the folders with scripts
        files = ["dev"] + [os.path.join(folder, name) for top in ("bindings", "scripts", "packaging", "tests")
                           for folder, _, names in os.walk(os.path.join(ROOT, top)) for name in names]
    else:
        files = tracked.stdout.split("\n")
    for path in files:
        full = os.path.join(ROOT, path)
        if not path or not os.path.isfile(full):
            continue
        with open(full, "rb") as file:
            text = file.read().decode(errors="replace").replace("\\\n", " ")
        if not re.match(r"#!.*\b(ba)?sh\n", text):
            continue
        for line in text.splitlines():
            if not line.lstrip().startswith("#") and re.search(r'(\bpip3?"?|\$pip) (install|wheel|download)\b', line):
                yield path, " ".join(line.split())


def main():
    passed = failed = found = 0
    results = list(lists())
    for path, line in calls():
        found += 1
        pinned = "--require-hashes" in line or "--no-index" in line or "--no-build-isolation" in line
        results.append((f"{path}: '{line}' is pinned", pinned))
    results.append((f"{found} calls of pip were found", found >= 5))
    for name, holds in results:
        passed += holds
        failed += not holds
        if not holds:
            print(f"{name}: does not hold")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
