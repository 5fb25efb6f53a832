# SPDX-License-Identifier: Apache-2.0
"""FP16_Optimizer and FP16_UnfusedOptimizer."""
import copy
import gc
import math
import weakref

from support import TestCase, main, params_of, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb, ZeroOneAdam

SHAPES = ((7, 3), (5,))
EVERY = ((FusedAdam, {}), (FusedLamb, {}), (OnebitAdam, {"freeze_step": 4}), (ZeroOneAdam, {"var_freeze_step": 4}),
         (OnebitLamb, {"freeze_step": 4}))


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

    def test_masters_match_torch(self):
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

    def test_a_dropped_optimizer_is_freed_at_once(self):
        """Without the cyclic collector, which may run much later: inside a capture, or never."""
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer, None):
            for kind, options in EVERY:
                with self.subTest(wrapper=wrapper, kind=kind):
                    if wrapper is None:
                        params = params_of(*SHAPES)
                        optimizer = inner = kind(params, lr=0.01, **options)
                        for p in params:
                            p.grad = torch.ones_like(p)
                        inner.step()
                    else:
                        params, optimizer = self.make(wrapper, kind, options=options)
                        self.step(params, optimizer)
                        inner = optimizer.optimizer
                    optimizer.load_state_dict(optimizer.state_dict())
                    gone = [weakref.ref(x) for x in (optimizer, inner, *(inner._plans or ()))]
                    del optimizer
                    if wrapper is not None:
                        with self.assertRaisesRegex(RuntimeError, "wrapper of this .* no longer exists"):
                            inner.step()
                    del inner
                    self.assertEqual([x() for x in gone], [None] * len(gone))

    def test_scale_grows_and_halves(self):
        """With a window of 3 the scale grows in the call after 3 good ones, and is halved if a gradient is not
        finite."""
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

    def test_scale_can_be_set(self):
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

    def test_clips_gradients(self):
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

    def test_clips_float32_gradients(self):
        params, optimizer = self.make(FP16_Optimizer,
                                      dtype=torch.float32,
                                      clip_grad=0.5,
                                      options={"betas": (0.0, 0.999)})
        self.step(params, optimizer)
        momentum = torch.cat([optimizer.state[p]["exp_avg"].reshape(-1) for p in params])
        self.assert_close(momentum.norm().item(), 0.5, rtol=1e-3, atol=0)
        self.assertEqual((optimizer.loss_scale, optimizer.cur_scale), (None, 1))

    def test_state_dict_restores_everything(self):
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

    def test_refuses_state_of_other_trained_parameters(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            wrapped = []
            for frozen in (0, 2):
                params = params_of((4, ), (4, ), (4, ), dtype=torch.float16)
                params[frozen].requires_grad = False
                optimizer = wrapper(FusedAdam(params, lr=0.01), dynamic_loss_scale=True)
                optimizer.backward(sum((p.float() ** 2).sum() for p in params))
                optimizer.step()
                wrapped.append(optimizer)
            before = str(wrapped[1].state_dict())
            with self.assertRaisesRegex(dsopt.CheckpointError, "parameter 0 of group 0 was not trained, and here it is"):
                wrapped[1].load_state_dict(wrapped[0].state_dict())
            self.assertEqual(str(wrapped[1].state_dict()), before)
            wrapped[1].load_state_dict(wrapped[1].state_dict())
            for p in wrapped[1].param_groups[0]["params"][:1]:  # frozen later: there is a master
                p.requires_grad = False
            wrapped[1].load_state_dict(wrapped[1].state_dict())

    def test_a_load_whose_masters_cannot_be_copied_changes_nothing(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            params, optimizer = self.make(wrapper)
            self.step(params, optimizer)
            saved = copy.deepcopy(optimizer.state_dict())
            self.step(params, optimizer, 1)
            before = str(optimizer.state_dict())
            for convert, text in ((lambda x: x.to("meta"), "cannot be copied"), (lambda x: x.half(), "float16"),
                                  (lambda x: x.long(), "int64"), (lambda x: x.bool(), "bool")):
                changed = {**saved, optimizer._masters_key: [
                    convert(x) if torch.is_tensor(x) else [convert(y) for y in x]
                    for x in saved[optimizer._masters_key]]}
                with self.assertRaisesRegex(dsopt.Error, optimizer._masters_key + ".*" + text):
                    optimizer.load_state_dict(changed)
                self.assertEqual(str(optimizer.state_dict()), before)

    def test_masters_load_without_state(self):
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

    def test_refresh_uses_new_weights(self):
        params, optimizer = self.make(FP16_UnfusedOptimizer)
        for p in params:
            p.data.fill_(0.5)
        optimizer.refresh_fp32_params()
        self.step(params, optimizer)
        self.assertLess((params[0].detach() - 0.5).abs().max().item(), 0.02)

    def test_compat_constructor_takes_a_decay_step(self):
        params, optimizer = self.make(FP16_Optimizer, options={"weight_decay": 0.5, "compat": "deepspeed"})
        self.assert_close(optimizer.masters()[0][0], params[0].detach().float() * (1 - 0.01 * 0.5))
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 1)

    def test_rejects_invalid_arguments(self):
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

    class Config:
        """The same fields as deepspeed.runtime.fp16.loss_scaler.LossScaleConfig."""

        def __init__(self, **changes):
            self.__dict__.update(dict(use_grad_scaling=True, dynamic_loss_scale=True, cur_iter=0, cur_scale=2.0 ** 6,
                                      last_overflow_iter=-1, scale_factor=2.0, scale_window=3, min_loss_scale=32.0))
            self.__dict__.update(changes)

    def test_accepts_loss_scale_config(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            params = params_of(*SHAPES, dtype=torch.float16)
            optimizer = wrapper(FusedAdam(params), deepspeed=object(), loss_scale_config=self.Config())
            config, scales = optimizer.loss_scale_config, []
            for i in range(12):
                self.step(params, optimizer, i, bad=i in (5, 6, 7))
                scales.append(config.cur_scale)
            self.assertEqual(scales, [64, 64, 64, 128, 128, 64, 32, 32, 32, 32, 32, 64])
            self.assertEqual((config.cur_iter, config.last_overflow_iter, config.scale_window, config.min_loss_scale,
                              config.scale_factor), (12, 7, 3, 32, 2))
            self.assertTrue(config.use_grad_scaling and config.dynamic_loss_scale)
            config.cur_scale = 256.0
            self.assertEqual((optimizer.loss_scale, optimizer.cur_scale), (256, 256))
            self.assertIn("cur_scale=256.0", repr(config))

    def test_loss_scale_config_continues_a_run(self):
        params = params_of(*SHAPES, dtype=torch.float16)
        config = self.Config(cur_iter=9, last_overflow_iter=6, scale_factor=4.0)
        optimizer = FP16_Optimizer(FusedAdam(params), loss_scale_config=config)
        self.assertEqual((optimizer.cur_iter, optimizer.last_overflow_iter, optimizer.scale_factor), (9, 6, 4))
        self.step(params, optimizer)
        self.assertEqual(optimizer.cur_scale, 64)
        self.step(params, optimizer)
        self.assertEqual(optimizer.cur_scale, 256)

    def test_loss_scale_config_may_be_static(self):
        none = {"last_overflow_iter": None, "scale_factor": None, "scale_window": None, "min_loss_scale": None}
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for dtype, scale in ((torch.float16, 8.0), (torch.bfloat16, 1.0)):
                params = params_of(*SHAPES, dtype=dtype)
                passed = self.Config(use_grad_scaling=dtype == torch.float16, dynamic_loss_scale=False, cur_scale=scale,
                                    **none)
                optimizer = wrapper(FusedAdam(params), loss_scale_config=passed, low_precision_dtype=dtype)
                self.step(params, optimizer)
                for name, value in passed.__dict__.items():
                    if name != "cur_iter":
                        self.assertEqual(getattr(optimizer.loss_scale_config, name), value, name)

    def test_rejects_invalid_loss_scale_config(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            base = FusedAdam(params_of(*SHAPES, dtype=torch.float16))
            for options, text in ((dict(loss_scale_config=object()), "use_grad_scaling"),
                                  (dict(loss_scale_config=self.Config(use_grad_scaling=False)), "torch.float16"),
                                  (dict(loss_scale_config=self.Config(), static_loss_scale=4.0), "one of them"),
                                  (dict(loss_scale_config=self.Config(), dynamic_loss_scale=True), "one of them")):
                with self.assertRaisesRegex(ValueError, text):
                    wrapper(base, **options)
            wrapper(base, loss_scale_config=self.Config())

    # Read by runtime/engine.py of DeepSpeed 0.19.6 and 0.19.8 from an optimizer without ZeRO: with hasattr, with
    # getattr, or directly. Attributes that it reads only from ZeRO's optimizers, after isinstance or depending on the
    # stage, are not listed.
    READ = ("step", "zero_grad", "param_groups", "state", "state_dict", "load_state_dict", "overflow",
            "_global_grad_norm", "loss_scale_config", "cur_scale", "refresh_fp32_params", "fp16_groups")
    # Tested with hasattr; if present, used like ZeRO's.
    ZERO = ("destroy", "checkpoint_event_prologue", "checkpoint_event_epilogue", "dp_process_group", "bf16_groups",
            "get_grads_for_reduction", "set_gradient_accumulation_boundary", "round_robin_bit16_groups",
            "swap_optimizer", "reduce_gradients", "_coalesce_grad_reduction", "reduction_stream",
            "empty_partition_cache", "real_dp_process_group", "partition_gradients",
            "configure_autoep_folding_tp_gradient_reduction")
    # Attributes of the originals.
    PUBLIC = ("backward", "set_lr", "get_lr", "override_loss_scale", "unscale_and_clip_grads",
              "initialize_optimizer_states", "loss_scale", "custom_loss_scaler", "external_loss_scale", "clip_grad",
              "clip_grad_norm", "norm_type", "mpu", "optimizer", "low_precision_dtype", "verbose")
    FUSED = ("fp16_groups_flat", "fp32_groups_flat", "has_moe_layers", "fused_adam_legacy", "timers", "deepspeed",
             "using_pipeline")
    UNFUSED = ("fp32_groups", "fused_lamb_legacy")

    def test_has_attributes_that_deepspeed_reads(self):
        for wrapper, more in ((FP16_Optimizer, self.FUSED), (FP16_UnfusedOptimizer, self.UNFUSED)):
            params, optimizer = self.make(wrapper)
            self.step(params, optimizer)
            for name in self.READ + self.PUBLIC + more:
                self.assertTrue(hasattr(optimizer, name), "%s.%s" % (wrapper.__name__, name))
            for name in self.ZERO:
                self.assertFalse(hasattr(optimizer, name), "%s.%s" % (wrapper.__name__, name))

    def test_groups_contain_trained_parameters(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            params = params_of((3,), (2, 2), (4,), dtype=torch.float16)
            params[1].requires_grad_(False)
            optimizer = wrapper(FusedAdam([{"params": params[:2]}, {"params": params[2:]}]))
            self.assertEqual([[id(p) for p in group] for group in optimizer.fp16_groups], [[id(params[0])],
                                                                                           [id(params[2])]])
            if wrapper is FP16_Optimizer:
                self.assert_same(optimizer.fp16_groups_flat, [params[0].detach(), params[2].detach()])
            before = [p.detach().clone() for p in params]
            optimizer.initialize_optimizer_states()
            self.assert_same(params, before)
            optimizer.param_groups = optimizer.param_groups[:1]
            self.assertEqual(len(optimizer.optimizer.param_groups), 1)

    def test_unscale_and_clip_grads_changes_gradients(self):
        """Gradients with the loss scale 2^10 and the norm 5 * 2^10 are clipped to 0.5."""
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            params, optimizer = self.make(wrapper, clip_grad=0.5)
            grads = [torch.full((2,), 1024.0), torch.full((3,), 2048.0)]
            passed = (grads,) if wrapper is FP16_Optimizer else ()
            if wrapper is FP16_UnfusedOptimizer:
                for master, scale in zip(optimizer.fp32_groups[0], (1024.0, 2048.0)):
                    master.grad = torch.full_like(master, scale)
                grads = [master.grad for master in optimizer.fp32_groups[0]]
            scale = optimizer.unscale_and_clip_grads(*passed, total_norm=5 * 1024.0, apply_scale=False)
            self.assertAlmostEqual(scale, 1024 * (5 + 1e-6) / 0.5, places=2)
            self.assertEqual(grads[0].flatten()[0].item(), 1024)
            optimizer.unscale_and_clip_grads(*passed, total_norm=torch.tensor(5 * 1024.0))
            self.assert_close([grads[0].flatten()[0], grads[1].flatten()[-1]], [torch.tensor(0.1), torch.tensor(0.2)])
            optimizer.clip_grad = 0.0
            self.assertEqual(optimizer.unscale_and_clip_grads(*passed, total_norm=1.0, apply_scale=False), 1024)

    def test_scale_if_loss_scales_losses(self):
        _, optimizer = self.make(FP16_Optimizer)
        self.assertEqual(optimizer.scale_if_loss(torch.tensor(2.0)).item(), 2048)

    def test_zero_grad_works_with_bucket_views(self):
        """Gradients are views of buckets with DistributedDataParallel(gradient_as_bucket_view=True)."""
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            params, optimizer = self.make(wrapper)
            bucket = torch.ones(26, dtype=torch.float16)
            params[0].grad, params[1].grad = bucket[:21].view(7, 3), bucket[21:]
            optimizer.zero_grad(set_to_none=False)
            self.assertEqual(bucket.sum().item(), 0)

    def test_hysteresis_delays_the_decrease(self):
        params, optimizer = self.make(FP16_Optimizer, dynamic_loss_args={"init_scale": 64.0, "delayed_shift": 2})
        self.step(params, optimizer, bad=True)
        self.assertEqual(optimizer.cur_scale, 64)
        self.step(params, optimizer, bad=True)
        self.assertEqual(optimizer.cur_scale, 32)

    def test_schedulers_accept_the_inner_optimizer(self):
        params, optimizer = self.make(FP16_Optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1, gamma=0.5)
        self.step(params, optimizer)
        scheduler.step()
        self.assertEqual(optimizer.get_lr(), 0.005)
        optimizer.set_lr(0.5)
        self.assertEqual(optimizer.param_groups[0]["lr"], 0.5)


if __name__ == "__main__":
    main()
