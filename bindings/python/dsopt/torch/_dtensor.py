# SPDX-License-Identifier: Apache-2.0
"""Parameters that are DTensors: the engine steps the local tensors of this rank.

An element-wise rule needs no communication for that. LAMB's trust ratios and max_grad_norm are over whole tensors, and
their sums are reduced over the ranks of the meshes (_mesh.py). State tensors are DTensors with the placements of their
parameter.
"""
from __future__ import annotations

from math import prod
from operator import is_
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._comm import Comm
from .._handles import Context
from ._formats import SCALED, Pair, moment_of
from ._mesh import Layout, Named, Spread, interval_of, layout_of_scales
from ._parallel import LAMBS
from ._plan import Entry, Plan, Stale
from ._rounding import Kind
from ._tensors import E4M3, check_kind, dtensors, is_dtensor, unsupported, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer


SENT_AS = {E4M3: torch.uint8, torch.int16: torch.int32}  # dtypes that gloo does not send


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
    return with_placements(key, tensor, key.placements)


def with_placements(key: Any, tensor: Any, placements: Any) -> Any:
    """Returns a DTensor with other placements on the mesh of a parameter. Communicates if they differ."""
    if tuple(tensor.placements) == tuple(placements):
        return tensor
    dtype, local = tensor.dtype, tensor._local_tensor
    if dtype in SENT_AS:
        sent = SENT_AS[dtype]
        local = local.view(sent) if dtype == E4M3 else local.to(sent)
        tensor = _dtensor_of(key, local, tensor.placements, tensor.shape, tensor.stride())
    with torch.no_grad():
        tensor = tensor.redistribute(placements=placements)
    if dtype not in SENT_AS:
        return tensor
    local = local_of(tensor)
    local = local.view(dtype) if dtype == E4M3 else local.to(dtype)
    return _dtensor_of(key, local, placements, tensor.shape, tensor.stride())


def wrapped(key: Any, local: torch.Tensor) -> Any:
    """Returns a DTensor with the placements of a parameter, or `local` itself for a plain parameter."""
    if not is_dtensor(key):
        return local
    return _dtensor_of(key, local, key.placements, key.shape, key.stride())


def _dtensor_of(key: Any, local: torch.Tensor, placements: Any, shape: Any, stride: Any) -> Any:
    with torch.no_grad():
        return type(key.data).from_local(local, key.device_mesh, placements, run_check=False, shape=torch.Size(shape),
                                         stride=tuple(stride))


def with_scales(key: Any, local: torch.Tensor) -> Any:
    """Returns the scales of a moment of this parameter as they are in the state."""
    if not is_dtensor(key):
        return local
    layout = _layout(key, "scales")
    local = local.reshape((-1,) + layout.shape[1:])
    return _dtensor_of(key, local, layout.placements, layout.shape, torch.empty(layout.shape, device="meta").stride())


def local_scales(key: Any, tensor: Any, what: str) -> torch.Tensor:
    """Returns the scales of this rank's blocks, in one dimension."""
    check_kind(what, tensor, key)
    if is_dtensor(key):
        layout = _layout(key, what)
        if tuple(tensor.shape) != layout.shape:
            tensor = _with_shape(key, tensor, layout.shape, what)
        tensor = with_placements(key, tensor, layout.placements)
    return local_of(tensor).reshape(-1)


def _with_shape(key: Any, tensor: Any, shape: Tuple[int, ...], what: str) -> Any:
    """Returns a replicated DTensor with another shape, for scales of an optimizer without DTensors, which have one
    dimension."""
    if tensor.numel() != prod(shape):
        raise wrong("%s has shape %s, and must have %s" % (what, tuple(tensor.shape), shape), "SHAPE")
    module = dtensors()
    everywhere = [module.Replicate()] * key.device_mesh.ndim
    local = local_of(with_placements(key, tensor, everywhere)).reshape(shape)
    return _dtensor_of(key, local, everywhere, shape, local.stride())


def _layout(key: Any, what: str) -> Layout:
    layout = layout_of_scales(key)
    if layout is None:
        raise unsupported("%s: the parameter has shape %s and placements %s, and formats 'e4m3' and 'q8' need shards "
                          "that are made of whole blocks of 256 elements; give this parameter another format" %
                          (what, tuple(key.shape), _placed(key)))
    return layout


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

    def describe(self, place: Any, entry: Entry, formats: Pair) -> None:
        """Completes a dsopt_param. `formats` are those of its moments."""
        param = self.tensors.get(entry.name)
        if param is None:
            return
        if self.comms:
            place.flags |= self.spread.flags(param)  # type: ignore[union-attr]
        # The random number of an element depends on its index in the whole tensor, and blocks are those of the whole
        # tensor, so any sharding gives the same bits.
        rounds = self.desc.flags & abi.DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING and param.dtype == torch.bfloat16
        if any(fmt in SCALED for fmt in formats):
            _layout(param, entry.name)
        if rounds or any(fmt in SCALED + ("bf16_random",) for fmt in formats):
            offset = interval_of(param)
            if offset is None:
                cause = "stochastic_rounding" if rounds else "the format 'bf16_random'"
                raise unsupported("%s has shape %s, strides %s and placements %s, and %s needs shards that are "
                                  "intervals of the tensor in memory, as those of Shard(0) are; leave %s out of the "
                                  "group" % (entry.name, tuple(param.shape), param.stride(), _placed(param), cause,
                                             cause))
            place.offset = offset


class ShardedPlan(Plan):
    """A plan with DTensor parameters. `params` are their local tensors, which are read in each step: FSDP2 may replace
    them."""

    def __init__(self, owner: EngineOptimizer, device: torch.device, kind: Kind, entries: List[Entry]) -> None:
        for entry in entries:
            if is_dtensor(entry.param):
                refuse(owner, entry.name, entry.param)
        self.specs = [spec_of(entry.param) for entry in entries]
        self.redistributed: List[torch.Tensor] = []  # gradients, kept until the step is enqueued
        super().__init__(owner, device, kind, entries)
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
        if moment_of(name) is not None:
            return local_scales(key, tensor, what)
        check_kind(what, tensor, key)
        return local_of(like(key, tensor, what))

    def _keep(self, i: int, name: str, tensor: torch.Tensor) -> None:
        key, old = self.keys[i], self.of_param[i].get(name)
        if self.specs[i] is None:
            super()._keep(i, name, tensor)
        elif moment_of(name) is not None:
            if old is None or local_of(old).data_ptr() != tensor.data_ptr():
                self.of_param[i][name] = with_scales(key, tensor)
        elif local_of(old) is not tensor or tuple(old.placements) != tuple(key.placements):
            self.of_param[i][name] = wrapped(key, tensor)

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
