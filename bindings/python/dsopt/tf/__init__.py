# SPDX-License-Identifier: Apache-2.0
"""Keras' Adam, AdamW and Muon with dsopt, for TensorFlow. See README.md in this folder."""
import keras as _keras
import tensorflow as _tensorflow

from .. import _versions

for _package in (_tensorflow, _keras):
    _versions.require("dsopt.tf", _package)  # before the modules that need it

from ._muon import Muon
from ._optimizer import Adam, AdamW

__all__ = ["Adam", "AdamW", "Muon"]
