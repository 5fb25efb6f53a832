# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding of bfloat16 parameters."""
import copy
import io
import math
import pickle

from support import VERSION, TestCase, give_grads, main, params_of, torch

import dsopt
from dsopt.torch import (SGD, Adagrad, Adam, AdamW, DeepSpeedCPUAdam, DeepSpeedCPULion, FP16_Optimizer,
                         FP16_UnfusedOptimizer, FusedAdam, FusedLamb, FusedLion, Lion, OnebitAdam, OnebitLamb,
                         ZeroOneAdam)

STANDARD = (AdamW, Adam, SGD, Adagrad, Lion, FusedAdam, FusedLion, FusedLamb, DeepSpeedCPUAdam, DeepSpeedCPULion)
ONEBIT = (OnebitAdam, ZeroOneAdam, OnebitLamb)
BF16 = torch.bfloat16
SHAPES = ((300,), (7, 5), (), (0,), (1,))
# Each rule with the options that change its arithmetic, and the group of dsopt that has the same arithmetic.
SAME = [
    (AdamW, {"weight_decay": 0.1}, lambda lr: dsopt.AdamW(lr=lr, weight_decay=0.1)),
    (Adam, {}, lambda lr: dsopt.Adam(lr=lr)),
    (SGD, {}, lambda lr: dsopt.Sgd(lr=lr)),
    (SGD, {"momentum": 0.9, "dampening": 0.5}, lambda lr: dsopt.Sgd(lr=lr, momentum=0.9, dampening=0.5)),
    (Adagrad, {}, lambda lr: dsopt.Adagrad(lr=lr)),
    (Lion, {}, lambda lr: dsopt.Lion(lr=lr)),
    (FusedAdam, {}, lambda lr: dsopt.AdamW(lr=lr, weight_decay=0)),
    (FusedLion, {}, lambda lr: dsopt.Lion(lr=lr, betas=(0.9, 0.999))),
    (FusedLamb, {}, lambda lr: dsopt.Lamb(lr=lr)),
    (DeepSpeedCPUAdam, {}, lambda lr: dsopt.AdamW(lr=lr, weight_decay=0)),
    (DeepSpeedCPULion, {}, lambda lr: dsopt.Lion(lr=lr, betas=(0.9, 0.999))),
]


def run(optimizer, params, steps, begin=0):
    for i in range(begin, begin + steps):
        give_grads(params, seed=i)
        optimizer.step()


class Bits(TestCase):
    def each(self, **more):
        for kind, options, group in SAME:
            with self.subTest(kind.__name__, **options):
                yield kind, {"lr": 0.01, **options, **more}, group(0.01)

    def trained(self, kind, options, steps=4, seed=5):
        params = params_of(*SHAPES, dtype=BF16)
        optimizer = kind(params, stochastic_rounding=True, seed=seed, **options)
        run(optimizer, params, steps)
        return optimizer, params

    def test_bits_depend_only_on_the_seed(self):
        for kind, options, _ in self.each():
            _, first = self.trained(kind, options)
            _, again = self.trained(kind, options)
            self.assert_same(again, first)
            _, other = self.trained(kind, options, seed=6)
            self.assertFalse(torch.equal(other[0], first[0]))

    def test_gives_same_bits_as_the_engine_with_equal_names(self):
        for kind, options, group in self.each():
            _, params = self.trained(kind, options)
            arrays = {"param_groups[0]['params'][%d]" % i: p.detach()
                      for i, p in enumerate(params_of(*SHAPES, dtype=BF16)) if p.numel()}
            engine = dsopt.Optimizer(arrays, group, no_master=True, stochastic_rounding=True, seed=5)
            for i in range(4):
                give_grads(params, seed=i)
                engine.step([p.grad for p in params if p.numel()])
            self.assert_same([p for p in params if p.numel()], list(arrays.values()))

    def test_bits_do_not_depend_on_threads(self):
        before = torch.get_num_threads()
        try:
            results = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                params = params_of((70000,), dtype=BF16)
                run(AdamW(params, lr=0.01, stochastic_rounding=True), params, 3)
                results.append(params)
        finally:
            torch.set_num_threads(before)
        self.assert_same(*results)

    def test_bits_do_not_depend_on_groups_of_named_parameters(self):
        if VERSION < (2, 6):
            self.skipTest("torch %s has no named parameters" % torch.__version__)
        results = []
        for order in ((0, 1, 2), (2, 0, 1), None):
            params = params_of((50,), (60,), (70,), dtype=BF16)
            named = [("p%d" % i, p) for i, p in enumerate(params)]
            groups = [named[i] for i in order] if order else [{"params": named[2:]}, {"params": named[:2]}]
            optimizer = AdamW(groups, lr=0.01, stochastic_rounding=True, seed=3)
            run(optimizer, params, 3)
            results.append(params)
        self.assert_same(results[1], results[0])
        self.assert_same(results[2], results[0])

    def test_resumes_with_same_bits(self):
        for kind, options, _ in self.each():
            optimizer, params = self.trained(kind, options)
            file = io.BytesIO()
            torch.save({"optimizer": optimizer.state_dict(), "weights": [p.detach().clone() for p in params]}, file)
            run(optimizer, params, 3, begin=4)
            file.seek(0)
            saved = torch.load(file)
            for seed in (5, 77):  # the seed of the state dict is used, like its lr
                others = [torch.nn.Parameter(w.clone()) for w in saved["weights"]]
                resumed = kind(others, stochastic_rounding=True, seed=seed, **options)
                resumed.load_state_dict(saved["optimizer"])
                self.assertEqual(resumed.param_groups[0]["seed"], 5)
                run(resumed, others, 3, begin=4)
                self.assert_same(others, params)

    def test_new_plans_keep_the_bits(self):
        for kind, options, _ in self.each():
            _, expected = self.trained(kind, options, steps=6)
            optimizer, params = self.trained(kind, options, steps=0)
            for i in range(6):
                run(optimizer, params, 1, begin=i)
                optimizer._plans = None
            self.assert_same(params, expected)

    def test_copies_and_pickles_resume_with_same_bits(self):
        for kind, options, _ in self.each():
            _, expected = self.trained(kind, options, steps=6)
            for twin in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
                optimizer, _ = self.trained(kind, options, steps=4)
                again = twin(optimizer)
                others = again.param_groups[0]["params"]
                run(again, others, 2, begin=4)
                self.assert_same(others, expected)

    def test_skipped_steps_use_no_random_numbers(self):
        if VERSION < (2, 0):
            self.skipTest("torch %s has another protocol of GradScaler" % torch.__version__)
        _, expected = self.trained(SGD, {"lr": 0.01, "fused": True})
        optimizer, params = self.trained(SGD, {"lr": 0.01, "fused": True}, steps=2)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
        run(optimizer, params, 1, begin=9)
        optimizer.found_inf = torch.tensor(0.0)
        run(optimizer, params, 2, begin=2)
        self.assert_same(params, expected)

    def test_transposed_parameters_round_in_memory_order(self):
        """Elements are counted in memory order."""
        (plain,) = params_of((30, 20), dtype=BF16)
        turned = torch.nn.Parameter(plain.detach().clone().t())
        for param in (plain, turned):
            optimizer = AdamW([param], lr=0.01, stochastic_rounding=True)
            for i in range(3):
                give_grads([plain], seed=i)
                param.grad = plain.grad if param is plain else plain.grad.t()
                optimizer.step()
            plain.grad = None
        self.assert_same([turned.detach().t()], [plain])


class Expectation(TestCase):
    def steady(self, steps, lr, n=100000, **options):
        """Returns values after steps of exactly lr, down from 1.5."""
        param = torch.nn.Parameter(torch.full((n,), 1.5, dtype=BF16))
        optimizer = SGD([param], lr=lr, **options)
        for _ in range(steps):
            param.grad = torch.ones(n, dtype=BF16)
            optimizer.step()
        return param.detach().double()

    def test_is_unbiased(self):
        ulp, n = 2.0**-7, 100000
        for share in (0.01, 0.3, 0.5, 0.9):
            values = self.steady(1, share * ulp, stochastic_rounding=True)
            self.assertEqual(set(values.tolist()), {1.5, 1.5 - ulp})
            deviation = 5 * ulp * math.sqrt(share * (1 - share) / n)
            self.assertLess(abs(values.mean().item() - (1.5 - share * ulp)), deviation)

    def test_small_updates_accumulate(self):
        ulp, n, steps = 2.0**-7, 100000, 50
        self.assertEqual(set(self.steady(steps, ulp / 40).tolist()), {1.5})
        values = self.steady(steps, ulp / 40, stochastic_rounding=True)
        expected, deviation = 1.5 - steps * ulp / 40, 5 * ulp * math.sqrt(steps / 40 / n)
        self.assertLess(abs(values.mean().item() - expected), deviation)

    def test_steps_are_independent(self):
        """SGD without momentum has no other state that changes."""
        first = self.steady(1, 2.0**-8, stochastic_rounding=True)
        param = torch.nn.Parameter(torch.full((100000,), 1.5, dtype=BF16))
        optimizer = SGD([param], lr=2.0**-8, stochastic_rounding=True)
        for _ in range(2):
            param.data.fill_(1.5)
            param.grad = torch.ones_like(param)
            optimizer.step()
        same = (param.detach().double() == first).double().mean().item()
        self.assertLess(abs(same - 0.5), 0.01)


class Groups(TestCase):
    def test_float32_parameters_are_exact(self):
        for kind in STANDARD:
            results = []
            for options in ({}, {"stochastic_rounding": True, "seed": 4}):
                params = params_of((30,)) + params_of((40,), dtype=BF16)
                run(kind(params, lr=0.01, **options), params, 3)
                results.append(params)
            self.assert_same(results[1][:1], results[0][:1])
            self.assertFalse(torch.equal(results[1][1], results[0][1]))

    def test_groups_have_separate_settings(self):
        """A group that rounds to nearest, and one with another seed."""
        for kind in STANDARD:
            params = params_of((40,), (40,), (40,), dtype=BF16)
            optimizer = kind([{"params": params[:1]}, {"params": params[1:2], "stochastic_rounding": False},
                              {"params": params[2:], "seed": 9}], lr=0.01, stochastic_rounding=True, seed=2)
            run(optimizer, params, 3)
            for g, options in enumerate(({"stochastic_rounding": True, "seed": 2}, {},
                                         {"stochastic_rounding": True, "seed": 9})):
                alone = params_of((40,), (40,), (40,), dtype=BF16)
                groups = [{"params": [p]} for p in alone]
                run(kind(groups, lr=0.01, **options), alone, 3)
                self.assert_same([params[g]], [alone[g]])

    def test_error_in_one_group_leaves_others_unchanged(self):
        for kind in STANDARD:
            params = params_of((40,), (5, 4), dtype=BF16)
            optimizer = kind([{"params": params[:1], "seed": 1}, {"params": params[1:], "seed": 2}], lr=0.01,
                             stochastic_rounding=True)
            run(optimizer, params, 1)
            before = [p.detach().clone() for p in params]
            params[1].grad = params[1].grad.to_sparse()
            with self.assertRaisesRegex(dsopt.UnsupportedError, r"gradient of .*\[1\]\['params'\]\[0\] is sparse"):
                optimizer.step()
            self.assert_same(params, before)
            self.assertEqual([int(optimizer.state[p]["step"]) for p in params], [1, 1])

    def test_trust_ratios_are_in_parameter_order(self):
        params = params_of((40,), (50,), (60,), dtype=BF16)
        optimizer = FusedLamb([{"params": params[:1]}, {"params": params[1:2], "stochastic_rounding": False},
                               {"params": params[2:]}], stochastic_rounding=True)
        run(optimizer, params, 1)
        alone = params_of((40,), (50,), (60,), dtype=BF16)
        other = FusedLamb(alone)
        run(other, alone, 1)
        self.assertEqual(optimizer.get_lamb_coeffs(), other.get_lamb_coeffs())
        self.assertEqual([ratio.item() for ratio in optimizer.lamb_coeffs], other.get_lamb_coeffs())

    def test_changed_group_option_takes_effect_in_the_next_step(self):
        params, others = params_of((300,), dtype=BF16), params_of((300,), dtype=BF16)
        optimizer, plain = Lion(params, lr=0.01), Lion(others, lr=0.01)
        for i in range(2):
            run(optimizer, params, 1, begin=i)
            run(plain, others, 1, begin=i)
        self.assert_same(params, others)
        optimizer.param_groups[0].update(stochastic_rounding=True, seed=1)
        run(optimizer, params, 1, begin=2)
        run(plain, others, 1, begin=2)
        self.assertFalse(torch.equal(params[0], others[0]))

    def test_disabled_rounding_adds_no_keys(self):
        for kind, reference in ((AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)):
            params = params_of((3,), dtype=BF16)
            optimizer = kind(params, lr=0.1)
            run(optimizer, params, 1)
            self.assertEqual(set(optimizer.param_groups[0]), set(reference(params, lr=0.1).param_groups[0]))
        self.assertEqual(dict(optimizer.state[params[0]]), {})

    def test_new_groups_have_the_defaults(self):
        for kind in STANDARD:
            params = params_of((3,), (4,), dtype=BF16)
            optimizer = kind(params[:1], stochastic_rounding=True, seed=8)
            optimizer.add_param_group({"params": params[1:]})
            for group in optimizer.param_groups:
                self.assertEqual((group["stochastic_rounding"], group["seed"]), (True, 8))

    def test_state_dict_without_keys_keeps_the_optimizers_options(self):
        for kind in STANDARD:
            params = params_of((40,), dtype=BF16)
            old = kind(params, lr=0.01)
            run(old, params, 2)
            others = [torch.nn.Parameter(params[0].detach().clone())]
            optimizer = kind([{"params": others, "seed": 7}], lr=0.01, stochastic_rounding=True)
            optimizer.load_state_dict(old.state_dict())
            self.assertEqual(optimizer.param_groups[0]["stochastic_rounding"], True)
            self.assertEqual(optimizer.param_groups[0]["seed"], 7)
            run(optimizer, others, 1)

    def test_state_is_compatible_with_torch(self):
        params, others = params_of((40,), dtype=BF16), params_of((40,), dtype=BF16)
        for kind, reference in ((AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD), (Adagrad, torch.optim.Adagrad)):
            optimizer, theirs = kind(params, lr=0.01, stochastic_rounding=True), reference(others, lr=0.01)
            run(theirs, others, 2)
            optimizer.load_state_dict(theirs.state_dict())
            run(optimizer, params, 1)
            theirs.load_state_dict(optimizer.state_dict())
            run(theirs, others, 1)

    def test_late_momentum_starts_undampened(self):
        """The first gradient initializes the buffer, without dampening."""
        old = params_of((4,), dtype=BF16)
        optimizer = SGD(old, lr=0.01, stochastic_rounding=True)
        run(optimizer, old, 3)
        params = params_of((4,), dtype=BF16)
        fresh = SGD(params, lr=0.01, momentum=0.9, dampening=0.5, stochastic_rounding=True)
        saved = fresh.state_dict()
        saved["state"] = optimizer.state_dict()["state"]
        fresh.load_state_dict(saved)
        run(fresh, params, 1)
        self.assert_same([fresh.state[params[0]]["momentum_buffer"]], [params[0].grad.float()])


class Refusals(TestCase):
    def refused(self, text, call, kind=dsopt.UnsupportedError):
        with self.assertRaisesRegex(kind, text):
            call()

    def test_rejects_parameters_without_bfloat16(self):
        for kind in STANDARD:
            params = params_of((3,))
            before = params[0].detach().clone()
            optimizer = kind(params, stochastic_rounding=True)
            self.refused("no effect.*no parameter is bfloat16.*float32", lambda: run(optimizer, params, 1))
            self.assert_same(params, [before])

    def test_rejects_float16(self):
        params = params_of((3,), dtype=BF16) + params_of((3,), dtype=torch.float16)
        before = [p.detach().clone() for p in params]
        optimizer = AdamW(params, stochastic_rounding=True)
        self.refused(r"\['params'\]\[1\].*F16.*BF16", lambda: run(optimizer, params, 1))
        self.assert_same(params, before)

    def test_rejects_compat_mode(self):
        params = params_of((3,), dtype=BF16)
        for kind in (FusedAdam, FusedLamb):
            self.refused("%s: stochastic_rounding=True.*compat" % kind.__name__,
                         lambda: kind(params, compat="deepspeed", stochastic_rounding=True))
            optimizer = kind([{"params": params, "stochastic_rounding": True}], compat="deepspeed")
            self.refused(r"param_groups\[0\]: stochastic_rounding=True.*compat", lambda: run(optimizer, params, 1))

    def test_rejects_onebit_family(self):
        params = params_of((3,), dtype=BF16)
        for kind in ONEBIT:
            self.refused("%s: stochastic_rounding=True.*masters" % kind.__name__,
                         lambda: kind(params, stochastic_rounding=True))
            optimizer = kind([{"params": params, "stochastic_rounding": True}])
            self.refused(r"param_groups\[0\]: stochastic_rounding=True.*%s" % kind.__name__,
                         lambda: run(optimizer, params, 1))

    def test_rejects_wrappers(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            params = params_of((3,), dtype=BF16)
            inner = FusedAdam(params, stochastic_rounding=True)
            self.refused("stochastic_rounding=True is not supported in %s" % wrapper.__name__,
                         lambda: wrapper(inner, low_precision_dtype=BF16))
            run(inner, params, 1)

    def test_rejects_invalid_seeds(self):
        for kind in STANDARD:
            params = params_of((3,), dtype=BF16)
            self.refused("seed is 3, which has no effect without stochastic_rounding", lambda: kind(params, seed=3))
            for seed in (-1, 2**64, 1.5, "a"):
                self.refused("seed is .*must be a whole number",
                             lambda: kind(params, stochastic_rounding=True, seed=seed), dsopt.ArgumentError)
            run(kind(params, stochastic_rounding=True, seed=2**64 - 1), params, 1)
        optimizer = AdamW(params, stochastic_rounding=True)
        optimizer.param_groups[0]["seed"] = None
        self.refused(r"param_groups\[0\]: seed is None", lambda: run(optimizer, params, 1), dsopt.ArgumentError)

    def test_rejects_loads_that_enable_unsupported_rounding(self):
        """The load fails, and changes nothing."""
        params = params_of((3,), dtype=BF16)
        saved = FusedAdam(params, lr=0.5, stochastic_rounding=True)
        run(saved, params, 1)
        optimizer = FusedAdam(params, lr=0.25, compat="deepspeed")
        self.refused("compat", lambda: optimizer.load_state_dict(saved.state_dict()))
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.25)
        self.assertEqual(len(optimizer.state), 0)


if __name__ == "__main__":
    main()
