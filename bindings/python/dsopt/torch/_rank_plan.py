# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers with `shard`, `average` or `split_matrices`: over the data-parallel ranks, in one engine.

With `shard` the state of a parameter is this rank's part of it, an interval of its elements in row-major order, as a
tensor of one dimension. A parameter with another memory order is stepped in a copy.
"""
from __future__ import annotations

import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, Any, List, Tuple

import torch

from .. import _abi as abi
from .._errors import StateError
from .._handles import Comm, Context
from ._double_plan import is_double
from ._formats import Pair
from ._plan import Entry, Plan
from ._rounding import Kind
from ._tensors import is_dtensor, unsupported

if TYPE_CHECKING:
    from ._base import EngineOptimizer


def check_entries(owner: EngineOptimizer, entries: List[Entry], engines: int) -> None:
    """Refuses parameters that cannot be stepped by one engine over the data-parallel ranks."""
    what = owner._ranks.argument  # type: ignore[union-attr]
    if owner._wrapper is not None:
        raise unsupported("%s with %s is not supported in %s; step it without the wrapper" %
                          (type(owner).__name__, what, type(owner._wrapper).__name__))
    for entry in entries:
        if is_dtensor(entry.param):
            raise unsupported("%s is a DTensor, and %s is for parameters that each rank has as a whole; leave %s out: "
                              "the state of a DTensor is placed as the parameter is" % (entry.name, what, what))
        if is_double(entry.param):
            raise unsupported("%s is %s, which is stepped without the engine and not supported with %s; convert it, or "
                              "make an optimizer without %s for it" % (entry.name, str(entry.param.dtype).replace(
                                  "torch.", ""), what, what))
    if engines > 1:
        raise unsupported("%s with %s steps all parameters in one engine, and they differ in stochastic_rounding, in "
                          "the seed, or in masters; make an optimizer for each" % (type(owner).__name__, what))


class RankComms:
    """Parallel for data-parallel ranks."""

    def __init__(self, owner: EngineOptimizer, context: Context, device: torch.device, desc: Any) -> None:
        self.comms: List[Comm] = owner._ranks.comms(context, device, desc)  # type: ignore[union-attr]
        self.hooked = any(comm.hooked for comm in self.comms)

    def describe(self, place: Any, entry: Entry, formats: Pair) -> None:
        """Completes a dsopt_param. All ranks have the same parameters, so nothing is added."""


class RankPlan(Plan):
    """A plan of an optimizer with `shard`, `average` or `split_matrices`."""

    local_name = "this rank's part"

    def __init__(self, owner: EngineOptimizer, device: torch.device, kind: Kind, entries: List[Entry]) -> None:
        assert owner._ranks is not None
        self.shards = owner._ranks.shards
        without = [entry.name for entry in entries if not owner.state.get(entry.param)]
        if self.shards and without and len(without) < len(entries):
            raise StateError("%s has no state, and other parameters have: state is sharded by the whole list, so all "
                             "parameters come before the first step; save with opt.save(path), and load into an "
                             "optimizer that has all (DSOPT_ERR_STATE)" % without[0], abi.DSOPT_ERR_STATE,
                             "DSOPT_ERR_STATE")
        owner._ranks.compare(owner, entries, device)
        super().__init__(owner, device, kind, entries)

    def _parallel(self, owner: EngineOptimizer, desc: Any) -> Any:
        if hasattr(owner, "_group"):  # the 1-bit family adds its comms itself
            return super()._parallel(owner, desc)
        return RankComms(owner, self.context, self.device, desc)

    # --------------------------------------------------------------------------------------------------------- parts
    def _range_of(self, i: int) -> Tuple[int, int]:
        """Returns the begin and the number of elements of this rank's part of a parameter, in torch's elements."""
        begin, numel = ctypes.c_int64(), ctypes.c_int64()
        abi.check(abi.lib.dsopt_optimizer_shard(self.handle, i, -1, byref(begin), byref(numel)))
        factor = 2 if self.entries[i].param.is_complex() else 1
        return begin.value // factor, numel.value // factor

    def _in_place(self, i: int) -> bool:
        return self.entries[i].param.is_contiguous() if self.shards else super()._in_place(i)

    def _local(self, i: int) -> torch.Tensor:
        if not self.shards:
            return super()._local(i)
        begin, numel = self._range_of(i)
        part: torch.Tensor = self.entries[i].param.detach().contiguous().view(-1)[begin:begin + numel]
        return part

    def _in_order(self, entry: Entry) -> bool:
        return self.shards or super()._in_order(entry)

    def _shape_of(self, i: int) -> Tuple[int, ...]:
        return (self._range_of(i)[1],) if self.shards else super()._shape_of(i)

    def _order_state(self, i: int, param: torch.Tensor) -> None:
        if not self.shards:
            super()._order_state(i, param)
