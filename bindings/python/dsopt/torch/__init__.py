# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch that step with the engine. See README.md."""
import torch as _torch

from .. import _versions

_versions.require("dsopt.torch", _torch)  # before the modules that need it
from ._8bit import Adam8bit, AdamW8bit
from ._adagrad import Adagrad
from ._adam import Adam, AdamW
from ._cpu import DeepSpeedCPUAdam, DeepSpeedCPULion
from ._deepspeed import FusedAdam, FusedLamb, FusedLion
from ._fp16 import FP16_Optimizer, FP16_UnfusedOptimizer
from ._lion import Lion
from ._muon import Muon
from ._onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
from ._register import register, unregister
from ._sgd import SGD

__all__ = [
    "Adagrad", "Adam", "Adam8bit", "AdamW", "AdamW8bit", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FP16_Optimizer",
    "FP16_UnfusedOptimizer", "FusedAdam", "FusedLamb", "FusedLion", "Lion", "Muon", "OnebitAdam", "OnebitLamb",
    "SGD", "ZeroOneAdam", "register", "unregister"
]
