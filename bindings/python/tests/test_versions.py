# SPDX-License-Identifier: Apache-2.0
"""Versions of other packages: which are refused at import, and that all documents state the same ones."""

import pathlib
import re
import tempfile
import unittest

import dsopt
from dsopt import _nvidia, _versions
from support import PACKAGE, python

ROOT = PACKAGE.parent.parent
MODULES = {"torch": "dsopt.torch", "jax": "dsopt.jax", "tensorflow": "dsopt.tf", "keras": "dsopt.tf"}
# Modules that only have a version and what is read before it is compared.
BACKEND = "\nclass backend:\n    backend = staticmethod(lambda: 'tensorflow')\n"


class Refused(unittest.TestCase):
    def import_with(self, module, **versions):
        """Imports a module where these packages have such versions. Returns what the import prints on failure."""
        with tempfile.TemporaryDirectory() as folder:
            for name, version in versions.items():
                pathlib.Path(folder, name + ".py").write_text("__version__ = %r\n%s" % (version, BACKEND), "utf-8")
            program = "import sys\nsys.path.insert(0, %r)\nimport %s" % (folder, module)
            status, _, complaint = python(program)
        self.assertEqual(status, 1)
        return complaint.splitlines()[-1]

    def test_too_old_versions_are_named_at_import(self):
        for module, name, old, title, others in (
            ("dsopt", "numpy", "1.22.4", "NumPy", {}),
            ("dsopt.torch", "torch", "1.12.1+cu113", "torch", {}),
            ("dsopt.jax", "jax", "0.8.0", "JAX", {}),
            ("dsopt.jax", "jax", "0.4.38", "JAX", {}),
            ("dsopt.tf", "tensorflow", "2.15.1", "TensorFlow", {"keras": "2.15.0"}),
            ("dsopt.tf", "keras", "2.15.0", "Keras", {"tensorflow": "2.16.1"}),
        ):
            with self.subTest(module=module, name=name, old=old):
                oldest = _versions.OLDEST[name][1]
                self.assertEqual(
                    self.import_with(module, **{name: old, **others}),
                    "dsopt._errors.MissingError: %s needs %s %s or later, and this is %s %s: pip install '%s>=%s'"
                    % (module, title, oldest, title, old, name, oldest),
                )

    def test_oldest_and_unknown_versions_are_accepted(self):
        class Package:
            pass

        for name, (_, oldest) in _versions.OLDEST.items():
            Package.__name__ = name
            for version in (oldest, oldest + ".0rc1", oldest + "+cpu", "99", "unknown"):
                Package.__version__ = version
                _versions.require("dsopt.one", Package)
            Package.__version__ = "0.1.dev3"
            with self.assertRaises(ImportError) as caught:
                _versions.require("dsopt.one", Package)
            self.assertIsInstance(caught.exception, dsopt.MissingError)

    def test_package_works_without_numpy(self):
        program = """
            import sys
            sys.modules["numpy"] = None
            import array, dsopt
            w = array.array("f", [1.0])
            opt = dsopt.Optimizer({"w": w}, dsopt.AdamW(lr=0.5, weight_decay=0))
            opt.step([array.array("f", [1.0])])
            print(round(w[0], 3), opt.state["w.exp_avg"][0] > 0)
            """
        self.assertEqual(python(program), (0, "0.5 True\n", ""))


@unittest.skipUnless((ROOT / "pyproject.toml").exists(), "not in the source tree")
class Documents(unittest.TestCase):
    """The bounds in pyproject.toml, in the READMEs and in the package."""

    def text(self, path):
        return (ROOT / path).read_text(encoding="utf-8")

    def test_extras_have_the_bounds(self):
        section = self.text("pyproject.toml").partition("[project.optional-dependencies]")[2].partition("\n[")[0]
        lines = re.findall(r"^(\w+) = (.*)$", section, re.M)
        extras = {name: re.findall(r'"([\w-]+)([^"]*)"', rest) for name, rest in lines}
        self.assertLessEqual({"numpy", "torch", "jax", "tensorflow"}, set(extras))
        found = {}
        for extra in ("numpy", "torch", "jax", "tensorflow"):
            for name, bound in extras[extra]:
                if name in _versions.OLDEST:
                    self.assertNotIn(name, found)
                    found[name] = bound
        self.assertEqual(found, {name: ">=" + oldest for name, (_, oldest) in _versions.OLDEST.items()})
        # The version of CUDA that the package looks for first.
        self.assertEqual(extras["muon"], [("nvidia-cublas", ">=13,<14; sys_platform == 'linux'")])
        self.assertEqual(_nvidia.CUBLASLT.files[0].rpartition(".")[2], "13")

    def test_readmes_state_the_bounds(self):
        package = "bindings/python/"
        pages = {package + "dsopt/torch/README.md": ["torch"], package + "dsopt/jax/README.md": ["jax"],
                 package + "dsopt/tf/README.md": ["tensorflow", "keras"], package + "README.md": list(_versions.OLDEST),
                 "README.md": list(_versions.OLDEST), "docs/install.md": list(_versions.OLDEST)}
        for path, names in pages.items():
            stated = re.findall(r"(NumPy|torch|JAX|TensorFlow|Keras) (\d+(?:\.\d+)*) or later", self.text(path))
            for name in names:
                title, oldest = _versions.OLDEST[name]
                with self.subTest(path=path, name=name):
                    # A feature may need a later version.
                    of_name = [version for found, version in stated if found == title]
                    self.assertEqual(min(of_name, key=_versions.numbers, default=None), oldest)


    def test_page_of_installation_has_the_versions_of_the_locks(self):
        page = self.text("docs/install.md")
        for binding, names in (("numpy", ["numpy"]), ("torch", ["torch"]), ("jax", ["jax"]),
                               ("tf", ["tensorflow-cpu", "keras"])):
            extra = "tensorflow" if binding == "tf" else binding
            row = re.search(r"^\| `%s` \|.*\|(.*)\|$" % extra, page, re.M)[1]
            for kind in ("oldest", "branch", "newest"):
                path = "scripts/requirements/versions-%s-%s.txt" % (binding, kind)
                for name in names if (ROOT / path).exists() else ():
                    with self.subTest(path, name=name):
                        newest = re.findall(r"^%s==(\S+)" % name, self.text(path), re.M)[-1]
                        self.assertIn(newest, re.findall(r"[\d.]*\d", row))


if __name__ == "__main__":
    unittest.main()
