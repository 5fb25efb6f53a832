#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_model.py [--machine NAME] [LIST...]: predicted times of the CUDA backend's steps, as a Markdown table beside the goals.

A step is a chain of kernels. A kernel takes the longer of two times: its bytes at the bandwidth that a copy on the device
reaches, less where too little is in flight to hide the latency of memory; and the leaves of one block, each with the latency
of finding its tensor. Then come what its last block does alone (sums of leaves, in 32 lanes by 8 warps) and the gap to the next
kernel. `./dev gpu` prints measured times beside these, so what the model does not know shows.
"""
import sys

from lists import shapes

LISTS = ["gpt2-124m", "bert-large", "resnet50", "vit-b-16", "10000x1000", "1x67108864"]
LEAF = 4096
WARPS, LANES, THREADS = 8, 32, 256
STREAMS = 0.95  # of a copy's bandwidth, where a kernel reads and writes several arrays at once: what such kernels reach elsewhere

# Bytes per second of a copy, read and written; multiprocessors; Hz; seconds of a load from memory with the queue half full.
MACHINES = {"h200": (4.3e12, 132, 1.98e9, 0.65e-6), "h100": (3.0e12, 132, 1.98e9, 0.65e-6)}
GAP = {"plain": 2.5e-6, "graph": 1.3e-6}  # between two kernels of a stream, the first launch included
ADD = 8  # cycles between two dependent additions in double
FOLD = 5 * (ADD + 25)  # five shuffles and additions, cycles
FIND = 1.2e-6  # tensor of a leaf, its job, its scalars: two dependent loads and a barrier, where nothing is prefetched

# Kernel: bytes an element, resident blocks on a multiprocessor, bytes that a thread has in flight, sums that its last block folds.
KERNELS = {
    "update fp32": (28, 4, 64, 0), "update mixed": (28, 4, 64, 0), "update one moment": (20, 4, 48, 0), "update plain": (12, 4, 32, 0),
    "inspect 16-bit": (2, 3, 64, 1), "inspect fp32": (4, 3, 64, 1), "lamb moments": (24, 4, 64, 2), "lamb weights": (16, 4, 48, 0),
    "feed": (12.125, 4, 48, 1), "feed momentum": (16.125, 4, 48, 1), "serve": (1.25, 4, 64, 1), "decode": (4.125, 4, 16, 0),
    "finish momentum": (16.125, 4, 48, 0), "finish bits": (8.25, 4, 32, 0), "moments of 1-bit LAMB": (24, 3, 64, 2), "small": (0, 4, 64, 0)}

# Step: bytes an element that it is measured against, its kernels, and the least share of a copy's speed on GPT-2.
STEPS = {
    "Fp32": (28, ["update fp32"], 0.93),
    "Mixed": (30, ["inspect 16-bit", "update mixed"], 0.92),
    "Lamb": (40, ["lamb moments", "lamb weights"], 0.92),
    "Lamb/clip": (44, ["inspect fp32", "lamb moments", "lamb weights"], 0.92),
    "Sgd": (12, ["update plain"], None),
    "Lion": (20, ["update one moment"], None),
    "Compressed": (17, ["feed", "small", "serve", "small", "decode"], 0.80),
    "OnebitAdam": (33, ["small", "feed momentum", "small", "serve", "small", "finish momentum", "small"], None),
    "OnebitAdam/bits": (25, ["small", "feed momentum", "small", "serve", "small", "finish bits", "small"], None),
    "OnebitLamb": (57, ["small", "feed momentum", "small", "serve", "small", "moments of 1-bit LAMB", "lamb weights", "small"], None)}
GRAPH_GOAL = {"10000x1000": 90e-6}  # seconds of Fp32


def fold_seconds(leaves, machine):
    """The last block adds the leaves of each tensor in 32 lanes, tensors in turns by warps."""
    warps = [0] * WARPS
    for i, count in enumerate(leaves):
        warps[i % WARPS] += -(-count // LANES) * ADD + FOLD
    return max(warps) / machine[2]


def kernel_seconds(name, sizes, machine, mode):
    bandwidth, processors, _, latency = machine
    size, resident, in_flight, sums = KERNELS[name]
    leaves = [-(-n // LEAF) for n in sizes]
    count, numel = sum(leaves), sum(sizes)
    seconds = GAP[mode]
    if size == 0 or count == 0:
        return seconds
    grid = processors * resident
    rounds, rest = divmod(count, grid)

    def at_speed(bytes_moved, share_of_grid):
        reach = processors * resident * THREADS * in_flight * share_of_grid / latency
        return bytes_moved / min(bandwidth * STREAMS, reach)
    bytes_of_leaf = size * numel / count
    streaming = at_speed(rounds * grid * bytes_of_leaf, 1) + (at_speed(rest * bytes_of_leaf, rest / grid) if rest else 0)
    waiting = -(-count // grid) * (FIND + latency)
    return seconds + max(streaming, waiting) + sums * fold_seconds(leaves, machine)


def step_seconds(step, sizes, machine="h200", mode="plain"):
    return sum(kernel_seconds(name, sizes, MACHINES[machine], mode) for name in STEPS[step][1])


def copy_seconds(step, sizes, machine="h200"):
    return STEPS[step][0] * sum(sizes) / MACHINES[machine][0] + GAP["plain"]


def main():
    words, machine = sys.argv[1:], "h200"
    if words[:1] == ["--machine"]:
        machine, words = words[1], words[2:]
    if machine not in MACHINES:
        sys.exit("machines: " + ", ".join(MACHINES))
    print("| list | step | predicted µs | by graph | copy µs | copy / step | goal |\n|" + " --- |" * 7)
    for name in words or LISTS:
        sizes = shapes(name)
        for step, (_, _, goal) in STEPS.items():
            plain, graph = (step_seconds(step, sizes, machine, mode) for mode in ("plain", "graph"))
            copy = copy_seconds(step, sizes, machine)
            goal_text = "%.2f" % goal if goal and name == "gpt2-124m" else ""
            if step == "Fp32" and name in GRAPH_GOAL:
                goal_text = "by graph %.0f µs" % (GRAPH_GOAL[name] * 1e6)
            print("| %s | %s | %.0f | %.0f | %.0f | %.2f | %s |" % (name, step, plain * 1e6, graph * 1e6, copy * 1e6, copy / plain,
                                                             goal_text))


if __name__ == "__main__":
    main()
