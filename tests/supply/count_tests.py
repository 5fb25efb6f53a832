#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that scripts/count_tests.py counts skipped tests, names the reasons, and stores the output of failed tests.

usage: count_tests.py ROOT
"""
import json
import os
import subprocess
import sys
import tempfile

TESTS = [
    ("plain", "OK", "", [1, 0, 0], []),
    ("counted", "OK", "a: does not hold\n7 passed, 2 failed\n", [7, 2, 0], []),
    ("partly", "OK", "skipped: test_x: no GPU\nskipped: test_y: no GPU at all\n5 passed, 0 failed, 2 skipped\n",
     [5, 0, 2],
     ["test_x: no GPU", "test_y: no GPU at all"]),
    ("whole", "SKIP", "jax: skipped: PyPI was not reached for jax\n", [0, 0, 1], ["PyPI was not reached for jax"]),
    ("silent", "SKIP", "", [0, 0, 1], ["no reason given"]),
    ("crashed", "FAIL", "", [0, 1, 0], []),
    ("cases", "OK", "", [1, 0, 2], ["this device has no streams"]),
]
JUNIT = """<?xml version='1.0' encoding='utf-8'?><testsuites><testsuite name="dsopt.cases.Suite"><testcase name="runs"/>
<testcase name="One"><skipped message="this device has no streams"/></testcase>
<testcase name="Two"><skipped message="this device
has no streams"/></testcase></testsuite></testsuites>"""


def main():
    script = os.path.join(sys.argv[1], "scripts", "count_tests.py")
    with tempfile.TemporaryDirectory() as build:
        os.mkdir(os.path.join(build, "meson-logs"))
        with open(os.path.join(build, "meson-logs", "testlog.junit.xml"), "w", encoding="utf-8") as file:
            file.write(JUNIT)
        with open(os.path.join(build, "meson-logs", "testlog.json"), "w", encoding="utf-8") as file:
            for name, result, output, _, _ in TESTS:
                entry = {"name": name, "result": result, "stdout": output, "returncode": 0, "duration": 1}
                file.write(json.dumps(entry) + "\n")
        counted = subprocess.run([sys.executable, script, build], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True, check=True)
        with open(os.path.join(build, "not-run"), encoding="utf-8") as file:
            not_run = file.read().splitlines()
        with open(os.path.join(build, "failed"), encoding="utf-8") as file:
            failures = file.read().splitlines()
    results = [
        ("counts", counted.stdout.split(), [str(sum(test[3][i] for test in TESTS)) for i in range(3)]),
        ("not-run", not_run, [f"{test[0]}: {reason}" for test in TESTS for reason in test[4]]),
        ("failed", failures, [
            "--- counted: OK, exit status 0, 1 s", "a: does not hold", "7 passed, 2 failed",
            "--- crashed: FAIL, exit status 0, 1 s", ""]),
    ]
    for name, have, want in results:
        if have != want:
            print(f"{name}: {have} in place of {want}")
    failed = sum(have != want for _, have, want in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
