# SPDX-License-Identifier: Apache-2.0
"""Parameters of experts in the wrappers, over processes with gloo."""
import functools
import math
import sys
import types
import unittest

import originals
from support import TestCase, child, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb, ZeroOneAdam

dist = torch.distributed
GLOO = dist.is_available() and dist.is_gloo_available()
WRAPPERS = ((FP16_Optimizer, FusedAdam), (FP16_UnfusedOptimizer, FusedLamb))
FAMILY = (OnebitAdam, ZeroOneAdam, OnebitLamb)
SCALE = 2.0 ** 4
DENSE = (7, 3)
EXPERT = (11,)


def groups_of(rank, *lists):
    """Creates process groups of these ranks, and returns the one that contains `rank`."""
    made = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(made, lists) if rank in ranks)


def gathered(tensor, group=None):
    tensor = tensor.detach().float().contiguous()
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor, group=group)
    return every


def marked(param, name="ep_size_2"):
    param.allreduce, param.group_name = False, name
    return param


def model_of(expert, name="ep_size_2", moe=True):
    """Returns groups of a dense parameter, equal on all ranks, and of a parameter of expert number `expert`."""
    dense, = params_of(DENSE, seed=1, dtype=torch.float16)
    own, = params_of(EXPERT, seed=100 + expert, dtype=torch.float16)
    more = {"moe": True, "name": name} if moe else {}
    return [{"params": [dense]}, dict(params=[marked(own, name)], **more)]


def give(groups, expert, step):
    for group, seed in zip(groups, (1000 + step, 2000 + 10 * step + expert)):
        for i, param in enumerate(group["params"]):
            generator = torch.Generator().manual_seed(seed + 5000 * i)
            param.grad = (torch.randn(param.shape, generator=generator) * SCALE).half()


def norm_of(*tensors, scale=SCALE):
    return math.sqrt(sum(float((t.detach().double() / scale).square().sum()) for t in tensors))


def wrap(index, groups, compat=None, **more):
    wrapper, kind = WRAPPERS[index]
    more.setdefault("dynamic_loss_scale", True)
    if more["dynamic_loss_scale"]:
        more["dynamic_loss_args"] = {"init_scale": SCALE, "scale_window": 100}
    return wrapper(kind([dict(group) for group in groups], lr=0.02, weight_decay=0.1, compat=compat), **more)


def norm_is_over_all_experts(rank, index, moe):
    """All ranks use one divisor, so the dense masters stay equal."""
    passed = {} if index == 1 else {"has_moe_layers": moe}
    groups = model_of(rank, moe=moe)
    optimizer = wrap(index, groups, clip_grad=0.25, expert_groups={"ep_size_2": dist.group.WORLD}, **passed)
    for i in range(4):
        give(groups, rank, i)
        norm = norm_of(groups[0]["params"][0].grad, *gathered(groups[1]["params"][0].grad))
        assert not optimizer.step()
        assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)
    dense, own = (gathered(group[0]) for group in optimizer.masters())
    assert torch.equal(dense[0], dense[1]) and not torch.equal(own[0], own[1])


def overflow_of_an_expert_skips_on_all_ranks(rank, index, compat, moe):
    passed = {} if index == 1 else {"has_moe_layers": moe}
    groups = model_of(rank, moe=moe)
    optimizer = wrap(index, groups, compat, expert_groups={"ep_size_2": dist.group.WORLD}, **passed)
    for i in range(4):
        give(groups, rank, i)
        if i == 2 and rank == 1:
            groups[1]["params"][0].grad[0] = math.nan
        assert optimizer.step() == (i == 2), i
    assert optimizer.cur_scale == SCALE / 2


def compat_norms_are_those_of_the_originals(rank, index, moe):
    """Fused: uses the experts' masters if has_moe_layers is set; otherwise all is dense. Unfused: ignores experts."""
    options = {} if index == 1 else {"has_moe_layers": moe}
    groups = model_of(rank, moe=moe)
    optimizer = wrap(index, groups, "deepspeed", clip_grad=0.25, expert_groups={"ep_size_2": dist.group.WORLD},
                     **options)
    for i in range(3):
        give(groups, rank, i)
        dense, own = groups[0]["params"][0].grad, groups[1]["params"][0].grad
        if index == 1:
            norm = norm_of(dense, scale=1.0)  # the original's norm includes the loss scale
        elif moe:
            weights = gathered(optimizer.masters()[1][0])  # without the loss scale, and divided by it
            norm = norm_of(dense, *weights)
        else:
            norm = norm_of(dense, own)
        assert not optimizer.step()
        assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (i, optimizer._global_grad_norm, norm)


def groups_that_are_set_count_from_the_next_step_on(rank, index):
    groups, alone = model_of(rank), groups_of(rank, [0], [1])
    optimizer = wrap(index, groups, clip_grad=0.25, expert_groups={"ep_size_2": alone})
    for i, passed in enumerate((alone, dist.group.WORLD, alone)):
        optimizer.expert_groups = {"ep_size_2": passed}
        give(groups, rank, i)
        dense, own = groups[0]["params"][0].grad, groups[1]["params"][0].grad
        norm = norm_of(dense, *(gathered(own) if passed is dist.group.WORLD else [own]))
        assert not optimizer.step()
        assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (i, optimizer._global_grad_norm, norm)


def has_moe_layers_that_is_set_counts_from_the_next_step_on(rank):
    groups = model_of(rank)
    optimizer = wrap(0, groups, "deepspeed", clip_grad=0.25, expert_groups={"ep_size_2": dist.group.WORLD})
    for i, moe in enumerate((False, True, False)):
        optimizer.has_moe_layers = moe
        give(groups, rank, i)
        norm = norm_of(groups[0]["params"][0].grad,
                       *(gathered(optimizer.masters()[1][0]) if moe else [groups[1]["params"][0].grad]))
        assert not optimizer.step()
        assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (i, optimizer._global_grad_norm, norm)


def groups_are_those_of_deepspeed(rank):
    """If deepspeed.utils.groups is imported, its groups are used."""
    module = types.ModuleType("deepspeed.utils.groups")
    module._EXPERT_PARALLEL_GROUP = {"ep_size_2": dist.group.WORLD, "ep_size_1": None}
    sys.modules["deepspeed.utils.groups"] = module
    try:
        groups = model_of(rank)
        optimizer = wrap(0, groups, has_moe_layers=True, clip_grad=0.25)
        give(groups, rank, 0)
        norm = norm_of(groups[0]["params"][0].grad, *gathered(groups[1]["params"][0].grad))
        optimizer.step()
        assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)
    finally:
        del sys.modules["deepspeed.utils.groups"]


def unknown_groups_are_refused(rank):
    alone = groups_of(rank, [0], [1])
    other = [dist.new_group([0]), dist.new_group([1])][1 - rank]
    for groups, passed, text in (
            (model_of(rank), {}, "of 'ep_size_2', and the process group of that name is unknown"),
            (model_of(rank), {"expert_groups": {"ep_size_4": alone}}, "'ep_size_2', and expert_groups has 'ep_size_4'"),
            (model_of(rank), {"expert_groups": {}}, "of 'ep_size_2', and expert_groups has no groups"),
            (model_of(rank), {"expert_groups": {"ep_size_2": other}}, "groups['ep_size_2'] does not have this rank"),
            (model_of(rank, name=None, moe=False), {}, "without the name of their process group")):
        for index in range(2):
            try:
                wrap(index, groups, **passed)
            except dsopt.ArgumentError as problem:
                assert text in str(problem), problem
            else:
                raise AssertionError("no exception: " + text)


def onebit_refuses_experts(rank):
    for kind in FAMILY:
        for around in (False, True):
            groups = model_of(rank)
            params = [group["params"][0] for group in groups]
            if not around:
                for param in params:
                    param.data = param.data.float()
                    param.grad = torch.ones_like(param)
            before = [param.detach().clone() for param in params]
            try:
                if around:
                    FP16_UnfusedOptimizer(kind(groups), expert_groups={"ep_size_2": dist.group.WORLD})
                else:
                    kind(groups).step()
            except dsopt.UnsupportedError as problem:
                assert "param_groups[1]['params'][0] is a parameter of experts, and the exchange of " in str(problem)
                assert kind.__name__ in str(problem), problem
            else:
                raise AssertionError("no exception")
            for param, old in zip(params, before):
                assert torch.equal(param, old)


def mean_of_the_norms_of_2023(rank):
    optimizer = wrap(0, model_of(rank), has_moe_layers=True, expert_groups={"ep_size_2": dist.group.WORLD})
    assert optimizer._get_norm_with_moe_layers(3.0 + 2 * rank) == 4.0


def deepspeed_finds_the_same_norms(rank, index, experts):
    """Compares both over the same parameters: norms, skipped steps, loss scales and masters."""
    found = originals.load()
    from deepspeed.utils import groups as names

    names._EXPERT_PARALLEL_GROUP["ep_size_2"] = dist.group.WORLD
    groups, others = model_of(rank, moe=experts), model_of(rank, moe=experts)
    options = dict(dynamic_loss_scale=True, clip_grad=0.25,
                   dynamic_loss_args={"init_scale": SCALE, "scale_window": 100, "min_scale": 1, "delayed_shift": 1})
    more = {"has_moe_layers": experts} if index == 0 else {}
    ours = (FP16_Optimizer, FP16_UnfusedOptimizer)[index](
        FusedAdam([dict(group) for group in groups], lr=0.02, weight_decay=0.1, compat="deepspeed"), **options, **more)
    theirs = (found.FP16_Optimizer, found.FP16_UnfusedOptimizer)[index](
        torch.optim.AdamW([dict(group) for group in others], lr=0.02, weight_decay=0.1), **options, **more)
    theirs_of = [list(group["params"]) for group in others]
    for i in range(6):
        give(groups, rank, i)
        for some, same in zip(groups, theirs_of):
            for param, other in zip(some["params"], same):
                other.grad = param.grad.clone()
        if i == 3 and rank == 1:
            for param in (groups[1]["params"][0], theirs_of[1][0]):
                param.grad[0] = math.inf
        skipped = ours.step()
        assert skipped == theirs.step() == (i == 3), i
        assert ours.cur_scale == theirs.loss_scale_config.cur_scale, i
        if not skipped:
            expected = float(theirs._global_grad_norm)
            assert math.isclose(ours._global_grad_norm, expected, rel_tol=1e-5), (i, ours._global_grad_norm, expected)
        for some, same in zip(groups, theirs_of):
            torch.testing.assert_close(some["params"][0].detach(), same[0].detach(), rtol=2e-3, atol=2e-3)
    del names._EXPERT_PARALLEL_GROUP["ep_size_2"]


TWO = [functools.partial(norm_is_over_all_experts, index=index, moe=moe) for index in range(2) for moe in (True, False)]
TWO += [functools.partial(overflow_of_an_expert_skips_on_all_ranks, index=index, compat=compat, moe=moe)
        for index in range(2) for compat in (None, "deepspeed") for moe in (True, False)]
TWO += [functools.partial(compat_norms_are_those_of_the_originals, index=index, moe=moe)
        for index in range(2) for moe in (True, False)]
TWO += [groups_are_those_of_deepspeed, unknown_groups_are_refused, onebit_refuses_experts, mean_of_the_norms_of_2023,
        has_moe_layers_that_is_set_counts_from_the_next_step_on]
TWO += [functools.partial(groups_that_are_set_count_from_the_next_step_on, index=index) for index in range(2)]
ORIGINALS = [functools.partial(deepspeed_finds_the_same_norms, index=index, experts=experts)
             for index in range(2) for experts in (True, False)]


def two_pairs_of_expert_ranks(rank, index):
    """Ranks 0 and 1 have experts 0 and 1, and so have ranks 2 and 3. The test averages gradients, like an engine."""
    experts = groups_of(rank, [0, 1], [2, 3])
    replicas = groups_of(rank, [0, 2], [1, 3])
    groups = model_of(rank % 2)
    optimizer = wrap(index, groups, clip_grad=0.25, expert_groups={"ep_size_2": experts})
    for i in range(5):
        give(groups, rank, i)
        if i == 2 and rank == 1:
            groups[1]["params"][0].grad[0] = math.inf
        for param, group in ((groups[0]["params"][0], None), (groups[1]["params"][0], replicas)):
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
        norm = norm_of(groups[0]["params"][0].grad, *gathered(groups[1]["params"][0].grad, experts),
                       scale=optimizer.cur_scale)
        assert optimizer.step() == (i == 2), i
        if i != 2:
            assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)
    dense, own = (gathered(group[0]) for group in optimizer.masters())
    assert all(torch.equal(dense[0], other) for other in dense)
    assert torch.equal(own[0], own[2]) and torch.equal(own[1], own[3]) and not torch.equal(own[0], own[1])


def two_sizes_of_expert_groups(rank, index):
    """Expert-parallel groups of 2 and of 4 ranks; an overflow in either is known to all ranks."""
    pairs, every = groups_of(rank, [0, 1], [2, 3]), dist.group.WORLD
    replicas = groups_of(rank, [0, 2], [1, 3])
    groups = model_of(rank % 2) + model_of(10 + rank, "ep_size_4")[1:]
    optimizer = wrap(index, groups, clip_grad=0.25, expert_groups={"ep_size_4": every, "ep_size_2": pairs})
    own, wide = groups[1]["params"][0], groups[2]["params"][0]
    for i in range(6):
        give(groups[:2], rank, i)
        give(groups[2:], rank, 50 + rank + i)
        if rank == 3 and i in (2, 4):
            (own if i == 2 else wide).grad[1] = math.inf
        for param, group in ((groups[0]["params"][0], None), (own, replicas)):
            dist.all_reduce(param.grad, group=group)
            param.grad /= dist.get_world_size(group)
        norm = norm_of(groups[0]["params"][0].grad, *gathered(own.grad, pairs), *gathered(wide.grad),
                       scale=optimizer.cur_scale)
        assert optimizer.step() == (i in (2, 4)), i
        if i not in (2, 4):
            assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)


def experts_with_model_parallel_ranks(rank, index):
    """Model-parallel ranks 0 and 1, 2 and 3 have the same experts; expert-parallel ranks are 0 and 2, 1 and 3."""
    model, experts = groups_of(rank, [0, 1], [2, 3]), groups_of(rank, [0, 2], [1, 3])

    class Mpu:
        def get_model_parallel_group(self):
            return model

    groups = model_of(rank // 2)
    optimizer = wrap(index, groups, clip_grad=0.25, mpu=Mpu(), expert_groups={"ep_size_2": experts})
    for i in range(3):
        give(groups, rank // 2, i)
        if i == 1 and rank == 2:
            groups[1]["params"][0].grad[0] = math.inf
        norm = norm_of(groups[0]["params"][0].grad, *gathered(groups[1]["params"][0].grad, experts),
                       scale=optimizer.cur_scale)
        assert optimizer.step() == (i == 1), i
        if i != 1:  # a tensor shared by model-parallel ranks counts once
            assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)


FOUR = [functools.partial(case, index=index) for index in range(2)
        for case in (two_pairs_of_expert_ranks, two_sizes_of_expert_groups, experts_with_model_parallel_ranks)]


@unittest.skipUnless(GLOO, "torch is built without gloo")
class Processes(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "two")

    def test_cases_pass_on_four_ranks(self):
        run_ranks(self, __file__, "four", ranks=4)

    @originals.needed
    def test_matches_deepspeed(self):
        """In compat mode norms and skipped steps equal those of DeepSpeed's own wrappers."""
        run_ranks(self, __file__, "originals")


class OneProcess(TestCase):
    def test_computes_norm_without_process_groups(self):
        for index in range(2):
            for moe in (True, False):
                groups = model_of(0, moe=moe)
                optimizer = wrap(index, groups, **({} if index == 1 else {"has_moe_layers": moe}))
                give(groups, 0, 0)
                norm = norm_of(*(group["params"][0].grad for group in groups))
                optimizer.step()
                self.assertAlmostEqual(optimizer._global_grad_norm, norm, places=4)

    def test_onebit_on_one_rank_accepts_experts(self):
        for kind in FAMILY:
            groups = model_of(0)
            optimizer = FP16_Optimizer(kind(groups, lr=0.02), has_moe_layers=True)
            give(groups, 0, 0)
            self.assertFalse(optimizer.step())

    def test_plain_steps_accept_experts_without_a_name(self):
        param, = params_of(EXPERT)
        param.allreduce = False
        param.grad = torch.ones_like(param)
        before = param.detach().clone()
        FusedAdam([param]).step()
        self.assertFalse(torch.equal(param, before))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        cases = {"two": TWO, "four": FOUR, "originals": ORIGINALS}[sys.argv[2]]
        child(cases, int(sys.argv[3]), sys.argv[4], 4 if cases is FOUR else 2)
    else:
        main()
