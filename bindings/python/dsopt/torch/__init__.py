# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch that step with the engine. See README.md."""
from ._adam import Adam, AdamW
from ._deepspeed import FusedAdam, FusedLamb
from ._fp16 import FP16_Optimizer, FP16_UnfusedOptimizer
from ._onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

__all__ = [
    "Adam", "AdamW", "FP16_Optimizer", "FP16_UnfusedOptimizer", "FusedAdam", "FusedLamb", "OnebitAdam", "OnebitLamb",
    "ZeroOneAdam"
]
