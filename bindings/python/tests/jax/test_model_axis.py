# SPDX-License-Identifier: Apache-2.0
"""Steps of shards with norms and trust ratios of whole tensors, compared with steps of whole tensors."""

import unittest

from support import bits

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import dsopt
import dsopt.jax
from dsopt.jax import FusedStep

STEPS = 5
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "rows": jax.random.normal(KEYS[0], (8, 130)),
    "columns": jax.random.normal(KEYS[1], (5, 12)) * 3,
    "whole": jax.random.normal(KEYS[2], (7,)),
}
SPECS = {"rows": P("tp"), "columns": P(None, "tp"), "whole": P()}
REPLICATED = {"rows": False, "columns": False, "whole": True}
CASES = {
    "adamw": {"max_norm": 0.5},
    "lamb": {"max_norm": 2.0, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "max_norm": 0.5},
}


def gradients(step, bad=False):
    grads = jax.tree.map(lambda p: jnp.cos(3 * p + step), PARAMS)
    return {**grads, "rows": grads["rows"].at[0, 0].set(jnp.inf)} if bad else grads


def program(opt, mesh, dtype=None):
    """Returns the parameters and state over a mesh, and the step."""
    params = PARAMS if dtype is None else jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    specs = opt.specs(params, SPECS)
    over = {"mesh": mesh, "check_vma": False}
    state = jax.jit(jax.shard_map(opt.init, in_specs=(SPECS,), out_specs=specs, **over))(params)

    def body(params, grads, state):
        params, state, report = opt.step(params, grads, state)
        return params, state, report.values[None]

    axes = P(mesh.axis_names)
    return (
        params,
        state,
        jax.jit(jax.shard_map(body, in_specs=(SPECS, SPECS, specs), out_specs=(SPECS, specs, axes), **over)),
    )


class ModelAxis(unittest.TestCase):
    def run_both(self, name, mesh, options, bad=-1, dtype=None):
        """Returns the parameters of both, and the reports of the last step."""
        options = {**CASES[name], **options}
        opt = FusedStep(name, 1e-2, model_axis="tp", replicated=REPLICATED, timeout_ms=60000, **options)
        params, state, step = program(opt, mesh, dtype)
        one = FusedStep(name, 1e-2, **options)
        whole, expected = params, one.init(params)
        for i in range(STEPS):
            grads = gradients(i, i == bad)
            params, state, reports = step(params, grads, state)
            whole, expected, report = jax.jit(one.step)(whole, grads, expected)
        return params, whole, np.asarray(reports), np.asarray(report.values)

    def test_takes_norms_and_ratios_of_whole_tensors(self):
        for name in CASES:
            for devices in (np.array(jax.devices()[:4]), np.array(jax.devices()[:2])):
                with self.subTest(name=name, devices=len(devices)):
                    params, whole, reports, report = self.run_both(name, Mesh(devices, ("tp",)), {})
                    for key, value in whole.items():
                        np.testing.assert_allclose(params[key], value, rtol=2e-6, atol=1e-6)
                    for row in reports:
                        np.testing.assert_allclose(row[1], report[1], rtol=1e-6)

    def test_replicas_have_comms_of_their_own(self):
        """A mesh with a data axis: the devices of each data index form a comm over the model axis."""
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
        for name in CASES:
            with self.subTest(name=name):
                params, whole, reports, report = self.run_both(name, mesh, {})
                for key, value in whole.items():
                    np.testing.assert_allclose(params[key], value, rtol=2e-6, atol=1e-6)
                    shards = [shard for shard in params[key].addressable_shards]
                    for a in shards:
                        for b in shards:
                            if a.index == b.index:
                                self.assertEqual(bits(a.data), bits(b.data))
                np.testing.assert_allclose(reports[:, 1], np.full(4, report[1]), rtol=1e-6)

    def test_skips_on_all_devices(self):
        mesh = Mesh(np.array(jax.devices()[:4]), ("tp",))
        for options in ({"nonfinite": "skip"}, {"loss_scale": 4.0}):
            params, whole, reports, _ = self.run_both("adamw", mesh, options, bad=STEPS - 1)
            self.assertEqual(reports[:, 0].tolist(), [1] * 4)
            for key, value in whole.items():
                np.testing.assert_allclose(params[key], value, rtol=2e-6, atol=1e-6)

    def test_has_masters(self):
        mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
        params, whole, _, _ = self.run_both("lamb", mesh, {"masters": "remainder"}, dtype=jnp.bfloat16)
        for key, value in whole.items():
            np.testing.assert_allclose(
                params[key].astype(jnp.float32), value.astype(jnp.float32), rtol=2**-7, atol=1e-3
            )


class Refusals(unittest.TestCase):
    def test_refuses_arguments_without_effect(self):
        with self.assertRaisesRegex(dsopt.UnsupportedError, "model_axis is not supported by the 1-bit family"):
            FusedStep("onebit_adam", axis_name="dp", model_axis="tp")
        with self.assertRaisesRegex(dsopt.ArgumentError, "replicated has no effect without model_axis"):
            FusedStep("adamw", replicated=True)

    def test_rejects_calls_outside_of_the_axis(self):
        with self.assertRaisesRegex(dsopt.ArgumentError, "there is no axis 'tp' here"):
            FusedStep("adamw", model_axis="tp").init(PARAMS)


if __name__ == "__main__":
    unittest.main()
