# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW beside torch.optim's: values, groups, state, hooks, schedulers, scaling, copies."""
import copy
import functools
import inspect
import io
import math
import os
import pickle
import unittest
import unittest.mock
import warnings

from support import VERSION, TestCase, give_grads, main, params_of, torch

import dsopt
import dsopt.torch
from dsopt.torch import Adam, AdamW

PAIRS = ((AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam))
SHAPES = ((10, 5), (10,), (), (3, 0), (1000,))


def step_both(ours, theirs, params, others, steps, begin=0):
    for i in range(begin, begin + steps):
        give_grads(params, others, seed=i)
        ours.step()
        theirs.step()


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

    def test_closer_to_float64_than_torch(self):
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

    def test_trains_as_torch(self):
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

    def test_complex_is_two_reals(self):
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
            param.grad = value.conj()  # conjugated on reading only
            a.step()
            real.grad = torch.view_as_real(value.conj().resolve_conj()).clone()
            b.step()
            self.assert_same([torch.view_as_real(param.detach())], [real])
            self.assertFalse(torch.equal(before, param.detach()))

    def test_16_bit_parameters(self):
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

    def test_mixed_dtypes_in_a_group(self):
        params = params_of((7,)) + params_of((7,), dtype=torch.bfloat16) + params_of((7,), dtype=torch.float16)
        optimizer = AdamW(params, lr=0.1)
        before = [p.detach().clone() for p in params]
        give_grads(params)
        optimizer.step()
        for p, old in zip(params, before):
            self.assertGreater((p.detach() - old).abs().float().min().item(), 0.05)


class Going(TestCase):
    """The loss falls: contiguous and other parameters, groups, schedulers."""

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

    def test_contiguous_or_not(self):
        for kind, _ in PAIRS:
            self.fall(torch.randn(10, 5), torch.randn(10), lambda w, b: kind([w, b], lr=1e-2))
            self.fall(torch.randn(10, 5, 2)[..., 0], torch.randn(10, 2)[..., 0], lambda w, b: kind([w, b], lr=1e-2))
            self.fall(torch.randn(5, 10).t(), torch.randn(10), lambda w, b: kind([w, b], lr=1e-2))

    def test_groups_with_their_own_lr(self):
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

    def test_schedulers(self):
        rates = torch.optim.lr_scheduler
        for schedulers in ([lambda o: rates.ExponentialLR(o, gamma=0.9)
                            ], [lambda o: rates.LinearLR(o, start_factor=0.4, total_iters=4)],
                           [lambda o: rates.StepLR(o, gamma=0.9, step_size=10), lambda o: rates.ReduceLROnPlateau(o)
                            ], [lambda o: rates.PolynomialLR(o, power=0.9, total_iters=4)
                                ], [lambda o: rates.CosineAnnealingWarmRestarts(o, T_0=5)
                                    ], [lambda o: rates.OneCycleLR(o, max_lr=0.02, total_steps=50)]):
            self.fall(torch.randn(10, 5), torch.randn(10), lambda w, b: AdamW([w, b], lr=1e-2), schedulers)

    def test_one_cycle_moves_betas(self):
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

    def test_swa(self):
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

    def test_add_param_group(self):
        params, others = params_of((9,), (4,)), params_of((9,), (4,))
        ours, theirs = AdamW(params[:1]), torch.optim.AdamW(others[:1])
        step_both(ours, theirs, params, others, 3)
        ours.add_param_group({"params": params[1], "lr": 0.1})
        theirs.add_param_group({"params": others[1], "lr": 0.1})
        step_both(ours, theirs, params, others, 3, begin=3)
        self.assert_close(params, others)
        self.assertEqual([ours.state[p]["step"].item() for p in params], [6, 3])

    def test_parameters_without_gradient_stay(self):
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

    def test_nothing_to_do(self):
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

    def test_zero_grad(self):
        params = params_of((3,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        self.assert_same([params[0].grad], [torch.zeros(3)])
        optimizer.zero_grad(set_to_none=True)
        self.assertIsNone(params[0].grad)

    def test_parameters_exchanged_in_the_list(self):
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
    def test_other_memory_of_parameters_and_gradients(self):
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

    def test_other_dtype_of_parameters(self):
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

    def test_channels_last(self):
        for kind, reference in PAIRS:
            params, others = params_of((8, 3, 3, 3), (8,)), params_of((8, 3, 3, 3), (8,))
            for some in (params, others):
                some[0].data = some[0].data.contiguous(memory_format=torch.channels_last)
            ours, theirs = kind(params, weight_decay=0.1), reference(others, weight_decay=0.1)
            for i in range(4):
                give_grads(params, others, seed=i)
                if i % 2:  # gradients have the parameter's order, or that of the shape
                    params[0].grad = params[0].grad.contiguous(memory_format=torch.channels_last)
                ours.step()
                theirs.step()
            self.assert_close(params, others)
            self.assertTrue(params[0].is_contiguous(memory_format=torch.channels_last))

    def test_becomes_channels_last_later(self):
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

    def test_state_exchanged_by_the_caller(self):
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
            self.skipTest("torch %s cannot be told that a tensor has changed" % torch.__version__)
        param = torch.nn.Parameter(torch.ones(3))
        loss = (param * param).sum()
        loss.backward(retain_graph=True)
        AdamW([param]).step()
        with self.assertRaisesRegex(RuntimeError, "inplace"):
            loss.backward()


class Refused(TestCase):
    def test_options(self):
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

    def test_values(self):
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

    def test_parameters(self):
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

    def test_gradients_by_name(self):
        def sparse(params):
            params[1].grad = torch.ones(4, 4).to_sparse()

        def turned(params):
            params[1].grad = torch.randn(4, 4).t()

        def resized(params):
            params[1].grad.resize_(1000)

        self.named(sparse, NotImplementedError, "sparse")
        self.named(sparse, RuntimeError, "sparse")
        self.named(turned, ValueError, "not contiguous")
        self.named(resized, ValueError, "shape")

    def test_turned_in_place(self):
        """The same address, other strides."""
        def turned(params):
            params[1].grad = params[1].grad.t()
        self.named(turned, ValueError, "not contiguous")

    def test_resized_parameter(self):
        params = params_of((3,), (4,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        params[1].data = torch.zeros(1000)
        with self.assertRaisesRegex(ValueError, r"\['params'\]\[1\].*shape"):
            optimizer.step()

    def test_dtypes(self):
        for dtype in (torch.float64, torch.complex128):
            param = torch.zeros(3, dtype=dtype, requires_grad=True)
            param.grad = torch.ones(3, dtype=dtype)
            with self.assertRaisesRegex(ValueError, r"\['params'\]\[0\] is " + str(dtype).replace("torch.", "")):
                AdamW([param]).step()

    def test_given_names(self):
        if VERSION < (2, 6):
            self.skipTest("torch %s has no named parameters" % torch.__version__)
        model = torch.nn.Linear(3, 3)
        optimizer = AdamW(model.named_parameters())
        model.weight.grad = torch.randn(3, 3).t()
        with self.assertRaisesRegex(ValueError, "gradient of weight"):
            optimizer.step()

    def test_other_devices(self):
        param = torch.nn.Parameter(torch.zeros(3, device="meta"))
        param.grad = torch.zeros(3, device="meta")
        with self.assertRaisesRegex(ValueError, "device meta"):
            AdamW([param]).step()

    def test_fused_on_other_devices(self):
        """RuntimeError as with torch's fused implementation, if there is a gradient."""
        for kind, reference in PAIRS:
            if "fused" not in inspect.signature(reference).parameters:
                self.skipTest("torch %s has no fused %s" % (torch.__version__, reference.__name__))
            model = torch.nn.Linear(3, 3, device="meta")
            optimizer = kind(model.parameters(), fused=True)
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            with self.assertRaisesRegex(RuntimeError, "`fused=True` requires .* torch.float32 and meta") as caught:
                optimizer.step()
            self.assertIsInstance(caught.exception, dsopt.Error)
            optimizer.zero_grad(set_to_none=True)
            optimizer.step()


class State(TestCase):
    def test_both_ways_with_torch(self):
        for kind, reference in PAIRS:
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            ours, theirs = kind(params, lr=0.01), reference(others, lr=0.01)
            step_both(ours, theirs, params, others, 4)
            self.assertEqual(list(ours.state_dict()["param_groups"][0]), list(theirs.state_dict()["param_groups"][0]))
            crossed = kind(others, lr=0.5), reference(params, lr=0.5)
            crossed[0].load_state_dict(copy.deepcopy(theirs.state_dict()))
            crossed[1].load_state_dict(copy.deepcopy(ours.state_dict()))
            step_both(crossed[0], crossed[1], others, params, 4, begin=4)
            self.assert_close(params, others)
            self.assertEqual(float(crossed[0].state[others[0]]["step"]), 8)
            self.assertEqual(float(crossed[1].state[params[0]]["step"]), 8)
            self.assertEqual(crossed[0].param_groups[0]["lr"], 0.01)

    def continued(self, make, load):
        params = params_of((9,), (4, 2))
        first = make(params)
        for i in range(3):
            give_grads(params, seed=i)
            first.step()
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        second = make(others)
        load(first, second)
        for i in range(3, 6):
            give_grads(params, others, seed=i)
            first.step()
            second.step()
            self.assert_same(params, others)
        self.assertEqual(str(first.state_dict()), str(second.state_dict()))

    def test_same_bits_after_a_load(self):
        def by_file(first, second):
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            file.seek(0)
            second.load_state_dict(torch.load(file, **({"weights_only": True} if VERSION >= (2, 0) else {})))

        for kind, _ in PAIRS:
            self.continued(functools.partial(kind, lr=0.01),
                           lambda a, b: b.load_state_dict(copy.deepcopy(a.state_dict())))
            self.continued(functools.partial(kind, lr=0.01), by_file)

    def test_in_place_of_torch(self):
        """torch.optim.AdamW = dsopt.torch.AdamW for code that cannot be changed."""
        for kind, reference in PAIRS:
            params, others = params_of((9,)), params_of((9,))
            theirs = reference(others, lr=0.01)
            with unittest.mock.patch.object(torch.optim, kind.__name__, kind):
                ours = getattr(torch.optim, kind.__name__)(params, lr=0.01)
                ours.load_state_dict(copy.deepcopy(ours).state_dict())
            step_both(ours, theirs, params, others, 3)
            self.assert_close(params, others)

    def test_loading_does_not_change_the_dict(self):
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)
        AdamW(params_of((9,))).load_state_dict(saved)
        self.assertEqual(str(before), str(saved))

    def test_16_bit_parameters_keep_their_state(self):
        params = params_of((50,), dtype=torch.bfloat16)
        optimizer = AdamW(params, lr=0.01)
        for i in range(3):
            give_grads(params, seed=i)
            optimizer.step()
        again = AdamW(params, lr=0.01)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for key in ("exp_avg", "exp_avg_sq"):
            self.assert_same([again.state[params[0]][key]], [optimizer.state[params[0]][key]])
        if VERSION >= (2, 2):  # what hooks put in its place is loaded
            def hook(optimizer, state_dict):
                state_dict = copy.deepcopy(state_dict)
                state_dict["state"][0]["exp_avg"].zero_()
                return state_dict
            again.register_load_state_dict_pre_hook(hook)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            self.assert_same([again.state[params[0]]["exp_avg"]], [torch.zeros(50)])
            self.assert_same([again.state[params[0]]["exp_avg_sq"]], [optimizer.state[params[0]]["exp_avg_sq"]])

    def test_older_state(self):
        """Without the keys of newer versions; with the step as a number."""
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            saved["param_groups"][0].pop(key, None)
        saved["state"][0]["step"] = 5
        optimizer.load_state_dict(saved)
        optimizer.step()
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 6)

    def test_amsgrad_of_another_run_is_refused(self):
        params = params_of((9,))
        other = torch.optim.AdamW(params, amsgrad=True)
        give_grads(params)
        other.step()
        optimizer = AdamW(params)
        optimizer.load_state_dict(other.state_dict())
        with self.assertRaisesRegex(NotImplementedError, "amsgrad"):
            optimizer.step()

    def test_state_of_another_shape_is_refused(self):
        params = params_of((9,), (4,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        optimizer.state[params[1]]["exp_avg"] = torch.zeros(3)
        with self.assertRaisesRegex(ValueError, r"'exp_avg' of param_groups\[0\]\['params'\]\[1\]"):
            optimizer.step()

    def test_copies(self):
        for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            params = params_of((9,))
            optimizer = AdamW(params, lr=0.02)
            give_grads(params)
            optimizer.step()
            other = again(optimizer)
            copied = other.param_groups[0]["params"]
            self.assertIsNot(copied[0], params[0])
            self.assert_same(copied, params)
            self.assertEqual({key
                              for key in vars(optimizer) if key[0] != "_"},
                             {key
                              for key in vars(other) if key[0] != "_"})
            for i in range(3):
                give_grads(params, copied, seed=i)
                optimizer.step()
                other.step()
            self.assert_same(copied, params)
            self.assertEqual(repr(optimizer), repr(other))

    def test_default_dtype_float64(self):
        torch.set_default_dtype(torch.float64)
        try:
            param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float32))
            optimizer = AdamW([param])
            param.grad = torch.ones(3, dtype=torch.float32)
            optimizer.step()
            self.assertEqual(optimizer.state[param]["exp_avg"].dtype, torch.float32)
            self.assertEqual(optimizer.state[param]["step"].item(), 1)
        finally:
            torch.set_default_dtype(torch.float32)


class Hooks(TestCase):
    def test_around_steps(self):
        if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
            self.skipTest("torch %s has no hooks" % torch.__version__)
        params = params_of((3,))
        optimizer, seen = AdamW(params), []
        give_grads(params)
        handles = [optimizer.register_step_pre_hook(lambda *a: seen.append("before")),
                   optimizer.register_step_post_hook(lambda *a: seen.append("after"))]
        optimizer.step()
        self.assertEqual(seen, ["before", "after"])
        for handle in handles:
            handle.remove()
        optimizer.step()
        self.assertEqual(len(seen), 2)

    def test_around_state(self):
        if not hasattr(torch.optim.Optimizer, "register_state_dict_pre_hook"):
            self.skipTest("torch %s has no such hooks" % torch.__version__)
        params = params_of((3,))
        optimizer, seen = AdamW(params), []
        give_grads(params)
        optimizer.step()
        optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
        optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("load"))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertEqual(seen, ["save", "saved", "load", "loaded"])
        self.assertEqual(len(optimizer._optimizer_load_state_dict_pre_hooks), 1)

    def test_profiler_names_the_step(self):
        params = params_of((3,))
        optimizer = AdamW(params)
        give_grads(params)
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        self.assertIn("Optimizer.step#AdamW.step", [event.key for event in profile.key_averages()])

    def test_exception_of_a_closure(self):
        def closure():
            raise KeyError("mine")
        optimizer = AdamW(params_of((3,)))
        with self.assertRaisesRegex(KeyError, "mine"):
            optimizer.step(closure)


class Scaling(TestCase):
    def test_grad_scale_and_found_inf(self):
        if not AdamW._step_supports_amp_scaling:
            self.skipTest("torch %s scales in another way" % torch.__version__)
        params, others = params_of((9,)), params_of((9,))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        give_grads(params, others)
        params[0].grad.mul_(1024)
        ours.grad_scale, ours.found_inf = torch.full((1,), 1024.0), torch.tensor(0.0)
        ours.step()
        theirs.step()
        self.assert_close(params, others)
        old, state = params[0].detach().clone(), copy.deepcopy(ours.state[params[0]])
        ours.found_inf = torch.tensor(1.0)
        ours.grad_scale = None
        ours.step()
        self.assert_same([params[0], *ours.state[params[0]].values()], [old, *state.values()])
        fresh = AdamW(others)
        fresh.grad_scale, fresh.found_inf = None, torch.tensor(1.0, dtype=torch.float64)
        fresh.step()
        self.assertEqual(fresh.state[others[0]]["step"].item(), 0)

    def test_grad_scaler(self):
        try:
            pair = [torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=3) for _ in range(2)]
        except (AttributeError, TypeError, RuntimeError):
            self.skipTest("torch %s has no GradScaler for the CPU" % torch.__version__)
        models = [torch.nn.Linear(4, 2)]
        models.append(copy.deepcopy(models[0]))
        optimizers = [AdamW(models[0].parameters(), lr=0.1), torch.optim.AdamW(models[1].parameters(), lr=0.1)]
        for i in range(8):
            x = torch.randn(3, 4) * (float("inf") if i == 4 else 1)
            for model, optimizer, scaler in zip(models, optimizers, pair):
                optimizer.zero_grad()
                scaler.scale(model(x).pow(2).mean()).backward()
                if i == 6:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            self.assert_close(list(models[0].parameters()), list(models[1].parameters()))
            self.assertEqual(pair[0].get_scale(), pair[1].get_scale())
        self.assertEqual(optimizers[0].state[models[0].weight]["step"].item(), 7)
        self.assertFalse(hasattr(optimizers[0], "found_inf"))


class Processes(TestCase):
    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_fork(self):
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        expected = copy.deepcopy(params)
        again = copy.deepcopy(optimizer)
        again.param_groups[0]["params"][0].grad = params[0].grad.clone()
        again.step()
        expected = again.param_groups[0]["params"][0].detach()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                optimizer.step()
                status = 0 if torch.equal(params[0].detach(), expected) else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        optimizer.step()
        self.assert_same(params, [expected])

    def test_shared_memory(self):
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        for tensor in [params[0], params[0].grad, *optimizer.state[params[0]].values()]:
            tensor.share_memory_()
        optimizer.step()
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 2)

    def test_from_many_threads(self):
        import threading
        results = [None] * 4

        def work(k):
            params = params_of((2000,))
            optimizer = AdamW(params)
            for i in range(20):
                give_grads(params, seed=i)
                optimizer.step()
            results[k] = params[0].detach()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assert_same(results[1:], results[:1] * 3)


if __name__ == "__main__":
    main()
