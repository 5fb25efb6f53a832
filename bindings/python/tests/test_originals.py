# SPDX-License-Identifier: Apache-2.0
"""Tests the recipe of docs/checkpoints.md, "State of DeepSpeed", on recorded runs of DeepSpeed."""

import io
import json
import os
import struct
import threading
import unittest

import numpy as np

import dsopt
from dsopt import _abi as abi

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 3, "tests", "golden")
DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I64": np.int64, "U8": np.uint8}
COUNTERS = ("var_interval", "var_counter", "local_step_interval", "local_step_counter")


class Case:
    """A recorded case of two parameters and two ranks."""

    def __init__(self, name):
        with open(os.path.join(GOLDEN, name + ".safetensors"), "rb") as file:
            data = file.read()
        (size,) = struct.unpack("<Q", data[:8])
        self.tensors = json.loads(data[8 : 8 + size])
        self.data, self.info = data[8 + size :], self.tensors.pop("__metadata__")
        self.begin = int(self.info.get("resume_before_call", 5))
        self.steps = int(self.info["steps"])

    def get(self, name, rank=0):
        what, _, item = name.partition("/")
        names = (name, "%s/all/%s" % (what, item), "%s/r%d/%s" % (what, rank, item))
        entry = next(self.tensors[key] for key in names if key in self.tensors)
        begin, end = entry["data_offsets"]
        return np.frombuffer(self.data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def group(self):
        def number(name):
            return float(self.info[name])

        common = dict(betas=(number("beta1"), number("beta2")), eps=number("eps"), weight_decay=number("weight_decay"))
        if "onebit_adam" in (self.info["algorithm"], self.info.get("inner")):
            return dsopt.OnebitAdam(freeze_step=int(number("freeze_step")), **common)
        if self.info["algorithm"] == "zero_one_adam":
            return dsopt.ZeroOneAdam(
                freeze_step=int(number("var_freeze_step")),
                max_local_interval=int(number("local_step_clipper")),
                var_interval_steps=int(number("var_update_scaler")),
                local_interval_steps=int(number("local_step_scaler")),
                **common,
            )
        return dsopt.OnebitLamb(
            freeze_step=int(number("freeze_step")),
            min_trust=number("min_coeff"),
            max_trust=number("max_coeff"),
            trust_beta=number("coeff_beta"),
            trust_threshold=number("factor_threshold"),
            trust_min_change=number("factor_min"),
            trust_max_change=number("factor_max"),
            **common,
        )

    def weights(self, t):
        return {"p%d" % i: self.get("param/p%d" % i)[t].copy() for i in range(2)}


def imported(case, compat):
    """Converts the state of the original's rank 0 after the call before `case.begin` to a checkpoint of one rank."""
    t = case.begin - 1
    params, step = case.weights(t), int(case.get("step")[t])
    opt = dsopt.Optimizer(params, case.group(), compat=compat)
    for name in params:
        for state in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"):
            if "%s.%s" % (name, state) in opt.state:
                opt.state["%s.%s" % (name, state)] = case.get("%s/%s" % (state, name))[t].copy()
        if name + ".anchor" in opt.state:
            opt.state[name + ".anchor"] = params[name]
    opt.state["optimizer.step"] = np.full(2, step, np.int32)
    schedule, freeze_step = np.zeros(8, np.int32), int(case.info.get("freeze_step", case.info.get("var_freeze_step")))
    zero_one, lamb = (case.info["algorithm"] == name for name in ("zero_one_adam", "onebit_lamb"))
    schedule[:2] = step, step > freeze_step if zero_one else step >= freeze_step
    if zero_one:
        schedule[2:6] = [case.get(name)[t] for name in COUNTERS]
    opt.state["optimizer.schedule"] = schedule
    if lamb:
        ours = {"trust_average": "lamb_coeff_freeze", "trust_factor": "last_factor", "trust_scaling": "scaling_coeff"}
        for name, original in ours.items():
            if "optimizer." + name in opt.state:
                opt.state["optimizer." + name] = case.get(original)[t].astype(np.float32)
        if "optimizer.trust_weight" in opt.state:
            opt.state["optimizer.trust_weight"] = np.ones(2, np.float32)
    abi.check(abi.lib.dsopt_optimizer_set(opt.handle, abi.DSOPT_ALL_GROUPS, abi.DSOPT_KEY_CALLS, step))
    file = io.BytesIO()
    opt.save(file, params=True)
    return file.getvalue()


def continued(case, compat, checkpoint, rank, id, averages):
    """Runs one rank. Returns (weights and moments after each call, reduction before each call)."""
    comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2)
    params = {name: np.zeros_like(value) for name, value in case.weights(0).items()}
    opt = dsopt.Optimizer(params, case.group(), data=comm, compat=compat, nonfinite="apply", averages=averages)
    opt.load(io.BytesIO(checkpoint), params=True)
    rows = []
    for t in range(case.begin, case.steps):
        reduction = opt.next_reduction()
        opt.lr = case.get("lr")[t]
        opt.step({name: case.get("grad/" + name, rank)[t].copy() for name in params})
        state = {"%s/%s" % (what, name): opt.state.copy("%s.%s" % (name, what)) for name in params
                 for what in ("exp_avg", "exp_avg_sq")}
        rows.append((reduction, {**state, **{"param/" + name: value.copy() for name, value in params.items()}}))
    return rows


def mixed(case, context, params, data=None):
    """Returns the equivalent of FP16_Optimizer around OnebitAdam."""
    scaler = dsopt.Scaler(context, profile="fused", init=2.0, window=int(case.info["scale_window"]))
    return scaler, dsopt.Optimizer(
        params,
        case.group(),
        context=context,
        scaler=scaler,
        data=data,
        max_norm=float(case.info["clip_grad"]),
        compat="deepspeed",
        masters="flat",
    )


def imported_mixed(case):
    """Same as `imported` for FP16_Optimizer, which has one flat tensor per group."""
    t = case.begin - 1
    params = {"p%d" % i: case.get("param16/p%d" % i)[t].copy() for i in range(5)}
    scaler, opt = mixed(case, dsopt.Context(), params)
    step, ends = int(case.get("step")[t]), np.cumsum([value.size for value in params.values()])
    scaler.scale = case.get("loss_scale")[t]
    for state, original in (("master", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
        for name, part in zip(params, np.split(case.get(original + "/g0")[t], ends[:-1])):
            opt.state["%s.%s" % (name, state)] = part.copy()
    opt.state["optimizer.step"] = np.full(len(params), step, np.int32)
    frozen = step >= int(case.info["freeze_step"])
    opt.state["optimizer.schedule"] = np.array([step, frozen, 0, 0, 0, 0, 0, 0], np.int32)
    words = opt.state.copy("optimizer.scaler")
    words[4:6] = case.get("cur_iter")[t], case.get("last_overflow_iter")[t]
    opt.state["optimizer.scaler"] = words
    abi.check(abi.lib.dsopt_optimizer_set(opt.handle, abi.DSOPT_ALL_GROUPS, abi.DSOPT_KEY_CALLS, step))
    file = io.BytesIO()
    opt.save(file, params=True)
    return file.getvalue()


def continued_mixed(case, checkpoint, rank, id):
    """Runs one rank. Returns (weights, masters, moments, loss scale) after each call."""
    context = dsopt.Context()
    params = {"p%d" % i: np.zeros_like(case.get("param16/p%d" % i)[0]) for i in range(5)}
    scaler, opt = mixed(case, context, params, dsopt.Comm.local(context, id, rank, 2))
    opt.load(io.BytesIO(checkpoint), params=True)
    rows = []
    for t in range(case.begin, case.steps):
        opt.lr = case.get("lr")[t]
        opt.step({name: case.get("grad16/" + name, rank)[t].copy() for name in params})
        flat = {what + "/g0": np.concatenate([opt.state.copy("%s.%s" % (name, what)) for name in params])
                for what in ("master", "exp_avg", "exp_avg_sq")}
        rows.append((scaler.query(), flat))
    return rows


def on_two_ranks(work):
    """Runs work(rank, id) on one thread per rank."""
    id, rows = dsopt.Comm.unique_id(), [None, None]

    def run(rank):
        rows[rank] = work(rank, id)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows


@unittest.skipUnless(os.path.isdir(GOLDEN), "tests/golden is absent")
class StateOfDeepSpeed(unittest.TestCase):
    CASES = ("onebit_adam_resume_n2", "zero_one_adam_resume_n2", "onebit_lamb_resume_n2")

    def ranks(self, case, compat, averages=False):
        checkpoint = imported(case, compat)
        return on_two_ranks(lambda rank, id: continued(case, compat, checkpoint, rank, id, averages))

    def test_compat_mode_resumes_like_the_original(self):
        for name in self.CASES:
            case = Case(name)
            for rank, rows in enumerate(self.ranks(case, "deepspeed")):
                for t, (_, state) in enumerate(rows, case.begin):
                    for tensor, value in state.items():
                        recorded = case.get(tensor, rank)
                        limit = 2e-5 * np.abs(recorded).max()
                        self.assertLess(np.abs(value - recorded[t]).max(), limit, (name, rank, t, tensor))

    def test_masters_and_loss_scale_resume_like_the_original(self):
        """Begins before the freeze, where the record is the same as a run after a load."""
        case = Case("fp16_onebit_adam_n2")
        checkpoint = imported_mixed(case)
        self.assertIn(1, case.get("compression_stage")[case.begin :])
        self.assertFalse(case.get("compression_stage")[case.begin - 1])
        for rank, rows in enumerate(on_two_ranks(lambda rank, id: continued_mixed(case, checkpoint, rank, id))):
            for t, (scale, state) in enumerate(rows, case.begin):
                found = scale.scale, scale.updates, scale.last_overflow
                self.assertEqual(found, tuple(case.get(name)[t] for name in ("loss_scale", "cur_iter",
                                                                             "last_overflow_iter")))
                for tensor, value in state.items():
                    recorded = case.get(tensor, rank)
                    limit = 2e-5 * np.abs(recorded).max()
                    self.assertLess(np.abs(value - recorded[t]).max(), limit, (rank, t, tensor))

    def test_standard_mode_resumes_frozen(self):
        for name in self.CASES:
            case = Case(name)
            first, second = self.ranks(case, "none", averages=True)
            self.assertNotIn("full", [reduction for reduction, _ in first])
            t = case.begin - 1
            for parameter, before in case.weights(t).items():
                for rows in (first, second):
                    variance = case.get("exp_avg_sq/" + parameter)[t]
                    np.testing.assert_array_equal(rows[-1][1]["exp_avg_sq/" + parameter], variance)
                    self.assertTrue((rows[-1][1]["param/" + parameter] != before)[variance != 0].all())
            equal = [reduction == "compressed" for reduction, _ in first]
            self.assertTrue(any(equal))
            for agree, (_, one), (_, other) in zip(equal, first, second):
                for tensor in one:
                    if agree:
                        np.testing.assert_array_equal(one[tensor], other[tensor], name)


if __name__ == "__main__":
    unittest.main()
