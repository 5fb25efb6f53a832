# SPDX-License-Identifier: Apache-2.0
"""The oldest versions of other packages that this package works with, as its extras in pyproject.toml. Versions before
them fail in ways that do not show the cause, so they are refused at import."""

from __future__ import annotations

import re
from typing import Any, Tuple

from . import _abi as abi
from ._errors import MissingError

OLDEST = {
    "numpy": ("NumPy", "1.23"),  # before: asarray of a view of state does not keep its memory
    "torch": ("torch", "1.13"),
    "jax": ("JAX", "0.8.1"),  # before: version 0.1 of XLA's FFI, without types of state
    "tensorflow": ("TensorFlow", "2.16"),  # before: Keras 2
    "keras": ("Keras", "3.10"),  # before: optimizers without _overwrite_variable_with_gradient
}


def missing(text: str) -> MissingError:
    return MissingError(text, abi.DSOPT_ERR_MISSING, "DSOPT_ERR_MISSING")


def numbers(version: str) -> Tuple[int, ...]:
    """Returns the numbers at the beginning of a version, or () if it begins with none, as those of some builds do."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def require(module: str, package: Any) -> None:
    """Refuses an imported package that is too old for `module`."""
    name = package.__name__
    title, oldest = OLDEST[name]
    version = str(package.__version__)
    if numbers(version) and numbers(version) < numbers(oldest):
        raise missing(
            "%s needs %s %s or later, and this is %s %s: pip install '%s>=%s'"
            % (module, title, oldest, title, version, name, oldest)
        )
