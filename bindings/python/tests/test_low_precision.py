# SPDX-License-Identifier: Apache-2.0
"""Formats of moments, masters in 16 bits more, and their conversion to float32."""

import dataclasses
import io
import os
import tempfile
import unittest

import numpy as np

import dsopt
from support import Bfloat16, arrays, python, values_of_bfloat16

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

SIZE = 600  # three blocks, the last one short
BF16, E4M3 = ("bfloat16", "float8_e4m3fn") if ml_dtypes else ("uint16", "uint8")
SCALED = {"e4m3": E4M3, "q8": "uint8"}
ONE_BYTE = {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random"}


def shown(opt):
    """Returns dtype and shape of the state of each parameter, by name."""
    state = {name: opt.state[name] for name in opt.state if not name.startswith("optimizer.")}
    return {name: (x.dtype.name, x.shape) for name, x in state.items()}


def trained(group, params=None, steps=3, **options):
    params = {"w": arrays((SIZE,))[0]} if params is None else params
    opt = dsopt.Optimizer(params, group, **options)
    for t in range(steps):
        opt.step([g for g in arrays(*opt.shapes, seed=t)])
    return opt


def bytes_of(state):
    return {name: np.asarray(state[name]).tobytes() for name in state}


def levels_of_e4m3(codes):
    codes = np.asarray(codes).view(np.uint8).astype(np.uint32)
    levels = ((codes & 0x7F) << 20).view(np.float32) * np.float32(2.0**120)
    return np.where(codes & 0x80, -levels, levels)


class Groups(unittest.TestCase):
    def test_each_algorithm_has_the_formats_of_its_moments(self):
        first, second = ["exp_avg_format"], ["exp_avg_sq_format"]
        for kind in dsopt._groups.ALGORITHMS:
            expected = first + second
            if kind in (dsopt.Sgd, dsopt.Lion, dsopt.Muon):
                expected = first
            elif kind is dsopt.Adagrad:
                expected = second
            elif kind in (dsopt.OnebitAdam, dsopt.ZeroOneAdam, dsopt.OnebitLamb):
                expected = []
            found = [field.name for field in dataclasses.fields(kind) if field.name.endswith("_format")]
            self.assertEqual(found, expected, kind)
            self.assertEqual(kind().formats(), dict.fromkeys(expected, "f32"))

    def test_state_has_the_dtype_of_the_format(self):
        kept, scale = ((SIZE,), ("float32", (3,)))
        for group, expected in (
            (dsopt.AdamW(), {"exp_avg": ("float32", kept), "exp_avg_sq": ("float32", kept)}),
            (
                dsopt.AdamW(exp_avg_format="bf16", exp_avg_sq_format="bf16_random"),
                {"exp_avg": (BF16, kept), "exp_avg_sq": (BF16, kept)},
            ),
            (
                dsopt.Lamb(exp_avg_format="e4m3", exp_avg_sq_format="q8"),
                {
                    "exp_avg": (E4M3, kept),
                    "exp_avg_scale": scale,
                    "exp_avg_sq": ("uint8", kept),
                    "exp_avg_sq_scale": scale,
                },
            ),
            (dsopt.Adam(exp_avg_format="bf16_random"), {"exp_avg": (BF16, kept), "exp_avg_sq": ("float32", kept)}),
            (dsopt.AdamLegacy(exp_avg_sq_format="q8"),
             {"exp_avg": ("float32", kept), "exp_avg_sq": ("uint8", kept), "exp_avg_sq_scale": scale}),
            (
                dsopt.Sgd(momentum=0.9, exp_avg_format="q8"),
                {"momentum_buffer": ("uint8", kept), "momentum_buffer_scale": scale},
            ),
            (dsopt.Lion(exp_avg_format="e4m3"), {"exp_avg": (E4M3, kept), "exp_avg_scale": scale}),
            (dsopt.Adagrad(exp_avg_sq_format="bf16_random"), {"sum": (BF16, kept)}),
        ):
            with self.subTest(repr(group)):
                opt = trained(group)
                self.assertEqual(shown(opt), {"w." + name: value for name, value in expected.items()})
                for name in opt.state:
                    self.assertEqual(np.asarray(opt.state[name]).tobytes(), opt.state.copy(name).tobytes())

    def test_scales_have_one_dimension(self):
        params = {"a": arrays((20, 30))[0], "s": arrays(())[0], "e": arrays((0, 3))[0], "n": arrays((2, 256))[0]}
        opt = trained(dsopt.AdamW(exp_avg_format="q8"), params)
        shapes = {name: opt.state[name].shape for name in opt.state if ".exp_avg" in name and "_sq" not in name}
        self.assertEqual(
            shapes,
            {
                "a.exp_avg": (20, 30),
                "a.exp_avg_scale": (3,),
                "s.exp_avg": (),
                "s.exp_avg_scale": (1,),
                "e.exp_avg": (0, 3),
                "e.exp_avg_scale": (0,),
                "n.exp_avg": (2, 256),
                "n.exp_avg_scale": (2,),
            },
        )

    def test_bf16_is_the_moment_rounded_to_nearest(self):
        exact, opt = trained(dsopt.AdamW(), steps=1), trained(dsopt.AdamW(exp_avg_format="bf16"), steps=1)
        nearest = Bfloat16(exact.state["w.exp_avg"]).values
        np.testing.assert_array_equal(values_of_bfloat16(opt.state["w.exp_avg"]), nearest)
        np.testing.assert_array_equal(opt.params["w"], exact.params["w"])  # weights move by the unrounded moment

    def test_bf16_random_depends_on_the_seed(self):
        make = lambda seed: trained(dsopt.AdamW(exp_avg_sq_format="bf16_random"), seed=seed).state["w.exp_avg_sq"]
        first, same, other = (make(seed).tobytes() for seed in (1, 1, 2))
        self.assertEqual(first, same)
        self.assertNotEqual(first, other)

    def test_codes_times_scales_are_close_to_the_moments(self):
        exact, opt = (trained(group, steps=1) for group in (dsopt.AdamW(), dsopt.AdamW(**ONE_BYTE)))
        scales = np.repeat(opt.state["w.exp_avg_scale"], 256)[:SIZE]
        found = opt.state.export_f32("w.exp_avg")
        np.testing.assert_array_equal(found, levels_of_e4m3(opt.state["w.exp_avg"]) * scales)
        top = np.abs(exact.state["w.exp_avg"]).max()
        np.testing.assert_allclose(found, exact.state["w.exp_avg"], rtol=2.0**-4, atol=top * 2.0**-15)
        self.assertGreater(np.abs(found - exact.state["w.exp_avg"]).max(), 0)

    def test_f32_moments_of_a_parameter(self):
        first, second = arrays((SIZE,), (SIZE,))
        opt = trained(dsopt.AdamW(**ONE_BYTE), {"w": first, "norm": dsopt.Param(second, f32_moments=True)})
        found = {name: dtype for name, (dtype, _) in shown(opt).items()}
        self.assertEqual(found["norm.exp_avg"], "float32")
        self.assertEqual(found["w.exp_avg"], E4M3)
        self.assertNotIn("norm.exp_avg_scale", found)
        (copy,) = arrays((SIZE,), (SIZE,))[1:]
        peer = dsopt.Optimizer({"norm": copy}, dsopt.AdamW())
        for t in range(3):
            peer.step([arrays((SIZE,), (SIZE,), seed=t)[1]])
        np.testing.assert_array_equal(second, copy)

    def test_slices_have_the_bits_of_the_whole(self):
        for formats in (ONE_BYTE, {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}):
            whole = trained(dsopt.AdamW(**formats), seed=5)
            (w,) = arrays((SIZE,))
            part = dsopt.Optimizer({"w": dsopt.Param(w[256:], offset=256)}, dsopt.AdamW(**formats), seed=5)
            for t in range(3):
                part.step([arrays((SIZE,), seed=t)[0][256:]])
            np.testing.assert_array_equal(w[256:], whole.params["w"][256:])
            for name in ("w.exp_avg", "w.exp_avg_sq"):
                self.assertEqual(part.state[name].tobytes(), whole.state[name][256:].tobytes())
            np.testing.assert_array_equal(part.state["w.exp_avg_scale"], whole.state["w.exp_avg_scale"][1:])

    def test_refusals(self):
        (w,), (d,) = arrays((SIZE,)), arrays((SIZE,), dtype=np.float64)
        for kind, field, words in (
            (dsopt.AdamW, "exp_avg_format", "fp8"),
            (dsopt.AdamW, "exp_avg_sq_format", None),
            (dsopt.Adagrad, "exp_avg_sq_format", 2),
            (dsopt.Lion, "exp_avg_format", "E4M3"),
        ):
            text = "%s of %s is %r, and must be one of 'f32', 'bf16', 'bf16_random', 'e4m3', 'q8'"
            with self.assertRaisesRegex(dsopt.ArgumentError, text % (field, kind.__name__, words)):
                kind(**{field: words})
        for kind, field in ((dsopt.Lion, "exp_avg_sq_format"), (dsopt.Adagrad, "exp_avg_format"),
                            (dsopt.OnebitAdam, "exp_avg_format")):
            with self.assertRaisesRegex(dsopt.ArgumentTypeError, "has no field '%s'" % field):
                kind(**{field: "f32"})
        e4m3 = dsopt.AdamW(exp_avg_format="e4m3")
        for params, group, options, text in (
            (w, dsopt.AdamW(exp_avg_sq_format="e4m3"), {}, "exp_avg_sq_format is E4M3"),
            (w, dsopt.AdamW(exp_avg_sq_format="bf16"), {}, "exp_avg_sq_format is BF16"),
            (w, dsopt.Adagrad(exp_avg_sq_format="q8"), {}, "exp_avg_sq_format is Q8"),
            (w, dsopt.Sgd(exp_avg_format="e4m3"), {}, "exp_avg_format has no effect"),
            (w, e4m3, {"compat": "deepspeed"}, "exp_avg_format"),
            (w, e4m3, {"masters": "flat"}, "exp_avg_format|MASTERS_FLAT"),
            (dsopt.Param(w, f32_moments=True), dsopt.AdamW(), {}, "'w'.*no effect"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.UnsupportedError, text):
                dsopt.Optimizer({"w": params}, group, **options)
        with self.assertRaisesRegex(dsopt.ArgumentError, "'w' has offset 100, no multiple of 256"):
            dsopt.Optimizer({"w": dsopt.Param(w, offset=100)}, e4m3)
        with self.assertRaisesRegex(dsopt.ArgumentError, r"\['w'\] has dtype float64.*with exp_avg_format='e4m3'"):
            dsopt.Optimizer({"w": d}, e4m3)
        with self.assertRaisesRegex(dsopt.ArgumentError, r"\['w'\] has dtype float64.*f32_moments Param"):
            dsopt.Optimizer({"w": dsopt.Param(d, f32_moments=True)}, dsopt.AdamW())


class Remainders(unittest.TestCase):
    def pair(self, **options):
        """Returns optimizers with separate masters and with remainders, after the same steps."""
        made = []
        for masters in ("per_tensor", "remainder"):
            w = Bfloat16(arrays((SIZE,))[0])
            made.append((w, trained(dsopt.AdamW(lr=0.01), {"w": w}, masters=masters, **options)))
        return made

    def test_masters_have_the_bits_of_separate_ones(self):
        (w, separate), (x, opt) = self.pair()
        self.assertEqual(shown(opt)["w.remainder"], ("int16", (SIZE,)))
        self.assertNotIn("w.master", opt.state)
        masters = opt.state.export_f32("w.remainder")
        np.testing.assert_array_equal(masters, separate.state["w.master"])
        np.testing.assert_array_equal(masters, separate.state.export_f32("w.master"))
        bits = (x.words.astype(np.uint32) << 16) + opt.state["w.remainder"].astype(np.uint32)
        np.testing.assert_array_equal(bits.view(np.float32), masters)
        self.assertTrue((masters != x.values).any())
        np.testing.assert_array_equal(np.abs(w.values - x.values) <= np.abs(w.values) * 2.0**-7, True)

    def test_import_f32_sets_the_parameter(self):
        (_, _), (x, opt) = self.pair()
        new = arrays((SIZE,), seed=50)[0]
        opt.state.import_f32("w.remainder", new)
        np.testing.assert_array_equal(opt.state.export_f32("w.remainder"), new)
        np.testing.assert_allclose(x.values, new, rtol=2.0**-8)

    def test_files_load_into_either_kind_of_masters(self):
        (_, separate), (_, opt) = self.pair()
        for saved, other in ((separate, "remainder"), (opt, "per_tensor")):
            file = io.BytesIO()
            saved.save(file)
            file.seek(0)
            loaded = dsopt.Optimizer({"w": Bfloat16(np.zeros(SIZE))}, dsopt.AdamW(lr=0.01), masters=other)
            loaded.load(file)
            name = "w.remainder" if other == "remainder" else "w.master"
            np.testing.assert_array_equal(loaded.state.export_f32(name), separate.state["w.master"])

    def test_out_is_the_new_weight_or_the_master(self):
        (_, _), (x, opt) = self.pair()
        weights, masters = Bfloat16(np.zeros(SIZE)), np.zeros(SIZE, np.float32)
        opt.step([arrays((SIZE,), seed=9)[0]], out={"w": weights})
        np.testing.assert_array_equal(weights.words, x.words)
        opt.step([arrays((SIZE,), seed=10)[0]], out={"w": masters})
        np.testing.assert_array_equal(masters, opt.state.export_f32("w.remainder"))

    def test_refusals(self):
        w, half, group = Bfloat16(np.zeros(SIZE)), np.zeros(SIZE, np.float16), dsopt.AdamW()
        for array, options, text in (
            (half, {}, "'w' is F16"),
            (w, {"no_master": True}, "masters has no effect"),
            (w, {"compat": "deepspeed"}, "masters|REMAINDER"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.UnsupportedError, text):
                dsopt.Optimizer({"w": array}, group, masters="remainder", **options)
        with self.assertRaisesRegex(dsopt.ArgumentError, "'kahan', and must be one of .*'remainder'"):
            dsopt.Optimizer({"w": w}, group, masters="kahan")
        opt = dsopt.Optimizer({"w": dsopt.Param(shape=(3,), dtype="bfloat16")}, group, masters="remainder")
        with self.assertRaises(dsopt.StateError):
            opt.state.export_f32("w.remainder")


class Functional(unittest.TestCase):
    def params(self):
        return {"w": dsopt.Param(shape=(20, 30), dtype="bfloat16"), "b": dsopt.Param(shape=(5,))}

    def values(self):
        w, b = arrays((20, 30), (5,))
        return {"w": Bfloat16(w), "b": b}

    def check(self, converted):
        """Steps with state whose arrays `converted` has replaced."""
        for formats in (ONE_BYTE, {"exp_avg_format": "bf16", "exp_avg_sq_format": "q8"}):
            p, q = self.values(), self.values()
            opt = dsopt.Optimizer(self.params(), dsopt.AdamW(**formats), masters="remainder", seed=3)
            peer = dsopt.Optimizer(q, dsopt.AdamW(**formats), masters="remainder", seed=3)
            state = opt.init_state(p)
            state = opt.init_state(p, {name: converted(x) for name, x in state.items()})
            for t in range(3):
                grads = dict(zip("wb", arrays((20, 30), (5,), seed=t)))
                opt.apply(p, grads, state)
                peer.step(grads)
            self.assertEqual(bytes_of(state), bytes_of(peer.state))
            np.testing.assert_array_equal(p["w"].words, q["w"].words)
            bound = dsopt.Optimizer(p, dsopt.AdamW(**formats), masters="remainder", seed=3)
            bound.bind(state=state)
            bound.step(grads)
            peer.step(grads)
            self.assertEqual(bytes_of(state), bytes_of(peer.state))

    def test_apply_accepts_its_own_state(self):
        self.check(lambda x: x)

    def test_apply_accepts_integers_of_the_same_size(self):
        self.check(lambda x: x if x.dtype.kind in "fiu" else x.view("u%d" % x.dtype.itemsize))

    @unittest.skipIf(ml_dtypes is None, "ml_dtypes is not installed")
    def test_apply_accepts_floats_of_ml_dtypes(self):
        state = dsopt.Optimizer(self.params(), dsopt.AdamW(**ONE_BYTE)).init_state(self.values())
        self.assertEqual(state["w.exp_avg"].dtype, ml_dtypes.float8_e4m3fn)
        self.assertEqual(state["w.exp_avg_sq"].dtype, ml_dtypes.bfloat16)
        self.check(lambda x: x)

    def test_apply_rejects_state_of_another_format(self):
        opt, p = dsopt.Optimizer(self.params(), dsopt.AdamW(**ONE_BYTE)), self.values()
        state, grads = opt.init_state(p), dict(zip("wb", arrays((20, 30), (5,))))
        for name, value, text in (
            ("w.exp_avg", np.zeros((20, 30), np.float32), "float32, and must have float8_e4m3fn; .*import_f32"),
            ("w.exp_avg_sq", np.zeros((20, 30), np.float16), "float16, and must have bfloat16"),
            ("w.exp_avg_sq", np.zeros((20, 30), np.int16), "int16, and must have bfloat16"),
            ("w.exp_avg_scale", np.zeros(2, np.float32), "2 elements, and must have 3"),
        ):
            text = r"state\['%s'\] has .*%s" % (name, text)
            with self.subTest(text), self.assertRaisesRegex(dsopt.ArgumentError, text):
                opt.apply(p, grads, {**state, name: value})
        with self.assertRaisesRegex(dsopt.ArgumentError, "state lacks 'w.exp_avg_scale'"):
            opt.apply(p, grads, {name: x for name, x in state.items() if name != "w.exp_avg_scale"})


class Values(unittest.TestCase):
    def test_import_f32_stores_to_nearest(self):
        for formats in (ONE_BYTE, {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}, {"exp_avg_format": "bf16"}):
            with self.subTest(**formats):
                opt = trained(dsopt.AdamW(**formats))
                new = {"w.exp_avg": arrays((SIZE,), seed=7)[0], "w.exp_avg_sq": np.abs(arrays((SIZE,), seed=8)[0])}
                for name, value in new.items():
                    opt.state.import_f32(name, value)
                    found = opt.state.export_f32(name)
                    self.assertEqual((found.dtype, found.shape), (np.float32, (SIZE,)))
                    np.testing.assert_allclose(found, value, rtol=2.0**-4, atol=0.05)
                    codes = opt.state[name].tobytes()
                    opt.state.import_f32(name, found)  # values that the format has, but for the last bit of the scale
                    self.assertEqual(opt.state[name].tobytes(), codes)
        np.testing.assert_array_equal(opt.state["w.exp_avg_sq"], new["w.exp_avg_sq"])  # F32

    def test_codes_are_assigned_as_they_are(self):
        opt, peer = (trained(dsopt.AdamW(**ONE_BYTE), steps=steps) for steps in (3, 0))
        for name in opt.state:
            peer.state[name] = opt.state[name]
        self.assertEqual(bytes_of(peer.state), bytes_of(opt.state))
        peer.state["w.exp_avg"] = np.full(SIZE, 0x38, np.uint8)
        np.testing.assert_array_equal(levels_of_e4m3(peer.state["w.exp_avg"]), 1)
        peer.state["w.exp_avg_sq"] = np.full(SIZE, 0x3F80, np.uint16)
        np.testing.assert_array_equal(peer.state.export_f32("w.exp_avg_sq"), 1)

    def test_shapes_are_kept(self):
        opt = trained(dsopt.AdamW(**ONE_BYTE), {"a": arrays((20, 30))[0], "s": arrays(())[0], "e": arrays((0, 3))[0]})
        for name in ("a.exp_avg", "s.exp_avg_sq", "e.exp_avg", "a.exp_avg_scale"):
            value = opt.state.export_f32(name)
            self.assertEqual(value.shape, opt.state[name].shape)
            opt.state.import_f32(name, value)

    def test_float64_state_is_converted(self):
        opt = trained(dsopt.AdamW(), {"w": arrays((SIZE,), dtype=np.float64)[0]})
        value = opt.state.export_f32("w.exp_avg")
        self.assertEqual(value.dtype, np.float32)
        np.testing.assert_array_equal(value, opt.state["w.exp_avg"].astype(np.float32))
        opt.state.import_f32("w.exp_avg", value + 1)
        np.testing.assert_array_equal(opt.state["w.exp_avg"], (value + 1).astype(np.float64))
        with self.assertRaisesRegex(dsopt.ArgumentError, "float32, and was given float64"):
            opt.state.import_f32("w.exp_avg", opt.state["w.exp_avg"])

    def test_refusals(self):
        opt = trained(dsopt.AdamW(**ONE_BYTE))
        before = bytes_of(opt.state)
        for value, text in (
            (np.zeros(SIZE, np.float16), "has dtype float32, and was given float16; cast that first"),
            (np.zeros(SIZE, np.uint8), "has dtype float32, and was given uint8"),
            (np.zeros(SIZE - 1, np.float32), r"has shape \(600,\), and was given \(599,\)"),
            ([1.0], "no array"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.ArgumentError, r"state\['w.exp_avg'\] .*" + text):
                opt.state.import_f32("w.exp_avg", value)
        text = r"state\['w.exp_avg'\] has dtype float8_e4m3fn, and was given float32; import_f32"
        with self.assertRaisesRegex(dsopt.ArgumentError, text):
            opt.state["w.exp_avg"] = np.zeros(SIZE, np.float32)
        with self.assertRaisesRegex(dsopt.ArgumentError, "step has integers"):
            opt.state.export_f32("optimizer.step")
        with self.assertRaisesRegex(dsopt.ArgumentError, "step has integers"):
            opt.state.import_f32("optimizer.step", np.zeros(1, np.float32))
        for call in (lambda: opt.state.export_f32("w.momentum"), lambda: opt.state.import_f32("w.momentum", before)):
            with self.assertRaises(KeyError):
                call()
        self.assertEqual(bytes_of(opt.state), before)

    def test_without_numpy_state_is_an_array_of_ctypes(self):
        status, stdout, stderr = python(
            """
            import sys
            sys.modules["numpy"] = None
            from array import array
            import dsopt
            group = dsopt.AdamW(exp_avg_format="e4m3", exp_avg_sq_format="bf16_random")
            opt, peer = (dsopt.Optimizer([array("f", [1, 2, 3])], group) for _ in range(2))
            opt.step([array("f", [1, 1, 1])])
            for name in opt.state:
                print(name, type(opt.state.copy(name)).__name__)
                peer.state[name] = opt.state.copy(name)
                assert bytes(peer.state.copy(name)) == bytes(opt.state.copy(name))
            opt.state.import_f32("p0.exp_avg", array("f", [4, 2, 1]))
            print(list(opt.state.export_f32("p0.exp_avg")))
            """
        )
        self.assertEqual(status, 0, stderr)
        lines = ["p0.exp_avg c_ubyte_Array_3", "p0.exp_avg_scale c_float_Array_1", "p0.exp_avg_sq c_ushort_Array_3"]
        self.assertEqual(stdout.splitlines(), [*lines, "optimizer.step c_int_Array_1", "[4.0, 2.0, 1.0]"])


class Files(unittest.TestCase):
    FORMATS = (
        {},
        {"exp_avg_format": "bf16", "exp_avg_sq_format": "bf16_random"},
        ONE_BYTE,
        {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"},
    )

    def test_state_of_each_format_survives_a_file(self):
        for formats in self.FORMATS:
            opt, other = (trained(dsopt.AdamW(**formats), steps=steps) for steps in (3, 0))
            file = io.BytesIO()
            opt.save(file, params=True)
            file.seek(0)
            other.load(file, params=True)
            self.assertEqual(bytes_of(other.state), bytes_of(opt.state))

    def test_convert_loads_every_format_from_paths_and_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "run")
            for saved in self.FORMATS:
                opt = trained(dsopt.AdamW(**saved))
                opt.save(path)
                with open(path, "rb") as file:
                    data = file.read()
                for loaded in self.FORMATS:
                    if loaded is saved:
                        continue
                    for source in (lambda: path, lambda: [path], lambda: io.BytesIO(data), lambda: [io.BytesIO(data)]):
                        other = trained(dsopt.AdamW(**loaded), steps=0)
                        with self.assertRaisesRegex(dsopt.CheckpointError, r"w\.exp_avg"):
                            other.load(source())
                        other.load(source(), convert=True)
                        for name in ("w.exp_avg", "w.exp_avg_sq"):
                            expected = opt.state.export_f32(name)
                            peer = trained(dsopt.AdamW(**loaded), steps=0)
                            peer.state.import_f32(name, expected)
                            self.assertEqual(other.state[name].tobytes(), peer.state[name].tobytes())

    def test_convert_is_not_needed_between_nearest_and_random(self):
        opt, other = (trained(dsopt.AdamW(exp_avg_format=name)) for name in ("bf16", "bf16_random"))
        file = io.BytesIO()
        opt.save(file)
        file.seek(0)
        other.load(file)
        self.assertEqual(other.state["w.exp_avg"].tobytes(), opt.state["w.exp_avg"].tobytes())


if __name__ == "__main__":
    unittest.main()
