# SPDX-License-Identifier: Apache-2.0
"""A process group of torch.distributed as a comm."""
from __future__ import annotations

import ctypes
from typing import Any, Optional

import torch
import torch.distributed as dist

from .. import _abi as abi
from .._handles import Comm, Context
from ._tensors import unsupported, wrong

BACKENDS = ("nccl", "mpi", "hccl", "compressed", "gloo")  # DeepSpeed's names of its backends, and gloo
DTYPES = {abi.DSOPT_DTYPE_F32: torch.float32, abi.DSOPT_DTYPE_F64: torch.float64, abi.DSOPT_DTYPE_I32: torch.int32}
SIZES = {torch.float32: 4, torch.float64: 8, torch.int32: 4, torch.uint8: 1}


class _Memory:
    """Device memory by its address, for torch.as_tensor."""

    def __init__(self, address: int, count: int, kind: str) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count, ),
            "typestr": kind,
            "version": 3,
            "strides": None
        }


class Collectives:
    """The functions of a comm table on torch.distributed. They work in host memory; with NCCL in device memory."""

    # The tensors of the last call. A thread of gloo may hold them slightly longer than the call, and must not release
    # the last reference: it would wait for the interpreter's lock, which ends the process at interpreter exit.
    _last: Any = None

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if "nccl" not in str(dist.get_backend(group)):
            # gloo does not have all-to-all in every version of torch; it always has send and receive.
            self.all_to_all = self._by_pairs

    def _tensor(self, address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        if self.device.type == "cuda":
            kind = {torch.float32: "<f4", torch.float64: "<f8", torch.int32: "<i4", torch.uint8: "|u1"}[dtype]
            return torch.as_tensor(_Memory(address, count, kind), device=self.device)
        return torch.frombuffer((ctypes.c_char * (count * SIZES[dtype])).from_address(address), dtype=dtype)

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: Optional[int]) -> None:
        if not count:
            return
        out = self._tensor(recv, count, DTYPES[dtype])
        if send != recv:
            out.copy_(self._tensor(send, count, DTYPES[dtype]))
        self._last = out
        dist.all_reduce(out, dist.ReduceOp.MAX if op == abi.DSOPT_OP_MAX else dist.ReduceOp.SUM, group=self.group)

    def broadcast(self, address: int, count: int, dtype: int) -> None:
        """Broadcasts from rank 0 of the group, in place."""
        if count:
            root = 0 if self.group is None else dist.distributed_c10d._get_global_rank(self.group, 0)
            self._last = self._tensor(address, count, DTYPES[dtype])
            dist.broadcast(self._last, root, group=self.group)

    def all_gather(self, send: int, recv: int, size: int, stream: Optional[int]) -> None:
        if not size:
            return
        row = self._tensor(send, size, torch.uint8).clone()  # it may overlap `recv`
        out = list(self._tensor(recv, size * self.ranks, torch.uint8).view(self.ranks, size))
        self._last = row, out
        dist.all_gather(out, row, group=self.group)

    def all_to_all(self, send: int, recv: int, size: int, stream: Optional[int]) -> None:
        if not size:
            return
        rows = self._tensor(send, size * self.ranks, torch.uint8).clone()
        out = self._tensor(recv, size * self.ranks, torch.uint8)
        self._last = rows, out
        dist.all_to_all_single(out, rows, group=self.group)

    def _by_pairs(self, send: int, recv: int, size: int, stream: Optional[int]) -> None:
        if not size:
            return
        rows = self._tensor(send, size * self.ranks, torch.uint8).view(self.ranks, size).clone()
        out = self._tensor(recv, size * self.ranks, torch.uint8).view(self.ranks, size)
        out[self.rank].copy_(rows[self.rank])
        peers = [
            dist.distributed_c10d._get_global_rank(self.group, r) if self.group is not None else r
            for r in range(self.ranks)
        ]
        others = [r for r in range(self.ranks) if r != self.rank]
        from_rows, to_rows = list(rows), list(out)
        self._last = from_rows, to_rows
        for work in ([dist.isend(from_rows[r], peers[r], group=self.group) for r in others] +
                     [dist.irecv(to_rows[r], peers[r], group=self.group) for r in others]):
            work.wait()


class Default(str):
    """The default of comm_backend_name, to distinguish it from an equal name that a caller passes."""


def check_backend(name: Any, group: Any) -> None:
    """Refuses a comm_backend_name that is unknown, or that contradicts the backend of the process group."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise wrong("comm_backend_name is %r, and must be one of %s" % (name, ", ".join(map(repr, BACKENDS))))
    # "compressed" of DeepSpeed works over any backend of torch.distributed.
    if isinstance(name, Default) or name == "compressed" or not is_distributed():
        return
    backend = str(dist.get_backend(group)).lower()
    if backend == "undefined" and hasattr(dist, "get_backend_config"):  # torch chose a backend per device
        backend = str(dist.get_backend_config(group)).lower()
    if name not in backend:
        raise wrong("comm_backend_name is %r, and the backend of the process group is %r; leave comm_backend_name out, "
                    "or pass a process group with that backend as `group`" % (name, backend))


def is_distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def ranks_of(group: Any) -> int:
    """Returns the number of ranks of a process group; 1 without torch.distributed."""
    return int(dist.get_world_size(group)) if is_distributed() else 1


def memory_of(group: Any, device: torch.device, what: str) -> bool:
    """True if the collectives of a process group must work in the memory of `device`; False: in host memory."""
    backend = str(dist.get_backend(group))
    own = device.type == "cuda" and "nccl" in backend
    if "nccl" in backend and "gloo" not in backend and not own:
        raise unsupported("%s: its backend nccl has no collectives for parameters on %s" % (what, device))
    return own


def comm_of(group: Any, context: Context, device: torch.device, what: str = "group") -> Optional[Comm]:
    """Returns a comm over a process group; None: the default group, if there is one. Returns None for one rank. `what`
    names the group in errors."""
    if not is_distributed():
        if group is not None:
            raise unsupported("%s: torch.distributed is not initialized" % what)
        return None
    if dist.get_rank(group) < 0:
        raise wrong("%s does not have this rank" % what)
    if dist.get_world_size(group) == 1:
        return None
    own = memory_of(group, device, what)
    collectives = Collectives(group, device if own else torch.device("cpu"))
    return Comm.table(context, collectives, collectives.rank, collectives.ranks, memory="backend" if own else "host")
