# SPDX-License-Identifier: Apache-2.0
"""The library as ctypes sees it: functions, structs and constants by their names in dsopt.h, made from dsopt.json.

    from dsopt import _abi as abi
    group = abi.dsopt_group(lr=1e-3)            # a ctypes.Structure; `size` is filled in
    abi.check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group), abi.DSOPT_ALGORITHM_ADAMW))

Pointers are addresses (c_void_p), strings bytes. A status is returned and not raised: `check` raises it.
"""
import ctypes
import json
import os
import sys
from typing import Any

from ._errors import MissingError, error_of

HERE = os.path.dirname(os.path.abspath(__file__))
_SCALARS = {"void": None, "char": ctypes.c_char, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
            "uint64_t": ctypes.c_uint64, "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double}


def _type_of(entry, known):
    """Of a field or an argument."""
    if "signature" in entry:
        return _function_type(entry["signature"], known)
    kind = entry["type"]
    if kind.endswith("*"):
        return ctypes.c_char_p if kind == "const char *" else ctypes.c_void_p
    return known[kind] * entry["count"] if "count" in entry else known[kind]


def _signature_of(entry, known):
    """Of a function: result and arguments."""
    return _type_of({"type": entry["result"]}, known), [_type_of(argument, known) for argument in entry["arguments"]]


def _function_type(entry, known):
    result, arguments = _signature_of(entry, known)
    return ctypes.CFUNCTYPE(result, *arguments)


def _struct_type(entry, known):
    def init(self, *values, _own=entry["fields"][0]["name"] == "size", **named):
        if _own and not values:
            named.setdefault("size", ctypes.sizeof(self))
        ctypes.Structure.__init__(self, *values, **named)

    fields = [(field["name"], _type_of(field, known)) for field in entry["fields"]]
    return type(entry["name"], (ctypes.Structure,), {"_fields_": fields, "__init__": init})


def types(description):
    """Every struct, callback and constant of a description, by name."""
    known = dict(_SCALARS)
    for new in description["typedefs"]:
        known[new["name"]] = _type_of(new, known)
    for callback in description["callbacks"]:
        known[callback["name"]] = _function_type(callback, known)
    for struct in description["structs"]:
        known[struct["name"]] = _struct_type(struct, known)
    named = {name: kind for name, kind in known.items() if name.startswith("dsopt_")}
    named.update(description["constants"])
    return known, named


def bind(library, description, known):
    """Give every function of a library its signature."""
    for function in description["functions"]:
        entry = getattr(library, function["name"])
        entry.restype, entry.argtypes = _signature_of(function, known)
    return library


def read_description():
    """dsopt.json: beside this file in a wheel, else in the source tree."""
    for path in (os.path.join(HERE, "dsopt.json"), os.path.join(HERE, "..", "..", "..", "include", "dsopt.json")):
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return json.load(file)
    raise MissingError("dsopt.json is not beside %s: the package is not complete" % __file__, 31, "DSOPT_ERR_MISSING")


def candidates(abi_version):
    """Where the library may be, best first: DSOPT_LIBRARY, the package's own, the system's."""
    chosen = os.environ.get("DSOPT_LIBRARY")
    if chosen:
        return [chosen]
    own = os.path.join(HERE, "libdsopt.so")
    return ([own] if os.path.exists(own) else []) + ["libdsopt.so.%s" % abi_version]


def load(description, known):
    """The library, or MissingError with every place that was tried."""
    problems = []
    for path in candidates(description["abi_version"]):
        try:
            library = ctypes.CDLL(path)
            abi = library.dsopt_abi_version()
        except (OSError, AttributeError) as problem:
            problems.append(str(problem))
            continue
        if abi != description["abi_version"]:
            problems.append("%s has ABI version %d, and this package needs %d" % (path, abi, description["abi_version"]))
            continue
        return bind(library, description, known), path
    raise MissingError("libdsopt was not found: %s. Set DSOPT_LIBRARY to its path" % "; ".join(problems), 31, "DSOPT_ERR_MISSING")


description = read_description()
_known, _named = types(description)
globals().update(_named)
lib, path = load(description, _known)


def __getattr__(name: str) -> Any:  # for type checkers: the names above are made at run time
    raise AttributeError("dsopt.h has no %r (version %s)" % (name, description["version"]))


def check(status: int, prefix: str = "") -> None:
    """Raise the reason if a call failed. In the thread that called."""
    if status:
        text = lib.dsopt_last_error().decode("utf-8", "replace")
        raise error_of(status, lib.dsopt_status_name(status).decode(), prefix + text)


if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
    raise MissingError("dsopt needs a 64-bit little-endian system", 31, "DSOPT_ERR_MISSING")
