# SPDX-License-Identifier: Apache-2.0
"""Model parallelism: four processes with gloo, two model-parallel ranks times two data-parallel ranks."""
import functools
import math
import sys
import unittest

import originals
from support import TestCase, child, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb, ZeroOneAdam

dist = torch.distributed
GLOO = dist.is_available() and dist.is_gloo_available()
KINDS = {"adam": (OnebitAdam, {"freeze_step": 3}), "lamb": (OnebitLamb, {"freeze_step": 3}),
         "zero_one": (ZeroOneAdam, {"var_freeze_step": 4, "local_step_scaler": 3})}
WRAPPERS = ((FP16_Optimizer, FusedAdam), (FP16_UnfusedOptimizer, FusedLamb))
SCALE = 2.0 ** 4


def groups_of(rank, *lists):
    """Creates process groups of these ranks, and returns the one that contains `rank`."""
    made = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(made, lists) if rank in ranks)


class Mpu:
    """Model-parallel ranks are adjacent."""

    def __init__(self, rank):
        self.rank = rank % 2
        self.data = groups_of(rank, [0, 2], [1, 3])
        self.model = groups_of(rank, [0, 1], [2, 3])

    def get_data_parallel_group(self):
        return self.data

    def get_model_parallel_group(self):
        return self.model

    def get_model_parallel_rank(self):
        return self.rank

    def get_model_parallel_world_size(self):
        return 2


class Stages(Mpu):
    """Two pipeline stages of two tensor-parallel ranks: the model-parallel group has all four."""

    def __init__(self, rank):
        self.rank = rank
        self.data = groups_of(rank, *([r] for r in range(4)))
        self.model = groups_of(rank, [0, 1, 2, 3])

    def get_model_parallel_world_size(self):
        return 4

    def get_slice_parallel_rank(self):
        return self.rank % 2

    def get_slice_parallel_world_size(self):
        return 2


class Engine:
    enable_backward_allreduce = True

    def __init__(self, mpu=None):
        self.mpu = mpu


def gathered(tensor, group=None):
    tensor = tensor.detach().float().contiguous()
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, tensor, group=group)
    return every


def give(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)


def mean(params, group):
    for param in params:
        dist.all_reduce(param.grad, group=group)
        param.grad /= dist.get_world_size(group)


def exchange_is_within_the_data_parallel_group(rank, name):
    """`deepspeed.mpu` provides the group: the bits are those of an optimizer that receives it as `group`."""
    kind, options = KINDS[name]
    mpu = Mpu(rank)
    params, others = params_of((40,), (3, 7), seed=rank % 2), params_of((40,), (3, 7), seed=rank % 2)
    engine, plain = Engine(mpu), Engine()
    optimizer = kind(params, engine, lr=0.01, **options)
    reference = kind(others, plain, lr=0.01, group=mpu.data, **options)
    last = 0
    while last < 9 or optimizer.next_reduction() != "compressed":
        for some, one, flags in ((params, optimizer, engine), (others, reference, plain)):
            give(some, 10 * last + rank)
            if flags.enable_backward_allreduce:
                mean(some, mpu.data)
            one.step()
        last += 1
        assert engine.enable_backward_allreduce == plain.enable_backward_allreduce, last
    give(params, 10 * last + rank)
    give(others, 10 * last + rank)
    optimizer.step()
    reference.step()
    assert "worker_error_rank%dof2" % (rank // 2) in optimizer.state[params[0]], list(optimizer.state[params[0]])
    for param, other in zip(params, others):
        assert torch.equal(param, other)
        momentum = gathered(optimizer.state[param]["exp_avg"])
        weights = gathered(param)
        assert not torch.equal(momentum[0], momentum[1]) and not torch.equal(momentum[2], momentum[3])
        if name != "zero_one":  # 0/1 Adam's ranks have different moments between the exchanges of weight changes
            assert torch.equal(momentum[0], momentum[2]) and torch.equal(momentum[1], momentum[3])
        assert torch.equal(weights[0], weights[2]) and torch.equal(weights[1], weights[3])


def non_freeze_is_within_the_data_parallel_group(rank):
    mpu = Mpu(rank)
    params, free = params_of((40,), (8,), seed=rank % 2)
    engine = Engine(mpu)
    groups = [{"params": [params]}, {"params": [free], "non_freeze": True}]
    optimizer = OnebitAdam(groups, engine, lr=0.01, freeze_step=2)
    for i in range(6):
        give([params, free], 10 * i + rank)
        if engine.enable_backward_allreduce:
            mean([params, free], mpu.data)
        before = optimizer.state[free]["exp_avg_sq"].clone() if i else None
        optimizer.step()
    assert not torch.equal(before, optimizer.state[free]["exp_avg_sq"])
    for tensor in (free, optimizer.state[free]["exp_avg"], optimizer.state[free]["exp_avg_sq"]):
        every = gathered(tensor)
        assert torch.equal(every[0], every[2]) and torch.equal(every[1], every[3])
        assert not torch.equal(every[0], every[1])


def onebit_skips_on_all_model_parallel_ranks(rank, name, compat):
    """Also without a wrapper: shards of one model stay at the same step, and the engines at the same stage."""
    kind, options = KINDS[name]
    mpu = Mpu(rank)
    params = params_of((40,), seed=rank % 2)
    engine = Engine(mpu)
    optimizer = kind(params, engine, lr=0.01, compat=compat, **options)
    for i in range(10):
        give(params, 10 * i + rank)
        if rank == 1 and i in (2, 6):
            params[0].grad[3] = math.inf if i == 2 else math.nan
        if engine.enable_backward_allreduce:
            mean(params, mpu.data)
        before = params[0].detach().clone()
        optimizer.step()
        same = torch.equal(before, params[0])
        # The first call of the originals has no effect on the weights.
        assert same == (i in (2, 6) or (compat is not None and i == 0)), (i, same)
        flags = gathered(torch.tensor([float(engine.enable_backward_allreduce)]))
        assert len({float(flag) for flag in flags}) == 1, (i, flags)


def wrapped_onebit_takes_the_mpu_of_the_wrapper(rank, name):
    """The 1-bit class has no `deepspeed`. Norms are those of the whole model, and an overflow on one rank skips on
    all."""
    kind, options = KINDS[name]
    mpu = Mpu(rank)
    wrapper = FP16_UnfusedOptimizer if name == "lamb" else FP16_Optimizer
    params = params_of((40,), seed=rank % 2, dtype=torch.float16)
    params[0].model_parallel = True
    optimizer = wrapper(kind(params, lr=0.01, **options), mpu=mpu, clip_grad=0.5, dynamic_loss_scale=True,
                        dynamic_loss_args={"init_scale": SCALE, "scale_window": 100})
    for i in range(8):
        give(params, 10 * i + rank, SCALE)
        if i == 0:
            total = params[0].grad.float() / SCALE
            dist.all_reduce(total, group=mpu.data)
            norm = math.sqrt(sum(float((x / 2).double().square().sum()) for x in gathered(total, mpu.model)))
        if rank == 3 and i == 5:
            params[0].grad[0] = math.inf
        skipped = optimizer.step()
        assert skipped == (i == 5), (i, skipped)
        if i == 0:
            assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)
    assert optimizer.cur_scale == SCALE / 2
    while optimizer.optimizer.next_reduction() == "local":
        give(params, 77, SCALE)
        optimizer.step()
    give(params, 78 + rank, SCALE)
    optimizer.step()
    masters = gathered(optimizer.masters()[0][0])
    assert torch.equal(masters[0], masters[2]) and torch.equal(masters[1], masters[3])
    assert not torch.equal(masters[0], masters[1])


def the_mpu_without_a_data_parallel_group_is_refused(rank):
    class Partial:
        def get_model_parallel_group(self):
            return None

    try:
        OnebitAdam(params_of((4,)), Engine(Partial()))
    except dsopt.ArgumentError as problem:
        assert "mpu is a Partial without get_data_parallel_group()" in str(problem), problem
    else:
        raise AssertionError("no exception")
    params = params_of((4,), dtype=torch.float16)
    wrapper, engine = FP16_Optimizer(FusedAdam(params), mpu=Partial()), Engine()
    engine.enable_backward_allreduce = False
    for call in (lambda: wrapper._get_norm_with_moe_layers(1.0),
                 lambda: FP16_Optimizer(FusedAdam(params_of((4,), dtype=torch.float16)), engine, mpu=Partial())):
        try:
            call()
        except dsopt.ArgumentError as problem:
            assert "Partial without get_data_parallel_group(), so the data-parallel ranks are unknown" in str(problem)
        else:
            raise AssertionError("no exception")
    give(params, 0)
    assert not wrapper.step()


def model_of(rank, seed=0):
    """Returns a shard, a tensor shared by all tensor-parallel ranks, and one that another pipeline stage counts."""
    shard, = params_of((6, 4), seed=100 + rank % 2 + seed, dtype=torch.float16)
    same, copied = params_of((5,), (9,), seed=200 + seed, dtype=torch.float16)
    (shard.model_parallel, copied.ds_pipe_replicated) = True, True
    return [shard, same, copied]


def give_model(params, rank, step):
    give(params[:1], 1000 + 10 * step + rank % 2, SCALE)
    give(params[1:], 2000 + 10 * step, SCALE)


def square(*tensors):
    return sum(float((t.detach().double() / SCALE).square().sum()) for t in tensors)


def norms_are_of_the_whole_model(rank, index, compat):
    wrapper, kind = WRAPPERS[index]
    mpu = Mpu(rank)
    for passed in (mpu, None):
        params = model_of(rank)
        optimizer = wrapper(kind(params, lr=0.01, compat=compat), mpu=passed, clip_grad=0.25, static_loss_scale=SCALE)
        lost = compat and wrapper is FP16_UnfusedOptimizer
        for i in range(3):
            give_model(params, rank, i)
            shards = gathered(params[0].grad, mpu.model) if passed else [params[0].grad]
            norm = math.sqrt(square(*shards, params[1].grad))
            if lost:  # the original finds no marks on the gradients, and its norm includes the loss scale
                norm = math.sqrt(square(shards[0], params[1].grad, params[2].grad)) * SCALE
            assert not optimizer.step()
            assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)
        # All ranks use one divisor, so tensors shared by model-parallel ranks stay equal.
        for master in optimizer.masters()[0][1:]:
            a, b = gathered(master, mpu.model)
            assert torch.equal(a, b) == (passed is not None), passed


def an_mpu_that_is_set_counts_from_the_next_step_on(rank, index):
    wrapper, kind = WRAPPERS[index]
    mpu = Mpu(rank)
    params, others = model_of(rank), model_of(rank)
    optimizer, reference = (wrapper(kind(some, lr=0.01), mpu=passed, clip_grad=0.25, static_loss_scale=SCALE)
                            for some, passed in ((params, None), (others, mpu)))
    for i, passed in enumerate((None, mpu, mpu, None)):
        optimizer.mpu = passed
        for some, one in ((params, optimizer), (others, reference)):
            give_model(some, rank, i)
            one.step()
        norms = optimizer._global_grad_norm, reference._global_grad_norm
        assert math.isclose(*norms, rel_tol=1e-5) == (passed is not None), (i, norms)


def an_mpu_of_the_engine_that_is_set_counts_from_the_next_step_on(rank):
    engine, mpu = Engine(), Mpu(rank)
    params = params_of((40,))
    optimizer = OnebitAdam(params, engine, lr=0.01, freeze_step=2)
    for i, (passed, ranks) in enumerate(((None, 4), (None, 4), (None, 4), (mpu, 2), (mpu, 2), (None, 4))):
        engine.mpu = passed
        give(params, 10 * i + rank)
        if engine.enable_backward_allreduce:
            mean(params, None)
        optimizer.step()
        assert optimizer.comm_backend_handle.ranks == optimizer.size == ranks, (i, optimizer.comm_backend_handle.ranks)
        momenta = gathered(optimizer.state[params[0]]["exp_avg"])
        assert torch.equal(momenta[0], momenta[2]) and torch.equal(momenta[1], momenta[3])
        assert torch.equal(momenta[0], momenta[1]) == (ranks == 4), i


def overflow_is_agreed_by_model_parallel_ranks(rank, index, compat):
    wrapper, kind = WRAPPERS[index]
    mpu = Mpu(rank)
    for passed in (mpu, None):
        params = model_of(rank)
        optimizer = wrapper(kind(params, lr=0.01, compat=compat), mpu=passed, dynamic_loss_scale=True,
                            dynamic_loss_args={"init_scale": SCALE, "scale_window": 100})
        give_model(params, rank, 0)
        assert not optimizer.step()
        give_model(params, rank, 1)
        if rank == 1:
            params[0].grad[0, 0] = math.inf
        skipped = optimizer.step()
        assert skipped == (rank in (0, 1) if passed else rank == 1), (passed, skipped)
        assert optimizer.cur_scale == (SCALE / 2 if skipped else SCALE)


def overflow_without_a_loss_scale(rank, index, compat):
    """Standard mode checks gradients only for clip_grad, and then agrees. In compat mode FP16_Optimizer takes the step
    and
    reports this rank's gradients, and FP16_UnfusedOptimizer agrees (docs/compat.md)."""
    wrapper, kind = WRAPPERS[index]
    mpu, fused = Mpu(rank), wrapper is FP16_Optimizer
    for clip in (0.0, 0.5):
        params = [torch.nn.Parameter(param.detach().bfloat16()) for param in model_of(rank)]
        params[0].model_parallel = True
        optimizer = wrapper(kind(params, lr=0.01, compat=compat), mpu=mpu, low_precision_dtype=torch.bfloat16,
                            clip_grad=clip)
        give(params[:1], 1000 + rank % 2)
        give(params[1:], 2000)
        if rank == 1:
            params[0].grad[0, 0] = math.nan
        before = params[0].detach().clone()
        agreed = rank in (0, 1) and (bool(clip) if compat is None else not fused)
        found = agreed or (rank == 1 and compat is not None)
        assert optimizer.step() == optimizer.overflow == found, (wrapper, compat, clip, found)
        assert torch.equal(params[0].detach(), before) == agreed, (wrapper, compat, clip)


def overflow_is_agreed_by_data_parallel_ranks_that_do_not_average(rank, index, compat):
    """While the engine does not average in its backward pass: ranks of the mpu's groups; without an mpu, all ranks."""
    wrapper, kind = WRAPPERS[index]
    mpu = Mpu(rank)
    for passed in (mpu, None):
        params, engine = model_of(rank), Engine(mpu)
        optimizer = wrapper(kind(params, lr=0.01, compat=compat), engine, mpu=passed, dynamic_loss_scale=True,
                            dynamic_loss_args={"init_scale": SCALE, "scale_window": 100})
        for i, averages in enumerate((True, False, False, True)):
            engine.enable_backward_allreduce = averages
            give_model(params, rank, i)
            if rank == 1 and i > 1:
                params[0].grad[0, 0] = math.inf
            skipped = optimizer.step()
            expected = i > 1 and (not averages or (rank in (0, 1) if passed else rank == 1))
            assert skipped == expected, (passed, i, skipped)


def every_pipeline_stage_counts(rank, compat):
    """Tensors that are not sharded are counted by tensor-parallel rank 0 of each stage, so also by rank 2 of the
    group."""
    mpu = Stages(rank)
    params = model_of(rank, seed=rank // 2)
    optimizer = FP16_Optimizer(FusedAdam(params, lr=0.01, compat=compat), mpu=mpu, clip_grad=0.25,
                               static_loss_scale=SCALE)
    for i in range(2):
        give(params[:1], 1000 + 10 * i + rank, SCALE)
        give(params[1:], 2000 + 10 * i + rank // 2, SCALE)
        shards, same = gathered(params[0].grad), gathered(params[1].grad)
        norm = math.sqrt(square(*shards, same[0], same[2]))
        assert not optimizer.step()
        assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (optimizer._global_grad_norm, norm)


def lamb_over_pipeline_stages_is_refused(rank):
    """A trust ratio would combine shards of different tensors. Compat mode has one per shard."""
    mpu = Stages(rank)
    for wrapper, kind in ((FP16_UnfusedOptimizer, FusedLamb), (FP16_UnfusedOptimizer, OnebitLamb)):
        try:
            wrapper(kind(model_of(rank)), mpu=mpu)
        except dsopt.UnsupportedError as problem:
            assert "several pipeline stages, and %s takes one trust ratio" % kind.__name__ in str(problem), problem
        else:
            raise AssertionError("no exception")
    params = model_of(rank)
    optimizer = FP16_UnfusedOptimizer(FusedLamb(params, compat="deepspeed"), mpu=mpu, static_loss_scale=SCALE)
    give_model(params, rank, 0)
    assert not optimizer.step()


def trust_ratios_are_of_whole_tensors(rank):
    """FusedLamb on shards steps like FusedLamb on the whole tensor."""
    mpu = Mpu(rank)
    whole, = params_of((8, 4), dtype=torch.float16)
    shard = torch.nn.Parameter(whole.detach()[4 * (rank % 2):][:4].clone())
    shard.tensor_model_parallel = True
    ours = FP16_UnfusedOptimizer(FusedLamb([shard], lr=0.1), mpu=mpu)
    reference = FP16_UnfusedOptimizer(FusedLamb([whole], lr=0.1))
    for i in range(3):
        give([whole], i)
        shard.grad = whole.grad[4 * (rank % 2):][:4].clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(ours.masters()[0][0], reference.masters()[0][0][4 * (rank % 2):][:4])


FOUR = [functools.partial(exchange_is_within_the_data_parallel_group, name=name) for name in KINDS]
FOUR += [functools.partial(onebit_skips_on_all_model_parallel_ranks, name=name, compat=None) for name in KINDS]
FOUR += [functools.partial(onebit_skips_on_all_model_parallel_ranks, name="adam", compat="deepspeed")]
FOUR += [functools.partial(wrapped_onebit_takes_the_mpu_of_the_wrapper, name=name) for name in KINDS]
FOUR += [functools.partial(case, index=index, compat=compat)
         for case in (norms_are_of_the_whole_model, overflow_is_agreed_by_model_parallel_ranks,
                      overflow_without_a_loss_scale, overflow_is_agreed_by_data_parallel_ranks_that_do_not_average)
         for index in range(2) for compat in (None, "deepspeed")]
FOUR += [functools.partial(every_pipeline_stage_counts, compat=compat) for compat in (None, "deepspeed")]
FOUR += [non_freeze_is_within_the_data_parallel_group, the_mpu_without_a_data_parallel_group_is_refused,
         lamb_over_pipeline_stages_is_refused, trust_ratios_are_of_whole_tensors,
         an_mpu_of_the_engine_that_is_set_counts_from_the_next_step_on]
FOUR += [functools.partial(an_mpu_that_is_set_counts_from_the_next_step_on, index=index) for index in range(2)]


def deepspeed_finds_the_same_norms(rank, index, kind):
    """Compares both wrappers in compat mode with DeepSpeed's: norms, skipped steps and parameters."""
    found = originals.load()
    mpu = kind(rank)
    ours, theirs = model_of(rank, seed=rank // 2), model_of(rank, seed=rank // 2)
    options = dict(mpu=mpu, clip_grad=0.25, dynamic_loss_scale=True,
                   dynamic_loss_args={"init_scale": SCALE, "scale_window": 100, "min_scale": 1, "delayed_shift": 1})
    optimizer = (FP16_Optimizer, FP16_UnfusedOptimizer)[index](
        FusedAdam(ours, lr=0.01, weight_decay=0.1, compat="deepspeed"), **options)
    original = (found.FP16_Optimizer, found.FP16_UnfusedOptimizer)[index](
        torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), **options)
    for i in range(5):
        for params in (ours, theirs):
            give(params[:1], 1000 + 10 * i + rank, SCALE)
            give(params[1:], 2000 + 10 * i + rank // 2, SCALE)
            if i == 2 and rank == 3:
                params[0].grad[0, 0] = math.inf
        skipped = optimizer.step()
        assert skipped == original.step() == (i == 2 and (kind is Stages or rank > 1)), (i, skipped)
        assert optimizer.cur_scale == original.loss_scale_config.cur_scale
        if not skipped:
            norm = float(original._global_grad_norm)
            assert math.isclose(optimizer._global_grad_norm, norm, rel_tol=1e-5), (i, optimizer._global_grad_norm, norm)
        torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs], rtol=2e-3, atol=2e-3)


def deepspeed_exchanges_the_same_momentum(rank):
    """Compares OnebitAdam in compat mode with DeepSpeed's, whose backend also gets the group from `deepspeed.mpu`."""
    found = originals.load()
    mpu = Mpu(rank)
    ours, theirs = params_of((40,), seed=rank % 2), params_of((40,), seed=rank % 2)
    engine, other = Engine(mpu), originals.Engine(mpu)
    optimizer = OnebitAdam(ours, engine, lr=0.01, freeze_step=3, compat="deepspeed")
    original = found.OnebitAdam(theirs, other, lr=0.01, freeze_step=3, comm_backend_name="compressed")
    for i in range(9):
        for params, flags in ((ours, engine), (theirs, other)):
            give(params, 10 * i + rank)
            if flags.enable_backward_allreduce:
                mean(params, mpu.data)
        optimizer.step()
        original.step()
        assert engine.enable_backward_allreduce == other.enable_backward_allreduce, i
        torch.testing.assert_close(ours[0].detach(), theirs[0].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[ours[0]]["exp_avg"], original.state[theirs[0]]["exp_avg"], rtol=1e-5,
                                   atol=1e-6)
    assert not engine.enable_backward_allreduce


ORIGINALS = [functools.partial(deepspeed_finds_the_same_norms, index=index, kind=kind) for index in range(2)
             for kind in (Mpu, Stages)]
ORIGINALS += [deepspeed_exchanges_the_same_momentum]


def flag_of_a_pipeline_follows_the_stage(rank):
    """An engine with pipeline stages averages if pipeline_enable_backward_allreduce is set, and has the other flag
    cleared."""
    class Pipeline:
        enable_backward_allreduce = False
        pipeline_enable_backward_allreduce = True

    params, engine = params_of((8,)), Pipeline()
    optimizer = OnebitAdam(params, engine, lr=0.01, freeze_step=2)
    seen = []
    for i in range(4):
        give(params, 10 * i + rank)
        seen.append(engine.pipeline_enable_backward_allreduce)
        if seen[-1]:
            mean(params, None)
        optimizer.step()
        assert engine.enable_backward_allreduce is False
    assert seen == [True, True, False, False], seen
    a, b = gathered(params[0])
    assert torch.equal(a, b)


TWO = [flag_of_a_pipeline_follows_the_stage]


@unittest.skipUnless(GLOO, "torch is built without gloo")
class Processes(TestCase):
    def test_cases_pass_on_two_by_two_ranks(self):
        run_ranks(self, __file__, "four", ranks=4)

    @originals.needed
    def test_matches_deepspeed(self):
        run_ranks(self, __file__, "originals", ranks=4)

    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "two")


class OneProcess(TestCase):
    def test_accepts_an_mpu_without_a_model_parallel_group(self):
        with self.assertRaisesRegex(ValueError, r"mpu is a object without get_model_parallel_group\(\)"):
            FP16_Optimizer(FusedAdam(params_of((3,), dtype=torch.float16)), mpu=object())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        cases, ranks = {"four": (FOUR, 4), "originals": (ORIGINALS, 4), "two": (TWO, 2)}[sys.argv[2]]
        child(cases, int(sys.argv[3]), sys.argv[4], ranks)
    else:
        main()
