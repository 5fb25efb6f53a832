# SPDX-License-Identifier: Apache-2.0
"""The op's library: compiled against the installed TensorFlow on first use, or found by DSOPT_TF_OP."""
import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from typing import Any, List

import tensorflow as tf

from .. import _abi as abi
from .._errors import MissingError

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.join(HERE, "_op.cc")


def _missing(text: str) -> MissingError:
    return MissingError(text, abi.DSOPT_ERR_MISSING, "DSOPT_ERR_MISSING")


def _headers() -> str:
    """The folder of dsopt.h and dsopt_dl.h: in the package, the source tree, or beside an installed library."""
    library = os.path.dirname(os.path.realpath(abi.path))
    places = [os.path.join(HERE, "..", "include"), os.path.join(HERE, "..", "..", "..", "..", "include"),
              os.path.join(library, "..", "include"), "/usr/include", "/usr/local/include"]
    for place in map(os.path.abspath, places):
        if os.path.exists(os.path.join(place, "dsopt_dl.h")):
            return place
    raise _missing("dsopt_dl.h is not in %s: dsopt.tf needs it to compile its op" % ", ".join(places))


def _compiler() -> List[str]:
    chosen = os.environ.get("CXX")
    if chosen:
        return shlex.split(chosen)
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise _missing("dsopt.tf compiles its op against the headers of TensorFlow %s on first use, and there is no C++ "
                   "compiler. Install one (Debian: g++), name it in CXX, or set DSOPT_TF_OP to the path of an op that "
                   "was compiled elsewhere for this TensorFlow" % tf.__version__)


def _flags(headers: str) -> List[str]:
    """TensorFlow's types must keep their default visibility: it compares the addresses of what they have."""
    given = tf.sysconfig.get_compile_flags()
    include = ["-isystem" + flag[2:] if flag.startswith("-I") else flag for flag in given]
    return ["-std=c++17", "-O2", "-fPIC", "-shared", "-I" + headers] + include


def _cache() -> str:
    return os.environ.get("DSOPT_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "dsopt")


def _key(headers: str) -> str:
    """Versions, and a hash of everything that is compiled and how."""
    digest = hashlib.sha256(" ".join(tf.sysconfig.get_compile_flags() + tf.sysconfig.get_link_flags()).encode())
    for path in (__file__, SOURCE, os.path.join(headers, "dsopt.h"), os.path.join(headers, "dsopt_dl.h")):
        with open(path, "rb") as file:
            digest.update(file.read())
    return "tf-op-%s-tensorflow-%s-%s.so" % (abi.description["version"], tf.__version__, digest.hexdigest()[:16])


def build(path: str, headers: str) -> None:
    """Compile the op. It appears under `path` at once and whole, so processes may do so at the same time."""
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=os.path.dirname(path))
    except OSError as problem:
        raise _missing("dsopt.tf cannot keep its compiled op in %s: %s. Set DSOPT_CACHE to a folder that can be written"
                       % (os.path.dirname(path), problem)) from None
    with folder as name:
        result = os.path.join(name, "op.so")
        libraries = tf.sysconfig.get_link_flags() + ["-ldl", "-pthread"]
        command = _compiler() + _flags(headers) + [SOURCE, "-o", result] + libraries
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        except OSError as problem:
            raise _missing("dsopt.tf could not run the C++ compiler: %s" % problem) from None
        if done.returncode:
            raise _missing("dsopt.tf could not compile its op for TensorFlow %s:\n%s\n%s"
                           % (tf.__version__, shlex.join(command), done.stdout[-4000:]))
        os.replace(result, path)


def op_path() -> str:
    """Of the op for this TensorFlow, compiled if it is not there yet."""
    chosen = os.environ.get("DSOPT_TF_OP")
    if chosen:
        return chosen
    headers = _headers()
    path = os.path.join(_cache(), _key(headers))
    if not os.path.exists(path):
        build(path, headers)
    return path


@functools.lru_cache(maxsize=None)
def ops() -> Any:
    """The module of TensorFlow with the op `dsopt_adam`. Once per process."""
    path = op_path()
    try:
        module = tf.load_op_library(path)
        load = ctypes.CDLL(path).dsopt_tf_load
    except (OSError, AttributeError, tf.errors.OpError) as problem:
        raise _missing("%s is no op of dsopt.tf for TensorFlow %s: %s" % (path, tf.__version__, problem)) from None
    load.restype, load.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    problem = load(os.fsencode(abi.path))
    if problem:
        raise _missing("the op of dsopt.tf cannot open libdsopt: %s" % problem.decode("utf-8", "replace"))
    return module
