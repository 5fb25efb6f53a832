# SPDX-License-Identifier: Apache-2.0
"""Saving and continuing: tf.train.Checkpoint, Keras' files, configurations, and alternating with Keras' optimizer."""
import os
import subprocess
import sys
import tempfile
import unittest

import keras
import numpy as np
import tensorflow as tf

import dsopt.tf
from support import distance, fit, gradients, make_model, same, variables, weights


def everything(model):
    return weights(model) + weights(model.optimizer.variables)


class Resume(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "run")
        self.whole = make_model(dsopt.tf.AdamW(0.01, global_clipnorm=1.0))
        fit(self.whole, 2)
        self.first = make_model(dsopt.tf.AdamW(0.01, global_clipnorm=1.0))
        fit(self.first, 1)

    def check_next_steps(self, model):
        self.assertTrue(same(everything(model), everything(self.first)))
        fit(model, 1)
        self.assertTrue(same(everything(model), everything(self.whole)))

    def test_resumes_from_a_checkpoint(self):
        path = tf.train.Checkpoint(model=self.first, optimizer=self.first.optimizer).save(self.path)
        other = make_model(dsopt.tf.AdamW(0.01, global_clipnorm=1.0), seed=9)
        other.optimizer.build(other.trainable_variables)
        tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
        self.check_next_steps(other)

    def test_resumes_before_variables_are_created(self):
        path = tf.train.Checkpoint(model=self.first, optimizer=self.first.optimizer).save(self.path)
        other = make_model(dsopt.tf.AdamW(0.01, global_clipnorm=1.0), seed=9)
        status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
        other.optimizer.build(other.trainable_variables)
        status.assert_existing_objects_matched()
        self.check_next_steps(other)

    def test_resumes_from_a_model_file(self):
        self.first.save(self.path + ".keras")
        self.check_next_steps(keras.models.load_model(self.path + ".keras"))

    def test_model_file_needs_the_import_of_dsopt(self):
        """README.md, "What differs from Keras"."""
        self.first.save(self.path + ".keras")
        load = "model = keras.models.load_model(%r%s)"
        for imports, options, words in (("", "", "Could not locate class 'AdamW'"), ("", ", compile=False", "3 layers"),
                                        (", dsopt.tf", "", "3 layers")):
            program = "import keras%s\n%s\nprint(len(model.layers), 'layers')" % (
                imports, load % (self.path + ".keras", options))
            done = subprocess.run([sys.executable, "-c", program], text=True, timeout=600, check=False,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            self.assertIn(words, done.stdout)

    def test_resumes_from_optimizer_weights(self):
        other = make_model(dsopt.tf.AdamW(0.01, global_clipnorm=1.0), seed=9)
        other.optimizer.build(other.trainable_variables)
        other.set_weights(self.first.get_weights())
        other.optimizer.set_weights(weights(self.first.optimizer.variables))
        self.check_next_steps(other)


class WithKeras(unittest.TestCase):
    def test_checkpoints_are_compatible_with_keras(self):
        makers = (keras.optimizers.AdamW, dsopt.tf.AdamW)
        with tempfile.TemporaryDirectory() as folder:
            for saver, loader in (makers, makers[::-1]):
                first, second = variables((30, 4), (9,)), variables((30, 4), (9,), seed=6)
                a, b = saver(0.01), loader(0.02)
                for step in range(3):
                    a.apply_gradients(zip(gradients(first, step), first))
                path = tf.train.Checkpoint(optimizer=a, first=first).save(os.path.join(folder, saver.__module__))
                b.build(second)
                tf.train.Checkpoint(optimizer=b, first=second).restore(path).assert_consumed()
                self.assertTrue(same(weights(second) + weights(b.variables), weights(first) + weights(a.variables)))
                for step in range(3, 6):
                    a.apply_gradients(zip(gradients(first, step), first))
                    b.apply_gradients(zip(gradients(second, step), second))
                self.assertLess(distance(weights(second), weights(first)), 1e-5)


class Changed(unittest.TestCase):
    """A file without one variable, or with one of another shape or dtype, is refused by name, and nothing changes."""

    CASES = (
        (dsopt.tf.Adam, {}),
        (dsopt.tf.AdamW, {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}),
        (dsopt.tf.AdamW, {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random"}),
        (dsopt.tf.Muon, {}),
    )

    @staticmethod
    def store_of(optimizer):
        store = {}
        optimizer.save_own_variables(store)
        return {key: np.array(value) for key, value in store.items()}

    def each(self, store):
        """Yields each change of a file, and a word of the error."""
        for key, value in store.items():
            rest = {name: other for name, other in store.items() if name != key}
            what = "variable %s of the file" % key
            yield "without " + key, rest, what
            yield "renamed " + key, {**rest, "old": value}, what
            yield "cut " + key, {**store, key: value.ravel()[1:] if value.ndim else value[None]}, what
            yield "float16 " + key, {**store, key: value.astype(np.float16)}, what
        yield "more", {**store, str(len(store)): store["0"]}, "of another optimizer"
        for steps in (-1, 2**31):
            yield "iterations %d" % steps, {**store, "0": np.array(steps, store["0"].dtype)}, "variable 0 of the file"

    def test_is_refused_by_name(self):
        for kind, options in self.CASES:
            model = make_model(kind(0.01, **options))
            fit(model, 1)
            before, store = everything(model), self.store_of(model.optimizer)
            for what, changed, word in self.each(store):
                with self.subTest(kind.__name__, **options, what=what):
                    with self.assertRaisesRegex(dsopt.Error, word):
                        model.optimizer.load_own_variables(changed)
                    self.assertTrue(same(everything(model), before))
            model.optimizer.load_own_variables(store)
            self.assertTrue(same(everything(model), before))

    def test_file_of_keras_loads(self):
        theirs, ours = make_model(keras.optimizers.AdamW(0.01)), make_model(dsopt.tf.AdamW(0.02))
        fit(theirs, 1)
        ours.optimizer.build(ours.trainable_variables)
        ours.optimizer.load_own_variables(self.store_of(theirs.optimizer))
        self.assertTrue(same(weights(ours.optimizer.variables), weights(theirs.optimizer.variables)))


class Configuration(unittest.TestCase):
    def test_survives_a_round_trip(self):
        options = {"weight_decay": 0.3, "beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-5, "clipvalue": 2.0,
                   "name": "mine"}
        for kind in (dsopt.tf.Adam, dsopt.tf.AdamW):
            optimizer = kind(0.25, **options)
            other = kind.from_config(optimizer.get_config())
            self.assertEqual(other.get_config(), optimizer.get_config())
            for name, value in options.items():
                self.assertEqual(getattr(other, name), value)
            again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
            self.assertIs(type(again), kind)
            self.assertEqual(again.get_config(), optimizer.get_config())

    def test_arguments_and_defaults_match_keras(self):
        for name in ("Adam", "AdamW"):
            theirs = getattr(keras.optimizers, name)().get_config()
            ours = getattr(dsopt.tf, name)().get_config()
            for config in (theirs, ours):
                del config["name"]
            self.assertEqual(ours, theirs)

    def test_schedule_survives_a_round_trip(self):
        optimizer = dsopt.tf.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 100))
        other = dsopt.tf.AdamW.from_config(optimizer.get_config())
        self.assertEqual(other._learning_rate.get_config(), optimizer._learning_rate.get_config())


if __name__ == "__main__":
    unittest.main()
