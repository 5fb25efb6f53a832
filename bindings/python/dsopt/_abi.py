# SPDX-License-Identifier: Apache-2.0
"""The library through ctypes: functions, structs and constants under their names in dsopt.h, generated from dsopt.json.

    from dsopt import _abi as abi
    group = abi.dsopt_group(lr=1e-3)            # a ctypes.Structure; `size` is filled in
    abi.check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group), abi.DSOPT_ALGORITHM_ADAMW))

Pointers are addresses (c_void_p), strings bytes. A status is returned and not raised: `check` raises it. ctypes lets
other threads run during a call.
"""

from __future__ import annotations

import ctypes
import json
import operator
import os
import re
import reprlib
import sys
import threading
from typing import Any, Dict, List, Optional, Tuple

from ._errors import ArgumentError, ArgumentTypeError, MissingError, error_of

HERE = os.path.dirname(os.path.abspath(__file__))
_SCALARS: Dict[str, Any] = {
    "void": None,
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_FLOATS = (ctypes.c_float, ctypes.c_double)
_INTEGERS = (ctypes.c_int, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_size_t)


def _missing(text: str) -> MissingError:
    return MissingError(text, 31, "DSOPT_ERR_MISSING")


def shown(value: Any) -> str:
    """Returns a value as text for an error. Large arrays are abbreviated."""
    return reprlib.repr(value)


def number(value: Any, kind: Any, name: str) -> Any:
    """Returns `value` for an argument of a ctypes type. ctypes itself silently drops the upper bits of an int."""
    text = "%s is %s, and must be %s"
    try:
        if kind in _FLOATS:
            if isinstance(value, (str, bytes, bytearray)):  # float() reads text
                raise TypeError
            return float(value)
        whole = operator.index(value)
    except (TypeError, ValueError, OverflowError) as problem:
        wanted = "a number" if kind in _FLOATS else "an integer"
        if isinstance(problem, OverflowError):
            wanted += " that 64 bits can hold"
        raise ArgumentTypeError(text % (name, shown(value), wanted), 10, "DSOPT_ERR_ARGUMENT") from problem
    if kind(whole).value != whole:
        wanted = "%s is %d, which does not fit into %d bits" % (name, whole, 8 * ctypes.sizeof(kind))
        raise ArgumentError(wanted, 10, "DSOPT_ERR_ARGUMENT")
    return whole


def assign(struct: Any, field: str, value: Any, name: str = "") -> None:
    """Set a field of a struct; errors call it `name`."""
    kind = struct.numbers.get(field)
    setattr(struct, field, value if kind is None else number(value, kind, name or field))


def _type_of(entry: Dict[str, Any], known: Dict[str, Any]) -> Any:
    """Returns the type of a field or an argument."""
    if "signature" in entry:
        return _function_type(entry["signature"], known)
    kind = entry["type"]
    if kind.endswith("*"):
        return ctypes.c_char_p if kind == "const char *" else ctypes.c_void_p
    return known[kind] * entry["count"] if "count" in entry else known[kind]


def _signature_of(entry: Dict[str, Any], known: Dict[str, Any]) -> Tuple[Any, List[Any]]:
    """Returns the types of the result and of the arguments of a function."""
    return _type_of({"type": entry["result"]}, known), [_type_of(argument, known) for argument in entry["arguments"]]


def _function_type(entry: Dict[str, Any], known: Dict[str, Any]) -> Any:
    result, arguments = _signature_of(entry, known)
    return ctypes.CFUNCTYPE(result, *arguments)


def _struct_type(entry: Dict[str, Any], known: Dict[str, Any]) -> Any:
    sized = entry["fields"][0]["name"] == "size"

    def init(self: Any, /, *values: Any, **named: Any) -> None:
        if sized and not values:
            named.setdefault("size", ctypes.sizeof(self))
        ctypes.Structure.__init__(self, *values)
        for name, value in named.items():
            assign(self, name, value)

    fields = [(field["name"], _type_of(field, known)) for field in entry["fields"]]
    numbers = {name: kind for name, kind in fields if kind in _FLOATS + _INTEGERS}
    return type(entry["name"], (ctypes.Structure,), {"_fields_": fields, "__init__": init, "numbers": numbers})


def types(description: Dict[str, Any]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Returns every type by its name in C, and the public names of this module: structs, callbacks and constants."""
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


def bind(library: Any, description: Dict[str, Any], known: Dict[str, Any]) -> Any:
    """Set the signature of every function of a library."""
    for function in description["functions"]:
        entry = getattr(library, function["name"])
        entry.restype, entry.argtypes = _signature_of(function, known)
    return library


def find_description() -> str:
    """Finds dsopt.json, which is next to this file in a wheel, else in the source tree."""
    for place in (os.path.join(HERE, "dsopt.json"), os.path.join(HERE, "..", "..", "..", "include", "dsopt.json")):
        if os.path.exists(place):
            return place
    raise _missing("dsopt.json is not next to %s: the package is not complete" % __file__)


def candidates(abi_version: int) -> List[str]:
    """Returns the paths to try, best first: only DSOPT_LIBRARY, or the package's library, then the system's."""
    chosen = os.environ.get("DSOPT_LIBRARY")
    if chosen:
        return [chosen]
    own = os.path.join(HERE, "libdsopt.so")
    return ([own] if os.path.exists(own) else []) + ["libdsopt.so.%s" % abi_version]


def _reason(place: str, error: str) -> Tuple[str, str]:
    """Returns why dlopen failed and what to do about it, from the text of dlerror. Empty if `place` does not exist."""
    missing = re.match(r"(?P<name>[^:]+): cannot open shared object file: No such file", error)
    if missing:
        name = missing.group("name")
        if name == place:
            return error, ""
        return (
            "%s was found, but %s, which it needs, was not" % (place, name),
            "Install the package that has %s, or add the folder of %s to LD_LIBRARY_PATH" % (name, name),
        )
    version = re.match(r"[^:]+: version `(?P<version>[^']+)' not found \(required by ", error)
    if version:
        return (
            "%s was found, but this system has no %s: %s" % (place, version.group("version"), error),
            "It was built on a newer system: install a wheel of dsopt, or build dsopt on this system",
        )
    return error, "%s is no library of dsopt that this system can load" % place if os.path.exists(place) else ""


def load(description: Dict[str, Any], known: Dict[str, Any]) -> Tuple[Any, str]:
    """Returns the library and its path. Raises MissingError with every path that was tried."""
    problems: List[str] = []
    advice: List[str] = []
    for place in candidates(description["abi_version"]):
        try:
            library = ctypes.CDLL(place)
            version = library.dsopt_abi_version()
            if version == description["abi_version"]:
                return bind(library, description, known), place
            problems.append(
                "%s has ABI version %d, and this package needs %d" % (place, version, description["abi_version"])
            )
        except AttributeError as problem:  # it lacks a function
            problems.append(str(problem))
        except OSError as problem:
            for text, texts in zip(_reason(place, str(problem)), (problems, advice)):
                if text:
                    texts.append(text)
    if not advice:
        advice = ["Set DSOPT_LIBRARY to the path of libdsopt.so"]
    raise _missing("libdsopt could not be loaded: %s. %s" % ("; ".join(problems), ". ".join(advice)))


if sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
    raise _missing("dsopt needs a 64-bit little-endian system")
description_path = find_description()
with open(description_path, encoding="utf-8") as _file:
    description: Dict[str, Any] = json.load(_file)
_known, _named = types(description)
globals().update(_named)
lib, path = load(description, _known)

# Exceptions of hooks in a running call, by thread. An exception cannot pass through C, so the hook stores it here and
# reports failure, and `check` raises it after the call.
raised: Dict[int, BaseException] = {}


def __getattr__(name: str) -> Any:  # for type checkers too: the names above are created at run time
    raise AttributeError("dsopt.h has no %r (version %s)" % (name, description["version"]))


def last_error(status: int, prefix: str = "") -> Exception:
    """Returns the exception for a status that the last call of this thread returned."""
    text = lib.dsopt_last_error().decode("utf-8", "replace")
    return error_of(status, lib.dsopt_status_name(status).decode(), prefix + text)


def check(status: int, prefix: str = "") -> None:
    """Raises the reason if the thread's last call failed: the exception of a hook, else the library's text."""
    if status or raised:
        kept: Optional[BaseException] = raised.pop(threading.get_ident(), None)
        if kept is None:
            if status:
                raise last_error(status, prefix)
        elif status:
            raise kept from last_error(status, prefix)
        else:
            raise kept
