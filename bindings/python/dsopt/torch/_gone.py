# SPDX-License-Identifier: Apache-2.0
"""Attributes of DeepSpeed's wrappers that the wrappers here do not have, and how the text of their AttributeError
continues."""
from __future__ import annotations

from typing import Dict

_SCALE = ": the step updates the loss scale on the device; set loss_scale or use override_loss_scale"
_OVERFLOW = ": the step checks the gradients; read overflow after it"
_MASK = ": the step reads the attributes model_parallel, tensor_model_parallel and ds_pipe_replicated of each parameter"

GONE: Dict[str, str] = {
    "_update_scale": _SCALE,
    "overflow_checker": _OVERFLOW,
    "flatten_grad_norm_mask_list": _MASK,
    "_get_norm_mask_idx": _MASK,
    "_require_avoid_recompute_norm": _MASK,
    "step_unfused": "; use step",
}
for _name in ("state", "param_groups", "loss_scale"):
    GONE["_get_" + _name] = GONE["_set_" + _name] = "; use the property " + _name
