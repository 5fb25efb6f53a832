#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""json_ctypes.py PACKAGE-FOLDER LIBDSOPT: the ctypes structs that the Python package builds from dsopt.json must
have the sizes and offsets of that file. They must train a linear model through the library, on threads of this
program."""
import ctypes
import os
import sys

os.environ["DSOPT_LIBRARY"] = os.path.realpath(sys.argv[2])
sys.path.insert(0, sys.argv[1])
from dsopt import _abi as abi  # noqa: E402

description = abi.description
fields = 0
for struct in description["structs"]:
    kind = getattr(abi, struct["name"])
    assert ctypes.sizeof(kind) == struct["size"], struct["name"]
    for field in struct["fields"]:
        attribute = getattr(kind, field["name"])
        assert (attribute.offset, attribute.size) == (field["offset"], field["size"]), (struct["name"], field["name"])
        fields += 1
assert fields > 100, fields
assert abi.lib.dsopt_abi_version() == description["abi_version"] == abi.DSOPT_ABI_VERSION
version = abi.lib.dsopt_version()
assert "%d.%d.%d" % (version // 10000, version // 100 % 100, version % 100) == description["version"]
assert abi.lib.dsopt_status_name(abi.DSOPT_ERR_SHAPE) == b"DSOPT_ERR_SHAPE"


def run(user, n, body, arg):
    assert user == 123
    calls.append(n)
    for i in reversed(range(n)):
        body(arg, i)


# y = 2 x0 - 3 x1 + 1 as in examples/fp32.c
calls = []
desc = abi.dsopt_context_desc(parallel_for=abi.dsopt_parallel_for(run), user=123, threads=2)
context, optimizer, group = ctypes.c_void_p(), ctypes.c_void_p(), abi.dsopt_group()
abi.check(abi.lib.dsopt_context_create(ctypes.byref(desc), ctypes.byref(context)))
abi.check(abi.lib.dsopt_optimizer_create(context, None, ctypes.byref(optimizer)))
abi.check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group), abi.DSOPT_ALGORITHM_ADAMW))
group.lr, group.weight_decay = 0.02, 0
w, gw = (ctypes.c_float * 3)(), (ctypes.c_float * 3)()


def tensors(memory):
    address = ctypes.addressof(memory)
    return abi.dsopt_tensor(address, 2, abi.DSOPT_DTYPE_F32), abi.dsopt_tensor(address + 8, 1, abi.DSOPT_DTYPE_F32)


params = (abi.dsopt_param * 2)(*(abi.dsopt_param(tensor=tensor, name=name)
                                 for tensor, name in zip(tensors(w), (b"w", b"b"))))
grads = (abi.dsopt_tensor * 2)(*tensors(gw))
abi.check(abi.lib.dsopt_optimizer_add_group(optimizer, ctypes.byref(group), params, 2))
step = abi.dsopt_step(grads=ctypes.addressof(grads), count=2, flags=abi.DSOPT_STEP_ZERO_GRADS)
for i in range(4000):
    x0, x1 = i % 7 / 7, i % 5 / 5
    e = w[0] * x0 + w[1] * x1 + w[2] - (2 * x0 - 3 * x1 + 1)
    gw[0], gw[1], gw[2] = e * x0, e * x1, e
    abi.check(abi.lib.dsopt_optimizer_step(optimizer, ctypes.byref(step)))
learnt = "%.2f %.2f %.2f" % tuple(w)
assert learnt == "2.00 -3.00 1.00", learnt
assert not any(gw), list(gw)
report = abi.dsopt_report()
abi.check(abi.lib.dsopt_optimizer_report(optimizer, ctypes.byref(report)))
assert report.calls == 4000 and report.skipped == 0
try:
    abi.check(abi.lib.dsopt_optimizer_step(optimizer, None))
except ValueError as error:
    assert error.status == abi.DSOPT_ERR_ARGUMENT, error
else:
    raise AssertionError("a step without arguments is accepted")
# Enough elements for several work items.
ones, result = (ctypes.c_float * (1 << 20))(*[1] * (1 << 20)), abi.dsopt_norm_result()
tensor = abi.dsopt_tensor(ctypes.addressof(ones), len(ones), abi.DSOPT_DTYPE_F32)
abi.check(abi.lib.dsopt_tensors_norm(context, ctypes.byref(tensor), 1, abi.DSOPT_NORM_L2, 0, None, ctypes.byref(result),
                                     None))
assert calls and (result.norm, result.nonfinite, result.first_bad) == (1024, 0, -1), (calls, result.norm)
abi.lib.dsopt_optimizer_destroy(optimizer)
abi.lib.dsopt_context_destroy(context)
print("%d structs, %d fields; learnt %s" % (len(description["structs"]), fields, learnt))
