# SPDX-License-Identifier: Apache-2.0
import io
import os
import pathlib
import tempfile
import unittest

import numpy as np

import dsopt
from support import arrays, ranks


def optimizer(seed=0, **options):
    return dsopt.Optimizer({"w": arrays((3, 4), seed=seed)[0]}, dsopt.AdamW(lr=0.1), **options)


def trained(steps=3, **options):
    opt = optimizer(**options)
    for t in range(steps):
        opt.step(arrays((3, 4), seed=t))
    return opt


class Checkpoints(unittest.TestCase):
    def same(self, a, b):
        for name in a.state:
            np.testing.assert_array_equal(a.state[name], b.state[name])
        np.testing.assert_array_equal(a.params["w"], b.params["w"])

    def test_saves_to_paths_and_files(self):
        opt = trained()
        with tempfile.TemporaryDirectory() as folder:
            for path in (os.path.join(folder, "a"), pathlib.Path(folder) / "b", os.fsencode(folder) + b"/c"):
                opt.save(path, params=True)
                other = optimizer(seed=9)
                other.load(path, params=True)
                self.same(opt, other)
            with open(os.path.join(folder, "d"), "wb") as file:
                file.write(b"before")
                opt.save(file, params=True)
            with open(os.path.join(folder, "d"), "rb") as file:
                file.seek(6)
                other = optimizer(seed=9)
                other.load(file, params=True)
            self.same(opt, other)
        memory = io.BytesIO()
        opt.save(memory, params=True)
        memory.seek(0)
        other = optimizer(seed=9)
        other.load(memory, params=True)
        self.same(opt, other)
        other.lr = 0.5
        memory.seek(0)
        other.load(memory, hyper=False)
        self.assertEqual(other.lr, 0.5)

    def test_resets_errors_only_if_asked(self):
        id = dsopt.Comm.unique_id()

        def work(rank):
            comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2)

            def optimizer():
                group = dsopt.OnebitAdam(lr=0.1, freeze_step=1)
                return dsopt.Optimizer(arrays((130,)), group, data=comm, averages=True, context=comm.context)

            opt, file = optimizer(), io.BytesIO()
            for t in range(3):
                opt.step(arrays((130,), seed=10 * rank + t))
            opt.save(file)
            errors = opt.state.copy("optimizer.worker_error")
            found = []
            for reset in (False, True):
                other = optimizer()
                file.seek(0)
                other.load(file, reset_errors=reset)
                found.append(other.state.copy("optimizer.worker_error"))
            return errors, found

        for errors, (kept, reset) in ranks(2, work):
            self.assertTrue(np.any(errors))
            np.testing.assert_array_equal(kept, errors)
            self.assertFalse(np.any(reset))

    def test_reports_failures(self):
        opt = trained()
        with self.assertRaises(OSError) as caught:
            opt.save("/nonexistent/folder/file")
        self.assertIsInstance(caught.exception, dsopt.FileError)
        self.assertIn("/nonexistent", str(caught.exception))
        with self.assertRaises(dsopt.CheckpointError):
            opt.load(io.BytesIO(b"x" * 100))
        for file in (3, object(), None):
            with self.assertRaisesRegex(TypeError, "file"):
                opt.save(file)
        with self.assertRaisesRegex(TypeError, "read"):
            opt.load(object())

        class Full(io.RawIOBase):
            def write(self, data):
                raise OSError(28, "the disk is full")

        with self.assertRaisesRegex(OSError, "the disk is full"):
            opt.save(Full())

        class Short(io.BytesIO):
            def read(self, size=-1):
                return b""

        with self.assertRaisesRegex(EOFError, "early"):
            opt.load(Short(b"x" * 1000))
        memory = io.BytesIO()
        trained(steps=5).save(memory)
        memory.seek(0)
        with self.assertRaisesRegex(dsopt.CheckpointError, "w"):
            dsopt.Optimizer({"v": np.zeros((3, 4), np.float32)}, dsopt.AdamW()).load(memory)
        self.assertEqual(opt.report().calls, 3)

    def test_exports_and_imports_state(self):
        opt = trained()
        with self.assertRaises(KeyError):
            opt.state["w.momentum"]
        copied = opt.state.copy("w.exp_avg")
        opt.state["w.exp_avg"] = np.full((3, 4), 7, np.float32)
        self.assertTrue((opt.state["w.exp_avg"] == 7).all())
        self.assertFalse((copied == 7).any())
        for value, text in (
            (np.zeros((3, 4), np.int32), "int32"),
            (np.zeros(5, np.float32), r"\(5,\)"),
            ([1], "no array"),
        ):
            with self.assertRaisesRegex(dsopt.ArgumentError, r"state\['w.exp_avg'\].*" + text):
                opt.state["w.exp_avg"] = value
        opt.reset("moments", "counters")
        self.assertFalse(opt.state["w.exp_avg"].any())
        self.assertEqual(opt.calls, 0)
        with self.assertRaisesRegex(dsopt.ArgumentError, "parts"):
            opt.reset("everything")

    def test_rejects_objects_that_violate_the_file_protocol(self):
        opt = dsopt.Optimizer({"w": np.ones(4, np.float32)}, dsopt.AdamW())
        opt.step([np.ones(4, np.float32)])
        whole = io.BytesIO()
        opt.save(whole)

        class File(io.BytesIO):
            def __init__(self, **methods):
                super().__init__(whole.getvalue())
                self.__dict__.update(methods)

        class Writer:
            def __init__(self, write):
                self.write = write

        for result in (-1, 10**9, "x", 1.5):
            with self.subTest(write=result), self.assertRaisesRegex(dsopt.ArgumentError, "file.write returned"):
                opt.save(Writer(lambda data: result))
        kept = []
        opt.save(Writer(lambda data: kept.append(data)))
        for data in kept:  # of memory that has been reused
            with self.assertRaises(ValueError):
                bytes(data)
        for read in (lambda n: "x" * n, lambda n: 5, lambda n: b"x" * (n + 10**6), lambda n: [1] * n):
            with self.assertRaisesRegex(dsopt.ArgumentError, "file.read"):
                opt.load(File(read=read))
        opt.load(File())
        for tell in (lambda: None, lambda: 10**9, lambda: -1):
            with self.assertRaises((dsopt.ArgumentError, dsopt.CheckpointError)):
                opt.load(File(tell=tell))
        silent = File()
        seek = silent.seek
        silent.seek = lambda *place: seek(*place) and None  # like tempfile.SpooledTemporaryFile before Python 3.11
        silent.read = lambda n, read=silent.read: bytearray(read(n))
        opt.load(silent)
        for path in ("a\0b", "\ud800"):
            for call in (opt.save, opt.load):
                with self.assertRaisesRegex(dsopt.ArgumentError, "file is"):
                    call(path)
        with self.assertRaisesRegex(dsopt.ArgumentError, "file is an empty list"):
            opt.load([])

    def test_file_callbacks_cannot_close_the_optimizer(self):
        opt = dsopt.Optimizer({"w": np.ones(4, np.float32)}, dsopt.AdamW())
        whole = io.BytesIO()
        opt.save(whole)

        class Closes(io.BytesIO):
            def write(self, data):
                opt.close()

            def read(self, size):
                opt.close()

        for call in (opt.save, opt.load):
            with self.assertRaises(dsopt.StateError):
                call(Closes(whole.getvalue()))
        self.assertFalse(opt.closed)
        opt.load(io.BytesIO(whole.getvalue()))


if __name__ == "__main__":
    unittest.main()
