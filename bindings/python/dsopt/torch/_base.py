# SPDX-License-Identifier: Apache-2.0
"""Base class of all optimizers here: torch.optim.Optimizer with the engine's step."""
from __future__ import annotations

import os
import weakref
from itertools import chain
from operator import is_, itemgetter
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .. import _files
from .._complete import PER_PARAM
from . import _formats
from ._convert import convert
from ._double_plan import DoublePlan, is_double
from ._dtensor import ShardedPlan, local_tensors, takes_norms
from ._fields import set_field
from ._formats import Pair
from ._import import imported
from ._loaded import WHOLE, check_loaded, ordered
from ._parallel import agrees_over_data
from ._plan import ERRORS, Entry, Plan, Stale
from ._rank_plan import RankPlan, check_entries
from ._ranks import KEY, DataRanks, check_whole, data_ranks_of
from ._rounding import Kind, check_dtypes, keep, kinds_of, values_of
from ._several import PassedArguments, with_norms
from ._tensors import Layouts, check_kind, is_dtensor, refused, unsupported, wrong

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
REFUSED = ("amsgrad", "maximize", "differentiable")
SHAPED = ("master", "remainder", "exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "anchor", "momentum_accumulator",
          "momentum_buffer", "sum")  # state tensors of the parameter's shape
WRAPPED = ("master", "loss_scale", "scaler")  # under the keys of a wrapper in its state dict
_params_of = itemgetter("params")


def number(value: Any, g: int, key: str) -> float:
    """Returns a hyper-parameter of a group, which is a number or a tensor of one element, as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise wrong("param_groups[%d]: %s is %r, and must be a number" % (g, key, value)) from None


class EngineOptimizer(torch.optim.Optimizer):
    """Steps with the engine. The state is torch's: tensors in `state`, hyper-parameters in `param_groups`."""

    _fields: Tuple[str, ...] = ("lr", "beta1", "beta2", "eps", "weight_decay")  # of dsopt_group, in the order of _hyper
    _counts = True  # "step" is in the state of each parameter
    _at_once = False  # True: all parameters have state from the first step on, with or without a gradient
    _reports = False  # True: steps write dsopt_step.report
    _rounds = True  # groups may have stochastic_rounding
    _stores: Tuple[str, ...] = ()  # keys of _formats that groups may have
    _report: Optional[torch.Tensor] = None  # report of the last step; all plans use the same tensor
    _may_have: Tuple[str, ...] = ()  # moments of others that a state dict may have; not used
    _may_lack: Tuple[str, ...] = ()  # moments with which a parameter that has been stepped may start
    _kept: Tuple[str, ...] = ()  # keys of groups that keep their values if a state dict lacks them
    _rank_key = ""  # suffix of the names of state tensors that differ between ranks
    _wrapper_ref: Any = None  # weak reference to the FP16_Optimizer or FP16_UnfusedOptimizer around it
    _plans: Optional[List[Any]] = None  # each a Plan or a DoublePlan
    _loading: Optional[Dict[str, Any]] = None
    _ranks: Optional[DataRanks] = None  # with shard or average
    _passed: Optional[PassedArguments] = None  # during a step with more arguments than a closure

    @property
    def _wrapper(self) -> Any:
        """The FP16_Optimizer or FP16_UnfusedOptimizer around it, which owns it. A cycle would keep the memory of both
        until the cyclic collector runs."""
        if self._wrapper_ref is None:
            return None
        wrapper = self._wrapper_ref()
        if wrapper is None:
            raise unsupported("the wrapper of this %s no longer exists, and has its masters and loss scale; keep it" %
                              type(self).__name__)
        return wrapper

    @_wrapper.setter
    def _wrapper(self, wrapper: Any) -> None:
        self._wrapper_ref = None if wrapper is None else weakref.ref(wrapper)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if the step does GradScaler's unscaling and skipping: with fused=True only, as in torch. Then accelerate
        does not detect a skipped step, and Lightning refuses to clip. Before torch 2.0 GradScaler had another
        protocol."""
        if self._ranks is not None and self._ranks.averages:
            if VERSION < (2, 0):
                self._ranks.refuse_scaler(type(self).__name__)
            return True  # the step refuses
        return VERSION >= (2, 0) and bool(self.__dict__.get("defaults", {}).get("fused"))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Ignores the value that torch's constructors set; the property follows from `fused`."""

    def _begin_ranks(self, group: Any, shard: Any, average: Any, node_group: Any, max_grad_norm: Any = 0.0,
                     split_matrices: Any = False, check_ranks: Any = False) -> None:
        """Takes these arguments of the constructor."""
        self._ranks = data_ranks_of(type(self), group, shard, average, node_group, max_grad_norm, split_matrices,
                                    check_ranks)
        if self._ranks is not None:
            self._at_once = True  # the list of all ranks
            self._counts |= self._ranks.shards  # each parameter has state, so new ones are detected

    @property
    def _shards(self) -> bool:
        """True if the state is this rank's parts."""
        return self._ranks is not None and self._ranks.shards

    # ----------------------------------------------------------------------------------- descriptions for the engine
    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        """Returns algorithm, flags and constant fields of a group."""
        raise NotImplementedError

    def _fields_in(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        """Returns the fields of dsopt_group that a group of param_groups has."""
        return self._fields

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        """Returns the values of `_fields_in` a group."""
        lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        if type(lr) is float and type(beta1) is float and type(beta2) is float and type(eps) is float:
            return lr, beta1, beta2, eps, float(decay)
        return (number(lr, g, "lr"), number(beta1, g, "betas[0]"), number(beta2, g, "betas[1]"), number(eps, g, "eps"),
                number(decay, g, "weight_decay"))

    def _set_field(self, group: Dict[str, Any], field: str, value: float) -> None:
        """Sets the hyper-parameter of a group that is this field of dsopt_group."""
        set_field(group, field, value)

    def _counts_in(self, group: Dict[str, Any]) -> bool:
        """True if "step" is in the state of each parameter of a group."""
        return self._counts

    def _steps_of(self, state: Dict[str, Any]) -> float:
        """Returns the step count of a parameter, from its state."""
        return float(state.get("step", 0))

    def _starts_at(self, group: Dict[str, Any], g: int) -> float:
        """Returns the step count of a parameter that has no state yet."""
        return 0.0

    def _has_begun(self, state: Optional[Dict[str, Any]]) -> bool:
        """True for the state of a parameter that has been stepped."""
        return bool(state)

    def _freezes(self, group: Dict[str, Any]) -> bool:
        """True if a parameter of a group cannot be new once the variance is frozen."""
        return False

    def _is_frozen_at(self, steps: float) -> bool:
        """True if the variance is frozen after so many steps."""
        return False

    def _starts_as(self, name: str, group: Dict[str, Any]) -> float:
        """Returns the initial value of a missing state tensor."""
        return 0.0

    def _engine_desc(self, context: Any) -> Tuple[Any, Tuple[object, ...], bool]:
        """Returns dsopt_optimizer_desc, the objects that it refers to, and True if steps call Python functions."""
        return abi.dsopt_optimizer_desc(flags=abi.DSOPT_OPTIMIZER_NO_MASTER), (), False

    def _formats_in(self, group: Dict[str, Any]) -> Pair:
        """Returns the formats of a group's moments."""
        first, second = _formats.FIRST, _formats.SECOND
        return (group.get(first, "f32") if first in self._stores else "f32",
                group.get(second, "f32") if second in self._stores else "f32")

    def _formats_of(self, group: Dict[str, Any], param: torch.Tensor) -> Pair:
        """Returns the formats for the dtype of a parameter of this group."""
        return self._formats_in(group)

    def _param_flags(self, group: Dict[str, Any], param: torch.Tensor) -> int:
        return 0

    def _block_of(self, group: Dict[str, Any]) -> Tuple[int, int]:
        """Returns dsopt_param.rows and cols of the parameters of a group."""
        return 0, 0

    def _is_row_major(self, group: Dict[str, Any]) -> bool:
        """True if the rule of a group depends on the order of elements: parameters must be contiguous to be stepped in
        place."""
        return False

    def _fixed(self) -> List[Any]:
        """Returns values that are read when plans are made, not in each step. If they change, plans are made again."""
        return []

    # ---------------------------------------------------------------------------------------------------------- step
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Step once. Calls `closure` first and returns its result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance()
        return loss

    def _advance(self) -> None:
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self._ranks is not None and self._ranks.averages and not (scale is None and found_inf is None):
            self._ranks.refuse_scaler(type(self).__name__)
        if self._plans is None or not self._is_current():
            self._plan()
        try:
            self._run_plans(scale, found_inf)
        except Stale:  # before anything was stepped
            self._plan()
            self._run_plans(scale, found_inf)

    def _run_plans(self, scale: Optional[torch.Tensor], found_inf: Optional[torch.Tensor]) -> None:
        plans, passed = self._plans or (), self._passed
        if len(plans) == 1:
            self._run(0, scale, found_inf)
            return
        for plan in plans:
            plan.check_params()
        self._passed = with_norms(self, scale, found_inf)
        try:
            # All plans check their arguments before any of them steps: an error does not change weights.
            prepared = [plan.prepare(self, *self._on(plan, scale, found_inf)) for plan in plans]
            for plan, step in zip(plans, prepared):
                plan.step(self, step)
        finally:
            self._passed = passed

    def _run(self, i: int, scale: Optional[torch.Tensor], found_inf: Optional[torch.Tensor]) -> None:
        plan = self._plans[i]  # type: ignore[index]
        plan.step(self, plan.prepare(self, *self._on(plan, scale, found_inf)))

    def _on(self, plan: Any, *values: Optional[torch.Tensor]) -> List[Optional[torch.Tensor]]:
        """Returns numbers for a step on the device of a plan. The engine skips if any bit of the float is set."""
        return [None if x is None else torch.as_tensor(x, dtype=torch.float32, device=plan.device) for x in values]

    def _has_grad(self, param: torch.Tensor) -> bool:
        return param.grad is not None if self._passed is None else param in self._passed.grads

    def _is_current(self) -> bool:
        """True if groups, parameters and state tensors are those for which the plans were made."""
        groups, seen = self.param_groups, self._seen
        try:
            return (seen.process == os.getpid() and seen.sizes == [len(group["params"]) for group in groups] and
                    all(map(is_, chain.from_iterable(map(_params_of, groups)), seen.params)) and
                    len(self.state) == len(seen.states) and all(map(is_, self.state.values(), seen.states)) and
                    seen.has_state() and
                    (all(p.grad is None for p in seen.idle) if self._passed is None else
                     not any(map(self._has_grad, seen.idle))) and
                    # The lists of all ranks change in the same step, also if only some ranks have a gradient.
                    (self._ranks is None or not any(p.requires_grad for p in seen.idle)) and
                    self._fixed() == seen.fixed and values_of(groups) == seen.values and
                    agrees_over_data(self) == seen.agrees)
        except TypeError:  # the state has other values than tensors
            return False

    def _plan(self) -> None:
        """Makes the plans, and state for parameters with their first gradient."""
        self._plans = None
        kinds = kinds_of(self)
        check_dtypes(self, kinds)
        at_once = self._at_once or takes_norms(self)
        entries, idle = self._entries(at_once)
        devices = list(dict.fromkeys(entry.param.device for entry in entries))
        if len(devices) > 1 and at_once:
            raise unsupported("parameters are on several devices (%s), and must be on one; make an optimizer for each" %
                              ", ".join(map(str, devices)))
        parts = self._parted(entries, kinds)
        if self._ranks is not None:
            check_entries(self, entries, len(parts))
        if len(parts) > 1 and takes_norms(self):
            raise unsupported("%s takes norms of whole DTensors in one engine, and its parameters need several: they "
                              "differ in stochastic_rounding, in the seed, or in float64; make an optimizer for each" %
                              type(self).__name__)
        plans = [DoublePlan(self, device, members) if double else self._plan_of(members)(self, device, kind, members)
                 for (device, kind, double), members in parts.items()]
        self._seen = Seen(self, idle, any(isinstance(plan, ShardedPlan) for plan in plans))
        self._note_formats()
        self._plans = plans

    def _plan_of(self, entries: List[Entry]) -> Any:
        if self._ranks is not None:
            return RankPlan
        return ShardedPlan if any(is_dtensor(entry.param) for entry in entries) else Plan

    def _parted(self, entries: List[Entry],
                kinds: List[Kind]) -> Dict[Tuple[torch.device, Kind, bool], List[Entry]]:
        """Returns the entries of each plan: one device, one kind, and either float64 parameters or others."""
        parts: Dict[Tuple[torch.device, Kind, bool], List[Entry]] = {}
        for entry in entries:
            double = is_double(entry.param)
            key = entry.param.device, Kind() if double else kinds[entry.group], double
            parts.setdefault(key, []).append(entry)
        return parts

    def _report_on(self, device: torch.device) -> torch.Tensor:
        """Returns the tensor of the report. It is kept if plans are made again, because nothing was stepped then."""
        if self._report is None or self._report.device != device:
            self._report = torch.zeros(abi.DSOPT_REPORT_FLOATS, dtype=torch.float32, device=device)
        return self._report

    def _entries(self, at_once: bool) -> Tuple[List[Entry], List[torch.Tensor]]:
        """Returns the parameters to step: those with a gradient, with state, or, with at_once, all trained ones. Also
        returns the other parameters."""
        entries: List[Entry] = []
        idle: List[torch.Tensor] = []
        known: Dict[torch.Tensor, str] = {}
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        for g, group in enumerate(self.param_groups):
            for option in REFUSED:
                if group.get(option):
                    raise refused("param_groups[%d]" % g, option)
            for i, param in enumerate(group["params"]):
                name = "param_groups[%d]['params'][%d]" % (g, i)
                given_name = group["param_names"][i] if "param_names" in group else ""
                if given_name and names.count(given_name) == 1 and len(given_name.encode()) <= 1000:
                    name = given_name
                if param in known:
                    raise wrong("%s is also %s" % (name, known[param]), "OVERLAP")
                known[param] = name
                if self.state.get(param) or self._has_grad(param) or (at_once and param.requires_grad):
                    entries.append(Entry(g, name, param))
                else:
                    idle.append(param)
        return entries, idle

    # --------------------------------------------------------------------------------------------------------- files
    def save(self, path: Any) -> None:
        """Write state and hyper-parameters to a file in safetensors form. With `shard` or `average`, and in the 1-bit
        family, all ranks must call this function together, each with a `path` of its own, and later load all files of
        the same call."""
        plan = self._file_plan("save")
        plan.exchange_file(self, lambda plan: _files.save(plan, path, 0))

    def load(self, paths: Any) -> None:
        """Read state and hyper-parameters that `save` wrote. `paths`: the file of an optimizer without `shard`, or a
        list of the files of all ranks that saved, of any number. With `shard` or `average`, and in the 1-bit family,
        all ranks must call this function together. Moments in other formats are converted, rounded to nearest. Load the
        weights first. A load that fails changes no value."""
        plan = self._file_plan("load")
        try:
            plan.exchange_file(self, lambda plan: _files.load(plan, paths, abi.DSOPT_IO_CONVERT))
        finally:
            self._plans = None

    def _file_plan(self, what: str) -> Plan:
        """Returns the plan of all parameters, with their state."""
        kind = type(self).__name__
        compat = hasattr(self, "_group") and getattr(self, "_compat", None)  # of the 1-bit family
        if self._wrapper is not None or compat:
            raise unsupported("%s: %s is not supported %s; use state_dict" %
                              (kind, what, "with compat=%r" % compat if self._wrapper is None else "in " +
                               type(self._wrapper).__name__))
        if any(is_dtensor(param) for group in self.param_groups for param in group["params"]):
            raise unsupported("%s: %s is not supported with DTensors; use torch.distributed.checkpoint" % (kind, what))
        if not self._at_once or self._plans is None or not self._is_current():
            self._at_once = True
            self._plan()
        plans = self._plans or []
        if len(plans) != 1 or not isinstance(plans[0], Plan):
            raise unsupported("%s: %s needs one engine for all parameters, and they differ in device, "
                              "stochastic_rounding, seed or masters, are float64, or there are none; use state_dict" %
                              (kind, what))
        return plans[0]

    # --------------------------------------------------------------------------------------------- groups and state
    def state_dict(self, *args: Any, **options: Any) -> Dict[str, Any]:
        """Returns the state and the groups. `args` and options are torch's. With `shard` the tensors are this rank's
        parts, and "shard" has this rank, the number of ranks and the number of ranks of a node."""
        found: Dict[str, Any] = super().state_dict(*args, **options)
        if self._shards and found["state"]:
            found[KEY] = self._ranks.numbers()  # type: ignore[union-attr]
        return found

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a group, as torch's. `param_group` is a dict of its parameters and its hyper-parameters."""
        super().add_param_group(param_group)
        self._plans = None

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Load `state_dict`, as torch's, or one of an 8-bit optimizer of bitsandbytes or torchao. State keeps its
        dtype, which torch would change to that of the parameter. Moments in other formats than this optimizer's are
        converted, rounded to nearest. Hyper-parameters that its groups lack keep their values. Refused are state of
        another optimizer, of a parameter that lacks a tensor of the rule, or in a dtype that loses values. A parameter
        without any state starts with its next gradient. If the groups of both have the same "param_names" in another
        order, names count. A load that fails changes nothing."""
        register = getattr(self, "register_load_state_dict_pre_hook", None)
        last = register(_note) if register else None
        before = self.state, self.param_groups
        try:
            if not register:
                _note(self, state_dict)
            super().load_state_dict(state_dict if register else self._loading)
            self._keep_wrapped(before[0])
            saved = _formats.raw_of(self.param_groups)
            keep(before[1], self.param_groups)
            for old, new in zip(before[1], self.param_groups):
                for key in (*self.defaults, *self._kept):
                    if key in old:
                        new.setdefault(key, old[key])
            kinds_of(self)
            convert(self, saved)
            self._note_formats()
            self._after_load()
        except BaseException:
            self.state, self.param_groups = before
            self._plans = None
            raise
        finally:
            self._loading = None
            if last is not None:
                last.remove()

    def _keep_wrapped(self, before: Dict[Any, Any]) -> None:
        """Keeps masters and the loss scale if the state dict lacks them: the originals save them elsewhere."""
        if self._wrapper is None:
            return
        params = list(chain.from_iterable(map(_params_of, self.param_groups)))
        for param in params:  # also without other state: SGD without momentum has only the master
            if "master" in before.get(param, {}):
                self.state[param].setdefault("master", before[param]["master"])
        states = [self.state[param] for param in params if self.state.get(param)]
        for name in WRAPPED[1:]:
            if states and not any(name in state for state in states):
                states[0].update({name: state[name] for state in before.values() if name in state})

    def _after_load(self) -> None:
        """Runs after a load; if it fails, the load fails."""
        if self._wrapper is not None:
            self._plan()

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        loaded, self._loading = self._loading, None
        self._adopt(self.state.pop(WHOLE, None))
        if loaded is not None:
            self._restore(loaded)
        else:  # a copy
            self._note_formats()
        self._plans = None

    def _note_formats(self) -> None:
        """Stores the formats of the state, which cannot change from here on."""
        self._formats = {param: self._formats_in(group) for group in self.param_groups for param in group["params"]}

    def __getstate__(self) -> Dict[str, Any]:
        if self._ranks is not None:
            self._ranks.refuse_pickle(type(self).__name__)
        state: Any = super().__getstate__()
        return dict(state)

    def _restore(self, loaded: Dict[str, Any]) -> None:
        if not self._shards:
            check_whole(type(self).__name__, loaded)
        elif loaded["state"]:
            self._ranks.check_loaded(type(self).__name__, loaded.get(KEY))  # type: ignore[union-attr]
        places = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        for place, param in zip(places, chain.from_iterable(group["params"] for group in self.param_groups)):
            saved, state = loaded["state"].get(place), self.state.get(param)
            if not isinstance(saved, dict) or not state:
                continue
            for name in SHAPED:
                if not torch.is_tensor(saved.get(name)):
                    continue
                check_kind("state %r of parameter %s" % (name, place), saved[name], param)
                if not self._fits(saved[name], param):
                    raise wrong("state %r of parameter %s has shape %s, and the parameter %s" %
                                (name, place, tuple(saved[name].shape), tuple(param.shape)), "SHAPE")
            for name, value in saved.items():
                if not torch.is_tensor(value) or name == "step":
                    continue
                # torch shares tensors of the parameter's dtype with the state dict: codes and scales stay together.
                if value.dtype != param.dtype or _formats.moment_of(name) is not None:
                    state[name] = value.detach().to(param.device, copy=True)

    def _fits(self, tensor: torch.Tensor, param: torch.Tensor) -> bool:
        """True if a state tensor may be that of a parameter. The first step checks the length of parts."""
        if self._shards:
            return bool(tensor.dim() == 1 and tensor.numel() <= param.numel())
        return bool(tensor.shape == param.shape)

    def _adopt(self, whole: Optional[Dict[str, torch.Tensor]]) -> None:
        """Converts state of the whole optimizer from versions before 0.2."""
        states = [self.state[p] for p in chain.from_iterable(map(_params_of, self.param_groups)) if self.state.get(p)]
        for name, value in (whole or {}).items() if states else ():
            if name in PER_PARAM and value.numel() == len(states):
                for state, one in zip(states, value.detach().clone().reshape(-1).unbind()):
                    state[name] = one
            else:
                states[0][name] = value.detach().clone()

    def _reset_errors(self) -> None:
        """Resets error feedback to zero."""
        for state in self.state.values():
            for key in [key for key in state if key.startswith(ERRORS)]:
                del state[key]


def _note(optimizer: EngineOptimizer, state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """Checks and stores the state dict that is finally loaded: the last of the hooks."""
    optimizer._loading = state_dict = ordered(optimizer, imported(state_dict))
    check_loaded(optimizer, state_dict)
    return state_dict


class Seen:
    """Everything on which plans depend, to detect changes. It keeps the memory of the state tensors alive, even if a
    caller replaces it, so that no other tensor can have the same addresses."""

    def __init__(self, owner: EngineOptimizer, idle: List[torch.Tensor], sharded: bool) -> None:
        self.sharded = sharded  # state tensors may be DTensors, which have no addresses
        self.process = os.getpid()
        self.sizes = [len(group["params"]) for group in owner.param_groups]
        self.params = list(chain.from_iterable(map(_params_of, owner.param_groups)))
        self.states = list(owner.state.values())
        tensors = self._tensors()
        self.state_at: Optional[List[int]] = None
        if all(map(torch.is_tensor, tensors)):  # otherwise nothing is assumed
            self.state_at = list(map(torch.Tensor.data_ptr, tensors))
            self.layouts = Layouts(tensors)
            self.memory = list(map(torch.Tensor.detach, tensors))
        self.idle, self.fixed, self.agrees = idle, owner._fixed(), agrees_over_data(owner)
        self.values = values_of(owner.param_groups)

    def _tensors(self) -> List[torch.Tensor]:
        tensors = list(chain.from_iterable(map(dict.values, self.states)))
        return local_tensors(tensors) if self.sharded else tensors

    def has_state(self) -> bool:
        """True if the state tensors have the addresses and layouts that they had when the plans were made."""
        tensors = self._tensors()
        return self.state_at == list(map(torch.Tensor.data_ptr, tensors)) and self.layouts.equal(tensors)
