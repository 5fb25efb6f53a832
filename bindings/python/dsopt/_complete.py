# SPDX-License-Identifier: Apache-2.0
"""Which tensors the complete state of a parameter has, from the engine's table of state, for checks of loaded state."""

from __future__ import annotations

import ctypes
from ctypes import byref
from functools import lru_cache
from typing import Any, Tuple

from . import _abi as abi

# Tensors of the whole optimizer with one value per parameter. Trust ratios are only reported.
PER_PARAM = ("trust_average", "trust_factor", "trust_scaling", "trust_weight")
# Tensors with which the state of a parameter may start later: masters from the parameter, sums with the next call.
_OTHERS = ("master", "remainder", "grad_accum")


def tensors_of(group: Any, flags: int = 0, compat: int = 0, rows: int = 0, cols: int = 0) -> Tuple[str, ...]:
    """Returns the names of the tensors that a parameter of a group has, and of those with one value per parameter.

    group       dsopt_group; its formats do not matter
    flags       flags of dsopt_optimizer_desc
    compat      enum dsopt_compat
    rows, cols  of dsopt_param
    """
    copy = type(group).from_buffer_copy(group)
    copy.lr = 0.0  # one entry of the cache for all
    copy.exp_avg_format = copy.exp_avg_sq_format = abi.DSOPT_MOMENT_F32
    return _tensors_of(bytes(copy), flags, compat, rows, cols)


@lru_cache(maxsize=256)
def _tensors_of(group: bytes, flags: int, compat: int, rows: int, cols: int) -> Tuple[str, ...]:
    lib, context, optimizer = abi.lib, ctypes.c_void_p(), ctypes.c_void_p()
    try:
        abi.check(lib.dsopt_context_create(byref(abi.dsopt_context_desc(threads=1)), byref(context)))
        desc = abi.dsopt_optimizer_desc(flags=flags, compat=compat)
        abi.check(lib.dsopt_optimizer_create(context, byref(desc), byref(optimizer)))
        shape = (max(rows, 1), max(cols, 1))
        dims = (ctypes.c_int64 * 2)(*shape)
        param = abi.dsopt_param(rows=rows, cols=cols, ndim=2, dims=ctypes.addressof(dims))
        param.tensor.numel, param.tensor.dtype = shape[0] * shape[1], abi.DSOPT_DTYPE_F32
        data = abi.dsopt_group.from_buffer_copy(group)
        abi.check(lib.dsopt_optimizer_add_group(optimizer, byref(data), byref(param), 1))
        count, info, names = ctypes.c_int64(), abi.dsopt_state_info(), []
        abi.check(lib.dsopt_optimizer_state_count(optimizer, byref(count)))
        for i in range(count.value):
            abi.check(lib.dsopt_optimizer_state(optimizer, i, byref(info)))
            name = info.name.decode()
            if name not in _OTHERS and (info.param == 0 or name in PER_PARAM):
                names.append(name)
        return tuple(names)
    finally:
        lib.dsopt_optimizer_destroy(optimizer)
        lib.dsopt_context_destroy(context)
