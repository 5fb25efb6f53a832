#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests that each kernel is loaded when a device is created, and begins with the wait for the preceding kernel.

usage: kernels.py SOURCE-FOLDER

At its first launch a kernel that is not loaded may wait for all work of the device. So each .cu file has a function
load_..._kernels() that names its kernels, and device.cc calls all of these functions. Kernels are defined in .cu files
alone. The emulated device checks the instances of templates: a kernel that is launched before it is loaded fails a
test.

The launcher accepts only kernels whose first parameter is a PdlArgument. This test checks that they read nothing
through their other parameters before they have waited: the first statement must call begin_kernel().
"""
import pathlib
import re
import sys

KERNEL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^()]*\)\s*)?(\w+)\(")
BEGIN = re.compile(r"\s*(?:const [\w<> ]+&|[\w ]+\*const )\w+ = argument\.begin_kernel\(\);")


def body_of(text, kernel):
    """Returns the text after the opening brace of a kernel."""
    return re.search(rf"__global__[^;{{}}]*\b{kernel}\([^;{{}}]*\) \{{(.*)", text, re.DOTALL).group(1)


def arrays(text):
    """Returns the text of the constant arrays of kernels by name."""
    return dict(re.findall(r"(k\w+Kernels)\[\] = \{(.*?)\};", text, re.DOTALL))


def main():
    folder = pathlib.Path(sys.argv[1]) / "cuda"
    device = (folder / "device.cc").read_text(encoding="utf-8")
    count, wrong = 0, []
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".h", ".cuh", ".cc", ".cu"):
            continue
        text = path.read_text(encoding="utf-8")
        kernels = KERNEL.findall(text)
        if len(kernels) != len(re.findall(r"^[^/\n]*__global__", text, re.MULTILINE)):
            wrong.append(f"{path.name}: a definition of a kernel that this test does not understand")
        count += len(kernels)
        if path.suffix != ".cu":
            wrong += [f"{path.name}: {kernel} is not in a .cu file" for kernel in kernels]
            continue
        loads = re.findall(r"^void (load_\w+_kernels)\(KernelLoader &load\) \{(.*?\})$", text, re.MULTILINE | re.DOTALL)
        wrong += [f"{path.name}: device.cc does not call {name}()" for name, _ in loads
                  if f"{name}(load);" not in device]
        loaded = " ".join(body for _, body in loads)
        loaded += " ".join(named for name, named in arrays(text).items() if name in loaded)
        loaded += " ".join(re.findall(r"^static void load_each\(.*?\n\}$", text, re.MULTILINE | re.DOTALL))
        wrong += [f"{path.name}: {kernel} does not begin with begin_kernel()" for kernel in kernels
                  if not BEGIN.match(body_of(text, kernel))]
        wrong += [f"{path.name}: {kernel} is not loaded" for kernel in kernels
                  if not re.search(rf"\b{kernel}\b", loaded)]
    print("\n".join(wrong + [f"{count} kernels, {len(wrong)} wrong"]))
    return 1 if wrong or count < 30 else 0


sys.exit(main())
