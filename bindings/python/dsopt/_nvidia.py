# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt and NCCL in NVIDIA's packages of PyPI, where the dynamic linker does not look. libdsopt uses a copy that the
process has, so these are loaded before libdsopt looks for them. Neither the packages nor torch is imported."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
from typing import Iterator, NamedTuple, Optional, Tuple

from . import _abi as abi


class Library(NamedTuple):
    """A library that libdsopt loads at run time, as in cuda/lt.cc and comm/nccl/api.h.

    function  name of one of its functions
    variable  environment variable with the path of another file
    files     its names, best first. Both versions of cuBLASLt have the same ABI
    folders   where the packages have it, below the folder `nvidia`
    """

    function: str
    variable: str
    files: Tuple[str, ...]
    folders: str


CUBLASLT = Library("cublasLtMatmul", "DSOPT_CUBLASLT_LIBRARY", ("libcublasLt.so.13", "libcublasLt.so.12"), "*/lib")
NCCL = Library("ncclGetUniqueId", "DSOPT_NCCL_LIBRARY", ("libnccl.so.2",), "nccl/lib")


def is_loaded(library: Library) -> bool:
    """True if the process has the library: in the global scope, or under one of its names."""
    if hasattr(ctypes.CDLL(None), library.function):
        return True
    return any(_open(file, os.RTLD_NOLOAD) is None for file in library.files)


def packaged(library: Library) -> Iterator[str]:
    """Yields the paths of the library in NVIDIA's packages, best first."""
    try:
        spec = importlib.util.find_spec("nvidia")  # a namespace: finding it imports nothing
    except (ImportError, ValueError):  # a module without a spec
        spec = None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for file in library.files:
        for folder in folders:
            yield from sorted(glob.glob(os.path.join(glob.escape(folder), library.folders, file)))


def load(library: Library) -> None:
    """Loads the library from NVIDIA's packages, unless the process has it or the environment names a file. Without one
    in the packages, libdsopt leaves the search to the dynamic linker."""
    if library.variable in os.environ or is_loaded(library):
        return
    for path in packaged(library):
        if _open(path) is None:
            return


def load_for_group(algorithm: int, backend: str) -> None:
    """Loads cuBLASLt if a group of this algorithm needs it."""
    if algorithm == abi.DSOPT_ALGORITHM_MUON and backend == "cuda":
        load(CUBLASLT)


def where(library: Library, major: str) -> str:
    """Loads the library as a group or a comm would, and returns where it is, or why it was not found.

    major  CUDA version of libdsopt's runtime: without another copy libdsopt loads the library of that version
    """
    if is_loaded(library):
        return "%s, which the process had loaded" % _mapped(library)
    chosen = os.environ.get(library.variable)
    if chosen is not None:
        wrong = _open(chosen) if os.path.isabs(chosen) else "%s: not an absolute path" % chosen
        return wrong or "%s, named by %s" % (chosen, library.variable)
    load(library)
    if is_loaded(library):
        return "%s, of NVIDIA's packages" % _mapped(library)
    names = [file for file in library.files if len(library.files) == 1 or file.endswith("." + major)]
    reason: Optional[str] = "not found"
    for file in names:
        reason = _open(file)
    return reason or "%s, found by the dynamic linker" % _mapped(library)


def _open(file: str, mode: int = 0) -> Optional[str]:
    """Loads a file for the rest of the process. Returns the reason if that fails."""
    try:
        ctypes.CDLL(file, mode=mode)
    except OSError as problem:
        return str(problem)
    return None


def _mapped(library: Library) -> str:
    """Returns the path of the loaded file, or the name of the library if another file has its functions."""
    stem = library.files[0].rpartition(".")[0]
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            path = line.rstrip("\n").partition("/")
            if os.path.basename(path[2]).startswith(stem):
                return "/" + path[2]
    return library.files[0]
