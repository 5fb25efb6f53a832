# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters under plain jit: placements, values, collectives and memory, of optax updates."""

import unittest

import support  # first, it sets up the devices
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sharded
from jax.sharding import NamedSharding, PartitionSpec as P

import dsopt.jax
from dsopt.jax import FusedStep

OPTAX = {
    "adam": (0.01,),
    "adamw": (0.01,),
    "lamb": (0.01,),
    "lion": (0.001,),
    "adagrad": (0.01,),
    "sgd": (0.01, 0.9),
}


def updating(tx):
    """Returns a step with a transformation; gradients are computed in the program. Their products are exact, because
    XLA fuses them with the sums in some of the programs only."""

    def step(params, grads, state):
        updates, state = tx.update(jax.tree.map(lambda g, p: g + 0.125 * p, grads, params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def steps(step, params, grads, state, count=3):
    step = jax.jit(step)
    for _ in range(count):
        params, state = jax.block_until_ready(step(params, grads, state)[:2])
    return params, state


def trees_of(state):
    """Returns the trees of a state that have the structure of the parameters."""
    is_tree = lambda x: isinstance(x, dict) and set(x) == set(sharded.SHAPES)
    return [x for x in jax.tree.leaves(state, is_leaf=is_tree) if is_tree(x)]


@support.sharded_tests
class Updates(unittest.TestCase):
    def test_keeps_placements_and_bits(self):
        params, grads = sharded.tree(0), sharded.tree(1)
        for rule, arguments in OPTAX.items():
            ours, theirs = getattr(dsopt.jax, rule)(*arguments), getattr(optax, rule)(*arguments)
            whole, _ = steps(updating(ours), params, grads, ours.init(params))
            for mesh in sharded.MESHES if rule == "adamw" else ("4 x 2",):
                with self.subTest(rule, mesh=mesh):
                    p, g = sharded.placed(params, mesh), sharded.placed(grads, mesh)
                    new, state = steps(updating(ours), p, g, ours.init(p))
                    self.assertEqual([leaf for t in [new, *trees_of(state)] for leaf in sharded.misplaced(t, mesh)], [])
                    optax_new, _ = steps(updating(theirs), p, g, theirs.init(p))
                    for name, x in new.items():
                        np.testing.assert_allclose(x, optax_new[name], rtol=2e-5, atol=2e-6, err_msg=name)
                        if rule != "lamb":
                            np.testing.assert_array_equal(x, whole[name], err_msg=name)
                        else:
                            np.testing.assert_allclose(x, whole[name], rtol=1e-6, atol=1e-7, err_msg=name)

    def test_keeps_bits_if_shards_compile_differently(self):
        """XLA vectorises and fuses a sum of two products depending on the shape. With these shapes it did so for shards
        only."""
        random = np.random.default_rng(0)
        tx = dsopt.jax.adamw(0.01, weight_decay=0.1)
        for mesh, shape, spec in (("4", (16, 8), P("x")), ("2 x 2", (3, 3, 8, 16), P(None, None, "y", "x"))):
            p, g = (jnp.asarray(random.standard_normal(shape), jnp.float32) for _ in range(2))
            whole = steps(updating(tx), p, g, tx.init(p), 5)
            p, g = jax.device_put((p, g), NamedSharding(sharded.mesh_of(mesh), spec))
            self.assertEqual(support.bits(steps(updating(tx), p, g, tx.init(p), 5)), support.bits(whole), mesh)

    def test_adds_no_collectives_to_those_of_optax(self):
        for mesh in ("8", "4 x 2"):
            p, g = sharded.placed(sharded.tree(0), mesh), sharded.placed(sharded.tree(1), mesh)
            for rule, arguments in OPTAX.items() if mesh == "4 x 2" else [("adamw", (0.01,))]:
                with self.subTest(rule, mesh=mesh):
                    found = []
                    for module in (dsopt.jax, optax):
                        tx = getattr(module, rule)(*arguments)
                        found.append(sharded.collectives(updating(tx), p, g, tx.init(p)))
                    self.assertEqual(*found)

    def test_init_follows_the_parameters(self):
        for mesh in ("4", "4 x 2"):
            params = sharded.placed(sharded.tree(0), mesh)
            for rule, arguments in OPTAX.items():
                tx = getattr(dsopt.jax, rule)(*arguments)
                for init in (tx.init, jax.jit(tx.init)):
                    with self.subTest(rule, mesh=mesh, init=init):
                        state = init(params)
                        for moments in trees_of(state):
                            self.assertEqual(sharded.misplaced(moments, mesh), [])
                        wanted = getattr(optax, rule)(*arguments).init(params)
                        for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
                            np.testing.assert_array_equal(ours, theirs)

    def test_keeps_placements_outside_of_a_program(self):
        mesh = "4 x 2"
        params, grads = sharded.tree(0), sharded.tree(1)
        p, g = sharded.placed(params, mesh), sharded.placed(grads, mesh)
        tx = dsopt.jax.adamw(0.01)
        updates, state = tx.update(g, tx.init(p), p)
        self.assertEqual([sharded.misplaced(x, mesh) for x in [updates, *trees_of(state)]], [[], [], []])
        whole, _ = tx.update(grads, tx.init(params), params)
        self.assertEqual(support.bits(updates), support.bits(whole))

    def test_chains_masks_and_labels_keep_placements(self):
        mesh = "2 x 2"
        labels = {leaf: "a" if leaf < "one" else "b" for leaf in sharded.SHAPES}
        mask = {leaf: leaf != "tuple" for leaf in sharded.SHAPES}
        chosen = {
            "chain": lambda m: optax.chain(optax.clip_by_global_norm(0.5), m.adamw(0.01)),
            "mask": lambda m: m.adamw(0.01, weight_decay=0.1, mask=mask),
            "masked": lambda m: optax.masked(m.adamw(0.01), mask),
            "multi_transform": lambda m: optax.multi_transform({"a": m.adamw(0.01), "b": m.lion(0.01)}, labels),
            "inject": lambda m: optax.inject_hyperparams(m.adamw)(learning_rate=0.01),
            "steps": lambda m: optax.MultiSteps(m.adamw(0.01), 2),
        }
        params, grads = sharded.tree(0), sharded.tree(1)
        p, g = sharded.placed(params, mesh), sharded.placed(grads, mesh)
        for name, make in chosen.items():
            with self.subTest(name):
                ours, theirs = make(dsopt.jax), make(optax)
                new, _ = steps(updating(ours), p, g, ours.init(p))
                wanted, _ = steps(updating(theirs), p, g, theirs.init(p))
                self.assertEqual(sharded.misplaced(new, mesh), [])
                for leaf, x in new.items():
                    np.testing.assert_allclose(x, wanted[leaf], rtol=2e-5, atol=2e-6, err_msg=leaf)
                self.assertEqual(
                    sharded.collectives(updating(ours), p, g, ours.init(p)),
                    sharded.collectives(updating(theirs), p, g, theirs.init(p)),
                )

    def test_places_results_like_optax_if_only_state_is_sharded(self):
        """Same as in ZeRO-1."""
        mesh = sharded.mesh_of("2 x 2")
        whole, over = (NamedSharding(mesh, spec) for spec in (P(), P("x")))
        p = g = jax.device_put(jnp.arange(48.0).reshape(8, 6) / 48, whole)
        results = []
        for module in (dsopt.jax, optax):
            tx = module.adamw(0.01)
            state = jax.tree.map(lambda v: jax.device_put(v, over) if v.ndim else v, tx.init(p))
            results.append((*steps(updating(tx), p, g, state), sharded.collectives(updating(tx), p, g, state)))
        (new, moved, found), (wanted, theirs, allowed) = results
        np.testing.assert_allclose(new, wanted, rtol=2e-5, atol=2e-6)
        for a, b in zip(jax.tree.leaves((new, moved)), jax.tree.leaves((wanted, theirs)), strict=True):
            self.assertTrue(a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding))
        self.assertEqual(found, allowed)

    def test_keeps_placements_if_gradients_have_others(self):
        """Gradients are computed by the program or passed to it. With optax, parameters or state receive the gradients'
        placements."""
        mesh, tx = sharded.mesh_of("2 x 2"), dsopt.jax.adamw(0.01)
        values = jnp.arange(48.0).reshape(8, 6) / 48
        specs = ((P("x"), P(None, "x")), (P("x"), P(None, "y")), (P("x", "y"), P("y", "x")), (P(), P("x")))
        wanted = steps(updating(tx), values, values, tx.init(values))
        for made in (True, False):
            for of_params, of_grads in specs:
                with self.subTest(made=made, params=of_params, grads=of_grads):
                    p, g = (jax.device_put(values, NamedSharding(mesh, spec)) for spec in (of_params, of_grads))
                    if made:
                        found = steps(updating(tx), p, g, tx.init(p))
                        self.assertEqual(support.bits(found), support.bits(wanted))
                        new, state = found
                        self.assertTrue(new.sharding.is_equivalent_to(p.sharding, 2), new.sharding)
                    else:
                        _, state = jax.jit(tx.update)(g, tx.init(p), p)
                    for x in (state[0].mu, state[0].nu):
                        self.assertTrue(x.sharding.is_equivalent_to(p.sharding, 2), x.sharding)

    def test_gradient_placements_match_optax(self):
        """XLA chooses the shardings of matrix products before those of custom calls."""
        over = NamedSharding(sharded.mesh_of("4"), P("x"))
        random = np.random.default_rng(0)
        shapes = {"embed": (64, 16), "qkv": (16, 48), "up": (16, 64), "bias": (64,), "down": (64, 16), "head": (16, 64)}
        arrays = {k: 0.1 * random.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
        p, tokens = jax.device_put((arrays, random.integers(0, 64, (4, 8))), over)

        def loss(p):
            x = p["embed"][tokens]
            q, k, v = jnp.split(x @ p["qkv"], 3, -1)
            x = x + jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v
            x = x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]
            return optax.softmax_cross_entropy_with_integer_labels(x @ p["head"], tokens).mean()

        def of(tx):
            def step(p, state):
                updates, state = tx.update(jax.grad(loss)(p), state, p)
                return optax.apply_updates(p, updates), state

            return sharded.collectives(step, p, tx.init(p))

        opt = FusedStep("adamw", 0.01)
        wanted = of(optax.adamw(0.01))
        self.assertEqual(of(dsopt.jax.adamw(0.01)), wanted)
        found = sharded.collectives(lambda p, s: opt.step(p, jax.grad(loss)(p), s), p, opt.init(p))
        self.assertEqual(found, wanted)

    def test_works_if_axes_do_not_divide_a_dimension(self):
        mesh = sharded.mesh_of("4")

        def step(module, p, g):
            spread = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x")))
            tx = module.adamw(0.01)
            return tx.update(spread(g), tx.init(spread(p)), spread(p))[0]

        p, g = jnp.linspace(0, 1, 10), jnp.linspace(-1, 1, 10)
        ours = jax.jit(lambda p, g: step(dsopt.jax, p, g))(p, g)
        np.testing.assert_allclose(ours, jax.jit(lambda p, g: step(optax, p, g))(p, g), rtol=2e-5)

    def test_works_with_the_partitioner_before_shardy(self):
        mesh = "4 x 2"
        params, grads = sharded.tree(0), sharded.tree(1)
        p, g = sharded.placed(params, mesh), sharded.placed(grads, mesh)
        tx, fused = dsopt.jax.adamw(0.01), FusedStep("adamw", 0.01, max_norm=0.1)
        wanted, _ = steps(updating(tx), p, g, tx.init(p))
        in_place, _ = steps(fused.step, p, g, fused.init(p))
        jax.config.update("jax_use_shardy_partitioner", False)
        try:
            new, state = steps(updating(tx), p, g, jax.jit(tx.init)(p))
            self.assertEqual([sharded.misplaced(x, mesh) for x in [new, *trees_of(state)]], [[], [], []])
            self.assertEqual(support.bits(new), support.bits(wanted))
            new, state = steps(fused.step, p, g, jax.jit(fused.init)(p))
            self.assertEqual([sharded.misplaced(x, mesh) for x in [new, *trees_of(state)]], [[], [], []])
            self.assertEqual(support.bits(new), support.bits(in_place))
        finally:
            jax.config.update("jax_use_shardy_partitioner", True)


@support.sharded_tests
class Memory(unittest.TestCase):
    def test_state_memory_is_divided_by_the_devices(self):
        mesh = sharded.mesh_of("8")
        params = {"w": jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("x")))}
        whole = 4 * 64 * 32
        for name, tx in (("optax", optax.adamw(0.01)), ("dsopt", dsopt.jax.adamw(0.01))):
            with self.subTest(name):
                new, state = steps(updating(tx), params, params, tx.init(params))
                self.assertEqual(sharded.bytes_per_device(new), whole // 8)
                self.assertLessEqual(sharded.bytes_per_device(state), 2 * whole // 8 + 64)
        fused = FusedStep("adamw", 0.01)
        new, state = steps(fused.step, params, params, fused.init(params))
        self.assertEqual(sharded.bytes_per_device(new), whole // 8)
        self.assertLessEqual(sharded.bytes_per_device(state), 2 * whole // 8 + 64)

    def test_program_memory_is_that_of_shards(self):
        """Arguments, results and temporaries of one device; a gathered array would be eight times a shard."""
        mesh = sharded.mesh_of("8")
        params = {"w": jax.device_put(jnp.ones((512, 64)), NamedSharding(mesh, P("x")))}
        shard = 4 * 512 * 64 // 8
        tx, fused = dsopt.jax.adamw(0.01), FusedStep("adamw", 0.01)
        for step, state in ((updating(tx), tx.init(params)), (fused.step, fused.init(params))):
            program = jax.jit(step, donate_argnums=(0, 2)).lower(params, params, state).compile()
            sizes = program.memory_analysis()
            self.assertLessEqual(sizes.argument_size_in_bytes, 4 * shard + 1024)
            self.assertLessEqual(sizes.output_size_in_bytes, 3 * shard + 1024)
            self.assertLessEqual(sizes.temp_size_in_bytes, 2 * shard + 4096)
            self.assertGreaterEqual(sizes.alias_size_in_bytes, 3 * shard)


if __name__ == "__main__":
    unittest.main()
