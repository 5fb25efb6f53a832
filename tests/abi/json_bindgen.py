#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""json_bindgen.py dsopt.json INCLUDE-DIR: checks that bindgen's output for dsopt.h agrees with dsopt.json.

Names and types are read from the output. Sizes, offsets and values are asserted in Rust, in addition to bindgen's own
tests.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

SCALARS = {"int32_t": "i32", "int64_t": "i64", "uint64_t": "u64", "size_t": "usize", "float": "f32", "double": "f64"}
DESCRIPTION, INCLUDE = sys.argv[1:]
for tool in ("bindgen", "rustc", "rustfmt"):  # bindgen formats with rustfmt
    if not shutil.which(tool):
        print("bindgen: skipped, %s is not installed" % tool)
        sys.exit(77)
with open(DESCRIPTION, encoding="utf-8") as file:
    abi = json.load(file)

# The command line that a user of bindgen would write.
command = ["bindgen", os.path.join(INCLUDE, "dsopt.h"), "--allowlist-file", ".*/dsopt.h", "--no-prepend-enum-name",
           "--size_t-is-usize", "--default-macro-constant-type", "signed"]
# Clang's own headers, such as stddef.h, are in another package than its library, and those of the C compiler will do.
headers = subprocess.run(["cc", "-print-file-name=include"], stdout=subprocess.PIPE, text=True, check=True).stdout
extra = os.environ.get("BINDGEN_EXTRA_CLANG_ARGS", "") + " -idirafter " + headers.strip()
rust = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True,
                      env={**os.environ, "BINDGEN_EXTRA_CLANG_ARGS": extra.strip()}).stdout


def expect(got, wanted, what):
    if sorted(got) != sorted(wanted):
        sys.exit("%s: bindgen has %s in addition and lacks %s" % (what, set(got) - set(wanted), set(wanted) - set(got)))


def rust_name(field):
    return {"self": "self_"}.get(field["name"], field["name"])  # a Rust keyword


if "_bindgen_ty_" in rust:
    sys.exit("bindgen: an enum has no name")
aliases = dict(re.findall(r"pub type (dsopt_\w+) = ([^;]*);", rust))
for enum in abi["enums"]:
    if aliases.get(enum["name"]) != "::std::os::raw::c_int":
        sys.exit("%s: bindgen makes it %s" % (enum["name"], aliases.get(enum["name"])))
expect(aliases, [new["name"] for kind in ("enums", "typedefs", "callbacks") for new in abi[kind]], "types")
bodies = dict(re.findall(r"pub struct (dsopt_\w+) \{(.*?)\n\}", rust, flags=re.S))
expect(bodies, abi["opaque"] + [struct["name"] for struct in abi["structs"]], "structs")
for struct in abi["structs"]:
    have = re.findall(r"^    pub (\w+):", bodies[struct["name"]], flags=re.M)
    expect(have, [rust_name(field) for field in struct["fields"]], struct["name"])
expect(re.findall(r"pub fn (dsopt_\w+)\s*\(", rust), [function["name"] for function in abi["functions"]], "functions")
constants = re.findall(r"pub const (DSOPT_\w+):", rust)
expect([name for name in constants if not name.endswith("_SIGNED") and name != "DSOPT_H"], abi["constants"],
       "constants")

lines = ["", "#[test]", "fn as_in_dsopt_json() {"]
for struct in abi["structs"]:
    name = struct["name"]
    lines += ["    assert_eq!(::std::mem::size_of::<%s>(), %d);" % (name, struct["size"]),
              "    let memory = ::std::mem::MaybeUninit::<%s>::zeroed();" % name, "    let whole = memory.as_ptr();"]
    for field in struct["fields"]:
        expression = "unsafe { ::std::ptr::addr_of!((*whole).%s) }" % rust_name(field)
        lines += ["    let address = %s;" % expression,
                  "    assert_eq!(address as usize - whole as usize, %d);" % field["offset"],
                  "    assert_eq!(::std::mem::size_of_val(unsafe { &*address }), %d);" % field["size"]]
        if field["type"] in SCALARS:
            kind = SCALARS[field["type"]]
            lines.append("    let _: *const %s = address;" %
                         ("[%s; %d]" % (kind, field["count"]) if "count" in field else kind))
lines += ["    let value: i32 = %s; assert_eq!(value, %d);" % item for item in abi["constants"].items()] + ["}", ""]
with tempfile.TemporaryDirectory() as folder:
    source, program = os.path.join(folder, "dsopt.rs"), os.path.join(folder, "tests")
    with open(source, "w", encoding="utf-8") as file:
        file.write("#![allow(non_camel_case_types, non_snake_case, dead_code)]\n" + rust + "\n".join(lines))
    for command in (["rustc", "--test", "-C", "linker=cc", source, "-o", program], [program]):
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode:
            sys.exit(result.stdout)
passed = int(re.search(r"(\d+) passed", result.stdout).group(1))
if passed < len(abi["structs"]) + 1:
    sys.exit("bindgen: only %d tests" % passed)
print("%d structs, %d functions, %d constants; %d tests in Rust"
      % (len(abi["structs"]), len(abi["functions"]), len(abi["constants"]), passed))
