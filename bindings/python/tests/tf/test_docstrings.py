# SPDX-License-Identifier: Apache-2.0
"""Docstrings and errors of dsopt.tf. bindings/python/tests/test_docs.py checks that every argument is described."""
import inspect
import unittest

import tensorflow as tf

import dsopt
import dsopt.tf


class Docstrings(unittest.TestCase):
    def test_adamw_refers_to_all_arguments_of_adam(self):
        self.assertEqual(set(inspect.signature(dsopt.tf.AdamW).parameters),
                         set(inspect.signature(dsopt.tf.Adam).parameters))

    def test_errors_say_what_to_do(self):
        with self.assertRaisesRegex(dsopt.UnsupportedError, "does not support amsgrad=True: leave it False, or use "
                                    "keras.optimizers.AdamW"):
            dsopt.tf.AdamW(amsgrad=True)
        with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
            optimizer, variable = dsopt.tf.Adam(), tf.Variable([1.0])
            with self.assertRaisesRegex(dsopt.UnsupportedError, "does not support tf.distribute.Strategy: average"):
                optimizer.apply([tf.ones(1)], [variable])


if __name__ == "__main__":
    unittest.main()
