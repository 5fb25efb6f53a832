# SPDX-License-Identifier: Apache-2.0
"""Steps and initial values, of whole arrays and of sharded arrays."""

import functools
from typing import Optional, Sequence

import jax

from . import _call, _partition


def _only_call(function):
    """Raises dsopt's error for transformations that JAX would refuse with its own error."""

    def refuse(what):
        raise _call.unsupported("dsopt.jax: a step cannot be %s" % what)

    guarded = jax.custom_batching.custom_vmap(function)
    guarded.def_vmap(lambda *_: refuse("vectorised: vmap the loss, and step once with the gradients that come out"))
    differentiable = jax.custom_jvp(guarded)
    differentiable.defjvp(lambda *_: refuse("differentiated: take the gradients before it"))
    return differentiable


def _run(call, arrays) -> list:
    function = _compiled(call) if _partition.is_spread(arrays) else _function(call)
    return function(*arrays)


def _function(call):
    return _only_call(_partition.partitioned(call))


@functools.lru_cache(maxsize=256)
def _compiled(call):
    """Returns a program of the call alone: outside a program each device would receive whole arrays."""
    return jax.jit(_function(call))


def init(recipe: _call.Recipe, params: list, rank=None) -> list:
    """Returns the initial values of every state tensor, in list order."""
    call = _call.Init(recipe, rank is not None)
    return _run(call, ([] if rank is None else [rank]) + params)


def _owners(call, params, state) -> list:
    """Returns the arrays whose sharding the gradients have: the state of the parameter, else the parameter."""
    owners = list(params)
    for entry, x in zip(call.entries(), state):
        if entry.owner is not None and entry.shape == call.recipe.params[entry.param].shape:
            owners[entry.param] = x
    return owners


def step(
    recipe: _call.Recipe,
    params: Optional[list],
    grads: list,
    state: list,
    values: dict,
    *,
    flags: int = 0,
    options: int = 0,
    out: Optional[list] = None,
    over: Sequence[int] = (),
):
    """dsopt_optimizer_apply. `values`: arrays by the names of OPTIONS, None = not passed. Without `out` parameters are
    updated in place. With `out` results are new arrays of those dtypes; result i reuses the memory of gradient i for
    each i in `over`. params=None (with `out`, on the CPU): the parameters are zeros, and `state` has no "step", which
    counts as 1. Returns parameters or out, state, report."""
    names = tuple(name for name in _call.OPTIONS if values.get(name) is not None)  # in the order of the handler
    call = _call.Step(
        recipe, names, flags, options, None if out is None else tuple(out), tuple(over), zeros=params is None
    )
    operands = [_call.operand(name, values[name]) for name in names]
    if recipe.ranks == 1 and out is None:
        grads = list(map(_partition.gradient, _owners(call, params, state), grads))
    done = _run(call, [*operands, *(params or []), *grads, *state])
    if recipe.ranks == 1 and out is None:
        done[:-1] = map(_partition.alike, [*params, *state], done)
    n, m = len(grads), len(state)
    return list(done[:n]), list(done[n : n + m]), done[n + m]
