# SPDX-License-Identifier: Apache-2.0
"""FusedAdam, FusedLamb, the 1-bit family on one rank, and the 16-bit wrappers."""
import copy
import inspect
import math
import pickle

from support import TestCase, give_grads, main, params_of, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb, ZeroOneAdam

SHAPES = ((7, 3), (5,))
FAMILY = ((OnebitAdam, {"freeze_step": 4}), (ZeroOneAdam, {"var_freeze_step": 4}), (OnebitLamb, {"freeze_step": 4}))
EVERY = ((FusedAdam, {}), (FusedLamb, {}), *FAMILY)


def lamb(params, state, grads, t, lr, wd, low, high, bias_correction=True):
    """FusedLamb in float64."""
    ratios = []
    for p, (m, v), g in zip(params, state, grads):
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        u = m / (v.sqrt() + 1e-8) + wd * p
        size = lr * math.sqrt(1 - 0.999 ** t) / (1 - 0.9 ** t) if bias_correction else lr
        a, b = p.norm().item(), u.norm().item()
        ratios.append(min(max(a / b, low), high) if a and b else 1.0)
        p.sub_(u, alpha=size * ratios[-1])
    return ratios


class Signatures(TestCase):
    def defaults(self, kind):
        return {name: parameter.default for name, parameter in inspect.signature(kind.__init__).parameters.items()
                if parameter.default is not parameter.empty}

    def test_defaults(self):
        both = {
            "lr": 1e-3,
            "bias_correction": True,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.,
            "amsgrad": False
        }
        onebit = {
            "deepspeed": None,
            "eps_inside_sqrt": False,
            "max_grad_norm": 0.,
            "cuda_aware": False,
            "comm_backend_name": "nccl"
        }
        for kind, more in ((FusedAdam, {
                "adam_w_mode": True,
                "set_grad_none": True
        }), (FusedLamb, {
                "eps_inside_sqrt": False,
                "max_grad_norm": 0.,
                "max_coeff": 10.0,
                "min_coeff": 0.01
        }), (OnebitAdam, {
                **onebit, "freeze_step": 100000
        }), (ZeroOneAdam, {
                **onebit, "var_freeze_step": 100000,
                "var_update_scaler": 16,
                "local_step_scaler": 32678,
                "local_step_clipper": 16
        }), (OnebitLamb, {
                **onebit, "freeze_step": 100000,
                "max_coeff": 10.0,
                "min_coeff": 0.01,
                "coeff_beta": 0.9,
                "factor_max": 4.0,
                "factor_min": 0.5,
                "factor_threshold": 0.1
        })):
            found = self.defaults(kind)
            for name, value in {**both, **more}.items():
                self.assertEqual(found[name], value, "%s %s" % (kind.__name__, name))
        self.assertEqual(self.defaults(FP16_Optimizer)["initial_dynamic_scale"], 2 ** 32)

    def test_refused(self):
        params = params_of((3,))
        for kind, _ in EVERY:
            with self.assertRaisesRegex(RuntimeError, "amsgrad"):
                kind(params, amsgrad=True)
            with self.assertRaisesRegex(ValueError, "compat"):
                kind(params, compat="apex")
        for kind, _ in FAMILY:
            with self.assertRaisesRegex(dsopt.UnsupportedError, "max_grad_norm"):
                kind(params, max_grad_norm=1.0)
        with self.assertRaisesRegex(RuntimeError, "output_params"):
            FusedAdam(params).step(output_params=[])


class Fused(TestCase):
    def test_adam_modes(self):
        for mode, reference in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            ours, theirs = FusedAdam(params, lr=0.01, weight_decay=0.1, adam_w_mode=mode), reference(others,
                                                                                                     lr=0.01,
                                                                                                     weight_decay=0.1)
            for i in range(5):
                give_grads(params, others, seed=i)
                ours.step()
                theirs.step()
            self.assert_close(params, others)

    def test_bias_correction_can_change(self):
        params = params_of((4,))
        optimizer = FusedAdam(params, lr=0.1, bias_correction=False)
        old = params[0].detach().clone()
        params[0].grad = torch.ones(4)
        optimizer.step()
        self.assert_close(old - params[0].detach(), torch.full((4,), 0.1 * 0.1 / math.sqrt(0.001)), rtol=1e-4, atol=0)
        optimizer.param_groups[0]["bias_correction"] = True
        old = params[0].detach().clone()
        optimizer.step()
        self.assert_close(old - params[0].detach(), torch.full((4,), 0.1), rtol=1e-4, atol=0)

    def test_zero_grad(self):
        params = params_of((4,))
        for optimizer, gone in ((FusedAdam(params), True), (FusedAdam(params, set_grad_none=False), False)):
            give_grads(params)
            optimizer.zero_grad()
            self.assertEqual(params[0].grad is None, gone)

    def test_lamb_beside_float64(self):
        params = params_of(*SHAPES)
        exact = [p.detach().double() for p in params]
        state = [(torch.zeros_like(p), torch.zeros_like(p)) for p in exact]
        optimizer = FusedLamb(params, lr=0.01, weight_decay=0.1)
        for t in range(1, 8):
            give_grads(params, seed=t)
            ratios = lamb(exact, state, [p.grad.double() for p in params], t, 0.01, 0.1, 0.01, 10.0)
            optimizer.step()
            self.assert_close(torch.tensor(optimizer.get_lamb_coeffs()), torch.tensor(ratios), rtol=1e-5, atol=0)
        self.assert_close([p.detach().double() for p in params], exact, rtol=1e-5, atol=1e-6)
        optimizer.param_groups[0].update(max_coeff=0.5, min_coeff=0.5)
        give_grads(params)
        optimizer.step()
        self.assertEqual(optimizer.get_lamb_coeffs(), [0.5, 0.5])

    def test_compat_state_has_the_dtype_of_the_parameter(self):
        for compat, dtype in (("deepspeed", torch.float16), (None, torch.float32)):
            params = params_of((4,), dtype=torch.float16)
            optimizer = FusedAdam(params, compat=compat)
            give_grads(params)
            optimizer.step()
            self.assertEqual(optimizer.state[params[0]]["exp_avg"].dtype, dtype)

    def test_copies(self):
        for kind, options in EVERY:
            params = params_of(*SHAPES)
            optimizer = kind(params, lr=0.01, **options)
            for i in range(6):
                give_grads(params, seed=i)
                optimizer.step()
            for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
                again = other.param_groups[0]["params"]
                start = [p.detach().clone() for p in params]
                give_grads(params, again, seed=9)
                backup = copy.deepcopy(optimizer)
                give_grads(backup.param_groups[0]["params"], seed=9)
                backup.step()
                other.step()
                self.assert_same(again, backup.param_groups[0]["params"])
                self.assert_same(params, start)


class Family(TestCase):
    def test_full_steps(self):
        """AdamW without bias correction."""
        params, others = params_of(*SHAPES), params_of(*SHAPES)
        ours = OnebitAdam(params, lr=0.01, weight_decay=0.1, freeze_step=100)
        theirs = FusedAdam(others, lr=0.01, weight_decay=0.1, bias_correction=False)
        for i in range(5):
            give_grads(params, others, seed=i)
            ours.step()
            theirs.step()
        self.assert_close(params, others)

    def test_freeze(self):
        for kind, options in FAMILY:
            params = params_of(*SHAPES)
            optimizer = kind(params, lr=0.01, **options)
            self.assertEqual(optimizer.next_reduction(), "full")
            for i in range(6):
                give_grads(params, seed=i)
                optimizer.step()
                if i == 4:
                    variance = optimizer.state[params[0]]["exp_avg_sq"].clone()
            self.assertTrue(optimizer.frozen)
            self.assert_same([optimizer.state[params[0]]["exp_avg_sq"]], [variance])
            with self.assertRaisesRegex(RuntimeError, "frozen"):
                optimizer.add_param_group({"params": params_of((3,))})
            self.assertEqual(len(optimizer.param_groups), 1)

    def test_groups_before_the_freeze(self):
        params = params_of((4,), (6,))
        optimizer = OnebitLamb(params[:1], lr=0.01, freeze_step=4)
        give_grads(params)
        optimizer.step()
        average = optimizer.state[params[0]]["trust_average"].clone()
        optimizer.add_param_group({"params": params[1:]})
        params[1].grad = None
        old = [p.detach().clone() for p in params]
        params[0].grad = None
        optimizer.step()
        self.assert_same([optimizer.state[params[0]]["trust_average"]], [average])
        self.assertEqual(optimizer.state[params[1]]["trust_average"].shape, ())
        self.assert_same(params, old)

    def test_nan_is_skipped(self):
        params = params_of((4,))
        optimizer, old = OnebitAdam(params), params[0].detach().clone()
        params[0].grad = torch.full((4,), math.nan)
        optimizer.step()
        self.assert_same(params, [old])


class Wrapped(TestCase):
    def make(self, wrapper, kind=FusedAdam, dtype=torch.float16, options=None, **more):
        params = params_of(*SHAPES, dtype=dtype)
        more.setdefault("dynamic_loss_scale", True)
        more.setdefault("dynamic_loss_args", {"init_scale": 2.0 ** 10, "scale_window": 3})
        return params, wrapper(kind(params, lr=0.01, **(options or {})), low_precision_dtype=dtype, **more)

    def step(self, params, optimizer, seed=0, bad=False):
        generator = torch.Generator().manual_seed(seed)
        optimizer.zero_grad()
        loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params)
        optimizer.backward(loss * (math.inf if bad else 1))
        return optimizer.step()

    def test_masters_beside_torch(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for dtype in (torch.float16, torch.bfloat16):
                params, optimizer = self.make(wrapper, dtype=dtype, options={"weight_decay": 0.1})
                others = [torch.nn.Parameter(p.detach().float()) for p in params]
                reference = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
                for i in range(8):
                    generator = torch.Generator().manual_seed(i)
                    for p in others:
                        p.grad = torch.randn(p.shape, generator=generator).to(dtype).float()
                    reference.step()
                    optimizer.zero_grad()
                    self.assertFalse(self.step(params, optimizer, i))
                self.assert_close(optimizer.masters()[0], [p.detach() for p in others], rtol=2e-3, atol=2e-3)
                self.assert_same(params, [m.to(dtype) for m in optimizer.masters()[0]])
                self.assertEqual(params[0].grad is None, wrapper is FP16_Optimizer)

    def test_scale(self):
        """Windows of 3: growth in the call behind 3 good ones; halved where a gradient is not finite."""
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            params, optimizer = self.make(wrapper)
            scales = []
            for i in range(12):
                optimizer.zero_grad()
                before = [p.detach().clone() for p in params]
                bad = i in (5, 6)
                self.assertEqual(self.step(params, optimizer, i, bad), bad)
                self.assertEqual(optimizer.overflow, bad)
                if bad:
                    self.assert_same(params, before)
                scales.append(math.log2(optimizer.cur_scale))
            self.assertEqual(scales, [10, 10, 10, 11, 11, 10, 9, 9, 9, 9, 10, 10])
            self.assertEqual((optimizer.cur_iter, optimizer.last_overflow_iter), (12, 6))

    def test_setting_the_scale(self):
        params, optimizer = self.make(FP16_Optimizer)
        optimizer.loss_scale = 64.0
        self.assertEqual((optimizer.loss_scale, optimizer.cur_scale), (64, 64))
        optimizer.override_loss_scale(4.0)
        self.assertEqual((optimizer.loss_scale, optimizer.cur_scale, optimizer.custom_loss_scaler), (4, 64, True))
        self.step(params, optimizer, bad=True)
        self.assertEqual(optimizer.cur_scale, 64)
        optimizer.override_loss_scale(None)
        self.assertEqual((optimizer.loss_scale, optimizer.external_loss_scale), (64, None))
        with self.assertRaisesRegex(ValueError, "loss scale"):
            optimizer.loss_scale = 0
        _, static = self.make(FP16_Optimizer, dynamic_loss_scale=False, static_loss_scale=8.0)
        self.assertEqual(static.loss_scale, 8)

    def test_clipping(self):
        params, optimizer = self.make(FP16_Optimizer, clip_grad=0.5, options={"betas": (0.0, 0.999)})
        self.step(params, optimizer)
        norm = optimizer._global_grad_norm
        self.assertGreater(norm, 0.5)
        momentum = torch.cat([optimizer.state[p]["exp_avg"].reshape(-1) for p in params])
        self.assert_close(momentum.norm().item(), 0.5, rtol=1e-3, atol=0)
        optimizer.clip_grad = 0.0
        self.step(params, optimizer)
        momentum = torch.cat([optimizer.state[p]["exp_avg"].reshape(-1) for p in params])
        self.assert_close(momentum.norm().item(), norm, rtol=1e-3, atol=0)

    def test_clipping_of_float32(self):
        params, optimizer = self.make(FP16_Optimizer,
                                      dtype=torch.float32,
                                      clip_grad=0.5,
                                      options={"betas": (0.0, 0.999)})
        self.step(params, optimizer)
        momentum = torch.cat([optimizer.state[p]["exp_avg"].reshape(-1) for p in params])
        self.assert_close(momentum.norm().item(), 0.5, rtol=1e-3, atol=0)
        self.assertEqual(optimizer.loss_scale, 1)

    def test_state(self):
        for wrapper, key in ((FP16_Optimizer, "fp32_groups_flat"), (FP16_UnfusedOptimizer, "fp32_groups")):
            for kind, options in EVERY:
                params, optimizer = self.make(wrapper, kind, options=options, clip_grad=1.0)
                for i in range(6):
                    self.step(params, optimizer, i, bad=i == 2)
                saved = copy.deepcopy(optimizer.state_dict())
                self.assertLessEqual(
                    {
                        "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor",
                        "scale_window", "optimizer_state_dict", "clip_grad", key
                    }, set(saved))
                others, again = self.make(wrapper, kind, options=options)
                for p, q in zip(others, params):
                    p.data.copy_(q.data)
                again.load_state_dict(saved)
                self.assertEqual((again.cur_scale, again.cur_iter, again.clip_grad), (optimizer.cur_scale, 6, 1.0))
                for i in range(6, 10):
                    self.step(params, optimizer, i)
                    self.step(others, again, i)
                self.assert_same(others, params)
                self.assert_same(again.masters()[0], optimizer.masters()[0])

    def test_masters_without_state(self):
        params, optimizer = self.make(FP16_Optimizer)
        self.step(params, optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        others, again = self.make(FP16_Optimizer)
        again.load_state_dict(saved, load_optimizer_states=False)
        self.assert_same(again.masters()[0], optimizer.masters()[0])
        self.assertEqual(again.state[others[0]]["step"].item(), 0)
        saved["fp32_groups_flat"][0] = torch.zeros(3)
        with self.assertRaisesRegex(ValueError, "fp32_groups_flat"):
            again.load_state_dict(saved)

    def test_new_weights(self):
        params, optimizer = self.make(FP16_UnfusedOptimizer)
        for p in params:
            p.data.fill_(0.5)
        optimizer.refresh_fp32_params()
        self.step(params, optimizer)
        self.assertLess((params[0].detach() - 0.5).abs().max().item(), 0.02)

    def test_compat_takes_a_step_of_decay_when_made(self):
        params, optimizer = self.make(FP16_Optimizer, options={"weight_decay": 0.5, "compat": "deepspeed"})
        self.assert_close(optimizer.masters()[0][0], params[0].detach().float() * (1 - 0.01 * 0.5))
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 1)

    def test_refused(self):
        params = params_of((3,), dtype=torch.float16)
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            with self.assertRaisesRegex(ValueError, "init_optimizer"):
                wrapper(torch.optim.AdamW(params))
            with self.assertRaisesRegex(ValueError, r"param_groups\[0\]\['params'\]\[0\]"):
                wrapper(FusedAdam(params), low_precision_dtype=torch.bfloat16)
            with self.assertRaisesRegex(ValueError, "delayed_shif"):
                wrapper(FusedAdam(params), dynamic_loss_scale=True, dynamic_loss_args={"delayed_shif": 2})
            base = FusedAdam(params)
            optimizer = wrapper(base)
            with self.assertRaisesRegex(ValueError, "another wrapper"):
                wrapper(base)
            with self.assertRaisesRegex(RuntimeError, "state_dict"):
                copy.deepcopy(optimizer)
        with self.assertRaisesRegex(NotImplementedError, "has_moe_layers"):
            FP16_Optimizer(FusedAdam(params), has_moe_layers=True)

    def test_hysteresis(self):
        params, optimizer = self.make(FP16_Optimizer, dynamic_loss_args={"init_scale": 64.0, "delayed_shift": 2})
        self.step(params, optimizer, bad=True)
        self.assertEqual(optimizer.cur_scale, 64)
        self.step(params, optimizer, bad=True)
        self.assertEqual(optimizer.cur_scale, 32)

    def test_schedulers_take_the_optimizer_inside(self):
        params, optimizer = self.make(FP16_Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
        self.step(params, optimizer)
        scheduler.step()
        self.assertEqual(optimizer.get_lr(), 0.005)
        optimizer.set_lr(0.5)
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.5)


if __name__ == "__main__":
    main()
