#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests that the early launch of a kernel that does not wait for the preceding one does not compile.

usage: launch_types.py SOURCES COMPILER...
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE = """#include "launcher.h"
using namespace dsopt::gpu;
__global__ void kernel(%s) { %s }
cudaError_t direct(float *x) { return Launch{"kernel", 1, 32, 0, nullptr}(%s); }
void by_launcher(const Launcher &launcher, float *x) { %s }
"""
WAITS, PLAIN = "const PdlArgument<float *> argument", "float *x"
USES, READS = "float *const x = argument.begin_kernel(); *x = 1;", "*x = 1;"
EARLY, LATE = "Pdl{.early = true}, kernel, x", "kernel, x"
LAUNCHER = 'launcher.launch_thread("kernel", kernel, x);'
MESSAGE = "a kernel that may be launched early takes a PdlArgument first"
# Description, parts of the source, and the expected text of the compiler; None: it compiles.
CASES = [
    ("a kernel that waits is launched early", (WAITS, USES, EARLY, LAUNCHER), None),
    ("a kernel that does not wait is launched late", (PLAIN, READS, LATE, ""), None),
    ("a kernel that does not wait is launched early", (PLAIN, READS, EARLY, ""), MESSAGE),
    ("a kernel that does not wait is launched by a Launcher", (PLAIN, READS, LATE, LAUNCHER), MESSAGE),
    ("a kernel uses its argument without waiting", (WAITS, "*argument = 1;", EARLY, LAUNCHER), r"error:.*PdlArgument"),
    ("a kernel reads the value without waiting", (WAITS, "*argument.value_ = 1;", EARLY, LAUNCHER),
     r"value_.* is .*private"),
    ("a kernel passes the trigger flag itself", (WAITS, "(void)argument.begin_kernel(true);", EARLY, LAUNCHER),
     r"error: (no matching function for call to .*begin_kernel\(bool\)|too many arguments)"),
]

sources, compiler = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
folders = [f"-I{sources}/{name}" for name in ("tests/emulation/include", "cuda", "include", "src")]
failures = 0
with tempfile.TemporaryDirectory() as name:
    path = pathlib.Path(name) / "case.cc"
    for what, parts, pattern in CASES:
        path.write_text(SOURCE % parts, encoding="utf-8")
        done = subprocess.run([*compiler, "-std=c++20", "-fsyntax-only", *folders, str(path)],
                              env={**os.environ, "LC_ALL": "C"},
                              capture_output=True, text=True, check=False)
        good = (done.returncode == 0 if pattern is None else
                done.returncode != 0 and re.search(pattern, done.stderr) is not None)
        failures += not good
        print(f"{what}: {'ok' if good else 'FAILED'}" + ("" if good else "\n" + done.stderr))
print(f"{len(CASES)} cases, {failures} failures")
sys.exit(failures != 0)
