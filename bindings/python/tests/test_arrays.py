# SPDX-License-Identifier: Apache-2.0
import array
import ctypes
import unittest

import numpy as np

import dsopt
from dsopt import _abi as abi
from dsopt._arrays import CPU, _DLTensor, _Versioned, tensor_of

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Producer:
    """An array that supports only DLPack, implemented here so that every field can be wrong."""

    def __init__(
        self,
        memory,
        shape,
        *,
        strides=None,
        code=2,
        bits=32,
        lanes=1,
        device=(CPU, 0),
        versioned=True,
        flags=0,
        major=1,
        offset=0,
        label=None,
    ):
        self.memory, self.device, self.versioned = memory, device, versioned
        self.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        tensor = _DLTensor(
            data=ctypes.addressof(memory),
            device_type=device[0],
            device_id=device[1],
            ndim=len(shape),
            code=code,
            bits=bits,
            lanes=lanes,
            shape=self.shape,
            byte_offset=offset,
        )
        if self.strides is not None:
            tensor.strides = self.strides
        self.managed = _Versioned(major=major, flags=flags, tensor=tensor) if versioned else tensor
        self.label = label or (b"dltensor_versioned" if versioned else b"dltensor")
        self.asked = None

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **asked):
        if not self.versioned and "max_version" in asked:
            raise TypeError("unexpected keyword max_version")
        self.asked = asked
        return new_capsule(ctypes.addressof(self.managed), self.label, None)


N = 2048
floats = (ctypes.c_float * 12)(*range(12))


class Arrays(unittest.TestCase):
    def refused(self, value, *words, kind=dsopt.ArgumentError):
        with self.assertRaises(kind) as caught:
            tensor_of(value, "grads['w']")
        for word in ("grads['w']", *words):
            self.assertIn(word, str(caught.exception))

    def test_accepts_numpy_arrays(self):
        for dtype, number in (
            ("float32", abi.DSOPT_DTYPE_F32),
            ("float16", abi.DSOPT_DTYPE_F16),
            ("int32", abi.DSOPT_DTYPE_I32),
            ("int16", abi.DSOPT_DTYPE_I16),
            ("uint8", abi.DSOPT_DTYPE_U8),
        ):
            x = np.zeros((3, 4), dtype)
            tensor = tensor_of(x, "x")
            self.assertEqual(
                (tensor.address, tensor.numel, tensor.dtype, tensor.shape, tensor.device, tensor.writable),
                (x.ctypes.data, 12, number, (3, 4), "cpu", True),
            )
        for shape in ((), (0,), (3, 0), (1, 5, 1)):
            self.assertEqual(tensor_of(np.zeros(shape, np.float32), "x").shape, shape)

    def test_rejects_unsuitable_numpy_arrays(self):
        self.refused(np.zeros((4, 4), np.float32)[:, :2], "not contiguous", "(4, 2)")
        self.refused(np.zeros((4, 4), np.float32).T[1:], "not contiguous")
        self.refused(np.asfortranarray(np.zeros((4, 4), np.float32)), "not contiguous")
        self.refused(np.zeros(4), "float64", "float32")
        self.refused(np.zeros(4, np.int8), "int8")
        self.refused(np.zeros(4, ">f4"), ">f4")
        self.refused(np.zeros(4, [("a", "f4")]), "dtype")
        self.refused(np.zeros(4, bool), "bool")

    def test_accepts_contiguous_slices(self):
        x = np.zeros((4, 4), np.float32)
        self.assertEqual(tensor_of(x[1:3], "x").address, x.ctypes.data + 16 * 1)
        self.assertEqual(tensor_of(x[:, :1][:1], "x").numel, 1)  # strides of dimensions of one element are ignored

    def test_accepts_floats_that_numpy_does_not_have(self):
        for typestr, name, code, number in (
            ("<V2", "bfloat16", 4, abi.DSOPT_DTYPE_BF16),
            ("|V1", "float8_e4m3fn", 10, abi.DSOPT_DTYPE_F8_E4M3),
            ("<V1", "float8_e4m3fn", 10, abi.DSOPT_DTYPE_F8_E4M3),
        ):

            class Named(np.ndarray):  # like ml_dtypes: only the dtype has a name
                @property
                def __array_interface__(self):
                    return {
                        "typestr": typestr,
                        "shape": (4,),
                        "data": (self.ctypes.data, False),
                        "strides": None,
                        "version": 3,
                    }

                @property
                def dtype(self):
                    return type("float", (), {"name": name})()

            memory, bits = np.zeros(4, "u%s" % typestr[2]), 8 * int(typestr[2])
            self.assertEqual(tensor_of(memory.view(Named), "x").dtype, number)
            self.assertEqual(tensor_of(Producer(floats, (4,), code=code, bits=bits), "x").dtype, number)

    def test_integers_stand_for_floats_only_where_these_are_wanted(self):
        for dtype, number in (("uint16", abi.DSOPT_DTYPE_BF16), ("uint8", abi.DSOPT_DTYPE_F8_E4M3)):
            words = np.zeros(4, dtype)
            producer = Producer(floats, (4,), code=1, bits=8 * words.itemsize)
            for array_ in (words, producer, memoryview(words)):
                self.assertEqual(tensor_of(array_, "x", dtype=number).dtype, number)
        self.assertEqual(tensor_of(np.zeros(4, np.uint8), "x", dtype=abi.DSOPT_DTYPE_F32).dtype, abi.DSOPT_DTYPE_U8)
        self.refused(np.zeros(4, np.uint16), "uint16", "float32")
        with self.assertRaisesRegex(dsopt.ArgumentError, "has dtype uint16, and must have float8_e4m3fn"):
            tensor_of(np.zeros(4, np.uint16), "x", dtype=abi.DSOPT_DTYPE_F8_E4M3)

    def test_accepts_dlpack(self):
        for versioned in (True, False):
            for strides in (None, (4, 1)):
                producer = Producer(floats, (3, 4), strides=strides, versioned=versioned)
                tensor = tensor_of(producer, "x")
                self.assertEqual(
                    (tensor.address, tensor.shape, tensor.dtype, tensor.device, tensor.writable),
                    (ctypes.addressof(floats), (3, 4), abi.DSOPT_DTYPE_F32, "cpu", True),
                )
                self.assertEqual(producer.asked, {"max_version": (1, 0)} if versioned else {})
        self.assertEqual(tensor_of(Producer(floats, (2,), offset=16), "x").address, ctypes.addressof(floats) + 16)
        self.assertEqual(tensor_of(Producer(floats, ()), "x").numel, 1)
        self.assertFalse(tensor_of(Producer(floats, (2,), flags=1), "x").writable)
        self.assertFalse(
            tensor_of(Producer(floats, (2,), flags=2), "x").writable
        )  # a copy: writes to it would be lost

    def test_accepts_dlpack_of_a_device(self):
        on_device = Producer(floats, (4,), device=(2, 3))
        tensor = tensor_of(on_device, "x", stream=77)
        self.assertEqual((tensor.device, tensor.index, on_device.asked["stream"]), ("cuda", 3, 77))
        tensor_of(on_device, "x")
        self.assertEqual(on_device.asked["stream"], 1)  # the legacy default stream
        self.refused(Producer(floats, (4,), device=(7, 0)), "device")  # Vulkan
        opt = dsopt.Optimizer([np.zeros(4, np.float32)], dsopt.AdamW())
        with self.assertRaisesRegex(dsopt.ArgumentError, r"grads\['p0'\].*cuda:3.*cpu"):
            opt.step([on_device])

    def test_rejects_invalid_dlpack(self):
        self.refused(Producer(floats, (2, 4), strides=(1, 2)), "not contiguous")
        self.refused(Producer(floats, (4,), bits=64), "float64")
        self.refused(Producer(floats, (4,), code=0, bits=8), "int8")
        self.refused(Producer(floats, (4,), code=11, bits=8), "dtype")
        self.refused(Producer(floats, (4,), code=10, bits=16), "dtype")
        self.refused(Producer(floats, (4,), lanes=2), "lanes")
        self.refused(Producer(floats, (4,), major=2), "DLPack 2")
        self.refused(Producer(floats, (4,), label=b"used_dltensor"), "used_dltensor")

        class Unwilling:
            def __dlpack_device__(self):
                return 1, 0

            def __dlpack__(self, **_):
                raise BufferError("it requires grad")

        self.refused(Unwilling(), "it requires grad")

    def test_releases_the_capsule(self):
        x = np.zeros(4, np.float32)
        if not hasattr(x, "__dlpack__"):
            self.skipTest("this NumPy has no DLPack")

        class Only:  # hides the array interface
            def __dlpack_device__(self):
                return x.__dlpack_device__()

            def __dlpack__(self, **asked):
                return x.__dlpack__(**asked)

        import sys

        before = sys.getrefcount(x)
        tensor = tensor_of(Only(), "x")
        self.assertEqual(tensor.address, x.ctypes.data)
        self.assertGreater(sys.getrefcount(x), before)
        del tensor
        self.assertEqual(sys.getrefcount(x), before)

    def test_accepts_cuda_array_interface(self):
        class Device:
            def __init__(self, **other):
                self.__cuda_array_interface__ = {
                    "version": 3,
                    "shape": (2, 3),
                    "typestr": "<f4",
                    "data": (4096, False),
                    **other,
                }

        tensor = tensor_of(Device(), "x")
        self.assertEqual((tensor.address, tensor.device, tensor.shape), (4096, "cuda", (2, 3)))
        self.assertFalse(tensor_of(Device(data=(4096, True)), "x").writable)
        self.refused(Device(strides=(4, 8)), "not contiguous")
        self.refused(Device(mask=object()), "mask")

    def test_accepts_buffers(self):
        x = array.array("f", [1, 2, 3])
        self.assertEqual(tensor_of(x, "x").address, x.buffer_info()[0])
        tensor = tensor_of(x, "x")
        with self.assertRaises(BufferError):
            x.append(4)
        del tensor
        x.append(4)
        self.assertEqual(tensor_of((ctypes.c_float * 3)(), "x").numel, 3)
        self.refused(memoryview(b"1234").cast("f"), "read-only")
        self.refused(array.array("d", [1]), "float64")
        self.refused(memoryview(array.array("f", range(8)))[::2], "not contiguous")

    def test_rejects_objects_that_are_no_arrays(self):
        for value in ("text", [1.0], 1.0, object(), None):
            self.refused(value, "no array", kind=dsopt.ArgumentTypeError)
            self.refused(value, kind=TypeError)


class Addresses(unittest.TestCase):
    """Objects that report an address themselves."""

    class Interface:
        def __init__(self, **fields):
            self.__array_interface__ = {"version": 3, "typestr": "<f4", "shape": (N,), "data": (4096, False), **fields}

    def test_rejects_impossible_addresses(self):
        opt = dsopt.Optimizer({"a": np.zeros(N, np.float32)}, dsopt.AdamW())
        for address in (0, None, -4096, 1 << 64, 1 << 70, (1 << 64) - 4):
            for call in (lambda x: opt.step({"a": x}), lambda x: dsopt.norm([x])):
                with self.subTest(address=address), self.assertRaisesRegex(dsopt.ArgumentError, "address"):
                    call(self.Interface(data=(address, False)))

    def test_rejects_impossible_dlpack_addresses(self):
        with self.assertRaisesRegex(dsopt.ArgumentError, "address"):
            dsopt.norm([Producer(floats, (12,), offset=(1 << 64) - 4)])
        nowhere = Producer(floats, (12,))
        nowhere.managed.tensor.data = None
        with self.assertRaisesRegex(dsopt.ArgumentError, "address 0"):
            dsopt.norm([nowhere])
        for dimensions in (-1, 65):
            wrong = Producer(floats, (12,))
            wrong.managed.tensor.ndim = dimensions
            with self.assertRaisesRegex(dsopt.ArgumentError, "%d dimensions" % dimensions):
                dsopt.norm([wrong])
        for other in (None, 3, "x"):
            methods = {"__dlpack__": lambda self, **_: other, "__dlpack_device__": lambda self: (1, 0)}
            kind = type("Stranger", (), methods)
            with self.assertRaisesRegex(dsopt.ArgumentError, "must come in a capsule"):
                dsopt.norm([kind()])

    def test_rejects_wrong_fields(self):
        for fields, text in (
            ({"shape": (-1,)}, "shape"),
            ({"shape": (2.5,)}, "integers"),
            ({"shape": 3}, "integers"),
            ({"shape": ((1 << 64) + N,)}, "shape"),
            ({"data": None}, "address"),
            ({"data": (4096,)}, "address"),
            ({"data": ("x", False)}, "no integer"),
            ({"typestr": ""}, "dtype"),
            ({"typestr": None}, "array interface"),
            ({"strides": ()}, "0 strides for 1 dimensions"),
            ({"strides": 3}, "strides"),
        ):
            with self.subTest(**fields), self.assertRaisesRegex(dsopt.ArgumentError, text):
                dsopt.norm([self.Interface(**fields)])
        with self.assertRaisesRegex(dsopt.ArgumentError, "array interface"):
            dsopt.norm([type("Other", (), {"__array_interface__": 3})()])
        empty = self.Interface(shape=(0,), data=(0, False))
        self.assertEqual(dsopt.norm([empty, np.zeros(3, np.float32)]).norm, 0)


if __name__ == "__main__":
    unittest.main()
