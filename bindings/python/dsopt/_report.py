# SPDX-License-Identifier: Apache-2.0
"""The report of an optimizer."""

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
    """Statistics of the steps so far. Norms are those of the last call, and NaN if they were not computed.

    calls            steps so far, skipped ones included
    skipped          number of skipped steps
    skipped_in_row   number of consecutive skipped steps up to now
    last_skipped     True if the last step was skipped
    reasons          why the last step was skipped: "gradients", "norm", "scale", "hyper", "caller", "peer"
    nonfinite        elements that are Inf or NaN in the gradients of the last call on this rank, where gradients are
                     read before the update: with a scaler, clipping or nonfinite="skip"
    first_bad        name of the first parameter with such an element
    kind             "inf" or "nan": the value found there
    loss_scale       loss scale for the next backward pass; 1 without a scaler
    scale_used       loss scale of the gradients of the last call
    grad_norm        norm of the unscaled gradients before clipping
    weight_norm      norm of the weights before the step, with Optimizer(report_norms=True)
    update_norm      norm of new - old, with Optimizer(report_norms=True)
    dense_norm       norm of the parameters that are not experts: grad_norm^2 = dense_norm^2 + expert_norm^2
    expert_norm      norm of the experts, over all their ranks
    divisor          divisor of the gradients: scale and clipping; 0 if skipped
    ms               milliseconds of the phases of the last call, with Optimizer(timing=True)
    state_bytes      memory of the state
    workspace_bytes  memory that a step needs in addition to the state
    resharded_from   number of ranks that saved the last loaded checkpoint, if it differs from the present number; else
    0
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
    """Returns the Report of a dsopt_report."""
    name = struct.first_bad_name
    return Report(
        last_skipped=bool(struct.last_skipped),
        first_bad=None if name is None else name.decode(),
        kind={abi.DSOPT_FOUND_INF: "inf", abi.DSOPT_FOUND_NAN: "nan"}.get(struct.kind),
        reasons=tuple(word for bit, word in sorted(REASONS.items()) if struct.reasons & bit),
        ms={phase: struct.ms[place] for phase, place in PHASES.items()},
        **{field: getattr(struct, field) for field in _SAME},
    )
