# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of bfloat16 parameters: the keys "stochastic_rounding" and "seed" of groups.

The engine's random number for an element depends on the seed, the name and the step count of its parameter, and the
element's index, so a run continues with the same bits from the groups and the step counts of a state dict. Groups have
these keys only if rounding is enabled: other state dicts have torch's keys.
"""
from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Dict, List, Optional

import torch

from ._tensors import unsupported, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer

KEYS = ("stochastic_rounding", "seed")


def defaults_of(stochastic_rounding: Any, seed: Any) -> Dict[str, Any]:
    """Returns the defaults of a constructor with these arguments."""
    _check_seed(seed, "seed")
    if not stochastic_rounding:
        if seed != 0:
            raise unsupported("seed is %r, which has no effect without stochastic_rounding=True" % (seed,))
        return {}
    return {"stochastic_rounding": True, "seed": seed}


def _check_seed(seed: Any, what: str) -> int:
    try:
        found = operator.index(seed)
    except TypeError:
        raise wrong("%s is %r, and must be a whole number" % (what, seed)) from None
    if not 0 <= found < 2**64:
        raise wrong("%s is %d, and must be a whole number in [0, 2^64)" % (what, found))
    return found


def raw_seeds(groups: List[Dict[str, Any]]) -> List[Any]:
    """Returns the unchecked values of the groups."""
    return [(group.get("seed", 0),) if group.get("stochastic_rounding") else None for group in groups]


def seeds_of(owner: EngineOptimizer) -> List[Optional[int]]:
    """Returns the checked seed of each group; None if it rounds to nearest."""
    seeds = [None if raw is None else _check_seed(raw[0], "param_groups[%d]: seed" % g)
             for g, raw in enumerate(raw_seeds(owner.param_groups))]
    first = next((g for g, seed in enumerate(seeds) if seed is not None), None)
    if first is not None:
        _refuse(owner, "param_groups[%d]: stochastic_rounding=True" % first)
    return seeds


def _refuse(owner: EngineOptimizer, what: str) -> None:
    name = type(owner).__name__
    if not owner._rounds:
        raise unsupported("%s is not supported by %s, whose 16-bit parameters have float32 masters" % (what, name))
    if getattr(owner, "_compat", None):
        raise unsupported("%s is not supported with compat='deepspeed', as the original does not have it; leave compat "
                          "out" % what)
    if owner._wrapper is not None:
        raise unsupported("%s is not supported in %s, whose float32 masters make it unnecessary; step the optimizer "
                          "without the wrapper" % (what, type(owner._wrapper).__name__))


def check_dtypes(owner: EngineOptimizer, seeds: List[Optional[int]]) -> None:
    """Refuses stochastic rounding without bfloat16 parameters. float32 parameters next to bfloat16 ones are exact."""
    dtypes = [param.dtype for group, seed in zip(owner.param_groups, seeds) if seed is not None
              for param in group["params"]]
    if dtypes and torch.bfloat16 not in dtypes:
        shown = ", ".join(sorted({str(dtype).replace("torch.", "") for dtype in dtypes}))
        raise unsupported("stochastic_rounding=True has no effect, as no parameter is bfloat16: they are %s; leave it "
                          "out" % shown)


def keep(old: List[Dict[str, Any]], new: List[Dict[str, Any]]) -> None:
    """Keeps the optimizer's values for groups of a state dict without the keys, such as torch.optim's."""
    for before, group in zip(old, new):
        for key in KEYS:
            if key in before:
                group.setdefault(key, before[key])
