#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_cuda.py LIST: torch.optim.AdamW on a GPU over a list of bench_cuda, timed by events, as JSON on stdout.

Rows: fused and foreach, on fp32 weights; a mixed-precision step as programs write it (unscale and check, norm and clip,
fused AdamW on fp32 masters, copy back); the order of operations of DeepSpeed's FP16_Optimizer, which synchronizes with
the device for each tensor; compression to one bit by tensor operations. Without PyTorch or a GPU, prints one line and
exits with status 77.
"""
import json
import os
import sys

from lists import shapes

try:
    import torch
except ImportError as error:
    sys.exit(print("torch_cuda.py: %s" % error, file=sys.stderr) or 77)

STEPS = 10  # between two events, as in bench_cuda
ROUNDS = int(os.environ.get("ROUNDS", "9"))


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


def plain(sizes, **options):
    optimizer = torch.optim.AdamW(masters(sizes), lr=1e-3, weight_decay=0.01, **options)
    return milliseconds(optimizer.step)


def mixed(sizes, dtype):
    """AdamW on fp32 masters with 16-bit gradients and weights; does not wait for the device."""
    weights = masters(sizes)
    grads = [torch.full((n,), 1e-3, device="cuda", dtype=dtype) for n in sizes]
    copies = [torch.zeros_like(g) for g in grads]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01, fused=True)
    found, scale = torch.zeros(1, device="cuda"), torch.full((1,), 1.0 / 1024, device="cuda")
    grads32 = [w.grad for w in weights]

    def step():
        torch._foreach_copy_(grads32, grads)
        torch._amp_foreach_non_finite_check_and_unscale_(grads32, found, scale)
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        torch._foreach_copy_(copies, weights)

    with torch.no_grad():
        return milliseconds(step)


def wrapper_sequence(sizes):
    """FP16_Optimizer.step: a sum of each gradient that the host reads, cast, flatten, norm, unscale, Adam on one flat
    master, copy back."""
    total = sum(sizes)
    grads = [torch.full((n,), 1e-3, device="cuda", dtype=torch.float16) for n in sizes]
    params = [torch.zeros_like(g) for g in grads]
    flat = torch.full((total,), 0.5, device="cuda", requires_grad=True)
    optimizer = torch.optim.AdamW([flat], lr=1e-3, weight_decay=0.01, fused=True)

    def step():
        for grad in grads:
            value = float(grad.float().sum())
            if value in (float("inf"), -float("inf")) or value != value:
                return
        flat.grad = torch.cat([grad.float().reshape(-1) for grad in grads])
        norm = float(flat.grad.norm())
        flat.grad.mul_(1.0 / (1024 * max(1.0, norm / 1024)))
        optimizer.step()
        flat.grad = None
        offset = 0
        for param in params:
            param.copy_(flat[offset:offset + param.numel()])
            offset += param.numel()

    with torch.no_grad():
        return milliseconds(step)


def compress(sizes):
    """Error feedback, scale and sign bits of the worker and the decoded result, each as a separate operation, for one
    flat tensor."""
    total = (sum(sizes) + 7) // 8 * 8
    value, error = torch.full((total,), 1e-3, device="cuda"), torch.zeros(total, device="cuda")
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], device="cuda", dtype=torch.uint8)

    def step():
        error.add_(value)
        scale = error.norm() / total ** 0.5
        signs = error >= 0
        bits = (signs.view(-1, 8).to(torch.uint8) * weights).sum(dim=1, dtype=torch.uint8)
        error.sub_(torch.where(signs, scale, -scale))
        decoded = ((bits.unsqueeze(1) & weights) != 0).view(-1)
        value.copy_(torch.where(decoded, scale, -scale))

    with torch.no_grad():
        return milliseconds(step)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit(print("torch_cuda.py: PyTorch sees no GPU", file=sys.stderr) or 77)
    rows, sizes = {}, shapes(sys.argv[1])
    for row, run in (("fused", lambda: plain(sizes, fused=True)), ("foreach", lambda: plain(sizes, foreach=True)),
                     ("mixed f16", lambda: mixed(sizes, torch.float16)),
                     ("mixed bf16", lambda: mixed(sizes, torch.bfloat16)),
                     ("deepspeed f16", lambda: wrapper_sequence(sizes)), ("compress", lambda: compress(sizes))):
        try:
            rows[row] = run()
        except (RuntimeError, AttributeError) as error:  # out of memory, or a version without the function
            print("torch_cuda.py: %s: %s" % (row, str(error).splitlines()[0]), file=sys.stderr)
        torch.cuda.empty_cache()
    json.dump({"version": torch.__version__, "ms": rows}, sys.stdout)


if __name__ == "__main__":
    main()
