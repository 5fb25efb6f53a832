# SPDX-License-Identifier: Apache-2.0
"""Fields of dsopt_group, and the keys of groups that hold them."""
from __future__ import annotations

import ctypes
from ctypes import byref
from itertools import chain
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import torch

from .. import _abi as abi

if TYPE_CHECKING:
    from ._base import EngineOptimizer

# Keys of groups whose names differ from those of the engine's fields, the second ones with an index in a pair.
GROUP_KEYS: Dict[str, Tuple[str, Optional[int]]] = {
    "beta1": ("betas", 0), "beta2": ("betas", 1), "max_norm": ("max_grad_norm", None),
    "min_trust": ("min_coeff", None), "max_trust": ("max_coeff", None)}


def key_of(field: str) -> int:
    """Returns the DSOPT_KEY of a field of dsopt_group."""
    name = "DSOPT_KEY_GROUP_MAX_NORM" if field == "max_norm" else "DSOPT_KEY_" + field.upper()
    return getattr(abi, name)  # type: ignore[no-any-return]


def group_of(owner: EngineOptimizer, group: Dict[str, Any], hyper: Tuple[float, ...]) -> Any:
    """Returns the dsopt_group of a group, without formats. `hyper`: the values of owner._hyper(group)."""
    algorithm, flags, fields = owner._rule(group)
    new = abi.dsopt_group()
    abi.check(abi.lib.dsopt_group_init(byref(new), ctypes.sizeof(new), algorithm))
    for field, value in chain(zip(owner._fields_in(group), hyper), fields.items()):
        setattr(new, field, value)
    new.flags |= flags
    return new


def set_field(group: Dict[str, Any], field: str, value: float) -> None:
    """Sets the hyper-parameter of a group that is this field of dsopt_group."""
    key, index = GROUP_KEYS.get(field, (field, None))
    old = group[key] if index is None else group[key][index]
    if isinstance(old, torch.Tensor):
        old.fill_(value)
    elif index is None:
        group[key] = type(old)(value) if isinstance(old, bool) else value
    else:
        group[key] = tuple(value if i == index else x for i, x in enumerate(group[key]))
