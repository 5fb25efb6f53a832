# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of README.md on arrays of the standard library."""

import itertools
import os
import sys
import threading
from array import array
from types import SimpleNamespace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
import dsopt  # noqa: E402


def generator(x):
    while True:
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
        yield (x >> 8) * 2.0**-24 - 0.5


def take(values, sizes):
    return {name: array("f", itertools.islice(values, size)) for name, size in sizes.items()}


def adamw():
    sizes = {"a": 1, "b": 7, "c": 4099}
    params, values = take(generator(12345), sizes), generator(1000)
    opt = dsopt.Optimizer(
        params, dsopt.AdamW(lr=0.015625, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.125), max_norm=1
    )
    for _ in range(10):
        opt.step(take(values, sizes))
    return [
        *params.values(),
        *(opt.state["%s.%s" % (name, what)] for what in ("exp_avg", "exp_avg_sq") for name in sizes),
    ]


def onebit():
    sizes, id = {"u": 5, "v": 130}, dsopt.Comm.unique_id()
    ranks = [take(generator(54321), sizes) for _ in range(2)]
    problems = []

    def run(rank):
        try:
            comm, values = dsopt.Comm.local(dsopt.Context(), id, rank, 2), generator(2000 + rank)
            group = dsopt.OnebitAdam(lr=0.015625, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, freeze_step=3)
            opt = dsopt.Optimizer(ranks[rank], group, context=comm.context, data=comm, averages=True)
            for _ in range(6):
                opt.step(take(values, sizes))
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    if ranks[0] != ranks[1]:
        sys.exit("the ranks differ")
    return list(ranks[0].values())


class Bfloat16:
    """An array of bfloat16, which the standard library does not have: values rounded to nearest."""

    def __init__(self, values):
        bits = array("I", values.tobytes())
        self.words = array("H", [(x + 0x7FFF + (x >> 16 & 1)) >> 16 for x in bits])
        self.dtype = SimpleNamespace(name="bfloat16")
        address, count = self.words.buffer_info()
        self.__array_interface__ = {"version": 3, "typestr": "<V2", "shape": (count,), "data": (address, False)}


def low_precision():
    sizes = {"a": 1, "b": 7, "c": 4099}
    values = generator(1000)
    params = {name: Bfloat16(x) for name, x in take(generator(12345), sizes).items()}

    def group(exp_avg, exp_avg_sq):
        return dsopt.AdamW(lr=0.015625, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.125, exp_avg_format=exp_avg,
                           exp_avg_sq_format=exp_avg_sq)

    opt = dsopt.Optimizer(
        {name: params[name] for name in "ab"}, group("e4m3", "bf16_random"), masters="remainder", seed=7
    )
    opt.add_group(group("q8", "q8"), {"c": params["c"]})
    for _ in range(10):
        opt.step(take(values, sizes))
    kinds = ("remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq")
    names = ["%s.%s" % (name, kind) for kind in kinds for name in sizes] + ["c.exp_avg_sq_scale"]
    return [*(param.words for param in params.values()), *map(opt.state.copy, names)]


digest = 0xCBF29CE484222325
for values in adamw() + onebit() + low_precision():
    for byte in values.tobytes() if hasattr(values, "tobytes") else bytes(values):  # an array, or one of ctypes
        digest = (digest ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
print("python %016x" % digest)
