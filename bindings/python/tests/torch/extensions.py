# SPDX-License-Identifier: Apache-2.0
"""extensions.py: builds the extensions that DeepSpeed's own DeepSpeedCPUAdam and DeepSpeedCPULion use.

Builds those of both pinned versions, in folders of the virtual environment, unless they exist. DeepSpeed's builders
compile them for the processor of this machine, in one or two minutes each. Prints a line for each extension that cannot
be built; its tests are then skipped.
"""
import os
import subprocess
import sys

import originals

PACKAGE = "deepspeed.ops.op_builder"
BUILDERS = {"cpu_adam": {version: (PACKAGE, "CPUAdamBuilder") for version in (originals.VERSION, originals.NEWER)},
            "cpu_lion": {originals.VERSION: (PACKAGE + ".cpu_lion", "CPULionBuilder"),
                         originals.NEWER: (PACKAGE, "CPULionBuilder")}}
FOLDER = os.environ.get("DSOPT_EXTENSIONS") or os.path.join(sys.prefix, "extensions")
PROGRAM = "import importlib, sys; getattr(importlib.import_module(sys.argv[1]), sys.argv[2])().load()"


def path(version, name):
    return os.path.join(FOLDER, version, name, name + ".so")


def build(version, name):
    # DeepSpeed compares an installed CUDA toolkit with torch's, although these extensions do not use CUDA.
    environment = dict(os.environ, TORCH_EXTENSIONS_DIR=os.path.join(FOLDER, version), DS_ACCELERATOR="cpu",
                       DS_SKIP_CUDA_CHECK="1")
    environment.update(originals.newer() if version == originals.NEWER else {})
    os.makedirs(environment["TORCH_EXTENSIONS_DIR"], exist_ok=True)
    try:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *BUILDERS[name][version]], env=environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=1800, check=False)
        last_line = done.stdout.strip().splitlines()[-1:]
    except subprocess.TimeoutExpired:
        last_line = ["more than half an hour"]
    if not os.path.exists(path(version, name)):
        print("left out: the extension %s of DeepSpeed %s: %s" % (name, version, " ".join(last_line)))


if __name__ == "__main__":
    for version, reason in ((originals.VERSION, originals.REASON), (originals.NEWER, originals.NEWER_REASON)):
        for name in BUILDERS if not reason else ():
            if not os.path.exists(path(version, name)):
                build(version, name)
