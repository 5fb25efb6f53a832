#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes bindings/julia/src/abi.jl, what dsopt.json describes in the words of Julia.

usage: julia_structs.py [--check]      --check: writes nothing, and fails if the file is not what would be written
"""

import json
import os
import sys
import textwrap

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
TARGET = os.path.join(ROOT, "bindings", "julia", "src", "abi.jl")
SCALARS = {
    "void": ("Cvoid", None, 0),
    "char": ("UInt8", "0", 1),
    "int": ("Int32", "0", 4),
    "int32_t": ("Int32", "0", 4),
    "int64_t": ("Int64", "0", 8),
    "uint64_t": ("UInt64", "0", 8),
    "size_t": ("UInt64", "0", 8),
    "float": ("Float32", "0", 4),
    "double": ("Float64", "0", 8),
}

HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# dsopt.h as Julia sees it. Written by scripts/generate/julia_structs.py from dsopt.json: change that.
module ABI

using Libdl

const VERSION = "@version@"
"""

FUNCTIONS = """\
# The functions of the library. Their addresses are looked up when the package is loaded: the library may lie anywhere.
# Pointers to structs take a Ref or an Array. A call keeps both alive, but not what their pointers lead to.
const ADDRESSES = fill(C_NULL, @count@)
const NAMES = @names@

function lookup(library)
    for (place, name) in enumerate(NAMES)
        ADDRESSES[place] = Libdl.dlsym(library, name)
    end
end
"""


class Types:
    def __init__(self, abi):
        self.abi = abi
        self.structs = {struct["name"]: struct for struct in abi["structs"]}
        self.callbacks = {callback["name"] for callback in abi["callbacks"]}
        self.typedefs = {new["name"]: new["type"] for new in abi["typedefs"]}

    def of(self, kind, string="Ptr{UInt8}"):
        """(type, default, size) of a C type. `string` is what text becomes."""
        if kind in self.typedefs:
            return self.of(self.typedefs[kind])
        if kind in SCALARS:
            return SCALARS[kind]
        if kind in self.structs:
            return kind, kind + "()", self.structs[kind]["size"]
        if kind in self.callbacks or "(*)" in kind:
            return "Ptr{Cvoid}", "C_NULL", 8
        if not kind.endswith(("*", "*const")):
            raise SystemExit("no Julia type for " + kind)
        if kind == "const char *":
            return string, "C_NULL", 8
        target = kind[: kind.rindex("*")].strip()
        target = target[6:] if target.startswith("const ") and not target.endswith(("*", "*const")) else target
        if target in self.abi["opaque"]:  # a handle
            return "Ptr{Cvoid}", "C_NULL", 8
        return "Ptr{%s}" % self.of(target)[0], "C_NULL", 8

    def struct(self, struct):
        fields, defaults, at = [], [], 0
        for field in struct["fields"]:
            kind, default, size = self.of(field["type"])
            if "count" in field:
                kind, default = "NTuple{%d,%s}" % (field["count"], kind), "(%s)" % ", ".join([default] * field["count"])
                size *= field["count"]
            if (at, size) != (field["offset"], field["size"]):
                raise SystemExit("%s.%s has another place in Julia" % (struct["name"], field["name"]))
            at += size
            if field is struct["fields"][0] and field["name"] == "size":
                default = str(struct["size"])
            fields.append((field["name"], kind))
            defaults.append(default)
        name = struct["name"]
        if at != struct["size"]:
            raise SystemExit("%s has another size in Julia" % name)
        rows = ["    %s::%s = %s" % (field, kind, default) for (field, kind), default in zip(fields, defaults)]
        return ["Base.@kwdef struct " + name, *rows, "end", ""]

    def function(self, function, place):
        """A ccall by the address."""
        name = function["name"]
        result = self.of(function["result"], "Cstring")[0]
        kinds = [self.of(argument["type"], "Cstring")[0] for argument in function["arguments"]]
        names = [argument["name"] for argument in function["arguments"]]
        types = "(%s)" % (", ".join(kinds) + ("," if len(kinds) == 1 else ""))
        words = ", ".join(["ADDRESSES[%d]" % place, result, types.replace(" ", "\0"), *names]) + ")"
        rows = textwrap.wrap(words, 120, initial_indent="    return ccall(", subsequent_indent=" " * 17)
        return ["function %s(%s)" % (name, ", ".join(names)), *(row.replace("\0", " ") for row in rows), "end", ""]


def text_of(abi):
    types = Types(abi)
    rows = ["const %s = Int32(%d)" % item for item in abi["constants"].items()] + [""]
    for struct in abi["structs"]:
        rows += types.struct(struct)
    names = textwrap.wrap(", ".join(":" + function["name"] for function in abi["functions"]) + ",", 116)
    names = ["(", *("    " + row for row in names), ")"]
    rows += FUNCTIONS.replace("@count@", str(len(abi["functions"]))).replace("@names@", "\n".join(names)).split("\n")
    for place, function in enumerate(abi["functions"], 1):
        rows += types.function(function, place)
    layout = ["# Name, size, and the offset of each field: the package's tests hold Julia to them.", "const LAYOUT = ("]
    for struct in abi["structs"]:
        offsets = ", ".join(str(field["offset"]) for field in struct["fields"])
        layout.append("    (%s, %d, (%s))," % (struct["name"], struct["size"], offsets))
    return HEAD.replace("@version@", abi["version"]) + "\n".join(rows + layout + [")", "", "end"]) + "\n"


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    with open(os.path.join(ROOT, "include", "dsopt.json"), encoding="utf-8") as file:
        wanted = text_of(json.load(file))
    if not arguments:
        with open(TARGET, "w", encoding="utf-8") as file:
            file.write(wanted)
        return
    with open(TARGET, encoding="utf-8") as file:
        if file.read() != wanted:
            sys.exit("bindings/julia/src/abi.jl is not what scripts/generate/julia_structs.py writes: run it")


if __name__ == "__main__":
    main(sys.argv[1:])
