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
    """Backend, device and hooks. Serves any number of threads.

    backend         "cpu" or "cuda"; CUDA needs a library that was built with it
    device          CUDA ordinal
    threads         workers of a step; 0 = number of cores
    parallel_for    thread pool: called as parallel_for(n, body), it runs body(i) once for every i in range(n), in any
                    order and on any thread, and returns when all are done. The calling thread must run pieces too.
    log             called as log(level, text); level 1 = error, 2 = warn, 3 = info, 4 = trace
    log_level       highest level passed to log; 0 = the environment's DSOPT_LOG, else warn
    chunk           smallest piece of work in elements, a multiple of 4096
    check_pointers  CUDA, for debugging: each step asks the driver to which device each pointer belongs
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
        self.hooks = tuple(hooks)  # what is made from a context has it as `needed`, and with it these
        self._create(
            abi.lib.dsopt_context_create, byref(desc), destroy=abi.lib.dsopt_context_destroy, needed=self.hooks
        )

    def _shown(self) -> str:
        if self.backend != "cpu":
            return "%s:%d" % (self.backend, self.device)
        return "cpu, %s" % (counted(self.threads, "thread") if self.threads else "all threads")


PROFILES = {
    "default": abi.DSOPT_PROFILE_DEFAULT,
    "fused": abi.DSOPT_PROFILE_FUSED,
    "unfused": abi.DSOPT_PROFILE_UNFUSED,
    "dynamic": abi.DSOPT_PROFILE_DYNAMIC,
}


class Scaler(Handle):
    """A loss scale: gradients are divided by it, and it adapts so that they neither overflow nor vanish. For every
    number 0 = the profile's value.

    context           where the scale is kept
    profile           "default", or DeepSpeed's "fused", "unfused" or "dynamic"
    init              starting scale; 2^16 in the default profile
    factor            the scale grows and shrinks by it
    min, max          bounds of the scale
    window            good steps after which it grows
    hysteresis        overflows after which it shrinks
    static            the scale never changes by itself; steps with an overflow are skipped all the same
    refill            each good step sets the count of `hysteresis` back
    fail_at_min       an overflow at the minimum counts in query().failures
    keep_at_min       takes fail_at_min out of the profile "dynamic"
    shared            for several optimizers: steps record overflows, and `update` moves the scale once per iteration
    growth_at_window  it grows in the last step of the window, not in the one after it
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
        """The dsopt_scaler_info of now: scale, dynamic, updates, last_overflow, hysteresis, overridden, failures,
        skipped_in_row. Waits for earlier calls on the scaler and its optimizers."""
        info = abi.dsopt_scaler_info()
        abi.check(abi.lib.dsopt_scaler_query(self.handle, byref(info)))
        return info

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by. Setting it sets the scaler's own value."""
        return float(self.query().scale)

    @scale.setter
    def scale(self, value: float) -> None:
        abi.check(abi.lib.dsopt_scaler_set(self.handle, abi.DSOPT_SCALE_VALUE, _scale(value), None))

    def override(self, value: Optional[float], *, stream: Optional[int] = None) -> None:
        """Use `value` in place of the scaler's own scale; None ends that. `stream` is the CUDA stream."""
        what = abi.DSOPT_SCALE_CLEAR_OVERRIDE if value is None else abi.DSOPT_SCALE_OVERRIDE
        scale = 0.0 if value is None else _scale(value)
        abi.check(abi.lib.dsopt_scaler_set(self.handle, what, scale, require_stream(stream)))

    def detach(self) -> None:
        """Release the optimizers that were made with this scaler. They can step no more."""
        abi.check(abi.lib.dsopt_scaler_detach(self.handle))

    def update(self, overflow: Optional[bool] = None, *, stream: Optional[int] = None) -> None:
        """One transition of a shared scaler, once per iteration.

        overflow  True or False; None = what the optimizers recorded, the only value on CUDA
        stream    the CUDA stream on which the steps were
        """
        word = None if overflow is None else ctypes.c_int32(bool(overflow))
        if word is not None and self.context.backend != "cpu":
            text = "overflow is %r, and must be None on %s, where the optimizers record it"
            raise ArgumentError(text % (overflow, self.context.backend), 10, "DSOPT_ERR_ARGUMENT")
        place = None if word is None else byref(word)
        abi.check(abi.lib.dsopt_scaler_update(self.handle, place, require_stream(stream)))

    @property
    def device_scale(self) -> int:
        """Address of the scale, one float in backend memory, for the life of the scaler."""
        return int(abi.lib.dsopt_scaler_device_scale(self.handle))


def _scale(value: Any) -> float:
    return float(abi.number(value, ctypes.c_double, "scale"))


_default: Tuple[int, Optional[Context]] = (0, None)


def default_context() -> Context:
    """The CPU with every default, one per process: that of the parent is of no use after a fork."""
    global _default
    pid, context = _default
    if context is None or pid != os.getpid() or context.closed:
        context = Context()
        _default = os.getpid(), context
    return context
