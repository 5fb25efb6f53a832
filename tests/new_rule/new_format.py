#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An incomplete dtype of gradients and weights does not compile: the compiler names each place that needs it.

usage: new_format.py SOURCES COMPILER...

Adds a format of one byte to src/base/dtype.h, first without and then with its codec, and compiles all code that
distinguishes formats: the CPU kernels of one instruction set, the CUDA kernels as compiled for the emulated device, and
the plan of a step.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ENUMERATOR = [("bf16 = DSOPT_DTYPE_BF16 }", "bf16 = DSOPT_DTYPE_BF16, byte = 100 }")]
CODEC = ENUMERATOR + [
    ("/// Calls `f` with the storage tag of a dtype.",
     "struct Byte {\n"
     "    using storage = uint8_t;\n"
     "    DSOPT_HD static float load(uint8_t value) { return float(value); }\n"
     "    DSOPT_HD static uint8_t store(float value) { return uint8_t(value); }\n"
     "};\n"
     "/// Calls `f` with the storage tag of a dtype."),
    ("    case Dtype::bf16: f(BF16{}); return;\n",
     "    case Dtype::bf16: f(BF16{}); return;\n    case Dtype::byte: f(Byte{}); return;\n"),
]
# Functions of cuda/vec.cuh with a switch over formats.
CUDA = ["fetch", "store", "elements_per_load", "half_to_f32", "f32_to_half"]
CUDA_SOURCE = """#include "vec.cuh"
namespace dsopt::gpu {
template Pack<4> fetch<4>(const Slot &, int64_t);
template Pack<1> fetch<1>(const Slot &, int64_t);
template void store<4>(const Pack<4> &, const Slot &, int64_t);
template void store<1>(const Pack<1> &, const Slot &, int64_t);
}
"""

sources, compiler = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
failures = []


def errors_of(folder, edits, source, *flags):
    """Returns the compiler's output with these edits of dtype.h; None if it compiles."""
    text = (sources / "src/base/dtype.h").read_text(encoding="utf-8")
    for old, new in edits:
        if text.count(old) != 1:
            sys.exit(f"dtype.h: found {text.count(old)} times, not once: {old}")
        text = text.replace(old, new)
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base/dtype.h").write_text(text, encoding="utf-8")
    options = ["-std=c++20", "-fsyntax-only", "-Werror=switch", "-Wno-psabi", "-Wno-unknown-pragmas", *flags]
    folders = [f"-I{folder}", f"-I{sources}/include", f"-I{sources}/src", f"-I{sources}"]
    done = subprocess.run([*compiler, *options, *folders, str(source)], env={**os.environ, "LC_ALL": "C"},
                          capture_output=True, text=True, check=False)
    return done.stderr if done.returncode != 0 else None


def switch_of(function, path):
    """Returns the line of the first switch in the function."""
    found = re.search(rf"\b{function}\([^;{{]*\)[^;{{]*{{.*?\bswitch\b", path.read_text(encoding="utf-8"), re.DOTALL)
    return found.string.count("\n", 0, found.end()) + 1


def expect(what, text, pattern):
    if pattern is None:
        ok = text is None
    else:
        ok = text is not None and re.search(pattern, text) is not None
    if not ok:
        failures.append(what)
        print(f"FAILED: {what}\n{text}")


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    cuda = folder / "cuda.cc"
    cuda.write_text(CUDA_SOURCE, encoding="utf-8")
    cuda_flags = [f"-I{sources}/tests/emulation/include", f"-I{sources}/cuda"]
    cpu = sources / "src/cpu/kernels.cc"
    machine = subprocess.run(compiler + ["-dumpmachine"], capture_output=True, text=True, check=True).stdout
    cpu_flags = ["-DDSOPT_ISA=avx2", "-mavx2", "-mf16c", "-mfma"] if machine.startswith("x86_64") else ["-DDSOPT_ISA=generic"]
    expect("the unchanged tree compiles (CPU)", errors_of(folder, [], cpu, *cpu_flags), None)
    expect("the unchanged tree compiles (CUDA)", errors_of(folder, [], cuda, *cuda_flags), None)
    expect("visit() needs a case", errors_of(folder, ENUMERATOR, cpu, *cpu_flags), r"dtype\.h.*\n?.*byte.*not handled")
    expect("the CPU's registers need conversions", errors_of(folder, CODEC, cpu, *cpu_flags),
           r"(registers|tiles|kernels)\.(h|cc).*error")
    expect("the count of steps in compat mode needs a case",
           errors_of(folder, CODEC, sources / "src/optimizer/plan_jobs.cc"),
           r"plan_jobs\.cc:\d+:\d+: error: .*byte.*not handled")
    errors = errors_of(folder, CODEC, cuda, *cuda_flags)
    for function in CUDA:
        line = switch_of(function, sources / "cuda/vec.cuh")
        expect(f"{function}() needs a case", errors, rf"vec\.cuh:{line}:\d+: error: .*byte.*not handled")

print(f"{len(failures)} failures")
sys.exit(bool(failures))
