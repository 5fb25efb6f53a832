# SPDX-License-Identifier: Apache-2.0
"""fp32 masters that consist of a bfloat16 parameter and 16 more bits: dsopt.h, DSOPT_MASTERS_REMAINDER."""

import jax
import jax.numpy as jnp


def join(weight, remainder):
    """Returns the master of a weight and its remainder, which counts from the weight up or down."""
    return _float((_bits(weight, jnp.uint16).astype(jnp.uint32) << 16) + remainder.astype(jnp.uint32))


def split(master):
    """Returns the weight of a master, to nearest with ties away from zero, and its remainder."""
    bits = _bits(master, jnp.uint32)
    weight = (bits >> 16) + (bits >> 15 & 1)
    is_nan = jnp.isnan(master)
    weight = jnp.where(is_nan, bits >> 16 | 0x40, weight).astype(jnp.uint16)
    remainder = jnp.where(is_nan, 0, bits).astype(jnp.uint16)
    return (
        jax.lax.bitcast_convert_type(weight, jnp.bfloat16),
        jax.lax.bitcast_convert_type(remainder, jnp.int16),
    )


def of_rounded(weight, master):
    """Returns the remainder for a given weight that was rounded from a master, to nearest with ties either way."""
    above = _bits(jnp.asarray(master, jnp.float32), jnp.uint32) - (_bits(weight, jnp.uint16).astype(jnp.uint32) << 16)
    return jnp.clip(above.astype(jnp.int32), -(1 << 15), (1 << 15) - 1).astype(jnp.int16)


def _bits(x, dtype):
    return jax.lax.bitcast_convert_type(x, dtype)


def _float(bits):
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
