# SPDX-License-Identifier: Apache-2.0
"""Contexts and loss scalers."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref
from typing import Any, Callable, Optional, Tuple

from . import _abi as abi
from . import _hooks
from ._arrays import require_stream
from ._comm import Comm
from ._errors import ArgumentError
from ._handle import Handle, choice, counted, require_handle

__all__ = ["Comm", "Context", "Handle", "Scaler"]
ParallelFor = _hooks.ParallelFor


class Context(Handle):
    """Backend, device and hooks. Any number of threads may use it.

    backend         "cpu" or "cuda"; CUDA needs a library that was built with it
    device          CUDA ordinal
    threads         workers of a step; 0 = OMP_NUM_THREADS, else the number of cores. The attribute has the number that
                    was chosen
    parallel_for    thread pool: called as parallel_for(n, body), it runs body(i) once for every i in range(n), in any
                    order and on any thread, and returns when all are done. The calling thread must run some of them.
    log             called as log(level, text); level 1 = error, 2 = warn, 3 = info, 4 = trace
    log_level       highest level passed to log; 0 = the environment's DSOPT_LOG, else warn
    chunk           smallest work item in elements, a multiple of 4096
    check_pointers  CUDA, for debugging: each step checks the device of each pointer
    """

    def __init__(
        self,
        backend: str = "cpu",
        device: int = 0,
        threads: int = 0,
        *,
        parallel_for: Optional[ParallelFor] = None,
        log: Optional[Callable[[int, str], object]] = None,
        log_level: int = 0,
        chunk: int = 0,
        check_pointers: bool = False,
    ) -> None:
        self.backend, self.device, self.threads = backend, device, threads
        desc = abi.dsopt_context_desc(
            backend=choice("backend", backend, {"cpu": abi.DSOPT_BACKEND_CPU, "cuda": abi.DSOPT_BACKEND_CUDA}),
            device=device,
            threads=threads,
            log_level=log_level,
            chunk=chunk,
            flags=abi.DSOPT_CONTEXT_CHECK_POINTERS if check_pointers else 0,
        )
        hooks = []
        candidates: Tuple[Tuple[str, Any, Any], ...] = (
            ("parallel_for", parallel_for, _hooks.parallel_for),
            ("log", log, _hooks.log),
        )
        for name, function, make in candidates:
            if function is not None:
                if not callable(function):
                    text = "%s is %s, and must be callable" % (name, type(function).__name__)
                    raise ArgumentError(text, 10, "DSOPT_ERR_ARGUMENT")
                hooks.append(make(function))
                setattr(desc, name, hooks[-1])
        self.hooked = bool(hooks)
        self.hooks = tuple(hooks)  # objects made from a context keep the context, and so these
        self._create(
            abi.lib.dsopt_context_create, byref(desc), destroy=abi.lib.dsopt_context_destroy, needed=self.hooks
        )

        info = abi.dsopt_context_info()
        abi.check(abi.lib.dsopt_context_query(self.handle, byref(info)))
        self.threads = int(info.threads)

    def _shown(self) -> str:
        if self.backend != "cpu":
            return "%s:%d" % (self.backend, self.device)
        return "cpu, %s" % counted(self.threads, "thread")


PROFILES = {
    "default": abi.DSOPT_PROFILE_DEFAULT,
    "fused": abi.DSOPT_PROFILE_FUSED,
    "unfused": abi.DSOPT_PROFILE_UNFUSED,
    "dynamic": abi.DSOPT_PROFILE_DYNAMIC,
}


class Scaler(Handle):
    """A loss scale: gradients are divided by it, and it adapts so that they neither overflow nor underflow. For every
    number, 0 = the profile's value.

    context           where the scale is kept
    profile           "default", or DeepSpeed's "fused", "unfused" or "dynamic"
    init              initial scale; 2^16 in the default profile
    factor            factor by which the scale grows and shrinks
    min, max          bounds of the scale
    window            number of good steps after which it grows
    hysteresis        number of overflows after which it shrinks
    static            the scale never changes automatically; steps with an overflow are still skipped
    refill            each good step resets the count of `hysteresis`
    fail_at_min       an overflow at the minimum counts in query().failures
    keep_at_min       removes fail_at_min from the profile "dynamic"
    shared            for several optimizers: steps record overflows, and `update` updates the scale once per iteration
    growth_at_window  the scale grows in the last step of the window, not in the next one
    """

    def __init__(
        self,
        context: Context,
        *,
        profile: str = "default",
        init: float = 0,
        factor: float = 0,
        min: float = 0,
        max: float = 0,
        window: int = 0,
        hysteresis: int = 0,
        static: bool = False,
        refill: bool = False,
        fail_at_min: bool = False,
        keep_at_min: bool = False,
        shared: bool = False,
        growth_at_window: bool = False,
    ) -> None:
        self.context, self.hooked = require_handle(context, Context, "context"), context.hooked
        self._profile = profile
        desc = abi.dsopt_scaler_desc(
            profile=choice("profile", profile, PROFILES),
            init=init,
            factor=factor,
            min=min,
            max=max,
            window=window,
            hysteresis=hysteresis,
            flags=abi.DSOPT_SCALER_STATIC * bool(static)
            | abi.DSOPT_SCALER_REFILL * bool(refill)
            | abi.DSOPT_SCALER_FAIL_AT_MIN * bool(fail_at_min)
            | abi.DSOPT_SCALER_KEEP_AT_MIN * bool(keep_at_min)
            | abi.DSOPT_SCALER_SHARED * bool(shared)
            | abi.DSOPT_SCALER_GROWTH_AT_WINDOW * bool(growth_at_window),
        )
        self._create(
            abi.lib.dsopt_scaler_create,
            context.handle,
            byref(desc),
            destroy=abi.lib.dsopt_scaler_destroy,
            needed=(context,),
        )

    def _shown(self) -> str:
        return "profile %r on %s" % (self._profile, self.context._shown())

    def query(self) -> Any:
        """Returns the current dsopt_scaler_info: scale, dynamic, updates, last_overflow, hysteresis, overridden,
        failures, skipped_in_row. Waits for earlier calls on the scaler and its optimizers."""
        info = abi.dsopt_scaler_info()
        abi.check(abi.lib.dsopt_scaler_query(self.handle, byref(info)))
        return info

    @property
    def scale(self) -> float:
        """Scale of the next loss. Setting it sets the dynamic scale."""
        return float(self.query().scale)

    @scale.setter
    def scale(self, value: float) -> None:
        abi.check(abi.lib.dsopt_scaler_set(self.handle, abi.DSOPT_SCALE_VALUE, _scale(value), None))

    def override(self, value: Optional[float], *, stream: Optional[int] = None) -> None:
        """Use `value` instead of the dynamic scale; None ends that. `stream` is the CUDA stream."""
        what = abi.DSOPT_SCALE_CLEAR_OVERRIDE if value is None else abi.DSOPT_SCALE_OVERRIDE
        scale = 0.0 if value is None else _scale(value)
        abi.check(abi.lib.dsopt_scaler_set(self.handle, what, scale, require_stream(stream)))

    def detach(self) -> None:
        """Detach the optimizers that were made with this scaler. They can no longer step."""
        abi.check(abi.lib.dsopt_scaler_detach(self.handle))

    def update(self, overflow: Optional[bool] = None, *, stream: Optional[int] = None) -> None:
        """Execute one transition of a shared scaler, once per iteration.

        overflow  True or False; None = what the optimizers recorded, the only value on CUDA
        stream    the CUDA stream of the steps
        """
        word = None if overflow is None else ctypes.c_int32(bool(overflow))
        if word is not None and self.context.backend != "cpu":
            text = "overflow is %r, and must be None on %s, where the optimizers record it"
            raise ArgumentError(text % (overflow, self.context.backend), 10, "DSOPT_ERR_ARGUMENT")
        place = None if word is None else byref(word)
        abi.check(abi.lib.dsopt_scaler_update(self.handle, place, require_stream(stream)))

    @property
    def device_scale(self) -> int:
        """Address of the scale, one float in backend memory, fixed for the life of the scaler."""
        return int(abi.lib.dsopt_scaler_device_scale(self.handle))


def _scale(value: Any) -> float:
    return float(abi.number(value, ctypes.c_double, "scale"))


_default: Tuple[int, Optional[Context]] = (0, None)


def default_context() -> Context:
    """Returns the CPU context with every default, one per process: the parent's cannot be used after a fork."""
    global _default
    pid, context = _default
    if context is None or pid != os.getpid() or context.closed:
        context = Context()
        _default = os.getpid(), context
    return context
