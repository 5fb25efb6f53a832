# SPDX-License-Identifier: Apache-2.0
"""Addresses that are cached between calls: arrays that are present, then freed, then absent, and arrays that change in
place. The address sanitizer also runs this file, and reports reads of freed memory that change no result."""

import gc
import unittest
import warnings
import weakref

import numpy as np

import dsopt

N = 2048


def full(value, dtype=np.float32):
    return np.full(N, value, dtype)


def rig(dtype=np.float32, **options):
    params = {"a": full(1, dtype), "b": full(1, dtype)}
    return dsopt.Optimizer(params, dsopt.Sgd(lr=1.0), **options), params


CALLS = {
    "step": lambda opt, grads: opt.step(grads),
    "step(zero_grads)": lambda opt, grads: opt.step(grads, zero_grads=True),
    "step(list)": lambda opt, grads: opt.step([grads.get("a"), grads.get("b")]),
    "accumulate": lambda opt, grads: (opt.accumulate(grads), opt.step(accumulated=True)),
    "zero_grad": lambda opt, grads: opt.zero_grad(grads),
    "step(out)": lambda opt, grads: opt.step(grads, out={name: full(0) for name in grads}),
}


class PresentGoneAbsent(unittest.TestCase):
    def run_call(self, name, read_only=False):
        call = CALLS[name]
        opt, params = rig(accumulate=name == "accumulate")
        kept = {"a": full(0.25)}
        for times in (1, 2, 3):  # addresses are cached from the first or the second call on
            passing = {**kept, "b": full(0.5)}
            if read_only:
                passing["b"].flags.writeable = False
            for _ in range(times):
                kept["a"][:] = 0.25
                call(opt, passing)
            at, passing = passing["b"].ctypes.data, None
            others = [full(7) for _ in range(64)]  # one of these reuses the memory, unless the sanitizer quarantines it
            before = params["b"].copy()
            for absent in (kept, {**kept, "b": None}, {}):
                call(opt, absent)
                np.testing.assert_array_equal(params["b"], before)
            self.assertTrue(all((other == 7).all() for other in others), hex(at))

    def test_freed_gradients_of_a_call_are_not_used(self):
        for name in CALLS:
            with self.subTest(call=name):
                self.run_call(name)

    def test_freed_read_only_gradients_are_not_used(self):
        for name in ("step", "step(list)", "accumulate"):
            with self.subTest(call=name):
                self.run_call(name, read_only=True)

    def test_missing_gradients_leave_parameters_unchanged(self):
        for name in ("step", "step(list)", "accumulate", "zero_grad"):
            opt, params = rig(accumulate=name == "accumulate")
            with self.subTest(call=name):
                CALLS[name](opt, {"a": full(0.5), "b": full(0.5)})
                before = {name: array.copy() for name, array in params.items()}
                CALLS[name](opt, {})
                for name, array in params.items():
                    np.testing.assert_array_equal(array, before[name])

    def test_freed_gradients_in_cycles_are_not_used(self):
        """The garbage collector clears weak references before it calls any callback."""
        opt, params = rig()

        class Owner:
            pass

        owner = Owner()
        owner.itself, owner.grad = owner, full(0.5)
        opt.step({"a": owner.grad})
        opt.step({"a": owner.grad})
        del owner
        gc.collect()
        before = params["a"].copy()
        opt.step({})
        np.testing.assert_array_equal(params["a"], before)

    def test_replaced_bound_gradients_are_not_used(self):
        opt, params = rig()
        opt.bind(grads={"a": full(0.25), "b": full(0.5)})  # the optimizer keeps references
        opt.step()
        opt.bind(grads={"a": full(0.25)})
        before = params["b"].copy()
        opt.step()
        opt.step(zero_grads=True)
        opt.zero_grad()
        np.testing.assert_array_equal(params["b"], before)
        np.testing.assert_array_equal(params["a"], full(0.25))

    def test_changes_of_the_callers_list_have_no_effect(self):
        opt, params = rig()
        grads = [full(0.25), full(0.25)]
        opt.bind(grads=grads)
        grads[0] = None
        gc.collect()
        opt.step()
        np.testing.assert_array_equal(params["a"], full(0.75))

    def test_replaced_parameters_may_be_freed(self):
        opt, params = rig()
        opt.step({"a": full(0.5), "b": full(0.5)})
        opt.bind(params={"a": full(2), "b": full(2)})
        params.clear()
        gc.collect()
        opt.step({"a": full(0.5), "b": full(0.5)})
        np.testing.assert_array_equal(opt.params["a"], full(1.5))

    def test_view_keeps_replaced_state(self):
        opt = dsopt.Optimizer({"a": full(1)}, dsopt.Sgd(lr=1.0, momentum=0.5))
        opt.bind(state=opt.init_state({"a": full(1)}))
        opt.step([full(1)])
        view = opt.state["a.momentum_buffer"]
        opt.bind(state=opt.init_state({"a": full(1)}))
        gc.collect()
        opt.step([full(1)])
        np.testing.assert_array_equal(view, full(1))

    def test_freed_arrays_of_list_functions_are_not_used(self):
        kept = full(1)
        for call in (dsopt.zero, dsopt.norm, lambda xs: dsopt.clip(xs, 1.0), lambda xs: dsopt.clamp(xs, 1.0)):
            call([kept, full(1)])
            call([kept, None])
        dsopt.axpby(1, [kept, full(1)], 0, [kept.copy(), full(1)])
        dsopt.axpby(1, [kept, None], 0, [kept.copy(), None])

    def test_compressed_all_reduce_keeps_no_freed_array(self):
        comm = dsopt.Comm.single(dsopt.Context())
        reduce = dsopt.CompressedAllReduce(comm, [full(1)])  # the array is freed after this line
        for _ in range(2):
            gc.collect()
            reduce([full(1)])

    def test_views_keep_the_state(self):
        opt, _ = rig()
        opt.step({"a": full(1)})
        view = opt.state["optimizer.step"]
        opt.close()
        gc.collect()
        self.assertEqual(list(view), [1, 0])

    def test_view_follows_state_bound_later(self):
        for use in (np.asarray, lambda view: view):
            opt, _ = rig()
            opt.step({"a": full(1)})
            view = opt.state["optimizer.step"]
            state = {name: opt.state.copy(name) for name in opt.state}
            bound = weakref.ref(state["optimizer.step"])
            opt.bind(state=state)
            used = use(view)
            del opt, state, view
            gc.collect()
            self.assertIsNotNone(bound())
            self.assertEqual(list(used), [1, 0])
            used[0] = 5
            self.assertEqual(list(bound()), [5, 0])
            del used
            gc.collect()
            self.assertIsNone(bound())

    def test_view_follows_replaced_state(self):
        opt, params = rig()
        states = [opt.init_state(params) for _ in range(2)]
        opt.bind(state=states[0])
        view = opt.state["optimizer.step"]
        array, first = np.asarray(view), weakref.ref(states[0]["optimizer.step"])
        opt.bind(state=states[1])
        states.clear()
        gc.collect()
        opt.step({"a": full(1)})
        self.assertEqual((list(view), list(array)), ([1, 0], [0, 0]))
        del array
        gc.collect()
        self.assertIsNone(first())


class RefusedCalls(unittest.TestCase):
    """Entries that a failed call wrote into a list must not be used by the next one."""

    def test_dtype_of_a_failed_call_is_not_reused(self):
        half, wide = np.float16, np.float32
        opt, peer = rig(half)[0], rig(half)[0]
        for o in (opt, peer):
            o.step([full(0.5, half), full(0.5, half)])
        with self.assertRaises(dsopt.ArgumentError):
            opt.step([None, np.zeros(N)])  # float64: fails after the first entry was written
        with self.assertRaises(dsopt.ArgumentError):
            opt.step([full(1, wide), np.zeros(N)])
        for o in (opt, peer):
            o.step([full(0.5, half), full(0.5, half)])
        for name, array in opt.params.items():
            np.testing.assert_array_equal(array, peer.params[name])

    def test_failed_bind_changes_nothing(self):
        opt, params = rig()
        grads = {"a": full(0.25), "b": full(0.25)}
        opt.bind(grads=grads)
        other = {"a": full(5), "b": full(5)}
        wrong = {"a": np.zeros(N), "b": full(0)}
        for what in (
            {"grads": wrong},
            {"params": other, "grads": wrong},
            {"grads": wrong, "params": wrong},
            {"params": other, "state": {}},
            {"params": other, "state": {**opt.init_state(other), "optimizer.step": np.full(2, -1, np.int32)}},
        ):
            with self.subTest(**{name: sorted(value) for name, value in what.items()}):
                with self.assertRaises(dsopt.ArgumentError):
                    opt.bind(**what)
                before = params["a"].copy()
                gc.collect()
                opt.step()
                np.testing.assert_array_equal(params["a"], before - 0.25)
                np.testing.assert_array_equal(other["a"], full(5))


def in_place(array, field, value):
    """Sets a field of an array that NumPy discourages to set, and finally removes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            setattr(array, field, value)
        except AttributeError as problem:
            raise unittest.SkipTest("this NumPy: %s" % problem)


class ChangesInPlace(unittest.TestCase):
    def test_gradient_may_get_other_memory(self):
        opt, params = rig()
        g = full(0.5)
        for _ in range(3):
            opt.step({"a": g})
        in_place(g, "data", full(0.25))
        opt.step({"a": g})
        np.testing.assert_array_equal(params["a"], full(1 - 1.75))

    def test_bound_gradient_may_get_other_memory(self):
        opt, params = rig()
        g = full(0.5)
        opt.bind(grads={"a": g})
        opt.step()
        in_place(g, "data", full(0.25))
        opt.step()
        np.testing.assert_array_equal(params["a"], full(0.25))
        opt.step(zero_grads=True)
        self.assertFalse(g.any())

    def test_parameter_may_get_other_memory(self):
        """The array's previous memory is free, and its current memory is updated."""
        for begin in (lambda opt: None, lambda opt: opt.step({"a": full(0.5)})):
            for use in (
                lambda opt: opt.step({"a": full(0.5)}),
                lambda opt: (opt.bind(grads={"a": full(0.5)}), opt.step()),
                lambda opt: (opt.accumulate({"a": full(0.5)}), opt.step(accumulated=True)),
            ):
                opt, params = rig(accumulate=True)
                begin(opt)
                in_place(params["a"], "data", full(8))
                use(opt)
                np.testing.assert_array_equal(params["a"], full(7.5))

    def test_every_call_uses_a_parameters_new_memory(self):
        opt = dsopt.Optimizer({"h": full(1, np.float16)}, dsopt.Sgd(lr=1.0))
        in_place(opt.params["h"], "data", full(8, np.float16))
        np.testing.assert_array_equal(opt.state["h.master"], full(8))
        in_place(opt.params["h"], "data", full(9, np.float16))
        opt.reset("masters")
        np.testing.assert_array_equal(opt.state["h.master"], full(9))
        in_place(opt.params["h"], "data", full(3, np.float16))
        opt.add_group(dsopt.Sgd(lr=1.0), {"w": full(1)})
        in_place(opt.params["w"], "data", full(4))
        opt.step({"w": full(1)})
        np.testing.assert_array_equal(opt.params["w"], full(3))

    def test_bound_state_may_get_other_memory(self):
        opt = dsopt.Optimizer({"a": full(1)}, dsopt.Sgd(lr=1.0, momentum=0.5))
        state = opt.init_state({"a": full(1)})
        opt.bind(state=state)
        opt.step([full(1)])
        in_place(state["a.momentum_buffer"], "data", full(4))
        opt.step([full(0)])
        np.testing.assert_array_equal(state["a.momentum_buffer"], full(2))
        np.testing.assert_array_equal(opt.state["a.momentum_buffer"], full(2))

    def test_viewed_bound_state_may_get_other_memory(self):
        opt, params = rig()
        state = opt.init_state(params)
        opt.bind(state=state)
        view = opt.state["optimizer.step"]
        in_place(state["optimizer.step"], "data", np.array([7, 8], np.int32))
        self.assertEqual(list(view), [7, 8])

    def test_rejects_changed_dtype(self):
        for other in (np.int32, ">f4", np.uint16):
            for bound in (False, True):
                opt, params = rig()
                g, h = full(0.5), full(0.5)
                if bound:
                    opt.bind(grads={"a": g, "b": h})
                grads = () if bound else ({"a": g, "b": h},)
                opt.step(*grads)
                opt.step(*grads)
                in_place(g, "dtype", other)
                with self.subTest(dtype=other, bound=bound):
                    with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['a'\] has dtype"):
                        opt.step(*grads)
                    np.testing.assert_array_equal(params["b"], full(0))
        opt, params = rig()
        in_place(params["b"], "dtype", np.int32)
        for _ in range(2):
            with self.assertRaisesRegex(dsopt.ArgumentError, r"params\['b'\] has dtype int32"):
                opt.step({"a": full(1)})
        np.testing.assert_array_equal(params["a"], full(1))

    def test_rejects_changed_strides(self):
        for bound in (False, True):
            opt, params = rig()
            g = np.repeat(full(0.5), 2)[:N]
            if bound:
                opt.bind(grads={"a": g})
            grads = () if bound else ({"a": g},)
            opt.step(*grads)
            opt.step(*grads)
            in_place(g, "strides", (8,))
            with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['a'\] is not contiguous"):
                opt.step(*grads)
            np.testing.assert_array_equal(params["a"], full(0))

    def test_rejects_changed_shape(self):
        opt, params = rig()
        g = full(0.5)
        opt.step({"a": g})
        opt.step({"a": g})
        in_place(g, "shape", (2, N // 2))
        with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['a'\] has shape"):
            opt.step({"a": g})
        np.testing.assert_array_equal(params["a"], full(0))

    def test_gradients_may_be_resized(self):
        """An array with weak references cannot be resized; another array is checked again."""
        opt, _ = rig()
        g = full(0.5)
        opt.step({"a": g})
        try:
            g.resize(2, refcheck=False)
        except ValueError:
            return
        with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['a'\] has shape"):
            opt.step({"a": g})

    def test_arrays_are_checked_if_the_object_layout_is_unknown(self):
        """Arrays are then checked in each call."""
        from dsopt import _lists

        known, _lists._layout_is_known = _lists._layout_is_known, lambda ndarray: False
        try:
            opt, params = rig()
            g = full(0.5)
            for _ in range(3):
                opt.step({"a": g})
            opt.bind(grads={"b": g})
            opt.step()
            in_place(params["b"], "data", full(3))
            opt.step()
        finally:
            _lists._layout_is_known = known
        self.assertTrue(known(np.ndarray))
        np.testing.assert_array_equal(params["a"], full(-0.5))
        np.testing.assert_array_equal(params["b"], full(2.5))


if __name__ == "__main__":
    unittest.main()
