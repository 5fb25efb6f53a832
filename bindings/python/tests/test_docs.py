# SPDX-License-Identifier: Apache-2.0
"""Docstrings are the reference of the package, so they must describe every name and every argument."""

import inspect
import re
import unittest

import documented
import dsopt
from support import PACKAGE, python

reference = documented.reference()


class Docstrings(unittest.TestCase):
    def test_every_export_of_dsopt_is_described(self):
        self.assertEqual(list(documented.missing(dsopt)), [])

    def test_every_export_of_framework_modules_is_described(self):
        """In a separate process, in which frameworks that are not installed are stubs."""
        found = sorted(path.parent.name for path in (PACKAGE / "dsopt").glob("[a-z]*/__init__.py"))
        self.assertLessEqual({"jax", "tf", "torch"}, set(found))
        path = str(documented.__file__)
        program = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
        status, stdout, stderr = python(program, path, *["dsopt." + name for name in found], timeout=600)
        self.assertEqual((status, stdout), (0, ""), stderr)

    def test_missing_docstrings_are_found(self):
        class Module:
            __all__ = ["Thing", "call"]

            class Thing:
                """A thing with a method. `a` is described."""

                def __init__(self, a):
                    pass

                def method(self):
                    pass

            @staticmethod
            def call(a, bb):
                """Calls with an argument.

                a  the first one
                """

        Module.Thing.__module__ = "dsopt.test"
        self.assertEqual(
            list(documented.missing(Module)),
            ["Module.Thing.method has no docstring", "Module.call: the docstring does not describe bb"],
        )

    def test_algorithms_show_the_defaults_of_the_library(self):
        for kind in dsopt._groups.ALGORITHMS:
            for field, parameter in inspect.signature(kind).parameters.items():
                self.assertEqual(parameter.default, getattr(kind(), field))
                self.assertRegex(kind.__doc__, r"\n    %s .*\(%s\)\n" % (field, re.escape(repr(parameter.default))))


class Markdown(unittest.TestCase):
    """Markdown that the generator of the reference receives."""

    def test_tables_become_lists(self):
        text = "Text.\n\na, b    first\n        and more\n`cc`    third\n**rest  others\nAfter."
        self.assertEqual(
            reference.as_markdown(text),
            "Text.\n\n- `a`, `b`: first\n  and more\n- `cc`: third\n- `**rest`: others\n\nAfter.",
        )
        self.assertEqual(
            reference.rows_of(text), {"a": "first and more", "b": "first and more", "cc": "third", "rest": "others"}
        )

    def test_text_has_no_other_marks(self):
        text, expected = '2 * a[0] * b, "<w>.x", `c * d`', '2 \\* a\\[0\\] \\* b, "&lt;w>.x", `c * d`'
        self.assertEqual(reference.as_markdown(text), expected)
        self.assertEqual(reference.as_markdown("Text:\n\n    x = a * b[0]\n\nb"), "Text:\n\n    x = a * b[0]\n\nb")
        self.assertEqual(reference.as_markdown(""), "")


if __name__ == "__main__":
    unittest.main()
