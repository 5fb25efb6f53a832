# SPDX-License-Identifier: Apache-2.0
"""Stage, engine's flag and loss scale after a load."""
import copy
import functools
import math
import pickle
import sys
import unittest

from support import TestCase, child, give_grads, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import (SGD, Adagrad, FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, OnebitAdam, OnebitLamb,
                         ZeroOneAdam)

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
SHAPES = ((7, 3), (5,), (40,))
FAMILY = ((OnebitAdam, "freeze_step"), (ZeroOneAdam, "var_freeze_step"), (OnebitLamb, "freeze_step"))
FLAGS = ("enable_backward_allreduce", "pipeline_enable_backward_allreduce")


class Engine:
    """DeepSpeed's engine or, with `pipeline`, that of its pipelines, which does not average in backward."""

    def __init__(self, pipeline=False, value=True):
        self.flag = FLAGS[pipeline]
        if pipeline:
            self.enable_backward_allreduce = False
        setattr(self, self.flag, value)

    @property
    def averages(self):
        return getattr(self, self.flag)


class Run:
    """An optimizer whose engine averages gradients while the flag is set."""

    def __init__(self, kind, freeze, rank=0, ranks=1, pipeline=False, **options):
        self.kind, self.freeze, self.rank, self.ranks = kind, freeze, rank, ranks
        self.pipeline, self.options, self.count = pipeline, options, 0
        self.params = params_of(*SHAPES)
        self.renew(freeze)

    def renew(self, freeze):
        """Creates a new optimizer with a new engine."""
        self.engine = Engine(self.pipeline)
        self.optimizer = self.kind(self.params, self.engine, lr=0.01, **{dict(FAMILY)[self.kind]: freeze},
                                   **self.options)

    def steps(self, count):
        for _ in range(count):
            self.count += 1
            give_grads(self.params, seed=10 * self.count + self.rank)
            if self.engine.averages and self.ranks > 1:
                for param in self.params:
                    torch.distributed.all_reduce(param.grad)
                    param.grad /= self.ranks
            self.optimizer.step()

    def save(self):
        return copy.deepcopy(self.optimizer.state_dict()), [param.detach().clone() for param in self.params], self.count

    def load(self, saved):
        state, weights, self.count = saved
        self.optimizer.load_state_dict(copy.deepcopy(state))
        for param, value in zip(self.params, weights):
            param.data.copy_(value)

    def variance(self):
        return torch.cat([self.optimizer.state[param]["exp_avg_sq"].reshape(-1) for param in self.params])

    def check_flag(self):
        needs = self.optimizer.next_reduction() == "full"
        assert self.engine.averages == needs, (self.kind, self.options, needs)
        assert self.engine.averages is True or self.engine.averages is False
        if self.pipeline:
            assert self.engine.enable_backward_allreduce is False


def same_everywhere(run):
    flat = torch.cat([param.detach().reshape(-1) for param in run.params] + [run.variance()])
    every = [torch.empty_like(flat) for _ in range(run.ranks)]
    torch.distributed.all_gather(every, flat)
    assert all(torch.equal(every[0], other) for other in every), (every[0] - every[-1]).abs().max()


def rolled_back(rank, ranks, kind, compat, pipeline):
    """A frozen run loads a checkpoint of its warm-up, and repeats its steps."""
    run = Run(kind, 4, rank, ranks, pipeline, compat=compat)
    run.check_flag()
    run.steps(2)
    saved = run.save()
    run.steps(6)
    assert run.optimizer.frozen
    run.check_flag()
    run.load(saved)
    assert not run.optimizer.frozen
    run.check_flag()
    before = run.variance()
    run.steps(1)
    assert not torch.equal(run.variance(), before)
    if ranks > 1:
        same_everywhere(run)
    run.check_flag()


def fresh_engine(rank, ranks, kind, compat, pipeline):
    """A new optimizer with a new engine loads a frozen checkpoint, before or after its first steps."""
    run = Run(kind, 4, rank, ranks, pipeline, compat=compat)
    run.steps(9)
    while run.optimizer.next_reduction() == "local":
        run.steps(1)
    saved = run.save()
    for steps in (0, 2):
        again = Run(kind, 4, rank, ranks, pipeline, compat=compat)
        again.steps(steps)
        again.load(saved)
        assert again.optimizer.frozen == (kind is not ZeroOneAdam or compat is None)
        again.check_flag()
        again.steps(2)
        again.check_flag()
        if ranks > 1 and (kind is not ZeroOneAdam or compat is None):
            same_everywhere(again)


def another_freeze_step(rank, ranks, kind):
    """The stage follows from `step` and from the freeze_step of the optimizer that loads."""
    for first, second in ((3, 100), (100, 3)):
        run = Run(kind, first, rank, ranks)
        run.steps(8)
        while run.optimizer.next_reduction() == "local":
            run.steps(1)
        saved = run.save()
        run.renew(second)
        run.load(saved)
        frozen = second == 3
        assert run.optimizer.frozen == frozen, (kind, first, second)
        key = {OnebitAdam: "adam_freeze_key", ZeroOneAdam: "freeze_key", OnebitLamb: "lamb_freeze_key"}[kind]
        assert getattr(run.optimizer, key) == frozen
        run.check_flag()
        before, weights = run.variance(), [param.detach().clone() for param in run.params]
        run.steps(3)
        assert torch.equal(run.variance(), before) == frozen, (kind, first, second)
        # Every element has a gradient and a variance, so all change.
        assert all(bool((param != old).all()) for param, old in zip(run.params, weights)), (kind, first, second)
        if ranks > 1:
            same_everywhere(run)


CASES = [functools.partial(case, ranks=2, kind=kind, compat=compat, pipeline=pipeline)
         for case in (rolled_back, fresh_engine) for kind, _ in FAMILY for compat in (None, "deepspeed")
         for pipeline in (False, True)]
CASES += [functools.partial(another_freeze_step, ranks=2, kind=kind) for kind, _ in FAMILY]


def frozen_run_of_one_rank(rank):
    """A run of one rank does not save which elements exchanges include: they are derived from the variance."""
    alone = [torch.distributed.new_group([r]) for r in range(2)]
    for kind, freeze in FAMILY:
        params = params_of(*SHAPES)
        first = kind(params, lr=0.01, group=alone[rank], **{freeze: 3})
        for i in range(8):
            give_grads(params, seed=i)
            first.step()
        for name in ("exp_avg", "exp_avg_sq"):
            first.state[params[0]][name][0] = 0  # elements without a gradient
        again = kind(params, lr=0.01, **{freeze: 3})
        again.load_state_dict(first.state_dict())
        before = [param.detach().clone() for param in params]
        for i in range(3):
            give_grads(params, seed=10 * i + rank)
            again.step()
        moved = [(param.detach() != old).tolist() for param, old in zip(params, before)]
        assert moved == [[[False] * 3] + [[True] * 3] * 6, [True] * 5, [True] * 40], (kind, moved)


def bits_are_those_of_the_freeze(rank):
    """After a load they are derived from the variance, in memory order."""
    def make(freeze_step):
        params = params_of((3, 40), (0, ), (5, ), (33, ), ())
        params[0] = torch.nn.Parameter(params[0].detach().t().contiguous().t())
        groups = [{"params": params[:2]}, {"params": params[2:3], "non_freeze": True}, {"params": params[3:]}]
        return params, OnebitAdam(groups, lr=0.01, freeze_step=freeze_step)

    params, optimizer = make(3)
    for i in range(6):
        give_grads(params, seed=10 * i + rank)
        params[0].grad[1, 7:] = 0
        params[3].grad[::2] = 0
        optimizer.step()
    words = optimizer.state[params[0]]["active"].tolist()
    # Tensors begin at multiples of 64 elements, two words. The one of the other group only takes its place.
    assert len(words) == 4 + 2 + 2 + 1 and words[4:6] == [0, 0], words
    assert 0 < sum(bin(word % 2 ** 32).count("1") for word in words) < 154, words
    others, again = make(3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.next_reduction()
    assert again.state[others[0]]["active"].tolist() == words, (again.state[others[0]]["active"].tolist(), words)


def between_exchanges(rank):
    """0/1 Adam: ranks without common weights cannot adapt the variance again."""
    run = Run(ZeroOneAdam, 3, rank, 2, local_step_scaler=2, local_step_clipper=8)
    run.steps(4)
    while not any(bool(state["lr_sum"].any()) for state in run.optimizer.state.values() if "lr_sum" in state):
        run.steps(1)
    saved = run.save()
    other = Run(ZeroOneAdam, 100, rank, 2)
    other.steps(1)
    before = other.save()
    try:
        other.optimizer.load_state_dict(saved[0])
        raise AssertionError("no exception")
    except dsopt.Error as problem:
        assert "var_freeze_step=100" in str(problem) and problem.name == "DSOPT_ERR_MISMATCH", problem
    assert str(other.save()) == str(before)
    other.steps(1)
    same_everywhere(other)


def copies_have_the_process_group(rank):
    """A copy exchanges over the same ranks as its original, and relies on the same engine for averaging."""
    alone = [torch.distributed.new_group([r]) for r in range(2)][rank]

    class Mpu:
        def get_model_parallel_group(self):
            return None

        def get_data_parallel_group(self):
            return alone

    def steps(optimizer):
        params = optimizer.param_groups[0]["params"]
        for i in range(6):
            give_grads(params, seed=10 * i + rank)
            optimizer.step()
        return params

    for kind, freeze in FAMILY:
        options = {"lr": 0.01, freeze: 3}
        engine = Engine()
        for passed in ({"group": alone}, {"group": alone, "deepspeed": engine}):
            optimizer = kind(params_of(*SHAPES), **options, **passed)
            copied = copy.deepcopy(optimizer)
            assert copied.deepspeed is passed.get("deepspeed") and copied.size == 1
            for a, b in zip(steps(copied), steps(optimizer)):
                assert torch.equal(a, b), (kind, passed)
            refused(optimizer, kind.__name__)
        inner = kind(params_of(*SHAPES, dtype=torch.float16), **options)
        wrapper = FP16_Optimizer(inner, mpu=Mpu(), dynamic_loss_scale=True)
        refused(inner, kind.__name__)
        assert copy.deepcopy(inner).size == 1
        del wrapper
        optimizer = kind(params_of(*SHAPES), **options)  # of all ranks
        copied, loaded = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
        assert copied.size == loaded.size == 2
        for a, b, c in zip(steps(copied), steps(loaded), steps(optimizer)):
            assert torch.equal(a, c) and torch.equal(b, c), kind


def refused(optimizer, name):
    try:
        pickle.dumps(optimizer)
    except dsopt.StateError as problem:
        assert name in str(problem) and "state_dict" in str(problem), problem
    else:
        raise AssertionError("no exception")


CASES += [copies_have_the_process_group]
CASES += [frozen_run_of_one_rank, bits_are_those_of_the_freeze, between_exchanges]


class OneRank(TestCase):
    def test_rollback_repeats_the_steps(self):
        for case in (rolled_back, fresh_engine):
            for kind, _ in FAMILY:
                for compat in (None, "deepspeed"):
                    for pipeline in (False, True):
                        case(0, 1, kind, compat, pipeline)

    def test_stage_follows_the_loading_optimizers_freeze_step(self):
        for kind, _ in FAMILY:
            another_freeze_step(0, 1, kind)

    def test_new_optimizer_requests_averaged_gradients(self):
        for kind, _ in FAMILY:
            for pipeline in (False, True):
                engine = Engine(pipeline, value=False)  # as left by a previous optimizer
                kind(params_of(*SHAPES), engine)
                self.assertIs(engine.averages, True)
                self.assertIs(engine.enable_backward_allreduce, not pipeline)

    def test_failed_plan_changes_nothing(self):
        for kind, freeze in FAMILY:
            run = Run(kind, 4)
            run.steps(2)
            before = run.save()
            saved = copy.deepcopy(before[0])
            saved["param_groups"][0]["eps"] = -1.0
            with self.assertRaisesRegex(dsopt.Error, "eps"):
                run.optimizer.load_state_dict(saved)
            self.assertEqual(str(run.save()), str(before))
            run.steps(1)

    def test_state_of_another_class_is_refused(self):
        for compat in (None, "deepspeed"):
            for source, _ in FAMILY:
                for steps in (2, 8):
                    run = Run(source, 4, compat=compat)
                    run.steps(steps)
                    saved = run.save()
                    for kind, _ in FAMILY:
                        other = Run(kind, 4, compat=compat)
                        before = str(other.save())
                        if kind is source:
                            other.load(saved)
                            Run(kind, 4).load(other.save())  # saved between a load and a step
                            continue
                        with self.assertRaisesRegex(dsopt.Error, kind.__name__) as caught:
                            other.optimizer.load_state_dict(copy.deepcopy(saved[0]))
                        self.assertEqual(caught.exception.name, "DSOPT_ERR_MISMATCH")
                        self.assertEqual(str(other.save()), before)
                        other.steps(1)

    def test_copies_use_the_same_engine(self):
        for kind, _ in FAMILY:
            run = Run(kind, 4)
            run.steps(2)
            copied = copy.deepcopy(run.optimizer)
            self.assertIs(copied.deepspeed, run.engine)
            self.assertIsNot(copied.param_groups[0]["params"][0], run.params[0])
            refused(run.optimizer, kind.__name__)

    def test_rejects_groups_without_a_hyper_parameter(self):
        for kind, key in ((OnebitAdam, "bias_correction"), (ZeroOneAdam, "max_grad_norm"), (OnebitLamb, "min_coeff"),
                          (FusedAdam, "bias_correction")):
            params = params_of(*SHAPES)
            optimizer = kind(params, lr=0.01)
            give_grads(params)
            optimizer.step()
            before = str(optimizer.state_dict())
            saved = copy.deepcopy(optimizer.state_dict())
            del saved["param_groups"][0][key]
            with self.assertRaisesRegex(dsopt.Error, r"param_groups\[0\] .* %r.* %s" % (key, kind.__name__)) as caught:
                optimizer.load_state_dict(saved)
            self.assertEqual(caught.exception.name, "DSOPT_ERR_MISMATCH")
            self.assertEqual(str(optimizer.state_dict()), before)
            optimizer.step()

    def test_rejects_a_schedule_of_another_length(self):
        run = Run(OnebitAdam, 4)
        run.steps(2)
        saved = run.save()[0]
        saved["state"][0]["schedule"] = torch.zeros(3, dtype=torch.int32)
        with self.assertRaisesRegex(dsopt.Error, "'schedule' has 3 words"):
            run.optimizer.load_state_dict(saved)


class Scale(TestCase):
    DYNAMIC = dict(dynamic_loss_scale=True, dynamic_loss_args=dict(init_scale=1024.0, scale_window=3, min_scale=256.0))

    def make(self, wrapper=FP16_Optimizer, dtype=torch.float16, compat=None, **options):
        params = params_of((7, 3), (5,), dtype=dtype)
        return params, wrapper(FusedAdam(params, lr=0.01, compat=compat), low_precision_dtype=dtype,
                               **(options or self.DYNAMIC))

    def step(self, run, bad=False):
        params, optimizer = run
        for param in params:
            param.grad = torch.full_like(param, math.inf if bad else optimizer.loss_scale or 1)
        return optimizer.step()

    def scales(self, run, pattern):
        return [(self.step(run, bad == "X"), run[1].cur_scale, run[1].cur_iter, run[1].last_overflow_iter)
                for bad in pattern]

    def test_restores_every_saved_rule(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for compat in (None, "deepspeed"):
                run = self.make(wrapper, compat=compat)
                self.scales(run, "..X..")
                saved = copy.deepcopy(run[1].state_dict())
                low = dict(dynamic_loss_scale=True, dynamic_loss_args=dict(init_scale=2.0))
                for options in ({}, dict(dynamic_loss_scale=True), low):
                    again = self.make(wrapper, compat=compat, **options)
                    again[1].load_state_dict(copy.deepcopy(saved))
                    self.assertEqual((again[1].scale_window, again[1].loss_scale_config.min_loss_scale), (3, 256))
                    other = self.make(wrapper, compat=compat)
                    other[1].load_state_dict(copy.deepcopy(saved))
                    pattern = "..........XXXX....."
                    self.assertEqual(self.scales(again, pattern), self.scales(other, pattern))
                    self.assertEqual(again[1].cur_scale, 512)

    def test_restores_the_factor(self):
        saved = self.make()[1].state_dict()
        saved.update(scale_factor=8.0, scale_window=1)
        run = self.make()
        run[1].load_state_dict(saved)
        self.assertEqual([scale for _, scale, _, _ in self.scales(run, "..")], [1024, 8192])
        self.assertEqual(run[1].scale_factor, 8)

    def test_loads_without_optimizer_states(self):
        run = self.make()
        self.scales(run, "..X....")
        saved = copy.deepcopy(run[1].state_dict())
        del saved["optimizer_state_dict"]
        again = self.make(**dict(dynamic_loss_scale=True))
        again[1].load_state_dict(saved, load_optimizer_states=False)
        self.assertEqual((again[1].cur_scale, again[1].cur_iter, again[1].scale_window), (run[1].cur_scale, 7, 3))
        self.assert_same(again[1].masters()[0], run[1].masters()[0])

    def test_restores_the_remaining_hysteresis(self):
        options = dict(dynamic_loss_scale=True, dynamic_loss_args=dict(init_scale=64.0, delayed_shift=3))
        run = self.make(**options)
        self.scales(run, "X.X")
        saved = copy.deepcopy(run[1].state_dict())
        self.assertEqual(saved["cur_hysteresis"], 1)
        for states in (True, False):
            again = self.make(**options)
            again[1].load_state_dict(copy.deepcopy(saved), load_optimizer_states=states)
            self.assertEqual([scale for _, scale, _, _ in self.scales(again, "XX")], [32, 16])
        del saved["cur_hysteresis"]  # as the original saves it
        again = self.make(**options)
        again[1].load_state_dict(saved)
        self.assertEqual([scale for _, scale, _, _ in self.scales(again, "XXX")], [64, 64, 32])

    def test_load_keeps_an_override(self):
        run = self.make()
        self.scales(run, "..X")
        for states in (True, False):
            again = self.make()
            again[1].override_loss_scale(4.0)
            again[1].load_state_dict(copy.deepcopy(run[1].state_dict()), load_optimizer_states=states)
            self.assertEqual((again[1].loss_scale, again[1].custom_loss_scaler, again[1].cur_scale), (4, True, 512))
            again[1].override_loss_scale(None)
            self.assertEqual((again[1].loss_scale, again[1].cur_iter), (512, 3))

    def test_override_is_not_saved(self):
        run = self.make()
        run[1].override_loss_scale(4.0)
        again = self.make()
        again[1].load_state_dict(copy.deepcopy(run[1].state_dict()))
        self.assertEqual((again[1].loss_scale, again[1].custom_loss_scaler), (1024, False))

    def test_rejects_static_state_for_dynamic_scale_and_vice_versa(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            static, dynamic = self.make(wrapper, static_loss_scale=8.0), self.make(wrapper)
            for (_, source), (params, target), say in ((static, dynamic, "False"), (dynamic, static, "True")):
                self.step((params, target))
                saved, before = copy.deepcopy(source.state_dict()), copy.deepcopy(target.state_dict())
                saved[target._masters_key] = [torch.zeros(26)] if wrapper is FP16_Optimizer else [[
                    torch.zeros(7, 3), torch.zeros(5)]]
                with self.assertRaisesRegex(dsopt.Error, "dynamic_loss_scale=" + say) as caught:
                    target.load_state_dict(saved)
                self.assertEqual(caught.exception.name, "DSOPT_ERR_MISMATCH")
                self.assertEqual(str(target.state_dict()), str(before))

    def test_restores_a_static_scale(self):
        _, source = self.make(static_loss_scale=8.0)
        source.loss_scale = 32.0
        saved = copy.deepcopy(source.state_dict())
        for key in ("last_overflow_iter", "scale_factor", "scale_window"):  # keys that the original does not save
            saved.pop(key, None)
        _, target = self.make(static_loss_scale=8.0)
        target.load_state_dict(saved)
        self.assertEqual(target.loss_scale, 32)

    def test_bfloat16_loads_no_scale(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for dtype in (torch.bfloat16, torch.float32):
                run = self.make(wrapper, dtype)
                self.step(run)
                saved = copy.deepcopy(run[1].state_dict())
                for key in ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor",
                            "scale_window"):
                    saved.pop(key, None)
                again = self.make(wrapper, dtype)
                again[1].load_state_dict(saved)
                self.assertEqual(again[1].optimizer.state[again[0][0]]["step"].item(), 1)
                target = self.make(wrapper)
                with self.assertRaisesRegex(dsopt.Error, "no 'cur_scale'|fp32_groups"):
                    target[1].load_state_dict(saved)

    def test_load_of_the_inner_optimizer_keeps_scale_and_masters(self):
        params, optimizer = run = self.make()
        self.scales(run, "..X")
        masters = [master.clone() for master in optimizer.masters()[0]]
        state = optimizer.state_dict()["optimizer_state_dict"]
        for of in state["state"].values():
            of.pop("scaler", None)
            of.pop("loss_scale", None)
        optimizer.optimizer.load_state_dict(copy.deepcopy(state))
        self.assertEqual((optimizer.cur_scale, optimizer.loss_scale, optimizer.cur_iter), (512, 512, 3))
        self.assert_same(optimizer.masters()[0], masters)
        self.assertFalse(self.step(run))

    def test_rejects_masters_that_are_no_tensors(self):
        for wrapper, bad in ((FP16_Optimizer, (None, 3, {}, [None], [[torch.zeros(26)]])),
                             (FP16_UnfusedOptimizer, (None, 3, [None], [torch.zeros(26)], [[None, None]]))):
            for dtype in (torch.float16, torch.bfloat16):
                run = params, optimizer = self.make(wrapper, dtype)
                self.step(run)
                before = str(optimizer.state_dict())
                key = optimizer._masters_key
                for text, saved in [("the state dict is ", value) for value in (None, 3, [])] + [
                        (key, dict(optimizer.state_dict(), **{key: value})) for value in bad]:
                    with self.assertRaisesRegex(dsopt.Error, text) as caught:
                        optimizer.load_state_dict(saved)
                    self.assertEqual(caught.exception.name, "DSOPT_ERR_MISMATCH")
                    self.assertEqual(str(optimizer.state_dict()), before)

    def test_loads_masters_without_other_state(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            runs = []
            for _ in range(2):
                params = params_of((7, 3), (5,), dtype=torch.float16)
                runs.append((params, wrapper(SGD(params, lr=1e-5), **self.DYNAMIC)))
            self.scales(runs[0], "..X.")
            saved = copy.deepcopy(runs[0][1].state_dict())
            masters = [master.clone() for master in runs[0][1].masters()[0]]
            self.assertFalse(torch.equal(masters[0], masters[0].half().float()))
            runs[1][1].load_state_dict(saved)
            self.assert_same(runs[1][1].masters()[0], masters)
            for _, optimizer in runs:
                self.assertEqual((optimizer.cur_scale, optimizer.cur_iter), (512, 4))
            self.assertEqual(self.scales(runs[0], "...."), self.scales(runs[1], "...."))
            self.assert_same(runs[1][1].masters()[0], runs[0][1].masters()[0])

    def test_new_plans_before_a_first_step_keep_the_scale(self):
        for kind in (SGD, Adagrad, FusedAdam):
            params = params_of((7, 3), (5,), dtype=torch.float16)
            optimizer = FP16_Optimizer(kind(params, lr=1e-5), **self.DYNAMIC)
            self.step((params, optimizer), bad=True)
            optimizer.clip_grad = 1.0
            self.assertEqual((optimizer.cur_scale, optimizer.cur_iter), (512, 1), kind)

    def test_load_without_state_keeps_masters(self):
        for kind in (SGD, Adagrad, FusedAdam):
            params = params_of((7, 3), (5,), dtype=torch.float16)
            optimizer = FP16_Optimizer(kind(params, lr=1e-5), **self.DYNAMIC)
            self.scales((params, optimizer), "..X")
            masters = [master.clone() for master in optimizer.masters()[0]]
            optimizer.optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()[
                "optimizer_state_dict"]["param_groups"]})
            self.assert_same(optimizer.masters()[0], masters)
            self.assertEqual((optimizer.cur_scale, optimizer.cur_iter), (512, 3))


@unittest.skipUnless(GLOO, "torch is built without gloo")
class TwoProcesses(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(CASES, int(sys.argv[3]), sys.argv[4])
    else:
        main()
