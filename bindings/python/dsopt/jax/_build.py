# SPDX-License-Identifier: Apache-2.0
"""The handler library: compiled against the installed jaxlib on first use, or found by DSOPT_JAX_HANDLER."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile

import jax
import jaxlib

from .. import _abi as abi
from .._errors import MissingError

HERE = os.path.dirname(os.path.abspath(__file__))
_SOURCES = ("_handler.cc", "_handler.map")
_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]


def _missing(text: str) -> MissingError:
    return MissingError(text, abi.DSOPT_ERR_MISSING, "DSOPT_ERR_MISSING")


def _headers() -> str:
    """The folder of dsopt.h and dsopt_dl.h: in the package, the source tree, or beside an installed library."""
    library = os.path.realpath(abi.path)
    places = [
        os.path.join(HERE, "..", "include"),
        os.path.join(HERE, "..", "..", "..", "..", "include"),
        os.path.join(os.path.dirname(library), "..", "include"),
        "/usr/include",
        "/usr/local/include",
    ]
    for place in map(os.path.abspath, places):
        if os.path.exists(os.path.join(place, "dsopt_dl.h")):
            return place
    raise _missing("dsopt_dl.h is not in %s: dsopt.jax needs it to compile its XLA handler" % ", ".join(places))


def _compiler() -> list:
    chosen = os.environ.get("CXX")
    if chosen:
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise _missing(
        "dsopt.jax compiles a small library against the headers of jaxlib %s on first use, and there is no C++ "
        "compiler. Install one (Debian: g++), name it in CXX, or set DSOPT_JAX_HANDLER to the path of a handler "
        "that was compiled elsewhere for this jaxlib" % jaxlib.__version__
    )


def _cache() -> str:
    return os.environ.get("DSOPT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "dsopt"
    )


def _key(headers: str) -> str:
    """Versions, and a hash of everything that is compiled."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in [os.path.join(HERE, name) for name in _SOURCES] + [
        os.path.join(headers, name) for name in ("dsopt.h", "dsopt_dl.h")
    ]:
        with open(path, "rb") as file:
            digest.update(file.read())
    return "jax-handler-%s-jaxlib-%s-%s.so" % (abi.description["version"], jaxlib.__version__, digest.hexdigest()[:16])


def build(path: str, headers: str) -> None:
    """Compile the handler. It appears under `path` at once and whole, so processes may do so at the same time."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
        result = os.path.join(folder, "handler.so")
        command = (
            _compiler()
            + _FLAGS
            + [
                "-I" + headers,
                "-isystem",
                jax.ffi.include_dir(),
                os.path.join(HERE, "_handler.cc"),
                "-Wl,--version-script=" + os.path.join(HERE, "_handler.map"),
                "-o",
                result,
                "-ldl",
            ]
        )
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        except OSError as problem:
            raise _missing("dsopt.jax could not run the C++ compiler: %s" % problem) from None
        if done.returncode:
            raise _missing(
                "dsopt.jax could not compile its XLA handler for jaxlib %s:\n%s\n%s"
                % (jaxlib.__version__, shlex.join(command), done.stdout[-4000:])
            )
        os.replace(result, path)


def handler_path() -> str:
    """Of the handler for this jaxlib, compiled if it is not there yet."""
    chosen = os.environ.get("DSOPT_JAX_HANDLER")
    if chosen:
        return chosen
    headers = _headers()
    path = os.path.join(_cache(), _key(headers))
    if not os.path.exists(path):
        build(path, headers)
    return path


def _capsule(address: int):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, None, None)


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The handler, with its calls known to JAX. Once per process."""
    path = handler_path()
    try:
        handler = ctypes.CDLL(path)
        handler.dsopt_jax_open.restype, handler.dsopt_jax_open.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
        handler.dsopt_jax_register_comm.restype = None
        handler.dsopt_jax_register_comm.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
        for name in ("dsopt_jax_type_id", "dsopt_jax_type_info"):
            getattr(handler, name).restype, getattr(handler, name).argtypes = ctypes.c_void_p, []
    except (OSError, AttributeError) as problem:
        raise _missing("%s is no handler of dsopt.jax: %s" % (path, problem)) from None
    problem = handler.dsopt_jax_open(os.fsencode(abi.path))
    if problem:
        raise _missing("the handler of dsopt.jax cannot open libdsopt: %s" % problem.decode("utf-8", "replace"))
    jax.devices()  # before its backends are there, JAX would register the calls ahead of the type of their state
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


if __name__ == "__main__":  # python -m dsopt.jax._build: compile now, such as into an image, and say where it is
    sys.stdout.write(handler_path() + "\n")
