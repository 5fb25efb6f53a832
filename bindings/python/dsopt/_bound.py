# SPDX-License-Identifier: Apache-2.0
"""The arrays of an optimizer whose addresses the library keeps between calls."""

from __future__ import annotations

import ctypes
from ctypes import byref
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from . import _abi as abi
from ._arrays import refuse
from ._lists import TensorList, Watch, pins_of
from ._params import Arrays, in_order
from ._state import BoundState, StateList, structs_of


class Bound:
    """Parameters, and bound gradients and state. Keeps the arrays, exports of their buffers and DLPack capsules, and
    binds an array of NumPy again if its `data` was assigned."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.names: List[str] = []
        self.shapes: List[Tuple[int, ...]] = []
        self.dtypes: List[int] = []
        self.params: List[Any] = []
        self.state = BoundState()
        self._params_owners: List[Any] = []
        self._pins: List[Any] = []
        self._params_watch = Watch()
        self._bound_state_arrays: Optional[Mapping[str, Any]] = None
        self._grads: Optional[Sequence[Any]] = None
        self._grads_watch = Watch()
        self._grads_call: Tuple[TensorList, Any, Any] = self._with_step(self.list("grads"))
        self._grads_kept: Any = None
        self._grads_pins: List[Any] = []
        self._call: Optional[Tuple[TensorList, Any, Any]] = None

    def list(self, label: str, write: bool = False) -> TensorList:
        """Returns an empty list with an entry for each parameter."""
        return TensorList(label, self.names, self.shapes, self.dtypes, self._context, write=write)

    def _with_step(self, grads: TensorList) -> Tuple[TensorList, Any, Any]:
        """Returns the list, a dsopt_step with these gradients, and a reference to the struct."""
        step = abi.dsopt_step(grads=ctypes.addressof(grads.struct), count=len(self.names))
        return grads, step, byref(step)

    def add(
        self,
        names: Sequence[str],
        shapes: Sequence[Tuple[int, ...]],
        dtypes: Sequence[int],
        arrays: Sequence[Any],
        owners: Any,
    ) -> None:
        """Adds parameters that were registered. Bound gradients and state are too short from now on."""
        self.names += names
        self.shapes += shapes
        self.dtypes += dtypes
        self.params += arrays
        self._params_owners.append(owners)
        self._pins += pins_of(arrays)
        self._params_watch.extend(arrays)
        self._grads = self._call = self._bound_state_arrays = None
        self.state.watch = Watch()

    # ---------------------------------------------------------------------------------------------------------- in use
    def unchanged(self) -> bool:
        """Returns True if parameters and state have the memory that was bound."""
        return self._params_watch.unchanged() and self.state.watch.unchanged()

    def follow(self, optimizer: Any) -> None:
        """Binds arrays again whose memory has changed."""
        if not self._params_watch.unchanged():
            self._bind_params(optimizer, self.params, *self._filled("params", self.params))
        if self._bound_state_arrays is not None and not self.state.watch.unchanged():
            self._bind_state(optimizer, self._bound_state_arrays, *structs_of(optimizer, self._bound_state_arrays))

    def call_list(self) -> Tuple[TensorList, Any, Any]:
        """Returns the result of _with_step for the gradients of one call, reused by later calls."""
        if self._call is None:
            self._call = self._with_step(self.list("grads"))
        return self._call

    def bound_list(self, stream: Optional[int], write: bool = False) -> Tuple[TensorList, Any, Any]:
        """Returns the result of _with_step for the bound gradients."""
        if self._grads is None:
            refuse("grads", "are neither given nor bound: pass them, or bind them first with bind(grads=...)")
        if write or not self._grads_watch.unchanged():
            self._grads_kept = self._grads_call[0].fill(self._grads, stream, write)
            self._grads_pins, self._grads_watch = pins_of(self._grads), Watch(self._grads)
        return self._grads_call

    # ------------------------------------------------------------------------------------------------------------ bind
    def bind(
        self, optimizer: Any, params: Optional[Arrays], grads: Optional[Arrays], state: Optional[Mapping[str, Any]]
    ) -> None:
        """As Optimizer.bind. Everything is checked before anything is bound."""
        before = self.params
        if params is not None:
            arrays = in_order("params", params, self.names)
            new_params = arrays, *self._filled("params", arrays)
        if grads is not None:
            gradients = in_order("grads", grads, self.names, missing=True)
            call = self._with_step(self.list("grads"))
            grads_kept = call[0].fill(gradients)
        if state is not None:
            new_state = structs_of(optimizer, state)
        if params is not None:
            self._bind_params(optimizer, *new_params)
        if state is not None:
            try:
                self._bind_state(optimizer, state, *new_state)
            except BaseException:
                if params is not None:
                    self._bind_params(optimizer, before, *self._filled("params", before))
                raise
        if grads is not None:
            # A copy, because the caller may change the list.
            self._grads, self._grads_call, self._grads_kept = list(gradients), call, grads_kept
            self._grads_pins, self._grads_watch = pins_of(self._grads), Watch(self._grads)

    def _filled(self, label: str, arrays: Sequence[Any]) -> Tuple[TensorList, Any]:
        filled = self.list(label, write=True)
        return filled, filled.fill(arrays)

    def _bind_params(self, optimizer: Any, arrays: Sequence[Any], filled: TensorList, owners: Any) -> None:
        abi.check(
            abi.lib.dsopt_optimizer_bind(optimizer.handle, abi.DSOPT_BIND_PARAMS, filled.struct, len(self.names))
        )
        self.params, self._params_owners = list(arrays), [owners]
        self._pins, self._params_watch = pins_of(arrays), Watch(arrays)

    def _bind_state(self, optimizer: Any, state: Mapping[str, Any], structs: Any, owners: Any) -> None:
        abi.check(abi.lib.dsopt_optimizer_bind(optimizer.handle, abi.DSOPT_BIND_STATE, structs, len(structs)))
        self._bound_state_arrays = dict(state)
        arrays = list(self._bound_state_arrays.values())
        self.state.watch = Watch(arrays)
        self.state.owners = owners, pins_of(arrays)  # last, because the old watch reads the old arrays


class ApplyLists:
    """The lists and the workspace of one call of Optimizer.apply, which later calls use again. `key`: what the lists
    depend on."""

    def __init__(self, bound: Bound, optimizer: Any, key: Tuple[int, int]) -> None:
        self.key, self.state = key, StateList(optimizer)
        self.params, self.grads, self.out = map(bound.list, ("params", "grads", "out"))
        self.space: Any = b""
