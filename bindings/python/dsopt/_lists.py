# SPDX-License-Identifier: Apache-2.0
"""Lists of arrays as the library takes them, quickly."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
import weakref
from array import array as words_of
from typing import Any, Callable, List, Optional, Sequence, Tuple

from . import _abi as abi
from ._arrays import FLOATS, refuse, require, tensor_of

_first_byte = ctypes.c_char.from_buffer  # refuses what is read-only or not contiguous
_dtype_of, _shape_of = operator.attrgetter("dtype"), operator.attrgetter("shape")


class TensorList:
    """The dsopt_tensor array of a list of arrays of known sizes.

    `fill` fetches all addresses anew. Two cases are quick, because 148 conversions would cost more than a small step:
     - The arrays of the last call: their addresses are still right. Only for arrays of NumPy that are pinned.
     - Other arrays of NumPy with the dtypes and shapes of the last ones.

    A NumPy array to which a weak reference exists is pinned: ndarray.resize refuses it. Pinning costs a quarter of a call,
    so arrays that follow others are pinned once they come a second time.
    """

    def __init__(
        self, label: str, names: Sequence[str], shapes: Sequence[Tuple[int, ...]], context: Any, *, write: bool
    ) -> None:
        self._label, self._names, self._shapes = label, names, shapes
        self._context, self._write = context, write
        count = len(names)
        self._words = words_of("Q", bytes(24 * count))  # data, numel, dtype of each
        self.struct = (abi.dsopt_tensor * count).from_buffer(self._words) if count else (abi.dsopt_tensor * 0)()
        self._seen: Optional[List[Callable[[], Any]]] = None
        self._pins: List[Any] = []
        self._first: Optional[int] = None  # id of the first array of the last call
        self._types: Optional[List[Any]] = None  # of the last arrays if all were of NumPy, and what they were:
        self._dtypes: List[Any] = []
        self._shapes_seen: List[Any] = []
        self._ndarray: Any = None
        self._writes = False

    def name(self, i: int) -> str:
        return "%s[%r]" % (self._label, self._names[i])

    def fill(self, arrays: Sequence[Any], stream: Optional[int] = None, write: bool = False) -> Any:
        """Take the addresses of `arrays`, None = no memory. What is returned must be kept for the call."""
        seen = self._seen
        if (
            seen is not None
            and write <= self._writes
            and len(arrays) == len(seen)
            and all(map(operator.is_, arrays, [get() for get in seen]))
        ):
            return arrays
        self._seen = None
        if len(arrays) != len(self._names):
            refuse(
                self._label, "has %d arrays, and must have %d" % (len(arrays), len(self._names)), abi.DSOPT_ERR_SHAPE
            )
        return arrays if self._quickly(arrays) else self._one_by_one(arrays, stream, write)

    def _quickly(self, arrays: Sequence[Any]) -> bool:
        if list(map(type, arrays)) != self._types:
            return False
        # Two lists, each compared at once, are quicker than one of pairs.
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
        kept: List[Any] = [arrays]
        for i, array in enumerate(arrays):
            place = self.struct[i]
            if array is None:
                place.data, place.numel, place.dtype = None, math.prod(self._shapes[i]), abi.DSOPT_DTYPE_F32
                continue
            tensor = tensor_of(array, self.name(i), stream=stream)
            require(
                tensor,
                self.name(i),
                context=self._context,
                write=write or self._write,
                dtypes=FLOATS,
                shape=self._shapes[i],
            )
            place.data, place.numel, place.dtype = tensor.address if tensor.numel else None, tensor.numel, tensor.dtype
            kept.append(tensor.owner)
        self._writes = write or self._write
        numpy = sys.modules.get("numpy")
        self._ndarray = numpy.ndarray if numpy is not None else None
        types = list(map(type, arrays))
        self._types = types if types and types.count(self._ndarray) == len(types) else None
        if self._types is not None:
            self._dtypes, self._shapes_seen = list(map(_dtype_of, arrays)), list(map(_shape_of, arrays))
        if all(array is None or type(array) is self._ndarray for array in arrays):
            self._pin(arrays)
        return kept

    def _pin(self, arrays: Sequence[Any]) -> None:
        self._seen = [type(None) if array is None else weakref.ref(array) for array in arrays]
        self._pins = []
        for base in [array.base for array in arrays if array is not None and array.base is not None]:
            while base is not None and isinstance(base, self._ndarray):
                self._pins.append(weakref.ref(base))
                base = base.base
