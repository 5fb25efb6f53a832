# SPDX-License-Identifier: Apache-2.0
"""dsopt inside jax.jit: optax transformations, steps in place, and the 1-bit family. See README.md in this folder."""

import jax as _jax

from .. import _versions

_versions.require("dsopt.jax", _jax)  # before the modules that need it

from ._build import handler_path, library as register
from ._comms import register_comm
from ._fused import DynamicScale, FusedStep, Report, onebit_adam, onebit_lamb, zero_one_adam
from ._optax import (
    adagrad,
    adam,
    adamw,
    lamb,
    lion,
    scale_by_adam,
    scale_by_lion,
    scale_by_rss,
    sgd,
    trace,
)

__all__ = [
    "DynamicScale",
    "FusedStep",
    "Report",
    "adagrad",
    "adam",
    "adamw",
    "handler_path",
    "lamb",
    "lion",
    "onebit_adam",
    "onebit_lamb",
    "register",
    "register_comm",
    "scale_by_adam",
    "scale_by_lion",
    "scale_by_rss",
    "sgd",
    "trace",
    "zero_one_adam",
]
