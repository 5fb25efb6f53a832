#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the compiler made of the kernels, from the machine code that ships.

usage: resources.py LIBDSOPT FOLDER...

Registers within budget, nothing spilled to memory, 16-byte loads and stores on the arrays. Needs no GPU, but cuobjdump and
nvdisasm, from PATH or from `FOLDER` or its nvidia/*/bin, where pip puts them; without them the test is skipped.
"""
import glob
import os
import re
import shutil
import subprocess
import sys

# Kernel or kernels, registers at most, 16-byte loads and stores of global memory at least (a group of four arrays, or of eight elements each).
BUDGET = [
    ("update_kernelILi4E", 64, 4, 3),
    ("update_kernelILi8E", 80, 7, 7),
    ("lamb_weights_kernelILi4E", 64, 3, 1),
    ("lamb_weights_kernelILi8E", 80, 6, 3),
    ("inspect_kernel", 80, 2, 0),
    ("axpby_kernel", 64, 4, 2),
    ("zero_kernel", 64, 0, 2),
    ("clamp_kernel", 64, 2, 2),
    ("feed_list_kernel", 64, 2, 1),
    ("pack_kernel", 64, 0, 0),
    ("serve_kernel", 64, 2, 2),
    ("decode_kernel", 64, 0, 2),
    ("feed_slice_kernel", 64, 3, 1),
    ("mean_slice_kernel", 64, 2, 1),
    ("row_scales_kernel", 64, 0, 0),
    ("result_scales_kernel", 64, 0, 0),
    ("feed_kernelILNS.*4FeedE[012]E", 64, 2, 1),  # the gradient, or the momentum
    ("feed_kernelILNS.*4FeedE3E", 80, 6, 4),  # the distance, after a step
    ("finish_kernelILNS.*4FeedE[012]E", 64, 2, 2),
    ("finish_kernelILNS.*4FeedE3E", 80, 3, 3),
    ("local_kernel", 64, 5, 3),
    ("onebit_lamb_moments_kernel", 80, 4, 2),
    ("onebit_lamb_weights_kernel", 64, 3, 1),
]


def find_tools(folders):
    """cuobjdump, with nvdisasm where it looks for it."""
    places = []
    for folder in folders:
        places += [folder] + sorted(glob.glob(os.path.join(folder, "nvidia", "*", "bin")))
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath)] + places)
    missing = [tool for tool in ("cuobjdump", "nvdisasm") if shutil.which(tool) is None]
    if missing:
        print("not found: " + ", ".join(missing))
        sys.exit(77)
    return shutil.which("cuobjdump")


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True).stdout


def sections(text, pattern):
    """Text of every function by its name."""
    parts = re.split(pattern, text)
    return dict(zip(parts[1::2], parts[2::2]))


def main():
    library, folders = sys.argv[1], sys.argv[2:]
    dump = find_tools(folders)
    passed = failed = 0
    archs = sorted(set(re.findall(r"\.(sm_\d+)\.cubin", run(dump, "-lelf", library))))
    if not archs:
        sys.exit("no machine code in " + library)
    for arch in archs:
        usage = sections(run(dump, "-res-usage", "-arch", arch, library), r"Function (\S+):")
        code = sections(run(dump, "-sass", "-arch", arch, library), r"Function : (\S+)")
        for kernel, registers, loads, stores in BUDGET:
            names = [name for name in usage if re.search(r"\d" + kernel, name)]
            if not names:
                print("%s: no kernel is called %s" % (arch, kernel))
                failed += 1
            for name in names:
                have = int(re.search(r"REG:(\d+)", usage[name]).group(1))
                spills = len(re.findall(r"\b(?:LDL|STL)\b", code[name]))
                wide = [len(re.findall(r"\b%sG\.E(?:\.\w+)*\.128\b" % kind, code[name])) for kind in ("LD", "ST")]
                generic = len(re.findall(r"\b(?:LD|ST)\.E(?:\.\w+)*\.128\b", code[name]))
                good = have <= registers and spills == 0 and wide[0] >= loads and wide[1] >= stores and generic == 0
                passed, failed = passed + good, failed + (not good)
                print("%s %-26s %3d registers, %d spills, %d loads and %d stores of 16 bytes, %d generic: %s" %
                      (arch, kernel, have, spills, wide[0], wide[1], generic, "ok" if good else "over budget"))
    print("%d passed, %d failed" % (passed, failed))
    sys.exit(failed != 0)


main()
