# SPDX-License-Identifier: Apache-2.0
"""Attributes and group entries of DeepSpeed's classes that a program sets between steps."""
import itertools
import sys
import unittest

from support import TestCase, child, give_grads, main, params_of, run_ranks, torch

from dsopt.torch import OnebitAdam, OnebitLamb, ZeroOneAdam

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
FAMILY = ((OnebitAdam, {"freeze_step": 2}), (ZeroOneAdam, {"var_freeze_step": 2}), (OnebitLamb, {"freeze_step": 2}))
MODES = tuple(itertools.product(FAMILY, (None, "deepspeed")))


def moved_by_a_step(params, optimizer, seed):
    """Which elements a step moves: those that have momentum after it. 0/1 Adam in compat mode takes its local change
    back, which rounds."""
    start = [p.detach().clone() for p in params]
    give_grads(params, seed=seed)
    optimizer.step()
    now = [((p.detach() - old).abs() > 1e-6).tolist() for p, old in zip(params, start)]
    momentum = [(optimizer.state[p]["exp_avg"] != 0).tolist() for p in params]
    assert now == momentum, (now, momentum)
    return now


def masks_change(rank=0):
    """Every way to change exp_avg_mask counts from the next step on. After the freeze each step exchanges here."""
    for (kind, options), compat in MODES:
        params, seeds = params_of((4,), (2, 4)), itertools.count(10 * rank)
        optimizer = kind([{"params": params[:1]}, {"params": params[1:]}], lr=0.01, compat=compat, **options)
        group, second = optimizer.param_groups

        def expect(first, other=(1, 1, 1, 1)):
            found = moved_by_a_step(params, optimizer, next(seeds))
            wanted = [[bool(x) for x in first], [[bool(x) for x in other]] * 2]
            assert found == wanted, (kind, compat, found, wanted)

        for seed in range(5):
            give_grads(params, seed=100 + seed)
            optimizer.step()
        expect([1, 1, 1, 1])
        group["exp_avg_mask"] = torch.tensor([1.0, 1, 0, 0])  # set after the first step
        expect([1, 1, 0, 0])
        group["exp_avg_mask"] = torch.tensor([0.0, 1, 1, 0])  # replaced
        expect([0, 1, 1, 0])
        group["exp_avg_mask"][3] = 1  # in place
        expect([0, 1, 1, 1])
        group["exp_avg_mask"].data[1] = 0  # in place, without a new version of the tensor
        expect([0, 0, 1, 1])
        second["exp_avg_mask"] = torch.tensor([True, False, True, True])  # of another dtype and a shape to broadcast
        expect([0, 0, 1, 1], [1, 0, 1, 1])
        del group["exp_avg_mask"]
        expect([1, 1, 1, 1], [1, 0, 1, 1])
        assert "mask" not in optimizer.state[params[0]] and "mask" in optimizer.state[params[1]]
        second["exp_avg_mask"] = None
        expect([1, 1, 1, 1])
        with torch.inference_mode():
            group["exp_avg_mask"] = torch.tensor([1.0, 0, 1, 1])
        expect([1, 0, 1, 1])
        with torch.inference_mode():
            group["exp_avg_mask"][0] = 0  # a tensor that has no version
        expect([0, 0, 1, 1])


CASES = [masks_change]


class Masks(TestCase):
    def test_a_mask_counts_from_the_next_step_on(self):
        masks_change()

    def test_what_is_no_tensor_is_refused_and_the_next_step_goes_on(self):
        params = params_of((4,))
        optimizer = OnebitAdam(params)
        give_grads(params)
        optimizer.step()
        start = params[0].detach().clone()
        optimizer.param_groups[0]["exp_avg_mask"] = [1.0, 1, 0, 0]
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, r"param_groups\[0\]: exp_avg_mask is a list, and must be a tensor"):
                optimizer.step()
        self.assert_same(params, [start])
        optimizer.param_groups[0]["exp_avg_mask"] = None
        optimizer.step()
        self.assertFalse(torch.equal(params[0], start))


@unittest.skipUnless(GLOO, "torch is built without gloo")
class TwoProcesses(TestCase):
    def test_cases(self):
        run_ranks(self, __file__, "all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(CASES, int(sys.argv[3]), sys.argv[4])
    else:
        main()
