# SPDX-License-Identifier: Apache-2.0
"""register(): deepspeed.initialize creates the 1-bit optimizers by the names in its configuration."""
import functools
import shutil
import sys
import tempfile
import unittest
import warnings
from unittest import mock

import originals
from support import TestCase, child, main, run_ranks, torch

import dsopt
from dsopt.torch import (FP16_Optimizer, FP16_UnfusedOptimizer, OnebitAdam, OnebitLamb, ZeroOneAdam, register,
                         unregister)

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
NAMES = {"OneBitAdam": (OnebitAdam, FP16_Optimizer, {"freeze_step": 4}),
         "ZeroOneAdam": (ZeroOneAdam, FP16_Optimizer, {"var_freeze_step": 4}),
         "OneBitLamb": (OnebitLamb, FP16_UnfusedOptimizer, {"freeze_step": 4})}
METHODS = ("_configure_basic_optimizer", "_do_optimizer_sanity_check", "_configure_fp16_optimizer", "backward")
check = unittest.TestCase()


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def batch(i, rank):
    generator = torch.Generator().manual_seed(1000 * i + rank)
    x = torch.randn(64, 16, generator=generator)
    return x, x[:, :1] + x[:, 1:2]


def initialize(name=None, client=None, stage=0, **more):
    import deepspeed
    model = model_of()
    config = {"train_micro_batch_size_per_gpu": 64, "steps_per_print": 10**9, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": stage}}
    if name:
        params = {"lr": 3e-3, **NAMES[name][2], **more.pop("params", {})}
        config["optimizer"] = {"type": name, "params": params}
    passed = {} if client is None else {"optimizer": client(model.parameters())}
    return deepspeed.initialize(model=model, model_parameters=None if client else model.parameters(), **passed,
                                config={**config, **more})[0]


def loss_of(engine, i, rank):
    dtype = next(engine.module.parameters()).dtype
    x, y = batch(i, rank)
    return ((engine(x.to(dtype)).float() - y) ** 2).mean()


class Sent:
    """Counts elements of float tensors that torch.distributed sends, and bytes of all others."""

    def __init__(self):
        self.floats, self.bytes = 0, 0
        self.patches = [mock.patch.object(torch.distributed, name, self.counted(getattr(torch.distributed, name)))
                        for name in ("all_reduce", "isend")]

    def counted(self, function):
        def call(tensor, *args, **more):
            if tensor.is_floating_point():
                self.floats += tensor.numel()
            else:
                self.bytes += tensor.numel()
            return function(tensor, *args, **more)
        return call

    def __enter__(self):
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


def trained(engine, rank, steps, begin=0):
    losses = []
    for i in range(begin, begin + steps):
        loss = loss_of(engine, i, rank)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trains_through_the_freeze(rank):
    """The weights equal those of the class without an engine, and after the freeze 1-bit messages are sent."""
    freeze = 12
    engine = initialize("OneBitAdam", params={"lr": 2e-3, "freeze_step": freeze})
    check.assertIs(type(engine.optimizer), OnebitAdam)
    check.assertIs(engine.optimizer.deepspeed, engine)
    model = model_of()
    optimizer = OnebitAdam(model.parameters(), lr=2e-3, freeze_step=freeze)
    elements = sum(param.numel() for param in model.parameters())
    losses = []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*averaged before the step.*")
        for i in range(36):
            check.assertEqual(engine.enable_backward_allreduce, i < freeze, i)
            with Sent() as sent:
                losses += trained(engine, rank, 1, i)
            # 1 bit per element in 2 messages of half the elements each, scales and padding.
            if i > freeze:
                check.assertLess(sent.floats, 32)
                check.assertTrue(0 < sent.bytes < elements, sent.bytes)
            else:
                check.assertGreaterEqual(sent.floats, elements if i < freeze else 0)
            if i < freeze + 2:  # later rounding may have flipped signs
                x, y = batch(i, rank)
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()
                for param, other in zip(engine.module.parameters(), model.parameters()):
                    torch.testing.assert_close(param.detach(), other.detach(), rtol=1e-5, atol=1e-5)
    check.assertLess(sum(losses[-5:]), 0.5 * sum(losses[:5]))


def names_make_the_classes(rank):
    for name, (kind, wrapper, options) in NAMES.items():
        for dtype in (None, "fp16", "bf16"):
            more = {dtype: {"enabled": True}} if dtype else {}
            engine = initialize(name, params={"betas": [0.8, 0.99]}, **more)
            inner = engine.optimizer if dtype is None else engine.optimizer.optimizer
            check.assertIs(type(inner), kind, name)
            check.assertIs(inner.deepspeed, engine)
            check.assertEqual(list(inner.param_groups[0]["betas"]), [0.8, 0.99])
            for key, value in options.items():
                check.assertEqual(getattr(inner, key), value)
            if dtype:
                check.assertIs(type(engine.optimizer), wrapper)
                check.assertEqual(engine.optimizer.low_precision_dtype,
                                  {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
            losses = trained(engine, rank, 12)
            check.assertLess(losses[-1], losses[0], (name, dtype))


def options_of_the_configuration_arrive(rank):
    for name, first in (("OneBitAdam", 2.**10), ("OneBitLamb", 2.**10)):
        engine = initialize(name, gradient_clipping=0.5, params={"compat": "deepspeed"},
                            fp16={"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3,
                                  "hysteresis": 1, "min_loss_scale": 2})
        wrapper, config = engine.optimizer, engine.optimizer.loss_scale_config
        check.assertEqual((wrapper.clip_grad, config.cur_scale, config.scale_window, config.min_loss_scale),
                          (0.5, first, 3, 2))
        check.assertIs(wrapper.deepspeed, engine)
        check.assertEqual(wrapper.optimizer._compat, "deepspeed")
    engine = initialize("OneBitAdam", fp16={"enabled": True, "loss_scale": 64})
    check.assertIs(engine.optimizer.dynamic_loss_scale, False)
    check.assertEqual(engine.optimizer.loss_scale, 64)


def the_loss_is_scaled(rank):
    """The gradients have the loss scale by which the step divides, also with gradient accumulation."""
    for steps in (1, 2):
        engine = initialize("OneBitAdam", gradient_accumulation_steps=steps,
                            fp16={"enabled": True, "loss_scale": 128})
        model = model_of().half()
        for _ in range(2):
            for i in range(steps):
                loss = loss_of(engine, i, rank)
                x, y = batch(i, rank)
                same = ((model(x.half()).float() - y) ** 2).mean() * 128
                expected = torch.autograd.grad(same, list(model.parameters()))
                before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in engine.module.parameters()]
                engine.enable_backward_allreduce = False
                returned = engine.backward(loss)
                torch.testing.assert_close(returned.detach(), loss.detach() / steps)
                for param, grad, was in zip(engine.module.parameters(), expected, before):
                    torch.testing.assert_close(param.grad.float(), was.float() + grad.float() / steps,
                                               rtol=4e-3, atol=4e-3)
            for param in engine.module.parameters():
                param.grad = None


def a_loss_that_is_scaled_already_is_not_scaled_again(rank):
    from dsopt.torch import _register
    engine = initialize("OneBitAdam", fp16={"enabled": True, "loss_scale": 128})
    scales = _register._backward(lambda self, loss, *args, **more: (loss * 128).backward())
    param = engine.module[0].weight
    for _ in range(2):
        param.grad = None
        scales(engine, param.float().sum())
        check.assertEqual(float(param.grad.max()), 128)


def the_gradient_of_the_loss_tells_whether_it_is_scaled(rank):
    """Engines divide by the number of micro-batches before the loss or, as DeepSpeed did before the release of 0.19.6,
    in a
    hook on the output of the module. The gradient of a loss computed from that output does not show the latter."""
    from dsopt.torch import _register
    engine = initialize("OneBitAdam", gradient_accumulation_steps=2, fp16={"enabled": True, "loss_scale": 128})
    param = engine.module[0].weight
    for factor, expected in ((1, 128), (1 / 2, 64), (128, 128), (64, 64)):
        engine.__dict__.pop("_dsopt_scales", None)
        backward = _register._backward(lambda self, loss, factor=factor: (loss * factor).backward())
        for _ in range(2):
            param.grad = None
            backward(engine, param.float().sum())
            check.assertEqual(float(param.grad.max()), expected, factor)
        check.assertIs(engine._dsopt_scales, factor > 1)


def client_optimizers_have_the_wrapper(rank):
    engine = initialize(client=lambda params: OnebitAdam(params, lr=3e-3, freeze_step=4), fp16={"enabled": True})
    check.assertIs(type(engine.optimizer), FP16_Optimizer)
    engine = initialize(client=lambda params: torch.optim.SGD(params, lr=0.1), fp16={"enabled": True})
    check.assertEqual(type(engine.optimizer).__module__, "deepspeed.runtime.fp16.unfused_optimizer")
    check.assertIs(type(initialize(client=lambda params: torch.optim.SGD(params, lr=0.1)).optimizer), torch.optim.SGD)


def zero_and_max_grad_norm_are_refused(rank):
    for stage in (1, 2, 3):
        for name, (kind, _, options) in NAMES.items():
            with check.assertRaisesRegex(AssertionError, "%s: ZeRO stage %d is not supported.*\"stage\" of" %
                                         (name, stage)):
                initialize(name, stage=stage)
            with check.assertRaisesRegex(dsopt.UnsupportedError, "%s: ZeRO stage %d is not supported" %
                                         (kind.__name__, stage)):
                initialize(client=lambda params: kind(params, lr=1e-3, **options), stage=stage)
    for name in NAMES:
        with check.assertRaisesRegex(ValueError, "%s: 'max_grad_norm' is not supported.*gradient_clipping" % name):
            initialize(name, params={"max_grad_norm": 1.0})
    with check.assertRaisesRegex(TypeError, "nonsense"):
        initialize("OneBitAdam", params={"nonsense": 1})


def checkpoints_of_the_engine_resume(rank):
    for more in ({}, {"fp16": {"enabled": True, "initial_scale_power": 8}}):
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        torch.distributed.broadcast_object_list(folder)
        engine = initialize("OneBitAdam", **more)
        trained(engine, rank, 8)
        engine.save_checkpoint(folder[0])
        other = initialize("OneBitAdam", **more)
        other.load_checkpoint(folder[0])
        check.assertIs(other.enable_backward_allreduce, False)
        check.assertEqual(other.optimizer.state_dict().keys(), engine.optimizer.state_dict().keys())
        for param, same in zip(engine.module.parameters(), other.module.parameters()):
            check.assertTrue(torch.equal(param, same))
        trained(other, rank, 4, 8)
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])


def checkpoints_of_the_originals_load(rank):
    """An engine with DeepSpeed's own OnebitAdam saves, and one with register() resumes from there."""
    if sys.argv[2] != originals.VERSION:
        return
    for more in ({}, {"fp16": {"enabled": True, "initial_scale_power": 8}}):
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        torch.distributed.broadcast_object_list(folder)
        unregister()
        engine = initialize("OneBitAdam", params={"comm_backend_name": "compressed"}, **more)
        register()
        basic = engine.optimizer.optimizer if more else engine.optimizer
        check.assertEqual(type(basic).__module__, "deepspeed.runtime.fp16.onebit.adam")
        trained(engine, rank, 8)
        engine.save_checkpoint(folder[0])
        other = initialize("OneBitAdam", **more)
        other.load_checkpoint(folder[0])
        inner = other.optimizer.optimizer if more else other.optimizer
        check.assertIs(type(inner), OnebitAdam)
        check.assertEqual(inner.next_reduction(), "compressed")
        check.assertIs(other.enable_backward_allreduce, False)
        for name in ("exp_avg", "exp_avg_sq"):
            ours, theirs = [torch.cat([state[name].reshape(-1) for state in optimizer.state.values()])
                            for optimizer in (inner, basic)]
            check.assertTrue(torch.equal(ours, theirs), name)
        for param, same in zip(engine.module.parameters(), other.module.parameters()):
            check.assertTrue(torch.equal(param, same))
        trained(other, rank, 4, 8)
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder[0])


def bf16_optimizer_is_refused(rank):
    """DeepSpeed uses it for bfloat16 with pipeline parallelism."""
    from dsopt.torch import _register
    engine = initialize("OneBitAdam")
    with check.assertRaisesRegex(dsopt.UnsupportedError, "OnebitAdam: the BF16_Optimizer of DeepSpeed is not supp"):
        _register._check(lambda self, optimizer: "bf16")(engine, engine.optimizer)


def twice_and_back(rank):
    """Everything is restored, even if register() was called twice."""
    from deepspeed.runtime import config
    from deepspeed.runtime.engine import DeepSpeedEngine
    unregister()
    before, names = [getattr(DeepSpeedEngine, name) for name in METHODS], list(config.DEEPSPEED_OPTIMIZERS)
    unregister()
    register()
    once = [getattr(DeepSpeedEngine, name) for name in METHODS]
    register()
    check.assertEqual([getattr(DeepSpeedEngine, name) for name in METHODS], once)
    check.assertEqual(len(config.DEEPSPEED_OPTIMIZERS), len(set(config.DEEPSPEED_OPTIMIZERS)))
    for name in NAMES:
        check.assertIn(name.lower(), config.DEEPSPEED_OPTIMIZERS)
    with mock.patch.object(DeepSpeedEngine, "backward", lambda self, loss: None):
        with check.assertRaisesRegex(dsopt.StateError, "DeepSpeedEngine.backward has been replaced since register"):
            unregister()
    check.assertEqual([getattr(DeepSpeedEngine, name) for name in METHODS], once)
    unregister()
    check.assertEqual([getattr(DeepSpeedEngine, name) for name in METHODS], before)
    check.assertEqual(config.DEEPSPEED_OPTIMIZERS, names)
    register()


def what_a_deepspeed_lacks_is_refused_by_name(rank):
    from deepspeed.runtime import config
    from deepspeed.runtime.engine import DeepSpeedEngine
    unregister()
    for name in METHODS:
        with mock.patch.object(DeepSpeedEngine, name, None):
            with check.assertRaisesRegex(dsopt.UnsupportedError, r"register: DeepSpeed [\d.]+ does not have "
                                         "DeepSpeedEngine.%s; pass an optimizer" % name):
                register()
    with mock.patch.object(config, "DEEPSPEED_OPTIMIZERS", []):
        with check.assertRaisesRegex(dsopt.UnsupportedError, "DEEPSPEED_OPTIMIZERS"):
            register()
    with mock.patch("deepspeed.runtime.fp16.loss_scaler.LossScaleConfig", create=True):
        del sys.modules["deepspeed.runtime.fp16.loss_scaler"].LossScaleConfig
        with check.assertRaisesRegex(dsopt.UnsupportedError, "LossScaleConfig"):
            register()
    register()
    initialize("OneBitAdam")


CASES = [trains_through_the_freeze, names_make_the_classes, options_of_the_configuration_arrive, the_loss_is_scaled,
         a_loss_that_is_scaled_already_is_not_scaled_again, the_gradient_of_the_loss_tells_whether_it_is_scaled,
         client_optimizers_have_the_wrapper,
         zero_and_max_grad_norm_are_refused, checkpoints_of_the_engine_resume, checkpoints_of_the_originals_load,
         bf16_optimizer_is_refused, twice_and_back,
         what_a_deepspeed_lacks_is_refused_by_name]


@unittest.skipUnless(GLOO, "torch is built without gloo")
class Engines(TestCase):
    @originals.needed
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, originals.VERSION)

    @originals.newer_needed
    def test_cases_pass_with_a_version_without_the_optimizers(self):
        run_ranks(self, __file__, originals.NEWER, environment=originals.newer())


class WithoutDeepSpeed(TestCase):
    def test_rejects_missing_deepspeed(self):
        with mock.patch.dict(sys.modules, {"deepspeed": None, "deepspeed.runtime": None}):
            with self.assertRaisesRegex(dsopt.MissingError, "register: DeepSpeed cannot be imported"):
                register()
        unregister()


def prepare():
    originals.load()
    from deepspeed.accelerator import get_accelerator
    import deepspeed
    check.assertEqual(deepspeed.__version__.split("+")[0], sys.argv[2])
    type(get_accelerator()).is_fp16_supported = lambda self: True  # not every processor supports it
    register()


def started(case):
    @functools.wraps(case)
    def call(rank):
        prepare()
        case(rank)
    return call


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child([started(case) for case in CASES], int(sys.argv[3]), sys.argv[4])
    else:
        main()
