# SPDX-License-Identifier: Apache-2.0
"""Arguments of the steps of DeepSpeed's optimizers: gradients, output copies, a scale and norms."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

from ._base import number
from ._several import PassedArguments
from ._tensors import unsupported, wrong


def _per_group(groups: List[Dict[str, Any]], values: Any, what: str) -> List[Optional[List[Any]]]:
    """Returns a list for each of the first groups, None where a group has none. `values` None has no list for any
    group; tensors in a list or generator are the list of group 0; a list of lists has one per group."""
    if values is None:
        return [None] * len(groups)
    if torch.is_tensor(values) or isinstance(values, (str, bytes, dict)):
        raise wrong("%s is a %s, and must be None, a list of tensors, or a list of such lists" %
                    (what, type(values).__name__))
    try:
        values = list(values)
        if any(hasattr(entry, "__iter__") and not torch.is_tensor(entry) for entry in values):
            lists = [None if entry is None else list(entry) for entry in values]
        else:
            lists = [values]
    except TypeError:
        raise wrong("%s is a %s, and must be None, a list of tensors, or a list of such lists" %
                    (what, type(values).__name__)) from None
    if len(lists) > len(groups):
        raise wrong("%s has %d lists, and the optimizer %d groups" % (what, len(lists), len(groups)))
    for g, (entries, group) in enumerate(zip(lists, groups)):
        if entries is not None and len(entries) > len(group["params"]):
            raise wrong("%s has %d tensors for param_groups[%d], which has %d parameters" %
                        (what, len(entries), g, len(group["params"])))
    return lists


def _tensors(groups: List[Dict[str, Any]], values: Any,
             what: str) -> Iterator[Tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """Yields parameters, each with its entry. Parameters past the end of their list are omitted, as by the
    originals."""
    for g, (group, entries) in enumerate(zip(groups, _per_group(groups, values, what))):
        for i, (param, entry) in enumerate(zip(group["params"], [None] * len(group["params"])
                                               if entries is None else entries)):
            if entry is not None and not torch.is_tensor(entry):
                raise wrong("%s[%d][%d] is a %s, and must be a tensor or None" % (what, g, i, type(entry).__name__))
            yield param, entry


def _norms(groups: List[Dict[str, Any]], values: Any) -> Optional[List[float]]:
    """Returns one norm per group, or None if no group has max_grad_norm: in that case the original does not read
    them."""
    if values is None or not any(group.get("max_grad_norm") for group in groups):
        return None
    values = [values] if torch.is_tensor(values) and values.dim() == 0 else list(values)
    if len(values) != len(groups):
        raise wrong("grad_norms has %d entries, and the optimizer %d groups" % (len(values), len(groups)))
    norms = []
    for g, (value, group) in enumerate(zip(values, groups)):
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if isinstance(value, (list, tuple)) or torch.is_tensor(value) and value.numel() != 1:
            raise unsupported("grad_norms[%d] has a norm per parameter, which is not supported; give one norm per "
                              "group, or None for grad_norms, and the step takes the norms" % g)
        if value is None and group.get("max_grad_norm"):
            raise wrong("grad_norms[%d] is None, and the group has max_grad_norm" % g)
        norms.append(0.0 if value is None else number(value, g, "grad_norms"))
    return norms


def passed_arguments_of(groups: List[Dict[str, Any]], grads: Any, output_params: Any, scale: Any,
             grad_norms: Any) -> Optional[PassedArguments]:
    """Returns None if all arguments have their defaults."""
    factor = number(scale, 0, "scale")
    if not 0 < factor < 3.4e38:
        raise wrong("scale is %r, and must be positive and finite" % (scale,))
    if grads is None and output_params is None and grad_norms is None and factor == 1:
        return None
    visited = {param: param.grad if grad is None else grad for param, grad in _tensors(groups, grads, "grads")}
    present = {param: grad for param, grad in visited.items() if grad is not None}
    outputs = {param: output for param, output in _tensors(groups, output_params, "output_params")
               if output is not None and param in present}
    return PassedArguments(present, outputs, factor, _norms(groups, grad_norms))
