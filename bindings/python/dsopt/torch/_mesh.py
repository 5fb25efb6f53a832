# SPDX-License-Identifier: Apache-2.0
"""Distribution of DTensors over the ranks of their meshes: the process groups over which norms are summed, the rank
that counts a shard, and the offset of a shard in its tensor."""
from __future__ import annotations

from math import prod
from typing import Any, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from .. import _abi as abi
from .._comm import Comm
from .._handles import Context
from ._formats import BLOCK, scales_in
from ._process_group import Collectives, comm_of, memory_of
from ._tensors import strides_of, unsupported


class Named(NamedTuple):
    """A DTensor that is a parameter."""
    name: str
    param: Any


def _root_of(mesh: Any) -> Any:
    """Returns the mesh from which `mesh` was sliced, or `mesh` itself. The name of the function is not public."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    resources = getattr(torch.distributed.device_mesh, "_mesh_resources", None)
    find = getattr(resources, "get_root_mesh", None) or getattr(resources, "get_parent_mesh", None)
    return (find(mesh) if find is not None else None) or mesh


def is_shard(placement: Any) -> bool:
    """True also for shards of shards, which are not of the class Shard in every version of torch."""
    return not placement.is_replicate() and not placement.is_partial()


class Spread:
    """The ranks over which some DTensors are distributed: dims of one mesh from which all of their meshes are sliced,
    or whose ranks they have. Norms are summed over these dims only. Other dims have other tensors, such as those of
    another pipeline stage."""

    def __init__(self, tensors: Sequence[Named]) -> None:
        meshes: Dict[int, Named] = {}
        for entry in tensors:
            meshes.setdefault(id(entry.param.device_mesh), entry)
            if entry.param.device_mesh.get_coordinate() is None:
                raise unsupported("this rank is not in the mesh of %s, and norms are over all shards of a tensor; make "
                                  "an optimizer with the parameters of this rank" % entry.name)
        roots = {id(root): root for root in (_root_of(entry.param.device_mesh) for entry in meshes.values())}
        for root in sorted(roots.values(), key=lambda root: -root.ndim):
            self._use(root)
            spans = {key: self._spans(entry.param.device_mesh) for key, entry in meshes.items()}
            if all(span is not None for some in spans.values() for span in some):
                break
        else:
            names = [entry.name for entry in meshes.values()]
            raise unsupported("%s and %s are on meshes without a common one, and norms are added up over one; slice "
                              "both meshes from one, or make an optimizer for each" % (names[0], names[-1]))
        self.spans = spans
        self.dims = sorted(frozenset().union(*(span for some in spans.values() for span in some)))

    def _use(self, root: Any) -> None:
        self.root, self.sizes = root, tuple(root.mesh.shape)
        places = torch.cartesian_prod(*map(torch.arange, self.sizes)).reshape(-1, len(self.sizes)).tolist()
        self.place = dict(zip(root.mesh.reshape(-1).tolist(), places))
        self.here = self.place.get(dist.get_rank())

    def _spans(self, mesh: Any) -> List[Optional[FrozenSet[int]]]:
        """Returns for each dim of a mesh the dims of the root of which it is the product; None if there are none."""
        return [self._span(dist.get_process_group_ranks(mesh.get_group(d))) for d in range(mesh.ndim)]

    def _span(self, ranks: List[int]) -> Optional[FrozenSet[int]]:
        if self.here is None or any(rank not in self.place for rank in ranks):
            return None
        varied = frozenset(d for d in range(len(self.sizes)) if len({self.place[rank][d] for rank in ranks}) > 1)
        return varied if prod(self.sizes[d] for d in varied) == len(ranks) else None

    def _has_all_ranks(self) -> bool:
        return prod(self.sizes[d] for d in self.dims) == dist.get_world_size()

    def comm(self, context: Context, device: torch.device) -> Optional[Comm]:
        """Returns a comm over these ranks; None if this is the only rank."""
        if not self.dims:
            return None
        if self._has_all_ranks():
            return comm_of(None, context, device, "the mesh of the parameters")
        groups = [self.root.get_group(d) for d in self.dims]
        if len(groups) == 1:
            return comm_of(groups[0], context, device, "the mesh of the parameters")
        own = all([memory_of(group, device, "the mesh of the parameters") for group in groups])
        collectives = OverDims(groups, device if own else torch.device("cpu"))
        return Comm.table(context, collectives, collectives.rank, collectives.ranks,
                          memory="backend" if own else "host")

    def flags(self, param: Any) -> int:
        """Returns the flags of dsopt_param. A shard is counted on one of the ranks that have it. A replicated tensor
        has no flags: the engine counts it on rank 0 of the comm."""
        spans = self.spans[id(param.device_mesh)]
        sharded = frozenset().union(*(span for span, placement in zip(spans, param.placements)
                                      if span is not None and is_shard(placement)))
        if not sharded:
            return 0
        copied = any(self.here[d] for d in self.dims if d not in sharded)  # type: ignore[index]
        return int(abi.DSOPT_PARAM_MODEL_PARALLEL | abi.DSOPT_PARAM_REPLICATED * copied)


class OverDims(Collectives):
    """Sums and maxima over several dims of a mesh, sequentially: there may be no process group of all ranks, and
    creating one needs ranks that have none of the tensors."""

    all_gather = all_to_all = None  # type: ignore[assignment]

    def __init__(self, groups: List[Any], device: torch.device) -> None:
        self.each = [Collectives(group, device) for group in groups]
        self.group, self.device = None, device
        self.rank, self.ranks = 0, 1
        for one in self.each:
            self.rank, self.ranks = self.rank * one.ranks + one.rank, self.ranks * one.ranks

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: Optional[int]) -> None:
        for one in self.each:
            one.all_reduce(send, recv, count, dtype, op, stream)
            send = recv
        # Every rank must receive the same bits, and the groups of the last dim may sum in different orders.
        for one in self.each[:-1]:
            one.broadcast(recv, count, dtype)


def interval_of(param: Any) -> Optional[int]:
    """Returns the index in the whole tensor of the first element of this rank's shard; None if the shards are not
    intervals of the elements in memory. All ranks return None or none does."""
    shape = tuple(param.shape)
    if prod(shape) and strides_of(param) != strides_of(torch.empty(shape, device="meta")):
        return None  # the elements of the unsharded tensor are not in the order of its shape
    begins, sizes, largest = [0] * len(shape), list(shape), list(shape)  # this rank's shard; the largest shard
    plain = [(d, p) for d, p in enumerate(param.placements) if is_shard(p) and not hasattr(p, "split_factor")]
    # FSDP shards the shards of tensor parallelism, on an earlier dim of the mesh: these are applied last.
    strided = [(d, p) for d, p in enumerate(param.placements) if is_shard(p) and hasattr(p, "split_factor")]
    for mesh_dim, placement in plain + strided[::-1]:
        d = placement.dim
        chunk = -(-sizes[d] // param.device_mesh.size(mesh_dim))
        begin = min(chunk * param.device_mesh.get_local_rank(mesh_dim), sizes[d])
        begins[d], sizes[d] = begins[d] + begin, min(chunk, sizes[d] - begin)
        largest[d] = -(-largest[d] // param.device_mesh.size(mesh_dim))
    first = next((d for d, size in enumerate(largest) if size != 1), len(shape))
    if tuple(sizes) != tuple(param._local_tensor.shape) or tuple(largest[first + 1:]) != shape[first + 1:]:
        return None
    offset = 0
    for begin, size in zip(begins, shape):
        offset = offset * size + begin
    return offset if prod(sizes) else 0


class Layout(NamedTuple):
    """Shape and placements of the scales of a DTensor."""
    shape: Tuple[int, ...]
    placements: Tuple[Any, ...]


def layout_of_scales(param: Any) -> Optional[Layout]:
    """Returns the layout of a tensor with a scale per block of a DTensor; None if some shard is not made of blocks of
    the whole tensor. If rows are made of blocks, there is a row of scales per row: it is sharded as the parameter is,
    by any number of ranks. All ranks return the same."""
    shape = tuple(param.shape)
    if interval_of(param) is None:
        return None
    first = next((d for d, size in enumerate(shape) if size != 1), 0)
    row = prod(shape[first + 1:])
    by_rows = bool(shape) and row > 0 and row % BLOCK == 0
    scales = (shape[first], row // BLOCK) if by_rows else (scales_in(prod(shape)),)
    shards = [(d, p) for d, p in enumerate(param.placements) if is_shard(p)]
    if shards and all(p.dim == shards[0][1].dim for _, p in shards) and shape[shards[0][1].dim] == 1:
        # One rank has all elements.
        return Layout((1, scales_in(prod(shape))), tuple(_on_first_dim(p) if is_shard(p) else p for p in param.placements))
    if any(p.dim != first for _, p in shards):
        return None
    if shards and not by_rows:
        ranks = prod(param.device_mesh.size(d) for d, _ in shards)
        chunk = -(-shape[first] // ranks) * row
        aligned = chunk % BLOCK == 0 or chunk >= prod(shape)
        if len(shards) > 1 or not aligned or scales_in(chunk) != -(-scales[0] // ranks):
            return None
    return Layout(scales, tuple(_on_first_dim(p) if is_shard(p) else p for p in param.placements))


def _on_first_dim(placement: Any) -> Any:
    more = {"split_factor": placement.split_factor} if hasattr(placement, "split_factor") else {}
    return placement if placement.dim == 0 else type(placement)(0, **more)
