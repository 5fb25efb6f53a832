# SPDX-License-Identifier: Apache-2.0
"""Moments in fewer bits and bfloat16 variables with remainders."""
import os
import tempfile
import unittest

import keras
import numpy as np
import tensorflow as tf

import dsopt
import dsopt.tf
from support import fit, gradients, make_model, same, variables, weights

ONE_BYTE = {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random"}
Q8 = {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}
REMAINDER = {"masters": "remainder", **ONE_BYTE}
SHAPES = ((7, 3), (), (0,), (5000,))


def stepped(optimizer, params, steps=4):
    optimizer.build(params)
    for step in range(steps):
        optimizer.apply_gradients(zip(gradients(params, step), params))
    return optimizer


def state_of(optimizer):
    """Returns the state of the variables by name, without iterations and learning rate."""
    return {variable.name: np.array(variable.numpy()) for variable in optimizer.variables[2:]}


class Steps(unittest.TestCase):
    def test_gives_same_bits_as_the_engine(self):
        for dtype, masters in (("float32", None), ("bfloat16", "remainder"), ("bfloat16", None)):
            for formats in (ONE_BYTE, Q8, {"exp_avg_format": "bf16"}):
                with self.subTest(dtype, masters=masters, **formats):
                    params = variables(*SHAPES, dtype=dtype)
                    copies = {"w%d:0" % i: np.array(p.numpy()) for i, p in enumerate(params)}
                    group = dsopt.AdamW(betas=(0.9, 0.999), eps=1e-7, weight_decay=0.125, eps_uncorrected=True,
                                        **formats)
                    options = {"masters": masters} if masters else {"no_master": True}
                    engine = dsopt.Optimizer(copies, group, seed=2**63 + 5, nonfinite="apply", **options)
                    ours = dsopt.tf.AdamW(0.01, weight_decay=0.125, masters=masters, seed=2**63 + 5, **formats)
                    ours.build(params)
                    for step in range(4):
                        grads = gradients(params, step)
                        ours.apply_gradients(zip(grads, params))
                        engine.step([np.array(g.numpy()) for g in grads], lr=np.array([0.01], np.float32))
                    self.assertTrue(same(weights(params), list(copies.values())))
                    wanted = [engine.state.copy(name) for name in engine.state if not name.startswith("optimizer.")]
                    found = state_of(ours).values()
                    self.assertEqual([x.tobytes() for x in found], [x.tobytes() for x in wanted])

    def test_state_variables_have_names_and_dtypes(self):
        params = variables((20, 30), dtype="bfloat16")
        optimizer = dsopt.tf.Adam(0.1, masters="remainder", exp_avg_format="e4m3", exp_avg_sq_format="q8")
        optimizer.build(params)
        self.assertEqual(
            {name: (x.dtype.name, x.shape) for name, x in state_of(optimizer).items()},
            {
                "w0_0_remainder": ("int16", (20, 30)),
                "w0_0_momentum": ("uint8", (20, 30)),
                "w0_0_momentum_scale": ("float32", (3,)),
                "w0_0_velocity": ("uint8", (20, 30)),
                "w0_0_velocity_scale": ("float32", (3,)),
            },
        )

    def test_f32_moments_are_chosen_by_words_of_the_name(self):
        params = [tf.Variable(tf.ones((4, 3)), name="dense/kernel"), tf.Variable(tf.ones(3), name="dense/bias")]
        plain = [tf.Variable(p) for p in params]
        optimizer = stepped(dsopt.tf.Adam(0.1, f32_moments=["bias", "norm"], **ONE_BYTE), params)
        stepped(dsopt.tf.Adam(0.1), plain)
        found = {name: x.dtype.name for name, x in state_of(optimizer).items()}
        self.assertEqual(found["dense_bias_0_momentum"], "float32")
        self.assertEqual(found["dense_kernel_0_momentum"], "uint8")
        self.assertNotIn("dense_bias_0_momentum_scale", found)
        self.assertTrue(same(weights(params[1:]), weights(plain[1:])))
        self.assertFalse(same(weights(params[:1]), weights(plain[:1])))

    def test_graph_and_eager_give_the_same_bits(self):
        results = []
        for graph in (False, True):
            params, optimizer = variables(*SHAPES, dtype="bfloat16"), dsopt.tf.AdamW(0.01, **REMAINDER)
            step = lambda grads: optimizer.apply_gradients(zip(grads, params))  # noqa: E731
            if graph:
                optimizer.build(params)
                step = tf.function(step)
            for i in range(4):
                step(gradients(params, i))
            results.append(weights(params) + weights(optimizer.variables))
        self.assertTrue(same(*results))

    def test_trains_a_model(self):
        losses = fit(make_model(dsopt.tf.AdamW(0.01, f32_moments=["bias"], **ONE_BYTE)), 5)
        self.assertLess(losses[-1], 0.8 * losses[0])

    def test_values_read_before_a_step_do_not_change(self):
        params = variables((6000,), dtype="bfloat16")
        optimizer = stepped(dsopt.tf.Adam(0.1, **REMAINDER), params)
        before = [variable.value.read_value() for variable in optimizer.variables[2:]]
        copies = [value.numpy().copy() for value in before]
        optimizer.apply_gradients(zip(gradients(params, 9), params))
        self.assertTrue(same([value.numpy() for value in before], copies))
        self.assertFalse(same(list(state_of(optimizer).values()), copies))


class Resume(unittest.TestCase):
    def check(self, resume):
        """Compares the next steps of an optimizer and of one that `resume` fills."""
        params = variables(*SHAPES, dtype="bfloat16")
        optimizer = stepped(dsopt.tf.AdamW(0.01, **REMAINDER), params)
        others = variables(*SHAPES, dtype="bfloat16", seed=6)  # of the same names, on which random rounding depends
        other = dsopt.tf.AdamW(0.01, **REMAINDER)
        other.build(others)
        resume(optimizer, params, other, others)
        for step in (7, 8):
            for each, list_ in ((optimizer, params), (other, others)):
                each.apply_gradients(zip(gradients(list_, step), list_))
        found, wanted = weights(others) + weights(other.variables), weights(params) + weights(optimizer.variables)
        self.assertTrue(same(found, wanted))

    def test_resumes_from_a_checkpoint(self):
        def resume(optimizer, params, other, others):
            with tempfile.TemporaryDirectory() as folder:
                path = tf.train.Checkpoint(optimizer=optimizer, params=params).save(os.path.join(folder, "run"))
                tf.train.Checkpoint(optimizer=other, params=others).restore(path).assert_consumed()

        self.check(resume)

    def test_resumes_from_optimizer_weights(self):
        def resume(optimizer, params, other, others):
            other.set_weights(weights(optimizer.variables))
            for a, b in zip(others, params):
                a.assign(b)

        self.check(resume)

    def test_resumes_from_a_model_file(self):
        """Keras gives other names to the variables, so random rounding would have other numbers."""
        first = make_model(dsopt.tf.AdamW(0.01, f32_moments=["bias"], **Q8))
        fit(first, 1)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run.keras")
            first.save(path)
            other = keras.models.load_model(path)
        self.assertTrue(same(weights(other.optimizer.variables), weights(first.optimizer.variables)))
        for model in (first, other):
            fit(model, 1)
        self.assertTrue(same(weights(other), weights(first)))

    def test_configuration_survives_a_round_trip(self):
        options = {"masters": "remainder", "seed": 2**64 - 1, "f32_moments": ["bias"], **Q8}
        for kind in (dsopt.tf.Adam, dsopt.tf.AdamW):
            optimizer = kind(0.25, **options)
            other = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
            self.assertEqual(other.get_config(), optimizer.get_config())
            for name, value in options.items():
                self.assertEqual(getattr(other, name), value)


class Values(unittest.TestCase):
    def test_export_f32_gives_values_of_the_shape(self):
        params = variables((20, 30), (), dtype="bfloat16")
        plain, optimizer = [tf.Variable(p) for p in params], dsopt.tf.Adam(0.1, **REMAINDER)
        stepped(optimizer, params, 1)
        exact = stepped(dsopt.tf.Adam(0.1), plain, 1)
        for index, p in enumerate(params):
            for name, slot in (("momentum", exact._momentums), ("velocity", exact._velocities)):
                found, wanted = optimizer.export_f32(p, name), slot[index].numpy()
                self.assertEqual((found.dtype, found.shape), (np.float32, tuple(p.shape)))
                np.testing.assert_allclose(found, wanted, rtol=2.0**-4, atol=np.abs(wanted).max() * 2.0**-15)
            master = optimizer.export_f32(p, "remainder")
            np.testing.assert_allclose(master, p.numpy().astype(np.float32), rtol=2.0**-8)
            self.assertTrue((master != p.numpy().astype(np.float32)).any())

    def test_import_f32_sets_state_and_variable(self):
        params = variables((20, 30), dtype="bfloat16")
        optimizer = stepped(dsopt.tf.Adam(0.1, **REMAINDER), params)
        kept = optimizer.export_f32(params[0], "velocity")
        new = np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30)
        optimizer.import_f32(params[0], "momentum", new)
        np.testing.assert_allclose(optimizer.export_f32(params[0], "momentum"), new, rtol=2.0**-4, atol=1e-4)
        before = weights(params)
        optimizer.import_f32(params[0], "remainder", new)
        np.testing.assert_array_equal(optimizer.export_f32(params[0], "remainder"), new)
        self.assertFalse(same(weights(params), before))
        np.testing.assert_array_equal(optimizer.export_f32(params[0], "velocity"), kept)

    def test_refusals(self):
        params = variables((5,))
        optimizer = stepped(dsopt.tf.Adam(0.1, **ONE_BYTE), params)
        before = weights(optimizer.variables)
        with self.assertRaisesRegex(dsopt.ArgumentError, "name is 'remainder', must be 'momentum' or 'velocity'"):
            optimizer.export_f32(params[0], "remainder")
        with self.assertRaisesRegex(dsopt.ArgumentError, "name is 'x', must be"):
            optimizer.import_f32(params[0], "x", np.zeros(5, np.float32))
        with self.assertRaisesRegex(dsopt.ArgumentError, "float32, and was given float16"):
            optimizer.import_f32(params[0], "momentum", np.zeros(5, np.float16))
        with self.assertRaisesRegex(dsopt.ArgumentError, "shape"):
            optimizer.import_f32(params[0], "momentum", np.zeros(4, np.float32))
        for each, variable in ((optimizer, tf.Variable(1.0, name="other")), (dsopt.tf.Adam(), params[0])):
            with self.assertRaisesRegex(dsopt.ArgumentError, "variable '(other|w0):0' is not stepped by this"):
                each.export_f32(variable, "momentum")
        self.assertTrue(same(weights(optimizer.variables), before))


class Refusals(unittest.TestCase):
    def test_rejects_invalid_arguments(self):
        for options, kind, text in (
            ({"exp_avg_format": "fp8"}, dsopt.ArgumentError, "exp_avg_format of AdamW is 'fp8', and must be one of"),
            ({"masters": "flat"}, dsopt.ArgumentError, "masters is 'flat', must be None or 'remainder'"),
            ({"f32_moments": "bias", **Q8}, dsopt.ArgumentError, "f32_moments is 'bias', must be a list of words"),
            ({"f32_moments": ["bias"]}, dsopt.UnsupportedError, "f32_moments has no effect"),
            ({"seed": -1}, dsopt.ArgumentError, "seed is -1"),
        ):
            with self.subTest(text), self.assertRaisesRegex(kind, text):
                dsopt.tf.Adam(**options)

    def test_rejects_formats_and_variables_before_variables_are_added(self):
        for options, dtype, text in (
            ({"exp_avg_sq_format": "e4m3"}, "float32", "exp_avg_sq_format is E4M3"),
            ({"exp_avg_sq_format": "bf16"}, "float32", "exp_avg_sq_format is BF16"),
            ({"masters": "remainder"}, "float16", "'w0:0' is F16: remainders are for BF16"),
        ):
            params, optimizer = variables((5,), dtype=dtype), dsopt.tf.Adam(**options)
            for build in (optimizer.build, tf.function(lambda params: optimizer.apply(gradients(params, 0), params))):
                with self.subTest(text), self.assertRaisesRegex(dsopt.UnsupportedError, text):
                    build(params)
            self.assertEqual(len(optimizer.variables), 2)

    def test_rejects_scales_and_remainders_of_another_shape_or_dtype(self):
        params = variables((300,), dtype="bfloat16")
        optimizer = dsopt.tf.Adam(0.1, **REMAINDER)
        optimizer.build(params)
        plan = optimizer._plan(params)
        for place, dtype, shape, text in (
            (0, "uint16", (300,), "remainder of 'w0:0' has dtype uint16, must be int16"),
            (1, "int8", (300,), "momentum of 'w0:0' has dtype int8, must be uint8"),
            (2, "float32", (300,), r"momentum_scale of 'w0:0' has shape \[300\], must be \[2\]"),
            (3, "float32", (300,), "velocity of 'w0:0' has dtype float, must be bfloat16"),
        ):
            kept, plan.state[place] = plan.state[place], tf.Variable(tf.zeros(shape, dtype))
            with self.subTest(text), self.assertRaisesRegex(tf.errors.InvalidArgumentError, text):
                optimizer.apply(gradients(params, 0), params)
            plan.state[place] = kept


if __name__ == "__main__":
    unittest.main()
