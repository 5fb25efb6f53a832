# SPDX-License-Identifier: Apache-2.0
"""Names of DeepSpeed's optimizers, and their descriptions in README.md.

FusedAdam and FusedLamb of DeepSpeed need an extension to be constructed. Their attributes are read from their source,
as
are those of the 1-bit family that a method sets after the constructor.
"""
import inspect
import re
import sys
import unittest

import originals
from support import TestCase, child, give_grads, main, params_of, run_ranks, torch
from test_attributes import names_in, rows_of, section

from dsopt.torch import FusedAdam, FusedLamb, OnebitAdam, OnebitLamb, ZeroOneAdam

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
FAMILY = ((OnebitAdam, {"freeze_step": 2}), (ZeroOneAdam, {"var_freeze_step": 2}), (OnebitLamb, {"freeze_step": 2}))
KINDS = (FusedAdam, FusedLamb, OnebitAdam, ZeroOneAdam, OnebitLamb)
check = unittest.TestCase()


def original_of(kind):
    return getattr(originals.load(), kind.__name__)


def made(kind, options):
    """Returns an optimizer of DeepSpeed after steps past its freeze, and its parameter."""
    params = params_of((4,))
    optimizer = original_of(kind)(params, originals.Engine(), comm_backend_name="compressed", **options)
    before = set(vars(optimizer))
    for seed in range(6):
        give_grads(params, seed=seed)
        optimizer.step()
    check.assertLessEqual(before, set(vars(optimizer)))
    return optimizer, params[0]


def listed(kind):
    """Returns rows of the kind's table, and those of OnebitAdam to which its section refers: (names, the first
    cell)."""
    rows = [(names_in(first), first) for first, _ in rows_of(kind)]
    if kind in (ZeroOneAdam, OnebitLamb):
        (without,) = re.findall(r"^As OnebitAdam, without (.*?), which the original", section(kind), re.M | re.S)
        without = names_in(without)
        common = {name for first, _ in rows_of(OnebitAdam) for name in names_in(first)}
        check.assertLessEqual(set(without), common)
        check.assertFalse(set(without) & found_in(kind), kind)
        rows += [([name for name in names_in(first) if name not in without], first) for first, _ in rows_of(OnebitAdam)]
    return rows


def found_in(kind):
    """Returns arguments of the constructor, attributes and methods of DeepSpeed's class."""
    original = original_of(kind)
    names = set(inspect.signature(original).parameters) | set(vars(original))
    names |= set(re.findall(r"self\.(\w+) = ", inspect.getsource(original)))
    for family, options in FAMILY:
        if family is kind:
            names |= set(vars(made(kind, options)[0])) - set(vars(torch.optim.SGD(params_of((1,)), lr=1)))
    return {name for name in names if not name.startswith("__")}


def tables_have_every_name(rank):
    for kind in KINDS:
        names = {name for names, first in listed(kind) if " of " not in first for name in names}
        check.assertLessEqual(found_in(kind) - names, {"load_state_dict"}, kind)  # a method of torch's


def tables_have_no_other_names(rank):
    for kind in KINDS:
        found, text = found_in(kind), inspect.getsource(original_of(kind))
        check.assertLessEqual({name for names, first in listed(kind) if " of " not in first for name in names}, found)
        for first, _ in rows_of(kind):
            for name in names_in(first.partition(" of ")[0]) if " of " in first else ():
                check.assertIn("'%s'" % name, text, kind)


def tables_have_the_state(rank):
    for kind, options in FAMILY:
        optimizer, param = made(kind, options)
        names = {name for names, first in listed(kind) if first.endswith("of `state`") for name in names}
        check.assertLessEqual(set(optimizer.state[param]), names, kind)


def signatures(rank):
    for kind in KINDS:
        for ours, theirs in ((kind, original_of(kind)), (kind.step, original_of(kind).step)):
            ours, theirs = [[(name, argument.default) for name, argument in inspect.signature(call).parameters.items()
                             if argument.kind is not argument.KEYWORD_ONLY] for call in (ours, theirs)]
            check.assertEqual(ours, theirs, kind)
    for kind, options in FAMILY:
        optimizer, _ = made(kind, options)
        check.assertEqual(set(kind(params_of((4,))).defaults), set(optimizer.defaults), kind)


CASES = (tables_have_every_name, tables_have_no_other_names, tables_have_the_state, signatures)


@unittest.skipUnless(GLOO, "torch is built without gloo")
class OriginalNames(TestCase):
    @originals.needed
    def test_names_match_deepspeed(self):
        run_ranks(self, __file__, "all", ranks=1)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(CASES, int(sys.argv[3]), sys.argv[4], ranks=1)
    else:
        main()
