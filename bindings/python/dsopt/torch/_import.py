# SPDX-License-Identifier: Apache-2.0
"""Converts states of the 8-bit optimizers of bitsandbytes and torchao to those of the classes here.

Both have the codes of the format "q8". Their maps are tables that were computed in other ways: one that is not the same
within 1e-6 is applied here, and the values are stored as float32.
"""
from __future__ import annotations

from typing import Any, Dict, Tuple

import torch

from ._codes import decode, levels_of
from ._formats import BLOCK, FIRST, SECOND, scale_of, scales_in
from ._originals import mismatch
from ._tensors import E4M3, is_dense, unsupported

NESTED = "__bnb_optimizer_quant_state__"
BNB = ((1, "exp_avg"), (2, "exp_avg_sq"))
OLD_BLOCK = 2048  # of bitsandbytes before 0.44
State = Dict[str, Any]


def imported(state_dict: Any) -> Any:
    """Returns the state dict with the names and dtypes of this package, or unchanged if it is of neither library."""
    states = state_dict.get("state") if isinstance(state_dict, dict) else None
    if not isinstance(states, dict):
        return state_dict
    kinds = {place: _kind_of(state) for place, state in states.items()}
    if not any(kinds.values()):
        return state_dict
    convert = {"": lambda what, state: state, "bitsandbytes": _of_bitsandbytes, "torchao": _of_torchao}
    new = {place: convert[kinds[place]]("state of parameter %s" % place, state) for place, state in states.items()}
    groups = state_dict["param_groups"]
    if any(kinds[place] == "bitsandbytes" and scale_of("exp_avg") in state for place, state in new.items()):
        # float32 moments next to these are those of small tensors and overridden ones, and stay float32.
        groups = [{**group, FIRST: "q8", SECOND: "q8"} for group in groups]
    return {**state_dict, "state": new, "param_groups": groups}


def _has_codes(value: Any) -> bool:
    return hasattr(value, "codes") and hasattr(value, "scale")


def _kind_of(state: Any) -> str:
    if not isinstance(state, dict):
        return ""
    if NESTED in state or "state1" in state:
        return "bitsandbytes"
    values = [getattr(value, "_local_tensor", value) for value in state.values()]
    return "torchao" if any(map(_has_codes, values)) else ""


def _stored(name: str, codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, block: int) -> State:
    """Returns the entries of a moment with this map and this size of blocks."""
    own = levels_of(name, "q8")
    if block % BLOCK == 0 and bool(((levels.cpu() - own).abs() <= 1e-6 * own.abs()).all()):
        scales = scales.reshape(-1).repeat_interleave(block // BLOCK)[:scales_in(codes.numel())]
        return {name: codes, scale_of(name): scales.float()}
    return {name: decode(codes, scales.float(), levels.float(), block)}


# ------------------------------------------------------------------------------------------------------- bitsandbytes
def _of_bitsandbytes(what: str, state: State) -> State:
    state = {**state, **state.get(NESTED, {})}
    if "state2" not in state:
        raise mismatch("%s has 'state1' without 'state2', so it is of a class of bitsandbytes with one moment; only "
                       "states of Adam and AdamW can be loaded" % what)
    new: State = {"step": torch.tensor(float(state.get("step", 0)), dtype=torch.float32)}
    for number, name in BNB:
        codes = state["state%d" % number]
        if not torch.is_tensor(codes):
            raise mismatch("%s: 'state%d' is a %s, and must be a tensor" % (what, number, type(codes).__name__))
        if codes.dtype == torch.uint8:
            new.update(_stored(name, _in_order(codes), *_map_of(what, state, number, codes.numel())))
        else:
            new[name] = codes
    return new


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    """Returns codes with their elements in the order of memory: bitsandbytes makes parameters contiguous, but not their
    codes, and uses both in that order."""
    return codes.as_strided((codes.numel(),), (1,)).reshape(codes.shape) if is_dense(codes) else codes.contiguous()


def _map_of(what: str, state: State, number: int, numel: int) -> Tuple[torch.Tensor, torch.Tensor, int]:
    """Returns scales, levels and the size of blocks."""
    keys = ["qmap%d" % number, "absmax%d" % number if "absmax%d" % number in state else "max%d" % number]
    for key in keys:
        if not torch.is_tensor(state.get(key)):
            raise mismatch("%s has codes in 'state%d' without %r" % (what, number, key))
    levels, scales = (state[key] for key in keys)
    sizes = {scales_in(numel): BLOCK} if keys[1].startswith("absmax") else {1: max(numel, 1)}  # a scale per tensor
    if keys[1].startswith("absmax"):
        sizes.setdefault(-(-numel // OLD_BLOCK), OLD_BLOCK)
    if scales.numel() not in sizes or levels.numel() != 256:
        raise mismatch("%s has %d elements, %d scales in %r and %d levels in %r, and must have %s scales and 256 levels"
                       % (what, numel, scales.numel(), keys[1], levels.numel(), keys[0],
                          " or ".join(map(str, sorted(sizes)))))
    return scales, levels, sizes[scales.numel()]


# ------------------------------------------------------------------------------------------------------------ torchao
def _of_torchao(what: str, state: State) -> State:
    new: State = {}
    for name, value in state.items():
        if _has_codes(getattr(value, "_local_tensor", None)):
            raise unsupported("%s: %r is a DTensor of torchao's codes, which is not supported; load a full state dict "
                              "without DTensors" % (what, name))
        if not _has_codes(value):
            new[name] = value
        elif name not in ("exp_avg", "exp_avg_sq"):
            raise unsupported("%s has %r, which the optimizers here do not have" % (what, name))
        else:
            new.update(_moment_of_torchao("%s: %r" % (what, name), name, value))
    return new


def _moment_of_torchao(what: str, name: str, value: Any) -> State:
    codes, scales, levels = value.codes.contiguous(), value.scale, getattr(value, "qmap", None)
    block = getattr(value, "block_size", None) or codes.numel() // max(scales.numel(), 1)
    if levels is not None and levels.numel() != 256:
        raise unsupported("%s has codes of 4 bits, which are not supported; continue with torchao, or without this "
                          "state" % what)
    if scales.numel() * block != codes.numel():
        raise mismatch("%s has %d codes and %d scales of %d each" % (what, codes.numel(), scales.numel(), block))
    if levels is not None:
        return _stored(name, codes, scales, levels, block)
    if name == "exp_avg" and block % BLOCK == 0 and E4M3 != torch.uint8:  # else they would be read as Q8
        scales = scales.reshape(-1).repeat_interleave(block // BLOCK)
        return {name: codes.view(E4M3), scale_of(name): scales.float()}
    return {name: decode(codes, scales.float(), levels_of("exp_avg", "e4m3"), block)}
