# SPDX-License-Identifier: Apache-2.0
"""Docstrings and errors of dsopt.jax. bindings/python/tests/test_docs.py checks that every argument is described."""

import re
import unittest

import support  # noqa: F401 - first, it sets up the devices  pylint: disable=unused-import
import dsopt
import dsopt.jax
from dsopt.jax import _fused


def is_row(argument, text):
    """Returns a match for a table row with the argument, possibly among others, or for the heading of a table of
    options."""
    return re.search(r"(?m)^ *((\w+, )*%s(, \w+)*  +\S|`%s`,)" % (argument, argument), text)


class Docstrings(unittest.TestCase):
    def test_every_option_and_algorithm_of_fused_step_is_described(self):
        text = dsopt.jax.FusedStep.__doc__
        options = _fused._OPTIONS  # pylint: disable=protected-access
        self.assertEqual([name for name in options if not is_row(name, text)], [])
        named = re.findall(r'"(\w+)"', re.search(r"algorithm  (.*?)\n +mask", text, re.DOTALL).group(1))
        with self.assertRaises(dsopt.ArgumentError) as caught:
            dsopt.jax.FusedStep("nothing")
        self.assertEqual(sorted(named), sorted(str(caught.exception).split("one of ")[1].split(" (")[0].split(", ")))


class Refusals(unittest.TestCase):
    def test_errors_say_what_to_do(self):
        for options, text in (({"nesterov": True}, "nesterov=True"), ({"eps_root": 1e-8}, "an eps_root other than 0")):
            with self.assertRaisesRegex(dsopt.UnsupportedError, "does not support %s: use .* in optax" % text):
                dsopt.jax.adamw(0.1, **options)
        with self.assertRaisesRegex(dsopt.ArgumentError, "onebit_adam needs axis_name: pass the name"):
            dsopt.jax.FusedStep("onebit_adam")
        with self.assertRaisesRegex(dsopt.ArgumentError, "no loss scale: pass loss_scale to FusedStep"):
            dsopt.jax.FusedStep("adamw").loss_scale({})


if __name__ == "__main__":
    unittest.main()
