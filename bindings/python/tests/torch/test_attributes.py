# SPDX-License-Identifier: Apache-2.0
"""Attributes and group entries of DeepSpeed's classes that a program sets between steps."""
import copy
import inspect
import itertools
import pathlib
import pickle
import re
import sys
import tempfile
import types
import unittest

import originals
from support import TestCase, child, give_grads, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import (DeepSpeedCPUAdam, DeepSpeedCPULion, FP16_Optimizer, FusedAdam, FusedLamb, OnebitAdam,
                         OnebitLamb, ZeroOneAdam)

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
FAMILY = ((OnebitAdam, {"freeze_step": 2}), (ZeroOneAdam, {"var_freeze_step": 2}), (OnebitLamb, {"freeze_step": 2}))
MODES = tuple(itertools.product(FAMILY, (None, "deepspeed")))
# Attributes with a value for the constructor and a value to set later.
SCHEDULES = ((OnebitAdam, "freeze_step", 4, 7), (OnebitAdam, "freeze_step", 100, 3),
             (ZeroOneAdam, "var_freeze_step", 4, 7), (ZeroOneAdam, "var_freeze_step", 100, 3),
             (ZeroOneAdam, "var_update_scaler", 16, 2), (ZeroOneAdam, "local_step_scaler", 100, 2),
             (ZeroOneAdam, "local_step_clipper", 16, 2), (OnebitLamb, "freeze_step", 4, 7),
             (OnebitLamb, "freeze_step", 100, 3), (OnebitLamb, "coeff_beta", 0.9, 0.5),
             (OnebitLamb, "factor_max", 4.0, 1.01), (OnebitLamb, "factor_min", 0.5, 0.99),
             (OnebitLamb, "factor_threshold", 0.1, 0.01))
DEFAULTS = {OnebitAdam: {"freeze_step": 4}, OnebitLamb: {"freeze_step": 4},
            ZeroOneAdam: {"var_freeze_step": 4, "local_step_scaler": 2, "local_step_clipper": 4}}


def moved_by_a_step(params, optimizer, seed):
    """Returns which elements a step changes: those with momentum after it. 0/1 Adam in compat mode subtracts its local
    change again, which rounds."""
    start = [p.detach().clone() for p in params]
    give_grads(params, seed=seed)
    optimizer.step()
    now = [((p.detach() - old).abs() > 1e-6).tolist() for p, old in zip(params, start)]
    momentum = [(optimizer.state[p]["exp_avg"] != 0).tolist() for p in params]
    assert now == momentum, (now, momentum)
    return now


def masks_change(rank=0):
    """Every way to change exp_avg_mask takes effect in the next step. After the freeze each step exchanges here."""
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
        group["exp_avg_mask"].data[1] = 0  # in place, without an increment of the tensor's version
        expect([0, 0, 1, 1])
        second["exp_avg_mask"] = torch.tensor([True, False, True, True])  # with another dtype, and a shape to broadcast
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
            group["exp_avg_mask"][0] = 0  # a tensor without a version counter
        expect([0, 0, 1, 1])


def attributes_are_read_by_each_step(rank=0):
    """After an attribute is set, an optimizer continues like a new one that loads its state and has the value from the
    beginning. A load derives the stage from the number of steps, so the new one is constructed with the first value."""
    for kind, name, first, then in SCHEDULES:
        for when in (1, 6):  # before and after the freeze
            params, others = params_of((4,), (3, 2)), params_of((4,), (3, 2))
            ours = kind(params, lr=0.01, **{**DEFAULTS[kind], name: first})
            theirs = kind(others, lr=0.01, **{**DEFAULTS[kind], name: first})
            for seed in range(14):
                if seed == when:
                    setattr(ours, name, then)
                    with torch.no_grad():
                        for p, q in zip(params, others):
                            q.copy_(p)
                    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
                    setattr(theirs, name, then)
                give_grads(params, others, seed=100 * rank + seed)
                ours.step()
                if seed >= when:
                    theirs.step()
                    assert ours.frozen == theirs.frozen, (kind, name, when, seed)
                    assert ours.next_reduction() == theirs.next_reduction(), (kind, name, when, seed)
                    assert all(map(torch.equal, params, others)), (kind, name, when, seed)


def comm_backend_names(rank):
    """Tests the names over gloo."""
    for kind in (OnebitAdam, ZeroOneAdam, OnebitLamb):
        for options in ({}, {"comm_backend_name": "gloo"}, {"comm_backend_name": "compressed"}):
            optimizer = kind(params_of((4,)), **options)
            assert optimizer.comm_backend_name == options.get("comm_backend_name", "nccl")
            assert (optimizer.size, optimizer.divider, optimizer.comm_backend_handle) == (2, 8, None)
            give_grads(optimizer.param_groups[0]["params"])
            optimizer.step()
            assert (optimizer.comm_backend_handle.rank, optimizer.comm_backend_handle.ranks) == (rank, 2)
        for name in ("nccl", "mpi", "hccl"):
            try:
                kind(params_of((4,)), comm_backend_name=name)
                raise AssertionError("no exception for %s" % name)
            except ValueError as problem:
                assert "comm_backend_name is %r, and the backend of the process group is 'gloo'" % name in str(problem)


def parameters_without_elements(rank=0):
    """They do not affect other parameters. DeepSpeed's 1-bit LAMB removes them from its groups."""
    for (kind, options), compat in MODES:
        params, others = params_of((4,), (0,), (3, 2), (0, 5)), params_of((4,), (3, 2))
        with torch.no_grad():
            others[1].copy_(params[2])
        ours = kind([{"params": params[:2]}, {"params": params[2:]}], lr=0.01, compat=compat, **options)
        theirs = kind([{"params": others[:1]}, {"params": others[1:]}], lr=0.01, compat=compat, **options)
        for seed in range(8):
            give_grads(others, seed=10 * seed + rank)
            give_grads([params[1], params[3]])
            params[0].grad, params[2].grad = others[0].grad, others[1].grad
            ours.step()
            theirs.step()
            assert torch.equal(params[0], others[0]) and torch.equal(params[2], others[1]), (kind, compat, seed)


CASES = [masks_change, attributes_are_read_by_each_step, comm_backend_names, parameters_without_elements]


class Masks(TestCase):
    def test_mask_takes_effect_in_the_next_step(self):
        masks_change()

    def test_mask_works_with_a_wrapper(self):
        """FP16_Optimizer also accepts a flat mask for the group."""
        params = params_of((2, 2), (4,), dtype=torch.float16)
        optimizer = FP16_Optimizer(OnebitAdam(params, lr=0.1, freeze_step=2))
        for mask in (None, None, None, torch.ones(8), torch.tensor([1.0, 0, 1, 0, 0, 0, 1, 1]), None,
                     torch.tensor([[0.0, 1], [1, 0]]).reshape(4).repeat(2), "in place"):
            if isinstance(mask, str):
                optimizer.param_groups[0]["exp_avg_mask"][1] = 0
                mask = torch.tensor([0.0, 0, 1, 0, 0, 1, 1, 0])
            else:
                optimizer.param_groups[0]["exp_avg_mask"] = mask
            before = torch.cat(optimizer.fp32_groups_flat)
            give_grads(params)
            optimizer.step()
            moved = (torch.cat(optimizer.fp32_groups_flat) != before).float()
            self.assert_same([moved], [torch.ones(8) if mask is None else mask])

    def test_rejects_masks_that_are_no_tensors(self):
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


class Schedules(TestCase):
    def test_attributes_are_read_by_each_step(self):
        attributes_are_read_by_each_step()

    def test_early_assignment_acts_as_in_the_constructor(self):
        """In both modes; in compat mode a load would reinitialize parts of the state."""
        for (kind, name, first, then), compat in itertools.product(SCHEDULES, (None, "deepspeed")):
            if name == "coeff_beta":  # takes effect from the first full step on
                continue
            params, others = params_of((4,), (3, 2)), params_of((4,), (3, 2))
            ours = kind(params, lr=0.01, compat=compat, **{**DEFAULTS[kind], name: first})
            theirs = kind(others, lr=0.01, compat=compat, **{**DEFAULTS[kind], name: then})
            for seed in range(14):
                if seed == 1:
                    setattr(ours, name, then)
                give_grads(params, others, seed=seed)
                ours.step()
                theirs.step()
            self.assert_same(params, others)

    def test_freeze_step_is_checked_at_the_end_of_a_step(self):
        """A step checks it at its end, like the original's. A frozen optimizer stays frozen."""
        for kind, name in ((OnebitAdam, "freeze_step"), (OnebitLamb, "freeze_step"), (ZeroOneAdam, "var_freeze_step")):
            for compat in (None, "deepspeed"):
                params = params_of((4,))
                optimizer = kind(params, compat=compat, **{name: 100})
                for seed in range(6):
                    give_grads(params, seed=seed)
                    optimizer.step()
                setattr(optimizer, name, 3)
                self.assertFalse(optimizer.frozen)
                variance = optimizer.state[params[0]]["exp_avg_sq"].clone()
                optimizer.step()
                self.assertTrue(optimizer.frozen)
                self.assertFalse(torch.equal(optimizer.state[params[0]]["exp_avg_sq"], variance))
                setattr(optimizer, name, 100)
                variance = optimizer.state[params[0]]["exp_avg_sq"].clone()
                optimizer.step()
                self.assertTrue(optimizer.frozen)
                self.assert_same([optimizer.state[params[0]]["exp_avg_sq"]], [variance])

    def test_rejects_invalid_values_and_stays_usable(self):
        for kind, name, good, _ in SCHEDULES:
            params = params_of((4,))
            optimizer = kind(params, **DEFAULTS[kind])
            give_grads(params)
            optimizer.step()
            start = params[0].detach().clone()
            for value in ("3", None, float("nan"), -1, float("inf"), [1]):
                setattr(optimizer, name, value)
                with self.assertRaisesRegex(ValueError, "%s of %s is " % (name, kind.__name__)):
                    optimizer.step()
            setattr(optimizer, name, good)
            self.assert_same(params, [start])
            optimizer.step()
            self.assertFalse(torch.equal(params[0], start))
        with self.assertRaisesRegex(ValueError, "freeze_step of OnebitAdam is 2.5, and must be a whole number"):
            optimizer = OnebitAdam(params, freeze_step=2.5)
            optimizer.step()
        optimizer = OnebitAdam(params, freeze_step=1e3)  # a value as in a JSON file
        optimizer.step()
        optimizer = OnebitAdam(params, freeze_step=0)
        with self.assertRaisesRegex(ValueError, "freeze_step of OnebitAdam is 0"):
            optimizer.step()

    def test_freeze_steps_below_1_act_as_1_in_compat_mode(self):
        for kind, name in ((OnebitAdam, "freeze_step"), (OnebitLamb, "freeze_step"), (ZeroOneAdam, "var_freeze_step")):
            for value in (1, 0, -5):
                params = params_of((4,))
                optimizer, frozen = kind(params, compat="deepspeed", **{name: value}), []
                for seed in range(3):
                    give_grads(params, seed=seed)
                    optimizer.step()
                    frozen.append(optimizer.frozen)
                self.assertEqual(frozen, [False, True, True], (kind, value))


class Modes(TestCase):
    def test_eps_mode_and_adam_w_mode_are_read_by_each_step(self):
        for kind, name, option, compat in ((FusedLamb, "eps_mode", "eps_inside_sqrt", None),
                                           (FusedLamb, "eps_mode", "eps_inside_sqrt", "deepspeed"),
                                           (FusedAdam, "adam_w_mode", "adam_w_mode", None),
                                           (FusedAdam, "adam_w_mode", "adam_w_mode", "deepspeed")):
            params, others = params_of((4,), (3, 2)), params_of((4,), (3, 2))
            ours = kind(params, eps=0.1, weight_decay=0.5, compat=compat)
            for i, mode in enumerate((0, 0, 1, 0, 1, 1)):
                value = not mode if option == "eps_inside_sqrt" else bool(mode)
                theirs = kind(others, eps=0.1, weight_decay=0.5, compat=compat, **{option: value})
                theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
                setattr(ours, name, mode)
                give_grads(params, others, seed=i)
                ours.step()
                theirs.step()
                self.assert_same(params, others)


class Attributes(TestCase):
    NAMES = {
        OnebitAdam: "comm_time step_time bk_time ave_step adam_freeze_key freeze_step",
        ZeroOneAdam: "var_freeze_step var_update_scaler local_step_scaler local_step_clipper freeze_key "
                     "reinitial_error_buffer",
        OnebitLamb: "lamb_freeze_key freeze_step coeff_beta factor_max factor_min factor_threshold lamb_coeffs",
    }
    COMMON = ("eps_mode deepspeed initialize cuda_aware using_pipeline comm_backend_name comm_backend_handle size "
              "divider")

    def test_has_the_originals_attributes_before_the_first_step(self):
        for kind, names in self.NAMES.items():
            params = params_of((4,))
            optimizer = kind(params)
            found = {name: getattr(optimizer, name) for name in (names + " " + self.COMMON).split()}
            self.assertFalse(optimizer.state, "reading attributes must not make state")
            for name in found:
                if name.endswith("freeze_key") or name in ("initialize", "cuda_aware", "using_pipeline",
                                                           "reinitial_error_buffer"):
                    self.assertIs(found[name], False, name)
            self.assertEqual([found[name] for name in ("eps_mode", "deepspeed", "comm_backend_name", "size", "divider",
                                                       "comm_backend_handle")], [1, None, "nccl", 1, 8, None])
            self.assertEqual(found.get("lamb_coeffs", []), [])
        optimizer = OnebitAdam(params)
        self.assertEqual((optimizer.comm_time, optimizer.step_time, optimizer.bk_time, optimizer.ave_step),
                         (0.0, 0.0, 0.0, 1))

    def test_attributes_follow_the_steps(self):
        for kind, options in FAMILY:
            params = params_of((4,))
            optimizer, seen = kind(params, **options), []
            for seed in range(3):
                give_grads(params, seed=seed)
                optimizer.step()
                key = {OnebitAdam: "adam_freeze_key", OnebitLamb: "lamb_freeze_key", ZeroOneAdam: "freeze_key"}[kind]
                seen.append((optimizer.initialize, getattr(optimizer, key)))
            self.assertEqual(seen, [(True, False), (True, True), (True, True)])
            again = pickle.loads(pickle.dumps(optimizer))
            self.assertTrue(again.initialize and again.frozen and again.comm_backend_name == "nccl")
        self.assertEqual(len(optimizer.get_lamb_coeffs()), 1)
        self.assertEqual(optimizer.get_lamb_coeffs(), [float(x) for x in optimizer.lamb_coeffs])

    def test_derived_attributes_are_read_only(self):
        for kind, names in self.NAMES.items():
            optimizer = kind(params_of((4,)))
            every = (names + " " + self.COMMON).split()
            for name in [name for name in every if name in ("initialize", "size", "divider", "eps_mode", "cuda_aware",
                                                            "comm_backend_name", "comm_backend_handle", "lamb_coeffs",
                                                            "using_pipeline", "reinitial_error_buffer") or
                         name.endswith("freeze_key")]:
                with self.assertRaisesRegex(dsopt.UnsupportedError, "%s of %s cannot be set" % (name, kind.__name__)):
                    setattr(optimizer, name, 1)

    def test_lamb_coeffs_of_1_bit_lamb_are_the_ratios_of_the_step(self):
        params = params_of((4,), (3, 2))
        optimizer = OnebitLamb(params, lr=0.01, freeze_step=3, max_coeff=0.5, min_coeff=0.5)
        for seed in range(3):
            give_grads(params, seed=seed)
            optimizer.step()
            self.assertEqual(optimizer.get_lamb_coeffs(), [0.5, 0.5])
        give_grads(params, seed=3)
        optimizer.step()
        factors = [float(optimizer.state[p]["trust_factor"]) for p in params]
        self.assert_close(optimizer.get_lamb_coeffs(), [0.5 * factor for factor in factors])

    def test_lamb_coeffs_without_a_gradient_are_unchanged(self):
        for kind, unused in ((FusedLamb, []), (OnebitLamb, [0.0])):
            for compat in (None, "deepspeed"):
                params = params_of((4,), (3, 2), (5,))
                optimizer, last = kind(params, compat=compat), {}
                for seed, present in enumerate(((0, 1), (0,), (0, 1), (1,))):
                    give_grads(params, seed=seed)
                    for i, p in enumerate(params):
                        p.grad = p.grad if i in present else None
                    optimizer.step()
                    ratios = optimizer.get_lamb_coeffs()
                    self.assertEqual(ratios[2:], unused)
                    self.assertTrue(all(ratios[i] == last[i] for i in last if i not in present), (kind, compat))
                    self.assertTrue(all(ratios[i] != last[i] for i in last if i in present), (kind, compat))
                    last = dict(enumerate(ratios[:2]))

    def test_engine_can_be_set(self):
        class Engine:
            pipeline_enable_backward_allreduce = True

        params = params_of((4,))
        optimizer = OnebitAdam(params, freeze_step=2)
        give_grads(params)
        optimizer.step()
        optimizer.deepspeed = engine = Engine()
        self.assertTrue(optimizer.using_pipeline and optimizer.deepspeed is engine)
        optimizer.step()
        self.assertFalse(engine.pipeline_enable_backward_allreduce)
        optimizer.deepspeed = engine = Engine()
        self.assertFalse(engine.pipeline_enable_backward_allreduce)
        optimizer.deepspeed = None
        self.assertFalse(OnebitAdam(params, engine, comm_backend_name="mpi").using_pipeline)

    def test_using_pipeline_reads_its_flag(self):
        for (kind, options), compat in MODES:
            for name, pipeline in (("nccl", True), ("compressed", True), ("mpi", False)):
                engine, seen, params = originals.PipelineEngine(), [], params_of((4,))
                flags = "enable_backward_allreduce", "pipeline_enable_backward_allreduce"
                other = getattr(engine, flags[not pipeline])
                optimizer = kind(params, engine, comm_backend_name=name, compat=compat, **options)
                self.assertIs(optimizer.using_pipeline, pipeline)
                for seed in range(6):
                    seen.append(getattr(engine, flags[pipeline]))
                    self.assertIs(getattr(engine, flags[not pipeline]), other, (kind, name))
                    give_grads(params, seed=seed)
                    optimizer.step()
                self.assertEqual((seen[0], seen[-1]), (True, False), (kind, name))

    def test_assigned_engine_averages_from_the_first_step(self):
        for kind, options in FAMILY:
            for name in ("enable_backward_allreduce", "pipeline_enable_backward_allreduce"):
                # The flag is as left by a frozen optimizer.
                engine, params = types.SimpleNamespace(**{name: False}), params_of((4,))
                optimizer = kind(params, **options)
                optimizer.deepspeed = engine
                self.assertEqual(vars(engine), {name: True})
                optimizer.deepspeed = bare = types.SimpleNamespace()
                self.assertEqual(vars(bare), {})  # like in the constructor
                optimizer.deepspeed = engine
                for seed in range(3):
                    give_grads(params, seed=seed)
                    optimizer.step()
                self.assertEqual(vars(engine), {name: False})


README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def section(kind):
    """Returns a section of the README chapter "Arguments and attributes of DeepSpeed's classes"."""
    text = README.read_text(encoding="utf-8")
    (part,) = re.findall(r"^#### %s\n(.*?)(?=^#|\Z)" % kind.__name__, text, re.M | re.S)
    return part


def rows_of(kind):
    """Returns the rows of the section's table: names and descriptions."""
    return [row for row in re.findall(r"^\| (.*?) \| (.*?) \|$", section(kind), re.M) if row[0] not in ("name", "---")]


def names_in(cell):
    return [name.partition("(")[0] for name in re.findall("`(.*?)`", cell)]


class Table(TestCase):
    def test_listed_attributes_exist(self):
        for kind in (FusedAdam, FusedLamb, DeepSpeedCPUAdam, DeepSpeedCPULion, OnebitAdam, ZeroOneAdam, OnebitLamb):
            params = params_of((4,))
            optimizer = kind(params)
            give_grads(params)
            optimizer.step()
            arguments, seen = inspect.signature(kind).parameters, set()
            for first, second in rows_of(kind):
                names = names_in(first)
                seen.update(names)
                for name in names if second.startswith("supported") else ():
                    if first.endswith("of `state`"):
                        self.assertIn(name, [*optimizer.state[params[0]], "state"], kind)
                    elif not first.endswith("of a group"):
                        self.assertTrue(name in arguments or hasattr(optimizer, name), "%s: %s" % (kind, name))
            common = set(inspect.signature(OnebitAdam).parameters if kind in (ZeroOneAdam, OnebitLamb) else ())
            own = {name for name, argument in arguments.items() if argument.kind is not argument.KEYWORD_ONLY}
            self.assertEqual(own - common - seen, set(), kind)


class Arguments(TestCase):
    def test_accepts_comm_backend_names(self):
        for kind, _ in FAMILY:
            for name in ("nccl", "mpi", "hccl", "compressed", "gloo"):  # no exchange happens here
                params = params_of((4,))
                optimizer = kind(params, comm_backend_name=name)
                give_grads(params)
                optimizer.step()
                self.assertEqual(optimizer.comm_backend_name, name)
            for name in ("foo", "", "NCCL", None, 1):
                with self.assertRaisesRegex(ValueError, "comm_backend_name is .*, and must be one of 'nccl', 'mpi'"):
                    kind(params, comm_backend_name=name)

    @unittest.skipUnless(GLOO, "torch is built without gloo")
    def test_accepts_backends_chosen_per_device(self):
        with tempfile.TemporaryDirectory() as folder:
            try:
                torch.distributed.init_process_group(init_method="file://%s/rendezvous" % folder, rank=0, world_size=1)
            except (RuntimeError, TypeError, ValueError) as problem:  # torch 1.13 requires a backend
                self.skipTest(str(problem))
            try:
                self.assertEqual(OnebitAdam(params_of((4,)), comm_backend_name="gloo").size, 1)
                with self.assertRaisesRegex(ValueError, "comm_backend_name is 'mpi', and the backend"):
                    OnebitAdam(params_of((4,)), comm_backend_name="mpi")
            finally:
                torch.distributed.destroy_process_group()

    def test_cuda_aware_is_refused(self):
        for kind, _ in FAMILY:
            for name in ("nccl", "mpi"):
                with self.assertRaisesRegex(dsopt.UnsupportedError, kind.__name__ + ": cuda_aware=True is not sup"):
                    kind(params_of((4,)), cuda_aware=True, comm_backend_name=name)

    def test_compat_mode_ignores_arguments_the_originals_ignore(self):
        for kind, options in FAMILY:
            params, others = params_of((4,), (3, 2)), params_of((4,), (3, 2))
            ours = kind([{"params": params[:1]}, {"params": params[1:], "max_grad_norm": 1e-6}], max_grad_norm=1e-6,
                        eps_inside_sqrt=True, compat="deepspeed", **options)
            theirs = kind(others, compat="deepspeed", **options)
            self.assertEqual((ours.eps_mode, theirs.eps_mode), (0, 1))
            self.assertEqual(ours.param_groups[0]["max_grad_norm"], 1e-6)
            self.assertEqual(pickle.loads(pickle.dumps(ours)).eps_mode, 0)
            for seed in range(5):
                give_grads(params, others, seed=seed)
                ours.step()
                theirs.step()
            self.assert_same(params, others)

    def test_standard_mode_rejects_arguments_the_originals_ignore(self):
        for kind, _ in FAMILY:
            params = params_of((4,))
            for options in ({"max_grad_norm": 1.0}, {"eps_inside_sqrt": True}):
                with self.assertRaisesRegex(dsopt.UnsupportedError, kind.__name__ + ": %s=" % list(options)[0]):
                    kind(params, **options)
            with self.assertRaisesRegex(dsopt.UnsupportedError, "a group of %s: max_grad_norm=1.0" % kind.__name__):
                kind([{"params": params, "max_grad_norm": 1.0}])
            optimizer = kind(params)
            give_grads(params)
            optimizer.step()
            optimizer.param_groups[0]["max_grad_norm"] = 2.0
            with self.assertRaisesRegex(dsopt.UnsupportedError, "max_grad_norm=2.0 .* use clip_grad"):
                optimizer.step()

    def test_rejects_non_freeze_if_the_originals_ignore_it(self):
        for (kind, options), compat in MODES:
            params = params_of((4,), (3, 2))
            groups = [{"params": params[:1]}, {"params": params[1:], "non_freeze": True}]
            start = [p.detach().clone() for p in params]
            optimizer = kind(groups, compat=compat, **options)
            give_grads(params)
            if kind is OnebitAdam:
                optimizer.step()
                continue
            for make in (optimizer.step, optimizer.next_reduction):
                with self.assertRaisesRegex(dsopt.UnsupportedError, "non_freeze"):
                    make()
            self.assert_same(params, start)
            self.assertFalse(optimizer.state)
            del optimizer.param_groups[1]["non_freeze"]
            optimizer.step()

    def test_accepts_parameters_without_elements(self):
        parameters_without_elements()

    def test_accepts_groups_without_trained_parameters(self):
        for kind, options in (*FAMILY, (FusedAdam, {}), (FusedLamb, {})):
            idle = params_of((3,))[0].requires_grad_(False)
            params = params_of((4,))
            optimizer = kind([{"params": []}, {"params": [idle]}, {"params": params}], **options)
            start = params[0].detach().clone()
            for seed in range(5):
                give_grads(params, seed=seed)
                optimizer.step()
            self.assertFalse(torch.equal(params[0], start))
            self.assertEqual(set(optimizer.state), set(params))
            optimizer = kind([{"params": []}, {"params": [idle]}], **options)
            optimizer.step()
            if kind not in (FusedAdam, FusedLamb):
                self.assertEqual((optimizer.frozen, optimizer.next_reduction()), (False, "full"))


@unittest.skipUnless(GLOO, "torch is built without gloo")
class TwoProcesses(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "all")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(CASES, int(sys.argv[3]), sys.argv[4])
    else:
        main()
