# SPDX-License-Identifier: Apache-2.0
"""Formats of moments and masters: the keys "exp_avg_format", "exp_avg_sq_format", "min_8bit_size" and "masters" of
groups.

Groups have a key only if it is given, so other state dicts have torch's keys. They belong to the optimizer, not to a
state dict: a load keeps them, and converts the state.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._errors import StateError, error_of
from .._groups import FORMATS as NUMBERS
from .._groups import SCALED
from .._handle import choice
from ._tensors import E4M3, integer, unsupported

if TYPE_CHECKING:
    from ._base import EngineOptimizer

FIRST, SECOND = "exp_avg_format", "exp_avg_sq_format"
KEYS = (FIRST, SECOND, "min_8bit_size", "masters")
MIN_8BIT_SIZE = 4096
BLOCK = 256  # elements that share a scale
MASTERS = {"float32": abi.DSOPT_MASTERS_PER_TENSOR, "remainder": abi.DSOPT_MASTERS_REMAINDER}
OTHER_MASTER = {"master": "remainder", "remainder": "master"}
KEY_OF = {"exp_avg": FIRST, "momentum_buffer": FIRST, "exp_avg_sq": SECOND, "sum": SECOND}  # by moment
SCALE = "_scale"  # end of the names of scales
Pair = Tuple[str, str]  # formats of moments of gradients and of squares
F32: Pair = ("f32", "f32")


def scale_of(moment: str) -> str:
    """Returns the name of the scales of a moment."""
    return moment + SCALE


def moment_of(name: str) -> Optional[str]:
    """Returns the moment of a tensor of scales, None for other names."""
    moment = name[:-len(SCALE)] if name.endswith(SCALE) else ""
    return moment if moment in KEY_OF else None


def scales_in(numel: int) -> int:
    return -(-numel // BLOCK)


def is_codes(tensor: torch.Tensor) -> bool:
    """True if the tensor has codes of E4M3 or Q8."""
    return tensor.dtype in (torch.uint8, E4M3)


def is_number(tensor: torch.Tensor) -> bool:
    """True if the tensor has values of a floating dtype."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not is_codes(tensor)


def check_dtype(state: Dict[str, Any], name: str, what: str) -> None:
    """Refuses codes and remainders that were converted to another dtype, as torch.optim does in a load."""
    tensor = state[name]
    if name == "remainder":
        good = tensor.dtype == torch.int16
    elif name in KEY_OF:
        good = is_codes(tensor) or (is_number(tensor) and scale_of(name) not in state)
    else:
        return
    if not good:
        raise error_of(abi.DSOPT_ERR_DTYPE, "DSOPT_ERR_DTYPE",
                       "%s is %s%s: it was converted, and codes are no numbers; save and load it with the dtype that "
                       "it has here" % (what, _name_of(tensor.dtype),
                                     " next to %r" % scale_of(name) if scale_of(name) in state else ""))


def defaults_of(formats: Dict[str, Any], min_8bit_size: Any, masters: Any) -> Dict[str, Any]:
    """Returns the defaults of a constructor with these arguments."""
    for key, value in formats.items():
        choice(key, value, NUMBERS)
    integer("min_8bit_size", min_8bit_size, 2**63)
    if masters is not None:
        choice("masters", masters, MASTERS)
    defaults = {key: value for key, value in formats.items() if value != "f32"}
    if any(value in SCALED for value in formats.values()):
        defaults["min_8bit_size"] = min_8bit_size
    elif min_8bit_size != MIN_8BIT_SIZE:
        raise unsupported("min_8bit_size is %r, which has no effect without a format 'e4m3' or 'q8'" % min_8bit_size)
    return defaults if masters is None else {**defaults, "masters": masters}


def check(owner: EngineOptimizer) -> None:
    """Checks the keys of all groups, and refuses a format that has changed since the last step."""
    seen = owner.__dict__.get("_formats", {})  # when state was made, loaded or copied
    for g, group in enumerate(owner.param_groups):
        for key in KEYS:
            if key in group:
                _check_key(owner, "param_groups[%d]: %s" % (g, key), key, group[key])
        now = owner._formats_in(group)
        for param in group["params"]:
            for key, old, new in zip((FIRST, SECOND), seen.get(param, now), now):
                if old != new and any(KEY_OF.get(name) == key for name in owner.state.get(param, ())):
                    raise changed("param_groups[%d]: %s is %r, and the state has %r" % (g, key, new, old))
    _check_masters(owner)


def changed(text: str) -> StateError:
    return StateError("%s: a format cannot change once there is state; load_state_dict into a new optimizer converts "
                      "(DSOPT_ERR_STATE)" % text, abi.DSOPT_ERR_STATE, "DSOPT_ERR_STATE")


def _check_key(owner: EngineOptimizer, what: str, key: str, value: Any) -> None:
    if key == "min_8bit_size":
        integer(what, value, 2**63)
    elif key == "masters":
        if value is not None:
            choice(what, value, MASTERS)
    else:
        choice(what, value, NUMBERS)
    if key == "min_8bit_size" or value in (None, "f32"):
        return
    if key not in owner._stores:
        raise unsupported("%s is %r, which %s does not have" % (what, value, type(owner).__name__))
    if owner._wrapper is not None:
        raise unsupported("%s=%r is not supported in %s, which has float32 moments and masters of its own; step the "
                          "optimizer without the wrapper" % (what, value, type(owner._wrapper).__name__))


def _check_masters(owner: EngineOptimizer) -> None:
    """Refuses masters without a parameter that has one."""
    groups = [(g, group) for g, group in enumerate(owner.param_groups) if group.get("masters") and group["params"]]
    for kind, dtypes in (("float32", (torch.bfloat16, torch.float16)), ("remainder", (torch.bfloat16,))):
        chosen = [(g, group) for g, group in groups if group["masters"] == kind]
        for g, group in chosen:
            if group.get("stochastic_rounding"):
                raise unsupported("param_groups[%d]: stochastic_rounding=True has no effect with masters=%r, which are "
                                  "exact; leave one of them out" % (g, kind))
        params = [param for _, group in chosen for param in group["params"]]
        if params and not any(param.dtype in dtypes for param in params):
            raise unsupported("masters=%r has no effect, as no parameter is %s; leave it out" %
                              (kind, " or ".join(_name_of(dtype) for dtype in dtypes)))


def formats_of(owner: EngineOptimizer, group: Dict[str, Any], what: str, param: torch.Tensor,
               moments: Iterable[torch.Tensor]) -> Pair:
    """Returns the formats of a parameter's moments. `what` is its name. `moments` are those that the group has as codes
    and that exist: float32 ones stay float32. The size that counts is that of a whole DTensor."""
    formats = owner._formats_of(group, param)
    if formats == F32:
        return formats
    if param.dtype in (torch.float64, torch.complex64, torch.complex128):
        key, value = next(pair for pair in zip((FIRST, SECOND), formats) if pair[1] != "f32")
        raise unsupported("%s is %s, and %s=%r is for float32, float16 and bfloat16; put it into a group with float32 "
                          "moments" % (what, _name_of(param.dtype), key, value))
    if not any(value in SCALED for value in formats):
        return formats
    numbers = list(map(is_number, moments))
    if numbers:
        return F32 if all(numbers) else formats
    return F32 if param.numel() < group.get("min_8bit_size", MIN_8BIT_SIZE) else formats


def scaled_moments(owner: EngineOptimizer, group: Dict[str, Any], param: torch.Tensor) -> List[torch.Tensor]:
    """Returns the moments in a parameter's state that the group has as codes."""
    scaled = [key for key, value in zip((FIRST, SECOND), owner._formats_in(group)) if value in SCALED]
    return [tensor for name, tensor in owner.state.get(param, {}).items()
            if KEY_OF.get(name) in scaled and torch.is_tensor(tensor)]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def raw_of(groups: List[Dict[str, Any]]) -> List[List[Any]]:
    """Returns the unchecked values of the groups."""
    return [[group.get(key) for key in KEYS] for group in groups]


def keep(old: List[Dict[str, Any]], new: List[Dict[str, Any]]) -> None:
    """Keeps the optimizer's values in groups of a state dict."""
    for before, group in zip(old, new):
        for key in KEYS:
            group.pop(key, None)
            if key in before:
                group[key] = before[key]


# ------------------------------------------------------------------------------------------------------------ masters
def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Returns the float32 masters of bfloat16 weights and their remainders."""
    low = remainder.int() & 0xffff
    high = weight.contiguous().view(torch.int16).int() - (low >> 15)
    return ((high << 16) | low).view(torch.float32)


def remainders_of(masters: torch.Tensor) -> torch.Tensor:
    """Returns the remainders of float32 masters whose weights were rounded to nearest, ties to even. A tie that was
    rounded down gets the remainder below it, because joined() would round it up."""
    bits = masters.contiguous().view(torch.int32)
    down = (bits & 0x1ffff) == 0x8000
    return torch.where(masters.isnan(), torch.zeros_like(bits), bits - down.int()).short()
