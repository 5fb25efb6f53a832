# SPDX-License-Identifier: Apache-2.0
import threading
import unittest

import numpy as np

import dsopt
from support import arrays


def shapes_only(group, **options):
    params = {"w": dsopt.Param(shape=(3, 4)), "h": dsopt.Param(shape=(5,), dtype="float16")}
    return dsopt.Optimizer(params, group, **options)


def values(seed=0):
    return {"w": arrays((3, 4), seed=seed)[0], "h": arrays((5,), seed=seed + 100, dtype=np.float16)[0]}


class Functional(unittest.TestCase):
    def test_apply_gives_same_bits_as_step(self):
        for group in (dsopt.AdamW(lr=0.1), dsopt.Lamb(lr=0.1), dsopt.OnebitAdam(lr=0.1, freeze_step=2)):
            p, q = values(), values()
            opt, peer = shapes_only(group), dsopt.Optimizer(q, group)
            state = opt.init_state(p)
            for t in range(4):
                opt.apply(p, values(t), state)
                peer.step(values(t))
            for name in p:
                np.testing.assert_array_equal(p[name], q[name])
            self.assertEqual(list(state), list(peer.state))
            for name in state:
                np.testing.assert_array_equal(state[name], peer.state[name])
            self.assertEqual(opt.report().calls, 0)

    def test_apply_accepts_out_and_hyper(self):
        opt, p = shapes_only(dsopt.AdamW(lr=0.1)), values()
        state, before = opt.init_state(p), values()
        out = {name: np.zeros_like(x) for name, x in p.items()}
        report = np.zeros(16, np.float32)
        opt.apply(p, values(1), state, out=out, out_only=True, report=report, lr=0.0)
        for name in p:
            np.testing.assert_array_equal(p[name], before[name])
            np.testing.assert_array_equal(out[name], before[name])  # the learning rate was 0
        hyper = np.full((1, 16), np.nan, np.float32)
        hyper[0, 0] = -1
        opt.apply(p, values(1), state, hyper=hyper, report=report)
        self.assertEqual(report[0], 1)  # skipped because of an invalid learning rate
        opt.apply(p, values(1), state, workspace=np.zeros(opt.workspace, np.int32))
        opt.apply(p, values(1), state, workspace=np.zeros(opt.workspace, np.uint8))
        with self.assertRaisesRegex(dsopt.ArgumentError, "WORKSPACE"):
            opt.apply(p, values(1), state, workspace=np.zeros(1, np.int32))

    def test_apply_runs_in_several_threads(self):
        opt = shapes_only(dsopt.AdamW(lr=0.1))
        runs = [(values(), values()) for _ in range(4)]
        states = [opt.init_state(p) for p, _ in runs]

        def run(p, state):
            for t in range(50):
                opt.apply(p, values(t), state)

        threads = [threading.Thread(target=run, args=(p, state)) for (p, _), state in zip(runs, states)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for (p, _), state in zip(runs, states):
            np.testing.assert_array_equal(p["w"], runs[0][0]["w"])
            np.testing.assert_array_equal(state["w.exp_avg"], states[0]["w.exp_avg"])
            self.assertEqual(state["optimizer.step"][0], 50)

    def test_apply_rejects_invalid_arguments(self):
        opt, p = shapes_only(dsopt.AdamW()), values()
        state = opt.init_state(p)
        with self.assertRaisesRegex(dsopt.StateError, "memory"):
            opt.step(values())
        for change, text in (
            (lambda s: s.pop("w.exp_avg"), "state lacks 'w.exp_avg'"),
            (lambda s: s.update(x=1), "'x'"),
            (lambda s: s.update({"w.exp_avg": np.zeros((3, 5), np.float32)}), r"state\['w.exp_avg'\] has 15 elements"),
            (lambda s: s.update({"optimizer.step": np.zeros(2, np.float32)}), r"state\['optimizer.step'\].*int32"),
        ):
            wrong = dict(state)
            change(wrong)
            with self.assertRaisesRegex(dsopt.ArgumentError, text):
                opt.apply(p, values(1), wrong)
        with self.assertRaisesRegex(dsopt.ArgumentError, "params lacks 'h'"):
            opt.apply({"w": p["w"]}, values(1), state)
        with self.assertRaisesRegex(dsopt.ArgumentError, "dtype 'float8'"):
            dsopt.Optimizer({"w": dsopt.Param(shape=(2,), dtype="float8")}, dsopt.AdamW())

    def test_bind_uses_the_callers_memory(self):
        p, q = values(), values()
        opt, peer = dsopt.Optimizer(p, dsopt.AdamW()), dsopt.Optimizer(q, dsopt.AdamW())
        state = opt.init_state(p)
        opt.bind(state=state)
        for t in range(3):
            opt.step(values(t))
            peer.step(values(t))
        self.assertEqual(state["optimizer.step"][0], 3)
        for name in state:
            np.testing.assert_array_equal(state[name], peer.state[name])
            self.assertEqual(opt.state[name].ctypes.data, state[name].ctypes.data)
        moved = {name: x.copy() for name, x in p.items()}
        opt.bind(params=moved)
        opt.step(values(3))
        peer.step(values(3))
        np.testing.assert_array_equal(moved["w"], q["w"])
        self.assertTrue((p["w"] != q["w"]).any())


if __name__ == "__main__":
    unittest.main()
