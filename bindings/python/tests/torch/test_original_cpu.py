# SPDX-License-Identifier: Apache-2.0
"""DeepSpeedCPUAdam and DeepSpeedCPULion compared with DeepSpeed's.

The originals step with extensions that DeepSpeed compiles. Tests of steps run if extensions.py has built them, which
bindings/python/check does.
"""
import copy
import importlib.util
import inspect
import os
import re
import sys
import unittest

import extensions
import originals
from support import TestCase, child, give_grads, main, params_of, run_ranks, torch
from test_attributes import names_in, rows_of

from dsopt.torch import DeepSpeedCPUAdam, DeepSpeedCPULion

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
# DeepSpeedCPULion of 0.19.6 masks the sign with the bits of -1.0 in its vector loop, from 8 or 16 elements on, so that
# its updates differ from lr. Its scalar loop is correct.
SHAPES = {DeepSpeedCPUAdam: ((7, 3), (5,), (1,), (2000,)), DeepSpeedCPULion: ((2, 3), (7,), (1,))}
EXTENSIONS = {DeepSpeedCPUAdam: "cpu_adam", DeepSpeedCPULion: "cpu_lion"}
check = unittest.TestCase()


class Builder:
    """Replaces DeepSpeed's builder: loads the built extension."""

    def __init__(self, path):
        self.path = path

    def __call__(self):
        return self

    def load(self):
        name = os.path.splitext(os.path.basename(self.path))[0]
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self.path)
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]


def original_of(kind):
    original = getattr(originals.load(), kind.__name__)
    path = extensions.path(os.path.basename(sys.argv[2]), EXTENSIONS[kind])
    if os.path.exists(path):
        builder = {DeepSpeedCPUAdam: "CPUAdamBuilder", DeepSpeedCPULion: "CPULionBuilder"}[kind]
        setattr(sys.modules[original.__module__], builder, Builder(path))
    return original


def signatures_and_names(kind):
    original = original_of(kind)
    methods = ("step", "step_subgroup", "rollback_subgroup") if kind is DeepSpeedCPUAdam else ("step",)
    for ours, theirs in ((kind, original), *((getattr(kind, name), getattr(original, name)) for name in methods)):
        ours, theirs = [[(name, argument.default) for name, argument in inspect.signature(call).parameters.items()
                         if argument.kind is not argument.KEYWORD_ONLY] for call in (ours, theirs)]
        check.assertEqual(ours, theirs, kind)
    listed = {name for first, _ in rows_of(kind) for name in names_in(first)}
    found = set(inspect.signature(original).parameters) | {name for name in vars(original) if name[:2] != "__"}
    found |= set(re.findall(r"self\.(\w+) = ", inspect.getsource(original)))
    check.assertLessEqual(found, listed | {"state"}, kind)


def steps(kind):
    """Compares weights, state and its keys. Both have float32 moments."""
    original = original_of(kind)
    options = [dict(), dict(weight_decay=0.1, betas=(0.8, 0.95), lr=1e-2)]
    if kind is DeepSpeedCPUAdam:
        options += [dict(adamw_mode=False, weight_decay=0.1), dict(bias_correction=False, eps=1e-6)]
    for dtype, tolerance in ((torch.float32, dict(rtol=2e-5, atol=1e-6)),
                             (torch.bfloat16, dict(rtol=1.6e-2, atol=1e-3)),
                             (torch.float16, dict(rtol=2e-3, atol=1e-4))):
        for more in options:
            params, others = [params_of(*SHAPES[kind], dtype=dtype) for _ in range(2)]
            ours, theirs = kind(params, **more), original(others, **more)
            for seed in range(6):
                give_grads(params, others, seed=seed)
                ours.step()
                theirs.step()
            for p, q in zip(params, others):
                torch.testing.assert_close(p.detach(), q.detach(), **tolerance)
                a, b = ours.state[p], theirs.state[q]
                unused = {"exp_avg_sq"} if kind is DeepSpeedCPULion else set()
                check.assertEqual(set(a), set(b) - unused)
                check.assertEqual(float(a["step"]), float(b["step"]))
                for name in set(a) - {"step"}:
                    check.assertEqual(a[name].dtype, b[name].dtype)
                    torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
            check.assertEqual({key for key in ours.param_groups[0]}, set(theirs.param_groups[0]))


def moments_of_16_bit_parameters(kind):
    """fp32_optimizer_states=False. The originals' have the dtype of the parameter, and load here."""
    original = original_of(kind)
    for dtype, tolerance in ((torch.bfloat16, dict(rtol=2e-2, atol=2e-3)), (torch.float16, dict(rtol=5e-3, atol=1e-3))):
        params, others = [params_of(*SHAPES[kind], dtype=dtype) for _ in range(2)]
        ours, theirs = [each(p, fp32_optimizer_states=False) for each, p in ((kind, params), (original, others))]
        for seed in range(6):
            give_grads(params, others, seed=seed)
            ours.step()
            theirs.step()
        again = kind([torch.nn.Parameter(q.detach().clone()) for q in others], fp32_optimizer_states=False)
        again.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for p, q, r in zip(params, others, again.param_groups[0]["params"]):
            torch.testing.assert_close(p.detach(), q.detach(), **tolerance)
            for name in set(ours.state[p]) - {"step"}:
                check.assertEqual(ours.state[p][name].dtype, torch.bfloat16)
                check.assertEqual(theirs.state[q][name].dtype, dtype)
                check.assertTrue(torch.equal(again.state[r][name], theirs.state[q][name].bfloat16()), name)
        give_grads(again.param_groups[0]["params"], others, seed=6)
        again.step()
        theirs.step()
        for q, r in zip(others, again.param_groups[0]["params"]):
            torch.testing.assert_close(r.detach(), q.detach(), **tolerance)


def state_dicts_load_into_each_other(kind):
    original = original_of(kind)
    for there, back in ((original, kind), (kind, original)):
        params, others = [params_of(*SHAPES[kind]) for _ in range(2)]
        first = there(params)
        for seed in range(3):
            give_grads(params, seed=seed)
            first.step()
        with torch.no_grad():
            for p, q in zip(params, others):
                q.copy_(p)
        second = back(others)
        saved = copy.deepcopy(first.state_dict())
        for state in saved["state"].values() if back is original else ():
            state["step"] = int(state["step"])  # the extension does not accept a tensor
            state.setdefault("exp_avg_sq", torch.zeros_like(state["exp_avg"]))
        second.load_state_dict(saved)
        for seed in range(3, 5):
            give_grads(params, others, seed=seed)
            first.step()
            second.step()
        for p, q in zip(params, others):
            torch.testing.assert_close(p.detach(), q.detach(), rtol=2e-5, atol=1e-6)


def subgroups(kind):
    """Compares step_subgroup and rollback_subgroup, which undoes a step with the default arguments."""
    params, others = params_of((50,)), params_of((50,))
    ours, theirs = kind(params), original_of(kind)(others)
    for seed in range(4):
        give_grads(params, others, seed=seed)
        before = params[0].detach().clone()
        ours.step_subgroup(7)
        theirs.step_subgroup(7)
        torch.testing.assert_close(params[0].detach(), others[0].detach(), rtol=2e-5, atol=1e-6)
    for optimizer in (ours, theirs):
        optimizer.rollback_subgroup(7)
        check.assertEqual(float(optimizer.state[7]["step"]), 3)
    torch.testing.assert_close(params[0].detach(), before, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(params[0].detach(), others[0].detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.state[7]["exp_avg"], theirs.state[7]["exp_avg"], rtol=1e-4, atol=1e-5)


def elements_without_gradient(kind):
    """README.md: the original changes them by lr, and dsopt.torch does not."""
    params, others = [[torch.nn.Parameter(torch.ones(7))] for _ in range(2)]
    params[0].grad, others[0].grad = torch.zeros(7), torch.zeros(7)
    kind(params, lr=0.5).step()
    original_of(kind)(others, lr=0.5).step()
    check.assertEqual(params[0].tolist(), [1.0] * 7)
    check.assertEqual((others[0] - 1).abs().tolist(), [0.5] * 7)


def vector_loop_of_lion(kind):
    """README.md: from 16 elements on, the original of 0.19.6 does not change weights by lr, and dsopt.torch does."""
    if os.path.basename(sys.argv[2]) != originals.VERSION:
        return
    params, others = [[torch.nn.Parameter(torch.zeros(64))] for _ in range(2)]
    give_grads(params, others)
    kind(params, lr=0.5).step()
    original_of(kind)(others, lr=0.5).step()
    check.assertEqual(params[0].detach().abs().tolist(), [0.5] * 64)
    check.assertNotEqual(others[0].detach().abs().tolist(), [0.5] * 64)


CASES = {"names": ((signatures_and_names, DeepSpeedCPUAdam), (signatures_and_names, DeepSpeedCPULion)),
         "cpu_adam": ((steps, DeepSpeedCPUAdam), (state_dicts_load_into_each_other, DeepSpeedCPUAdam),
                      (subgroups, DeepSpeedCPUAdam), (moments_of_16_bit_parameters, DeepSpeedCPUAdam)),
         "cpu_lion": ((steps, DeepSpeedCPULion), (state_dicts_load_into_each_other, DeepSpeedCPULion),
                      (elements_without_gradient, DeepSpeedCPULion), (vector_loop_of_lion, DeepSpeedCPULion),
                      (moments_of_16_bit_parameters, DeepSpeedCPULion))}


@unittest.skipUnless(GLOO, "torch is built without gloo")
class NextToDeepSpeed(TestCase):
    def compare(self, version, cases):
        reason = originals.REASON if version == originals.VERSION else originals.NEWER_REASON
        if reason:
            self.skipTest(reason)
        if cases in EXTENSIONS.values() and not os.path.exists(extensions.path(version, cases)):
            self.skipTest("the extension %s of DeepSpeed %s is not built" % (cases, version))
        run_ranks(self, __file__, os.path.join(cases, version), ranks=1,
                  environment=originals.newer() if version == originals.NEWER else None)

    def test_names_match_deepspeed(self):
        self.compare(originals.VERSION, "names")

    def test_names_match_the_newer_version(self):
        self.compare(originals.NEWER, "names")

    def test_adam_matches_deepspeed(self):
        self.compare(originals.VERSION, "cpu_adam")

    def test_adam_matches_the_newer_version(self):
        self.compare(originals.NEWER, "cpu_adam")

    def test_lion_matches_deepspeed(self):
        self.compare(originals.VERSION, "cpu_lion")

    def test_lion_matches_the_newer_version(self):
        self.compare(originals.NEWER, "cpu_lion")


def named(case, kind):
    def call(rank):
        case(kind)
    call.__qualname__ = "%s of %s" % (case.__name__, kind.__name__)
    return call


if __name__ == "__main__":
    if "--child" in sys.argv:
        child([named(*case) for case in CASES[os.path.dirname(sys.argv[2])]], int(sys.argv[3]), sys.argv[4], ranks=1)
    else:
        main()
