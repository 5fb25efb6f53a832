# SPDX-License-Identifier: Apache-2.0
"""Eight CPU devices, a small model, and the engine through ctypes as the reference. Import it before jax."""

import ctypes
import os
import unittest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# pylint: disable=wrong-import-position
import jax
import jax.numpy as jnp
import numpy as np

from dsopt import _abi as abi

DTYPES = {
    "float32": abi.DSOPT_DTYPE_F32,
    "float16": abi.DSOPT_DTYPE_F16,
    "bfloat16": abi.DSOPT_DTYPE_BF16,
    "int32": abi.DSOPT_DTYPE_I32,
}

# They take minutes, mostly to compile programs for several devices.
sharded_tests = unittest.skipIf(
    os.environ.get("DSOPT_SHARDED_TESTS") == "0", "sharded arrays; ./dev bindings jax runs these tests"
)


def copy(tree):
    """Returns copies of the arrays, to be donated."""
    return jax.tree.map(jnp.copy, tree)


def bits(tree):
    """Returns the bytes of every leaf."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def differing(a, b):
    """Returns the paths of leaves with different bytes in two trees of the same structure."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(a)[0]]
    return [path for path, x, y in zip(paths, bits(a), bits(b), strict=True) if x != y]


def model(seed=0):
    """Returns a multilayer perceptron: parameters, and its loss on a batch."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "first": {"kernel": jax.random.normal(keys[0], (8, 32)) * 0.3, "bias": jnp.zeros(32)},
        "second": {"kernel": jax.random.normal(keys[1], (32, 1)) * 0.2, "bias": jnp.zeros(1)},
    }
    x = jax.random.normal(keys[2], (128, 8))
    y = x[:, :1] * x[:, 1:2] + jnp.sin(x[:, 2:3])

    def loss(p, x=x, y=y):
        h = jnp.tanh(x.astype(p["first"]["kernel"].dtype) @ p["first"]["kernel"] + p["first"]["bias"])
        return jnp.mean(((h @ p["second"]["kernel"] + p["second"]["bias"]).astype(jnp.float32) - y) ** 2)

    return params, loss


def tensors(arrays):
    """Returns a list of dsopt_tensor over NumPy arrays."""
    made = (abi.dsopt_tensor * len(arrays))()
    for place, array in zip(made, arrays):
        place.data, place.numel, place.dtype = array.ctypes.data, array.size, DTYPES[array.dtype.name]
    return made


class Engine:
    """dsopt_optimizer_step through ctypes: the reference that the handler must match bit for bit."""

    def __init__(self, params, algorithm, comm=None, flags=0, max_norm=0.0, group_flags=0, **fields):
        self.params = [np.array(p) for p in params]
        self.handles = []
        context = self.make(abi.lib.dsopt_context_create, None)
        desc = abi.dsopt_optimizer_desc(flags=flags, max_norm=max_norm)
        if comm is not None:
            desc.data = comm
        self.optimizer = self.make(abi.lib.dsopt_optimizer_create, context, ctypes.byref(desc))
        group = abi.dsopt_group()
        abi.check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group), algorithm))
        group.flags = group_flags
        for name, value in fields.items():
            setattr(group, name, value)
        list_ = (abi.dsopt_param * len(self.params))()
        for place, tensor in zip(list_, tensors(self.params)):
            place.tensor = tensor
        abi.check(abi.lib.dsopt_optimizer_add_group(self.optimizer, ctypes.byref(group), list_, len(self.params)))

    def make(self, function, *arguments):
        handle = ctypes.c_void_p()
        abi.check(function(*arguments, ctypes.byref(handle)))
        return handle

    def step(self, grads):
        grads = [np.array(g) for g in grads]
        list_ = tensors(grads)
        step = abi.dsopt_step(grads=ctypes.addressof(list_), count=len(grads))
        abi.check(abi.lib.dsopt_optimizer_step(self.optimizer, ctypes.byref(step)))
        return self.params


def local_comms(ranks, timeout_ms=60000):
    """Returns a function that creates the LOCAL comm of a rank; call it in one thread per rank."""
    size = ctypes.c_size_t(16)
    ident = ctypes.create_string_buffer(16)
    abi.check(abi.lib.dsopt_comm_unique_id(abi.DSOPT_COMM_KIND_LOCAL, ident, ctypes.byref(size)))

    def create(rank):
        context, comm = ctypes.c_void_p(), ctypes.c_void_p()
        abi.check(abi.lib.dsopt_context_create(None, ctypes.byref(context)))
        desc = abi.dsopt_comm_desc(
            kind=abi.DSOPT_COMM_KIND_LOCAL,
            rank=rank,
            ranks=ranks,
            timeout_ms=timeout_ms,
            id=ctypes.addressof(ident),
            id_bytes=16,
        )
        abi.check(abi.lib.dsopt_comm_create(context, ctypes.byref(desc), ctypes.byref(comm)))
        return comm

    return create
