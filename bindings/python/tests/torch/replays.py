# SPDX-License-Identifier: Apache-2.0
"""Replays recorded cases step by step with the classes of dsopt.torch in place of the originals."""
import inspect
import io
import json
import math

import originals
import torch
from golden import EXACT, Comparison

from dsopt import _abi as abi
from dsopt.torch import (FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, OnebitAdam, OnebitLamb,
                         ZeroOneAdam)

KINDS = {"fused_adam": FusedAdam, "fused_lamb": FusedLamb, "onebit_adam": OnebitAdam, "onebit_lamb": OnebitLamb,
         "zero_one_adam": ZeroOneAdam}
FAMILY = (OnebitAdam, OnebitLamb, ZeroOneAdam)
WRAPPERS = {"fused": FP16_Optimizer, "unfused": FP16_UnfusedOptimizer}
BITS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Replay:
    """An optimizer over the recorded parameters."""

    def __init__(self, golden, rank, kind):
        self.golden, self.rank, self.kind = golden, rank, kind
        self.comparison = Comparison(golden, rank)
        self.shapes = json.loads(golden.metadata["param_shapes"])
        self.described = json.loads(golden.metadata["groups"])
        self.order = [index for group in self.described for index in group["params"]]
        self.start = "param16_init" if golden.has("param16_init") else "param_init"
        self.averaged = "grad16" if golden.has("grad16") else "grad"
        self.make()

    def make(self):
        golden = self.golden
        words = golden.metadata.get("dtype", "f32").split(",")
        self.params = [torch.nn.Parameter(golden.get(self.start, item="p%d" % i).clone().reshape(shape).to(
            BITS[words[i % len(words)]])) for i, shape in enumerate(self.shapes)]
        groups = []
        for described in self.described:
            group = {key: tuple(value) if key == "betas" else value for key, value in described.items()}
            group["params"] = [self.params[i] for i in described["params"]]
            mask = "exp_avg_mask/p%d" % described["params"][0]
            if mask in golden.tensors:
                assert len(group["params"]) == 1
                group["exp_avg_mask"] = golden.tensors[mask].clone().reshape(group["params"][0].shape)
            groups.append(group)
        options = {name: golden.number(name) for name in inspect.signature(self.kind).parameters
                   if golden.number(name) is not None and name != "seed"}
        options["betas"] = golden.number("beta1"), golden.number("beta2")
        if self.kind in FAMILY:
            self.engine = originals.Engine()
            options["deepspeed"] = self.engine
        self.optimizer = self.kind(groups, compat="deepspeed", **options)

    def set_inputs(self, t):
        golden = self.golden
        self.grads = []
        for place, i in enumerate(self.order):
            absent = golden.has("grad_present") and not golden.tensors["grad_present"][t, place]
            grad = None if absent else golden.get(self.averaged, self.rank, "p%d" % i)[t].clone()
            self.grads.append(None if grad is None else grad.reshape(self.params[i].shape))
            if not golden.has("param_out"):
                self.params[i].grad = self.grads[-1]
        for group in self.optimizer.param_groups:
            group["lr"] = golden.get("lr", self.rank)[t].item()

    def row(self, t, got, quantity, item=None, allowed=None):
        self.comparison.row(t, got, quantity, item, allowed)

    # ------------------------------------------------------------------------------------------ contents of the state
    def of(self, i, name):
        """Returns state of parameter i: zeros before the first gradient, as in the record."""
        state = self.optimizer.state.get(self.params[i], {})
        return state[name].reshape(-1) if name in state else torch.zeros(self.params[i].numel())

    def whole(self, name):
        """Returns state of the whole optimizer, which is stored with the first parameter."""
        found = [value for state in self.optimizer.state.values() for key, value in state.items()
                 if key == name or key.startswith(name + "_rank")]
        assert len(found) == 1, "%s is there %d times" % (name, len(found))
        return found[0]

    def steps(self):
        return [float(self.optimizer.state.get(self.params[i], {}).get("step", 0)) for i in self.order]

    def ratios(self):
        return self.optimizer._plans[0].whole["trust_ratio"]

    def run(self):
        resume = self.golden.number("resume_before_call")
        for t in range(self.golden.steps):
            if t == resume:
                self.resume()
            self.set_inputs(t)
            self.step(t)
            self.compare(t)
        return self.comparison.finish()

    def compare_family(self, t, flat):
        """Compares state that 1-bit Adam, 0/1 Adam and 1-bit LAMB have, with or without a wrapper. `flat`: one master
        per group."""
        schedule = self.whole("schedule").tolist()
        self.row(t, schedule[0], "step")
        self.row(t, self.engine.enable_backward_allreduce, "enable_backward_allreduce")
        zero_one, lamb = self.kind is ZeroOneAdam, self.kind is OnebitLamb
        self.row(t, schedule[1], "local_step_stage" if zero_one else "compression_stage")
        if self.golden.ranks > 1:
            self.compare_errors(t, flat)
        if zero_one:
            for name, value in (("var_interval", max(1, schedule[2])), ("var_counter", schedule[3]),
                                ("local_step_interval", max(1, schedule[4])), ("local_step_counter", schedule[5])):
                self.row(t, value, name)
            sums = self.whole("lr_sum").view(torch.float64)
            self.row(t, sums if flat else [sums[g].item() for g, group in enumerate(self.described)
                                           for _ in group["params"]], "lrs")
            for item, members in self.vectors(flat):
                changes = torch.cat([self.of(i, "momentum_accumulator") for i in members])
                self.row(t, changes, "momentum_accumulator", item)
        if lamb:
            for i in self.order:
                self.row(t, self.of(i, "exp_avg_sq_fresh"), "exp_avg_sq_fresh", "p%d" % i)
            for name, key in (("lamb_coeff_freeze", "trust_average"), ("last_factor", "trust_factor"),
                              ("scaling_coeff", "trust_scaling")):
                self.row(t, [self.optimizer.state[self.params[i]][key].item() for i in self.order], name)
            self.row(t, self.ratios(), "lamb_coeff")
            if self.golden.has("exp_avg_pad"):
                self.row(t, self.whole("exp_avg_pad"), "exp_avg_pad", "flat")

    def vectors(self, flat):
        """Returns name and parameters of each tensor of the original's inner optimizer."""
        if flat:
            return [("g%d" % g, group["params"]) for g, group in enumerate(self.described)]
        return [("p%d" % i, [i]) for i in self.order]

    def error(self, name, begin, count, scale):
        """Returns the residuals. The state has the compensated values and, at its end, the scales to subtract."""
        state = self.whole(name)
        values = state[begin:begin + count]
        return values - torch.where(values >= 0, state[scale], -state[scale])

    def compare_errors(self, t, flat):
        ranks = self.golden.ranks
        vectors = [("flat", self.order)] if self.kind is OnebitLamb else self.vectors(flat)
        frozen = {i for group in self.described if group.get("non_freeze") for i in group["params"]}
        align = ranks * (8 * ranks // math.gcd(ranks, 8))
        begin = 0
        kept = [item for item, members in vectors if members[0] not in frozen]
        for item, members in vectors:
            padded = -(-sum(self.params[i].numel() for i in members) // align) * align
            if members[0] in frozen:
                worker, server = torch.zeros(padded), torch.zeros(padded // ranks)
            else:
                place = kept.index(item)
                worker = self.error("worker_error", begin, padded, place - len(kept))
                server = self.error("server_error", begin // ranks, padded // ranks, place - len(kept))
                begin += padded
            self.comparison.error_row(t, worker, "worker_error", item)
            self.comparison.error_row(t, server, "server_error", item)


class Plain(Replay):
    """Without a wrapper. Gradients of another dtype than the parameters, and output copies, are arguments of step."""

    def set_inputs(self, t):
        super().set_inputs(t)
        self.passed = {}
        if self.golden.has("param_out"):
            self.outputs = [self.golden.get("param_out", item="p%d" % i)[t].new_zeros(self.params[i].shape)
                            for i in self.order]
            self.passed = {"grads": self.grads, "output_params": self.outputs,
                          "scale": self.golden.number("grad_divisor")}

    def step(self, t):
        self.optimizer.step(**self.passed)

    def compare(self, t):
        for place, i in enumerate(self.order):
            self.row(t, self.params[i].detach().double(), "param", "p%d" % i)
            if self.passed:
                self.row(t, self.outputs[place], "param_out", "p%d" % i)
            for name in ("exp_avg", "exp_avg_sq"):
                self.row(t, self.of(i, name), name, "p%d" % i)
        if self.kind in FAMILY:
            self.compare_family(t, flat=False)
            return
        self.row(t, self.steps(), "state_step")
        if self.kind is FusedLamb:
            self.row(t, self.optimizer.get_lamb_coeffs(), "lamb_coeff")

    def resume(self):
        """Resumes all ranks from rank 0's weights and state, with new optimizers."""
        file = io.BytesIO()
        torch.save([self.optimizer.state_dict(), [p.detach() for p in self.params]], file)
        sent = [file.getvalue()]
        torch.distributed.broadcast_object_list(sent, src=0)
        state, weights = torch.load(io.BytesIO(sent[0]))
        self.make()
        for param, weight in zip(self.params, weights):
            param.data.copy_(weight)
        self.optimizer.load_state_dict(state)


def scale_arguments(golden):
    """Returns a wrapper's arguments for its loss scale."""
    if golden.metadata.get("dynamic", "1") == "0" or golden.number("loss_scale_static"):
        return {"static_loss_scale": golden.number("loss_scale_static") or golden.number("init_scale")}
    passed = {name: golden.number(name) for name in ("init_scale", "min_scale", "scale_window")}
    passed["delayed_shift"] = golden.number("delayed_shift_ignored")  # not used by the original's wrappers
    return {"dynamic_loss_scale": True,
            "dynamic_loss_args": {name: value for name, value in passed.items() if value is not None}}


class Wrapped(Replay):
    """FP16_Optimizer or FP16_UnfusedOptimizer around an optimizer."""

    def make(self):
        super().make()
        golden = self.golden
        self.flat = golden.metadata["wrapper"] == "fused"
        self.wrapper = WRAPPERS[golden.metadata["wrapper"]](
            self.optimizer, deepspeed=getattr(self, "engine", None), clip_grad=golden.number("clip_grad"),
            verbose=False, low_precision_dtype=BITS[golden.metadata["dtype"]], **scale_arguments(golden))
        self.norm = 0.0
        self.compare_state(None, "_init")

    def compare_state(self, t, ending):
        for item, members in self.vectors(self.flat):
            for name in ("master", "exp_avg", "exp_avg_sq"):
                self.row(t, torch.cat([self.of(i, name) for i in members]), name + ending, item)

    def step(self, t):
        self.row(t, self.wrapper.cur_scale, "loss_scale_used", allowed=EXACT)
        self.overflow = self.wrapper.step()

    def compare(self, t):
        wrapper = self.wrapper
        self.compare_state(t, "")
        for i in self.order:
            self.row(t, self.params[i].detach().double(), "param16", "p%d" % i)
        self.row(t, self.overflow, "overflow")
        self.row(t, wrapper.cur_scale, "loss_scale", allowed=EXACT)
        self.row(t, wrapper.cur_iter, "cur_iter")
        self.row(t, wrapper.last_overflow_iter, "last_overflow_iter")
        skipped = wrapper._reported(abi.DSOPT_REPORT_SKIPPED)
        if not skipped:
            self.norm = wrapper._global_grad_norm
        self.row(t, self.norm, "global_grad_norm")
        self.row(t, wrapper._reported(abi.DSOPT_REPORT_DIVISOR), "combined_scale")
        if self.kind in FAMILY:
            self.compare_family(t, self.flat)
        else:
            steps = self.steps()
            self.row(t, steps[0], "step")
            assert steps == steps[:1] * len(steps), steps
        if self.kind is FusedLamb:
            self.row(t, self.optimizer.get_lamb_coeffs(), "lamb_coeff")


def scale_rule(golden, rank):
    """Replays the loss scale of a wrapper that finds overflows in the gradients."""
    comparison = Comparison(golden, rank)
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float16))
    wrapper = WRAPPERS[golden.metadata["wrapper"]](FusedAdam([param], compat="deepspeed"), verbose=False,
                                                   **scale_arguments(golden))
    for t in range(golden.steps):
        param.grad = torch.full_like(param, math.inf if golden.tensors["overflow"][t] else 0.0)
        wrapper.step()
        comparison.row(t, wrapper.cur_scale, "loss_scale", allowed=EXACT)
        comparison.row(t, wrapper.cur_iter, "cur_iter")
        comparison.row(t, wrapper.last_overflow_iter, "last_overflow_iter")
    return comparison.finish(inputs=("overflow",))


def replay(golden, rank=0):
    """Returns the differences from the record."""
    algorithm = golden.metadata["algorithm"]
    if algorithm == "fp16_scale_rule":
        return scale_rule(golden, rank)
    if algorithm == "fp16_optimizer":
        return Wrapped(golden, rank, KINDS[golden.metadata["inner"]]).run()
    return Plain(golden, rank, KINDS[algorithm]).run()
