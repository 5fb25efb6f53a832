# SPDX-License-Identifier: Apache-2.0
"""The 1-bit family detects gradients that were averaged before a step that exchanges them itself."""
from __future__ import annotations

import warnings
from typing import Any, Iterable, List, Optional

import torch
import torch.distributed as dist

from .. import _abi as abi
from ._base import EngineOptimizer
from ._hash import BITS, hash_of
from ._ranks import largest

AVERAGED = ("%s: in the first step with local gradients they are equal on all %d ranks. So they were averaged before "
            "the step, and the communication that the step would save has been made. With DeepSpeed set "
            "engine.enable_backward_allreduce = False after deepspeed.initialize; do not use DistributedDataParallel. "
            "If the gradients were not averaged, the ranks have the same data: give each rank different data")
DIFFERENT_WEIGHTS = (
    "%s: the weights of the %d ranks differ. Each rank must have a whole copy of the parameters with the same "
    "values: broadcast them before the first step, and use neither ZeRO nor FSDP, which partition them")


def _any(tests: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=device)
    for test in tests:
        total += test.to(device)
    return total.clamp(max=1)


class Averaged(EngineOptimizer):
    """The check of the 1-bit family: one all-reduce of six numbers, before the first step with local gradients, and
    again after a load. It is inconclusive if all gradients are 0 or one is not finite; then the next such step repeats
    it. All ranks are in the same stage, so all take part, with or without gradients."""

    _unchecked = True
    _calls_left = 0  # steps that certainly need averaged gradients: they do not read the stage from the device
    _rank_key = ""
    _algorithm = 0
    size: Any
    _levels: Any
    _schedule: Any
    _schedule_fields: Any

    def _calls_to_come(self, info: Any) -> int:
        """Returns a lower bound of the number of steps after the next one that need averaged gradients too."""
        if self._algorithm == abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM:
            return 0
        return max(0, int(self._schedule_fields()["freeze_step"]) - int(info.step) - 2)

    def _run_plans(self, scale: Optional[torch.Tensor], found_inf: Optional[torch.Tensor]) -> None:
        self._check_gradients()
        super()._run_plans(scale, found_inf)

    def _check_gradients(self) -> None:
        if not self._unchecked or not self._rank_key or not self._plans:
            return
        if self._calls_left > 0:
            self._calls_left -= 1
            return
        info = self._schedule()
        if info.reduction == abi.DSOPT_REDUCTION_FULL:
            self._calls_left = self._calls_to_come(info) if self._plans[0].device.type == "cuda" else 0
            return
        whole = not (info.frozen and self._plans[0].whole.get("lr_sum") is not None)  # otherwise ranks step locally
        self._unchecked = not self._compare(whole)

    def _compare(self, weights: bool) -> bool:
        """Returns True if the check was conclusive. Collective."""
        plan, levels = self._plans[0], self._levels()  # type: ignore[index]
        passed = self._passed
        grads = [(i, grad) for i, grad in enumerate(p.grad if passed is None else passed.grads.get(p)
                                                    for p in plan.params)
                 if grad is not None and grad.layout == torch.strided and grad.element_size() in BITS]
        gradients = hash_of(grads, plan.device)
        params = hash_of(enumerate(plan.params if weights else ()), plan.device)
        found = torch.stack([gradients, ~gradients, params, ~params,
                             _any(((g != 0).any() for _, g in grads), plan.device),
                             _any((~torch.isfinite(g).all() for _, g in grads), plan.device)])
        most, least, heaviest, lightest, nonzero, nonfinite = map(int, largest(found, levels, plan.device).tolist())
        warning_texts: List[str] = []
        if heaviest != ~lightest:
            warning_texts.append(DIFFERENT_WEIGHTS)
        elif nonfinite or not nonzero:
            return False
        elif most == ~least:
            warning_texts.append(AVERAGED)
        for text in warning_texts if all(dist.get_rank(group) == 0 for _, group in levels) else ():
            warnings.warn(text % (type(self).__name__, self.size), stacklevel=2)
        return True
