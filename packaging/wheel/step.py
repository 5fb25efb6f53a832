#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains with the dsopt of a wheel, without NumPy, and prints a digest that must be the same on every machine.

usage: step.py FOLDER [LIBRARIES]

The package dsopt must come from FOLDER. With LIBRARIES, every library of the process must be in FOLDER or LIBRARIES,
and libstdc++, libgcc_s and OpenMP runtimes must not be among them. Writes the version of glibc to standard error.
"""
import array
import hashlib
import os
import re
import sys

import dsopt


def train(rule, threads):
    """Returns digests of parameters after 20 steps: one tensor that is partitioned among threads, small ones, an empty
    one."""
    sizes = {"large": 200000, "small": 77, "one": 1, "none": 0}
    params = {name: array.array("f", [((i * 7919) % 1000) / 500 - 1 for i in range(size)])
              for name, size in sizes.items()}
    opt = dsopt.Optimizer(params, rule, context=dsopt.Context("cpu", threads=threads), max_norm=1.0)
    for step in range(20):
        grads = {name: array.array("f", [x * 0.25 + (step % 5) * 0.0625 for x in values])
                 for name, values in params.items()}
        opt.step(grads, lr=0.01 * (1 - step / 40))
    digest = hashlib.sha256()
    for values in params.values():
        digest.update(values.tobytes())
    return digest.hexdigest()


def libraries():
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sorted({line.split()[-1] for line in file if re.search(r"/[^ /]*\.so[^ /]*$", line)})


def main():
    folder = os.path.realpath(sys.argv[1])
    assert dsopt._abi.path == os.path.join(folder, "dsopt", "libdsopt.so"), dsopt._abi.path
    for name, rule in (("AdamW", dsopt.AdamW(lr=0.01, weight_decay=0.02)), ("Lamb", dsopt.Lamb(lr=0.01))):
        one, two = train(rule, 1), train(rule, 2)
        assert one == two, (name, one, two)
        print(name, one)
    try:  # an exception inside the library
        dsopt.Optimizer({"x": array.array("f", [1])}, dsopt.AdamW(lr=0.01)).load("/nothing/at/all")
    except dsopt.FileError as error:
        print(error)
    if len(sys.argv) > 2:
        allowed = tuple(os.path.join(os.path.realpath(path), "") for path in (folder, sys.argv[2]))
        loaded = libraries()
        assert os.path.join(folder, "dsopt", "libdsopt.so") in loaded, loaded
        wrong = [path for path in loaded if not path.startswith(allowed) or re.search(r"stdc\+\+|gcc_s|omp\.", path)]
        assert not wrong, wrong
    sys.stderr.write(os.confstr("CS_GNU_LIBC_VERSION") + "\n")


if __name__ == "__main__":
    main()
