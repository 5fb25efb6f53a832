# SPDX-License-Identifier: Apache-2.0
"""Tests of float64 parameters, which NumPy steps."""

import math
import unittest

import numpy as np
from support import arrays

import dsopt

SHAPES = ((10, 5), (10,), (), (3, 0), (200,))
TOLERANCE = 1e-15  # of the largest magnitude in the array, per step


def doubles(*shapes, seed=0):
    return arrays(*shapes, seed=seed, dtype=np.float64)


def means(g, m, v, b1=0.9, b2=0.999):
    return b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g


def adam(p, g, t, m, v, lr=0.01, eps=1e-8, l2=0.0, decay=0.0, uncorrected=False):
    g = g + l2 * p
    m, v = means(g, m, v)
    c1, c2 = 1 - 0.9**t, 1 - 0.999**t
    eps = eps / math.sqrt(c2) if uncorrected else eps
    return p - lr * decay * p - lr * (m / c1) / (np.sqrt(v) / math.sqrt(c2) + eps), m, v


def legacy(p, g, t, m, v):
    m, v = means(g, m, v)
    return p - 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * (m / np.sqrt(v + 1e-8) + 0.1 * p), m, v


def lamb(p, g, t, m, v):
    m, v = means(g, m, v)
    u = m / (np.sqrt(v) + 1e-8) + 0.1 * p
    weight, change = math.sqrt((p * p).sum()), math.sqrt((u * u).sum())
    ratio = min(max(weight / change, 0.01), 10.0) if weight and change else 1.0
    return p - 0.01 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * ratio * u, m, v


def sgd(p, g, t, b, nesterov=False, dampening=0.0):
    g = g + 0.1 * p
    b = g if t == 1 else 0.9 * b + (1 - dampening) * g
    return p - 0.01 * (g + 0.9 * b if nesterov else b), b


def adagrad(p, g, t, s, inside=False):
    s = s + g * g
    lr = 0.01 / (1 + (t - 1) * 0.1)
    return p - lr * (g / np.sqrt(s + 1e-10) if inside else g / (np.sqrt(s) + 1e-10)), s


def lion(p, g, t, m):
    return p - 0.01 * (np.sign(0.9 * m + (1 - 0.9) * g) + 0.1 * p), 0.99 * m + (1 - 0.99) * g


RULES = [
    (dsopt.Adam(lr=0.01, weight_decay=0.1), ("exp_avg", "exp_avg_sq"), lambda *a: adam(*a, l2=0.1)),
    (dsopt.AdamW(lr=0.01, weight_decay=0.1), ("exp_avg", "exp_avg_sq"), lambda *a: adam(*a, decay=0.1)),
    (
        dsopt.AdamW(lr=0.01, weight_decay=0, eps=1e-3, eps_uncorrected=True),
        ("exp_avg", "exp_avg_sq"),
        lambda *a: adam(*a, eps=1e-3, uncorrected=True),
    ),
    (dsopt.AdamLegacy(lr=0.01, weight_decay=0.1, eps_inside_sqrt=True), ("exp_avg", "exp_avg_sq"), legacy),
    (dsopt.Lamb(lr=0.01, weight_decay=0.1), ("exp_avg", "exp_avg_sq"), lamb),
    (dsopt.Sgd(lr=0.01), (), lambda p, g, t: (p - 0.01 * g,)),
    (
        dsopt.Sgd(lr=0.01, momentum=0.9, dampening=0.5, weight_decay=0.1),
        ("momentum_buffer",),
        lambda *a: sgd(*a, dampening=0.5),
    ),
    (
        dsopt.Sgd(lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
        ("momentum_buffer",),
        lambda *a: sgd(*a, nesterov=True),
    ),
    (dsopt.Adagrad(lr=0.01, lr_decay=0.1, initial_accumulator_value=0.5), ("sum",), adagrad),
    (
        dsopt.Adagrad(lr=0.01, lr_decay=0.1, initial_accumulator_value=0.5, eps_inside_sqrt=True),
        ("sum",),
        lambda *a: adagrad(*a, inside=True),
    ),
    (dsopt.Lion(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), ("exp_avg",), lion),
]


class Case(unittest.TestCase):
    def near(self, actual, expected, *others, times=1):
        """`others` are the operands of the value: if they cancel, their rounding errors remain."""
        self.assertEqual((actual.dtype, actual.shape), (np.dtype(np.float64), expected.shape))
        if expected.size:
            largest = max(np.abs(x).max() for x in (expected, *others))
            self.assertLessEqual(np.abs(actual - expected).max(), times * TOLERANCE * largest)


class Rules(Case):
    def test_each_step_matches_the_formula(self):
        for group, names, formula in RULES:
            with self.subTest(str(group)):
                params = doubles(*SHAPES)
                opt = dsopt.Optimizer(params, group)
                for t in range(1, 8):
                    grads = doubles(*SHAPES, seed=t)
                    before = [p.copy() for p in params]
                    state = [[opt.state.copy("p%d.%s" % (i, name)) for name in names] for i in range(len(params))]
                    opt.step(grads)
                    for i, (p, g) in enumerate(zip(before, grads)):
                        expected, *moments = formula(p, g, t, *state[i])
                        self.near(params[i], np.asarray(expected), p, g)
                        for name, moment in zip(names, moments):
                            self.near(opt.state["p%d.%s" % (i, name)], np.asarray(moment), g)

    def test_steps_are_close_to_the_engine(self):
        for group, names, _ in RULES:
            params = doubles(*SHAPES)
            singles = [p.astype(np.float32) for p in params]
            opt, engine = dsopt.Optimizer(params, group), dsopt.Optimizer(singles, group)
            for t in range(5):
                grads = doubles(*SHAPES, seed=t)
                opt.step(grads)
                engine.step([g.astype(np.float32) for g in grads])
            for p, q in zip(params, singles):
                np.testing.assert_allclose(p, q, rtol=1e-4, atol=1e-5)
            self.assertEqual(sorted(opt.state), sorted(engine.state))


class Mixed(Case):
    def lists(self):
        (single,), (double,) = arrays((30,)), doubles((40,), seed=3)
        return {"a": single, "b": double}

    def test_float32_bits_do_not_depend_on_float64(self):
        for group, _, _ in RULES:
            both, alone = self.lists(), self.lists()
            opt = dsopt.Optimizer(both, group)
            first, second = dsopt.Optimizer({"a": alone["a"]}, group), dsopt.Optimizer({"b": alone["b"]}, group)
            for t in range(3):
                grads = {"a": arrays((30,), seed=t)[0], "b": doubles((40,), seed=t)[0]}
                opt.step(grads)
                first.step({"a": grads["a"]})
                second.step({"b": grads["b"]})
            for name in both:
                np.testing.assert_array_equal(both[name], alone[name])

    def test_clipping_uses_the_norm_of_both_dtypes(self):
        for options, fields in (({"max_norm": 1.0}, {}), ({}, {"max_norm": 1.0})):
            both, plain = self.lists(), self.lists()
            opt = dsopt.Optimizer(both, dsopt.Sgd(lr=0.1, **fields), **options)
            grads = {"a": arrays((30,), seed=1)[0], "b": doubles((40,), seed=2)[0]}
            norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
            self.assertGreater(norm, 1)
            opt.step(grads)
            self.near(both["b"], plain["b"] - 0.1 * (grads["b"] / (norm + 1e-6)), plain["b"])
            np.testing.assert_allclose(both["a"], plain["a"] - 0.1 * grads["a"] / (norm + 1e-6), rtol=1e-5, atol=1e-6)
            self.assertAlmostEqual(opt.report().grad_norm, norm, places=12)

    def test_loss_scale_skips_overflows(self):
        for bad in (None, "a", "b"):
            both, plain = self.lists(), self.lists()
            scaler = dsopt.Scaler(dsopt.Context(), init=1024, window=100)
            opt = dsopt.Optimizer(both, dsopt.AdamW(lr=0.1), context=scaler.context, scaler=scaler)
            other = dsopt.Optimizer(plain, dsopt.AdamW(lr=0.1))
            for t in range(3):
                grads = {"a": arrays((30,), seed=t)[0], "b": doubles((40,), seed=t)[0]}
                scaled = {name: g * g.dtype.type(1024) for name, g in grads.items()}
                if t == 1 and bad:
                    scaled[bad][2] = np.inf
                    before = {name: p.copy() for name, p in both.items()}
                    opt.step(scaled)
                    for name, p in both.items():
                        np.testing.assert_array_equal(p, before[name])
                    report = opt.report()
                    self.assertEqual((report.last_skipped, report.nonfinite, report.first_bad), (True, 1, bad))
                    self.assertEqual(scaler.scale, 512)
                    scaler.scale = 1024
                else:
                    opt.step(scaled)
                    other.step(grads)
            for name in both:
                np.testing.assert_allclose(both[name], plain[name], rtol=1e-6 if name == "a" else 1e-14)
            self.assertEqual(opt.state["optimizer.step"].tolist(), [3 - bool(bad)] * 2)

    def test_step_accepts_every_argument(self):
        (w,) = doubles((40,))
        v = w.copy()
        opt = dsopt.Optimizer({"w": w}, dsopt.Sgd(lr=0.5), max_value=0.25)
        for options, factor in (
            ({"lr": 0.1}, 0.1),
            ({"lr": [0.2]}, 0.2),
            ({"lr": np.float32([0.2])}, np.float32(0.2)),
            ({"lr": 0.1, "grad_scale": 4}, 0.1),
        ):
            g = doubles((40,), seed=5)[0]
            used = np.clip(g, -0.25, 0.25)
            given = g * options.get("grad_scale", 1)
            opt.step({"w": given}, zero_grads=True, **options)
            v -= float(factor) * used
            self.near(w, v, times=8)
            self.assertFalse(given.any())
        opt.step({"w": g}, skip=1)
        self.near(w, v, times=8)
        opt.step({})
        self.near(w, v, times=8)
        self.assertEqual(opt.report().calls, 6)
        opt.zero_grad({"w": g})
        self.assertFalse(g.any())

    def test_report_has_norms_of_weights_and_updates(self):
        both = self.lists()
        before = {name: p.copy() for name, p in both.items()}
        opt = dsopt.Optimizer(both, dsopt.AdamW(lr=0.1), report_norms=True)
        opt.step({"a": arrays((30,), seed=1)[0], "b": doubles((40,), seed=2)[0]})
        report = opt.report()
        weight = math.sqrt(sum((p.astype(np.float64) ** 2).sum() for p in before.values()))
        change = math.sqrt(sum(((both[n].astype(np.float64) - p) ** 2).sum() for n, p in before.items()))
        self.assertAlmostEqual(report.weight_norm / weight, 1, places=5)
        self.assertAlmostEqual(report.update_norm / change, 1, places=5)

    def test_state_can_be_copied_to_another_optimizer(self):
        both, grads = self.lists(), {"a": arrays((30,), seed=1)[0], "b": doubles((40,), seed=2)[0]}
        opt = dsopt.Optimizer(both, dsopt.AdamW(lr=0.1))
        opt.step(grads)
        others = {name: p.copy() for name, p in both.items()}
        again = dsopt.Optimizer(others, dsopt.AdamW(lr=0.1))
        for name in opt.state:
            again.state[name] = opt.state.copy(name)
        opt.step(grads)
        again.step(grads)
        for name in both:
            np.testing.assert_array_equal(others[name], both[name])
        again.reset("moments")
        self.assertFalse(again.state["b.exp_avg"].any())

    def test_params_and_shapes_follow_added_groups(self):
        both = self.lists()
        opt = dsopt.Optimizer(both, dsopt.AdamW())
        opt.add_group(dsopt.Sgd(lr=0.1, momentum=0.5), {"c": np.zeros((2, 3))})
        self.assertEqual(opt.shapes, [(30,), (40,), (2, 3)])
        self.assertIs(opt.params["b"], both["b"])
        opt.step({"c": np.ones((2, 3))})
        np.testing.assert_array_equal(opt.params["c"], np.full((2, 3), -0.1))
        self.assertEqual(opt.state["c.momentum_buffer"].shape, (2, 3))


class Refusals(Case):
    def test_rejects_options_unsupported_with_float64(self):
        context = dsopt.Context()
        for options, text in (
            ({"compat": "deepspeed"}, "compat='deepspeed'"),
            ({"accumulate": True}, "accumulate=True"),
            ({"nonfinite": "apply"}, "nonfinite='apply'"),
            ({"context": context, "data": dsopt.Comm.single(context)}, "a comm"),
        ):
            with self.assertRaisesRegex(dsopt.TensorError, r"params\['w'\] has dtype float64.*" + text):
                dsopt.Optimizer({"w": np.zeros(3)}, dsopt.AdamW(), **options)
        for group in (dsopt.OnebitAdam(), dsopt.ZeroOneAdam(), dsopt.OnebitLamb()):
            with self.assertRaisesRegex(dsopt.TensorError, r"params\['w'\] has dtype float64.*1-bit family"):
                dsopt.Optimizer({"w": np.zeros(3)}, group)

    def test_rejects_unsuitable_arrays(self):
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        for array, text in ((np.zeros(6)[::2], "not contiguous"), (frozen, "read-only"), (np.zeros(3, ">f8"), ">f8")):
            with self.assertRaisesRegex(dsopt.ArgumentError, r"params\['w'\].*" + text):
                dsopt.Optimizer({"w": array}, dsopt.AdamW())
        both = {"v": np.zeros(3, np.float32), "w": np.zeros(3)}
        opt = dsopt.Optimizer(both, dsopt.AdamW())
        good = np.ones(3, np.float32)
        for grads, text in (
            ({"v": good, "w": np.ones(4)}, r"grads\['w'\] has shape"),
            ({"v": good, "w": np.ones(3, np.int32)}, r"grads\['w'\] has dtype int32"),
            ({"v": np.ones(3), "w": np.ones(3)}, r"grads\['v'\] has dtype float64"),
        ):
            with self.assertRaisesRegex(dsopt.ArgumentError, text):
                opt.step(grads)
            self.assertFalse(both["v"].any() or both["w"].any())
        self.assertEqual(opt.report().calls, 0)

    def test_rejects_arrays_that_share_memory(self):
        w = np.ones(8)
        with self.assertRaisesRegex(dsopt.Error, r"params\['a'\] and params\['b'\] share memory at 0x") as caught:
            dsopt.Optimizer({"a": w[:5], "b": w[4:]}, dsopt.AdamW(lr=0.1))
        self.assertEqual(caught.exception.status, dsopt._abi.DSOPT_ERR_OVERLAP)
        opt = dsopt.Optimizer({"a": w[:4], "b": w[4:6], "empty": w[2:2]}, dsopt.AdamW(lr=0.1))
        with self.assertRaisesRegex(dsopt.Error, r"params\['b'\] and params\['c'\] share memory"):
            opt.add_group(dsopt.AdamW(lr=0.1), {"c": w[5:]})
        self.assertEqual(opt.names, ["a", "b", "empty"])
        opt.add_group(dsopt.AdamW(lr=0.1), {"c": w[6:]})

    def test_rejects_unsupported_calls(self):
        opt = dsopt.Optimizer({"w": np.zeros(3)}, dsopt.AdamW())
        for call, text in (
            (lambda: opt.save("/nonexistent/file"), "save is not supported.*numpy.savez"),
            (lambda: opt.load("/nonexistent/file"), "load is not supported"),
            (lambda: opt.bind(grads=[np.zeros(3)]), "bind is not supported"),
            (lambda: opt.init_state([np.zeros(3)]), "init_state is not supported"),
            (lambda: opt.apply([np.zeros(3)], [np.zeros(3)], {}), "apply is not supported"),
            (lambda: opt.add_params([np.zeros(3)], 0), "add a group"),
            (lambda: opt.step([np.zeros(3)], out=[np.zeros(3)]), "out is not supported"),
            (lambda: opt.step([np.zeros(3)], delta=True), "delta is not supported"),
        ):
            with self.assertRaisesRegex(dsopt.UnsupportedError, text):
                call()
        with self.assertRaisesRegex(dsopt.ArgumentError, "grads are not given"):
            opt.step()


if __name__ == "__main__":
    unittest.main()
