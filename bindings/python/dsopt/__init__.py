# SPDX-License-Identifier: Apache-2.0
"""The optimizer side of training, on arrays of NumPy and of everything that speaks DLPack. See README.md."""
from ._errors import (ArgumentError, BackendError, CheckpointError, CommError, Error, FileError, MissingError, OutOfMemoryError,
                      StateError, TimeoutError, UnsupportedError)

__all__ = ["ArgumentError", "BackendError", "CheckpointError", "CommError", "Error", "FileError", "MissingError",
           "OutOfMemoryError", "StateError", "TimeoutError", "UnsupportedError"]
