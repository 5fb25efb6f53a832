# SPDX-License-Identifier: Apache-2.0
"""Python functions that the library calls: their exceptions, and interpreter shutdown.

A Python function cannot be entered once the interpreter shuts down: CPython ends the calling thread in the middle of
the library's frames, and the process aborts. So calls that may lead to a Python function pass a gate. At exit the gate
is closed, and exit waits for the calls inside.

An interrupt (Ctrl-C) that arrives as the library enters a Python function would be raised before the first line of that
function, where ctypes drops it and returns 0, which the library reads as success. So while the main thread is inside
the gate, interrupts are raised only inside the caller's functions, otherwise after the call.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import signal
import threading
import time
from typing import Any, Callable, List, Protocol, Sequence, TypeVar

from . import _abi as abi
from ._errors import StateError

T = TypeVar("T")


class Piece(Protocol):
    """The second argument of a context's `parallel_for`, which calls it once for every number in range(n)."""

    def __call__(self, i: int, /) -> None:
        """Run index `i`, on any thread, before `parallel_for` returns."""


ParallelFor = Callable[[int, Piece], object]
EXIT_WAIT = 30.0  # seconds; exit does not wait longer for a call


class Interrupts:
    """Handles SIGINT while the main thread is in a call that may lead to a Python function. Used only by that
    thread."""

    def __init__(self) -> None:
        self.inside = False  # in a function of the caller
        self._arrived = False
        self._outer: List[bool] = []
        self._previous: Any = None

    def begin(self) -> None:
        if not self._outer:
            self._previous = signal.getsignal(signal.SIGINT)
            if callable(self._previous):
                try:
                    signal.signal(signal.SIGINT, self._handle)
                except ValueError:
                    pass  # an interpreter that receives no signals
        self._outer.append(self.inside)
        self.inside = False

    def end(self) -> None:
        self.inside = self._outer.pop()
        if not self._outer and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, self._previous)
        if self._arrived and (self.inside or not self._outer):
            self._arrived = False
            self._previous(signal.SIGINT, None)

    def _handle(self, number: int, frame: Any) -> None:
        if self.inside:
            self._previous(number, frame)
        else:
            self._arrived = True


interrupts = Interrupts()


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Gate:
    """`with gate:` around a call that may lead to a Python function."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._closed = False

    def __enter__(self) -> None:
        main = in_main_thread()
        if main:  # first: an interrupt that is raised inside Condition.__enter__ would leave the lock locked
            interrupts.begin()
        with self._changed:
            closed = self._closed
            self._inside += not closed
        if closed:
            if main:
                interrupts.end()
            raise StateError(
                "the interpreter shuts down: hooks of Python cannot be called any more", 19, "DSOPT_ERR_STATE"
            )

    def __exit__(self, *_: Any) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
        if in_main_thread():
            interrupts.end()

    def close(self) -> None:
        end = time.monotonic() + EXIT_WAIT
        with self._changed:
            self._closed = True
            while self._inside and time.monotonic() < end:
                self._changed.wait(end - time.monotonic())


gate = Gate()
atexit.register(gate.close)
os.register_at_fork(after_in_child=gate._reset)  # threads inside the gate do not exist in the child


class Using:
    """`with Using(handles):` around a call: a hook or another thread cannot close the handles meanwhile. It passes the
    gate if the call may lead to a Python function."""

    __slots__ = ("_owners", "_gated")

    def __init__(self, owners: Sequence[Any]) -> None:
        self._owners = [owner for owner in owners if owner is not None]
        self._gated = any(owner.hooked for owner in self._owners)

    def __enter__(self) -> None:
        if self._gated:
            gate.__enter__()
        for owner in self._owners:
            owner.uses.append(None)

    def __exit__(self, *_: Any) -> None:
        for owner in self._owners:
            owner.uses.pop()
        if self._gated:
            gate.__exit__()


def gated(*owners: Any) -> Using:
    """Returns a Using for a call with these handles."""
    return Using(owners)


def keep(problem: BaseException) -> None:
    """Stores an exception of a hook, which may not raise: `abi.check` raises the first one after the call."""
    abi.raised.setdefault(threading.get_ident(), problem)


def guarded(function: Callable[..., T], failed: Callable[[BaseException], T]) -> Callable[..., T]:
    """Wraps `function`: stores its exceptions and returns `failed(problem)` to the library."""

    @functools.wraps(function)
    def hook(*arguments: Any) -> T:
        try:
            if not in_main_thread():
                return function(*arguments)
            try:
                interrupts.inside = True
                return function(*arguments)
            finally:
                interrupts.inside = False
        except BaseException as problem:  # KeyboardInterrupt and SystemExit too: no exception may pass through C
            keep(problem)
            return failed(problem)

    return hook


def parallel_for(run: ParallelFor) -> Any:
    """Returns a dsopt_parallel_for that calls run(n, body), where body(i) runs index i."""

    def hook(_user: Any, n: int, body: Callable[[Any, int], None], arg: Any) -> None:
        changed = threading.Condition(threading.Lock())
        active, running = True, 0

        def piece(i: int) -> None:
            nonlocal running
            i = abi.number(i, ctypes.c_int64, "parallel_for: number of a piece")
            if not 0 <= i < n:
                raise IndexError("parallel_for: there are %d pieces, and number %d was run" % (n, i))
            with changed:
                if not active:
                    raise StateError("a piece of work was run after parallel_for had returned", 23, "DSOPT_ERR_HOOK")
                running += 1
            try:
                body(arg, i)
            finally:
                with changed:
                    running -= 1
                    changed.notify_all()

        try:
            run(n, piece)
        finally:
            with changed:
                active = False
                while running:  # running indices use memory of this call, even if `run` has returned
                    try:
                        changed.wait()
                    except BaseException as problem:  # an interrupt does not end them
                        keep(problem)

    return abi.dsopt_parallel_for(guarded(hook, lambda problem: None))


def log(write: Callable[[int, str], object]) -> Any:
    """Returns the `log` of a context that calls write(level, text)."""
    kinds = dict(abi.dsopt_context_desc._fields_)
    return kinds["log"](
        guarded(
            lambda _user, level, text: _nothing(write(level, text.decode("utf-8", "replace"))), lambda problem: None
        )
    )


def _nothing(_: object) -> None:
    return None
