# SPDX-License-Identifier: Apache-2.0
"""Training compared with Keras' optimizers, with the features that Keras adds to an optimizer."""
import unittest

import keras
import numpy as np
import tensorflow as tf

import dsopt.tf
from support import data, distance, fit, make_model, same, variables, weights

# Keras computes powers of the betas in fp32, with an error of 1e-5 in the first steps; test_step.py has exact tests.
TOLERANCE = 2e-4


class ComparedWithKeras(unittest.TestCase):
    def compare(self, name, epochs=5, schedule=None, policy="float32", wrap=None, **options):
        results = []
        keras.mixed_precision.set_global_policy(policy)
        try:
            for module in (keras.optimizers, dsopt.tf):
                optimizer = getattr(module, name)(learning_rate=schedule() if schedule else 0.01, **options)
                model = make_model(wrap(optimizer) if wrap else optimizer)
                results.append((fit(model, epochs), weights(model), model))
        finally:
            keras.mixed_precision.set_global_policy("float32")
        (theirs, wanted, _), (ours, got, model) = results
        self.assertLess(ours[-1], 0.8 * ours[0], "the loss does not decrease")
        np.testing.assert_allclose(ours, theirs, rtol=1e-4 if policy == "float32" else 0.05)
        if policy == "float32":
            self.assertLess(distance(got, wanted), TOLERANCE)
        return model

    def test_adam_trains_like_keras(self):
        self.compare("Adam")

    def test_adamw_trains_like_keras(self):
        self.compare("AdamW", weight_decay=0.1)

    def test_global_norm_clipping_matches_keras(self):
        self.compare("AdamW", global_clipnorm=0.1)

    def test_norm_clipping_per_variable_matches_keras(self):
        self.compare("AdamW", clipnorm=0.1)

    def test_value_clipping_matches_keras(self):
        self.compare("AdamW", clipvalue=0.01)

    def test_schedule_matches_keras(self):
        self.compare("AdamW", schedule=lambda: keras.optimizers.schedules.ExponentialDecay(0.02, 10, 0.8))

    def test_callable_learning_rate_matches_keras(self):
        self.compare("AdamW", schedule=lambda: lambda: 0.015)

    def test_moving_average_matches_keras(self):
        model = self.compare("AdamW", use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4)
        self.assertEqual(len(model.optimizer._model_variables_moving_average), 6)

    def test_gradient_accumulation_matches_keras(self):
        model = self.compare("AdamW", gradient_accumulation_steps=2, global_clipnorm=1.0, epochs=8)
        self.assertEqual(int(model.optimizer.iterations), 8 * 8 // 2)

    def test_constant_loss_scale_matches_keras(self):
        self.compare("AdamW", loss_scale_factor=1024.0)

    def test_dynamic_loss_scale_matches_keras(self):
        self.compare("AdamW", wrap=lambda inner: keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**120))

    def test_mixed_precision_matches_keras(self):
        model = self.compare("AdamW", policy="mixed_bfloat16")
        self.assertEqual({v.dtype for v in model.trainable_variables}, {"float32"})
        self.compare("AdamW", policy="mixed_float16", epochs=8)

    def test_16_bit_weights_learn(self):
        keras.mixed_precision.set_global_policy("bfloat16")
        try:
            model = make_model(dsopt.tf.AdamW(0.01))
            losses = fit(model, 8)
        finally:
            keras.mixed_precision.set_global_policy("float32")
        self.assertIn("bfloat16", {v.dtype for v in model.trainable_variables})
        self.assertLess(losses[-1], 0.8 * losses[0])

    def test_eager_fit_matches_the_compiled_one(self):
        results = []
        for eager in (False, True):
            model = make_model(dsopt.tf.AdamW(0.01), run_eagerly=eager)
            fit(model, 1)
            results.append(weights(model.optimizer.variables))
        self.assertLess(distance(*results), 1e-5)  # TensorFlow's kernels differ slightly between the two

    def test_assigned_learning_rate_takes_effect_in_the_next_step(self):
        model = make_model(dsopt.tf.AdamW(0.01))
        fit(model, 1)
        before = weights(model)
        model.optimizer.learning_rate = 0.0
        fit(model, 1)
        self.assertTrue(same(weights(model), before))
        model.optimizer.learning_rate = 0.01
        fit(model, 1)
        self.assertFalse(same(weights(model), before))

    def test_constraints_are_applied(self):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(3, kernel_constraint="non_neg")])
        model.compile(dsopt.tf.Adam(0.05), "mse")
        model.fit(data()[0], np.zeros((256, 3)), epochs=1, verbose=0)
        self.assertGreaterEqual(float(tf.reduce_min(model.trainable_variables[0])), 0)


class CustomLoop(unittest.TestCase):
    def test_steps_inside_tf_function(self):
        x, y = data()
        results = []
        for make in (keras.optimizers.AdamW, dsopt.tf.AdamW):
            model, optimizer = make_model(None), make(0.01)
            optimizer.build(model.trainable_variables)

            @tf.function
            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(y, tf.int32), model(x))
                    loss = tf.reduce_mean(loss)
                optimizer.apply(tape.gradient(loss, model.trainable_variables))
                return loss

            losses = [float(step(x, y)) for _ in range(20)]
            self.assertLess(losses[-1], losses[0])
            results.append(weights(model))
        self.assertLess(distance(*results), TOLERANCE)

    def test_one_function_may_take_several_steps(self):
        once, often = variables((100,)), variables((100,))
        a, b = dsopt.tf.AdamW(0.01), dsopt.tf.AdamW(0.01)
        a.build(once)
        b.build(often)

        @tf.function
        def steps():
            for i in tf.range(5):
                b.apply([tf.cast(i + 1, tf.float32) * often[0]])

        steps()
        for i in range(5):
            a.apply([float(i + 1) * once[0]])
        self.assertTrue(same(weights(once), weights(often)))
        self.assertEqual(int(b.iterations), 5)


if __name__ == "__main__":
    unittest.main()
