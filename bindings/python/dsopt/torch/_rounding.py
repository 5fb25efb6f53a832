# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of bfloat16 parameters and moments: the keys "stochastic_rounding" and "seed" of groups.

The engine's random number for an element depends on the seed, the name and the step count of its parameter, and the
element's index, so a run continues with the same bits from the groups and the step counts of a state dict. Groups have
these keys only if something is rounded stochastically: other state dicts have torch's keys.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional

import torch

from . import _formats
from ._tensors import integer, unsupported

if TYPE_CHECKING:
    from ._base import EngineOptimizer

KEYS = ("stochastic_rounding", "seed")
ALL = KEYS + _formats.KEYS


class Kind(NamedTuple):
    """What all parameters of one engine have in common."""
    seed: Optional[int] = None  # of random numbers; None = not used
    rounds: bool = False  # True: bfloat16 weights are rounded stochastically
    masters: Optional[str] = None  # a key of _formats.MASTERS


def defaults_of(stochastic_rounding: Any, seed: Any, formats: Optional[Dict[str, Any]] = None,
                min_8bit_size: Any = _formats.MIN_8BIT_SIZE, masters: Any = None,
                random: bool = False) -> Dict[str, Any]:
    """Returns the defaults of a constructor with these arguments. `formats` has the formats by key. `random`: moments
    without these keys are rounded stochastically."""
    integer("seed", seed, 2**64)
    stored = _formats.defaults_of(formats or {}, min_8bit_size, masters)
    if stochastic_rounding:
        return {"stochastic_rounding": True, "seed": seed, **stored}
    if random or "bf16_random" in stored.values():
        return {"seed": seed, **stored}
    if seed != 0:
        raise unsupported("seed is %r, which has no effect without stochastic_rounding=True%s" %
                          (seed, "" if formats is None else " or a moment in 'bf16_random'"))
    return stored


def values_of(groups: List[Dict[str, Any]]) -> List[List[Any]]:
    """Returns the unchecked values of all keys here and in _formats, to detect changes."""
    return [list(map(group.get, ALL)) for group in groups]


def raw_of(owner: EngineOptimizer) -> List[Any]:
    """Returns the unchecked values of the groups: stochastic_rounding, and the seed if it is used."""
    raw = []
    for group in owner.param_groups:
        rounds = bool(group.get("stochastic_rounding"))
        raw.append((rounds, group.get("seed", 0)) if rounds or "bf16_random" in owner._formats_in(group) else (False, ))
    return raw


def kinds_of(owner: EngineOptimizer) -> List[Kind]:
    """Returns the checked kind of each group."""
    _formats.check(owner)
    kinds = []
    for g, (raw, group) in enumerate(zip(raw_of(owner), owner.param_groups)):
        seed = integer("param_groups[%d]: seed" % g, raw[1], 2**64) if len(raw) > 1 else None
        kinds.append(Kind(seed, raw[0], group.get("masters")))
    first = next((g for g, kind in enumerate(kinds) if kind.rounds), None)
    if first is not None:
        _refuse(owner, "param_groups[%d]: stochastic_rounding=True" % first)
    # Groups that use no seed share an engine with others.
    shared = {kind[1:]: kind for kind in reversed(kinds) if kind.seed is not None}
    return [kind if kind.seed is not None else shared.get(kind[1:], kind) for kind in kinds]


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


def check_dtypes(owner: EngineOptimizer, kinds: List[Kind]) -> None:
    """Refuses stochastic rounding without bfloat16 parameters. float32 parameters next to bfloat16 ones are exact."""
    dtypes = [param.dtype for group, kind in zip(owner.param_groups, kinds) if kind.rounds
              for param in group["params"]]
    if dtypes and torch.bfloat16 not in dtypes:
        shown = ", ".join(sorted({str(dtype).replace("torch.", "") for dtype in dtypes}))
        raise unsupported("stochastic_rounding=True has no effect, as no parameter is bfloat16: they are %s; leave it "
                          "out" % shown)


def keep(old: List[Dict[str, Any]], new: List[Dict[str, Any]]) -> None:
    """Keeps the optimizer's values for groups of a state dict without the keys, such as torch.optim's. Formats are
    always the optimizer's."""
    _formats.keep(old, new)
    for before, group in zip(old, new):
        for key in KEYS:
            if key in before:
                group.setdefault(key, before[key])
