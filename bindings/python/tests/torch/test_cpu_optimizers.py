# SPDX-License-Identifier: Apache-2.0
"""DeepSpeedCPUAdam and DeepSpeedCPULion without DeepSpeed. test_original_cpu.py compares them with the originals."""
import copy
import math
import pickle
from unittest import mock

from support import TestCase, give_grads, main, params_of, torch

import dsopt
from dsopt.torch import DeepSpeedCPUAdam, DeepSpeedCPULion, FP16_Optimizer, FusedAdam, FusedLion
from dsopt.torch import _cpu

SHAPES = ((7, 3), (5, ), (), (0, 2), (1000, ))
BOTH = (DeepSpeedCPUAdam, DeepSpeedCPULion)


def stepped(optimizer, params, steps, begin=0):
    for seed in range(begin, begin + steps):
        give_grads(params, seed=seed)
        optimizer.step()


class Steps(TestCase):
    def test_adam_matches_torch(self):
        for dtype, tolerance in ((torch.float32, dict(rtol=1e-6, atol=1e-7)),
                                 (torch.bfloat16, dict(rtol=2e-2, atol=1e-3)),
                                 (torch.float16, dict(rtol=2e-3, atol=1e-4))):
            for mode, kind in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
                params = params_of(*SHAPES, dtype=dtype)
                others = [torch.nn.Parameter(p.detach().float()) for p in params]
                ours = DeepSpeedCPUAdam(params, lr=1e-2, weight_decay=0.1, adamw_mode=mode)
                theirs = kind(others, lr=1e-2, weight_decay=0.1)
                for seed in range(4):
                    give_grads(params, seed=seed)
                    for p, q in zip(params, others):
                        q.grad = p.grad.float()
                    ours.step()
                    theirs.step()
                for p, q in zip(params, others):
                    self.assert_close(p.detach().float(), q.detach(), **tolerance)
                    self.assertEqual(ours.state[p]["exp_avg"].dtype, torch.float32)
                    self.assert_close(ours.state[p]["exp_avg"], theirs.state[q]["exp_avg"], rtol=1e-2, atol=1e-3)

    def test_gives_same_bits_as_the_classes_for_devices(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for ours, theirs, more, same in (
                    (DeepSpeedCPUAdam, FusedAdam, {}, {}), (DeepSpeedCPULion, FusedLion, {}, {}),
                    (DeepSpeedCPUAdam, FusedAdam, {"adamw_mode": False, "bias_correction": False},
                     {"adam_w_mode": False, "bias_correction": False})):
                params, others = [params_of(*SHAPES, dtype=dtype) for _ in range(2)]
                stepped(ours(params, weight_decay=0.1, **more), params, 4)
                stepped(theirs(others, weight_decay=0.1, **same), others, 4)
                self.assert_same(params, others)

    def test_accepts_gradients_of_another_dtype(self):
        params = params_of((9, ), dtype=torch.bfloat16)
        optimizer = DeepSpeedCPUAdam(params)
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 10):
            params[0].grad = torch.ones(9, dtype=torch.bfloat16)
        else:
            params[0].grad_dtype = None
            params[0].grad = torch.ones(9)
        optimizer.step()
        self.assert_close(optimizer.state[params[0]]["exp_avg"], torch.full((9, ), 0.1))

    def test_groups_and_state_have_the_originals_keys(self):
        params = params_of((3, ))
        for optimizer, group, state in (
                (DeepSpeedCPUAdam(params), {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0,
                                            "bias_correction": True, "amsgrad": False},
                 ["step", "exp_avg", "exp_avg_sq"]),
                (DeepSpeedCPULion(params), {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0},
                 ["step", "exp_avg"])):
            found = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
            self.assertEqual({key: found[key] for key in group}, group)
            self.assertLessEqual(set(found) - set(group), {"differentiable"})  # from torch 1.13
            stepped(optimizer, params, 3)
            self.assertEqual(sorted(optimizer.state[params[0]]), sorted(state))
            self.assertEqual(float(optimizer.state[params[0]]["step"]), 3)

    def test_has_the_originals_attributes(self):
        params = params_of((3, ))
        for kind in BOTH:
            before = kind.optimizer_id
            optimizers = [kind(params) for _ in range(3)]
            self.assertEqual([optimizer.opt_id for optimizer in optimizers], [before, before + 1, before + 2])
            self.assertEqual(kind.optimizer_id, before + 3)
            self.assertIs(optimizers[0].fp32_optimizer_states, True)
            for copied in (copy.deepcopy(optimizers[1]), pickle.loads(pickle.dumps(optimizers[1]))):
                self.assertEqual(copied.opt_id, before + 1)
        self.assertIs(DeepSpeedCPUAdam(params, adamw_mode=False).adam_w_mode, False)
        self.assertIs(copy.deepcopy(DeepSpeedCPUAdam(params, adamw_mode=False)).adam_w_mode, False)

    def test_rejects_invalid_arguments(self):
        params = params_of((3, ))
        for kind in BOTH:
            before = kind.optimizer_id
            with self.assertRaisesRegex(dsopt.UnsupportedError, "seed is 3, which has no effect"):
                kind(params, seed=3)
            self.assertEqual(kind.optimizer_id, before)
            with self.assertRaisesRegex(dsopt.UnsupportedError,
                                        "fp32_optimizer_states of %s cannot be set" % kind.__name__):
                kind(params).fp32_optimizer_states = False
        with self.assertRaisesRegex(RuntimeError, "DeepSpeedCPUAdam: amsgrad=True is not supported"):
            DeepSpeedCPUAdam(params, amsgrad=True)
        optimizer = DeepSpeedCPUAdam(params)
        with self.assertRaisesRegex(RuntimeError, r"param_groups\[1\]: amsgrad=True is not supported"):
            optimizer.add_param_group({"params": params_of((2, )), "amsgrad": True})
        self.assertEqual(len(optimizer.param_groups), 1)

    def test_state_dicts_are_interchangeable(self):
        """State dicts load into each other, and into torch.optim and back."""
        params, others = params_of(*SHAPES), params_of(*SHAPES)
        ours, again = DeepSpeedCPUAdam(params, lr=1e-2), DeepSpeedCPUAdam(others, lr=1e-2)
        stepped(ours, params, 3)
        stepped(again, others, 1)
        again.load_state_dict(copy.deepcopy(ours.state_dict()))
        for p, q in zip(params, others):
            q.data.copy_(p.detach())
        stepped(ours, params, 3, begin=3)
        stepped(again, others, 3, begin=3)
        self.assert_same(params, others)
        saved = ours.state_dict()
        del saved["param_groups"][0]["amsgrad"]  # of an old version
        again.load_state_dict(saved)
        self.assertIs(again.param_groups[0]["amsgrad"], False)

    def test_loads_steps_that_are_numbers(self):
        """Loads state of DeepSpeed's classes, including the second moment of its Lion."""
        for kind in BOTH:
            params, others = params_of((6, )), params_of((6, ))
            ours, again = kind(params), kind(others)
            stepped(ours, params, 3)
            stepped(again, others, 3)
            saved = copy.deepcopy(again.state_dict())
            saved["state"][0].update(step=3, exp_avg_sq=saved["state"][0].get("exp_avg_sq", torch.zeros(6)))
            again.load_state_dict(saved)
            stepped(ours, params, 2, begin=3)
            stepped(again, others, 2, begin=3)
            self.assert_same(params, others)
            self.assertEqual(float(again.state[others[0]]["step"]), 5)

    def test_accepts_masters(self):
        params = params_of((6, ), dtype=torch.bfloat16)
        wrapper = FP16_Optimizer(DeepSpeedCPUAdam(params), low_precision_dtype=torch.bfloat16)
        give_grads(params)
        wrapper.step()
        self.assertEqual(wrapper.masters()[0][0].dtype, torch.float32)

    def test_lion_does_not_change_weights_with_zero_mean(self):
        (param, ) = params_of((4, ))
        before = param.detach().clone()
        optimizer = DeepSpeedCPULion([param], lr=0.5)
        param.grad = torch.tensor([0.0, -0.0, 1.0, -1.0])
        optimizer.step()
        self.assert_close(param.detach() - before, torch.tensor([0.0, 0.0, -0.5, 0.5]))


class Bfloat16Moments(TestCase):
    """fp32_optimizer_states=False."""

    KINDS = ((DeepSpeedCPUAdam, lambda: dsopt.AdamW(lr=1e-3, weight_decay=0, exp_avg_format="bf16",
                                                    exp_avg_sq_format="bf16_random"), ("exp_avg", "exp_avg_sq")),
             (DeepSpeedCPULion, lambda: dsopt.Lion(lr=1e-3, betas=(0.9, 0.999), exp_avg_format="bf16"), ("exp_avg",)))

    def optimizer(self, kind, params, **options):
        if kind is DeepSpeedCPUAdam:
            options.setdefault("seed", 5)
        return kind(params, fp32_optimizer_states=False, **options)

    def test_moments_of_16_bit_parameters_are_bfloat16(self):
        for kind, _, names in self.KINDS:
            params = [p for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
                      for p in params_of((7, 3), dtype=dtype)]
            optimizer = self.optimizer(kind, params)
            self.assertIs(optimizer.fp32_optimizer_states, False)
            stepped(optimizer, params, 2)
            for name in names:
                self.assertEqual([optimizer.state[p][name].dtype for p in params],
                                 [torch.float32, torch.bfloat16, torch.bfloat16, torch.float64])

    def test_gives_same_bits_as_the_formats(self):
        for kind, group, names in self.KINDS:
            params = params_of((700,), (5,), dtype=torch.bfloat16)
            arrays = {"param_groups[0]['params'][%d]" % i: p.detach().clone() for i, p in enumerate(params)}
            engine = dsopt.Optimizer(arrays, group(), no_master=True, seed=5 if kind is DeepSpeedCPUAdam else 0)
            optimizer = self.optimizer(kind, params)
            for i in range(4):
                give_grads(params, seed=i)
                optimizer.step()
                engine.step([p.grad for p in params])
            self.assert_same(params, list(arrays.values()))

    def test_float32_parameters_have_the_same_bits_as_before(self):
        for kind, _, _ in self.KINDS:
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            stepped(self.optimizer(kind, params), params, 3)
            stepped(kind(others), others, 3)
            self.assert_same(params, others)

    def test_variance_falls_without_gradients(self):
        """Rounded to nearest it could not: the difference is less than half of a unit in the last place."""
        param = torch.nn.Parameter(torch.zeros(2000, dtype=torch.bfloat16))
        optimizer = self.optimizer(DeepSpeedCPUAdam, [param], lr=0.0)
        param.grad = torch.ones_like(param)
        optimizer.step()
        param.grad = torch.zeros_like(param)
        before = optimizer.state[param]["exp_avg_sq"].float().mean().item()
        for _ in range(300):
            optimizer.step()
        after = optimizer.state[param]["exp_avg_sq"].float().mean().item()
        self.assertAlmostEqual(after / before, 0.999**300, delta=0.01)

    def test_resumes_with_same_bits(self):
        for kind, _, names in self.KINDS:
            params = params_of(*SHAPES, dtype=torch.bfloat16)
            optimizer = self.optimizer(kind, params)
            stepped(optimizer, params, 3)
            others = [torch.nn.Parameter(p.detach().clone()) for p in params]
            resumed = self.optimizer(kind, others)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
            stepped(optimizer, params, 2, begin=3)
            for again in (resumed, *copies):
                self.assertIs(again.fp32_optimizer_states, False)
                stepped(again, again.param_groups[0]["params"], 2, begin=3)
                self.assert_same(again.param_groups[0]["params"], params)

    def test_loads_convert(self):
        """Also moments of DeepSpeed in float16."""
        for kind, _, names in self.KINDS:
            for dtype in (torch.float16, torch.bfloat16):
                params = params_of((50,), dtype=dtype)
                wide = kind(params)
                stepped(wide, params, 3)
                saved = copy.deepcopy(wide.state_dict())
                narrow = self.optimizer(kind, [torch.nn.Parameter(p.detach().clone()) for p in params])
                narrow.load_state_dict(saved)
                found = narrow.state[narrow.param_groups[0]["params"][0]]
                for name in names:
                    self.assertTrue(torch.equal(found[name], wide.state[params[0]][name].bfloat16()))
                stepped(narrow, narrow.param_groups[0]["params"], 1, begin=3)
                back = kind([torch.nn.Parameter(p.detach().clone()) for p in params])
                back.load_state_dict(copy.deepcopy(narrow.state_dict()))
                stepped(back, back.param_groups[0]["params"], 1, begin=4)
                self.assertEqual(back.state[back.param_groups[0]["params"][0]]["exp_avg"].dtype, torch.float32)
                saved["state"][0].update({name: saved["state"][0][name].half() for name in names})
                narrow.load_state_dict(saved)
                found = narrow.state[narrow.param_groups[0]["params"][0]]
                for name in names:
                    self.assertEqual(found[name].dtype, torch.bfloat16)
                    self.assert_close(found[name].float(), saved["state"][0][name].float(), rtol=2**-8, atol=0)

    def test_steps_subgroups(self):
        (param,), (other,) = params_of((300,), dtype=torch.bfloat16), params_of((300,), dtype=torch.bfloat16)
        optimizer, reference = [self.optimizer(DeepSpeedCPUAdam, [p]) for p in (param, other)]
        for i in range(3):
            give_grads([param], [other], seed=i)
            optimizer.step_subgroup("a")
            reference.step()
        self.assert_same([param], [other])
        with self.assertRaisesRegex(dsopt.TensorError, "the parameter is bfloat16, and must be float32"):
            optimizer.rollback_subgroup("a")


class Subgroups(TestCase):
    def new(self, weights, grads):
        param = torch.nn.Parameter(weights)
        param.grad = grads
        return param

    def test_step_subgroup_matches_step(self):
        """Each call gets new tensors over the same memory, as from DeepSpeed's workers."""
        params = params_of((33, ), (5, ))
        plain = DeepSpeedCPUAdam([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.1}], weight_decay=0.1)
        flat = [p.detach().clone() for p in params]
        ours = DeepSpeedCPUAdam([{"params": params_of((1, ))}, {"params": params_of((1, )), "lr": 0.1}],
                                weight_decay=0.1)
        for seed in range(5):
            give_grads(params, seed=seed)
            plain.step()
            for g in range(2):
                ours.param_groups[g]["params"] = [self.new(flat[g], params[g].grad.clone())]
                self.assertEqual(ours.step_subgroup(7 - g, lambda: 5), 5)
                ours.param_groups[g]["params"] = []
            self.assert_same(flat, params)
        self.assertEqual(sorted(ours.state), [6, 7])
        for g in range(2):
            self.assert_same([ours.state[7 - g]["exp_avg_sq"]], [plain.state[params[g]]["exp_avg_sq"]])
            self.assertEqual(float(ours.state[7 - g]["step"]), 5)

    def test_steps_16_bit_parameters(self):
        for dtype in (torch.bfloat16, torch.float16):
            params, others = params_of((9, ), dtype=dtype), params_of((9, ), dtype=dtype)
            plain, ours = DeepSpeedCPUAdam(params), DeepSpeedCPUAdam(others)
            for seed in range(3):
                give_grads(params, others, seed=seed)
                plain.step()
                ours.step_subgroup(0)
            self.assert_same(params, others)
            self.assertEqual(ours.state[0]["exp_avg"].dtype, torch.float32)

    def test_without_a_gradient_nothing_is_stepped(self):
        (param, ) = params_of((3, ))
        optimizer = DeepSpeedCPUAdam([param])
        optimizer.step_subgroup(0)
        self.assertEqual(len(optimizer.state), 0)

    def test_rejects_several_gradients(self):
        params = params_of((3, ), (4, ))
        before = [p.detach().clone() for p in params]
        optimizer = DeepSpeedCPUAdam(params)
        give_grads(params)
        with self.assertRaisesRegex(dsopt.ArgumentError,
                                    r"step_subgroup\(2\): 2 parameters have a gradient, and must be one"):
            optimizer.step_subgroup(2)
        self.assert_same(params, before)
        self.assertEqual(len(optimizer.state), 0)

    def test_failed_step_changes_nothing(self):
        (param, ) = params_of((3, ))
        optimizer = DeepSpeedCPUAdam([param])
        groups = optimizer.param_groups
        give_grads([param])
        optimizer.param_groups[0]["lr"] = -1.0
        with self.assertRaises(dsopt.ArgumentError):
            optimizer.step_subgroup(0)
        self.assertEqual(len(optimizer.state), 0)
        self.assertIs(optimizer.param_groups, groups)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step_subgroup(0)
        self.assertEqual(float(optimizer.state[0]["step"]), 1)

    def test_rejects_state_of_another_size(self):
        optimizer = DeepSpeedCPUAdam([self.new(torch.ones(3), torch.ones(3))])
        optimizer.step_subgroup(0)
        before = {key: value.clone() for key, value in optimizer.state[0].items()}
        optimizer.param_groups[0]["params"] = [self.new(torch.ones(4), torch.ones(4))]
        for call in (optimizer.step_subgroup, optimizer.rollback_subgroup):
            with self.assertRaisesRegex(dsopt.TensorError, r"shape \(3,\), and the parameter \(4,\)"):
                call(0)
        for key, value in before.items():
            self.assertTrue(torch.equal(optimizer.state[0][key], value))

    def test_rejects_state_dict_and_stays_usable(self):
        (param, ) = params_of((3, ))
        optimizer = DeepSpeedCPUAdam([param])
        give_grads([param])
        optimizer.step_subgroup(4)
        with self.assertRaisesRegex(dsopt.StateError, r"the state of subgroups 4 belongs to no parameter"):
            optimizer.state_dict()
        optimizer.step()
        self.assertEqual({float(state["step"]) for state in optimizer.state.values()}, {1.0})
        copied = pickle.loads(pickle.dumps(optimizer))
        self.assertEqual(float(copied.state[4]["step"]), 1)


class Rollback(TestCase):
    def run_of(self, count=50, steps=3, **options):
        """Returns an optimizer after `steps`, with its weights and state before the last step."""
        (param, ) = params_of((count, ))
        optimizer = DeepSpeedCPUAdam([param], lr=1e-2, weight_decay=0.1, **options)
        for seed in range(steps):
            state = copy.deepcopy(optimizer.state[0]) if 0 in optimizer.state else {}
            before = [param.detach().clone(), *state.values()]
            give_grads([param], seed=seed)
            optimizer.step_subgroup(0)
        return param, optimizer, before

    def test_restores_weights_and_moments(self):
        for options in ({}, {"adamw_mode": False}, {"bias_correction": False},
                        {"adamw_mode": False, "bias_correction": False}, {"betas": (0.5, 0.6), "eps": 1e-3}):
            for steps in (1, 2, 20):
                param, optimizer, before = self.run_of(steps=steps, **options)
                stepped_to = param.detach().clone()
                self.assertEqual(optimizer.rollback_subgroup(0, lambda: 3), 3)
                state = optimizer.state[0]
                expected = before[1:] or [torch.tensor(0.0), torch.zeros(50), torch.zeros(50)]
                for found, value in zip((param.detach(), state["step"], state["exp_avg"], state["exp_avg_sq"]),
                                        (before[0], *expected)):
                    self.assert_close(found, value, rtol=1e-5, atol=1e-6)
                self.assertTrue((state["exp_avg_sq"] >= 0).all())
                optimizer.step_subgroup(0)
                self.assert_close(param.detach(), stepped_to, rtol=1e-4, atol=1e-4)

    def test_restores_edges_of_chunks(self):
        with mock.patch.object(_cpu, "CHUNK", 8):
            for count in (0, 1, 7, 8, 9, 16, 17):
                param, optimizer, before = self.run_of(count)
                optimizer.rollback_subgroup(0)
                self.assert_close(param.detach(), before[0], rtol=1e-5, atol=1e-6)

    def test_next_step_after_a_gradient_of_0_is_finite(self):
        """Rounding may make the variance negative."""
        param, optimizer, _ = self.run_of(count=1000, steps=1)
        optimizer.rollback_subgroup(0)
        param.grad = torch.zeros(1000)
        optimizer.step_subgroup(0)
        self.assertTrue(torch.isfinite(param).all())

    def test_without_a_gradient_nothing_changes(self):
        param, optimizer, _ = self.run_of()
        param.grad, before = None, param.detach().clone()
        optimizer.rollback_subgroup(0)
        self.assert_same([param], [before])
        self.assertEqual(float(optimizer.state[0]["step"]), 3)

    def test_rejects_invalid_arguments(self):
        param, optimizer, _ = self.run_of(steps=1)
        before = param.detach().clone()
        # DeepSpeed's own tests check the beginning of both texts.
        with self.assertRaisesRegex(RuntimeError, "Cannot rollback optimizer state for sub_group_id 1, as no step"):
            optimizer.rollback_subgroup(1)
        self.assertNotIn(1, optimizer.state)
        for change in ({"betas": (0.0, 0.9)}, {"betas": (0.9, 0.0)}, {"lr": 10.0}):
            kept = dict(optimizer.param_groups[0])
            optimizer.param_groups[0].update(change)
            with self.assertRaisesRegex(dsopt.ArgumentError, "cannot be undone"):
                optimizer.rollback_subgroup(0)
            optimizer.param_groups[0].update(kept)
        self.assert_same([param], [before])
        optimizer.rollback_subgroup(0)
        with self.assertRaisesRegex(RuntimeError, "Cannot rollback sub_group_id 0: step count is 0"):
            optimizer.rollback_subgroup(0)
        params = params_of((3, ), dtype=torch.bfloat16)
        optimizer = DeepSpeedCPUAdam(params)
        give_grads(params)
        optimizer.step_subgroup(0)
        with self.assertRaisesRegex(dsopt.TensorError, "the parameter is bfloat16, and must be float32"):
            optimizer.rollback_subgroup(0)
        self.assertEqual(float(optimizer.state[0]["step"]), 1)
        self.assertTrue(math.isfinite(float(params[0].detach().sum())))


if __name__ == "__main__":
    main()
