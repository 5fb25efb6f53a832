# SPDX-License-Identifier: Apache-2.0
"""Docstrings are the reference of dsopt.tf: each argument of each public callable is in one."""
import inspect
import re
import unittest

import tensorflow as tf

import dsopt
import dsopt.tf


class Docstrings(unittest.TestCase):
    def test_every_argument_is_described(self):
        missing = []
        for name in dsopt.tf.__all__:
            kind = getattr(dsopt.tf, name)
            own = [kind] + [value for member, value in vars(kind).items()
                            if not member.startswith("_") and inspect.isfunction(value)]
            for thing in own:
                text = inspect.getdoc(thing) or ""
                self.assertGreater(len(text.split()), 2, thing)
                # A row of a table, or the list of AdamW's arguments that are those of Adam
                shared = re.search(r"The other arguments \((.*?)\)", text, re.DOTALL)
                known = re.split(r",\s+", shared.group(1)) if shared else []
                missing += ["%s: %s" % (thing.__name__, argument) for argument in inspect.signature(thing).parameters
                            if argument != "self" and argument not in known
                            and not re.search(r"(?m)^ *(\w+, )*%s(, \w+)*  +\S" % argument, text)]
        self.assertEqual(missing, [])
        self.assertEqual(set(inspect.signature(dsopt.tf.AdamW).parameters),
                         set(inspect.signature(dsopt.tf.Adam).parameters))

    def test_refusals_say_what_to_do(self):
        with self.assertRaisesRegex(dsopt.UnsupportedError, "does not support amsgrad=True: leave it False, or use "
                                    "keras.optimizers.AdamW"):
            dsopt.tf.AdamW(amsgrad=True)
        with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
            optimizer, variable = dsopt.tf.Adam(), tf.Variable([1.0])
            with self.assertRaisesRegex(dsopt.UnsupportedError, "does not support tf.distribute.Strategy: average"):
                optimizer.apply([tf.ones(1)], [variable])


if __name__ == "__main__":
    unittest.main()
