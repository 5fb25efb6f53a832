# SPDX-License-Identifier: Apache-2.0
"""Optimizers as optax.GradientTransformation: with optax's arguments, formulas, dtypes and state."""

from typing import Any, Callable, NamedTuple, Optional, Union

import jax
import jax.numpy as jnp
import optax

from .. import _abi as abi
from . import _call, _partition, _step

_LARGE = 1 << 23  # elements of a leaf: 32 MiB of fp32
_PART = 1 << 20  # elements of a call whose directions are new memory: 4 MiB of fp32, which fit in a last-level cache

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
    """optax.adam over the engine, with the arguments and the state of optax.

    learning_rate  step size: a number, an array, or a function of the number of steps (a schedule)
    b1             decay of the first moment
    b2             decay of the second moment
    eps            added to the root of the second moment
    eps_root       must be 0: use optax for another value
    mu_dtype       dtype of the first moment in the state; None = the parameter's
    nesterov       must be False: use optax for True
    """
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
    """optax.adamw over the engine, with the arguments and the state of optax.

    learning_rate  step size: a number, an array, or a function of the number of steps (a schedule)
    b1             decay of the first moment
    b2             decay of the second moment
    eps            added to the root of the second moment
    eps_root       must be 0: use optax for another value
    mu_dtype       dtype of the first moment in the state; None = the parameter's
    weight_decay   decoupled decay, times the learning rate: a number, an array, or a schedule
    mask           which parameters decay: a tree of bools, a prefix of one, or a function of the parameters; None = all
    nesterov       must be False: use optax for True
    """
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
    """optax.lamb over the engine, with the arguments and the state of optax.

    learning_rate  step size: a number, an array, or a function of the number of steps (a schedule)
    b1             decay of the first moment
    b2             decay of the second moment
    eps            added to the root of the second moment
    eps_root       must be 0: use optax for another value
    weight_decay   decoupled decay, times the learning rate: a number, an array, or a schedule
    mask           which parameters decay: a tree of bools, a prefix of one, or a function of the parameters; None = all
    """
    return optax.chain(
        scale_by_adam(b1, b2, eps, eps_root),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_trust_ratio(),
        optax.scale_by_learning_rate(learning_rate),
    )


def sgd(
    learning_rate: ScalarOrSchedule,
    momentum: Optional[Scalar] = None,
    nesterov: bool = False,
    accumulator_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """optax.sgd over the engine. Without momentum the engine is not used, and the transformation is optax's.

    learning_rate      step size: a number, an array, or a function of the number of steps (a schedule)
    momentum           decay of the trace; None = no trace
    nesterov           True = Nesterov's momentum
    accumulator_dtype  dtype of the trace in the state; None = the parameter's
    """
    return optax.chain(
        optax.identity() if momentum is None else trace(momentum, nesterov, accumulator_dtype),
        optax.scale_by_learning_rate(learning_rate),
    )


def adagrad(
    learning_rate: ScalarOrSchedule, initial_accumulator_value: Scalar = 0.1, eps: Scalar = 1e-7
) -> optax.GradientTransformationExtraArgs:
    """optax.adagrad over the engine, with the arguments and the state of optax.

    learning_rate              step size: a number, an array, or a function of the number of steps (a schedule)
    initial_accumulator_value  initial sum of squares
    eps                        added to the sum of squares, under the root
    """
    return optax.chain(
        scale_by_rss(initial_accumulator_value, eps),
        optax.scale_by_learning_rate(learning_rate),
    )


def lion(
    learning_rate: ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    mu_dtype: Any = None,
    weight_decay: ScalarOrSchedule = 1e-3,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """optax.lion over the engine, with the arguments and the state of optax.

    learning_rate  step size: a number, an array, or a function of the number of steps (a schedule)
    b1             weight of the moment in the direction
    b2             decay of the moment
    mu_dtype       dtype of the moment in the state; None = the parameter's
    weight_decay   decoupled decay, times the learning rate: a number, an array, or a schedule
    mask           which parameters decay: a tree of bools, a prefix of one, or a function of the parameters; None = all
    """
    return optax.chain(
        scale_by_lion(b1, b2, mu_dtype),
        optax.add_decayed_weights(weight_decay, mask),
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
    """optax.scale_by_adam over the engine: moments and direction in one call, which overwrites the gradients with the
    direction. XLA computes decay, learning rate and trust ratio where the update is added.

    b1        decay of the first moment
    b2        decay of the second moment
    eps       added to the root of the second moment
    eps_root  must be 0: use optax for another value
    mu_dtype  dtype of the first moment in the state; None = the parameter's
    nesterov  must be False: use optax for True
    """
    for name, refused in (("nesterov=True", nesterov), ("an eps_root other than 0", _call.fixed(eps_root))):
        if refused:
            raise _call.unsupported(
                "dsopt.jax does not support %s: use the function of the same name in optax, which has the same state"
                % name
            )
    hyper = _call.Hyper(1.0, b1, b2, eps, 0.0, eps_root=eps_root)

    def engine(leaves, state):
        """Uses optax's bias correction in fp32, where 1 - b2**1 has an error of 1e-5. With the corrections c1 and c2
        the direction is sqrt(c2) / c1 * m / (sqrt(v) + sqrt(c2) eps); its first factor is the engine's learning rate.
        If XLA computed that factor, it would add two products, this one and the decay's. Its CPU code contracts one of
        the two with the sum, and which one depends on the shape, so that shards would have other bits than whole
        arrays."""
        step, one = optax.safe_increment(state.count), jnp.float32(1)
        root = jnp.sqrt(one / optax.tree.bias_correction(one, hyper.b2, step))
        factor = root * optax.tree.bias_correction(one, hyper.b1, step)
        rule = _Rule(abi.DSOPT_ALGORITHM_ADAM, abi.DSOPT_GROUP_NO_BIAS_CORRECTION, ("exp_avg", "exp_avg_sq"))
        return _direction(rule, hyper._replace(lr=factor, eps=hyper.eps * root), leaves)

    return _over_engine(optax.scale_by_adam(b1, b2, eps, eps_root, mu_dtype), ("mu", "nu"), engine)


def trace(decay: Scalar, nesterov: bool = False, accumulator_dtype: Any = None) -> optax.GradientTransformation:
    """optax.trace over the engine.

    decay              decay of the trace; optax computes 0 and values that only the program knows
    nesterov           True = Nesterov's momentum
    accumulator_dtype  dtype of the trace in the state; None = the parameter's
    """
    theirs = optax.trace(decay, nesterov, accumulator_dtype)
    known = _call.fixed(decay)
    if not known:
        return theirs
    flags = abi.DSOPT_GROUP_NESTEROV if nesterov else 0
    rule = _Rule(abi.DSOPT_ALGORITHM_SGD, flags, ("momentum_buffer",), (("momentum", known),))
    hyper = _call.Hyper(1.0, 0.0, 0.0, 0.0, 0.0)
    return _over_engine(theirs, ("trace",), lambda leaves, state: _direction(rule, hyper, leaves))


def scale_by_rss(initial_accumulator_value: Scalar = 0.1, eps: Scalar = 1e-7) -> optax.GradientTransformation:
    """optax.scale_by_rss over the engine.

    initial_accumulator_value  initial sum of squares
    eps                        added to the sum of squares, under the root
    """
    rule = _Rule(abi.DSOPT_ALGORITHM_ADAGRAD, abi.DSOPT_GROUP_EPS_INSIDE_SQRT, ("sum",))
    hyper = _call.Hyper(1.0, 0.0, 0.0, eps, 0.0)
    theirs = optax.scale_by_rss(initial_accumulator_value, eps)
    return _over_engine(theirs, ("sum_of_squares",), lambda leaves, state: _direction(rule, hyper, leaves))


def scale_by_lion(
    b1: Scalar = 0.9, b2: Scalar = 0.99, mu_dtype: Any = None, *, mode: str = "hard", smooth_beta: float = 1.0
) -> optax.GradientTransformation:
    """optax.scale_by_lion over the engine.

    b1           weight of the moment in the direction
    b2           decay of the moment
    mu_dtype     dtype of the moment in the state; None = the parameter's
    mode         "hard" is the sign; optax computes other modes
    smooth_beta  for the modes that optax computes
    """
    if mode != "hard":
        return optax.scale_by_lion(b1, b2, mu_dtype, mode=mode, smooth_beta=smooth_beta)
    rule = _Rule(abi.DSOPT_ALGORITHM_LION, 0, ("exp_avg",))
    hyper = _call.Hyper(1.0, b1, b2, 0.0, 0.0)
    theirs = optax.scale_by_lion(b1, b2, mu_dtype)
    return _over_engine(theirs, ("mu",), lambda leaves, state: _direction(rule, hyper, leaves))


class _Rule(NamedTuple):
    """Algorithm of a direction: `moments` are the engine's names of the state, `fields` further fields of
    dsopt_group."""

    algorithm: int
    flags: int
    moments: tuple
    fields: tuple = ()


def _over_engine(theirs, moments, engine):
    """Returns optax's transformation `theirs`, computed by the engine. `moments` are the trees of its state;
    engine(leaves, state) returns direction and moments of each leaf. optax makes the state, so checkpoints of either
    continue with the other."""

    def init(params):
        state = theirs.init(params)  # in a program these are constants without a sharding
        for moment in _SQUARES.intersection(moments):
            _check_range(moment, params, jax.tree.leaves(getattr(state, moment), is_leaf=_is_none))
        placed = {name: jax.tree.map(_partition.alike, params, getattr(state, name)) for name in moments}
        return state._replace(**placed)

    def update(updates, state, params=None):
        del params
        spread = _partition.is_spread(jax.tree.leaves((updates, state)))
        return in_program(updates, state) if spread else plain_update(updates, state)

    def plain_update(updates, state):
        grads, treedef = jax.tree.flatten(updates, is_leaf=_is_none)
        names = _call.names_of(updates, is_leaf=_is_none)
        old = zip(*(treedef.flatten_up_to(getattr(state, name)) for name in moments))
        for moment in _SQUARES.intersection(moments):
            _check_range(moment, updates, treedef.flatten_up_to(getattr(state, moment)))
        done = [(None, *each) for each in old]
        leaves = {
            i: _Leaf(name, grad, done[i][1:]) for i, (name, grad) in enumerate(zip(names, grads)) if grad is not None
        }

        def by_optax(leaf):
            new, moved = theirs.update(leaf.grad, state._replace(**dict(zip(moments, leaf.moments))))
            return (new, *(getattr(moved, name) for name in moments))

        def by_platform(leaf):
            return jax.lax.platform_dependent(
                cpu=lambda: by_optax(leaf), default=lambda: tuple(engine([leaf], state)[0])
            )

        ours = [i for i, leaf in leaves.items() if leaf.known and not leaf.is_large]
        for i, (direction, *moved) in zip(ours, engine([leaves[i] for i in ours], state) if ours else ()):
            done[i] = (direction, *map(_partition.alike, leaves[i].moments, moved))
        for i in leaves.keys() - set(ours):
            done[i] = by_platform(leaves[i]) if leaves[i].known else by_optax(leaves[i])
        new, *trees = (treedef.unflatten([each[i] for each in done]) for i in range(1 + len(moments)))
        changed = dict(zip(moments, trees))
        if "count" in state._fields:
            changed["count"] = optax.safe_increment(state.count)
        return new, state._replace(**changed)

    in_program = jax.jit(plain_update)  # for sharded arrays, which stay sharded only in a program
    return optax.GradientTransformation(init, update)


_SQUARES = frozenset(("nu", "sum_of_squares"))


def _check_range(moment, params, leaves):
    """Refuses squares in float16: a gradient of 1e-4 would have none, and a step without bound."""
    for i, leaf in enumerate(leaves):
        if getattr(leaf, "dtype", None) == jnp.float16:
            raise _call.unsupported(
                "%s of %s is float16, which has no squares of gradients below 2e-4: use bfloat16 or float32 "
                "parameters, or FusedStep, whose moments are float32"
                % (moment, _call.names_of(params, is_leaf=_is_none)[i])
            )


def _is_none(x):
    return x is None


class _Leaf:
    """One parameter of an update."""

    def __init__(self, name, grad, moments):
        self.name, self.grad, self.moments = name, jnp.asarray(grad), moments
        shape = moments[0].shape
        if self.grad.shape != shape:
            raise _call.argument_error(
                "the gradient of %s has shape %s: it must be that of the parameter, %s" % (name, self.grad.shape, shape)
            )
        # The engine computes in fp32. optax computes other leaves (double, complex, integer), with the same state.
        self.known = all(x.dtype.name in _call.DTYPES for x in (self.grad, *moments))
        # As in optax: the dtype of a sum of old moment and new gradient
        self.dtype = jnp.promote_types(self.grad.dtype, moments[0].dtype)
        # True if the memory of a dead gradient can be reused: new memory costs more than the arithmetic. Determined
        # here, because in a branch of platform_dependent every array looks like a temporary of the program.
        self.gives_memory = self.dtype == self.grad.dtype and _call.temporary(self.grad)
        self.grad = _partition.gradient(moments[0], self.grad)
        # A direction larger than the caches is written to new memory in every run, and read again. XLA needs no such
        # array: it computes the update where it is added. So optax computes such a leaf on the CPU.
        self.is_large = not self.gives_memory and self.grad.size > _LARGE


def _direction(rule, hyper, leaves):
    """Returns direction and moments of each leaf."""
    values = _call.values_of([(hyper, True)])
    over = [leaf.gives_memory for leaf in leaves]
    parts = [slice(len(leaves))] if all(over) else list(_parts([leaf.grad.size for leaf in leaves]))
    grads = [leaf.grad for leaf in leaves]
    moments = [leaf.moments for leaf in leaves]

    def on_cpu(values, grads, moments):
        """Computes the parts sequentially: XLA adds the updates of a part while its directions are in the cache, and a
        later part reuses their memory. One call would write all directions to new memory in every run."""
        done, after = [], None
        for part in parts:
            ordered = {**values, "after": after}
            some, after = _one_call(
                rule, hyper, ordered, leaves[part], grads[part], moments[part], over[part], zeros=False
            )
            done += some
        return done

    def on_device(values, grads, moments):
        return _one_call(rule, hyper, values, leaves, grads, moments, over, zeros=True)[0]

    done = jax.lax.platform_dependent(values, grads, moments, cpu=on_cpu, default=on_device)
    return [
        (-direction.astype(leaf.dtype), *(x.astype(old.dtype) for x, old in zip(new, leaf.moments)))
        for leaf, (direction, *new) in zip(leaves, done)
    ]


def _parts(sizes):
    """Yields slices of consecutive leaves with at most _PART elements in total, or of one larger leaf."""
    begin, total = 0, 0
    for end, size in enumerate(sizes):
        if end > begin and total + size > _PART:
            yield slice(begin, end)
            begin, total = end, 0
        total += size
    yield slice(begin, len(sizes))


def _one_call(rule, hyper, values, leaves, grads, moments, over, *, zeros):
    """Returns direction and moments of each leaf, and an array that a later call can wait for.

    The engine steps parameters that are zero, whose change is exactly the direction; the difference of two weights is
    rounded. The zeros are 16-bit, which halves the reads. With `zeros` they and the count of steps are operands,
    without `zeros` the handler provides both. The count is 1: after the first step no rule here depends on it.

    The engine reads and writes a bfloat16 moment of the gradient itself: like optax, it rounds the moment after the
    direction is computed. XLA converts all other moments to fp32 and back."""
    halves = [rule.moments[0] in ("exp_avg", "momentum_buffer") and old[0].dtype == jnp.bfloat16 for old in moments]
    fields = {**dict(rule.fields), **({"exp_avg_format": abi.DSOPT_MOMENT_BF16} if any(halves) else {})}
    recipe = _call.Recipe(
        groups=(_call.group(rule.algorithm, rule.flags, **hyper.known(), **fields),),
        params=tuple(
            _call.Param(leaf.name, leaf.grad.shape, "bfloat16", 0, f32_moments=any(halves) and not half)
            for leaf, half in zip(leaves, halves)
        ),
        flags=abi.DSOPT_OPTIMIZER_NO_MASTER,
    )
    entries = [entry for entry in recipe.layout.entries if zeros or entry.name != "step"]
    state = [
        jnp.ones(entry.shape, entry.dtype)
        if entry.name == "step"
        else moments[entry.param][rule.moments.index(entry.name)].astype(entry.dtype)
        for entry in entries
    ]
    change, state, report = _step.step(
        recipe,
        [jnp.zeros(param.shape, param.dtype) for param in recipe.params] if zeros else None,
        grads,
        state,
        values,
        flags=abi.DSOPT_STEP_DELTA,
        options=_call.HYPER_IS_ERROR,
        out=[leaf.dtype for leaf in leaves],
        over=[i for i, dead in enumerate(over) if dead],
    )
    new = {(entry.name, entry.param): x for entry, x in zip(entries, state)}
    return [(change[i], *(new[name, i] for name in rule.moments)) for i in range(len(leaves))], report
