# SPDX-License-Identifier: Apache-2.0
"""Docstrings are the reference of the package, so every name and every argument is in one."""

import inspect
import re
import unittest

import dsopt


def described(argument, text):
    """A row of a table that begins with the argument, perhaps after others, or a mention between backquotes."""
    row = r"^ *(\w+, )*%s(, \w+)* +\S" % argument
    return re.search(row, text, re.MULTILINE) or re.search(r"`%s`" % argument, text)


def arguments(function):
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.name not in ("self", "cls") and p.kind not in (p.VAR_KEYWORD,)]


def documented():
    """(name, docstring, arguments) of everything that is exported, and of what a class has itself."""
    for name in dsopt.__all__:
        thing = getattr(dsopt, name)
        text = inspect.getdoc(thing) or ""
        if not inspect.isclass(thing):
            yield name, text, arguments(thing)
            continue
        raises = issubclass(thing, BaseException)
        has_own = "__doc__" in vars(thing) and not text.startswith(name + "(")  # a dataclass would write that one
        protocol = getattr(thing, "_is_protocol", False)
        yield name, text if has_own else "", [] if raises or protocol else arguments(thing)
        for base in [base for base in thing.__mro__ if base.__module__.startswith("dsopt.")]:
            for member, value in vars(base).items():
                value = getattr(value, "__func__", value)
                if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    found = inspect.getdoc(value) or ""
                    for other in re.findall(r"as in `(\w+)`", found):
                        found += "\n" + (inspect.getdoc(getattr(thing, other)) or "")
                    yield "%s.%s" % (name, member), found, [] if isinstance(value, property) else arguments(value)


class Docstrings(unittest.TestCase):
    def test_everything_exported_has_one(self):
        self.assertEqual([name for name, text, _ in documented() if len(text.split()) < 3], [])

    def test_every_argument_is_described(self):
        missing = ["%s: %s" % (n, a) for n, text, found in documented() for a in found if not described(a, text)]
        self.assertEqual(missing, [])

    def test_algorithms_show_the_defaults_of_the_library(self):
        for kind in dsopt._groups.ALGORITHMS:
            for field, parameter in inspect.signature(kind).parameters.items():
                self.assertEqual(parameter.default, getattr(kind(), field))
                self.assertRegex(kind.__doc__, r"\n    %s .*\(%s\)\n" % (field, re.escape(repr(parameter.default))))


if __name__ == "__main__":
    unittest.main()
