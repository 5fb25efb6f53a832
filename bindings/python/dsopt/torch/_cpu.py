# SPDX-License-Identifier: Apache-2.0
"""DeepSpeedCPUAdam and DeepSpeedCPULion with the arguments of DeepSpeed, for ZeRO-Offload."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._errors import StateError
from ._base import EngineOptimizer, number
from ._deepspeed import COMMON, DECAY, Named, ReadOnly
from ._formats import F32, Pair
from ._lion import Lion
from ._ranks import rows
from ._rounding import defaults_of
from ._tensors import refused, unsupported, wrong

CHUNK = 2**20  # elements that a rollback converts to double at a time
STATES = """
    fp32_optimizer_states  False: the moments of 16-bit parameters are bfloat16: %s. In DeepSpeed
                           they have the dtype of the parameter, and are rounded to nearest
    stochastic_rounding    True: bfloat16 parameters are rounded up or down with a probability proportional to the
                           distance, so that small updates are not lost; float32 ones are exact
    seed                   seed of the random numbers, an integer in [0, 2^64)
    """ + rows(27).replace("%", "%%")
TENSORS = """
    Parameters are float32, float16 or bfloat16, on the CPU or on a device of the engine. Gradients may have another
    dtype than their parameter.
    """


def _called(closure: Optional[Callable[[], Any]]) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class Offload(EngineOptimizer):
    """Base class of both classes."""

    optimizer_id = 0  # id of the next optimizer of the class
    opt_id = 0

    _bf16: Pair = F32  # formats of the moments with fp32_optimizer_states=False
    _fp32_states = True

    def _number(self) -> None:
        self.opt_id = type(self).optimizer_id
        type(self).optimizer_id += 1

    @ReadOnly
    def fp32_optimizer_states(self) -> bool:
        """True: the moments are float32. False: those of 16-bit parameters are bfloat16."""
        return self._fp32_states

    def __getstate__(self) -> Dict[str, Any]:
        return {**super().__getstate__(), "opt_id": self.opt_id, "_fp32_states": self._fp32_states}

    def _formats_in(self, group: Dict[str, Any]) -> Pair:
        return F32 if self._fp32_states else self._bf16

    def _formats_of(self, group: Dict[str, Any], param: torch.Tensor) -> Pair:
        return self._formats_in(group) if param.dtype in (torch.float16, torch.bfloat16) else F32


class DeepSpeedCPUAdam(Offload, Named):
    __doc__ = """deepspeed.ops.adam.DeepSpeedCPUAdam: AdamW, or with adamw_mode=False Adam with L2 decay.
    """ + TENSORS + COMMON.replace("    params      ", "    model_params") + DECAY + """
    bias_correction  False: the means are used without bias correction
    amsgrad          must be False
    adamw_mode       True: decoupled weight decay (AdamW); False: weight_decay times the weights is added to the
                     gradient (Adam). Each step reads the attribute adam_w_mode""" + STATES % (
        "exp_avg is\n                           rounded to nearest, exp_avg_sq stochastically")

    _kept = Named._kept + ("adam_w_mode",)
    _bf16 = "bf16", "bf16_random"

    def __init__(self, model_params: Any, lr: Any = 1e-3, bias_correction: bool = True,
                 betas: Tuple[Any, Any] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0,
                 amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True, *,
                 stochastic_rounding: bool = False, seed: int = 0, group: Any = None, shard: Any = False,
                 average: bool = False, node_group: Any = None, max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, max_grad_norm, check_ranks=check_ranks)
        self.adam_w_mode, self._fp32_states = adamw_mode, bool(fp32_optimizer_states)
        self._start(model_params, None, amsgrad, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                                                      bias_correction=bias_correction, amsgrad=amsgrad,
                                                      **defaults_of(stochastic_rounding, seed,
                                                                    random=not fp32_optimizer_states)))
        self._number()

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        if isinstance(param_group, dict) and param_group.get("amsgrad"):
            raise refused("param_groups[%d]" % len(self.param_groups), "amsgrad")
        super().add_param_group(param_group)

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        return abi.DSOPT_ALGORITHM_ADAMW if self.adam_w_mode else abi.DSOPT_ALGORITHM_ADAM, self._flags(group), {}

    def state_dict(self) -> Dict[str, Any]:
        """As torch's. Refused with state of step_subgroup, whose numbers torch would mistake for parameter numbers."""
        keys = [key for key in self.state if not torch.is_tensor(key)]
        if keys:
            raise StateError("state_dict: the state of subgroups %s belongs to no parameter, so a state dict cannot "
                             "hold it; save optimizer.state[subgroup_id] itself (DSOPT_ERR_STATE)" %
                             ", ".join(map(repr, keys)), abi.DSOPT_ERR_STATE, "DSOPT_ERR_STATE")
        return super().state_dict()  # type: ignore[no-any-return]

    # ----------------------------------------------------------------------------------------------------- subgroups
    def _subgroup_param(self, where: str) -> Tuple[Optional[int], Optional[torch.Tensor]]:
        """Returns the group and the only parameter with a gradient."""
        if self._ranks is not None:
            raise unsupported("%s is not supported with shard or average: a subgroup is the state of one tensor on one "
                              "rank" % where)
        found = [(g, param) for g, group in enumerate(self.param_groups) for param in group["params"]
                 if param.grad is not None]
        if len(found) > 1:
            raise wrong("%s: %d parameters have a gradient, and must be one, the flat tensor of the subgroup: its "
                        "state is that of one tensor" % (where, len(found)))
        return found[0] if found else (None, None)

    def step_subgroup(self, subgroup_id: int, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Step the only parameter that has a gradient, with the state of the subgroup: `state[subgroup_id]`. So the
        parameter may be another tensor in each call. Without a gradient nothing is stepped. `subgroup_id` is any key
        that is not a tensor, such as a number. Calls `closure` first and returns its result."""
        loss = _called(closure)
        g, param = self._subgroup_param("step_subgroup(%r)" % (subgroup_id, ))
        if g is None or param is None:
            return loss
        state, groups = self.state, self.param_groups
        own = state[subgroup_id] if subgroup_id in state else {}
        alone = type(state)(dict)  # torch's defaultdict
        if own:
            alone[param] = own
        try:
            # Keeps all groups, so that errors have the group's number.
            self.state = alone
            self.param_groups = [{**group, "params": [param] if i == g else []} for i, group in enumerate(groups)]
            self._plans = None
            super().step()
            own = self.state[param]
        finally:
            self.state, self.param_groups, self._plans = state, groups, None
        self.state[subgroup_id] = own
        return loss

    def rollback_subgroup(self, sub_group_id: int, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Undo the last step_subgroup of the only parameter that has a gradient, which must be that step's. Weights and
        moments are inverted in double, so they equal those before the step up to rounding. `sub_group_id` is the key
        that was passed to step_subgroup. Calls `closure` first and returns its result."""
        loss = _called(closure)
        where = "rollback_subgroup(%r)" % (sub_group_id, )
        own = self.state[sub_group_id] if sub_group_id in self.state else {}
        step = self._steps_of(own)
        if step <= 0:  # the texts begin as in the original
            text = ("sub_group_id %r: step count is 0" if own else
                    "optimizer state for sub_group_id %r, as no step_subgroup has made it")
            raise StateError("Cannot rollback %s (DSOPT_ERR_STATE)" % (text % (sub_group_id, )), abi.DSOPT_ERR_STATE,
                             "DSOPT_ERR_STATE")
        g, param = self._subgroup_param(where)
        if g is None or param is None:
            return loss
        grad = param.grad
        tensors = {"the parameter": param, "its gradient": grad, "exp_avg": own["exp_avg"],
                   "exp_avg_sq": own["exp_avg_sq"]}
        for name, tensor in tensors.items():
            if name != "its gradient" and tensor.dtype != torch.float32:
                raise wrong("%s: %s is %s, and must be float32: a step of another dtype loses what it rounds" %
                            (where, name, str(tensor.dtype).replace("torch.", "")), "DTYPE")
            if tensor.shape != param.shape:
                raise wrong("%s: %s has shape %s, and the parameter %s" %
                            (where, name, tuple(tensor.shape), tuple(param.shape)), "SHAPE")
        group = self.param_groups[g]
        lr, beta1, beta2, eps, decay, correction = self._hyper(group, g)
        if not beta1 or not beta2 or (self.adam_w_mode and lr * decay == 1):
            raise wrong("%s: a step with betas=%r, lr=%r and weight_decay=%r cannot be undone: it multiplies what was "
                        "there by 0" % (where, group["betas"], group["lr"], group["weight_decay"]))
        c1, c2 = (1 - beta1**step, 1 - beta2**step) if correction else (1.0, 1.0)
        beta1, beta2, a1, a2 = [float(torch.tensor(x, dtype=torch.float32))  # as in the step
                                for x in (beta1, beta2, 1 - beta1, 1 - beta2)]
        flat = [tensor.detach().contiguous().reshape(-1).split(CHUNK) for tensor in tensors.values()]
        new: List[List[torch.Tensor]] = [[], [], []]
        for parts in zip(*flat):
            p, gradient, m, v = [part.double() for part in parts]
            p += lr * (m / c1) / ((v / c2).sqrt() + eps)
            if self.adam_w_mode:
                p /= 1 - lr * decay
            else:
                gradient += decay * p
            # Rounding may make a variance slightly negative, and its root NaN.
            both = (m - a1 * gradient) / beta1, ((v - a2 * gradient**2) / beta2).clamp_(min=0)
            for values, value in zip(new, (p, *both)):
                values.append(value.float())
        for target, values in zip((param, own["exp_avg"], own["exp_avg_sq"]), new):
            target.detach().copy_(torch.cat(values).view(param.shape) if values else target.detach())
        own["step"] = own["step"] - 1
        self._plans = None
        return loss


class DeepSpeedCPULion(Offload, Lion):
    __doc__ = """deepspeed.ops.lion.DeepSpeedCPULion: Lion with DeepSpeed's defaults, which are not the authors'. An
    element whose gradient and mean are both 0 does not change.
    """ + TENSORS + """
    model_params     parameters, or dicts of parameters with separate values of the arguments below
    lr               learning rate: the size of a step, because updates are signs
    betas            weight of the mean in the update, and decay of the mean
    weight_decay     decoupled decay per step, times lr""" + STATES % "rounded to\n                           nearest"

    _counts, _stores = True, ()
    _bf16 = "bf16", "f32"

    def __init__(self, model_params: Any, lr: Any = 1e-3, betas: Tuple[Any, Any] = (0.9, 0.999),
                 weight_decay: float = 0, fp32_optimizer_states: bool = True, *, stochastic_rounding: bool = False,
                 seed: int = 0, group: Any = None, shard: Any = False, average: bool = False, node_group: Any = None,
                 max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._fp32_states = bool(fp32_optimizer_states)
        super().__init__(model_params, lr, betas, weight_decay, stochastic_rounding=stochastic_rounding, seed=seed,
                         group=group, shard=shard, average=average, node_group=node_group, max_grad_norm=max_grad_norm,
                         check_ranks=check_ranks)
        self._number()
