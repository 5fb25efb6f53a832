# SPDX-License-Identifier: Apache-2.0
"""The library for Python: structs, constants and signatures as include/dsopt.json has them.

    lib = dsopt_abi.load("libdsopt.so")
    group = lib.dsopt_group(lr=1e-3)        # a ctypes.Structure; `size` is filled in
    lib.check(lib.dsopt_group_init(ctypes.byref(group), ...))
"""
import ctypes
import json
import os

DESCRIPTION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "include", "dsopt.json")
SCALARS = {"void": None, "char": ctypes.c_char, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
           "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double}


class Library(ctypes.CDLL):
    def check(self, status):
        if status:
            raise RuntimeError("status %d: %s" % (status, self.dsopt_last_error().decode()))


def type_of(entry, known):
    """Of a field or an argument. Pointers are addresses, strings bytes."""
    if "signature" in entry:
        return function_type(entry["signature"], known)
    kind = entry["type"]
    if kind.endswith("*"):
        return ctypes.c_char_p if kind == "const char *" else ctypes.c_void_p
    return known[kind] * entry["count"] if "count" in entry else known[kind]


def signature_of(entry, known):
    """Of a function: result and arguments."""
    return type_of({"type": entry["result"]}, known), [type_of(argument, known) for argument in entry["arguments"]]


def function_type(entry, known):
    result, arguments = signature_of(entry, known)
    return ctypes.CFUNCTYPE(result, *arguments)


def struct_type(entry, known):
    def init(self, *values, _own=entry["fields"][0]["name"] == "size", **named):
        if _own and not values:
            named.setdefault("size", ctypes.sizeof(self))
        ctypes.Structure.__init__(self, *values, **named)

    fields = [(field["name"], type_of(field, known)) for field in entry["fields"]]
    return type(entry["name"], (ctypes.Structure,), {"_fields_": fields, "__init__": init})


def load(path, description=DESCRIPTION):
    with open(description, encoding="utf-8") as file:
        abi = json.load(file)
    library, known = Library(path), dict(SCALARS)
    for new in abi["typedefs"]:
        known[new["name"]] = type_of(new, known)
    for callback in abi["callbacks"]:
        known[callback["name"]] = function_type(callback, known)
    for struct in abi["structs"]:
        known[struct["name"]] = struct_type(struct, known)
    for function in abi["functions"]:
        entry = getattr(library, function["name"])
        entry.restype, entry.argtypes = signature_of(function, known)
    for name in [entry["name"] for entry in abi["callbacks"] + abi["structs"]]:
        setattr(library, name, known[name])
    for name, value in abi["constants"].items():
        setattr(library, name, value)
    return library


def idle_table(library, ranks):
    """The table of rank 0 of so many; what the others would send stays as it is. To be kept as long as the comm."""
    table = library.dsopt_comm_table(ranks=ranks)
    kinds = dict(library.dsopt_comm_table._fields_)
    for name in ("all_reduce", "all_to_all", "all_gather"):
        setattr(table, name, kinds[name](lambda *_: 0))
    return table
