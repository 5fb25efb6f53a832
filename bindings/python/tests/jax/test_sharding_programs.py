# SPDX-License-Identifier: Apache-2.0
"""Sharded steps inside other transformations of JAX: loops, shard_map, donation, explicit axes, and JAX's caches."""

import os
import subprocess
import sys
import tempfile
import unittest

import support  # first, it sets up the devices
import jax
import jax.numpy as jnp
import numpy as np
import sharded
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import dsopt
import dsopt.jax
from dsopt.jax import FusedStep

MESH = "4 x 2"

CACHED = """
import sys, jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from dsopt.jax import FusedStep
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
p = jax.device_put(jnp.ones(8), NamedSharding(Mesh(jax.devices(), ("x",)), P("x")))
for rate in (0.5, 0.25):
    opt = FusedStep("lion", rate)
    print(jax.jit(opt.step)(p, p, opt.init(p))[0][0])
"""


@support.sharded_tests
class Programs(unittest.TestCase):
    def setUp(self):
        self.whole, self.grads = sharded.tree(0), sharded.tree(1)
        self.params = sharded.placed(self.whole, MESH)
        self.placed_grads = sharded.placed(self.grads, MESH)

    def check(self, opt, new, state, count):
        """Checks placements, and bits against the same number of unsharded steps."""
        wanted, kept = self.whole, opt.init(self.whole)
        for _ in range(count):
            wanted, kept, _ = jax.jit(opt.step)(wanted, self.grads, kept)
        self.assertEqual(sharded.misplaced(new, MESH) + sharded.misplaced(state["exp_avg"], MESH), [])
        self.assertEqual(support.bits((new, state)), support.bits((wanted, kept)))

    def test_scan_keeps_placements(self):
        opt = FusedStep("adamw", 0.01)

        def steps(p, g, s):
            return jax.lax.scan(lambda carry, _: (opt.step(carry[0], g, carry[1])[:2], None), (p, s), length=3)[0]

        new, state = jax.jit(steps)(self.params, self.placed_grads, opt.init(self.params))
        self.check(opt, new, state, 3)

    def test_out_shardings_are_respected(self):
        opt, wanted = FusedStep("adamw", 0.01), sharded.shardings(MESH)
        whole = NamedSharding(sharded.mesh_of(MESH), P())
        state = opt.init(self.params)
        places = {k: wanted if isinstance(v, dict) else whole for k, v in state.items()}
        step = jax.jit(opt.step, out_shardings=(wanted, places, None), donate_argnums=(0, 2))
        new, state, _ = step(support.copy(self.params), self.placed_grads, state)
        self.check(opt, new, state, 1)
        other = jax.tree.map(lambda _: whole, wanted)
        new, _, _ = jax.jit(opt.step, out_shardings=(other, places, None))(
            self.params, self.placed_grads, opt.init(self.params)
        )
        self.assertTrue(all(x.sharding.is_fully_replicated for x in new.values()))

    def test_steps_without_jit(self):
        opt = FusedStep("adamw", 0.01, max_norm=100.0)
        new, state, report = opt.step(self.params, self.placed_grads, opt.init(self.params))
        self.check(opt, new, state, 1)
        self.assertGreater(float(report.grad_norm), 1)

    def test_reuses_donated_memory(self):
        mesh = sharded.mesh_of("8")
        params = {"w": jax.device_put(jnp.ones((64, 8)), NamedSharding(mesh, P("x")))}
        for rule in ("adamw", "lamb"):
            opt = FusedStep(rule, 0.01)
            state = opt.init(params)
            program = jax.jit(opt.step, donate_argnums=(0, 2)).lower(params, params, state).compile()
            self.assertGreaterEqual(program.memory_analysis().alias_size_in_bytes, 3 * 4 * 64 * 8 // 8)
            if rule == "adamw":
                self.assertEqual(program.as_text().count(" copy("), 0)

    def test_shard_map_over_all_axes_is_unaffected(self):
        mesh, opt, tx = sharded.mesh_of("4"), FusedStep("adamw", 0.01), dsopt.jax.adamw(0.01)
        p = jax.device_put(jnp.linspace(0, 1, 16).reshape(8, 2), NamedSharding(mesh, P("x")))
        fused = lambda p: opt.step(p, p, opt.init(p))[0]
        update = lambda p: p + tx.update(p, tx.init(p), p)[0]
        for step in (fused, update):
            inside = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(p)
            np.testing.assert_array_equal(inside, jax.jit(step)(jnp.array(np.asarray(p))))

    def test_shard_map_over_some_axes_steps_or_is_refused(self):
        mesh = sharded.mesh_of("4 x 2")
        p = jax.device_put(jnp.linspace(0, 1, 32).reshape(8, 4), NamedSharding(mesh, P("x", "y")))

        def run(opt):
            step = lambda p: opt.step(p, p, opt.init(p))[0]
            some = jax.shard_map(
                step, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
            )
            return jax.jit(some)(p)

        opt = FusedStep("adamw", 0.01)
        new = run(opt)
        self.assertEqual(new.sharding.spec, P("x", "y"))
        q = jnp.array(np.asarray(p))
        np.testing.assert_array_equal(new, jax.jit(opt.step)(q, q, opt.init(q))[0])
        for opt in (FusedStep("adamw", 0.01, max_norm=1.0), FusedStep("lamb", 0.01)):
            with self.assertRaisesRegex(dsopt.UnsupportedError, "some axes of a mesh only, here x of x, y"):
                run(opt)

    def test_explicit_axes_keep_placements(self):
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
        specs = {"a": P("x", "y"), "b": P(("x", "y")), "c": P()}
        whole = {"a": jnp.linspace(0, 1, 32).reshape(8, 4), "b": jnp.ones(8), "c": jnp.ones(3)}
        p = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in whole.items()}
        for opt in (FusedStep("adamw", 0.01), FusedStep("lamb", 0.01, max_norm=1.0)):
            new, state, _ = jax.jit(opt.step)(p, p, jax.jit(opt.init)(p))
            for leaf, x in new.items():
                for y in (x, state["exp_avg"][leaf]):
                    self.assertTrue(y.sharding.is_equivalent_to(p[leaf].sharding, y.ndim), leaf)
            wanted, _, _ = jax.jit(opt.step)(whole, whole, opt.init(whole))
            for leaf, x in new.items():
                np.testing.assert_allclose(x, wanted[leaf], rtol=1e-6)

    def test_init_follows_explicit_axes(self):
        """In the context of the mesh the state has the sharding in its type."""
        mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
        p = jax.device_put(jnp.linspace(0, 1, 32, dtype=jnp.bfloat16).reshape(8, 4), NamedSharding(mesh, P("x", "y")))
        opt = FusedStep("adamw", 0.01)
        with jax.set_mesh(mesh):
            for init in (opt.init, jax.jit(opt.init)):
                state = init(p)
                new, moved, _ = jax.jit(opt.step)(p, p, state)
                for x in (new, *(s[name] for s in (state, moved) for name in ("exp_avg", "exp_avg_sq", "master"))):
                    self.assertTrue(x.sharding.is_equivalent_to(p.sharding, 2), x.sharding)

    def test_device_order_does_not_change_shards(self):
        mesh = Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("x", "y"))
        p = jax.device_put(jnp.linspace(0, 1, 64).reshape(8, 8), NamedSharding(mesh, P("y", "x")))
        q = jnp.array(np.asarray(p))
        for opt in (FusedStep("adamw", 0.01), FusedStep("adamw", 0.01, max_norm=0.5)):
            new, _, _ = jax.jit(opt.step)(p, p, opt.init(p))
            np.testing.assert_allclose(new, jax.jit(opt.step)(q, q, opt.init(q))[0], rtol=1e-6)
            self.assertTrue(new.sharding.is_equivalent_to(p.sharding, 2))

    def test_vmap_and_grad_are_refused(self):
        opt = FusedStep("adamw", 0.01)
        step = lambda p: opt.step(p, p, opt.init(p))[0]
        for transformed in (jax.vmap(step), jax.grad(lambda p: step(p).sum())):
            with self.assertRaisesRegex(dsopt.UnsupportedError, "a step cannot be"):
                jax.jit(transformed)(self.params["both"])

    def test_cache_distinguishes_optimizers(self):
        """Before partitioning, no instruction of a program identifies the call."""
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(2):
                done = subprocess.run(
                    [sys.executable, "-c", CACHED, cache], env=os.environ, text=True, check=True, stdout=subprocess.PIPE
                )
                self.assertEqual(done.stdout.split(), ["0.5", "0.75"])

    def test_many_steps_on_all_devices_do_not_deadlock(self):
        """Threads of several devices wait for each other in collectives, and share XLA's pool with the engine."""
        mesh = sharded.mesh_of("8")
        params = {k: jax.device_put(jnp.ones((64, 1024)), NamedSharding(mesh, P("x"))) for k in "abcd"}
        opt = FusedStep("lamb", 1e-3, max_norm=1.0)
        step, state = jax.jit(opt.step, donate_argnums=(0, 2)), opt.init(params)
        grads = jax.tree.map(lambda p: p * 0.5, params)
        for _ in range(50):
            params, state, report = jax.block_until_ready(step(params, grads, state))
        self.assertEqual((int(state["step"][0]), bool(report.skipped)), (50, False))


if __name__ == "__main__":
    unittest.main()
