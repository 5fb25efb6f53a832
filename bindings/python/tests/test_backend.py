# SPDX-License-Identifier: Apache-2.0
"""The build backend, with a stub of meson-python."""

import contextlib
import importlib.util
import io
import os
import pathlib
import sys
import tempfile
import types
import unittest
from unittest import mock

BACKEND = pathlib.Path(__file__).resolve().parent.parent / "wheel_backend.py"
HOOKS = ("build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable",
         "get_requires_for_build_sdist", "get_requires_for_build_wheel")


def fail(*_):
    raise SystemExit(1)  # as meson-python does if ninja fails


@unittest.skipUnless(BACKEND.exists(), "not in the source tree")
class Advice(unittest.TestCase):
    def advice(self, hook, settings, nvcc):
        """Returns the standard error of a build that fails, with or without an nvcc in PATH."""
        with tempfile.TemporaryDirectory() as folder:
            if nvcc:
                path = pathlib.Path(folder, "nvcc")
                path.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
                path.chmod(0o700)
            stub = types.ModuleType("mesonpy")
            vars(stub).update({name: fail for name in HOOKS})
            spec = importlib.util.spec_from_file_location("wheel_backend", str(BACKEND))
            backend = importlib.util.module_from_spec(spec)
            said = io.StringIO()
            with mock.patch.dict(sys.modules, mesonpy=stub), mock.patch.dict(os.environ, PATH=folder):
                spec.loader.exec_module(backend)
                with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
                    getattr(backend, hook)(folder, settings)
        return said.getvalue()

    def test_failed_builds_name_the_option_for_no_cuda(self):
        for hook in ("build_wheel", "build_editable"):
            for settings in (None, {"setup-args": "-Dtests=disabled"}):
                self.assertIn("-Csetup-args=-Dcuda=disabled", self.advice(hook, settings, True))
            for settings in ({"setup-args": "-Dcuda=disabled"}, {"setup-args": ["-Dx=y", "-Dcuda=disabled"]}):
                self.assertEqual(self.advice(hook, settings, True), "")
            self.assertEqual(self.advice(hook, None, False), "")


if __name__ == "__main__":
    unittest.main()
