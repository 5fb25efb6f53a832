#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""json_ctypes.py BENCH-FOLDER LIBDSOPT: ctypes, as bench/dsopt_abi.py makes them of dsopt.json, have the sizes and offsets
written there, and train a line through the library, on threads of this program."""
import ctypes
import json
import os
import sys

sys.path.insert(0, sys.argv[1])
import dsopt_abi  # noqa: E402

lib = dsopt_abi.load(os.path.realpath(sys.argv[2]))
with open(dsopt_abi.DESCRIPTION, encoding="utf-8") as file:
    abi = json.load(file)
places = 0
for struct in abi["structs"]:
    kind = getattr(lib, struct["name"])
    assert ctypes.sizeof(kind) == struct["size"], struct["name"]
    for field in struct["fields"]:
        place = getattr(kind, field["name"])
        assert (place.offset, place.size) == (field["offset"], field["size"]), (struct["name"], field["name"])
        places += 1
assert places > 100, places
assert lib.dsopt_abi_version() == abi["abi_version"] == lib.DSOPT_ABI_VERSION
assert "%d.%d.%d" % (lib.dsopt_version() // 10000, lib.dsopt_version() // 100 % 100, lib.dsopt_version() % 100) == abi["version"]
assert lib.dsopt_status_name(lib.DSOPT_ERR_SHAPE) == b"DSOPT_ERR_SHAPE"


def run(user, n, body, arg):
    assert user == 123
    pieces.append(n)
    for i in reversed(range(n)):
        body(arg, i)


# y = 2 x0 - 3 x1 + 1 as in caller_c.c
pieces = []
desc = lib.dsopt_context_desc(parallel_for=lib.dsopt_parallel_for(run), user=123, threads=2)
context, optimizer, group = ctypes.c_void_p(), ctypes.c_void_p(), lib.dsopt_group()
lib.check(lib.dsopt_context_create(ctypes.byref(desc), ctypes.byref(context)))
lib.check(lib.dsopt_optimizer_create(context, None, ctypes.byref(optimizer)))
lib.check(lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group), lib.DSOPT_ALGORITHM_ADAMW))
group.lr = 0.02
w, gw = (ctypes.c_float * 3)(), (ctypes.c_float * 3)()


def tensors(memory):
    address = ctypes.addressof(memory)
    return lib.dsopt_tensor(address, 2, lib.DSOPT_DTYPE_F32), lib.dsopt_tensor(address + 8, 1, lib.DSOPT_DTYPE_F32)


params = (lib.dsopt_param * 2)(*(lib.dsopt_param(tensor=tensor, name=name) for tensor, name in zip(tensors(w), (b"w", b"b"))))
grads = (lib.dsopt_tensor * 2)(*tensors(gw))
lib.check(lib.dsopt_optimizer_add_group(optimizer, ctypes.byref(group), params, 2))
step = lib.dsopt_step(grads=ctypes.addressof(grads), count=2, flags=lib.DSOPT_STEP_ZERO_GRADS)
for i in range(4000):
    x0, x1 = i % 7 / 7, i % 5 / 5
    e = w[0] * x0 + w[1] * x1 + w[2] - (2 * x0 - 3 * x1 + 1)
    gw[0], gw[1], gw[2] = e * x0, e * x1, e
    lib.check(lib.dsopt_optimizer_step(optimizer, ctypes.byref(step)))
learnt = "%.2f %.2f %.2f" % tuple(w)
assert learnt == "2.00 -3.00 1.00", learnt
assert not any(gw), list(gw)
report = lib.dsopt_report()
lib.check(lib.dsopt_optimizer_report(optimizer, ctypes.byref(report)))
assert report.calls == 4000 and report.skipped == 0
try:
    lib.check(lib.dsopt_optimizer_step(optimizer, None))
except RuntimeError as error:
    assert "status 10" in str(error), error
else:
    raise AssertionError("a step without arguments is taken")
# As many elements as make several pieces.
ones, result = (ctypes.c_float * (1 << 20))(*[1] * (1 << 20)), lib.dsopt_norm_result()
tensor = lib.dsopt_tensor(ctypes.addressof(ones), len(ones), lib.DSOPT_DTYPE_F32)
lib.check(lib.dsopt_tensors_norm(context, ctypes.byref(tensor), 1, lib.DSOPT_NORM_L2, 0, None, ctypes.byref(result), None))
assert pieces and (result.norm, result.nonfinite, result.first_bad) == (1024, 0, -1), (pieces, result.norm)
lib.dsopt_optimizer_destroy(optimizer)
lib.dsopt_context_destroy(context)
print("%d structs, %d fields; learnt %s" % (len(abi["structs"]), places, learnt))
