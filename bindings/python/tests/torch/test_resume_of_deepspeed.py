# SPDX-License-Identifier: Apache-2.0
"""Runs that DeepSpeed 0.19.6, the last version with the 1-bit optimizers, starts and dsopt.torch resumes, compared with
DeepSpeed's own resumed run. Skipped if that version is not installed."""
import contextlib
import copy
import io
import sys
import unittest

import originals
from support import TestCase, child, main, run_ranks, torch

import dsopt.torch

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
SHAPES = ((7, 3), (5,), (33,))
KINDS = {"OnebitAdam": ("freeze_step", "FP16_Optimizer"), "ZeroOneAdam": ("var_freeze_step", "FP16_Optimizer"),
         "OnebitLamb": ("freeze_step", "FP16_UnfusedOptimizer")}
SCALE = dict(init_scale=256.0, scale_window=4, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False)


class Run:
    """An optimizer of `classes` with its parameters on one rank. The caller averages gradients if the flag is set."""

    def __init__(self, classes, name, wrapped, freeze_step, rank, **options):
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float16 if wrapped else torch.float32
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        self.engine, self.rank, self.count = originals.Engine(), rank, 0
        freeze, wrapper = KINDS[name]
        self.inner = self.optimizer = getattr(classes, name)(self.params, self.engine, lr=0.01, **{freeze: freeze_step},
                                                             comm_backend_name="compressed", **options)
        if wrapped:
            self.optimizer = getattr(classes, wrapper)(self.inner, dynamic_loss_scale=True, dynamic_loss_args=SCALE,
                                                       clip_grad=1.0, verbose=False)

    def step(self, scale):
        self.count += 1
        generator = torch.Generator().manual_seed(100 * self.count + self.rank)
        for param in self.params:
            grad = torch.randn(param.shape, generator=generator) * scale
            if self.engine.enable_backward_allreduce:
                torch.distributed.all_reduce(grad)
                grad /= 2
            param.grad = grad.to(param.dtype)
        self.optimizer.step()

    def steps(self, count):
        for _ in range(count):
            self.step(self.optimizer.loss_scale if self.optimizer is not self.inner else 1)


def continued(rank, classes, name, wrapped, freeze_step, steps):
    """Resumes three runs from rank 0's checkpoint: DeepSpeed's, ours in compat mode, and ours in standard mode."""
    ours = dsopt.torch
    run = Run(classes, name, wrapped, freeze_step, rank)
    run.steps(steps)
    saved = [copy.deepcopy(run.optimizer.state_dict()), [param.detach() for param in run.params]]
    torch.distributed.broadcast_object_list(saved)
    frozen = steps + wrapped > freeze_step
    weights = []
    for which, options in ((classes, {}), (ours, {"compat": "deepspeed"}), (ours, {"compat": None})):
        again = Run(which, name, wrapped, freeze_step, rank, **options)
        if which is classes and not wrapped:
            for param in again.params:  # the first call of the original has no effect, also after a load
                param.grad = torch.zeros_like(param)
            again.optimizer.step()
        again.count = run.count
        for param, value in zip(again.params, saved[1]):
            param.data.copy_(value)
        again.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        flag = again.engine.enable_backward_allreduce
        # After its load the original's 0/1 Adam adapts the variance without requesting averaged gradients.
        again.engine.enable_backward_allreduce |= which is classes and name == "ZeroOneAdam"
        if which is ours:
            forgets = name == "ZeroOneAdam" and options["compat"]
            assert again.inner.frozen == (frozen and not forgets), (name, options)
            assert flag == (again.inner.next_reduction() == "full"), (name, options)
        again.steps(6)
        weights.append(torch.cat([param.detach().float().reshape(-1) for param in again.params]))
        if options.get("compat", "") is None and name != "ZeroOneAdam":
            both = [torch.empty_like(weights[-1]) for _ in range(2)]
            torch.distributed.all_gather(both, weights[-1])
            assert torch.equal(*both), name
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-5, msg=lambda text: "%s: %s" % (name, text))
    if not frozen:
        torch.testing.assert_close(weights[2], weights[0], rtol=1e-5, atol=1e-5)


def runs_resume(rank):
    with contextlib.redirect_stdout(io.StringIO()):  # the originals print
        classes = originals.load()
        for name in KINDS:
            for wrapped in (False, True):
                for freeze_step, steps in ((100, 6), (4, 12)):
                    continued(rank, classes, name, wrapped, freeze_step, steps)


@originals.needed
@unittest.skipUnless(GLOO, "torch is built without gloo")
class TwoProcesses(TestCase):
    def test_resumes_runs_of_deepspeed(self):
        run_ranks(self, __file__, "all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child([runs_resume], int(sys.argv[3]), sys.argv[4])
    else:
        main()
