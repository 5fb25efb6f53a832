# SPDX-License-Identifier: Apache-2.0
"""float64 and complex128 parameters."""
import copy
import io
import math

from support import NO_FUSED, SHAPES, VERSION, TestCase, fused_on, main, params_of, torch

import dsopt
from dsopt.torch import (SGD, Adagrad, Adam, AdamW, FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb,
                         FusedLion, Lion, OnebitAdam, OnebitLamb, ZeroOneAdam)

F64 = torch.float64
STANDARD = (AdamW, Adam, SGD, Adagrad, Lion, FusedAdam, FusedLion, FusedLamb)
PAIRS = [
    (AdamW, torch.optim.AdamW, {}), (AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.5, 0.9)}),
    (Adam, torch.optim.Adam, {}), (Adam, torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3}),
    (SGD, torch.optim.SGD, {}), (SGD, torch.optim.SGD, {"weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (Adagrad, torch.optim.Adagrad, {}),
    (Adagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5}),
]
TOLERANCE = 1e-15  # of the largest magnitude in a tensor


def doubles(*shapes, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def give(*lists, seed=0, scale=1.0):
    """Sets equal gradients, random in all bits of a double."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for same in zip(*lists):
        grad = torch.randn(same[0].shape, generator=generator, dtype=same[0].dtype) * scale
        for param in same:
            param.grad = grad.to(param.dtype).clone()


def run(optimizer, params, steps, begin=0):
    for i in range(begin, begin + steps):
        give(params, seed=i)
        optimizer.step()


def lamb(p, g, m, v, t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, wd=0.0, low=0.01, high=10.0):
    """Takes one step of FusedLamb, in place."""
    m.mul_(betas[0]).add_((1 - betas[0]) * g)
    v.mul_(betas[1]).add_((1 - betas[1]) * g * g)
    update = m / (v.sqrt() + eps) + wd * p
    ratio = min(max((p.norm() / update.norm()).item(), low), high)
    p -= lr * math.sqrt(1 - betas[1]**t) / (1 - betas[0]**t) * ratio * update
    return ratio


class DoubleCase(TestCase):
    def near(self, actual, expected, times=1, grad=None):
        """If a gradient cancels a moment's old value, the moment has the rounding errors of both."""
        actual, expected = actual.detach(), expected.detach()
        self.assertEqual((actual.dtype, actual.shape), (expected.dtype, expected.shape))
        if expected.numel():
            largest = max(x.abs().max().item() for x in (expected, grad) if x is not None)
            limit = times * TOLERANCE * largest
            self.assertLessEqual((actual - expected).abs().max().item(), limit)


class AsTorch(DoubleCase):
    def each(self):
        for kind, reference, options in PAIRS:
            with self.subTest(kind.__name__, **options):
                yield kind, reference, {"lr": 0.01, **options}

    def compare(self, kind, reference, options, params, others, steps=20):
        """Takes each step from the same state, so that rounding errors of steps do not accumulate."""
        ours, theirs = kind(params, **options), reference(others, **options)
        for i in range(steps):
            give(params, others, seed=i)
            ours.step()
            theirs.step()
            for p, q in zip(params, others):
                self.near(p, q)
                for key, value in theirs.state[q].items():
                    if key == "step":
                        self.assertEqual(float(ours.state[p][key]), float(value))
                    elif value is not None:
                        self.near(ours.state[p][key], value, grad=q.grad)
                        ours.state[p][key].copy_(value)
                p.data.copy_(q.detach())
        return ours, theirs

    def test_agrees_with_torch(self):
        for kind, reference, options in self.each():
            self.compare(kind, reference, options, doubles(*SHAPES), doubles(*SHAPES))

    def test_agrees_with_torch_after_many_steps(self):
        """With the operations of torch without foreach and fused, the rounding is the same."""
        if VERSION < (2, 1):
            self.skipTest("torch %s has another order of operations" % torch.__version__)
        for kind, reference, options in self.each():
            params, others = doubles(*SHAPES), doubles(*SHAPES)
            ours, theirs = kind(params, **options), reference(others, foreach=False, **options)
            for i in range(20):
                give(params, others, seed=i)
                ours.step()
                theirs.step()
            for p, q in zip(params, others):
                self.near(p, q, times=4)

    def test_steps_complex128_parameters(self):
        for kind, reference, options in self.each():
            params, others = [doubles((4, 3), (0,), (5,), dtype=torch.complex128) for _ in range(2)]
            self.compare(kind, reference, options, params, others, steps=5)

    def test_steps_transposed_parameters_and_gaps(self):
        for kind, reference, options in self.each():
            lists = []
            for _ in range(2):
                a, b = doubles((6, 4), (8, 8))
                lists.append([torch.nn.Parameter(a.detach().t()), torch.nn.Parameter(b.detach()[::2, ::2])])
            self.compare(kind, reference, options, *lists, steps=5)

    def test_state_is_compatible_with_torch(self):
        for kind, reference, options in self.each():
            params, others = doubles(*SHAPES), doubles(*SHAPES)
            ours, theirs = self.compare(kind, reference, options, params, others, steps=3)
            there, back = reference(others, **options), kind(params, **options)
            there.load_state_dict(ours.state_dict())
            back.load_state_dict(theirs.state_dict())
            give(params, others, seed=9)
            there.step()
            back.step()
            for p, q in zip(params, others):
                self.near(p, q)

    def test_uses_the_learning_rate_of_a_schedule(self):
        for kind, reference, options in self.each():
            params, others = doubles((20,)), doubles((20,))
            pairs = [(kind(params, **options), params), (reference(others, **options), others)]
            schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer, _ in pairs]
            for i in range(4):
                for (optimizer, of_it), schedule in zip(pairs, schedules):
                    run(optimizer, of_it, 1, begin=i)
                    schedule.step()
            self.near(params[0], others[0], times=10)

    def test_works_with_clip_grad_norm(self):
        params, others = doubles((20,), (3,)), doubles((20,), (3,))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        for i in range(3):
            give(params, others, seed=i, scale=10)
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            ours.step()
            theirs.step()
        for p, q in zip(params, others):
            self.near(p, q, times=10)


GROUPS = [
    (lambda: dsopt.AdamW(lr=0.01), torch.optim.AdamW, {}),
    (lambda: dsopt.Adam(lr=0.01, weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    (lambda: dsopt.Sgd(lr=0.01), torch.optim.SGD, {}),
    (lambda: dsopt.Sgd(lr=0.01, momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (lambda: dsopt.Adagrad(lr=0.01, lr_decay=0.1), torch.optim.Adagrad, {"lr_decay": 0.1}),
]


class Numpy(DoubleCase):
    def test_dsopt_optimizer_agrees_with_torch(self):
        """Steps over the memory of tensors, each from the same weights."""
        for group, reference, options in GROUPS:
            params, others = doubles((300,), (7, 5)), doubles((300,), (7, 5))
            arrays = [p.detach().numpy() for p in params]
            ours, theirs = dsopt.Optimizer(arrays, group()), reference(others, lr=0.01, **options)
            for i in range(10):
                give(others, seed=i)
                ours.step([q.grad.numpy() for q in others])
                theirs.step()
                for p, q in zip(params, others):
                    self.near(p, q)
                    p.data.copy_(q.detach())

    def test_dsopt_optimizer_accepts_torch_tensors(self):
        tensor = torch.ones(3, dtype=F64)
        opt = dsopt.Optimizer({"w": tensor}, dsopt.Sgd(lr=0.5))
        opt.step({"w": torch.ones(3, dtype=F64)})
        self.assertEqual(tensor.tolist(), [0.5] * 3)


class Rules(DoubleCase):
    def test_lion_matches_the_formula(self):
        for kind, betas in ((Lion, (0.9, 0.99)), (FusedLion, (0.9, 0.999))):
            (param,) = doubles((50,))
            p, m = param.detach().clone(), torch.zeros(50, dtype=F64)
            optimizer = kind([param], lr=0.01, weight_decay=0.1)
            for i in range(5):
                run(optimizer, [param], 1, begin=i)
                p = p * (1 - 0.01 * 0.1) - 0.01 * torch.sign(betas[0] * m + (1 - betas[0]) * param.grad)
                m = betas[1] * m + (1 - betas[1]) * param.grad
            self.near(param, p, times=10)
            self.near(optimizer.state[param]["exp_avg"], m, times=10)
            self.assertEqual(set(optimizer.state[param]), {"exp_avg"})

    def test_lamb_matches_the_formula(self):
        params = doubles((30,), (4, 5))
        optimizer = FusedLamb(params, lr=0.01, weight_decay=0.1)
        own = [(p.detach().clone(), torch.zeros_like(p.data), torch.zeros_like(p.data)) for p in params]
        for i in range(5):
            run(optimizer, params, 1, begin=i)
            ratios = [lamb(p, param.grad, m, v, i + 1, lr=0.01, wd=0.1) for (p, m, v), param in zip(own, params)]
        for (p, _, _), param in zip(own, params):
            self.near(param, p, times=10)
        self.assert_close(optimizer.get_lamb_coeffs(), ratios, rtol=1e-12, atol=0)

    def test_fused_adam_matches_torch(self):
        for adam_w, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
            params, others = doubles((30,)), doubles((30,))
            run(FusedAdam(params, lr=0.01, weight_decay=0.1, adam_w_mode=adam_w), params, 5)
            run(reference(others, lr=0.01, weight_decay=0.1), others, 5)
            self.near(params[0], others[0], times=10)


class Norms(DoubleCase):
    def test_clipping_uses_the_norm_of_both_dtypes(self):
        params = params_of((30,)) + doubles((40,))
        optimizer = FusedLamb(params, lr=0.01, max_grad_norm=1.0)
        others = params_of((30,)) + doubles((40,))
        plain = FusedLamb(others, lr=0.01)
        for i in range(4):
            give(params, seed=i, scale=3.0)
            total = math.sqrt(sum(p.grad.double().square().sum().item() for p in params))
            self.assertGreater(total, 1)
            for p, q in zip(params, others):
                q.grad = p.grad / ((total + 1e-6) / 1.0)
            optimizer.step()
            plain.step()
        self.assert_close(params[0], others[0], rtol=1e-5, atol=1e-6)
        self.near(params[1], others[1], times=10)

    def test_nan_in_either_dtype_skips_both(self):
        for bad in (0, 1):
            params = params_of((3,)) + doubles((4,))
            optimizer = FusedLamb(params, max_grad_norm=1.0)
            run(optimizer, params, 1)
            before = [p.detach().clone() for p in params]
            give(params, seed=1)
            params[bad].grad[0] = math.nan
            optimizer.step()
            self.assert_same(params, before)
            self.assertEqual([optimizer.state[p]["step"].item() for p in params], [1.0, 1.0])

    def test_step_accepts_scale_output_and_norms(self):
        params, others = params_of((3,)) + doubles((40,)), params_of((3,)) + doubles((40,))
        ours, plain = FusedLamb(params, lr=0.01), FusedLamb(others, lr=0.01)
        outputs = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(40, dtype=torch.float32)]
        for i in range(3):
            give(params, others, seed=i)
            ours.step(grads=[p.grad * 4 for p in params], output_params=outputs, scale=4.0)
            plain.step()
        self.assert_close(params[0], others[0])
        self.near(params[1], others[1])
        self.assert_same(outputs[1:], [params[1].detach().float()])


class Scaling(DoubleCase):
    def test_fused_step_unscales_and_skips(self):
        if VERSION < (2, 0):
            self.skipTest("torch %s has another protocol of GradScaler" % torch.__version__)
        if not fused_on("cpu"):
            self.skipTest(NO_FUSED % (torch.__version__, "cpu"))
        for kind in (AdamW, Adam, SGD, Adagrad):
            for make in (lambda: doubles((40,)), lambda: params_of((3,)) + doubles((40,))):
                params, others = make(), make()
                optimizer, plain = kind(params, lr=0.01, fused=True), kind(others, lr=0.01)
                for i in range(4):
                    give(params, others, seed=i)
                    for p in params:
                        p.grad.mul_(1024)
                    optimizer.grad_scale = torch.tensor(1024.0)
                    optimizer.found_inf = torch.tensor(float(i == 2))
                    optimizer.step()
                    if i != 2:
                        plain.step()
                self.near(params[-1], others[-1])
                if kind is not SGD:
                    self.assertEqual(optimizer.state[params[-1]]["step"].item(), 3)

    def test_scale_without_found_inf_checks_for_overflow(self):
        params = doubles((3,))
        optimizer = AdamW(params, fused=True) if fused_on("cpu") else AdamW(params)
        before = params[0].detach().clone()
        give(params)
        params[0].grad[1] = math.inf
        optimizer.grad_scale = torch.tensor(2.0)
        optimizer.step()
        self.assert_same(params, [before])


class Lists(DoubleCase):
    def test_float32_bits_do_not_depend_on_float64(self):
        for kind in STANDARD:
            mixed, single, double = params_of((30,)) + doubles((40,)), params_of((30,)), doubles((40,))
            optimizer = kind(mixed, lr=0.01)
            alone, apart = kind(single, lr=0.01), kind(double, lr=0.01)
            for i in range(3):
                give(mixed, single + [torch.nn.Parameter(torch.zeros(40, dtype=F64))], seed=i)
                double[0].grad = mixed[1].grad.clone()
                for each in (optimizer, alone, apart):
                    each.step()
            self.assert_same(mixed, single + double)

    def test_error_in_one_dtype_leaves_the_other_unchanged(self):
        for kind in STANDARD:
            for order in (1, -1):
                params = (params_of((3, 4)) + doubles((5, 4)))[::order]
                optimizer = kind(params, lr=0.01)
                run(optimizer, params, 1)
                before = [p.detach().clone() for p in params]
                steps = [float(optimizer.state[p].get("step", 0)) for p in params]
                params[1].grad = params[1].grad.to_sparse()
                with self.assertRaisesRegex(dsopt.UnsupportedError, r"gradient of .*\['params'\]\[1\] is sparse"):
                    optimizer.step()
                self.assert_same(params, before)
                self.assertEqual([float(optimizer.state[p].get("step", 0)) for p in params], steps)
                params[1].grad = params[1].grad.to_dense()
                optimizer.step()

    def test_parameters_without_gradient_are_unchanged(self):
        for kind in STANDARD:
            params = doubles((3,), (4,))
            optimizer = kind(params, lr=0.01)
            run(optimizer, params, 1)
            before = params[0].detach().clone()
            params[0].grad = None
            optimizer.step()
            self.assert_same(params[:1], [before])
            optimizer.zero_grad()
            self.assertTrue(params[1].grad is None or not params[1].grad.any())

    def test_resumes_with_same_bits(self):
        for kind in STANDARD:
            params = params_of((30,)) + doubles((40,))
            optimizer = kind(params, lr=0.01)
            run(optimizer, params, 3)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            others = [torch.nn.Parameter(p.detach().clone()) for p in params]
            run(optimizer, params, 2, begin=3)
            file.seek(0)
            resumed = kind(others, lr=0.5)
            resumed.load_state_dict(torch.load(file))
            run(resumed, others, 2, begin=3)
            self.assert_same(others, params)
            again = copy.deepcopy(resumed)
            run(again, again.param_groups[0]["params"], 1, begin=5)
            run(optimizer, params, 1, begin=5)
            self.assert_same(again.param_groups[0]["params"], params)

    def test_model_may_change_to_float64_and_back(self):
        for count in (1, 2):
            params, others = params_of(*[(30,)] * count), params_of(*[(30,)] * count)
            optimizer, plain = AdamW(params, lr=0.01), AdamW(others, lr=0.01)
            for i in range(6):
                if i in (2, 4):
                    for p in params[-1:]:
                        p.grad = None
                        p.data = p.data.double() if i == 2 else p.data.float()
                give(params, seed=i)
                for p, q in zip(params, others):
                    q.grad = p.grad.float()
                optimizer.step()
                plain.step()
            self.assertEqual([optimizer.state[p]["step"].item() for p in params], [6.0] * count)
            self.assert_close(params, others)

    def test_momentum_of_a_first_step_is_not_dampened(self):
        params = doubles((4,))
        optimizer = SGD(params, lr=0.01, momentum=0.9, dampening=0.5)
        run(optimizer, params, 1)
        self.assert_same([optimizer.state[params[0]]["momentum_buffer"]], [params[0].grad])


class Refusals(DoubleCase):
    def refused(self, text, call, kind=dsopt.TensorError):
        with self.assertRaisesRegex(kind, text):
            call()

    def test_rejects_compat_mode_and_the_onebit_family(self):
        for kind, options in ((FusedAdam, {"compat": "deepspeed"}), (FusedLamb, {"compat": "deepspeed"}),
                              (OnebitAdam, {}), (ZeroOneAdam, {}), (OnebitLamb, {})):
            params = doubles((3,))
            before = params[0].detach().clone()
            optimizer = kind(params, **options)
            self.refused(r"\['params'\]\[0\] is float64, which .*%s" % ("compat" if options else kind.__name__),
                         lambda: run(optimizer, params, 1))
            self.assert_same(params, [before])

    def test_wrappers_reject_float64(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            self.refused(r"\['params'\]\[0\] is torch.float64, and low_precision_dtype",
                         lambda: wrapper(AdamW(doubles((3,))), low_precision_dtype=torch.bfloat16))

    def test_hyper_parameters_are_checked(self):
        for kind in STANDARD:
            params = doubles((3,))
            optimizer = kind(params, lr=0.01)
            run(optimizer, params, 1)
            before = params[0].detach().clone()
            optimizer.param_groups[0]["lr"] = math.nan
            self.refused(r"param_groups\[0\]: lr", lambda: run(optimizer, params, 1), dsopt.ArgumentError)
            self.assert_same(params, [before])

    def test_rejects_invalid_gradients(self):
        params = doubles((3,), (4,))
        optimizer = AdamW(params)
        run(optimizer, params, 1)
        before = [p.detach().clone() for p in params]
        params[1].grad = params[1].grad.to_sparse()
        self.refused(r"gradient of .*\['params'\]\[1\] is sparse", optimizer.step, dsopt.UnsupportedError)
        params[1].grad = torch.ones(4, dtype=F64)
        params[1].grad.data = torch.ones(5, dtype=F64)
        self.refused(r"gradient of .*\['params'\]\[1\] has shape", optimizer.step)
        self.assert_same(params, before)

    def test_float32_parameter_rejects_float64_gradient(self):
        params = params_of((3,))
        params[0].grad = torch.ones(3)
        params[0].grad.data = torch.ones(3, dtype=F64)
        self.refused(r"gradient of .*\['params'\]\[0\] is float64", AdamW(params).step)


if __name__ == "__main__":
    main()
