#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""packbits_sequence.py LIBDSOPT [NUMEL...]: compares local work of the compressed all-reduce with the original's.

Needs PyTorch and NumPy (Debian: python3-torch). Both sides are rank 0 of 8 with collectives that do nothing,
alternating in one process. So the worker's part, the server's part of one eighth and decoding are timed, and not the
network.
  dsopt      dsopt_compressed_allreduce, standard mode, one tensor
  framework  compressed_allreduce of the original with its cupy packbits replaced by NumPy's: add error, norm, sign,
             pack, new error; unpack to a matrix, weighted sum, the same again; unpack and multiply
"""
import ctypes
import mmap
import os
import statistics
import sys
import time

import numpy
import torch

if len(sys.argv) < 2:
    sys.exit(__doc__)
os.environ["DSOPT_LIBRARY"] = sys.argv[1]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bindings", "python"))
import dsopt  # noqa: E402
from dsopt import _abi as abi  # noqa: E402

RANKS = 8
ROUNDS = int(os.environ.get("ROUNDS", "9"))
torch.set_num_threads(len(os.sched_getaffinity(0)))


def huge(size):
    """Returns zeroed memory in huge pages, as the engine allocates it for an optimizer's errors."""
    memory = mmap.mmap(-1, (size >> 21) + 2 << 21)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_char * len(memory)).from_buffer(memory)


class Idle:
    """Collectives of a rank whose peers' messages never change."""

    def all_reduce(self, *_):
        pass

    all_to_all = all_gather = all_reduce


class Dsopt:
    def __init__(self, x):
        self.comm = dsopt.Comm.table(dsopt.Context(), Idle(), 0, RANKS)
        self.x = x
        self.list = (abi.dsopt_tensor * 1)(abi.dsopt_tensor(x.data_ptr(), x.numel(), abi.DSOPT_DTYPE_F32))
        self.args = abi.dsopt_compressed(tensors=ctypes.addressof(self.list), count=1)
        worker, server, space = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_size_t()
        abi.check(abi.lib.dsopt_compressed_sizes(self.comm.handle, ctypes.byref(self.args), ctypes.byref(worker),
                                                 ctypes.byref(server),
                                             ctypes.byref(space)))
        self.keep = [huge(size) for size in (4 * worker.value, 4 * server.value, space.value)]
        self.args.worker_error, self.args.server_error, self.args.workspace = map(ctypes.addressof, self.keep)
        self.args.workspace_bytes = space.value

    def call(self):
        abi.check(abi.lib.dsopt_compressed_allreduce(self.comm.handle, ctypes.byref(self.args)))


class Framework:
    def __init__(self, x):
        self.x = x
        self.worker_error, self.server_error = torch.zeros_like(x), torch.zeros(x.numel() // RANKS)

    @staticmethod
    def compress(buffer, error):
        buffer.add_(error)
        scale = buffer.norm() / buffer.numel() ** 0.5
        error.set_((buffer - scale * buffer.sign().add_(1).bool().float().add_(-0.5).mul_(2.0)).storage())
        return numpy.packbits(buffer.sign().add_(1).bool().numpy()), scale

    @staticmethod
    def unpack(bits):
        return torch.from_numpy(numpy.unpackbits(bits)).float().add_(-0.5).mul_(2.0)

    def call(self):
        bits, scale = self.compress(self.x, self.worker_error)
        chunk = bits[:bits.size // RANKS]
        received, scales = numpy.stack([chunk] * RANKS), scale.repeat(RANKS)
        mean = self.unpack(received).view(RANKS, -1).mul_(scales.mul_(1 / RANKS).unsqueeze(1)).sum(0)
        bits, scale = self.compress(mean, self.server_error)
        self.x.copy_(self.unpack(numpy.concatenate([bits] * RANKS)).view(RANKS, -1).mul_(
            scale.repeat(RANKS).unsqueeze(1))
                     .view(-1))


def main():
    print("| elements | threads | dsopt ms | ns per element | framework ms | framework / dsopt |\n"
          "| --- | --- | --- | --- | --- | --- |")
    for numel in [int(word) for word in sys.argv[2:]] or [1 << 18, 1 << 20, 1 << 26]:
        numel = (numel + 63) // 64 * 64
        sides = [Dsopt(torch.randn(numel)), Framework(torch.randn(numel))]
        repeat = max(1, (1 << 22) // numel)
        times = [[], []]
        for round_ in range(ROUNDS + 1):
            for k in (0, 1) if round_ % 2 else (1, 0):
                start = time.perf_counter()
                for _ in range(repeat):
                    sides[k].call()
                if round_:
                    times[k].append((time.perf_counter() - start) / repeat)
        a, b = (statistics.median(t) for t in times)
        print("| %d | %d | %.3f | %.2f | %.2f | %.1f |" % (numel, torch.get_num_threads(), a * 1e3, a / numel * 1e9,
                                                           b * 1e3,
                                                       b / a), flush=True)


if __name__ == "__main__":
    main()
