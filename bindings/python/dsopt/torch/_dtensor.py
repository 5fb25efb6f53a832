# SPDX-License-Identifier: Apache-2.0
"""Parameters that are DTensors: the engine steps the local tensors of this rank.

An element-wise rule needs no communication for that. LAMB's trust ratios and max_grad_norm are over whole tensors, and
their sums are reduced over the ranks of the meshes (_mesh.py). State tensors are DTensors with the placements of their
parameter.
"""
from __future__ import annotations

from operator import is_
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import torch

from .. import _abi as abi
from .._comm import Comm
from .._handles import Context
from ._mesh import Named, Spread, interval_of
from ._parallel import LAMBS
from ._plan import Entry, Plan, Stale
from ._tensors import check_kind, is_dtensor, unsupported, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer


def local_of(tensor: Any) -> torch.Tensor:
    """Returns the local tensor of a DTensor, and any other tensor itself. Does not call to_local(), which may make a
    view."""
    local = getattr(tensor, "_local_tensor", tensor)
    if type(local) is not torch.Tensor and hasattr(local, "wait"):  # the result of a running collective
        local = local.wait()
    return local  # type: ignore[no-any-return]


def local_tensors(tensors: List[Any]) -> List[Any]:
    return list(map(local_of, tensors))


def spec_of(tensor: Any) -> Any:
    """Returns mesh, placements and shape of a DTensor in one object; None for a plain tensor."""
    return getattr(tensor, "_spec", None)


def takes_norms(owner: EngineOptimizer) -> bool:
    """True if ranks must sum norms, because a rule uses norms of whole tensors and some parameter is a DTensor. The
    lists of all ranks are then equal: each has all trained parameters."""
    if "max_norm" not in owner._fields and not any(owner._rule(group)[0] in LAMBS for group in owner.param_groups):
        return False
    return any(is_dtensor(param) for group in owner.param_groups for param in group["params"])


def refuse(owner: EngineOptimizer, name: str, param: Any) -> None:
    """Raises for a DTensor that cannot be stepped."""
    kind = type(owner).__name__
    if hasattr(owner, "_group"):
        raise unsupported("%s is a DTensor, and %s exchanges momenta of whole tensors between data-parallel ranks, "
                          "each with all parameters; use plain parameters, or AdamW or FusedLamb for DTensors" %
                          (name, kind))
    if owner._wrapper is not None:
        raise unsupported("%s is a DTensor, and %s has masters of plain parameters only; keep float32 parameters and "
                          "give fully_shard a MixedPrecisionPolicy, with torch.amp.GradScaler for float16" %
                          (name, type(owner._wrapper).__name__))
    if getattr(owner, "_compat", None) and takes_norms(owner):
        raise unsupported("%s is a DTensor, and %s with compat='deepspeed' takes one trust ratio per shard, as the "
                          "original; leave compat out" % (name, kind))
    if any(placement.is_partial() for placement in param.placements):
        raise unsupported("%s is a DTensor with placements %s, and a parameter cannot be a Partial; redistribute it" %
                          (name, _placed(param)))
    local = local_of(param)
    if hasattr(local, "__tensor_flatten__"):  # made of other tensors, without its own memory
        raise unsupported("the local tensor of %s is a %s, and must be a plain tensor; leave this parameter to "
                          "torch.optim" % (name, type(local).__name__))


def _placed(tensor: Any) -> str:
    return "(%s)" % ", ".join(map(repr, tensor.placements))


def is_placed_as(now: Any, before: Any) -> bool:
    """True if two results of spec_of() are equal."""
    return now is before or (now is not None and before is not None and now.mesh == before.mesh and
                             tuple(now.placements) == tuple(before.placements) and now.shape == before.shape)


def like(key: Any, tensor: Any, what: str) -> Any:
    """Returns `tensor` with the placements of a parameter. Communicates if the placements differ."""
    if tensor.shape != key.shape:
        raise wrong("%s has shape %s, and the parameter %s" % (what, tuple(tensor.shape), tuple(key.shape)), "SHAPE")
    if tensor.device_mesh != key.device_mesh:
        raise unsupported("%s is on the mesh %s, and the parameter on %s; put both on one mesh" %
                          (what, tensor.device_mesh, key.device_mesh))
    if tuple(tensor.placements) == tuple(key.placements):
        return tensor
    with torch.no_grad():
        return tensor.redistribute(placements=key.placements)


def local_grad(key: Any, grad: Any, name: str, redistributed: List[torch.Tensor]) -> torch.Tensor:
    """Returns the local tensor of the gradient of a DTensor. A redistributed gradient is appended to
    `redistributed`."""
    if spec_of(grad) is not spec_of(key):
        what = "the gradient of " + name
        if not is_dtensor(grad):
            raise unsupported("%s is a plain tensor, and the parameter a DTensor; make the gradient one with "
                              "DTensor.from_local" % what)
        placed = like(key, grad, what)  # redistributes other placements, as torch.optim does
        if placed is not grad:
            redistributed.append(placed)
        grad = placed
    return local_of(grad)


class MeshNorms:
    """Parallel for DTensors: the comm over which norms are summed, and the flags of shards."""

    def __init__(self, owner: EngineOptimizer, context: Context, device: torch.device, tensors: Dict[str, Any],
                 desc: Any) -> None:
        self.desc, self.tensors = desc, tensors
        self.comms: List[Comm] = []
        self.spread: Optional[Spread] = None
        if takes_norms(owner):
            self.spread = Spread([Named(name, tensor) for name, tensor in tensors.items()])
            comm = self.spread.comm(context, device)
            if comm is not None:
                self.comms.append(comm)
                desc.model = comm.handle
        self.hooked = bool(self.comms)

    def describe(self, place: Any, entry: Entry) -> None:
        """Completes a dsopt_param."""
        param = self.tensors.get(entry.name)
        if param is None:
            return
        if self.comms:
            place.flags |= self.spread.flags(param)  # type: ignore[union-attr]
        if self.desc.flags & abi.DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING and param.dtype == torch.bfloat16:
            # The random number of an element depends on its index in the whole tensor, so any sharding gives the same
            # bits.
            offset = interval_of(param)
            if offset is None:
                raise unsupported("%s has shape %s, strides %s and placements %s, and stochastic_rounding needs shards "
                                  "that are intervals of the tensor in memory, as those of Shard(0) are; leave "
                                  "stochastic_rounding out of the group" %
                                  (entry.name, tuple(param.shape), param.stride(), _placed(param)))
            place.offset = offset


class ShardedPlan(Plan):
    """A plan with DTensor parameters. `params` are their local tensors, which are read in each step: FSDP2 may replace
    them."""

    def __init__(self, owner: EngineOptimizer, device: torch.device, seed: Optional[int], entries: List[Entry]) -> None:
        for entry in entries:
            if is_dtensor(entry.param):
                refuse(owner, entry.name, entry.param)
        self.specs = [spec_of(entry.param) for entry in entries]
        self.redistributed: List[torch.Tensor] = []  # gradients, kept until the step is enqueued
        super().__init__(owner, device, seed, entries)
        self._note_written()

    def _with_memory(self, entries: List[Entry]) -> List[Entry]:
        return [entry._replace(param=local_of(entry.param)) for entry in entries]

    def _note_written(self) -> None:
        self.written = self.params + [key for key, spec in zip(self.keys, self.specs) if spec is not None]

    def _parallel(self, owner: EngineOptimizer, desc: Any) -> MeshNorms:
        tensors = {entry.name: key for entry, key in zip(self.entries, self.keys) if is_dtensor(key)}
        return MeshNorms(owner, self.context, self.device, tensors, desc)

    # --------------------------------------------------------------------------------------------------------- state
    def _state_tensor(self, i: int, name: str) -> Optional[torch.Tensor]:
        key, tensor = self.keys[i], self.of_param[i].get(name)
        if self.specs[i] is None or tensor is None:
            return super()._state_tensor(i, name)
        what = "state %r of %s" % (name, self.entries[i].name)
        check_kind(what, tensor, key)
        return local_of(like(key, tensor, what))

    def _keep(self, i: int, name: str, tensor: torch.Tensor) -> None:
        key, old = self.keys[i], self.of_param[i].get(name)
        if self.specs[i] is None:
            super()._keep(i, name, tensor)
        elif local_of(old) is not tensor or tuple(old.placements) != tuple(key.placements):
            with torch.no_grad():
                self.of_param[i][name] = type(key.data).from_local(tensor, key.device_mesh, key.placements,
                                                                   run_check=False, shape=key.shape,
                                                                   stride=key.stride())

    # ---------------------------------------------------------------------------------------------------------- step
    def prepare(self, owner: EngineOptimizer, scale: Optional[torch.Tensor], skip: Optional[torch.Tensor]) -> Any:
        self._find_memory()
        for entry, key, spec in zip(self.entries, self.keys, self.specs) if owner._passed is not None else ():
            if spec is not None and key in owner._passed.outputs:
                raise unsupported("output_params has a tensor for %s, which is a DTensor; copy its local tensor after "
                                  "the step" % entry.name)
        return super().prepare(owner, scale, skip)

    def step(self, owner: EngineOptimizer, prepared: Any) -> None:
        super().step(owner, prepared)
        self.redistributed = []

    def check_params(self) -> None:
        self._find_memory()
        super().check_params()

    def _find_memory(self) -> None:
        params = local_tensors(self.keys)
        if all(map(is_, params, self.params)) and all(map(is_, map(spec_of, self.keys), self.specs)):
            return
        for key, spec in zip(self.keys, self.specs):
            now = spec_of(key)
            if not is_placed_as(now, spec):
                raise Stale
        self.params, self.specs = params, list(map(spec_of, self.keys))
        self.entries = [entry._replace(param=param) for entry, param in zip(self.entries, params)]
        self._note_written()

    def _grads(self, passed: Any) -> List[Optional[torch.Tensor]]:
        self.redistributed = []
        grads = [key.grad for key in self.keys] if passed is None else [passed.grads.get(key) for key in self.keys]
        return [grad if grad is None or spec is None else local_grad(key, grad, entry.name, self.redistributed)
                for entry, key, grad, spec in zip(self.entries, self.keys, grads, self.specs)]
