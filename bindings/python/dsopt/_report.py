# SPDX-License-Identifier: Apache-2.0
"""What happened so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

from . import _abi as abi

PHASES = {
    name[len("DSOPT_MS_") :].lower(): value
    for name, value in abi.description["constants"].items()
    if name.startswith("DSOPT_MS_") and name != "DSOPT_MS_PHASES"
}
REASONS = {
    value: name[len("DSOPT_SKIP_") :].lower()
    for name, value in abi.description["constants"].items()
    if name.startswith("DSOPT_SKIP_")
}


@dataclass(frozen=True)
class Report:
    """What happened so far. Norms are those of the last call, and NaN if they were not computed.

    calls            steps so far, skipped ones included
    skipped          how many of them were skipped
    skipped_in_row   how many up to now in a row
    last_skipped     True if the last one was
    reasons          why it was: "gradients", "norm", "scale", "hyper", "caller", "peer"
    nonfinite        elements that are Inf or NaN in the gradients of the last call on this rank, where gradients are
                     read before the update: with a scaler, clipping or nonfinite="skip"
    first_bad        name of the first parameter with one
    kind             "inf" or "nan": what was found there
    loss_scale       for the next backward pass; 1 without a scaler
    scale_used       of the gradients of the last call
    grad_norm        of the unscaled gradients before clipping
    weight_norm      before the step, with Optimizer(report_norms=True)
    update_norm      of new - old, with Optimizer(report_norms=True)
    dense_norm       share of the parameters that are no experts: grad_norm^2 = dense_norm^2 + expert_norm^2
    expert_norm      share of the experts, over all their ranks
    divisor          gradients were divided by it: scale and clipping; 0 if skipped
    ms               milliseconds of the phases of the last call, with Optimizer(timing=True)
    state_bytes      memory of the state
    workspace_bytes  memory that a step needs in addition to the state
    resharded_from   ranks that saved what was loaded last, if they were others in number than now; else 0
    """

    calls: int
    skipped: int
    skipped_in_row: int
    last_skipped: bool
    reasons: Tuple[str, ...]
    nonfinite: int
    first_bad: Optional[str]
    kind: Optional[str]
    loss_scale: float
    scale_used: float
    grad_norm: float
    weight_norm: float
    update_norm: float
    dense_norm: float
    expert_norm: float
    divisor: float
    ms: Dict[str, float]
    state_bytes: int
    workspace_bytes: int
    resharded_from: int


_SAME = (
    "calls",
    "skipped",
    "skipped_in_row",
    "nonfinite",
    "loss_scale",
    "scale_used",
    "grad_norm",
    "weight_norm",
    "update_norm",
    "dense_norm",
    "expert_norm",
    "divisor",
    "state_bytes",
    "workspace_bytes",
    "resharded_from",
)


def report_of(struct: Any) -> Report:
    """Of a dsopt_report."""
    name = struct.first_bad_name
    return Report(
        last_skipped=bool(struct.last_skipped),
        first_bad=None if name is None else name.decode(),
        kind={abi.DSOPT_FOUND_INF: "inf", abi.DSOPT_FOUND_NAN: "nan"}.get(struct.kind),
        reasons=tuple(word for bit, word in sorted(REASONS.items()) if struct.reasons & bit),
        ms={phase: struct.ms[place] for phase, place in PHASES.items()},
        **{field: getattr(struct, field) for field in _SAME},
    )
