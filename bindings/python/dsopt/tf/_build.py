# SPDX-License-Identifier: Apache-2.0
"""The op's library: compiled against the installed TensorFlow on first use, or named by DSOPT_TF_OP."""

import ctypes
import functools
import os
import sys
from typing import Any

import tensorflow as tf

from .. import _abi as abi
from .. import _compile

HERE = os.path.dirname(os.path.abspath(__file__))


def op_path() -> str:
    """Returns the path of the op for this TensorFlow, compiled if it does not exist yet.

    TensorFlow's types must keep their default visibility: TensorFlow compares addresses of their members.
    """
    given = tf.sysconfig.get_compile_flags()
    return _compile.Extension(
        module="dsopt.tf",
        what="op",
        framework="TensorFlow",
        framework_version=tf.__version__,
        variable="DSOPT_TF_OP",
        source=os.path.join(HERE, "_op.cc"),
        other_sources=[],
        flags=["-isystem" + flag[2:] if flag.startswith("-I") else flag for flag in given],
        libraries=tf.sysconfig.get_link_flags(),
    ).path()


@functools.lru_cache(maxsize=None)
def ops() -> Any:
    """Returns the module of TensorFlow with the op `dsopt_step`, loaded once per process."""
    path = op_path()
    try:
        module = tf.load_op_library(path)
        load = ctypes.CDLL(path).dsopt_tf_load
    except (OSError, AttributeError, tf.errors.OpError) as problem:
        raise _compile.missing(
            "%s is no op of dsopt.tf for TensorFlow %s: %s" % (path, tf.__version__, problem)
        ) from None
    load.restype, load.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    problem = load(os.fsencode(abi.path))
    if problem:
        raise _compile.missing("the op of dsopt.tf cannot open libdsopt: %s" % problem.decode("utf-8", "replace"))
    return module


if __name__ == "__main__":  # python -m dsopt.tf._build: compiles now, such as into an image, and prints the path
    sys.stdout.write(op_path() + "\n")
