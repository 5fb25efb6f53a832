# SPDX-License-Identifier: Apache-2.0
"""Arrays of installed frameworks."""

import unittest

import numpy as np

import dsopt
from dsopt import _abi as abi
from dsopt._arrays import tensor_of
from support import arrays

try:
    import torch

    torch.Tensor  # without PyTorch, the folder tests/torch is imported
except (ImportError, AttributeError):
    torch = None
try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
try:
    import jax.numpy as jnp
except ImportError:
    jnp = None


@unittest.skipIf(torch is None, "PyTorch is not installed")
class Torch(unittest.TestCase):
    def test_steps_arrays_of_the_framework(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            (start,), (g,) = arrays((3, 4)), arrays((3, 4), seed=1)
            w, peer = torch.from_numpy(start.copy()).to(dtype), torch.from_numpy(start.copy()).to(dtype).float().numpy()
            master = peer.copy()
            opt, other = dsopt.Optimizer({"w": w}, dsopt.AdamW(lr=0.1)), dsopt.Optimizer(
                {"w": master}, dsopt.AdamW(lr=0.1)
            )
            for _ in range(3):
                opt.step([torch.from_numpy(g)])
                other.step([g])
            np.testing.assert_array_equal(w.float().numpy(), torch.from_numpy(master).to(dtype).float().numpy())

    def test_rejects_unsuitable_tensors(self):
        for value, text in (
            (torch.zeros(4, 4)[:, 1], "not contiguous"),
            (torch.zeros(4, requires_grad=True), "grad"),
            (torch.zeros(4, dtype=torch.float64), "float64"),
            (torch.zeros(4, dtype=torch.int8), "int8"),
            (torch.zeros(4).to_sparse(), "DLPack"),
        ):
            with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['w'\].*" + text):
                tensor_of(value, "grads['w']")
        self.assertEqual(tensor_of(torch.zeros(0, 3), "x").shape, (0, 3))


@unittest.skipIf(ml_dtypes is None, "ml_dtypes is not installed")
class Bfloat16(unittest.TestCase):
    def test_steps_arrays_of_the_framework(self):
        w = np.ones(5, ml_dtypes.bfloat16)
        opt = dsopt.Optimizer({"w": w}, dsopt.AdamW(lr=0.25, weight_decay=0), no_master=True, compat="deepspeed")
        opt.step([np.ones(5, ml_dtypes.bfloat16)])
        opt.step([np.ones(5, ml_dtypes.bfloat16)])
        self.assertTrue((w == 0.5).all())
        self.assertEqual(opt.state["w.exp_avg"].dtype, ml_dtypes.bfloat16)


@unittest.skipIf(jnp is None, "JAX is not installed")
class Jax(unittest.TestCase):
    def test_accepts_jax_gradients(self):
        (w,), (g,) = arrays((3, 4)), arrays((3, 4), seed=1)
        peer = w.copy()
        opt, other = dsopt.Optimizer([w], dsopt.AdamW(lr=0.1)), dsopt.Optimizer([peer], dsopt.AdamW(lr=0.1))
        opt.step([jnp.asarray(g)])
        other.step([g])
        np.testing.assert_array_equal(w, peer)
        self.assertEqual(tensor_of(jnp.zeros(3, jnp.bfloat16), "x").dtype, abi.DSOPT_DTYPE_BF16)
        with self.assertRaisesRegex(dsopt.ArgumentError, r"params\['p0'\].*read-only"):
            dsopt.Optimizer([jnp.zeros(3)], dsopt.AdamW())


if __name__ == "__main__":
    unittest.main()
