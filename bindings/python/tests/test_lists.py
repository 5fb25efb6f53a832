# SPDX-License-Identifier: Apache-2.0
import importlib.metadata
import json
import os
import platform
import shutil
import unittest

import numpy as np

import dsopt
from support import arrays, python


class Lists(unittest.TestCase):
    def test_computes_norm_and_clip_coefficient(self):
        xs = arrays((100,), (3, 7), (0,))
        whole = np.concatenate([x.ravel() for x in xs]).astype(np.float64)
        result = dsopt.norm(xs, max_norm=2.0)
        self.assertAlmostEqual(result.norm, np.linalg.norm(whole), places=6)
        self.assertAlmostEqual(result.coefficient, 2 / (result.norm + 1e-6), places=6)
        self.assertEqual((result.nonfinite, result.first_bad), (0, None))
        self.assertEqual(dsopt.norm(xs, kind="max").norm, abs(whole).max())
        self.assertEqual(dsopt.clip(xs, 2.0), result.norm)
        self.assertAlmostEqual(dsopt.norm(xs).norm, 2, places=5)
        xs[1][0, 0] = np.nan
        self.assertEqual(dsopt.norm([None, *xs]).first_bad, 2)
        for wrong, text in ((0, "max_norm"), (-1, "max_norm")):
            with self.assertRaisesRegex(dsopt.ArgumentError, text):
                dsopt.clip(xs, wrong)
        with self.assertRaisesRegex(dsopt.ArgumentError, r"arrays\[1\].*float64"):
            dsopt.norm([xs[0], np.zeros(3)])
        with self.assertRaisesRegex(dsopt.ArgumentError, "kind.*'l2'"):
            dsopt.norm(xs, kind="l1")

    def test_axpby_clamp_and_zero_change_lists(self):
        (x,), (y,) = arrays((5,)), arrays((5,), seed=1)
        expected = np.float32(0.5) * x + np.float32(2) * y
        dsopt.axpby(0.5, [x], 2, [y])
        np.testing.assert_array_equal(y, expected)
        half = np.zeros(5, np.float16)
        dsopt.axpby(None, [x], 0, [half])
        np.testing.assert_array_equal(half, x.astype(np.float16))
        dsopt.clamp([y], 0.25)
        np.testing.assert_array_equal(y, expected.clip(-0.25, 0.25))
        dsopt.zero([y])
        self.assertFalse(y.any())
        y.flags.writeable = False
        with self.assertRaisesRegex(dsopt.ArgumentError, r"y\[0\].*read-only"):
            dsopt.axpby(1, [x], 0, [y])
        with self.assertRaisesRegex(dsopt.ArgumentError, "x has 2"):
            dsopt.axpby(1, [x, x], 0, [half])
        with self.assertRaisesRegex(dsopt.ArgumentError, "limit"):
            dsopt.clamp([x], -1)

    def test_package_works_without_numpy(self):
        """The package needs only the standard library."""
        status, stdout, stderr = python("""
            import sys
            sys.modules["numpy"] = None
            from array import array
            import dsopt
            w, g = array("f", [1, 2]), array("f", [1, -1])
            opt = dsopt.Optimizer({"w": w}, dsopt.AdamW(lr=0.5, eps=0, weight_decay=0))
            opt.step({"w": g})
            print(list(w), list(opt.state["w.exp_avg"])[1] < 0, dsopt.norm([g]).norm > 1.4)
            try:
                w.append(3)
            except BufferError:
                print("bound memory cannot be resized")
            """)
        self.assertEqual((status, stdout, stderr), (0, "[0.5, 2.5] True True\nbound memory cannot be resized\n", ""))

    def test_module_prints_a_diagnosis(self):
        status, stdout, _ = python("""
            import runpy, sys
            runpy.run_module('dsopt', run_name='__main__')
            assert not {'torch', 'jax', 'tensorflow', 'keras', 'nvidia'} & set(sys.modules)
            """)
        self.assertEqual(status, 0)
        found, info = json.loads(stdout), dsopt.build_info()
        capabilities = info.pop("cuda_devices", [])
        self.assertEqual({key: found.get(key) for key in info}, info)
        self.assertEqual(found["version"], dsopt.__version__)
        self.assertEqual(len(found["devices"]), len(capabilities))
        self.assertEqual("cuda" in info["backends"], bool(capabilities))
        self.assertEqual(found["libraries"]["mpiexec"], shutil.which("mpiexec") or "not in PATH")
        if "cuda_runtime" not in info:
            self.assertEqual(found["libraries"]["cublaslt"], "needs CUDA")
        self.assertIn(platform.python_version(), found["python"])
        self.assertEqual(found["environment"]["DSOPT_LIBRARY"], dsopt._abi.path)
        self.assertEqual(found["packages"]["numpy"], importlib.metadata.version("numpy"))

    def test_missing_library_raises_import_error(self):
        environment = dict(os.environ)
        status, _, stderr = python("""
            import os
            os.environ["DSOPT_LIBRARY"] = "/nonexistent/libdsopt.so"
            import dsopt
            """)
        self.assertEqual(os.environ, environment)
        self.assertEqual(status, 1)
        self.assertRegex(stderr, "MissingError.*/nonexistent/libdsopt.so.*DSOPT_LIBRARY")


if __name__ == "__main__":
    unittest.main()
