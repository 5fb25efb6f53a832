#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes include/dsopt.json and include/dsopt_dl.h: what include/dsopt.h declares, for programs that cannot read C.
dsopt.json also has the options that the library refuses (options.py).

usage: abi.py [--check]      --check: writes nothing, and fails if a file is not what would be written

docs/generators.md describes both files. The parser accepts only the subset of C that dsopt.h uses, so no declaration is
omitted. Layout is that of LP64.
"""
import json
import os
import re
import sys
import textwrap

import options

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "include")
SIZES = {"char": 1, "int": 4, "int32_t": 4, "float": 4, "int64_t": 8, "uint64_t": 8, "size_t": 8, "double": 8}
POINTER = 8
# Conditions of a C compiler. The values of the visibility macros do not matter.
CONDITIONS = {"ifndef DSOPT_H": True, "ifdef __cplusplus": False, "if defined(__GNUC__)": True}
MACROS = r"define DSOPT_(H|API|CHECK|NEW)\b.*"


def preprocess(text):
    """Returns the tokens of the declarations, and the macros that are numbers."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S).replace("\\\n", " ")
    kept, numbers, taken = [], {}, []
    for line in text.splitlines():
        directive = re.fullmatch(r"\s*#\s*(.*?)\s*", line)
        words = directive and re.sub(r"\s+", " ", directive.group(1))
        number = words and re.fullmatch(r"define (DSOPT_\w+) (\d+)", words)
        if words is None:
            kept += [line] if all(taken) else []
        elif words in CONDITIONS:
            taken.append(CONDITIONS[words])
        elif words == "else":
            taken[-1] = not taken[-1]
        elif words == "endif":
            taken.pop()
        elif number:
            numbers[number.group(1)] = int(number.group(2))
        elif not re.match(MACROS + "|include ", words):
            raise SyntaxError("unknown directive: #" + words)
    return re.findall(r"\w+|[^\s\w]", "\n".join(kept)), numbers


class Parser:
    def __init__(self, text):
        self.tokens, self.constants = preprocess(text)
        self.at = 0
        self.functions, self.structs, self.enums, self.typedefs, self.callbacks, self.opaque = ([] for _ in range(6))
        self.layouts = {name: (size, size) for name, size in SIZES.items()}  # size and alignment
        while self.at < len(self.tokens):
            self.declaration()

    # ----------------------------------------------------------------------------------------------------- tokens
    def accept(self, token):
        found = self.at < len(self.tokens) and self.tokens[self.at] == token
        self.at += found
        return found

    def expect(self, *tokens):
        for token in tokens:
            if not self.accept(token):
                raise SyntaxError("expected %s before: %s" % (token, " ".join(self.tokens[self.at:self.at + 12])))

    def word(self, pattern=r"[A-Za-z_]\w*"):
        self.at += 1
        if self.at > len(self.tokens) or not re.fullmatch(pattern, self.tokens[self.at - 1]):
            raise SyntaxError("unexpected: " + " ".join(self.tokens[self.at - 1:self.at + 11]))
        return self.tokens[self.at - 1]

    def integer(self):
        sign = -1 if self.accept("-") else 1
        return sign * int(self.word(r"0|[1-9]\d*"))

    # ----------------------------------------------------------------------------------------------- declarations
    def declaration(self):
        if self.accept("typedef"):
            if self.accept("struct"):
                self.struct()
            else:
                self.typedef()
        elif self.accept("enum"):
            self.enum()
        else:
            self.function()
        self.expect(";")

    def struct(self):
        name = self.word()
        if not self.accept("{"):
            self.expect(name)
            self.opaque.append(name)
            return
        fields, size, strictest = [], 0, 1
        while not self.accept("}"):
            base = self.base()
            while True:
                field = self.declarator(base)
                field_size, alignment = self.layout(field["type"])
                field_size *= field.get("count", 1)
                offset = (size + alignment - 1) // alignment * alignment
                size, strictest = offset + field_size, max(strictest, alignment)
                signature = field.pop("signature", None)
                field.update(offset=offset, size=field_size)
                fields.append(dict(field, signature=signature) if signature else field)
                if not self.accept(","):
                    break
            self.expect(";")
        self.expect(name)
        size = (size + strictest - 1) // strictest * strictest
        self.layouts[name] = size, strictest
        self.structs.append({"name": name, "size": size, "fields": fields})

    def typedef(self):
        new = self.declarator(self.base())
        self.layouts[new["name"]] = self.layout(new["type"])
        if "signature" in new:
            self.callbacks.append(dict(name=new["name"], **new["signature"]))
        else:
            self.typedefs.append(new)

    def enum(self):
        name, constants = self.word(), []
        self.expect("{")
        while not self.accept("}"):
            constant = self.word()
            self.expect("=")
            value = self.integer()
            if constant.endswith("_SIGNED"):  # only makes the type signed
                if value != -1:
                    raise SyntaxError("%s is not -1" % constant)
            else:
                constants.append({"name": constant, "value": value})
                if self.constants.setdefault(constant, value) != value:
                    raise SyntaxError("%s has two values" % constant)
            if not self.accept(","):
                self.expect("}")
                break
        self.enums.append({"name": name, "type": "int32_t", "constants": constants})

    def function(self):
        self.expect("DSOPT_API")
        self.accept("DSOPT_CHECK")
        result = self.base() + self.stars()
        self.functions.append({"name": self.word(), "result": result, "arguments": self.arguments()})

    # ------------------------------------------------------------------------------------------------------ types
    def base(self):
        const = "const " if self.accept("const") else ""
        name = self.word()
        if name not in self.layouts and name not in self.opaque and name != "void":
            raise SyntaxError("unknown type: " + name)
        return const + name

    def stars(self):
        text = ""
        while self.accept("*"):
            text += ("" if text.endswith("*") else " ") + ("*const" if self.accept("const") else "*")
        return text

    def declarator(self, base):
        """Returns name and type; for an array also `count`, for a pointer to a function also `signature`."""
        base += self.stars()
        if self.accept("("):
            self.expect("*")
            name = self.word()
            self.expect(")")
            signature = {"result": base, "arguments": self.arguments()}
            kinds = ", ".join(argument["type"] for argument in signature["arguments"]) or "void"
            kind = "%s%s(*)(%s)" % (base, "" if base.endswith("*") else " ", kinds)
            return {"name": name, "type": kind, "signature": signature}
        new = {"name": self.word(), "type": base}
        if self.accept("["):
            new["count"] = self.integer()
            self.expect("]")
        return new

    def arguments(self):
        self.expect("(")
        if self.tokens[self.at:self.at + 2] == ["void", ")"]:
            self.at += 2
            return []
        found = [self.declarator(self.base())]
        while self.accept(","):
            found.append(self.declarator(self.base()))
        self.expect(")")
        if any("count" in argument for argument in found):
            raise SyntaxError("an array as an argument")
        return found

    def layout(self, kind):
        if kind.endswith(("*", ")", "*const")):
            return POINTER, POINTER
        return self.layouts[kind.replace("const ", "")]


def describe(header):
    """Returns the contents of dsopt.json."""
    found = Parser(header)
    version = ".".join(str(found.constants["DSOPT_VERSION_" + part]) for part in ("MAJOR", "MINOR", "PATCH"))
    return {"version": version, "abi_version": found.constants["DSOPT_ABI_VERSION"], "functions": found.functions,
            "structs": found.structs, "enums": found.enums, "constants": found.constants, "typedefs": found.typedefs,
            "callbacks": found.callbacks, "opaque": found.opaque, "options": options.description()}


def json_text(abi):
    """Returns JSON with one field, argument or constant per line, so that its diffs are as small as the header's."""
    def block(opening, rows, closing, depth):
        pad = " " * depth
        return opening + "\n" + ",\n".join(pad + " " + row for row in rows) + "\n" + pad + closing

    def entry(value):  # scalars are on the first line; a list, if there is one, is last
        members = ["%s: %s" % (json.dumps(key), json.dumps(member)) for key, member in value.items()]
        last = list(value)[-1]
        if not isinstance(value[last], list):
            return "{" + ", ".join(members) + "}"
        rows = [json.dumps(row) for row in value[last]]
        members[-1] = "%s: %s" % (json.dumps(last), block("[", rows, "]", 2) if rows else "[]")
        return "{" + ", ".join(members) + "}"

    parts = []
    for key, value in abi.items():
        if isinstance(value, dict):
            text = block("{", ["%s: %d" % (json.dumps(name), number) for name, number in value.items()], "}", 1)
        elif isinstance(value, list):
            text = block("[", [json.dumps(row) if isinstance(row, str) else entry(row) for row in value], "]", 1)
        else:
            text = json.dumps(value)
        parts.append("%s: %s" % (json.dumps(key), text))
    return block("{", parts, "}", 0) + "\n"


DL = """\
/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DSOPT_DL_H
#define DSOPT_DL_H
/**
 * dsopt for programs that are not linked to it: opens the shared library at run time, and has a typed pointer to each
 * function of dsopt.h under the function's name.
 *
 *     dsopt_dl dl;
 *     const char *problem = dsopt_dl_load(&dl, NULL);
 *     if (problem) { fprintf(stderr, "no dsopt: %s\\n", problem); return 1; }
 *     dsopt_context *ctx;
 *     if (dl.dsopt_context_create(NULL, &ctx) != DSOPT_OK) fprintf(stderr, "%s\\n", dl.dsopt_last_error());
 *
 * Everything here is static; link with -ldl where dlopen is in libdl. C99 and C++11, systems with dlfcn.h.
 * Generated by scripts/generate/abi.py from dsopt.h: do not edit. Since: 0.2
 */
#include "dsopt.h"
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * The functions of a loaded library, documented in dsopt.h. After dsopt_dl_load the struct is constant, and may be
 * copied: all copies are valid until one of them is unloaded.
 */
typedef struct dsopt_dl {
    /** Result of dlopen; NULL = nothing is loaded. */
    void *library;
@members@
} dsopt_dl;

/**
 * Close the library. No call into it may be running or made later. The library itself stays in memory until the
 * process ends, so threads and handles that it made stay valid.
 * @param[in,out] dl  every byte becomes zero. If nothing is loaded, nothing else happens.
 * Thread-safety: one thread per struct.
 */
static inline void dsopt_dl_unload(dsopt_dl *dl) {
    if (dl->library) (void)dlclose(dl->library);
    memset(dl, 0, sizeof *dl);
}

/**
 * Open the shared library, look up every function of this header, and check that header and library are compatible.
 * @param[out] dl    release with dsopt_dl_unload. On failure every byte is zero and the library is closed again.
 * @param[in]  path  as for dlopen. NULL = "@soname@", where the system looks for libraries.
 * @return NULL, or an error text: dlopen's, the name of the first function that the library lacks, or another
 * DSOPT_ABI_VERSION. The text is valid until the thread's next call of a dl function. Thread-safety: one thread per
 * struct.
 */
DSOPT_CHECK static inline const char *dsopt_dl_load(dsopt_dl *dl, const char *path) {
    /* The version is first: a library with another ABI version may lack any function. */
    static const struct {
        const char *problem;
        size_t offset;
    } functions[] = {
@rows@
    };
    const size_t name = sizeof "the library has no " - 1;
    const char *problem = NULL;
    size_t i;
    memset(dl, 0, sizeof *dl);
    dl->library = dlopen(path ? path : "@soname@", RTLD_NOW | RTLD_LOCAL);
    if (!dl->library) {
        problem = dlerror();
        return problem ? problem : "dlopen failed";
    }
    for (i = 0; i < sizeof functions / sizeof *functions && !problem; ++i) {
        void *found = dlsym(dl->library, functions[i].problem + name);
        /* Copied, because C cannot cast a data pointer to a function pointer. */
        memcpy((char *)dl + functions[i].offset, &found, sizeof found);
        if (!found)
            problem = functions[i].problem;
        else if (i == 0 && dl->dsopt_abi_version() != DSOPT_ABI_VERSION)
            problem = "the library has another DSOPT_ABI_VERSION than dsopt.h";
    }
    if (problem) dsopt_dl_unload(dl);
    return problem;
}

#ifdef __cplusplus
}
#endif
#endif
"""


def dl_text(abi):
    members, rows = [], []
    for function in abi["functions"]:
        name, result = function["name"], function["result"]
        check = "DSOPT_CHECK " if result == "dsopt_status" else ""
        head = "    %s%s%s(*%s)(" % (check, result, "" if result.endswith("*") else " ", name)
        arguments = ["%s%s%s" % (argument["type"], "" if argument["type"].endswith("*") else " ", argument["name"])
                     for argument in function["arguments"]] or ["void"]
        # Wraps as clang-format does: lines are aligned with the first argument, and arguments are not broken.
        text = ", ".join(argument.replace(" ", "\0") for argument in arguments) + ");"
        lines = textwrap.wrap(text, 120, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
        members += [line.replace("\0", " ") for line in lines]
    names = [function["name"] for function in abi["functions"]]
    for name in sorted(names, key=lambda name: name != "dsopt_abi_version"):
        row = '        {"the library has no %s", offsetof(dsopt_dl, %s)},' % (name, name)
        rows.append(row if len(row) <= 120 else row.replace(", offsetof", ",\n         offsetof"))
    text = DL.replace("@members@", "\n".join(members)).replace("@rows@", "\n".join(rows))
    return text.replace("@soname@", "libdsopt.so.%d" % abi["abi_version"])


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    with open(os.path.join(FOLDER, "dsopt.h"), encoding="utf-8") as file:
        abi = describe(file.read())
    stale = []
    for name, text in (("dsopt.json", json_text(abi)), ("dsopt_dl.h", dl_text(abi))):
        path = os.path.join(FOLDER, name)
        if not arguments:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        elif not os.path.exists(path) or open(path, encoding="utf-8").read() != text:
            stale.append(name)
    if stale:
        sys.exit("%s: stale. Run scripts/generate/abi.py." % ", ".join(stale))


if __name__ == "__main__":
    main(sys.argv[1:])
