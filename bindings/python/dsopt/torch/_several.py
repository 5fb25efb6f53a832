# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer with several plans: parameters on several devices, with different seeds, and float64 ones.

A plan computes norms and checks for Inf and NaN only in the gradients of its parameters. Decisions that all plans must
share are computed here first.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional

import torch

from ._double_plan import squares_of
from ._dtensor import local_tensors
from ._tensors import check_grad, is_dtensor

if TYPE_CHECKING:
    from ._base import EngineOptimizer


class PassedArguments(NamedTuple):
    """The arguments of one step."""
    grads: Dict[torch.Tensor, torch.Tensor]  # by parameter; missing ones have no gradient
    outputs: Dict[torch.Tensor, torch.Tensor]  # by parameter
    scale: float  # factor by which the gradients are scaled
    norms: Optional[List[float]]  # norm of each group's gradients; None: the step computes them if it clips


def with_norms(owner: EngineOptimizer, scale: Any, found_inf: Any) -> Optional[PassedArguments]:
    """Returns the arguments of this step, with the norm of each group if a group clips or gradients have a scale. A
    norm that is not finite skips the step in each plan. GradScaler has already checked for Inf and NaN."""
    passed = owner._passed
    if passed is not None and passed.norms is not None:
        return passed
    clips = "max_norm" in owner._fields and any(
        owner._hyper(group, g)[owner._fields.index("max_norm")] for g, group in enumerate(owner.param_groups))
    if not clips and (scale is None or found_inf is not None) and (passed is None or passed.scale == 1):
        return passed
    grads = {param: param.grad for plan in owner._plans or () for param in plan.keys
             if param.grad is not None} if passed is None else passed.grads
    return (passed or PassedArguments(grads, {}, 1.0, None))._replace(norms=_norms(owner, grads))


def _norms(owner: EngineOptimizer, grads: Any) -> List[float]:
    sums = [0.0] * len(owner.param_groups)
    for plan in owner._plans or ():
        for entry, param in zip(plan.entries, plan.keys):
            if param not in grads:
                continue
            grad = grads[param]
            if is_dtensor(param):  # the rule has no norms: only this rank's shard must be finite
                grad, = local_tensors([grad])
            else:
                check_grad(grad, param, "the gradient of " + entry.name, plan.device)
            if grad.layout == torch.strided:
                sums[entry.group] += squares_of(grad)
    largest = torch.finfo(torch.float32).max  # largest norm that the engine accepts
    return [math.sqrt(total) if total <= largest**2 else math.inf for total in sums]
