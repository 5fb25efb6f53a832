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

    def test_apply_follows_its_arrays_from_call_to_call(self):
        """Later calls use the lists of earlier ones."""
        for group in (dsopt.AdamW(lr=0.1), dsopt.Lion(lr=0.1)):
            opt, p, q = shapes_only(group), values(), values()
            peer = dsopt.Optimizer(q, group)
            state, grads = opt.init_state(p), values(0)
            for t in range(12):
                if t in (3, 4):  # other memory, which stays the same then
                    state = {name: x.copy() for name, x in state.items()}
                    p = {name: x.copy() for name, x in p.items()}
                if t == 6:
                    p["w"].shape, p["w"].shape = (4, 3), (3, 4)
                if t == 7:
                    state["w.exp_avg"] = state["w.exp_avg"].reshape(-1)
                if t == 8:
                    opt.add_group(dsopt.Sgd(lr=0.5), {"more": dsopt.Param(shape=(2, 2))})
                    peer.add_group(dsopt.Sgd(lr=0.5), {"more": np.ones((2, 2), np.float32)})
                    p["more"], grads["more"] = np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)
                    more = {name: np.zeros(x.shape, x.dtype) for name, x in peer.state.items()}
                    state = {name: state.get(name, x) for name, x in more.items() if name != "optimizer.step"}
                    state["optimizer.step"] = np.array([t, t, 0], np.int32)
                if t % 2:
                    for name, x in values(t).items():
                        grads[name][...] = x
                else:
                    grads.update(values(t))
                given = dict(grads, h=None) if t == 10 else grads
                opt.apply(p, given, state)
                peer.step(given)
                for name in p:
                    np.testing.assert_array_equal(p[name], peer.params[name], "step %d" % t)
                for name in state:
                    found = np.asarray(peer.state[name])
                    np.testing.assert_array_equal(state[name].reshape(found.shape), found, "step %d" % t)
            with self.assertRaisesRegex(dsopt.ArgumentError, "'x', which is not in the state"):
                opt.apply(p, grads, dict(state, x=state["w.exp_avg"]))
            with self.assertRaisesRegex(dsopt.ArgumentError, r"state\['w.exp_avg'\]"):
                opt.apply(p, grads, dict(state, **{"w.exp_avg": None}))

    def test_apply_in_a_hook_of_apply_has_lists_of_its_own(self):
        calls = []

        def pool(count, run):
            if not calls:
                calls.append(count)
                opt.apply(*inner)
            for i in range(count):
                run(i)

        opt = dsopt.Optimizer(
            {"w": dsopt.Param(shape=(20000,))}, dsopt.AdamW(lr=0.1), context=dsopt.Context(threads=2, parallel_for=pool)
        )
        sets = []
        for seed in range(2):
            p = {"w": arrays((20000,), seed=seed)[0]}
            sets.append((p, {"w": arrays((20000,), seed=seed + 10)[0]}, opt.init_state(p)))
        wanted = []
        for p, grads, _ in sets:
            wanted.append(p["w"].copy())
            dsopt.Optimizer({"w": wanted[-1]}, dsopt.AdamW(lr=0.1)).step(grads)
        inner = sets[1]
        calls.clear()
        opt.apply(*sets[0])
        self.assertEqual(len(calls), 1)
        for (p, _, _), w in zip(sets, wanted):
            np.testing.assert_array_equal(p["w"], w)

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
