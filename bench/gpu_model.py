#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_model.py [--machine NAME | --page] [LIST...]: predicted times of the CUDA backend's steps and the goals, as a
Markdown table. --page: prints bench/results/gpu-model.md, with all machines.

Nothing here was measured. Every constant that is not counted is a range, the better end first, so every prediction is a
range too.

A step is a chain of kernels. A kernel takes the longest of three times, or somewhat more, as they overlap imperfectly:
- memory: its bytes, at a share of the speed of a copy;
- issue: its instructions, by the issue slots of the multiprocessors;
- latency: the leaves of a block, round by round. A round has loads that are in flight together (one latency for all of
  them), the arithmetic on them, sums that all warps wait for, and finding the tensor of a leaf if it is a new one.
Then the last block works alone (sums over leaves and tensors, step counts, the report). Last comes the gap to the next
kernel, which is shorter if that kernel may be launched early (PDL). A memset of an exchange is a launch of its own, and
a kernel after it is not launched early. `./dev gpu` prints measured times next to these, which shows the errors of
the model.
"""
import sys
from typing import NamedTuple

from lists import shapes

LISTS = ["gpt2-124m", "bert-large", "resnet50", "vit-b-16", "10000x1000", "1x67108864"]
LEAF = 4096  # elements
WARPS, LANES, THREADS = 8, 32, 256
LEAF_LANES = 128  # of the sum of a leaf
SERVER_RANKS = 8  # number of ranks: a server has this factor less work than a worker


class Kernel(NamedTuple):
    """Properties of a kernel's code."""
    bytes: float  # moved per element
    issued: float  # instructions per element in loops
    registers: int
    blocks: int  # resident on a multiprocessor
    in_flight: int  # elements per thread whose loads are in flight together
    leaves: int = 1  # of a block per round: one, or one per warp
    outside: float = 0  # instructions per element outside of those loops, counted by hand
    sums: int = 0  # sequential sums per leaf for which all warps of a block wait
    loads: tuple = (1, 1)  # dependent loads per element, at the better end and at the worse end
    last: tuple = ()  # work of the last block


# tests/cuda/loops.py counts instructions in loops from machine code for sm_90. tests/cuda/resources.py fails if these
# numbers or the registers differ from the code. Outside of loops: a vote and the packing of its bits.
SIGNS = 18
KERNELS = {
    "update fp32": Kernel(28, 64, 64, 4, 4, last=("finish",)),
    "update f16": Kernel(28, 54.5, 64, 4, 4, last=("finish",)),
    "update bf16": Kernel(28, 54.5, 64, 4, 4, last=("finish",)),
    "update one moment": Kernel(20, 32.5, 64, 4, 4, last=("finish",)),
    "update plain": Kernel(12, 27.8, 64, 4, 4, last=("finish",)),
    # AdamW with stored formats, fp32 gradients, and fp32 weights or bf16 weights with remainders.
    "update bf16, bf16 random": Kernel(20, 86.8, 64, 4, 8, last=("finish",)),
    "update e4m3, bf16 random": Kernel(18.03, 121.1, 64, 4, 8, last=("finish",)),
    "update q8": Kernel(16.06, 223.1, 64, 4, 8, last=("finish",)),
    "update remainder": Kernel(28, 76.1, 64, 4, 8, last=("finish",)),
    "update remainder, e4m3, bf16 random": Kernel(18.03, 134.6, 64, 4, 8, last=("finish",)),
    "inspect f16": Kernel(2, 3.5, 64, 4, 32, WARPS, last=("fold", "decide")),
    "inspect bf16": Kernel(2, 3.5, 64, 4, 32, WARPS, last=("fold", "decide")),
    "inspect fp32": Kernel(4, 2.8, 64, 4, 16, WARPS, last=("fold", "decide")),
    "lamb moments": Kernel(24, 59, 64, 4, 4, sums=1, last=("trust", "trust")),
    "lamb weights": Kernel(16, 44.2, 62, 4, 4, last=("finish",)),
    "feed": Kernel(12.125, 11.9, 62, 4, 4, outside=SIGNS, sums=1),
    "feed momentum": Kernel(16.125, 48.6, 56, 4, 4, outside=SIGNS, sums=1),
    # All ranks' bits, then the residual.
    "reduce messages": Kernel(10, 76.4, 60, 4, 4, outside=SIGNS, sums=1, loads=(2, 2)),
    "decode": Kernel(4.125, 13.5, 32, 8, 4, loads=(1, 2)),
    "apply mean, momentum": Kernel(16.125, 74.2, 57, 4, 4, loads=(1, 2)),
    "apply mean, bits": Kernel(8.25, 72.5, 57, 4, 4, loads=(1, 2)),
    "moments of 1-bit LAMB": Kernel(24, 121, 66, 3, 4, sums=1, loads=(1, 2)),
    "trust": Kernel(0, 0, 60, 1, 0, last=("trust", "trust")),
    "message scales": Kernel(0, 0, 48, 5, 0, last=("scales",)),
    "result scales": Kernel(0, 0, 48, 5, 0, last=("scales",)),
    "end of step": Kernel(0, 0, 64, 4, 0, last=("finish",)),
    "one thread": Kernel(0, 0, 64, 1, 0)}

# Per step: bytes per element of the copy that is the reference, the kernels, and the goal for the share of a copy's
# speed on GPT-2.
EXCHANGE = ["message scales", "memset", "reduce messages", "result scales"]
STEPS = {
    "Fp32": (28, ["update fp32"], 0.93),
    "Mixed/f16": (30, ["inspect f16", "update f16"], 0.92),
    "Mixed/bf16": (30, ["inspect bf16", "update bf16"], 0.92),
    "Lamb": (40, ["lamb moments", "lamb weights"], 0.92),
    "Lamb/clip": (44, ["inspect fp32", "lamb moments", "lamb weights"], 0.92),
    "Bf16/random": (20, ["update bf16, bf16 random"], 0.92),
    "E4m3/random": (18.03, ["update e4m3, bf16 random"], 0.92),
    "Q8": (16.06, ["update q8"], 0.85),
    "Remainder": (28, ["update remainder"], 0.92),
    "Remainder/e4m3/random": (18.03, ["update remainder, e4m3, bf16 random"], 0.92),
    "Sgd": (12, ["update plain"], None),
    "Lion": (20, ["update one moment"], None),
    "Compressed": (17, ["memset", "feed", *EXCHANGE, "decode"], 0.85),
    "OnebitAdam": (33, ["one thread", "memset", "feed momentum", *EXCHANGE, "apply mean, momentum", "one thread",
                        "end of step"], None),
    "OnebitAdam/bits": (25, ["one thread", "memset", "feed momentum", *EXCHANGE, "apply mean, bits", "one thread",
                             "one thread", "end of step"], None),
    "OnebitLamb": (57, ["one thread", "one thread", "memset", "feed momentum", *EXCHANGE, "moments of 1-bit LAMB",
                        "trust", "lamb weights", "one thread", "one thread", "end of step"], None)}
GRAPH_GOAL = {"10000x1000": 75e-6}  # seconds of Fp32

# The constants below are taken from results of similar kernels and from the vendor's documents: better end, worse end.
BEST, WORST = 0, 1
# Share of a copy's bandwidth, for a kernel that reads and writes several arrays. If nothing else limits a step, this is
# the result.
STREAMS = (0.96, 0.88)
SLOTS = (0.9, 0.7)  # share of usable issue slots; a multiprocessor has 4 per clock
OVERLAP = (None, 4)  # of the three times: their maximum, or their norm with this exponent
GAPS = {"plain": ((2.0e-6, 3.5e-6), (0.8e-6, 1.5e-6)),  # before a kernel, and before one that may be launched early
        "graph": ((1.0e-6, 1.6e-6), (0.7e-6, 1.2e-6))}
DEPENDENT = (2.5, 3.5)  # cycles between two instructions of a thread: many depend on the one before
BARRIER = (0.1e-6, 0.2e-6)
HANDSHAKE = (0.7e-6, 1.5e-6)  # fence, ticket and fence of a grid's last block
DECIDE = REPORT = (0.5e-6, 1.2e-6)  # by one thread
L2 = (250, 350)  # cycles of a load that hits the L2 cache
CHAIN = (8, 12)  # cycles between two dependent additions in fp64
AHEAD = 16  # loads per lane that are in flight at once during sums over leaves
FEW = 8  # one thread adds up tensors with fewer leaves
COUNTED = 4 * THREADS  # tensors whose steps the last block counts, and whose leaf counts it loads, per round
JOB = 160  # bytes of a tensor's job


class Machine(NamedTuple):
    bandwidth: float  # of a copy, bytes per second, reads plus writes
    processors: int
    hertz: float
    latency: tuple  # seconds of a load from memory
    cache: float  # bytes of the L2 cache


MACHINES = {"h200": Machine(4.3e12, 132, 1.98e9, (0.6e-6, 0.7e-6), 50e6),
            "h100": Machine(3.0e12, 132, 1.98e9, (0.6e-6, 0.7e-6), 50e6)}


class List(NamedTuple):
    sizes: list
    numel: int
    tensors: int
    leaves: list  # of each tensor
    cold: bool  # a step moves more bytes than the L2 cache holds, so the next step misses the jobs


def list_of(sizes, size, machine):
    leaves = [-(-n // LEAF) for n in sizes]
    cold = size * sum(sizes) + JOB * len(sizes) > machine.cache
    return List(sizes, sum(sizes), sum(n > 0 for n in sizes), leaves, cold)


def load_seconds(list_, machine, end):
    """Returns the seconds of a load from the table of jobs."""
    return machine.latency[end] if list_.cold else L2[end] / machine.hertz


def lane_cycles(count, end):
    """Returns the cycles in which a warp adds up `count` values."""
    lane = -(-count // LANES)
    return -(-lane // AHEAD) * L2[end] + lane * CHAIN[end] + 5 * (CHAIN[end] + 25)  # five shuffles and additions


def fold_seconds(list_, machine, end, least):
    """Returns the seconds in which the last block adds up the leaves of each tensor with at least `least` leaves.

    A thread adds up few leaves and a warp many; tensors are assigned to warps round-robin. Then a warp adds up the sums
    of tensors."""
    few = [count for count in list_.leaves if least <= count < FEW]
    threads = -(-len(few) // THREADS) * (2 * L2[end] + max(few, default=0) * CHAIN[end])
    warps = [0] * WARPS
    for i, count in enumerate(count for count in list_.leaves if count >= FEW):
        warps[i % WARPS] += lane_cycles(count, end) + 2 * L2[end]
    rounds = -(-len(list_.leaves) // COUNTED) * L2[end]  # loads each tensor's number of leaves from a separate table
    return (threads + max(warps) + lane_cycles(len(list_.leaves), end) + rounds) / machine.hertz


def scales_seconds(list_, machine, end):
    """Returns the seconds in which a grid adds up the leaves of each tensor, with a warp per scale group."""
    rounds = -(-len(list_.leaves) // (machine.processors * 4 * WARPS))
    return rounds * (lane_cycles(max(list_.leaves, default=0), end) + 4 * L2[end]) / machine.hertz


def last_seconds(work, list_, machine, end):
    """Returns the seconds of the last block's work, or of a kernel that does nothing else."""
    if work == "fold":  # pass 1 has folded tensors of one leaf already
        return fold_seconds(list_, machine, end, 2)
    if work == "trust":
        return fold_seconds(list_, machine, end, 1) + load_seconds(list_, machine, end)
    if work == "scales":
        return scales_seconds(list_, machine, end)
    if work == "decide":
        return DECIDE[end]
    # for more tensors, another kernel counts
    counts = 2 * load_seconds(list_, machine, end) if list_.tensors <= COUNTED else 0
    return counts + REPORT[end]  # "finish"


def pieces_of(numel, piece):
    """Returns the number of pieces of a tensor whose loads are in flight together. None spans two leaves."""
    return numel // LEAF * -(-LEAF // piece) + -(-(numel % LEAF) // piece)


def limits(name, list_, machine, end):
    """Returns the seconds of a kernel's bytes, of its instructions and of a block's rounds."""
    kernel, share = KERNELS[name], SERVER_RANKS if name == "reduce messages" else 1
    if kernel.bytes == 0 or list_.numel == 0:
        return 0, 0, 0
    processors, threads = machine.processors, LANES if kernel.leaves == WARPS else THREADS
    numel = list_.numel / share
    moved = numel * kernel.bytes / (machine.bandwidth * STREAMS[end])
    issued = numel * (kernel.issued + kernel.outside) / (LANES * 4 * processors * machine.hertz * SLOTS[end])
    piece = kernel.in_flight * threads
    cycles = kernel.in_flight * (kernel.issued + kernel.outside) * DEPENDENT[end]
    cycles += kernel.sums * piece / LEAF_LANES * CHAIN[end]
    round_seconds = kernel.loads[end] * machine.latency[end] + cycles / machine.hertz + kernel.sums * BARRIER[end]
    # Load of the tensor's step count. Its job is copied while the block works on the tensor before it.
    find = load_seconds(list_, machine, end) + 3 * BARRIER[end]
    grid = processors * kernel.blocks * kernel.leaves * share
    rounds = max(pieces_of(min(LEAF, max(list_.sizes)), piece),
                 -(-sum(pieces_of(n, piece) for n in list_.sizes) // grid))
    return moved, issued, rounds * round_seconds + min(-(-sum(list_.leaves) // grid), list_.tensors) * find


def kernel_seconds(name, list_, machine, end):
    if sum(list_.leaves) == 0:
        return 0
    last = sum(last_seconds(work, list_, machine, end) for work in KERNELS[name].last)
    if KERNELS[name].bytes == 0:
        return last
    times, power = limits(name, list_, machine, end), OVERLAP[end]
    together = max(times) if power is None else sum(time ** power for time in times) ** (1 / power)
    return together + last + (HANDSHAKE[end] if last else 0)


def step_seconds(step, sizes, machine="h200", mode="plain", end=BEST):
    size, kernels, _ = STEPS[step]
    machine, gaps = MACHINES[machine], GAPS[mode]
    list_, seconds, early = list_of(sizes, size, machine), 0, False
    for name in kernels:
        if name == "memset":  # of the messages, one bit per element
            seconds += gaps[0][end] + list_.numel / 8 / (machine.bandwidth / 2)
        else:
            seconds += gaps[early][end] + kernel_seconds(name, list_, machine, end)
        early = name != "memset"
    if list_.tensors > COUNTED:  # a kernel for the counts
        seconds += gaps[early][end] + 2 * load_seconds(list_, machine, end)
    return seconds


def copy_seconds(step, sizes, machine="h200", mode="plain"):
    """Returns the seconds of a copy of as many bytes, launched in the same way."""
    return STEPS[step][0] * sum(sizes) / MACHINES[machine].bandwidth + GAPS[mode][0][BEST]


def share_of_copy(step, sizes, machine="h200", mode="plain"):
    """Returns copy / step, the lower end first."""
    copy = copy_seconds(step, sizes, machine, mode)
    return tuple(copy / step_seconds(step, sizes, machine, mode, end) for end in (WORST, BEST))


def span(values, form):
    """Returns a range as text."""
    low, high = (form % value for value in values)
    return low if low == high else low + " to " + high


def table(machine, names):
    lines = ["| list | step | predicted µs | predicted µs by graph | copy µs | predicted copy / step | goal |",
             "|" + " --- |" * 7]
    for name in names:
        sizes = shapes(name)
        for step, (_, _, goal) in STEPS.items():
            plain, graph = ([step_seconds(step, sizes, machine, mode, end) * 1e6 for end in (BEST, WORST)]
                            for mode in ("plain", "graph"))
            goal_text = "%.2f" % goal if goal and name == "gpt2-124m" else ""
            if step == "Fp32" and name in GRAPH_GOAL:
                goal_text = "by graph %.0f µs" % (GRAPH_GOAL[name] * 1e6)
            lines.append("| %s | %s | %s | %s | %.0f | %s | %s |" % (
                name, step, span(plain, "%.0f"), span(graph, "%.0f"), copy_seconds(step, sizes, machine) * 1e6,
                span(share_of_copy(step, sizes, machine), "%.2f"), goal_text))
    return lines


def kernel_table(machine, name):
    """Returns a table of what limits each kernel."""
    lines = ["| kernel | bytes, predicted µs | instructions, predicted µs | rounds of a block, predicted µs |",
             "|" + " --- |" * 4]
    for kernel, properties in KERNELS.items():
        if properties.bytes:
            list_ = list_of(shapes(name), properties.bytes, MACHINES[machine])
            ends = [limits(kernel, list_, MACHINES[machine], end) for end in (BEST, WORST)]
            spans = [span([time * 1e6 for time in times], "%.0f") for times in zip(*ends)]
            lines.append("| %s | %s |" % (kernel, " | ".join(spans)))
    return lines


PAGE = """# Predicted, not measured: steps on an %s

Generated by `bench/gpu_model.py --page`; nothing on this page was timed. The model includes bytes, instructions,
resident blocks, loads in flight, dependent additions, the serial work of a last block, and the number of kernels and
memsets.
`tests/cuda/resources.py` compares its kernel figures with the machine code for sm_90. Everything else is assumed, as
ranges: the machines' copy bandwidth and latencies, the fractions of bandwidth and of issue slots that kernels reach,
and the gaps between kernels (constants at the top of the script). The model ignores contention and clock throttling.
`./dev gpu` writes a page of measured times next to these predictions.

"copy" is a device-to-device copy of as many bytes as the step must transfer. Ranges are from the best to the worst case
of all constants at once; copy / step has the worst case first. Goals are for an H200.
"""


def main():
    words, machine = sys.argv[1:], "h200"
    if words[:1] == ["--page"]:
        lines = [PAGE % " and an ".join(name.upper() for name in MACHINES)]
        for machine in MACHINES:
            names = words[1:] or LISTS
            lines += ["## " + machine.upper(), "", *table(machine, names), "",
                      "What limits the kernels on %s:" % names[0], "", *kernel_table(machine, names[0]), ""]
        print("\n".join(lines).rstrip())
        return
    if words[:1] == ["--machine"]:
        machine, words = words[1], words[2:]
    if machine not in MACHINES:
        sys.exit("machines: " + ", ".join(MACHINES))
    print("\n".join(table(machine, words or LISTS)))


if __name__ == "__main__":
    main()
