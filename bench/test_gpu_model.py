#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks properties of gpu_model.py that hold for all constants: the better end of a prediction is not worse than the
other end, no step is faster than a copy of its bytes, and more elements, tensors, bytes or instructions are never
faster."""
import subprocess
import sys

import gpu_model

SIZES = [1, 100, 1000, 4096, 5000, 1 << 20, 1 << 24]
passed, failed = 0, 0


def expect(good, text):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    if not good:
        print("FAILED: " + text)


def times(step, sizes, machine, mode):
    return [gpu_model.step_seconds(step, sizes, machine, mode, end) for end in (gpu_model.BEST, gpu_model.WORST)]


def check_step(step, machine, mode):
    for counts in (1, 7, 2000):
        before = [0, 0]
        for size in SIZES:
            best, worst = now = times(step, [size] * counts, machine, mode)
            name = "%s of %d x %d on %s, %s" % (step, counts, size, machine, mode)
            expect(0 < best <= worst, "%s: %g to %g s" % (name, best, worst))
            low, high = gpu_model.share_of_copy(step, [size] * counts, machine, mode)
            expect(0 < low <= high <= 1, "%s: %g to %g of a copy" % (name, low, high))
            expect(all(a <= b for a, b in zip(before, now)), "%s is faster than with fewer elements" % name)
            more = times(step, [size] * (counts + 1), machine, mode)
            expect(all(a <= b for a, b in zip(now, more)), "%s is slower than a list with one more" % name)
            before = now


def check_kernel(name, kernel):
    expect(kernel.blocks * gpu_model.THREADS * kernel.registers <= 65536, name + ": too many registers for its blocks")
    list_, machine = gpu_model.list_of([1 << 24], kernel.bytes, gpu_model.MACHINES["h200"]), gpu_model.MACHINES["h200"]
    before = [gpu_model.kernel_seconds(name, list_, machine, end) for end in (gpu_model.BEST, gpu_model.WORST)]
    for field in ("bytes", "issued", "outside"):
        gpu_model.KERNELS[name] = kernel._replace(**{field: 2 * getattr(kernel, field)})
        after = [gpu_model.kernel_seconds(name, list_, machine, end) for end in (gpu_model.BEST, gpu_model.WORST)]
        expect(all(a <= b for a, b in zip(before, after)), "%s is faster with twice the %s" % (name, field))
    gpu_model.KERNELS[name] = kernel


def main():
    for step, (_, kernels, _) in gpu_model.STEPS.items():
        expect(all(name in gpu_model.KERNELS or name == "memset" for name in kernels), step + " has an unknown kernel")
        for machine in gpu_model.MACHINES:
            for mode in gpu_model.GAPS:
                check_step(step, machine, mode)
    for name, kernel in list(gpu_model.KERNELS.items()):
        check_kernel(name, kernel)
    page = subprocess.run([sys.executable, gpu_model.__file__, "--page"], check=True, stdout=subprocess.PIPE,
                          encoding="utf-8").stdout
    expect(page.startswith("# Predicted, not measured") and "| gpt2-124m | Fp32 |" in page, "a page without its table")
    expect("| predicted copy / step | goal |" in page, "a table that does not say that it is predicted")
    print("%d passed, %d failed" % (passed, failed))
    sys.exit(failed != 0)


main()
