# SPDX-License-Identifier: Apache-2.0
"""Calls whose arrays are sharded over the devices of a program: each device calls the engine for its shards.

XLA does not know what a custom call does, and would gather every operand. This module tells XLA which dimensions of
operands and results correspond, and returns the program of one device after XLA has chosen all shardings."""

import functools
import hashlib
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _call, _shards
from ._alike import shard_alike

# The mesh of a partitioned call has this axis only, over all devices of the program: arrays of one call may have
# shardings of different meshes.
AXIS = "dsopt"


def is_spread(arrays) -> bool:
    """True outside of a program, if an array is on several devices."""
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return False
    return any(isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in arrays)


def _manual_axes() -> tuple:
    """Returns the mesh axes of the shard_map around a call, and the other axes of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.manual_axes, tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)


def alike(of, x):
    """Returns x, in a program with the sharding of `of`, where XLA could choose another sharding."""
    can = isinstance(of, jax.core.Tracer) and jnp.ndim(x) and jnp.shape(of) == jnp.shape(x)
    if not can or _call.like(x).sharding is not None or _manual_axes()[0]:
        return x  # with explicit axes, whose types have the sharding, or in a shard_map
    return shard_alike(of, x)


def gradient(of, grad):
    """Returns a gradient that the program computes, with the sharding of `of`, its parameter or state. XLA considers
    custom calls last, after it has chosen the shardings of matrix products by their operands, and would reshard their
    results."""
    return alike(of, grad) if _call.temporary(grad) else grad


def partitioned(call):
    """Returns a _call.Init or _call.Step with rules for its shardings. In a program of one device and in a shard_map
    JAX uses the call itself."""
    if call.recipe.ranks > 1:
        return call  # its ranks are in a shard_map or pmap
    manual, automatic = _manual_axes()
    if manual and automatic and call.needs_whole_tensors:
        raise _call.unsupported(
            "dsopt.jax: clipping, overflow checks, loss scales, norms, LAMB, random rounding and moments with scales "
            "are not supported in a shard_map over some axes of a mesh only, here %s of %s: step outside of shard_map, "
            "or name all axes"
            % (", ".join(manual), ", ".join((*manual, *automatic)))
        )
    function = custom_partitioning(lambda *arrays: call(*arrays))  # pylint: disable=unnecessary-lambda
    function.def_partition(
        partition=functools.partial(_partition, call),
        infer_sharding_from_operands=functools.partial(_infer, call),  # without Shardy
        sharding_rule=functools.partial(_rule, call),
        decode_shardings=False,
    )
    return _named_by(call, function)


def _named_by(call, function):
    """Returns the function with a digest of the call in its name. JAX's persistent cache compares programs before
    partitioning, where nothing else identifies the call behind the address of a custom_partitioning."""

    def named(*arrays):
        return function(*arrays)

    named.__name__ = "dsopt_" + hashlib.sha256(repr(call).encode()).hexdigest()[:32]
    return jax.jit(named)


def _rule(call, _mesh, operands, results) -> SdyShardingRule:
    """Returns a factor for each dimension of a parameter, which its gradient and state share. Other arrays are
    replicated."""
    alone = []

    def mapping(owner, value):
        rank = len(value.shape)
        if owner is not None:
            return ArrayMapping(*("p%d_%d" % (owner, d) for d in range(rank)))
        names = ["other%d" % (len(alone) + d) for d in range(rank)]
        alone.extend(names)
        return ArrayMapping(*names)

    mappings = [tuple(map(mapping, owners, values)) for owners, values in zip(call.owners(), (operands, results))]
    return SdyShardingRule(*mappings, need_replication_factors=tuple(alone))


class Place(NamedTuple):
    """The sharding of a parameter, its gradient and its state."""

    sharding: object
    shape: tuple  # of a shard
    copies: int  # number of devices that have the same shard
    padded: bool = False  # XLA pads the last shard of a dimension that its axes do not divide


def _places(call, operands, results, devices) -> list:
    """Returns for each parameter the sharding with the smallest shards, among those of the parameter and its state; if
    several are as small, the parameter's. XLA reshards the other arrays. For an optax update, which has no parameters,
    gradients and results are used."""
    owners, owners_of_results = call.owners()
    places = []
    for leaf, param in enumerate(call.recipe.params):
        own = [x.sharding for x, owner in zip(operands, owners) if owner == leaf]
        if call.out is not None:
            own += [x.sharding for x, owner in zip(results, owners_of_results) if owner == leaf]
        elif call.gradient is not None:
            del own[call.gradient]
        found = [_place(param, sharding, devices) for sharding in own]
        places.append(min(found, key=lambda place: math.prod(place.shape)))
    return places


def _place(param, sharding, devices) -> Place:
    if sharding is None:
        return Place(_replicated(devices), param.shape, len(devices))
    hlo = sharding._to_xla_hlo_sharding(len(param.shape))  # pylint: disable=protected-access
    if hlo.is_replicated():
        return Place(sharding, param.shape, len(devices))
    if not hlo.is_tiled() or hlo.subgroup_types():
        raise _call.unsupported(
            "dsopt.jax: parameter %s has sharding %s, for which it would have to be gathered. Use a NamedSharding "
            "outside of shard_map, or a shard_map over all axes of the mesh" % (param.name, hlo)
        )
    parts = hlo.tile_assignment_dimensions()[: len(param.shape)]
    shape = tuple(-(-whole // part) for whole, part in zip(param.shape, parts))
    padded = any(whole % part for whole, part in zip(param.shape, parts))
    return Place(sharding, shape, len(devices) // math.prod(parts), padded)


def _replicated(devices) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), (AXIS,)), PartitionSpec())


def _devices(operands) -> tuple:
    """Returns the devices of the program, in its order."""
    for x in operands:
        if x.sharding is not None:
            return x.sharding._device_assignment  # pylint: disable=protected-access
    raise _call.unsupported("dsopt.jax: XLA has no sharding for any array of a step: use NamedSharding")


def _shardings(places, owners, devices) -> list:
    whole = _replicated(devices)
    return [whole if owner is None else places[owner].sharding for owner in owners]


def _infer(call, _mesh, operands, results) -> list:
    devices = _devices(operands)
    return _shardings(_places(call, operands, [], devices), call.owners()[1], devices)


def _partition(call, _mesh, operands, results):
    devices = _devices(operands)
    places = _places(call, operands, results, devices)
    of_operands, of_results = (_shardings(places, owners, devices) for owners in call.owners())
    return _replicated(devices).mesh, _shards.program(call, places, AXIS), of_results, tuple(of_operands)
