# SPDX-License-Identifier: Apache-2.0
"""Keras' Adam, AdamW and Muon with dsopt, for TensorFlow. See README.md in this folder."""
from ._muon import Muon
from ._optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW", "Muon"]
