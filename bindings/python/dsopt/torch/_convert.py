# SPDX-License-Identifier: Apache-2.0
"""Conversion of loaded moments to the formats of the optimizer that loads them."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List

import torch

from ._codes import DTYPES, dense, encode, values_of
from ._dtensor import like, local_of, local_scales, with_scales, wrapped
from ._formats import FIRST, KEY_OF, KEYS, SCALED, SECOND, check_dtype, formats_of, is_codes, scale_of, scales_in
from ._originals import mismatch
from ._tensors import is_dense, is_dtensor, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer


def convert(owner: EngineOptimizer, saved: List[List[Any]]) -> None:
    """Converts the moments in the state. `saved` has the keys that the groups have in the state dict."""
    for g, (group, values) in enumerate(zip(owner.param_groups, saved)):
        for i, param in enumerate(group["params"]):
            state = owner.state.get(param) or {}
            moments = [name for name in KEY_OF if torch.is_tensor(state.get(name))]
            what = "param_groups[%d]['params'][%d]" % (g, i)
            for name in moments + ["remainder"] * torch.is_tensor(state.get("remainder")):
                check_dtype(state, name, "state %r of %s" % (name, what))
            if moments:
                _convert(owner, group, what, param, state, {name: dict(zip(KEYS, values))[KEY_OF[name]]
                                                            for name in moments})


def _stored(tensor: torch.Tensor, saved: Any) -> str:
    """Returns the format of a loaded moment. `saved` is that of its group."""
    if is_codes(tensor):  # torch without float8_e4m3fn has uint8 for both
        return "q8" if tensor.dtype == torch.uint8 and saved != "e4m3" else "e4m3"
    return "bf16" if tensor.dtype == torch.bfloat16 else "f32"


def _convert(owner: EngineOptimizer, group: Dict[str, Any], what: str, param: torch.Tensor, state: Dict[str, Any],
             saved: Dict[str, Any]) -> None:
    kinds = {name: _stored(state[name], saved[name]) for name in saved}
    # A float32 moment in a group of codes stays float32.
    kept = [state[name] for name in saved if kinds[name] == "f32" and saved[name] in SCALED]
    wanted = dict(zip((FIRST, SECOND), formats_of(owner, group, what, param, kept)))
    for name, have in kinds.items():
        want, label = wanted[KEY_OF[name]], "state %r of %s" % (name, what)
        if have in SCALED:
            _check_scales(state, name, label)
        if have == want and have in SCALED:
            if state[name].dtype != DTYPES[want]:
                state[name] = state[name].view(DTYPES[want])
        elif have in SCALED or want in SCALED:
            _recode(param, state, name, have, want, label)
        elif want != "f32" and have != "bf16":
            state[name] = state[name].to(torch.bfloat16)


def _check_scales(state: Dict[str, Any], name: str, label: str) -> None:
    scales, expected = state.get(scale_of(name)), scales_in(state[name].numel())
    if not torch.is_tensor(scales):
        raise mismatch("%s has codes, and there is no %r" % (label, scale_of(name)))
    if scales.numel() != expected:
        raise wrong("%s has %d scales, and must have %d, one per 256 elements" % (label, scales.numel(), expected),
                    "SHAPE")


def _recode(param: Any, state: Dict[str, Any], name: str, have: str, want: str, label: str) -> None:
    tensor, scale = state[name], scale_of(name)
    local = dense(local_of(like(param, tensor, label) if is_dtensor(param) else tensor))
    values = local.float() if have not in SCALED else values_of(name, have, local,
                                                                local_scales(param, state[scale], label))
    if want in SCALED:
        order = local_of(param).detach()
        if values.shape == order.shape and is_dense(order):  # the blocks are those of the parameter's memory
            values = torch.empty_strided(order.shape, order.stride(), dtype=torch.float32,
                                         device=values.device).copy_(values)
        codes, scales = encode(name, want, dense(values))
        state[name], state[scale] = wrapped(param, codes), with_scales(param, scales)
    else:
        state[name] = wrapped(param, values if want == "f32" else values.to(torch.bfloat16))
        state.pop(scale, None)
