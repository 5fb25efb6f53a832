# SPDX-License-Identifier: Apache-2.0
import copy
import ctypes
import dataclasses
import pickle
import unittest

import numpy as np

import dsopt
from dsopt import _abi as abi
from support import arrays


class Groups(unittest.TestCase):
    def refused(self, make, *words):
        with self.assertRaises(TypeError) as caught:
            make()
        self.assertIsInstance(caught.exception, dsopt.ArgumentTypeError)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_accepts_positional_parameters(self):
        """Positional parameters and learning rate, as in torch.optim."""
        (w,) = arrays((3,))
        for kind in dsopt._groups.ALGORITHMS:
            for values in (([w],), ({"w": w}, 0.1), (0.1,)):
                advice = "parameters go to the optimizer, as in Optimizer(params, %s(" % kind.__name__
                self.refused(lambda: kind(*values), "%s takes its fields by name" % kind.__name__, advice)

    def test_rejects_unknown_fields(self):
        self.refused(lambda: dsopt.AdamW(amsgrad=True), "AdamW has no field 'amsgrad'", "it has lr, betas")
        self.refused(lambda: dsopt.Sgd(betas=(0.9, 0.99)), "Sgd has no field 'betas'")
        self.refused(lambda: dsopt.Group(lr=1e-3), "Group has no field 'lr'")

    def test_rejects_fields_of_a_wrong_type(self):
        (w,) = arrays((3,))
        for make, words in (
            (lambda: dsopt.AdamW(lr=[w]), ("lr of AdamW is [array(", "must be a number")),
            (lambda: dsopt.AdamW(lr="0.1"), ("lr of AdamW is '0.1'", "must be a number")),
            (lambda: dsopt.AdamW(lr=None), ("lr of AdamW is None",)),
            (lambda: dsopt.AdamW(lr=10**400), ("lr of AdamW is 1000", "64 bits")),
            (lambda: dsopt.AdamW(betas=0.9), ("betas of AdamW is 0.9", "a pair of numbers")),
            (lambda: dsopt.AdamW(betas=(0.9, "x")), ("betas of AdamW is 'x'",)),
            (lambda: dsopt.AdamW(bias_correction="no"), ("bias_correction of AdamW is 'no'", "True or False")),
            (lambda: dsopt.Sgd(nesterov=2), ("nesterov of Sgd is 2", "True or False")),
            (lambda: dsopt.OnebitAdam(freeze_step=2.5), ("freeze_step of OnebitAdam is 2.5", "an integer")),
        ):
            self.refused(make, *words)
        group = dsopt.AdamW()
        group.lr = "x"  # checked when it is used
        self.refused(lambda: dsopt.Optimizer([w], group), "lr of AdamW is 'x'")

    def test_accepts_numpy_numbers(self):
        group = dsopt.AdamW(lr=np.float32(0.5), betas=np.array([0.5, 0.75]), bias_correction=np.bool_(False))
        (view,) = dsopt.Optimizer(arrays((3,)), group).groups
        self.assertEqual((view.lr, view.betas, view.bias_correction), (0.5, (0.5, 0.75), False))

    def test_defaults_match_the_library(self):
        for kind in dsopt._groups.ALGORITHMS:
            struct = abi.dsopt_group()
            abi.check(abi.lib.dsopt_group_init(ctypes.byref(struct), struct.size, kind.algorithm))
            self.assertEqual(bytes(kind().struct()), bytes(struct))
        (group,) = dsopt.Optimizer(arrays((3,)), dsopt.AdamW()).groups
        self.assertEqual((group.weight_decay, dsopt.AdamW().weight_decay, dsopt.Adam().weight_decay), (0.01, 0.01, 0))

    def test_onebit_groups_have_clipping_and_eps(self):
        """Groups have clipping in both modes, and eps is added to the root."""
        for kind in (dsopt.OnebitAdam, dsopt.ZeroOneAdam, dsopt.OnebitLamb):
            for compat in ("none", "deepspeed"):
                moments = []
                for limit in (0, 1):
                    opt = dsopt.Optimizer({"w": np.ones(4, np.float32)}, kind(max_norm=limit), compat=compat)
                    for _ in range(2):
                        opt.step({"w": np.full(4, 10, np.float32)})
                    moments.append(opt.state["w.exp_avg"][0])
                self.assertAlmostEqual(moments[0] / moments[1], 20, places=3)
                status = abi.lib.dsopt_optimizer_set(opt.handle, 0, abi.DSOPT_KEY_EPS_INSIDE_SQRT, 1.0)
                self.assertEqual(status, abi.DSOPT_ERR_UNSUPPORTED, (kind, compat))

    def test_values_survive_copies_and_pickling(self):
        group = dsopt.AdamW(lr=0.5, betas=(0.1, 0.2))
        for other in (copy.copy(group), copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
            self.assertEqual(other, group)
        self.assertEqual(dataclasses.replace(group, lr=2.0), dsopt.AdamW(lr=2.0, betas=(0.1, 0.2)))
        self.assertIn("AdamW(lr=0.5, betas=(0.1, 0.2), eps=1e-08", repr(group))

    def test_accepts_subclasses(self):
        class Mine(dsopt.AdamW):
            lr: float = 0.25

        self.assertEqual((Mine().lr, Mine(eps=1.0).eps, Mine.algorithm), (0.25, 1.0, dsopt.AdamW.algorithm))
        self.assertEqual(dsopt.Optimizer(arrays((3,)), Mine()).lr, 0.25)


if __name__ == "__main__":
    unittest.main()
