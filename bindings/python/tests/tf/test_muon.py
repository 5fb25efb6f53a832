# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for other variables: the recurrence, Keras' state, blocks, clipping, refusals."""
import os
import tempfile
import unittest
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import dsopt
import dsopt.tf
from dsopt import _nvidia
from support import Reference, distance, fit, gradients, make_model, same, variables, weights

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
KERAS = tuple(map(int, keras.__version__.split(".")[:2]))
KERAS_FAILS = "keras.optimizers.Muon of Keras %s reads the path of a tf.Variable, which has none" % keras.__version__


def orthogonal(u, steps=5):
    """Returns the result of the iterations in double precision."""
    a, b, c = COEFFICIENTS
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / max(np.linalg.norm(x), 1e-7)
    for _ in range(steps):
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return x.T if u.shape[0] > u.shape[1] else x


class MuonReference:
    """Keras' Muon for matrices, in double precision."""

    def __init__(self, params, lr=0.01, momentum=0.95, nesterov=True, decay=0.004, rms_rate=0.2):
        self.p = [p.numpy().astype("float64") for p in params]
        self.m = [np.zeros_like(p) for p in self.p]
        self.lr, self.momentum, self.nesterov, self.decay, self.rms_rate = lr, momentum, nesterov, decay, rms_rate

    def step(self, grads):
        for i, g in enumerate(grads):
            g = np.asarray(g, "float64")
            self.m[i] = self.momentum * self.m[i] + g
            u = g + self.momentum * self.m[i] if self.nesterov else self.m[i]
            factor = 1.0 if self.rms_rate is None else self.rms_rate * max(g.shape) ** 0.5
            self.p[i] = self.p[i] * (1 - self.lr * self.decay) - self.lr * factor * orthogonal(u)


def normal(like, step, scale=1.0):
    random = np.random.RandomState(200 + step)
    return [tf.cast(scale * random.randn(*v.shape), v.dtype) for v in like]


def follow(optimizer, params, references, steps=4, scale=1.0):
    """Steps both; `references` has pairs of a reference and the indices of its parameters."""
    for step in range(steps):
        grads = normal(params, step, scale)
        optimizer.apply_gradients(zip(grads, params))
        for reference, places in references:
            reference.step([grads[place].numpy() for place in places])


class Formula(unittest.TestCase):
    def test_matches_keras_in_double_precision(self):
        for options in ({}, {"nesterov": False}, {"momentum": 0.8}, {"decay": 0.3}, {"rms_rate": 0.5},
                        {"rms_rate": None}):
            with self.subTest(options):
                params = variables((40, 24), (24, 40), (17, 17), (1, 5), (16, 1))
                reference = MuonReference(params, **options)
                given = {"weight_decay" if name == "decay" else name: value for name, value in options.items()}
                follow(dsopt.tf.Muon(0.01, ns_dtype="float32", **given), params, [(reference, range(5))])
                self.assertLess(distance(weights(params), reference.p), 1e-5)

    def test_products_of_bfloat16_are_close(self):
        params = variables((64, 48))
        reference = MuonReference(params)
        follow(dsopt.tf.Muon(0.01), params, [(reference, [0])])
        self.assertLess(distance(weights(params), reference.p), 1e-2)
        self.assertGreater(distance(weights(params), reference.p), 1e-6)  # not the products of float32

    def test_other_variables_are_stepped_by_adamw(self):
        params = variables((20, 30), (30,), (), (4, 5, 6))
        muon, adamw = MuonReference(params[:1], decay=0.02), Reference(params[1:], lr=0.01 * 0.5, decay=0.03 / 0.5)
        optimizer = dsopt.tf.Muon(0.01, weight_decay=0.02, adam_weight_decay=0.03, adam_lr_ratio=0.5,
                                  ns_dtype="float32")
        follow(optimizer, params, [(muon, [0]), (adamw, [1, 2, 3])])
        self.assertLess(distance(weights(params), muon.p + adamw.p), 1e-5)

    def test_excluded_variables_do_not_decay(self):
        params = variables((20, 30), (30,))
        muon, adamw = MuonReference(params[:1], decay=0.0), Reference(params[1:])
        optimizer = dsopt.tf.Muon(0.01, weight_decay=0.5, adam_weight_decay=0.5, ns_dtype="float32")
        optimizer.exclude_from_weight_decay(var_list=params)
        follow(optimizer, params, [(muon, [0]), (adamw, [1])])
        self.assertLess(distance(weights(params), muon.p + adamw.p), 1e-5)

    @unittest.skipIf(KERAS < (3, 13), KERAS_FAILS)
    def test_state_matches_keras(self):
        """Also with each kind of clipping, because the gradients of matrices are scaled."""
        for clipping in ({}, {"clipvalue": 0.3}, {"clipnorm": 2.0}, {"global_clipnorm": 3.0}):
            with self.subTest(clipping):
                ours, theirs = variables((20, 30), (7,)), variables((20, 30), (7,))
                options = dict(learning_rate=0.01, adam_lr_ratio=0.5, **clipping)
                # Keras assumes that variables have a path.
                ours, theirs = ([keras.Variable(v.numpy(), name="w%d" % i) for i, v in enumerate(each)]
                                for each in (ours, theirs))
                a, b = dsopt.tf.Muon(ns_dtype="float32", **options), keras.optimizers.Muon(**options)
                for step in range(4):
                    grads = normal(ours, step)
                    a.apply(grads, ours)
                    b.apply(grads, theirs)
                self.assertEqual([v.path.split("/")[1] for v in a.variables],
                                 [v.path.split("/")[1] for v in b.variables])
                self.assertLess(distance(weights(a.variables), weights(b.variables)), 2e-6)
                self.assertLess(distance(weights(ours), weights(theirs)), 1e-5)

    def test_gradients_of_float16_do_not_overflow(self):
        params = variables((20, 20), dtype="float16")
        optimizer = dsopt.tf.Muon(0.01)
        optimizer.apply_gradients(zip(normal(params, 0, 1e4), params))  # 20 times the gradient is above 65504
        self.assertTrue(np.isfinite(weights(params)[0]).all())

    def test_step_is_one_op(self):
        params, optimizer = variables((20, 30), (30,)), dsopt.tf.Muon(0.01)
        optimizer.build(params)
        traced = tf.function(lambda grads: optimizer.apply_gradients(zip(grads, params))).get_concrete_function(
            normal(params, 0))
        self.assertEqual([node.op for node in traced.graph.as_graph_def().node].count("DsoptStep"), 1)

    def test_graph_and_eager_give_the_same_bits(self):
        results = []
        for graph in (False, True):
            params, optimizer = variables((20, 30), (30,)), dsopt.tf.Muon(0.01, global_clipnorm=1.0)
            optimizer.build(params)
            step = lambda grads: optimizer.apply_gradients(zip(grads, params))  # noqa: E731
            step = tf.function(step) if graph else step
            for i in range(3):
                step(normal(params, i))
            results.append(weights(params) + weights(optimizer.variables))
        self.assertTrue(same(*results))


class Devices(unittest.TestCase):
    def test_cublaslt_is_loaded_for_muon_on_a_gpu(self):
        for kind, devices, expected in ((dsopt.tf.Muon, ["GPU"], [_nvidia.CUBLASLT]), (dsopt.tf.Muon, [], []),
                                        (dsopt.tf.AdamW, ["GPU"], [])):
            with self.subTest(kind=kind, devices=devices), \
                    mock.patch.object(tf.config, "list_physical_devices", return_value=devices), \
                    mock.patch.object(_nvidia, "load") as load:
                kind().build(variables((4, 6)))
                self.assertEqual([call.args[0] for call in load.call_args_list], expected)


class Choice(unittest.TestCase):
    def rules(self, optimizer, *paths_and_shapes):
        params = [keras.Variable(np.ones(shape, "float32"), name=name) for name, shape in paths_and_shapes]
        optimizer.build(params)
        return ["muon" if variable is None else "adamw" for variable in optimizer.adam_velocities]

    def test_matrices_except_embeddings_and_excluded_layers(self):
        shapes = (("kernel", (4, 5)), ("Embedding_table", (4, 5)), ("head", (4, 5)), ("bias", (5,)),
                  ("cube", (2, 3, 4)))
        self.assertEqual(self.rules(dsopt.tf.Muon(), *shapes), ["muon", "adamw", "muon", "adamw", "adamw"])
        self.assertEqual(self.rules(dsopt.tf.Muon(exclude_layers=["^he.d"], exclude_embeddings=False), *shapes),
                         ["muon", "muon", "adamw", "adamw", "adamw"])

    def test_blocks_are_orthogonalised_apart(self):
        whole, parts = variables((3, 8, 12)), variables((3, 8, 12))
        parts = [tf.Variable(parts[0][i]) for i in range(3)]
        a = dsopt.tf.Muon(0.01, blocks={"w0": (8, 12)})
        b = dsopt.tf.Muon(0.01)
        for step in range(3):
            grads = normal(whole, step)
            a.apply_gradients(zip(grads, whole))
            b.apply_gradients([(grads[0][i], parts[i]) for i in range(3)])
        self.assertTrue(same([weights(whole)[0][i] for i in range(3)], weights(parts)))
        self.assertEqual(tuple(a.momentums[0].shape), (3, 8, 12))

    def test_factor_by_the_shape_uses_outputs(self):
        """A Dense kernel (in, out) = (4, 16): sqrt(max(1, out / in)) = 2."""
        moves = []
        for inputs in (True, False):
            params = variables((4, 16))
            before = weights(params)[0]
            optimizer = dsopt.tf.Muon(0.01, weight_decay=None, rms_rate=None, adjust="original", rows_are_inputs=inputs,
                                      ns_dtype="float32")
            optimizer.apply_gradients(zip(normal(params, 0), params))
            moves.append(weights(params)[0] - before)
        self.assertLess(distance([moves[0]], [2 * moves[1]]), 1e-4)


class State(unittest.TestCase):
    def test_training_lowers_the_loss(self):
        losses = fit(make_model(dsopt.tf.Muon(0.01)))
        self.assertLess(losses[-1], 0.7 * losses[0])

    def test_resumes_from_a_checkpoint_and_a_model_file(self):
        make = lambda seed=1: make_model(dsopt.tf.Muon(0.01, blocks={"nothing": (2, 3)}), seed)  # noqa: E731
        whole, first, other = make(), make(), make(seed=9)
        fit(whole, 2)
        fit(first, 1)
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(model=first, optimizer=first.optimizer).save(os.path.join(folder, "run"))
            other.optimizer.build(other.trainable_variables)
            tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
            first.save(os.path.join(folder, "run.keras"))
            loaded = keras.models.load_model(os.path.join(folder, "run.keras"))
        for model in (other, loaded):
            fit(model, 1)
            self.assertTrue(same(weights(model) + weights(model.optimizer.variables),
                                 weights(whole) + weights(whole.optimizer.variables)))

    @unittest.skipIf(KERAS < (3, 13), KERAS_FAILS)
    def test_checkpoints_are_compatible_with_keras(self):
        makers = (lambda rate: keras.optimizers.Muon(rate, adam_lr_ratio=1), lambda rate: dsopt.tf.Muon(
            rate, ns_dtype="float32"))
        with tempfile.TemporaryDirectory() as folder:
            for saver, loader in (makers, makers[::-1]):
                first, second = ([keras.Variable(v.numpy(), name="w%d" % i)
                                  for i, v in enumerate(variables((30, 4), (9,), seed=seed))] for seed in (5, 6))
                a, b = saver(0.01), loader(0.02)
                a.build(first)
                for step in range(3):
                    a.apply(normal(first, step), first)
                path = tf.train.Checkpoint(optimizer=a, first=first).save(os.path.join(folder, "run"))
                b.build(second)
                tf.train.Checkpoint(optimizer=b, first=second).restore(path).assert_consumed()
                self.assertTrue(same(weights(second) + weights(b.variables), weights(first) + weights(a.variables)))
                for step in range(3, 6):
                    a.apply(normal(first, step), first)
                    b.apply(normal(second, step), second)
                self.assertLess(distance(weights(second), weights(first)), 1e-5)

    def test_low_precision_momentum_and_masters(self):
        params = variables((40, 24), (24,), dtype="bfloat16")
        optimizer = dsopt.tf.Muon(0.01, exp_avg_format="bf16_random", exp_avg_sq_format="q8", masters="remainder",
                                  f32_moments=["w1"], seed=3)
        for step in range(3):
            optimizer.apply_gradients(zip(normal(params, step), params))
        self.assertEqual([v.dtype for v in optimizer.momentums], ["bfloat16", "float32"])
        momentum = optimizer.export_f32(params[0], "momentum")
        self.assertEqual(momentum.shape, (40, 24))
        optimizer.import_f32(params[0], "momentum", 2 * momentum)
        self.assertTrue(same([optimizer.export_f32(params[0], "momentum")], [2 * momentum]))
        with self.assertRaisesRegex(dsopt.ArgumentError, "'momentum' or 'remainder'"):
            optimizer.export_f32(params[0], "velocity")
        self.assertEqual(optimizer.export_f32(params[0], "remainder").dtype, np.float32)

    def test_configuration_survives_a_round_trip(self):
        options = {"adam_beta_1": 0.8, "exclude_layers": ["head"], "muon_a": 3.0, "momentum": 0.9, "ns_steps": 3,
                   "nesterov": False, "rms_rate": None, "adjust": "original", "rows_are_inputs": False,
                   "ns_dtype": "float16", "blocks": {"qkv": (8, 8)}, "exp_avg_format": "bf16",
                   "adam_weight_decay": None, "name": "mine"}
        optimizer = dsopt.tf.Muon(0.25, **options)
        again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
        self.assertIs(type(again), dsopt.tf.Muon)
        self.assertEqual(again.get_config(), optimizer.get_config())
        for name, value in options.items():
            self.assertEqual(getattr(again, name), value)

    @unittest.skipIf(KERAS < (3, 13), "the defaults of keras.optimizers.Muon were others before Keras 3.13")
    def test_arguments_and_defaults_match_keras(self):
        theirs, ours = keras.optimizers.Muon().get_config(), dsopt.tf.Muon().get_config()
        for config in (theirs, ours):
            del config["name"]
        self.assertEqual(ours, theirs)


class Refusals(unittest.TestCase):
    def test_rejects_invalid_arguments(self):
        for options, words in (({"momentum": 1.0}, "momentum is 1.0"), ({"momentum": 0}, "momentum is 0"),
                               ({"rms_rate": 0}, "rms_rate is 0"), ({"adam_lr_ratio": 0}, "adam_lr_ratio is 0"),
                               ({"adjust": "original"}, "adjust='original' has no effect with rms_rate"),
                               ({"rms_rate": None, "adjust": "often"}, "adjust"), ({"ns_dtype": "float8"}, "ns_dtype"),
                               ({"ns_schedule": "often"}, "ns_schedule"), ({"blocks": {"w": 3}}, r"blocks\['w'\] is 3"),
                               ({"masters": "fp32"}, "masters is 'fp32'"),
                               ({"exclude_layers": "head"}, "exclude_layers is 'head'")):
            with self.subTest(options), self.assertRaisesRegex(dsopt.ArgumentError, words):
                dsopt.tf.Muon(**options)

    def test_rejects_what_the_engine_refuses(self):
        for options, shape, words in (({"exp_avg_format": "q8"}, (4, 5), "exp_avg_format"),
                                      ({"blocks": {"w": (3, 5)}}, (4, 5), "w0")):
            with self.subTest(options), self.assertRaisesRegex(dsopt.Error, words):
                dsopt.tf.Muon(**options).build(variables(shape))
        for options, words in (({"ns_steps": 0}, "ns_steps"), ({"muon_a": 3.0, "ns_schedule": "you"}, "ns_a")):
            params, optimizer = variables((4, 5)), dsopt.tf.Muon(**options)
            before = weights(params)
            optimizer.build(params)
            with self.subTest(options), self.assertRaisesRegex(tf.errors.OpError, words):
                optimizer.apply(normal(params, 0), params)
            self.assertTrue(same(weights(params), before))


if __name__ == "__main__":
    unittest.main()
