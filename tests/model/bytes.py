#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bytes.py BENCH_FOLDER LIBDSOPT: the byte formulas of bench/alpha_beta.py against what the engine counts and needs."""
import ctypes
import sys

sys.path.insert(0, sys.argv[1])
import alpha_beta as model  # noqa: E402

MOVE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
REDUCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32,
                          ctypes.c_int32, ctypes.c_void_p)


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("numel", ctypes.c_int64), ("dtype", ctypes.c_int32), ("reserved", ctypes.c_int32)]


class Table(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("self", ctypes.c_void_p), ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32),
                ("all_reduce", REDUCE), ("all_to_all", MOVE), ("all_gather", MOVE)] + [
                    (name, ctypes.c_void_p) for name in ("broadcast", "barrier", "error", "abort", "destroy")] + [
                    ("memory", ctypes.c_int32), ("reserved", ctypes.c_int32)]


class CommDesc(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("kind", ctypes.c_int32), ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32),
                ("timeout_ms", ctypes.c_int32), ("id", ctypes.c_void_p), ("id_bytes", ctypes.c_size_t),
                ("table", ctypes.c_void_p), ("native", ctypes.c_void_p)]


class CommInfo(ctypes.Structure):  # as far as it is needed: the rest of it is not asked for
    _fields_ = [("size", ctypes.c_size_t), ("rank", ctypes.c_int32), ("ranks", ctypes.c_int32), ("status", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("calls", ctypes.c_int64), ("bytes_sent", ctypes.c_int64),
                ("bytes_received", ctypes.c_int64), ("more", ctypes.c_int64 * 64)]


class Compressed(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("tensors", ctypes.c_void_p), ("count", ctypes.c_int64),
                ("worker_error", ctypes.c_void_p), ("server_error", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
                ("workspace_bytes", ctypes.c_size_t), ("stream", ctypes.c_void_p), ("compat", ctypes.c_int32),
                ("reserved", ctypes.c_int32), ("node", ctypes.c_void_p)]


lib = ctypes.CDLL(sys.argv[2])
lib.dsopt_last_error.restype = ctypes.c_char_p
kept = []


def check(status):
    if status:
        sys.exit("status %d: %s" % (status, lib.dsopt_last_error().decode()))


def expect(got, wanted, what):
    if got != wanted:
        sys.exit("%s: the engine has %s, the model %s" % (what, got, wanted))


context = ctypes.c_void_p()
check(lib.dsopt_context_create(None, ctypes.byref(context)))


def comm_of(ranks):
    """One rank of so many; what the others would send stays as it is."""
    table = Table(ctypes.sizeof(Table), None, 0, ranks, REDUCE(lambda *_: 0), MOVE(lambda *_: 0), MOVE(lambda *_: 0))
    kept.append(table)
    desc = CommDesc(size=ctypes.sizeof(CommDesc), kind=4, table=ctypes.addressof(table))
    comm = ctypes.c_void_p()
    check(lib.dsopt_comm_create(context, ctypes.byref(desc), ctypes.byref(comm)))
    return comm


def sent(comm):
    info = CommInfo(size=ctypes.sizeof(CommInfo))
    check(lib.dsopt_comm_query(comm, ctypes.byref(info)))
    return info.bytes_sent


def sizes(numels, ranks, node, data=False):
    """Arguments of an exchange, with floats of worker and server. `data`: with memory."""
    tensors = (Tensor * len(numels))(*(Tensor(None, n, 1, 0) for n in numels))
    args = Compressed(size=ctypes.sizeof(Compressed), tensors=ctypes.addressof(tensors), count=len(numels), node=node)
    worker, server, space = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_size_t()
    check(lib.dsopt_compressed_sizes(ranks, ctypes.byref(args), ctypes.byref(worker), ctypes.byref(server), ctypes.byref(space)))
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
            check(lib.dsopt_compressed_allreduce(across, ctypes.byref(args)))
            what = "%d nodes of %d ranks" % (nodes, per_node)
            if per_node == 1:
                expect(sent(across), model.flat_bytes(numels, nodes), what)
            else:
                expect((sent(across), sent(inside)), model.two_level_bytes(numels, per_node, nodes), what)
            checked += 1
for ranks in (2, 3, 8):  # an all-reduce of one double, and one of two
    comm = comm_of(ranks)
    result, value = (ctypes.c_char * 64)(), ctypes.c_float(1)
    tensor = Tensor(ctypes.addressof(value), 1, 1, 0)
    check(lib.dsopt_tensors_norm(context, ctypes.byref(tensor), ctypes.c_int64(1), 0, ctypes.c_double(0), comm, result, None))
    expect(sent(comm), model.all_reduce_bytes(8, ranks) + model.all_reduce_bytes(16, ranks), "all-reduce of %d ranks" % ranks)
    checked += 1

for name in ("gpt2-124m", "bert-large"):  # rows from the sizes of buffers: no memory for the lists is needed
    numels = model.shapes(name)
    for per_node, nodes in ((1, 2), (1, 8), (1, 64), (2, 4), (8, 2), (8, 64)):
        args, worker, server, _ = sizes(numels, comm_of(nodes), comm_of(per_node) if per_node > 1 else None)
        layout = model.Layout(numels, per_node * nodes)
        expect((worker, server), (nodes * layout.chunk + len(numels), layout.chunk + layout.scales),
               "%s, %d nodes of %d ranks" % (name, nodes, per_node))
        checked += 1
    for ranks in (8,):  # one bit an element each way, at most 0.1% more
        bits = 8 * ranks * model.Layout(numels, ranks).row / sum(numels)
        if not 1 <= bits <= 1.001:
            sys.exit("%s at %d ranks: %.5f bits an element each way" % (name, ranks, bits))
        flat, (two, _) = model.flat_bytes(numels, 64), model.two_level_bytes(numels, 8, 8)
        leaving = flat // 63 * 56  # of a rank, to those of other nodes
        if leaving != 8 * two:
            sys.exit("%s: of a node's bytes two levels save a factor of %.3f, not 8" % (name, leaving / two))
        checked += 2
print("%d figures are those of the engine" % checked)
