#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_low_precision.py LIBDSOPT [LIST...]: compares AdamW steps with 8-bit and other low-precision state on the CPU.

The steps alternate in one process, on the same lists of float32 tensors. Peers are the libraries that can be imported:
torch.optim.AdamW(fused=True), bitsandbytes' AdamW8bit (pip install bitsandbytes), torchao's AdamW8bit and AdamWFp8 (pip
install torchao), which compile their step, and the same with torch.compile off. Nothing is installed here. Prints a
Markdown table: bytes of state and nanoseconds per parameter, and the median of time / time of dsopt with Q8 moments over
the rounds, with its quartiles.
Environment: ROUNDS (default 9), OMP_NUM_THREADS.
"""
import os
import statistics
import sys
import time

if len(sys.argv) < 2:
    sys.exit(__doc__)
os.environ["DSOPT_LIBRARY"] = os.path.abspath(sys.argv[1])
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bindings", "python"))
THREADS = int(os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)))))
import torch  # noqa: E402

import dsopt.torch  # noqa: E402
from lists import shapes  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "9"))
LISTS = ["1x16777216", "1x1048576", "1x65536", "resnet50"]
LR, DECAY = 1e-3, 0.01
FORMATS = {"F32": {}, "BF16 and BF16_RANDOM": {"exp_avg_format": "bf16", "exp_avg_sq_format": "bf16_random"},
           "E4M3 and BF16_RANDOM": {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random"}}
torch.set_num_threads(THREADS)


def dsopt_of(**formats):
    return lambda params: dsopt.torch.AdamW(params, lr=LR, weight_decay=DECAY, **formats)


def bitsandbytes_step(params):
    from bitsandbytes.optim import AdamW8bit
    return AdamW8bit(params, lr=LR, weight_decay=DECAY)


def torchao_step(name):
    def make(params):
        from torchao import optim
        return getattr(optim, name)(params, lr=LR, weight_decay=DECAY)
    return make


def eager(make):
    """The same optimizer, with torch.compile off during its steps."""
    def make_eager(params):
        optimizer = make(params)
        step = optimizer.step

        def run():
            with torch.compiler.set_stance("force_eager"):
                step()
        optimizer.step = run
        return optimizer
    return make_eager


def bytes_of(value):
    if isinstance(value, dict):
        return sum(bytes_of(x) for x in value.values())
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return 0
    parts = [getattr(value, name) for name in ("codes", "scale") if isinstance(getattr(value, name, None), torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in parts or [value])


def peers():
    yield "dsopt, Q8", lambda params: dsopt.torch.AdamW8bit(params, lr=LR, weight_decay=DECAY)
    for name, formats in FORMATS.items():
        yield "dsopt, " + name, dsopt_of(**formats)
    yield "torch.optim, fused", lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, fused=True)
    yield "bitsandbytes, AdamW8bit", bitsandbytes_step
    for name in ("AdamW8bit", "AdamWFp8"):
        yield "torchao, %s, compiled" % name, torchao_step(name)
        yield "torchao, %s, eager" % name, eager(torchao_step(name))


def params_of(sizes):
    params = [torch.nn.Parameter(torch.randn(*size)) for size in sizes]
    for param in params:
        param.grad = torch.randn(param.shape) * 0.01
    return params


def timed(step):
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def main():
    print("torch %s, %d threads\n" % (torch.__version__, THREADS))
    for name in sys.argv[2:] or LISTS:
        sizes = [[size] if isinstance(size, int) else list(size) for size in shapes(name)]
        count = sum(torch.Size(size).numel() for size in sizes)
        steps, memory = {}, {}
        for peer, make in peers():
            try:
                optimizer = make(params_of(sizes))
                for _ in range(3):
                    optimizer.step()
            except Exception as problem:  # pylint: disable=broad-except  # whatever a peer does where it cannot run
                print("no %s: %s" % (peer, str(problem).split("\n")[0][:100]))
                continue
            steps[peer] = optimizer.step
            memory[peer] = sum(bytes_of(state) for state in optimizer.state.values()) / count
        times = {peer: [] for peer in steps}
        for _ in range(ROUNDS):
            for peer, step in steps.items():
                calls = max(1, min(20, int(0.05 / max(timed(step), 1e-6))))
                times[peer].append(min(timed(step) for _ in range(calls)))
        print("\n| %s | bytes of state | ns | time / time of dsopt with Q8 |\n| --- | --- | --- | --- |" % name)
        for peer, some in times.items():
            ratios = [mine / base for mine, base in zip(some, times["dsopt, Q8"])]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print("| %s | %.2f | %.3f | %.2f (%.2f to %.2f) |" %
                  (peer, memory[peer], statistics.median(some) / count * 1e9, middle, low, high))
        print()


if __name__ == "__main__":
    main()
