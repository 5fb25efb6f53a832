# SPDX-License-Identifier: Apache-2.0
"""Tests of steps in place."""

import os
import subprocess
import sys
import unittest

from support import Engine, bits, copy, model

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import dsopt
from dsopt import _abi as abi
from dsopt.jax import DynamicScale, FusedStep

PARAMS = {"w": jnp.linspace(-1, 1, 5000).reshape(50, 100), "b": jnp.zeros(7), "s": jnp.float32(2.0)}


def grads_at(params, i):
    return jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32) * 3 + i), params)


class Bits(unittest.TestCase):
    def test_gives_same_bits_as_the_engine(self):
        """The engine's parameters are sorted by key here, like the leaves of a dict."""
        leaves = jax.tree.leaves(PARAMS)
        for name, fields in (
            ("adam", {}),
            ("adamw", {"weight_decay": 0.125}),
            ("lamb", {"weight_decay": 0.125}),
            ("adam_legacy", {}),
            ("sgd", {}),
            ("sgd", {"momentum": 0.875, "dampening": 0.5}),
            ("sgd", {"momentum": 0.875, "nesterov": True, "weight_decay": 0.125}),
            ("adagrad", {"lr_decay": 0.125, "initial_accumulator_value": 0.5}),
            ("adagrad", {"eps_inside_sqrt": True}),
            ("lion", {"weight_decay": 0.125}),
        ):
            with self.subTest(name, **fields):
                flags = {
                    "nesterov": abi.DSOPT_GROUP_NESTEROV,
                    "eps_inside_sqrt": abi.DSOPT_GROUP_EPS_INSIDE_SQRT,
                }
                engine = Engine(
                    leaves,
                    abi.description["constants"]["DSOPT_ALGORITHM_" + name.upper()],
                    max_norm=1.0,
                    lr=1e-2,
                    **{key: value for key, value in fields.items() if key not in flags},
                    group_flags=sum(flags[key] for key in fields if key in flags),
                )
                opt = FusedStep(name, 1e-2, max_norm=1.0, **fields)
                step = jax.jit(opt.step, donate_argnums=(0, 2))
                params, state = copy(PARAMS), opt.init(PARAMS)
                for i in range(5):
                    grads = grads_at(PARAMS, i)
                    params, state, _ = step(params, grads, state)
                    expected = engine.step(jax.tree.leaves(grads))
                self.assertEqual(bits(params), [e.tobytes() for e in expected])

    def test_steps_inside_scan_and_fori_loop(self):
        opt = FusedStep("adamw", optax.cosine_decay_schedule(1e-2, 100), weight_decay=0.1)

        def one(carry, i):
            params, state, report = opt.step(carry[0], grads_at(carry[0], i), carry[1])
            return (params, state), report.values[0]

        start = (PARAMS, opt.init(PARAMS))
        scanned = jax.jit(lambda c: jax.lax.scan(one, c, jnp.arange(100))[0])(start)
        looped = jax.jit(lambda c: jax.lax.fori_loop(0, 100, lambda i, c: one(c, i)[0], c))(start)
        step, called = jax.jit(one), start
        for i in range(100):
            called, _ = step(called, i)
        self.assertEqual(bits(scanned), bits(called))
        self.assertEqual(bits(looped), bits(called))

    def test_does_not_change_inputs_that_are_not_donated(self):
        opt = FusedStep("adamw", 1e-2)
        state = opt.init(PARAMS)
        before = bits((PARAMS, state))
        jax.block_until_ready(jax.jit(opt.step)(PARAMS, grads_at(PARAMS, 0), state))
        self.assertEqual(bits((PARAMS, state)), before)

    def test_donated_program_copies_nothing(self):
        for options in ({}, {"max_norm": 1.0, "loss_scale": DynamicScale()}):
            with self.subTest(options):
                opt = FusedStep("adamw", 1e-2, **options)
                half = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS) if options else PARAMS
                program = jax.jit(opt.step, donate_argnums=(0, 2)).lower(half, half, opt.init(half)).compile()
                self.assertEqual(program.as_text().count(" copy("), 0)

    def test_rounds_stochastically(self):
        """An update too small for bfloat16 changes the mean; the result depends on the seed."""
        params = {"w": jnp.ones(20000, jnp.bfloat16)}
        ends = []
        for seed in (1, 1, 2):
            opt = FusedStep("adamw", 1e-4, masters=False, stochastic_rounding=True, seed=seed, weight_decay=0.0)
            done, state, _ = jax.jit(opt.step)(params, {"w": jnp.ones(20000)}, opt.init(params))
            self.assertNotIn("master", state)
            ends.append(done)
        self.assertEqual(bits(ends[0]), bits(ends[1]))
        self.assertNotEqual(bits(ends[0]), bits(ends[2]))
        self.assertAlmostEqual(float(jnp.mean(ends[0]["w"].astype(jnp.float32))), 1 - 1e-4, delta=3e-5)


class MixedPrecision(unittest.TestCase):
    def test_trains_and_skips_overflow(self):
        params, loss = model()
        half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
        opt = FusedStep("adamw", 5e-3, max_norm=1.0, loss_scale=DynamicScale(init=2.0**24, window=50))

        def step(p, s):
            value, grads = jax.value_and_grad(lambda q: loss(q) * opt.loss_scale(s))(p)
            used = opt.loss_scale(s)
            p, s, report = opt.step(p, grads, s)
            return p, s, value / used, report

        step = jax.jit(step, donate_argnums=(0, 1))
        p, s = copy(half), opt.init(half, masters=params)
        np.testing.assert_array_equal(s["master"]["first"]["kernel"], params["first"]["kernel"])
        skipped, scales = 0, []
        for _ in range(150):
            before = bits(p)
            p, s, value, report = step(p, s)
            if report.skipped:
                skipped += 1
                self.assertEqual(bits(p), before)
                self.assertEqual(int(report.reasons) & abi.DSOPT_SKIP_GRADIENTS, abi.DSOPT_SKIP_GRADIENTS)
            scales.append(float(report.loss_scale))
        self.assertGreater(skipped, 0)
        self.assertEqual(int(s["step"][0]), 150 - skipped)
        self.assertEqual(scales[-1], float(opt.loss_scale(s)))
        self.assertTrue(any(b > a for a, b in zip(scales, scales[1:])), "the scale never grew")
        self.assertLess(float(value), 0.5 * float(loss(params)))

    def test_trains_like_optax(self):
        params, loss = model()
        opt, tx = FusedStep("adamw", 5e-3, weight_decay=0.1), optax.adamw(5e-3, weight_decay=0.1)

        @jax.jit
        def ours(p, s):
            return opt.step(p, jax.grad(loss)(p), s)[:2]

        @jax.jit
        def theirs(p, s):
            updates, s = tx.update(jax.grad(loss)(p), s, p)
            return optax.apply_updates(p, updates), s

        a, s, b, t = params, opt.init(params), params, tx.init(params)
        for _ in range(100):
            a, s = ours(a, s)
            b, t = theirs(b, t)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
            np.testing.assert_allclose(x, y, atol=1e-4)

    def test_other_rules_train_like_optax(self):
        """The decay is a function, so that a row of hyper-parameters is read: momentum is unchanged."""
        params, loss = model()
        decay = lambda count: 0.01 / (1 + count)  # noqa: E731
        start = {"initial_accumulator_value": 0.1}
        for name, options, theirs in (
            ("sgd", {}, optax.sgd(5e-3)),
            ("sgd", {"momentum": 0.9}, optax.sgd(5e-3, momentum=0.9)),
            ("sgd", {"momentum": 0.9, "nesterov": True}, optax.sgd(5e-3, momentum=0.9, nesterov=True)),
            ("adagrad", {"eps": 1e-7, "eps_inside_sqrt": True, **start}, optax.adagrad(5e-3)),
            ("lion", {}, optax.lion(5e-3, weight_decay=decay)),
        ):
            with self.subTest(name, **options):
                tx = theirs if name == "lion" else optax.chain(optax.add_decayed_weights(decay), theirs)
                opt = FusedStep(name, 5e-3, weight_decay=decay, **options)
                ours = jax.jit(lambda p, s, opt=opt: opt.step(p, jax.grad(loss)(p), s)[:2])
                update = jax.jit(lambda p, s, tx=tx: tx.update(jax.grad(loss)(p), s, p))
                a, s, b, t = params, opt.init(params), params, tx.init(params)
                for _ in range(30):
                    a, s = ours(a, s)
                    updates, t = update(b, t)
                    b = optax.apply_updates(b, updates)
                self.assertLess(float(loss(a)), float(loss(params)))
                for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
                    np.testing.assert_allclose(x, y, atol=1e-4)

    def test_accepts_static_scale_and_callers_scale(self):
        grads = grads_at(PARAMS, 0)
        scaled = jax.tree.map(lambda g: g * 256, grads)
        plain = FusedStep("adamw", 1e-2)
        expected = bits(plain.step(PARAMS, grads, plain.init(PARAMS))[0])
        fixed = FusedStep("adamw", 1e-2, loss_scale=256.0)
        self.assertEqual(bits(fixed.step(PARAMS, scaled, fixed.init(PARAMS))[0]), expected)
        self.assertEqual(bits(plain.step(PARAMS, scaled, plain.init(PARAMS), grad_scale=256.0)[0]), expected)
        kept, _, report = plain.step(PARAMS, grads, plain.init(PARAMS), skip=jnp.int32(1))
        self.assertEqual(bits(kept), bits(PARAMS))
        self.assertEqual(int(report.reasons), abi.DSOPT_SKIP_CALLER)

    def test_nan_is_skipped_and_named(self):
        opt = FusedStep("adamw", 1e-2, nonfinite="skip")
        grads = {**PARAMS, "s": jnp.float32(jnp.nan)}
        kept, _, report = opt.step(PARAMS, grads, opt.init(PARAMS))
        self.assertEqual(bits(kept), bits(PARAMS))
        self.assertEqual(int(report.first_bad), 1)  # "b", "s", "w"

    def test_works_with_debug_nans(self):
        with jax.debug_nans(True):
            opt = FusedStep("adamw", 1e-2)
            params, _, report = jax.jit(opt.step)(PARAMS, grads_at(PARAMS, 0), opt.init(PARAMS))
            jax.block_until_ready(params)
        self.assertEqual(float(report.grad_norm), -1)


class Sharded(unittest.TestCase):
    def test_steps_inside_shard_map(self):
        """Shards of parameters and state step like whole arrays."""
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        params = {"w": PARAMS["w"], "b": PARAMS["b"]}
        spec = {"w": PartitionSpec("x"), "b": PartitionSpec()}
        opt = FusedStep("adamw", 1e-2)
        state_spec = opt.specs(params, spec)
        self.assertEqual(state_spec["exp_avg"]["w"], PartitionSpec("x"))
        sharded = jax.jit(
            jax.shard_map(
                lambda p, g, s: opt.step(p, g, s)[:2],
                mesh=mesh,
                in_specs=(spec, spec, state_spec),
                out_specs=(spec, state_spec),
                check_vma=False,
            )
        )
        grads = grads_at(params, 1)
        whole = opt.step(params, grads, opt.init(params))
        parts = sharded(params, grads, opt.init(params))
        self.assertEqual(bits(parts[0]), bits(whole[0]))
        self.assertEqual(bits(parts[1]), bits(whole[1]))

    def test_steps_inside_pmap(self):
        opt = FusedStep("adamw", 1e-2)
        double = jax.tree.map(lambda p: jnp.stack([p, p]), PARAMS)
        state = jax.pmap(opt.init, devices=jax.devices()[:2])(double)
        params, _, report = jax.pmap(opt.step, devices=jax.devices()[:2])(double, double, state)
        alone, _, _ = opt.step(PARAMS, PARAMS, opt.init(PARAMS))
        self.assertEqual(bits(jax.tree.map(lambda p: p[1], params)), bits(alone))
        self.assertEqual(report.skipped.shape, (2,))


class Refusals(unittest.TestCase):
    OPT = FusedStep("adamw", 1e-2)

    def test_rejects_invalid_input(self):
        state = self.OPT.init(PARAMS)
        half = FusedStep("adamw", 1e-2).init(jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS))
        cases = [
            ({**PARAMS, "b": jnp.zeros(7, jnp.int32)}, PARAMS, state, r"parameter \['b'\] has dtype int32"),
            (PARAMS, {**PARAMS, "b": jnp.zeros(8)}, state, r"gradient of \['b'\] has shape \(8,\)"),
            (PARAMS, {**PARAMS, "b": jnp.zeros(7, jnp.int32)}, state, r"gradient of \['b'\] has dtype int32"),
            (PARAMS, {"b": PARAMS["b"]}, state, "gradients must have the structure"),
            (PARAMS, PARAMS, {**state, "step": jnp.zeros(2, jnp.int32)}, "state 'step' has int32"),
            (PARAMS, PARAMS, {**state, "exp_avg": {**PARAMS, "w": jnp.zeros(3)}}, r"state 'exp_avg' of \['w'\]"),
            (jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS), PARAMS, state, "the state has no 'master'"),
            ({}, {}, half, "no parameters"),
        ]
        for params, grads, given, text in cases:
            with self.subTest(text), self.assertRaisesRegex(dsopt.ArgumentError, text):
                self.OPT.step(params, grads, given)

    def test_rejects_invalid_options(self):
        for options, text in (
            ({"algorithm": "nothing"}, "no algorithm 'nothing': it must be one of adam, adamw, lamb, .*, onebit_lamb"),
            ({"nonfinite": "maybe"}, "nonfinite"),
            ({"axis_name": "x"}, "1-bit family"),
            ({"algorithm": "onebit_adam"}, "needs axis_name"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.ArgumentError, text):
                FusedStep(**options)
        with self.assertRaisesRegex(TypeError, "betas"):
            FusedStep("adamw", betas=(0.9, 0.99))
        with self.assertRaisesRegex(dsopt.ArgumentError, "beta1 is 2"):
            FusedStep("adamw", b1=2.0).init(PARAMS)
        with self.assertRaisesRegex(dsopt.ArgumentError, "lr_decay is -1"):
            FusedStep("adagrad", lr_decay=-1.0).init(PARAMS)
        for name, options, text in (
            ("sgd", {"b1": 0.9}, "beta1"),
            ("sgd", {"dampening": 0.5}, "dampening has no effect without momentum"),
            ("sgd", {"nesterov": True}, "nesterov has no effect without momentum"),
            ("adagrad", {"momentum": 0.9}, "momentum"),
            ("adamw", {"nesterov": True}, "nesterov has no effect"),
            ("lion", {"eps": 1e-8}, "eps"),
        ):
            with self.subTest(name, **options), self.assertRaisesRegex(NotImplementedError, text):
                FusedStep(name, **options).init(PARAMS)
        with self.assertRaisesRegex(dsopt.UnsupportedError, "STOCHASTIC_ROUNDING"):
            FusedStep("adamw", stochastic_rounding=True).init(PARAMS)


class Exported(unittest.TestCase):
    def test_exported_program_runs_in_another_process(self):
        opt = FusedStep("adamw", 1e-2, max_norm=1.0)
        state, grads = opt.init(PARAMS), grads_at(PARAMS, 0)
        program = jax.export.export(
            jax.jit(lambda p, g, s: opt.step(p, g, s)[:2]),
            # JAX exports only known custom calls, unless others are named.
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("dsopt_step")],
        )(PARAMS, grads, state)
        script = (
            "import sys, jax, dsopt.jax, numpy as np, jax.numpy as jnp\n"
            "dsopt.jax.register()\n"
            "data = np.load(sys.argv[1], allow_pickle=True)\n"
            "args = data['args'].item()\n"
            "done = jax.export.deserialize(bytearray(data['program'].tobytes())).call(*args)\n"
            "print(b''.join(np.asarray(x).tobytes() for x in jax.tree.leaves(done)).hex())\n"
        )
        path = os.path.join(os.environ.get("TMPDIR", "/tmp"), "dsopt-export-%d.npz" % os.getpid())
        self.addCleanup(os.remove, path)
        np.savez(
            path,
            program=np.frombuffer(program.serialize(), np.uint8),
            args=_boxed(jax.tree.map(np.asarray, (PARAMS, grads, state))),
        )
        result = subprocess.run([sys.executable, "-c", script, path], stdout=subprocess.PIPE, check=True, text=True)
        self.assertEqual(result.stdout.strip(), b"".join(bits(opt.step(PARAMS, grads, state)[:2])).hex())


def _boxed(value):
    box = np.empty((), dtype=object)
    box[()] = value
    return box


if __name__ == "__main__":
    unittest.main()
