# SPDX-License-Identifier: Apache-2.0
"""The owner of a handle of the library.

A handle is destroyed when its owner is closed or collected. The library keeps alive what a handle was made from, so
owners may be collected in any order. Nothing is destroyed at interpreter exit, because a thread may then be inside a
call.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, TypeVar

from . import _abi as abi
from ._errors import ArgumentError, ArgumentTypeError, StateError, error_of

H = TypeVar("H", bound="Handle")


def choice(parameter: str, value: Any, choices: Dict[str, int]) -> int:
    """Returns the number of a word."""
    if isinstance(value, str) and value in choices:
        return choices[value]
    raise ArgumentError(
        "%s is %r, and must be one of %s" % (parameter, value, ", ".join(map(repr, choices))), 10, "DSOPT_ERR_ARGUMENT"
    )


def require_handle(owner: Any, kind: Type[H], name: str) -> H:
    """Checks the type of an owner: the library cannot distinguish handles."""
    if not isinstance(owner, kind):
        raise ArgumentTypeError(
            "%s is %s, and must be a dsopt.%s" % (name, type(owner).__name__, kind.__name__), 10, "DSOPT_ERR_ARGUMENT"
        )
    return owner


def counted(count: int, word: str) -> str:
    """Returns a count with its noun."""
    return "%d %s%s" % (count, word, "" if count == 1 else "s")


class Handle:
    """Owns one handle. `hooked` is True if calls with it may lead to a Python function."""

    _handle: Optional[int] = None
    hooked = False

    def __new__(cls: Type[H], *_: Any, **__: Any) -> H:
        self = super().__new__(cls)
        self.uses = []
        return self

    uses: List[None]  # one entry per running call with this handle; appending is atomic

    def _own(self, handle: ctypes.c_void_p, destroy: Callable[[int], None], *needed: object) -> None:
        """`needed` is kept until the handle is destroyed: Python functions that the library calls, memory that it
        borrows."""
        assert handle.value is not None
        self._handle = handle.value
        self._finalizer = weakref.finalize(self, _destroy, destroy, handle.value, needed)
        self._finalizer.atexit = False

    def _create(
        self, create: Callable[..., int], *arguments: Any, destroy: Callable[[int], None], needed: Tuple[object, ...]
    ) -> None:
        """Owns the handle that `create` makes with these arguments."""
        handle = ctypes.c_void_p()
        status = create(*arguments, ctypes.byref(handle))
        if not status:
            self._own(handle, destroy, *needed)
        abi.check(status)  # a hook may have raised although the call succeeded

    @property
    def handle(self) -> int:
        """Address for the library. Raises StateError once it is closed."""
        if self._handle is None:
            raise StateError("this %s is closed; make a new one" % type(self).__name__, 19, "DSOPT_ERR_STATE")
        return self._handle

    @property
    def closed(self) -> bool:
        """True once the handle is released."""
        return self._handle is None

    def close(self) -> None:
        """Release the handle now. Raises StateError during a call with it, such as in a hook."""
        handle, self._handle = self._handle, None  # from here on no call starts
        if handle is None:
            return
        if self.uses:
            self._handle = handle
            raise StateError(
                "this %s is in a call, and cannot be closed before it is over" % type(self).__name__,
                abi.DSOPT_ERR_BUSY,
                "DSOPT_ERR_BUSY",
            )
        self._finalizer()

    def _shown(self) -> str:
        """Returns what the representation shows after the class. Must not call the library, which may be in a call."""
        return ""

    def __repr__(self) -> str:
        text = "closed" if self.closed else self._shown()
        return "<dsopt.%s%s>" % (type(self).__name__, text and ": " + text)

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Tuple[Any, ...]:
        raise TypeError(
            "a dsopt.%s cannot be pickled or copied: it belongs to this process. Make a new one, and take over "
            "the state by save and load" % type(self).__name__
        )


class Exclusive:
    """Allows one call at a time that changes an optimizer, also within a thread: its lists have one user."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise error_of(
                abi.DSOPT_ERR_BUSY,
                "DSOPT_ERR_BUSY",
                "the optimizer is in a call of another thread, or in the call that runs this hook",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _destroy(destroy: Callable[[int], None], handle: int, needed: Tuple[object, ...]) -> None:
    destroy(handle)
