# SPDX-License-Identifier: Apache-2.0
"""FusedAdam and FusedLamb with the arguments of DeepSpeed."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from ._base import REFUSED, EngineOptimizer, number
from ._lion import Lion
from ._originals import mismatch
from ._ranks import rows
from ._rounding import KEYS, defaults_of
from ._step_arguments import passed_arguments_of
from ._tensors import refused, unsupported, wrong


class ReadOnly(property):
    """A property whose error on assignment names it, as Python's property does from 3.11 on."""

    _name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, owner: Any, value: Any) -> None:
        raise unsupported("%s of %s cannot be set" % (self._name, type(owner).__name__))


class Named(EngineOptimizer):
    """DeepSpeed's defaults and attributes. compat="deepspeed" also reproduces its quirks (docs/compat.md)."""

    _fields = EngineOptimizer._fields + ("bias_correction",)
    _kept: Tuple[str, ...] = ("_compat",)  # attributes that copies and pickles keep
    _compat: Optional[str] = None

    def _start(self, params: Any, compat: Optional[str], amsgrad: bool, defaults: Dict[str, Any]) -> None:
        if amsgrad:
            raise refused(type(self).__name__, "amsgrad")
        if compat not in (None, "deepspeed"):
            raise wrong("compat is %r, and must be None or 'deepspeed'" % (compat,))
        if compat and defaults.get("stochastic_rounding"):
            raise unsupported("%s: stochastic_rounding=True is not supported with compat='deepspeed', as the original "
                              "does not have it; leave compat out" % type(self).__name__)
        if compat and self._ranks is not None:
            raise unsupported("%s: %s is not supported with compat='deepspeed', as the original keeps all state on "
                              "every rank and averages elsewhere; leave compat out" %
                              (type(self).__name__, "shard" if self._shards else "average"))
        self._compat = compat
        super().__init__(params, defaults)

    def __getstate__(self) -> Dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._kept}}

    def _restore(self, loaded: Dict[str, Any]) -> None:
        for g, group in enumerate(self.param_groups):
            for key in self.defaults:
                if key not in group and key not in REFUSED + KEYS:  # torch adds "differentiable" to the defaults
                    raise mismatch("param_groups[%d] of the state dict has no %r, so it is not one of %s" %
                                   (g, key, type(self).__name__))
        super()._restore(loaded)

    def _fixed(self) -> List[Any]:
        return [getattr(self, name) for name in self._kept]

    def _engine_desc(self, context: Any) -> Tuple[Any, Tuple[object, ...], bool]:
        desc, needed, hooked = super()._engine_desc(context)
        desc.compat = abi.DSOPT_COMPAT_DEEPSPEED if self._compat else abi.DSOPT_COMPAT_NONE
        return desc, needed, hooked

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        return super()._hyper(group, g) + (float(bool(group["bias_correction"])),)

    def _step(self, closure: Optional[Callable[[], Any]], grads: Any, output_params: Any = None, scale: Any = 1.0,
              grad_norms: Any = None) -> Any:
        """Runs step() with the arguments of the originals."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._passed = passed_arguments_of(self.param_groups, grads, output_params, scale, grad_norms)
        try:
            self._advance()
        finally:
            self._passed = None
        return loss

    def _flags(self, group: Dict[str, Any]) -> int:
        return 0 if group["bias_correction"] else int(abi.DSOPT_GROUP_NO_BIAS_CORRECTION)


# Shared by the docstrings below.
COMMON = """
    params           parameters, or dicts of parameters with separate values of the arguments below
    lr               learning rate
    betas            decay of the running means of gradients and of their squares
    eps              added to the square root of the second mean"""
DECAY = """
    weight_decay     decoupled decay per step, times lr"""
LAMB = """
    weight_decay     coefficient of the weights that are added to the update before the trust ratio is computed
    max_coeff        largest trust ratio
    min_coeff        smallest trust ratio"""
AMSGRAD = """
    amsgrad          must be False"""
COMPAT = """
    compat           None: standard mode; "deepspeed": also reproduces the original's quirks (docs/compat.md)
    stochastic_rounding True: bfloat16 parameters are rounded up or down with a probability proportional to the
                     distance, so that small updates are not lost; float32 ones are exact. Standard mode only
    seed             seed of the random numbers, an integer in [0, 2^64)
    """


class StepArguments(EngineOptimizer):
    """Optimizers whose original's step refuses its arguments."""

    set_grad_none: bool = True

    def zero_grad(self, set_to_none: Optional[bool] = None) -> None:
        """Set the gradients to None, or to zero.

        set_to_none  True: to None; False: to zero; None: as the attribute set_grad_none
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(self,
             closure: Optional[Callable[[], Any]] = None,
             grads: Any = None,
             output_params: Any = None,
             scale: Any = None,
             grad_norms: Any = None,
             grad_scaler: Any = None) -> Any:
        """Step once. Calls `closure` first and returns its result.

        grads, output_params, scale, grad_norms  must be None, as in the original: use FP16_Optimizer
        grad_scaler                              no effect
        """
        if grad_scaler is not None and self._ranks is not None and self._ranks.averages:
            self._ranks.refuse_scaler(type(self).__name__)
        for name, value in (("grads", grads), ("output_params", output_params), ("scale", scale), ("grad_norms",
                                                                                                   grad_norms)):
            if value is not None:
                raise unsupported("%s.step: %s is not supported; use FP16_Optimizer" % (type(self).__name__, name))
        return super().step(closure)


class FusedAdam(StepArguments, Named):
    __doc__ = """deepspeed.ops.adam.FusedAdam: AdamW, or with adam_w_mode=False Adam with L2 decay.
    """ + COMMON + DECAY + """
    bias_correction  False: the means are used without bias correction
    adam_w_mode      True: decoupled weight decay (AdamW); False: weight_decay times the weights is added to the
                     gradient (Adam)""" + AMSGRAD + """
    set_grad_none    zero_grad() sets gradients to None; False: to zero""" + COMPAT + rows(21)

    _kept = Named._kept + ("adam_w_mode", "set_grad_none")

    def __init__(self, params: Any, lr: Any = 1e-3, bias_correction: bool = True, betas: Tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0., amsgrad: bool = False,
                 set_grad_none: bool = True, *, compat: Optional[str] = None, stochastic_rounding: bool = False,
                 seed: int = 0, group: Any = None, shard: Any = False, average: bool = False, node_group: Any = None,
                 max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, max_grad_norm, check_ranks=check_ranks)
        self.adam_w_mode, self.set_grad_none = 1 if adam_w_mode else 0, set_grad_none
        self._start(params, compat, amsgrad, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                                  weight_decay=weight_decay, **defaults_of(stochastic_rounding, seed)))

    def _starts_at(self, group: Dict[str, Any], g: int) -> float:
        """Returns the number of steps of the group, which old checkpoints have."""
        step = number(group.get("step", 0), g, "step")
        if not 0 <= step < 2**31 - 1 or step != int(step):
            raise wrong("param_groups[%d]: step is %r, and must be a whole number in [0, 2^31 - 1)" %
                        (g, group["step"]))
        return step

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        return abi.DSOPT_ALGORITHM_ADAMW if self.adam_w_mode else abi.DSOPT_ALGORITHM_ADAM, self._flags(group), {}


class FusedLion(StepArguments, Lion):
    __doc__ = """deepspeed.ops.lion.FusedLion: Lion with DeepSpeed's defaults, which are not the authors'.

    params               parameters, or dicts of parameters with separate values of the arguments below
    lr                   learning rate: the size of a step, because updates are signs
    betas                weight of the mean in the update, and decay of the mean
    weight_decay         decoupled decay per step, times lr
    set_grad_none        zero_grad() sets gradients to None; False: to zero
    stochastic_rounding  True: bfloat16 parameters are rounded up or down with a probability proportional to
                         the distance, so that small updates are not lost; float32 ones are exact
    seed                 of the random numbers, a whole number in [0, 2^64)
    """ + rows(25)

    _stores = ()

    def __init__(self, params: Any, lr: Any = 1e-3, betas: Tuple[Any, Any] = (0.9, 0.999), weight_decay: float = 0.,
                 set_grad_none: bool = True, *, stochastic_rounding: bool = False, seed: int = 0, group: Any = None,
                 shard: Any = False, average: bool = False, node_group: Any = None, max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr, betas, weight_decay, stochastic_rounding=stochastic_rounding, seed=seed,
                         group=group, shard=shard, average=average, node_group=node_group, max_grad_norm=max_grad_norm,
                         check_ranks=check_ranks)

    def __getstate__(self) -> Dict[str, Any]:
        return {**super().__getstate__(), "set_grad_none": self.set_grad_none}


class TrustRatios(EngineOptimizer):
    """Trust ratios of the two LAMB classes."""

    def get_lamb_coeffs(self) -> List[float]:
        """The trust ratios of the last step, one per parameter that has had a gradient. Waits for the device."""
        return self._in_order([plan.whole["trust_ratio"].tolist() for plan in self._plans or ()])

    @ReadOnly
    def lamb_coeffs(self) -> List[torch.Tensor]:
        """The trust ratios of the last step as tensors, one per parameter that has had a gradient."""
        return self._in_order([plan.whole["trust_ratio"].unbind() for plan in self._plans or ()])

    def _in_order(self, values: List[Any]) -> List[Any]:
        """Returns the values of each plan's parameters, in the order of the groups."""
        if len(values) < 2:
            return [value for of_plan in values for value in of_plan]
        of_param = {param: value for plan, of_plan in zip(self._plans or (), values)
                    for param, value in zip(plan.params, of_plan)}
        return [of_param[param] for group in self.param_groups for param in group["params"] if param in of_param]


class FusedLamb(TrustRatios, Named):
    __doc__ = """deepspeed.ops.lamb.FusedLamb (You et al. 2019). Each parameter's update is scaled by its trust ratio,
    the norm of the weights divided by the norm of the update.
    """ + COMMON + LAMB + """
    bias_correction  False: the means are used without bias correction
    eps_inside_sqrt  True: sqrt(v + eps) in place of sqrt(v) + eps
    max_grad_norm    largest L2 norm of the gradients of a group; 0 = off""" + AMSGRAD + COMPAT + rows(
        21, "max_grad_norm")

    _fields = Named._fields + ("max_norm", "min_trust", "max_trust")
    _kept = Named._kept + ("eps_mode",)

    def __init__(self,
                 params: Any,
                 lr: Any = 1e-3,
                 bias_correction: bool = True,
                 betas: Tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8,
                 eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.,
                 max_grad_norm: float = 0.,
                 max_coeff: float = 10.,
                 min_coeff: float = 0.01,
                 amsgrad: bool = False,
                 *,
                 compat: Optional[str] = None,
                 stochastic_rounding: bool = False,
                 seed: int = 0,
                 group: Any = None,
                 shard: Any = False,
                 average: bool = False,
                 node_group: Any = None,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, check_ranks=check_ranks)
        self.eps_mode = 0 if eps_inside_sqrt else 1
        self._start(
            params, compat, amsgrad,
            dict(lr=lr,
                 bias_correction=bias_correction,
                 betas=betas,
                 eps=eps,
                 weight_decay=weight_decay,
                 max_grad_norm=max_grad_norm,
                 max_coeff=max_coeff,
                 min_coeff=min_coeff,
                 **defaults_of(stochastic_rounding, seed)))

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        inside = 0 if self.eps_mode else int(abi.DSOPT_GROUP_EPS_INSIDE_SQRT)
        return abi.DSOPT_ALGORITHM_LAMB, self._flags(group) | inside, {}

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        return super()._hyper(group, g) + tuple(
            number(group[key], g, key) for key in ("max_grad_norm", "min_coeff", "max_coeff"))

    def step(self, closure: Optional[Callable[[], Any]] = None, grads: Any = None, output_params: Any = None,
             scale: float = 1., grad_norms: Any = None) -> Any:
        """Step once. Calls `closure` first and returns its result.

        grads          gradients: None: those of the parameters; a list or generator for group 0; a list of such lists,
                       one per group. An entry None means the parameter's gradient. Parameters past the end of a list
        are not stepped
        output_params  tensors for the new weights, in the same forms, of any floating dtype of the engine. They are
                       written for parameters with a gradient
        scale          gradients are divided by it
        grad_norms     L2 norms of the gradients, with their scale, one per group, for max_grad_norm. None: the step
                       computes them
        """
        return self._step(closure, grads, output_params, scale, grad_norms)
