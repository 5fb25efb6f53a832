# SPDX-License-Identifier: Apache-2.0
"""The library and what dsopt.h declares, for Python: structs and constants are read from the header, so they cannot be out of date.

    lib = dsopt_abi.load("libdsopt.so")
    group = lib.dsopt_group(lr=1e-3)        # a ctypes.Structure; `size` is filled in
    lib.check(lib.dsopt_group_init(ctypes.byref(group), ...))
"""
import ctypes
import os
import re

HEADER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "include", "dsopt.h")
SCALARS = {"int": ctypes.c_int, "size_t": ctypes.c_size_t, "float": ctypes.c_float, "double": ctypes.c_double,
           "dsopt_status": ctypes.c_int, "dsopt_parallel_for": ctypes.c_void_p}
SCALARS.update({name + "_t": getattr(ctypes, "c_" + name) for name in "int32 uint32 int64 uint64".split()})


class Library(ctypes.CDLL):
    def check(self, status):
        if status:
            raise RuntimeError("status %d: %s" % (status, self.dsopt_last_error().decode()))


def type_of(text, known):
    """Of 'const float *' and the like. Pointers are addresses, strings bytes."""
    if "*" in text:
        return ctypes.c_char_p if re.fullmatch(r"const char \*", text.strip()) else ctypes.c_void_p
    return known[text.replace("const ", "").strip()]


def fields_of(body, known, constants):
    for line in filter(str.strip, body.split(";")):
        line = " ".join(line.split())
        function = re.fullmatch(r"(.*?)\(\*(\w+)\)\((.*)\)", line)
        if function:
            result, name, arguments = function.groups()
            types = [type_of(re.sub(r"\w+$", "", word.strip()), known) for word in arguments.split(",")]
            yield name, ctypes.CFUNCTYPE(None if result.strip() == "void" else type_of(result, known), *types)
            continue
        first, *more = line.split(",")
        base, star, name = re.fullmatch(r"(.*?)(\**)(\w+(?:\[\w+\])?)", first).groups()
        for name in [name] + [word.strip() for word in more]:
            name, count = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", name).groups()
            kind = type_of(base + star, known)
            yield name, kind * int(constants.get(count, count)) if count else kind


def structs(header=HEADER):
    """Structs and enumerators by name."""
    with open(header, encoding="utf-8") as file:
        text = re.sub(r"/\*.*?\*/", "", file.read(), flags=re.DOTALL)
    found = {name: int(value, 0) for name, value in re.findall(r"\b(DSOPT_\w+) = (0x[0-9a-fA-F]+|\d+)\b", text)}
    known = dict(SCALARS)
    for name, body in re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", text, flags=re.DOTALL):
        fields = list(fields_of(body, known, found))

        def init(self, *values, _own=fields[0][0] == "size", **named):
            if _own and not values:
                named.setdefault("size", ctypes.sizeof(self))
            ctypes.Structure.__init__(self, *values, **named)

        found[name] = known[name] = type(name, (ctypes.Structure,), {"_fields_": fields, "__init__": init})
    return found


def load(path, header=HEADER):
    library = Library(path)
    library.dsopt_last_error.restype = ctypes.c_char_p
    for name, value in structs(header).items():
        setattr(library, name, value)
    return library


def idle_table(library, ranks):
    """The table of rank 0 of so many; what the others would send stays as it is. To be kept as long as the comm."""
    table = library.dsopt_comm_table(ranks=ranks)
    kinds = dict(library.dsopt_comm_table._fields_)
    for name in ("all_reduce", "all_to_all", "all_gather"):
        setattr(table, name, kinds[name](lambda *_: 0))
    return table
