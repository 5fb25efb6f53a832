# SPDX-License-Identifier: Apache-2.0
"""documented.py [MODULE...]: prints the public names of the modules whose docstring is missing or lacks an argument.
Without arguments: of all modules of the package. Absent frameworks are replaced by the stubs of reference.py."""

import importlib.util
import inspect
import pathlib
import re
import sys


def reference():
    """Imports bindings/python/reference.py and returns the module."""
    path = pathlib.Path(__file__).resolve().parents[1] / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(argument, text):
    """True if a table row begins with the argument, possibly after others, or if it is mentioned between backquotes."""
    row = r"^ *(\w+, )*%s(, \w+)* +\S" % argument
    return re.search(row, text, re.MULTILINE) or re.search(r"`%s`" % argument, text)


def arguments(function):
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.name not in ("self", "cls") and p.kind not in (p.VAR_KEYWORD,)]


def entries(module):
    """Yields (name, docstring, arguments) of all exports of a module, and of the members that a class has from the
    package."""
    for name in module.__all__:
        thing = getattr(module, name)
        text = inspect.getdoc(thing) or ""
        if not inspect.isclass(thing):
            yield name, text, arguments(thing)
            continue
        raises = issubclass(thing, BaseException)
        # Excludes the docstring generated for a dataclass.
        has_own = "__doc__" in vars(thing) and not text.startswith(name + "(")
        protocol = getattr(thing, "_is_protocol", False)
        yield name, text if has_own else "", [] if raises or protocol else arguments(thing)
        for member, value in members(thing):
            found = inspect.getdoc(value) or ""
            for other in re.findall(r"as in `(\w+)`", found):
                found += "\n" + (inspect.getdoc(getattr(thing, other)) or "")
            yield "%s.%s" % (name, member), found, [] if isinstance(value, property) else arguments(value)


def members(kind):
    """Yields (name, function or property) of the public members that a class has from classes of the package."""
    seen = set()
    for base in [base for base in kind.__mro__ if base.__module__.startswith("dsopt.")]:
        for member, value in vars(base).items():
            value = getattr(value, "__func__", value)
            if not member.startswith("_") and member not in seen and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                yield member, getattr(kind, member) if inspect.isfunction(value) else value
            seen.add(member)


def resolve(module, name):
    """Returns the object of a name of entries()."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def missing(module):
    """Yields the names without a docstring, and the arguments that no docstring describes."""
    for name, text, found in entries(module):
        if len(text.split()) < 3:
            yield "%s.%s has no docstring" % (module.__name__, name)
        for argument in found:
            if not described(argument, text):
                yield "%s.%s: the docstring does not describe %s" % (module.__name__, name, argument)


if __name__ == "__main__":
    for public in reference().public_modules().values():
        if public.__name__ in (sys.argv[1:] or [public.__name__]):
            print("\n".join(missing(public)), end="\n" if any(missing(public)) else "")
