# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW with the arguments of torch.optim."""
from __future__ import annotations

import inspect
from itertools import chain
from typing import Any, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from ._base import REFUSED, EngineOptimizer
from ._formats import FIRST, MIN_8BIT_SIZE, SECOND
from ._ranks import rows
from ._rounding import defaults_of
from ._tensors import DEVICES, refused, unsupported

# Saved on import: a caller may replace them by the classes here.
TorchAdam, TorchAdamW = torch.optim.Adam, torch.optim.AdamW


class Torch(EngineOptimizer):
    """The base class of torch.optim checks the arguments and holds the groups. `foreach`, `fused` and `capturable`
    choose among torch's implementations; here they are accepted and do not change the step. As in torch, with
    fused=True the step does GradScaler's unscaling and skipping, and a device that the engine does not support raises a
    RuntimeError."""

    def _init(self, base: Any, params: Any, **options: Any) -> None:
        for name in REFUSED:
            if options.get(name):
                raise refused(type(self).__name__, name)
        known = inspect.signature(base.__init__).parameters
        if options.get("decoupled_weight_decay") and "decoupled_weight_decay" not in known:
            raise unsupported("Adam: decoupled_weight_decay=True is not known to torch %s; use AdamW" %
                              torch.__version__)
        formats = {key: options[key] for key in (FIRST, SECOND) if key in options}
        extra = defaults_of(options["stochastic_rounding"], options["seed"], formats,
                            options.get("min_8bit_size", MIN_8BIT_SIZE), options["masters"])
        base.__init__(self, params, **{name: value for name, value in options.items() if name in known})
        self.defaults.update(extra)
        for group in self.param_groups:
            for name, value in extra.items():
                group.setdefault(name, value)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a group, as torch's. `param_group` is a dict of its parameters and its hyper-parameters."""
        for name in REFUSED:
            if isinstance(param_group, dict) and param_group.get(name):
                raise refused("param_groups[%d]" % len(self.param_groups), name)
        super().add_param_group(param_group)

    def _plan(self) -> None:
        for param in chain.from_iterable(group["params"] for group in self.param_groups if group.get("fused")):
            if param.grad is not None and param.device.type not in DEVICES:
                raise unsupported("`fused=True` requires all the params to be floating point Tensors of supported "
                                  "devices: %s but %s and %s" % (list(DEVICES), param.dtype, param.device.type))
        super()._plan()


class AdamW(Torch, TorchAdamW):
    __doc__ = """torch.optim.AdamW, stepped by the engine (Loshchilov and Hutter 2019).

    Parameters are float32, float16, bfloat16, float64 or complex. Moments are float32 unless a format is given.

    params                  parameters, or dicts of parameters with separate values of the arguments below
    lr                      learning rate; a number, or a tensor that is read in each step
    betas                   decay of the running means of gradients and of their squares
    eps                     added to the root of the second mean
    weight_decay            decoupled decay per step, times lr
    amsgrad                 must be False
    foreach                 no effect: the step is the same
    maximize                must be False
    capturable              no effect: the step is the same
    differentiable          must be False
    fused                   True: with torch.amp.GradScaler the step unscales gradients and skips on overflow; do not
                            clip between. Otherwise GradScaler does both. Results are the same
    stochastic_rounding     True: bfloat16 parameters are rounded up or down with a probability proportional to
                            the distance, so that small updates are not lost; float32 ones are exact
    seed                    of the random numbers, a whole number in [0, 2^64)
    exp_avg_format          format of the running mean of gradients: "f32"; "bf16", rounded to nearest; "bf16_random",
                            rounded stochastically; "e4m3" or "q8", a byte per element and a scale per 256 elements
    exp_avg_sq_format       format of the running mean of squares: "f32", "bf16_random" or "q8"
    min_8bit_size           smaller tensors, in elements, have float32 moments in place of "e4m3" and "q8"
    masters                 of 16-bit parameters: None; "float32": copies in the state; "remainder": 16 more bits in
                            the state, with which a bfloat16 parameter is its own master
    """ + rows(28)

    _stores = (FIRST, SECOND, "masters")

    def __init__(self,
                 params: Any,
                 lr: Any = 1e-3,
                 betas: Tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8,
                 weight_decay: float = 1e-2,
                 amsgrad: bool = False,
                 *,
                 maximize: bool = False,
                 foreach: Optional[bool] = None,
                 capturable: bool = False,
                 differentiable: bool = False,
                 fused: Optional[bool] = None,
                 stochastic_rounding: bool = False,
                 seed: int = 0,
                 exp_avg_format: str = "f32",
                 exp_avg_sq_format: str = "f32",
                 min_8bit_size: int = MIN_8BIT_SIZE,
                 masters: Optional[str] = None,
                 group: Any = None,
                 shard: Any = False,
                 average: bool = False,
                 node_group: Any = None,
                 max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, max_grad_norm, check_ranks=check_ranks)
        self._init(TorchAdamW,
                   params,
                   lr=lr,
                   betas=betas,
                   eps=eps,
                   weight_decay=weight_decay,
                   amsgrad=amsgrad,
                   maximize=maximize,
                   foreach=foreach,
                   capturable=capturable,
                   differentiable=differentiable,
                   fused=fused,
                   stochastic_rounding=stochastic_rounding,
                   seed=seed,
                   exp_avg_format=exp_avg_format,
                   exp_avg_sq_format=exp_avg_sq_format,
                   min_8bit_size=min_8bit_size,
                   masters=masters)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # as torch 2.7: a state dict of Adam says False
            if "decoupled_weight_decay" in group:
                group["decoupled_weight_decay"] = True

    def _fixed(self) -> List[Any]:
        return [group.get("decoupled_weight_decay", True) for group in self.param_groups]

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        decoupled = group.get("decoupled_weight_decay", True)  # torch 2.7 and later have this key
        return abi.DSOPT_ALGORITHM_ADAMW if decoupled else abi.DSOPT_ALGORITHM_ADAM, 0, {}


class Adam(Torch, TorchAdam):
    __doc__ = """torch.optim.Adam, stepped by the engine (Kingma and Ba 2015).

    Parameters are float32, float16, bfloat16, float64 or complex. Moments are float32 unless a format is given.

    params                  parameters, or dicts of parameters with separate values of the arguments below
    lr                      learning rate; a number, or a tensor that is read in each step
    betas                   decay of the running means of gradients and of their squares
    eps                     added to the root of the second mean
    weight_decay            times the weights is added to the gradient
    amsgrad                 must be False
    foreach                 no effect: the step is the same
    maximize                must be False
    capturable              no effect: the step is the same
    differentiable          must be False
    fused                   True: with torch.amp.GradScaler the step unscales gradients and skips on overflow; do not
                            clip between. Otherwise GradScaler does both. Results are the same
    decoupled_weight_decay  True: decoupled decay, as in AdamW
    stochastic_rounding     True: bfloat16 parameters are rounded up or down with a probability proportional to
                            the distance, so that small updates are not lost; float32 ones are exact
    seed                    of the random numbers, a whole number in [0, 2^64)
    exp_avg_format          format of the running mean of gradients: "f32"; "bf16", rounded to nearest; "bf16_random",
                            rounded stochastically; "e4m3" or "q8", a byte per element and a scale per 256 elements
    exp_avg_sq_format       format of the running mean of squares: "f32", "bf16_random" or "q8"
    min_8bit_size           smaller tensors, in elements, have float32 moments in place of "e4m3" and "q8"
    masters                 of 16-bit parameters: None; "float32": copies in the state; "remainder": 16 more bits in
                            the state, with which a bfloat16 parameter is its own master
    """ + rows(28)

    _stores = (FIRST, SECOND, "masters")

    def __init__(self,
                 params: Any,
                 lr: Any = 1e-3,
                 betas: Tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8,
                 weight_decay: float = 0,
                 amsgrad: bool = False,
                 *,
                 foreach: Optional[bool] = None,
                 maximize: bool = False,
                 capturable: bool = False,
                 differentiable: bool = False,
                 fused: Optional[bool] = None,
                 decoupled_weight_decay: bool = False,
                 stochastic_rounding: bool = False,
                 seed: int = 0,
                 exp_avg_format: str = "f32",
                 exp_avg_sq_format: str = "f32",
                 min_8bit_size: int = MIN_8BIT_SIZE,
                 masters: Optional[str] = None,
                 group: Any = None,
                 shard: Any = False,
                 average: bool = False,
                 node_group: Any = None,
                 max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, max_grad_norm, check_ranks=check_ranks)
        self._init(TorchAdam,
                   params,
                   lr=lr,
                   betas=betas,
                   eps=eps,
                   weight_decay=weight_decay,
                   amsgrad=amsgrad,
                   foreach=foreach,
                   maximize=maximize,
                   capturable=capturable,
                   differentiable=differentiable,
                   fused=fused,
                   decoupled_weight_decay=decoupled_weight_decay,
                   stochastic_rounding=stochastic_rounding,
                   seed=seed,
                   exp_avg_format=exp_avg_format,
                   exp_avg_sq_format=exp_avg_sq_format,
                   min_8bit_size=min_8bit_size,
                   masters=masters)

    def _fixed(self) -> List[Any]:
        return [bool(group.get("decoupled_weight_decay")) for group in self.param_groups]

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        decoupled = group.get("decoupled_weight_decay", False)
        return abi.DSOPT_ALGORITHM_ADAMW if decoupled else abi.DSOPT_ALGORITHM_ADAM, 0, {}
