# SPDX-License-Identifier: Apache-2.0
"""The engine's description of an optimizer's parameters on one device.

A plan holds no state: weights, moments and counters are torch's tensors, and the engine is called in its functional
form (dsopt_optimizer_apply). So a plan is replaced whenever its lists change.
"""
from __future__ import annotations

import contextlib
import ctypes
from ctypes import byref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from .. import _abi as abi
from .. import _nvidia
from .._complete import PER_PARAM
from .._hooks import gate
from ._codes import DTYPES, reordered
from ._fields import group_of, key_of
from ._formats import (FIRST, KEY_OF, MASTERS, NUMBERS, OTHER_MASTER, SCALED, SECOND, Pair, changed, check_dtype,
                       formats_of, is_number, joined, moment_of, remainders_of, scale_of, scaled_moments)
from ._parallel import Parallel, agrees_over_data
from ._rounding import Kind, raw_of
from ._tensors import (STATES, Engine, Layouts, bump, check_grad, check_kind, context_of, dtype_of, is_dense, put,
                       strides_of, unsupported, words_of, wrong)

if TYPE_CHECKING:
    from ._base import EngineOptimizer

ERRORS = ("worker_error", "server_error")  # this rank's
_data_ptr, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous
_somewhere = ctypes.create_string_buffer(64)  # address of the gradient of a tensor without elements
_ungated = contextlib.nullcontext()


class Stale(Exception):
    """The plan no longer describes the parameters."""


class Entry(NamedTuple):
    group: int
    name: str
    param: torch.Tensor


class Plan:
    local_name = "the parameter"  # what has state on this rank, in errors

    def __init__(self, owner: EngineOptimizer, device: torch.device, kind: Kind, entries: List[Entry]) -> None:
        self.device = device
        self.at_once = owner._at_once  # a step may change parameters that have no gradient
        self.row_major = [owner._is_row_major(group) for group in owner.param_groups]
        self.keys = [entry.param for entry in entries]  # parameters as keys of the state
        self.formats = [self._formats_of(owner, entry) for entry in entries]
        self.entries = entries = self._with_memory(entries)
        self.params = [entry.param for entry in entries]
        self.written = self.params  # tensors whose versions a step increments
        self.context = context_of(device, entries[0].name if entries else "the optimizer")
        desc, needed, hooked = owner._engine_desc(self.context)
        if kind.rounds:
            desc.flags |= abi.DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING
        if kind.seed is not None:
            desc.seed = kind.seed
        if kind.masters is not None:
            desc.flags &= ~abi.DSOPT_OPTIMIZER_NO_MASTER
            desc.masters = MASTERS[kind.masters]
        if owner._wrapper is not None:
            needed, hooked = owner._wrapper._extend(desc, self.context, device, needed, hooked)
        parallel = self._parallel(owner, desc)
        # dsopt_optimizer_apply does not record times. dsopt_optimizer_step does, and with the 1-bit family the first
        # step of a plan compares the lists of ranks. That is one more collective, so all ranks must make a new plan in
        # the same step.
        self.timed = bool(desc.flags & abi.DSOPT_OPTIMIZER_TIMING)
        self.step_of = abi.lib.dsopt_optimizer_step if self.timed else abi.lib.dsopt_optimizer_apply
        self.engine = Engine(self.context, desc, *needed, *parallel.comms)
        self.handle = self.engine.handle
        self.gate = gate if hooked or parallel.hooked else _ungated
        # In compat mode data-parallel ranks also agree on the caller's reason to skip, not only on overflow.
        self.skip = torch.zeros(1, dtype=torch.float32, device=device) if agrees_over_data(owner) else None
        self.stream: Optional[int] = None
        self.hyper: List[Tuple[float, ...]] = []
        self._register(owner, parallel)
        self._list_params()
        self._list_state(owner)
        self.report = owner._report_on(device) if owner._reports else None
        size = ctypes.c_size_t()
        if not self.timed:
            abi.check(abi.lib.dsopt_optimizer_workspace(self.handle, byref(size)))
        self.workspace = torch.empty(size.value, dtype=torch.uint8, device=device)
        self.call = abi.dsopt_step(grads=ctypes.addressof(self.grad_list),
                                   params=ctypes.addressof(self.param_list),
                                   count=len(entries),
                                   state=ctypes.addressof(self.state_list),
                                   state_count=len(self.state_list),
                                   workspace=self.workspace.data_ptr() or None,
                                   workspace_bytes=size.value,
                                   report=self.report.data_ptr() if self.report is not None else None)

    # ------------------------------------------------------------------------------------------------------- set-up
    def _with_memory(self, entries: List[Entry]) -> List[Entry]:
        """Returns the entries with tensors whose memory the engine can use."""
        return entries

    def _formats_of(self, owner: EngineOptimizer, entry: Entry) -> Pair:
        group = owner.param_groups[entry.group]
        return formats_of(owner, group, entry.name, entry.param, scaled_moments(owner, group, entry.param))

    def _parallel(self, owner: EngineOptimizer, desc: Any) -> Any:
        return Parallel(owner, self.context, self.device, self.entries, desc)

    def _register(self, owner: EngineOptimizer, parallel: Any) -> None:
        """Registers groups and parameters, without memory."""
        for g, group in enumerate(owner.param_groups):
            self.hyper.append(owner._hyper(group, g))
            new = group_of(owner, group, self.hyper[-1])
            formats = owner._formats_in(group)
            new.exp_avg_format, new.exp_avg_sq_format = map(NUMBERS.__getitem__, formats)
            members = [(entry, own) for entry, own in zip(self.entries, self.formats) if entry.group == g]
            places, dims = (abi.dsopt_param * max(len(members), 1))(), []
            for place, (entry, own) in zip(places, members):
                dtype, factor = dtype_of(entry.param, entry.name)
                shape = tuple(entry.param.shape) + (2,) * (factor == 2)
                dims.append((ctypes.c_int64 * max(len(shape), 1))(*shape))
                place.tensor.dtype, place.tensor.numel, place.name = dtype, entry.param.numel(
                ) * factor, entry.name.encode()
                if len(shape) <= 8:
                    place.dims, place.ndim = ctypes.addressof(dims[-1]), len(shape)
                place.flags = owner._param_flags(group, entry.param)
                place.rows, place.cols = owner._block_of(group)
                if own != formats:
                    place.flags |= abi.DSOPT_PARAM_F32_MOMENTS
                parallel.describe(place, entry, own)
            _nvidia.load_for_group(new.algorithm, self.device.type)
            abi.check(abi.lib.dsopt_optimizer_add_group(self.handle, byref(new), places, len(members)),
                      "param_groups[%d]: " % g)

    def _list_params(self) -> None:
        count = len(self.entries)
        self.param_list, self.grad_list = [(abi.dsopt_tensor * max(count, 1))() for _ in range(2)]
        self.param_words, self.grad_words = words_of(self.param_list), words_of(self.grad_list)
        kinds = [dtype_of(entry.param, entry.name) for entry in self.entries]
        self.numels = [p.numel() for p in self.params]
        self.dtypes = [p.dtype for p in self.params]
        self.shapes = [p.shape for p in self.params]
        for words in (self.param_words, self.grad_words):
            put(words, 1, [n * factor for n, (_, factor) in zip(self.numels, kinds)])
            put(words, 2, [dtype for dtype, _ in kinds])
        self.param_at: Optional[List[int]] = None
        self.grad_at: Optional[List[int]] = None
        self.layouts: Optional[Layouts] = None  # layouts of the parameters and gradients in the lists
        # The fast path of _gather requires contiguous tensors.
        self.plain = all(map(_is_contiguous, self.params)) and not any(p.is_complex() for p in self.params)

    def _list_state(self, owner: EngineOptimizer) -> None:
        """Lists torch's state tensors for the engine, and creates missing ones."""
        count = ctypes.c_int64()
        abi.check(abi.lib.dsopt_optimizer_state_count(self.handle, byref(count)))
        self.state_list = (abi.dsopt_tensor * count.value)()
        # Per parameter: index and name of each tensor of its shape. The scales of a moment are the next tensor.
        self.state_of: List[List[Tuple[int, str]]] = [[] for _ in self.entries]
        is_new = not any(owner._has_begun(owner.state.get(p)) for p in self.keys)
        existing: List[torch.Tensor] = []  # state that exists before the first step
        self._take_steps(owner)
        self.of_param = [owner.state[p] for p in self.keys]
        self.whole: Dict[str, torch.Tensor] = {}  # state of the whole optimizer by name
        for i, place in enumerate(self.state_list):
            info = abi.dsopt_state_info()
            abi.check(abi.lib.dsopt_optimizer_state(self.handle, i, byref(info)))
            name = info.name.decode()
            if info.param >= 0:
                self._convert_master(info.param, name)
                was_there = name in self.of_param[info.param]
                tensor = self._state_of_param(owner, info, name)
                if was_there and is_new:
                    existing.append(tensor)
                if moment_of(name) is None:
                    self.state_of[info.param].append((i, name))
            elif name == "step":
                tensor = self.steps
            else:
                tensor = self._state_of_whole(owner, info, name)
            place.data, place.numel, place.dtype = tensor.data_ptr(), info.tensor.numel, info.tensor.dtype
        self._drop_errors()
        self._drop_masters()
        if is_new and self.entries:
            dense = [p.detach() if self._in_place(i) else p.detach().contiguous() for i, p in enumerate(self.params)]
            put(self.param_words, 0, list(map(_data_ptr, dense)))
            values = [tensor.clone() for tensor in existing]
            abi.check(
                abi.lib.dsopt_optimizer_init_state(self.handle, self.param_list, len(self.params), self.state_list,
                                                   count.value, self._stream()))
            for tensor, value in zip(existing, values):
                tensor.copy_(value)
            for i, (param, copy) in enumerate(zip(self.params, dense)):
                if not self._in_place(i):
                    param.detach().copy_(copy)
            self.steps_seen.add_(self.steps)

    def _take_steps(self, owner: EngineOptimizer) -> None:
        """Makes torch's step counts views of one tensor, which is copied from and to the engine's I32 list: torch's
        `step` is a number per parameter. If torch's state has no `step`, none is added."""
        count = len(self.entries)
        states = [owner.state[p] for p in self.keys]
        old = [owner._steps_of(state) if state else owner._starts_at(owner.param_groups[entry.group], entry.group)
               for entry, state in zip(self.entries, states)]
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self.steps_seen = torch.tensor(old, dtype=dtype, device=self.device)
        self.steps = torch.zeros(count, dtype=torch.int32, device=self.device)
        random = [len(raw) > 1 for raw in raw_of(owner)]  # random numbers depend on the step
        for entry, p, step in zip(self.entries, self.keys, self.steps_seen.unbind()):
            if owner._counts_in(owner.param_groups[entry.group]) or random[entry.group]:
                owner.state[p]["step"] = step

    def _state_tensor(self, i: int, name: str) -> Optional[torch.Tensor]:
        """Returns a state tensor of a parameter, if it exists."""
        tensor: Optional[torch.Tensor] = self.of_param[i].get(name)
        if tensor is not None:
            check_kind("state %r of %s" % (name, self.entries[i].name), tensor, self.keys[i])
        return tensor

    def _keep(self, i: int, name: str, tensor: torch.Tensor) -> None:
        """Stores a state tensor in the state of its parameter."""
        self.of_param[i][name] = tensor

    def _state_of_param(self, owner: EngineOptimizer, info: Any, name: str) -> torch.Tensor:
        entry = self.entries[info.param]
        param = entry.param
        if moment_of(name) is not None:
            return self._scales_of_param(info, name)
        dtype = torch.complex64 if param.is_complex() else STATES[info.tensor.dtype]
        tensor = self._state_tensor(info.param, name)
        if tensor is not None:
            self._check_format(info.param, name, tensor)
        else:
            self.of_param[info.param].pop(scale_of(name), None)
            like = self._local(info.param)
            if info.flags & abi.DSOPT_STATE_FROM_PARAM:
                tensor = like.to(dtype, copy=True)
            elif self._format_of(info.param, name) in SCALED:
                tensor = torch.zeros_like(like, dtype=torch.uint8).view(dtype)
            else:
                start = owner._starts_as(name, owner.param_groups[entry.group])
                value = complex(start, start) if param.is_complex() else start
                tensor = torch.full_like(like, value, dtype=dtype)
        if tuple(tensor.shape) != self._shape_of(info.param):
            raise wrong("state %r of %s has shape %s, and %s %s" %
                        (name, entry.name, tuple(tensor.shape), self.local_name, self._shape_of(info.param)), "SHAPE")
        if tensor.dtype != dtype or tensor.device != self.device:
            tensor = tensor.to(dtype=dtype, device=self.device)
        if not is_dense(tensor):
            tensor = tensor.contiguous()
        self.plain &= tensor.is_contiguous()
        self._keep(info.param, name, tensor)
        return tensor

    def _in_place(self, i: int) -> bool:
        """True if the engine steps a parameter where it is, False: in a contiguous copy."""
        param = self.entries[i].param
        return param.is_contiguous() if self.row_major[self.entries[i].group] else is_dense(param)

    def _local(self, i: int) -> torch.Tensor:
        """Returns the elements of a parameter that have state on this rank, in the memory order of the state."""
        param = self.entries[i].param.detach()
        return param if self._in_place(i) else param.contiguous()

    def _shape_of(self, i: int) -> Tuple[int, ...]:
        """Returns the shape of the state of a parameter."""
        return tuple(self.entries[i].param.shape)

    def _scales_of_param(self, info: Any, name: str) -> torch.Tensor:
        """Returns the scales of a moment, which precedes them in the list. A moment of zeros has scales of zero."""
        entry, tensor = self.entries[info.param], self._state_tensor(info.param, name)
        if tensor is None:
            tensor = torch.zeros(info.tensor.numel, dtype=torch.float32, device=self.device)
        elif tensor.numel() != info.tensor.numel:
            raise wrong("state %r of %s has %d elements, and must have %d, one per 256 elements of the parameter" %
                        (name, entry.name, tensor.numel(), info.tensor.numel), "SHAPE")
        tensor = tensor.to(dtype=torch.float32, device=self.device).contiguous().reshape(-1)
        self._keep(info.param, name, tensor)
        return tensor

    def _format_of(self, i: int, name: str) -> str:
        """Returns the format of a state tensor of a parameter."""
        return dict(zip((FIRST, SECOND), self.formats[i]))[KEY_OF[name]] if name in KEY_OF else "f32"

    def _check_format(self, i: int, name: str, tensor: torch.Tensor) -> None:
        """Refuses a moment that is not stored in its format: a conversion to the dtype of codes makes no codes."""
        fmt, what = self._format_of(i, name), "state %r of %s" % (name, self.entries[i].name)
        same = tensor.dtype == DTYPES.get(fmt, torch.bfloat16)
        if fmt == "f32":
            same = name not in KEY_OF or is_number(tensor)
        if not same:
            raise changed("%s is %s, and its format is %r" % (what, str(tensor.dtype).replace("torch.", ""), fmt))
        check_dtype(self.of_param[i], name, what)
        if fmt in SCALED and scale_of(name) not in self.of_param[i]:
            raise changed("%s has codes, and there is no %r" % (what, scale_of(name)))

    def _convert_master(self, i: int, name: str) -> None:
        """Converts the master of a state dict to the kind that this optimizer has. Done in the first step: weights may
        be loaded after the state."""
        state, other = self.of_param[i], OTHER_MASTER.get(name)
        if other in state and name not in state:
            check_dtype(state, other, "state %r of %s" % (other, self.entries[i].name))
            param = self._local(i)
            tensor = self._state_tensor(i, other).to(self.device)
            if tensor.shape == param.shape and param.dtype == torch.bfloat16:
                self._keep(i, name, joined(param, tensor) if name == "master" else remainders_of(tensor.float()))

    def _drop_masters(self) -> None:
        """Removes masters of a kind that this optimizer does not have: weights change without them."""
        for state, names in zip(self.of_param, self.state_of):
            for name in OTHER_MASTER:
                if name in state and name not in [listed for _, listed in names]:
                    del state[name]

    def _state_of_whole(self, owner: EngineOptimizer, info: Any, name: str) -> torch.Tensor:
        """Returns state of the whole optimizer. Keys of optimizer.state must be parameters, for code that loops over it
        and for torch.distributed.checkpoint. So a value per parameter is in the state of each parameter, and other
        values in the state of the first parameter. Trust ratios are only reported, so they are not in the state."""
        numel, dtype = info.tensor.numel, STATES[info.tensor.dtype]
        tensor = torch.zeros(numel, dtype=dtype, device=self.device)
        if name in PER_PARAM:
            for value, state in zip(tensor.unbind(), self.of_param):
                if name in state:
                    value.copy_(state[name].reshape(()))
                state[name] = value
        elif name != "trust_ratio":
            key = name + owner._rank_key if info.flags & abi.DSOPT_STATE_RANK_LOCAL else name
            found = [state.pop(k) for state in self.of_param for k in (key, name) if k in state]
            old = found[0] if found else tensor
            if old.shape == tensor.shape and old.dtype == dtype and old.device == self.device and old.is_contiguous():
                tensor = old
            elif not info.flags & abi.DSOPT_STATE_RANK_LOCAL:  # else parameters were added: reset
                both = min(numel, old.numel())
                tensor[:both].copy_(old.reshape(-1)[:both])
            self.of_param[0][key] = tensor
        self.whole[name] = tensor
        return tensor

    def _drop_errors(self) -> None:
        """Removes error feedback of other ranks or of another number of ranks, which a checkpoint may have."""
        used = [tensor for name, tensor in self.whole.items() if name in ERRORS]
        for state in self.of_param:
            for key in [key for key in state if key.startswith(ERRORS)]:
                if not any(state[key] is tensor for tensor in used):
                    del state[key]

    # -------------------------------------------------------------------------------------------------------- files
    def exchange_file(self, owner: EngineOptimizer, call: Callable[[Plan], None]) -> None:
        """Calls a function that saves the state to a file, or loads it. The engine has the memory of all tensors during
        the call. Loaded hyper-parameters are written to the groups."""
        for entry in self.entries:
            if not self._in_order(entry):
                raise unsupported("%s is not contiguous, and files are in row-major order; use state_dict" % entry.name)
        for i, param in enumerate(self.params):
            self._order_state(i, param.detach())
        copies = [param.detach().contiguous() for param in self.params]
        self.layouts = self.grad_at = self.param_at = None
        put(self.param_words, 0, list(map(_data_ptr, copies)))
        self.steps.copy_(self.steps_seen)
        lists = ((abi.DSOPT_BIND_PARAMS, self.param_list, len(self.params)),
                 (abi.DSOPT_BIND_STATE, self.state_list, len(self.state_list)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with self.gate:
            for what, tensors, count in lists:
                abi.check(abi.lib.dsopt_optimizer_bind(self.handle, what, tensors, count))
            call(self)
        self.steps_seen.copy_(self.steps)
        for param, copy in zip(self.params, copies):
            if copy.data_ptr() != param.data_ptr():  # with masters="remainder" a load writes the parameters
                param.detach().copy_(copy)
        for g, group in enumerate(owner.param_groups):
            for field, old in zip(owner._fields_in(group), self.hyper[g]):
                value = ctypes.c_double()
                abi.check(abi.lib.dsopt_optimizer_get(self.handle, g, key_of(field), byref(value)))
                if value.value != old:
                    owner._set_field(group, field, value.value)

    def _in_order(self, entry: Entry) -> bool:
        """True if the state of a parameter is in row-major order."""
        return bool(entry.param.is_contiguous())

    # --------------------------------------------------------------------------------------------------------- step
    def prepare(self, owner: EngineOptimizer, scale: Optional[torch.Tensor], skip: Optional[torch.Tensor]) -> Any:
        """Describes a step to the engine, and checks it. Returns the argument of `step`; nothing has been stepped
        yet."""
        for g, group in enumerate(owner.param_groups):
            now = owner._hyper(group, g)
            if now != self.hyper[g]:
                self._set(owner, g, now)
        passed, call = owner._passed, self.call
        staged, copies = self._gather(passed)
        call.out = call.grad_norms = None
        if passed is not None:
            scale = self._add_passed(passed, scale)
            copies += [*passed.grads.values(), *passed.outputs.values()]
        call.stream = self._stream()
        call.grad_scale = None if scale is None else scale.data_ptr()
        skip = self.skip if skip is None else skip
        call.skip = None if skip is None else skip.data_ptr()
        return staged, (copies, scale, skip), [] if passed is None else list(passed.outputs.values())

    def step(self, owner: EngineOptimizer, prepared: Any) -> None:
        staged, needed, outputs = prepared
        self.steps.copy_(self.steps_seen)
        with self.gate:
            status = self.step_of(self.handle, byref(self.call))
        if status:
            abi.check(status)
        self.steps_seen.copy_(self.steps)
        for param, copy in staged:
            param.copy_(copy)
        del needed  # kernels that read them are earlier on the stream
        if bump is not None:
            bump(self.written + outputs if outputs else self.written)

    def _add_passed(self, passed: Any, scale: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """Adds outputs and norms to the call. Returns the scale of the gradients."""
        if passed.outputs:
            self.out_list = (abi.dsopt_tensor * max(len(self.params), 1))()
            for place, entry, numel in zip(self.out_list, self.entries, self.numels):
                out = passed.outputs.get(entry.param)
                if out is not None and numel:
                    self._check_output(entry, out)
                    place.dtype, factor = dtype_of(out, "the output of " + entry.name)
                    place.data, place.numel = out.data_ptr(), numel * factor
            self.call.out = ctypes.addressof(self.out_list)
        if passed.norms is not None:
            self.norms = torch.tensor(passed.norms, dtype=torch.float32, device=self.device)
            self.call.grad_norms = self.norms.data_ptr()
        if passed.scale != 1:
            scale = passed.scale * (1 if scale is None else scale)
            self.scale = scale = torch.as_tensor(scale, dtype=torch.float32).to(self.device)
        return scale

    def _check_output(self, entry: Entry, out: torch.Tensor) -> None:
        what, param = "the output of " + entry.name, entry.param
        if out.shape != param.shape:
            raise wrong("%s has shape %s, and the parameter %s" % (what, tuple(out.shape), tuple(param.shape)), "SHAPE")
        if out.device != self.device:
            raise wrong("%s is on device %s, and the parameter on %s" % (what, out.device, self.device), "DEVICE")
        if out.layout != torch.strided or not is_dense(param) or strides_of(out) != strides_of(param):
            raise unsupported("%s does not have the strides of the parameter, or there are gaps between elements; make "
                              "it with torch.empty_like(parameter, dtype=...), and parameters contiguous" % what)
        if out.is_complex() != param.is_complex():
            raise wrong("%s is %s, and the parameter %s" % (what, out.dtype, param.dtype), "DTYPE")

    def milliseconds(self) -> List[float]:
        """Returns dsopt_report.ms of the last step. Waits for the device."""
        report = abi.dsopt_report()
        with self.gate:
            status = abi.lib.dsopt_optimizer_report(self.handle, byref(report))
        abi.check(status)
        return list(report.ms)

    def _set(self, owner: EngineOptimizer, g: int, now: Tuple[float, ...]) -> None:
        # Fields that become 0 are set first: nesterov and dampening exclude each other.
        fields = owner._fields_in(owner.param_groups[g])
        for field, old, new in sorted(zip(fields, self.hyper[g], now), key=lambda change: change[2] != 0):
            if new != old:
                abi.check(abi.lib.dsopt_optimizer_set(self.handle, g, key_of(field), new), "param_groups[%d]: " % g)
        self.hyper[g] = now

    def _stream(self) -> Optional[int]:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else None

    def _grads(self, passed: Any) -> List[Optional[torch.Tensor]]:
        return [p.grad for p in self.params] if passed is None else [passed.grads.get(p) for p in self.params]

    def _gather(self, passed: Any) -> Tuple[List[Tuple[torch.Tensor, torch.Tensor]], List[torch.Tensor]]:
        """Writes the addresses of parameters and gradients to the lists. Returns the parameters that are stepped in a
        copy, with their copies, and the copies of gradients, which must live until the call has returned."""
        params = self.params
        grads = self._grads(passed)
        if not self.plain:
            return self._arrange(grads)
        present = grads
        try:
            # This function takes a third of the time of a step of small tensors.
            gradient_addresses = list(map(_data_ptr, grads))
        except (TypeError, RuntimeError):  # None; sparse
            present = [p if g is None else g for p, g in zip(params, grads)]
            if any(g.layout != torch.strided for g in present):
                return self._arrange(grads)
            gradient_addresses = [0 if g is None else g.data_ptr() for g in grads]
        # Freed memory may be reused for another dtype or shape, so equal addresses prove nothing.
        both = present + params
        if self.layouts is None or not self.layouts.equal(both):
            self.layouts = self.grad_at = None
            if not all(map(_is_contiguous, both)) or any(g.is_neg() for g in present):
                return self._arrange(grads)
            self.check_params()
            gradient_addresses = [self._examine(i, g) for i, g in enumerate(grads)]
            put(self.grad_words, 0, gradient_addresses)
            self.layouts, self.grad_at = Layouts(both), gradient_addresses
        elif gradient_addresses != self.grad_at:
            self.grad_at = None
            if 0 in gradient_addresses:
                gradient_addresses = [self._examine(i, g) for i, g in enumerate(grads)]
            put(self.grad_words, 0, gradient_addresses)
            self.grad_at = gradient_addresses
        here = list(map(_data_ptr, params))
        if here != self.param_at:
            self._follow(here)
        return [], []

    def check_params(self) -> None:
        """Raises Stale if the parameters are not those for which the plan was made."""
        for param, dtype, shape in zip(self.params, self.dtypes, self.shapes):
            if param.dtype != dtype or param.shape != shape or param.device != self.device:
                raise Stale

    def _follow(self, here: List[int]) -> None:
        """Updates the lists after parameters have moved to other memory."""
        for entry, at, numel in zip(self.entries, here, self.numels):
            if not at and numel:
                raise wrong("%s has no memory" % entry.name)
        put(self.param_words, 0, here)
        self.param_at = here

    def _examine(self, i: int, grad: Optional[torch.Tensor]) -> int:
        """Returns the address of a gradient, after checking that it matches its parameter."""
        entry = self.entries[i]
        if grad is None:  # `layouts` has the parameter instead
            self.grad_list[i].dtype = self.param_list[i].dtype
            return 0
        what = "the gradient of " + entry.name
        check_grad(grad, entry.param, what, self.device)
        self.grad_list[i].dtype, _ = dtype_of(grad, what)
        if not self.numels[i]:
            return ctypes.addressof(_somewhere)
        if not grad.data_ptr():
            raise wrong("%s has no memory" % what)
        return grad.data_ptr()

    def _arrange(
            self,
            grads: List[Optional[torch.Tensor]]) -> Tuple[List[Tuple[torch.Tensor, torch.Tensor]], List[torch.Tensor]]:
        """_gather for any memory order: parameter, gradient and state must have the parameter's order. Gradients with
        another order are copied. A parameter that is not dense is stepped in a copy."""
        staged: List[Tuple[torch.Tensor, torch.Tensor]] = []
        copies: List[torch.Tensor] = []
        self.layouts = self.grad_at = self.param_at = None
        self.check_params()
        for i, (entry, grad) in enumerate(zip(self.entries, grads)):
            param = entry.param
            self.grad_list[i].data = self._examine(i, grad)
            self.param_list[i].data = param.data_ptr()
            if grad is None and not self.at_once:
                continue
            param = param.detach()
            if not self._in_place(i):
                staged.append((param, param.clone(memory_format=torch.contiguous_format)))
                param = staged[-1][1]
                self.param_list[i].data = param.data_ptr()
            if grad is not None and (strides_of(grad) != strides_of(param) or grad.is_conj() or grad.is_neg()):
                copies.append(torch.empty_strided(param.shape, param.stride(), dtype=grad.dtype, device=self.device))
                copies[-1].copy_(grad.detach())
                self.grad_list[i].data = copies[-1].data_ptr() if self.numels[i] else ctypes.addressof(_somewhere)
            self._order_state(i, param)
        return staged, copies

    def _order_state(self, i: int, param: torch.Tensor) -> None:
        """Converts the state of a parameter to the parameter's strides."""
        for index, name in self.state_of[i]:
            tensor, fmt = self._state_tensor(i, name), self._format_of(i, name)
            if strides_of(tensor) == strides_of(param):
                continue
            if fmt in SCALED:
                new, scales = reordered(name, fmt, tensor, self._state_tensor(i, scale_of(name)), param)
                self._keep(i, scale_of(name), scales)
                self.state_list[index + 1].data = scales.data_ptr()
            else:
                new = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device)
                new.copy_(tensor)
            self._keep(i, name, new)
            self.state_list[index].data = new.data_ptr()
