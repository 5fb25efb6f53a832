# SPDX-License-Identifier: Apache-2.0
"""float64 parameters of an Optimizer, stepped by NumPy in double.

Each has a placeholder in the engine's list: one float32 element whose value and gradient are 0. So the engine keeps its
group, its step count and its index in every list, and decides about scaling, clipping and skipping.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import _abi as abi
from ._arrays import refuse
from ._double import Hyper, clipping, limits_of, moments_of, squares, update
from ._errors import UnsupportedError
from ._functions import norm as norm_of
from ._numpy import numpy
from ._params import Param, in_order, unboxed

_KEYS = {name: getattr(abi, "DSOPT_KEY_" + name.upper()) for name in Hyper._fields}
_LIMITED = {"": "", "exchange": "the 1-bit family, whose exchange is float32",
            "products": "Muon, whose products are float32"}
_CASTS = ("float64", "float32", "float16", "bfloat16")


def dtype_of(array: Any) -> str:
    return str(getattr(array, "dtype", "")).rpartition(".")[2]


def is_double(array: Any) -> bool:
    """True for float64 arrays in host memory and float64 tensors."""
    return numpy is not None and dtype_of(array) == "float64" and not isinstance(array, numpy.generic)


def _view(array: Any, name: str, shape: Optional[Tuple[int, ...]], write: bool) -> Any:
    """Returns a NumPy array with the same memory."""
    try:
        view = numpy.asarray(array)
    except Exception as problem:  # of any type
        refuse(name, "has dtype float64, and cannot be used as an array of NumPy: %s" % problem)
    if isinstance(array, numpy.ma.MaskedArray):
        refuse(name, "has a mask, which is not supported; pass its data alone, such as array.filled(0)")
    if dtype_of(view) not in _CASTS:
        refuse(name, "has dtype %s, and must have float64 or another float" % dtype_of(view), abi.DSOPT_ERR_DTYPE)
    if not view.flags.c_contiguous:
        refuse(name, "is not contiguous: shape %s, strides %s. Pass a contiguous copy" % (view.shape, view.strides))
    if write and not view.flags.writeable:
        refuse(name, "is read-only, and would be written to; pass a copy that can be written")
    if shape is not None and view.shape != shape:
        refuse(name, "has shape %s, and must have %s" % (view.shape, shape), abi.DSOPT_ERR_SHAPE)
    return view


class Operations:
    """The functions of NumPy for dsopt._double."""

    if numpy is not None:
        sqrt, sign, where = numpy.sqrt, numpy.sign, numpy.where

    @staticmethod
    def add(x: Any, y: Any, a: float) -> None:
        x += a * y

    @staticmethod
    def sum(x: Any, y: Any, a: float) -> Any:
        return x + a * y

    @staticmethod
    def lerp(x: Any, y: Any, a: float) -> None:
        if a < 0.5:
            x += a * (y - x)
        else:
            x[...] = y - (y - x) * (1 - a)

    @staticmethod
    def addcmul(x: Any, y: Any, z: Any, a: float) -> None:
        x += a * y * z

    @staticmethod
    def addcdiv(x: Any, y: Any, z: Any, a: float) -> None:
        x += a * (y / z)


class Doubles:
    """The float64 parameters of an optimizer, by index in the flat order."""

    def __init__(self, checks_nonfinite: bool, reports: bool) -> None:
        self._checks_nonfinite, self._reports = checks_nonfinite, reports
        self.arrays: Dict[int, Any] = {}
        self.groups: List[int] = []  # group of each parameter
        self.state: Dict[str, Any] = {}
        self.known: Dict[str, Any] = {}  # values that a report replaces
        self._fields: Dict[int, List[str]] = {}  # hyper-parameters of each algorithm

    def add(self, optimizer: Any, first: int, arrays: Sequence[Any], groups: Sequence[int]) -> None:
        """Adds registered parameters; None = a parameter of the engine."""
        self.groups += groups
        for i, array in enumerate(arrays):
            if array is not None:
                self.arrays[first + i] = array
                self._start(optimizer, first + i)

    def _start(self, optimizer: Any, i: int) -> None:
        view = optimizer.groups[self.groups[i]]
        momentum = view.momentum if view.algorithm == abi.DSOPT_ALGORITHM_SGD else 0.0
        for name in moments_of(view.algorithm, momentum):
            start = view.initial_accumulator_value if name == "sum" else 0.0
            self.state["%s.%s" % (optimizer.names[i], name)] = numpy.full(self.arrays[i].shape, start)

    def reset(self, optimizer: Any) -> None:
        """Resets the moments."""
        for i in self.arrays:
            self._start(optimizer, i)

    def set_state(self, name: str, value: Any, dtype: str = "float64") -> None:
        view = _view(value, "state[%r]" % name, self.state[name].shape, False)
        if dtype_of(view) != dtype:
            refuse("state[%r]" % name, "has dtype %s, and was given %s; cast that first" % (dtype, dtype_of(view)),
                   abi.DSOPT_ERR_DTYPE)
        self.state[name][...] = view

    def shapes(self, shapes: Sequence[Tuple[int, ...]]) -> List[Tuple[int, ...]]:
        """Returns the list of shapes with the shapes of float64 parameters."""
        return [self.arrays[i].shape if i in self.arrays else shape for i, shape in enumerate(shapes)]

    # ------------------------------------------------------------------------------------------------------------ step
    def step(self, optimizer: Any, grads: Any, options: Dict[str, Any]) -> None:
        """As Optimizer.step, whose arguments `options` are."""
        for name in ("hyper", "out", "params", "out_only", "delta", "accumulated"):
            if options[name] is not None and options[name] is not False:
                refuse(name, "is not supported with parameters of float64; leave it out", abi.DSOPT_ERR_UNSUPPORTED)
        if grads is None:
            refuse("grads", "are not given; parameters of float64 have no bound gradients")
        arrays = in_order("grads", grads, optimizer.names, missing=True)
        theirs, mine = self.gradients(optimizer, arrays, options["zero_grads"])
        lr, scale = unboxed(options["lr"]), optimizer.scaler.scale if optimizer.scaler is not None else 1.0
        scale *= self._first(options["grad_scale"], 1.0)
        clips = optimizer.max_norm or any(group.max_norm for group in optimizer.groups)
        inspects = self._checks_nonfinite or clips or optimizer.scaler is not None or options["grad_scale"] is not None
        norms, self.known = options["grad_norms"], {}
        if norms is None and inspects:
            norms = self.norms(optimizer, theirs, mine)
        before = optimizer.state.copy("optimizer.step")
        optimizer._doubles = None  # from here on step() is the engine's
        try:
            optimizer.step(theirs, **{**options, "grad_norms": norms})
            taken = {i: grad for i, grad in mine.items() if optimizer.state.copy("optimizer.step")[i] != before[i]}
        finally:
            optimizer._doubles = self
        self._set_known(norms, scale)
        if taken:
            rates = None if lr is None or isinstance(lr, (int, float)) else numpy.asarray(lr).reshape(-1)
            self.update(optimizer, taken, rates, scale, norms)
        for grad in mine.values() if options["zero_grads"] else ():
            grad.fill(0)

    @staticmethod
    def _first(value: Any, otherwise: float) -> float:
        return otherwise if value is None else float(numpy.asarray(value).reshape(-1)[0])

    def _set_known(self, norms: Any, scale: float) -> None:
        if norms is not None:
            total = math.sqrt(sum(float(norm) ** 2 for norm in norms)) / scale
            self.known.update(grad_norm=total, dense_norm=total)

    def report(self, report: Any) -> Any:
        """Returns a Report that includes float64 parameters."""
        known = dict(self.known)
        for name in ("weight_norm", "update_norm"):
            if name in known:
                known[name] = math.sqrt(known[name] + getattr(report, name) ** 2)
        return replace(report, **known)

    def gradients(self, optimizer: Any, arrays: Sequence[Any], write: bool) -> Tuple[List[Any], Dict[int, Any]]:
        """Returns the engine's list with gradients of placeholders, and the gradients of float64 parameters."""
        if len(arrays) != len(optimizer.names):
            text = "has %d arrays, and must have %d" % (len(arrays), len(optimizer.names))
            refuse("grads", text, abi.DSOPT_ERR_SHAPE)
        mine = {i: _view(arrays[i], "grads[%r]" % optimizer.names[i], array.shape, write)
                for i, array in self.arrays.items() if arrays[i] is not None}
        zero = numpy.zeros(1, numpy.float32)
        theirs = [(zero.copy() if i in mine else None) if i in self.arrays else array for i, array in enumerate(arrays)]
        return theirs, mine

    def norms(self, optimizer: Any, theirs: Sequence[Any], mine: Dict[int, Any]) -> List[float]:
        """Returns the norm of each group's gradients as passed: Inf if the group has an Inf or NaN."""
        sums, bad, first = [0.0] * len(optimizer.groups), 0, None
        for i, grad in enumerate(theirs):
            if grad is None:
                continue
            if i in mine:
                values = mine[i].astype(numpy.float64)
                total, wrong = squares(values), int(values.size - numpy.isfinite(values).sum())
            else:
                result = norm_of([grad], context=optimizer.context)
                total, wrong = result.norm**2, result.nonfinite
            sums[self.groups[i]] += total
            bad += wrong
            first = optimizer.names[i] if wrong and first is None else first
        self.known = {"nonfinite": bad, "first_bad": first}
        return [math.sqrt(total) if total < 1e77 else math.inf for total in sums]

    def update(
        self, optimizer: Any, mine: Dict[int, Any], lr: Any, scale: float, norms: Optional[Sequence[float]]
    ) -> None:
        """Steps the parameters whose step the engine has counted. `norms` are the norms of the gradients as passed."""
        whole, limit = clipping(self.known.get("grad_norm", 0.0), optimizer.max_norm), optimizer.max_value
        hypers = [self._hyper(view, lr, g) for g, view in enumerate(optimizer.groups)]
        weights = changes = 0.0
        steps = optimizer.state.copy("optimizer.step")
        for i, given in mine.items():
            algorithm, hyper, largest = hypers[self.groups[i]]
            own = clipping(norms[self.groups[i]] / scale, largest) if norms is not None else 1.0
            grad, divisor = given.reshape(-1).astype(numpy.float64), scale * max(whole, own)
            grad = grad if divisor == 1 else grad / divisor
            if limit:
                grad = numpy.clip(grad, -limit, limit)
            param = self.arrays[i].reshape(-1)
            before = param.copy() if self._reports else None
            names = moments_of(algorithm, hyper.momentum)
            moments = tuple(self.state["%s.%s" % (optimizer.names[i], name)].reshape(-1) for name in names)
            with numpy.errstate(all="ignore"):  # like the engine, which does not warn about Inf and NaN
                ratio = update(Operations, algorithm, hyper, int(steps[i]), param, grad, moments)
            if ratio is not None:
                optimizer.state["optimizer.trust_ratio"][i] = ratio
            if self._reports:
                weights, changes = weights + squares(before), changes + squares(param - before)
        if self._reports:
            self.known.update(weight_norm=weights, update_norm=changes)

    def _hyper(self, view: Any, lr: Any, g: int) -> Tuple[int, Hyper, float]:
        algorithm = view.algorithm
        if algorithm not in self._fields:
            self._fields[algorithm] = [name for name in _KEYS if self._has(view, name)]
        values = {name: view._get(_KEYS[name]) for name in self._fields[algorithm]}
        if lr is not None:
            values["lr"] = float(lr[g])
        return algorithm, Hyper(**values), view.max_norm

    @staticmethod
    def _has(view: Any, name: str) -> bool:
        try:
            view._get(_KEYS[name])
        except UnsupportedError:
            return False
        return True


def check_overlaps(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Refuses float64 arrays that share memory, as the engine does for its parameters. None = no array."""
    spans = [(array.ctypes.data, array.ctypes.data + array.nbytes, name)
             for name, array in zip(names, arrays) if array is not None and array.nbytes]
    spans.sort()
    for (_, end, first), (begin, _, second) in zip(spans, spans[1:]):
        if begin < end:
            refuse("params[%r]" % first, "and params[%r] share memory at 0x%x" % (second, begin), abi.DSOPT_ERR_OVERLAP)


def placed(
    pairs: Sequence[Tuple[str, Param]], algorithms: Sequence[int], refused: Dict[str, bool]
) -> Tuple[List[Tuple[str, Param]], List[Any]]:
    """Returns parameters with placeholders for float64 ones, and the float64 arrays; None = a parameter of the engine.
    `algorithms` are the algorithms of their groups, `refused` the options that float64 does not support."""
    new: List[Tuple[str, Param]] = []
    arrays: List[Any] = []
    for (name, param), algorithm in zip(pairs, algorithms):
        double, label = is_double(param.array), "params[%r]" % name
        arrays.append(_view(param.array, label, None, True) if double else None)
        if double:
            reason = next((what for what, value in refused.items() if value), "")
            reason = reason or _LIMITED[limits_of(algorithm)]
            reason = reason or ("a model_parallel, replicated, masked, expert or f32_moments Param" if
                                param.model_parallel or param.replicated or param.masked or param.expert or
                                param.f32_moments else "")
            reason = reason or ("rows, cols and rows_are_inputs" if param.rows or param.cols or param.rows_are_inputs
                                else "")
            if reason:
                text = "has dtype float64, which is not supported with %s; cast it first, such as with "
                refuse(label, text % reason + "array.astype('float32')", abi.DSOPT_ERR_DTYPE)
            param = Param(numpy.zeros(1, numpy.float32))
        new.append((name, param))
    return new, arrays
