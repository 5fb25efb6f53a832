# SPDX-License-Identifier: Apache-2.0
"""Parameters with shards on the devices of meshes, and properties of programs over them."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

SHAPES = {
    "rows": (8, 6),
    "columns": (5, 8),
    "tuple": (16,),
    "both": (8, 4),
    "uneven": (7, 3),  # no axis divides it: replicated
    "one": (1,),
    "scalar": (),
    "empty": (0, 4),
}

# Name of a mesh: its shape, its axes, and the specs of the leaves that are not replicated
MESHES = {
    "4": ((4,), ("x",), {"rows": P("x"), "columns": P(None, "x"), "tuple": P("x"), "both": P("x", None)}),
    "8": ((8,), ("x",), {"rows": P("x"), "columns": P(None, "x"), "tuple": P("x"), "empty": P(None, None)}),
    "2 x 2": (
        (2, 2),
        ("x", "y"),
        {"rows": P("x"), "columns": P(None, "y"), "tuple": P(("x", "y")), "both": P("y", "x")},
    ),
    "4 x 2": (
        (4, 2),
        ("x", "y"),
        {"rows": P("x"), "columns": P(None, ("y", "x")), "tuple": P(("x", "y")), "both": P("x", "y")},
    ),
}


def mesh_of(name):
    shape, axes, _ = MESHES[name]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), axes)


def shardings(name):
    mesh, specs = mesh_of(name), MESHES[name][2]
    return {leaf: NamedSharding(mesh, specs.get(leaf, P())) for leaf in SHAPES}


def tree(seed, dtype=np.float32, scale=1.0):
    """Returns unsharded arrays on the first device."""
    random = np.random.default_rng(seed)
    return {
        leaf: jnp.asarray(scale * random.standard_normal(shape).astype(np.float32), dtype)
        for leaf, shape in SHAPES.items()
    }


def placed(values, name):
    """Returns copies with the shardings of a mesh."""
    return jax.device_put(values, shardings(name))


def replicated(values, name):
    """Returns copies on all devices of a mesh."""
    return jax.device_put(values, NamedSharding(mesh_of(name), P()))


def bytes_per_device(values):
    """Returns the bytes of the device that has the most."""
    sizes = collections.Counter()
    for leaf in jax.tree.leaves(values):
        for shard in leaf.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    return max(sizes.values())


def collectives(function, *arguments):
    """Returns the collectives of a compiled program: {kind: [elements of each]}."""
    text = (function if hasattr(function, "lower") else jax.jit(function)).lower(*arguments).compile().as_text()
    found = collections.defaultdict(list)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for result, kind in re.findall(r"= (\(.*?\)|\S+) (%s)(?:-start)?\(" % kinds, text):
        sizes = [np.prod([int(n) for n in dims.split(",") if n]) for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
        found[kind].append(int(sum(sizes)))
    return {kind: sorted(sizes) for kind, sizes in found.items()}


def misplaced(values, name):
    """Returns the names of the leaves whose sharding differs from that of the mesh's parameters."""
    wanted = shardings(name)
    return [
        leaf for leaf, x in values.items() if not x.sharding.is_equivalent_to(wanted[leaf], np.ndim(x))
    ]
