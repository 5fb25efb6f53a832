# SPDX-License-Identifier: Apache-2.0
"""Checks of a state dict before it is loaded: the state of each parameter has all tensors of the rule or none, in a
dtype that keeps their values."""
from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._complete import PER_PARAM, tensors_of
from .._errors import error_of
from ._fields import group_of
from ._formats import KEYS, is_codes, moment_of
from ._originals import NAMES, kind_of, mismatch
from ._tensors import is_dtensor, refused, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer

# State of the shape of the parameter in the optimizers here and in torch.optim. Other keys are the program's own.
KNOWN = frozenset(("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "momentum_buffer", "sum", "max_exp_avg_sq", "square_avg",
                   "grad_avg", "acc_delta", "exp_inf", "prev", "step_size", "mu", "eta", "ax"))
WHOLE = "dsopt"  # key of optimizer.state in versions before 0.2, for state of the whole optimizer
OTHER_MODE = {"trust_scaling": "trust_weight", "trust_weight": "trust_scaling"}  # of compat and standard mode
WORDS = ("schedule", "scaler")  # whole numbers
MAX_STEP = 2**31 - 1


def moments_of(owner: EngineOptimizer, group: Dict[str, Any], g: int) -> Tuple[str, ...]:
    """Returns the names of the moments that each parameter of a group has."""
    new = group_of(owner, group, owner._hyper(group, g))
    compat = abi.DSOPT_COMPAT_DEEPSPEED if getattr(owner, "_compat", None) else abi.DSOPT_COMPAT_NONE
    return tensors_of(new, abi.DSOPT_OPTIMIZER_NO_MASTER * (new.algorithm not in NAMES), compat,
                      *owner._block_of(group))


def check_loaded(owner: EngineOptimizer, loaded: Dict[str, Any]) -> None:
    """Refuses state that the optimizer would not continue as it was saved. torch compares the groups later."""
    old = loaded["state"].get(WHOLE)  # of a version before 0.2
    most, without = 0.0, None  # steps of a parameter, and the first trained one without state
    for g, (own, saved_group) in enumerate(zip(owner.param_groups, loaded["param_groups"])):
        group, needed = _merged(own, saved_group), None
        for param, place in zip(own["params"], saved_group["params"]):
            saved, what = loaded["state"].get(place), "parameter %s" % place
            if not isinstance(saved, dict) or not saved:
                if param.requires_grad and owner._freezes(group) and without is None:
                    without = what
                continue
            steps = check_step(saved["step"], "state 'step' of " + what) if "step" in saved else 0.0
            most = max(most, steps)
            for name, value in saved.items():
                _check_dtype(name, value, param, what)
            if needed is None:
                needed = moments_of(owner, group, g)
            if isinstance(old, dict):
                saved = {**old, **saved}
            _check_names(owner, {**group, "amsgrad": saved_group.get("amsgrad")}, needed, saved, steps, what)
    if without is not None and owner._is_frozen_at(most):
        raise mismatch("the state dict has no state of %s: the variance of %s is frozen after %d steps, so this "
                       "parameter would never move" % (without, type(owner).__name__, most))


def ordered(owner: EngineOptimizer, loaded: Dict[str, Any]) -> Dict[str, Any]:
    """Returns a state dict in the order of the optimizer's parameters, if both have the same names ("param_names").
    torch goes by position."""
    groups, saved = owner.param_groups, loaded.get("param_groups") if isinstance(loaded, dict) else None
    if not isinstance(saved, (list, tuple)):
        return loaded
    # torch.distributed.checkpoint has names in place of numbers, in the order of this optimizer.
    if not all(isinstance(place, int) for group in saved for place in group["params"]):
        return loaded
    names, others = _names_in(groups), _names_in(saved)
    if names is None or others is None or names == others:
        return loaded
    every, known = [sorted(chain.from_iterable(lists)) for lists in (names, others)]
    if every != known or len(set(every)) != len(every):
        return loaded  # renamed, or not unique
    by_names = {frozenset(group): (group, value) for group, value in zip(others, saved)}
    new = []
    for g, group in enumerate(names):
        if frozenset(group) not in by_names:
            raise mismatch("the state dict has the same parameters in other groups: none of its groups has %s of "
                           "param_groups[%d] alone" % (", ".join(map(repr, group)), g))
        theirs, value = by_names[frozenset(group)]
        places = dict(zip(theirs, value["params"]))
        new.append({**value, "params": [places[name] for name in group], "param_names": list(group)})
    # Keys of the state are indices of parameters, in the order of the groups.
    places = [place for group in new for place in group["params"]]
    number = {place: i for i, place in enumerate(places)}
    for group in new:
        group["params"] = [number[place] for place in group["params"]]
    state = {number.get(place, place): value for place, value in loaded["state"].items()}
    return {**loaded, "state": state, "param_groups": new}


def _names_in(groups: Any) -> Optional[List[List[str]]]:
    """Returns the names of the parameters of each group, None if a group has none."""
    lists = [group.get("param_names") for group in groups]
    if any(names is None or len(names) != len(group["params"]) for names, group in zip(lists, groups)):
        return None
    return [list(map(str, names)) for names in lists]


def _merged(own: Dict[str, Any], saved: Dict[str, Any]) -> Dict[str, Any]:
    """Returns a group with which the rule has the tensors that it has after the load. Other hyper-parameters are those
    of the optimizer: a step checks the saved ones."""
    if saved.get("use_muon", True) != own.get("use_muon", True):
        return {**own, **{key: value for key, value in saved.items() if key not in KEYS}}
    return {**own, **{key: saved[key] for key in ("momentum", "rows", "cols") if key in saved}}


def check_step(value: Any, what: str) -> float:
    """Returns a step count."""
    if torch.is_tensor(value) and value.numel() != 1:
        raise wrong("%s has shape %s, and must be a number" % (what, tuple(value.shape)), "SHAPE")
    try:
        steps = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise mismatch("%s is %s, and must be a number" % (what, kind_of(value))) from None
    if not 0 <= steps <= MAX_STEP or steps != math.floor(steps):  # also NaN
        raise mismatch("%s is %r, and must be a whole number in [0, 2^31)" % (what, steps))
    return steps


def _check_dtype(name: Any, value: Any, param: torch.Tensor, what: str) -> None:
    if not torch.is_tensor(value) or not isinstance(name, str) or name == "step":
        return
    dtype, need = value.dtype, ""
    if moment_of(name) is not None:
        need = "" if dtype == torch.float32 else "float32"
    elif name in WORDS:
        need = "int32" if value.is_floating_point() else ""
    elif name in PER_PARAM:
        need = "" if value.is_floating_point() else "floating"
    elif name in KNOWN or name in ("master", "anchor", "momentum_accumulator"):
        if dtype == torch.float16 and (param.dtype not in (dtype, torch.bfloat16) or name == "master"):
            need = "float32, as float16 loses small values"
        elif name not in ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum") and (
                is_codes(value) or not (value.is_floating_point() or value.is_complex())):
            need = "floating"
    if need:
        raise error_of(abi.DSOPT_ERR_DTYPE, "DSOPT_ERR_DTYPE", "state %r of %s is %s: it was converted; save and load "
                       "it as %s" % (name, what, str(dtype).replace("torch.", ""), need))


def _says_something(tensor: torch.Tensor) -> bool:
    """False for zeros: DeepSpeedCPULion of DeepSpeed makes a variance that it does not use."""
    return is_dtensor(tensor) or tensor.is_meta or bool(tensor.any())


def _check_names(owner: EngineOptimizer, group: Dict[str, Any], needed: Tuple[str, ...], saved: Dict[str, Any],
                 steps: float, what: str) -> None:
    has, kind = [name for name, value in saved.items() if torch.is_tensor(value)], type(owner).__name__
    for name in has:
        if name == "max_exp_avg_sq":
            if group["amsgrad"]:
                raise refused("state of " + what, "amsgrad")
        elif name in KNOWN and name not in needed and name not in owner._may_have and _says_something(saved[name]):
            raise mismatch("state %r of %s is of another optimizer: %s has %s" %
                           (name, what, kind, ", ".join(map(repr, needed)) or "no moments"))
    missing = [name for name in needed if name not in has and name not in owner._may_lack and
               OTHER_MODE.get(name) not in has]
    if not steps and not any(name in has for name in needed):
        return  # no state of the rule yet
    if not missing and needed and owner._counts_in(group) and "step" not in saved:
        missing = ["step"]
    if missing:
        raise mismatch("the state of %s has no %r, which %s needs; it has %s" %
                       (what, missing[0], kind, ", ".join(map(str, saved))))
