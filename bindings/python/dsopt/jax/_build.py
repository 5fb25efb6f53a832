# SPDX-License-Identifier: Apache-2.0
"""The handler library: in the package, compiled against the installed jaxlib on first use, or named by
DSOPT_JAX_HANDLER."""

import ctypes
import functools
import os
import re
import sys
from typing import Optional, Tuple

import jax
import jaxlib

from .. import _abi as abi
from .. import _compile

HERE = os.path.dirname(os.path.abspath(__file__))
_SYMBOLS = os.path.join(HERE, "_handler.map")


def api_version() -> Tuple[int, int]:
    """Returns the version of XLA's FFI in the installed jaxlib, from the header that comes with it."""
    with open(os.path.join(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h"), encoding="utf-8") as file:
        text = file.read()
    major, minor = (re.search(r"^#define XLA_FFI_API_%s (\d+)$" % part, text, re.M) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else (-1, 0)  # no handler is compiled for it


def prebuilt(folder: str, version: Tuple[int, int]) -> Optional[str]:
    """Returns the path of the handler in `folder` for a version of XLA's FFI. XLA accepts handlers that were compiled
    with its version or with an earlier minor version, and refuses later ones."""
    best = None
    for name in os.listdir(folder):
        found = re.fullmatch(r"_handler-(\d+)\.(\d+)\.so", name)
        if found and int(found[1]) == version[0] and int(found[2]) <= version[1]:
            best = max(best or (-1, ""), (int(found[2]), name))
    return best and os.path.join(folder, best[1])


def handler_path() -> str:
    """Returns the path of the handler for this jaxlib, and compiles it if it does not exist yet."""
    return _compile.Extension(
        module="dsopt.jax",
        what="XLA handler",
        framework="jaxlib",
        framework_version=jaxlib.__version__,
        variable="DSOPT_JAX_HANDLER",
        source=os.path.join(HERE, "_handler.cc"),
        other_sources=[os.path.join(HERE, name) for name in ("_memory.h", "_operands.h", "_program.h")] + [_SYMBOLS],
        flags=["-fvisibility=hidden", "-isystem", jax.ffi.include_dir()],
        libraries=["-Wl,--version-script=" + _SYMBOLS],
        prebuilt=prebuilt(HERE, api_version()),
    ).path()


def _capsule(address: int):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """Loads the handler and registers its calls with JAX, once per process. A process that runs a program of jax.export
    must call it first."""
    path = handler_path()
    try:
        handler = ctypes.CDLL(path)
        handler.dsopt_jax_open.restype, handler.dsopt_jax_open.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
        handler.dsopt_jax_register_comm.restype = None
        handler.dsopt_jax_register_comm.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
        for name in ("dsopt_jax_type_id", "dsopt_jax_type_info"):
            getattr(handler, name).restype, getattr(handler, name).argtypes = ctypes.c_void_p, []
    except (OSError, AttributeError) as problem:
        raise _compile.missing("%s is no handler of dsopt.jax: %s" % (path, problem)) from None
    problem = handler.dsopt_jax_open(os.fsencode(abi.path))
    if problem:
        raise _compile.missing("the handler of dsopt.jax cannot open libdsopt: %s" % problem.decode("utf-8", "replace"))
    jax.devices()  # before its backends exist, JAX would register the calls ahead of the type of their state
    _register(handler)
    return handler


def _register(handler: ctypes.CDLL) -> None:
    kind = {"type_id": _capsule(handler.dsopt_jax_type_id()), "type_info": _capsule(handler.dsopt_jax_type_info())}
    for platform, more in (("cpu", {}), ("CUDA", {"initialize": handler.dsopt_jax_prepare_cuda})):
        suffix = "_" + platform.lower()
        jax.ffi.register_ffi_type("dsopt_program", kind, platform=platform)
        for call in ("init", "step"):
            stages = {
                "instantiate": getattr(handler, "dsopt_jax_instantiate" + suffix),
                "execute": getattr(handler, "dsopt_jax_" + call + suffix),
                **more,
            }
            jax.ffi.register_ffi_target(
                "dsopt_" + call, {stage: jax.ffi.pycapsule(entry) for stage, entry in stages.items()}, platform=platform
            )


if __name__ == "__main__":  # python -m dsopt.jax._build: compiles now, such as into an image, and prints the path
    sys.stdout.write(handler_path() + "\n")
