# SPDX-License-Identifier: Apache-2.0
"""Reports of FP16_Optimizer and FP16_UnfusedOptimizer about a step: text in Python's logging, times in timers."""
from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence

from .. import _abi as abi
from .._errors import StateError
from .._report import PHASES, REASONS

if TYPE_CHECKING:
    from ._base import EngineOptimizer
    from ._plan import Plan

LOG = logging.getLogger("dsopt")

# DeepSpeed's names of the phases, and the engine's phases of each. BASIC_STEP also writes 16-bit parameters. An
# exchange is in the inner optimizer's step.
OVERFLOW = {"compute_norm": ("compute_norm", ), "overflow_check": ("overflow_check", )}
STEP = {**OVERFLOW, "unscale_and_clip": ("unscale_and_clip", ),
        "basic_step": ("basic_step", "compress", "exchange", "decompress"), "update_fp16": ()}


def overflowed(report: Sequence[float]) -> bool:
    """True if the step of this report found a gradient that is not finite."""
    return bool(report[abi.DSOPT_REPORT_SKIPPED] or report[abi.DSOPT_REPORT_NONFINITE])


def log_step(report: Sequence[float], before: float, name_of: Any) -> None:
    """Logs (INFO) a skipped step, and a loss scale that differs from `before`. `report` is indexed by
    DSOPT_REPORT_SKIPPED and others; `name_of` returns the name of a parameter of the plan."""
    after, bad = report[abi.DSOPT_REPORT_SCALE_NEXT], int(report[abi.DSOPT_REPORT_FIRST_BAD])
    scale = "the loss scale " + ("is %g" % before if after == before else "changed from %g to %g" % (before, after))
    if report[abi.DSOPT_REPORT_SKIPPED]:
        mask = int(report[abi.DSOPT_REPORT_REASONS])
        reasons = ", ".join(word for bit, word in sorted(REASONS.items()) if mask & bit)
        where = "; not finite: %s" % name_of(bad) if bad >= 0 else ""
        LOG.info("skipped a step (%s%s); %s", reasons, where, scale)
    elif after != before:
        LOG.info("%s", scale)


class Measured:
    """An entry of DeepSpeed's timers for a device: a known time."""

    def __init__(self, milliseconds: float) -> None:
        self._milliseconds = milliseconds

    def get_elapsed_msec(self) -> float:
        return self._milliseconds


def measures(timers: Any) -> bool:
    """False without timers, and for DeepSpeed's NoopTimer, which has one timer for all names."""
    return bool(timers) and timers("basic_step") is not timers("overflow_check")


class Timed:
    """`with Timed(timers) as timed:` around a step, and then timed.report(). A timer of DeepSpeed, which has a list
    `event_timers`, receives the times of the engine's phases. Any other timer is started and stopped: basic_step around
    the whole step, the others around nothing, because the engine's phases do not begin and end in Python."""

    def __init__(self, timers: Any) -> None:
        self._timers = timers
        self._basic: Optional[Any] = None
        self._takes = False

    def __enter__(self) -> Timed:
        if self._timers:
            timer = self._timers("basic_step")
            self._takes = isinstance(getattr(timer, "event_timers", None), list) and hasattr(timer, "use_host_timer")
            if not self._takes:
                timer.start()
                self._basic = timer
        return self

    def __exit__(self, *_: object) -> None:
        if self._basic is not None:
            self._basic.stop()

    def report(self, times: Optional[Dict[str, float]], skipped: bool) -> None:
        """Adds the phases to the timers, and logs them: a skipped step has the first two."""
        for name in OVERFLOW if skipped else STEP:
            timer = self._timers(name)
            if not self._takes:
                if name != "basic_step":
                    timer.start()
                    timer.stop()
            elif times is not None:
                timer.event_timers.append(times[name] / 1000 if timer.use_host_timer else Measured(times[name]))
        self._timers.log(list(OVERFLOW if skipped else STEP))


def times_of(milliseconds: Sequence[float]) -> Dict[str, float]:
    """Returns the times of dsopt_report.ms under DeepSpeed's names."""
    return {name: sum(milliseconds[PHASES[phase]] for phase in phases) for name, phases in STEP.items()}


class Watched:
    """The steps of a wrapper."""

    verbose: bool
    optimizer: EngineOptimizer
    _plan: Callable[[], Plan]
    _only_plan: Callable[[], Plan]
    _scale_in_use: Callable[[], float]
    _timers: Any = None

    def _step(self, closure: Optional[Callable[[], Any]], drops_grads: bool) -> List[float]:
        """Steps once. Returns the report; reading it is the only wait for the device."""
        if closure is not None:
            warnings.warn("%s.step does not call its closure; call it before the step" % type(self).__name__,
                          stacklevel=3)
        logs = self.verbose and LOG.isEnabledFor(logging.INFO)
        before = self._scale_in_use() if logs else 1.0
        with Timed(self._timers) as timed:
            self.optimizer.step()
        if drops_grads:
            self.zero_grad()
        plan = self._only_plan()
        report: List[float] = plan.report.tolist()  # type: ignore[union-attr]
        if logs:
            log_step(report, before, lambda i: plan.entries[i].name)
        if self._timers:
            timed.report(times_of(plan.milliseconds()) if plan.timed else None, bool(report[abi.DSOPT_REPORT_SKIPPED]))
        return report

    def zero_grad(self, set_to_none: bool = True) -> None:
        raise NotImplementedError

    @property
    def timers(self) -> Any:
        """The timers that receive the times of the phases of each step, or None."""
        return self._timers

    @timers.setter
    def timers(self, value: Any) -> None:
        if value is not self._timers:  # a new plan costs one more collective with timers and the 1-bit family
            self._timers = value
            self.optimizer._plans = None

    def phase_times(self) -> Dict[str, float]:
        """Milliseconds of the phases of the last step, under DeepSpeed's names. Waits for the device."""
        plan = self._plan()
        if not plan.timed:
            raise StateError("phase_times: steps are timed with `timers` only (DSOPT_ERR_STATE)", abi.DSOPT_ERR_STATE,
                             "DSOPT_ERR_STATE")
        return times_of(plan.milliseconds())
