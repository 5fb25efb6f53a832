# SPDX-License-Identifier: Apache-2.0
"""A status of the library as an exception. Every class also derives from the matching class of the language."""

from __future__ import annotations

import builtins
from typing import Any, Dict, Tuple, Type


class Error(Exception):
    """A call of the library failed. `status` is its number, `name` its name, such as "DSOPT_ERR_SHAPE", `text` the
    reason."""

    status: int
    name: Any  # str; ImportError has an optional one

    def __init__(self, text: str, status: int = 33, name: str = "DSOPT_ERR_INTERNAL") -> None:
        super().__init__(text)
        self.status, self.name = status, name

    def __str__(self) -> str:  # OSError and ImportError format differently
        return Exception.__str__(self)

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self.args[0], self.status, self.name)


class ArgumentError(Error, ValueError):
    """The call is wrong: argument, shape, dtype, alignment, overlap, device, workspace or version."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a wrong type, such as an object that is no array."""


class TensorError(ArgumentError, RuntimeError):
    """A tensor has a wrong shape or dtype, or is on a wrong device: a RuntimeError in torch and in DeepSpeed."""


class UnsupportedError(Error, NotImplementedError):
    """An option is not supported in this combination or build, or has no effect. NotImplementedError is a RuntimeError,
    which DeepSpeed's optimizers raise here."""


class AssertedError(UnsupportedError, AssertionError):
    """An unsupported option for which DeepSpeed has an assert statement."""


class StateError(Error, RuntimeError):
    """The call is not possible now: the order of calls, another thread, a fork, the skip budget, a hook."""


class OutOfMemoryError(Error, MemoryError):
    """Host or backend memory is exhausted."""


class MissingError(Error, ImportError):
    """A driver or library that the call needs is not on this machine."""


class FileError(Error, OSError):
    """Opening, reading, writing, flushing or renaming a file failed."""


class BackendError(Error, RuntimeError):
    """The device or its driver failed."""


class CommError(Error, ConnectionError):
    """A collective failed, or the comm was aborted. The comm is unusable."""


class TimeoutError(CommError, builtins.TimeoutError):  # noqa: A001 - the standard class is a base of it
    """A peer did not join a collective within the comm's time-out."""


class CheckpointError(Error, ValueError):
    """A file is not a dsopt checkpoint, is damaged, or belongs to another optimizer."""


_KINDS: Dict[int, Type[Error]] = {
    11: TensorError,
    12: TensorError,
    15: TensorError,
    18: UnsupportedError,
    19: StateError,
    30: OutOfMemoryError,
    31: MissingError,
    32: FileError,
    34: BackendError,
    50: CommError,
    51: TimeoutError,
    52: CommError,
}
_DECADES: Dict[int, Type[Error]] = {1: ArgumentError, 2: StateError, 7: CheckpointError}


def error_of(status: int, name: str, text: str) -> Error:
    """Returns the exception for a status."""
    kind = _KINDS.get(status) or _DECADES.get(status // 10, Error)
    return kind("%s (%s)" % (text, name), status, name)
