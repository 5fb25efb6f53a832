# SPDX-License-Identifier: Apache-2.0
"""Sharded parameters in FusedStep under plain jit, with moments in fewer bits and remainders."""

import unittest

import support  # first, it sets up the devices
import jax
import jax.numpy as jnp
import numpy as np
import sharded
from jax.sharding import NamedSharding, PartitionSpec as P

import dsopt
from dsopt.jax import DynamicScale, FusedStep

MESH = "4 x 2"
# Shards are intervals of whole blocks of 256 elements.
SPECS = {"a": P("x"), "b": P(None, "y"), "c": P(("x", "y")), "d": P(), "e": P(("y", "x")), "f": P()}
SHAPES = {"a": (8, 256), "b": (1, 8, 64), "c": (4096,), "d": (300,), "e": (2048, 2), "f": ()}
ONE_BYTE = {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random"}
Q8 = {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}
BF16 = {"exp_avg_format": "bf16"}


def tree(seed, dtype=jnp.float32):
    random = np.random.default_rng(seed)
    return {leaf: jnp.asarray(random.standard_normal(shape), dtype) for leaf, shape in SHAPES.items()}


def placed(values, specs=None):
    specs = {**SPECS, **(specs or {})}
    return {leaf: jax.device_put(x, NamedSharding(sharded.mesh_of(MESH), specs[leaf])) for leaf, x in values.items()}


def steps(opt, params, grads, count=3):
    """Returns parameters, state and reports of some steps."""
    step, state, reports = jax.jit(opt.step), jax.jit(opt.init)(params), []
    for i in range(count):
        params, state, report = jax.block_until_ready(step(params, jax.tree.map(lambda g: g / (1 + i), grads), state))
        reports.append(np.asarray(report.values))
    return params, state, reports


@support.sharded_tests
class LowPrecision(unittest.TestCase):
    def both(self, opt, dtype, specs=None):
        params, grads = tree(0, dtype), tree(1)
        return steps(opt, params, grads), steps(opt, placed(params, specs), placed(grads, specs))

    def test_keeps_placements_and_bits(self):
        for rule, dtype, options in (
            ("adamw", jnp.float32, ONE_BYTE),
            ("adamw", jnp.bfloat16, {"masters": "remainder", **ONE_BYTE}),
            ("adam", jnp.bfloat16, {"masters": "remainder", **Q8}),
            ("adamw", jnp.bfloat16, {"masters": False, "stochastic_rounding": True, **Q8}),
            ("lion", jnp.float32, {"exp_avg_format": "e4m3"}),
            ("adagrad", jnp.float32, {"exp_avg_sq_format": "bf16_random"}),
        ):
            with self.subTest(rule, **options):
                opt = FusedStep(rule, 0.01, seed=5, **options)
                whole, parts = self.both(opt, dtype)
                self.assertEqual(support.differing(parts, whole), [])
                for name, x in [("parameters", parts[0]), *parts[1].items()]:
                    for leaf, value in x.items() if isinstance(x, dict) else ():
                        if value is not None:
                            spec = P() if name.endswith("_scale") else SPECS[leaf]
                            expected = NamedSharding(sharded.mesh_of(MESH), spec)
                            self.assertTrue(value.sharding.is_equivalent_to(expected, value.ndim), (name, leaf))

    def test_bf16_and_remainders_keep_bits_with_any_sharding(self):
        specs = {"a": P("y", "x"), "b": P(None, "x", "y"), "c": P("x"), "d": P("y")}
        opt = FusedStep("adamw", 0.01, masters="remainder", **BF16)
        whole, parts = self.both(opt, jnp.bfloat16, specs)
        self.assertEqual(support.differing(parts, whole), [])
        params, grads = placed(tree(0, jnp.bfloat16), specs), placed(tree(1), specs)
        self.assertEqual(sharded.collectives(opt.step, params, grads, opt.init(params)), {})

    def test_scales_add_one_all_gather(self):
        params, grads = placed(tree(0)), placed(tree(1))
        opt = FusedStep("adamw", 0.01, **Q8)
        found = sharded.collectives(opt.step, params, grads, opt.init(params))
        blocks = 2 * 8 * (2 + 1 + 2 + 2)  # of the shards of a, b, c and e on eight devices, for two moments
        self.assertEqual(found, {"all-gather": [blocks]})

    def test_every_device_has_the_scales_of_the_whole(self):
        _, parts = self.both(FusedStep("adamw", 0.01, **Q8), jnp.float32)
        for leaf, x in parts[1]["exp_avg_scale"].items():
            copies = {np.asarray(shard.data).tobytes() for shard in x.addressable_shards}
            self.assertEqual((x.shape, len(copies)), ((-(-int(np.prod(SHAPES[leaf])) // 256),), 1), leaf)

    def test_accepts_state_that_is_placed_by_specs(self):
        opt, params, grads = FusedStep("adamw", 0.01, **Q8), tree(0), tree(1)
        state, mesh = opt.init(params), sharded.mesh_of(MESH)
        specs = opt.specs(params, SPECS)
        self.assertEqual(specs["exp_avg_scale"]["c"], P(("x", "y")))
        spread = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs)
        whole, parts = opt.step(params, grads, state), jax.jit(opt.step)(placed(params), placed(grads), spread)
        self.assertEqual(support.differing(parts[:2], whole[:2]), [])

    def test_lamb_and_norms_are_those_of_whole_tensors(self):
        for rule, dtype, options in (
            ("lamb", jnp.bfloat16, {"masters": "remainder", **ONE_BYTE}),
            ("lamb", jnp.float32, {"exp_avg_format": "q8", "max_norm": 0.5}),
            ("adamw", jnp.bfloat16, {"masters": "remainder", "report_norms": True, "max_norm": 1e9, **Q8}),
        ):
            with self.subTest(rule, **options):
                whole, parts = self.both(FusedStep(rule, 0.01, weight_decay=0.1, seed=2, **options), dtype)
                np.testing.assert_allclose(parts[2], whole[2], rtol=1e-5)
                if rule == "adamw":
                    self.assertEqual(support.differing(parts[:2], whole[:2]), [])
                    continue
                for a, b in zip(jax.tree.leaves(parts[0]), jax.tree.leaves(whole[0]), strict=True):
                    # Masters that differ by 1e-7 can be on different sides of a tie.
                    tolerance = 1e-5 if dtype == jnp.float32 else 2.0**-7
                    np.testing.assert_allclose(np.asarray(a, "f8"), np.asarray(b, "f8"), rtol=tolerance, atol=1e-6)

    def test_lamb_keeps_remainders_with_their_parameters(self):
        opt = FusedStep("lamb", 0.01, weight_decay=0.1, masters="remainder")
        peer = FusedStep("lamb", 0.01, weight_decay=0.1)
        params, grads = placed(tree(0, jnp.bfloat16)), placed(tree(1))
        (new, state, _), (_, other, _) = (steps(each, params, grads) for each in (opt, peer))
        for leaf, x in new.items():
            joined = dsopt.jax._remainders.join(x, state["remainder"][leaf])  # pylint: disable=protected-access
            self.assertEqual(support.differing(joined, other["master"][leaf]), [], leaf)

    def test_skipped_step_changes_nothing(self):
        params, grads = tree(0, jnp.bfloat16), tree(1)
        grads["c"] = grads["c"].at[4000].set(np.inf)
        for rule in ("adamw", "lamb"):
            opt = FusedStep(rule, 0.01, masters="remainder", loss_scale=DynamicScale(init=8.0), **ONE_BYTE)
            p, g = placed(params), placed(grads)
            state = jax.jit(opt.init)(p)
            p, state, _ = jax.jit(opt.step)(p, placed(tree(1)), state)
            new, moved, report = jax.jit(opt.step)(p, g, state)
            self.assertTrue(bool(report.skipped))
            for kept in (moved, state):
                del kept["loss_scale"], kept["scaler"]
            self.assertEqual(support.differing((new, moved), (p, state)), [], rule)

    def refused(self, text, spec, shape, **options):
        opt, mesh = FusedStep("adamw", 0.1, **options), sharded.mesh_of(MESH)
        p = {"w": jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))}
        with self.assertRaises(Exception) as caught:  # XLA's during partitioning, with the text of dsopt
            jax.block_until_ready(jax.jit(opt.step)(p, p, jax.jit(opt.init)(p)))
        self.assertRegex(str(caught.exception), text)

    def test_rejects_shards_that_are_not_whole_blocks(self):
        interval = r"the format of a moment needs shards that are intervals .* those of \['w'\] .* f32_moments"
        self.refused(interval, P(None, "x"), (8, 1024), **Q8)
        self.refused(interval, P("x", "y"), (8, 1024), exp_avg_sq_format="bf16_random")
        blocks = r"shards of a multiple of 256 elements, and those of \['w'\] with shape \(8, 64\) have 128: .*f32_mom"
        self.refused(blocks, P("x"), (8, 64), exp_avg_format="e4m3")

    def test_rejects_scales_if_axes_do_not_divide_a_dimension(self):
        spread = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(sharded.mesh_of("4"), P("x")))
        opt = FusedStep("adamw", 0.1, exp_avg_format="q8")
        with self.assertRaisesRegex(Exception, r"params does not divide its shape \(10, 256\).*moments with scales"):
            jax.jit(lambda p: opt.init(spread(p)))(jnp.ones((10, 256)))

    def test_rejects_scales_in_a_shard_map_over_some_axes(self):
        mesh, p = sharded.mesh_of(MESH), jnp.ones((8, 256))
        opt = FusedStep("adamw", 0.1, exp_avg_format="q8")
        some = lambda f: jax.shard_map(
            f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
        )
        with self.assertRaisesRegex(dsopt.UnsupportedError, "moments with scales .* some axes of a mesh only"):
            jax.jit(some(lambda p: opt.step(p, p, opt.init(p))[0]))(p)

    def test_f32_moments_have_any_sharding(self):
        specs = {"a": P("x", "y"), "d": P("y")}
        opt = FusedStep("adamw", 0.01, f32_moments={**dict.fromkeys(SHAPES, False), "a": True, "d": True}, **ONE_BYTE)
        whole, parts = self.both(opt, jnp.float32, specs)
        self.assertEqual(support.differing(parts, whole), [])


if __name__ == "__main__":
    unittest.main()
