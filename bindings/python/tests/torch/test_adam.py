# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW compared with torch.optim's: values, groups, memory, errors."""
import copy
import inspect
import math
import warnings

from support import (NO_FUSED, PAIRS, SHAPES, VERSION, TestCase, fused_on, give_grads, main, params_of, step_both,
                     torch)

import dsopt
from dsopt.torch import AdamW


class Values(TestCase):
    def test_agrees_with_torch(self):
        for kind, reference in PAIRS:
            for options in ({}, {
                    "lr": 0.01
            }, {
                    "weight_decay": 0.1
            }, {
                    "betas": (0.8, 0.99),
                    "eps": 1e-6
            }, {
                    "weight_decay": 0.0
            }):
                with self.subTest(kind=kind.__name__, **{k: str(v) for k, v in options.items()}):
                    params, others = params_of(*SHAPES), params_of(*SHAPES)
                    ours, theirs = kind(params, **options), reference(others, **options)
                    step_both(ours, theirs, params, others, 7)
                    self.assert_close(params, others)
                    for p, q in zip(params, others):
                        self.assertEqual(list(ours.state[p]), list(theirs.state[q]))
                        for key in ours.state[p]:
                            self.assert_close(ours.state[p][key],
                                              torch.as_tensor(theirs.state[q][key]),
                                              check_dtype=key != "step")

    def test_is_closer_to_float64_than_torch(self):
        worst = {}
        exact = [p.detach().double().requires_grad_() for p in params_of((3000,))]
        reference = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.1)
        runs = {kind: params_of((3000,)) for kind in (AdamW, torch.optim.AdamW)}
        optimizers = [kind(params, lr=1e-2, weight_decay=0.1) for kind, params in runs.items()] + [reference]
        for i in range(100):
            give_grads(*runs.values(), exact, seed=i)
            for optimizer in optimizers:
                optimizer.step()
        for kind, params in runs.items():
            worst[kind] = (params[0].double() - exact[0]).abs().max().item()
        self.assertLess(worst[AdamW], 1e-5)
        self.assertLessEqual(worst[AdamW], 1.5 * worst[torch.optim.AdamW])

    def test_trains_like_torch(self):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        other = copy.deepcopy(model)
        x = torch.randn(64, 8)
        y = x[:, :1] * x[:, 1:2]
        losses = []
        for net, kind in ((model, AdamW), (other, torch.optim.AdamW)):
            optimizer = kind(net.parameters(), lr=1e-2, weight_decay=0.01)
            for _ in range(100):
                optimizer.zero_grad()
                loss = ((net(x) - y) ** 2).mean()
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        self.assertLess(losses[0], 0.3)
        self.assertAlmostEqual(losses[0], losses[1], delta=1e-3)
        self.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-3, atol=1e-3)

    def test_complex_parameters_step_as_two_reals(self):
        for kind, _ in PAIRS:
            torch.manual_seed(1)
            param = torch.randn(5, 5, dtype=torch.complex64, requires_grad=True)
            real = torch.view_as_real(param).detach().clone().requires_grad_()
            a, b = kind([param]), kind([real])
            for _ in range(3):
                param.grad = torch.randn_like(param)
                real.grad = torch.view_as_real(param.grad).clone()
                a.step()
                b.step()
                self.assert_same([torch.view_as_real(param.detach())], [real])
            self.assertEqual(a.state[param]["exp_avg"].dtype, torch.complex64)
            value = param.grad.clone()
            before = param.detach().clone()
            param.grad = value.conj()  # conjugated lazily, on reading
            a.step()
            real.grad = torch.view_as_real(value.conj().resolve_conj()).clone()
            b.step()
            self.assert_same([torch.view_as_real(param.detach())], [real])
            self.assertFalse(torch.equal(before, param.detach()))

    def test_steps_16_bit_parameters(self):
        for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
            params, others = params_of((40, 3), dtype=dtype), params_of((40, 3))
            others[0].data.copy_(params[0].data)
            ours, theirs = AdamW(params, lr=1e-2, eps=1e-4), torch.optim.AdamW(others, lr=1e-2, eps=1e-4)
            for i in range(5):
                give_grads(params, seed=i)
                others[0].grad = params[0].grad.float()
                ours.step()
                theirs.step()
            self.assert_close(params[0].float(), others[0], rtol=tolerance, atol=tolerance)
            self.assertEqual(ours.state[params[0]]["exp_avg"].dtype, torch.float32)

    def test_steps_mixed_dtypes_in_a_group(self):
        params = params_of((7,)) + params_of((7,), dtype=torch.bfloat16) + params_of((7,), dtype=torch.float16)
        optimizer = AdamW(params, lr=0.1)
        before = [p.detach().clone() for p in params]
        give_grads(params)
        optimizer.step()
        for p, old in zip(params, before):
            self.assertGreater((p.detach() - old).abs().float().min().item(), 0.05)


class Training(TestCase):
    """The loss decreases: with contiguous and other parameters, groups, schedulers."""

    def fall(self, weight, bias, make, schedulers=()):
        source = torch.randn(5)
        weight, bias = weight.requires_grad_(), bias.requires_grad_()
        optimizer = make(weight, bias)
        repr(optimizer)
        going = [scheduler(optimizer) for scheduler in schedulers]

        def closure():
            optimizer.zero_grad()
            loss = (weight.mv(source) + bias).pow(2).sum()
            loss.backward()
            return loss

        first = closure().item()
        for _ in range(20):
            loss = optimizer.step(closure)
            for scheduler in going:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(loss.item())
                else:
                    scheduler.step()
        self.assertLess(closure().item(), first)

    def test_trains_contiguous_and_other_parameters(self):
        for kind, _ in PAIRS:
            self.fall(torch.randn(10, 5), torch.randn(10), lambda w, b: kind([w, b], lr=1e-2))
            self.fall(torch.randn(10, 5, 2)[..., 0], torch.randn(10, 2)[..., 0], lambda w, b: kind([w, b], lr=1e-2))
            self.fall(torch.randn(5, 10).t(), torch.randn(10), lambda w, b: kind([w, b], lr=1e-2))

    def test_groups_have_separate_learning_rates(self):
        self.fall(torch.randn(10, 5), torch.randn(10),
                  lambda w, b: AdamW([{
                      "params": [w]
                  }, {
                      "params": [b],
                      "lr": 1e-2
                  }], lr=1e-3))
        self.fall(torch.randn(10, 5), torch.randn(10), lambda w, b: AdamW([{
            "params": [w],
            "lr": 1e-2
        }, {
            "params": b,
            "lr": 1e-2
        }]))
        self.fall(torch.randn(10, 5), torch.randn(10), lambda w, b: AdamW([{
            "params": []
        }, {
            "params": [w, b],
            "lr": 1e-2
        }]))

    def test_works_with_schedulers(self):
        rates = torch.optim.lr_scheduler
        for schedulers in ([lambda o: rates.ExponentialLR(o, gamma=0.9)
                            ], [lambda o: rates.LinearLR(o, start_factor=0.4, total_iters=4)],
                           [lambda o: rates.StepLR(o, gamma=0.9, step_size=10), lambda o: rates.ReduceLROnPlateau(o)
                            ], [lambda o: rates.PolynomialLR(o, power=0.9, total_iters=4)
                                ], [lambda o: rates.CosineAnnealingWarmRestarts(o, T_0=5)
                                    ], [lambda o: rates.OneCycleLR(o, max_lr=0.02, total_steps=50)]):
            self.fall(torch.randn(10, 5), torch.randn(10), lambda w, b: AdamW([w, b], lr=1e-2), schedulers)

    def test_one_cycle_changes_betas(self):
        params, others = params_of((50,)), params_of((50,))
        pair = AdamW(params), torch.optim.AdamW(others)
        schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20) for o in pair]
        seen = set()
        for i in range(15):
            give_grads(params, others, seed=i)
            for optimizer, scheduler in zip(pair, schedulers):
                optimizer.step()
                scheduler.step()
            seen.add(pair[0].param_groups[0]["betas"][0])
        self.assertGreater(len(seen), 10)
        self.assert_close(params, others)

    def test_works_with_swa(self):
        from torch.optim.swa_utils import SWALR, AveragedModel
        model = torch.nn.Linear(4, 2)
        averaged, optimizer = AveragedModel(model), AdamW(model.parameters(), lr=0.1)
        scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
        seen = []
        for i in range(5):
            give_grads(list(model.parameters()), seed=i)
            optimizer.step()
            averaged.update_parameters(model)
            scheduler.step()
            seen.append(model.weight.detach().clone())
        self.assert_close(averaged.module.weight, torch.stack(seen).mean(0))


class Groups(TestCase):
    def test_hyper_parameters_change_at_any_time(self):
        params, others = params_of((9,), (4,)), params_of((9,), (4,))
        ours = AdamW([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.5}])
        theirs = torch.optim.AdamW([{"params": others[:1]}, {"params": others[1:], "weight_decay": 0.5}])
        for i, change in enumerate(({
                "lr": 0.1
        }, {
                "betas": (0.5, 0.9)
        }, {
                "eps": 1e-3
        }, {
                "weight_decay": 0.2
        }, {
                "lr": 0
        })):
            for optimizer in (ours, theirs):
                optimizer.param_groups[i % 2].update(change)
            step_both(ours, theirs, params, others, 2, begin=10 * i)
            self.assert_close(params, others)

    def test_lr_tensor_is_read_in_each_step(self):
        params, others = params_of((9,)), params_of((9,))
        lr = torch.tensor(0.1)
        ours, theirs = AdamW(params, lr=lr), torch.optim.AdamW(others, lr=0.1)
        step_both(ours, theirs, params, others, 2)
        lr.fill_(0.01)
        theirs.param_groups[0]["lr"] = 0.01
        step_both(ours, theirs, params, others, 2, begin=5)
        self.assert_close(params, others)
        self.assertIs(ours.param_groups[0]["lr"], lr)

    def test_add_param_group_adds_parameters(self):
        params, others = params_of((9,), (4,)), params_of((9,), (4,))
        ours, theirs = AdamW(params[:1]), torch.optim.AdamW(others[:1])
        step_both(ours, theirs, params, others, 3)
        ours.add_param_group({"params": params[1], "lr": 0.1})
        theirs.add_param_group({"params": others[1], "lr": 0.1})
        step_both(ours, theirs, params, others, 3, begin=3)
        self.assert_close(params, others)
        self.assertEqual([ours.state[p]["step"].item() for p in params], [6, 3])

    def test_parameters_without_gradient_are_unchanged(self):
        params, others = params_of((9,), (4,), (6,)), params_of((9,), (4,), (6,))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        old = params[1].detach().clone()
        for i in range(6):
            give_grads(params, others, seed=i)
            for absent in ([1], [1], [0, 1], [2], [], [0, 1, 2])[i]:
                params[absent].grad = others[absent].grad = None
            ours.step()
            theirs.step()
            if i < 3:
                self.assertNotIn(params[1], ours.state)
                self.assert_same([params[1]], [old])
        self.assert_close(params, others)
        self.assertEqual([ours.state[p]["step"].item() for p in params],
                         [float(theirs.state[q]["step"]) for q in others])

    def test_step_without_gradients_does_nothing(self):
        params = params_of((3,))
        optimizer = AdamW(params)
        optimizer.step()
        self.assertEqual(len(optimizer.state), 0)
        AdamW([{"params": []}]).step()
        self.assertEqual(optimizer.step(lambda: torch.tensor(2.0)).item(), 2.0)

    def test_zero_gradients_without_decay_change_nothing(self):
        params = params_of((3,))
        optimizer, old = AdamW(params, weight_decay=0), [p.detach().clone() for p in params]
        params[0].grad = torch.zeros(3)
        for _ in range(3):
            optimizer.step()
        self.assert_same(params, old)

    def test_zero_grad_clears_gradients(self):
        params = params_of((3,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        self.assert_same([params[0].grad], [torch.zeros(3)])
        optimizer.zero_grad(set_to_none=True)
        self.assertIsNone(params[0].grad)

    def test_parameters_in_groups_may_be_replaced(self):
        params = params_of((3,), (5,))
        optimizer = AdamW(params[:1])
        give_grads(params)
        optimizer.step()
        old = optimizer.state.pop(params[0])
        optimizer.param_groups[0]["params"][0] = params[1]
        state = {"step": old["step"], "exp_avg": torch.ones(5), "exp_avg_sq": torch.ones(5)}
        optimizer.state[params[1]] = state
        before = [p.detach().clone() for p in params]
        optimizer.step()
        self.assert_same(params[:1], before[:1])
        self.assertFalse(torch.equal(params[1].detach(), before[1]))
        self.assertEqual(optimizer.state[params[1]]["step"].item(), 2)


class Memory(TestCase):
    def test_parameters_and_gradients_may_get_other_memory(self):
        params, others = params_of((9,), (4,)), params_of((9,), (4,))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        keep = []
        for i in range(6):
            step_both(ours, theirs, params, others, 1, begin=i)
            keep.append(params[0].data)
            params[0].data = params[0].data.clone()
            params[1].data.add_(1)
            others[1].data.add_(1)
        self.assert_close(params, others)

    def test_parameters_may_change_dtype(self):
        model = torch.nn.Linear(4, 4)
        optimizer = AdamW(model.parameters(), lr=0.1)
        give_grads(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        model.to(torch.bfloat16)
        old = model.weight.detach().clone()
        give_grads(list(model.parameters()))
        optimizer.step()
        self.assertEqual(model.weight.dtype, torch.bfloat16)
        self.assertFalse(torch.equal(old, model.weight.detach()))

    def test_steps_channels_last_parameters(self):
        for kind, reference in PAIRS:
            params, others = params_of((8, 3, 3, 3), (8,)), params_of((8, 3, 3, 3), (8,))
            for some in (params, others):
                some[0].data = some[0].data.contiguous(memory_format=torch.channels_last)
            ours, theirs = kind(params, weight_decay=0.1), reference(others, weight_decay=0.1)
            for i in range(4):
                give_grads(params, others, seed=i)
                if i % 2:  # gradients have the parameter's strides, or contiguous ones
                    params[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
                ours.step()
                theirs.step()
            self.assert_close(params, others)
            self.assertTrue(params[0].is_contiguous(memory_format=torch.channels_last))

    def test_parameters_may_become_channels_last(self):
        params, others = params_of((8, 3, 3, 3)), params_of((8, 3, 3, 3))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        step_both(ours, theirs, params, others, 2)
        params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
        for i in range(2, 5):
            give_grads(params, others, seed=i)
            params[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
            ours.step()
            theirs.step()
        self.assert_close(params, others)

    def test_caller_may_replace_state(self):
        params, others = params_of((9,), (4,)), params_of((9,), (4,))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        step_both(ours, theirs, params, others, 3)
        for optimizer, some in ((ours, params), (theirs, others)):
            optimizer.state[some[0]]["exp_avg"] = torch.full((9,), 0.5)
            optimizer.state[some[1]]["step"].fill_(40)
            optimizer.state[some[0]]["step"] = torch.tensor(7.0)
        step_both(ours, theirs, params, others, 2, begin=3)
        self.assert_close(params, others)
        self.assertEqual([ours.state[p]["step"].item() for p in params], [9, 42])
        optimizer = ours
        optimizer.state.clear()
        give_grads(params)
        optimizer.step()
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 1)

    def test_backward_through_an_older_graph_is_refused(self):
        if VERSION < (2, 1):
            self.skipTest("torch %s has no function that marks a tensor as changed" % torch.__version__)
        param = torch.nn.Parameter(torch.ones(3))
        loss = (param * param).sum()
        loss.backward(retain_graph=True)
        AdamW([param]).step()
        with self.assertRaisesRegex(RuntimeError, "inplace"):
            loss.backward()


class Refused(TestCase):
    def test_rejects_unsupported_options(self):
        params = params_of((3,))
        for kind, _ in PAIRS:
            for option in ("amsgrad", "maximize", "differentiable"):
                with self.assertRaisesRegex(NotImplementedError, option):
                    kind(params, **{option: True})
                with self.assertRaisesRegex(NotImplementedError, option):
                    kind([{"params": params, option: True}])
                optimizer = kind(params)
                optimizer.param_groups[0][option] = True
                give_grads(params)
                with self.assertRaisesRegex(NotImplementedError, option):
                    optimizer.step()

    def test_rejects_invalid_values(self):
        params = params_of((3,))
        for kind, _ in PAIRS:
            for options, text in (({
                    "lr": -1
            }, "Invalid learning rate: -1"), ({
                    "eps": -1.0
            }, "Invalid epsilon value: -1.0"), ({
                    "betas": (1.0, 0.0)
            }, "Invalid beta parameter at index 0: 1.0"), ({
                    "betas": (0.0, -0.5)
            }, "Invalid beta parameter at index 1: -0.5"), ({
                    "weight_decay": -1
            }, "Invalid weight_decay value: -1")):
                with self.assertRaisesRegex(ValueError, text):
                    kind(params, **options)
        for options, text in (({
                "lr": -1.0
        }, r"param_groups\[0\].*lr"), ({
                "lr": math.nan
        }, r"param_groups\[0\].*lr"), ({
                "betas": (0.9, 1.5)
        }, r"param_groups\[0\].*beta2"), ({
                "lr": "much"
        }, r"param_groups\[0\]: lr is 'much'")):
            optimizer = AdamW(params)
            give_grads(params)
            optimizer.step()
            optimizer.param_groups[0].update(options)
            old = params[0].detach().clone()
            with self.assertRaisesRegex(ValueError, text):
                optimizer.step()
            self.assert_same(params, [old])

    def test_rejects_invalid_parameters(self):
        param = params_of((3,))[0]
        with self.assertRaises(TypeError):
            AdamW(param)
        with self.assertRaises(ValueError):
            AdamW([])
        with self.assertRaisesRegex(ValueError, "more than one parameter group"):
            AdamW([{"params": [param]}, {"params": [param]}])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            twice = AdamW([param, param])
        give_grads([param])
        with self.assertRaisesRegex(ValueError, r"\['params'\]\[1\] is also param_groups\[0\]\['params'\]\[0\]"):
            twice.step()

    def named(self, prepare, kind, text):
        params = params_of((3,), (4, 4))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        old = [p.detach().clone() for p in params]
        prepare(params)
        with self.assertRaisesRegex(kind, r"param_groups\[0\]\['params'\]\[1\].*" + text):
            optimizer.step()
        self.assert_same([params[0]], old[:1])

    def test_errors_name_the_gradient(self):
        def sparse(params):
            params[1].grad = torch.ones(4, 4).to_sparse()

        def resized(params):
            params[1].grad.resize_(1000)

        self.named(sparse, NotImplementedError, "sparse")
        self.named(sparse, RuntimeError, "sparse")
        self.named(resized, ValueError, "shape")

    def test_rejects_resized_parameters(self):
        params = params_of((3,), (4,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        params[1].data = torch.zeros(1000)
        with self.assertRaisesRegex(ValueError, r"\['params'\]\[1\].*shape"):
            optimizer.step()

    def test_errors_use_given_names(self):
        if VERSION < (2, 6):
            self.skipTest("torch %s has no named parameters" % torch.__version__)
        model = torch.nn.Linear(3, 3)
        optimizer = AdamW(model.named_parameters())
        model.weight.grad = torch.randn(3, 3)
        model.weight.grad.resize_(2)
        with self.assertRaisesRegex(ValueError, "gradient of weight"):
            optimizer.step()

    def test_rejects_other_devices(self):
        param = torch.nn.Parameter(torch.zeros(3, device="meta"))
        param.grad = torch.zeros(3, device="meta")
        with self.assertRaisesRegex(ValueError, "device meta"):
            AdamW([param]).step()

    def test_fused_raises_runtime_error_on_other_devices(self):
        """If there is a gradient, raises RuntimeError like torch's fused implementation."""
        for kind, reference in PAIRS:
            if "fused" not in inspect.signature(reference).parameters:
                self.skipTest("torch %s has no fused %s" % (torch.__version__, reference.__name__))
            if not fused_on("meta"):
                self.skipTest(NO_FUSED % (torch.__version__, "meta"))
            model = torch.nn.Linear(3, 3, device="meta")
            optimizer = kind(model.parameters(), fused=True)
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            with self.assertRaisesRegex(RuntimeError, "`fused=True` requires .* torch.float32 and meta") as caught:
                optimizer.step()
            self.assertIsInstance(caught.exception, dsopt.Error)
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()


if __name__ == "__main__":
    main()
