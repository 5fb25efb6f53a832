#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the cases of the last `meson test` in a build folder.

usage: count_tests.py BUILD

Prints `passed failed skipped` on standard output, and on standard error the end of each failed test's output. The cases
of a GoogleTest program are counted individually, a program that ends with a line `N passed, N failed[, N skipped]`
counts with these numbers, any other program as one case. A test that failed without a failed case (it crashed, timed
out, leaked memory) is one more failed case. Writes BUILD/not-run: a line `TEST: REASON` for each reason for which
something was skipped; and BUILD/failed: what standard error has of the failed tests.
"""
import collections
import json
import os
import re
import sys
import xml.etree.ElementTree

TAIL = 60  # lines shown of a failed test
NOISE = ("[ RUN ", "[       OK", "[-----")  # GoogleTest's
CLOSING_LINE = re.compile(r"^(\d+) passed, (\d+) failed(?:, (\d+) skipped)?\s*\Z", re.MULTILINE)
REASON = re.compile(r"^.*\bskipped[:,] (.+)", re.MULTILINE)


def gtest_cases(path):
    """Returns test name -> [passed, failed, skipped], and test name -> reasons for skipped cases. Suites of a
    GoogleTest program are named project.test.suite."""
    counts = collections.defaultdict(lambda: [0, 0, 0])
    reasons = collections.defaultdict(list)
    with open(path, encoding="utf-8", errors="replace") as stream:
        text = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f]", "?", stream.read())  # Meson inserts the raw output of tests
    for suite in xml.etree.ElementTree.fromstring(text.encode()).iter("testsuite"):
        name = suite.get("name").partition(".")[2].rpartition(".")[0]
        if not name:
            continue  # the suite of all tests with one case each
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                counts[name][1] += 1
            elif case.find("skipped") is not None or case.get("status") == "notrun":
                counts[name][2] += 1
                skipped = case.find("skipped")
                message = (skipped.get("message") or skipped.text or "") if skipped is not None else "disabled"
                reasons[name].append(" ".join(message.split()) or "no reason given")
            else:
                counts[name][0] += 1
    return counts, reasons


def cases_of(test, gtests):
    """Returns [passed, failed, skipped] of one line of testlog.json."""
    if test["name"] in gtests:
        counts = list(gtests[test["name"]])
    elif test["result"] == "SKIP":
        counts = [0, 0, 1]
    else:
        closing = CLOSING_LINE.search(test["stdout"] or "")
        counts = [int(number or 0) for number in closing.groups()] if closing else [0, 0, 0]
        if sum(counts) == 0:
            counts[0 if test["result"] in ("OK", "EXPECTEDFAIL") else 1] = 1
    if test["result"] not in ("OK", "EXPECTEDFAIL", "SKIP") and counts[1] == 0:
        counts[1] = 1
    return counts


def reasons_of(test, gtests):
    """Returns the reasons for which cases of one line of testlog.json were skipped."""
    output = (test["stdout"] or "") + test.get("stderr", "")
    found = gtests.get(test["name"], []) + [reason.strip() for reason in REASON.findall(output)]
    if not found and test["result"] == "SKIP":
        found = [(output.strip().splitlines() or ["no reason given"])[-1]]
    return list(dict.fromkeys(found))


def output_of(test):
    lines = ((test["stdout"] or "") + test.get("stderr", "")).splitlines()
    return "\n".join([line for line in lines if line and not line.startswith(NOISE)][-TAIL:])


def main():
    logs = os.path.join(sys.argv[1], "meson-logs")
    gtests, skipped_cases = gtest_cases(os.path.join(logs, "testlog.junit.xml"))
    total = [0, 0, 0]
    not_run, failures = [], []
    with open(os.path.join(logs, "testlog.json"), encoding="utf-8") as lines:
        for test in map(json.loads, lines):
            counts = cases_of(test, gtests)
            total = [a + b for a, b in zip(total, counts)]
            if counts[2]:
                not_run += [f"{test['name']}: {reason}" for reason in reasons_of(test, skipped_cases)]
            if counts[1] or test["result"] == "SKIP":
                shown = (f"--- {test['name']}: {test['result']}, exit status {test['returncode']}, "
                         f"{test['duration']:.0f} s\n{output_of(test)}")
                print(shown, file=sys.stderr)
                if counts[1]:
                    failures.append(shown)
    for name, lines in (("not-run", not_run), ("failed", failures)):
        with open(os.path.join(sys.argv[1], name), "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    print(*total)


if __name__ == "__main__":
    main()
