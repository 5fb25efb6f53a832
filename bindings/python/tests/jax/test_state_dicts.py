# SPDX-License-Identifier: Apache-2.0
"""Tests of incomplete, renamed and converted state."""

import unittest

from support import bits, copy  # must come before jax

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp

import dsopt
from dsopt.jax import DynamicScale, FusedStep

PARAMS = {"w": jnp.linspace(-1, 1, 1024).reshape(32, 32), "b": jnp.ones(7)}
HALF = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
OTHER = FusedStep("adamw", 1e-3)
# Every rule, with the options that add tensors to the state.
CASES = [
    ("adamw", PARAMS, {}),
    ("adam", HALF, {"loss_scale": DynamicScale()}),
    ("adamw", HALF, {"masters": "remainder", "exp_avg_format": "q8", "exp_avg_sq_format": "q8"}),
    ("adamw", PARAMS, {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random", "max_norm": 1.0}),
    ("lamb", HALF, {}),
    ("adam_legacy", PARAMS, {}),
    ("sgd", PARAMS, {"momentum": 0.9}),
    ("adagrad", PARAMS, {}),
    ("lion", PARAMS, {}),
    ("muon", PARAMS, {"other": OTHER}),
]


def converted(value):
    """Returns the array in another dtype."""
    floating = jnp.issubdtype(value.dtype, jnp.floating)
    return value.astype(jnp.int32 if floating and value.dtype.itemsize == 2 else jnp.float16)


class Changed(unittest.TestCase):
    """A state without one tensor, or with one of another name or dtype, is refused by name, and nothing is changed."""

    def each(self, opt, params, state):
        """Yields each change of the state, and a word of the error."""
        for name in state:
            rest = {key: value for key, value in state.items() if key != name}
            yield "without " + name, rest, repr(name)
            yield "renamed " + name, {**rest, "old_" + name: state[name]}, "old_" + name
            leaves, treedef = jax.tree.flatten(state[name])
            for i, leaf in enumerate(leaves):
                changed = treedef.unflatten([*leaves[:i], converted(leaf), *leaves[i + 1 :]])
                yield "converted %s %d" % (name, i), {**state, name: changed}, repr(name)
                if leaf.size > 1:
                    cut = treedef.unflatten([*leaves[:i], leaf.ravel()[1:], *leaves[i + 1 :]])
                    yield "cut %s %d" % (name, i), {**state, name: cut}, repr(name)

    def test_is_refused_by_name(self):
        for algorithm, params, options in CASES:
            opt = FusedStep(algorithm, 1e-3, **options)
            grads = jax.tree.map(jnp.ones_like, params)
            new, state, _ = opt.step(copy(params), grads, opt.init(params))
            before = bits((new, state))
            for what, changed, word in self.each(opt, new, state):
                with self.subTest(algorithm, **options, what=what):
                    with self.assertRaisesRegex(dsopt.Error, word):
                        opt.step(new, grads, changed)
                    self.assertEqual(bits((new, state)), before)

    def test_of_another_rule_is_refused(self):
        names = {name: FusedStep(name, 1e-3) for name in ("adamw", "lamb", "adagrad", "lion")}
        states = {name: opt.init(PARAMS) for name, opt in names.items()}
        for name, opt in names.items():
            for other, state in states.items():
                if sorted(state) != sorted(states[name]):
                    with self.subTest(name, other=other), self.assertRaisesRegex(dsopt.Error, "the state has"):
                        opt.step(PARAMS, PARAMS, state)

    def test_with_the_loss_scale_of_another_setting_is_refused(self):
        state = FusedStep("adamw", 1e-3, loss_scale=DynamicScale()).init(HALF)
        with self.assertRaisesRegex(dsopt.Error, "'loss_scale', which this optimizer does not have"):
            FusedStep("adamw", 1e-3).step(HALF, HALF, state)
