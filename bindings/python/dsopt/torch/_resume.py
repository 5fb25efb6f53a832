# SPDX-License-Identifier: Apache-2.0
"""The stage of the 1-bit family after a load (docs/compat.md, "Checkpoints")."""
from __future__ import annotations

from typing import Any, Dict, List

import torch

from .. import _abi as abi
from ._originals import mismatch
from ._plan import ERRORS

# Words of the state tensor "schedule", in the order of dsopt_schedule_info.
STEP, FROZEN, LOCAL_INTERVAL = 0, 1, 4
# State that the originals reset in each load, and in a load before the freeze.
FORGOTTEN = ("exp_avg_pad", "momentum_accumulator")
TRUST = ("trust_average", "trust_factor", "trust_scaling")


def resume(states: List[Dict[str, Any]], algorithm: int, freeze_step: int, compat: bool) -> None:
    """Sets the stage that follows from `step` and `freeze_step`. `states` are the loaded states of the parameters."""
    home = next((state for state in states if "schedule" in state), None)
    if home is None:
        return
    words = [int(word) for word in home["schedule"].reshape(-1).tolist()]
    if len(words) != 8:
        raise mismatch("the state tensor 'schedule' has %d words, and must have 8" % len(words))
    words = _as_original(states, words, algorithm, freeze_step) if compat else _stage(states, words, algorithm,
                                                                                      freeze_step)
    home["schedule"] = torch.tensor(words, dtype=torch.int32, device=home["schedule"].device)


def _drop(states: List[Dict[str, Any]], *names: str) -> None:
    for state in states:
        for key in [key for key in state if key.startswith(names)]:
            del state[key]


def _as_original(states: List[Dict[str, Any]], words: List[int], algorithm: int, freeze_step: int) -> List[int]:
    """As dsopt_optimizer_load in compat mode. The original 0/1 Adam writes its stage to an attribute that is never
    read."""
    frozen = algorithm != abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM and words[STEP] >= freeze_step
    _drop(states, *ERRORS, *FORGOTTEN, *(() if frozen else TRUST))
    for state in states:
        if "lr_sum" in state:  # kept to mark state of 0/1 Adam
            state["lr_sum"] = torch.zeros_like(state["lr_sum"])
    return [words[STEP], int(frozen)] + [0] * 6


def _stage(states: List[Dict[str, Any]], words: List[int], algorithm: int, freeze_step: int) -> List[int]:
    """Freezes or unfreezes if freeze_step differs from the saved run's. Error feedback is then reset."""
    step, frozen = words[STEP], bool(words[FROZEN])
    zero_one = algorithm == abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM
    # A checkpoint of the original 0/1 Adam is not frozen yet at step == var_freeze_step.
    if not frozen and step > 0 and (step > freeze_step if zero_one else step >= freeze_step):
        _drop(states, *ERRORS, "anchor")
        for state in states:
            if "exp_avg_sq_fresh" in state:
                state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        words[FROZEN] = 1
    elif frozen and step < freeze_step:
        several = any(key.startswith(ERRORS) for state in states for key in state)
        if several and any(bool(state["lr_sum"].any()) for state in states if "lr_sum" in state):
            raise mismatch("the state is from step %d, between two exchanges of 0/1 Adam (lr_sum is not 0): its ranks "
                           "have no common parameters, and cannot adapt the variance again until var_freeze_step=%d" %
                           (step, freeze_step))
        _drop(states, *ERRORS, "anchor", "trust_factor")
        words[FROZEN] = words[LOCAL_INTERVAL] = words[LOCAL_INTERVAL + 1] = 0
    return words
