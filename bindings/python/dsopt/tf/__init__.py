# SPDX-License-Identifier: Apache-2.0
"""Keras' Adam and AdamW with dsopt, for TensorFlow. See README.md in this folder."""
from ._optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW"]
