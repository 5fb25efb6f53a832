#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bench.py [C-PROGRAM]: cost of one step of AdamW on 148 float32 tensors of 4 elements, medians in microseconds.

  c          the C call through ctypes alone, or the output of C-PROGRAM (bench/call_cost)
  bound      opt.step() with bound gradients
  again      opt.step(list) with the arrays of the previous call, each of which is checked
  dict       the same arrays in a dict by name
  other      opt.step(list) with other arrays in each call

The variants alternate in one process. The times are CPU times of this thread, which executes the whole step, so other
processes affect them only through the caches. DSOPT_LIBRARY names the library.
"""

import os
import statistics
import subprocess
import sys
import time

import numpy

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import dsopt  # noqa: E402
from dsopt import _abi as abi  # noqa: E402

TENSORS, ELEMENTS, ROUNDS, CALLS = 148, 4, 60, 100


def arrays(value):
    return [numpy.full(ELEMENTS, value, numpy.float32) for _ in range(TENSORS)]


def optimizer():
    return dsopt.Optimizer({"p%d" % i: array for i, array in enumerate(arrays(1))}, dsopt.AdamW(lr=1e-3))


def main():
    grads, others = arrays(0.5), [arrays(0.5), arrays(0.25)]
    raw, bound, again, by_name, other = (optimizer() for _ in range(5))
    bound.bind(grads=grads)
    named = dict(zip(by_name.names, grads))
    raw.bind(grads=grads)
    step, handle, call = raw._bound.bound_list(None)[2], raw.handle, abi.lib.dsopt_optimizer_step
    turn = [0]

    def changing():
        turn[0] ^= 1
        other.step(others[turn[0]])

    runs = {
        "c": lambda: call(handle, step),
        "bound": bound.step,
        "again": lambda: again.step(grads),
        "dict": lambda: by_name.step(named),
        "other": changing,
    }
    times = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begin = time.thread_time()
            for _ in range(CALLS):
                run()
            times[name].append((time.thread_time() - begin) / CALLS * 1e6)
    medians = {name: statistics.median(values) for name, values in times.items()}
    if len(sys.argv) > 1:
        result = subprocess.run([sys.argv[1]], stdout=subprocess.PIPE, check=True, universal_newlines=True)
        words = result.stdout.split()
        medians["c"] = float(words[words.index("c") + 1])
    print("python %s, numpy %s, dsopt %s" % (sys.version.split()[0], numpy.__version__, dsopt.__version__))
    for name, median in medians.items():
        print("%-6s %7.1f us  %+7.1f us" % (name, median, median - medians["c"]))


if __name__ == "__main__":
    main()
