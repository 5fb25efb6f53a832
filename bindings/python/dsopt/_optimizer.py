# SPDX-License-Identifier: Apache-2.0
"""The optimizer."""

from __future__ import annotations

import ctypes
import math
from ctypes import byref
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from . import _abi as abi
from . import _nvidia
from ._arrays import DTYPE_SIZES, refuse, require, require_stream, tensor_of
from ._bound import ApplyLists, Bound
from ._double_arrays import Doubles, check_overlaps, is_double, placed
from ._comm import Comm
from ._errors import ArgumentTypeError
from ._files import load, save
from ._groups import Group, GroupView
from ._handle import Exclusive, Handle, choice, counted, require_handle
from ._handles import Context, Scaler, default_context
from ._hooks import gate, gated
from ._params import Arrays, Param, in_order, named, scalars, unboxed
from ._report import Report, report_of
from ._state import BoundState, State, allocate, count_of, structs_of

COMPAT = {"none": abi.DSOPT_COMPAT_NONE, "deepspeed": abi.DSOPT_COMPAT_DEEPSPEED}
NONFINITE = {"auto": abi.DSOPT_NONFINITE_AUTO, "skip": abi.DSOPT_NONFINITE_SKIP, "apply": abi.DSOPT_NONFINITE_APPLY}
MASTERS = {
    "per_tensor": abi.DSOPT_MASTERS_PER_TENSOR,
    "flat": abi.DSOPT_MASTERS_FLAT,
    "remainder": abi.DSOPT_MASTERS_REMAINDER,
}
SHARD = {"data": abi.DSOPT_OPTIMIZER_SHARD, "node": abi.DSOPT_OPTIMIZER_SHARD_NODE}
REDUCTIONS = {
    abi.DSOPT_REDUCTION_FULL: "full",
    abi.DSOPT_REDUCTION_COMPRESSED: "compressed",
    abi.DSOPT_REDUCTION_LOCAL: "local",
}
PARTS = {
    "masters": abi.DSOPT_RESET_MASTERS,
    "moments": abi.DSOPT_RESET_MOMENTS,
    "counters": abi.DSOPT_RESET_COUNTERS,
    "grads": abi.DSOPT_RESET_GRADS,
    "errors": abi.DSOPT_RESET_ERRORS,
}
Values = Union[float, Sequence[float], Any]


def _setting(key: int, kind: type, text: str) -> property:
    """A hyper-parameter of the whole optimizer."""

    def get(self: Any) -> Any:
        return kind(GroupView(self, abi.DSOPT_ALL_GROUPS)._get(key))

    def put(self: Any, value: Any) -> None:
        GroupView(self, abi.DSOPT_ALL_GROUPS)._set(key, value)

    return property(get, put, doc=text)


class Optimizer(Handle):
    """Updates parameters in place.

        opt = dsopt.Optimizer({"w": w, "b": b}, dsopt.AdamW(lr=1e-3))
        opt.step({"w": gw, "b": gb})

    params               dict of names and arrays, or a list of arrays; float32, float16, bfloat16 or float64. The
                         arrays are kept. float64 ones are stepped by NumPy, in double
    group                algorithm and hyper-parameters of `params`, such as AdamW(lr=1e-3). add_group adds more groups.
    context              None = CPU with every default
    scaler               loss scaling; None = none
    data                 comm of the data-parallel ranks, which agree on skipping and exchange compressed momentum
    model                comm of the model-parallel ranks, which sum norms
    experts              list of comms of expert-parallel ranks, see Param
    node                 comm of the ranks of this node, where `data` has one rank per node
    max_norm             clip by the norm of all gradients; 0 = off
    max_value            clip every element after clipping by norm; 0 = off
    compat               "none" or "deepspeed" (docs/compat.md)
    nonfinite            Inf and NaN in gradients: "auto" skips the step if they are read before the update anyway, for
                         a scaler or clipping; "skip" always reads them, and skips; "apply" uses them
    masters              masters of 16-bit parameters: "per_tensor", "flat" = contiguous per group, or "remainder" =
                         bfloat16 parameters and 16 bits more in state "<param>.remainder"
    no_master            16-bit parameters without fp32 masters
    report_norms         norms of weights and updates in the report
    stochastic_rounding  bfloat16 without masters is rounded at random
    seed                 seed of stochastic rounding, and of moments in the format bf16_random
    accumulate           an fp32 accumulator per parameter, for the method `accumulate`
    timing               times of the phases in the report
    averages             gradients are this rank's own, and steps average them over `data` and `node`
    check_ranks          ranks compare their calls before each step
    momentum_bits        1-bit Adam: after the freeze, momentum is kept as bits
    shard                None, or the ranks over which state is spread: "data" = all data-parallel ranks, of `data` and
                         `node`; "node" = those of `node`. Every step is then collective. See the method `shard`
    split_matrices       Muon: the matrices are partitioned among the data-parallel ranks, with `node` among those of a
                         node, and each rank orthogonalises its own. Needs `data` or `node`
    skip_budget          skipped steps in a row after which `step` raises StateError; 0 = never

    One thread at a time; a concurrent call raises StateError.
    """

    def __init__(
        self,
        params: Optional[Arrays] = None,
        group: Optional[Group] = None,
        *,
        context: Optional[Context] = None,
        scaler: Optional[Scaler] = None,
        data: Optional[Comm] = None,
        model: Optional[Comm] = None,
        experts: Sequence[Comm] = (),
        node: Optional[Comm] = None,
        max_norm: float = 0,
        max_value: float = 0,
        compat: str = "none",
        nonfinite: str = "auto",
        masters: str = "per_tensor",
        no_master: bool = False,
        report_norms: bool = False,
        stochastic_rounding: bool = False,
        accumulate: bool = False,
        timing: bool = False,
        averages: bool = False,
        check_ranks: bool = False,
        momentum_bits: bool = False,
        split_matrices: bool = False,
        shard: Optional[str] = None,
        skip_budget: int = 0,
        seed: int = 0,
    ) -> None:
        self.context = require_handle(context, Context, "context") if context is not None else default_context()
        self.scaler, self.data = scaler, data
        if scaler is not None:
            require_handle(scaler, Scaler, "scaler")
        for name, comm in (("data", data), ("model", model), ("node", node)):
            if comm is not None:
                require_handle(comm, Comm, name)
        if not isinstance(experts, (list, tuple)):
            refuse("experts", "is %s, and must be a list of comms" % type(experts).__name__, kind=ArgumentTypeError)
        for i, comm in enumerate(experts):
            require_handle(comm, Comm, "experts[%d]" % i)
        comms = [comm for comm in (data, model, node, *experts) if comm is not None]
        self.hooked = self.context.hooked or any(comm.hooked for comm in comms)
        expert_handles = (ctypes.c_void_p * len(experts))(*[comm.handle for comm in experts])
        flags = (
            abi.DSOPT_OPTIMIZER_NO_MASTER * bool(no_master)
            | abi.DSOPT_OPTIMIZER_REPORT_NORMS * bool(report_norms)
            | abi.DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING * bool(stochastic_rounding)
            | abi.DSOPT_OPTIMIZER_ACCUMULATE * bool(accumulate)
            | abi.DSOPT_OPTIMIZER_TIMING * bool(timing)
            | abi.DSOPT_OPTIMIZER_AVERAGES * bool(averages)
            | abi.DSOPT_OPTIMIZER_CHECK_RANKS * bool(check_ranks)
            | abi.DSOPT_OPTIMIZER_MOMENTUM_BITS * bool(momentum_bits)
            | abi.DSOPT_OPTIMIZER_SPLIT_MATRICES * bool(split_matrices)
            | (0 if shard is None else choice("shard", shard, SHARD))
        )
        desc = abi.dsopt_optimizer_desc(
            compat=choice("compat", compat, COMPAT),
            flags=flags,
            nonfinite=choice("nonfinite", nonfinite, NONFINITE),
            masters=choice("masters", masters, MASTERS),
            max_norm=max_norm,
            max_value=max_value,
            scaler=_handle(scaler),
            data=_handle(data),
            model=_handle(model),
            experts=ctypes.addressof(expert_handles) if experts else None,
            expert_count=len(experts),
            skip_budget=skip_budget,
            seed=seed,
            node=_handle(node),
        )
        self._exclusive = Exclusive()
        # The library keeps comms and the scaler; their Python owners keep the Python functions that they call.
        self._needed = (self.context, scaler, *comms)
        with gated(self):
            self._create(
                abi.lib.dsopt_optimizer_create,
                self.context.handle,
                byref(desc),
                destroy=abi.lib.dsopt_optimizer_destroy,
                needed=self._needed,
            )
        # float64 parameters, which the engine does not support
        self._doubles: Optional[Doubles] = None
        self._checks_nonfinite, self._reports_norms = nonfinite == "skip", bool(report_norms)
        self._refuses_doubles = {
            "compat='deepspeed'": compat != "none",
            "a comm": bool(comms),
            "accumulate=True": bool(accumulate),
            "nonfinite='apply'": nonfinite == "apply",
            "a context on " + self.context.backend: self.context.backend != "cpu",
        }
        self._algorithms: List[str] = []  # one per group
        self._groups_of: List[int] = []  # one per parameter
        self._bound = Bound(self.context)
        self._spare: List[ApplyLists] = []  # of calls of `apply` that have returned
        if params is not None:
            if group is None:
                refuse("group", "is missing; pass an algorithm, such as AdamW(lr=1e-3)")
            self.add_group(group, params)

    # ------------------------------------------------------------------------------------------- groups and parameters
    def add_group(self, group: Group, params: Arrays = ()) -> None:
        """Append a group and its parameters. Existing state is kept.

        group   algorithm and hyper-parameters
        params  dict of names and arrays, or a list of arrays; may be empty
        """
        if not isinstance(group, Group) or type(group) is Group:
            refuse(
                "group",
                "is %s, and must be an algorithm, such as AdamW(lr=1e-3)" % type(group).__name__,
                kind=ArgumentTypeError,
            )
        pairs = named(params, len(self.names))
        pairs, doubles = self._placed(pairs, group)
        structs, owners = self._structs(pairs, [0] * len(pairs))
        data = group.struct()
        _nvidia.load_for_group(group.algorithm, self.context.backend)
        with self._exclusive:
            abi.check(abi.lib.dsopt_optimizer_add_group(self.handle, byref(data), structs, len(pairs)))
            self._algorithms.append(type(group).__name__)
            self._registered(pairs, owners, doubles, [len(self._algorithms) - 1] * len(pairs))

    def add_params(self, params: Arrays, group: Union[int, Sequence[int]]) -> None:
        """Append parameters to existing groups.

        params  dict of names and arrays, or a list of arrays
        group   index of their group, or a list with an index per parameter
        """
        pairs = named(params, len(self.names))
        groups: List[Any] = list(group) if isinstance(group, (list, tuple)) else [group] * len(pairs)
        if len(groups) != len(pairs):
            refuse("group", "has %d indices for %d parameters" % (len(groups), len(pairs)), abi.DSOPT_ERR_SHAPE)
        if any(is_double(param.array) for _, param in pairs) or self._doubles is not None:
            refuse(
                "params",
                "cannot be added to groups where there is float64; add a group for them",
                abi.DSOPT_ERR_UNSUPPORTED,
            )
        structs, owners = self._structs(pairs, groups)
        with self._exclusive:
            abi.check(abi.lib.dsopt_optimizer_add_params(self.handle, structs, len(pairs)))
            self._registered(pairs, owners, [], [])

    def _structs(self, pairs: List[Tuple[str, Param]], groups: List[int]) -> Tuple[Any, Any]:
        self._bound.follow(self)
        made = [param.struct(name, self.context, group) for (name, param), group in zip(pairs, groups)]
        return (abi.dsopt_param * len(made))(*[struct for struct, _ in made]), made

    def _placed(self, pairs: List[Tuple[str, Param]], group: Group) -> Tuple[List[Tuple[str, Param]], List[Any]]:
        if not any(is_double(param.array) for _, param in pairs):
            return pairs, [None] * len(pairs)
        formats = {"%s=%r" % field: field[1] != "f32" for field in group.formats().items()}
        new, doubles = placed(pairs, [group.algorithm] * len(pairs), {**self._refuses_doubles, **formats})
        known = self._doubles.arrays if self._doubles is not None else {}
        check_overlaps([self.names[i] for i in known] + [name for name, _ in pairs], [*known.values(), *doubles])
        return new, doubles

    def _registered(self, pairs: List[Tuple[str, Param]], owners: Any, doubles: List[Any], groups: List[int]) -> None:
        params, first = [param for _, param in pairs], len(self.names)
        shapes, dtypes = [tuple(param.shape) for param in params], [struct.tensor.dtype for struct, _ in owners]
        self._bound.add([name for name, _ in pairs], shapes, dtypes, [param.array for param in params], owners)
        if self._doubles is None and any(array is not None for array in doubles):
            self._doubles = Doubles(self._checks_nonfinite, self._reports_norms)
            self._doubles.groups += self._groups_of
        self._groups_of += groups
        if self._doubles is not None:
            self._doubles.add(self, first, doubles, groups)

    def _without_doubles(self, name: str, instead: str) -> None:
        if self._doubles is not None:
            refuse(name, "is not supported with parameters of float64; " + instead, abi.DSOPT_ERR_UNSUPPORTED)

    def _shown(self) -> str:
        count, elements = len(self.names), sum(map(math.prod, self.shapes))
        algorithms = ", ".join(dict.fromkeys(self._algorithms)) or "no group"
        sizes = "%s with %s" % (counted(count, "parameter"), counted(elements, "element"))
        return "%s, %s on %s" % (algorithms, sizes, self.context._shown())

    @property
    def params(self) -> Dict[str, Any]:
        """The bound arrays by name, in flat order; None without memory."""
        arrays = self._doubles.arrays if self._doubles is not None else {}
        return {name: arrays.get(i, array) for i, (name, array) in enumerate(zip(self.names, self._bound.params))}

    @property
    def groups(self) -> List[GroupView]:
        """Hyper-parameters group by group: `opt.groups[0].lr = 1e-4`."""
        return [GroupView(self, i) for i in range(len(self._algorithms))]

    def shard(self, param: Union[str, int], rank: Optional[int] = None) -> Tuple[int, int]:
        """Return the first element and the number of elements of a parameter whose state a rank keeps: (0, 0) if there
        are none, and without `shard` the whole parameter. It changes when parameters are added.

        param  name of the parameter, or its index in flat order
        rank   rank in `data` + ranks of `data` * rank in `node`; None = this one
        """
        if isinstance(param, str):
            if param not in self.names:
                refuse("param", "is %r, which is not registered; registered are %s" % (param, abi.shown(self.names)))
            param = self.names.index(param)
        index = abi.number(param, ctypes.c_int64, "param")
        begin, numel = ctypes.c_int64(), ctypes.c_int64()
        number = -1 if rank is None else abi.number(rank, ctypes.c_int32, "rank")
        if rank is not None and number < 0:
            refuse("rank", "is %d, and must be the number of a data-parallel rank, or None" % number)
        abi.check(abi.lib.dsopt_optimizer_shard(self.handle, index, number, byref(begin), byref(numel)))
        return begin.value, numel.value

    @property
    def lr(self) -> float:
        """Learning rate of group 0. Setting it sets all groups."""
        return GroupView(self, abi.DSOPT_ALL_GROUPS).lr

    @lr.setter
    def lr(self, value: float) -> None:
        GroupView(self, abi.DSOPT_ALL_GROUPS).lr = value

    max_norm = _setting(abi.DSOPT_KEY_MAX_NORM, float, "Clip by the norm of all gradients. 0 = off.")
    max_value = _setting(abi.DSOPT_KEY_MAX_VALUE, float, "Clip every element. 0 = off.")
    skip_budget = _setting(
        abi.DSOPT_KEY_SKIP_BUDGET, int, "So many steps may be skipped in a row. Setting it starts counting at 0."
    )
    calls = _setting(abi.DSOPT_KEY_CALLS, int, "Steps so far, skipped ones included.")
    freeze_step = _setting(abi.DSOPT_KEY_FREEZE_STEP, int, "The 1-bit family: last step that changes the variance.")

    # ------------------------------------------------------------------------------------------------------------ step
    def bind(
        self,
        *,
        params: Optional[Arrays] = None,
        grads: Optional[Arrays] = None,
        state: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Use these arrays for parameters, gradients or state from now on. Arrays and their addresses are kept: an
        array that is moved or resized must be bound again. NumPy refuses to resize bound arrays, and assigning to their
        `data` is detected.

        params  a dict by name or a list; None = the bound ones
        grads   a dict by name (missing names have no gradient) or a list; None = the bound ones
        state   all of it by name, with its values: from init_state or from a saved state
        """
        self._without_doubles("bind", "pass gradients to step, and make a new optimizer for other parameters")
        with self._exclusive:
            self._bound.bind(self, params, grads, state)

    def step(
        self,
        grads: Optional[Arrays] = None,
        *,
        lr: Optional[Values] = None,
        hyper: Any = None,
        grad_scale: Optional[Values] = None,
        skip: Any = None,
        grad_norms: Optional[Values] = None,
        out: Optional[Arrays] = None,
        params: Optional[Arrays] = None,
        report: Any = None,
        zero_grads: bool = False,
        out_only: bool = False,
        delta: bool = False,
        accumulated: bool = False,
        no_nan: bool = False,
        stream: Optional[int] = None,
    ) -> None:
        """Update every parameter that has a gradient, once.

        grads       dict by name (missing names have no gradient) or list in flat order (None = no gradient). None = the
        bound ones. On a device their memory belongs to the stream until it has passed the step.
        lr          a number is set for all groups, as `opt.lr = lr`; an array has one float32 per group in backend
                    memory
        hyper       one row of DSOPT_HYPER_FLOATS (16) float32 per group, see enum dsopt_hyper_index
        grad_scale  additional factor by which the gradients are scaled; they are divided by it
        skip        nonzero = skip this step
        grad_norms  norms of the gradients, one per group, if they are known
        out         receives new weights, rounded to the dtypes of these arrays; with out_only they are written only
        here, with delta it receives new - old
        params      memory of the parameters in this call
        report      receives DSOPT_REPORT_FLOATS float32
        zero_grads  set gradients to zero in the same pass
        out_only    new weights are written only to `out`
        delta       `out` receives new - old, and parameters are not changed
        accumulated the gradients are those of `accumulate`
        no_nan      `report` has -1 in place of NaN
        stream      the CUDA stream of the step

        Scalars may be numbers on the CPU backend, and are arrays in device memory otherwise.
        """
        if self._doubles is not None:
            options = dict(lr=lr, hyper=hyper, grad_scale=grad_scale, skip=skip, grad_norms=grad_norms, out=out)
            options.update(params=params, report=report, zero_grads=zero_grads, out_only=out_only, delta=delta)
            options.update(accumulated=accumulated, no_nan=no_nan, stream=stream)
            self._doubles.step(self, grads, options)
            return
        with self._exclusive:
            flags = 0
            if zero_grads or out_only or delta or accumulated or no_nan:
                flags = _flags(zero_grads, out_only, delta, accumulated, no_nan)
            if stream is not None:
                require_stream(stream)
            bound = self._bound
            if not bound.unchanged():
                bound.follow(self)
            if grads is not None:
                arrays = in_order("grads", grads, bound.names, missing=True)
                tensor_list, plain, step = bound.call_list()
                owners = tensor_list.fill(arrays, stream, zero_grads)
            elif accumulated:
                plain = abi.dsopt_step(count=len(bound.names))
                owners, step = None, byref(plain)
            else:
                owners, plain, step = bound.bound_list(stream, zero_grads)
            plain.flags, plain.stream = flags, stream
            if not (
                lr is None
                and hyper is None
                and grad_scale is None
                and skip is None
                and grad_norms is None
                and out is None
                and params is None
                and report is None
            ):
                lr = unboxed(lr)
                if isinstance(lr, (int, float)):
                    self.lr, lr = lr, None
                args = abi.dsopt_step.from_buffer_copy(plain)
                owners = owners, self._optional(args, lr, hyper, grad_scale, skip, grad_norms, out, params, report)
                step = byref(args)
            if self.hooked:
                with gate:
                    status = abi.lib.dsopt_optimizer_step(self.handle, step)
            else:
                status = abi.lib.dsopt_optimizer_step(self.handle, step)
            if status or abi.raised:
                abi.check(status)

    def _optional(
        self,
        args: Any,
        lr: Any,
        hyper: Any,
        grad_scale: Any,
        skip: Any,
        grad_norms: Any,
        out: Optional[Arrays],
        params: Optional[Arrays],
        report: Any,
        lists: Any = None,
    ) -> Any:
        """Fills in the optional fields of a step. The result must be kept during the call. `lists`: for `out` and
        `params`; None = new ones."""
        groups, context, stream, owners = len(self._algorithms), self.context, args.stream, []
        for field, value, count, dtype in (
            ("lr", lr, groups, abi.DSOPT_DTYPE_F32),
            ("hyper", hyper, groups * abi.DSOPT_HYPER_FLOATS, abi.DSOPT_DTYPE_F32),
            ("grad_scale", grad_scale, 1, abi.DSOPT_DTYPE_F32),
            ("skip", skip, 1, abi.DSOPT_DTYPE_I32),
            ("grad_norms", grad_norms, groups, abi.DSOPT_DTYPE_F32),
            ("report", report, abi.DSOPT_REPORT_FLOATS, abi.DSOPT_DTYPE_F32),
        ):
            if value is not None:
                address, memory = scalars(value, field, count, context, dtype, write=field == "report", stream=stream)
                setattr(args, field, address)
                owners.append(memory)
        for field, arrays in (("out", out), ("params", params)):
            if arrays is not None:
                tensor_list = self._bound.list(field) if lists is None else getattr(lists, field)
                in_list_order = in_order(field, arrays, self.names, missing=field == "out")
                write = field == "out" or not args.flags & 6
                owners.append((tensor_list, tensor_list.fill(in_list_order, stream, write)))
                setattr(args, field, ctypes.addressof(tensor_list.struct))
        return owners

    def accumulate(self, grads: Arrays, *, stream: Optional[int] = None) -> None:
        """Add gradients to the accumulators. The next step(accumulated=True) uses and zeroes them.

        grads   as in `step`
        stream  the CUDA stream on which they are used
        """
        with self._exclusive:
            tensor_list, _, _ = self._bound.call_list()
            owners = tensor_list.fill(in_order("grads", grads, self.names, missing=True), require_stream(stream))
            with gated(self):
                abi.check(abi.lib.dsopt_optimizer_accumulate(self.handle, tensor_list.struct, len(self.names), stream))

    def zero_grad(self, grads: Optional[Arrays] = None, *, stream: Optional[int] = None) -> None:
        """Set gradients to zero.

        grads   as in `step`; None = the bound ones
        stream  the CUDA stream on which they are used
        """
        if self._doubles is not None and grads is not None:
            arrays = in_order("grads", grads, self.names, missing=True)
            grads, mine = self._doubles.gradients(self, arrays, True)
            for array in mine.values():
                array.fill(0)
        with self._exclusive:
            require_stream(stream)
            if grads is None:
                tensor_list, _, owners = self._bound.bound_list(stream, True)
            else:
                tensor_list, _, _ = self._bound.call_list()
                owners = tensor_list.fill(in_order("grads", grads, self.names, missing=True), stream, True)
            with gated(self, self.context):
                abi.check(
                    abi.lib.dsopt_zero_grad(
                        self.context.handle, tensor_list.struct, len(self.names), abi.DSOPT_ZERO_FILL, stream
                    )
                )

    def report(self) -> Report:
        """Return statistics of the steps so far. Waits for earlier calls on the optimizer."""
        struct = abi.dsopt_report()
        with gated(self):
            abi.check(abi.lib.dsopt_optimizer_report(self.handle, byref(struct)))
        report = report_of(struct)
        return report if self._doubles is None else self._doubles.report(report)

    def next_reduction(self, call: int = 0) -> str:
        """Return the reduction of the gradients of step number `call` (0 = the next one): "full" = they must be
        averaged over the data-parallel ranks before the step, "compressed" or "local" = leave them local."""
        reduction, call = ctypes.c_int32(), abi.number(call, ctypes.c_int64, "call")
        abi.check(abi.lib.dsopt_optimizer_next_reduction(self.handle, call, byref(reduction)))
        return REDUCTIONS[reduction.value]

    # ----------------------------------------------------------------------------------------------------------- state
    @property
    def names(self) -> List[str]:
        """Names of the parameters, in flat order."""
        return self._bound.names

    @property
    def shapes(self) -> List[Tuple[int, ...]]:
        """Shapes of the parameters, in flat order."""
        return self._bound.shapes if self._doubles is None else self._doubles.shapes(self._bound.shapes)

    @property
    def engine_shapes(self) -> List[Tuple[int, ...]]:
        """Shapes with the placeholders of float64 parameters."""
        return self._bound.shapes

    @property
    def state(self) -> State:
        """State tensors by name, as views of their memory. With `shard` those of a parameter have one dimension, and
        are the part of this rank."""
        return State(self)

    def reset(self, *parts: str, stream: Optional[int] = None) -> None:
        """Reset parts of the state to their initial values.

        parts   any of "masters" (from the parameters), "moments", "counters", "grads", "errors"
        stream  the CUDA stream of the next step
        """
        what = 0
        for part in parts:
            what |= choice("parts", part, PARTS)
        with self._exclusive, gated(self):
            self._bound.follow(self)
            abi.check(abi.lib.dsopt_optimizer_reset(self.handle, what, require_stream(stream)))
        if self._doubles is not None and "moments" in parts:
            self._doubles.reset(self)

    def save(self, file: Any, *, params: bool = False) -> None:
        """Write a checkpoint, a safetensors file.

        file    a path, or a binary file that is open for writing
        params  save the parameters as well
        """
        self._without_doubles("save", "copy the arrays of opt.state, such as with numpy.savez")
        with self._exclusive:
            self._bound.follow(self)
            save(self, file, abi.DSOPT_IO_PARAMS * bool(params))

    def load(
        self,
        file: Any,
        *,
        params: bool = False,
        state: bool = True,
        masters: bool = True,
        hyper: bool = True,
        scaler: bool = True,
        reset_errors: bool = False,
        convert: bool = False,
    ) -> None:
        """Read a checkpoint. Everything is checked before anything is changed.

        file          a path, a binary file that can seek, or a list of either, one per rank that saved
        params        load the parameters as well
        state         False = moments, counters, schedule and error feedback are not loaded
        masters       False = masters are copied from the parameters
        hyper         False = the current hyper-parameters are kept
        scaler        False = the current loss scale and its counters are kept
        reset_errors  error feedback of the 1-bit family starts at zero
        convert       moments that were saved in another format are converted, rounded to nearest
        """
        self._without_doubles("load", "assign to opt.state by name")
        flags = (
            abi.DSOPT_IO_PARAMS * bool(params)
            | abi.DSOPT_IO_NO_STATE * (not state)
            | abi.DSOPT_IO_NO_MASTERS * (not masters)
            | abi.DSOPT_IO_NO_HYPER * (not hyper)
            | abi.DSOPT_IO_NO_SCALER * (not scaler)
            | abi.DSOPT_IO_RESET_ERRORS * bool(reset_errors)
            | abi.DSOPT_IO_CONVERT * bool(convert)
        )
        with self._exclusive:
            self._bound.follow(self)
            load(self, file, flags)

    # -------------------------------------------------------------------------------------------------- functional form
    @property
    def workspace(self) -> int:
        """Bytes of workspace that `apply` needs."""
        size = ctypes.c_size_t()
        abi.check(abi.lib.dsopt_optimizer_workspace(self.handle, byref(size)))
        return size.value

    def init_state(
        self, params: Arrays, state: Optional[Dict[str, Any]] = None, *, stream: Optional[int] = None
    ) -> Dict[str, Any]:
        """Initialize the state of these parameters. Returns the state by name.

        params  a dict by name or a list
        state   arrays by name that receive the values; None = new host memory
        stream  the CUDA stream on which they are used
        """
        self._without_doubles("init_state", "use step")
        if state is None:
            if self.context.backend != "cpu":
                refuse("state", "is None, and must be arrays in memory of the device")
            state = allocate(self)
        structs, owners = structs_of(self, state, require_stream(stream))
        tensor_list = self._bound.list("params", write=True)
        arrays = tensor_list.fill(in_order("params", params, self.names), stream)
        with gated(self):
            abi.check(
                abi.lib.dsopt_optimizer_init_state(
                    self.handle, tensor_list.struct, len(self.names), structs, len(structs), stream
                )
            )
        return state

    def apply(
        self,
        params: Arrays,
        grads: Arrays,
        state: Mapping[str, Any],
        *,
        lr: Optional[Values] = None,
        hyper: Any = None,
        grad_scale: Optional[Values] = None,
        skip: Any = None,
        grad_norms: Optional[Values] = None,
        out: Optional[Arrays] = None,
        report: Any = None,
        workspace: Any = None,
        zero_grads: bool = False,
        out_only: bool = False,
        delta: bool = False,
        no_nan: bool = False,
        stream: Optional[int] = None,
    ) -> None:
        """Step on memory of the caller only: the state of the optimizer does not change. Any number of threads may call
        it. Later calls use the lists of this one again: until `close` NumPy refuses to resize these arrays.

        params     memory of the parameters; new weights are written there or to `out`
        state      all of it by name, from init_state; new state is written there
        lr         a number for all groups in this call, or an array as in `step`
        workspace  an array of uint8, float32 or int32 with Optimizer.workspace bytes; optional on the CPU

        All other arguments are as in `step`.
        """
        self._without_doubles("apply", "use step")
        step = abi.dsopt_step(
            count=len(self.names),
            stream=require_stream(stream),
            flags=_flags(zero_grads, out_only, delta, False, no_nan),
        )
        lists = self._spare_lists()
        try:
            owners = [lists.state.fill_from(state, stream)]
            step.state, step.state_count = ctypes.addressof(lists.state.struct), len(lists.state.struct)
            owners.append(lists.grads.fill(in_order("grads", grads, self.names, missing=True), stream, zero_grads))
            step.grads = ctypes.addressof(lists.grads.struct)
            lr = unboxed(lr)
            if isinstance(lr, (int, float)):
                lr = [lr] * len(self._algorithms)
            owners += self._optional(step, lr, hyper, grad_scale, skip, grad_norms, out, params, report, lists)
            step.workspace, step.workspace_bytes, space = self._space(workspace, stream, lists)
            with gated(self):
                abi.check(abi.lib.dsopt_optimizer_apply(self.handle, byref(step)))
        finally:
            self._spare.append(lists)

    def _spare_lists(self) -> ApplyLists:
        """Returns lists that no other call uses: those of an earlier call, if parameters and groups are as they were
        then."""
        key = len(self.names), count_of(self)
        try:
            lists = self._spare.pop()  # one call of a list: other threads may do the same
        except IndexError:
            lists = None
        return lists if lists is not None and lists.key == key else ApplyLists(self._bound, self, key)

    def _space(self, workspace: Any, stream: Optional[int], lists: ApplyLists) -> Tuple[int, int, Any]:
        if workspace is None:
            if self.context.backend != "cpu":
                refuse("workspace", "is None, and must be an array in memory of the device", abi.DSOPT_ERR_WORKSPACE)
            size = max(self.workspace, 1)
            if len(lists.space) < size:
                lists.space = ctypes.create_string_buffer(size)
            return ctypes.addressof(lists.space), len(lists.space), lists.space
        tensor = tensor_of(workspace, "workspace", stream=stream)
        require(tensor, "workspace", context=self.context, write=True, dtypes=tuple(DTYPE_SIZES))
        return tensor.address, tensor.numel * DTYPE_SIZES[tensor.dtype], tensor

    # --------------------------------------------------------------------------------------------------------- handles
    @property
    def needed(self) -> Tuple[Any, ...]:
        """Objects that every handle to this optimizer needs."""
        return self._needed

    @property
    def bound_state(self) -> BoundState:
        """Owner of the memory that is bound as state."""
        return self._bound.state

    def follow(self) -> None:
        """Bind arrays again whose memory has changed."""
        self._bound.follow(self)

    def close(self) -> None:
        """Release the handle now. Raises StateError during a call with it, such as in a hook."""
        with self._exclusive:
            super().close()
            self._spare.clear()


def _handle(owner: Optional[Handle]) -> Optional[int]:
    return None if owner is None else owner.handle


def _flags(*flags: Any) -> int:
    """Returns the flags of a step, in the order of their bits."""
    return sum(1 << bit for bit, flag in enumerate(flags) if flag)
