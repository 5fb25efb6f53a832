#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch_muon.py LIBDSOPT [LIST...]: compares steps of Muon on the CPU with torch.optim.Muon.

The steps alternate in one process, on the same matrices in fp32: those of the layers of a list of bench/shapes. Peers
are torch.optim.Muon (PyTorch 2.9 or later), whose iterations are in bfloat16, and the same step with the iterations in
fp32 by torch.mm. Prints a Markdown table: medians of wall time and of CPU time over the rounds, and the ratio to each
peer, formed within a round. A second table compares the passes over memory, without the iterations, with a step of SGD
with momentum: the time of a step is linear in the number of iterations, and that of none is extrapolated, for matrices
of 16 rows, whose products are short.
Environment: ROUNDS (default 5), MATRICES (number of matrices from the beginning of a list; default all),
OMP_NUM_THREADS.
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

import dsopt  # noqa: E402
from lists import matrices  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "5"))
MATRICES = int(os.environ.get("MATRICES", "0")) or None
LISTS = ["gpt2-124m"]
LR, DECAY, MOMENTUM = 1e-3, 0.1, 0.95
JORDAN = (3.4445, -4.7750, 2.0315)
torch.set_num_threads(THREADS)


def dsopt_step(params, rule):
    optimizer = dsopt.Optimizer([param.detach() for param in params], rule)
    optimizer.bind(grads=[param.grad for param in params])
    return optimizer.step


def dsopt_muon(ns_dtype):
    return lambda params: dsopt_step(
        params, dsopt.Muon(lr=LR, momentum=MOMENTUM, weight_decay=DECAY, ns_dtype=ns_dtype))


def torch_muon(params):
    return torch.optim.Muon(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY).step


def torch_fp32(params):
    """The step of torch.optim.Muon with iterations in fp32."""
    momenta = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step():
        a, b, c = JORDAN
        for param, momentum in zip(params, momenta):
            momentum.lerp_(param.grad, 1 - MOMENTUM)
            update = param.grad.lerp(momentum, MOMENTUM)
            tall = update.size(0) > update.size(1)
            x = update.T if tall else update
            x = x / x.norm().clamp(min=1e-7)
            for _ in range(5):
                gram = torch.mm(x, x.T)
                factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
                x = torch.addmm(x, factor, x, beta=a)
            param.mul_(1 - LR * DECAY)
            param.add_(x.T if tall else x, alpha=-LR * max(1, param.size(0) / param.size(1)) ** 0.5)

    return step


STEPS = {"dsopt, BF16": dsopt_muon("bfloat16"), "dsopt, F32": dsopt_muon("float32"), "torch.optim.Muon": torch_muon,
         "torch, fp32": torch_fp32}
PEERS = {"dsopt, BF16": "torch.optim.Muon", "dsopt, F32": "torch, fp32"}


def params_of(shapes):
    params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape) * 0.01
    return params


def timed(step):
    """Returns wall time and CPU time of a step."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begin, time.process_time() - begin_cpu


def measured(steps):
    """Returns the times of each step by round."""
    times = {name: [] for name in steps}
    for step in steps.values():
        step()
    for index in range(ROUNDS):
        for name in list(steps)[:: 1 if index % 2 else -1]:
            times[name].append(timed(steps[name]))
    return times


def ratio(times, name, peer, kind):
    quotients = [mine[kind] / theirs[kind] for mine, theirs in zip(times[name], times[peer])]
    low, middle, high = statistics.quantiles(quotients, n=4) if len(quotients) > 1 else quotients * 3
    return "%.2f (%.2f to %.2f)" % (middle, low, high)


def compare(name):
    shapes = matrices(name)[:MATRICES]
    steps = {}
    for peer, make in STEPS.items():
        try:
            steps[peer] = make(params_of(shapes))
        except AttributeError as problem:  # an older PyTorch
            print("torch_muon.py: no %s: %s" % (peer, problem), file=sys.stderr)
    times = measured(steps)
    print("| %s: %d matrices | ms | CPU ms | time / time of the peer | CPU time / CPU time of the peer |\n|%s"
          % (name, len(shapes), " --- |" * 5))
    for each, some in times.items():
        peer = PEERS.get(each)
        cells = [ratio(times, each, peer, kind) for kind in range(2)] if peer in times else ["", ""]
        middle = [statistics.median(column) * 1e3 for column in zip(*some)]
        print("| %s | %.0f | %.0f | %s | %s |" % (each, *middle, *cells), flush=True)


def passes():
    """Prints the time of the passes over memory next to that of SGD with momentum."""
    shapes = [(16, 1 << 20)]
    steps = {"sgd": dsopt_step(params_of(shapes), dsopt.Sgd(lr=LR, momentum=MOMENTUM, weight_decay=DECAY))}
    for count in (1, 2, 3):
        steps[count] = dsopt_step(params_of(shapes), dsopt.Muon(lr=LR, ns_steps=count, ns_dtype="float32"))
    times = measured(steps)
    found = []
    for kind in range(2):
        rounds = zip(*([time[kind] for time in times[name]] for name in ("sgd", 1, 2, 3)))
        found.append(statistics.median((one - (three - one) / 2) / sgd for sgd, one, _, three in rounds))
    print("\n| passes of Muon / step of SGD with momentum | time | CPU time |\n| --- | --- | --- |")
    print("| 28 bytes / 20 bytes = 1.4 | %.2f | %.2f |" % tuple(found))


def main():
    print("torch %s, %d threads\n" % (torch.__version__, THREADS))
    for name in sys.argv[2:] or LISTS:
        compare(name)
    passes()


if __name__ == "__main__":
    main()
