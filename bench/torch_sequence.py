#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_sequence.py LIBDSOPT [LIST...]: the mixed-precision step beside the original's sequence of framework operations.

Needs PyTorch (Debian: python3-torch). Both sides work on the same shapes, in turns, in one process:
  dsopt      one dsopt_optimizer_step: overflow check, norm, clip, AdamW on fp32 masters, fp16 copy
  framework  FP16_Optimizer.step in its order: sum of every fp32 copy for overflow, cast, flatten, norm, unscale and clip, AdamW
             in framework operations on the flat master, copy back tensor by tensor
"""
import ctypes
import os
import statistics
import sys
import time

import torch

import dsopt_abi

ROUNDS = int(os.environ.get("ROUNDS", "7"))
# Some builds take hyper-threads for none and start with half of them; the engine follows the same OpenMP setting.
torch.set_num_threads(len(os.sched_getaffinity(0)))
SHAPES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes")


def shapes(name):
    if "x" in name and name.replace("x", "").isdigit():
        count, numel = name.split("x")
        return [int(numel)] * int(count)
    with open(os.path.join(SHAPES, name + ".csv")) as file:
        return [int(line.rsplit(",", 1)[1]) for line in file.read().splitlines()[1:]]


class Dsopt:
    def __init__(self, path, params, grads):
        self.lib = lib = dsopt_abi.load(path)
        self.keep = (params, grads)
        context, scaler, self.optimizer = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        lib.check(lib.dsopt_context_create(None, ctypes.byref(context)))
        lib.check(lib.dsopt_scaler_create(context, None, ctypes.byref(scaler)))
        desc = lib.dsopt_optimizer_desc(max_norm=1.0, scaler=scaler)
        lib.check(lib.dsopt_optimizer_create(context, ctypes.byref(desc), ctypes.byref(self.optimizer)))
        group = lib.dsopt_group()
        lib.check(lib.dsopt_group_init(ctypes.byref(group), group.size, lib.DSOPT_ALGORITHM_ADAMW))
        group.weight_decay = 0.01

        def f16(tensor):
            return lib.dsopt_tensor(tensor.data_ptr(), tensor.numel(), lib.DSOPT_DTYPE_F16)
        list_ = (lib.dsopt_param * len(params))(*[lib.dsopt_param(tensor=f16(p)) for p in params])
        lib.check(lib.dsopt_optimizer_add_group(self.optimizer, ctypes.byref(group), list_, len(params)))
        self.grads = (lib.dsopt_tensor * len(grads))(*map(f16, grads))
        self.step_ = lib.dsopt_step(grads=ctypes.addressof(self.grads), count=len(grads))

    def step(self):
        self.lib.check(self.lib.dsopt_optimizer_step(self.optimizer, ctypes.byref(self.step_)))


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
        at = 0
        for p in self.params:
            p.copy_(self.master[at:at + p.numel()].view_as(p))
            at += p.numel()


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("| list | threads | dsopt ms | framework ms | framework / dsopt |\n| --- | --- | --- | --- | --- |")
    for name in sys.argv[2:] or ["gpt2-124m", "10000x1000"]:
        params = [torch.full((n,), 0.5, dtype=torch.float16) for n in shapes(name)]
        grads = [torch.full((n,), 1.0, dtype=torch.float16) for n in shapes(name)]
        sides = [Dsopt(sys.argv[1], params, grads), Framework(params, grads)]
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
