# SPDX-License-Identifier: Apache-2.0
"""Replays the recorded cases of low-precision state (tests/golden/lowp_*) with the classes of dsopt.torch. They follow
from a model of the formats in NumPy, and every value must be equal."""
import json
import unittest

import golden
from support import TestCase, main, torch

from dsopt.torch import SGD, Adagrad, Adam, AdamW, Lion

KINDS = {"adamw": AdamW, "adam": Adam, "sgd": SGD, "adagrad": Adagrad, "lion": Lion}
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "sum")
STATE = MOMENTS + tuple(name + "_scale" for name in MOMENTS) + ("master", "remainder")


def names():
    """FusedLamb has float32 moments only."""
    return [name for name in golden.low_precision_names() if golden.Golden(name).metadata["rule"] in KINDS]


def options_of(case, group, g):
    """Returns the arguments of a group."""
    rule, number = case.metadata["rule"], case.number
    options = {"lr": number("lr"), "weight_decay": number("weight_decay")}
    if rule in ("adamw", "adam", "lion"):
        options["betas"] = (number("beta1"), number("beta2"))
    if rule in ("adamw", "adam", "adagrad"):
        options["eps"] = number("eps")
    if rule == "sgd":
        options.update(momentum=number("momentum"), dampening=number("dampening"),
                       nesterov=bool(number("nesterov")))
    if rule == "adagrad":
        options.update(lr_decay=number("lr_decay"), initial_accumulator_value=number("initial_accumulator_value"))
    options.update({key: value for key, value in group.items() if key != "params"})
    for key in ("exp_avg_format", "exp_avg_sq_format"):
        if key in KINDS[rule]._stores:
            options[key] = case.metadata[key].split(",")[g]
    return options


def optimizer_of(case):
    """Returns an optimizer and its parameters, with the names of the record. A parameter with float32 moments has a
    group of its own."""
    count = len(json.loads(case.metadata["param_shapes"]))
    params = [torch.nn.Parameter(case.get("param_init", item="p%d" % i).clone()) for i in range(count)]
    groups = []
    for g, group in enumerate(json.loads(case.metadata["groups"])):
        for float32 in (False, True):
            members = [i for i in group["params"] if (i in case.number("f32_moments")) == float32]
            options = options_of(case, group, g)
            if float32:
                options.update({key: "f32" for key in options if key.endswith("_format")})
            if members:
                groups.append({**options, "params": [params[i] for i in members], "min_8bit_size": 0,
                               "param_names": ["p%d" % i for i in members], "seed": case.number("rounding_seed")})
    masters = {"f32": "float32", "remainder": "remainder"}.get(case.metadata["masters"])
    for group in groups:
        group["masters"] = masters
        group["stochastic_rounding"] = bool(case.number("stochastic_rounding"))
    return KINDS[case.metadata["rule"]](groups), params


def same(a, b):
    """True if the values are the same bits, or both NaN."""
    if a.dtype != b.dtype or a.numel() != b.numel():
        return False
    a, b = a.detach().reshape(-1), b.reshape(-1)
    equal = (a.view(torch.uint8) == b.view(torch.uint8)).reshape(a.numel(), -1).all(dim=1)
    if a.dtype in (torch.float32, torch.bfloat16):
        equal |= a.isnan() & b.isnan()
    return bool(equal.all())


def replay(case):
    """Returns the differences, and the recorded tensors that were not compared."""
    optimizer, params = optimizer_of(case)
    wrong, compared = [], set()
    for t in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = case.tensors["lr"][t].item()
        for i, param in enumerate(params):
            grad = case.get("grad", item="p%d" % i)[t].reshape(param.shape)
            param.grad = grad.clone().to(param.dtype) if case.tensors["grad_present"][t, i] else None
        optimizer.grad_scale, optimizer.found_inf = None, case.tensors["skip"][t].float()
        optimizer.step()
        for i, param in enumerate(params):
            state = optimizer.state.get(param, {})
            for name, value in [("param", param), *((name, state[name]) for name in STATE if name in state)]:
                key = "%s/p%d" % (name, i)
                compared.add(key)
                if not same(value, case.tensors[key][t]):
                    wrong.append("%s, step %d" % (key, t))
    inputs = ("grad", "param_init")
    return wrong + ["%s was not compared" % key for key in case.tensors
                    if "/" in key and key.split("/")[0] not in inputs and key not in compared]


@unittest.skipUnless(names(), "tests/golden has no cases of low-precision state")
class Recorded(TestCase):
    """One test per case."""

    def test_detects_one_wrong_value(self):
        case = golden.Golden(names()[0])
        for key in [key for key in case.tensors if key.split("/")[0] in STATE + ("param",)]:
            whole = case.tensors[key]
            case.tensors[key] = whole.clone()
            case.tensors[key].view(torch.uint8).reshape(-1)[-1] ^= 1
            self.assertEqual(replay(case), ["%s, step %d" % (key, case.steps - 1)])
            case.tensors[key] = whole

    def test_detects_a_tensor_that_is_not_compared(self):
        case = golden.Golden(names()[0])
        case.tensors["third_moment/p0"] = torch.zeros(1)
        self.assertEqual(replay(case), ["third_moment/p0 was not compared"])


def _add(name):
    def test(self):
        self.assertEqual(replay(golden.Golden(name)), [])

    setattr(Recorded, "test_" + name, test)


for _name in names():
    _add(_name)


if __name__ == "__main__":
    main()
