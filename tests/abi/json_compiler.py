#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares dsopt.json with a compiler's view of dsopt.h, in both directions.

usage: json_compiler.py dsopt.json INCLUDE-DIR STANDARD COMPILER...

A program generated from dsopt.json asserts every size, offset, type, value and signature. The list of names that
dsopt.json must contain comes from the preprocessor. A missing field would leave a gap, which is detected because no
struct has padding (test header-*). At the end the same checks must reject each of a list of wrong descriptions.
"""
import copy
import json
import re
import subprocess
import sys

DESCRIPTION, INCLUDE, STANDARD, *COMPILER = sys.argv[1:]
COMPILER += ["-x", "c++" if STANDARD.startswith("c++") else "c", "-std=" + STANDARD, "-I" + INCLUDE, "-Wall", "-Wextra",
             "-Werror", "-Wno-unused-function"]


def compiler(source, *options):
    return subprocess.run(COMPILER + [*options, "-"], input=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)


def kinds(arguments):
    return ", ".join(argument["type"] for argument in arguments) or "void"


def program(abi):
    lines = ['#include "dsopt.h"', "#include <stddef.h>", "#ifdef __cplusplus", "#define ASSERT static_assert",
             'extern "C" {', "#else", "#define ASSERT _Static_assert", "#endif",
             "#define CHECK(...) ASSERT((__VA_ARGS__), #__VA_ARGS__)"]

    def check(condition):
        lines.append("CHECK(%s);" % condition)

    for struct in abi["structs"]:
        name = struct["name"]
        check("sizeof(%s) == %d" % (name, struct["size"]))
        for field in struct["fields"]:
            check("offsetof(%s, %s) == %d" % (name, field["name"], field["offset"]))
            check("sizeof(((%s *)0)->%s) == %d" % (name, field["name"], field["size"]))
            array = "(*pointer)[%d]" % field["count"] if "count" in field else "*pointer"
            lines.append("static void %s_%s(%s *in) { __typeof__(%s) %s = &in->%s; (void)pointer; }"
                         % (name, field["name"], name, field["type"], array, field["name"]))
            if "signature" in field:
                signature = field["signature"]
                lines.append("static void %s_%s_call(%s *in) { %s (*pointer)(%s) = in->%s; (void)pointer; }" % (
                    name, field["name"], name, signature["result"], kinds(signature["arguments"]), field["name"]))
    for enum in abi["enums"]:
        check("sizeof(enum %s) == 4 && (enum %s)-1 < 0" % (enum["name"], enum["name"]))
        for constant in enum["constants"]:  # in C++ an enum can only be initialized with its own constants
            check("%s == %d" % (constant["name"], constant["value"]))
            lines.append("static const enum %s check_%s = %s;" % (enum["name"], constant["name"], constant["name"]))
            lines.append("static void use_%s(void) { (void)check_%s; }" % (constant["name"], constant["name"]))
    for name, value in abi["constants"].items():
        check("%s == %d" % (name, value))
    # Repeating a declaration is legal if it is identical.
    for new in abi["typedefs"]:
        lines.append("typedef %s %s;" % (new["type"], new["name"]))
    for callback in abi["callbacks"]:
        lines.append("typedef %s (*%s)(%s);" % (callback["result"], callback["name"], kinds(callback["arguments"])))
    for name in abi["opaque"]:
        lines.append("typedef struct %s %s;" % (name, name))
    for function in abi["functions"]:
        lines.append("%s %s(%s);" % (function["result"], function["name"], kinds(function["arguments"])))
    return "\n".join(lines + ["#ifdef __cplusplus", "}", "#endif", ""])


def header():
    """Returns the names in dsopt.h by kind."""
    include = '#include "dsopt.h"\n'
    text, macros = (compiler(include, *options).stdout for options in (("-E", "-P"), ("-E", "-dM")))
    text = re.sub(r"\s+", " ", text)
    constants = (re.findall(r"\b(DSOPT_\w+) = -?\d", text) +
                 re.findall(r"^#define (DSOPT_\w+) [-(\d]", macros, flags=re.M))
    return {"structs": re.findall(r"\bstruct (dsopt_\w+) \{", text),
            "enums": re.findall(r"\benum (dsopt_\w+) \{", text),
            "opaque": re.findall(r"\btypedef struct (dsopt_\w+) \1 ?;", text),
            "typedefs": re.findall(r"\btypedef (?!struct)[\w ]+\b(dsopt_\w+) ?;", text),
            "callbacks": re.findall(r"\btypedef [\w *]+\(\*(dsopt_\w+)\)", text),
            "functions": re.findall(r'visibility\("default"\).*?\b(dsopt_\w+) ?\(', text),
            "constants": [name for name in constants if not name.endswith("_SIGNED")]}


def problems(abi):
    for kind, want in header().items():
        have = abi[kind] if kind in ("constants", "opaque") else [entry["name"] for entry in abi[kind]]
        for name in sorted(set(want) ^ set(have)):
            yield "%s: %s" % (name, "missing" if name in want else "not in the header")
        if not want or len(have) != len(set(have)):
            yield "%s: none, or a duplicate" % kind
    listed = {constant["name"] for enum in abi["enums"] for constant in enum["constants"]}
    for name in sorted(set(abi["constants"]) - listed):
        if not re.fullmatch(r"DSOPT_(VERSION_(MAJOR|MINOR|PATCH)|ABI_VERSION)", name):
            yield "%s: in no enum" % name
    for struct in abi["structs"]:
        end = 0
        for field in struct["fields"] + [{"name": "(end)", "offset": struct["size"], "size": 0}]:
            if field["offset"] != end:
                yield "%s: %s begins at %d, the field before it ends at %d" % (struct["name"], field["name"],
                                                                               field["offset"], end)
            end = field["offset"] + field["size"]
    result = compiler(program(abi), "-fsyntax-only")
    if result.returncode:
        yield result.stderr


def named(entries, name):
    return next(entry for entry in entries if entry["name"] == name)


def altered(abi):
    """Yields descriptions with one error each."""
    def alter(change):
        wrong = copy.deepcopy(abi)
        change(wrong)
        return wrong

    def step(wrong):
        return named(wrong["structs"], "dsopt_step")["fields"]

    def save(wrong):
        return named(wrong["functions"], "dsopt_optimizer_save")["arguments"]

    yield "a missing struct", alter(lambda wrong: wrong["structs"].pop())
    yield "a missing field", alter(lambda wrong: step(wrong).pop(3))
    yield "a missing last field", alter(lambda wrong: step(wrong).pop())
    yield "a wrong size", alter(lambda wrong: wrong["structs"][0].update(size=32))
    yield "two fields exchanged", alter(lambda wrong: step(wrong)[1].update(name="params")
                                        or step(wrong)[3].update(name="grads"))
    yield "a wrong type of the same size", alter(lambda wrong: named(step(wrong), "count").update(type="uint64_t"))
    yield "a missing const", alter(lambda wrong: named(step(wrong), "grads").update(type="dsopt_tensor *"))
    yield ("a missing array",
           alter(lambda wrong: named(named(wrong["structs"], "dsopt_report")["fields"], "ms").pop("count")))
    yield "a wrong signature", alter(lambda wrong: named(named(wrong["structs"], "dsopt_comm_table")["fields"],
                                                         "error")[
        "signature"]["arguments"].pop())
    yield "a missing function", alter(lambda wrong: wrong["functions"].pop(4))
    yield "a missing argument", alter(lambda wrong: save(wrong).pop())
    yield "a wrong result", alter(lambda wrong: named(wrong["functions"], "dsopt_version").update(result="int64_t"))
    yield "a missing constant", alter(lambda wrong: wrong["constants"].pop("DSOPT_MS_PHASES"))
    yield "a wrong value", alter(lambda wrong: wrong["constants"].update(DSOPT_ALL_GROUPS=0))
    yield "a wrong value in its enum", alter(lambda wrong: wrong["enums"][1]["constants"][2].update(value=9))
    yield "a missing enum", alter(lambda wrong: wrong["enums"].pop())
    yield "a missing handle", alter(lambda wrong: wrong["opaque"].pop())
    yield "a wrong callback", alter(lambda wrong: wrong["callbacks"][0]["arguments"].pop())
    yield "a wrong typedef", alter(lambda wrong: wrong["typedefs"][0].update(type="int64_t"))


def main():
    with open(DESCRIPTION, encoding="utf-8") as file:
        abi = json.load(file)
    found = list(problems(abi))
    if found:
        sys.exit("\n".join(found))
    count = 0
    for count, (name, wrong) in enumerate(altered(abi), 1):
        if not any(problems(wrong)):
            sys.exit("not detected: " + name)
    print("%d structs, %d functions, %d constants; %d wrong descriptions rejected"
          % (len(abi["structs"]), len(abi["functions"]), len(abi["constants"]), count))


if __name__ == "__main__":
    main()
