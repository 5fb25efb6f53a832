# SPDX-License-Identifier: Apache-2.0
"""Steps of an optimizer that has several plans: parameters on several devices, of other seeds, and float64 ones.

A plan takes norms and looks for Inf and NaN in the gradients of its own parameters. What all plans must decide in the
same way is found here first.
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


class Given(NamedTuple):
    """The arguments of one step."""
    grads: Dict[torch.Tensor, torch.Tensor]  # by parameter; one that is not here has no gradient
    outputs: Dict[torch.Tensor, torch.Tensor]  # by parameter
    scale: float  # gradients are this much too large
    norms: Optional[List[float]]  # of the gradients of each group; None: the step takes them where it clips


def with_norms(owner: EngineOptimizer, scale: Any, found_inf: Any) -> Optional[Given]:
    """The arguments of this step with the norm of each group, where a group clips or gradients carry a scale; else as
    they are. A norm that is not finite skips the step in each plan. GradScaler has looked for Inf and NaN already."""
    given = owner._given
    if given is not None and given.norms is not None:
        return given
    clips = "max_norm" in owner._fields and any(
        owner._hyper(group, g)[owner._fields.index("max_norm")] for g, group in enumerate(owner.param_groups))
    if not clips and (scale is None or found_inf is not None) and (given is None or given.scale == 1):
        return given
    grads = {param: param.grad for plan in owner._plans or () for param in plan.keys
             if param.grad is not None} if given is None else given.grads
    return (given or Given(grads, {}, 1.0, None))._replace(norms=_norms(owner, grads))


def _norms(owner: EngineOptimizer, grads: Any) -> List[float]:
    sums = [0.0] * len(owner.param_groups)
    for plan in owner._plans or ():
        for entry, param in zip(plan.entries, plan.keys):
            if param not in grads:
                continue
            grad = grads[param]
            if is_dtensor(param):  # of a rule without norms: what counts is whether the shard of this rank is finite
                grad, = local_tensors([grad])
            else:
                check_grad(grad, param, "the gradient of " + entry.name, plan.device)
            if grad.layout == torch.strided:
                sums[entry.group] += squares_of(grad)
    largest = torch.finfo(torch.float32).max  # of the norms that the engine takes
    return [math.sqrt(total) if total <= largest**2 else math.inf for total in sums]
