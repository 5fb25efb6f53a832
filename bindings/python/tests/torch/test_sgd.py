# SPDX-License-Identifier: Apache-2.0
"""SGD and Adagrad compared with torch.optim's, Lion with its authors' formula."""
import copy
import inspect
import io
import math
import pickle
import unittest

from support import SHAPES, VERSION, TestCase, give_grads, main, params_of, step_both, torch

from dsopt.torch import SGD, Adagrad, FP16_Optimizer, Lion


class AuthorsLion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, (beta1, beta2) = self.state[p], group["betas"]
                mean = state.setdefault("exp_avg", torch.zeros_like(p))
                direction = (beta1 * mean + (1 - beta1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
                mean.mul_(beta2).add_(p.grad, alpha=1 - beta2)


PAIRS = {SGD: torch.optim.SGD, Adagrad: torch.optim.Adagrad, Lion: AuthorsLion}
CASES = (
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (SGD, {"lr": 0.1, "dampening": 0.5}),
    (Adagrad, {}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.25, "weight_decay": 0.1}),
    (Adagrad, {"initial_accumulator_value": 0.5, "eps": 1e-3}),
    (Lion, {}),
    (Lion, {"lr": 0.01, "betas": (0.5, 0.75), "weight_decay": 0.1}),
)
STATEFUL = tuple(case for case in CASES if case[0] is not SGD or case[1].get("momentum"))


def copies_of(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


class ComparedWithReference(TestCase):
    def each(self, cases=CASES):
        for kind, options in cases:
            with self.subTest(kind.__name__, **options):
                yield kind, PAIRS[kind], options


class Values(ComparedWithReference):
    def test_agrees_with_the_reference(self):
        for kind, reference, options in self.each():
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            ours, theirs = kind(params, **options), reference(others, **options)
            step_both(ours, theirs, params, others, 7)
            self.assert_close(params, others)
            for p, q in zip(params, others):
                expected = {key: value for key, value in theirs.state[q].items() if value is not None}
                self.assertEqual(list(ours.state[p]), list(expected))
                for key, value in expected.items():
                    self.assert_close(ours.state[p][key], torch.as_tensor(value), check_dtype=key != "step")

    def test_trains_like_the_reference(self):
        x = torch.randn(64, 8)
        y = x[:, :1] * x[:, 1:2]
        for kind, reference, options in self.each(((SGD, {"lr": 0.05, "momentum": 0.9}), (Adagrad, {"lr": 0.1}),
                                                   (Lion, {"lr": 3e-3, "weight_decay": 0.01}))):
            torch.manual_seed(3)
            model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
            losses = []
            for net, make in ((model, kind), (copy.deepcopy(model), reference)):
                optimizer = make(net.parameters(), **options)
                for _ in range(100):
                    optimizer.zero_grad()
                    loss = ((net(x) - y)**2).mean()
                    loss.backward()
                    optimizer.step()
                losses.append(loss.item())
            self.assertLess(losses[0], 0.5)
            self.assertAlmostEqual(losses[0], losses[1], delta=5e-3)

    def test_complex_parameters_step_as_two_reals(self):
        for kind, reference, options in self.each():
            torch.manual_seed(1)
            param = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
            real = torch.view_as_real(param).detach().clone().requires_grad_()
            a, b = kind([param], **options), kind([real], **options)
            for _ in range(3):
                param.grad = torch.randn_like(param)
                real.grad = torch.view_as_real(param.grad).clone()
                a.step()
                b.step()
                self.assert_same([torch.view_as_real(param.detach())], [real])

    def test_steps_16_bit_parameters(self):
        for kind, reference, options in self.each():
            for dtype, tolerance in ((torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
                params = params_of((40, 3), dtype=dtype)
                others = [torch.nn.Parameter(p.detach().float()) for p in params]
                options = {**options, "lr": 0.01}
                ours, theirs = kind(params, **options), reference(others, **options)
                for i in range(5):
                    give_grads(params, seed=i)
                    others[0].grad = params[0].grad.float()
                    ours.step()
                    theirs.step()
                self.assert_close(params[0].float(), others[0], rtol=tolerance, atol=tolerance)
                for key, value in ours.state[params[0]].items():
                    self.assertEqual(value.dtype, torch.float32)
                    if options.get("initial_accumulator_value") and key == "sum":
                        self.assert_close(value, theirs.state[others[0]]["sum"])

    def test_steps_channels_last_parameters(self):
        for kind, reference, options in self.each():
            params, others = params_of((2, 3, 4, 4)), params_of((2, 3, 4, 4))
            params[0].data = params[0].data.to(memory_format=torch.channels_last)
            ours, theirs = kind(params, **options), reference(others, **options)
            for i in range(3):
                give_grads(params, others, seed=i)
                params[0].grad = params[0].grad.to(memory_format=torch.channels_last)
                ours.step()
                theirs.step()
            self.assert_close(params, others)


class Groups(ComparedWithReference):
    def test_hyper_parameters_change_at_any_time(self):
        changes = {
            SGD: ({"lr": 0.02}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"dampening": 0.5},
                  {"dampening": 0, "nesterov": True}, {"dampening": 0.25, "nesterov": False}),
            Adagrad: ({"lr": 0.02}, {"lr_decay": 0.5}, {"weight_decay": 0.1}, {"eps": 1e-2}),
            Lion: ({"lr": 0.02}, {"betas": (0.5, 0.6)}, {"weight_decay": 0.1}),
        }
        for kind, reference, options in self.each(((SGD, {"lr": 0.1, "momentum": 0.9}), (Adagrad, {}), (Lion, {}))):
            params, others = params_of((9,), (4,)), params_of((9,), (4,))
            ours, theirs = kind(params, **options), reference(others, **options)
            step_both(ours, theirs, params, others, 2)
            for i, change in enumerate(changes[kind]):
                ours.param_groups[0].update(change)
                theirs.param_groups[0].update(change)
                step_both(ours, theirs, params, others, 2, begin=2 + 2 * i)
                self.assert_close(params, others)

    def test_lr_tensor_is_read_in_each_step(self):
        for kind, reference, options in self.each(STATEFUL):
            params, others, lr = params_of((9,)), params_of((9,)), torch.tensor(0.01)
            ours = kind(params, **{**options, "lr": 0.01})
            ours.param_groups[0]["lr"] = lr
            theirs = reference(others, **{**options, "lr": 0.01})
            for i in range(4):
                lr.fill_(0.01 / (i + 1))
                theirs.param_groups[0]["lr"] = 0.01 / (i + 1)
                step_both(ours, theirs, params, others, 1, begin=i)
            self.assert_close(params, others)

    def test_one_cycle_changes_momentum(self):
        params, others = params_of((50,)), params_of((50,))
        pair = SGD(params, lr=0.01, momentum=0.9), torch.optim.SGD(others, lr=0.01, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20) for o in pair]
        seen = set()
        for i in range(15):
            give_grads(params, others, seed=i)
            for optimizer, scheduler in zip(pair, schedulers):
                optimizer.step()
                scheduler.step()
            seen.add(pair[0].param_groups[0]["momentum"])
        self.assertGreater(len(seen), 10)
        self.assert_close(params, others)

    def test_add_param_group_adds_parameters(self):
        """Each group behaves as if it had a separate optimizer from the start."""
        for kind, reference, options in self.each():
            params, others = params_of((9,), (4,)), params_of((9,), (4,))
            ours, theirs = kind(params[:1], **options), reference(others[:1], **options)
            give_grads(params, others)
            for optimizer in (ours, theirs):
                optimizer.step()
            ours.add_param_group({"params": params[1:], "lr": 0.5})
            more = reference(others[1:], **{**options, "lr": 0.5})
            for i in range(3):
                give_grads(params, others, seed=i)
                for optimizer in (ours, theirs, more):
                    optimizer.step()
            self.assert_close(params, others)

    def test_parameters_without_gradient_are_unchanged(self):
        for kind, reference, options in self.each():
            params, others = params_of((9,), (4,)), params_of((9,), (4,))
            ours, theirs = kind(params, **options), reference(others, **options)
            for i in range(6):
                give_grads(params, others, seed=i)
                for p in (params[i % 2], others[i % 2]) if i < 4 else ():
                    p.grad = None
                ours.step()
                theirs.step()
            self.assert_close(params, others)

    def test_momentum_between_0_and_another_value_is_refused(self):
        for old, new in ((0, 0.9), (0.9, 0)):
            params, others = params_of((9,)), params_of((9,))
            ours, theirs = SGD(params, momentum=old), torch.optim.SGD(others, lr=1e-3, momentum=old)
            step_both(ours, theirs, params, others, 2)
            ours.param_groups[0]["momentum"] = new
            before = copies_of(params)
            for _ in range(2):
                with self.assertRaisesRegex(NotImplementedError, r"param_groups\[0\].*momentum"):
                    ours.step()
            self.assert_same(params, before)
            ours.param_groups[0]["momentum"] = old
            step_both(ours, theirs, params, others, 2, begin=2)
            self.assert_close(params, others)


class State(ComparedWithReference):
    def test_state_is_compatible_with_torch(self):
        for kind, reference, options in self.each():
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            ours, theirs = kind(params, **options), reference(others, **options)
            step_both(ours, theirs, params, others, 4)
            self.assertEqual(list(ours.state_dict()["param_groups"][0]), list(theirs.state_dict()["param_groups"][0]))
            crossed = kind(others, lr=0.5), reference(params, lr=0.5)
            crossed[0].load_state_dict(copy.deepcopy(theirs.state_dict()))
            crossed[1].load_state_dict(copy.deepcopy(ours.state_dict()))
            step_both(crossed[0], crossed[1], others, params, 4, begin=4)
            self.assert_close(params, others)
            self.assertEqual(crossed[0].param_groups[0]["lr"], ours.param_groups[0]["lr"])
            if kind is Adagrad:
                self.assertEqual(float(crossed[0].state[others[0]]["step"]), 8)
                self.assertEqual(float(crossed[1].state[params[0]]["step"]), 8)

    def test_resumes_with_same_bits(self):
        def by_file(first, second):
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            file.seek(0)
            second.load_state_dict(torch.load(file, **({"weights_only": True} if VERSION >= (2, 0) else {})))

        for kind, reference, options in self.each():
            for load in (by_file, lambda a, b: b.load_state_dict(copy.deepcopy(a.state_dict()))):
                for dtype in (torch.float32, torch.bfloat16):
                    params = params_of((9,), (4, 2), dtype=dtype)
                    first = kind(params, **options)
                    for i in range(3):
                        give_grads(params, seed=i)
                        first.step()
                    others = copies_of(params)
                    second = kind(others, **options)
                    load(first, second)
                    for i in range(3, 6):
                        give_grads(params, others, seed=i)
                        first.step()
                        second.step()
                        self.assert_same(params, others)

    def test_copies_step_like_the_original(self):
        for kind, reference, options in self.each():
            for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
                params = params_of((9,))
                optimizer = kind(params, **options)
                give_grads(params)
                optimizer.step()
                other = again(optimizer)
                copied = other.param_groups[0]["params"]
                for i in range(3):
                    give_grads(params, copied, seed=i)
                    optimizer.step()
                    other.step()
                self.assert_same(copied, params)

    def test_state_of_another_shape_is_refused(self):
        names = {SGD: "momentum_buffer", Adagrad: "sum", Lion: "exp_avg"}
        for kind, reference, options in self.each(STATEFUL):
            params = params_of((9,), (4,))
            optimizer = kind(params, **options)
            give_grads(params)
            optimizer.step()
            optimizer.state[params[1]][names[kind]] = torch.zeros(3)
            with self.assertRaisesRegex(ValueError, r"%r of param_groups\[0\]\['params'\]\[1\]" % names[kind]):
                optimizer.step()

    def test_skipped_first_step_has_no_effect(self):
        """A skipped step has no effect, like with torch, whose step GradScaler does not call then."""
        def nothing(optimizer):
            return optimizer

        def loaded(optimizer):
            again = type(optimizer)(optimizer.param_groups[0]["params"], lr=0.5)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            return again

        def grown(optimizer):
            optimizer.add_param_group({"params": params_of((3,))})
            return optimizer

        def renewed(optimizer):
            optimizer._plans = optimizer._plans[:]  # the next step creates them again
            optimizer._seen.sizes = None
            return optimizer

        for kind, reference, options in self.each():
            for then in (nothing, loaded, grown, renewed):
                params, others = params_of((9,)), params_of((9,))
                ours, theirs = kind(params, **options), reference(others, **options)
                give_grads(params)
                before = copies_of(params)
                ours.grad_scale, ours.found_inf = torch.ones(1), torch.tensor(1.0)
                ours.step()
                self.assert_same(params, before)
                del ours.grad_scale, ours.found_inf
                ours = then(ours)
                step_both(ours, theirs, params, others, 3)
                self.assert_close(params, others)

    def test_failed_first_step_has_no_effect(self):
        params, others = params_of((9,), (4,)), params_of((9,), (4,))
        options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
        ours, theirs = SGD(params, **options), torch.optim.SGD(others, **options)
        give_grads(params)
        ours.state[params[1]]["momentum_buffer"] = torch.zeros(3)
        with self.assertRaises(ValueError):
            ours.step()
        self.assertNotIn("momentum_buffer", ours.state[params[0]])
        del ours.state[params[1]]["momentum_buffer"]
        step_both(ours, theirs, params, others, 3)
        self.assert_close(params, others)

    def test_adagrad_uses_sums_set_before_the_first_step(self):
        params, others = params_of((9,)), params_of((9,))
        pair = Adagrad(params), torch.optim.Adagrad(others)
        for optimizer, p in zip(pair, (params[0], others[0])):
            optimizer.state[p]["sum"] = torch.full((9,), 4.0)
        step_both(*pair, params, others, 3)
        self.assert_close(params, others)

    def test_adagrad_has_state_from_the_start(self):
        params = params_of((9,)) + params_of((9,), dtype=torch.bfloat16)
        optimizer = Adagrad(params, initial_accumulator_value=0.1)
        for p in params:
            self.assert_same([optimizer.state[p]["sum"]], [torch.full((9,), 0.1)])
            self.assertEqual(float(optimizer.state[p]["step"]), 0)
        optimizer.share_memory()
        self.assertTrue(optimizer.state[params[1]]["sum"].is_shared())


class Mixed(TestCase):
    def test_works_with_masters(self):
        for kind, options in ((SGD, {"momentum": 0.9}), (SGD, {}), (Adagrad, {}), (Lion, {})):
            params, others = params_of((50,), dtype=torch.float16), params_of((50,))
            others[0].data.copy_(params[0].data.float())
            ours = FP16_Optimizer(kind(params, lr=0.01, **options), static_loss_scale=8.0)
            theirs = PAIRS[kind](others, lr=0.01, **options)
            for i in range(4):
                grad = torch.randn(50, generator=torch.Generator().manual_seed(i)).half()
                params[0].grad, others[0].grad = grad * 8, grad.float()
                ours.step()
                theirs.step()
            self.assert_close(params[0].detach(), others[0].detach().half(), rtol=1e-3, atol=1e-5)


class Refused(ComparedWithReference):
    def test_rejects_unsupported_options(self):
        params = params_of((3,))
        for kind in (SGD, Adagrad, Lion):
            for option in ("maximize", "differentiable"):
                with self.subTest(kind.__name__, option=option):
                    if kind is not Lion:
                        with self.assertRaisesRegex(NotImplementedError, option):
                            kind(params, **{option: True})
                    optimizer = kind([{"params": params}])
                    optimizer.param_groups[0][option] = True
                    give_grads(params)
                    with self.assertRaisesRegex(NotImplementedError, option):
                        optimizer.step()

    def test_rejects_invalid_values(self):
        params = params_of((3,))
        for kind, options, text in (
            (SGD, {"lr": -1.0}, "Invalid learning rate: -1"),
            (SGD, {"momentum": -1.0}, "Invalid momentum value: -1"),
            (SGD, {"weight_decay": -1.0}, "Invalid weight_decay value: -1"),
            (SGD, {"nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
            (Adagrad, {"lr": -1.0}, "Invalid learning rate: -1"),
            (Adagrad, {"lr_decay": -1.0}, "Invalid lr_decay value: -1"),
            (Adagrad, {"eps": -1.0}, "Invalid epsilon value: -1"),
            (Adagrad, {"initial_accumulator_value": -1.0}, "Invalid initial_accumulator_value value: -1"),
            (Lion, {"lr": -1.0}, "Invalid learning rate: -1"),
            (Lion, {"betas": (1.0, 0.5)}, "Invalid beta parameter at index 0: 1.0"),
            (Lion, {"betas": (0.5, -1.0)}, "Invalid beta parameter at index 1: -1.0"),
        ):
            with self.subTest(kind.__name__, **options), self.assertRaisesRegex(ValueError, text):
                kind(params, **options)
        for kind, options, text in (
            (SGD, {"lr": math.nan}, "lr"),
            (SGD, {"momentum": -1.0}, "momentum"),
            (SGD, {"dampening": 2.0}, "dampening"),
            (SGD, {"nesterov": True, "dampening": 0.5}, "nesterov"),
            (SGD, {"weight_decay": "x"}, "weight_decay"),
            (Adagrad, {"lr_decay": -1.0}, "lr_decay"),
            (Adagrad, {"eps": -1.0}, "eps"),
            (Lion, {"betas": (0.5, 1.5)}, "beta2"),
        ):
            for before in (0, 1):  # initially, and when it changes
                params = params_of((3,))
                optimizer = kind(params, **({"lr": 0.1, "momentum": 0.5} if kind is SGD else {}))
                for _ in range(before):
                    give_grads(params)
                    optimizer.step()
                optimizer.param_groups[0].update(options)
                give_grads(params)
                old = copies_of(params)
                with self.subTest(kind.__name__, before=before, **options):
                    with self.assertRaisesRegex(ValueError, r"param_groups\[0\].*" + text):
                        optimizer.step()
                    self.assert_same(params, old)

    def test_errors_name_the_gradient(self):
        for kind, reference, options in self.each():
            params = params_of((3,), (4,))
            optimizer = kind(params, **options)
            give_grads(params)
            params[1].grad = params[1].grad.to_sparse()
            with self.assertRaisesRegex(NotImplementedError, r"param_groups\[0\]\['params'\]\[1\] is sparse"):
                optimizer.step()


class Signatures(TestCase):
    @unittest.skipIf(VERSION < (2, 6), "torch %s has not all of the arguments" % torch.__version__)
    def test_signatures_match_torch(self):
        for kind in (SGD, Adagrad):
            ours, theirs = (inspect.signature(k.__init__).parameters for k in (kind, PAIRS[kind]))
            self.assertEqual([(p.name, p.default, p.kind) for p in ours.values()
                              if p.name not in ("stochastic_rounding", "seed", "exp_avg_format",
                                                "exp_avg_sq_format", "min_8bit_size", "masters", "group", "shard",
                                                "average", "node_group", "max_grad_norm")],
                             [(p.name, p.default, p.kind) for p in theirs.values()])

    def test_flags_change_nothing(self):
        for kind in (SGD, Adagrad):
            known = inspect.signature(PAIRS[kind].__init__).parameters
            results = []
            for flags in ({}, {"foreach": True}, {"fused": True}):
                if "fused" in flags and "fused" not in known:
                    continue
                params = params_of((9,))
                optimizer = kind(params, lr=0.1, **flags)
                give_grads(params)
                optimizer.step()
                results.append(params[0])
            self.assertGreater(len(results), 1)
            self.assert_same(results[1:], results[:1] * (len(results) - 1))


if __name__ == "__main__":
    main()
