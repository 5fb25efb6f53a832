# SPDX-License-Identifier: Apache-2.0
"""Replays the cases recorded from the originals (tests/golden) with the classes of dsopt.torch, in compat mode."""
import functools
import json
import sys
import traceback
import unittest

from support import TestCase, child, main, run_ranks, torch

import dsopt
import golden
import replays

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
ALONE = "is not a class of dsopt.torch; "
SCALER = "DynamicLossScaler %sthe wrappers have the rules of theirs, which the fp16_ cases record" % ALONE
# Cases that the classes cannot express, by the prefix of their names. The C replay has all of them.
LEFT_OUT = {
    "compressed_allreduce_": "the all-reduce alone %sthe 1-bit optimizers call it" % ALONE,
    "loss_scaler_": SCALER,
    "fp16_scale_rule_hysteresis_ignored": "a hysteresis that has no effect is refused in compat mode (docs/compat.md)",
}


def reason(name):
    """Returns the reason why the case is left out, or None."""
    return next((why for begin, why in LEFT_OUT.items() if name.startswith(begin)), None)


def text_of(name, rank):
    """Returns the differences in the replay of a case on this rank, an empty text if there are none."""
    try:
        wrong = replays.replay(golden.Golden(name), rank)
    except Exception:
        return traceback.format_exc()
    return "" if not wrong else "%d differences, the first: %s" % (len(wrong), wrong[0])


@functools.lru_cache(maxsize=None)
def of_ranks(ranks):
    """Runs all cases of that many ranks in one set of processes; returns text_of for each rank and case."""
    try:
        said = run_ranks(unittest.TestCase(), __file__, str(ranks), ranks)
    except AssertionError as problem:  # all later cases would raise it, too
        return [dict.fromkeys(cases_of(ranks), str(problem))]
    return [dict(json.loads(line[7:]) for line in text.splitlines() if line.startswith("golden ")) for text in said]


def cases_of(ranks):
    return [name for name in golden.names() if reason(name) is None and golden.Golden(name).ranks == ranks]


class Recorded(TestCase):
    """One test per recorded case."""

    def replay(self, name):
        ranks = golden.Golden(name).ranks
        if ranks == 1:
            self.assertEqual(text_of(name, 0), "")
            return
        if not GLOO:
            self.skipTest("torch is built without gloo")
        for rank, texts in enumerate(of_ranks(ranks)):
            self.assertEqual(texts[name], "", "rank %d" % rank)


@unittest.skipUnless(golden.names(), "tests/golden is absent")
class LeftOut(TestCase):
    def test_each_reason_applies_to_a_case(self):
        for begin in LEFT_OUT:
            self.assertTrue(any(name.startswith(begin) for name in golden.names()), begin)

    def test_ignored_hysteresis_is_refused(self):
        with self.assertRaisesRegex(dsopt.UnsupportedError, "hysteresis"):
            replays.replay(golden.Golden("fp16_scale_rule_hysteresis_ignored"))


def alter(values, row, peak):
    """Changes the first value of a row by slightly more than the tolerance."""
    flat = values.reshape(len(values), -1)[row]
    if values.dtype in (torch.float16, torch.bfloat16):
        flat.view(torch.int16)[0] += 3
    elif values.dtype == torch.uint8:
        flat[0] ^= 1
    else:
        flat[0] += (2e-5 * peak or 1) if values.dtype.is_floating_point else 1


@unittest.skipUnless(golden.names(), "tests/golden is absent")
class Comparisons(TestCase):
    """A wrong record leads to a failure."""

    NAMES = ("fused_lamb", "fused_lamb_fp16_grads", "fp16_fused_adam_static", "onebit_lamb_n1", "zero_one_adam_n1")

    def test_detects_one_wrong_value(self):
        for name in self.NAMES:
            case = golden.Golden(name)
            tried = set(golden.INPUTS) | set(golden.HIDDEN)
            for key in sorted(case.tensors):
                quantity = key.split("/")[0]
                if quantity in tried or quantity.endswith("_init"):
                    continue
                tried.add(quantity)
                whole, row = case.tensors[key], case.steps // 2
                case.tensors[key] = whole.clone()
                alter(case.tensors[key], row, golden.Comparison(case).peak(key))
                wrong = replays.replay(case)
                self.assertEqual(len(wrong), 1, (name, key, wrong))
                self.assertIn("%s, call %d, element 0" % (key, row), wrong[0])
                case.tensors[key] = whole

    def test_detects_a_tensor_that_is_not_compared(self):
        case = golden.Golden("fused_adam_l2")
        case.tensors["third_moment/p0"] = case.tensors["exp_avg/p0"]
        self.assertEqual(replays.replay(case), ["third_moment/p0 was compared in 0 of 10 calls"])


def _add(name):
    def test(self):
        self.replay(name)

    setattr(Recorded, "test_" + name, test)


for _name in golden.names():
    if reason(_name) is None:
        _add(_name)


def _report(name, rank):
    print("golden", json.dumps([name, text_of(name, rank)]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        count = int(sys.argv[2])
        child([functools.partial(_report, name) for name in cases_of(count)], int(sys.argv[3]), sys.argv[4], count)
    else:
        main()
