#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the lines and branches of src and comm that the tests took.

usage: coverage.py BUILD [--lines PERCENT] [--branches PERCENT]

BUILD was made with b_coverage and has run its tests. Counted are the .cc files. A line or branch is taken if any build of
the file, or any instance of a template, took it; edges to the handlers of exceptions are no branches, as nearly every
call has one. Names the lines that nothing took, and those with a branch that nothing took. Exits with 1 below either
floor.
"""
import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("src", "comm")
AT_ONCE = 8  # files for one gcov


def documents(build):
    """What gcov says of every object that ran."""
    objects = sorted(str(path.relative_to(build)) for path in build.rglob("*.gcda"))
    for i in range(0, len(objects), AT_ONCE):
        said = subprocess.run(["gcov", "--json-format", "--branch-probabilities", "--stdout", *objects[i:i + AT_ONCE]],
                              cwd=build, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
        yield from (json.loads(line) for line in said.splitlines() if line.startswith("{"))


def source(build, name):
    """Its path in the repository if it counts, else None."""
    path = pathlib.Path(os.path.normpath(build / name))
    if path.suffix != ".cc" or not path.is_relative_to(ROOT):
        return None
    path = path.relative_to(ROOT)
    return path if path.parts[0] in FOLDERS else None


class File:
    def __init__(self):
        self.lines = collections.Counter()
        # line -> number of branches of an instance -> how often each was taken: instances of a template whose branches
        # the compiler has folded differently are not the same, and the fullest one counts.
        self.branches = collections.defaultdict(dict)

    def add(self, line):
        number = line["line_number"]
        self.lines[number] += line["count"]
        counts = [branch["count"] for branch in line["branches"] if not branch["throw"]]
        if len(counts) > 1:
            before = self.branches[number].get(len(counts), [0] * len(counts))
            self.branches[number][len(counts)] = [a + b for a, b in zip(before, counts)]

    def branch_counts(self):
        """line -> how often each branch was taken."""
        return {number: instances[max(instances)] for number, instances in self.branches.items()}


def ranges(numbers):
    """1 2 3 7 -> "1-3 7"."""
    parts = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].splitlines()[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--lines", type=float, default=98)
    parser.add_argument("--branches", type=float, default=92)
    options = parser.parse_args()
    build = options.build.resolve()
    files = collections.defaultdict(File)
    for document in documents(build):
        for entry in document["files"]:
            path = source(build, entry["file"])
            if path is not None:
                for line in entry["lines"]:
                    files[path].add(line)
    if not files:
        sys.exit(f"{build} has nothing: were its tests run?")
    total = [0, 0, 0, 0]
    for path, file in sorted(files.items()):
        branches = file.branch_counts()
        untaken = {number for number, count in file.lines.items() if count == 0}
        half = {number for number, counts in branches.items() if number not in untaken and 0 in counts}
        numbers = [len(file.lines) - len(untaken), len(file.lines),
                   sum(count > 0 for counts in branches.values() for count in counts), sum(map(len, branches.values()))]
        total = [a + b for a, b in zip(total, numbers)]
        if untaken or half:
            print(f"{path}: lines {numbers[0]} of {numbers[1]}, branches {numbers[2]} of {numbers[3]}")
            for what, where in ("never", untaken), ("in part", half):
                if where:
                    print(f"    {what}: {ranges(where)}")
    lines, branches = 100 * total[0] / total[1], 100 * total[2] / total[3]
    print(f"lines {total[0]} of {total[1]}, {lines:.1f} % (floor {options.lines:g} %); "
          f"branches {total[2]} of {total[3]}, {branches:.1f} % (floor {options.branches:g} %)")
    return 1 if lines < options.lines or branches < options.branches else 0


if __name__ == "__main__":
    sys.exit(main())
