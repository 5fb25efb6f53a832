# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of README.md on arrays of the standard library."""

import itertools
import os
import struct
import sys
import tempfile
import threading
from array import array
from types import SimpleNamespace

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python"))
import dsopt  # noqa: E402

SIZES = {"a": 1, "b": 7, "c": 4099}
SHARDED = {"a": 6, "b": 9000, "c": 130}


def generator(x):
    while True:
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
        yield (x >> 8) * 2.0**-24 - 0.5


def take(values, sizes):
    return {name: array("f", itertools.islice(values, size)) for name, size in sizes.items()}


def group(**options):
    return dsopt.AdamW(**{"lr": 0.015625, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.125, **options})


def copies(opt, kinds, names):
    """Copies of state in the order of the kinds; not every parameter has each."""
    state = ["%s.%s" % (name, kind) for kind in kinds for name in names]
    return [opt.state.copy(name) for name in state if name in opt.state]


def adamw():
    params, values = take(generator(12345), SIZES), generator(1000)
    opt = dsopt.Optimizer(params, group(), max_norm=1)
    for _ in range(10):
        opt.step(take(values, SIZES))
    return [*params.values(), *copies(opt, ("exp_avg", "exp_avg_sq"), SIZES)]


def on_two_ranks(run):
    """Calls run(rank, comm) on two threads, and returns what they return."""
    id, results, problems = dsopt.Comm.unique_id(), [None, None], []

    def start(rank):
        try:
            results[rank] = run(rank, dsopt.Comm.local(dsopt.Context(), id, rank, 2))
        except Exception as problem:
            problems.append(problem)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results


def same(one, two):
    if one != two:
        sys.exit("the ranks differ")


def onebit():
    sizes = {"u": 5, "v": 130}

    def run(rank, comm):
        params, values = take(generator(54321), sizes), generator(2000 + rank)
        onebit_group = dsopt.OnebitAdam(lr=0.015625, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, freeze_step=3)
        opt = dsopt.Optimizer(params, onebit_group, context=comm.context, data=comm, averages=True)
        for _ in range(6):
            opt.step(take(values, sizes))
        return params

    first, second = on_two_ranks(run)
    same(first, second)
    return list(first.values())


class Array16:
    """An array of a dtype of 16 bits, which the standard library does not have."""

    def __init__(self, words, name, kind):
        self.words, self.dtype = array("H", words), SimpleNamespace(name=name)
        address, count = self.words.buffer_info()
        self.__array_interface__ = {"version": 3, "typestr": kind, "shape": (count,), "data": (address, False)}


def bfloat16(values):
    """Rounds to nearest, ties to even."""
    bits = array("I", values.tobytes())
    return Array16([(x + 0x7FFF + (x >> 16 & 1)) >> 16 for x in bits], "bfloat16", "<V2")


def bfloat16_params():
    return {name: bfloat16(x) for name, x in take(generator(12345), SIZES).items()}


KINDS = "remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"


def low_precision():
    values, params = generator(1000), bfloat16_params()
    small = group(exp_avg_format="e4m3", exp_avg_sq_format="bf16_random")
    opt = dsopt.Optimizer({name: params[name] for name in "ab"}, small, masters="remainder", seed=7)
    opt.add_group(group(exp_avg_format="q8", exp_avg_sq_format="q8"), {"c": params["c"]})
    for _ in range(10):
        opt.step(take(values, SIZES))
    return [*(param.words for param in params.values()), *copies(opt, KINDS, SIZES)]


def sharded():
    def run(rank, comm):
        params, values = take(generator(54321), SHARDED), generator(3000 + rank)
        opt = dsopt.Optimizer(
            params, group(), context=comm.context, data=comm, shard="data", averages=True, max_norm=1
        )
        for _ in range(5):
            opt.step(take(values, SHARDED))
        return params, [copies(opt, (kind,), SHARDED) for kind in ("exp_avg", "exp_avg_sq")]

    (first, parts), (second, others) = on_two_ranks(run)
    same(first, second)
    return [*first.values(), *parts[0], *others[0], *parts[1], *others[1]]


def resharded():
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, "%d.safetensors" % rank) for rank in range(2)]

        def run(rank, comm):
            params, values = take(generator(54321), SHARDED), generator(4000)
            opt = dsopt.Optimizer(params, group(), context=comm.context, data=comm, shard="data")
            for _ in range(3):
                opt.step(take(values, SHARDED))
            opt.save(files[rank])
            return params, values

        (params, values), (other, _) = on_two_ranks(run)
        same(params, other)
        opt = dsopt.Optimizer(params, group())
        opt.load(files)
    for _ in range(3):
        opt.step(take(values, SHARDED))
    return [*params.values(), *copies(opt, ("exp_avg", "exp_avg_sq"), SHARDED)]


def muon():
    sizes = {"qkv": 48 * 16, "w": 20 * 17, "bias": 130}
    params, values = take(generator(777), sizes), generator(888)
    matrices = {
        "qkv": dsopt.Param(memoryview(params["qkv"]).cast("B").cast("f", (48, 16)), rows=16, cols=16),
        "w": memoryview(params["w"]).cast("B").cast("f", (20, 17)),
    }
    opt = dsopt.Optimizer(matrices, dsopt.Muon(lr=0.015625, momentum=0.9375, weight_decay=0.125))
    opt.add_group(group(lr=0.0078125, weight_decay=0.25, eps=0), {"bias": params["bias"]})
    for _ in range(5):
        grads = take(values, sizes)
        for name, shape in (("qkv", (48, 16)), ("w", (20, 17))):
            grads[name] = memoryview(grads[name]).cast("B").cast("f", shape)
        opt.step(grads)
    return [*params.values(), *copies(opt, ("momentum_buffer", "exp_avg", "exp_avg_sq"), sizes)]


def float16(values):
    """Of the upper 10 bits of each value."""
    bits = b"".join(struct.pack("<e", (value * 1024 // 1) / 1024) for value in values)
    return Array16(array("H", bits), "float16", "<f2")


def accumulation():
    values = generator(5000)
    params = {name: float16(x) for name, x in take(generator(12345), SIZES).items()}
    context = dsopt.Context()
    scaler = dsopt.Scaler(context, init=1024, window=2)
    opt = dsopt.Optimizer(params, group(), context=context, scaler=scaler, max_norm=1, accumulate=True)
    for step in range(8):
        scale = scaler.scale
        for micro in range(3):
            grads = {name: array("f", (scale * g for g in x)) for name, x in take(values, SIZES).items()}
            if (step, micro) == (3, 1):
                grads["c"][0] = float("inf")
            opt.accumulate(grads)
        opt.step(accumulated=True)
    state = copies(opt, ("master", "exp_avg", "exp_avg_sq"), SIZES)
    return [*(param.words for param in params.values()), *state, opt.state.copy("optimizer.loss_scale")]


def uncorrected():
    values, params = generator(1000), bfloat16_params()
    keras = group(eps=0.001, eps_uncorrected=True, exp_avg_format="e4m3", exp_avg_sq_format="q8")
    opt = dsopt.Optimizer(params, keras, masters="remainder", max_value=0.25)
    for _ in range(10):
        opt.step(take(values, SIZES))
    return [*(param.words for param in params.values()), *copies(opt, KINDS, SIZES)]


for case in (adamw, onebit, low_precision, sharded, resharded, muon, accumulation, uncorrected):
    digest = 0xCBF29CE484222325
    for values in case():
        for byte in values.tobytes() if hasattr(values, "tobytes") else bytes(values):  # an array, or one of ctypes
            digest = (digest ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    print("python %s %016x" % (case.__name__, digest))
