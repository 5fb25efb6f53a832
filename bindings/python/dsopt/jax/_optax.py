# SPDX-License-Identifier: Apache-2.0
"""adamw, adam and lamb as optax.GradientTransformation: optax's arguments, formulas, dtypes, and its very state."""

from typing import Any, Callable, NamedTuple, Union

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import _abi as abi
from . import _call

Scalar = Union[float, jax.Array, Callable]
_LARGEST = float(np.finfo(np.float32).max)


class _Rule(NamedTuple):
    """What makes one of the transformations."""

    name: str
    optax: Callable
    algorithm: int
    flags: int = 0
    decays: bool = True
    trust: bool = False


_ADAM = _Rule("adam", optax.adam, abi.DSOPT_ALGORITHM_ADAM, decays=False)
_ADAMW = _Rule("adamw", optax.adamw, abi.DSOPT_ALGORITHM_ADAMW)
# optax takes |p| / |u| of the corrected direction, which does not depend on the correction except through eps and the
# decay.
_LAMB = _Rule("lamb", optax.lamb, abi.DSOPT_ALGORITHM_LAMB, abi.DSOPT_GROUP_NO_BIAS_CORRECTION, trust=True)


def adam(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """optax.adam, in one call of the engine. `nesterov` and an `eps_root` other than 0 are refused."""
    return _transformation(_ADAM, learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov=nesterov)


def adamw(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    mu_dtype: Any = None,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """optax.adamw, in one call of the engine. `nesterov` and an `eps_root` other than 0 are refused."""
    return _transformation(_ADAMW, learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay, mask, nesterov)


def lamb(
    learning_rate: Scalar,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-6,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """optax.lamb, in one call of the engine. An `eps_root` other than 0 is refused."""
    return _transformation(_LAMB, learning_rate, b1, b2, eps, eps_root, None, weight_decay, mask)


def _transformation(rule, learning_rate, b1, b2, eps, eps_root, mu_dtype, weight_decay=0.0, mask=None, nesterov=False):
    if nesterov:
        raise _call.unsupported("%s: nesterov=True is not in the engine; optax.%s has it" % (rule.name, rule.name))
    if _call.fixed(eps_root):
        raise _call.unsupported(
            "%s: an eps_root other than 0 is not in the engine; optax.%s has it" % (rule.name, rule.name)
        )
    mu_dtype = None if mu_dtype is None else jax.dtypes.canonicalize_dtype(mu_dtype)
    # State is made by optax and has its structure, so a checkpoint of one goes on with the other.
    init = rule.optax(
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        eps_root=eps_root,
        **({} if rule.trust else {"mu_dtype": mu_dtype}),
        **({"weight_decay": weight_decay, "mask": mask} if rule.decays else {}),
    ).init

    def update(updates, state, params=None, **extra_args):
        del extra_args
        if params is None and rule.decays:
            raise ValueError("dsopt.jax.%s: update() needs the parameters" % rule.name)
        adam_state, counts = state[0], state[1:]
        hyper = _call.Hyper(
            _at(learning_rate, counts[-1]),
            *(_at(value, adam_state) for value in (b1, b2, eps)),
            _at(weight_decay, counts[0]),
            eps_root=eps_root,
        )
        paths, treedef = jax.tree_util.tree_flatten_with_path(updates, is_leaf=_is_none)
        grads = [grad for _, grad in paths]
        names = _call.names_of(updates, is_leaf=_is_none)
        mu, nu = treedef.flatten_up_to(adam_state.mu), treedef.flatten_up_to(adam_state.nu)
        # Without parameters zeros do: the difference of new and old is then the update itself.
        old = [v if v is None else jnp.zeros_like(v) for v in nu] if params is None else treedef.flatten_up_to(params)
        groups = [0] * len(grads) if params is None else _call.decay_groups(mask, params, len(grads))
        leaves = [_Leaf(*each) for each in zip(names, grads, old, mu, nu, groups) if each[1] is not None]
        ours = [leaf for leaf in leaves if leaf.known]
        results = dict(zip((leaf.name for leaf in ours), _engine(rule, hyper, ours, adam_state.count))) if ours else {}
        results.update(
            (leaf.name, _by_optax(rule, hyper, leaf, adam_state.count, mu_dtype)) for leaf in leaves if not leaf.known
        )
        done = [results.get(name, (None, m, v)) for name, m, v in zip(names, mu, nu)]
        new, mu, nu = (treedef.unflatten([each[i] for each in done]) for i in range(3))
        # All that moves in the rest of the chain are the counts of schedules.
        return new, (
            optax.ScaleByAdamState(optax.safe_increment(adam_state.count), mu, nu),
            *jax.tree.map(optax.safe_increment, counts),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _is_none(x):
    return x is None


def _at(value, state):
    """A number or array, of a schedule that of its count."""
    return value(jax.tree.leaves(state)[0]) if callable(value) else value


class _Leaf:
    """One parameter of an update."""

    def __init__(self, name, grad, old, mu, nu, group):
        self.name, self.group, self.mu, self.nu = name, group, mu, nu
        self.grad, self.old = jnp.asarray(grad), jnp.asarray(old)
        if self.grad.shape != self.old.shape:
            raise _call.argument_error(
                "the gradient of %s has shape %s, and the parameter has %s" % (name, self.grad.shape, self.old.shape)
            )
        # The engine is fp32 inside. Other leaves (double, complex, integer) are left to optax, with the same state.
        self.known = all(x.dtype.name in _call.DTYPES for x in (self.grad, self.old, mu))
        # As in optax: the dtype of a mean of old mu and new gradient, and with decay of the parameter too
        self.dtype = jnp.promote_types(self.grad.dtype, mu.dtype)


def _engine(rule, hyper, leaves, count):
    """(update, mu, nu) of each leaf."""
    factor = None
    if rule.trust:
        hyper, factor = _without_correction(hyper, count)
    recipe, values = _recipe(rule, hyper, leaves)
    params = [leaf.old.astype(jnp.float32) for leaf in leaves]
    state, entries = [], recipe.layout.entries
    for entry in entries:
        if entry.name == "exp_avg":
            state.append(leaves[entry.param].mu.astype(jnp.float32))
        elif entry.name == "exp_avg_sq":
            state.append(leaves[entry.param].nu.astype(jnp.float32))
        else:  # step, and the ratios of LAMB, which are written only
            state.append(jnp.full(entry.shape, count if entry.name == "step" else 0, entry.dtype))
    delta, state, _ = _call.step(
        recipe,
        params,
        [leaf.grad for leaf in leaves],
        state,
        values,
        flags=abi.DSOPT_STEP_DELTA,
        options=_call.HYPER_IS_ERROR,
        out=[_call.like(p) for p in params],
    )
    if factor is not None:
        delta = [d * jnp.where(jnp.any(p != 0), 1.0, factor) for d, p in zip(delta, params)]
    moments = {(entry.name, entry.param): x for entry, x in zip(entries, state)}
    return [
        (
            d.astype(leaf.dtype),
            moments["exp_avg", i].astype(leaf.mu.dtype),
            moments["exp_avg_sq", i].astype(leaf.nu.dtype),
        )
        for i, (leaf, d) in enumerate(zip(leaves, delta))
    ]


def _recipe(rule, hyper, leaves):
    """What is known now goes into the recipe, and the rest into arrays."""
    used = sorted({leaf.group for leaf in leaves})
    known = hyper.known()
    if not rule.decays:
        known["weight_decay"] = 0.0
    if rule.trust:
        known.update(min_trust=0.0, max_trust=_LARGEST)
    groups = tuple(
        _call.group(rule.algorithm, rule.flags, **(known if group == 0 else {**known, "weight_decay": 0.0}))
        for group in used
    )
    params = tuple(_call.Param(leaf.name, leaf.old.shape, "float32", used.index(leaf.group)) for leaf in leaves)
    return _call.Recipe(groups=groups, params=params), hyper.values([group == 0 for group in used])


def _without_correction(hyper, count):
    """optax's LAMB by a rule without bias correction. With k = sqrt(c2) / c1 optax's direction is
    k (m / (sqrt(v) + eps sqrt(c2)) + (wd / k) p), and k leaves the ratio of norms, except where the parameter is zero
    and the ratio is 1: there the update must be multiplied with k, which is returned."""
    step = (count + 1).astype(jnp.float32)
    b1, b2 = jnp.asarray(hyper.b1, jnp.float32), jnp.asarray(hyper.b2, jnp.float32)
    root = jnp.sqrt(1 - b2**step)
    factor = root / (1 - b1**step)
    return hyper._replace(eps=hyper.eps * root, weight_decay=hyper.weight_decay / factor), factor


def _by_optax(rule, hyper, leaf, count, mu_dtype):
    """(update, mu, nu) of a leaf whose dtype the engine does not have."""
    state = optax.ScaleByAdamState(count, leaf.mu, leaf.nu)
    new, state = optax.scale_by_adam(hyper.b1, hyper.b2, hyper.eps, hyper.eps_root, mu_dtype).update(leaf.grad, state)
    if rule.decays and leaf.group == 0:
        new = new + hyper.weight_decay * leaf.old
    if rule.trust:
        new, _ = optax.scale_by_trust_ratio().update(new, optax.EmptyState(), leaf.old)
    return jnp.asarray(-hyper.lr, new.dtype) * new, state.mu, state.nu
