# SPDX-License-Identifier: Apache-2.0
"""The parameters of a call of FusedStep, and its state as a dict of trees with their structure."""

import jax
import jax.numpy as jnp

from . import _call


class Tree:
    """The parameters of a call, and the dict of state that has their structure."""

    def __init__(self, params):
        leaves, self.treedef = jax.tree.flatten(params)
        self.params = params
        self.leaves = [leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf) for leaf in leaves]
        self.names = _call.names_of(params)
        if not leaves:
            raise _call.argument_error("there are no parameters: pass a tree with at least one array")
        for name, leaf in zip(self.names, self.leaves):
            if leaf.dtype.name not in _call.DTYPES:
                raise _call.argument_error(
                    "parameter %s has dtype %s: it must be one of %s" % (name, leaf.dtype.name, ", ".join(_call.DTYPES))
                )

    def up_to(self, tree, what):
        try:
            return self.treedef.flatten_up_to(tree)
        except (ValueError, TypeError) as problem:
            raise _call.argument_error(
                "the %s must have the structure of the parameters: %s" % (what, problem)
            ) from None

    def check_gradients(self, grads):
        for name, leaf, grad in zip(self.names, self.leaves, grads):
            if grad.shape != leaf.shape:
                raise _call.argument_error(
                    "the gradient of %s has shape %s: it must be that of the parameter, %s"
                    % (name, grad.shape, leaf.shape)
                )
            if grad.dtype.name not in _call.DTYPES:
                raise _call.argument_error(
                    "the gradient of %s has dtype %s: it must be one of %s"
                    % (name, grad.dtype.name, ", ".join(_call.DTYPES))
                )

    def chosen(self, mask, default):
        return _call.chosen(mask, self.params, len(self.leaves), default)

    def blocks(self, blocks) -> list:
        """Returns rows and cols of each parameter."""
        given = self.up_to(blocks(self.params) if callable(blocks) else blocks, "blocks") if blocks is not None else ()
        pairs = [(0, 0) if pair is None else pair for pair in given] or [(0, 0)] * len(self.leaves)
        for name, pair in zip(self.names, pairs):
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(n, int) for n in pair)):
                raise _call.argument_error("blocks of %s is %r: it must be (rows, cols) or None" % (name, pair))
        return pairs

    def pack(self, recipe, values, expand=True) -> dict:
        """Returns the list of state as a dict."""
        state = {}
        for entry, value in zip(recipe.layout.entries, values):
            value = value[None] if expand and entry.rank_local else value
            if entry.param < 0:
                state[entry.name] = value
            else:
                state.setdefault(entry.name, [None] * len(self.leaves))[entry.param] = value
        return {
            name: self.treedef.unflatten(value) if isinstance(value, list) else value for name, value in state.items()
        }

    def unpack(self, recipe, state) -> list:
        """Returns the dict as a list in the engine's order. Refuses state that another optimizer made."""
        values, flat, names = [], {}, {entry.name for entry in recipe.layout.entries}
        for name in sorted(set(state) - names, key=str):
            raise _call.argument_error(
                "the state has %r, which this optimizer does not have: its state is %s"
                % (name, ", ".join(sorted(names)))
            )
        for entry in recipe.layout.entries:
            if entry.name not in state:
                raise _call.argument_error("the state has no %r: make one with init of this optimizer" % entry.name)
            if entry.name not in flat:
                whole = state[entry.name]
                flat[entry.name] = self.up_to(whole, "state %r" % entry.name) if entry.param >= 0 else whole
            value = flat[entry.name][entry.param] if entry.param >= 0 else flat[entry.name]
            shape = ((1,) if entry.rank_local else ()) + entry.shape
            owner = " of " + self.names[entry.param] if entry.param >= 0 else ""
            if value is None or jnp.shape(value) != shape or jnp.result_type(value) != entry.dtype:
                found = "is missing" if value is None else "has %s%s" % (jnp.result_type(value), jnp.shape(value))
                raise _call.argument_error(
                    "state %r%s %s, and must have %s%s" % (entry.name, owner, found, jnp.dtype(entry.dtype), shape)
                )
            values.append(jnp.reshape(value, entry.shape) if entry.rank_local else jnp.asarray(value))
        return values
