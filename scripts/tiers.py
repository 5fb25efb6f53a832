#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads tests/tiers.txt: which tier runs which suite, in which build.

usage: tiers.py suites BUILD COLUMN TIER...     suites that the build folder has and that belong to one of these tiers
       tiers.py matching BUILD COLUMN REGEX     suites with such names, of any tier
       tiers.py targets BUILD SUITE...          what ninja must build for these suites
       tiers.py parts                           the parts of `./dev check --all`, a line `NAME COLUMN...` each
       tiers.py pick TEXT                       the part for a commit, given by its hash
       tiers.py check BUILD COLUMN              fails if a suite of the build has no tier; the test `tiers`
"""
import fnmatch
import json
import os
import pathlib
import re
import subprocess
import sys

TABLE = pathlib.Path(__file__).resolve().parent.parent / "tests" / "tiers.txt"
COLUMNS = ("release", "cuda", "asan", "tsan", "clang", "coverage")
TIERS = ("test", "check", "-")


def read_table():
    """Returns [(pattern, {column: tier})] and {part: columns}, in the order of the table."""
    rows, parts = [], {}
    for number, line in enumerate(TABLE.read_text(encoding="utf-8").splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if words[0] == "part":
            name, _, last = words[1].partition("..")
            stem, _, first = name.rpartition("-")
            for part in [f"{stem}-{i}" for i in range(int(first), int(last) + 1)] if last else [name]:
                parts.setdefault(part, [])
            continue
        if len(words) != 1 + len(COLUMNS):
            sys.exit(f"{TABLE.name}:{number}: {len(words) - 1} tiers, there are {len(COLUMNS)} builds")
        row = dict(zip(COLUMNS, words[1:]))
        rows.append((words[0], row))
        for column, tier in row.items():
            if tier not in TIERS and column not in parts.setdefault(tier, []):
                parts[tier].append(column)
    return rows, parts


def tier_of(rows, suite, column):
    return next((row[column] for pattern, row in rows if fnmatch.fnmatchcase(suite, pattern)), None)


def introspect(build, what):
    """Returns what Meson knows about a build folder. Meson is started as a program, because this Python may lack it."""
    meson = os.environ.get("MESON", "meson").split()
    output = subprocess.run([*meson, "introspect", build, "--" + what], check=True, stdout=subprocess.PIPE).stdout
    return json.loads(output)


def suites_of(build):
    return [test["name"] for test in introspect(build, "tests")]


def targets(build, suites):
    root = pathlib.Path(build).resolve()
    needed = {target for test in introspect(build, "tests") if test["name"] in suites for target in test["depends"]}
    for target in introspect(build, "targets"):
        # Tests of an installation need everything that is installed.
        if target["id"] in needed or (target["installed"] and target["build_by_default"]):
            for name in target["filename"]:
                yield str(pathlib.Path(name).resolve().relative_to(root))


def check(build, column):
    rows, _ = read_table()
    wrong = 0
    suites = suites_of(build)
    for suite in suites:
        tier = tier_of(rows, suite, column)
        if tier is None:
            wrong += 1
            print(f"{suite}: has no tier: add a line to tests/{TABLE.name}")
    for index, (pattern, _) in enumerate(rows):
        if any(other == pattern for other, _ in rows[:index]):
            wrong += 1
            print(f"{pattern}: two lines")
    print(f"{len(suites)} suites, {wrong} wrong")
    return wrong != 0 or not suites


def main():
    command, arguments = sys.argv[1], sys.argv[2:]
    rows, parts = read_table()
    if command == "suites":
        build, column, *tiers = arguments
        print(*[suite for suite in suites_of(build) if tier_of(rows, suite, column) in tiers], sep="\n")
    elif command == "matching":
        build, column, expression = arguments
        print(*[suite for suite in suites_of(build)
                if re.search(expression, suite) and tier_of(rows, suite, column) not in (None, "-")], sep="\n")
    elif command == "targets":
        print(*targets(arguments[0], set(arguments[1:])), sep="\n")
    elif command == "parts":
        for part, columns in parts.items():
            print(part, *columns)
    elif command == "pick":
        print(list(parts)[int(arguments[0][:12], 16) % len(parts)])
    elif command == "check":
        return check(*arguments)
    else:
        sys.exit(__doc__)
    return 0


if __name__ == "__main__":
    sys.exit(main())
