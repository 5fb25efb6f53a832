# SPDX-License-Identifier: Apache-2.0
"""Registration of parameters, and arrays passed by name or in order."""

from __future__ import annotations

import ctypes
import math
import sys
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

from . import _abi as abi
from ._arrays import DTYPE_NAMES, FLOATS, refuse, require, tensor_of
from ._errors import ArgumentTypeError

Arrays = Union[Mapping[str, Any], Sequence[Any]]


@dataclass
class Param:
    """A parameter with more than an array. Without an array it is a shape and a dtype, for Optimizer.apply.

    array           the parameter: float32, float16 or bfloat16
    shape, dtype    without an array: its shape, and "float32", "float16" or "bfloat16"
    model_parallel  this rank has a shard; the shards of all ranks of the comm `model` count in norms
    replicated      another pipeline stage counts the same parameter in norms
    masked          1-bit family: the exchanged mean is multiplied with state "<param>.mask", which is initially zero
    offset          first element of this slice of a tensor; used by random rounding, and by moments in the formats e4m3
                    and q8, where it must be a multiple of 256
    expert          0 = dense; k = the ranks of experts[k - 1] hold different experts
    f32_moments     the moments are float32, whatever the formats of the group: for embeddings, norms and biases
    rows, cols      Muon: the tensor is partitioned into matrices of rows x cols (docs/muon.md); 0 = a tensor of two
                    dimensions is one matrix
    rows_are_inputs Muon: the weight is used as y = x W, as in JAX, so a matrix has `cols` outputs
    """

    array: Any = None
    shape: Tuple[int, ...] = ()
    dtype: str = "float32"
    model_parallel: bool = False
    replicated: bool = False
    masked: bool = False
    offset: int = 0
    expert: int = 0
    f32_moments: bool = False
    rows: int = 0
    cols: int = 0
    rows_are_inputs: bool = False

    def struct(self, name: str, context: Any, group: int = 0) -> Tuple[Any, Any]:
        """Returns a dsopt_param, and objects that must be kept during the call: `name` of the parameter, `context` of
        the optimizer, index of its `group`."""
        label = "params[%r]" % name
        if self.array is not None:
            tensor = require(tensor_of(self.array, label), label, context=context, write=True, dtypes=FLOATS)
            self.shape, self.dtype, place = tensor.shape, DTYPE_NAMES[tensor.dtype], tensor.struct()
        else:
            number = {DTYPE_NAMES[dtype]: dtype for dtype in FLOATS}.get(self.dtype)
            if number is None:
                refuse(
                    label,
                    "has dtype %r, and must have float32, float16 or bfloat16" % (self.dtype,),
                    abi.DSOPT_ERR_DTYPE,
                )
            self.shape = _shape(self.shape, label)
            tensor, place = None, abi.dsopt_tensor(None, math.prod(self.shape), number)
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        flags = (
            abi.DSOPT_PARAM_MODEL_PARALLEL * bool(self.model_parallel)
            | abi.DSOPT_PARAM_REPLICATED * bool(self.replicated)
            | abi.DSOPT_PARAM_MASKED * bool(self.masked)
            | abi.DSOPT_PARAM_F32_MOMENTS * bool(self.f32_moments)
            | abi.DSOPT_PARAM_ROWS_ARE_INPUTS * bool(self.rows_are_inputs)
        )
        return abi.dsopt_param(
            tensor=place,
            name=_encoded(name),
            dims=ctypes.addressof(shape) if self.shape else None,
            ndim=len(self.shape),
            flags=flags,
            offset=self.offset,
            expert=self.expert,
            group=group,
            rows=self.rows,
            cols=self.cols,
        ), (shape, tensor)


def _shape(shape: Any, label: str) -> Tuple[int, ...]:
    try:
        sizes = tuple(abi.number(size, ctypes.c_int64, "%s: its shape" % label) for size in shape)
    except TypeError as problem:
        refuse(label, "has shape %r: %s" % (shape, problem), kind=ArgumentTypeError)
    if any(size < 0 for size in sizes) or math.prod(sizes) >= 1 << 63:
        refuse(label, "has shape %r, which no array has" % (sizes,), abi.DSOPT_ERR_SHAPE)
    return sizes


def _encoded(name: str) -> bytes:
    """Encodes a name; strings of the library end at a NUL."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError as problem:
        refuse("params", "has the name %a: %s" % (name, problem))
    if b"\0" in encoded:
        refuse("params", "has the name %r, in which there is a NUL" % name)
    return encoded


def named(params: Arrays, first: int = 0) -> List[Tuple[str, Param]]:
    """Returns names and parameters of a dict or a list; names of a list are p<index>."""
    if isinstance(params, Mapping):
        for name in params:
            if not isinstance(name, str):
                refuse("params", "has the name %r, and must have names that are str" % (name,))
        pairs = list(params.items())
    elif isinstance(params, (list, tuple)):
        pairs = [("p%d" % (first + i), array) for i, array in enumerate(params)]
    else:
        refuse("params", "is %s, and must be a dict of names and arrays, or a list of arrays" % type(params).__name__)
    return [(name, array if isinstance(array, Param) else Param(array)) for name, array in pairs]


def in_order(label: str, arrays: Arrays, names: Sequence[str], *, missing: bool = False) -> Sequence[Any]:
    """Returns one array per name, in the order of the names. With `missing`, None for names that a dict lacks."""
    if isinstance(arrays, list):
        return arrays
    if isinstance(arrays, tuple):
        return list(arrays)
    if not isinstance(arrays, Mapping):
        refuse(
            label, "is %s, and must be a dict by name or a list in the order of the parameters" % type(arrays).__name__
        )
    if len(arrays) == len(names):
        try:
            return [arrays[name] for name in names]
        except KeyError:
            pass
    known = set(names)
    for name in arrays:
        if name not in known:
            refuse(label, "has %r, which is not registered; registered are %s" % (name, abi.shown(list(names))))
    if not missing:
        for name in names:
            if name not in arrays:
                refuse(label, "lacks %r; pass an array for each parameter" % name)
    return [arrays.get(name) for name in names]


def unboxed(value: Any) -> Any:
    """Returns a scalar of NumPy as a Python number; other values unchanged."""
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def scalars(
    value: Any,
    label: str,
    count: int,
    context: Any,
    dtype: int = abi.DSOPT_DTYPE_F32,
    *,
    write: bool = False,
    stream: Optional[int] = None,
) -> Tuple[Optional[int], Any]:
    """Returns the address of `count` values in backend memory, and their owner: an array, or on the CPU numbers."""
    if value is None:
        return None, None
    value = unboxed(value)
    if isinstance(value, (int, float)):
        value = [value]
    if isinstance(value, (list, tuple)):
        if write:
            refuse(label, "is %s, and must be an array, which is written to" % type(value).__name__)
        if context.backend != "cpu":
            refuse(label, "is a number, and must be an array in memory of the device")
        if len(value) != count:
            refuse(label, "has %d values, and must have %d" % (len(value), count), abi.DSOPT_ERR_SHAPE)
        kind = ctypes.c_float if dtype == abi.DSOPT_DTYPE_F32 else ctypes.c_int32
        memory = (kind * count)(*(abi.number(number, kind, label) for number in value))
        return ctypes.addressof(memory), memory
    tensor = require(
        tensor_of(value, label, stream=stream), label, context=context, write=write, dtype=dtype, numel=count
    )
    return tensor.address, tensor
