#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_cuda.py [LIST...]: torch.optim.AdamW on a GPU over the lists of bench_cuda, timed by events, as JSON on standard output.

Rows: fused and foreach, on fp32 weights; and a mixed-precision step as programs write it (unscale and check, norm and clip,
fused AdamW on fp32 masters, copy back). One line says so, with status 77, where PyTorch or a GPU is missing.
"""
import json
import os
import sys

try:
    import torch
except ImportError as error:
    sys.exit(print("torch_cuda.py: %s" % error, file=sys.stderr) or 77)

STEPS = 10  # between two events, as in bench_cuda
ROUNDS = int(os.environ.get("ROUNDS", "9"))
SHAPES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes")


def shapes(name):
    if "x" in name and name.replace("x", "").isdigit():
        count, numel = name.split("x")
        return [int(numel)] * int(count)
    with open(os.path.join(SHAPES, name + ".csv"), encoding="utf-8") as file:
        return [int(line.rsplit(",", 1)[1]) for line in file.read().splitlines()[1:]]


def milliseconds(step):
    for _ in range(3):
        step()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(STEPS):
            step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / STEPS)
    return sorted(times)[ROUNDS // 2]


def masters(sizes):
    weights = [torch.full((n,), 0.5, device="cuda", requires_grad=True) for n in sizes]
    for w in weights:
        w.grad = torch.full_like(w, 1e-3)
    return weights


def plain(sizes, **how):
    optimizer = torch.optim.AdamW(masters(sizes), lr=1e-3, weight_decay=0.01, **how)
    return milliseconds(optimizer.step)


def mixed(sizes, dtype):
    """AdamW on fp32 masters with 16-bit gradients and weights; nothing here waits for the device."""
    weights = masters(sizes)
    grads = [torch.full((n,), 1e-3, device="cuda", dtype=dtype) for n in sizes]
    copies = [torch.zeros_like(g) for g in grads]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01, fused=True)
    found, scale = torch.zeros(1, device="cuda"), torch.full((1,), 1.0 / 1024, device="cuda")
    own = [w.grad for w in weights]

    def step():
        torch._foreach_copy_(own, grads)
        torch._amp_foreach_non_finite_check_and_unscale_(own, found, scale)
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        torch._foreach_copy_(copies, weights)

    with torch.no_grad():
        return milliseconds(step)


def main():
    if not torch.cuda.is_available():
        sys.exit(print("torch_cuda.py: PyTorch sees no GPU", file=sys.stderr) or 77)
    rows = {}
    for name in sys.argv[1:] or ["gpt2-124m", "resnet50", "10000x1000", "1x67108864"]:
        sizes = shapes(name)
        for row, run in (("fused", lambda: plain(sizes, fused=True)), ("foreach", lambda: plain(sizes, foreach=True)),
                         ("mixed f16", lambda: mixed(sizes, torch.float16)),
                         ("mixed bf16", lambda: mixed(sizes, torch.bfloat16))):
            try:
                rows["%s/%s" % (row, name)] = run()
            except (RuntimeError, AttributeError) as error:  # out of memory, or a version without the function
                print("torch_cuda.py: %s on %s: %s" % (row, name, str(error).splitlines()[0]), file=sys.stderr)
            torch.cuda.empty_cache()
    json.dump({"version": torch.__version__, "ms": rows}, sys.stdout)


if __name__ == "__main__":
    main()
