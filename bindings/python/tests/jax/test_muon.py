# SPDX-License-Identifier: Apache-2.0
"""FusedStep("muon") next to the same iterations in NumPy's float64, and to optax.contrib.muon."""

import unittest
from unittest import mock

from support import bits, copy, differing, sharded_tests

# pylint: disable=wrong-import-position
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dsopt
from dsopt import _abi, _nvidia
from dsopt.jax import DynamicScale, FusedStep, _call

JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
YOU = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
BOUNDS = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 4e-2}


def orthogonalized(u, triples):
    if u.shape[0] > u.shape[1]:
        return orthogonalized(u.T, triples).T
    x = u / max(np.linalg.norm(u), 1e-7)
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


ADJUST = {
    "original": lambda r, c: max(1, r / c) ** 0.5,
    "match_rms_adamw": lambda r, c: 0.2 * max(r, c) ** 0.5,
    "spectral_unclamped": lambda r, c: (r / c) ** 0.5,
    "none": lambda r, c: 1.0,
}


class Reference:
    """One matrix in float64. `moved` is the sum of the lengths of its updates."""

    def __init__(self, weight, triples=None, rows_are_inputs=True, **options):
        self.p = np.array(weight, np.float64)
        self.m, self.t, self.moved = np.zeros_like(self.p), 0, 0.0
        self.triples = JORDAN if triples is None else triples
        outputs, inputs = self.p.shape[::-1] if rows_are_inputs else self.p.shape
        self.adjust = ADJUST[options.get("adjust", "original")](outputs, inputs)
        self.options = {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "bias_correction": False, **options}

    def step(self, grad, lr):
        grad, mu, self.t = np.asarray(grad, np.float64), self.options["momentum"], self.t + 1
        self.m = mu * self.m + (1 - mu) * grad
        r, s = (1 - mu, mu) if self.options["nesterov"] else (0, 1)
        if self.options["bias_correction"]:
            r, s = r / (1 - mu**self.t), s / (1 - mu ** (self.t + 1))
        update = orthogonalized(r * grad + s * self.m, self.triples)
        self.p = self.p * (1 - lr * self.options["weight_decay"]) - lr * self.adjust * update
        self.moved += lr * self.adjust * np.linalg.norm(update)

    def error(self, weight):
        return np.linalg.norm(np.asarray(weight, np.float64) - self.p) / self.moved


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def tree(seed):
    return {
        "wide": random(seed, 16, 40),
        "tall": {"kernel": random(seed + 1, 40, 16), "bias": random(seed + 2, 16)},
        "embedding": random(seed + 3, 50, 16),
    }


MATRICES = {"wide": True, "tall": {"kernel": True, "bias": False}, "embedding": False}
PARAMS = tree(0)


def other(**options):
    return FusedStep("adamw", 0.01, **options)


def mixed(learning_rate=0.02, **options):
    return FusedStep("muon", learning_rate, other=other(), muon_mask=MATRICES, **options)


def errors(opt, blocks_of, params, lr=0.02, **options):
    """Returns the errors of the matrices of params["w"] after steps of a compiled program that donates."""
    step, state = jax.jit(opt.step, donate_argnums=(0, 2)), opt.init(params)
    references = [Reference(block, **options) for block in blocks_of(np.asarray(params["w"]))]
    params = copy(params)
    for i in range(4):
        grads = {"w": random(100 + i, *params["w"].shape)}
        params, state, _ = step(params, grads, state)
        for reference, grad in zip(references, blocks_of(np.asarray(grads["w"]))):
            reference.step(grad, lr)
    return [reference.error(block) for reference, block in zip(references, blocks_of(np.asarray(params["w"])))]


class Reference64(unittest.TestCase):
    def check(self, shape, blocks_of=lambda w: [w], bound=5e-5, reference=None, **options):
        opt = FusedStep("muon", 0.02, **{"ns_dtype": "float32", **options})
        found = errors(opt, blocks_of, {"w": random(1, *shape)}, **({} if reference is None else reference))
        self.assertLess(max(found), bound)
        return max(found)

    def test_every_dtype_of_products_is_within_its_bound(self):
        for shape in ((24, 24), (16, 40), (40, 16)):
            for dtype, bound in BOUNDS.items():
                with self.subTest(dtype, shape=shape):
                    self.check(shape, bound=bound, ns_dtype=dtype)
            self.assertGreater(self.check(shape, bound=4e-2, ns_dtype="bfloat16"), 5e-5)

    def test_options_reach_the_engine(self):
        for options in (
            {"momentum": 0.8, "weight_decay": 0.0},
            {"nesterov": False},
            {"bias_correction": True},
            {"adjust": "match_rms_adamw"},
            {"adjust": "spectral_unclamped"},
            {"adjust": "none"},
            {"rows_are_inputs": False},
        ):
            for shape in ((16, 40), (40, 16)):
                with self.subTest(**options, shape=shape):
                    self.check(shape, reference=options, **options)
        for options, triples in (
            ({"ns_steps": 3}, JORDAN[:3]),
            ({"ns_schedule": "you", "ns_steps": 6}, [*YOU, YOU[-1]]),
            ({"ns_coefficients": (2, -1.5, 0.5)}, [(2, -1.5, 0.5)] * 5),
        ):
            with self.subTest(**options):
                self.check((16, 40), reference={"triples": triples}, **options)

    def test_blocks_are_matrices_of_their_own(self):
        everything = {"w": True}
        for shape, block, blocks_of in (
            ((3, 20, 18), (20, 18), list),
            ((60, 18), (20, 18), lambda w: np.split(w, 3)),
            ((18, 60), (18, 20), lambda w: np.split(w, 3, 1)),
            ((20, 2, 3, 3), (20, 18), lambda w: [w.reshape(20, 18)]),
            ((2, 18, 60), (18, 20), lambda w: [part for layer in w for part in np.split(layer, 3, 1)]),
        ):
            for given in ({"w": block}, lambda params, block=block: {"w": block}):
                with self.subTest(shape=shape):
                    self.check(shape, blocks_of, muon_mask=everything, blocks=given)

    def test_other_parameters_are_stepped_by_the_other_rule(self):
        """Matrices within the bound, other leaves with the bits of a step of AdamW alone."""
        opt, alone = mixed(ns_dtype="float32", weight_decay=0.0), other()
        rest = lambda t: {"bias": t["tall"]["bias"], "embedding": t["embedding"]}  # noqa: E731
        references = [Reference(PARAMS["wide"], weight_decay=0), Reference(PARAMS["tall"]["kernel"], weight_decay=0)]
        step, alone_step = jax.jit(opt.step, donate_argnums=(0, 2)), jax.jit(alone.step)
        params, state = copy(PARAMS), opt.init(PARAMS)
        few, few_state = rest(PARAMS), alone.init(rest(PARAMS))
        self.assertEqual(jax.tree.map(jnp.shape, state["momentum_buffer"])["wide"], (16, 40))
        self.assertIsNone(state["momentum_buffer"]["embedding"])
        self.assertIsNone(state["exp_avg"]["wide"])
        for i in range(4):
            grads = tree(1000 + i)
            params, state, _ = step(params, grads, state)
            few, few_state, _ = alone_step(few, rest(grads), few_state)
            references[0].step(grads["wide"], 0.02)
            references[1].step(grads["tall"]["kernel"], 0.02)
        self.assertLess(references[0].error(params["wide"]), 5e-5)
        self.assertLess(references[1].error(params["tall"]["kernel"]), 5e-5)
        self.assertEqual(bits(rest(params)), bits(few))

    def test_default_mask_is_two_dimensions(self):
        explicit = FusedStep("muon", 0.02, other=other(), muon_mask=lambda p: jax.tree.map(lambda x: x.ndim == 2, p))
        default = FusedStep("muon", 0.02, other=other())
        done = [opt.step(PARAMS, tree(5), opt.init(PARAMS)) for opt in (explicit, default)]
        self.assertEqual(differing(done[0][0], done[1][0]), [])
        self.assertIsNotNone(done[1][1]["momentum_buffer"]["embedding"])


class Optax(unittest.TestCase):
    def test_bias_correction_is_that_of_optax(self):
        """optax adds its eps to the norm, and uses bfloat16 for no product."""
        for nesterov in (True, False):
            tx = optax.contrib.muon(0.02, nesterov=nesterov, weight_decay=0.1, adaptive=False)
            params = theirs = {"wide": PARAMS["wide"], "tall": PARAMS["tall"]["kernel"]}
            # Without Nesterov's momentum the corrections are a factor, which the norm removes.
            opt = FusedStep("muon", 0.02, ns_dtype="float32", nesterov=nesterov, bias_correction=nesterov)
            state, their_state, start = opt.init(params), tx.init(params), params
            for i in range(4):
                grads = {"wide": random(i, 16, 40), "tall": random(10 + i, 40, 16)}
                params, state, _ = opt.step(params, grads, state)
                updates, their_state = tx.update(grads, their_state, theirs)
                theirs = optax.apply_updates(theirs, updates)
            for name, weight in params.items():
                moved = np.linalg.norm(weight - start[name])
                self.assertLess(np.linalg.norm(weight - theirs[name]) / moved, 1e-4, name)


class Programs(unittest.TestCase):
    def test_schedules_and_rates_of_a_step(self):
        """A schedule has the bits of the same numbers as arguments of each step, for both rules."""
        rates = lambda count: 0.02 / (1 + count)  # noqa: E731
        scheduled = FusedStep("muon", rates, other=FusedStep("adamw", rates), muon_mask=MATRICES)
        plain = mixed()
        decays = FusedStep("muon", rates, other=FusedStep("adamw", rates), weight_decay=rates, muon_mask=MATRICES)
        state, other_state, third = scheduled.init(PARAMS), plain.init(PARAMS), decays.init(PARAMS)
        a = b = c = PARAMS
        step, with_rates, decaying = jax.jit(scheduled.step), jax.jit(plain.step), jax.jit(decays.step)
        for i in range(3):
            a, state, _ = step(a, tree(i), state)
            rate = rates(jnp.int32(i))
            b, other_state, _ = with_rates(b, tree(i), other_state, learning_rate=rate, other_learning_rate=rate)
            c, third, report = decaying(c, tree(i), third)
            self.assertFalse(report.skipped)
        self.assertEqual(differing(a, b), [])
        self.assertEqual(differing(a, c), ["['tall']['kernel']", "['wide']"])

    def test_program_donates_and_copies_nothing(self):
        for options in ({}, {"max_norm": 1.0, "loss_scale": DynamicScale()}):
            with self.subTest(options):
                opt = mixed(**options)
                half = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS) if options else PARAMS
                program = jax.jit(opt.step, donate_argnums=(0, 2)).lower(half, half, opt.init(half)).compile()
                self.assertEqual(program.as_text().count(" copy("), 0)

    def test_state_continues_from_numpy_arrays(self):
        for options in ({}, {"exp_avg_format": "bf16_random", "masters": "remainder"}):
            with self.subTest(options):
                opt = mixed(**options)
                half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
                step = jax.jit(opt.step)
                params, state, _ = step(half, tree(1), opt.init(half))
                saved = jax.tree.map(np.asarray, (params, state))
                expected = step(params, tree(2), state)
                done = step(*jax.tree.map(jnp.asarray, (saved[0], tree(2), saved[1])))
                self.assertEqual(bits(done), bits(expected))

    def test_skips_overflow_with_the_momentum(self):
        opt = mixed(nonfinite="skip")
        state, bad = opt.init(PARAMS), {**tree(1), "wide": jnp.full((16, 40), jnp.inf)}
        params, after, report = jax.jit(opt.step)(PARAMS, bad, state)
        self.assertTrue(report.skipped)
        self.assertEqual(bits((params, after["momentum_buffer"])), bits((PARAMS, state["momentum_buffer"])))


@sharded_tests
class Devices(unittest.TestCase):
    """Which calls of the library a program of Muon makes before it runs."""

    def backends(self, has_cuda, algorithm):
        """Returns the backends on which sizes are computed, and the libraries that are loaded."""
        params = (_call.Param("w", (4, 4), "float32", 0),)
        recipe = _call.Recipe(groups=(_call.group(algorithm),), params=params)
        with mock.patch.object(_call, "_layout_on", wraps=_call._layout_on) as layout, mock.patch.object(
            _call, "_has_cuda", return_value=has_cuda
        ), mock.patch.object(_nvidia, "load") as load:
            _call._layout.cache_clear()
            self.assertGreater(len(recipe.layout.entries), 0)
        return [call.args[1] for call in layout.call_args_list], [call.args[0] for call in load.call_args_list]

    def test_cuda_is_left_alone_without_devices_of_jax(self):
        cpu, cuda = _abi.DSOPT_BACKEND_CPU, _abi.DSOPT_BACKEND_CUDA
        self.assertEqual(self.backends(False, _abi.DSOPT_ALGORITHM_MUON), ([cpu], []))
        self.assertEqual(self.backends(True, _abi.DSOPT_ALGORITHM_MUON), ([cpu, cuda], [_nvidia.CUBLASLT]))
        self.assertEqual(self.backends(True, _abi.DSOPT_ALGORITHM_ADAMW), ([cpu], []))
        self.assertFalse(_call._has_cuda())


class Sharded(unittest.TestCase):
    def test_replicated_matrices_step_next_to_sharded_parameters(self):
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        over = NamedSharding(mesh, PartitionSpec("x"))
        whole = NamedSharding(mesh, PartitionSpec())
        places = jax.tree.map(lambda is_matrix: whole if is_matrix else over, MATRICES)
        opt = mixed(max_norm=1e6)
        params = jax.device_put(PARAMS, places)
        state = jax.jit(opt.init)(params)
        step = jax.jit(opt.step)
        a, b, alone = params, PARAMS, opt.init(PARAMS)
        for i in range(2):
            a, state, _ = step(a, jax.device_put(tree(i), places), state)
            b, alone, _ = step(b, tree(i), alone)
        self.assertEqual(differing(a, b), [])
        self.assertEqual(a["embedding"].sharding.spec, PartitionSpec("x"))

    def test_stacks_can_be_sharded_between_matrices(self):
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        opt = FusedStep("muon", 0.02, muon_mask=True, blocks={"w": (20, 18)})
        for shape in ((4 * 20 * 18,), (4, 20, 18)):
            with self.subTest(shape):
                params, grads = {"w": random(1, *shape)}, {"w": random(2, *shape)}
                expected = opt.step(params, grads, opt.init(params))[0]
                sharded = jax.device_put(params, NamedSharding(mesh, PartitionSpec("x")))
                done, _, _ = jax.jit(opt.step)(sharded, grads, jax.jit(opt.init)(sharded))
                self.assertEqual(bits(done), bits(expected))
                self.assertEqual(done["w"].sharding.spec, PartitionSpec("x"))
        for spec in (PartitionSpec(None, "x"), PartitionSpec(None, None, "x")):
            divided = jax.device_put(params, NamedSharding(mesh, spec))
            with self.assertRaisesRegex(Exception, "Muon needs whole matrices, and the sharding of parameter"):
                jax.block_until_ready(jax.jit(opt.step)(divided, divided, jax.jit(opt.init)(divided)))


class Refusals(unittest.TestCase):
    def test_options_that_have_no_effect_or_no_meaning(self):
        for call, text in (
            (lambda: FusedStep("adamw", other=other()), "other is for muon, and has no effect in adamw"),
            (lambda: FusedStep("adamw", blocks={}), "blocks is for muon"),
            (lambda: FusedStep("muon", other=other(max_norm=1.0)), "other has max_norm, which concerns the whole step"),
            (lambda: FusedStep("muon", other=other(masters=False)), "other has masters"),
            (lambda: FusedStep("muon", other=FusedStep("muon")), "other is muon"),
            (lambda: FusedStep("muon", adjust="large"), "adjust is 'large'"),
            (lambda: FusedStep("muon", ns_dtype="float64"), "ns_dtype is 'float64'"),
            (lambda: FusedStep("muon", ns_coefficients=(1, 2)), "ns_coefficients is"),
            (lambda: FusedStep("muon").init(PARAMS), r"parameter \['tall'\]\['bias'\] is not in muon_mask: pass other"),
            (lambda: mixed().init({"b": jnp.zeros(3)}), "structure|Mismatch|Expected"),
            (lambda: FusedStep("muon", other=other()).init({"b": jnp.zeros(3)}), "no parameter is in muon_mask"),
            (lambda: FusedStep("muon", muon_mask=True).init({"b": jnp.zeros(3)}), r"'\['b'\]' has 1 dims"),
            (lambda: FusedStep("muon", blocks={"w": 3}).init({"w": PARAMS["wide"]}), r"blocks of \['w'\] is 3"),
            (lambda: FusedStep("muon", momentum=1.0).init({"w": PARAMS["wide"]}), "momentum is 1"),
            (lambda: FusedStep("muon", ns_steps=0).init({"w": PARAMS["wide"]}), "ns_steps is 0"),
            (
                lambda: other().step(PARAMS, PARAMS, other().init(PARAMS), other_learning_rate=0.1),
                "other_learning_rate has no effect",
            ),
        ):
            with self.subTest(text), self.assertRaisesRegex((dsopt.ArgumentError, ValueError), text):
                call()
        with self.assertRaisesRegex(TypeError, "ns_step"):
            FusedStep("muon", ns_step=5)
        for options, text in (
            ({"ns_schedule": "you", "ns_coefficients": (1, 2, 3)}, "preset"),
            ({"nesterov": False, "bias_correction": True}, "bias correction has no effect without nesterov"),
            ({"exp_avg_format": "q8"}, "Q8"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.UnsupportedError, text):
                FusedStep("muon", **options).init({"w": PARAMS["wide"]})
        with self.assertRaisesRegex(dsopt.TensorError, "cannot be cut into matrices of 7 x 40"):
            FusedStep("muon", blocks={"w": (7, 40)}).init({"w": PARAMS["wide"]})
        with self.assertRaisesRegex(dsopt.UnsupportedError, "rows and cols of parameter .* has no effect in adamw"):
            mixed(blocks={"wide": None, "tall": {"kernel": None, "bias": None}, "embedding": (50, 16)}).init(PARAMS)


if __name__ == "__main__":
    unittest.main()
