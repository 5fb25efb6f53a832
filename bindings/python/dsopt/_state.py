# SPDX-License-Identifier: Apache-2.0
"""State tensors by name, as arrays that keep their memory alive."""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from ctypes import byref
from typing import Any, Dict, Iterator, List, Mapping, Tuple

from . import _abi as abi
from ._arrays import AS_INTEGERS, CODES, DTYPE_NAMES, DTYPE_SIZES, Tensor, refuse, require, tensor_of
from ._errors import Error
from ._handle import Handle
from ._lists import TensorList, Watch
from ._numpy import numpy

_CTYPES: Dict[int, Any] = {
    abi.DSOPT_DTYPE_F32: ctypes.c_float,
    abi.DSOPT_DTYPE_F16: ctypes.c_uint16,
    abi.DSOPT_DTYPE_BF16: ctypes.c_uint16,
    abi.DSOPT_DTYPE_I32: ctypes.c_int32,
    abi.DSOPT_DTYPE_I16: ctypes.c_int16,
    abi.DSOPT_DTYPE_U8: ctypes.c_uint8,
    abi.DSOPT_DTYPE_F8_E4M3: ctypes.c_uint8,
}
_TYPESTRS = {
    abi.DSOPT_DTYPE_F32: "<f4",
    abi.DSOPT_DTYPE_F16: "<f2",
    abi.DSOPT_DTYPE_BF16: "<V2",
    abi.DSOPT_DTYPE_I32: "<i4",
    abi.DSOPT_DTYPE_I16: "<i2",
    abi.DSOPT_DTYPE_U8: "|u1",
    abi.DSOPT_DTYPE_F8_E4M3: "|u1",  # no typestr says E4M3
}


# Array protocols of libraries. No other name that begins with "_" is looked up in the array of a view: Python looks up
# special methods before a copy has its fields.
_PROTOCOLS = frozenset(
    "__%s__" % name
    for name in ("array", "array_interface", "array_struct", "cuda_array_interface", "dlpack", "dlpack_device")
)
WHOLE = "optimizer."  # prefix of the names of tensors of the whole optimizer
_Operators: Any = object if numpy is None else numpy.lib.mixins.NDArrayOperatorsMixin


def array_at(address: int, dtype: int, shape: Tuple[int, ...], owner: object) -> Any:
    """Returns host memory as a NumPy array, or as a ctypes array without NumPy. `owner` lives as long as the array.
    Without ml_dtypes, bfloat16 is uint16 and float8_e4m3fn is uint8."""
    count = math.prod(shape)
    memory = (_CTYPES[dtype] * count).from_address(address) if count else (_CTYPES[dtype] * 0)()
    memory._owner = owner
    if numpy is None:
        return memory
    return numpy.frombuffer(memory, numpy_dtype(dtype)).reshape(shape)


def numpy_dtype(dtype: int) -> Any:
    if dtype not in AS_INTEGERS:
        return numpy.dtype(DTYPE_NAMES[dtype])
    try:
        import ml_dtypes  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return numpy.dtype(AS_INTEGERS[dtype])
    return numpy.dtype(getattr(ml_dtypes, DTYPE_NAMES[dtype]))


def aligned_zeros(sizes: List[int]) -> Tuple[List[int], Any]:
    """Returns addresses in one allocation, each 64-byte aligned, and the allocation."""
    steps = [-(-size // 64) * 64 for size in sizes]
    memory = (ctypes.c_char * (sum(steps) + 64))()
    place, places = -(-ctypes.addressof(memory) // 64) * 64, []
    for step in steps:
        places.append(place)
        place += step
    return places, memory


def exported(handle: int, index: int, dtype: int, shape: Tuple[int, ...]) -> Any:
    """Returns a copy of an entry of the state list in host memory."""
    size = math.prod(shape) * DTYPE_SIZES[dtype]
    (place,), memory = aligned_zeros([size])
    abi.check(abi.lib.dsopt_optimizer_export(handle, index, place, size))
    return array_at(place, dtype, shape, memory)


def exported_f32(handle: int, index: int, shape: Tuple[int, ...]) -> Any:
    """Returns the values of an entry of the state list as float32 in host memory."""
    count = math.prod(shape)
    (place,), memory = aligned_zeros([4 * count])
    abi.check(abi.lib.dsopt_optimizer_export_f32(handle, index, place, count))
    return array_at(place, abi.DSOPT_DTYPE_F32, shape, memory)


class DeviceArray:
    """Device memory, for every library that reads __cuda_array_interface__."""

    def __init__(self, address: int, dtype: int, shape: Tuple[int, ...], owner: object) -> None:
        self.shape, self._owner = shape, owner
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": _TYPESTRS[dtype],
            "strides": None,
            "data": (address, False),
        }

    def __repr__(self) -> str:
        interface = self.__cuda_array_interface__
        return "<dsopt array on the device: shape %s, dtype %s>" % (self.shape, interface["typestr"])


class Retained(Handle):
    """One more handle to an optimizer, for arrays that outlive it."""

    def __init__(self, optimizer: Any) -> None:
        self._create(
            abi.lib.dsopt_optimizer_retain,
            optimizer.handle,
            destroy=abi.lib.dsopt_optimizer_destroy,
            needed=optimizer.needed,
        )


class BoundState:
    """Owner of the memory that is bound as state; `bind` replaces the memory.

    An optimizer shares it with its views of tensors. Views look up the current memory of their tensor, so they keep
    that memory alive, not the memory that was bound when they were made.
    """

    __slots__ = ("owners", "watch")

    def __init__(self) -> None:
        self.owners: Any = None
        self.watch = Watch()


class Info:
    """One entry of the state list."""

    __slots__ = ("index", "name", "param", "dtype", "shape", "rank_local", "sharded", "address")

    def __init__(self, index: int, info: Any, optimizer: Any) -> None:
        self.index, self.param = index, info.param
        whole = info.param < 0
        self.name = "%s.%s" % (
            "optimizer" if whole else optimizer.names[info.param],
            info.name.decode(),
        )  # as in checkpoints
        self.dtype = info.tensor.dtype
        dims = (ctypes.c_int64 * info.ndim).from_address(info.dims) if info.ndim else ()
        self.shape: Tuple[int, ...] = tuple(dims)
        self.sharded = bool(info.flags & abi.DSOPT_STATE_SHARDED)
        if info.block == 1 and not self.sharded and not optimizer.engine_shapes[info.param]:
            self.shape = ()  # the library has one dimension for a parameter without dimensions
        self.rank_local = bool(info.flags & abi.DSOPT_STATE_RANK_LOCAL)
        self.address = info.tensor.data

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_SIZES[self.dtype]


def info_at(optimizer: Any, index: int) -> Info:
    """Returns one entry by its index in the list."""
    info = abi.dsopt_state_info()
    abi.check(abi.lib.dsopt_optimizer_state(optimizer.handle, index, byref(info)))
    return Info(index, info, optimizer)


def count_of(optimizer: Any) -> int:
    count = ctypes.c_int64()
    abi.check(abi.lib.dsopt_optimizer_state_count(optimizer.handle, byref(count)))
    return count.value


def infos(optimizer: Any) -> List[Info]:
    """Returns every entry, in list order."""
    return [info_at(optimizer, index) for index in range(count_of(optimizer))]


def whole_infos(optimizer: Any) -> Iterator[Info]:
    """Yields the entries of the whole optimizer, which are at the end of the list, in reverse order."""
    for index in range(count_of(optimizer) - 1, -1, -1):
        info = info_at(optimizer, index)
        if info.param >= 0:
            return
        yield info


class TensorView(_Operators):  # type: ignore[misc]
    """A state tensor of the whole optimizer, such as "optimizer.step", at its current address.

    Its size depends on the number of parameters, so adding parameters may move it. Every use looks it up again:
    indexing, operators, functions of NumPy, and the attributes of an array. numpy.asarray(view) is an array of the
    current memory, which stays valid, but is no longer the optimizer's after the tensor has moved. A copy or a pickle
    of a view is an array in host memory.
    """

    __slots__ = ("_name", "_backend", "_index", "_retained", "_bound", "_optimizer")

    def __init__(self, info: Info, optimizer: Any) -> None:
        self._name, self._index = info.name, info.index
        self._backend, self._retained = optimizer.context.backend, Retained(optimizer)
        self._bound: BoundState = optimizer.bound_state
        self._optimizer = weakref.ref(optimizer)

    def _info(self) -> Any:
        optimizer = self._optimizer()
        if optimizer is not None and not optimizer.closed and not self._bound.watch.unchanged():
            optimizer.follow()
        handle, info, name = self._retained.handle, abi.dsopt_state_info(), self._name[len(WHOLE) :].encode()
        count = ctypes.c_int64()
        abi.check(abi.lib.dsopt_optimizer_state_count(handle, byref(count)))
        for index in (self._index, *range(count.value - 1, -1, -1)):  # these entries are at the end
            if index < count.value:
                abi.check(abi.lib.dsopt_optimizer_state(handle, index, byref(info)))
                if info.param < 0 and info.name == name:
                    self._index = index
                    return info
        raise KeyError(self._name)

    def _now(self) -> Any:
        info = self._info()
        if info.tensor.data is None and info.tensor.numel:
            self.__copy__()  # which allocates the state
            info = self._info()
        make = array_at if self._backend == "cpu" else DeviceArray
        owner = self._retained, self._bound.owners
        return make(info.tensor.data or 0, info.tensor.dtype, (info.tensor.numel,), owner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in _PROTOCOLS:
            raise AttributeError("%r object has no attribute %r" % (type(self).__name__, name))
        return getattr(self._now(), name)

    def __copy__(self) -> Any:
        tensor = self._info().tensor
        return exported(self._retained.handle, self._index, tensor.dtype, (tensor.numel,))

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __reduce__(self) -> Any:
        return self.__copy__().__reduce__()

    def __bool__(self) -> bool:
        return bool(self._now())

    def __int__(self) -> int:
        return int(self._now())

    def __float__(self) -> float:
        return float(self._now())

    def __complex__(self) -> complex:
        return complex(self._now())

    def __index__(self) -> int:
        return operator.index(self._now())

    def __len__(self) -> int:
        return int(self._info().tensor.numel)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._now())

    def __getitem__(self, key: Any) -> Any:
        return self._now()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._now()[key] = value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        def now(values: Tuple[Any, ...]) -> List[Any]:
            return [value._now() if isinstance(value, TensorView) else value for value in values]

        if "out" in options:
            options["out"] = tuple(now(options["out"]))
        return getattr(ufunc, method)(*now(inputs), **options)

    def __repr__(self) -> str:
        try:
            return "<dsopt state %r: %r>" % (self._name, self._now())
        except Error as problem:  # such as in a hook
            return "<dsopt state %r: %s>" % (self._name, problem)


class State(Mapping[str, Any]):
    """State tensors by the names that they have in checkpoints: "<param>.exp_avg", "optimizer.step".

    Values are views of the memory that the optimizer works on: NumPy arrays, on a device objects with
    __cuda_array_interface__. They stay valid after the optimizer is destroyed. Views of the whole optimizer follow
    their tensor when parameters are added. Assigning copies from host memory.

    Moments and masters in fewer bits are codes: bfloat16, float8_e4m3fn, uint8 or int16, with the scales of a moment in
    "<param>.exp_avg_scale". Without ml_dtypes bfloat16 is uint16 and float8_e4m3fn is uint8. export_f32 and import_f32
    convert them.

    Of an optimizer with `shard`, tensors of a parameter have one dimension: they are the part of this rank.

    optimizer  the Optimizer; `opt.state` passes it
    """

    def __init__(self, optimizer: Any) -> None:
        optimizer.handle  # StateError if it is closed
        self._optimizer = optimizer
        self._indices: Dict[str, int] = {}
        self._params = -1

    def _index(self) -> Dict[str, int]:
        """Returns indices in the list, which change when parameters are added."""
        params = len(self._optimizer.names)
        if params != self._params:
            self._indices = {info.name: info.index for info in infos(self._optimizer)}
            self._params = params
        return self._indices

    def _info(self, name: str) -> Info:
        """Returns the current entry: `bind` changes the memory."""
        self._optimizer.follow()
        if isinstance(name, str) and name.startswith(WHOLE):
            for info in whole_infos(self._optimizer):
                if info.name == name:
                    return info
        return info_at(self._optimizer, self._index()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._index())

    def __len__(self) -> int:
        return len(self._index())

    def __repr__(self) -> str:
        return "<dsopt.State of %r>" % self._optimizer

    def _doubles(self) -> Dict[str, Any]:
        doubles = self._optimizer._doubles
        return doubles.state if doubles is not None else {}

    def __getitem__(self, name: str) -> Any:
        if name in self._doubles():
            return self._doubles()[name]
        info = self._info(name)
        if info.address is None and info.bytes:
            self.copy(name)  # which allocates the state
            info = self._info(name)
        if info.param < 0:
            return TensorView(info, self._optimizer)
        owner = Retained(self._optimizer), self._optimizer.bound_state.owners
        make = array_at if self._optimizer.context.backend == "cpu" else DeviceArray
        return make(info.address or 0, info.dtype, info.shape, owner)

    def copy(self, name: str) -> Any:
        """Return a copy of the tensor `name` in host memory. Waits for earlier calls on the optimizer and for the
        default stream."""
        if name in self._doubles():
            return self._doubles()[name].copy()
        info = self._info(name)
        return exported(self._optimizer.handle, info.index, info.dtype, info.shape)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._doubles():
            self._optimizer._doubles.set_state(name, value)
            return
        info, label = self._info(name), "state[%r]" % name
        tensor = _on_host(value, label, info.dtype, info.shape)
        abi.check(
            abi.lib.dsopt_optimizer_import(self._optimizer.handle, info.index, tensor.address or None, info.bytes)
        )

    def export_f32(self, name: str) -> Any:
        """Return the values of the tensor `name` as float32 in host memory, in the shape of the tensor, whatever its
        format. For a remainder they are the master. Waits for earlier calls on the optimizer and for the default
        stream."""
        if name in self._doubles():
            return self._doubles()[name].astype("float32")
        info = self._info(name)
        return exported_f32(self._optimizer.handle, info.index, info.shape)

    def import_f32(self, name: str, array: Any) -> None:
        """Store float32 values from host memory in the tensor `name`, in its format, rounded to nearest. A moment gets
        new scales as well, and a remainder sets the parameter too.

        array  float32, with as many elements as the tensor
        """
        if name in self._doubles():
            self._optimizer._doubles.set_state(name, array, "float32")
            return
        info = self._info(name)
        tensor = _on_host(array, "state[%r]" % name, abi.DSOPT_DTYPE_F32, info.shape)
        abi.check(
            abi.lib.dsopt_optimizer_import_f32(
                self._optimizer.handle, info.index, tensor.address or None, tensor.numel
            )
        )


def _on_host(value: Any, label: str, dtype: int, shape: Tuple[int, ...]) -> Tensor:
    """Returns the Tensor of a new value of a state tensor."""
    tensor = tensor_of(value, label, dtype=dtype)
    if tensor.device != "cpu":
        refuse(label, "is set from host memory, and was given an array on the device", abi.DSOPT_ERR_DEVICE)
    if tensor.dtype != dtype:
        text = "has dtype %s, and was given %s; " % (DTYPE_NAMES[dtype], DTYPE_NAMES[tensor.dtype])
        converts = dtype in CODES or dtype == abi.DSOPT_DTYPE_BF16
        advice = "import_f32 converts float32 to it" if converts else "cast that first"
        refuse(label, text + advice, abi.DSOPT_ERR_DTYPE)
    if tensor.numel != math.prod(shape):
        refuse(label, "has shape %s, and was given %s" % (shape, tensor.shape), abi.DSOPT_ERR_SHAPE)
    return tensor


class StateList(TensorList):
    """The dsopt_tensor array of a state by name."""

    _may_be_absent = False

    def __init__(self, optimizer: Any) -> None:
        entries = infos(optimizer)
        self._entries = [entry.name for entry in entries]
        shapes, dtypes = [entry.shape for entry in entries], [entry.dtype for entry in entries]
        super().__init__("state", self._entries, shapes, dtypes, optimizer.context, write=True)

    def fill_from(self, state: Mapping[str, Any], stream: Any) -> Any:
        """Reads the addresses of a state. The result must be kept alive during the call."""
        if len(state) != len(self._entries) or any(name not in state for name in self._entries):
            unknown = set(state) - set(self._entries)
            if unknown:
                refuse("state", "has %r, which is not in the state of this optimizer" % sorted(unknown)[0])
            lacks = next(name for name in self._entries if name not in state)
            refuse("state", "lacks %r; init_state makes all of it" % lacks)
        return self.fill([state[name] for name in self._entries], stream)

    def _tensor(self, i: int, array: Any, stream: Any, write: bool) -> Tensor:
        name, dtype = self.name(i), self._absent[i]
        tensor = tensor_of(array, name, stream=stream, dtype=dtype)
        return require(
            tensor, name, context=self._context, write=write, dtype=dtype, numel=math.prod(self._shapes[i])
        )


def structs_of(optimizer: Any, state: Mapping[str, Any], stream: Any = None) -> Tuple[Any, Any]:
    """Returns a dsopt_tensor list of a state by name, and objects that must be kept alive."""
    tensor_list = StateList(optimizer)
    return tensor_list.struct, (tensor_list, tensor_list.fill_from(state, stream))


def allocate(optimizer: Any) -> Dict[str, Any]:
    """Returns zeros for the whole state, in host memory."""
    entries = infos(optimizer)
    places, memory = aligned_zeros([entry.bytes for entry in entries])
    return {entry.name: array_at(place, entry.dtype, entry.shape, memory) for place, entry in zip(places, entries)}
