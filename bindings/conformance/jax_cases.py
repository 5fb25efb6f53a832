# SPDX-License-Identifier: Apache-2.0
"""Runs the conformance cases with dsopt.jax. Ranks are two devices of this process."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# pylint: disable=wrong-import-position
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from dsopt.jax import DynamicScale, FusedStep, onebit_adam


class Generator:
    """Generates values in [-0.5, 0.5), identical in every language."""

    def __init__(self, seed):
        self.x = seed

    def array(self, n):
        values = np.empty(n, np.float32)
        for i in range(n):
            self.x = (self.x * 1664525 + 1013904223) % 2**32
            values[i] = (self.x >> 8) * 2.0**-24 - 0.5
        return values

    def tree(self, sizes):
        return {name: jnp.asarray(self.array(n)) for name, n in sizes.items()}


class Named(dict):
    """A tree whose leaves have the names of the keys: those of a dict are "['a']", and random rounding depends on the
    name."""


jax.tree_util.register_pytree_with_keys(
    Named, lambda tree: (list(tree.items()), tuple(tree)), lambda names, leaves: Named(zip(names, leaves))
)


def fnv(arrays):
    digest = 0xCBF29CE484222325
    for byte in b"".join(np.asarray(array).tobytes() for array in arrays):
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


def adamw():
    """Returns everything that is hashed, in order."""
    sizes = {"a": 1, "b": 7, "c": 4099}
    opt = FusedStep("adamw", 0.015625, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.125, max_norm=1.0)
    step = jax.jit(opt.step, donate_argnums=(0, 2))
    params, gradients = Generator(12345).tree(sizes), Generator(1000)
    state = opt.init(params)
    for _ in range(10):
        params, state, _ = step(params, gradients.tree(sizes), state)
    return jax.tree.leaves([params, state["exp_avg"], state["exp_avg_sq"]])


def onebit():
    """Returns u and v, which must be the same bits on both ranks."""
    sizes = {"u": 5, "v": 130}
    mesh = Mesh(np.array(jax.devices()[:2]), ("dp",))
    opt = onebit_adam(0.015625, axis_name="dp", b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, freeze_step=3)
    params, gradients = Generator(54321).tree(sizes), [Generator(2000 + rank) for rank in range(2)]
    specs = opt.specs(params, ranks=2)
    state = jax.jit(jax.shard_map(opt.init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False))(params)

    def one(params, grads, state):
        return opt.step(params, jax.tree.map(lambda g: g[0], grads), state)[:2]

    step = jax.jit(
        jax.shard_map(one, mesh=mesh, in_specs=(P(), P("dp"), specs), out_specs=(P(), specs), check_vma=False)
    )
    for _ in range(6):
        grads = jax.tree.map(lambda *g: jnp.stack(g), *[generator.tree(sizes) for generator in gradients])
        params, state = step(params, grads, state)
    shards = [[np.asarray(leaf.addressable_shards[rank].data) for leaf in jax.tree.leaves(params)] for rank in range(2)]
    if [a.tobytes() for a in shards[0]] != [a.tobytes() for a in shards[1]]:
        raise SystemExit("jax: the ranks have different parameters")
    return shards[0]


def low_precision():
    """Returns everything that is hashed, in order. The groups are two steps, with one set of formats each."""
    sizes = {"a": 1, "b": 7, "c": 4099}
    every, gradients = Generator(12345).tree(sizes), Generator(1000)
    done = []
    for names, exp_avg, exp_avg_sq in (("ab", "e4m3", "bf16_random"), ("c", "q8", "q8")):
        opt = FusedStep(
            "adamw",
            0.015625,
            b1=0.9,
            b2=0.999,
            eps=1e-8,
            weight_decay=0.125,
            masters="remainder",
            seed=7,
            exp_avg_format=exp_avg,
            exp_avg_sq_format=exp_avg_sq,
        )
        params = Named((name, every[name].astype(jnp.bfloat16)) for name in names)
        done.append((opt, jax.jit(opt.step, donate_argnums=(0, 2)), params, opt.init(params)))
    for _ in range(10):
        grads = gradients.tree(sizes)
        for i, (opt, step, params, state) in enumerate(done):
            params, state, _ = step(params, Named((name, grads[name]) for name in params), state)
            done[i] = opt, step, params, state
    (_, _, ab, first), (_, _, c, second) = done
    pairs = [(ab, c)]
    pairs += [(first[name], second[name]) for name in ("remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq")]
    return [*jax.tree.leaves(pairs), second["exp_avg_sq_scale"]["c"]]


def resharded():
    """Returns everything that is hashed, in order. Half of each array is on a device, and then all on one: checkpoints
    of JAX are arrays of the program."""
    sizes = {"a": 6, "b": 9000, "c": 130}
    over_two = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("dp",)), P("dp"))
    opt = FusedStep("adamw", 0.015625, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.125)
    params, gradients = jax.device_put(Generator(54321).tree(sizes), over_two), Generator(4000)
    step, state = jax.jit(opt.step), jax.jit(opt.init)(params)
    for _ in range(3):
        params, state, _ = jax.block_until_ready(step(params, jax.device_put(gradients.tree(sizes), over_two), state))
    leaves = jax.tree.leaves([params, state["exp_avg"]])
    if any(2 * leaf.addressable_shards[0].data.size != leaf.size for leaf in leaves):
        raise SystemExit("jax: a device has more than its half")
    params, state = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), (params, state))
    for _ in range(3):
        params, state, _ = step(params, gradients.tree(sizes), state)
    return jax.tree.leaves([params, state["exp_avg"], state["exp_avg_sq"]])


def muon():
    """Returns everything that is hashed, in order."""
    shapes = {"qkv": (48, 16), "w": (20, 17), "bias": (130,)}

    def tree(generator):
        flat = ((name, generator.array(int(np.prod(shape)))) for name, shape in shapes.items())
        return Named((name, jnp.asarray(values.reshape(shapes[name]))) for name, values in flat)

    other = FusedStep("adamw", 0.0078125, b1=0.9, b2=0.999, eps=0.0, weight_decay=0.25)
    opt = FusedStep(
        "muon",
        0.015625,
        momentum=0.9375,
        weight_decay=0.125,
        rows_are_inputs=False,
        blocks=Named(qkv=(16, 16), w=None, bias=None),
        other=other,
    )
    params, gradients = tree(Generator(777)), Generator(888)
    step, state = jax.jit(opt.step, donate_argnums=(0, 2)), opt.init(params)
    for _ in range(5):
        params, state, _ = step(params, tree(gradients), state)
    return jax.tree.leaves([params, state["momentum_buffer"], state["exp_avg"], state["exp_avg_sq"]])


def accumulation():
    """Returns everything that is hashed, in order. The program adds up gradients."""
    sizes = {"a": 1, "b": 7, "c": 4099}
    scale = DynamicScale(init=1024.0, window=2)
    opt = FusedStep(
        "adamw", 0.015625, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.125, max_norm=1.0, loss_scale=scale
    )
    params = jax.tree.map(lambda x: (jnp.floor(x * 1024) / 1024).astype(jnp.float16), Generator(12345).tree(sizes))
    step, state, gradients = jax.jit(opt.step, donate_argnums=(0, 2)), opt.init(params), Generator(5000)
    for number in range(8):
        sums = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
        factor = np.float32(opt.loss_scale(state))
        for micro in range(3):
            for total in sums.values():
                total += gradients.array(total.size) * factor
            if (number, micro) == (3, 1):
                sums["c"][0] = np.inf
        params, state, _ = step(params, sums, state)
    return jax.tree.leaves([params, state["master"], state["exp_avg"], state["exp_avg_sq"], state["loss_scale"]])


for case in (adamw, onebit, low_precision, resharded, muon, accumulation):
    print("jax %s %016x" % (case.__name__, fnv(case())))
