# SPDX-License-Identifier: Apache-2.0
"""The build backend of pyproject.toml: meson-python, with the wheel's tag put right.

The package is Python and a library that is loaded by ctypes, so one wheel serves every Python 3 of a platform.
meson-python takes
all that lies beside a shared library for code of one Python's ABI, and names the wheel so.
"""

import os
import subprocess
import sys

from mesonpy import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,  # noqa: F401
    get_requires_for_build_wheel,
)
from mesonpy import build_wheel as build_tagged_wheel


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = build_tagged_wheel(wheel_directory, config_settings, metadata_directory)
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "wheel",
            "tags",
            "--python-tag",
            "py3",
            "--abi-tag",
            "none",
            "--remove",
            os.path.join(wheel_directory, name),
        ],
        stdout=subprocess.PIPE,
        check=True,
        universal_newlines=True,
    )
    return os.path.basename(said.stdout.split()[-1])
