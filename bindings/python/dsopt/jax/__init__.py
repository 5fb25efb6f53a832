# SPDX-License-Identifier: Apache-2.0
"""dsopt inside jax.jit. See bindings/jax/README.md."""
from ._optax import AdamState, adam, adamw, lamb

__all__ = ["AdamState", "adam", "adamw", "lamb"]
