#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""alpha_beta.py TIMES.json... [--node-gbyte 100] [LIST...]: step times of 8 to 4,096 ranks as Markdown tables.
alpha_beta.py --wire [--node-gbyte 450] [LIST...]: seconds that the messages of a step are on the wire, nothing else.

TIMES.json is the output of `local_times gpt2-124m` on a machine, the measured part: nanoseconds per element of a rank's
local work. Of several runs, the minimum is used. The rest is a model. A message takes alpha seconds plus beta
seconds per byte, and a rank can start another message after a gap. Ranks that share a link add up their bytes on it.
Messages overlap neither with the backward pass nor with each other.

  all-reduce   the best of a ring, a double tree, and both after a reduce-scatter inside the node; its additions are
               free
  1-bit flat   all-to-all (one latency, a gap for every further message), all-gather (log steps or a ring)
  two levels   all-to-all of 16-bit gradients in the node, the two steps of 1-bit flat between nodes for one slice per
               rank, all-gather of bits in the node
  SHARD        AdamW with DSOPT_OPTIMIZER_SHARD and AVERAGES, 16-bit weights and gradients, fp32 masters: all-to-all of
               gradients, all-gather of weights
  SHARD_NODE   the same with DSOPT_OPTIMIZER_SHARD_NODE: means are also gathered between nodes, weights in the node only

An all-reduce of norms, of results of leaves and of one flag is left out: it has at most 0.02 bytes per element.
"""
import bisect
import json
import math
import os
import sys

PER_NODE = 8
RANKS = [8 << k for k in range(10)]
# Gbit/s of the link, alpha and gap in seconds: TCP for the slow links, RDMA for the others.
LINKS = [(10, 30e-6, 5e-6), (25, 30e-6, 5e-6), (100, 4e-6, 0.5e-6), (400, 4e-6, 0.5e-6)]
NODE_ALPHA = 2e-6


# ------------------------------------------------------------------------------------------------------------ bytes
def shapes(name):
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes", name + ".csv")
    with open(path) as file:
        return [int(line.rsplit(",", 1)[1]) for line in file.read().splitlines()[1:]]


BLOCK, ALIGNMENT, LINE = 4096, 64, 64  # elements, elements, bytes
HOST_STAGING, DEVICE_STAGING = 4 << 20, 64 << 20  # memory for a row of every rank


def up(value, multiple):
    return -(-value // multiple) * multiple


class Vector:
    """ListVector of src/exchange/vector.h: where each tensor begins, and the chunk of each of `ranks` ranks."""

    def __init__(self, numels, ranks):
        self.numels, self.begins, end = numels, [], 0
        for numel in numels:
            begin = up(end, ALIGNMENT)
            if numel > BLOCK - begin % BLOCK:
                begin = up(begin, BLOCK)
            self.begins.append(begin if numel else end)
            end = self.begins[-1] + numel
        self.blocks = -(-end // BLOCK)
        self.chunk_blocks = -(-self.blocks // ranks)
        self.chunk = self.chunk_blocks * BLOCK

    def pieces(self, begin, end):
        """Returns the tensors that have elements of [begin, end), each with the number of these elements."""
        i, found = max(bisect.bisect_right(self.begins, begin) - 1, 0), []
        while i < len(self.begins) and self.begins[i] < end:
            count = min(self.begins[i] + self.numels[i], end) - max(self.begins[i], begin)
            if count > 0:
                found.append((i, count))
            i += 1
        return found


class Layout:
    """Layout of src/exchange/layout.h for a list and a number of ranks: one chunk per rank, a scale per tensor and
    chunk."""

    def __init__(self, numels, ranks):
        vector = Vector(numels, ranks)
        self.chunk, self.scales = vector.chunk, 0
        for rank in range(ranks if self.chunk else 0):
            pieces = vector.pieces(rank * self.chunk, (rank + 1) * self.chunk)
            if pieces:
                self.scales = max(self.scales, pieces[-1][0] - pieces[0][0] + 1)
        self.message = up(4 * self.scales + self.chunk // 8, 16)


class Rows:
    """Rows of src/step/rows.h: the pieces of each rank's chunk in each stripe. `largest`: bytes of the largest element
    that is sent."""

    def __init__(self, numels, ranks, largest, staging=HOST_STAGING):
        self.vector, self.ranks = Vector(numels, ranks), ranks
        fitting = staging // (ranks * BLOCK * largest)
        self.stripe = min(max(fitting, 1), max(self.vector.chunk_blocks, 1))

    def bytes(self, sizes):
        """Returns the bytes of a row, added up over the stripes. `sizes`: bytes of an element per tensor, or 0."""
        total, chunk = 0, self.vector.chunk
        for first in range(0, self.vector.chunk_blocks, self.stripe):
            count = min(self.stripe, self.vector.chunk_blocks - first) * BLOCK
            total += max(sum(up(n * sizes[i], LINE)
                             for i, n in self.vector.pieces(row * chunk + first * BLOCK,
                                                            row * chunk + first * BLOCK + count))
                         for row in range(self.ranks))
        return total


def all_reduce_bytes(payload, ranks):
    """Returns the bytes that a rank sends."""
    return 2 * (ranks - 1) * payload // ranks


def flat_bytes(numels, ranks):
    return 2 * (ranks - 1) * Layout(numels, ranks).message


def two_level_bytes(numels, per_node, nodes):
    """Returns the bytes that a rank sends between nodes, and inside its node, in dsopt_compressed_allreduce."""
    layout = Layout(numels, per_node * nodes)
    out = layout.chunk * nodes * 4
    back = nodes * layout.message if nodes > 1 else out
    return 2 * (nodes - 1) * layout.message, (per_node - 1) * (out + back)


def sharded_bytes(numels, per_node, nodes, weights, gradients=None, in_node=False, completed=1,
                  staging=HOST_STAGING, staged=4, provider_sums=False):
    """Returns the bytes that a rank sends in a step of sharded state, per comm (`data`, `node`) and kind of collective.

    weights, gradients  bytes of an element per tensor; `gradients` None: the caller averages
    in_node             DSOPT_OPTIMIZER_SHARD_NODE; else _SHARD
    completed           all-reduces of the results of leaves: 1 if gradients are read, 2 more for LAMB or REPORT_NORMS
    staged              bytes of the largest element in rows: 4 with means, which are fp32, or with fp32 weights
    provider_sums       DSOPT_COMM_FLAG_PROVIDER_SUMS
    """
    ranks = per_node * nodes
    rows = Rows(numels, ranks, staged, staging)
    leaves = sum(-(-numel // BLOCK) for numel in numels)
    sent = {comm: {"all_to_all": 0, "all_gather": 0, "all_reduce": all_reduce_bytes(8, size)}
            for comm, size in (("data", nodes), ("node", per_node))}  # the reasons to skip a step
    for comm, size in (("data", nodes), ("node", per_node)):
        if comm == "node" or not in_node:
            sent[comm]["all_reduce"] += completed * all_reduce_bytes(8 * leaves, size)
    row = rows.bytes(weights)
    sent["node"]["all_gather"] += (per_node - 1) * nodes * row
    if not in_node:
        sent["data"]["all_gather"] += (nodes - 1) * row
    if gradients is not None:
        means = rows.bytes([4 if size else 0 for size in gradients])
        row, kind = (means, "reduce_scatter") if provider_sums else (rows.bytes(gradients), "all_to_all")
        sent["node"][kind] = (per_node - 1) * nodes * row
        sent["data"][kind] = (nodes - 1) * (means if per_node > 1 else row)
        if in_node:
            sent["data"]["all_gather"] += (nodes - 1) * means
    return sent


def onebit_bytes(numels, per_node, nodes, weights, gradients, in_node=False, staging=HOST_STAGING):
    """Returns the bytes that a rank sends in an exchange step of 1-bit Adam or 1-bit LAMB with a node comm, per comm and
    kind of collective, without all-reduces. `in_node`: DSOPT_OPTIMIZER_SHARD_NODE. Others as in sharded_bytes()."""
    ranks = per_node * nodes
    rows, message = Rows(numels, ranks, max([4] + weights), staging), Layout(numels, ranks).message
    means = rows.bytes([4] * len(numels))  # of one node, which has nothing to compress
    back = rows.bytes(weights) if in_node else message if nodes > 1 else means
    node = {"all_to_all": (per_node - 1) * nodes * rows.bytes(gradients), "all_gather": (per_node - 1) * nodes * back}
    between = (nodes - 1) * message
    return {"data": {"all_to_all": between, "all_gather": between}, "node": node}


def sent_halves(bytes_of, numels, per_node, nodes, *arguments):
    """Returns the bytes of messages with 16-bit weights and gradients that a rank sends between nodes, and inside its
    node."""
    halves = [2] * len(numels)
    sent = bytes_of(numels, per_node, nodes, halves, halves, *arguments)
    return tuple(sent[comm]["all_to_all"] + sent[comm]["all_gather"] for comm in ("data", "node"))


def rows_sent(numels, per_node, nodes, in_node):
    return sent_halves(sharded_bytes, numels, per_node, nodes, in_node, 0, DEVICE_STAGING)


def onebit_sent(numels, per_node, nodes, in_node):
    return sent_halves(onebit_bytes, numels, per_node, nodes, in_node, DEVICE_STAGING)


# ------------------------------------------------------------------------------------------------------------- times
class Net:
    def __init__(self, link, per_node, node_gbyte):
        gbit, self.alpha, self.gap = link
        self.beta, self.node_beta, self.per_node = 8 / (gbit * 1e9), 1 / (node_gbyte * 1e9), per_node

    def ring_or_tree(self, payload, ranks):
        ring = 2 * (ranks - 1) * self.alpha + all_reduce_bytes(payload, ranks) * self.beta
        return min(ring, 2 * math.ceil(math.log2(ranks)) * self.alpha + 2 * payload * self.beta)

    def in_node(self, payload):
        """Returns the seconds of a rank's exchange inside its node, in one direction."""
        return 0 if self.per_node == 1 else NODE_ALPHA + payload * self.node_beta

    def all_reduce(self, payload, ranks):
        nodes = ranks // self.per_node
        inside = 2 * self.in_node(payload * (self.per_node - 1) / self.per_node)
        if nodes == 1:
            return inside
        # A ring in the order of nodes crosses each link once. So do the slices of all ranks of a node together.
        return min(self.ring_or_tree(payload, ranks), inside + self.ring_or_tree(payload, nodes))

    def flat(self, numels, ranks):
        message, per_node = Layout(numels, ranks).message, self.per_node
        if ranks == per_node:
            return 2 * self.in_node((ranks - 1) * message)
        # from every rank of the node to every rank of other nodes
        link = per_node * (ranks - per_node) * message * self.beta
        log_steps = math.ceil(math.log2(ranks)) * self.alpha + link
        ring = (ranks - 1) * (self.alpha + message * self.beta)
        return self.alpha + (ranks - 1) * self.gap + link + min(log_steps, ring)

    def two_level(self, numels, ranks):
        nodes = ranks // self.per_node
        sent = onebit_bytes(numels, self.per_node, nodes, [2] * len(numels), [2] * len(numels), staging=DEVICE_STAGING)
        inside = sum(self.in_node(payload) for payload in sent["node"].values())
        if nodes == 1:
            return inside
        link = self.per_node * sum(sent["data"].values()) * self.beta  # all ranks of a node share it
        return inside + link + self.alpha + (nodes - 1) * self.gap + math.ceil(math.log2(nodes)) * self.alpha

    def sharded(self, numels, ranks, in_node):
        nodes = ranks // self.per_node
        data, node = rows_sent(numels, self.per_node, nodes, in_node)
        # all ranks of a node share the link; two collectives, or three with means that are gathered
        between = 0 if nodes == 1 else self.per_node * data * self.beta + 2 * (self.alpha + (nodes - 1) * self.gap)
        return 2 * self.in_node(node / 2) + between


def steps(times, numels, net, ranks):
    """Returns the seconds of a step by scheme."""
    elements = sum(numels)

    def local(name):
        return times[name]["step"] * 1e-9 * elements

    result = {"fp32 all-reduce": local("full_f32") + net.all_reduce(4 * elements, ranks),
              "fp16 all-reduce": local("full_f16") + net.all_reduce(2 * elements, ranks),
              "1-bit flat": local("flat_%d" % ranks) + net.flat(numels, ranks)}
    if net.per_node > 1:
        result["1-bit two levels"] = local("two_level_%d" % ranks) + net.two_level(numels, ranks)
    sharded = [("SHARD", "shard_%d", False)] if net.per_node == 1 else [
        ("SHARD", "shard_two_level_%d", False), ("SHARD_NODE", "shard_in_node_%d", True)]
    for scheme, key, in_node in sharded:
        if key % ranks in times:  # missing in older files
            result[scheme] = local(key % ranks) + net.sharded(numels, ranks, in_node)
    return result


# ------------------------------------------------------------------------------------------------------------ tables
def number(value):
    return "%.3g" % value if value < 1000 else "%.0f" % value


def row(cells):
    print("| " + " | ".join(cells) + " |")


def heading(cells):
    row(cells)
    print("|" + " --- |" * len(cells))


def tables(times, name, per_node, node_gbyte):
    numels = shapes(name)
    ranks = [r for r in RANKS if r > per_node or per_node == 1]
    print("\n### %s, %s\n" % (name, "a link for every rank" if per_node == 1 else
                             "%d ranks behind one link" % per_node))
    heading(["Gbit/s", "milliseconds per step"] + ["%d ranks" % r if r == ranks[0] else str(r) for r in ranks])
    for link in LINKS:
        net = Net(link, per_node, node_gbyte)
        columns = [steps(times, numels, net, r) for r in ranks]
        for scheme in columns[0]:
            row([str(link[0]), scheme] + [number(column[scheme] * 1e3) for column in columns])
        for scheme in list(columns[0])[2:]:
            row([str(link[0]), "**fp16 / %s**" % scheme] +
                ["**%.2f**" % (column["fp16 all-reduce"] / column[scheme]) for column in columns])


def break_even_gbit(times, numels, per_node, node_gbyte, ranks, scheme):
    """Returns the Gbit/s of the link at which a scheme takes as long as the fp16 all-reduce, or None if it is never
    faster."""
    def gain(gbit):
        column = steps(times, numels, Net((gbit,) + LINKS[2][1:], per_node, node_gbyte), ranks)
        return column["fp16 all-reduce"] - column[scheme]
    low, high = 0.1, 10000.0
    if gain(low) <= 0:
        return None
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > 0 else (low, middle)
    return low


def limits(times, names, node_gbyte):
    print("\n### Links at which 1-bit compression breaks even\n")
    print("Gbit/s at which the step takes as long as with the fp16 all-reduce, with the latencies of the faster links. "
          "Slower links favour 1-bit compression.\n")
    heading(["list", "scheme"] + ["64 ranks", "512", "4096"])
    for name in names:
        for per_node, scheme in ((1, "1-bit flat"), (PER_NODE, "1-bit flat"), (PER_NODE, "1-bit two levels")):
            cells = [break_even_gbit(times, shapes(name), per_node, node_gbyte, ranks, scheme)
                     for ranks in (64, 512, 4096)]
            row([name, scheme +
                 (", a link for every rank" if per_node == 1 else ", %d ranks behind one link" % per_node)] +
                ["never" if cell is None else number(cell) for cell in cells])


WIRE_RANKS = 64


def wire_table(names, node_gbyte):
    """Prints the milliseconds that the messages of a rank are on the wire: bytes divided by bandwidth."""
    per_node, nodes = PER_NODE, WIRE_RANKS // PER_NODE
    gbits = [link[0] for link in LINKS]
    print("Milliseconds on the wire inside a node (%g GB/s per rank) + between nodes, %d ranks in nodes of %d, a link "
          "for every rank, 16-bit weights and gradients.\n" % (node_gbyte, WIRE_RANKS, per_node))
    heading(["list", "step", "bytes per parameter"] + ["%d Gbit/s" % gbits[0]] + [str(g) for g in gbits[1:]])
    for name in names:
        numels = shapes(name)
        total = sum(numels)
        between = all_reduce_bytes(2 * total, nodes) / per_node
        schemes = [("all-reduce of gradients", (between, 2 * (per_node - 1) / per_node * 2 * total)),
                   ("SHARD", rows_sent(numels, per_node, nodes, False)),
                   ("SHARD_NODE", rows_sent(numels, per_node, nodes, True)),
                   ("1-bit Adam, two levels", onebit_sent(numels, per_node, nodes, False)),
                   ("1-bit Adam, SHARD_NODE", onebit_sent(numels, per_node, nodes, True))]
        for scheme, (data, node) in schemes:
            row([name, scheme, "%.2f + %.2f" % (node / total, data / total)] +
                ["%s + %s" % (number(node / node_gbyte / 1e6), number(data * 8 / gbit / 1e6)) for gbit in gbits])


def local_table(data):
    times = data["times"]
    print("| step | ns per element | compression | exchange, local work | decompression, update |")
    print("| --- | --- | --- | --- | --- |")
    names = [("AdamW, fp32 gradients", "full_f32"), ("AdamW, fp16 gradients", "full_f16")]
    for ranks in (8, 64, 512, 4096):
        names.append(("1-bit Adam, %d ranks" % ranks, "flat_%d" % ranks))
        if "momentum_bits_%d" % ranks in times:  # missing in older files
            names.append(("1-bit Adam, %d ranks, MOMENTUM_BITS" % ranks, "momentum_bits_%d" % ranks))
        if ranks > PER_NODE:
            names.append(("1-bit Adam, %d ranks, %d per node" % (ranks, PER_NODE), "two_level_%d" % ranks))
    for ranks in (8, 64):
        for text, key in (("SHARD, %d ranks", "shard_%d"), ("SHARD, %d ranks in nodes", "shard_two_level_%d"),
                          ("SHARD_NODE, %d ranks", "shard_in_node_%d")):
            if key % ranks in times:  # missing in older files
                names.append((text % ranks, key % ranks))
    for text, key in names:
        t = times[key]
        row([text] + ["%.2f" % t[k] if t[k] else "" for k in ("step", "compress", "exchange", "decompress")])


def main():
    arguments = sys.argv[1:]
    wire = "--wire" in arguments
    node_gbyte = 450.0 if wire else 100.0
    if "--node-gbyte" in arguments:
        index = arguments.index("--node-gbyte")
        node_gbyte = float(arguments[index + 1])
        del arguments[index:index + 2]
    if wire:
        return wire_table([a for a in arguments if a != "--wire"] or ["llama-2-7b"], node_gbyte)
    files = [a for a in arguments if a.endswith(".json")]
    names = [a for a in arguments if a not in files] or ["gpt2-124m", "bert-large"]
    if not files:
        sys.exit(__doc__)
    data = None
    for path in files:
        with open(path) as file:
            run = json.load(file)
        if run["per_node"] != PER_NODE:
            sys.exit("the times are of nodes of %d ranks" % run["per_node"])
        data = data or run
        for key, value in run["times"].items():
            data["times"][key] = min(data["times"].get(key, value), value, key=lambda t: t["step"])
    print("Measured, of %s:\n" % data["list"])
    local_table(data)
    print("\nModelled: latency and gap between messages %s; in a node %g us and %g GB/s per rank." % (
        ", ".join("%g and %g us at %d Gbit/s" % (a * 1e6, g * 1e6, gbit) for gbit, a, g in LINKS), NODE_ALPHA * 1e6,
        node_gbyte))
    limits(data["times"], names, node_gbyte)
    for name in names:
        for per_node in (1, PER_NODE):
            tables(data["times"], name, per_node, node_gbyte)


if __name__ == "__main__":
    main()
