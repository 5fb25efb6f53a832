# SPDX-License-Identifier: Apache-2.0
"""The optimizer side of training, on arrays of NumPy and of everything that speaks DLPack. See README.md."""
from ._errors import (ArgumentError, ArgumentTypeError, BackendError, CheckpointError, CommError, Error, FileError, MissingError,
                      OutOfMemoryError, StateError, TimeoutError, UnsupportedError)
from ._handles import Comm, Context, Scaler

__all__ = ["ArgumentError", "ArgumentTypeError", "BackendError", "CheckpointError", "Comm", "CommError", "Context", "Error",
           "FileError", "MissingError", "OutOfMemoryError", "Scaler", "StateError", "TimeoutError", "UnsupportedError"]
