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
    """dsopt_report. Norms are NaN if they were not computed."""

    calls: int
    skipped: int
    skipped_in_row: int
    last_skipped: bool
    reasons: Tuple[str, ...]
    """Why the last call was skipped: "gradients", "norm", "scale", "hyper", "caller", "peer"."""
    nonfinite: int
    first_bad: Optional[str]
    """Name of the first parameter with an Inf or NaN in the last call."""
    kind: Optional[str]
    """"inf" or "nan": what was found there."""
    loss_scale: float
    scale_used: float
    grad_norm: float
    weight_norm: float
    update_norm: float
    dense_norm: float
    expert_norm: float
    divisor: float
    ms: Dict[str, float]
    """Milliseconds of the phases of the last call, with Optimizer(timing=True)."""
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
