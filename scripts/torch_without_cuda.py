#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes torch of PyPI importable without most of NVIDIA's libraries, which are gigabytes that the CPU never calls.

usage: torch_without_cuda.py PYTHON

For each library of NVIDIA that torch in the environment of PYTHON is linked with and that is not installed there,
compiles one with the same soname, symbols and symbol versions next to torch's libraries. Each of their functions ends
the process. Installed ones, such as the CUDA runtime, which torch calls on import, stay. Needs a C compiler and
binutils.
"""
import collections
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

NVIDIA = re.compile(r"lib(cu|nv|nccl)")
FUNCTION = re.compile(r"(cu|nv|nccl)[^@]*")


def lines_of(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def symbols_of(kind, path):
    """Returns the dynamic symbols, as name@version where they have one."""
    return {line.split()[-1].replace("@@", "@") for line in lines_of("nm", "-D", kind, path)}


def requirements_of(path):
    """Returns the libraries that one needs, and the symbol versions that it needs of each."""
    needed, versions, library = set(), collections.defaultdict(set), None
    for line in lines_of("objdump", "-p", path):
        words = line.split()
        if words[:1] == ["NEEDED"]:
            needed.add(words[1])
        elif words[:2] == ["required", "from"]:
            library = words[2].rstrip(":")
        elif library and len(words) == 4 and words[0].startswith("0x"):
            versions[library].add(words[3])
    return needed, versions


def compile_one(path, versions, wanted, elsewhere):
    """Writes the library. It also has the symbols without a version that no other library defines."""
    script, functions = "", set()
    for version in sorted(versions):
        names = sorted(name.partition("@")[0] for name in wanted if name.endswith("@" + version))
        functions.update(names)
        script += "%s { global: %s; };\n" % (version, "; ".join(names) or "none_of_its_symbols")
    functions.update(name for name in wanted - elsewhere if FUNCTION.fullmatch(name))
    source = "".join("void %s(void) { __builtin_trap(); }\n" % name for name in sorted(functions))
    with tempfile.NamedTemporaryFile("w", suffix=".map") as file:
        file.write(script)
        file.flush()
        subprocess.run([*shlex.split(os.environ.get("CC", "cc")), "-shared", "-fPIC", "-w", "-fno-builtin",
                        "-Wl,-soname," + path.name, *(["-Wl,--version-script=" + file.name] if script else []),
                        "-o", path, "-x", "c", "-"], input=source, text=True, check=True)


def main(python):
    find = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    package = pathlib.Path(lines_of(python, "-c", find)[0])
    libraries = sorted((package / "lib").glob("*.so*"))
    installed = libraries + sorted(package.parent.glob("nvidia/**/lib/*.so*"))
    needed, versions, wanted = set(), collections.defaultdict(set), set()
    for path in libraries:
        names, of_libraries = requirements_of(path)
        needed |= names
        wanted |= symbols_of("--undefined-only", path)
        for library, found in of_libraries.items():
            versions[library] |= found
    elsewhere = {name.partition("@")[0] for path in installed for name in symbols_of("--defined-only", path)}
    for name in sorted(needed - {path.name for path in installed}):
        if NVIDIA.match(name):
            compile_one(package / "lib" / name, versions[name], wanted, elsewhere)


if __name__ == "__main__":
    main(sys.argv[1])
