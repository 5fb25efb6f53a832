#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""peers.py LIBDSOPT [LIST...]: compares one fp32 AdamW step on the CPU with other libraries' steps.

All steps are on the same lists, alternating in one process. Peers are the libraries that can be imported: PyTorch
(torch.optim.AdamW fused, foreach and as a loop over tensors; Debian: python3-torch), DeepSpeed's CPU Adam (pip install
deepspeed; built by its own builder on first use), optax inside jax.jit with donated buffers (pip install "jax[cpu]"
optax). Nothing is installed here. Prints a Markdown table: times of dsopt, and for each peer the median of peer / dsopt
over the rounds, with its quartiles: above 1, dsopt is faster.
Environment: ROUNDS (default 15), OMP_NUM_THREADS.
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
try:
    import torch
except ImportError:
    sys.exit("peers.py needs PyTorch for its tensors: apt install python3-torch, or pip install torch")
import dsopt  # noqa: E402
from lists import shapes  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "15"))
LISTS = ["1x67108864", "gpt2-124m", "bert-large", "resnet50", "10000x1000", "1x1048576", "1x65536", "148x4"]
LR, DECAY = 1e-3, 0.01
torch.set_num_threads(THREADS)


def dsopt_step(params):
    optimizer = dsopt.Optimizer([param.detach() for param in params], dsopt.AdamW(lr=LR, weight_decay=DECAY))
    optimizer.bind(grads=[p.grad for p in params])
    return optimizer.step


def torch_step(params, **options):
    return torch.optim.AdamW(params, lr=LR, weight_decay=DECAY, **options).step


def deepspeed_step(params):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return DeepSpeedCPUAdam(params, lr=LR, weight_decay=DECAY, adamw_mode=True).step


def optax_step(params):
    import jax
    import numpy
    import optax
    transformation = optax.adamw(LR, weight_decay=DECAY)
    grads = [jax.numpy.asarray(numpy.full(p.numel(), 1e-3, numpy.float32)) for p in params]
    state = [[jax.numpy.asarray(numpy.full(p.numel(), 0.5, numpy.float32)) for p in params], None]
    state[1] = transformation.init(state[0])

    def update(weights, moments, gradients):
        delta, moments = transformation.update(gradients, moments, weights)
        return optax.apply_updates(weights, delta), moments

    run = jax.jit(update, donate_argnums=(0, 1))

    def step():
        state[0], state[1] = jax.block_until_ready(run(state[0], state[1], grads))

    return step


PEERS = [("PyTorch fused", lambda params: torch_step(params, fused=True)),
         ("PyTorch foreach", lambda params: torch_step(params, foreach=True)),
         ("PyTorch loop", lambda params: torch_step(params, foreach=False)), ("DeepSpeed", deepspeed_step),
         ("optax", optax_step)]


def milliseconds(step, repeat):
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat * 1e3


def open_peers(params):
    """Returns the peers that can be used. Reports the reason, once per peer, if a peer cannot."""
    steps = []
    for name, make in PEERS:
        try:
            step = make(params)
            step()
            steps.append((name, step))
        except Exception as error:  # noqa: BLE001 any exception of a peer that cannot be used
            if name not in open_peers.missing:
                print("peers.py: no %s: %s" %
                      (name, str(error).splitlines()[0] if str(error) else type(error).__name__), file=sys.stderr)
            open_peers.missing.add(name)
    return steps


open_peers.missing = set()


def main():
    print("| list | threads | dsopt ms | %s |\n|%s" % (" | ".join(name + " / dsopt" for name, _ in PEERS),
                                                       " --- |" * (3 + len(PEERS))))
    for name in sys.argv[2:] or LISTS:
        params = [torch.full((n,), 0.5, requires_grad=True) for n in shapes(name)]
        for param in params:
            param.grad = torch.full_like(param, 1e-3)
        step_dsopt = dsopt_step(params)
        step_dsopt()
        peers = open_peers(params)
        repeat = max(1, int(5 / max(milliseconds(step_dsopt, 1), 1e-3)))
        times, ratios = [], {peer: [] for peer, _ in peers}
        for round_ in range(ROUNDS):
            for peer, step in peers if round_ % 2 else peers[::-1]:
                step()  # reloads the caches after the other step
                peer_ms = milliseconds(step, repeat)
                step_dsopt()
                dsopt_ms = milliseconds(step_dsopt, repeat)
                step()
                peer_ms = (peer_ms + milliseconds(step, repeat)) / 2
                times.append(dsopt_ms)
                ratios[peer].append(peer_ms / dsopt_ms)
        cells = []
        for peer, _ in PEERS:
            if ratios.get(peer):
                low, middle, high = statistics.quantiles(ratios[peer], n=4) if ROUNDS > 1 else ratios[peer] * 3
                cells.append("%.2f (%.2f to %.2f)" % (middle, low, high))
            else:
                cells.append("-")
        print("| %s | %d | %.4g | %s |" % (name, THREADS, statistics.median(times), " | ".join(cells)), flush=True)


if __name__ == "__main__":
    main()
