# SPDX-License-Identifier: Apache-2.0
"""The memory of an array of any library: address, number of elements, dtype and device, without a copy.

Protocols, in this order: __array_interface__ (NumPy), DLPack (PyTorch, JAX, CuPy, ...), __cuda_array_interface__, and
the buffer
protocol (array.array, ctypes, bytearray views).
"""

from __future__ import annotations

import ctypes
import math
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
}
DTYPE_SIZES = {abi.DSOPT_DTYPE_F32: 4, abi.DSOPT_DTYPE_F16: 2, abi.DSOPT_DTYPE_BF16: 2, abi.DSOPT_DTYPE_I32: 4}
FLOATS = (abi.DSOPT_DTYPE_F32, abi.DSOPT_DTYPE_F16, abi.DSOPT_DTYPE_BF16)
_BY_NAME: Dict[str, int] = {
    "float32": abi.DSOPT_DTYPE_F32,
    "float16": abi.DSOPT_DTYPE_F16,
    "bfloat16": abi.DSOPT_DTYPE_BF16,
    "int32": abi.DSOPT_DTYPE_I32,
}
_BY_TYPESTR = {
    "<f4": "float32",
    "<f2": "float16",
    "<i4": "int32",
    "<f8": "float64",
    "<i8": "int64",
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
    "b": "int8",
    "B": "uint8",
}
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
CPU, CUDA_HOST, CUDA, CUDA_MANAGED = 1, 3, 2, 13  # DLDeviceType
_DEVICE_NAMES = {CPU: "cpu", CUDA_HOST: "cpu", CUDA: "cuda", CUDA_MANAGED: "cuda"}


def refuse(
    name: str, problem: str, status: int = abi.DSOPT_ERR_ARGUMENT, kind: Type[ArgumentError] = ArgumentError
) -> NoReturn:
    """Raise what is wrong with an argument."""
    label = abi.lib.dsopt_status_name(status).decode()
    raise kind("%s %s (%s)" % (name, problem, label), status, label)


class Tensor:
    """Where an array is. `owner` keeps its memory."""

    __slots__ = ("address", "numel", "dtype", "shape", "device", "index", "writable", "owner")

    def __init__(
        self, address: int, dtype: int, shape: Tuple[int, ...], device: str, index: int, writable: bool, owner: object
    ):
        self.address, self.dtype, self.shape, self.device = address, dtype, shape, device
        self.numel = math.prod(shape)
        self.index, self.writable, self.owner = index, writable, owner

    def struct(self) -> Any:
        """As a dsopt_tensor. An array without elements has no memory."""
        return abi.dsopt_tensor(self.address if self.numel else None, self.numel, self.dtype)


def require_stream(stream: Any) -> Optional[int]:
    """None, or the address of a stream."""
    if stream is not None and (not isinstance(stream, int) or not 0 <= stream < 1 << 64):
        refuse("stream", "is %r, and must be the address of a stream" % (stream,), kind=ArgumentTypeError)
    return stream


def tensor_of(array: Any, name: str, *, stream: Optional[int] = None) -> Tensor:
    """Of any array. Errors call it `name`. `stream` is the CUDA stream on which the array will be used."""
    if isinstance(array, Tensor):
        return array
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        _refuse_copies(array, name)
        return _from_interface(array, interface, name, "cpu")
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _from_dlpack(array, name, stream)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(array, interface, name, "cuda")
    return _from_buffer(array, name)


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
    """Refuse a tensor that cannot be used so."""
    if dtype is not None:
        dtypes = (dtype,)
    if tensor.dtype not in dtypes:
        refuse(
            name,
            "has dtype %s, and must have %s" % (DTYPE_NAMES[tensor.dtype], " or ".join(DTYPE_NAMES[d] for d in dtypes)),
            abi.DSOPT_ERR_DTYPE,
        )
    if shape is not None and tensor.shape != shape and (tensor.numel != math.prod(shape) or len(tensor.shape) > 1):
        refuse(name, "has shape %s, and must have %s" % (tensor.shape, shape), abi.DSOPT_ERR_SHAPE)
    if numel is not None and tensor.numel != numel:
        refuse(name, "has %d elements, and must have %d" % (tensor.numel, numel), abi.DSOPT_ERR_SHAPE)
    if write and not tensor.writable:
        refuse(name, "is read-only, and would be written to")
    if tensor.device != context.backend or tensor.device == "cuda" and tensor.index not in (context.device, -1):
        refuse(
            name,
            "is on device %s, and the context works on %s"
            % (_place(tensor.device, tensor.index), _place(context.backend, context.device)),
            abi.DSOPT_ERR_DEVICE,
        )
    return tensor


def _place(device: str, index: int) -> str:
    return device if device == "cpu" or index < 0 else "%s:%d" % (device, index)


def _dtype(dtype: str, name: str) -> int:
    if dtype not in _BY_NAME:
        refuse(name, "has dtype %s, and must have float32, float16 or bfloat16" % dtype, abi.DSOPT_ERR_DTYPE)
    return _BY_NAME[dtype]


def _contiguous(shape: Sequence[int], strides: Sequence[int], unit: int, name: str) -> None:
    """Row-major without gaps. `unit` is what strides count."""
    expected = unit
    if 0 in shape:
        return
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            refuse(
                name, "is not contiguous: shape %s, strides %s. Pass a contiguous copy" % (tuple(shape), tuple(strides))
            )
        expected *= size


def _refuse_copies(array: Any, name: str) -> None:
    """Things of NumPy whose memory is not what they are: a scalar tells that of a copy, which is gone by now."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(array) is numpy.ndarray:
        return
    if isinstance(array, numpy.generic):
        refuse(name, "is a scalar of NumPy, %s, and must be an array" % type(array).__name__, kind=ArgumentTypeError)
    if isinstance(array, numpy.ma.MaskedArray):
        refuse(name, "has a mask")


def _from_interface(array: Any, interface: Any, name: str, device: str) -> Tensor:
    """NumPy's __array_interface__, or __cuda_array_interface__, which has the same keys."""
    typestr, shape = interface["typestr"], tuple(interface["shape"])
    dtype = _BY_TYPESTR.get(typestr, typestr)
    if typestr[1] == "V":  # bfloat16 of ml_dtypes is "<V2", and has a name only
        dtype = str(getattr(getattr(array, "dtype", None), "name", typestr))
    number = _dtype(dtype, name)
    if interface.get("strides") is not None:
        _contiguous(shape, interface["strides"], DTYPE_SIZES[number], name)
    if interface.get("mask") is not None:
        refuse(name, "has a mask")
    data = interface.get("data")
    if not isinstance(data, tuple):
        refuse(name, "does not say where its memory is")
    return Tensor(data[0] or 0, number, shape, device, -1, not data[1], array)


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
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _from_dlpack(array: Any, name: str, stream: Optional[int]) -> Tensor:
    """The capsule is not consumed, only kept: it releases the memory when it is collected itself."""
    try:
        kind, index = array.__dlpack_device__()
        if int(kind) not in _DEVICE_NAMES:
            refuse(name, "is on a device of DLPack kind %d, and must be on cpu or cuda" % kind, abi.DSOPT_ERR_DEVICE)
        # Of CUDA the producer makes `stream` wait for its own work; 1 is the legacy default stream.
        on = {"stream": stream or 1} if int(kind) in (CUDA, CUDA_MANAGED) else {}
        try:
            capsule = array.__dlpack__(max_version=(1, 0), **on)
        except TypeError:  # a producer from before DLPack 1.0
            capsule = array.__dlpack__(**on)
    except ArgumentError:
        raise
    except Exception as problem:  # of a kind that the producer chose
        raise error_of(
            abi.DSOPT_ERR_ARGUMENT, "DSOPT_ERR_ARGUMENT", "%s cannot be shared by DLPack: %s" % (name, problem)
        ) from problem
    label = _capsule_name(capsule)
    if label == b"dltensor_versioned":
        versioned = _Versioned.from_address(_capsule_pointer(capsule, label))
        if versioned.major != 1:
            refuse(name, "comes by DLPack %d, and this package knows version 1" % versioned.major)
        tensor, writable = versioned.tensor, not versioned.flags & (_READ_ONLY | _IS_COPIED)
    elif label == b"dltensor":
        tensor, writable = _DLTensor.from_address(_capsule_pointer(capsule, label)), True
    else:
        refuse(name, "comes in a DLPack capsule called %r" % label)
    if type(array).__module__.partition(".")[0] in ("jax", "jaxlib"):  # immutable, which the capsule does not say
        writable = False
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    number = _dtype("%s%d" % (_DLPACK_KINDS.get(tensor.code, "code%d of " % tensor.code), tensor.bits), name)
    if tensor.lanes != 1:
        refuse(name, "has elements of %d lanes" % tensor.lanes, abi.DSOPT_ERR_DTYPE)
    if tensor.strides:
        _contiguous(shape, tensor.strides[: tensor.ndim], 1, name)
    return Tensor(
        (tensor.data or 0) + tensor.byte_offset,
        number,
        shape,
        _DEVICE_NAMES[tensor.device_type],
        tensor.device_id if tensor.device_type == CUDA else -1,
        writable,
        capsule,
    )


def _from_buffer(array: Any, name: str) -> Tensor:
    """An export of the buffer is kept, while which the array cannot be resized."""
    try:
        view = memoryview(array)
    except TypeError:
        refuse(
            name,
            "is %s, which is no array: it has neither DLPack nor an array interface" % type(array).__name__,
            kind=ArgumentTypeError,
        )
    number = _dtype(_BY_FORMAT.get(view.format.lstrip("<=@"), view.format), name)
    if not view.c_contiguous:
        refuse(name, "is not contiguous: shape %s, strides %s. Pass a contiguous copy" % (view.shape, view.strides))
    if view.readonly:
        refuse(name, "is a read-only buffer, whose address Python does not tell")
    shape = tuple(view.shape or ())
    if not view.nbytes:
        return Tensor(0, number, shape, "cpu", -1, True, view)
    export = (ctypes.c_char * view.nbytes).from_buffer(array)
    return Tensor(ctypes.addressof(export), number, shape, "cpu", -1, True, export)
