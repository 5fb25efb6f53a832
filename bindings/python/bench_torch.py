#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench_torch.py [C-PROGRAM] [SHARE]: compares dsopt.torch.AdamW with torch.optim.AdamW, medians per step.

1. 148 float32 tensors of 4 elements: cost of a call. `c` is the C call through ctypes alone, or the output of C-PROGRAM
   (bench/call_cost).
2. The shapes of GPT-2 (bench/shapes/gpt2-124m.csv), float32. SHARE < 1 keeps only this fraction of each tensor's rows,
   for small machines.

The variants alternate in one process, with torch's number of threads. DSOPT_LIBRARY names the library.
"""
import csv
import ctypes
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from dsopt import _abi as abi  # noqa: E402
from dsopt.torch import AdamW  # noqa: E402

SHAPES = pathlib.Path(__file__).resolve().parents[2] / "bench" / "shapes" / "gpt2-124m.csv"


def shapes(share):
    with open(SHAPES, encoding="utf-8") as file:
        for row in csv.DictReader(file):
            first, *rest = map(int, row["shape"].split("x"))
            yield [max(int(first * share), 1)] + rest


def params_of(sizes):
    params = [torch.nn.Parameter(torch.randn(*size)) for size in sizes]
    for param in params:
        param.grad = torch.randn(param.shape) * 0.01
    return params


def implementations(sizes):
    found = {"dsopt": AdamW(params_of(sizes), fused=None)}
    for name, options in (("for-loop", {"foreach": False}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        try:
            optimizer = torch.optim.AdamW(params_of(sizes), **options)
            optimizer.step()
            found[name] = optimizer
        except (TypeError, RuntimeError, NotImplementedError) as problem:
            print("torch %s: no %s: %s" % (torch.__version__, name, problem))
    return {name: optimizer.step for name, optimizer in found.items()}, found["dsopt"]


def medians(steps, rounds, calls):
    """Returns medians in microseconds."""
    times = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, step in steps.items():
            for _ in range(calls.get(name, 1)):
                begin = time.perf_counter()
                step()
                if i:
                    times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(some) * 1e6 for name, some in times.items()}


def main():
    program = sys.argv[1] if len(sys.argv) > 1 and os.path.exists(sys.argv[1]) else None
    share = float(sys.argv[-1]) if len(sys.argv) > 1 and sys.argv[-1] != program else 1.0
    print("torch %s, %d threads, %s" %
          (torch.__version__, torch.get_num_threads(), abi.lib.dsopt_build_info().decode()))

    steps, ours = implementations([[4]] * 148)
    ours.step()
    plan = ours._plans[0]
    reference, function = ctypes.byref(plan.call), abi.lib.dsopt_optimizer_apply
    steps["c"] = lambda: function(plan.handle, reference)
    found = medians(steps, 40, {"dsopt": 50, "c": 50, "for-loop": 2, "foreach": 2, "fused": 5})
    if program:
        found["c"] = float(subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()[1])
    print("148 x 4:")
    for name, microseconds in found.items():
        print("  %-9s %10.1f us   %+9.1f us more than c  %6.2f x dsopt" %
              (name, microseconds, microseconds - found["c"], microseconds / found["dsopt"]))

    sizes = list(shapes(share))
    steps, _ = implementations(sizes)
    found = medians(steps, 7, {})
    print("GPT-2, %.1f million parameters:" % (sum(torch.Size(size).numel() for size in sizes) / 1e6))
    for name, microseconds in found.items():
        print("  %-9s %10.2f ms   %6.2f x dsopt" % (name, microseconds / 1e3, microseconds / found["dsopt"]))


if __name__ == "__main__":
    main()
