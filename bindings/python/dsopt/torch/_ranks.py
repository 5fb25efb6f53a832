# SPDX-License-Identifier: Apache-2.0
"""Arguments `shard`, `average` and those that belong to them: the data-parallel ranks of an optimizer."""
from __future__ import annotations

import hashlib
import textwrap
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from .. import _abi as abi
from .._errors import StateError
from .._handles import Comm, Context
from ._hash import hash_of
from ._process_group import comm_of, is_distributed, memory_of, ranks_of
from ._tensors import strides_of, unsupported, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer
    from ._plan import Entry

SHARDS = {False: 0, None: 0, True: abi.DSOPT_OPTIMIZER_SHARD, "node": abi.DSOPT_OPTIMIZER_SHARD_NODE}
KEY = "shard"  # in state dicts
Level = Tuple[str, Any]  # name of an argument, and its process group
ROWS = {
    "group": "process group of the data-parallel ranks; None: all ranks. With node_group the ranks with the same rank "
             "in their nodes; None: there is one node",
    "shard": "True: each rank keeps the state of its part of the parameters, and the step gathers the weights. "
             "\"node\": the same over the ranks of node_group. Gradients are averages, as with "
             "DistributedDataParallel, or average=True",
    "average": "True: the step averages the gradients over the ranks. Do not use DistributedDataParallel, and start "
               "with the same weights on all ranks",
    "node_group": "process group of the ranks of this node; None: one level",
    "split_matrices": "True: each of the ranks, with node_group of the ranks of the node, orthogonalises some of the "
                      "matrices, and gets the others from the other ranks",
    "max_grad_norm": "with average=True: largest L2 norm of the averaged gradients; 0 = off",
    "check_ranks": "True: the ranks compare their calls before each step, and all raise if they differ, such as in a "
                   "gradient that is None on one rank. Costs one small all-reduce",
}


def rows(column: int, *without: str, also: Tuple[str, ...] = ()) -> str:
    """Returns the last rows of a docstring, for these arguments, from the first name on. `column`: of the text. `also`:
    arguments that not all classes have."""
    found = [textwrap.fill(text, 120, initial_indent=("    " + name + " ").ljust(column),
                           subsequent_indent=" " * column)
             for name, text in ROWS.items() if name in also or name not in ("split_matrices", *without)]
    return "\n".join(found).lstrip() + "\n    "


def largest(numbers: torch.Tensor, levels: List[Level], device: torch.device) -> torch.Tensor:
    """Returns the maxima of whole numbers over the ranks of all levels. Collective. `device`: of the parameters."""
    all_reduce: Any = dist.all_reduce if is_distributed() else None  # untyped in torch 1.13
    for name, group in reversed(levels) if all_reduce else ():
        numbers = numbers.to(device if memory_of(group, device, name) else "cpu")
        all_reduce(numbers, dist.ReduceOp.MAX, group=group)
    return numbers


class DataRanks:
    """The data-parallel ranks of an optimizer that shards its state or averages gradients."""

    def __init__(self, flags: int, group: Any, node_group: Any, max_grad_norm: float) -> None:
        self.flags, self.group, self.node_group, self.max_grad_norm = flags, group, node_group, max_grad_norm
        self._compared: Optional[str] = None  # description of the parameters that all ranks have

    @property
    def shards(self) -> bool:
        return bool(self.flags & (abi.DSOPT_OPTIMIZER_SHARD | abi.DSOPT_OPTIMIZER_SHARD_NODE))

    @property
    def argument(self) -> str:
        """Name of the argument because of which there are other ranks."""
        return "shard" if self.shards else "average" if self.averages else "split_matrices"

    @property
    def averages(self) -> bool:
        return bool(self.flags & abi.DSOPT_OPTIMIZER_AVERAGES)

    def _is_one_node(self) -> bool:
        """True if all ranks are in this node."""
        if self.node_group is None or self.group is not None:
            return False
        nodes = ranks_of(self.node_group), ranks_of(None)
        if nodes[0] != nodes[1]:
            raise wrong("node_group has %d of %d ranks, and group is None; give the process group of the ranks that "
                        "have the same rank in their nodes" % nodes)
        return True

    def levels(self) -> List[Level]:
        """Returns the name and the process group of each level, nodes last."""
        data = [] if self._is_one_node() else [("group", self.group)]
        return data + ([] if self.node_group is None else [("node_group", self.node_group)])

    def numbers(self) -> List[int]:
        """Returns this rank, the number of ranks, and the number of ranks of a node."""
        node_rank = dist.get_rank(self.node_group) if is_distributed() and self.node_group is not None else 0
        node_ranks = 1 if self.node_group is None else ranks_of(self.node_group)
        one_node = self._is_one_node()
        ranks = 1 if one_node else ranks_of(self.group)
        rank = dist.get_rank(self.group) if is_distributed() and not one_node else 0
        return [rank + ranks * node_rank, ranks * node_ranks, node_ranks]

    def comms(self, context: Context, device: torch.device, desc: Any) -> List[Comm]:
        """Adds comms and flags to a dsopt_optimizer_desc. Returns the comms."""
        desc.flags |= self.flags
        desc.max_norm = self.max_grad_norm
        found = []
        for name, group in self.levels():
            comm = comm_of(group, context, device, name) or Comm.single(context)
            found.append(comm)
            setattr(desc, "data" if name == "group" else "node", comm.handle)
        return found

    def compare(self, owner: EngineOptimizer, entries: List[Entry], device: torch.device) -> None:
        """Compares parameters and weights over the ranks, before the first step with these parameters. Collective then:
        ranks with different lists would exchange different messages, or wait for one another. With check_ranks only
        before the first step of all: later the engine compares, also if one rank alone has other parameters."""
        rules = [owner._rule(group)[:2] + owner._formats_in(group) for group in owner.param_groups]
        params = [(entry.group, entry.name, str(entry.param.dtype), tuple(entry.param.shape)) for entry in entries]
        text = repr((self.flags, rules, params))
        if text == self._compared or (self._compared and self.flags & abi.DSOPT_OPTIMIZER_CHECK_RANKS):
            return
        strides = repr([strides_of(entry.param) for entry in entries])
        digest = hashlib.blake2b((text + strides).encode(), digest_size=8).digest()
        words = [int.from_bytes(digest, "little", signed=True), len(entries)]
        weights = int(hash_of(enumerate(entry.param for entry in entries), device)) if self.averages else 0
        high = torch.tensor([x for word in (*words, weights) for x in (word, ~word)], dtype=torch.int64)
        lists, inverse, count, lowest, heaviest, lightest = largest(high, self.levels(), device).tolist()
        where = "rank %d of %s" % (self.numbers()[0], type(owner).__name__)
        if count != ~lowest:
            raise wrong("ranks have from %d to %d parameters to step, and %s has %d; make the optimizer with the same "
                        "parameters on all ranks" % (~lowest, count, where, len(entries)), "MISMATCH")
        if lists != ~inverse:
            raise wrong("%s has other parameters, groups or options than another rank: names, shapes, dtypes, memory "
                        "orders, rules and formats must be the same" % where, "MISMATCH")
        if heaviest != ~lightest:
            raise wrong("the weights of the ranks differ, and with average=True they must start with the same values; "
                        "broadcast them before the first step", "MISMATCH")
        self._compared = text

    # ----------------------------------------------------------------------------------------------- files, state dicts
    def check_loaded(self, kind: str, saved: Any) -> None:
        """Refuses a state dict that does not have this rank's parts. `saved`: its key "shard"."""
        if self.shards and saved != self.numbers():
            raise unsupported("the state dict has %s, and this optimizer needs %s; save with opt.save(path) and load "
                              "with opt.load(paths) of %s, which takes the files of any number of ranks" %
                              (parts_of(saved), parts_of(self.numbers()), kind))

    def refuse_scaler(self, kind: str) -> None:
        raise unsupported("%s: average=True is not supported with GradScaler, which decides about a step by the "
                          "gradients of its own rank; use DistributedDataParallel without average" % kind)

    def refuse_pickle(self, kind: str) -> None:
        raise StateError("%s with %s cannot be pickled or copied, because its process group belongs to "
                         "this process; use state_dict (DSOPT_ERR_STATE)" %
                         (kind, "shard or average" if self.argument != "split_matrices" else self.argument),
                         abi.DSOPT_ERR_STATE, "DSOPT_ERR_STATE")


def parts_of(saved: Any) -> str:
    try:
        return "the parts of rank %d of %d, in nodes of %d ranks" % tuple(saved)
    except TypeError:
        return "whole tensors"


def check_whole(kind: str, loaded: Dict[str, Any]) -> None:
    """Refuses a state dict of one of several ranks in an optimizer without shard."""
    saved = loaded.get(KEY)
    if saved is not None:
        raise unsupported("the state dict has %s, and this optimizer whole tensors; save with opt.save(path) and load "
                          "with opt.load(paths) of %s, which takes the files of any number of ranks" %
                          (parts_of(saved), kind))


def flags_of_shard(kind: type, shard: Any) -> int:
    """Returns the flag of dsopt_optimizer_desc of the argument shard."""
    if not isinstance(shard, (bool, str, type(None))) or shard not in SHARDS:
        raise wrong("%s: shard is %r, and must be False, True or 'node'" % (kind.__name__, shard))
    return int(SHARDS[shard])


def data_ranks_of(kind: type, group: Any, shard: Any, average: Any, node_group: Any,
                  max_grad_norm: Any = 0.0, split_matrices: Any = False,
                  check_ranks: Any = False) -> Optional[DataRanks]:
    """Returns the ranks of an optimizer of this class with these arguments; None: it does without other ranks."""
    name = kind.__name__
    flags = flags_of_shard(kind, shard) | (abi.DSOPT_OPTIMIZER_AVERAGES if average else 0)
    flags |= abi.DSOPT_OPTIMIZER_SPLIT_MATRICES if split_matrices else 0
    norm = float(max_grad_norm)
    if not 0 <= norm < float("inf"):
        raise wrong("%s: max_grad_norm is %r, and must be a finite number, not negative" % (name, max_grad_norm))
    if not flags:
        for argument, value in (("group", group), ("node_group", node_group), ("check_ranks", check_ranks or None)):
            if value is not None:
                raise unsupported("%s: %s has no effect without %s; leave it out" %
                                  (name, argument, "shard or average" if kind.__name__ != "Muon" else
                                   "shard, average or split_matrices"))
    if norm and not average:
        raise unsupported("%s: max_grad_norm has no effect without average=True; clip averaged gradients with "
                          "torch.nn.utils.clip_grad_norm_" % name)
    if shard == "node" and node_group is None:
        raise wrong("%s: shard='node' needs node_group, the process group of the ranks of this node" % name)
    if not flags:
        return None
    return DataRanks(flags | (abi.DSOPT_OPTIMIZER_CHECK_RANKS if check_ranks else 0), group, node_group, norm)
