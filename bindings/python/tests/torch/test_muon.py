# SPDX-License-Identifier: Apache-2.0
"""Muon compared with its formula in double and, where torch has it, with torch.optim.Muon; groups of AdamW, blocks,
state dicts, files, several ranks, and refusals."""
import copy
import io
import itertools
import pickle
import sys
import tempfile
import unittest

from support import TestCase, child, give_grads, main, params_of, run_ranks, step_both, torch

import dsopt
from dsopt.torch import AdamW, FP16_Optimizer, Muon

TORCH = getattr(torch.optim, "Muon", None)  # torch 2.9
BOUNDS = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 5e-5}  # error of an orthogonalised matrix, relative to its norm
TORCH_ERROR = 6e-2  # of torch, whose matrices are bfloat16, for gradients of noise
TRIPLE = (3.4445, -4.775, 2.0315)
SHAPES = ((32, 32), (64, 16), (16, 48), (5, 3), (1, 12))
FACTORS = {None: lambda r, c: max(1, r / c)**0.5, "original": lambda r, c: max(1, r / c)**0.5,
           "match_rms_adamw": lambda r, c: 0.2 * max(r, c)**0.5, "spectral_unclamped": lambda r, c: (r / c)**0.5,
           "none": lambda r, c: 1}


class Formula(torch.optim.Optimizer):
    """The formula in double. Parameters may be of any dtype: `exact` has the weights. `length` of a parameter is the
    sum of the lengths of its updates. `blocks` maps a parameter to its matrices."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=TRIPLE,
                 eps=1e-7, ns_steps=5, adjust_lr_fn=None, blocks=lambda param: [param], outputs=None):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                                      ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps,
                                      adjust_lr_fn=adjust_lr_fn))
        self.blocks, self.outputs = blocks, outputs
        self.exact = {p: p.detach().double() for group in self.param_groups for p in group["params"]}
        self.means = {p: torch.zeros_like(exact) for p, exact in self.exact.items()}
        self.length = dict.fromkeys(self.exact, 0.0)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean, grad, mu = self.means[p], p.grad.double(), group["momentum"]
                mean.mul_(mu).add_(grad, alpha=1 - mu)
                u = grad * (1 - mu) + mean * mu if group["nesterov"] else mean.clone()
                self.exact[p].mul_(1 - group["lr"] * group["weight_decay"])
                squares = 0
                for target, source in zip(self.blocks(self.exact[p]), self.blocks(u)):
                    o = self.orthogonalised(source, group)
                    target.sub_(o)
                    squares += float(o.norm())**2
                self.length[p] += squares**0.5

    def orthogonalised(self, u, group):
        rows, cols = u.shape
        x = u.T if rows > cols else u
        x = x / max(float(x.norm()), group["eps"])
        a, b, c = group["ns_coefficients"]
        for _ in range(group["ns_steps"]):
            square = x @ x.T
            x = a * x + (b * square + c * square @ square) @ x
        outputs = rows if self.outputs is None else self.outputs
        scale = group["lr"] * FACTORS[group["adjust_lr_fn"]](outputs, u.numel() // outputs)
        return scale * (x.T if rows > cols else x)


def copies_of(params):
    return [torch.nn.Parameter(p.detach().clone()) for p in params]


class Compared(TestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # the matrices are small

    def assert_near(self, params, formula, bound, rounding=1e-7):
        for p, (exact, length) in zip(params, zip(formula.exact.values(), formula.length.values())):
            error = float((p.detach().double() - exact).norm())
            self.assertLessEqual(error, bound * length + rounding * (1 + float(exact.norm())), p.shape)

    def follow(self, steps=20, bound=BOUNDS["float32"], shapes=SHAPES, formula=None, **options):
        params = params_of(*shapes)
        others = copies_of(params)
        ours = Muon(params, **{"ns_dtype": "float32", **options})
        exact = Formula(others, **{**{k: v for k, v in options.items() if k != "ns_dtype"}, **(formula or {})})
        step_both(ours, exact, params, others, steps)
        self.assert_near(params, exact, bound, 1e-7 * steps)
        return ours, params, exact


class Values(Compared):
    def test_follows_the_formula(self):
        for dtype, bound in BOUNDS.items():
            with self.subTest(dtype):
                ours, params, exact = self.follow(25, bound, lr=0.02, ns_dtype=dtype)
                for p, mean in zip(params, exact.means.values()):
                    self.assertEqual(list(ours.state[p]), ["momentum_buffer"])
                    self.assert_close(ours.state[p]["momentum_buffer"], mean.float(), rtol=1e-5, atol=1e-6)

    def test_follows_the_formula_with_each_option(self):
        for options in ({"nesterov": False}, {"momentum": 0.5}, {"weight_decay": 0}, {"ns_steps": 3}, {"eps": 0.5},
                        {"ns_coefficients": (2, -1.5, 0.5)}, {"adjust_lr_fn": "match_rms_adamw"},
                        {"adjust_lr_fn": "spectral_unclamped"}, {"adjust_lr_fn": "none"},
                        {"adjust_lr_fn": "original"}):
            with self.subTest(**options):
                self.follow(5, lr=0.02, **options)

    def test_presets_change_the_result(self):
        results = []
        for schedule in ("constant", "polar_express", "you"):
            params = params_of((24, 16))
            optimizer = Muon(params, lr=0.02, ns_schedule=schedule)
            give_grads(params)
            optimizer.step()
            results.append(params[0].detach())
            self.assertEqual(optimizer.param_groups[0].get("ns_schedule"), schedule if schedule != "constant" else None)
        for a, b in itertools.combinations(results, 2):
            self.assertFalse(torch.equal(a, b))

    def test_16_bit_parameters_follow_the_formula(self):
        for dtype, tolerance in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
            for masters in (None, "float32"):
                params = params_of((32, 24), (8, 40), dtype=dtype)
                others = copies_of(params)
                ours, exact = Muon(params, lr=0.05, masters=masters), Formula(others, lr=0.05)
                step_both(ours, exact, params, others, 5)
                rounding = tolerance * (1 if masters else 5)
                self.assert_near(params, exact, BOUNDS["bfloat16"], rounding)
                for p in params:
                    self.assertEqual(ours.state[p]["momentum_buffer"].dtype, torch.float32)
                    self.assertEqual("master" in ours.state[p], masters is not None)

    def test_momentum_may_be_bfloat16(self):
        for fmt in ("bf16", "bf16_random"):
            params = params_of((32, 24))
            others = copies_of(params)
            ours, exact = Muon(params, lr=0.02, exp_avg_format=fmt), Formula(others, lr=0.02)
            step_both(ours, exact, params, others, 10)
            self.assertEqual(ours.state[params[0]]["momentum_buffer"].dtype, torch.bfloat16)
            self.assert_near(params, exact, BOUNDS["bfloat16"] + 3e-2)

    def test_memory_order_does_not_change_the_matrix(self):
        """A transposed parameter has its rows as columns in memory."""
        plain = params_of((20, 30))
        other = [torch.nn.Parameter(plain[0].detach().t().contiguous().t())]
        gaps = [torch.nn.Parameter(torch.zeros(20, 60)[:, ::2].copy_(plain[0].detach()))]
        optimizers = [Muon(params) for params in (plain, other, gaps)]
        for i in range(3):
            give_grads(plain, other, gaps, seed=i)
            other[0].grad = other[0].grad.t().contiguous().t()
            for optimizer in optimizers:
                optimizer.step()
        self.assertFalse(other[0].is_contiguous() or gaps[0].is_contiguous())
        self.assert_same(plain * 2, other + gaps)

    def test_zero_and_missing_gradients(self):
        params = params_of((8, 6), (6, 8))
        before = [p.detach().clone() for p in params]
        optimizer = Muon(params, weight_decay=0)
        params[0].grad = torch.zeros(8, 6)
        optimizer.step()
        self.assert_same(params, before)
        self.assertNotIn("momentum_buffer", optimizer.state.get(params[1], {}))

    def test_trains(self):
        x = torch.randn(64, 8)
        y = x[:, :1] * x[:, 1:2]
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        optimizer = Muon([{"params": matrices, "lr": 0.05, "weight_decay": 0},
                          {"params": others, "use_muon": False, "lr": 0.01}])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
        for _ in range(300):
            optimizer.zero_grad()
            loss = ((model(x) - y)**2).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
        self.assertLess(loss.item(), 0.1)


@unittest.skipIf(TORCH is None, "torch has Muon since 2.9")
class ComparedWithTorch(Compared):
    def test_agrees_with_torch(self):
        cases = ({}, {"nesterov": False}, {"momentum": 0.8, "weight_decay": 0}, {"ns_steps": 3},
                 {"adjust_lr_fn": "match_rms_adamw"}, {"ns_coefficients": (2, -1.5, 0.5)})
        for options in cases:
            with self.subTest(**options):
                params = params_of(*SHAPES)
                others, exact = copies_of(params), copies_of(params)
                ours, theirs = Muon(params, lr=0.02, **options), TORCH(others, lr=0.02, **options)
                formula = Formula(exact, lr=0.02, **options)
                for i in range(24):
                    give_grads(params, others, exact, seed=i)
                    for optimizer in (ours, theirs, formula):
                        optimizer.step()
                self.assert_near(params, formula, BOUNDS["bfloat16"], 3e-6)
                for p, q, length in zip(params, others, formula.length.values()):
                    apart = float((p.detach().double() - q.detach().double()).norm())
                    self.assertLessEqual(apart, (BOUNDS["bfloat16"] + TORCH_ERROR) * length)
                    self.assertEqual(list(ours.state[p]), list(theirs.state[q]))
                    self.assert_close(ours.state[p]["momentum_buffer"], theirs.state[q]["momentum_buffer"], rtol=1e-5,
                                      atol=1e-6)

    def test_arguments_and_groups_are_those_of_torch(self):
        ours, theirs = Muon(params_of((4, 3))), TORCH(params_of((4, 3)))
        self.assertEqual(ours.defaults, theirs.defaults)
        self.assertEqual(list(ours.state_dict()["param_groups"][0]), list(theirs.state_dict()["param_groups"][0]))

    def test_state_dicts_load_both_ways(self):
        params, others = params_of((16, 24), (24, 16)), params_of((16, 24), (24, 16))
        ours, theirs = Muon(params, lr=0.5), TORCH(others, lr=0.02, ns_steps=4, nesterov=False)
        step_both(theirs, theirs, others, others, 4)
        with torch.no_grad():
            for p, q in zip(params, others):
                p.copy_(q)
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        self.assertEqual(ours.param_groups[0]["ns_steps"], 4)
        exact = copies_of(params)
        formula = Formula(exact, lr=0.02, ns_steps=4, nesterov=False)
        for p, q in zip(exact, others):
            formula.means[p].copy_(theirs.state[q]["momentum_buffer"])
        for i in range(4, 8):
            give_grads(params, others, exact, seed=i)
            for optimizer in (ours, theirs, formula):
                optimizer.step()
        self.assert_near(params, formula, BOUNDS["bfloat16"], 1e-6)
        back = TORCH(params, lr=0.5)
        back.load_state_dict(copy.deepcopy(ours.state_dict()))
        self.assertEqual(back.param_groups[0]["lr"], 0.02)
        for p in params:
            self.assert_same([back.state[p]["momentum_buffer"]], [ours.state[p]["momentum_buffer"]])
        back.step()


class Groups(Compared):
    def optimizer(self, matrices, others, **options):
        return Muon([{"params": matrices, "use_muon": True, "lr": 0.02, **options},
                     {"params": others, "use_muon": False, "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}])

    def test_groups_without_muon_are_adamw(self):
        params, others = params_of((16, 8), (8,), ()), params_of((16, 8), (8,), ())
        both = self.optimizer(params[:1], params[1:])
        pair = Muon(others[:1], lr=0.02), AdamW(others[1:], lr=3e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.01)
        for i in range(5):
            give_grads(params, others, seed=i)
            for optimizer in (both, *pair):
                optimizer.step()
        self.assert_same(params, others)
        self.assertEqual(list(both.state[params[1]]), ["step", "exp_avg", "exp_avg_sq"])
        self.assertEqual(int(both.state[params[1]]["step"]), 5)
        self.assertEqual(set(both.param_groups[1]), {"params", "use_muon", "lr", "betas", "eps", "weight_decay"})

    def test_defaults_of_the_author(self):
        optimizer = Muon([{"params": params_of((3,)), "use_muon": False}], lr=0.5, weight_decay=0.5)
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        expected = {"use_muon": False, "lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
        self.assertEqual(group, expected)

    def test_hyper_parameters_change_at_any_time(self):
        params = params_of((16, 8))
        others = copies_of(params)
        ours, exact = Muon(params, ns_dtype="float32"), Formula(others)
        for i, change in enumerate(({"lr": 0.02}, {"momentum": 0.5}, {"weight_decay": 0.5}, {"nesterov": False},
                                    {"ns_steps": 3}, {"adjust_lr_fn": "match_rms_adamw"}, {"eps": 1e-3},
                                    {"ns_coefficients": (1.5, -0.5, 0)}, {"nesterov": True})):
            for optimizer in (ours, exact):
                optimizer.param_groups[0].update(change)
            step_both(ours, exact, params, others, 2, begin=2 * i)
            self.assert_near(params, exact, BOUNDS["float32"], 3e-6)
        for schedule in ("you", "constant"):
            ours.param_groups[0].update(ns_schedule=schedule, ns_coefficients=TRIPLE)
            step_both(ours, ours, params, others, 1)
        exact.exact[others[0]].copy_(params[0].detach())
        exact.means[others[0]].copy_(ours.state[params[0]]["momentum_buffer"])
        exact.param_groups[0]["ns_coefficients"], exact.length = TRIPLE, dict.fromkeys(others, 0.0)
        step_both(ours, exact, params, others, 2, begin=50)
        self.assert_near(params, exact, BOUNDS["float32"], 3e-6)

    def test_lr_may_be_a_tensor(self):
        params, others = params_of((16, 8)), params_of((16, 8))
        ours, same = Muon(params, lr=torch.tensor(0.02)), Muon(others, lr=0.5)
        for i in range(3):
            ours.param_groups[0]["lr"].fill_(0.02 / (i + 1))
            same.param_groups[0]["lr"] = float(ours.param_groups[0]["lr"])
            step_both(ours, same, params, others, 1, begin=i)
        self.assert_same(params, others)

    def test_one_cycle_changes_momentum(self):
        params = params_of((16, 8), (8,))
        optimizer = self.optimizer(params[:1], params[1:])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        seen = set()
        for i in range(8):
            give_grads(params, seed=i)
            optimizer.step()
            schedule.step()
            seen.add(optimizer.param_groups[0]["momentum"])
        self.assertGreater(len(seen), 5)

    def test_add_param_group(self):
        params = params_of((16, 8), (8,))
        optimizer = Muon(params[:1])
        give_grads(params)
        optimizer.step()
        optimizer.add_param_group({"params": params[1:], "use_muon": False})
        with self.assertRaisesRegex(NotImplementedError, r"param_groups\[2\]: rows has no effect with use_muon=False"):
            optimizer.add_param_group({"params": params_of((3,)), "use_muon": False, "rows": 3})
        self.assertEqual(len(optimizer.param_groups), 2)
        before = params[1].detach().clone()
        optimizer.step()
        self.assertFalse(torch.equal(params[1].detach(), before))

    def test_float64_parameters_of_adamw(self):
        params = params_of((16, 8)) + params_of((8,), dtype=torch.float64)
        optimizer = self.optimizer(params[:1], params[1:])
        others = copies_of(params[1:])
        alone = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.01)
        for i in range(3):
            give_grads(params, seed=i)
            others[0].grad = params[1].grad.clone()
            optimizer.step()
            alone.step()
        self.assert_close(params[1:], others)


class Blocks(Compared):
    def follow_blocks(self, shape, blocks, formula=None, **keys):
        params = params_of(shape)
        others = copies_of(params)
        ours = Muon([{"params": params, **keys}], lr=0.02, ns_dtype="float32")
        exact = Formula(others, lr=0.02, blocks=blocks, **(formula or {}))
        step_both(ours, exact, params, others, 4)
        self.assert_near(params, exact, BOUNDS["float32"], 1e-6)
        self.assertEqual(ours.state[params[0]]["momentum_buffer"].shape, params[0].shape)

    def test_blocks_are_matrices(self):
        self.follow_blocks((24, 8), lambda t: t.view(3, 8, 8), rows=8, cols=8)
        self.follow_blocks((4, 6, 8), lambda t: t, rows=6, cols=8)
        self.follow_blocks((8, 3, 2, 2), lambda t: [t.view(8, 12)], rows=8, cols=12)
        self.follow_blocks((8, 24), lambda t: t.split(8, 1), rows=8, cols=8)

    def test_rows_are_inputs(self):
        self.follow_blocks((8, 24), lambda t: [t], {"outputs": 24}, rows_are_inputs=True)

    def test_channels_last_convolutions(self):
        plain, other = params_of((8, 3, 2, 2)), params_of((8, 3, 2, 2))
        other[0].data = other[0].data.to(memory_format=torch.channels_last)
        pair = [Muon([{"params": params, "rows": 8, "cols": 12}]) for params in (plain, other)]
        for i in range(2):
            give_grads(plain, other, seed=i)
            other[0].grad = other[0].grad.to(memory_format=torch.channels_last)
            for optimizer in pair:
                optimizer.step()
        self.assertTrue(other[0].is_contiguous(memory_format=torch.channels_last))
        self.assert_same(plain, other)


class Saved(Compared):
    def make(self, params, **options):
        return Muon([{"params": params[:1]}, {"params": params[1:2], "rows": 8, "cols": 12},
                     {"params": params[2:], "use_muon": False}], **options)

    def run_on(self, save, load, **options):
        """A run that is saved after three steps continues with the same bits."""
        shapes = (16, 8), (8, 3, 2, 2), (8,)
        params = params_of(*shapes)
        first = self.make(params, **options)
        step_both(first, first, params, params, 3)
        weights, saved = copies_of(params), save(first)
        step_both(first, first, params, params, 3, begin=3)
        second = self.make(weights, **{**options, "lr": 7})
        load(second, saved)
        step_both(second, second, weights, weights, 3, begin=3)
        self.assert_same(params, weights)
        return second

    def test_state_dicts(self):
        def save(optimizer):
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            return file.getvalue()

        def load(optimizer, saved):
            optimizer.load_state_dict(torch.load(io.BytesIO(saved)))

        for options in ({}, {"exp_avg_format": "bf16_random", "seed": 3}, {"ns_schedule": "you"},
                        {"adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (2, -1.5, 0.5)}):
            with self.subTest(**options):
                self.run_on(save, load, **options)

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            def save(optimizer):
                optimizer.save(folder + "/muon.safetensors")

            for options in ({}, {"adjust_lr_fn": "none", "ns_steps": 3, "ns_coefficients": (2, -1.5, 0.5),
                                 "nesterov": False}):
                loaded = self.run_on(save, lambda optimizer, _: optimizer.load(folder + "/muon.safetensors"), **options)
                self.assertEqual(loaded.param_groups[0]["lr"], 1e-3)
            other = self.make(params_of((16, 8), (8, 3, 2, 2), (8,)))  # hyper-parameters are those of the file
            other.load(folder + "/muon.safetensors")
            group = other.param_groups[0]
            self.assertEqual((group["adjust_lr_fn"], group["ns_steps"], group["ns_coefficients"], group["nesterov"]),
                             ("none", 3, (2, -1.5, 0.5), False))

    def test_copies_and_pickles(self):
        self.run_on(copy.deepcopy, lambda optimizer, saved: optimizer.load_state_dict(saved.state_dict()))
        self.run_on(pickle.dumps, lambda optimizer, saved: optimizer.load_state_dict(pickle.loads(saved).state_dict()))

    def test_groups_of_torch_keep_keys_that_torch_lacks(self):
        params = params_of((8, 3, 2, 2))
        optimizer = Muon([{"params": params, "rows": 8, "cols": 12}], ns_dtype="float32", ns_schedule="you")
        saved = optimizer.state_dict()
        for key in ("rows", "cols", "ns_dtype", "ns_schedule"):
            del saved["param_groups"][0][key]
        optimizer.load_state_dict(saved)
        group = optimizer.param_groups[0]
        self.assertEqual((group["rows"], group["cols"], group["ns_dtype"], group["ns_schedule"]),
                         (8, 12, "float32", "you"))

    def test_state_of_the_author(self):
        """His groups have fewer keys, and his step counts are numbers."""
        params = params_of((16, 8), (8,))
        state = {0: {"momentum_buffer": torch.ones(16, 8)},
                 1: {"exp_avg": torch.ones(8), "exp_avg_sq": torch.ones(8), "step": 4}}
        groups = [{"lr": 0.1, "momentum": 0.9, "weight_decay": 0, "use_muon": True, "params": [0]},
                  {"lr": 0.2, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0, "use_muon": False, "params": [1]}]
        optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        give_grads(params)
        optimizer.step()
        mean = 0.9 * torch.ones(16, 8) + 0.1 * params[0].grad
        self.assert_close(optimizer.state[params[0]]["momentum_buffer"], mean)
        self.assertEqual(int(optimizer.state[params[1]]["step"]), 5)


class Wrapped(Compared):
    def test_wrappers_have_masters(self):
        params = params_of((16, 8), (8, 3, 4), (8,), dtype=torch.float16)
        others = copies_of(params)
        groups = [[{"params": p[:1]}, {"params": p[1:2], "rows": 3, "cols": 4}, {"params": p[2:], "use_muon": False}]
                  for p in (params, others)]
        ours, same = FP16_Optimizer(Muon(groups[0]), static_loss_scale=8.0), Muon(groups[1], masters="float32")
        for i in range(3):
            give_grads(params, others, seed=i)
            for p in params:
                p.grad *= 8
            ours.step()
            same.step()
        self.assert_same(params, others)


class Refused(Compared):
    def test_shapes(self):
        for shape, keys, words in (
            ((8,), {}, r"param_groups\[0\]\['params'\]\[0\]' has 1 dims and no rows and cols"),
            ((8, 3, 2, 2), {}, "has 4 dims and no rows and cols"),
            ((8, 6), {"rows": 3, "cols": 6}, "cannot be cut"),
            ((8, 6), {"rows": 4}, "both must be above 0"),
        ):
            with self.subTest(shape=shape, **keys), self.assertRaisesRegex(dsopt.ArgumentError, words):
                params = params_of(shape)
                give_grads(params)
                Muon([{"params": params, **keys}]).step()

    def test_dtypes(self):
        for dtype, words in ((torch.float64, "is float64, which Muon does not have, as its products are float32"),
                             (torch.complex64, "is complex64, and Muon is for float32")):
            params = params_of((8, 6), dtype=dtype)
            params[0].grad = torch.ones_like(params[0])
            with self.subTest(dtype), self.assertRaisesRegex(dsopt.TensorError, words):
                Muon(params).step()

    @unittest.skipIf(TORCH is None, "earlier versions of torch have DTensor elsewhere")
    def test_dtensors(self):
        import torch.distributed.tensor as tensor
        with tempfile.NamedTemporaryFile() as file:
            torch.distributed.init_process_group("gloo", init_method="file://" + file.name, rank=0, world_size=1)
            try:
                mesh = torch.distributed.init_device_mesh("cpu", (1,))
                param = torch.nn.Parameter(tensor.distribute_tensor(torch.ones(8, 6), mesh, [tensor.Shard(0)]))
                param.grad = param.detach().clone()
                with self.assertRaisesRegex(NotImplementedError, r"'params'\]\[0\] is a DTensor of shape \(8, 6\), and "
                                            "Muon orthogonalises whole matrices"):
                    Muon([param]).step()
                Muon([{"params": [param], "use_muon": False}]).step()
            finally:
                torch.distributed.destroy_process_group()

    def test_values(self):
        for options, words in (
            ({"adjust_lr_fn": "rms"}, r"param_groups\[0\]: adjust_lr_fn is 'rms', and must be one of 'original'"),
            ({"ns_schedule": "cans"}, "must be one of 'constant', 'polar_express', 'you'"),
            ({"ns_dtype": torch.bfloat16}, "must be one of 'bfloat16', 'float16', 'float32'"),
            ({"ns_coefficients": (1, 2)}, "must be three numbers"),
            ({"ns_coefficients": 3.4}, "must be three numbers"),
            ({"ns_steps": 2.5}, "ns_steps is 2.5, and must be a whole number"),
            ({"lr": "x"}, "lr is 'x', and must be a number"),
            ({"seed": 3}, "seed is 3, which has no effect"),
            ({"group": object()}, "group has no effect without shard, average or split_matrices"),
            ({"max_grad_norm": 1.0}, "max_grad_norm has no effect without average"),
        ):
            with self.subTest(**options), self.assertRaisesRegex(dsopt.Error, words):
                Muon(params_of((8, 6)), **options)

    def test_values_that_the_engine_refuses(self):
        for options, words in (
            ({"momentum": 0.0}, r"param_groups\[0\]: momentum is 0, must be in \(0, 1\)"),
            ({"ns_steps": 100}, "ns_steps is 100"),
            ({"eps": 0.0}, "eps is 0"),
            ({"lr": -1.0}, "lr"),
            ({"ns_schedule": "you", "ns_coefficients": (2, -1.5, 0.5)}, "no effect with a preset"),
            ({"exp_avg_format": "q8"}, "exp_avg_format is Q8"),
        ):
            params = params_of((8, 6))
            give_grads(params)
            with self.subTest(**options), self.assertRaisesRegex(dsopt.Error, words):
                Muon(params, **options).step()


class OneRank(Compared):
    def test_has_the_bits_without_other_ranks(self):
        for options in ({"split_matrices": True}, {"average": True}, {"average": True, "split_matrices": True},
                        {"shard": True}):
            with self.subTest(**options):
                params, others = params_of((16, 8), (8, 3, 4), (8,)), params_of((16, 8), (8, 3, 4), (8,))
                groups = [[{"params": p[:1]}, {"params": p[1:2], "rows": 3, "cols": 4},
                           {"params": p[2:], "use_muon": False}] for p in (params, others)]
                step_both(Muon(groups[0], **options), Muon(groups[1]), params, others, 4)
                self.assert_same(params, others)

    def test_cannot_be_pickled(self):
        with self.assertRaisesRegex(dsopt.StateError, "Muon with split_matrices cannot be pickled"):
            pickle.dumps(Muon(params_of((4, 3)), split_matrices=True))


# ------------------------------------------------------------------------------------------------------- several ranks
def same_bits(rank):
    """Ranks that partition matrices or state, with averaged gradients, have the bits of one rank."""
    shapes = (16, 8), (24, 8), (8, 30), (3, 3), (8,)
    for options in ({"split_matrices": True}, {"average": True, "split_matrices": True}, {"shard": True},
                    {"shard": True, "average": True}):
        params, others = params_of(*shapes), params_of(*shapes)
        groups = [[{"params": p[:1]}, {"params": p[1:2], "rows": 8, "cols": 8}, {"params": p[2:4]},
                   {"params": p[4:], "use_muon": False}] for p in (params, others)]
        ours, alone = Muon(groups[0], lr=0.02, **options), Muon(groups[1], lr=0.02)
        for step in range(4):
            give_grads(params, others, seed=step)
            if options.get("average"):  # of the two ranks: 1.5 and 0.5 times
                for p in params:
                    p.grad *= 1.5 - rank
            ours.step()
            alone.step()
        for p, q in zip(params, others):
            assert torch.equal(p.detach(), q.detach()), (options, p.shape)


class Ranks(TestCase):
    def test_have_the_bits_of_one(self):
        run_ranks(self, __file__, "same_bits")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child([globals()[sys.argv[2]]], int(sys.argv[3]), sys.argv[4])
    main()
