# SPDX-License-Identifier: Apache-2.0
"""Adagrad with the arguments of torch.optim."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from .. import _abi as abi
from ._adam import Torch
from ._base import number
from ._formats import SECOND
from ._ranks import rows

TorchAdagrad = torch.optim.Adagrad  # as it is on import


class Adagrad(Torch, TorchAdagrad):
    __doc__ = """torch.optim.Adagrad, stepped by the engine (Duchi et al. 2011).

    Sparse gradients are refused. Parameters are float32, float16, bfloat16, float64 or complex; the sums are
    float32 unless a format is given.

    params                     parameters, or dicts of parameters with separate values of the arguments below
    lr                         learning rate; a number, or a tensor that is read in each step
    lr_decay                   lr is divided by 1 + lr_decay times the steps before
    weight_decay               times the weights is added to the gradient
    initial_accumulator_value  initial sums of squares
    eps                        added to the root of a sum
    foreach                    no effect: the step is the same
    maximize                   must be False
    differentiable             must be False
    fused                      True: with torch.amp.GradScaler the step unscales gradients and skips on overflow; do not
                               clip between. Otherwise GradScaler does both. Results are the same
    stochastic_rounding        True: bfloat16 parameters are rounded up or down with a probability proportional to
                               the distance, so that small updates are not lost; float32 ones are exact
    seed                       of the random numbers, a whole number in [0, 2^64)
    exp_avg_sq_format          format of the sum of squares: "f32" or "bf16_random"
    masters                    of 16-bit parameters: None; "float32": copies in the state; "remainder": 16 more bits in
                               the state, with which a bfloat16 parameter is its own master
    """ + rows(31)

    _stores = (SECOND, "masters")
    _fields = ("lr", "lr_decay", "weight_decay", "eps")

    def __init__(self,
                 params: Any,
                 lr: Any = 1e-2,
                 lr_decay: float = 0,
                 weight_decay: float = 0,
                 initial_accumulator_value: float = 0,
                 eps: float = 1e-10,
                 foreach: Optional[bool] = None,
                 *,
                 maximize: bool = False,
                 differentiable: bool = False,
                 fused: Optional[bool] = None,
                 stochastic_rounding: bool = False,
                 seed: int = 0,
                 exp_avg_sq_format: str = "f32",
                 masters: Optional[str] = None,
                 group: Any = None,
                 shard: Any = False,
                 average: bool = False,
                 node_group: Any = None,
                 max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, max_grad_norm, check_ranks=check_ranks)
        self._init(TorchAdagrad,
                   params,
                   lr=lr,
                   lr_decay=lr_decay,
                   weight_decay=weight_decay,
                   initial_accumulator_value=initial_accumulator_value,
                   eps=eps,
                   foreach=foreach,
                   maximize=maximize,
                   differentiable=differentiable,
                   fused=fused,
                   stochastic_rounding=stochastic_rounding,
                   seed=seed,
                   exp_avg_sq_format=exp_avg_sq_format,
                   masters=masters)
        if self._shards:  # the sums of this rank's parts are made in the first step
            self.state.clear()
            return
        for group in self.param_groups:  # torch's sums have the dtype of the parameter
            dtype = torch.float32 if group.get(SECOND, "f32") == "f32" else torch.bfloat16
            for param in group["params"]:
                if param.dtype in (torch.float16, torch.bfloat16) or dtype == torch.bfloat16:
                    start = group["initial_accumulator_value"]
                    self.state[param]["sum"] = torch.full_like(param.detach(), start, dtype=dtype)

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        return abi.DSOPT_ALGORITHM_ADAGRAD, 0, {"initial_accumulator_value": self._starts_as("sum", group)}

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        return tuple(number(group[key], g, key) for key in self._fields)

    def _has_begun(self, state: Optional[Dict[str, Any]]) -> bool:
        # torch creates state before the first step. The engine creates the master, and with it the loss scale.
        return bool(state) and ("master" in state or "remainder" in state or self._steps_of(state) > 0)

    def _starts_as(self, name: str, group: Dict[str, Any]) -> float:
        """torch creates only the sums of the first groups; sums of groups that are added later have the same initial
        value."""
        return float(group["initial_accumulator_value"]) if name == "sum" else 0.0
