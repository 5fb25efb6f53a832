# SPDX-License-Identifier: Apache-2.0
"""State dicts of DeepSpeed's own 1-bit classes and wrappers, and loads in compat mode compared with recorded cases."""
import copy
import json
import os
import struct
import sys
import unittest

from support import TestCase, child, give_grads, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import (FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb,
                         ZeroOneAdam)

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 4, "tests", "golden")
SHAPES = ((7, 3), (5,))
GROUP = dict(lr=0.01, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, max_grad_norm=0.0)
DTYPES = {"F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64, "U8": torch.uint8}
# By case name: class, names of its arguments, entries of each parameter's state in addition to the moments.
RESUMED = {
    "onebit_adam": (OnebitAdam, ("freeze_step",), ()),
    "zero_one_adam": (ZeroOneAdam, ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"),
                      ("momentum_accumulator",)),
    "onebit_lamb": (OnebitLamb, ("freeze_step", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min",
                                 "factor_threshold"), ("exp_avg_sq_fresh",))}


class Recorded:
    """A case of tests/golden as seen by rank `rank`."""

    def __init__(self, name, rank):
        self.rank = rank
        with open(os.path.join(GOLDEN, name + ".safetensors"), "rb") as file:
            data = file.read()
        size, = struct.unpack("<Q", data[:8])
        self.tensors = json.loads(data[8:8 + size])
        self.data, self.info = bytearray(data[8 + size:]), self.tensors.pop("__metadata__")

    def __contains__(self, name):
        return self._found(name, self.rank) is not None

    def _found(self, name, rank):
        quantity, _, item = name.partition("/")
        names = (name, quantity + "/all/" + item, quantity + "/r%d/%s" % (rank, item), quantity + "/r%d" % rank)
        return next((self.tensors[key] for key in names if key in self.tensors), None)

    def get(self, name, rank=None):
        entry = self._found(name, self.rank if rank is None else rank)
        begin, end = entry["data_offsets"]
        return torch.frombuffer(self.data[begin:end], dtype=DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def number(self, name):
        value = float(self.info[name])
        return int(value) if value == int(value) and name.endswith(("_step", "_scaler", "_clipper", "_call")) else value


class Engine:
    def __init__(self, **flags):
        self.__dict__.update(flags or {"enable_backward_allreduce": True})


class Replay:
    """An optimizer in compat mode that receives the recorded gradients, which are already averaged."""

    def __init__(self, name, rank):
        self.case = Recorded(name + "_resume_n2", rank)
        self.kind, self.arguments, self.more = RESUMED[name]
        self.steps, self.resume = int(self.case.info["steps"]), self.case.number("resume_before_call")
        self.params = [torch.nn.Parameter(self.case.get("param_init/p%d" % i).clone()) for i in range(2)]
        self.make()

    def make(self):
        number = self.case.number
        self.engine = Engine()
        self.optimizer = self.kind(self.params, self.engine, betas=(number("beta1"), number("beta2")),
                                   eps=number("eps"), weight_decay=number("weight_decay"), compat="deepspeed",
                                   **{name: number(name) for name in self.arguments})

    def step(self, t):
        for i, param in enumerate(self.params):
            param.grad = self.case.get("grad/p%d" % i)[t].clone()
        self.optimizer.param_groups[0]["lr"] = self.case.get("lr")[t].item()
        self.optimizer.step()

    def compare(self, t):
        schedule = self.optimizer._schedule()
        assert schedule.step == self.case.get("step")[t], (t, schedule.step)
        stage = "local_step_stage" if self.kind is ZeroOneAdam else "compression_stage"
        assert schedule.frozen == self.case.get(stage)[t], (t, schedule.frozen)
        assert self.engine.enable_backward_allreduce == self.case.get("enable_backward_allreduce")[t], t
        for i, param in enumerate(self.params):
            state = self.optimizer.state[param]
            for name in ("param", "exp_avg", "exp_avg_sq", *self.more):
                recorded = self.case.get("%s/p%d" % (name, i))
                found = param.detach() if name == "param" else state[name]
                most = (found - recorded[t]).abs().max().item()
                limit = 2e-5 * recorded.abs().max().item()
                assert most <= limit, "call %d: %s of p%d differs by %g" % (t, name, i, most)
            for name, recorded in (("trust_average", "lamb_coeff_freeze"), ("trust_factor", "last_factor")):
                if name in state:
                    torch.testing.assert_close(state[name].double(), self.case.get(recorded)[t, i], rtol=1e-4, atol=0)

    def weights_of_rank_0(self, t):
        for i, param in enumerate(self.params):
            param.data.copy_(self.case.get("param/p%d" % i, 0)[t])

    def state_of_the_original(self, t):
        """Returns the state that rank 0 of the original saves after call t."""
        def recorded(name):
            return self.case.get(name, 0)[t].clone()

        state = {}
        for i, param in enumerate(self.params):
            own = {name: recorded("%s/p%d" % (name, i)) for name in ("exp_avg", "exp_avg_sq", *self.more)}
            own.update(step=int(recorded("step")), tensor_size=param.numel())
            if self.kind is OnebitLamb:
                own.update({name: recorded(name)[i].item() for name in ("lamb_coeff_freeze", "last_factor",
                                                                        "scaling_coeff")})
            else:
                own.update({name: recorded("%s/p%d" % (name, i)) for name in ("worker_error", "server_error")})
            if self.kind is ZeroOneAdam:
                counters = ("var_interval", "var_counter", "local_step_interval", "local_step_counter")
                own.update({name: int(recorded(name)) for name in counters}, lrs=recorded("lrs")[i].item())
            state[i] = own
        return {"state": state, "param_groups": [{**self.optimizer.state_dict()["param_groups"][0]}]}


def recorded_resumes(rank):
    """Resumes from the state of the original, and from that of the class here: rank 0's for all."""
    for name in RESUMED:
        for own in (False, True):
            replay = Replay(name, rank)
            begin = 0 if own else replay.resume
            for t in range(begin, replay.resume):
                replay.step(t)
                replay.compare(t)
            saved = [replay.optimizer.state_dict() if own else replay.state_of_the_original(replay.resume - 1)]
            torch.distributed.broadcast_object_list(saved)
            for t in range(replay.resume, replay.steps):
                if t == replay.resume:
                    if own:
                        for param in replay.params:
                            torch.distributed.broadcast(param.data, 0)
                    else:
                        replay.weights_of_rank_0(t - 1)
                    replay.make()
                    replay.optimizer.load_state_dict(copy.deepcopy(saved[0]))
                    assert replay.engine.enable_backward_allreduce == (replay.optimizer.next_reduction() == "full")
                replay.step(t)
                replay.compare(t)


def onebit_state(kind, step, shapes=SHAPES, **changes):
    """Returns a state dict as the original saves it, with moments that identify their elements."""
    state = {}
    for i, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        state[i] = {"step": step, "exp_avg": torch.zeros(shape), "tensor_size": numel, "corrected_tensor_size": numel,
                    "exp_avg_sq": 1 + torch.arange(numel).reshape(shape).float(), "server_chunk_size": numel,
                    "worker_error": torch.ones(numel), "server_error": torch.ones(numel)}
        if kind is ZeroOneAdam:
            state[i].update(var_interval=4, var_counter=1, local_step_interval=2, local_step_counter=3, lrs=0.5,
                            momentum_accumulator=torch.ones(shape))
        if kind is OnebitLamb:
            state[i].update(scaling_coeff=1.5, lamb_coeff_freeze=0.25, last_factor=0.75,
                            exp_avg_sq_fresh=torch.full(shape, 2.0))
        state[i].update(changes)
    more = {"max_coeff": 10.0, "min_coeff": 0.01} if kind is OnebitLamb else {}
    return {"state": state, "param_groups": [{**GROUP, **more, "params": list(range(len(shapes)))}]}


FAMILY = ((OnebitAdam, "freeze_step"), (ZeroOneAdam, "var_freeze_step"), (OnebitLamb, "freeze_step"))


class StateOfTheOriginal(TestCase):
    def load(self, kind, freeze, step, compat=None, **changes):
        params, engine = params_of(*SHAPES), Engine()
        optimizer = kind(params, engine, compat=compat, **{dict(FAMILY)[kind]: freeze})
        optimizer.load_state_dict(onebit_state(kind, step, **changes))
        return params, engine, optimizer

    def test_stage_follows_from_step(self):
        for kind, _ in FAMILY:
            last = 1 if kind is ZeroOneAdam else 0  # 0/1 Adam adapts the variance in step var_freeze_step + 1, too
            for freeze, step, frozen in ((100, 50, False), (100, 99 + last, False), (100, 100 + last, True),
                                         (5, 100, True)):
                for compat in (None, "deepspeed"):
                    params, engine, optimizer = self.load(kind, freeze, step, compat)
                    if compat and kind is ZeroOneAdam:
                        frozen = False  # like the original, which begins again
                    self.assertEqual(optimizer.frozen, frozen, (kind, freeze, step, compat))
                    self.assertEqual(optimizer._schedule().step, step)
                    full = optimizer.next_reduction() == "full"
                    self.assertEqual(engine.enable_backward_allreduce, full)
                    before = optimizer.state[params[0]]["exp_avg_sq"].clone()
                    give_grads(params)
                    optimizer.step()
                    moved = not torch.equal(optimizer.state[params[0]]["exp_avg_sq"], before)
                    self.assertEqual(moved, full, (kind, freeze, step, compat))
                    self.assertEqual(optimizer.state[params[0]]["step"].item(), step + 1)

    def test_resumes_the_schedule_of_zero_one_adam(self):
        _, _, optimizer = self.load(ZeroOneAdam, 100, 6)
        info = optimizer._schedule()
        self.assertEqual((info.var_interval, info.var_counter, info.local_interval, info.local_counter), (4, 1, 2, 3))
        self.assertEqual(optimizer.next_reduction(), "compressed")
        _, _, optimizer = self.load(ZeroOneAdam, 5, 6)
        self.assertEqual(optimizer.next_reduction(), "local")

    def test_zero_one_adam_anchors_at_the_first_steps_weights(self):
        """Weights may be loaded after the optimizer's state."""
        params, _, optimizer = self.load(ZeroOneAdam, 5, 6)
        for param in params:
            param.data.fill_(3)
        give_grads(params)
        optimizer.step()
        for param in params:
            self.assert_same([optimizer.state[param]["anchor"]], [torch.full_like(param, 3)])

    def test_saves_the_anchor_after_a_load(self):
        """The next checkpoint, before a step, has the masters loaded by the wrapper."""
        params, optimizer = self.wrapped(FP16_Optimizer, ZeroOneAdam, var_freeze_step=5)
        masters, saved = self.state_of_wrapper(ZeroOneAdam, True, 9)
        optimizer.load_state_dict(saved)
        states = optimizer.state_dict()["optimizer_state_dict"]["state"]
        self.assert_same([states[0]["anchor"], states[1]["anchor"]], masters)

    def test_loads_trust_ratios_of_onebit_lamb(self):
        for freeze, step, compat, expected in (
                (5, 9, "deepspeed", {"trust_average": 0.25, "trust_factor": 0.75, "trust_scaling": 1.5}),
                (50, 9, "deepspeed", {"trust_average": 0.0, "trust_factor": 0.0, "trust_scaling": 0.0}),
                (5, 9, None, {"trust_average": 0.25, "trust_factor": 0.75, "trust_weight": 1.0}),
                (50, 9, None, {"trust_average": 0.25, "trust_factor": 0.75, "trust_weight": 1 - 0.9 ** 8})):
            params, _, optimizer = self.load(OnebitLamb, freeze, step, compat)
            for name, value in expected.items():
                self.assertAlmostEqual(optimizer.state[params[1]][name].item(), value, places=6, msg=(name, compat))

    def test_copies_a_variance_the_original_has_not_copied_yet(self):
        """freeze_step was larger in the run that saved, so exp_avg_sq_fresh is 0."""
        saved = onebit_state(OnebitLamb, 9)
        for state in saved["state"].values():
            state["exp_avg_sq_fresh"].zero_()
        params = params_of(*SHAPES)
        optimizer = OnebitLamb(params, freeze_step=5)
        optimizer.load_state_dict(saved)
        for param in params:
            self.assert_same([optimizer.state[param]["exp_avg_sq_fresh"]], [optimizer.state[param]["exp_avg_sq"]])

    def test_rejects_mismatched_state_by_name(self):
        cases = [(OnebitAdam, onebit_state(ZeroOneAdam, 9), "'var_interval': .*; load it into ZeroOneAdam"),
                 (ZeroOneAdam, onebit_state(OnebitLamb, 9), "'lamb_coeff_freeze': .*; load it into OnebitLamb"),
                 (OnebitLamb, onebit_state(OnebitAdam, 9), "no 'lamb_coeff_freeze'"),
                 (ZeroOneAdam, onebit_state(OnebitAdam, 9), "no 'var_interval'"),
                 (OnebitAdam, onebit_state(OnebitAdam, 9, ((3, 7), (5,))), r"'exp_avg' .* \(3, 7\), .* \(7, 3\)")]
        _, wrapper = self.state_of_wrapper(OnebitAdam, True, 9)
        cases.append((OnebitAdam, wrapper, "no 'state', .* it has dynamic_loss_scale.*; load it into the wrapper"))
        incomplete = onebit_state(OnebitAdam, 9)
        del incomplete["state"][1]["exp_avg"]
        cases.append((OnebitAdam, incomplete, r"\['state'\]\[1\] has no 'exp_avg'"))
        for kind, state_dict, text in cases:
            params, engine, optimizer = self.load(kind, 100, 50)
            before = copy.deepcopy(optimizer.state_dict())
            with self.assertRaisesRegex(dsopt.Error, text) as caught:
                optimizer.load_state_dict(state_dict)
            self.assertIsInstance(caught.exception, ValueError)
            after = optimizer.state_dict()
            self.assertEqual(after["param_groups"], before["param_groups"])
            for place, state in before["state"].items():
                self.assertEqual(set(after["state"][place]), set(state))
                self.assert_same([after["state"][place][name] for name in state], list(state.values()))
            self.assertTrue(engine.enable_backward_allreduce == (optimizer.next_reduction() == "full"))

    def wrapped(self, wrapper, kind, frozen_param=False, dtype=torch.float16, **options):
        params = params_of(*SHAPES, dtype=dtype)
        every = list(params)
        if frozen_param:
            every.insert(1, torch.nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False))
        return params, wrapper(kind(every, lr=0.01, **options), dynamic_loss_scale=dtype == torch.float16,
                               low_precision_dtype=dtype)

    SCALE = dict(dynamic_loss_scale=True, cur_scale=512.0, cur_iter=7, last_overflow_iter=2, scale_factor=4.0,
                 scale_window=5)

    def state_of_wrapper(self, kind, flat, step, dtype=torch.float16):
        masters = [torch.arange(21.0).reshape(7, 3), torch.arange(5.0) + 100]
        saved = dict(self.SCALE) if dtype == torch.float16 else {}
        if flat:
            inner = onebit_state(kind, step, ((26,),))
            saved.update(fp32_groups_flat=[torch.cat([m.reshape(-1) for m in masters])], clip_grad=0.5)
        else:
            inner = onebit_state(kind, step)
            saved.update(fp32_groups=[masters])
        return masters, {**saved, "optimizer_state_dict": inner}

    def test_wrappers_load_the_originals_state(self):
        for flat, wrapper in ((True, FP16_Optimizer), (False, FP16_UnfusedOptimizer)):
            for kind, name in (*FAMILY, (FusedAdam, None), (FusedLamb, None)):
                for frozen_param in (False, True):
                    for compat in (None, "deepspeed"):
                        options = {name: 5} if name else {}
                        params, optimizer = self.wrapped(wrapper, kind, frozen_param, compat=compat, **options)
                        masters, saved = self.state_of_wrapper(kind, flat, 9)
                        if kind is FusedLamb:
                            saved["optimizer_state_dict"]["param_groups"][0].update(max_coeff=10.0, min_coeff=0.01)
                        optimizer.load_state_dict(copy.deepcopy(saved))
                        self.assert_same(optimizer.masters()[0], masters)
                        states = [optimizer.state[param] for param in params]
                        variance = torch.cat([state["exp_avg_sq"].reshape(-1) for state in states])
                        numbers = 1 + torch.arange(26.0)
                        expected = numbers if flat else torch.cat([numbers[:21], numbers[:5]])
                        self.assert_same([variance], [expected])
                        self.assertEqual([state["step"].item() for state in states], [9, 9])
                        self.assertEqual((optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter,
                                          optimizer.scale_factor, optimizer.scale_window), (512, 7, 2, 4, 5))
                        self.assertEqual(optimizer.clip_grad, 0.5 if flat else 0)
                        if name:
                            again = kind is ZeroOneAdam and compat is not None
                            self.assertEqual(optimizer.optimizer.frozen, not again)
                        for param in params:
                            param.grad = torch.full_like(param, 512)
                        self.assertFalse(optimizer.step())
                        self.assertEqual([state["step"].item() for state in states], [10, 10])

    def test_bfloat16_and_float32_wrappers_load_state(self):
        for dtype in (torch.bfloat16, torch.float32):
            for flat, wrapper in ((True, FP16_Optimizer), (False, FP16_UnfusedOptimizer)):
                params, optimizer = self.wrapped(wrapper, FusedAdam, dtype=dtype)
                masters, saved = self.state_of_wrapper(FusedAdam, flat, 9, dtype)
                optimizer.load_state_dict(saved)
                self.assert_same(params if dtype == torch.float32 else optimizer.masters()[0], masters)

    def test_loads_a_flat_group_of_one_parameter(self):
        params = params_of((7, 3), dtype=torch.float16)
        optimizer = FP16_Optimizer(OnebitAdam(params, freeze_step=5), dynamic_loss_scale=True)
        saved = {**self.SCALE, "fp32_groups_flat": [torch.arange(21.0)], "clip_grad": 0.0,
                 "optimizer_state_dict": onebit_state(OnebitAdam, 9, ((21,),))}
        optimizer.load_state_dict(saved)
        self.assertEqual(optimizer.state[params[0]]["exp_avg_sq"].shape, (7, 3))

    def test_wrappers_reject_mismatches_and_change_nothing(self):
        def broken(flat, change):
            _, saved = self.state_of_wrapper(OnebitAdam, flat, 9)
            change(saved)
            return saved

        def inner(saved):
            return saved["optimizer_state_dict"]

        cases = [(True, lambda s: s.update(fp32_groups_flat=[torch.zeros(25)]), "fp32_groups_flat has 25 elements"),
                 (True, lambda s: s.update(fp32_groups_flat=[]), "fp32_groups_flat has 0 groups"),
                 (True, lambda s: s.update(fp32_groups=s.pop("fp32_groups_flat")), "'fp32_groups_flat'.*fp32_groups"),
                 (False, lambda s: s.pop("fp32_groups"), "no 'fp32_groups'"),
                 (False, lambda s: s["fp32_groups"][0].pop(), r"fp32_groups\[0\] has tensors of shapes \[\(7, 3\)\]"),
                 (True, lambda s: s.pop("optimizer_state_dict"), "no 'optimizer_state_dict'"),
                 (True, lambda s: inner(s)["state"][0].update(exp_avg=torch.zeros(20)), "'exp_avg' of group 0 has 20"),
                 (True, lambda s: inner(s)["state"][0].pop("exp_avg_sq"), "has no 'exp_avg_sq'"),
                 (True, lambda s: inner(s)["param_groups"].append({"params": []}), "2 groups, and the optimizer 1"),
                 (True, lambda s: s.update(optimizer_state_dict=[{}]), "optimizer_state_dict has no 'state'.* list"),
                 (True, lambda s: inner(s).pop("param_groups"), "optimizer_state_dict has no 'param_groups'"),
                 (False, lambda s: inner(s)["param_groups"][0].update(params=[0]), "group 0 has 1 tensors"),
                 (False, lambda s: inner(s)["param_groups"][0].update(eps=-1.0), "eps"),
                 (False, lambda s: s.update(clip_grad="much"), "clip_grad .* 'much'"),
                 (True, lambda s: s.update(dynamic_loss_scale=False), "static|dynamic_loss_scale"),
                 (True, lambda s: s.pop("cur_scale"), "no 'cur_scale'"),
                 (True, lambda s: s.update(cur_scale=0.0), "cur_scale .* 0.0"),
                 (True, lambda s: s.update(cur_iter=-1), "cur_iter .* -1"),
                 (True, lambda s: s.update(scale_window=0), "scale_window .* 0"),
                 (True, lambda s: s.update(scale_factor=1.0), "scale_factor .* 1.0")]
        for flat, change, text in cases:
            params, optimizer = self.wrapped(FP16_Optimizer if flat else FP16_UnfusedOptimizer, OnebitAdam,
                                             freeze_step=100)
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()
            before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(params)
            with self.assertRaisesRegex(dsopt.Error, text) as caught:
                optimizer.load_state_dict(broken(flat, change))
            self.assertIsInstance(caught.exception, ValueError)
            after = optimizer.state_dict()
            self.assertEqual(str(after), str(before), text)
            self.assert_same(params, weights)


@unittest.skipUnless(os.path.isdir(GOLDEN), "tests/golden is absent")
class RecordedWrappers(TestCase):
    """Runs of the original's wrappers that resume here after some calls, from their state dicts."""
    NAMES = ("master", "exp_avg", "exp_avg_sq")

    def make(self, case, flat):
        kind, wrapper = (FusedAdam, FP16_Optimizer) if flat else (FusedLamb, FP16_UnfusedOptimizer)
        params = [torch.nn.Parameter(case.get("param16_init/p%d" % i).clone()) for i in range(5)]
        number = case.number
        base = kind(params, lr=number("lr"), betas=(number("beta1"), number("beta2")), eps=number("eps"),
                    weight_decay=number("weight_decay"), compat="deepspeed")
        return params, wrapper(base, dynamic_loss_scale=True, dynamic_loss_args=dict(init_scale=2.0, scale_window=9))

    def saved(self, case, flat, t, groups):
        items = ["g0"] if flat else ["p%d" % i for i in range(5)]
        row = {name: [case.get("%s/%s" % (name, item))[t].clone() for item in items] for name in self.NAMES}
        state = {i: {"step": int(case.get("step")[t]), "exp_avg": row["exp_avg"][i], "exp_avg_sq": row["exp_avg_sq"][i]}
                 for i in range(len(items))}
        masters = {"fp32_groups_flat": row["master"]} if flat else {"fp32_groups": [row["master"]]}
        return {"dynamic_loss_scale": True, "cur_scale": case.get("loss_scale")[t].item(), "scale_factor": 2.0,
                "cur_iter": int(case.get("cur_iter")[t]), "last_overflow_iter": int(case.get("last_overflow_iter")[t]),
                "scale_window": int(case.number("scale_window")), "clip_grad": case.number("clip_grad"), **masters,
                "optimizer_state_dict": {"state": state, "param_groups": [{**groups[0], "params": list(state)}]}}

    def test_resumes_recorded_runs(self):
        counters = ("loss_scale", "cur_iter", "last_overflow_iter")
        for name, flat in (("fp16_fused_adam", True), ("fp16_unfused_lamb", False)):
            case = Recorded(name, 0)
            for begin in (1, 8, 13):
                params, optimizer = self.make(case, flat)
                groups = optimizer.optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict(self.saved(case, flat, begin - 1, groups))
                optimizer.clip_grad = case.number("clip_grad")  # FP16_UnfusedOptimizer does not save it
                for t in range(begin, int(case.info["steps"])):
                    for i, param in enumerate(params):
                        param.grad = case.get("grad16/p%d" % i)[t].clone()
                    optimizer.param_groups[0]["lr"] = case.get("lr")[t].item()
                    self.assertEqual(optimizer.step(), bool(case.get("overflow")[t]))
                    self.assertEqual((optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter),
                                     tuple(case.get(key)[t] for key in counters))
                    for key in self.NAMES:
                        found = torch.cat([optimizer.state[param][key].reshape(-1) for param in params])
                        items = ["g0"] if flat else ["p%d" % i for i in range(5)]
                        recorded = torch.cat([case.get("%s/%s" % (key, item))[t] for item in items])
                        self.assert_close(found, recorded, rtol=0, atol=2e-5 * recorded.abs().max().item())


@unittest.skipUnless(GLOO and os.path.isdir(GOLDEN), "torch is built without gloo, or tests/golden is absent")
class TwoProcesses(TestCase):
    def test_resumes_like_the_records(self):
        run_ranks(self, __file__, "recorded")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child([recorded_resumes], int(sys.argv[3]), sys.argv[4])
    else:
        main()
