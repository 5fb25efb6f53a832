#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_sequence.py LIBDSOPT [LIST...]: compares the mixed-precision step with the original's framework operations.

Needs PyTorch (Debian: python3-torch). Both sides work on the same shapes, alternating in one process:
  dsopt      one dsopt_optimizer_step: overflow check, norm, clip, AdamW on fp32 masters, fp16 copy
  framework  FP16_Optimizer.step in its order: sum of every fp32 copy for overflow, cast, flatten, norm, unscale and
             clip, AdamW in framework operations on the flat master, copy back tensor by tensor
"""
import os
import statistics
import sys
import time

import torch

if len(sys.argv) < 2:
    sys.exit(__doc__)
os.environ["DSOPT_LIBRARY"] = sys.argv[1]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bindings", "python"))
import dsopt  # noqa: E402
from lists import shapes  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "7"))
# Some builds do not count hyper-threads and start with half of the threads; the engine starts a thread per processor.
torch.set_num_threads(len(os.sched_getaffinity(0)))


class Dsopt:
    def __init__(self, params, grads):
        context = dsopt.Context()
        optimizer = dsopt.Optimizer(params, dsopt.AdamW(weight_decay=0.01), context=context,
                                    scaler=dsopt.Scaler(context), max_norm=1.0)
        optimizer.bind(grads=grads)
        self.step = optimizer.step


class Framework:
    def __init__(self, params, grads):
        self.params, self.grads = params, grads
        self.master = torch.cat([p.float().reshape(-1) for p in params])
        self.m, self.v = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.t = 0

    def step(self):
        for g in self.grads:
            total = float(g.float().sum())
            if total in (float("inf"), -float("inf")) or total != total:
                return
        flat = torch.cat([g.to(torch.float32).reshape(-1) for g in self.grads])
        norm = float(flat.norm(2))
        flat.mul_(1.0 / (65536.0 * max(1.0, norm / 65536.0)))
        self.t += 1
        self.m.mul_(0.9).add_(flat, alpha=0.1)
        self.v.mul_(0.999).addcmul_(flat, flat, value=0.001)
        c1, c2 = 1 - 0.9 ** self.t, 1 - 0.999 ** self.t
        self.master.mul_(1 - 1e-3 * 0.01)
        self.master.addcdiv_(self.m, (self.v.sqrt() / c2 ** 0.5).add_(1e-8), value=-1e-3 / c1)
        offset = 0
        for p in self.params:
            p.copy_(self.master[offset:offset + p.numel()].view_as(p))
            offset += p.numel()


def main():
    print("| list | threads | dsopt ms | framework ms | framework / dsopt |\n| --- | --- | --- | --- | --- |")
    for name in sys.argv[2:] or ["gpt2-124m", "10000x1000"]:
        params = [torch.full((n,), 0.5, dtype=torch.float16) for n in shapes(name)]
        grads = [torch.full((n,), 1.0, dtype=torch.float16) for n in shapes(name)]
        sides = [Dsopt(params, grads), Framework(params, grads)]
        times = [[], []]
        for round_ in range(ROUNDS + 1):
            for k in (0, 1) if round_ % 2 else (1, 0):
                start = time.perf_counter()
                sides[k].step()
                if round_:
                    times[k].append(time.perf_counter() - start)
        a, b = (statistics.median(t) * 1e3 for t in times)
        print("| %s | %d | %.2f | %.2f | %.1f |" % (name, torch.get_num_threads(), a, b, b / a), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
