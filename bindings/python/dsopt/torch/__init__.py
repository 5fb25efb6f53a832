# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch that step with the engine. See README.md."""
from ._adam import Adam, AdamW

__all__ = ["Adam", "AdamW"]
