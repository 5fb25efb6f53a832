# SPDX-License-Identifier: Apache-2.0
"""Errors that DeepSpeed's classes raise are caught here by the same except clauses."""
import pickle

from support import TestCase, main, params_of, torch

import dsopt
from dsopt.torch import (FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, FusedLion, OnebitAdam, OnebitLamb,
                         ZeroOneAdam)

EVERY = (FusedAdam, FusedLamb, FusedLion, OnebitAdam, OnebitLamb, ZeroOneAdam)


def sparse(kind):
    (param,) = params_of((3,))
    param.grad = torch.ones(3).to_sparse()
    kind([param]).step()


def double():
    (param,) = params_of((3,), dtype=torch.float64)
    param.grad = torch.ones_like(param)
    FusedAdam([param], compat="deepspeed").step()


def wrapped(wrapper, dtype=torch.float16, **more):
    return wrapper(FusedAdam(params_of((3,), dtype=dtype)), low_precision_dtype=dtype, **more)


def load_masters_of_another_size(wrapper, key, value):
    optimizer = wrapped(wrapper)
    saved = optimizer.state_dict()
    saved[key] = value
    optimizer.load_state_dict(saved)


# The type that the original raises, and a call that makes dsopt raise it.
CASES = [(RuntimeError, lambda kind=kind: kind(params_of((3,)), amsgrad=True), "amsgrad")
         for kind in EVERY if kind is not FusedLion]
CASES += [(NotImplementedError if kind is FusedLion else RuntimeError, lambda kind=kind: sparse(kind), "is sparse")
          for kind in EVERY]
CASES += [
    (RuntimeError, lambda: FusedAdam(params_of((3,))).step(grads=[]), "grads"),
    (RuntimeError, double, "float64"),
    (AssertionError, lambda: wrapped(FP16_Optimizer, torch.bfloat16).override_loss_scale(4.0), "torch.bfloat16"),
    (RuntimeError, lambda: load_masters_of_another_size(FP16_Optimizer, "fp32_groups_flat", [torch.zeros(9)]),
     "fp32_groups_flat"),
    (RuntimeError, lambda: load_masters_of_another_size(FP16_UnfusedOptimizer, "fp32_groups", [[torch.zeros(9)]]),
     "fp32_groups"),
]


class Errors(TestCase):
    def test_base_types_match_the_originals(self):
        for kind, call, text in CASES:
            with self.subTest(text, kind=kind):
                with self.assertRaisesRegex(kind, text) as caught:
                    call()
                self.assertIsInstance(caught.exception, dsopt.Error)

    def test_exceptions_have_the_status_of_their_class(self):
        for call, kind, name in ((CASES[-2][1], dsopt.TensorError, "DSOPT_ERR_SHAPE"),
                                 (CASES[-4][1], dsopt.TensorError, "DSOPT_ERR_DTYPE"),
                                 (CASES[-3][1], dsopt.AssertedError, "DSOPT_ERR_UNSUPPORTED")):
            with self.assertRaisesRegex(kind, name) as caught:
                call()
            self.assertEqual(caught.exception.name, name)
            self.assertIsInstance(caught.exception, dsopt.ArgumentError if kind is dsopt.TensorError else
                                  dsopt.UnsupportedError)
            again = pickle.loads(pickle.dumps(caught.exception))
            self.assertEqual((type(again), str(again)), (kind, str(caught.exception)))


if __name__ == "__main__":
    main()
