# SPDX-License-Identifier: Apache-2.0
"""Lion with the arguments of its authors' implementation for PyTorch."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from .. import _abi as abi
from ._base import EngineOptimizer, number
from ._formats import FIRST, MIN_8BIT_SIZE
from ._ranks import rows
from ._rounding import defaults_of


class Lion(EngineOptimizer):
    __doc__ = """Chen et al. 2023, with decoupled decay. State is the authors': only exp_avg. FusedLion has DeepSpeed's
    defaults.

    params               parameters, or dicts of parameters with separate values of the arguments below
    lr                   learning rate: the size of a step, because updates are signs
    betas                weight of the mean in the update, and decay of the mean
    weight_decay         decoupled decay per step, times lr
    stochastic_rounding  True: bfloat16 parameters are rounded up or down with a probability proportional to
                         the distance, so that small updates are not lost; float32 ones are exact
    seed                 of the random numbers, a whole number in [0, 2^64)
    exp_avg_format       format of the running mean: "f32"; "bf16", rounded to nearest; "bf16_random",
                         rounded stochastically; "e4m3" or "q8", a byte per element and a scale per 256 elements
    min_8bit_size        smaller tensors, in elements, have float32 moments in place of "e4m3" and "q8"
    masters              of 16-bit parameters: None; "float32": copies in the state; "remainder": 16 more bits in
                         the state, with which a bfloat16 parameter is its own master
    """ + rows(25)

    _stores: Tuple[str, ...] = (FIRST, "masters")
    _fields = ("lr", "beta1", "beta2", "weight_decay")
    _counts = False

    def __init__(self,
                 params: Any,
                 lr: Any = 1e-4,
                 betas: Tuple[Any, Any] = (0.9, 0.99),
                 weight_decay: float = 0.0,
                 *,
                 stochastic_rounding: bool = False,
                 seed: int = 0,
                 exp_avg_format: str = "f32",
                 min_8bit_size: int = MIN_8BIT_SIZE,
                 masters: Optional[str] = None,
                 group: Any = None,
                 shard: Any = False,
                 average: bool = False,
                 node_group: Any = None,
                 max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, max_grad_norm, check_ranks=check_ranks)
        if not 0.0 <= lr:
            raise ValueError("Invalid learning rate: {}".format(lr))
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError("Invalid beta parameter at index {}: {}".format(i, beta))
        extra = defaults_of(stochastic_rounding, seed, {FIRST: exp_avg_format}, min_8bit_size, masters)
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, **extra))

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        return abi.DSOPT_ALGORITHM_LION, 0, {}

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return (number(group["lr"], g, "lr"), number(beta1, g, "betas[0]"), number(beta2, g, "betas[1]"),
                number(group["weight_decay"], g, "weight_decay"))
