#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_model.py [--machine NAME | --page] [LIST...]: predicted times of the CUDA backend's steps, as a Markdown table beside the
goals. --page: both machines, as bench/results/gpu-model.md has them.

A step is a chain of kernels. A kernel takes the longer of two times: its bytes at the bandwidth that a copy on the device
reaches, less where too little is in flight to hide the latency of memory; and the leaves of one block (of one warp in pass 1), round
by round, each with the latency of its loads and, at a new tensor, of finding that. Then come what its last block does alone
(sums of leaves, in 32 lanes by 8 warps) and the gap to the next kernel, which is shorter where its blocks come early.
`./dev gpu` prints measured times beside these, so what the model does not know shows.
"""
import sys

from lists import shapes

LISTS = ["gpt2-124m", "bert-large", "resnet50", "vit-b-16", "10000x1000", "1x67108864"]
LEAF = 4096
WARPS, LANES, THREADS = 8, 32, 256
STREAMS = 0.95  # of a copy's bandwidth, where a kernel reads and writes several arrays at once: what such kernels reach elsewhere

# Bytes per second of a copy, read and written; multiprocessors; Hz; seconds of a load from memory with the queue half full.
MACHINES = {"h200": (4.3e12, 132, 1.98e9, 0.65e-6), "h100": (3.0e12, 132, 1.98e9, 0.65e-6)}
# Between two kernels of a stream: before the first one of a call, and before those whose blocks come early.
GAP = {"plain": (2.5e-6, 1.2e-6), "graph": (1.3e-6, 0.9e-6)}
ADD = 8  # cycles between two dependent additions in double
FOLD = 5 * (ADD + 25)  # five shuffles and additions, cycles
L2 = 300  # cycles of a load that the second-level cache has
AHEAD = 16  # such loads of a lane that are under way at once while leaves are added up
FEW = 8  # leaves of a tensor that one thread adds up
FIND = 1.2e-6  # job of a new tensor and its scalars: two dependent loads and a barrier
WORK = 0.15e-6  # arithmetic and stores of a thread's 4 elements, while nothing of it is loaded

# Kernel: bytes an element, resident blocks on a multiprocessor, bytes of loads that a thread has in flight, sums that its last block
# folds; elements of a leaf that are under way at once, and whether a warp has a leaf for itself. tests/cuda/resources.py holds the
# kernels to the resident blocks and the loads.
BLOCK, WARP = (1024, False), (1024, True)
KERNELS = {
    "update fp32": (28, 4, 64, 0, BLOCK), "update mixed": (28, 4, 64, 0, BLOCK), "update one moment": (20, 4, 48, 0, BLOCK),
    "update plain": (12, 4, 32, 0, BLOCK), "inspect 16-bit": (2, 4, 64, 1, WARP), "inspect fp32": (4, 4, 64, 1, (512, True)),
    "lamb moments": (24, 4, 64, 2, BLOCK), "lamb weights": (16, 4, 48, 0, BLOCK), "feed": (12.125, 4, 32, 0, BLOCK),
    "feed momentum": (16.125, 4, 48, 0, BLOCK), "serve": (1.25, 4, 48, 0, BLOCK), "decode": (4.125, 8, None, 0, BLOCK),
    "finish momentum": (16.125, 4, 48, 0, BLOCK), "finish bits": (8.25, 4, 32, 0, BLOCK),
    "moments of 1-bit LAMB": (24, 3, 64, 0, BLOCK), "trust": (0, 1, 0, 2, BLOCK), "scales": (0, 4, 0, 0, BLOCK), "small": (0, 4, 0, 0, BLOCK)}
SERVED = 8  # ranks: so much less a server has than a worker

# Step: bytes an element that it is measured against, its kernels, and the least share of a copy's speed on GPT-2.
STEPS = {
    "Fp32": (28, ["update fp32"], 0.93),
    "Mixed": (30, ["inspect 16-bit", "update mixed"], 0.92),
    "Lamb": (40, ["lamb moments", "lamb weights"], 0.92),
    "Lamb/clip": (44, ["inspect fp32", "lamb moments", "lamb weights"], 0.92),
    "Sgd": (12, ["update plain"], None),
    "Lion": (20, ["update one moment"], None),
    "Compressed": (17, ["feed", "scales", "serve", "scales", "decode"], 0.80),
    "OnebitAdam": (33, ["small", "feed momentum", "scales", "serve", "scales", "finish momentum", "small", "small"], None),
    "OnebitAdam/bits": (25, ["small", "feed momentum", "scales", "serve", "scales", "finish bits", "small", "small", "small"], None),
    "OnebitLamb": (57, ["small", "small", "feed momentum", "scales", "serve", "scales", "moments of 1-bit LAMB", "trust", "lamb weights",
                        "small", "small", "small"], None)}
GRAPH_GOAL = {"10000x1000": 90e-6}  # seconds of Fp32


def fold_seconds(leaves, machine):
    """The last block adds the leaves of each tensor: few by a thread, many in 32 lanes of a warp, tensors in turns by warps. Then
    a warp adds what the tensors have."""
    hertz = machine[2]
    few = [count for count in leaves if count < FEW]
    threads = -(-len(few) // THREADS) * (3 * L2 + max(few, default=0) * ADD)
    warps = [0] * WARPS
    for i, count in enumerate(leaves):
        if count >= FEW:
            lane = -(-count // LANES)
            warps[i % WARPS] += -(-lane // AHEAD) * L2 + lane * ADD + FOLD + 2 * L2
    lane = -(-len(leaves) // LANES)
    tensors = -(-lane // AHEAD) * L2 + lane * ADD + FOLD
    return (threads + max(warps) + tensors) / hertz


def scales_seconds(leaves, machine):
    """The same by a grid, a warp a part."""
    lane = -(-max(leaves, default=0) // LANES)
    rounds = -(-len(leaves) // (machine[1] * 4 * WARPS))
    return rounds * (-(-lane // AHEAD) * L2 + lane * ADD + FOLD + 4 * L2) / machine[2]


def kernel_seconds(name, sizes, machine):
    bandwidth, processors, _, latency = machine
    size, resident, in_flight, sums, (step, by_warp) = KERNELS[name]
    leaves = [-(-n // LEAF) for n in sizes]
    count, numel, tensors = sum(leaves), sum(sizes), sum(n > 0 for n in sizes)
    if count == 0:
        return 0
    folds = sums * fold_seconds(leaves, machine) + (scales_seconds(leaves, machine) if name == "scales" else 0)
    if size == 0:
        return folds
    if name == "serve":
        count, tensors = -(-count // SERVED), -(-tensors // SERVED)
    grid = processors * resident * (WARPS if by_warp else 1)
    rounds, rest = divmod(count, grid)
    bytes_of_leaf = size * numel / count

    def at_speed(bytes_moved, share_of_grid):
        # Stores need nobody to wait for them.
        reach = processors * resident * THREADS * in_flight * share_of_grid / latency if in_flight else bandwidth
        return bytes_moved / min(bandwidth * STREAMS, reach)
    streaming = at_speed(rounds * grid * bytes_of_leaf, 1) + (at_speed(rest * bytes_of_leaf, rest / grid) if rest else 0)
    # Each round a thread takes the pieces of a leaf one after the other, and finds the tensor where that is a new one.
    pieces = -(-min(LEAF, -(-numel // count)) // step)
    waits = 2 if name == "serve" else 1  # the bits of all ranks come behind the compensated values
    waiting = -(-count // grid) * pieces * (waits * latency + WORK) + min(-(-count // grid), tensors) * FIND
    return max(streaming, waiting) + folds


def step_seconds(step, sizes, machine="h200", mode="plain"):
    kernels = STEPS[step][1]
    first, later = GAP[mode]
    return first + later * (len(kernels) - 1) + sum(kernel_seconds(name, sizes, MACHINES[machine]) for name in kernels)


def copy_seconds(step, sizes, machine="h200"):
    return STEPS[step][0] * sum(sizes) / MACHINES[machine][0] + GAP["plain"][0]


def table(machine, names):
    lines = ["| list | step | predicted µs | by graph | copy µs | copy / step | goal |", "|" + " --- |" * 7]
    for name in names:
        sizes = shapes(name)
        for step, (_, _, goal) in STEPS.items():
            plain, graph = (step_seconds(step, sizes, machine, mode) for mode in ("plain", "graph"))
            copy = copy_seconds(step, sizes, machine)
            goal_text = "%.2f" % goal if goal and name == "gpt2-124m" else ""
            if step == "Fp32" and name in GRAPH_GOAL:
                goal_text = "by graph %.0f µs" % (GRAPH_GOAL[name] * 1e6)
            lines.append("| %s | %s | %.0f | %.0f | %.0f | %.2f | %s |" % (name, step, plain * 1e6, graph * 1e6, copy * 1e6,
                                                                         copy / plain, goal_text))
    return lines


PAGE = """# Predicted, not measured: steps on an %s

Made by `bench/gpu_model.py --page`; nothing on this page was timed. The model knows bytes, resident blocks, loads in flight, chains of
additions and the number of kernels, as `tests/cuda/resources.py` reads them from the machine code for sm_90, and takes the machines' copy
bandwidth, latencies and gaps between kernels as given (constants at its top). It knows no contention and no clock that falls. `./dev gpu`
writes a page of measured times with these predictions beside them, and the constants are set by the first such run.

"copy" is a copy on the device of as many bytes as the step has to move. Goals are for an H200.
"""


def main():
    words, machine = sys.argv[1:], "h200"
    if words[:1] == ["--page"]:
        lines = [PAGE % " and an ".join(name.upper() for name in MACHINES)]
        for machine in MACHINES:
            lines += ["## " + machine.upper(), ""] + table(machine, words[1:] or LISTS) + [""]
        print("\n".join(lines).rstrip())
        return
    if words[:1] == ["--machine"]:
        machine, words = words[1], words[2:]
    if machine not in MACHINES:
        sys.exit("machines: " + ", ".join(MACHINES))
    print("\n".join(table(machine, words or LISTS)))


if __name__ == "__main__":
    main()
