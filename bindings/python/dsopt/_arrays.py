# SPDX-License-Identifier: Apache-2.0
"""Reads the memory of an array of any library: address, number of elements, dtype and device, without a copy.

Protocols, in this order: __array_interface__ (NumPy), DLPack (PyTorch, JAX, CuPy, ...), __cuda_array_interface__, and
the buffer protocol (array.array, ctypes, bytearray views).
"""

from __future__ import annotations

import ctypes
import math
import operator
import reprlib
import sys
from typing import Any, Dict, NoReturn, Optional, Sequence, Tuple, Type

from . import _abi as abi
from ._errors import ArgumentError, ArgumentTypeError, error_of

DTYPE_NAMES = {
    abi.DSOPT_DTYPE_F32: "float32",
    abi.DSOPT_DTYPE_F16: "float16",
    abi.DSOPT_DTYPE_BF16: "bfloat16",
    abi.DSOPT_DTYPE_I32: "int32",
    abi.DSOPT_DTYPE_F64: "float64",
    abi.DSOPT_DTYPE_I16: "int16",
    abi.DSOPT_DTYPE_U8: "uint8",
    abi.DSOPT_DTYPE_F8_E4M3: "float8_e4m3fn",
}
DTYPE_SIZES = {
    abi.DSOPT_DTYPE_F32: 4,
    abi.DSOPT_DTYPE_F16: 2,
    abi.DSOPT_DTYPE_BF16: 2,
    abi.DSOPT_DTYPE_I32: 4,
    abi.DSOPT_DTYPE_I16: 2,
    abi.DSOPT_DTYPE_U8: 1,
    abi.DSOPT_DTYPE_F8_E4M3: 1,
}
FLOATS = (abi.DSOPT_DTYPE_F32, abi.DSOPT_DTYPE_F16, abi.DSOPT_DTYPE_BF16)
CODES = (abi.DSOPT_DTYPE_I16, abi.DSOPT_DTYPE_U8, abi.DSOPT_DTYPE_F8_E4M3)  # not values by themselves
# State of these dtypes is accepted as integers too: NumPy itself has no such floats.
AS_INTEGERS = {abi.DSOPT_DTYPE_BF16: "uint16", abi.DSOPT_DTYPE_F8_E4M3: "uint8"}
_BY_NAME: Dict[str, int] = {DTYPE_NAMES[number]: number for number in DTYPE_SIZES}
_BY_TYPESTR = {
    "<f4": "float32",
    "<f2": "float16",
    "<i4": "int32",
    "<f8": "float64",
    "<i8": "int64",
    "<i2": "int16",
    "<u2": "uint16",
    "|i1": "int8",
    "|u1": "uint8",
    "|b1": "bool",
}
_BY_FORMAT = {
    "f": "float32",
    "e": "float16",
    "i": "int32",
    "d": "float64",
    "q": "int64",
    "l": "int64",
    "h": "int16",
    "H": "uint16",
    "b": "int8",
    "B": "uint8",
}
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_E4M3FN = (10, 8)  # its code, which is the whole dtype, and its bits
CPU, CUDA_HOST, CUDA, CUDA_MANAGED = 1, 3, 2, 13  # DLDeviceType
_DEVICE_NAMES = {CPU: "cpu", CUDA_HOST: "cpu", CUDA: "cuda", CUDA_MANAGED: "cuda"}


def refuse(
    name: str, problem: str, status: int = abi.DSOPT_ERR_ARGUMENT, kind: Optional[Type[ArgumentError]] = None
) -> NoReturn:
    """Raises an error for an argument: a sentence whose subject is its name, and what to do."""
    label, text = abi.lib.dsopt_status_name(status).decode(), "%s %s" % (name, problem)
    raise error_of(status, label, text) if kind is None else kind("%s (%s)" % (text, label), status, label)


class Tensor:
    """The memory of an array. `owner` keeps it alive."""

    __slots__ = ("address", "numel", "dtype", "shape", "device", "index", "writable", "owner")

    def __init__(
        self, address: int, dtype: int, shape: Tuple[int, ...], device: str, index: int, writable: bool, owner: object
    ):
        self.address, self.dtype, self.shape, self.device = address, dtype, shape, device
        self.numel = math.prod(shape)
        self.index, self.writable, self.owner = index, writable, owner

    def struct(self) -> Any:
        """Returns a dsopt_tensor. An array without elements has no memory."""
        return abi.dsopt_tensor(self.address if self.numel else None, self.numel, self.dtype)


def require_stream(stream: Any) -> Optional[int]:
    """Returns None, or the address of a stream."""
    if stream is not None and (not isinstance(stream, int) or not 0 <= stream < 1 << 64):
        refuse("stream", "is %r, and must be the address of a stream" % (stream,), kind=ArgumentTypeError)
    return stream


def _at(address: Any, offset: int, shape: Tuple[int, ...], number: int, name: str) -> int:
    """Returns the address of an array of these sizes, after checking that it is valid."""
    try:
        start = 0 if address is None else operator.index(address)
    except TypeError:
        refuse(name, "has the address %s, which is no integer" % reprlib.repr(address), kind=ArgumentTypeError)
    start += offset
    size = math.prod(shape) * DTYPE_SIZES[number]
    if size and not 0 < start <= (1 << 64) - size:
        refuse(name, "has %d bytes at the address %d, where no memory can be" % (size, start))
    return start if size else 0


def _sizes(shape: Any, name: str) -> Tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        refuse(name, "has shape %s, and must have one of integers" % reprlib.repr(shape), kind=ArgumentTypeError)
    if any(size < 0 for size in sizes) or math.prod(sizes) >= 1 << 60:
        refuse(name, "has shape %s, which no array has" % reprlib.repr(sizes), abi.DSOPT_ERR_SHAPE)
    return sizes


def tensor_of(array: Any, name: str, *, stream: Optional[int] = None, dtype: Optional[int] = None) -> Tensor:
    """Returns the Tensor of any array. Errors call it `name`. `stream` is the CUDA stream on which it will be used.
    Integers of AS_INTEGERS[dtype] have this dtype."""
    if isinstance(array, Tensor):
        return array
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        _refuse_copies(array, name)
        return _from_interface(array, interface, name, "cpu", dtype)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array, name, stream, dtype)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(array, interface, name, "cuda", dtype)
    return _from_buffer(array, name, dtype)


def require(
    tensor: Tensor,
    name: str,
    *,
    context: Any,
    write: bool,
    dtypes: Sequence[int] = FLOATS,
    numel: Optional[int] = None,
    shape: Optional[Tuple[int, ...]] = None,
    dtype: Optional[int] = None,
) -> Tensor:
    """Refuses a tensor that does not have these properties."""
    if dtype is not None:
        dtypes = (dtype,)
    if tensor.dtype not in dtypes:
        _refuse_dtype(name, DTYPE_NAMES[tensor.dtype], dtypes)
    if shape is not None and tensor.shape != shape and (tensor.numel != math.prod(shape) or len(tensor.shape) > 1):
        refuse(name, "has shape %s, and must have %s" % (tensor.shape, shape), abi.DSOPT_ERR_SHAPE)
    if numel is not None and tensor.numel != numel:
        refuse(name, "has %d elements, and must have %d" % (tensor.numel, numel), abi.DSOPT_ERR_SHAPE)
    if write and not tensor.writable:
        refuse(name, "is read-only, and would be written to; pass a copy that can be written")
    if tensor.device != context.backend or tensor.device == "cuda" and tensor.index not in (context.device, -1):
        refuse(
            name,
            "is on device %s, and the context works on %s; copy it there, or use a context of that device"
            % (_place(tensor.device, tensor.index), _place(context.backend, context.device)),
            abi.DSOPT_ERR_DEVICE,
        )
    return tensor


def _place(device: str, index: int) -> str:
    return device if device == "cpu" or index < 0 else "%s:%d" % (device, index)


def _dtype(dtype: str, name: str, wanted: Optional[int]) -> int:
    """Returns the number of a dtype; `wanted` is the dtype of tensor_of."""
    if wanted is not None and dtype == AS_INTEGERS.get(wanted):
        return wanted
    if dtype not in _BY_NAME:
        _refuse_dtype(name, dtype, FLOATS if wanted is None else (wanted,))
    return _BY_NAME[dtype]


def _refuse_dtype(name: str, dtype: str, dtypes: Sequence[int]) -> NoReturn:
    words = [DTYPE_NAMES[number] for number in dtypes]
    text = " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    advice = "cast it first, such as with array.astype('%s')" % words[0]
    if dtypes[0] in CODES:
        advice = "cast values are no codes: use the state of init_state, or import_f32"
    refuse(name, "has dtype %s, and must have %s; %s" % (dtype, text, advice), abi.DSOPT_ERR_DTYPE)


def _contiguous(shape: Sequence[int], strides: Sequence[int], unit: int, name: str) -> None:
    """Refuses arrays that are not contiguous in row-major order. `unit` is the unit of the strides."""
    expected = unit
    try:
        strides = tuple(strides)
    except TypeError:
        strides = ()
    if len(strides) != len(shape):
        refuse(name, "has %d strides for %d dimensions" % (len(strides), len(shape)), abi.DSOPT_ERR_SHAPE)
    if 0 in shape:
        return
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            refuse(
                name, "is not contiguous: shape %s, strides %s. Pass a contiguous copy" % (tuple(shape), tuple(strides))
            )
        expected *= size


def _refuse_copies(array: Any, name: str) -> None:
    """Refuses objects of NumPy whose memory is not their value: a scalar reports the memory of a copy, which is already
    freed."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(array) is numpy.ndarray:
        return
    if isinstance(array, numpy.generic):
        text = "is a scalar of NumPy, %s, and must be an array, such as one of numpy.asarray(value)"
        refuse(name, text % type(array).__name__, kind=ArgumentTypeError)
    if isinstance(array, numpy.ma.MaskedArray):
        refuse(name, "has a mask, which is not supported; pass its data alone, such as array.filled(0)")


def _from_interface(array: Any, interface: Any, name: str, device: str, wanted: Optional[int]) -> Tensor:
    """Reads NumPy's __array_interface__, or __cuda_array_interface__, which has the same keys."""
    try:
        typestr, shape, data = interface["typestr"], interface["shape"], interface.get("data")
        strides, mask, kind = interface.get("strides"), interface.get("mask"), typestr[1:2]
    except (AttributeError, KeyError, TypeError) as problem:
        refuse(name, "has an array interface without the fields that it must have: %r" % problem)
    dtype = _BY_TYPESTR.get(typestr, typestr)
    if kind == "V":  # bfloat16 of ml_dtypes is "<V2", float8_e4m3fn "|V1" or "<V1": only their names tell what they are
        dtype = str(getattr(getattr(array, "dtype", None), "name", typestr))
    number, shape = _dtype(dtype, name, wanted), _sizes(shape, name)
    if strides is not None:
        _contiguous(shape, strides, DTYPE_SIZES[number], name)
    if mask is not None:
        refuse(name, "has a mask, which is not supported; pass its data alone, such as array.filled(0)")
    if not isinstance(data, tuple) or len(data) != 2:
        refuse(name, "has an array interface without the address of its memory")
    return Tensor(_at(data[0], 0, shape, number, name), number, shape, device, -1, not data[1], array)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    ]


_READ_ONLY, _IS_COPIED = 1, 2
_MOST_DIMENSIONS = 64  # as in NumPy; more dimensions mean that the memory is invalid
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _from_dlpack(array: Any, name: str, stream: Optional[int], wanted: Optional[int]) -> Tensor:
    """The capsule is not consumed, only kept: it releases the memory when the capsule is collected."""
    try:
        kind, index = array.__dlpack_device__()
        if int(kind) not in _DEVICE_NAMES:
            refuse(name, "is on a device of DLPack kind %d, and must be on cpu or cuda" % kind, abi.DSOPT_ERR_DEVICE)
        # On CUDA the producer makes `stream` wait for the producer's work; 1 is the legacy default stream.
        on = {"stream": stream or 1} if int(kind) in (CUDA, CUDA_MANAGED) else {}
        try:
            capsule = array.__dlpack__(max_version=(1, 0), **on)
        except TypeError:  # a producer from before DLPack 1.0
            capsule = array.__dlpack__(**on)
    except ArgumentError:
        raise
    except Exception as problem:  # of any type
        raise error_of(
            abi.DSOPT_ERR_ARGUMENT, "DSOPT_ERR_ARGUMENT", "%s cannot be shared by DLPack: %s" % (name, problem)
        ) from problem
    label = _capsule_name(capsule) if type(capsule).__name__ == "PyCapsule" else type(capsule).__name__
    if label == b"dltensor_versioned":
        versioned = _Versioned.from_address(_capsule_pointer(capsule, label))
        if versioned.major != 1:
            refuse(name, "comes by DLPack %d, and this package knows version 1" % versioned.major)
        tensor, writable = versioned.tensor, not versioned.flags & (_READ_ONLY | _IS_COPIED)
    elif label == b"dltensor":
        tensor, writable = _DLTensor.from_address(_capsule_pointer(capsule, label)), True
    else:
        refuse(name, "comes by DLPack in %r, and must come in a capsule of that protocol" % (label,))
    if type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):  # immutable, which the capsule does not report
        writable = False
    if not 0 <= tensor.ndim <= _MOST_DIMENSIONS or tensor.ndim and not tensor.shape:
        refuse(name, "comes by DLPack with %d dimensions, and has sizes for none" % tensor.ndim)
    shape = _sizes(tensor.shape[: tensor.ndim] if tensor.ndim else (), name)
    dtype = "%s%d" % (_DLPACK_KINDS.get(tensor.code, "code%d of " % tensor.code), tensor.bits)
    if (tensor.code, tensor.bits) == _DLPACK_E4M3FN:
        dtype = "float8_e4m3fn"
    number = _dtype(dtype, name, wanted)
    if tensor.lanes != 1:
        refuse(name, "has elements of %d lanes, and must have those of one" % tensor.lanes, abi.DSOPT_ERR_DTYPE)
    if tensor.strides:
        _contiguous(shape, tensor.strides[: tensor.ndim], 1, name)
    return Tensor(
        _at(tensor.data, tensor.byte_offset, shape, number, name),
        number,
        shape,
        _DEVICE_NAMES[tensor.device_type],
        tensor.device_id if tensor.device_type == CUDA else -1,
        writable,
        capsule,
    )


def _from_buffer(array: Any, name: str, wanted: Optional[int]) -> Tensor:
    """An export of the buffer is kept; meanwhile the array cannot be resized."""
    try:
        view = memoryview(array)
    except TypeError:
        refuse(
            name,
            "is %s, which is no array: it has neither DLPack nor an array interface. Pass an array, such as "
            "numpy.asarray(value, 'float32')" % type(array).__name__,
            kind=ArgumentTypeError,
        )
    number = _dtype(_BY_FORMAT.get(view.format.lstrip("<=@"), view.format), name, wanted)
    if not view.c_contiguous:
        refuse(name, "is not contiguous: shape %s, strides %s. Pass a contiguous copy" % (view.shape, view.strides))
    if view.readonly:
        refuse(name, "is a read-only buffer, whose address Python does not show; pass one that can be written")
    shape = tuple(view.shape or ())
    if not view.nbytes:
        return Tensor(0, number, shape, "cpu", -1, True, view)
    export = (ctypes.c_char * view.nbytes).from_buffer(array)
    return Tensor(ctypes.addressof(export), number, shape, "cpu", -1, True, export)
