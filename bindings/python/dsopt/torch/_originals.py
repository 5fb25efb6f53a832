# SPDX-License-Identifier: Apache-2.0
"""Converts state dicts of DeepSpeed's classes to those of the classes here.

The originals keep counters of the schedule as numbers in the state of each parameter, and FP16_Optimizer keeps one flat
tensor per group. Here the schedule is one tensor, and moments have the shapes of the parameters.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from .. import _abi as abi
from .._errors import CheckpointError
from ._tensors import wrong

State = Dict[str, Any]
# Entries that only one of the originals has. All have "step", "exp_avg" and "exp_avg_sq".
OWN = {"ZeroOneAdam": ("var_interval", "var_counter", "local_step_interval", "local_step_counter"),
       "OnebitLamb": ("lamb_coeff_freeze", "last_factor", "exp_avg_sq_fresh")}
# Names of state tensors that only one of the classes here has.
OURS = {"ZeroOneAdam": ("lr_sum", "anchor", "momentum_accumulator"),
        "OnebitLamb": ("exp_avg_sq_fresh", "trust_average", "trust_factor", "trust_scaling", "trust_weight")}
NAMES = {abi.DSOPT_ALGORITHM_ONEBIT_ADAM: "OnebitAdam", abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM: "ZeroOneAdam",
         abi.DSOPT_ALGORITHM_ONEBIT_LAMB: "OnebitLamb"}
MOMENTS = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
WRAPPED = "optimizer_state_dict"  # key of a wrapper's state dict
STEPPED = ("exp_avg", "momentum_buffer", "sum")  # one of these is in the state of each parameter that has moments
COMMON = ("step", "exp_avg", "exp_avg_sq")


def mismatch(text: str) -> CheckpointError:
    return CheckpointError("%s (DSOPT_ERR_MISMATCH)" % text, abi.DSOPT_ERR_MISMATCH, "DSOPT_ERR_MISMATCH")


def kind_of(value: Any) -> str:
    return "None" if value is None else "a %s" % type(value).__name__


def check_masters(name: str, saved: Any, flat: bool) -> None:
    """Refuses masters of a group in a wrapper's state dict that are not tensors."""
    if not flat and not isinstance(saved, (list, tuple)):
        raise mismatch("%s of the state dict is %s, and must be a list of tensors" % (name, kind_of(saved)))
    for i, value in enumerate([saved] if flat else saved):
        if not torch.is_tensor(value):
            raise mismatch("%s%s of the state dict is %s, and must be a tensor" %
                           (name, "" if flat else "[%d]" % i, kind_of(value)))


def _check_keys(what: str, state_dict: Any) -> None:
    for key in ("state", "param_groups"):
        if not isinstance(state_dict, dict) or key not in state_dict:
            found = ", ".join(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
            instead = "; load it into the wrapper, or its 'optimizer_state_dict' here" if WRAPPED in found else ""
            raise mismatch("%s has no %r, so it is not one of torch.optim.Optimizer; it has %s%s" %
                           (what, key, found, instead))


def is_original(state_dict: Dict[str, Any]) -> bool:
    """True for state without the tensor "schedule", which each state dict of the 1-bit family here has."""
    _check_keys("the state dict", state_dict)
    states = [state for state in state_dict["state"].values() if isinstance(state, dict) and state]
    return bool(states) and not any("schedule" in state for state in states)


def check_class(state_dict: Dict[str, Any], algorithm: int) -> None:
    """Refuses state of another class of the 1-bit family here."""
    name = NAMES[algorithm]
    states = [state for state in state_dict["state"].values() if isinstance(state, dict) and state]
    keys = [key for state in states for key in state if isinstance(key, str)]
    for kind, names in OURS.items():
        found = next((key for key in keys if key.startswith(names)), None)
        if found is not None and kind != name:
            raise mismatch("the state dict has %r: it is state of %s, and this is %s; load it into %s" %
                           (found, kind, name, kind))
    if name == "OnebitLamb" and states and "exp_avg_sq_fresh" not in keys:
        raise mismatch("the state dict has no 'exp_avg_sq_fresh', so it is not state of OnebitLamb")
    if name == "ZeroOneAdam" and states and "lr_sum" not in keys:
        # State of the original that was loaded and saved before a step has the intervals without lr_sum.
        words = next(state["schedule"] for state in states if "schedule" in state)
        if not torch.is_tensor(words) or not bool(words.reshape(-1)[2:6].any()):
            raise mismatch("the state dict has neither 'lr_sum' nor intervals in 'schedule', so it is not state of "
                           "ZeroOneAdam")


def converted(state_dict: Dict[str, Any], algorithm: int, frozen_after: int, trust_beta: Optional[float],
              compat: bool) -> Dict[str, Any]:
    """Converts state of DeepSpeed's OnebitAdam, ZeroOneAdam or OnebitLamb for the class of this algorithm.
    `frozen_after` is freeze_step or var_freeze_step. Error feedback belongs to one rank and is dropped, as by the
    originals."""
    name = NAMES[algorithm]
    order = [place for group in state_dict["param_groups"] for place in group["params"]]
    old = {place: state for place, state in state_dict["state"].items() if isinstance(state, dict) and state}
    _check(name, old)
    first = next((old[place] for place in order if place in old), None)
    if first is None:
        raise mismatch("state_dict['state'] has keys %s, and its groups have parameters %s" % (list(old), order))
    step = int(first["step"])
    zero_one, lamb = name == "ZeroOneAdam", name == "OnebitLamb"
    frozen = step > frozen_after if zero_one else step >= max(frozen_after, 1)
    counters = [int(first[key]) for key in OWN[name]] if zero_one else [0] * 4
    new: Dict[Any, State] = {}
    for place, state in old.items():
        new[place] = {key: state[key] for key in COMMON}
        if lamb:
            new[place].update(_trust(state, step, frozen, trust_beta, compat))
    home = next(new[place] for place in order if place in new)
    home["schedule"] = torch.tensor([step, int(frozen)] + counters + [0, 0], dtype=torch.int32)
    return {**state_dict, "state": new}


def _check(name: str, old: Dict[Any, State]) -> None:
    for place, state in old.items():
        for kind, keys in OWN.items():
            if kind != name and keys[0] in state:
                raise mismatch("state_dict['state'][%r] has %r: it is state of %s, and this is %s; load it into %s" %
                               (place, keys[0], kind, name, kind))
        for key in COMMON + OWN.get(name, ()):
            if key not in state:
                raise mismatch("state_dict['state'][%r] has no %r, so it is neither state of DeepSpeed's %s nor of "
                               "this class; it has %s" % (place, key, name, ", ".join(map(str, state))))


def _number(value: Any) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float32)


def _trust(state: State, step: int, frozen: bool, beta: Optional[float], compat: bool) -> State:
    """1-bit LAMB. The running mean of trust ratios is initially 0 in the original. Standard mode divides it by the sum
    of its weights. Once frozen the original uses the mean without that correction, so the divisor is 1."""
    fresh = state["exp_avg_sq_fresh"]
    new = {"trust_average": _number(state["lamb_coeff_freeze"]), "trust_factor": _number(state["last_factor"])}
    if compat:
        new["trust_scaling"] = _number(state.get("scaling_coeff", 0))
    else:
        weight = 1.0 if frozen or beta is None else 1 - beta ** max(step - 1, 0)
        new["trust_weight"] = _number(weight)
        if frozen and not bool(fresh.any()):  # saved before the freeze, for a larger freeze_step
            fresh = state["exp_avg_sq"].clone()
    return {**new, "exp_avg_sq_fresh": fresh}


def per_parameter(state_dict: Dict[str, Any], groups: Sequence[Sequence[torch.Tensor]],
                  flat: bool, has_master: Callable[[torch.Tensor], bool]) -> Dict[str, Any]:
    """Returns the optimizer's part of a wrapper's state dict for `groups`, the parameters of this optimizer. The
    originals omit parameters that are not trained; with `flat` the others of a group are one tensor."""
    _check_keys("optimizer_state_dict", state_dict)
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise mismatch("optimizer_state_dict has %d groups, and the optimizer %d" % (len(saved), len(groups)))
    state: Dict[Any, Any] = {}
    new_groups: List[Dict[str, Any]] = []
    begin = 0
    for g, (group, params) in enumerate(zip(saved, groups)):
        places = list(range(begin, begin + len(params)))
        begin += len(params)
        trained = [(place, param) for place, param in zip(places, params) if param.requires_grad]
        old = [state_dict["state"].get(place) for place in group["params"]]
        if flat and len(old) == 1 and _is_flat(old[0], trained):
            state.update(_split(g, old[0], trained))
        elif len(old) in (len(places), len(trained)):
            targets = places if len(old) == len(places) else [place for place, _ in trained]
            _check_trained(g, targets, old, {place for place, param in zip(places, params) if has_master(param)})
            state.update((place, entry) for place, entry in zip(targets, old) if entry is not None)
        else:
            raise mismatch("optimizer_state_dict: group %d has %d tensors, and the optimizer %d parameters" %
                           (g, len(old), len(places)))
        new_groups.append({**{key: value for key, value in group.items() if key != "param_names"}, "params": places})
    known = {place for group in saved for place in group["params"]}
    state.update((key, value) for key, value in state_dict["state"].items() if key not in known)
    return {**state_dict, "state": state, "param_groups": new_groups}


def _check_trained(g: int, places: List[int], old: List[Any], trained: Any) -> None:
    """Masters are saved in the order of the trained parameters: these must be the same ones."""
    stepped = [place for place, state in zip(places, old) if state and any(name in state for name in STEPPED)]
    for place in places if stepped else ():
        if (place in stepped) != (place in trained):
            raise mismatch("optimizer_state_dict: parameter %d of group %d %s, and here it %s: parameters must be trained "
                           "or not as they were when it was saved" %
                           (place, g, "was trained" if place in stepped else "was not trained",
                            "is" if place in trained else "is not"))


def _is_flat(state: Any, trained: List[Tuple[int, torch.Tensor]]) -> bool:
    if len(trained) != 1:
        return True
    moment = state.get("exp_avg") if isinstance(state, dict) else None
    return torch.is_tensor(moment) and moment.shape != trained[0][1].shape


def _split(g: int, state: Any, trained: List[Tuple[int, torch.Tensor]]) -> Dict[int, State]:
    """Splits each tensor of the flat master's size into tensors of the parameters. Numbers are copied."""
    if not isinstance(state, dict):  # the original has not stepped
        return {}
    sizes = [param.numel() for _, param in trained]
    new: Dict[int, State] = {place: {} for place, _ in trained}
    for key, value in state.items():
        if key in MOMENTS and (not torch.is_tensor(value) or value.numel() != sum(sizes)):
            raise wrong("optimizer_state_dict: %r of group %d has %s elements, and the group's parameters %d" %
                        (key, g, value.numel() if torch.is_tensor(value) else "no", sum(sizes)), "SHAPE")
        parts: Sequence[Any] = [value] * len(sizes)
        if key in MOMENTS:
            parts = value.detach().reshape(-1).split(sizes)
        for (place, param), part in zip(trained, parts):
            new[place][key] = part.reshape(param.shape).clone() if key in MOMENTS else part
    return new
