# SPDX-License-Identifier: Apache-2.0
"""SGD with the arguments of torch.optim."""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch

from .. import _abi as abi
from ._adam import Torch
from ._base import number
from ._formats import FIRST, MIN_8BIT_SIZE, scale_of
from ._ranks import rows

TorchSGD = torch.optim.SGD  # as it is on import


def _drop_buffer(state: Dict[str, Any]) -> None:
    for name in ("momentum_buffer", scale_of("momentum_buffer")):
        state.pop(name, None)


class SGD(Torch, TorchSGD):
    __doc__ = """torch.optim.SGD, stepped by the engine.

    Sparse gradients are refused, and so is a momentum that changes between 0 and another value. Parameters are float32,
    float16, bfloat16, float64 or complex. The momentum is float32 unless a format is given.

    params                  parameters, or dicts of parameters with separate values of the arguments below
    lr                      learning rate; a number, or a tensor that is read in each step
    momentum                decay of the sum of gradients; 0 = no momentum
    dampening               the fraction of a gradient that is not added to the momentum
    weight_decay            times the weights is added to the gradient
    nesterov                True: Nesterov's momentum
    foreach                 no effect: the step is the same
    maximize                must be False
    differentiable          must be False
    fused                   True: with torch.amp.GradScaler the step unscales gradients and skips on overflow; do not
                            clip between. Otherwise GradScaler does both. Results are the same
    stochastic_rounding     True: bfloat16 parameters are rounded up or down with a probability proportional to
                            the distance, so that small updates are not lost; float32 ones are exact
    seed                    of the random numbers, a whole number in [0, 2^64)
    exp_avg_format          format of the momentum: "f32"; "bf16", rounded to nearest; "bf16_random",
                            rounded stochastically; "e4m3" or "q8", a byte per element and a scale per 256 elements
    min_8bit_size           smaller tensors, in elements, have float32 moments in place of "e4m3" and "q8"
    masters                 of 16-bit parameters: None; "float32": copies in the state; "remainder": 16 more bits in
                            the state, with which a bfloat16 parameter is its own master
    """ + rows(28)

    _stores = (FIRST, "masters")
    _fields = ("lr", "weight_decay", "momentum", "dampening", "nesterov")
    _counts = False  # torch's state is only the buffer

    def __init__(self,
                 params: Any,
                 lr: Any = 1e-3,
                 momentum: float = 0,
                 dampening: float = 0,
                 weight_decay: Any = 0,
                 nesterov: bool = False,
                 *,
                 maximize: bool = False,
                 foreach: Optional[bool] = None,
                 differentiable: bool = False,
                 fused: Optional[bool] = None,
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
        self._init(TorchSGD,
                   params,
                   lr=lr,
                   momentum=momentum,
                   dampening=dampening,
                   weight_decay=weight_decay,
                   nesterov=nesterov,
                   maximize=maximize,
                   foreach=foreach,
                   differentiable=differentiable,
                   fused=fused,
                   stochastic_rounding=stochastic_rounding,
                   seed=seed,
                   exp_avg_format=exp_avg_format,
                   min_8bit_size=min_8bit_size,
                   masters=masters)

    _may_lack = _may_have = ("momentum_buffer", )  # of steps with another momentum, 0 or not

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        nesterov = group["nesterov"] and group["momentum"]
        return abi.DSOPT_ALGORITHM_SGD, abi.DSOPT_GROUP_NESTEROV if nesterov else 0, {}

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        lr, decay, momentum, dampening = (
            number(group[key], g, key) for key in ("lr", "weight_decay", "momentum", "dampening"))
        if not momentum:  # torch ignores the other two
            return lr, decay, 0.0, 0.0, 0.0
        return lr, decay, momentum, dampening, float(bool(group["nesterov"]))

    def _steps_of(self, state: Dict[str, Any]) -> float:
        """The engine only needs to know if the next step is the first, which creates the buffer. The step count itself
        matters only with stochastic rounding."""
        return float(state.get("step", "momentum_buffer" in state))

    def _plan(self) -> None:
        self._forget()
        begun = []
        for state in self.state.values():
            if state.get("momentum_buffer", state) is None:  # some versions of torch store None
                del state["momentum_buffer"]
            begun.append("momentum_buffer" in state)
        for group in self.param_groups:
            for state in [self.state[param] for param in group["params"] if param in self.state]:
                if group["momentum"] and "momentum_buffer" not in state:
                    state.pop("step", None)  # saved without momentum: the next step is the buffer's first
        try:
            super()._plan()
        except BaseException:
            begun += [False] * (len(self.state) - len(begun))
            for state, was in zip(self.state.values(), begun):
                if not was:
                    _drop_buffer(state)
            raise

    def _forget(self) -> None:
        """Removes buffers whose first step was skipped: the gradient that creates a buffer is not dampened."""
        if any(group["dampening"] for group in self.param_groups) and not self._shards:  # its state has `step`
            for plan in self._plans or ():
                for param, step in zip(plan.keys, plan.steps.tolist()):
                    if not step:
                        _drop_buffer(self.state.get(param, {}))

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a group, as torch's. `param_group` is a dict of its parameters and its hyper-parameters."""
        self._forget()
        super().add_param_group(param_group)

    def state_dict(self, *args: Any, **options: Any) -> Dict[str, Any]:
        """Returns the state and the groups. `args` and options are torch's."""
        self._forget()
        return super().state_dict(*args, **options)

    def __getstate__(self) -> Dict[str, Any]:
        self._forget()
        return super().__getstate__()
