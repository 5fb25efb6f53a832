# SPDX-License-Identifier: Apache-2.0
"""FusedAdam, FusedLion, FusedLamb, the 1-bit family on one rank, and arguments of all of DeepSpeed's classes."""
import copy
import inspect
import math
import pickle

from support import TestCase, give_grads, main, params_of, torch

import dsopt
import dsopt.torch
from dsopt.torch import (DeepSpeedCPUAdam, DeepSpeedCPULion, FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam,
                         FusedLamb, FusedLion, OnebitAdam, OnebitLamb, ZeroOneAdam)

REQUIRED = inspect.Parameter.empty

SHAPES = ((7, 3), (5,))
FAMILY = ((OnebitAdam, {"freeze_step": 4}), (ZeroOneAdam, {"var_freeze_step": 4}), (OnebitLamb, {"freeze_step": 4}))
EVERY = ((FusedAdam, {}), (FusedLamb, {}), *FAMILY)


def lamb(params, state, grads, t, lr, wd, low, high, bias_correction=True):
    """Takes one step of FusedLamb in float64."""
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


# Arguments and defaults of DeepSpeed 0.19.8; for the 1-bit family, which it no longer has, those of 0.19.6.
ONEBIT = dict(params=REQUIRED, deepspeed=None, lr=1e-3)
DEEPSPEED = {
    FusedAdam: dict(params=REQUIRED, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                    weight_decay=0., amsgrad=False, set_grad_none=True),
    FusedLion: dict(params=REQUIRED, lr=1e-3, betas=(0.9, 0.999), weight_decay=0., set_grad_none=True),
    DeepSpeedCPUAdam: dict(model_params=REQUIRED, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                           weight_decay=0, amsgrad=False, adamw_mode=True, fp32_optimizer_states=True),
    DeepSpeedCPULion: dict(model_params=REQUIRED, lr=1e-3, betas=(0.9, 0.999), weight_decay=0,
                           fp32_optimizer_states=True),
    FusedLamb: dict(params=REQUIRED, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False,
                    weight_decay=0., max_grad_norm=0., max_coeff=10.0, min_coeff=0.01, amsgrad=False),
    OnebitAdam: dict(ONEBIT, freeze_step=100000, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                     eps_inside_sqrt=False, weight_decay=0., max_grad_norm=0., amsgrad=False, cuda_aware=False,
                     comm_backend_name="nccl"),
    ZeroOneAdam: dict(ONEBIT, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, eps_inside_sqrt=False,
                      weight_decay=0., max_grad_norm=0., var_freeze_step=100000, var_update_scaler=16,
                      local_step_scaler=32678, local_step_clipper=16, amsgrad=False, cuda_aware=False,
                      comm_backend_name="nccl"),
    OnebitLamb: dict(ONEBIT, freeze_step=100000, bias_correction=True, betas=(0.9, 0.999), eps=1e-8,
                     eps_inside_sqrt=False, weight_decay=0., max_grad_norm=0., max_coeff=10.0, min_coeff=0.01,
                     amsgrad=False, cuda_aware=False, comm_backend_name="nccl", coeff_beta=0.9, factor_max=4.0,
                     factor_min=0.5, factor_threshold=0.1),
    FP16_Optimizer: dict(init_optimizer=REQUIRED, deepspeed=None, loss_scale_config=None,
                         low_precision_dtype=torch.float16, static_loss_scale=1.0, dynamic_loss_scale=False,
                         initial_dynamic_scale=2**32, dynamic_loss_args=None, verbose=True, mpu=None, clip_grad=0.0,
                         fused_adam_legacy=False, has_moe_layers=False, timers=None),
    FP16_UnfusedOptimizer: dict(init_optimizer=REQUIRED, deepspeed=None, loss_scale_config=None,
                                low_precision_dtype=torch.float16, static_loss_scale=1.0, dynamic_loss_scale=False,
                                dynamic_loss_args=None, verbose=True, mpu=None, clip_grad=0.0, fused_lamb_legacy=False),
}
STEPS = {
    **dict.fromkeys((FusedAdam, FusedLion), dict(closure=None, grads=None, output_params=None, scale=None,
                                                 grad_norms=None, grad_scaler=None)),
    FusedLamb: dict(closure=None, grads=None, output_params=None, scale=1., grad_norms=None),
    **dict.fromkeys((DeepSpeedCPUAdam, DeepSpeedCPULion), dict(closure=None)),
    **dict.fromkeys((OnebitAdam, ZeroOneAdam, OnebitLamb), dict(closure=None, grads=None)),
}


class Signatures(TestCase):
    def test_step_arguments_match_deepspeed(self):
        for kind, expected in STEPS.items():
            found = [(name, parameter.default) for name, parameter in inspect.signature(kind.step).parameters.items()]
            self.assertEqual(found[1:], list(expected.items()), kind.__name__)

    def test_accepts_positional_arguments(self):
        params = params_of((3,))
        onebit = OnebitAdam(params, None, 0.1, 5, True, (0.8, 0.9), 1e-6, False, 0.2, 0., False, False, "gloo")
        zero_one = ZeroOneAdam(params, None, 0.1, True, (0.8, 0.9), 1e-6, False, 0.2, 0., 5, 6, 7, 8, False, False,
                               "mpi")
        lamb = OnebitLamb(params, None, 0.1, 5, True, (0.8, 0.9), 1e-6, False, 0.2, 0., 9., 0.3, False, False, "gloo",
                          0.7, 3., 0.4, 0.2)
        for optimizer in (onebit, zero_one, lamb,
                          FusedAdam(params, 0.1, True, (0.8, 0.9), 1e-6, False, 0.2, False, False),
                          FusedLamb(params, 0.1, True, (0.8, 0.9), 1e-6, True, 0.2, 0., 9., 0.3, False)):
            group = optimizer.param_groups[0]
            self.assertEqual([group[key] for key in ("lr", "bias_correction", "betas", "eps", "weight_decay")],
                             [0.1, True, (0.8, 0.9), 1e-6, 0.2], type(optimizer).__name__)
            give_grads(params)
            optimizer.step()
        self.assertEqual([onebit.freeze_step, onebit.comm_backend_name, zero_one.comm_backend_name], [5, "gloo", "mpi"])
        self.assertEqual([zero_one.var_freeze_step, zero_one.var_update_scaler, zero_one.local_step_scaler,
                          zero_one.local_step_clipper], [5, 6, 7, 8])
        self.assertEqual([lamb.freeze_step, lamb.coeff_beta, lamb.factor_max, lamb.factor_min, lamb.factor_threshold],
                         [5, 0.7, 3., 0.4, 0.2])
        self.assertEqual((lamb.param_groups[0]["max_coeff"], lamb.param_groups[0]["min_coeff"]), (9., 0.3))

    def test_constructor_arguments_match_deepspeed(self):
        for kind, expected in DEEPSPEED.items():
            found = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()
                     if parameter.kind is not parameter.KEYWORD_ONLY}
            self.assertEqual(list(found), list(expected), kind.__name__)
            self.assertEqual(found, expected, kind.__name__)

    def test_every_class_named_after_deepspeed_is_in_the_table(self):
        others = {"AdamW", "Adam", "SGD", "Adagrad", "Lion", "Muon", "AdamW8bit", "Adam8bit", "register", "unregister"}
        self.assertEqual({kind.__name__ for kind in DEEPSPEED}, set(dsopt.torch.__all__) - others)

    def test_every_argument_is_documented(self):
        for name in dsopt.torch.__all__:
            kind = getattr(dsopt.torch, name)
            for argument in inspect.signature(kind).parameters:
                self.assertRegex(kind.__doc__, r"(?m)^    %s +\S" % argument, "%s: %s" % (name, argument))
            for line in kind.__doc__.splitlines():
                self.assertLessEqual(len(line), 120, line)

    def test_errors_say_what_to_do(self):
        params = params_of((3,))

        def sparse():
            embedding = torch.nn.Embedding(4, 2, sparse=True)
            embedding(torch.tensor([1])).sum().backward()
            dsopt.torch.AdamW(embedding.parameters()).step()

        cases = [(lambda kind=kind: kind(params, amsgrad=True), "amsgrad=True is not supported; use ")
                 for kind in (dsopt.torch.AdamW, dsopt.torch.Adam, FusedAdam, FusedLamb, *(k for k, _ in FAMILY))]
        cases += [(lambda kind=kind: kind(params, maximize=True), "maximize=True is not supported; minimize")
                  for kind in (dsopt.torch.AdamW, dsopt.torch.Adam, dsopt.torch.SGD, dsopt.torch.Adagrad)]
        cases += [(lambda: dsopt.torch.AdamW(params, differentiable=True), "=True is not supported; use "),
                  (lambda: dsopt.torch.AdamW([{"params": params, "amsgrad": True}]), r"param_groups\[0\]: .* use "),
                  (lambda: OnebitAdam(params, max_grad_norm=1.0), "max_grad_norm=1.0 is not supported; use clip_grad"),
                  (lambda: FusedLion(params).step(scale=2.0), "scale is not supported; use FP16_Optimizer"),
                  (sparse, "is sparse, and must be dense; use ")]
        for call, text in cases:
            with self.assertRaisesRegex(dsopt.UnsupportedError, text):
                call()

    def test_lion_has_the_defaults_of_its_authors(self):
        params = params_of((3,))
        self.assertEqual(dsopt.torch.Lion(params).defaults, dict(lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0))
        self.assertEqual(FusedLion(params).defaults, dict(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0))

    def test_rejects_unsupported_arguments(self):
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
    def test_adam_modes_match_the_formulas(self):
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

    def test_bias_correction_can_be_changed(self):
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

    def test_fused_lion_matches_lion(self):
        params, others = params_of(*SHAPES), params_of(*SHAPES)
        ours, theirs = FusedLion(params), dsopt.torch.Lion(others, lr=1e-3, betas=(0.9, 0.999))
        for i in range(4):
            give_grads(params, others, seed=i)
            ours.step()
            theirs.step()
        self.assert_same(params, others)
        self.assertFalse(copy.deepcopy(FusedLion(params, set_grad_none=False)).set_grad_none)

    def test_attributes_are_read_in_each_step(self):
        params, others = params_of(*SHAPES), params_of(*SHAPES)
        ours, theirs = FusedAdam(params, weight_decay=0.5), FusedAdam(others, weight_decay=0.5)
        for i in range(4):
            ours.adam_w_mode = i % 2
            theirs = FusedAdam(others, weight_decay=0.5, adam_w_mode=bool(i % 2))
            theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
            give_grads(params, others, seed=i)
            ours.step()
            theirs.step()
            self.assert_same(params, others)

    def test_zero_grad_clears_gradients(self):
        params = params_of((4,))
        for optimizer, gone in ((FusedAdam(params), True), (FusedAdam(params, set_grad_none=False), False),
                                (FusedLion(params), True), (FusedLion(params, set_grad_none=False), False)):
            give_grads(params)
            optimizer.zero_grad()
            self.assertEqual(params[0].grad is None, gone)

    def test_lamb_matches_a_float64_reference(self):
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

    def test_copies_step_like_the_original(self):
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
    def test_full_steps_match_adamw(self):
        """Full steps are AdamW without bias correction."""
        params, others = params_of(*SHAPES), params_of(*SHAPES)
        ours = OnebitAdam(params, lr=0.01, weight_decay=0.1, freeze_step=100)
        theirs = FusedAdam(others, lr=0.01, weight_decay=0.1, bias_correction=False)
        for i in range(5):
            give_grads(params, others, seed=i)
            ours.step()
            theirs.step()
        self.assert_close(params, others)

    def test_freeze_stops_the_variance(self):
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

    def test_add_param_group_before_the_freeze_keeps_state(self):
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

    def test_masks_of_a_load_are_ignored(self):
        for kind, options in FAMILY:
            for compat in (None, "deepspeed"):
                for mask in ([1.0, 1, 1, 1], [0.0, 1, 1, 1], None):
                    params, others = params_of((4,)), params_of((4,))
                    first = kind([{"params": params, "exp_avg_mask": torch.tensor([1.0, 1, 0, 0])}], lr=0.1,
                                 compat=compat, **options)
                    own = {} if mask is None else {"exp_avg_mask": torch.tensor(mask)}
                    second = kind([{"params": others, **own}], lr=0.1, compat=compat, **options)
                    for i in range(7):
                        give_grads(params, seed=i)
                        first.step()
                    saved = copy.deepcopy(first.state_dict())
                    second.load_state_dict(saved)
                    self.assertIs(second.param_groups[0].get("exp_avg_mask"), own.get("exp_avg_mask"))
                    self.assertEqual("exp_avg_mask" in second.param_groups[0], mask is not None)
                    self.assertEqual(saved["param_groups"][0]["exp_avg_mask"].tolist(), [1, 1, 0, 0])
                    give_grads(others)
                    second.step()
                    start = others[0].detach().clone()
                    for i in range(3):
                        give_grads(others, seed=i)
                        second.step()
                    # Compat mode computes the weights of the last exchange by a subtraction, which rounds.
                    moved = ((others[0].detach() - start).abs() > 1e-6).tolist()
                    self.assertEqual(moved, [bool(x) for x in mask or [1, 1, 1, 1]], (kind, compat, mask))

    def test_masks_can_change(self):
        """A mask is read in each step, as in the original."""
        params = params_of((4,))
        optimizer = OnebitAdam([{"params": params, "exp_avg_mask": torch.tensor([1.0, 1, 0, 0])}], freeze_step=2)

        def moved():
            start = params[0].detach().clone()
            give_grads(params)
            optimizer.step()
            return (params[0].detach() != start).tolist()

        for _ in range(4):
            last = moved()
        self.assertEqual(last, [True, True, False, False])
        optimizer.param_groups[0]["exp_avg_mask"][2] = 1  # in place
        self.assertEqual(moved(), [True, True, True, False])
        optimizer.param_groups[0]["exp_avg_mask"] = torch.tensor([1.0, 0, 0, 1])
        self.assertEqual(moved(), [True, False, False, True])
        del optimizer.param_groups[0]["exp_avg_mask"]
        self.assertEqual(moved(), [True, True, True, True])

    def test_wrapper_accepts_the_mask_of_a_flat_group(self):
        """A flat mask works as with the original's FP16_Optimizer, which has one flat master per group."""
        for wrapper, good in ((FP16_Optimizer, True), (FP16_UnfusedOptimizer, False)):
            params = params_of((2, 3), (4,), dtype=torch.float16)
            mask = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 1, 0, 0])
            base = OnebitAdam([{"params": params, "exp_avg_mask": mask}], lr=0.1, freeze_step=2)
            if not good:
                with self.assertRaisesRegex(ValueError, r"exp_avg_mask has shape \(10,\).*\(2, 3\)"):
                    wrapper(base)
                continue
            optimizer = wrapper(base)
            for i in range(5):
                before = torch.cat(optimizer.fp32_groups_flat)
                give_grads(params, seed=i)
                optimizer.step()
            self.assertEqual((torch.cat(optimizer.fp32_groups_flat) != before).float().tolist(), mask.tolist())

    def test_rejects_mask_of_another_shape(self):
        params = params_of((4,))
        optimizer = OnebitAdam([{"params": params, "exp_avg_mask": torch.ones(3)}])
        give_grads(params)
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, r"param_groups\[0\]: exp_avg_mask has shape \(3,\)"):
                optimizer.step()

    def test_nan_is_skipped(self):
        params = params_of((4,))
        optimizer, old = OnebitAdam(params), params[0].detach().clone()
        params[0].grad = torch.full((4,), math.nan)
        optimizer.step()
        self.assert_same(params, [old])


if __name__ == "__main__":
    main()
