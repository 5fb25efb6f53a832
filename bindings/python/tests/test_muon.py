# SPDX-License-Identifier: Apache-2.0
"""Muon compared with its formula in NumPy; blocks of a tensor, words, keys, other groups, checkpoints and refusals."""
import io
import unittest

import numpy as np

import dsopt
from support import arrays

JORDAN = ((3.4445, -4.775, 2.0315),)
YOU = ((4.0848, -6.8946, 2.927), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
       (2.8366, -3.0525, 1.2012))
EXPRESS = tuple((a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673)))
BOUNDS = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 5e-5}  # error of an orthogonalised matrix, relative to its norm


def orthogonalised(u, triples=JORDAN, steps=5, eps=1e-7):
    """Returns the exact result, in double."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / max(np.linalg.norm(x), eps)
    for step in range(steps):
        a, b, c = triples[min(step, len(triples) - 1)]
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def factor(adjust, outputs, inputs):
    return {"original": max(1, outputs / inputs) ** 0.5, "match_rms_adamw": 0.2 * max(outputs, inputs) ** 0.5,
            "spectral_unclamped": (outputs / inputs) ** 0.5, "none": 1}[adjust]


class Exact:
    """The formula for one matrix, in double. `length` is the sum of the lengths of its updates."""

    def __init__(self, p, lr=1e-3, momentum=0.95, nesterov=True, weight_decay=0.1, adjust="original", outputs=None,
                 bias_correction=False, **iteration):
        self.p, self.m, self.t, self.length = p.astype(np.float64), np.zeros(p.shape), 0, 0.0
        self.lr, self.mu, self.nesterov, self.decay = lr, momentum, nesterov, 1 - lr * weight_decay
        self.scale = factor(adjust, *(p.shape if outputs is None else (outputs, p.size // outputs)))
        self.corrects, self.iteration = bias_correction, iteration

    def step(self, g):
        g, mu, self.t = g.astype(np.float64), self.mu, self.t + 1
        self.m = mu * self.m + (1 - mu) * g
        u = mu * self.m + (1 - mu) * g if self.nesterov else self.m
        if self.corrects:
            u = mu / (1 - mu ** (self.t + 1)) * self.m + (1 - mu) / (1 - mu**self.t) * g
        o = self.lr * self.scale * orthogonalised(u, **self.iteration)
        self.length += np.linalg.norm(o)
        self.p = self.decay * self.p - o


class Steps(unittest.TestCase):
    def assert_follows(self, shape, dtype="float32", steps=8, iteration=None, **options):
        (w,) = arrays(shape)
        opt = dsopt.Optimizer({"w": w}, dsopt.Muon(ns_dtype=dtype, **options))
        formula = {key: value for key, value in options.items() if not key.startswith("ns_") and key != "eps"}
        exact = Exact(w, **formula, **(iteration or {}))
        for t in range(steps):
            (g,) = arrays(shape, seed=t)
            opt.step([g])
            exact.step(g)
        rounding = steps * 1e-7 * np.linalg.norm(exact.p) + 1e-7
        self.assertLessEqual(np.linalg.norm(w - exact.p), BOUNDS[dtype] * exact.length + rounding)
        np.testing.assert_allclose(opt.state["w.momentum_buffer"], exact.m, rtol=0, atol=2e-6 * np.abs(exact.m).max())

    def test_follows_the_formula(self):
        for dtype in BOUNDS:
            with self.subTest(dtype=dtype):
                self.assert_follows((17, 24), dtype, lr=0.02)

    def test_follows_the_formula_with_each_option(self):
        for options, iteration in (
            ({"momentum": 0.5}, {}),
            ({"nesterov": False}, {}),
            ({"weight_decay": 0.0}, {}),
            ({"adjust": "match_rms_adamw"}, {}),
            ({"adjust": "spectral_unclamped"}, {}),
            ({"adjust": "none"}, {}),
            ({"bias_correction": True}, {}),
            ({"eps": 0.5, "momentum": 0.995}, {"eps": 0.5}),
            ({"ns_steps": 3}, {"steps": 3}),
            ({"ns_coefficients": (2, -1.5, 0.5)}, {"triples": ((2, -1.5, 0.5),)}),
            ({"ns_schedule": "you"}, {"triples": YOU}),
            ({"ns_schedule": "you", "ns_steps": 7}, {"triples": YOU, "steps": 7}),
            ({"ns_schedule": "polar_express"}, {"triples": EXPRESS}),
        ):
            for shape in ((24, 17), (17, 24)):
                with self.subTest(shape=shape, **options):
                    self.assert_follows(shape, iteration=iteration, lr=0.02, **options)

    def test_missing_gradients_leave_momentum_alone(self):
        w, v = arrays((8, 5), (5, 8))
        opt = dsopt.Optimizer({"w": w, "v": v}, dsopt.Muon())
        opt.step(arrays((8, 5), (5, 8), seed=1))
        before, kept = v.copy(), opt.state["v.momentum_buffer"].copy()
        opt.step({"w": arrays((8, 5), seed=2)[0]})
        np.testing.assert_array_equal(v, before)
        np.testing.assert_array_equal(opt.state["v.momentum_buffer"], kept)

    def test_other_groups_have_their_own_state(self):
        w, b = arrays((8, 5), (7,))
        both = dsopt.Optimizer({"w": w}, dsopt.Muon(lr=0.02))
        both.add_group(dsopt.AdamW(lr=0.01), {"b": b})
        names = ["w.momentum_buffer", "b.exp_avg", "b.exp_avg_sq", "optimizer.step"]
        self.assertEqual(list(both.state), names)
        self.assertIn("Muon, AdamW, 2 parameters", repr(both))


class Blocks(unittest.TestCase):
    def stepped(self, w, group=None, **param):
        opt = dsopt.Optimizer({"w": dsopt.Param(w, **param)}, group or dsopt.Muon(lr=0.02, ns_dtype="float32"))
        for t in range(3):
            opt.step(arrays(w.shape, seed=t))
        return w

    def assert_blocks(self, shape, rows, cols, blocks):
        """Compares with the formula for each block. `blocks` returns the views of the blocks of an array."""
        (w,) = arrays(shape)
        exact = [Exact(block, lr=0.02) for block in blocks(w)]
        for t in range(3):
            for one, g in zip(exact, blocks(arrays(shape, seed=t)[0])):
                one.step(g)
        self.stepped(w, rows=rows, cols=cols)
        for one, block in zip(exact, blocks(w)):
            np.testing.assert_allclose(block, one.p, rtol=0, atol=1e-5)

    def test_each_block_is_a_matrix(self):
        self.assert_blocks((18, 6), 6, 6, lambda w: list(w.reshape(3, 6, 6)))  # queries, keys and values
        self.assert_blocks((4, 5, 6), 5, 6, list)  # experts
        self.assert_blocks((8, 3, 2, 2), 8, 12, lambda w: [w.reshape(8, 12)])  # a convolution
        self.assert_blocks((6, 18), 6, 6, lambda w: [w[:, :6], w[:, 6:12], w[:, 12:]])  # columns
        self.assert_blocks((60,), 6, 5, lambda w: list(w.reshape(2, 6, 5)))  # one dim

    def test_rows_are_inputs_changes_the_adjustment(self):
        (w,) = arrays((24, 6))
        plain, inputs = self.stepped(w.copy()), self.stepped(w.copy(), rows_are_inputs=True)
        decayed = w * (1 - 0.02 * 0.1) ** 3
        np.testing.assert_allclose(plain - decayed, 2 * (inputs - decayed), rtol=1e-3, atol=1e-5)

    def test_refuses_blocks_that_do_not_tile(self):
        (w,) = arrays((6, 4))
        muon = dsopt.Muon()
        for param, words in (
            ({"rows": 4, "cols": 4}, "'w' of 24 elements cannot be cut into matrices of 4 x 4"),
            ({"rows": 3}, "both must be above 0"),
            ({"rows": -3, "cols": 4}, "both must be above 0"),
            ({"rows": 2.5, "cols": 4}, "rows is 2.5, and must be an integer"),
            ({"model_parallel": True}, "'w' is MODEL_PARALLEL"),
        ):
            with self.subTest(**param), self.assertRaisesRegex(dsopt.Error, words):
                self.stepped(w, muon, **param)
        for shape in ((24,), (2, 3, 4), ()):
            with self.subTest(shape), self.assertRaisesRegex(ValueError, "no rows and cols"):
                self.stepped(np.zeros(shape, np.float32), muon)
        for param in ({"rows": 3, "cols": 4}, {"rows_are_inputs": True}):
            with self.subTest(**param), self.assertRaisesRegex(NotImplementedError, "no effect in adamw"):
                self.stepped(w, dsopt.AdamW(), **param)


class HyperParameters(unittest.TestCase):
    def test_are_read_and_set(self):
        opt = dsopt.Optimizer(arrays((4, 3)), dsopt.Muon(adjust="none", ns_dtype="float16"))
        (group,) = opt.groups
        self.assertEqual((group.lr, group.momentum, group.nesterov, group.weight_decay), (1e-3, 0.95, True, 0.1))
        self.assertEqual((group.eps, group.ns_steps, group.ns_schedule, group.ns_dtype), (1e-7, 5, "constant", "float16"))
        self.assertEqual((group.ns_coefficients, group.adjust, group.bias_correction), (*JORDAN, "none", False))
        group.ns_steps, group.adjust, group.ns_coefficients, group.momentum = 6, "match_rms_adamw", (2, -1.5, 0.5), 0.9
        self.assertEqual((group.ns_steps, group.adjust, group.ns_coefficients), (6, "match_rms_adamw", (2, -1.5, 0.5)))
        group.ns_schedule = "you"
        self.assertEqual((group.ns_schedule, group.ns_coefficients), ("you", None))
        group.ns_schedule = "constant"
        self.assertEqual(group.ns_coefficients, *JORDAN)
        with self.assertRaises(AttributeError):
            group.ns_dtype = "float32"
        shown = "<Muon lr=0.001 momentum=0.9 weight_decay=0.1 eps=1e-07 adjust='match_rms_adamw'>"
        self.assertEqual(repr(group), shown)

    def test_change_the_next_step(self):
        w, v = arrays((8, 5)) + arrays((8, 5))
        changed = dsopt.Optimizer([w], dsopt.Muon())
        created = dsopt.Optimizer([v], dsopt.Muon(ns_steps=3, ns_schedule="you", adjust="none", momentum=0.5))
        (group,) = changed.groups
        group.ns_steps, group.ns_schedule, group.adjust, group.momentum = 3, "you", "none", 0.5
        for t in range(2):
            changed.step(arrays((8, 5), seed=t))
            created.step(arrays((8, 5), seed=t))
        np.testing.assert_array_equal(w, v)

    def test_refused_values_change_nothing(self):
        opt = dsopt.Optimizer(arrays((4, 3)), dsopt.Muon())
        (group,) = opt.groups
        for name, value in (("momentum", 1), ("momentum", 0), ("eps", 0), ("ns_steps", 0), ("ns_steps", 100),
                            ("adjust", "rms"), ("ns_schedule", "cans"), ("ns_coefficients", (1, 2, np.inf)),
                            ("ns_coefficients", 3), ("bias_correction", "no"), ("betas", (0.9, 0.95))):
            before = getattr(group, name, None) if name != "betas" else None
            with self.subTest(**{name: value}), self.assertRaises(dsopt.Error):
                setattr(group, name, value)
            if name != "betas":
                self.assertEqual(getattr(group, name), before)

    def test_refused_groups_raise(self):
        (w,) = arrays((4, 3))
        for options, words in (
            ({"momentum": 0.0}, "momentum is 0"),
            ({"eps": 2.0}, "eps is 2"),
            ({"ns_steps": 100}, "ns_steps is 100"),
            ({"ns_coefficients": (1, 2, float("nan"))}, "ns_c"),
            ({"ns_coefficients": (1, 2)}, "must be three numbers"),
            ({"ns_schedule": "you", "ns_coefficients": (2, -1.5, 0.5)}, "no effect with a preset"),
            ({"ns_schedule": "keller"}, "must be one of 'constant'"),
            ({"ns_dtype": "float64"}, "must be one of 'bfloat16'"),
            ({"adjust": None}, "must be one of 'original'"),
            ({"nesterov": False, "bias_correction": True}, "no effect without nesterov"),
            ({"exp_avg_format": "q8"}, "exp_avg_format is Q8"),
        ):
            with self.subTest(**options), self.assertRaisesRegex(dsopt.Error, words):
                dsopt.Optimizer([w], dsopt.Muon(**options))

    def test_refused_optimizers_raise(self):
        (w,) = arrays((4, 3))
        with self.assertRaisesRegex(NotImplementedError, "SPLIT_MATRICES has no effect without"):
            dsopt.Optimizer([w], dsopt.Muon(), split_matrices=True)
        with self.assertRaisesRegex(NotImplementedError, "the original has no muon"):
            dsopt.Optimizer([w], dsopt.Muon(), compat="deepspeed")
        for group, param in ((dsopt.Muon(), w.astype(np.float64)),
                             (dsopt.AdamW(), dsopt.Param(w.astype(np.float64), rows=4, cols=3))):
            with self.assertRaisesRegex(dsopt.TensorError, "float64, which is not supported with"):
                dsopt.Optimizer([param], group)


class Checkpoints(unittest.TestCase):
    def test_continue_with_the_same_bits(self):
        w, b = arrays((8, 6), (7,))
        first = self.optimizer(w, b)
        file = io.BytesIO()
        for t in range(6):
            if t == 3:
                first.save(file, params=True)
            first.step(arrays((8, 6), (7,), seed=t))
        u, c = np.zeros_like(w), np.zeros_like(b)
        second = self.optimizer(u, c, lr=1.0, ns_steps=1, ns_schedule="you")
        file.seek(0)
        second.load(file, params=True)
        group = second.groups[0]
        self.assertEqual((group.lr, group.ns_steps, group.ns_coefficients), (0.02, 4, (2, -1.5, 0.5)))
        for t in range(3, 6):
            second.step(arrays((8, 6), (7,), seed=t))
        np.testing.assert_array_equal(w, u)
        np.testing.assert_array_equal(b, c)
        file.seek(0)
        with self.assertRaisesRegex(dsopt.CheckpointError, "2,6"):
            self.optimizer(u, c, rows=2).load(file)

    @staticmethod
    def optimizer(w, b, lr=0.02, rows=4, **options):
        options = options or {"ns_steps": 4, "ns_coefficients": (2, -1.5, 0.5)}
        opt = dsopt.Optimizer({"w": dsopt.Param(w, rows=rows, cols=6)}, dsopt.Muon(lr=lr, **options))
        opt.add_group(dsopt.AdamW(lr=0.01), {"b": b})
        return opt


if __name__ == "__main__":
    unittest.main()
