#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""json_cffi.py dsopt.json INCLUDE-DIR LIBDSOPT CC...: cffi's view of dsopt.h must agree with dsopt.json, and must
work."""
import json
import os
import subprocess
import sys

try:
    import cffi
except ImportError:
    print("cffi: skipped, Python's cffi (Debian: python3-cffi) is not installed")
    sys.exit(77)

DESCRIPTION, INCLUDE, LIBRARY, *CC = sys.argv[1:]
with open(DESCRIPTION, encoding="utf-8") as file:
    abi = json.load(file)

# The command that a user of cffi would write. cffi does not parse attributes. C99, because in later standards stddef.h
# has an aligned type.
command = CC + ["-E", "-P", "-std=c99", "-D__attribute__(x)=", os.path.join(INCLUDE, "dsopt.h")]
ffi = cffi.FFI()
ffi.cdef(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
lib = ffi.dlopen(os.path.realpath(LIBRARY))


def expect(got, wanted, *what):
    if got != wanted:
        sys.exit("%s: cffi has %s, dsopt.json %s" % (" ".join(what), got, wanted))


def kind(entry):
    """Returns cffi's type for an entry of dsopt.json."""
    return ffi.typeof(entry["type"] + ("[%d]" % entry["count"] if "count" in entry else ""))


def function(entry):
    return ffi.typeof("%s(*)(%s)" % (entry["result"], ", ".join(a["type"] for a in entry["arguments"]) or "void"))


INT32, names = ffi.typeof("int32_t"), {name for name in sum(ffi.list_types(), []) if name.startswith("dsopt_")}
opaque = [name for name in names if ffi.typeof(name).kind == "struct" and ffi.typeof(name).fields is None]
structs = [name for name in names if ffi.typeof(name).kind == "struct" and name not in opaque]
expect(sorted(structs), sorted(struct["name"] for struct in abi["structs"]), "structs")
expect(sorted(opaque), sorted(abi["opaque"]), "handles")
expect(sorted(names - {*structs, *opaque}), sorted(new["name"] for new in abi["typedefs"] + abi["callbacks"]), "types")
for struct in abi["structs"]:
    name = struct["name"]
    expect(ffi.sizeof(name), struct["size"], name)
    have = [(key, field.type, field.offset, ffi.sizeof(field.type), field.bitsize)
            for key, field in ffi.typeof(name).fields]
    expect(have, [(field["name"], kind(field), field["offset"], field["size"], -1) for field in struct["fields"]], name)
    for field in struct["fields"]:
        if "signature" in field:
            expect(ffi.typeof(field["type"]), function(field["signature"]), name, field["name"])
for new in abi["typedefs"]:
    expect(ffi.typeof(new["name"]), kind(new), new["name"])
for callback in abi["callbacks"]:
    expect(ffi.typeof(callback["name"]), function(callback), callback["name"])

constants = {}
for enum in abi["enums"]:
    name = "enum " + enum["name"]
    elements = {key: value for key, value in ffi.typeof(name).relements.items() if not key.endswith("_SIGNED")}
    expect(elements, {constant["name"]: constant["value"] for constant in enum["constants"]}, name)
    expect((ffi.sizeof(name), int(ffi.cast(name, -1))), (ffi.sizeof(INT32), -1), name)  # signed
    for key, value in elements.items():
        expect(int(ffi.cast(INT32, getattr(lib, key))), value, key)
    constants.update(elements)
names = {name for name in dir(lib) if name.startswith(("dsopt_", "DSOPT_")) and not name.endswith("_SIGNED")}
expect(sorted(name for name in names if name.startswith("DSOPT_")), sorted(constants), "constants")
expect({name: value for name, value in abi["constants"].items() if name in constants}, constants, "constants")
expect(sorted(name for name in names if name.startswith("dsopt_")), sorted(entry["name"] for entry in abi["functions"]),
       "functions")
for entry in abi["functions"]:
    expect(ffi.typeof(getattr(lib, entry["name"])), function(entry), entry["name"])


def check(status):
    if status != lib.DSOPT_OK:
        sys.exit("%s: %s" % (ffi.string(lib.dsopt_status_name(status)).decode(),
                             ffi.string(lib.dsopt_last_error()).decode()))


w, g = ffi.new("float[]", [3, -2]), ffi.new("float[2]")
context, optimizer, group = ffi.new("dsopt_context **"), ffi.new("dsopt_optimizer **"), ffi.new("dsopt_group *")
params = ffi.new("dsopt_param[]", [{"tensor": {"data": w, "numel": 2, "dtype": lib.DSOPT_DTYPE_F32}}])
grads = ffi.new("dsopt_tensor[]", [{"data": g, "numel": 2, "dtype": lib.DSOPT_DTYPE_F32}])
step = ffi.new("dsopt_step *", {"size": ffi.sizeof("dsopt_step"), "grads": grads, "count": 1})
check(lib.dsopt_context_create(ffi.NULL, context))
check(lib.dsopt_optimizer_create(context[0], ffi.NULL, optimizer))
check(lib.dsopt_group_init(group, ffi.sizeof("dsopt_group"), lib.DSOPT_ALGORITHM_ADAM))
group.lr = 0.01
check(lib.dsopt_optimizer_add_group(optimizer[0], group, params, 1))
for _ in range(2000):
    g[0], g[1] = w[0] - 1, w[1] - 2
    check(lib.dsopt_optimizer_step(optimizer[0], step))
expect("%.3f %.3f" % tuple(w), "1.000 2.000", "weights")
lib.dsopt_optimizer_destroy(optimizer[0])
lib.dsopt_context_destroy(context[0])
print("%d structs, %d functions, %d constants" % (len(structs), len(abi["functions"]), len(constants)))
