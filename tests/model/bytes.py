#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""bytes.py ROOT LIBDSOPT: compares the byte formulas of bench/alpha_beta.py with the counts and buffer sizes of the
engine."""
import ctypes
import os
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


def sent(comm):
    info = abi.dsopt_comm_info()
    check(abi.lib.dsopt_comm_query(comm, ctypes.byref(info)))
    return info.bytes_sent


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
print("%d figures match the engine" % checked)
