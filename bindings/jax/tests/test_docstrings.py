# SPDX-License-Identifier: Apache-2.0
"""Docstrings are the reference of dsopt.jax: a row for each argument of each public callable."""

import inspect
import re
import unittest

import support  # noqa: F401 - first, it sets up the devices  pylint: disable=unused-import
import dsopt
import dsopt.jax
from dsopt.jax import _fused


def public():
    """(name, object) of what is exported, and of the public members that classes have themselves."""
    for name in dsopt.jax.__all__:
        thing = getattr(dsopt.jax, name)
        yield name, thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    yield "%s.%s" % (name, member), value


def arguments(thing):
    if isinstance(thing, property):
        return []
    return [name for name in inspect.signature(thing).parameters if name != "self"]


def is_row(argument, text):
    """A row of a table: the argument, perhaps among others, and words; or the heading of a table of options."""
    return re.search(r"(?m)^ *((\w+, )*%s(, \w+)*  +\S|`%s`,)" % (argument, argument), text)


class Docstrings(unittest.TestCase):
    def test_every_argument_is_described(self):
        missing = [
            "%s: %s" % (name, argument)
            for name, thing in public()
            for argument in arguments(thing)
            if not is_row(argument, inspect.getdoc(thing) or "")
        ]
        self.assertEqual(missing, [])
        self.assertEqual([name for name, thing in public() if len((inspect.getdoc(thing) or "").split()) < 2], [])

    def test_every_option_and_algorithm_of_fused_step_is_described(self):
        text = dsopt.jax.FusedStep.__doc__
        options = _fused._GROUP_OPTIONS | set(_fused._GROUP_FLAGS)  # pylint: disable=protected-access
        self.assertEqual([name for name in options if not is_row(name, text)], [])
        named = re.findall(r'"(\w+)"', re.search(r"algorithm  (.*?)\n +mask", text, re.DOTALL).group(1))
        with self.assertRaises(dsopt.ArgumentError) as caught:
            dsopt.jax.FusedStep("nothing")
        self.assertEqual(sorted(named), sorted(str(caught.exception).split("one of ")[1].split(" (")[0].split(", ")))


class Refusals(unittest.TestCase):
    def test_say_what_to_do(self):
        for options, text in (({"nesterov": True}, "nesterov=True"), ({"eps_root": 1e-8}, "an eps_root other than 0")):
            with self.assertRaisesRegex(dsopt.UnsupportedError, "does not support %s: use .* in optax" % text):
                dsopt.jax.adamw(0.1, **options)
        with self.assertRaisesRegex(dsopt.ArgumentError, "onebit_adam needs axis_name: pass the name"):
            dsopt.jax.FusedStep("onebit_adam")
        with self.assertRaisesRegex(dsopt.ArgumentError, "no loss scale: pass loss_scale to FusedStep"):
            dsopt.jax.FusedStep("adamw").loss_scale({})


if __name__ == "__main__":
    unittest.main()
