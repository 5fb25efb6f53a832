# SPDX-License-Identifier: Apache-2.0
"""The build backend of pyproject.toml: meson-python with another tag, with the SBOM in the folder for wheels, and with
the licence of the CUDA runtime if the library has it. If a build with CUDA fails, it says how to build without.

The package is Python code and a library loaded through ctypes, so one wheel works for every Python 3 on a platform.
meson-python assumes that files next to a shared library are code for one Python ABI, and tags the wheel for that ABI.
It cannot install files into *.dist-info, and metadata do not depend on options of the build.
"""

import json
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


def add_cuda_licence(info):
    """Adds the licence of the CUDA runtime to the *.dist-info folder `info`, if its bill of materials has that."""
    with open(os.path.join(info, "sboms", "dsopt.spdx.json"), encoding="utf-8") as file:
        parts = {package["name"]: package for package in json.load(file)["packages"]}
    if "CUDA runtime" not in parts:
        return
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    shutil.copy(os.path.join(root, "LICENSES", "CUDA-runtime.txt"), os.path.join(info, "licenses", "LICENSES"))
    path = os.path.join(info, "METADATA")
    with open(path, encoding="utf-8", newline="") as file:
        head, blank, description = file.read().partition("\n\n")
    lines = []
    for line in head.split("\n"):
        if line.startswith("License-Expression: "):
            line += " AND " + parts["CUDA runtime"]["licenseDeclared"]
        lines.append(line)
    lines.append("License-File: LICENSES/CUDA-runtime.txt")
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write("\n".join(lines) + blank + description)


def complete(path):
    """Moves dsopt/dsopt.spdx.json into *.dist-info/sboms (PEP 770), and adds what depends on it."""
    with tempfile.TemporaryDirectory() as folder:
        wheel("unpack", "--dest", folder, path)
        (top,) = (os.path.join(folder, name) for name in os.listdir(folder))
        (info,) = (name for name in os.listdir(top) if name.endswith(".dist-info"))
        sboms = os.path.join(top, info, "sboms")
        os.mkdir(sboms)
        os.rename(os.path.join(top, "dsopt", "dsopt.spdx.json"), os.path.join(sboms, "dsopt.spdx.json"))
        add_cuda_licence(os.path.join(top, info))
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
    complete(path)
    return os.path.basename(wheel("tags", "--python-tag", "py3", "--abi-tag", "none", "--remove", path))
