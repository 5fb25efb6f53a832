# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend on the emulated device of the repository's tests, whose library DSOPT_EMULATED names."""

import os
import unittest

from support import python

PROGRAM = """
import ctypes
import numpy as np
import dsopt
from dsopt import _abi as abi

lib = abi.lib
lib.cudaMalloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
lib.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
TYPES = {"float32": "<f4", "float16": "<f2", "int32": "<i4", "uint8": "|u1", "uint16": "<u2"}


class Device:
    '''An array on the device.'''

    def __init__(self, values):
        self.host = np.array(values)
        self.address = ctypes.c_void_p()
        assert lib.cudaMalloc(ctypes.byref(self.address), max(self.host.nbytes, 1)) == 0
        assert lib.cudaMemcpy(self.address, self.host.ctypes.data, self.host.nbytes, 1) == 0
        self.__cuda_array_interface__ = {"version": 3, "shape": self.host.shape, "typestr": TYPES[self.host.dtype.name],
                                         "data": (self.address.value, False), "strides": None}

    def numpy(self):
        assert lib.cudaMemcpy(self.host.ctypes.data, self.address, self.host.nbytes, 2) == 0
        return self.host.copy()


def refused(call, *words):
    try:
        call()
    except (dsopt.ArgumentError, dsopt.UnsupportedError) as problem:
        assert all(word in str(problem) for word in words), problem
    else:
        raise AssertionError("not refused: " + words[0])


rng = np.random.default_rng(0)
start = rng.standard_normal((5, 7)).astype(np.float32)
grads = [rng.standard_normal((5, 7)).astype(np.float32) for _ in range(4)]
context = dsopt.Context("cuda", check_pointers=True)
on_host, on_device = start.copy(), Device(start)
host = dsopt.Optimizer({"w": on_host}, dsopt.AdamW(lr=0.1))
opt = dsopt.Optimizer({"w": on_device}, dsopt.AdamW(lr=0.1), context=context)
kept = [Device(g) for g in grads]
for g, d in zip(grads, kept):
    host.step([g], lr=np.array([0.05], np.float32))
    opt.step([d], lr=Device(np.array([0.05], np.float32)))
assert (on_device.numpy() == on_host).all()
assert opt.report().calls == 4

view = opt.state["w.exp_avg"]  # memory of the device
assert view.shape == (5, 7) and dsopt._arrays.tensor_of(view, "view").device == "cuda"
steps = opt.state["optimizer.step"]  # it follows its tensor
assert len(steps) == 1 and dsopt._arrays.tensor_of(steps, "steps").device == "cuda" and "<i4" in repr(steps)
assert (opt.state.copy("w.exp_avg") == host.state["w.exp_avg"]).all()
opt.state["w.exp_avg"] = np.zeros((5, 7), np.float32)
assert not opt.state.copy("w.exp_avg").any()

refused(lambda: opt.step([grads[0]]), "grads['w']", "cpu", "cuda:0")
refused(lambda: host.step([kept[0]]), "grads['w']", "cuda", "cpu")
refused(lambda: opt.step([kept[0]], grad_scale=2.0), "grad_scale", "array in memory of the device")
refused(lambda: dsopt.Optimizer({"w": start}, dsopt.AdamW(), context=context), "params['w']")
refused(lambda: opt.init_state([on_device]), "state", "memory of the device")
refused(lambda: dsopt.norm([kept[0]], context=context), "context")

opt.zero_grad([kept[0]])
assert not kept[0].numpy().any()
dsopt.axpby(None, [kept[1]], 0, [kept[0]], context=context)
assert (kept[0].numpy() == grads[1]).all()
comm = dsopt.Comm.single(context)
comm.all_reduce([kept[0]], "mean")

pure = dsopt.Optimizer({"w": dsopt.Param(shape=(5, 7))}, dsopt.AdamW(lr=0.1), context=context)
state = {"w.exp_avg": Device(np.zeros(35, np.float32)), "w.exp_avg_sq": Device(np.zeros(35, np.float32)),
         "optimizer.step": Device(np.zeros(1, np.int32))}
weights = Device(start)
pure.init_state({"w": weights}, state)
pure.apply({"w": weights}, [Device(grads[0])], state, workspace=Device(np.zeros(pure.workspace, np.int32)))
assert state["optimizer.step"].numpy()[0] == 1 and (weights.numpy() != start).all()

low = dsopt.AdamW(lr=0.1, exp_avg_format="e4m3", exp_avg_sq_format="bf16_random")
host = dsopt.Optimizer({"w": start.copy()}, low, seed=7)
opt = dsopt.Optimizer({"w": Device(start)}, low, seed=7, context=context)
pure = dsopt.Optimizer({"w": dsopt.Param(shape=(5, 7))}, low, seed=7, context=context)
state = {"w.exp_avg": Device(np.zeros((5, 7), np.uint8)), "w.exp_avg_scale": Device(np.zeros(1, np.float32)),
         "w.exp_avg_sq": Device(np.zeros((5, 7), np.uint16)), "optimizer.step": Device(np.zeros(1, np.int32))}
weights = Device(start)
pure.init_state({"w": weights}, state)
for g in grads:
    host.step([g])
    opt.step([Device(g)])
    pure.apply({"w": weights}, [Device(g)], state, workspace=Device(np.zeros(pure.workspace, np.uint8)))
for name in host.state:
    assert opt.state.copy(name).tobytes() == host.state.copy(name).tobytes() == state[name].numpy().tobytes(), name
view = opt.state["w.exp_avg"]
assert view.shape == (5, 7) and "|u1" in repr(view) and opt.state["w.exp_avg_scale"].shape == (1,)
assert (opt.state.export_f32("w.exp_avg") == host.state.export_f32("w.exp_avg")).all()
opt.state.import_f32("w.exp_avg", np.ones((5, 7), np.float32))
assert (opt.state.export_f32("w.exp_avg") == 1).all()
refused(lambda: opt.state.import_f32("w.exp_avg", Device(start)), "state['w.exp_avg']", "host memory")

loaded = []
dsopt._nvidia.load = loaded.append  # only a group of Muon on the device needs cuBLASLt
dsopt.Optimizer({"w": start.copy()}, dsopt.Muon())
opt = dsopt.Optimizer({"w": Device(start)}, dsopt.AdamW(), context=context)
assert loaded == []
opt.add_group(dsopt.Muon(), {"v": Device(start)})
assert loaded == [dsopt._nvidia.CUBLASLT]
print("done")
"""


class Cuda(unittest.TestCase):
    def test_steps_on_the_device(self):
        library = os.environ.get("DSOPT_EMULATED", "")
        if not os.path.exists(library):
            self.skipTest("no library with the emulated device: DSOPT_EMULATED is %r" % library)
        self.assertEqual(python(PROGRAM, library=library, preload=True), (0, "done\n", ""))


if __name__ == "__main__":
    unittest.main()
