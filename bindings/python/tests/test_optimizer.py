# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import pickle
import threading
import unittest
import weakref

import numpy as np

import dsopt
from support import adamw, arrays


class Steps(unittest.TestCase):
    def test_trains_like_a_float64_reference(self):
        """A small network, trained by the engine in float32 and by a NumPy loop in float64."""
        x, targets = arrays((64, 5), seed=1)[0], arrays((64, 3), seed=2)[0]
        start = arrays((5, 16), (16,), (16, 3), (3,), seed=3, scale=0.3)
        ours, theirs = [w.copy() for w in start], [w.astype(np.float64) for w in start]
        opt = dsopt.Optimizer(ours, dsopt.AdamW(lr=0.01, weight_decay=0.1))
        moments = [(np.zeros_like(w), np.zeros_like(w)) for w in theirs]

        def gradients(w):
            hidden = np.tanh(x @ w[0] + w[1])
            error = 2 * (hidden @ w[2] + w[3] - targets) / targets.size
            inner = error @ w[2].T * (1 - hidden**2)
            return (error**2).sum(), [x.T @ inner, inner.sum(0), hidden.T @ error, error.sum(0)]

        first, _ = gradients(theirs)
        for t in range(1, 201):
            loss, grads = gradients(ours)
            opt.step(grads)
            for p, g, (m, v) in zip(theirs, gradients(theirs)[1], moments):
                adamw(p, g, m, v, t, lr=0.01, wd=0.1)
        self.assertLess(loss, first / 2)
        for p, q in zip(ours, theirs):
            np.testing.assert_allclose(p, q, rtol=2e-3, atol=2e-4)

    def test_a_dropped_optimizer_is_freed_at_once(self):
        """Without the cyclic collector, which may run much later: inside a capture, or never."""
        context = dsopt.Context("cpu", threads=1)
        kinds = {
            "plain": {},
            "scaler": {"context": context, "scaler": dsopt.Scaler(context, init=4.0)},
            "norms": {"report_norms": True, "nonfinite": "skip"},
            "float64": {},
        }
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        for kind, options in kinds.items():
            with self.subTest(kind):
                w = [p.astype(np.float64 if kind == "float64" else np.float32) for p in arrays((4,), (2, 3))]
                opt = dsopt.Optimizer({"a": w[0]}, dsopt.AdamW(lr=0.1), **options)
                opt.add_group(dsopt.Lamb(lr=0.1), {"b": w[1]})
                opt.step([np.ones_like(p) for p in w])
                opt.lr = opt.lr / 2
                opt.groups[1].lr = 0.25
                self.assertEqual(opt.report().calls, 1)
                self.assertTrue(repr(opt) and opt.params and list(opt.state))
                opt.zero_grad([np.ones_like(p) for p in w])
                gone = weakref.ref(opt)
                del opt
                self.assertIsNone(gone())

    def test_gradients_may_be_named_or_missing(self):
        w, b = arrays((4,), (2,))
        before = w.copy(), b.copy()
        opt = dsopt.Optimizer({"w": w, "b": b}, dsopt.AdamW(lr=0.1))
        opt.step({"w": np.ones(4, np.float32)})
        self.assertTrue((w != before[0]).all() and (b == before[1]).all())
        opt.step([None, np.ones(2, np.float32)])
        self.assertTrue((b != before[1]).all())
        self.assertEqual(list(opt.state["optimizer.step"]), [1, 1])
        for wrong, text in (({"x": w}, "'x'"), ({"w": w, "b": b, "c": b}, "'c'"), ([w], "1 arrays"), (3, "grads")):
            with self.assertRaisesRegex(dsopt.ArgumentError, text):
                opt.step(wrong)

    def test_each_call_may_have_other_arrays(self):
        """Addresses are correct for the same arrays, others, views, read-only arrays, other dtypes, and mixtures."""
        shapes = ((4,), (3, 2), (), (5,))
        p, q = arrays(*shapes), arrays(*shapes)
        opt, peer = dsopt.Optimizer(p, dsopt.AdamW(lr=0.1)), dsopt.Optimizer(q, dsopt.AdamW(lr=0.1))
        for t in range(24):
            grads = [np.asarray(g) for g in arrays(*shapes, seed=t // 2)]  # the same values twice
            if t % 4 == 1:
                grads = [g.copy() for g in grads]
            if t % 6 == 2:
                grads[1] = np.repeat(grads[1][None], 2, 0)[1]  # a view
            if t % 6 == 3:
                grads[0].flags.writeable = False
            if t % 6 == 4:
                grads[3] = None
            if t % 6 == 5:
                grads = {"p%d" % i: g for i, g in enumerate(grads)}
            opt.step(grads)
            opt.step(grads)
            for _ in range(2):  # the same list is rewritten
                values = [
                    None if g is None else np.array(g) for g in (grads.values() if isinstance(grads, dict) else grads)
                ]
                peer.step(values)
        for a, b in zip(p, q):
            np.testing.assert_array_equal(a, b)

    def test_steps_with_bound_gradients(self):
        p, q, (g,) = arrays((6,)), arrays((6,)), arrays((6,), seed=1)
        opt, peer = dsopt.Optimizer(p, dsopt.AdamW()), dsopt.Optimizer(q, dsopt.AdamW())
        opt.bind(grads=[g])
        for t in range(5):
            g[:] = t
            opt.step()
            peer.step([g.copy()])
        np.testing.assert_array_equal(p[0], q[0])
        opt.step(zero_grads=True)
        self.assertFalse(g.any())
        g[:] = 1
        opt.zero_grad()
        self.assertFalse(g.any())
        with self.assertRaisesRegex(dsopt.ArgumentError, "grads"):
            peer.step()
        readonly = np.ones(6, np.float32)
        readonly.flags.writeable = False
        opt.bind(grads=[readonly])
        opt.step()
        with self.assertRaisesRegex(dsopt.ArgumentError, "read-only"):
            opt.step(zero_grads=True)
        self.assertTrue(readonly.all())

    def test_mixed_precision_uses_the_scaler(self):
        context = dsopt.Context()
        scaler = dsopt.Scaler(context, init=1024, window=2)
        (w,) = arrays((8,), dtype=np.float16)
        opt = dsopt.Optimizer({"w": w}, dsopt.AdamW(lr=0.1), context=context, scaler=scaler, max_norm=1.0)
        opt.step([np.full(8, 1024, np.float16)])
        report = opt.report()
        self.assertAlmostEqual(report.grad_norm, 8**0.5, places=4)
        self.assertEqual((report.scale_used, report.last_skipped, report.first_bad), (1024, False, None))
        before = w.copy()
        opt.step([np.full(8, np.inf, np.float16)])
        report = opt.report()
        self.assertEqual((report.skipped, report.first_bad, report.kind), (1, "w", "inf"))
        self.assertIn("gradients", report.reasons)
        self.assertEqual(scaler.scale, 512)
        np.testing.assert_array_equal(w, before)
        scaler.scale = 64
        self.assertEqual(scaler.query().dynamic, 64)
        scaler.override(8)
        self.assertEqual(scaler.scale, 8)
        scaler.override(None)
        self.assertEqual(scaler.scale, 64)
        with self.assertRaises(dsopt.StateError):
            dsopt.Optimizer([w], dsopt.AdamW(), context=context, scaler=scaler)
        scaler.detach()
        dsopt.Optimizer([w], dsopt.AdamW(), context=context, scaler=scaler)

    def test_step_accepts_optional_arguments(self):
        p, q = arrays((4,)), arrays((4,))
        (g,) = arrays((4,), seed=1)
        opt, peer = dsopt.Optimizer(p, dsopt.AdamW(lr=0.5)), dsopt.Optimizer(q, dsopt.AdamW(lr=0.25))
        out, report = np.zeros(4, np.float16), np.zeros(16, np.float32)
        opt.step([g * 8], lr=np.array([0.25], np.float32), grad_scale=8, out=[out], report=report, skip=0)
        peer.step([g])
        np.testing.assert_array_equal(p[0], q[0])
        np.testing.assert_array_equal(out, p[0].astype(np.float16))
        self.assertEqual((report[0], opt.lr), (0, 0.5))
        opt.step([g], lr=0.125)
        self.assertEqual(opt.lr, 0.125)
        opt.step([g], skip=1)
        self.assertEqual(opt.report().reasons, ("caller",))
        before = p[0].copy()
        wide = np.zeros(4, np.float32)
        opt.step([g], out=[wide], delta=True)
        np.testing.assert_array_equal(p[0], before)
        self.assertTrue(wide.any())
        with self.assertRaisesRegex(dsopt.ArgumentError, "report has 4 elements"):
            opt.step([g], report=np.zeros(4, np.float32))
        with self.assertRaisesRegex(dsopt.ArgumentError, "lr has 2 values"):
            opt.step([g], lr=[1, 2])
        with self.assertRaisesRegex(dsopt.ArgumentError, "skip has dtype float32"):
            opt.step([g], skip=np.zeros(1, np.float32))
        with self.assertRaisesRegex(dsopt.ArgumentError, r"out\['p0'\].*read-only"):
            out.flags.writeable = False
            opt.step([g], out=[out])

    def test_groups_have_separate_hyper_parameters(self):
        w, b = arrays((4,), (2,))
        opt = dsopt.Optimizer({"w": w}, dsopt.Lamb(lr=0.5, weight_decay=0.1))
        opt.add_group(dsopt.Adam(betas=(0.5, 0.75), bias_correction=False), {"b": b})
        lamb, adam = opt.groups
        self.assertEqual((lamb.lr, lamb.weight_decay, lamb.max_trust), (0.5, 0.1, 10))
        self.assertEqual((adam.betas, adam.bias_correction), ((0.5, 0.75), False))
        self.assertIn("Adam", repr(adam))
        opt.lr = 0.25
        self.assertEqual((lamb.lr, adam.lr), (0.25, 0.25))
        lamb.lr, adam.betas, lamb.min_trust = 1.0, (0.1, 0.2), 0.5
        self.assertEqual((opt.groups[0].lr, opt.groups[1].lr, adam.betas, lamb.min_trust), (1, 0.25, (0.1, 0.2), 0.5))
        for change in (
            lambda: setattr(adam, "lr", -1),
            lambda: setattr(adam, "betas", (0.3, 2)),
            lambda: setattr(adam, "eps", np.nan),
        ):
            with self.assertRaises(ValueError):
                change()
        self.assertEqual((adam.lr, adam.betas), (0.25, (0.1, 0.2)))
        with self.assertRaises(NotImplementedError):
            adam.max_trust = 3
        opt.max_norm = 2.0
        self.assertEqual((opt.max_norm, opt.calls, list(opt.params)), (2, 0, ["w", "b"]))
        opt.step([w.copy(), b.copy()])
        (c,) = arrays((3,))
        opt.add_params({"c": c}, 1)
        opt.step({"w": w.copy(), "b": b.copy(), "c": c.copy()})
        self.assertEqual(list(opt.state["optimizer.step"]), [2, 2, 1])

    def test_eps_uncorrected_is_added_to_the_uncorrected_root(self):
        lr, eps, wd = 0.1, 0.01, 0.5
        for group, decay in ((dsopt.Adam, 0.0), (dsopt.AdamW, wd)):
            for later in (False, True):  # set through a property of the group
                with self.subTest(group=group, later=later):
                    (w,) = arrays((5,))
                    p = w.astype(np.float64)
                    m, v = np.zeros(5), np.zeros(5)
                    opt = dsopt.Optimizer([w], group(lr=lr, eps=eps, weight_decay=decay, eps_uncorrected=not later))
                    opt.groups[0].eps_uncorrected = True
                    for t in range(1, 6):
                        (g,) = arrays((5,), seed=t, scale=0.01)
                        opt.step([g])
                        m += 0.1 * (g - m)
                        v += 0.001 * (g.astype(np.float64) ** 2 - v)
                        p -= lr * ((1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (np.sqrt(v) + eps) + decay * p)
                    self.assertTrue(opt.groups[0].eps_uncorrected)
                    np.testing.assert_allclose(w, p, rtol=1e-5)
        opt = dsopt.Optimizer(arrays((5,)), dsopt.Lamb())
        with self.assertRaises(NotImplementedError):
            opt.groups[0].eps_uncorrected = True
        with self.assertRaisesRegex(NotImplementedError, "eps_uncorrected"):
            dsopt.Optimizer(arrays((5,)), dsopt.Adam(bias_correction=False, eps_uncorrected=True))

    def test_sgd_matches_the_formula(self):
        lr, wd = 0.1, 0.25
        for momentum, dampening, nesterov in ((0, 0, False), (0.5, 0, False), (0.5, 0.25, False), (0.5, 0, True)):
            with self.subTest(momentum=momentum, dampening=dampening, nesterov=nesterov):
                (w,) = arrays((5,))
                p, b = w.astype(np.float64), None
                options = dict(momentum=momentum, dampening=dampening, nesterov=nesterov)
                opt = dsopt.Optimizer({"w": w}, dsopt.Sgd(lr=lr, weight_decay=wd, **options))
                self.assertEqual("w.momentum_buffer" in opt.state, momentum > 0)
                for t in range(5):
                    (g,) = arrays((5,), seed=t)
                    opt.step([g])
                    g = g + wd * p
                    b = g if b is None else momentum * b + (1 - dampening) * g
                    p -= lr * (g + momentum * b if nesterov else b if momentum else g)
                np.testing.assert_allclose(w, p, rtol=1e-5, atol=1e-6)

    def test_sgd_group_validates_options(self):
        opt = dsopt.Optimizer(arrays((5,)), dsopt.Sgd(momentum=0.5))
        (group,) = opt.groups
        group.momentum, group.dampening = 0.75, 0.5
        self.assertEqual((group.momentum, group.dampening, group.nesterov, group.lr), (0.75, 0.5, False, 1e-3))
        with self.assertRaisesRegex(ValueError, "dampening is 0.5, must be 0 with nesterov"):
            group.nesterov = True
        group.dampening, group.nesterov = 0, True
        self.assertTrue(group.nesterov)
        with self.assertRaisesRegex(NotImplementedError, "momentum"):
            group.momentum = 0
        with self.assertRaises(NotImplementedError):
            group.betas = 0.9, 0.99
        self.assertEqual(group.momentum, 0.75)
        with self.assertRaisesRegex(NotImplementedError, "nesterov has no effect without momentum"):
            dsopt.Optimizer(arrays((5,)), dsopt.Sgd(nesterov=True))

    def test_adagrad_matches_the_formula(self):
        for start, inside in ((0.0, False), (0.5, False), (0.5, True)):
            with self.subTest(start=start, inside=inside):
                (w,) = arrays((5,))
                p, s = w.astype(np.float64), start
                lr, decay, eps, wd = 0.1, 0.125, 1e-3, 0.25
                group = dsopt.Adagrad(
                    lr=lr,
                    lr_decay=decay,
                    weight_decay=wd,
                    initial_accumulator_value=start,
                    eps=eps,
                    eps_inside_sqrt=inside,
                )
                opt = dsopt.Optimizer({"w": w}, group)
                for t in range(5):
                    (g,) = arrays((5,), seed=t)
                    opt.step([g])
                    g = g + wd * p
                    s = s + g * g
                    p -= lr / (1 + t * decay) * g / (np.sqrt(s + eps) if inside else np.sqrt(s) + eps)
                np.testing.assert_allclose(w, p, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(opt.state["w.sum"], s, rtol=1e-5)

    def test_adagrad_group_validates_options(self):
        opt = dsopt.Optimizer({"w": arrays((5,))[0]}, dsopt.Adagrad())
        (group,) = opt.groups
        self.assertEqual((group.lr, group.eps, group.lr_decay, group.initial_accumulator_value), (1e-2, 1e-10, 0, 0))
        group.lr_decay, group.initial_accumulator_value = 0.5, 0.25
        opt.reset("moments")
        np.testing.assert_array_equal(opt.state["w.sum"], np.full(5, 0.25, np.float32))
        with self.assertRaisesRegex(ValueError, "lr_decay"):
            group.lr_decay = -1
        self.assertEqual(group.lr_decay, 0.5)

    def test_lion_matches_the_formula(self):
        (w,) = arrays((5,))
        p, m, lr, (b1, b2), wd = w.astype(np.float64), np.zeros(5), 0.1, (0.75, 0.5), 0.25
        opt = dsopt.Optimizer({"w": w}, dsopt.Lion(lr=lr, betas=(b1, b2), weight_decay=wd))
        for t in range(5):
            (g,) = arrays((5,), seed=t)
            opt.step([g])
            p -= lr * (np.sign(b1 * m + (1 - b1) * g) + wd * p)
            m = b2 * m + (1 - b2) * g
        np.testing.assert_allclose(w, p, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(opt.state["w.exp_avg"], m, rtol=1e-5, atol=1e-6)
        with self.assertRaises(NotImplementedError):
            opt.groups[0].eps = 1e-6
        opt.groups[0].betas = 0.5, 0.25
        self.assertEqual(repr(opt.groups[0]), "<Lion lr=0.1 betas=(0.5, 0.25) weight_decay=0.25>")

    def test_every_algorithm_steps(self):
        for group in (
            dsopt.Adam(),
            dsopt.AdamW(),
            dsopt.AdamLegacy(eps_inside_sqrt=True),
            dsopt.Lamb(),
            dsopt.Sgd(),
            dsopt.Sgd(momentum=0.9, nesterov=True),
            dsopt.Adagrad(),
            dsopt.Adagrad(eps_inside_sqrt=True, initial_accumulator_value=0.1),
            dsopt.Lion(),
            dsopt.OnebitAdam(freeze_step=2),
            dsopt.ZeroOneAdam(freeze_step=2),
            dsopt.OnebitLamb(freeze_step=2),
        ):
            with self.subTest(group=group):
                (w,) = arrays((9,))
                before = w.copy()
                opt = dsopt.Optimizer([w], group)
                for _ in range(4):
                    opt.step(arrays((9,), seed=5))
                self.assertTrue((w != before).all())
                self.assertEqual(opt.groups[0].algorithm, group.algorithm)
                self.assertIn("<%s lr=" % type(group).__name__, repr(opt.groups[0]))

    def test_rejects_invalid_arguments(self):
        (w,) = arrays((4,))
        group = dsopt.AdamW()
        for make, text in (
            (lambda: dsopt.Optimizer({"w": w}), "group"),
            (lambda: dsopt.Optimizer({"w": w}, 1e-3), "group"),
            (lambda: dsopt.Optimizer({"w": np.zeros(4)}, group, compat="deepspeed"), r"params\['w'\].*float64"),
            (lambda: dsopt.Optimizer({"w": w[::2]}, group), r"params\['w'\].*contiguous"),
            (lambda: dsopt.Optimizer({"w": np.zeros(4, np.int32)}, group), r"params\['w'\].*int32"),
            (lambda: dsopt.Optimizer({3: w}, group), "params"),
            (lambda: dsopt.Optimizer(w, group), "params"),
            (lambda: dsopt.Optimizer({"w": "text"}, group), r"params\['w'\]"),
            (lambda: dsopt.Optimizer({"a": w, "b": w}, group), "a.*b|b.*a"),
            (lambda: dsopt.Optimizer([w], dsopt.AdamW(lr=-1)), "lr"),
            (lambda: dsopt.Optimizer([w], dsopt.AdamW(betas=0.9)), "betas"),
            (lambda: dsopt.Optimizer([w], dsopt.AdamW(lr="big")), "lr"),
            (lambda: dsopt.Optimizer([w], group, compat="apex"), "compat.*'deepspeed'"),
            (lambda: dsopt.Optimizer([w], group, max_norm=-1), "max_norm"),
            (lambda: dsopt.Context("tpu"), "backend.*'cuda'"),
            (lambda: dsopt.Context(chunk=5), "chunk"),
            (lambda: dsopt.Context(parallel_for=3), "parallel_for"),
            (lambda: dsopt.Scaler(dsopt.Context(), factor=0.5), "factor"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                make()
        frozen = w.copy()
        frozen.flags.writeable = False
        with self.assertRaisesRegex(dsopt.ArgumentError, r"params\['w'\].*read-only"):
            dsopt.Optimizer({"w": frozen}, group)
        opt = dsopt.Optimizer({"w": w}, group)
        for grads, text in (
            ({"w": np.zeros(4)}, "float64"),
            ({"w": np.zeros(3, np.float32)}, "shape"),
            ({"w": np.zeros((2, 2), np.float32)}, "shape"),
            ({"w": np.zeros(8, np.float32)[::2]}, "contiguous"),
            ({"w": [0.0] * 4}, "no array"),
        ):
            with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['w'\].*" + text):
                opt.step(grads)
        self.assertEqual(opt.report().calls, 0)
        opt.step({"w": np.zeros(4, np.float32)})  # still usable

    def test_rejects_numbers_out_of_range(self):
        """ctypes would use their lower bits."""
        (w,), group = arrays((4,)), dsopt.AdamW()
        opt = dsopt.Optimizer([w], group)
        before = w.copy()
        for call, text in (
            (lambda: dsopt.Context(threads=2**33 + 1), "threads"),
            (lambda: dsopt.Optimizer([w], group, skip_budget=2**40), "skip_budget"),
            (lambda: dsopt.Optimizer([w], group, seed=2**70, stochastic_rounding=True), "seed"),
            (lambda: dsopt.Optimizer([w], dsopt.OnebitAdam(freeze_step=2**65)), "freeze_step"),
            (lambda: dsopt.Optimizer({"w": dsopt.Param(shape=(2**70,))}, group), "shape"),
            (lambda: dsopt.Optimizer({"w": dsopt.Param(shape=(2**40, 2**40))}, group), "shape"),
            (lambda: dsopt.Optimizer({"w": dsopt.Param(shape=(4,), expert=2**40)}, group), "expert"),
            (lambda: opt.add_params({"b": w.copy()}, 2**32), "group"),
            (lambda: opt.step([w.copy()], skip=2**40), "skip"),
            (lambda: opt.step([w.copy()], stream=2**70), "stream"),
            (lambda: opt.step([w.copy()], stream="x"), "stream"),
            (lambda: opt.step([w.copy()], lr=10**400), "lr"),
            (lambda: setattr(opt, "lr", "x"), "lr"),
            (lambda: setattr(opt.groups[0], "betas", 0.9), "betas"),
            (lambda: opt.step([w.copy()], report=[0] * 16), "report"),
            (lambda: dsopt.Optimizer([w], group, max_norm="x"), "max_norm"),
            (lambda: opt.next_reduction(2**70), "call"),
            (lambda: dsopt.zero([w], stream="x"), "stream"),
            (lambda: dsopt.zero(None), "arrays is NoneType"),
            (lambda: dsopt.clamp([w], "x"), "limit"),
            (lambda: dsopt.clip([w], "x"), "max_norm"),
            (lambda: dsopt.axpby(1, [w], "x", [w]), "b is 'x'"),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(dsopt.ArgumentError, text):
                call()
        with self.assertRaises(AttributeError):
            opt.groups[0].lrr = 1
        with self.assertRaisesRegex(dsopt.ArgumentError, "OUT_ONLY"):
            opt.step([w.copy()], zero_grads=False, out_only=2)  # any true value sets the flag
        np.testing.assert_array_equal(w, before)

    def test_rejects_handles_of_another_kind(self):
        (w,), group, context = arrays((4,)), dsopt.AdamW(), dsopt.Context()
        for call, text in (
            (lambda: dsopt.Optimizer([w], group, context=3), "context is int"),
            (lambda: dsopt.Optimizer([w], group, data=context), "data is Context"),
            (lambda: dsopt.Optimizer([w], group, scaler=dsopt.Optimizer([w], group)), "scaler is Optimizer"),
            (lambda: dsopt.Optimizer([w], group, experts=[context]), r"experts\[0\] is Context"),
            (lambda: dsopt.Optimizer([w], group, experts=None), "experts is NoneType"),
            (lambda: dsopt.Optimizer([w], dsopt.Group()), "group is Group"),
            (lambda: dsopt.Scaler(dsopt.Scaler(context)), "context is Scaler"),
            (lambda: dsopt.Comm.single(None), "context is NoneType"),
            (lambda: dsopt.norm([w], comm=context), "comm is Context"),
            (lambda: dsopt.zero([w], context=dsopt.Comm.single(context)), "context is Comm"),
        ):
            with self.subTest(text=text), self.assertRaisesRegex(dsopt.ArgumentTypeError, text):
                call()

    def test_rejects_invalid_parameter_names(self):
        for name in ("a\0b", "a\udc80"):
            with self.assertRaisesRegex(dsopt.ArgumentError, "params has the name"):
                dsopt.Optimizer({name: arrays((4,))[0]}, dsopt.AdamW())

    def test_rejects_numpy_scalars(self):
        (w,) = arrays((4,))
        with self.assertRaisesRegex(dsopt.ArgumentTypeError, r"params\['w'\] is a scalar of NumPy"):
            dsopt.Optimizer({"w": np.float32(1)}, dsopt.AdamW())  # their address would be that of a copy
        opt, peer = dsopt.Optimizer({"w": w}, dsopt.AdamW()), dsopt.Optimizer(arrays((4,)), dsopt.AdamW(lr=0.125))
        with self.assertRaisesRegex(dsopt.ArgumentError, "mask"):
            opt.step([np.ma.masked_array(w.copy(), mask=[1, 0, 0, 0])])
        for lr, skip in ((np.float32(0.125), np.int64(0)), (np.float64(0.125), np.bool_(False))):
            opt.step([np.ones(4, np.float32)], lr=lr, skip=skip)
            peer.step([np.ones(4, np.float32)])
        np.testing.assert_array_equal(w, peer.params["p0"])
        self.assertEqual(opt.lr, 0.125)
        opt.step([np.ones(4, np.float32)], skip=np.bool_(True))
        np.testing.assert_array_equal(w, peer.params["p0"])

    def test_rejects_misaligned_memory(self):
        memory = np.zeros(18, np.uint8)
        skewed = memory[1:17].view(np.float32) if memory.ctypes.data % 4 == 0 else memory[:16].view(np.float32)
        with self.assertRaisesRegex(dsopt.ArgumentError, "align"):
            dsopt.Optimizer({"w": skewed}, dsopt.AdamW())


class Lifetimes(unittest.TestCase):
    def test_arrays_are_kept(self):
        (w,) = arrays((1000,))
        watch = weakref.ref(w)
        opt = dsopt.Optimizer({"w": w}, dsopt.AdamW())
        del w
        gc.collect()
        self.assertIsNotNone(watch())
        opt.step(arrays((1000,), seed=1))
        del opt
        gc.collect()
        self.assertIsNone(watch())

    def test_gradients_are_not_kept(self):
        opt = dsopt.Optimizer(arrays((4,)), dsopt.AdamW())
        grads = arrays((4,))
        watch = weakref.ref(grads[0])
        opt.step(grads)
        opt.step(grads)
        del grads
        self.assertIsNone(watch())
        opt.step(arrays((4,)))

    def test_arrays_in_use_cannot_be_resized(self):
        """The memory of an array whose address is in use cannot move; if it moved before, the new address is used."""
        w, g = np.ones(4, np.float32), np.ones(4, np.float32)
        opt = dsopt.Optimizer({"w": w}, dsopt.AdamW())
        opt.bind(grads=[g])
        for array in (w, g):
            with self.assertRaises(ValueError):
                array.resize(100000, refcheck=False)
        owner = np.ones(8, np.float32)
        opt.bind(grads=[owner[:4]])
        with self.assertRaises(ValueError):
            owner.resize(100000, refcheck=False)
        resized = np.ones(4, np.float32)
        resized.resize(6, refcheck=False)
        with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['w'\].*shape"):
            opt.step([resized])

    def test_objects_can_be_closed_in_any_order(self):
        import itertools

        for order in itertools.permutations(range(4)):
            context = dsopt.Context(parallel_for=lambda n, body: [body(i) for i in range(n)])
            scaler, comm = dsopt.Scaler(context), dsopt.Comm.single(context)
            opt = dsopt.Optimizer(arrays((5000,)), dsopt.AdamW(), context=context, scaler=scaler, data=comm)
            opt.step(arrays((5000,)))
            objects = [context, scaler, comm, opt]
            del context, scaler, comm, opt
            for i in order:
                if i % 2:
                    objects[i].close()
                objects[i] = None
                gc.collect()
        context = dsopt.Context()
        opt = dsopt.Optimizer(arrays((5,)), dsopt.AdamW(), context=context)
        context.close()
        opt.step(arrays((5,)))  # the library keeps references

    def test_closed_objects_raise(self):
        opt = dsopt.Optimizer(arrays((4,)), dsopt.AdamW())
        with opt:
            pass
        self.assertTrue(opt.closed)
        opt.close()
        for call in (lambda: opt.step(arrays((4,))), opt.report, lambda: opt.state, lambda: opt.lr):
            with self.assertRaisesRegex(dsopt.StateError, "Optimizer is closed"):
                call()

    def test_state_outlives_the_optimizer(self):
        opt = dsopt.Optimizer({"w": np.ones((2, 3), np.float32)}, dsopt.AdamW())
        opt.step([np.ones((2, 3), np.float32)])
        view = opt.state["w.exp_avg"]
        self.assertEqual(view.shape, (2, 3))
        expected = view.copy()
        opt.close()
        del opt
        gc.collect()
        np.testing.assert_array_equal(view, expected)
        view[:] = 3

    def test_state_mapping_follows_the_optimizer(self):
        """Also in a mapping that was created before parameters were added or memory was bound."""
        opt = dsopt.Optimizer({"w": np.ones(3, np.float32)}, dsopt.AdamW())
        state = opt.state
        opt.add_params({"b": np.ones(3, np.float32)}, 0)
        opt.step([np.ones(3, np.float32)] * 2)
        self.assertEqual(list(state), list(opt.state))
        np.testing.assert_array_equal(state["optimizer.step"], [1, 1])
        state["optimizer.step"] = np.array([5, 6], np.int32)
        np.testing.assert_array_equal(opt.state.copy("optimizer.step"), [5, 6])
        mine = opt.init_state([np.ones(3, np.float32)] * 2)
        opt.bind(state=mine)
        self.assertEqual(state["b.exp_avg"].ctypes.data, mine["b.exp_avg"].ctypes.data)

    def test_pickle_and_copy_are_refused(self):
        opt = dsopt.Optimizer(arrays((4,)), dsopt.AdamW())
        for thing in (opt, opt.context, dsopt.Scaler(opt.context), dsopt.Comm.single(opt.context)):
            for refuse in (pickle.dumps, copy.copy, copy.deepcopy):
                with self.assertRaisesRegex(TypeError, "cannot be pickled"):
                    refuse(thing)

    def test_errors_can_be_pickled(self):
        with self.assertRaises(dsopt.ArgumentError) as caught:
            dsopt.Context(chunk=5)
        again = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual(
            (type(again), str(again), again.status, again.name),
            (dsopt.ArgumentError, str(caught.exception), 10, "DSOPT_ERR_ARGUMENT"),
        )

    def test_concurrent_calls_raise_state_error(self):
        inside, may_continue = threading.Event(), threading.Event()

        def slow(n, body):
            inside.set()
            may_continue.wait(60)
            for i in range(n):
                body(i)

        grads = arrays((100000,))
        opt = dsopt.Optimizer(arrays((100000,)), dsopt.AdamW(), context=dsopt.Context(threads=2, parallel_for=slow))
        thread = threading.Thread(target=lambda: opt.step(grads))
        thread.start()
        self.assertTrue(inside.wait(60))
        try:
            for call in (lambda: opt.step(grads), lambda: setattr(opt, "lr", 1), opt.report):
                with self.assertRaises(dsopt.StateError):
                    call()
        finally:
            may_continue.set()
            thread.join()
        opt.step(grads)


if __name__ == "__main__":
    unittest.main()
