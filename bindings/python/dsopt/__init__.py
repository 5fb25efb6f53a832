# SPDX-License-Identifier: Apache-2.0
"""The optimizer side of training, on arrays of NumPy and of every library that supports DLPack. See README.md."""

from ._comm import Comm
from ._errors import (
    ArgumentError,
    ArgumentTypeError,
    AssertedError,
    BackendError,
    CheckpointError,
    CommError,
    Error,
    FileError,
    MissingError,
    OutOfMemoryError,
    StateError,
    TensorError,
    TimeoutError,
    UnsupportedError,
)
from ._functions import CompressedAllReduce, NormResult, axpby, build_info, clamp, clip, norm, version, zero
from ._groups import (
    Adagrad,
    Adam,
    AdamLegacy,
    AdamW,
    Group,
    GroupView,
    Lamb,
    Lion,
    Muon,
    OnebitAdam,
    OnebitLamb,
    Sgd,
    ZeroOneAdam,
)
from ._handles import Context, Scaler
from ._hooks import Piece
from ._optimizer import Optimizer
from ._params import Param
from ._report import Report
from ._state import State

__all__ = [
    "Adagrad",
    "Adam",
    "AdamLegacy",
    "AdamW",
    "ArgumentError",
    "ArgumentTypeError",
    "AssertedError",
    "BackendError",
    "CheckpointError",
    "Comm",
    "CommError",
    "CompressedAllReduce",
    "Context",
    "Error",
    "FileError",
    "Group",
    "GroupView",
    "Lamb",
    "Lion",
    "MissingError",
    "Muon",
    "NormResult",
    "OnebitAdam",
    "OnebitLamb",
    "Optimizer",
    "OutOfMemoryError",
    "Param",
    "Piece",
    "Report",
    "Scaler",
    "Sgd",
    "State",
    "StateError",
    "TensorError",
    "TimeoutError",
    "UnsupportedError",
    "ZeroOneAdam",
    "axpby",
    "build_info",
    "clamp",
    "clip",
    "norm",
    "version",
    "zero",
]
__version__ = version()
