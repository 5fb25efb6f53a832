# SPDX-License-Identifier: Apache-2.0
"""adamw, adam and lamb as optax.GradientTransformation: optax's arguments, formulas, dtypes, and its very state."""

from typing import Any, Callable, Union

import jax
import jax.numpy as jnp
import optax

from .. import _abi as abi
from . import _call

Scalar = Union[float, jax.Array]
ScalarOrSchedule = Union[Scalar, Callable]


def adam(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """optax.adam over the engine. `nesterov` and an `eps_root` other than 0 are refused."""
    return optax.chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        optax.scale_by_learning_rate(learning_rate),
    )


def adamw(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """optax.adamw over the engine. `nesterov` and an `eps_root` other than 0 are refused."""
    return optax.chain(
        scale_by_adam(b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def lamb(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    eps_root: Scalar = 0.0,
    weight_decay: ScalarOrSchedule = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """optax.lamb over the engine. An `eps_root` other than 0 is refused."""
    return optax.chain(
        scale_by_adam(b1, b2, eps, eps_root),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_trust_ratio(),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformation:
    """optax.scale_by_adam over the engine: moments and direction in one call, which writes the direction over the
    gradients. Decay, learning rate and trust ratio are left to XLA, which does them where the update is added.
    `nesterov` and an `eps_root` other than 0 are refused."""
    for name, refused in (("nesterov=True", nesterov), ("an eps_root other than 0", _call.fixed(eps_root))):
        if refused:
            raise _call.unsupported("dsopt.jax: %s is not in the engine; optax has it" % name)
    hyper = _call.Hyper(1.0, b1, b2, eps, 0.0, eps_root=eps_root)
    theirs = optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype)

    def update(updates, state, params=None):
        del params
        grads, treedef = jax.tree.flatten(updates, is_leaf=_is_none)
        names = _call.names_of(updates, is_leaf=_is_none)
        moments = zip(treedef.flatten_up_to(state.mu), treedef.flatten_up_to(state.nu))
        done = [(None, *each) for each in moments]
        leaves = {
            i: _Leaf(name, grad, *done[i][1:]) for i, (name, grad) in enumerate(zip(names, grads)) if grad is not None
        }
        ours = [i for i, leaf in leaves.items() if leaf.known]
        for i, result in zip(ours, _engine(hyper, [leaves[i] for i in ours], state.count) if ours else ()):
            done[i] = result
        for i in leaves.keys() - set(ours):
            leaf = leaves[i]
            new, moved = theirs.update(leaf.grad, optax.ScaleByAdamState(state.count, leaf.mu, leaf.nu))
            done[i] = new, moved.mu, moved.nu
        new, mu, nu = (treedef.unflatten([each[i] for each in done]) for i in range(3))
        return new, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    # State is made by optax and has its structure, so a checkpoint of one goes on with the other.
    return optax.GradientTransformation(theirs.init, update)


def _is_none(x):
    return x is None


class _Leaf:
    """One parameter of an update."""

    def __init__(self, name, grad, mu, nu):
        self.name, self.grad, self.mu, self.nu = name, jnp.asarray(grad), mu, nu
        if self.grad.shape != mu.shape:
            raise _call.argument_error(
                "the gradient of %s has shape %s, and the parameter has %s" % (name, self.grad.shape, mu.shape)
            )
        # The engine is fp32 inside. Other leaves (double, complex, integer) are left to optax, with the same state.
        self.known = all(x.dtype.name in _call.DTYPES for x in (self.grad, mu, nu))
        # As in optax: the dtype of a mean of old mu and new gradient
        self.dtype = jnp.promote_types(self.grad.dtype, mu.dtype)


def _engine(hyper, leaves, count):
    """(direction, mu, nu) of each leaf.

    The engine steps from zeros, whose change is the direction to the last bit, which the difference of two weights is
    not. They are 16-bit zeros, half as much to read, of which XLA makes one array for all parameters of a shape.

    The bias correction is optax's, in fp32, where 1 - b2**1 has an error of 1e-5: with c1 and c2 of the moments the
    direction is sqrt(c2) / c1 * m / (sqrt(v) + sqrt(c2) eps), of which the engine does all but the first factor."""
    step = optax.safe_increment(count)
    one = jnp.float32(1)
    root = jnp.sqrt(one / optax.tree.bias_correction(one, hyper.b2, step))
    factor = root * optax.tree.bias_correction(one, hyper.b1, step)
    hyper = hyper._replace(eps=hyper.eps * root)
    recipe = _call.Recipe(
        groups=(_call.group(abi.DSOPT_ALGORITHM_ADAM, abi.DSOPT_GROUP_NO_BIAS_CORRECTION, **hyper.known()),),
        params=tuple(_call.Param(leaf.name, leaf.mu.shape, "bfloat16", 0) for leaf in leaves),
        flags=abi.DSOPT_OPTIMIZER_NO_MASTER,
    )
    state, entries = [], recipe.layout.entries
    for entry in entries:
        if entry.name == "exp_avg":
            state.append(leaves[entry.param].mu.astype(jnp.float32))
        elif entry.name == "exp_avg_sq":
            state.append(leaves[entry.param].nu.astype(jnp.float32))
        else:
            state.append(jnp.full(entry.shape, count, entry.dtype))
    change, state, _ = _call.step(
        recipe,
        [jnp.zeros_like(leaf.grad, jnp.bfloat16) for leaf in leaves],
        [leaf.grad for leaf in leaves],
        state,
        hyper.values([True]),
        flags=abi.DSOPT_STEP_DELTA,
        options=_call.HYPER_IS_ERROR,
        out=[_call.like(leaf.grad, leaf.dtype) for leaf in leaves],
    )
    moments = {(entry.name, entry.param): x for entry, x in zip(entries, state)}
    return [
        (
            (direction * -factor).astype(leaf.dtype),
            moments["exp_avg", i].astype(leaf.mu.dtype),
            moments["exp_avg_sq", i].astype(leaf.nu.dtype),
        )
        for i, (leaf, direction) in enumerate(zip(leaves, change))
    ]
