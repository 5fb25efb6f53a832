# SPDX-License-Identifier: Apache-2.0
"""The build backend of pyproject.toml: meson-python with another tag, with the SBOM in the folder for wheels, and with
advice if a build with CUDA fails.

The package is Python code and a library loaded through ctypes, so one wheel works for every Python 3 on a platform.
meson-python assumes that files next to a shared library are code for one Python ABI, and tags the wheel for that ABI.
It cannot install files into *.dist-info.
"""

import os
import shutil
import subprocess
import sys
import tempfile

from mesonpy import build_editable as build_tagged_editable
from mesonpy import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,  # noqa: F401
    get_requires_for_build_wheel,
)
from mesonpy import build_wheel as build_tagged_wheel


def wheel(*arguments):
    """Returns the last word of the output of `python -m wheel`."""
    command = [sys.executable, "-m", "wheel", *arguments]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True, universal_newlines=True)
    return said.stdout.split()[-1]


def move_sbom(path):
    """Moves dsopt/dsopt.spdx.json into *.dist-info/sboms (PEP 770)."""
    with tempfile.TemporaryDirectory() as folder:
        wheel("unpack", "--dest", folder, path)
        (top,) = (os.path.join(folder, name) for name in os.listdir(folder))
        (info,) = (name for name in os.listdir(top) if name.endswith(".dist-info"))
        sboms = os.path.join(top, info, "sboms")
        os.mkdir(sboms)
        os.rename(os.path.join(top, "dsopt", "dsopt.spdx.json"), os.path.join(sboms, "dsopt.spdx.json"))
        wheel("pack", "--dest-dir", os.path.dirname(path), top)


def advised(build, directory, config_settings, metadata_directory):
    """Builds. pip prints the whole output of a build that fails, in which the options of Meson are far above."""
    try:
        return build(directory, config_settings, metadata_directory)
    except (Exception, SystemExit):  # meson-python exits if ninja fails
        if shutil.which("nvcc") and "cuda=disabled" not in str(config_settings):
            sys.stderr.write(
                "dsopt: if a CUDA kernel did not compile, -Csetup-args=-Dcuda=disabled builds without CUDA\n"
            )
        raise


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return advised(build_tagged_editable, wheel_directory, config_settings, metadata_directory)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = advised(build_tagged_wheel, wheel_directory, config_settings, metadata_directory)
    path = os.path.join(wheel_directory, name)
    move_sbom(path)
    return os.path.basename(wheel("tags", "--python-tag", "py3", "--abi-tag", "none", "--remove", path))
