# SPDX-License-Identifier: Apache-2.0
"""FP16_Optimizer and FP16_UnfusedOptimizer compared with those of DeepSpeed."""
import inspect
import math
import sys
import unittest

import originals
from support import TestCase, child, main, params_of, run_ranks, torch
from test_wrapper_arguments import ATTRIBUTES
from test_wrapper_reports import OVERFLOW, STEP

import dsopt
from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
BOTH = (FP16_Optimizer, FP16_UnfusedOptimizer)
SHAPES = ((7, 3), (5,))
OLDER = {"dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window",
         "min_loss_scale", "_get_norm_with_moe_layers", "step_unfused"}  # absent in 0.19.6
NEWER = {"_skip_invalid_grad_norm"}  # in 0.19.8 the end of step()
check = unittest.TestCase()


def pair(wrapper, dtype=torch.float16, base=None, **more):
    """Returns parameters and the wrapper of dsopt.torch in compat mode, and the same with DeepSpeed's."""
    original = getattr(originals.load(), wrapper.__name__)
    params, others = [params_of(*SHAPES, dtype=dtype) for _ in range(2)]
    adam = FusedAdam(params, lr=0.01, adam_w_mode=False, compat="deepspeed")
    return ((params, wrapper(adam, low_precision_dtype=dtype, **more)),
            (others, original(torch.optim.Adam(others, lr=0.01), low_precision_dtype=dtype, **more)))


def dynamic():
    return {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.**10, "scale_window": 3, "min_scale": 1.}}


def step(params, optimizer, i, bad=False):
    generator = torch.Generator().manual_seed(i)
    loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params)
    optimizer.zero_grad()
    optimizer.backward(loss * (math.inf if bad else 1))
    return bool(optimizer.step())


def flat(tensors):
    return torch.cat([t.detach().float().reshape(-1) for t in tensors])


def moments(wrapper, optimizer):
    states = list(optimizer.optimizer.state.values())
    return flat([state["exp_avg"] for state in states])


def override_is_for_the_backward_pass_alone(rank):
    """In steps 3 to 7 gradients have the scale 64 and are divided by the scaler's scale, which continues as before."""
    for wrapper in BOTH:
        ours, theirs = pair(wrapper, **dynamic())
        for i in range(12):
            if i == 3:
                ours[1].override_loss_scale(64.)
                theirs[1].override_loss_scale(64.)
            bad = i in (5, 9)
            assert step(*ours, i, bad) == step(*theirs, i, bad) == bad, i
            assert ours[1].cur_scale == theirs[1].loss_scale_config.cur_scale, i
            assert ours[1].loss_scale == theirs[1].loss_scale, i
            assert (ours[1].custom_loss_scaler, ours[1].external_loss_scale) == (
                theirs[1].custom_loss_scaler, theirs[1].external_loss_scale)
            torch.testing.assert_close(moments(wrapper, ours[1]), moments(wrapper, theirs[1]), rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(flat(ours[0]), flat(theirs[0]), rtol=1e-3, atol=1e-3)
    assert ours[1].cur_scale != 2.**10


def graph_is_freed_with_an_override(rank):
    """The original ignores retain_graph in that case; dsopt.torch does not (docs/compat.md)."""
    for wrapper in BOTH:
        for (params, optimizer), kept in zip(pair(wrapper), (True, False)):
            optimizer.override_loss_scale(4.)
            loss = (params[0].float() ** 2).sum()
            optimizer.backward(loss, retain_graph=True)
            try:
                optimizer.backward(loss)
                assert kept
            except RuntimeError as problem:
                assert not kept and "second time" in str(problem), problem


def scale_and_keys_without_gradient_scaling(rank):
    scaler = {"dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"}
    for wrapper in BOTH:
        for dtype, more in ((torch.bfloat16, {}), (torch.float16, {"static_loss_scale": 8.}),
                            (torch.float16, dynamic())):
            ours, theirs = pair(wrapper, dtype, **more)
            step(*ours, 0)
            step(*theirs, 0)
            assert ours[1].loss_scale == theirs[1].loss_scale
            assert set(ours[1].state_dict()) & scaler == set(theirs[1].state_dict()) & scaler, (wrapper, dtype)


def attributes_and_arguments(rank):
    """The lists of test_wrapper_arguments are complete for the originals."""
    for wrapper in BOTH:
        _, (_, original) = pair(wrapper, **dynamic())
        names = {name for name in list(vars(original)) + list(vars(type(original))) if not name.startswith("__")}
        check.assertEqual(set(ATTRIBUTES[wrapper]) - OLDER, names - NEWER)
        theirs = inspect.signature(type(original)).parameters
        check.assertEqual(list(inspect.signature(wrapper).parameters)[:len(theirs)], list(theirs))


def closures_are_ignored(rank):
    for wrapper in BOTH:
        _, (params, original) = pair(wrapper)
        for p in params:
            p.grad = torch.ones_like(p)
        original.step(lambda: check.fail("the closure was called"))


def one_float32_parameter_makes_all_float32(rank):
    """FP16_Optimizer of dsopt.torch raises an error in that case."""
    original = originals.load().FP16_Optimizer
    params = params_of((3,), dtype=torch.float16) + params_of((2,))
    original(torch.optim.Adam(params))
    assert [p.dtype for p in params] == [torch.float32] * 2


def timers_get_the_phases(rank):
    originals.load()
    from deepspeed.utils.timer import NoopTimer, SynchronizedWallClockTimer
    (params, optimizer), _ = pair(FP16_Optimizer, **dynamic())
    timers = SynchronizedWallClockTimer()
    optimizer.timers = timers
    logged = []
    timers.log = lambda names, **more: logged.append({name: timers(name).elapsed(reset=True) for name in names})
    for i in range(3):
        step(params, optimizer, i, bad=i == 1)
    assert [sorted(log) for log in logged] == [sorted(STEP), sorted(OVERFLOW), sorted(STEP)]
    assert logged[0]["basic_step"] > 0 and logged[0]["update_fp16"] == 0
    for i in range(3):
        step(params, optimizer, i)
    del timers.log
    optimizer.timers = timers
    step(params, optimizer, 4)  # prints
    optimizer.timers = NoopTimer()
    step(params, optimizer, 5)


def norm_of_a_skipped_step(rank):
    """The original keeps the norm of the previous step; dsopt.torch has the norm of the gradients (docs/compat.md)."""
    for wrapper in BOTH:
        for dtype in (torch.float16, torch.bfloat16):
            ours, theirs = pair(wrapper, dtype, clip_grad=1.0, **(dynamic() if dtype == torch.float16 else {}))
            for i in range(3):
                before = float(theirs[1]._global_grad_norm)
                skipped = step(*theirs, i, bad=i == 2)
                assert step(*ours, i, bad=i == 2) == skipped
                if i < 2:
                    check.assertAlmostEqual(ours[1]._global_grad_norm / float(theirs[1]._global_grad_norm), 1, 4)
                elif dtype == torch.float16:
                    assert skipped and before == float(theirs[1]._global_grad_norm)
                    scale = ours[1].cur_scale if wrapper is FP16_Optimizer else 1.0  # halved by the step
                    check.assertEqual(ours[1]._global_grad_norm, 1 / scale)


def norms_of_lists(rank):
    """Compares the functions of deepspeed.runtime.utils with their replacements in README.md."""
    originals.load()
    from deepspeed.runtime.utils import get_global_norm, get_weight_norm
    lists = [[p.detach() for p in params_of(*SHAPES, seed=seed)] for seed in range(2)]
    for kind, norm_type in (("l2", 2), ("max", math.inf)):
        for tensors in lists:
            check.assertAlmostEqual(dsopt.norm(tensors, kind=kind).norm, get_weight_norm(tensors, norm_type), 5)
    norms = [get_weight_norm(tensors) for tensors in lists]
    check.assertAlmostEqual(dsopt.norm(lists[0] + lists[1]).norm, get_global_norm(norms), 5)
    check.assertAlmostEqual(math.hypot(*norms), get_global_norm(norms), 5)
    for bad in (math.inf, math.nan):
        lists[0][0][1] = bad
        check.assertEqual((get_weight_norm(lists[0]), get_weight_norm(lists[1]) > 0), (-1, True))
        found = dsopt.norm(lists[0])
        check.assertEqual(found.nonfinite, SHAPES[0][1])
        check.assertFalse(math.isfinite(found.norm))


CASES = (override_is_for_the_backward_pass_alone, graph_is_freed_with_an_override,
         scale_and_keys_without_gradient_scaling, attributes_and_arguments, closures_are_ignored,
         one_float32_parameter_makes_all_float32, timers_get_the_phases, norm_of_a_skipped_step, norms_of_lists)

# 0.19.8 skips a step with Inf or NaN also without a loss scale, and then has an infinite norm.
NEWER_CASES = tuple(case for case in CASES if case is not norm_of_a_skipped_step)


@unittest.skipUnless(GLOO, "torch is built without gloo")
class OriginalWrappers(TestCase):
    @originals.needed
    def test_matches_deepspeed(self):
        run_ranks(self, __file__, "all", ranks=1)

    @originals.newer_needed
    def test_matches_the_newer_version(self):
        run_ranks(self, __file__, "newer", ranks=1, environment=originals.newer())


if __name__ == "__main__":
    if "--child" in sys.argv:
        rank, file = int(sys.argv[3]), sys.argv[4]
        child(CASES if sys.argv[2] == "all" else NEWER_CASES, rank, file, ranks=1)
    else:
        main()
