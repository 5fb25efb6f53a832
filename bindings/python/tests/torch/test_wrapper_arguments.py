# SPDX-License-Identifier: Apache-2.0
"""Arguments, attributes and methods of DeepSpeed's wrappers, and their descriptions in README.md."""
import inspect
import math
import pathlib
import re
import warnings

from support import TestCase, main, params_of, torch

from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb, ZeroOneAdam

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
BOTH = (FP16_Optimizer, FP16_UnfusedOptimizer)
EVERY = ((FusedAdam, {}), (FusedLamb, {}), (OnebitAdam, {"freeze_step": 2}), (ZeroOneAdam, {"var_freeze_step": 2}),
         (OnebitLamb, {"freeze_step": 2}))
# Attributes and methods of the classes of DeepSpeed 0.19.6, and those of older versions.
COMMON = ("optimizer", "low_precision_dtype", "loss_scale_config", "fp16_groups", "verbose", "custom_loss_scaler",
          "external_loss_scale", "clip_grad", "norm_type", "clip_grad_norm", "mpu", "overflow", "overflow_checker",
          "_global_grad_norm", "initialize_optimizer_states", "zero_grad", "set_lr", "get_lr", "override_loss_scale",
          "step", "unscale_and_clip_grads", "backward", "_update_scale", "state", "param_groups", "loss_scale",
          "state_dict", "load_state_dict", "refresh_fp32_params", "_get_state", "_set_state", "_get_param_groups",
          "_set_param_groups", "_get_loss_scale", "_set_loss_scale", "dynamic_loss_scale", "cur_scale", "cur_iter",
          "last_overflow_iter", "scale_factor", "scale_window", "min_loss_scale")
ATTRIBUTES = {
    FP16_Optimizer: COMMON + (
        "fused_adam_legacy", "timers", "has_moe_layers", "deepspeed", "using_pipeline", "fp16_groups_flat",
        "fp32_groups_flat", "flatten_grad_norm_mask_list", "has_executed_step", "step_fused_adam",
        "_require_avoid_recompute_norm", "_get_norm_mask_idx", "_get_norm_with_moe_layers"),
    FP16_UnfusedOptimizer: COMMON + ("fused_lamb_legacy", "fp32_groups", "step_fused_lamb", "step_unfused"),
}


def table():
    """Returns README's rows: attribute -> its description."""
    text = README.read_text(encoding="utf-8")
    (found, ) = re.findall(r"^#### FP16_Optimizer and FP16_UnfusedOptimizer\n(.*?)(?=^##|\Z)", text, re.M | re.S)
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found.splitlines() if line[:3] == "| `"]
    return {name: row[-1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}


class Arguments(TestCase):
    def make(self, wrapper, kind=FusedAdam, dtype=torch.float16, options=None, **more):
        params = params_of((7, 3), (5,), dtype=dtype)
        return params, wrapper(kind(params, lr=0.01, **(options or {})), low_precision_dtype=dtype, **more)

    def give_grads(self, params, seed=0, bad=False):
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if bad:
            params[0].grad.fill_(math.inf)

    def test_readme_has_every_attribute_and_argument(self):
        rows = table()
        for wrapper, names in ATTRIBUTES.items():
            self.assertLessEqual(set(names) | set(list(inspect.signature(wrapper).parameters)[:14]), set(rows))

    def test_attributes_exist_or_raise_advice(self):
        rows = table()
        for wrapper, names in ATTRIBUTES.items():
            params, optimizer = self.make(wrapper, dynamic_loss_scale=True)
            for name in names:
                if rows[name].startswith("not supported"):
                    self.assertFalse(hasattr(optimizer, name), name)
                    with self.assertRaisesRegex(AttributeError, "%s has no %s[;:] ?\\w+" % (wrapper.__name__, name)):
                        getattr(optimizer, name)
                else:
                    self.assertTrue(hasattr(optimizer, name), name)
                if rows[name].startswith("supported; read only"):
                    with self.assertRaises(AttributeError):
                        setattr(optimizer, name, 1)
            with self.assertRaisesRegex(AttributeError, "has no nothing$"):
                optimizer.nothing

    def test_accepts_every_argument_by_position(self):
        (param, ) = params_of((3,), dtype=torch.float16)
        engine, timers = object(), None
        fused = FP16_Optimizer(FusedAdam([param]), engine, None, torch.float16, 1.0, True, 2.**9, None, False, None,
                               0.5, True, False, timers)
        self.assertEqual((fused.deepspeed, fused.loss_scale, fused.verbose, fused.clip_grad, fused.fused_adam_legacy,
                          fused.has_moe_layers), (engine, 2**9, False, 0.5, True, False))
        (param, ) = params_of((3,), dtype=torch.float16)
        arguments = {"init_scale": 2.**7, "scale_window": 5, "min_scale": 2.}
        unfused = FP16_UnfusedOptimizer(FusedLamb([param]), engine, None, torch.float16, 1.0, True, arguments, False,
                                        None, 0.5, True)
        self.assertEqual((unfused.loss_scale, unfused.scale_window, unfused.min_loss_scale, unfused.verbose,
                          unfused.clip_grad, unfused.fused_lamb_legacy), (2**7, 5, 2, False, 0.5, True))

    def test_accepts_static_scale_as_third_argument(self):
        """Same position as in DeepSpeed before LossScaleConfig."""
        for wrapper in BOTH:
            for scale in (128.0, 128):
                optimizer = wrapper(FusedAdam(params_of((3,), dtype=torch.float16)), None, scale)
                self.assertEqual((optimizer.loss_scale, optimizer.dynamic_loss_scale), (128, False))
            base = FusedAdam(params_of((3,), dtype=torch.float16))
            for arguments, options, text in (((128.0, True), {}, "low_precision_dtype is True.*dynamic_loss_scale"),
                                             ((128.0,), {"static_loss_scale": 4.0}, "static_loss_scale is 4.0"),
                                             ((True,), {}, "loss_scale_config is a bool")):
                with self.assertRaisesRegex(ValueError, text):
                    wrapper(base, None, *arguments, **options)

    def test_accepts_frozen_parameters_of_another_dtype(self):
        for wrapper in BOTH:
            params = params_of((3,), (4,), dtype=torch.float16)
            frozen = params_of((2,), (3, 3), seed=1)
            before = [p.detach().clone() for p in frozen]
            for p in frozen:
                p.requires_grad_(False)
            optimizer = wrapper(FusedAdam([{"params": [frozen[0], params[0]]}, {"params": [params[1], frozen[1]]}],
                                          lr=0.1, weight_decay=0.1), clip_grad=1.0)
            self.assertEqual([[id(p) for p in group] for group in optimizer.fp16_groups],
                             [[id(params[0])], [id(params[1])]])
            self.assertEqual([len(group) for group in optimizer.masters()], [1, 1])
            self.give_grads(params)
            optimizer.step()
            self.assert_same(frozen, before)
            optimizer.load_state_dict(optimizer.state_dict())
            frozen[0].requires_grad_(True)
            frozen[0].grad = torch.ones(2)
            with self.assertRaisesRegex(ValueError, r"param_groups\[0\]\['params'\]\[0\] is torch.float32"):
                optimizer.step()

    def test_trained_parameters_of_two_dtypes_are_refused(self):
        """The original's flat buffer would convert all of them to float32."""
        for wrapper in BOTH:
            params = params_of((3,), dtype=torch.float16) + params_of((2,))
            base = FusedAdam(params, lr=0.1)
            with self.assertRaisesRegex(ValueError, r"\['params'\]\[1\] is torch.float32, .*requires_grad"):
                wrapper(base)
            self.assertFalse(base.state or base._at_once or base._reports)
            params[1].requires_grad_(False)
            wrapper(base)

    def test_closure_is_ignored_with_a_warning(self):
        for wrapper in BOTH:
            params, optimizer = self.make(wrapper)
            methods = [optimizer.step, getattr(optimizer, "step_fused_adam", None) or optimizer.step_fused_lamb]
            for step in methods:
                before = [p.detach().clone() for p in params]
                self.give_grads(params)
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    self.assertFalse(step(lambda: self.fail("the closure was called")))
                (warning, ) = caught
                self.assertIn("%s.step does not call its closure" % wrapper.__name__, str(warning.message))
                self.assertEqual(pathlib.Path(warning.filename).name, pathlib.Path(__file__).name)
                self.assertFalse(torch.equal(params[0], before[0]))

    def test_lamb_accepts_a_static_scale(self):
        """DeepSpeed's engine rejects it, its wrappers do not."""
        for kind, options in EVERY:
            for wrapper in BOTH if "Lamb" in kind.__name__ else ():
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    params, optimizer = self.make(wrapper, kind, options=options, static_loss_scale=8.0)
                    before = [p.detach().clone() for p in params]
                    self.give_grads(params)
                    self.assertFalse(optimizer.step())
                self.assertFalse(torch.equal(params[0], before[0]))

    def test_skipped_step_reports_its_norm(self):
        for wrapper in BOTH:
            for compat in (None, "deepspeed"):
                params, optimizer = self.make(wrapper, options={"compat": compat}, dynamic_loss_scale=True)
                self.give_grads(params, bad=True)
                self.assertTrue(optimizer.step())
                scale = optimizer.cur_scale if wrapper is FP16_Optimizer else 1.0
                self.assertEqual(optimizer._global_grad_norm, 1 / scale if compat else math.inf)

    def test_legacy_steps_keep_the_gradients(self):
        for legacy in (False, True):
            params, optimizer = self.make(FP16_Optimizer, fused_adam_legacy=legacy)
            self.assertFalse(optimizer.has_executed_step)
            self.give_grads(params)
            optimizer.step()
            self.assertEqual([p.grad is None for p in params], [not legacy] * 2)
            self.assertEqual(optimizer.has_executed_step, not legacy)
            self.give_grads(params, bad=True)
            self.assertTrue(optimizer.step())
            self.assertEqual([p.grad is None for p in params], [not legacy] * 2)
            self.give_grads(params)
            optimizer.step_fused_adam()
            self.assertIsNotNone(params[0].grad)
        for name in ("step", "step_fused_lamb"):
            params, optimizer = self.make(FP16_UnfusedOptimizer)
            self.give_grads(params)
            self.assertFalse(getattr(optimizer, name)())
            self.assertIsNotNone(params[0].grad)

    def test_loss_scale_is_1_without_gradient_scaling(self):
        for dtype in (torch.bfloat16, torch.float32):
            _, fused = self.make(FP16_Optimizer, dtype=dtype)
            _, unfused = self.make(FP16_UnfusedOptimizer, dtype=dtype)
            self.assertEqual((fused.loss_scale, fused.cur_scale, unfused.loss_scale, unfused.cur_scale),
                             (None, 1, 1, 1))
            self.assertEqual(fused.scale_if_loss(torch.tensor(2.0)).item(), 2)
            self.assertEqual(fused.unscale_and_clip_grads([], 1.0), 1)
            for optimizer in (fused, unfused):
                with self.assertRaisesRegex(NotImplementedError, "loss scale"):
                    optimizer.loss_scale = 4.0
                for scale in (4.0, None):
                    with self.assertRaisesRegex(NotImplementedError, "override_loss_scale: there is no loss scale"):
                        optimizer.override_loss_scale(scale)

    def test_state_dicts_have_the_scalers_keys(self):
        own = {"optimizer_state_dict", "clip_grad"}
        static = own | {"dynamic_loss_scale", "cur_scale", "cur_iter"}
        dynamic = static | {"last_overflow_iter", "scale_factor", "scale_window"}
        for wrapper, key in zip(BOTH, ("fp32_groups_flat", "fp32_groups")):
            for dtype, options, expected in (
                    (torch.float16, {"dynamic_loss_scale": True}, dynamic), (torch.float16, {}, static),
                    (torch.bfloat16, {}, own if wrapper is FP16_Optimizer else static),
                    (torch.float32, {"dynamic_loss_scale": True}, own if wrapper is FP16_Optimizer else static)):
                params, optimizer = self.make(wrapper, dtype=dtype, **options)
                self.give_grads(params)
                optimizer.step()
                saved = optimizer.state_dict()
                self.assertEqual(set(saved) & (dynamic | {key}), expected | {key})
                others, again = self.make(wrapper, dtype=dtype, **options)
                again.load_state_dict(saved)
                self.assert_same(again.masters()[0], optimizer.masters()[0])

    def test_zero_grad_sets_zero_or_none(self):
        for wrapper in BOTH:
            params, optimizer = self.make(wrapper)
            self.give_grads(params)
            kept = [p.grad for p in params]
            optimizer.zero_grad(set_to_none=False)
            self.assertEqual([p.grad is g for p, g in zip(params, kept)], [True] * 2)
            self.assertEqual([g.abs().sum().item() for g in kept], [0, 0])
            before = [p.detach().clone() for p in params]
            self.assertFalse(optimizer.step())
            self.assert_same(params, before)
            optimizer.zero_grad()
            self.assertEqual([p.grad for p in params], [None] * 2)
            params[0].grad = (params[0] * 2).clone()  # with a graph, as after create_graph
            optimizer.zero_grad(set_to_none=False)
            self.assertFalse(params[0].grad.requires_grad)
            self.assertEqual(params[0].grad.abs().sum().item(), 0)

    def test_backward_accepts_retain_graph_and_create_graph(self):
        for wrapper in BOTH:
            for compat, override in ((None, None), (None, 4.0), ("deepspeed", None), ("deepspeed", 4.0)):
                params, optimizer = self.make(wrapper, options={"compat": compat}, static_loss_scale=8.0)
                if override:
                    optimizer.override_loss_scale(override)
                loss = (params[0].float() ** 2).sum()
                optimizer.backward(loss, retain_graph=True)
                once = params[0].grad.clone()
                self.assert_close(once, (2 * (override or 8.0) * params[0]).detach(), rtol=1e-2, atol=1e-3)
                optimizer.backward(loss)
                self.assert_close(params[0].grad, 2 * once)
                with self.assertRaisesRegex(RuntimeError, "second time"):
                    optimizer.backward(loss)
                optimizer.zero_grad()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns about the reference cycle
                    optimizer.backward((params[0].float() ** 2).sum(), create_graph=True)
                self.assertIsNotNone(params[0].grad.grad_fn)
                optimizer.zero_grad()

    def test_accepts_empty_groups(self):
        for wrapper in BOTH:
            for kind, options in EVERY:
                for compat in (None, "deepspeed"):
                    params = params_of((4,), (3,), dtype=torch.float16)
                    others = params_of((4,), (3,), dtype=torch.float16)
                    one = wrapper(kind(params, lr=0.01, compat=compat, **options), dynamic_loss_scale=True)
                    groups = [{"params": []}, {"params": others}, {"params": []}]
                    two = wrapper(kind(groups, lr=0.01, compat=compat, **options), dynamic_loss_scale=True)
                    for optimizer in (one, two):
                        optimizer.loss_scale = 4.0
                    for i in range(4):
                        for some, optimizer in ((params, one), (others, two)):
                            self.give_grads(some, i)
                            self.assertFalse(optimizer.step())
                    self.assert_same(others, params)
                    self.assertEqual([len(group) for group in two.masters()], [0, 2, 0])
                    if wrapper is FP16_Optimizer:
                        self.assertEqual([flat.numel() for flat in two.fp32_groups_flat], [0, 7, 0])
                        self.assertEqual([flat.numel() for flat in two.fp16_groups_flat], [0, 7, 0])
                    two.load_state_dict(two.state_dict())
                    self.give_grads(others)
                    two.step()


if __name__ == "__main__":
    main()
