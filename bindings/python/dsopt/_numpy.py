# SPDX-License-Identifier: Apache-2.0
"""NumPy, or None where it is not installed: then arrays are ctypes arrays."""

from . import _versions

__all__ = ["numpy"]

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]
else:
    _versions.require("dsopt", numpy)
