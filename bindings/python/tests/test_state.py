# SPDX-License-Identifier: Apache-2.0
import copy
import gc
import operator
import pickle
import unittest
import warnings

import numpy as np

import dsopt

N = 2048


def full(value):
    return np.full(N, value, np.float32)


class StateViews(unittest.TestCase):
    """State of the whole optimizer has entries per parameter, and is reallocated when parameters are added."""

    def test_views_follow_their_tensor(self):
        for algorithm in (dsopt.AdamW, dsopt.Lamb):
            opt = dsopt.Optimizer({"w": full(1)}, algorithm())
            opt.step([full(1)])
            opt.add_group(algorithm(), {"x": full(1)})
            view = opt.state["optimizer.step"]
            self.assertEqual(list(view), [1, 0])
            for i in range(100):
                opt.add_group(algorithm(), {"y%d" % i: full(1)})
                opt.state["optimizer.step"]
            others = [np.full(16, 77, np.int32) for _ in range(2000)]  # the size of the freed block
            self.assertEqual(list(view), [1] + [0] * 101)
            opt.step({"x": full(1)})
            self.assertEqual((len(view), view[1], view.sum(), int((view + view).max())), (102, 1, 2, 2))
            np.testing.assert_array_equal(view, opt.state.copy("optimizer.step"))
            view[1] = 5
            self.assertEqual(opt.state.copy("optimizer.step")[1], 5)
            self.assertEqual((view.dtype, view.shape), (np.int32, (102,)))
            self.assertRegex(repr(view), "optimizer.step.*array")
            self.assertTrue(all((other == 77).all() for other in others))

    def test_views_keep_their_memory(self):
        opt = dsopt.Optimizer({"w": full(1)}, dsopt.AdamW())
        opt.step([full(1)])
        opt.add_group(dsopt.AdamW(), {"x": full(1)})
        view = opt.state["optimizer.step"]
        array, copy = np.asarray(view), np.array(view)
        for i in range(100):
            opt.add_group(dsopt.AdamW(), {"x%d" % i: full(1)})
            self.assertEqual(len(opt.state["optimizer.step"]), 3 + i)
        opt.close()
        del opt
        gc.collect()
        self.assertEqual(list(view), [1] + [0] * 101)
        del view
        gc.collect()
        # The old values: the library keeps outgrown memory. The sanitizer checks the copy that bytes() makes.
        self.assertEqual(bytes(array), bytes(copy))

    def test_views_without_memory_read_zeros(self):
        opt = dsopt.Optimizer({"w": full(1)}, dsopt.AdamW())
        view = opt.state["optimizer.step"]
        opt.add_group(dsopt.AdamW(), {"x": full(1)})
        self.assertEqual(list(view), [0, 0])

    def test_views_are_accepted_as_arguments(self):
        opt, peer = (dsopt.Optimizer({"w": full(1)}, dsopt.AdamW()) for _ in range(2))
        opt.step([full(1)])
        view = opt.state["optimizer.step"]
        peer.state["optimizer.step"] = view
        self.assertEqual(list(peer.state["optimizer.step"]), [1])
        out = np.zeros(1, np.int32)
        np.add(view, 1, out=out)
        view += 1
        self.assertEqual((out[0], view[0], view == 2), (2, 2, True))

    def test_copies_of_views_are_arrays(self):
        opt = dsopt.Optimizer({"w": full(1), "x": full(1)}, dsopt.AdamW())
        opt.step([full(1), None])
        view = opt.state["optimizer.step"]
        for copied in (copy.copy, copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))):
            other = copied(view)
            other += 1
            self.assertEqual((type(other), list(other), list(view)), (np.ndarray, [2, 1], [1, 0]))
        self.assertEqual(list(copy.deepcopy({"step": [view]})["step"][0]), [1, 0])

    def test_views_convert_as_arrays_do(self):
        def converted(convert, value):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of arrays with one dimension
                try:
                    return convert(value)
                except (TypeError, ValueError) as problem:
                    return type(problem), str(problem)

        for count in (1, 2):
            for steps in (0, 1):
                opt = dsopt.Optimizer([full(1) for _ in range(count)], dsopt.AdamW())
                for _ in range(steps):
                    opt.step([full(1)] * count)
                view = opt.state["optimizer.step"]
                for convert in (int, float, complex, bool, operator.index, [7, 8].__getitem__):
                    with self.subTest(convert=convert, count=count, steps=steps):
                        self.assertEqual(converted(convert, view), converted(convert, np.array(view)))

    def test_views_have_the_public_attributes_of_arrays(self):
        opt = dsopt.Optimizer({"w": full(1)}, dsopt.AdamW())
        view = opt.state["optimizer.step"]
        self.assertEqual((view.itemsize, view.tolist()), (4, [0]))
        for name in ("_private", "__set_name__", "__cuda_array_interface__", "no_attribute"):
            self.assertFalse(hasattr(view, name), name)
        for name in ("__array__", "__array_interface__", "__array_struct__", "__dlpack__", "__dlpack_device__"):
            self.assertEqual(hasattr(view, name), hasattr(np.ndarray, name), name)
        unset = dsopt._state.TensorView.__new__(dsopt._state.TensorView)
        with self.assertRaisesRegex(AttributeError, "_optimizer"):
            unset.shape


class ChangedStates(unittest.TestCase):
    """A state by name that lacks a tensor, or has one with another name, dtype or size, is refused by name by `bind`,
    `apply` and `init_state`, and nothing changes."""

    CASES = (
        (dsopt.AdamW(lr=0.1), {}),
        (dsopt.Adam(lr=0.1), {"compat": "deepspeed"}),
        (dsopt.Lamb(lr=0.1), {"masters": "flat"}),
        (dsopt.AdamLegacy(lr=0.1), {}),
        (dsopt.Sgd(lr=0.1, momentum=0.9), {}),
        (dsopt.Sgd(lr=0.1), {}),
        (dsopt.Adagrad(lr=0.1), {}),
        (dsopt.Lion(lr=0.1), {}),
        (dsopt.Muon(lr=0.1), {}),
        (dsopt.OnebitAdam(lr=0.1, freeze_step=1), {}),
        (dsopt.ZeroOneAdam(lr=0.1), {}),
        (dsopt.OnebitLamb(lr=0.1, freeze_step=1), {}),
        (dsopt.AdamW(lr=0.1, exp_avg_format="e4m3", exp_avg_sq_format="q8"), {}),
        (dsopt.AdamW(lr=0.1, exp_avg_format="bf16", exp_avg_sq_format="bf16_random"), {"masters": "remainder"}),
    )

    def test_are_refused_by_name(self):
        for group, options in self.CASES:
            with self.subTest(group, **options):
                dtype = np.float16 if options.get("masters") != "remainder" else np.float32
                params = {"w": np.ones((8, 4), dtype), "b": np.ones((20, 15), np.float32)}
                opt = dsopt.Optimizer(params, group, **options)
                grads = {name: np.full(x.shape, 0.5, x.dtype) for name, x in params.items()}
                state = opt.init_state(params)
                opt.apply(params, grads, state)
                opt.bind(state=state)
                self.check(opt, params, grads, state)

    def check(self, opt, params, grads, state):
        before = {name: x.copy() for name, x in [*params.items(), *state.items()]}
        calls = (
            lambda changed: opt.bind(state=changed),
            lambda changed: opt.apply(params, grads, changed),
            lambda changed: opt.init_state(params, changed),
        )
        for name, x in state.items():
            others = {key: value for key, value in state.items() if key != name}
            read_only = x.copy()
            read_only.flags.writeable = False
            other = np.int64 if x.dtype.kind in "iu" else np.float64
            changes = [
                (dict(others), "state lacks %r" % name),
                ({**others, name + "x": x}, "%rx, which is not in the state" % name),
                ({**others, name: x.astype(other)}, "state[%r]" % name),
            ]
            if x.size:
                changes += [
                    ({**others, name: x.reshape(-1)[1:].copy()}, "state[%r] has %d elements" % (name, x.size - 1)),
                    ({**others, name: read_only}, "state[%r]" % name),
                    ({**others, name: None}, "state[%r]" % name),
                ]
            if x.size > 1:
                changes.append(({**others, name: np.repeat(x, 2).reshape(-1)[::2]}, "state[%r]" % name))
            for changed, text in changes:
                for call in calls:
                    with self.assertRaises(dsopt.Error, msg=text) as caught:
                        call(changed)
                    self.assertIn(text.replace("'x", "x'"), str(caught.exception))
        for name, x in [*params.items(), *state.items()]:
            self.assertEqual(x.tobytes(), before[name].tobytes(), name)
            if name in state:
                self.assertEqual(np.asarray(opt.state[name]).ctypes.data, x.ctypes.data)
        opt.apply(params, grads, state)


class StateMemory(unittest.TestCase):  # not under a sanitizer, which quarantines freed memory
    def test_views_do_not_keep_outgrown_state_memory(self):
        opt = dsopt.Optimizer({"w": full(1)}, dsopt.AdamW())
        opt.step([full(1)])
        views, resident = [], []
        for i in range(2001):
            opt.add_params({"p%d" % i: np.ones(4, np.float32)}, 0)
            views.append(opt.state["optimizer.step"])
            if i % 1000 == 0:
                with open("/proc/self/statm", encoding="ascii") as file:
                    resident.append(int(file.read().split()[1]) * 4 // 1024)
        self.assertEqual(len(views[0]), 2002)
        self.assertLess(resident[2] - resident[1], resident[1] - resident[0] + 16, resident)  # MiB


if __name__ == "__main__":
    unittest.main()
