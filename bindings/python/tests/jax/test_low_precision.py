# SPDX-License-Identifier: Apache-2.0
"""Moments in fewer bits and masters with remainders in FusedStep, and bfloat16 moments of optax."""

import io
import re
import unittest

from support import copy, differing

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import dsopt
import dsopt.jax
from dsopt.jax import FusedStep, _remainders

ONE_BYTE = {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random"}
Q8 = {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}
PARAMS = {"b": jnp.zeros(7), "s": jnp.float32(2.0), "w": jnp.linspace(-1, 1, 5000).reshape(50, 100)}
HALF = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)


def grads_at(params, i):
    return jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32) * 3 + i), params)


def engine(params, group, **options):
    """Returns an optimizer of the package dsopt on copies of the parameters, with the names that dsopt.jax gives."""
    return dsopt.Optimizer({"['%s']" % name: np.array(x) for name, x in params.items()}, group, **options)


def run(opt, params, steps=4):
    step, state = jax.jit(opt.step, donate_argnums=(0, 2)), opt.init(params)
    params = copy(params)
    for i in range(steps):
        params, state, _ = step(params, grads_at(HALF, i), state)
    return params, state


def named(state):
    """Returns the leaves of the state of dsopt.jax, or of parameters, by the names of the package dsopt."""
    found = {}
    for name, x in state.items():
        leaves = {"['%s'].%s" % (param, name): leaf for param, leaf in x.items()} if isinstance(x, dict) else {}
        found.update(leaves or {"optimizer." + name: x})
    return {name: x for name, x in found.items() if x is not None}


class Steps(unittest.TestCase):
    def test_gives_same_bits_as_the_engine(self):
        for rule, group, options in (
            ("adamw", dsopt.AdamW, ONE_BYTE),
            ("adamw", dsopt.AdamW, Q8),
            ("adam", dsopt.Adam, {"exp_avg_format": "bf16"}),
            ("adam_legacy", dsopt.AdamLegacy, {"exp_avg_format": "bf16_random", "exp_avg_sq_format": "q8"}),
            ("lamb", dsopt.Lamb, ONE_BYTE),
            ("sgd", dsopt.Sgd, {"momentum": 0.875, "exp_avg_format": "e4m3"}),
            ("lion", dsopt.Lion, {"exp_avg_format": "q8"}),
            ("adagrad", dsopt.Adagrad, {"exp_avg_sq_format": "bf16_random"}),
        ):
            for params, masters in ((PARAMS, True), (HALF, "remainder")):
                with self.subTest(rule, masters=masters, **options):
                    kind = "per_tensor" if masters is True else masters
                    opt = engine(params, group(lr=1e-2, weight_decay=0.125, **options), masters=kind, seed=3)
                    for i in range(4):
                        opt.step([np.array(g) for g in grads_at(HALF, i).values()])
                    fused = FusedStep(rule, 1e-2, weight_decay=0.125, masters=masters, seed=3, **options)
                    new, state = run(fused, params)
                    self.assertEqual(differing(new, dict(zip(new, opt.params.values()))), [])
                    self.assertEqual(set(named(state)), set(opt.state))
                    self.assertEqual(differing(named(state), {name: opt.state.copy(name) for name in opt.state}), [])

    def test_state_has_the_dtypes_of_the_formats(self):
        state = FusedStep("adamw", masters="remainder", **ONE_BYTE).init(HALF)
        found = {name: (x["w"].shape, x["w"].dtype.name) for name, x in state.items() if isinstance(x, dict)}
        self.assertEqual(
            found,
            {
                "remainder": ((50, 100), "int16"),
                "exp_avg": ((50, 100), "float8_e4m3fn"),
                "exp_avg_scale": ((20,), "float32"),
                "exp_avg_sq": ((50, 100), "bfloat16"),
            },
        )
        state = FusedStep("adamw", **Q8).init(PARAMS)
        self.assertEqual((state["exp_avg"]["s"].shape, state["exp_avg_scale"]["s"].shape), ((), (1,)))
        self.assertEqual(state["exp_avg_sq"]["w"].dtype, jnp.uint8)

    def test_f32_moments_of_chosen_parameters(self):
        for choice in ({"b": True, "s": True, "w": False}, lambda p: jax.tree.map(lambda x: jnp.ndim(x) < 2, p)):
            opt = FusedStep("adamw", 1e-2, f32_moments=choice, **ONE_BYTE)
            params, state = run(opt, PARAMS)
            self.assertEqual({k: x.dtype.name for k, x in state["exp_avg"].items()},
                             {"b": "float32", "s": "float32", "w": "float8_e4m3fn"})
            self.assertIsNone(state["exp_avg_scale"]["b"])
            plain, _ = run(FusedStep("adamw", 1e-2), PARAMS)
            self.assertEqual(differing(params, plain), ["['w']"])

    def test_donated_program_copies_nothing(self):
        opt = FusedStep("adamw", 1e-2, masters="remainder", **ONE_BYTE)
        program = jax.jit(opt.step, donate_argnums=(0, 2)).lower(HALF, HALF, opt.init(HALF)).compile()
        self.assertEqual(program.as_text().count(" copy("), 0)

    def test_steps_inside_scan(self):
        opt = FusedStep("adamw", 1e-2, masters="remainder", seed=1, **ONE_BYTE)

        def one(carry, i):
            params, state, _ = opt.step(carry[0], grads_at(HALF, i), carry[1])
            return (params, state), None

        scanned = jax.jit(lambda c: jax.lax.scan(one, c, jnp.arange(4))[0])((HALF, opt.init(HALF)))
        self.assertEqual(differing(scanned, run(opt, HALF)), [])

    def test_state_survives_a_file(self):
        opt = FusedStep("adamw", 1e-2, masters="remainder", **ONE_BYTE)
        params, state = run(opt, HALF)
        leaves, treedef = jax.tree.flatten((params, state))
        file = io.BytesIO()
        np.savez(file, *[np.asarray(x).view("u%d" % x.dtype.itemsize) for x in leaves])
        file.seek(0)
        loaded = np.load(file)
        new = [jnp.asarray(loaded["arr_%d" % i].view(x.dtype)) for i, x in enumerate(leaves)]
        a = opt.step(*self.with_grads(treedef.unflatten(new)))
        b = opt.step(*self.with_grads((params, state)))
        self.assertEqual(differing(a, b), [])

    @staticmethod
    def with_grads(pair):
        return pair[0], grads_at(HALF, 9), pair[1]


class Remainders(unittest.TestCase):
    WEIGHTS = jnp.asarray(np.random.default_rng(0).standard_normal(5000), jnp.float32)

    def test_split_and_join_are_inverse(self):
        words = np.random.default_rng(1).integers(0, 1 << 32, 100000, np.uint32)
        edges = np.array([0, 0x80000000, 0x3F808000, 0xBF808000, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
        masters = np.concatenate([words, edges]).view(np.float32)
        weight, remainder = _remainders.split(jnp.asarray(masters))
        joined, number = np.asarray(_remainders.join(weight, remainder)), ~np.isnan(masters)
        self.assertEqual(joined[number].tobytes(), masters[number].tobytes())
        self.assertTrue(np.isnan(joined[~number]).all())
        with np.errstate(invalid="ignore"):
            close = np.abs(np.asarray(weight, np.float32) - masters) <= np.abs(masters) * 2.0**-8 + 1e-38
        self.assertTrue(close[number & np.isfinite(np.asarray(weight, np.float32))].all())

    def test_init_takes_masters_that_parameters_were_rounded_from(self):
        params, masters = {"w": self.WEIGHTS.astype(jnp.bfloat16)}, {"w": self.WEIGHTS}
        made = []
        for kind in (True, "remainder"):
            opt = FusedStep("adamw", 1e-2, masters=kind)
            p, s = params, opt.init(params, masters)
            for i in range(3):
                p, s, _ = opt.step(p, grads_at(params, i), s)
            made.append(s["master"]["w"] if kind is True else _remainders.join(p["w"], s["remainder"]["w"]))
        self.assertEqual(differing(made[0], made[1]), [])

    def test_init_takes_ties(self):
        bits32 = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000], np.uint32)  # down, up, down, up
        masters = jnp.asarray(bits32.view(np.float32))
        params = masters.astype(jnp.bfloat16)
        state = FusedStep("adamw", masters="remainder").init(params, masters)
        joined = np.asarray(_remainders.join(params, state["remainder"])).view(np.uint32)
        self.assertEqual(list(joined), [0x3F807FFF, 0x3F818000, 0xBF807FFF, 0xBF818000])

    def test_float32_parameters_have_no_remainder(self):
        params = {"w": HALF["w"], "b": PARAMS["b"]}
        opt = FusedStep("adamw", masters="remainder")
        state = opt.init(params, masters={"w": PARAMS["w"], "b": PARAMS["b"]})
        self.assertIsNone(state["remainder"]["b"])
        opt.step(params, params, state)


class Sharded(unittest.TestCase):
    """In a shard_map the engine sees the shard, so blocks begin there."""

    def both(self, shape, options):
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        params = {"w": jnp.sin(jnp.arange(np.prod(shape))).reshape(shape)}
        opt = FusedStep("adamw", 1e-2, **options)
        specs = opt.specs(params, P("x"))
        smap = lambda f, i, o: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=o, check_vma=False))
        state = smap(opt.init, P("x"), specs)(params)
        step = smap(lambda p, g, s: opt.step(p, g, s)[:2], (P("x"), P("x"), specs), (P("x"), specs))
        whole, p, kept = opt.init(params), params, params
        for i in range(3):
            p, state = step(p, grads_at(params, i), state)
            kept, whole, _ = opt.step(kept, grads_at(params, i), whole)
        return specs, (p, state), (kept, whole)

    def test_shards_of_whole_blocks_have_the_bits_of_the_whole(self):
        specs, parts, whole = self.both((8, 64), Q8)
        self.assertEqual(specs["exp_avg_scale"]["w"], P(("x",)))
        self.assertEqual(differing(parts, whole), [])

    def test_each_shard_has_its_own_scales(self):
        _, (params, state), (_, whole) = self.both((4, 150), {"exp_avg_format": "e4m3"})
        self.assertEqual((state["exp_avg_scale"]["w"].shape, whole["exp_avg_scale"]["w"].shape), ((4,), (3,)))
        scales = np.repeat(np.asarray(state["exp_avg_scale"]["w"]).reshape(2, 2), [256, 44], axis=1)
        found = np.asarray(state["exp_avg"]["w"], np.float32) * scales.reshape(4, 150)
        expected = 0.1 * (0.81 * np.asarray(grads_at({"w": jnp.sin(jnp.arange(600.0))}, 0)["w"])
                          + 0.9 * np.asarray(grads_at({"w": jnp.sin(jnp.arange(600.0))}, 1)["w"])
                          + np.asarray(grads_at({"w": jnp.sin(jnp.arange(600.0))}, 2)["w"]))
        np.testing.assert_allclose(found.ravel(), expected, atol=0.03)

    def test_specs_of_scales_have_all_axes_of_the_parameter(self):
        params = {name: jnp.zeros((8, 64)) for name in "abcd"}
        specs = {"a": P("x", "y"), "b": P(None, ("y", "x")), "c": P(), "d": P(None, None)}
        found = FusedStep("adamw", **Q8).specs(params, specs)
        self.assertEqual(found["exp_avg_scale"], {"a": P(("x", "y")), "b": P(("y", "x")), "c": P(), "d": P()})
        self.assertEqual(found["exp_avg"], specs)


class Refusals(unittest.TestCase):
    def test_rejects_invalid_options(self):
        for options, text in (
            ({"exp_avg_format": "fp8"}, "exp_avg_format is 'fp8', and must be one of 'f32', 'bf16', .*'q8'"),
            ({"exp_avg_sq_format": None}, "exp_avg_sq_format is None, and must be one of"),
            ({"masters": "flat"}, "masters is 'flat': it must be True, False or 'remainder'"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.ArgumentError, text):
                FusedStep("adamw", **options)
        for rule, options, params, text in (
            ("adamw", {"exp_avg_sq_format": "e4m3"}, PARAMS, "exp_avg_sq_format is E4M3"),
            ("adamw", {"exp_avg_sq_format": "bf16"}, PARAMS, "exp_avg_sq_format is BF16"),
            ("lion", {"exp_avg_sq_format": "q8"}, PARAMS, "exp_avg_sq_format has no effect"),
            ("sgd", {"exp_avg_format": "q8"}, PARAMS, "exp_avg_format has no effect"),
            ("adagrad", {"exp_avg_sq_format": "q8"}, PARAMS, "exp_avg_sq_format is Q8"),
            ("adamw", {"f32_moments": True}, PARAMS, r"parameter '\['b'\]' has no effect"),
            ("adamw", {"masters": "remainder"}, {"w": jnp.zeros(3, jnp.float16)}, r"\['w'\]' is F16"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.UnsupportedError, text):
                FusedStep(rule, **options).init(params)

    def test_rejects_state_of_other_formats(self):
        opt = FusedStep("adamw", masters="remainder", **ONE_BYTE)
        state = opt.init(HALF)
        without = {name: x for name, x in state.items() if name != "exp_avg_scale"}
        for given, text in (
            (FusedStep("adamw", masters="remainder").init(HALF),
             r"state 'exp_avg' of \['b'\] has float32\(7,\), and must have float8_e4m3fn\(7,\)"),
            (without, "the state has no 'exp_avg_scale'"),
            ({**state, "exp_avg_scale": {**state["exp_avg_scale"], "w": jnp.zeros(19)}},
             r"state 'exp_avg_scale' of \['w'\] has float32\(19,\), and must have float32\(20,\)"),
            ({**state, "exp_avg": jax.tree.map(lambda x: x.view(jnp.uint8), state["exp_avg"])}, "has uint8"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.ArgumentError, text):
                opt.step(HALF, HALF, given)


class OptaxMoments(unittest.TestCase):
    """A bfloat16 moment of the gradient is an operand of the engine, which rounds it as optax does."""

    def types(self, tx, params):
        """Returns the element types of gradients and moments, the operands of the engine's call with 33 elements."""
        step = jax.jit(lambda g, s, p: tx.update(jax.tree.map(jnp.cos, g), s, p))
        text = step.lower(params, tx.init(params), params).as_text()
        (line,) = [line for line in text.splitlines() if "@dsopt_step(" in line]
        return re.findall(r"tensor<33x(\w+)>", line.rpartition(" : (")[2].partition(") -> ")[0])

    def test_only_the_first_moment_is_an_operand_in_bfloat16(self):
        params, half = {"w": jnp.ones(33)}, {"w": jnp.ones(33, jnp.bfloat16)}
        f32, bf16, adamw = "f32", "bf16", dsopt.jax.adamw
        for tx, p, expected in (
            (adamw(0.1), params, [f32, f32, f32]),
            (adamw(0.1, mu_dtype=jnp.bfloat16), params, [f32, bf16, f32]),
            (adamw(0.1, mu_dtype=jnp.float16), params, [f32, f32, f32]),
            (adamw(0.1), half, [bf16, bf16, f32]),
            (dsopt.jax.lion(0.1, mu_dtype=jnp.bfloat16), params, [f32, bf16]),
            (dsopt.jax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16), params, [f32, bf16]),
            (dsopt.jax.adagrad(0.1), half, [bf16, f32]),
        ):
            with self.subTest(expected):
                self.assertEqual(self.types(tx, p), expected)

    def test_leaves_of_several_dtypes_share_a_call(self):
        params = {"f": jnp.ones(33), "h": jnp.ones(33, jnp.bfloat16)}
        found = self.types(dsopt.jax.adamw(0.1), params)  # gradients, moments of f, moments of h
        self.assertEqual(found, ["f32", "bf16", "f32", "f32", "bf16", "f32"])

    def test_direction_comes_from_the_unrounded_moment(self):
        """One step from zeros: the moment is a1 * g, and the direction is g / (|g| + eps) for every g."""
        grads = {"w": jnp.linspace(0.1, 1, 1000)}
        tx = dsopt.jax.scale_by_adam(mu_dtype=jnp.bfloat16)
        direction, state = jax.jit(tx.update)(grads, tx.init(grads))
        np.testing.assert_allclose(direction["w"], 1, rtol=2e-5)
        moment = jnp.float32(1 - 0.9) * grads["w"]
        self.assertEqual(differing(state.mu["w"], moment.astype(jnp.bfloat16)), [])
        self.assertTrue((state.mu["w"].astype(jnp.float32) != moment).any())


if __name__ == "__main__":
    unittest.main()
