#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the requirements and the contents of a wheel.

usage: wheel_check.py [--largest BYTES] GLIBC ROOT WHEEL ARCHITECTURE...

The libraries of the wheel must need only the C library, no symbol of it later than GLIBC, and no symbol without a
version. They must export only functions of dsopt. ROOT is the source tree: the wheel must have its licences, a bill of
materials, the headers and the description. Its libdsopt.so must have every kernel for each ARCHITECTURE (sm_90, or
compute_90 for PTX) and for no other one. Needs readelf, and NVIDIA's cuobjdump. Prints `name: reason` for each check
that fails, then `N passed, N failed`.
"""
import argparse
import collections
import email
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--largest", type=int, metavar="BYTES")
PARSER.add_argument("glibc")
PARSER.add_argument("root")
PARSER.add_argument("wheel")
PARSER.add_argument("architectures", nargs="+")
OPTIONS = PARSER.parse_args()
GLIBC, ROOT, WHEEL = OPTIONS.glibc, OPTIONS.root, OPTIONS.wheel
C_LIBRARY = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2",
             "ld-linux-aarch64.so.1"}
CUDA_LICENCE = "LicenseRef-NVIDIA-CUDA-EULA"
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}


def readelf(*arguments):
    return subprocess.run(["readelf", "-W", *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def numbers(version):
    return [int(part) for part in version.split(".")]


def library(path, name, machine):
    dynamic, segments, symbols = readelf("-d", path), readelf("-l", path), readelf("--dyn-syms", path)
    yield f"{name} is for {machine}", MACHINES[machine] in readelf("-h", path)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    yield f"{name} needs {sorted(needed - C_LIBRARY)}", needed <= C_LIBRARY and "libc.so.6" in needed
    wanted = re.findall(r" UND (\S+)", symbols)
    versions = {symbol: re.search(r"@GLIBC_([0-9.]+)$", symbol) for symbol in wanted}
    without = [symbol for symbol, version in versions.items() if not version]
    yield f"{name} has symbols without a version of glibc: {without}", not without
    late = [symbol for symbol, version in versions.items() if version and numbers(version[1]) > numbers(GLIBC)]
    yield f"{name} has symbols later than {GLIBC}: {late}", not late and len(versions) > 20
    exports = re.findall(r" (?:GLOBAL|WEAK) +\S+ +(?!UND)\S+ (\S+)", symbols)
    others = [symbol for symbol in exports if not symbol.startswith(("dsopt_", "DSOPT_"))]
    yield f"{name} exports {others}", exports and not others
    yield f"{name} is position-independent", "TEXTREL" not in dynamic
    yield (f"{name} stays loaded, bound and read-only",
           all(word in dynamic for word in ("NODELETE", "NOW")) and "GNU_RELRO" in segments)
    stack = re.search(r"GNU_STACK\s.*?\s([RWE ]{3})\s+0x", segments)
    yield f"{name} has a stack that is not executable", bool(stack) and "E" not in stack[1]
    yield f"{name} has tables for the unwinder", "GNU_EH_FRAME" in segments


def same(folder, path, source):
    with open(os.path.join(folder, path), "rb") as one, open(os.path.join(ROOT, source), "rb") as other:
        return one.read() == other.read()


def images(path):
    """Returns how many images of kernels a library has, by architecture."""
    listed = subprocess.run(["cuobjdump", "-lelf", "-lptx", path], stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.findall(r"\.sm_(\w+)\.(cubin|ptx)$", listed, re.M)
    return collections.Counter(("sm_" if kind == "cubin" else "compute_") + number for number, kind in found)


def cuda(folder, info, parts):
    """Checks the metadata in the folder `info`, the components of the bill of materials, and the kernels."""
    with open(os.path.join(folder, info, "METADATA"), encoding="utf-8") as file:
        metadata = email.message_from_file(file)
    names = CUDA_LICENCE in metadata["License-Expression"].split(" AND ")
    yield f"the licence is {metadata['License-Expression']}", names
    yield "LICENSES/CUDA-runtime.txt is named", "LICENSES/CUDA-runtime.txt" in metadata.get_all("License-File")
    yield "the bill of materials has the CUDA runtime 13.0", parts.get("CUDA runtime") == "13.0"
    yield "there are kernels", ".nv_fatbin" in readelf("-S", os.path.join(folder, "dsopt/libdsopt.so"))
    sources = len(glob.glob(os.path.join(ROOT, "cuda", "*.cu")))
    found = images(os.path.join(folder, "dsopt/libdsopt.so"))
    yield (f"of {sources} files there are images for {dict(found)}",
           sources and found == {architecture: sources for architecture in OPTIONS.architectures})


def checks(folder):
    with zipfile.ZipFile(WHEEL) as file:
        names = file.namelist()
        file.extractall(folder)
    machine = re.search(r"-py3-none-.*manylinux_\d+_\d+_(x86_64|aarch64)\.whl$", os.path.basename(WHEEL))
    yield "the name has the tags of Python and of the platform", bool(machine)
    libraries = [name for name in names if ".so" in os.path.basename(name)]
    wanted = r"dsopt/jax/_handler-\d+\.\d+\.so dsopt/libdsopt\.so"
    yield f"the libraries are {libraries}", bool(re.fullmatch(wanted, " ".join(sorted(libraries))))
    for name in libraries:
        yield from library(os.path.join(folder, name), name, machine[1])
    (info,) = {name.split("/")[0] for name in names if name.split("/")[0].endswith(".dist-info")}
    for licence in ("LICENSE", "LICENSES/RapidJSON.txt", "LICENSES/xxHash.txt", "LICENSES/CUDA-runtime.txt"):
        yield f"{licence} is there", same(folder, f"{info}/licenses/{licence}", licence)
    for header in ("dsopt.h", "dsopt_dl.h"):
        yield f"{header} is there", same(folder, f"dsopt/include/{header}", f"include/{header}")
    yield "dsopt.json is there", same(folder, "dsopt/dsopt.json", "include/dsopt.json")
    with open(os.path.join(folder, info, "sboms", "dsopt.spdx.json"), encoding="utf-8") as file:
        parts = {package["name"]: package["versionInfo"] for package in json.load(file)["packages"]}
    yield (f"the bill of materials has {parts}",
           {"dsopt", "RapidJSON", "xxHash", "XLA FFI", "GCC runtime libraries"} <= set(parts))
    yield from cuda(folder, info, parts)
    size = os.path.getsize(WHEEL)
    print(f"{os.path.basename(WHEEL)}: {size} bytes")
    if OPTIONS.largest:
        yield f"the wheel has {size} bytes, at most {OPTIONS.largest}", size <= OPTIONS.largest


def main():
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, holds in checks(folder):
            passed += bool(holds)
            failed += not holds
            if not holds:
                print(f"{name}: is not so")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
