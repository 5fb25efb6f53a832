# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters in FusedStep under plain jit: bits, norms of whole tensors, overflow, and rejected options."""

import re
import unittest

import support  # first, it sets up the devices
import jax
import jax.numpy as jnp
import numpy as np
import sharded
from jax.sharding import NamedSharding, PartitionSpec as P

import dsopt
from dsopt.jax import DynamicScale, FusedStep


def steps(opt, params, grads, count=3, **options):
    """Returns parameters, state and reports of some steps."""
    made = lambda p, g: jax.tree.map(lambda g, p: g + (0.1 * p).astype(g.dtype), g, p)
    step = jax.jit(lambda p, g, s: opt.step(p, made(p, g), s, **options))
    state, reports = jax.jit(opt.init)(params), []
    for _ in range(count):
        params, state, report = jax.block_until_ready(step(params, grads, state))
        reports.append(np.asarray(report.values))
    return params, state, reports


def both(opt, mesh, params, grads, **options):
    """Returns the results of `steps` on whole arrays and on shards."""
    whole = steps(opt, params, grads, **options)
    return whole, steps(opt, sharded.placed(params, mesh), sharded.placed(grads, mesh), **options)


@support.sharded_tests
class Steps(unittest.TestCase):
    def check_placements(self, mesh, params, state):
        for name, x in [("parameters", params), *state.items()]:
            if isinstance(x, dict):
                kept = {leaf: value for leaf, value in x.items() if value is not None}
                self.assertEqual(sharded.misplaced(kept, mesh), [], name)

    def check_close(self, sharded_tree, whole_tree, rtol=1e-6):
        for a, b in zip(jax.tree.leaves(sharded_tree), jax.tree.leaves(whole_tree), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=1e-7)

    def test_keeps_placements_and_bits(self):
        rules = ("adamw", "adam", "adam_legacy", "sgd", "adagrad", "lion")
        params, grads = sharded.tree(0), sharded.tree(1)
        for rule in rules:
            opt = FusedStep(rule, 0.01, weight_decay=0.1, **({"momentum": 0.9} if rule == "sgd" else {}))
            for mesh in sharded.MESHES if rule == "adamw" else ("2 x 2",):
                with self.subTest(rule, mesh=mesh):
                    whole, parts = both(opt, mesh, params, grads)
                    self.check_placements(mesh, *parts[:2])
                    self.assertEqual(support.bits(parts), support.bits(whole))

    def test_16_bit_parameters_keep_placements_and_bits(self):
        grads = sharded.tree(1, jnp.float16)
        for dtype in (jnp.float16, jnp.bfloat16):
            for masters in (True, False):
                with self.subTest(dtype, masters=masters):
                    params = sharded.tree(0, dtype)
                    whole, parts = both(FusedStep("adamw", 0.01, masters=masters), "4 x 2", params, grads)
                    self.check_placements("4 x 2", *parts[:2])
                    self.assertEqual(support.bits(parts), support.bits(whole))

    def test_adds_no_collectives(self):
        for mesh in sharded.MESHES:
            with self.subTest(mesh):
                p, g = sharded.placed(sharded.tree(0), mesh), sharded.placed(sharded.tree(1), mesh)
                opt = FusedStep("adamw", 0.01, weight_decay=0.1)
                self.assertEqual(sharded.collectives(opt.step, p, g, opt.init(p)), {})

    def test_clips_by_the_norm_of_all_shards(self):
        params, grads = sharded.tree(0), sharded.tree(1)
        for mesh in sharded.MESHES:
            with self.subTest(mesh):
                whole, parts = both(FusedStep("adamw", 0.01, max_norm=0.5), mesh, params, grads)
                self.check_placements(mesh, *parts[:2])
                self.check_close(parts, whole)
                first = [np.asarray(g + 0.1 * params[k], np.float64) for k, g in grads.items()]
                wanted = np.sqrt(sum(np.sum(g**2) for g in first))
                np.testing.assert_allclose(parts[2][0][dsopt._abi.DSOPT_REPORT_GRAD_NORM], wanted, rtol=1e-6)

    def test_clipping_adds_one_all_reduce_and_lamb_two(self):
        p, g = sharded.placed(sharded.tree(0), "4 x 2"), sharded.placed(sharded.tree(1), "4 x 2")
        for opt, sizes in (
            (FusedStep("adamw", 0.01, max_norm=0.5), [1]),
            (FusedStep("adamw", 0.01, loss_scale=DynamicScale()), [1]),
            (FusedStep("lamb", 0.01), [2]),
            (FusedStep("lamb", 0.01, max_norm=0.5), [1, 2]),
        ):
            found = sharded.collectives(opt.step, p, g, opt.init(p))
            self.assertEqual(found, {"all-reduce": [4 * len(p) * n for n in sizes]})

    def test_clips_huge_and_tiny_gradients(self):
        for scale in (1e-30, 1e-18, 1e15, 1e30):
            with self.subTest(scale):
                params, grads = sharded.tree(0), sharded.tree(1, scale=scale)
                opt = FusedStep("adamw", 0.01, max_norm=0.5 * scale)
                step = jax.jit(opt.step)
                _, _, whole = step(params, grads, opt.init(params))
                p = sharded.placed(params, "4 x 2")
                _, _, parts = step(p, sharded.placed(grads, "4 x 2"), opt.init(p))
                np.testing.assert_allclose(parts.values, whole.values, rtol=1e-6)

    def test_lamb_uses_trust_ratios_of_whole_tensors(self):
        schedule = lambda count: 0.01 / (1 + count)
        for dtype, options in (
            (jnp.float32, {}),
            (jnp.float32, {"max_norm": 0.5, "report_norms": True, "max_trust": 0.5}),
            (jnp.float32, {"no_bias_correction": True, "mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)}),
            (jnp.bfloat16, {"loss_scale": DynamicScale(init=4.0)}),
            (jnp.float16, {"masters": False}),
            (jnp.float32, {"b1": lambda count: 0.9 - 0.1 * count, "b2": lambda count: 0.99}),
        ):
            params, grads = sharded.tree(0, dtype), sharded.tree(1)
            for mesh in ("8", "4 x 2"):
                with self.subTest(options, dtype=dtype, mesh=mesh):
                    opt = FusedStep("lamb", schedule, weight_decay=0.1, **options)
                    whole, parts = both(opt, mesh, params, grads)
                    self.check_placements(mesh, *parts[:2])
                    self.check_close(parts[1:], whole[1:], rtol=2e-6)
                    # Masters that differ by 1e-7 can be on different sides of a tie.
                    self.check_close(parts[0], whole[0], 1e-6 if dtype == jnp.float32 else 2.0**-7)

    def test_steps_of_lamb_on_large_weights_are_not_rounded_to_them(self):
        for scale in (1e5, 1e8):
            for dtype in (jnp.float32, jnp.bfloat16):
                with self.subTest(scale, dtype=dtype):
                    params, grads = sharded.tree(0, dtype, scale), sharded.tree(1)
                    opt = FusedStep("lamb", 0.01, weight_decay=1 / scale, report_norms=True)
                    step = jax.jit(opt.step)
                    _, state, whole = step(params, grads, opt.init(params))
                    p = sharded.placed(params, "4 x 2")
                    _, shards, parts = step(p, sharded.placed(grads, "4 x 2"), opt.init(p))
                    np.testing.assert_allclose(parts.values, whole.values, rtol=2e-6)
                    self.check_close(shards["trust_ratio"], state["trust_ratio"], 2e-6)

    def test_reports_norms_of_whole_tensors(self):
        for dtype in (jnp.float32, jnp.bfloat16):
            with self.subTest(dtype):
                opt = FusedStep("adamw", 0.01, report_norms=True)
                whole, parts = both(opt, "4 x 2", sharded.tree(0, dtype), sharded.tree(1))
                self.assertEqual(support.bits(parts[:2]), support.bits(whole[:2]))
                self.check_close(parts[2], whole[2])

    def test_overflow_on_one_device_skips_on_all(self):
        for bad in (np.inf, np.nan):
            for rule, dtype in (("adamw", jnp.float32), ("lamb", jnp.float32), ("lamb", jnp.bfloat16)):
                with self.subTest(rule, bad=bad, dtype=dtype):
                    params, grads = sharded.tree(0, dtype), sharded.tree(1)
                    grads["rows"] = grads["rows"].at[5, 1].set(bad)
                    grads["one"] = grads["one"].at[0].set(bad)
                    opt = FusedStep(rule, 0.01, loss_scale=DynamicScale(init=8.0), report_norms=True)
                    whole, parts = both(opt, "4 x 2", params, grads)
                    self.assertEqual(support.bits(parts), support.bits(whole))
                    self.assertEqual(support.bits(parts[0]), support.bits(params))
                    self.assertEqual(float(opt.loss_scale(parts[1])), 1.0)
                    for report in parts[2]:
                        self.assertEqual(report[dsopt._abi.DSOPT_REPORT_NONFINITE], 2)
                    for x in (parts[1]["scaler"], parts[1]["loss_scale"], parts[1]["step"]):
                        copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
                        self.assertEqual((len(x.addressable_shards), len(copies)), (8, 1))

    def test_nonfinite_apply_applies_the_step(self):
        params, grads = sharded.tree(0), sharded.tree(1)
        grads["rows"] = grads["rows"].at[5, 1].set(np.nan)
        opt = FusedStep("adamw", 0.01, nonfinite="apply", loss_scale=4.0)
        whole, parts = both(opt, "4 x 2", params, grads)
        self.assertEqual(support.bits(parts), support.bits(whole))

    def test_skips_for_caller_and_invalid_learning_rate(self):
        params, grads = sharded.tree(0), sharded.tree(1)
        for rule in ("adamw", "lamb"):
            for options in ({"skip": 1}, {"learning_rate": jnp.float32(-1)}, {"learning_rate": jnp.float32(np.nan)}):
                with self.subTest(rule, options=options):
                    opt = FusedStep(rule, 0.01)
                    whole, parts = both(opt, "2 x 2", params, grads, **options)
                    self.assertEqual(support.bits(parts[0]), support.bits(whole[0]))
                    self.assertEqual(support.bits(parts[2]), support.bits(whole[2]))

    def test_stochastic_rounding_matches_whole_arrays(self):
        """Each shard must be an interval of its parameter: only the first dimension longer than 1 is sharded."""
        mesh = sharded.mesh_of("4 x 2")
        specs = {"a": P("x"), "b": P(None, "y"), "c": P(("x", "y")), "d": P(), "e": P("x")}
        shapes = {"a": (8, 6), "b": (1, 64, 2), "c": (128,), "d": (40,), "e": (4, 2)}
        params = {k: jnp.full(shape, 0.37, jnp.bfloat16) for k, shape in shapes.items()}
        params["e"] = params["e"].astype(jnp.float32)
        grads = jax.tree.map(lambda p: jnp.linspace(-1, 1, p.size).reshape(p.shape), params)
        opt = FusedStep("adamw", 1e-3, masters=False, stochastic_rounding=True, seed=7)
        place = lambda t: {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in t.items()}
        whole, parts = steps(opt, params, grads), steps(opt, place(params), place(grads))
        self.assertEqual(support.bits(parts), support.bits(whole))
        self.assertGreater(len(np.unique(np.asarray(whole[0]["c"], np.float32))), 2)

    def test_placements_follow_parameters_instead_of_gradients(self):
        mesh = "4 x 2"
        params, grads = sharded.tree(0), sharded.tree(1)
        opt = FusedStep("adamw", 0.01)
        p = sharded.placed(params, mesh)
        other = {k: NamedSharding(sharded.mesh_of(mesh), P(None, "x") if k == "both" else P()) for k in params}
        new, state, _ = jax.jit(opt.step)(p, jax.device_put(grads, other), opt.init(p))
        self.check_placements(mesh, new, state)
        wanted, _, _ = jax.jit(opt.step)(params, grads, opt.init(params))
        self.assertEqual(support.bits(new), support.bits(wanted))

    def test_sharded_state_partitions_replicated_parameters(self):
        """Same as in ZeRO-1: parameters are replicated, and each device steps the shard whose state it has."""
        mesh = sharded.mesh_of("4")
        whole, x = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
        opt, p = FusedStep("adamw", 0.01), jax.device_put(jnp.ones((8, 4)), whole)
        state = jax.tree.map(lambda v: jax.device_put(v, x) if v.ndim == 2 else v, opt.init(p))
        places = jax.tree.map(lambda v: x if v.ndim == 2 else whole, state)
        step = jax.jit(opt.step, out_shardings=(whole, places, whole))
        new, state, _ = step(p, p, state)
        self.assertTrue(new.sharding.is_fully_replicated)
        self.assertEqual(state["exp_avg"].addressable_shards[0].data.shape, (2, 4))
        ones = jnp.ones((8, 4))
        self.assertEqual(support.bits(new), support.bits(opt.step(ones, ones, opt.init(ones))[0]))
        found = sharded.collectives(step, p, p, state)
        self.assertEqual(found, {"all-gather": [32]})


@support.sharded_tests
class Refused(unittest.TestCase):
    def refused(self, text, function, *arguments):
        with self.assertRaises(Exception) as caught:
            jax.block_until_ready(jax.jit(function)(*arguments))
        self.assertRegex(str(caught.exception), text)

    def test_rejects_stochastic_rounding_of_shards_not_intervals(self):
        mesh = sharded.mesh_of("4 x 2")
        opt = FusedStep("adamw", 0.1, masters=False, stochastic_rounding=True)
        for spec in (P(None, "x"), P("x", "y")):
            p = {"w": jax.device_put(jnp.ones((8, 8), jnp.bfloat16), NamedSharding(mesh, spec))}
            self.refused(r"needs shards that are intervals .* those of \['w'\]", opt.step, p, p, opt.init(p))

    def test_rejects_stochastic_rounding_of_sharded_lamb(self):
        opt = FusedStep("lamb", 0.1, masters=False, stochastic_rounding=True)
        p = {"w": jax.device_put(jnp.ones((8, 8), jnp.bfloat16), NamedSharding(sharded.mesh_of("4"), P("x")))}
        self.refused("stochastic_rounding of LAMB is not supported for sharded parameters", opt.step, p, p, opt.init(p))

    def test_rejects_norms_if_axes_do_not_divide_a_dimension(self):
        spread = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(sharded.mesh_of("4"), P("x")))

        def step(opt, p):
            p = {"w": spread(p)}
            return opt.step(p, p, opt.init(p))[0]

        for options in ({"max_norm": 1.0}, {"report_norms": True}, {"nonfinite": "skip"}, {"loss_scale": 2.0}):
            opt = FusedStep("adamw", 0.1, **options)
            self.refused(r"\['w'\] does not divide its shape \(10,\)", lambda p, opt=opt: step(opt, p), jnp.ones(10))
        opt = FusedStep("adamw", 0.1)
        new = jax.jit(lambda p: step(opt, p))(jnp.ones(10))["w"]
        np.testing.assert_array_equal(new, jnp.full(10, np.float32(0.899)))


if __name__ == "__main__":
    unittest.main()
