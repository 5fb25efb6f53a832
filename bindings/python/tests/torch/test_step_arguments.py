# SPDX-License-Identifier: Apache-2.0
"""Arguments of the steps of DeepSpeed's classes: closures, gradients, output copies, a scale and norms; and the initial
step number of a FusedAdam group."""
import copy
import itertools
import math
import sys
import unittest

from support import TestCase, child, give_grads, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FusedAdam, FusedLamb, FusedLion, OnebitAdam, OnebitLamb, ZeroOneAdam

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
SHAPES = ((4,), (3, 2), (5,))
FAMILY = ((OnebitAdam, {"freeze_step": 2}), (ZeroOneAdam, {"var_freeze_step": 2}), (OnebitLamb, {"freeze_step": 2}))
TAKE_GRADS = tuple(itertools.product(((FusedLamb, {}), *FAMILY), (None, "deepspeed")))


def two_groups(kind, options, compat):
    params = params_of(*SHAPES)
    return params, kind([{"params": params[:2]}, {"params": params[2:]}], lr=0.01, compat=compat, **options)


def grads_of(params, seed):
    generator = torch.Generator().manual_seed(3000 + seed)
    return [torch.randn(p.shape, generator=generator) for p in params]


def step_with_grads(optimizer, params, grads, form, seed):
    """Takes a step with these gradients, or None, passed in one of the forms."""
    junk = grads_of(params, 500 + seed)
    if form == "own":
        for param, grad in zip(params, grads):
            param.grad = grad
        return optimizer.step()
    for param, grad, other in zip(params, grads, junk):
        param.grad = other if grad is not None else None  # ignored
    if form == "lists":
        return optimizer.step(grads=[grads[:2], grads[2:]])
    if form == "iterators":
        return optimizer.step(None, [(grad for grad in grads[:2]), tuple(grads[2:])])
    for param in params[2:]:
        param.grad = grads[2]
    if form == "mixed":  # None: the parameter's own
        params[0].grad = grads[0]
        return optimizer.step(grads=[[None, grads[1]], None])
    raise AssertionError(form)


def grads_in_every_form(rank=0):
    for ((kind, options), compat), form in itertools.product(TAKE_GRADS, ("lists", "iterators", "mixed")):
        params, ours = two_groups(kind, options, compat)
        others, theirs = two_groups(kind, options, compat)
        for seed in range(7):
            grads = grads_of(params, 10 * seed + rank)
            if seed == 4 and form != "mixed":
                grads[1] = None  # in both forms: the parameter has no gradient
            before = [None if g is None else g.clone() for g in grads]
            step_with_grads(ours, params, grads, form, seed)
            step_with_grads(theirs, others, [None if g is None else g.clone() for g in grads], "own", seed)
            for grad, old in zip(grads, before):
                assert grad is None or torch.equal(grad, old)
            assert all(map(torch.equal, params, others)), (kind, compat, form, seed)


def grads_of_group_0(rank=0):
    """A list of tensors or a generator. Parameters of other groups then have no gradient, regardless of .grad."""
    for ((kind, options), compat), form in itertools.product(TAKE_GRADS, (list, tuple, iter)):
        params, ours = two_groups(kind, options, compat)
        others, theirs = two_groups(kind, options, compat)
        for seed in range(6):
            grads = grads_of(params, 10 * seed + rank)
            some = grads[:1 if seed == 3 else 2]  # parameters after the end of a short list have no gradient
            for i, (param, other) in enumerate(zip(params, others)):
                param.grad, other.grad = torch.full_like(param, 9), grads[i] if i < len(some) else None
            ours.step(grads=form(some))
            theirs.step()
            assert all(map(torch.equal, params, others)), (kind, compat, form, seed)


def non_freeze(rank=0):
    """Such a group is stepped with the mean of the gradients, and its variance is never frozen."""
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    for compat in (None, "deepspeed"):
        params, others = params_of((4,), (3, 2)), params_of((4,), (3, 2))[1:]
        optimizer = OnebitAdam([{"params": params[:1]}, {"params": params[1:], "non_freeze": True}], lr=0.01,
                               freeze_step=3, compat=compat)
        reference = FusedAdam(others, lr=0.01, bias_correction=False)
        for seed in range(8):
            every = [grads_of(params, 10 * seed + r) for r in range(ranks)]
            mean = [sum(grads) / ranks for grads in zip(*every)]
            variance = [optimizer.state[p]["exp_avg_sq"].clone() if seed else None for p in params]
            frozen = optimizer.frozen
            for param, grad in zip(params, every[rank]):
                param.grad = grad
            optimizer.step()
            if frozen:
                assert torch.equal(optimizer.state[params[0]]["exp_avg_sq"], variance[0])
                assert not torch.equal(optimizer.state[params[1]]["exp_avg_sq"], variance[1])
            others[0].grad = mean[1]
            if compat is None:
                reference.step()
                torch.testing.assert_close(params[1], others[0])
        assert frozen
        if ranks > 1:
            for param in params:
                both = [torch.empty_like(param) for _ in range(ranks)]
                torch.distributed.all_gather(both, param.detach())
                assert torch.equal(*both), compat


CASES = [grads_in_every_form, grads_of_group_0, non_freeze]


class Grads(TestCase):
    def test_accepts_every_form_of_grads(self):
        grads_in_every_form()

    def test_list_is_for_the_parameters_of_group_0(self):
        grads_of_group_0()

    def test_non_freeze_groups_average_gradients(self):
        non_freeze()

    def test_first_gradient_may_be_passed_either_way(self):
        """FusedLamb has state for parameters that had a gradient."""
        params = params_of(*SHAPES)
        optimizer, grads = FusedLamb(params), grads_of(params, 0)
        optimizer.step(grads=grads[:1])
        self.assertEqual(set(optimizer.state), {params[0]})
        optimizer.step(grads=[None, grads[1]])
        self.assertEqual(set(optimizer.state), set(params[:2]))
        params[2].grad = grads[2]
        optimizer.step(grads=grads[:2])
        self.assertEqual(set(optimizer.state), set(params[:2]))
        optimizer.step()
        self.assertEqual([int(optimizer.state[p]["step"]) for p in params], [2, 2, 1])

    def test_accepts_gradients_of_another_dtype_and_order(self):
        for kind, options in ((FusedLamb, {}), *FAMILY):
            params, others = params_of((3, 2)), params_of((3, 2))
            ours, theirs = kind(params, **options), kind(others, **options)
            for seed in range(4):
                grad = grads_of(params, seed)[0].half()
                ours.step(grads=[grad.t().contiguous().t()])
                others[0].grad = grad.float()
                theirs.step()
                self.assert_same(params, others)

    def test_works_with_float32_masters(self):
        params, others = params_of((4,), dtype=torch.float16), params_of((4,), dtype=torch.float16)
        base = OnebitAdam(params, lr=0.01, freeze_step=2)
        wrapper = FP16_Optimizer(base, static_loss_scale=8.0)
        reference = FP16_Optimizer(OnebitAdam(others, lr=0.01, freeze_step=2), static_loss_scale=8.0)
        for seed in range(4):
            grad = grads_of(params, seed)[0].half()
            base.step(grads=[grad])
            others[0].grad = grad
            reference.step()
        self.assert_same(wrapper.fp32_groups_flat, reference.fp32_groups_flat)

    def test_rejects_invalid_grads(self):
        for kind, options in ((FusedLamb, {}), *FAMILY):
            params = params_of(*SHAPES)
            optimizer, grads = kind([{"params": params[:2]}, {"params": params[2:]}], **options), grads_of(params, 0)
            give_grads(params)
            optimizer.step()
            start = [p.detach().clone() for p in params]
            for wrong, text in (
                    (torch.ones(4), "grads is a Tensor, and must be None, a list"), (3, "grads is a int"),
                    ("ab", "grads is a str"), (grads, r"grads has 3 tensors for param_groups\[0\], which has 2"),
                    ([grads[:2], grads[2:], []], "grads has 3 lists, and the optimizer 2 groups"),
                    ([[grads[0], 1.0]], r"grads\[0\]\[1\] is a float, and must be a tensor or None"),
                    ([grads[1], grads[0]], r"the gradient of param_groups\[0\]\['params'\]\[0\] has shape"),
                    ([grads[0].double()], r"the gradient of param_groups\[0\]\['params'\]\[0\] is float64"),
                    ([grads[0].to("meta")], r"the gradient of param_groups\[0\]\['params'\]\[0\] is on device meta")):
                with self.assertRaisesRegex(ValueError, text):
                    optimizer.step(grads=wrong)
            with self.assertRaisesRegex(RuntimeError, r"\['params'\]\[1\] is sparse"):
                optimizer.step(grads=[grads[0], grads[1].to_sparse()])
            self.assert_same(params, start)
            optimizer.step()
            self.assertFalse(torch.equal(params[0], start[0]))

    def test_grads_with_grad_scaler_are_refused(self):
        optimizer = OnebitAdam(params_of((4,)))
        optimizer.grad_scale = torch.tensor(2.0)
        with self.assertRaisesRegex(dsopt.UnsupportedError, "OnebitAdam.step: grads is not supported with GradScaler"):
            optimizer.step(grads=[torch.ones(4)])


class Closures(TestCase):
    def test_is_called_first_with_gradients_enabled_and_its_value_returned(self):
        for kind, options in ((FusedAdam, {}), (FusedLamb, {}), (FusedLion, {}), *FAMILY):
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            ours, theirs, calls = kind(params, **options), kind(others, **options), []

            def closure(params=params, ours=ours, calls=calls):
                calls.append(torch.is_grad_enabled())
                ours.zero_grad()
                loss = sum((p ** 2).sum() for p in params)
                loss.backward()
                return loss

            for _ in range(4):
                theirs.zero_grad()
                expected = sum((p ** 2).sum() for p in others)
                expected.backward()
                theirs.step()
                with torch.no_grad():
                    loss = ours.step(closure)
                self.assertEqual(loss.item(), expected.item())
            self.assertEqual(calls, [True] * 4)
            self.assert_same(params, others)
            self.assertIsNone(ours.step())

    def test_closure_may_compute_the_grads(self):
        for kind, options in ((FusedLamb, {}), *FAMILY):
            params, others = params_of((4,)), params_of((4,))
            ours, theirs, made = kind(params, **options), kind(others, **options), []
            for seed in range(3):
                give_grads(others, seed=seed)
                made[:] = []
                result = ours.step(lambda: made.append(others[0].grad) or 7, (grad for grad in made))
                theirs.step()
                self.assertEqual(result, 7)
            self.assert_same(params, others)

    def test_an_exception_of_the_closure_changes_nothing(self):
        params = params_of((4,))
        for kind in (OnebitAdam, FusedLamb, FusedAdam, FusedLion):
            optimizer, start = kind(params), params[0].detach().clone()
            with self.assertRaises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
            self.assert_same(params, [start])
            self.assertFalse(optimizer.state)


class Lamb(TestCase):
    def test_arguments_have_the_originals_order(self):
        params, others = params_of((4,)), params_of((4,))
        ours, theirs = FusedLamb(params, max_grad_norm=1.0), FusedLamb(others, max_grad_norm=1.0)
        grad, copies = torch.tensor([3.0, 4, 0, 0]), [torch.empty(4) for _ in range(2)]
        ours.step(None, [grad], [copies[0]], 2.0, [5.0])
        theirs.step(closure=None, grads=[grad], output_params=[copies[1]], scale=2.0, grad_norms=[5.0])
        self.assert_same(params + [copies[0]], others + [copies[1]])
        self.assert_same([params[0]], [copies[0]])

    def test_scale_divides_gradients(self):
        for compat in (None, "deepspeed"):
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            ours, theirs = FusedLamb(params, lr=0.01, compat=compat), FusedLamb(others, lr=0.01, compat=compat)
            for seed in range(3):
                grads = grads_of(params, seed)
                ours.step(grads=[1024 * g for g in grads], scale=1024)
                theirs.step(grads=grads)
                give_grads(params, seed=seed, scale=8.0)
                give_grads(others, seed=seed)
                ours.step(scale=torch.tensor(8.0))
                theirs.step()
            self.assert_same(params, others)
            for scale in (0, -1.0, float("nan"), float("inf"), "x", None):
                with self.assertRaisesRegex(ValueError, "scale is "):
                    ours.step(scale=scale)
            self.assert_same(params, others)

    def test_norms_clip_like_the_original(self):
        """By (norm / scale + 1e-6) / max_grad_norm, if that is above 1."""
        for compat, scale, norm in itertools.product((None, "deepspeed"), (1.0, 4.0), (0.5, 40.0)):
            params, others = params_of((4,), (5,)), params_of((4,), (5,))
            ours = FusedLamb([{"params": params[:1], "max_grad_norm": 2.0}, {"params": params[1:]}], compat=compat)
            theirs = FusedLamb(others, compat=compat)
            for seed in range(3):
                grads = grads_of(params, seed)
                clip = max((norm / scale + 1e-6) / 2.0, 1.0)
                ours.step(grads=[grads[:1], grads[1:]], scale=scale, grad_norms=[norm, None])
                theirs.step(grads=[grads[0] / (clip * scale), grads[1] / scale])
            self.assert_close(params, others, rtol=1e-5, atol=1e-7)

    def test_step_computes_missing_norms(self):
        params, others = params_of((4,)), params_of((4,))
        ours, theirs = FusedLamb(params, max_grad_norm=1.0), FusedLamb(others, max_grad_norm=1.0)
        for seed in range(3):
            grad = 10 * grads_of(params, seed)[0]
            ours.step(grads=[grad], scale=2.0)
            theirs.step(grads=[grad], scale=2.0, grad_norms=[torch.linalg.vector_norm(grad)])
        self.assert_close(params, others, rtol=1e-6, atol=1e-7)

    def test_rejects_invalid_norms(self):
        params = params_of(*SHAPES)
        optimizer = FusedLamb([{"params": params[:2]}, {"params": params[2:]}], max_grad_norm=1.0)
        give_grads(params)
        for norms, kind, text in (([1.0], ValueError, "grad_norms has 1 entries, and the optimizer 2 groups"),
                                  ([[1.0, 2.0], 1.0], dsopt.UnsupportedError, r"grad_norms\[0\] has a norm per param"),
                                  ([1.0, None], ValueError, r"grad_norms\[1\] is None"),
                                  ([1.0, "x"], ValueError, "grad_norms is 'x', and must be a number")):
            with self.assertRaisesRegex(kind, text):
                optimizer.step(grad_norms=norms)
        self.assertFalse(optimizer.state)
        optimizer.step(grad_norms=[1.0, [1.0]])  # of the group's only parameter
        for group in optimizer.param_groups:
            group["max_grad_norm"] = 0.0
        optimizer.step(grad_norms=[[1.0, 2.0]])  # nothing is clipped, and the original also ignores them

    def test_writes_output_params(self):
        for compat, dtype in itertools.product((None, "deepspeed"), (torch.float16, torch.bfloat16, torch.float32)):
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            groups = [{"params": params[:2]}, {"params": params[2:]}]
            ours, theirs = FusedLamb(groups, compat=compat), FusedLamb(others, compat=compat)
            copies = [torch.full_like(p, 77, dtype=dtype) for p in params]
            for seed in range(3):
                give_grads(params, others, seed=seed)
                ours.step(output_params=[copies[:2], copies[2:]])
                theirs.step()
                self.assert_same(params, others)
                self.assert_same(copies, [p.detach().to(dtype) for p in params])
            old = copy.deepcopy(copies)
            give_grads(params, others, seed=9)
            params[0].grad = others[0].grad = None
            ours.step(output_params=(c for c in copies[:2]))  # those of group 0
            theirs.step()
            self.assert_same(params, others)
            self.assert_same([copies[0], copies[2]], [old[0], old[2]])  # no gradient; no output
            self.assert_same([copies[1]], [params[1].detach().to(dtype)])
            old = copy.deepcopy(copies)
            ours.step()  # outputs apply to one step only
            self.assert_same(copies, old)

    def test_rejects_invalid_output_params(self):
        params = params_of((4,), (3, 2))
        optimizer = FusedLamb(params)
        give_grads(params)
        optimizer.step()
        start = [p.detach().clone() for p in params]
        for wrong, text in (([torch.empty(5)], r"the output of param_groups\[0\]\['params'\]\[0\] has shape \(5,\)"),
                            ([None, torch.empty(2, 3).t()], "the output of .* does not have the strides"),
                            ([torch.empty(4, dtype=torch.float64)], "the output of .* is float64"),
                            ([torch.empty(4, device="meta")], "the output of .* is on device meta"),
                            ([1], r"output_params\[0\]\[0\] is a int, and must be a tensor or None")):
            with self.assertRaisesRegex((ValueError, dsopt.UnsupportedError), text):
                optimizer.step(output_params=wrong)
        self.assert_same(params, start)
        optimizer.step()
        self.assertFalse(torch.equal(params[0], start[0]))


class StepOfTheGroup(TestCase):
    def test_first_state_starts_at_the_step_of_the_group(self):
        for compat in (None, "deepspeed"):
            params, others = params_of((4,), (5,)), params_of((4,), (5,))
            ours = FusedAdam([{"params": params, "step": 10}], lr=0.1, compat=compat)
            params[0].grad = torch.ones(4)
            ours.step()
            self.assertEqual(int(ours.state[params[0]]["step"]), 11)
            # AdamW with zero moments after 10 steps.
            step = 0.1 * (0.1 / (1 - 0.9 ** 11)) / (math.sqrt(0.001 / (1 - 0.999 ** 11)) + 1e-8)
            self.assert_close(params[0].detach(), others[0].detach() - step, rtol=1e-4, atol=1e-6)
            ours.param_groups[0]["step"] = 3
            params[1].grad = torch.ones(5)  # a parameter whose state is created later
            ours.step()
            found = [int(ours.state[p]["step"]) for p in params]
            # The original counts per group, at its last parameter with a gradient.
            self.assertEqual(found, [12, 4] if compat is None else [11, 4], compat)

    def test_existing_state_overrides_the_group(self):
        params = params_of((4,))
        first = FusedAdam(params)
        give_grads(params)
        first.step()
        saved = first.state_dict()
        saved["param_groups"][0]["step"] = 50
        again = FusedAdam(params)
        again.load_state_dict(saved)
        give_grads(params)
        again.step()
        self.assertEqual(int(again.state[params[0]]["step"]), 2)

    def test_works_with_a_wrapper(self):
        # In compat mode the wrapper takes a step when it is constructed.
        for compat, expected in ((None, 11), ("deepspeed", 12)):
            params = params_of((4,), dtype=torch.float16)
            wrapper = FP16_Optimizer(FusedAdam([{"params": params, "step": 10}], compat=compat))
            give_grads(params)
            wrapper.step()
            self.assertEqual(int(wrapper.state[params[0]]["step"]), expected)

    def test_other_classes_start_at_0(self):
        """Like FusedLamb and the 1-bit family of DeepSpeed."""
        for kind in (FusedLamb, OnebitAdam, ZeroOneAdam, OnebitLamb, dsopt.torch.AdamW):
            params = params_of((4,))
            optimizer = kind([{"params": params, "step": 10}])
            give_grads(params)
            optimizer.step()
            self.assertEqual(int(optimizer.state[params[0]]["step"]), 1)

    def test_rejects_invalid_values(self):
        for value in ("x", -1, 1.5, float("nan"), 2**31, None):
            params = params_of((4,))
            optimizer = FusedAdam([{"params": params, "step": value}])
            give_grads(params)
            start = params[0].detach().clone()
            with self.assertRaisesRegex(ValueError, r"param_groups\[0\]: step is "):
                optimizer.step()
            self.assert_same(params, [start])


@unittest.skipUnless(GLOO, "torch is built without gloo")
class TwoProcesses(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(CASES, int(sys.argv[3]), sys.argv[4])
    else:
        main()
