# SPDX-License-Identifier: Apache-2.0
"""jax.experimental.shard_alike, or for JAX 0.11.2 and later, which lack it, an operation made with jax.extend."""

import itertools

import jax

try:
    from jax.experimental.shard_alike import shard_alike as _both_alike

    def shard_alike(of, x):
        """Returns x, with the sharding of `of` after XLA has chosen it for both."""
        return _both_alike(of, x)[1]

except ImportError:
    from jax.extend.core import Primitive
    from jax.extend.mlir.dialects import sdy
    from jax.interpreters import ad, batching, mlir

    _alike = Primitive("dsopt_shard_alike")
    _groups = itertools.count()  # the number of a group must be unique in its program

    def shard_alike(of, x):
        """Returns x, with the sharding of `of` after XLA has chosen it for both."""
        return _alike.bind(of, x)

    def _lowered(_context, of, x):
        # Without Shardy JAX has no other operation for this, and XLA chooses the sharding of x.
        if getattr(jax.config, "jax_use_shardy_partitioner", True):
            group = next(_groups)
            sdy.ShardingGroupOp(of, group)
            sdy.ShardingGroupOp(x, group)
        return [x]

    _alike.def_impl(lambda of, x: x)
    _alike.def_abstract_eval(lambda of, x: x)
    mlir.register_lowering(_alike, _lowered)
    ad.defjvp(_alike, None, lambda tangent, of, x: tangent)
    # vmap adds a dimension to x that `of` may lack.
    batching.primitive_batchers[_alike] = lambda arrays, dims: (arrays[1], dims[1])
