#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares steps of dsopt.jax, with the handler of a wheel, to optax. usage: step_jax.py FOLDER, from which the package
dsopt must come."""
import os
import sys

import jax
import jax.numpy as jnp
import optax

import dsopt.jax


def train(rule):
    params = {"w": jnp.linspace(-1.0, 1.0, 1000), "b": jnp.float32(0.5)}
    state = rule.init(params)

    @jax.jit
    def step(params, state):
        updates, state = rule.update(jax.tree.map(lambda x: x * 0.5 + 0.1, params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(10):
        params, state = step(params, state)
    return params


def main():
    handler = dsopt.jax.handler_path()
    folder = os.path.join(os.path.realpath(sys.argv[1]), "dsopt", "jax", "")
    assert os.path.realpath(handler).startswith(folder), handler
    mine, others = train(dsopt.jax.adamw(0.01)), train(optax.adamw(0.01))
    for name, value in others.items():
        assert jnp.allclose(mine[name], value, rtol=1e-5, atol=1e-6), (name, mine[name], value)
    print("wheel: jaxlib %s takes %s" % (jax.lib.__version__, os.path.basename(handler)))


if __name__ == "__main__":
    main()
