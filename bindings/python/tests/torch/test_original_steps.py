# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's classes compared with those of dsopt.torch in compat mode, step by step.

Both get the same weights and gradients. Values are compared with the tolerance of the recorded cases, because torch's
kernels contract multiplications and additions and the engine does not: 2e-6 of the largest magnitude, and 1e-5 after
exchanges, whose residuals accumulate rounding errors. Scales, counters and flags must be equal.
"""
import functools
import io
import sys

from support import TestCase, child, main, run_ranks, torch

import dsopt.torch
import originals

SHAPES = ((3, 5), (40,), (7,))
OPTIONS = {"OnebitAdam": {"freeze_step": 5}, "OnebitLamb": {"freeze_step": 5, "max_coeff": 4.0},
           "ZeroOneAdam": {"var_freeze_step": 6, "var_update_scaler": 2, "local_step_scaler": 3,
                           "local_step_clipper": 4}}
SCALE = {"dynamic_loss_scale": True,
         "dynamic_loss_args": {"init_scale": 2.0 ** 10, "scale_window": 3, "min_scale": 1.0}}
WRAPPED = (("FP16_Optimizer", "OnebitAdam"), ("FP16_Optimizer", "ZeroOneAdam"), ("FP16_UnfusedOptimizer", "OnebitLamb"))
MASTERS = {None: None, "FP16_Optimizer": "fp32_groups_flat", "FP16_UnfusedOptimizer": "fp32_groups"}


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients(t, rank, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + 10 * t + rank)
    return [(scale * torch.randn(shape, generator=generator)) for shape in SHAPES]


def near(ours, theirs, what, tolerance):
    peak = theirs.abs().max().item() if theirs.numel() else 0.0
    torch.testing.assert_close(ours.detach().reshape(-1).float(), theirs.detach().reshape(-1).float(), rtol=0,
                               atol=tolerance * peak, equal_nan=True, msg=lambda text: "%s: %s" % (what, text))


class Side:
    """One of the two optimizers, with its parameters and engine."""

    def __init__(self, namespace, name, compat, engine=originals.Engine, groups=None, dtype=torch.float32, **options):
        self.params = [torch.nn.Parameter(w) for w in weights(dtype)]
        self.engine = engine()
        groups = groups or [{"params": [0, 1]}, {"params": [2], "weight_decay": 0.05}]
        made = [{**{key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()},
                 "params": [self.params[i] for i in group["params"]]} for group in groups]
        self.optimizer = getattr(namespace, name)(made, self.engine, lr=2e-3, comm_backend_name="compressed",
                                                  **OPTIONS[name], **options, **compat)
        self.wrapper = None

    def wrap(self, namespace, name, **options):
        self.wrapper = getattr(namespace, name)(self.optimizer, deepspeed=self.engine, verbose=False, **options)

    @property
    def flag(self):
        return getattr(self.engine, "pipeline_enable_backward_allreduce",
                       getattr(self.engine, "enable_backward_allreduce", None))

    def step(self, grads, average, form=None):
        if average and self.flag:
            for grad in grads:
                torch.distributed.all_reduce(grad)
                grad.div_(torch.distributed.get_world_size())
        for param, grad in zip(self.params, grads):
            param.grad = None if form or grad is None else grad.to(param.dtype)
        if form:
            return self.optimizer.step(grads=form(grads))
        return (self.wrapper or self.optimizer).step()

    def state_of(self, i, name):
        return self.optimizer.state[self.params[i]][name]


class Pair:
    """The original and our class."""

    def __init__(self, name, rank, wrapper=None, wrapper_options=None, **options):
        self.name, self.rank = name, rank
        original = originals.load()
        self.theirs = Side(original, name, {}, **options)
        self.ours = Side(dsopt.torch, name, {"compat": "deepspeed"}, **options)
        if wrapper:
            self.theirs.wrap(original, wrapper, **wrapper_options)
            self.ours.wrap(dsopt.torch, wrapper, **wrapper_options)
        self.masters = MASTERS[wrapper]

    def steps(self, begin, end, average=True, scale=1.0, bad=(), form=None):
        for t in range(begin, end):
            what = "%s, step %d" % (self.name, t)
            assert self.ours.flag == self.theirs.flag, "%s: %s, and the original has %s" % (what, self.ours.flag,
                                                                                            self.theirs.flag)
            grads = gradients(t, self.rank, scale)
            if (t, self.rank) in bad:
                grads[1][3] = float("inf")
            results = [side.step([grad.clone() for grad in grads], average, form) for side in (self.theirs, self.ours)]
            self.compare(what, results)

    def compare(self, what, results=(None, None)):
        ours, theirs = self.ours, self.theirs
        tolerance = 2e-6 if self.theirs.flag else 1e-5
        if not self.masters:
            for i, (p, q) in enumerate(zip(ours.params, theirs.params)):
                near(p, q, "%s, parameter %d" % (what, i), tolerance)
                for name in ("exp_avg", "exp_avg_sq"):
                    near(ours.state_of(i, name), theirs.state_of(i, name), "%s, %s %d" % (what, name, i), tolerance)
            return
        assert bool(results[0]) == bool(results[1]), "%s: the steps return %s" % (what, results)
        for p, q in zip(ours.params, theirs.params):  # one unit in the last place of 16 bits
            torch.testing.assert_close(p.detach().float(), q.detach().float(), rtol=1e-3, atol=1e-6)
        for p, q in zip(getattr(ours.wrapper, self.masters), getattr(theirs.wrapper, self.masters)):
            for a, b in zip(p, q) if isinstance(q, list) else [(p, q)]:
                near(a, b, what + ", masters", tolerance)
        names = ["use_grad_scaling", "dynamic_loss_scale", "cur_scale", "last_overflow_iter"]
        if theirs.wrapper.loss_scale_config.use_grad_scaling:  # otherwise the unfused wrapper counts (docs/compat.md)
            names.append("cur_iter")
        for name in names:
            found, expected = [getattr(side.wrapper.loss_scale_config, name) for side in (ours, theirs)]
            assert found == expected, "%s: %s is %s, and the original's %s" % (what, name, found, expected)
        assert ours.wrapper.loss_scale == theirs.wrapper.loss_scale, what


# ------------------------------------------------------------------------------------------------------- on each rank
def steps_are_those_of_the_original(rank):
    for name in OPTIONS:
        Pair(name, rank).steps(0, 16)


def flag_of_a_pipeline_is_that_of_the_original(rank):
    for name in OPTIONS:
        pair = Pair(name, rank, engine=originals.PipelineEngine)
        pair.steps(0, 10)
        assert pair.ours.engine.enable_backward_allreduce is False


def masks_hold_in_the_step_in_which_they_are_set(rank):
    mask = torch.tensor([1.0, 0, 1, 1, 0, 1, 1])
    for name in ("OnebitAdam", "ZeroOneAdam"):
        pair = Pair(name, rank, groups=[{"params": [0, 1]}, {"params": [2], "exp_avg_mask": mask}])
        pair.steps(0, 9)
        for side in (pair.ours, pair.theirs):
            side.optimizer.param_groups[1]["exp_avg_mask"] = mask.flip(0)
        pair.steps(9, 12)
        for side in (pair.ours, pair.theirs):
            side.optimizer.param_groups[1]["exp_avg_mask"][0] = 0  # in place
        pair.steps(12, 15)
        for side in (pair.ours, pair.theirs):
            del side.optimizer.param_groups[1]["exp_avg_mask"]
        pair.steps(15, 18)


def groups_that_never_freeze(rank):
    Pair("OnebitAdam", rank, groups=[{"params": [0, 2]}, {"params": [1], "non_freeze": True}]).steps(0, 12)


def hyper_parameters_that_change(rank):
    for name in OPTIONS:
        pair = Pair(name, rank)
        for begin, change in ((0, {}), (3, {"lr": 5e-3}), (5, {"betas": (0.8, 0.95)}), (8, {"eps": 1e-3}),
                              (11, {"weight_decay": 0.1})):
            for side in (pair.ours, pair.theirs):
                side.optimizer.param_groups[0].update(change)
            pair.steps(begin, begin + 3)


def a_freeze_step_that_changes(rank):
    for name, attribute in (("OnebitAdam", "freeze_step"), ("OnebitLamb", "freeze_step"),
                            ("ZeroOneAdam", "var_freeze_step")):
        for begin, value in ((3, 9), (2, 4)):
            pair = Pair(name, rank)
            pair.steps(0, begin)
            for side in (pair.ours, pair.theirs):
                setattr(side.optimizer, attribute, value)
            pair.steps(begin, 14)


def gradients_that_are_passed(rank):
    """A list or a generator is for the parameters of one group, a list of lists for those of each group."""
    one = [{"params": [0, 1, 2]}]
    for name in OPTIONS:
        for groups, form in ((one, list), (one, lambda grads: (grad for grad in grads)),
                             (None, lambda grads: [grads[:2], grads[2:]])):
            Pair(name, rank, groups=groups).steps(0, 10, form=form)


def a_load_sets_stage_and_engine(rank):
    """Tests a rollback to a checkpoint of the warm-up, and a new optimizer that loads one of the compressed stage."""
    for name in OPTIONS:
        pair = Pair(name, rank)
        pair.steps(0, 3)
        early = [saved(side) for side in (pair.theirs, pair.ours)]
        pair.steps(3, 10)
        late = [saved(side) for side in (pair.theirs, pair.ours)]
        for checkpoints in (early, late):
            # A rollback of the original's 0/1 Adam leaves its variance frozen (docs/compat.md).
            if checkpoints is late or name == "ZeroOneAdam":
                pair = Pair(name, rank)
                for side in (pair.theirs, pair.ours):  # the first call of an optimizer only counts
                    side.step([torch.zeros(shape) for shape in SHAPES], False)
            for side, file in zip((pair.theirs, pair.ours), checkpoints):
                load(side, file)
            if name == "ZeroOneAdam" and checkpoints is late:
                # The step updates the variance, and the original does not average the gradients (docs/compat.md).
                assert pair.ours.flag and not pair.theirs.flag
                pair.ours.engine.enable_backward_allreduce = False
            pair.steps(10, 18)


def saved(side):
    """Returns rank 0's checkpoint, on all ranks."""
    file = io.BytesIO()
    torch.save([side.optimizer.state_dict(), [p.detach() for p in side.params]], file)
    sent = [file.getvalue()]
    torch.distributed.broadcast_object_list(sent, src=0)
    return sent[0]


def load(side, file):
    state, values = torch.load(io.BytesIO(file))
    for param, value in zip(side.params, values):
        param.data.copy_(value)
    side.optimizer.load_state_dict(state)


def wrapped(rank, dtype, options, **more):
    for wrapper, name in WRAPPED:
        Pair(name, rank, wrapper, dict(options, low_precision_dtype=dtype), dtype=dtype, **more).steps(0, 14)


def wrappers_with_a_static_scale(rank):
    wrapped(rank, torch.float16, {"static_loss_scale": 8.0, "clip_grad": 0.5})


def wrappers_of_bfloat16(rank):
    wrapped(rank, torch.bfloat16, {"clip_grad": 1.0})


def wrappers_with_a_pipeline(rank):
    wrapped(rank, torch.float16, SCALE, engine=originals.PipelineEngine)


def wrappers_around_the_1_bit_family(rank):
    for wrapper, name in WRAPPED:
        pair = Pair(name, rank, wrapper, dict(SCALE, clip_grad=1.0), dtype=torch.float16)
        pair.steps(0, 4, scale=64.0)
        pair.steps(4, 16, scale=64.0, bad=[(9, 1), (10, 0)])


# One set of processes per number of ranks, as the import of DeepSpeed takes seconds.
ALL = {
    1: (steps_are_those_of_the_original, wrappers_around_the_1_bit_family),
    2: (steps_are_those_of_the_original, flag_of_a_pipeline_is_that_of_the_original,
        masks_hold_in_the_step_in_which_they_are_set, groups_that_never_freeze, hyper_parameters_that_change,
        a_freeze_step_that_changes, gradients_that_are_passed, a_load_sets_stage_and_engine,
        wrappers_around_the_1_bit_family, wrappers_with_a_static_scale, wrappers_of_bfloat16, wrappers_with_a_pipeline),
    3: (steps_are_those_of_the_original,),
}


@originals.needed
class Originals(TestCase):
    def test_steps_match_on_one_rank(self):
        run_ranks(self, __file__, "1", 1)

    def test_steps_match_on_two_ranks(self):
        run_ranks(self, __file__, "2", 2)

    def test_steps_match_on_three_ranks(self):
        run_ranks(self, __file__, "3", 3)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        ranks = int(sys.argv[2])
        child(ALL[ranks], int(sys.argv[3]), sys.argv[4], ranks)
    else:
        main()
