# SPDX-License-Identifier: Apache-2.0
"""Fast conversion of lists of arrays to dsopt_tensor arrays."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import sys
import weakref
from array import array as words_of
from typing import Any, Callable, List, Optional, Sequence, Tuple

from . import _abi as abi
from ._arrays import FLOATS, Tensor, refuse, require, tensor_of

_first_byte = ctypes.c_char.from_buffer  # refuses read-only and non-contiguous memory
_dtype_of, _shape_of = operator.attrgetter("dtype"), operator.attrgetter("shape")
_HEAD = object.__basicsize__  # header of every object; the fields of its type follow
_FIELDS = 6 * 8 + 4  # data, nd, dimensions, strides, base, descr and flags of PyArrayObject_fields in ndarraytypes.h


@functools.lru_cache(maxsize=None)
def _layout_is_known(ndarray: Any) -> bool:
    """True if an array of NumPy has the struct layout that extensions compiled against NumPy use."""
    if sys.implementation.name != "cpython" or ndarray.__basicsize__ < _HEAD + _FIELDS:
        return False
    probe = sys.modules["numpy"].zeros((4, 6), "f4")[1:, 2:]
    data, nd, _, _, base, descr = (ctypes.c_uint64 * 6).from_address(id(probe) + _HEAD)
    flags = ctypes.c_int32.from_address(id(probe) + _HEAD + 48).value
    return (data, nd & 0xFFFFFFFF, base, descr, flags) == (
        probe.ctypes.data,
        2,
        id(probe.base),
        id(probe.dtype),
        probe.flags.num,
    )


class Watch:
    """Detects changes of address, size, dtype or strides of pinned arrays of NumPy.

    Assigning to `data`, `dtype`, `shape` or `strides` changes an array in place. Reading the attributes of 148 arrays
    would cost ten times a small step, so their structs are compared as bytes. Non-contiguous strides clear a flag in
    the struct, and the number of elements changes only with the dtype, or in ndarray.resize, which refuses pinned
    arrays. Arrays of other libraries are ignored.
    """

    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self._fields: List[memoryview] = []
        self._before = b""
        self._dtypes: List[Any] = []  # keeps dtypes alive, so that their addresses are not reused
        self._known = True
        self.extend(arrays)

    def extend(self, arrays: Sequence[Any]) -> None:
        """Watches these arrays too, from now on."""
        new = numpy_arrays(arrays)
        if not new or not self._known:
            return
        ndarray = sys.modules["numpy"].ndarray
        self._known = _layout_is_known(ndarray)
        if self._known:
            fields = [memoryview((ctypes.c_char * _FIELDS).from_address(id(array) + _HEAD)) for array in new]
            self._fields += fields
            self._before += b"".join(fields)
            self._dtypes += map(ndarray.dtype.__get__, new)

    def unchanged(self) -> bool:
        """Returns True if no array has changed; all must be alive. False if arrays of this interpreter cannot be
        compared this way."""
        return self._known and b"".join(self._fields) == self._before


def numpy_arrays(arrays: Sequence[Any]) -> List[Any]:
    """Returns the arrays of NumPy."""
    numpy = sys.modules.get("numpy")
    return [] if numpy is None else [array for array in arrays if isinstance(array, numpy.ndarray)]


def pins_of(arrays: Sequence[Any]) -> List[Any]:
    """Returns references that make NumPy refuse to resize its arrays and their base arrays."""
    return list(map(weakref.ref, [*numpy_arrays(arrays), *_bases_of(arrays)]))


def _bases_of(arrays: Sequence[Any]) -> List[Any]:
    bases: List[Any] = []
    for array in numpy_arrays(arrays):
        level = numpy_arrays([array.base])
        while level:
            bases += level
            level = numpy_arrays([level[0].base])
    return bases


class TensorList:
    """The dsopt_tensor array of a list of arrays of known sizes.

    `fill` reads all addresses again. Two cases are fast, because 148 conversions would cost more than a small step:
     - The arrays of the last call, alive and unchanged: their addresses are still valid. Only for pinned arrays of
       NumPy.
     - Other arrays of NumPy with the dtypes and shapes of the last ones.

    A NumPy array to which a weak reference exists is pinned: ndarray.resize refuses it. Pinning costs a quarter of a
    call, so new arrays are pinned when they are passed a second time.

    An absent array has the sizes and the dtype of its parameter: with averages they say what the other ranks send.
    """

    _may_be_absent = True

    def __init__(
        self,
        label: str,
        names: Sequence[str],
        shapes: Sequence[Tuple[int, ...]],
        dtypes: Sequence[int],
        context: Any,
        *,
        write: bool,
    ) -> None:
        self._label, self._names, self._shapes, self._absent = label, names, shapes, dtypes
        self._context, self._write = context, write
        count = len(names)
        self._words = words_of("Q", bytes(24 * count))  # data, numel, dtype per array
        self.struct = (abi.dsopt_tensor * count).from_buffer(self._words) if count else (abi.dsopt_tensor * 0)()
        self._pins: List[Any] = []
        self._first: Optional[int] = None  # id of the first array of the last call
        self._types: Optional[List[Any]] = None  # types of the last arrays if all were NumPy's; with their properties:
        self._dtypes: List[Any] = []
        self._shapes_seen: List[Any] = []
        self._ndarray: Any = None
        self._writes = False
        self._forget()

    def name(self, i: int) -> str:
        return "%s[%r]" % (self._label, self._names[i])

    def _forget(self) -> None:
        """Forgets the arrays of the last call."""
        self._seen: Optional[List[Callable[[], Any]]] = None
        self._died: List[Any] = []  # references to dead arrays: they return None, as references to "no array" do
        self._watch: Optional[Watch] = None

    def fill(self, arrays: Sequence[Any], stream: Optional[int] = None, write: bool = False) -> Any:
        """Reads the addresses of `arrays`, None = no memory. The result must be kept alive during the call."""
        seen = self._seen
        if seen is not None and write <= self._writes and len(arrays) == len(seen):
            alive = [get() for get in seen]
            if not self._died and all(map(operator.is_, arrays, alive)) and self._watch.unchanged():  # type: ignore
                return arrays
        self._forget()
        if len(arrays) != len(self._names):
            refuse(
                self._label, "has %d arrays, and must have %d" % (len(arrays), len(self._names)), abi.DSOPT_ERR_SHAPE
            )
        return arrays if self._quickly(arrays) else self._one_by_one(arrays, stream, write)

    def _quickly(self, arrays: Sequence[Any]) -> bool:
        if list(map(type, arrays)) != self._types:
            return False
        # Comparing two lists is faster than comparing a list of pairs.
        if list(map(_dtype_of, arrays)) != self._dtypes or list(map(_shape_of, arrays)) != self._shapes_seen:
            return False
        try:
            self._words[0::3] = words_of("Q", list(map(ctypes.addressof, map(_first_byte, arrays))))
        except (TypeError, ValueError, BufferError):  # read-only, not contiguous, or empty
            return False
        self._writes = True
        first, self._first = self._first, id(arrays[0])
        if first == self._first:  # probably the arrays of the last call
            self._pin(arrays)
        return True

    def _one_by_one(self, arrays: Sequence[Any], stream: Optional[int], write: bool) -> List[Any]:
        self._types = None  # the list no longer matches the last call, even if an entry is refused
        owners: List[Any] = [arrays]
        for i, array in enumerate(arrays):
            place = self.struct[i]
            if array is None and self._may_be_absent:
                place.data, place.numel, place.dtype = None, math.prod(self._shapes[i]), self._absent[i]
                continue
            tensor = self._tensor(i, array, stream, write or self._write)
            place.data, place.numel, place.dtype = tensor.address if tensor.numel else None, tensor.numel, tensor.dtype
            owners.append(tensor.owner)
        self._writes = write or self._write
        numpy = sys.modules.get("numpy")
        self._ndarray = numpy.ndarray if numpy is not None else None
        types = list(map(type, arrays))
        self._types = types if types and types.count(self._ndarray) == len(types) else None
        if self._types is not None:
            self._dtypes, self._shapes_seen = list(map(_dtype_of, arrays)), list(map(_shape_of, arrays))
        if all(array is None or type(array) is self._ndarray for array in arrays):
            self._pin(arrays)
        return owners

    def _tensor(self, i: int, array: Any, stream: Optional[int], write: bool) -> Tensor:
        """Returns array number i, after a check."""
        tensor = tensor_of(array, self.name(i), stream=stream)
        return require(
            tensor, self.name(i), context=self._context, write=write, dtypes=FLOATS, shape=self._shapes[i]
        )

    def _pin(self, arrays: Sequence[Any]) -> None:
        died = self._died.append
        self._seen = [type(None) if array is None else weakref.ref(array, died) for array in arrays]
        self._watch = Watch(arrays)
        self._pins = list(map(weakref.ref, _bases_of(arrays)))
