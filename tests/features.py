#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads features.txt: which tests each feature has. Without an argument it prints the table with the number of unit
tests and recorded cases of each feature. `features.py BUILD` checks that each entry exists, that no suite, recorded case
or conformance case is in no line, and that entries of one kind have a reason; the test `features`."""
import fnmatch
import json
import pathlib
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parent
COLUMNS = ("unit", "emulated", "recorded", "conformance")


def read_table():
    """Returns [(feature, {column: [pattern]}, [reason])]."""
    rows = []
    for line in (TESTS / "features.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("    twice: "):
            rows[-1][2].append(line.partition(": ")[2])
        elif line.strip() and not line.startswith("#"):
            feature, *cells = re.split(" {2,}", line.strip())
            if len(cells) != len(COLUMNS):
                sys.exit(f"features.txt: '{feature}' has {len(cells)} columns after its name, not {len(COLUMNS)}")
            entries = [[] if cell == "-" else cell.split(",") for cell in cells]
            rows.append((feature, dict(zip(COLUMNS, entries)), []))
    return rows


def unit_tests():
    """Returns {"folder/Suite": number of TESTs}."""
    found = {}
    for path in sorted((TESTS / "unit").glob("*/*.cc")):
        for suite in re.findall(r"^TEST(?:_F|_P)?\((\w+),", path.read_text(encoding="utf-8"), re.MULTILINE):
            name = f"{path.parent.name}/{suite}"
            found[name] = found.get(name, 0) + 1
    return found


def present(build):
    """Returns the names that each column can have."""
    conformance = (TESTS.parent / "bindings" / "conformance" / "expected").read_text(encoding="utf-8")
    meson = [test["name"] for test in json.loads((build / "meson-info" / "intro-tests.json").read_text())]
    return {
        "unit": list(unit_tests()),
        "emulated": meson,
        "recorded": [path.stem for path in (TESTS / "golden").glob("*.safetensors")],
        "conformance": [line.split()[0] for line in conformance.splitlines()],
    }


def check(build):
    rows, names, wrong = read_table(), present(build), []
    for feature, entries, reasons in rows:
        for column in COLUMNS:
            patterns = entries[column]
            wrong += [f"{feature}: no {column} test is called '{pattern}'" for pattern in patterns
                      if not fnmatch.filter(names[column], pattern)]
        if sum(len(patterns) > 1 for patterns in entries.values()) > len(reasons):
            wrong.append(f"{feature}: has two entries in a column, and no line `twice: why`")
    for column in COLUMNS:
        every = [pattern for _, entries, _ in rows for pattern in entries[column]]
        wanted = names[column]
        if column == "unit":  # folders: the suites of a folder are often several for one feature
            every, wanted = [pattern.split("/")[0] for pattern in every], sorted({n.split("/")[0] for n in wanted})
        elif column == "emulated":
            wanted = [name for name in wanted if name.endswith("-emulated") and name.split("-")[0] not in OTHERS]
        wrong += [f"{name}: is in no line of features.txt ({column})" for name in wanted
                  if not any(fnmatch.fnmatchcase(name, pattern) for pattern in every)]
    print("".join(problem + "\n" for problem in wrong), end="")
    print(f"{len(rows)} features, {len(wrong)} wrong")
    return bool(wrong)


# Suites on the emulated device that are about no single feature: all recorded cases, a short selection, digests.
OTHERS = ("golden", "kernels", "digests")


def print_table():
    tests = unit_tests()
    cases = sorted(path.stem for path in (TESTS / "golden").glob("*.safetensors"))
    for feature, entries, _ in read_table():
        units = sum(count for name, count in tests.items()
                    if any(fnmatch.fnmatchcase(name, pattern) for pattern in entries["unit"]))
        recorded = [case for case in cases if any(fnmatch.fnmatchcase(case, p) for p in entries["recorded"])]
        cases = [case for case in cases if case not in recorded]
        print(f"{feature:25} {units:4d} unit tests, {len(recorded):3d} recorded cases, "
              f"emulated: {' '.join(entries['emulated']) or '-'}, conformance: {' '.join(entries['conformance']) or '-'}")


if __name__ == "__main__":
    sys.exit(check(pathlib.Path(sys.argv[1])) if len(sys.argv) > 1 else print_table())
