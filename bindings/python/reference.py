#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""reference.py FOLDER: writes the reference of the Python package, one HTML page per public module.

pdoc generates the pages from the docstrings. It imports the modules, because some docstrings are assembled at import.
PyTorch, JAX and TensorFlow need not be installed: an absent framework is replaced by stubs. DSOPT_LIBRARY names the
library; the defaults of the algorithms are read from it.
"""

import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import pathlib
import pkgutil
import re
import sys
import types
import typing

FRAMEWORKS = ("torch", "jax", "jaxlib", "optax", "keras", "tensorflow", "numpy")
VALUES = {"keras.backend.backend": lambda: "tensorflow"}  # values of stubs that are read at import
VERSIONS = {"tensorflow": "2.16", "keras": "3.10"}  # for the package does not import with earlier ones


# ------------------------------------------------------------------------------------------------------------- stubs
class Stub:
    """An attribute of an absent framework: a class to derive from, a decorator without effect, a type or a constant."""

    def __init__(self, path):
        self._path = path

    def __getattr__(self, name):
        return stub_of(self, self._path, name)

    def __repr__(self):
        return self._path

    def __call__(self, *arguments, **options):
        if len(arguments) == 1 and not options and (inspect.isfunction(arguments[0]) or inspect.isclass(arguments[0])):
            return arguments[0]  # a decorator
        shown = list(map(repr, arguments)) + ["%s=%r" % option for option in options.items()]
        return Stub("%s(%s)" % (self._path, ", ".join(shown)))

    def __mro_entries__(self, bases):
        module, _, name = self._path.rpartition(".")
        self.__dict__.setdefault("_kind", type(name, (), {"__module__": module}))
        return (self._kind,)

    def __or__(self, other):
        return typing.Union[self, other]

    def __ror__(self, other):
        return typing.Union[other, self]


def stub_of(owner, path, name):
    """Creates attribute `name` of a stub, sets it and returns it."""
    if name.startswith("__"):
        raise AttributeError("%s has no attribute %s" % (path, name))
    found = VALUES.get("%s.%s" % (path, name)) or Stub("%s.%s" % (path, name))
    setattr(owner, name, found)
    return found


class StubModule(types.ModuleType):
    """A module of an absent framework. Its attributes are stubs."""

    def __init__(self, name):
        super().__init__(name)
        self.__version__ = VERSIONS.get(name, "2.0")

    def __getattr__(self, name):
        return stub_of(self, self.__name__, name)


class Stubs:
    """Finds and loads the modules of absent frameworks; the first finder in sys.meta_path."""

    def __init__(self):
        found = {name: importlib.util.find_spec(name) for name in FRAMEWORKS}
        # A folder with that name in sys.path, such as tests/torch, is found as a package without a file.
        self.absent = [name for name, spec in found.items() if spec is None or spec.origin is None]

    def find_spec(self, name, path=None, target=None):
        found = name.partition(".")[0] in self.absent
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    @staticmethod
    def create_module(spec):
        return StubModule(spec.name)

    @staticmethod
    def exec_module(module):
        pass


def public_modules():
    """Imports the package and its subpackages. Returns the modules by name. Replaces absent frameworks by stubs."""
    if not any(isinstance(finder, Stubs) for finder in sys.meta_path):
        sys.meta_path.insert(0, Stubs())
    package = importlib.import_module("dsopt")
    # Packages only: in an installed package the library itself, libdsopt.so, has the name of an extension module.
    modules = pkgutil.iter_modules(package.__path__)
    found = sorted(found.name for found in modules if found.ispkg and not found.name.startswith("_"))
    names = ["dsopt"] + ["dsopt." + name for name in found]
    return {name: importlib.import_module(name) for name in names}


# ---------------------------------------------------------------------------------------------------------- Markdown
ROW = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*|`[^`]+`(?:, `[^`]+`)*)(?:,? {2,}|, (?=\w))(\S.*)")


def escaped(text):
    """Escapes Markdown marks, except between backquotes."""
    parts = re.split(r"(`[^`]+`)", text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\*\[\]#])", r"\\\1", parts[i]).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(parts)


def rows_of(text):
    """Returns the table rows of a docstring: the descriptions by name."""
    rows, names, indent = {}, [], None
    for line in text.splitlines():
        row = row_of(line)
        if row:
            names, indent = [name.strip("`*") for name in row.group(1).split(", ")], row.start(2)
            rows.update(dict.fromkeys(names, row.group(2)))
        elif indent is not None and line.startswith(" " * indent):
            rows.update({name: "%s %s" % (rows[name], line.strip()) for name in names})
        else:
            indent = None
    return rows


def row_of(line):
    """Returns the match of a table row: names, at least two spaces, and a description."""
    found = ROW.fullmatch(line)
    return found if found and "  " in line[: found.start(2)] else None


def as_markdown(text):
    """Converts a docstring to Markdown. Its tables become lists."""
    lines, indent, code = [], None, False
    for line in text.splitlines():
        code = line.startswith("    ") and indent is None and (code or not lines or not lines[-1])
        row = row_of(line)
        if row:
            if indent is None and lines and lines[-1]:
                lines.append("")  # Markdown needs an empty line before a list
            indent = row.start(2)
            names = ", ".join("`%s`" % name.strip("`") for name in row.group(1).split(", "))
            lines.append("- %s: %s" % (names, escaped(row.group(2))))
        elif indent is not None and line.startswith(" " * indent):
            lines.append("  " + escaped(line.strip()))
        else:
            if indent is not None and line:
                lines.append("")
            indent = None
            lines.append(line if code else escaped(line))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- pages
def public_bases(kind, exported):
    """Returns (module, name, text) of the bases. A base class that the package does not export is replaced by its
    bases."""
    for base in kind.__bases__:
        if base.__module__.split(".")[0] == "dsopt" and base not in exported:
            yield from public_bases(base, exported)
        elif base is not object:
            text = base.__name__ if base.__module__ == "builtins" else "%s.%s" % (base.__module__, base.__qualname__)
            yield base.__module__, base.__qualname__, text


def prepare(namespace, exported):
    """Converts the docstrings of a pdoc.doc.Module or Class and of its members to Markdown. Members that a class
    inherits
    inside the package are documented as its own."""
    rows = rows_of(namespace.docstring)
    if namespace.kind == "class":
        namespace.own_members = [m for m in namespace.members.values() if m.taken_from[0].split(".")[0] == "dsopt"]
        namespace.inherited_members, namespace.decorators = {}, []
        namespace.bases = list(dict.fromkeys(public_bases(namespace.obj, exported)))
    for member in namespace.own_members:
        if member.kind == "class":
            prepare(member, exported)
            continue
        if member.docstring.startswith(("Alias for field number", "Create new instance of")):  # of a NamedTuple
            member.docstring = ""
        if member.kind == "variable" and not member.docstring:
            made = getattr(namespace.obj, member.name, None)  # property(..., doc="..."), for which pdoc finds no text
            member.docstring = inspect.getdoc(made) if isinstance(made, property) else rows.get(member.name, "")
        member.docstring = as_markdown(member.docstring)
    namespace.docstring = as_markdown(namespace.docstring)


def write(folder):
    """Writes the pages. Returns their paths."""
    import pdoc.doc
    import pdoc.render

    found = public_modules()
    exported = {getattr(module, name) for module in found.values() for name in module.__all__}
    footer = "dsopt %s" % found["dsopt"].__version__
    pdoc.render.configure(show_source=False, search=False, footer_text=footer)
    modules = {name: pdoc.doc.Module(module) for name, module in found.items()}
    modules["dsopt"].submodules = [module for name, module in modules.items() if name != "dsopt"]
    for module in modules.values():
        prepare(module, exported)
    pages = {name.replace(".", "/") + ".html": pdoc.render.html_module(m, modules) for name, m in modules.items()}
    pages["index.html"] = pdoc.render.html_index(modules)
    for path, text in pages.items():
        file = pathlib.Path(folder, path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return sorted(pages)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    for path in write(sys.argv[1]):
        print(os.path.join(sys.argv[1], path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
