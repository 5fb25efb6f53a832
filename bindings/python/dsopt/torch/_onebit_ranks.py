# SPDX-License-Identifier: Apache-2.0
"""The data-parallel ranks of the 1-bit family: one level, or nodes and the ranks of a node, whose state may be sharded.
"""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._handles import Comm, Context
from ._averaged import Averaged
from ._parallel import data_group_of
from ._process_group import check_backend, comm_of
from ._ranks import DataRanks, Level, flags_of_shard
from ._tensors import is_dense, strides_of, unsupported, wrong

WORD = 32  # bits
LINE, BLOCK = 64, 4096  # elements: alignment of tensors in the vector that ranks exchange, and its blocks


def begin_after(end: int, numel: int) -> int:
    """Returns the begin of a tensor in the vector of all tensors. `end`: of the tensor before it."""
    if numel == 0:
        return end
    begin = -(-end // LINE) * LINE
    return begin if numel <= BLOCK - begin % BLOCK else -(-begin // BLOCK) * BLOCK


def ranges_of(params: List[torch.Tensor]) -> List[Tuple[int, int]]:
    """Returns begin and end of each parameter in the vector."""
    found, end = [], 0
    for param in params:
        numel = param.numel() * (2 if param.is_complex() else 1)
        begin = begin_after(end, numel)
        end = begin + numel
        found.append((begin, end))
    return found


class OnebitRanks(Averaged):
    """Base class of the 1-bit family."""

    _nodes: Optional[DataRanks] = None  # with node_group
    _checks_ranks = False
    _comm: Optional[Comm] = None
    _comm_backend_name: str
    _engine: Any

    def _begin_nodes(self, group: Any, shard: Any, node_group: Any, check_ranks: bool) -> None:
        """Takes these arguments of the constructor."""
        self._checks_ranks = bool(check_ranks)
        name, flags = type(self).__name__, flags_of_shard(type(self), shard)
        if flags and self._algorithm == abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM:
            raise unsupported("%s: 0/1 Adam is not sharded; leave shard out" % name)
        if flags & abi.DSOPT_OPTIMIZER_SHARD:
            raise unsupported("%s: the 1-bit family is sharded in its node: shard='node' with node_group" % name)
        if flags and node_group is None:
            raise wrong("%s: shard='node' needs node_group, the process group of the ranks of this node" % name)
        if node_group is not None:
            self._nodes = DataRanks(flags, group, node_group, 0.0)
            self._ranks = self._nodes if flags else None

    def _levels(self) -> List[Level]:
        """Returns the name and the process group of each level of ranks, nodes last."""
        return [("group", data_group_of(self))] if self._nodes is None else self._nodes.levels()

    def _check_backends(self) -> None:
        for _, group in self._levels():
            check_backend(self._comm_backend_name, group)

    def _add_comms(self, desc: Any, context: Context) -> List[Comm]:
        """Adds the comms to a dsopt_optimizer_desc. Returns them."""
        device = torch.device(context.backend, context.device) if context.backend == "cuda" else torch.device("cpu")
        if self._nodes is None:
            comm = comm_of(data_group_of(self), context, device)
            comms = [] if comm is None else [comm]
            rank, ranks, node_ranks = (0, 1, 1) if comm is None else (comm.rank, comm.ranks, 1)
            desc.data = None if comm is None else comm.handle
        else:
            comms = self._nodes.comms(context, device, desc)
            rank, ranks, node_ranks = self._nodes.numbers()
        if comms and self._engine is None:
            desc.flags |= abi.DSOPT_OPTIMIZER_AVERAGES
        if comms and self._checks_ranks:
            desc.flags |= abi.DSOPT_OPTIMIZER_CHECK_RANKS
        self._comm = next((comm for comm in comms if comm.ranks > 1), None)
        self._rank_key = "" if ranks == 1 else "_rank%dof%d" % (rank, ranks)
        if node_ranks > 1:
            self._rank_key += "_nodes_of_%d" % node_ranks
        return comms

    # ----------------------------------------------------------------------------------------------------- active, mask
    @staticmethod
    def _has_active(state: Dict[str, Any]) -> bool:
        return any(key.startswith("active") for key in state)

    def _drop_active(self, states: List[Dict[str, Any]]) -> None:
        """Removes "active" of loaded state: it follows from the variance, and a run of one rank does not save it."""
        for state in states:
            for key in [key for key in state if key.startswith("active")]:
                del state[key]

    def _find_active(self) -> None:
        """Computes "active": exchanges include the elements whose variance is not 0, determined when it last changed.
        One bit per element of the vector, or with shard of this rank's slice of it, lowest first."""
        for plan in self._plans or ():
            if "active" not in plan.whole:
                continue
            words, ranges = plan.whole["active"].zero_(), ranges_of(plan.params)
            first = self._slice_begin(ranges[-1][1]) if self._shards else 0
            for i, (entry, (begin, _)) in enumerate(zip(plan.entries, ranges)):
                if self.param_groups[entry.group].get("non_freeze"):
                    continue
                param, variance = entry.param.detach(), self.state[entry.param]["exp_avg_sq"]
                factor = 2 if param.is_complex() else 1
                if self._shards:
                    begin += plan._range_of(i)[0] * factor - first
                else:
                    like = param if is_dense(param) else param.contiguous()
                    if strides_of(variance) != strides_of(like):
                        variance = torch.empty_strided(param.shape, like.stride(), dtype=variance.dtype,
                                                       device=param.device).copy_(variance)
                numel = variance.numel() * factor
                count = -(-numel // WORD)
                bits = torch.zeros(count * WORD, dtype=torch.bool, device=param.device)
                flat = variance.as_strided((variance.numel(), ), (1, ))
                bits[:numel] = (torch.view_as_real(flat).reshape(-1) if factor == 2 else flat) != 0
                for bit, column in enumerate(bits.view(count, WORD).unbind(1)):
                    words[begin // WORD:begin // WORD + count] |= column.to(torch.int32) << bit

    def _slice_begin(self, end: int) -> int:
        """Returns the begin of the slice of this rank. `end`: of the vector."""
        rank, ranks, node_ranks = self._nodes.numbers()  # type: ignore[union-attr]
        nodes, blocks = ranks // node_ranks, -(-end // BLOCK)
        return rank // nodes * nodes * -(-blocks // ranks) * BLOCK

    def _part_of_mask(self, param: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a mask that belong to this rank's part of a parameter."""
        plan = self._plans[0]  # type: ignore[index]
        begin, numel = plan._range_of(next(i for i, p in enumerate(plan.params) if p is param))
        part: torch.Tensor = mask.expand(param.shape).reshape(-1)[begin:begin + numel]
        return part
