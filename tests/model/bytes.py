#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bytes.py ROOT LIBDSOPT: compares with the engine's counts and buffer sizes: the byte formulas of bench/alpha_beta.py,
those of steps with sharded state too, and the bytes per element in the tables of docs/low_precision.md and
docs/sharding.md."""
import ctypes
import os
import re
import sys

os.environ["DSOPT_LIBRARY"] = sys.argv[2]
sys.path[:0] = [os.path.join(sys.argv[1], "bench"), os.path.join(sys.argv[1], "bindings", "python")]
import alpha_beta as model  # noqa: E402
import dsopt  # noqa: E402
from dsopt import _abi as abi  # noqa: E402

check = abi.check
comms = []


def expect(got, wanted, what):
    if got != wanted:
        sys.exit("%s: %s in the engine, %s in the model" % (what, got, wanted))


class Idle:
    def all_reduce(self, *_):
        pass

    all_to_all = all_gather = all_reduce


context = dsopt.Context()


def comm_of(ranks):
    """Returns the handle of a comm of `ranks` ranks whose collectives do nothing."""
    comms.append(dsopt.Comm.table(context, Idle(), 0, ranks))
    return comms[-1].handle


def summing_comm_of(ranks):
    """The same with DSOPT_COMM_FLAG_PROVIDER_SUMS."""
    table, handle = abi.dsopt_comm_table(ranks=ranks), ctypes.c_void_p()
    for name in ("all_reduce", "all_to_all", "all_gather", "reduce_scatter"):
        setattr(table, name, dict(table._fields_)[name](lambda *_: 0))
    desc = abi.dsopt_comm_desc(kind=abi.DSOPT_COMM_KIND_TABLE, table=ctypes.addressof(table),
                               flags=abi.DSOPT_COMM_FLAG_PROVIDER_SUMS)
    check(abi.lib.dsopt_comm_create(context.handle, ctypes.byref(desc), ctypes.byref(handle)))
    comms.append((table, handle))
    return handle


def sent(comm):
    info = abi.dsopt_comm_info()
    check(abi.lib.dsopt_comm_query(comm, ctypes.byref(info)))
    return info.bytes_sent


KINDS = {"all_reduce": abi.DSOPT_COLLECTIVE_ALL_REDUCE, "all_to_all": abi.DSOPT_COLLECTIVE_ALL_TO_ALL,
         "all_gather": abi.DSOPT_COLLECTIVE_ALL_GATHER, "reduce_scatter": abi.DSOPT_COLLECTIVE_REDUCE_SCATTER}


def sent_of(comm):
    """Returns the bytes sent by kind of collective."""
    info = abi.dsopt_comm_info()
    check(abi.lib.dsopt_comm_query(comm, ctypes.byref(info)))
    expect(sum(info.sent_of), info.bytes_sent, "sum of the counters")
    return {kind: info.sent_of[index] for kind, index in KINDS.items()}


def sizes(numels, ranks, node, data=False):
    """Returns arguments of an exchange, the numbers of worker and server floats, and the memory of the arguments.
    `data`: also allocates tensors, errors and workspace."""
    tensors = (abi.dsopt_tensor * len(numels))(*(abi.dsopt_tensor(None, n, abi.DSOPT_DTYPE_F32) for n in numels))
    args = abi.dsopt_compressed(tensors=ctypes.addressof(tensors), count=len(numels), node=node)
    worker, server, space = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_size_t()
    check(abi.lib.dsopt_compressed_sizes(ranks, ctypes.byref(args), ctypes.byref(worker), ctypes.byref(server),
                                         ctypes.byref(space)))
    memory = [tensors]
    if data:
        for tensor in tensors:
            memory.append((ctypes.c_float * max(tensor.numel, 1))())
            tensor.data = ctypes.addressof(memory[-1])
        memory += [(ctypes.c_float * max(worker.value, 1))(), (ctypes.c_float * max(server.value, 1))(),
                   (ctypes.c_char * (space.value + 256))()]
        args.worker_error, args.server_error = ctypes.addressof(memory[-3]), ctypes.addressof(memory[-2])
        args.workspace = (ctypes.addressof(memory[-1]) + 255) // 256 * 256
        args.workspace_bytes = space.value
    return args, worker.value, server.value, memory


LISTS = [[1], [31, 0, 33], [5, 20000, 3, 64, 0, 9001], [1 + i * 7 % 40 for i in range(300)]]
checked = 0
for numels in LISTS:
    for nodes in (1, 2, 3, 4, 8):
        for per_node in (1, 2, 3, 8):
            across, inside = comm_of(nodes), comm_of(per_node)
            args, _, _, memory = sizes(numels, across, inside if per_node > 1 else None, data=True)
            check(abi.lib.dsopt_compressed_allreduce(across, ctypes.byref(args)))
            what = "%d nodes of %d ranks" % (nodes, per_node)
            if per_node == 1:
                expect(sent(across), model.flat_bytes(numels, nodes), what)
            else:
                expect((sent(across), sent(inside)), model.two_level_bytes(numels, per_node, nodes), what)
            checked += 1
for ranks in (2, 3, 8):  # an all-reduce of one double, and one of two
    comm = comm_of(ranks)
    result, value = abi.dsopt_norm_result(), ctypes.c_float(1)
    tensor = abi.dsopt_tensor(ctypes.addressof(value), 1, abi.DSOPT_DTYPE_F32)
    check(abi.lib.dsopt_tensors_norm(context.handle, ctypes.byref(tensor), 1, abi.DSOPT_NORM_L2, 0, comm,
                                 ctypes.byref(result), None))
    expect(sent(comm), model.all_reduce_bytes(8, ranks) + model.all_reduce_bytes(16, ranks),
           "all-reduce of %d ranks" % ranks)
    checked += 1

WIDTHS = {abi.DSOPT_DTYPE_F32: 4, abi.DSOPT_DTYPE_BF16: 2, abi.DSOPT_DTYPE_F16: 2}


WARMUP = 2  # full steps of the 1-bit family


class Parts:
    """An optimizer of rank 0 whose state is sharded over comms that do nothing. Tensors, if they have memory, are
    zeros."""

    def __init__(self, numels, per_node, nodes, weights, flags, algorithm="ADAMW", has_memory=True, comm_of=comm_of,
                 **fields):
        self.comms = {name: comm_of(ranks) if ranks > 1 else None
                      for name, ranks in (("data", nodes), ("node", per_node))}
        self.memory, self.handle, group = [], ctypes.c_void_p(), abi.dsopt_group()
        desc = abi.dsopt_optimizer_desc(flags=flags, **self.comms, **fields)
        check(abi.lib.dsopt_optimizer_create(context.handle, ctypes.byref(desc), ctypes.byref(self.handle)))
        check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group),
                                       getattr(abi, "DSOPT_ALGORITHM_" + algorithm)))
        group.freeze_step = WARMUP if algorithm.startswith("ONEBIT") else group.freeze_step
        params = (abi.dsopt_param * len(numels))(*(
            abi.dsopt_param(tensor=self.tensor(n, dtype) if has_memory else abi.dsopt_tensor(None, n, dtype))
            for n, dtype in zip(numels, weights)))
        check(abi.lib.dsopt_optimizer_add_group(self.handle, ctypes.byref(group), params, len(numels)))

    def tensor(self, numel, dtype):
        self.memory.append((ctypes.c_char * max(numel * WIDTHS[dtype], 1))())
        return abi.dsopt_tensor(ctypes.addressof(self.memory[-1]), numel, dtype)

    def step(self, numels, gradients, warmup=1):
        """Returns the bytes that a step after `warmup` others sends, by comm and kind."""
        list_ = (abi.dsopt_tensor * len(numels))(*map(self.tensor, numels, gradients))
        step = abi.dsopt_step(grads=ctypes.addressof(list_), count=len(numels))
        for _ in range(warmup):  # the first step also compares lists
            check(abi.lib.dsopt_optimizer_step(self.handle, ctypes.byref(step)))
        before = {name: sent_of(comm) for name, comm in self.comms.items() if comm}
        check(abi.lib.dsopt_optimizer_step(self.handle, ctypes.byref(step)))
        return {name: {kind: sent - before[name][kind] for kind, sent in sent_of(comm).items()}
                for name, comm in self.comms.items() if comm}

    def close(self):
        abi.lib.dsopt_optimizer_destroy(self.handle)


def check_shard_bytes(numels, per_node, nodes, in_node, averages, weights, gradients, algorithm, clips, sums=False):
    flags = abi.DSOPT_OPTIMIZER_SHARD_NODE if in_node else abi.DSOPT_OPTIMIZER_SHARD
    flags |= abi.DSOPT_OPTIMIZER_AVERAGES if averages else 0
    parts = Parts(numels, per_node, nodes, weights, flags, algorithm, max_norm=1.0 if clips else 0.0,
                  comm_of=summing_comm_of if sums else comm_of)
    got = parts.step(numels, gradients)
    parts.close()
    wide = [WIDTHS[dtype] for dtype in weights]
    wanted = model.sharded_bytes(numels, per_node, nodes, wide,
                                 [WIDTHS[dtype] for dtype in gradients] if averages else None, in_node,
                                 clips + 2 * (algorithm == "LAMB"), staged=4 if averages else max(wide),
                                 provider_sums=sums)
    for name, counts in got.items():
        expect({kind: count for kind, count in counts.items() if count or kind in wanted[name]}, wanted[name],
               "%s of %d nodes of %d ranks, list of %d" % (name, nodes, per_node, len(numels)))
    return len(got)


def check_onebit_bytes(numels, per_node, nodes, in_node, weights, gradients, algorithm):
    flags = abi.DSOPT_OPTIMIZER_SHARD_NODE if in_node else 0
    parts = Parts(numels, per_node, nodes, weights, flags, algorithm)
    got = parts.step(numels, gradients, WARMUP)
    parts.close()
    wanted = model.onebit_bytes(numels, per_node, nodes, [WIDTHS[dtype] for dtype in weights],
                                [WIDTHS[dtype] for dtype in gradients], in_node)
    for name, counts in got.items():
        expect({kind: count for kind, count in counts.items() if kind != "all_reduce" and count}, wanted[name],
               "%s of %d nodes of %d ranks, %s, list of %d" % (name, nodes, per_node, algorithm, len(numels)))
    return len(got)


# One stripe and several ones; blocks that tensors share; chunks that are empty.
SHARD_LISTS = [[1], [700, 1, 33, 0, 5000, 4096, 12345, 64, 4095, 9000, 4097], [1 + i * 37 % 900 for i in range(300)],
               [3000000, 5, 70001]]
F32, BF16, F16 = abi.DSOPT_DTYPE_F32, abi.DSOPT_DTYPE_BF16, abi.DSOPT_DTYPE_F16
for numels in SHARD_LISTS:
    mixed = [(F32, BF16, F16)[i % 3] for i in range(len(numels))]
    same = [BF16] * len(numels)
    for per_node, nodes in ((1, 2), (1, 3), (1, 8), (1, 64), (2, 1), (2, 2), (3, 2), (8, 8)):
        for in_node in (False, True) if per_node > 1 else (False,):
            for averages in (False, True):
                checked += check_shard_bytes(numels, per_node, nodes, in_node, averages, same, same, "ADAMW", True)
                checked += check_shard_bytes(numels, per_node, nodes, in_node, averages, mixed, mixed[::-1], "LAMB",
                                             False)
            if per_node > 1:
                checked += check_onebit_bytes(numels, per_node, nodes, in_node, same, same, "ONEBIT_ADAM")
                checked += check_onebit_bytes(numels, per_node, nodes, in_node, mixed, mixed[::-1], "ONEBIT_LAMB")
            checked += check_shard_bytes(numels, per_node, nodes, in_node, True, same, same, "ADAMW", False, sums=True)

for name in ("gpt2-124m", "bert-large"):  # lengths of messages from buffer sizes: the lists need no memory
    numels = model.shapes(name)
    for per_node, nodes in ((1, 2), (1, 8), (1, 64), (2, 4), (8, 2), (8, 64)):
        args, worker, server, _ = sizes(numels, comm_of(nodes), comm_of(per_node) if per_node > 1 else None)
        layout = model.Layout(numels, per_node * nodes)
        expect((worker, server), (nodes * layout.chunk + len(numels), layout.chunk + layout.scales),
               "%s, %d nodes of %d ranks" % (name, nodes, per_node))
        checked += 1
    for ranks in (8,):  # one bit per element each way, at most 0.1% more
        bits = 8 * ranks * model.Layout(numels, ranks).message / sum(numels)
        if not 1 <= bits <= 1.001:
            sys.exit("%s at %d ranks: %.5f bits an element each way" % (name, ranks, bits))
        flat, (two, _) = model.flat_bytes(numels, 64), model.two_level_bytes(numels, 8, 8)
        leaving = flat // 63 * 56  # bytes per rank that go to ranks of other nodes
        if leaving != 8 * two:
            sys.exit("%s: two levels reduce the bytes that leave a node by a factor of %.3f, not 8" %
                     (name, leaving / two))
        checked += 2
ELEMENTS = 4096  # of the parameter in the table of docs/low_precision.md: whole blocks
FORMATS = {name: getattr(abi, "DSOPT_MOMENT_" + name) for name in ("F32", "BF16", "BF16_RANDOM", "E4M3", "Q8")}
COLUMNS = {  # algorithm, dtype of weights and gradients, fields of dsopt_optimizer_desc
    "F32": ("ADAMW", "F32", {}),
    "BF16, F32 master": ("ADAMW", "BF16", {}),
    "BF16, remainder": ("ADAMW", "BF16", {"masters": abi.DSOPT_MASTERS_REMAINDER}),
    "BF16, no master": ("ADAMW", "BF16", {"flags": abi.DSOPT_OPTIMIZER_NO_MASTER}),
    "LAMB, F32": ("LAMB", "F32", {})}


def state_of(optimizer):
    """Returns the bytes of each state tensor of the only parameter, by name."""
    count, state = ctypes.c_int64(), {}
    check(abi.lib.dsopt_optimizer_state_count(optimizer, ctypes.byref(count)))
    size = {abi.DSOPT_DTYPE_F32: 4, abi.DSOPT_DTYPE_BF16: 2, abi.DSOPT_DTYPE_I16: 2, abi.DSOPT_DTYPE_U8: 1,
            abi.DSOPT_DTYPE_F8_E4M3: 1}
    for i in range(count.value):
        info = abi.dsopt_state_info()
        check(abi.lib.dsopt_optimizer_state(optimizer, i, ctypes.byref(info)))
        if info.param == 0:
            state[info.name.decode()] = info.tensor.numel * size[info.tensor.dtype]
    return state


def step_bytes(column, moments):
    """Returns the bytes per element that a step moves and that the engine and the caller keep, as text."""
    algorithm, dtype, fields = COLUMNS[column]
    width = 4 if dtype == "F32" else 2
    memory = [(ctypes.c_char * (width * ELEMENTS))() for _ in range(2)]
    weight, grad = (abi.dsopt_tensor(ctypes.addressof(one), ELEMENTS, getattr(abi, "DSOPT_DTYPE_" + dtype))
                    for one in memory)
    optimizer, group = ctypes.c_void_p(), abi.dsopt_group()
    check(abi.lib.dsopt_optimizer_create(context.handle, ctypes.byref(abi.dsopt_optimizer_desc(**fields)),
                                         ctypes.byref(optimizer)))
    check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group),
                                   getattr(abi, "DSOPT_ALGORITHM_" + algorithm)))
    group.exp_avg_format, group.exp_avg_sq_format = (FORMATS[name] for name in moments.split(", "))
    param = abi.dsopt_param(tensor=weight)
    check(abi.lib.dsopt_optimizer_add_group(optimizer, ctypes.byref(group), ctypes.byref(param), 1))
    check(abi.lib.dsopt_optimizer_step(optimizer, ctypes.byref(abi.dsopt_step(grads=ctypes.addressof(grad), count=1))))
    state, report = state_of(optimizer), abi.dsopt_report()
    check(abi.lib.dsopt_optimizer_report(optimizer, ctypes.byref(report)))
    abi.lib.dsopt_optimizer_destroy(optimizer)
    whole = 8 if algorithm == "LAMB" else 4  # step, and LAMB's trust ratio: elements of the whole optimizer
    expect(report.state_bytes, sum(state.values()) + whole, "state of %s, %s" % (column, moments))

    one = width * ELEMENTS  # a pass over the gradient or the weight
    moved = one + 2 * sum(state.values()) + (one if "master" in state else 2 * one)
    if algorithm == "LAMB":  # the second pass reads the moments and updates the weight, which the first pass has read
        moved += sum(state.values()) + one
    kept = one + sum(state.values())
    return " / ".join(re.sub(r"\.?0+$", "", "%.2f" % (size / ELEMENTS)) for size in (moved, kept))


def table_of(page, section):
    """Returns the rows of the first table in a section of a page in docs, as lists of cells."""
    with open(os.path.join(sys.argv[1], "docs", page), encoding="utf-8") as file:
        text = file.read().split("\n## %s\n" % section)[1].split("\n## ")[0]
    lines = text[text.index("\n| ") + 1:].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


head, _, *body = table_of("low_precision.md", "Bytes")
expect(set(head[1:]), set(COLUMNS), "columns of docs/low_precision.md")
for moments, *cells in body:
    for column, cell in zip(head[1:], cells):
        expect(step_bytes(column, moments), cell, "bytes of %s, %s" % (column, moments))
        checked += 1

FLAGS = {"unsharded": 0, "SHARD": abi.DSOPT_OPTIMIZER_SHARD, "SHARD_NODE": abi.DSOPT_OPTIMIZER_SHARD_NODE,
         "averaged by the caller": 0, "AVERAGES": abi.DSOPT_OPTIMIZER_AVERAGES}
ALGORITHMS = {"AdamW": "ADAMW", "1-bit Adam": "ONEBIT_ADAM"}
RANKS = {"8 ranks": (1, 8), "64 ranks in nodes of 8": (8, 8)}  # per node, nodes
numels = model.shapes("llama-2-7b")


def rank_bytes(per_node, nodes, flags, algorithm):
    """Returns the bytes per element of weights and gradients in BF16, state and workspace of a rank. The list needs no
    memory."""
    parts = Parts(numels, per_node, nodes, [BF16] * len(numels), flags, algorithm, has_memory=False)
    report, workspace = abi.dsopt_report(), ctypes.c_size_t()
    check(abi.lib.dsopt_optimizer_report(parts.handle, ctypes.byref(report)))
    check(abi.lib.dsopt_optimizer_workspace(parts.handle, ctypes.byref(workspace)))
    parts.close()
    errors = sum(numels) * 4 * (nodes + 1) // (nodes * per_node) if algorithm == "ONEBIT_ADAM" else 0
    share = errors + sum(numels) * 12 // (nodes * per_node if flags & abi.DSOPT_OPTIMIZER_SHARD else
                                                  per_node if flags & abi.DSOPT_OPTIMIZER_SHARD_NODE else 1)
    if report.state_bytes > 1.05 * share:
        sys.exit("%d nodes of %d ranks: %d bytes of state, %d are the share of a rank" % (nodes, per_node,
                                                                                         report.state_bytes, share))
    return "%.2f" % (4 + (report.state_bytes + workspace.value) / sum(numels))


(_, _, *head), _, *body = table_of("sharding.md", "Memory per rank")
expect(set(head), set(RANKS), "columns of docs/sharding.md")
for row, _, *cells in body:
    algorithm, kind, averaged_by = row.split(", ")
    for column, cell in zip(head, cells):
        if cell:
            expect(rank_bytes(*RANKS[column], FLAGS[kind] | FLAGS[averaged_by], ALGORITHMS[algorithm]), cell,
                   "memory of %s, %s" % (row, column))
            checked += 1
print("%d figures match the engine" % checked)
