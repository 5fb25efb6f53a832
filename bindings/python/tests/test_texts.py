# SPDX-License-Identifier: Apache-2.0
"""Representations of objects, and error texts."""

import os
import unittest

import numpy as np

import dsopt
from dsopt import _abi as abi
from support import arrays


class Representations(unittest.TestCase):
    def test_repr_describes_handles(self):
        context, w = dsopt.Context(threads=2), np.zeros((3, 4), np.float32)
        scaler, comm = dsopt.Scaler(context, profile="fused"), dsopt.Comm.single(context)
        opt = dsopt.Optimizer({"w": w}, dsopt.AdamW(), context=context)
        opt.add_group(dsopt.Lamb(), {"b": np.zeros(2, np.float32)})
        threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
        reduce = dsopt.CompressedAllReduce(comm, [w])
        for thing, text in (
            (context, "<dsopt.Context: cpu, 2 threads>"),
            (dsopt.Context(), "<dsopt.Context: cpu, %d thread" % threads),
            (scaler, "<dsopt.Scaler: profile 'fused' on cpu, 2 threads>"),
            (comm, "<dsopt.Comm: rank 0 of 1>"),
            (opt, "<dsopt.Optimizer: AdamW, Lamb, 2 parameters with 14 elements on cpu, 2 threads>"),
            (reduce, "<dsopt.CompressedAllReduce: 1 array, rank 0 of 1>"),
            (opt.state, "<dsopt.State of <dsopt.Optimizer: AdamW, Lamb"),
        ):
            self.assertTrue(repr(thing).startswith(text), repr(thing))
        groups = opt.groups
        for handle in (opt, scaler, comm, context):
            handle.close()
            self.assertEqual(repr(handle), "<dsopt.%s: closed>" % type(handle).__name__)
        self.assertEqual(repr(groups[1]), "<group 1 of <dsopt.Optimizer: closed>>")

    def test_repr_works_in_a_hook(self):
        """repr() does not fail while the library is in a call."""
        said = []
        things = []

        def run(n, body):
            said.extend(map(repr, things))
            for i in range(n):
                body(i)

        (w,) = arrays((100000,))
        opt = dsopt.Optimizer([w], dsopt.AdamW(), context=dsopt.Context(threads=2, parallel_for=run))
        opt.step([w.copy()])
        things += [opt, opt.groups[0], opt.state, opt.state["optimizer.step"], opt.context]
        opt.step([w.copy()])
        self.assertIn("<dsopt.Optimizer: AdamW, 1 parameter with 100000 elements on cpu, 2 threads>", said)


class Refusals(unittest.TestCase):
    """Error texts say what to do."""

    def test_float64_errors_suggest_a_dtype(self):
        (w,) = arrays((3,))
        opt = dsopt.Optimizer([w], dsopt.AdamW())
        for call, name in (
            (lambda: opt.step([np.zeros(3)]), "grads['p0']"),
            (lambda: dsopt.norm([np.zeros(3)]), "arrays[0]"),
        ):
            with self.assertRaises(dsopt.ArgumentError) as caught:
                call()
            self.assertEqual(
                str(caught.exception),
                name + " has dtype float64, and must have float32, float16 or bfloat16; cast it first, such as with "
                "array.astype('float32') (DSOPT_ERR_DTYPE)",
            )

    def test_errors_say_what_to_do(self):
        (w,) = arrays((3,))
        opt = dsopt.Optimizer({"w": w}, dsopt.AdamW())
        for call, kind, text in (
            (lambda: dsopt.Optimizer([w]), dsopt.ArgumentError, "group is missing; pass an algorithm"),
            (lambda: opt.step(), dsopt.ArgumentError, "neither given nor bound: pass them, or bind them"),
            (lambda: opt.step({"v": w}), dsopt.ArgumentError, r"'v', which is not registered; registered are \['w'\]"),
            (lambda: opt.step({"w": [1.0]}), TypeError, "no array.*Pass an array, such as numpy.asarray"),
            (lambda: opt.bind(params={}), dsopt.ArgumentError, "lacks 'w'; pass an array for each"),
            (lambda: dsopt.Context(log=3), dsopt.ArgumentError, "log is int, and must be callable"),
            (
                lambda: dsopt.Comm.table(opt.context, 3, 0, 1),
                dsopt.ArgumentError,
                "collectives is int, and must have a method all_reduce",
            ),
        ):
            with self.assertRaisesRegex(kind, text):
                call()

    def test_unsupported_raises_the_class_of_the_status(self):
        """The class of the exception is that of the status."""
        with self.assertRaisesRegex(dsopt.UnsupportedError, "x is y .DSOPT_ERR_UNSUPPORTED"):
            dsopt._arrays.refuse("x", "is y", abi.DSOPT_ERR_UNSUPPORTED)


if __name__ == "__main__":
    unittest.main()
