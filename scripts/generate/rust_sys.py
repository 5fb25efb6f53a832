#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What include/dsopt.json describes, for Rust: writes bindings.rs and the test of layouts in bindings/rust/dsopt-sys.

usage: rust_sys.py [--check]      --check: writes nothing, and fails if a file is not what would be written
"""
import json
import os
import re
import sys

TOP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CRATE = os.path.join(TOP, "bindings", "rust", "dsopt-sys")
HEAD = "// SPDX-License-Identifier: Apache-2.0\n" \
    "// Written by scripts/generate/rust_sys.py from include/dsopt.json: change that.\n"
SCALARS = {"void": "c_void", "char": "c_char", "int": "c_int", "int32_t": "i32", "int64_t": "i64", "uint64_t": "u64",
           "size_t": "usize", "float": "f32", "double": "f64"}
RESERVED = {"self": "self_", "type": "type_"}


def type_of(entry):
    """Of a field or an argument."""
    if "signature" in entry:
        return "Option<%s>" % function_type(entry["signature"])
    rust = plain_type(entry["type"])
    return "[%s; %d]" % (rust, entry["count"]) if "count" in entry else rust


def plain_type(c):
    """Of C as dsopt.json writes it: a base type and pointers, outermost last."""
    words = re.findall(r"\w+|\*", c)
    constant = words[0] == "const"
    words = words[constant:]
    rust = SCALARS.get(words[0], words[0])
    for word in words[1:]:
        if word == "const":
            constant = True
        elif word == "*":
            rust = "*%s %s" % ("const" if constant else "mut", rust)
            constant = False
        else:
            raise ValueError("unknown type: " + c)
    return rust


def arguments(entry):
    return ", ".join("%s: %s" % (RESERVED.get(each["name"], each["name"]), type_of(each))
                     for each in entry["arguments"])


def returns(entry):
    return "" if entry["result"] == "void" else " -> " + plain_type(entry["result"])


def function_type(entry):
    return 'unsafe extern "C" fn(%s)%s' % (arguments(entry), returns(entry))


def wrapped(text, indent, opening="("):
    """`text` in lines of at most 100 columns: the arguments behind the last `opening` a line each, as rustfmt does."""
    if len(text) <= 100:
        return text
    at = text.index(opening) + len(opening)
    depth, end = 1, at
    pieces, begin = [], at
    while depth:
        depth += text[end] in "([<"
        depth -= text[end] in ")]>" and text[end - 1] != "-"
        if text[end] == "," and depth == 1:
            pieces.append(text[begin:end].strip())
            begin = end + 1
        end += 1
    pieces.append(text[begin:end - 1].strip())
    inner = "".join("%s    %s,\n" % (indent, piece) for piece in pieces)
    return "%s\n%s%s%s" % (text[:at], inner, indent, text[end - 1:])


def constant(name, value):
    return "pub const %s: i32 = %d;\n" % (name, value)


def bindings(abi):
    out = [HEAD, "use std::os::raw::{c_char, c_int, c_void};\n\n"]
    of_enums = {each["name"] for enum in abi["enums"] for each in enum["constants"]}
    out += [constant(name, value) for name, value in abi["constants"].items() if name not in of_enums]
    for enum in abi["enums"]:
        out.append("\n// enum %s\n" % enum["name"])
        out += [constant(each["name"], each["value"]) for each in enum["constants"]]
    out.append("\n")
    for new in abi["typedefs"]:
        out.append("pub type %s = %s;\n" % (new["name"], plain_type(new["type"])))
    for new in abi["callbacks"]:
        out.append("pub type %s = Option<\n    %s,\n>;\n" % (
            new["name"], wrapped(function_type(new), "    ", "fn(")))
    for name in abi["opaque"]:
        out.append("\n/// A handle: only pointers to it exist.\n#[repr(C)]\npub struct %s {\n    _data: [u8; 0],\n"
                   "    _marker: Opaque,\n}\n" % name)
    out.append("\ntype Opaque = std::marker::PhantomData<(*mut u8, std::marker::PhantomPinned)>;\n")
    for struct in abi["structs"]:
        out.append("\n#[repr(C)]\n#[derive(Clone, Copy, Debug)]\npub struct %s {\n" % struct["name"])
        for field in struct["fields"]:
            name = RESERVED.get(field["name"], field["name"])
            line = "    pub %s: %s," % (name, type_of(field))
            if len(line) > 100:
                kind = wrapped(type_of(field)[7:-1], "        ", "fn(")
                line = "    pub %s: Option<\n        %s,\n    >," % (name, kind)
            out.append(line + "\n")
        out.append("}\nconst _: () = assert!(std::mem::size_of::<%s>() == %d);\n" % (struct["name"], struct["size"]))
    out.append("\n#[cfg(not(feature = \"dlopen\"))]\nextern \"C\" {\n")
    for function in abi["functions"]:
        out.append("    " + wrapped("pub fn %s(%s)%s;" % (function["name"], arguments(function), returns(function)),
                                    "    ") + "\n")
    out.append("}\n\n#[cfg(feature = \"dlopen\")]\ncrate::dl::functions! {\n")
    for function in abi["functions"]:
        out.append("    " + wrapped("fn %s(%s)%s;" % (function["name"], arguments(function), returns(function)),
                                    "    ") + "\n")
    out.append("}\n")
    return "".join(out)


def layout(abi):
    out = [HEAD, """//! Size and offset of every field, and every constant, as in dsopt.json. Tests of the header
//! compare that with C.
use dsopt_sys::*;
use std::mem::{size_of, size_of_val, MaybeUninit};
use std::ptr::addr_of;

/// Offset and size of a field. `offset_of!` came later than Rust 1.63.
macro_rules! field {
    ($kind:ty, $field:ident) => {{
        let whole = MaybeUninit::<$kind>::zeroed();
        let base = whole.as_ptr();
        // SAFETY: `base` points to a whole struct, for which zeros are a value: numbers and pointers that may be NULL.
        let (part, size) = unsafe { (addr_of!((*base).$field) as usize, size_of_val(&(*base).$field)) };
        (part - base as usize, size)
    }};
}

#[test]
fn abi_version_is_that_of_the_library() {
    // SAFETY: the function has no preconditions.
    assert_eq!(unsafe { dsopt_abi_version() }, DSOPT_ABI_VERSION);
}
"""]
    for struct in abi["structs"]:
        out.append("\n#[test]\nfn layout_of_%s() {\n    assert_eq!(size_of::<%s>(), %d);\n" % (
            struct["name"][len("dsopt_"):], struct["name"], struct["size"]))
        for field in struct["fields"]:
            name = RESERVED.get(field["name"], field["name"])
            out.append("    assert_eq!(field!(%s, %s), (%d, %d));\n" % (
                struct["name"], name, field["offset"], field["size"]))
        out.append("}\n")
    out.append("\n#[test]\nfn constants() {\n")
    for name, value in abi["constants"].items():
        out.append("    assert_eq!(%s, %d);\n" % (name, value))
    out.append("}\n")
    return "".join(out)


def main():
    with open(os.path.join(TOP, "include", "dsopt.json"), encoding="utf-8") as file:
        abi = json.load(file)
    files = {os.path.join("src", "bindings.rs"): bindings(abi), os.path.join("tests", "layout.rs"): layout(abi)}
    wrong = []
    for name, text in files.items():
        path = os.path.join(CRATE, name)
        if sys.argv[1:] != ["--check"]:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            continue
        with open(path, encoding="utf-8") as file:
            if file.read() != text:
                wrong.append(name)
    if wrong:
        sys.exit("%s: not what include/dsopt.json gives: run scripts/generate/rust_sys.py" % ", ".join(wrong))


if __name__ == "__main__":
    main()
