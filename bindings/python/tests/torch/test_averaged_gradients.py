# SPDX-License-Identifier: Apache-2.0
"""Warnings of the 1-bit family: gradients that were averaged before a compressed step, and weights that differ."""
import copy
import functools
import sys
import unittest
import warnings

from support import TestCase, child, main, params_of, run_ranks, torch

from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, OnebitAdam, OnebitLamb, ZeroOneAdam
from dsopt.torch import _hash

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
SHAPES = ((7, 3), (1, ), (0, ), (40, ))
FAMILY = {OnebitAdam: dict(freeze_step=3), OnebitLamb: dict(freeze_step=3),
          ZeroOneAdam: dict(var_freeze_step=12, var_update_scaler=2, local_step_scaler=2)}


class Engine:
    enable_backward_allreduce = True


class Run:
    """An optimizer on this rank, and the warnings of its steps."""

    def __init__(self, kind, rank, dtype=torch.float32, wrapper=None, seed=0, **options):
        self.rank, self.params, self.count = rank, params_of(*SHAPES, dtype=dtype, seed=seed), 0
        self.optimizer = self.outer = kind(self.params, lr=1e-3, **FAMILY[kind], **options)
        if wrapper:
            self.outer = wrapper(self.optimizer, low_precision_dtype=dtype, static_loss_scale=1., verbose=False)

    def gradients(self, of):
        generator = torch.Generator().manual_seed(100 * self.count + of)
        return [torch.randn(p.shape, generator=generator) for p in self.params]

    def step(self, averaged, change=None):
        """Returns the texts of the warnings."""
        self.count += 1
        grads = self.gradients(self.rank)
        if averaged:
            for grad in grads:
                torch.distributed.all_reduce(grad)
                grad /= torch.distributed.get_world_size()
        for param, grad in zip(self.params, change(grads) if change else grads):
            param.grad = None if grad is None else grad.to(param.dtype)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            self.outer.step()
        return [str(warning.message) for warning in found]

    def steps(self, count, averaged, change=None):
        return [text for _ in range(count) for text in self.step(averaged, change)]


def expect(run, texts, count, text="engine.enable_backward_allreduce = False"):
    """Asserts that rank 0 and no other rank logged the warning."""
    assert len(texts) == (count if run.rank == 0 else 0), (type(run.optimizer).__name__, texts)
    for found in texts:
        assert text in found and type(run.optimizer).__name__ in found, found


def averaged_gradients_cause_one_warning(rank, kind, compat):
    run = Run(kind, rank, compat=compat)
    while run.optimizer.next_reduction() == "full":
        assert not run.step(True), run.count
        assert run.count < 20
    expect(run, run.step(True), 1)
    assert not run.steps(6, True)
    state = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(state)
    expect(run, run.steps(20, True), 1)


def local_gradients_cause_no_warning(rank, kind):
    for compat in (None, "deepspeed"):
        run = Run(kind, rank, compat=compat)
        assert not run.steps(16, False)


def wrappers(rank):
    for kind, wrapper in ((OnebitAdam, FP16_Optimizer), (OnebitLamb, FP16_UnfusedOptimizer)):
        for dtype in (torch.float16, torch.bfloat16):
            run = Run(kind, rank, dtype, wrapper)
            expect(run, run.steps(8, True), 1)
            assert not Run(kind, rank, dtype, wrapper).steps(8, False)


def grads_argument_is_checked(rank):
    for averaged in (True, False):
        run = Run(OnebitAdam, rank)
        texts = []
        for _ in range(6):
            run.count += 1
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                run.optimizer.step(grads=run.gradients(0 if averaged else rank))
            texts += [str(warning.message) for warning in found]
        expect(run, texts, int(averaged))


def zero_gradients_cause_no_warning(rank):
    """Zero gradients cause no warning; the first step with other gradients does."""
    for nothing in (lambda grads: [torch.zeros_like(g) for g in grads], lambda grads: [None] * len(grads)):
        run = Run(OnebitAdam, rank)
        run.steps(3, True)
        assert not run.steps(3, True, nothing)
        expect(run, run.steps(3, True), 1)


def overflow_causes_no_warning(rank):
    run = Run(OnebitAdam, rank)
    run.steps(3, True)

    def bad(grads):
        grads[0][0, 0] = float("nan")
        return grads

    assert not run.steps(2, True, bad)
    expect(run, run.steps(2, True), 1)


def a_rank_without_gradients_participates(rank):
    """With 2 ranks: neither has equal gradients, and neither waits."""
    for kind in FAMILY:
        run = Run(kind, rank)
        assert not run.steps(16, False, lambda grads: grads if rank else [None] * len(grads))
        run = Run(kind, rank)
        assert not run.steps(16, False, lambda grads: [None if i == rank else g for i, g in enumerate(grads)])


def different_weights_cause_a_warning(rank):
    for kind in FAMILY:
        run = Run(kind, rank, seed=rank)
        expect(run, run.steps(11, False), 1, "the weights of the 2 ranks differ")


def local_steps_of_0_1_adam_may_change_weights_differently(rank):
    run = Run(ZeroOneAdam, rank)
    assert not run.steps(12, False)
    while run.optimizer.next_reduction() != "local":
        assert not run.step(False)
    run.step(False)
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    assert not run.steps(8, False)


def engines(rank):
    """Tests an engine that obeys its flag, and one that does not."""
    for obeys in (True, False):
        run = Run(OnebitAdam, rank)
        run.optimizer.deepspeed = engine = Engine()
        texts = []
        for _ in range(8):
            texts += run.step(engine.enable_backward_allreduce or not obeys)
        expect(run, texts, 0 if obeys else 1)


def a_rank_that_makes_new_plans_participates_once(rank):
    run = Run(OnebitAdam, rank)

    def new_plan(grads):
        if rank == 0:
            run.optimizer._plans = None
        return grads

    expect(run, run.steps(9, True, new_plan), 1)


def copies(rank):
    run = Run(OnebitAdam, rank)
    run.steps(2, True)
    run.optimizer = run.outer = copy.deepcopy(run.optimizer)
    run.params = run.optimizer.param_groups[0]["params"]
    expect(run, run.steps(5, True), 1)


CASES = [functools.partial(averaged_gradients_cause_one_warning, kind=kind, compat=compat) for kind in FAMILY
         for compat in (None, "deepspeed")]
CASES += [functools.partial(local_gradients_cause_no_warning, kind=kind) for kind in FAMILY]
CASES += [wrappers, grads_argument_is_checked, zero_gradients_cause_no_warning, overflow_causes_no_warning,
          a_rank_without_gradients_participates, different_weights_cause_a_warning,
          local_steps_of_0_1_adam_may_change_weights_differently, engines,
          a_rank_that_makes_new_plans_participates_once, copies]


@unittest.skipUnless(GLOO, "torch is built without gloo")
class TwoProcesses(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "all")


class OneRank(TestCase):
    def test_one_rank_never_warns(self):
        for kind in FAMILY:
            self.assertEqual(Run(kind, 0).steps(16, False), [])

    def test_process_group_of_one_rank_never_warns(self):
        if not GLOO:
            self.skipTest("torch is built without gloo")
        run_ranks(self, __file__, "one", 1)


class Hash(TestCase):
    def hash(self, *tensors):
        return int(_hash.hash_of(enumerate(tensors), torch.device("cpu")))

    def test_equal_bits_have_equal_hashes(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float64):
            a = torch.randn(5, 3).to(dtype)
            self.assertEqual(self.hash(a), self.hash(a.clone()))
            self.assertEqual(self.hash(a.t()), self.hash(a.t().contiguous()))
            b = a.clone()
            b[4, 2] += 0.01
            self.assertNotEqual(self.hash(a), self.hash(b))

    def test_hash_depends_on_positions_and_tensors(self):
        a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
        self.assertNotEqual(self.hash(a), self.hash(b))
        self.assertNotEqual(self.hash(a, b), self.hash(b, a))
        self.assertNotEqual(self.hash(a, a), self.hash(b, b))
        self.assertEqual(self.hash(torch.empty(0), a), self.hash(torch.empty(0, 3), a))

    def test_hash_covers_edges_of_chunks(self):
        a = torch.randn(2 * _hash.CHUNK + 1)
        for place in (0, _hash.CHUNK - 1, _hash.CHUNK, 2 * _hash.CHUNK):
            b = a.clone()
            b[place] = -b[place]
            self.assertNotEqual(self.hash(a), self.hash(b), place)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        ranks = 2 if sys.argv[2] == "all" else 1
        cases = CASES if ranks == 2 else [functools.partial(local_gradients_cause_no_warning, kind=kind)
                                          for kind in FAMILY]
        child(cases, int(sys.argv[3]), sys.argv[4], ranks)
    else:
        main()
