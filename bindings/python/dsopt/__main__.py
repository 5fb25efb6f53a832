# SPDX-License-Identifier: Apache-2.0
"""python -m dsopt: prints a JSON object for reports of defects: what the library is, which devices and libraries it
finds on this machine, and versions of other packages, which are not imported. Loads libraries and starts the CUDA
driver."""

import importlib.metadata
import json
import os
import platform
import shutil
from typing import Any, Dict

from . import Context, Error, _abi, _nvidia, build_info

_PACKAGES = ("dsopt", "numpy", "torch", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "optax", "flax",
             "tensorflow", "tensorflow-cpu", "keras", "deepspeed", "transformers", "accelerate", "lightning",
             "cupy-cuda12x", "cupy-cuda13x", "mpi4py", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-nccl-cu12",
             "nvidia-nccl-cu13")

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "OMP_THREAD_LIMIT")


def _versions() -> Dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def _device(number: int, capability: str) -> str:
    try:
        Context("cuda", number).close()
    except Error as problem:
        return str(problem)
    return "usable, compute capability " + capability


def diagnosis() -> Dict[str, Any]:
    """Returns build_info() with what this machine has."""
    info = build_info()
    info["environment"] = {
        name: value for name, value in os.environ.items() if name.startswith("DSOPT_") or name in _VARIABLES
    }
    capabilities = info.pop("cuda_devices", [])
    info["devices"] = {"cuda:%d" % i: _device(i, capability) for i, capability in enumerate(capabilities)}
    major = info.get("cuda_runtime", "").partition(".")[0]
    info["libraries"] = {
        "cublaslt": _nvidia.where(_nvidia.CUBLASLT, major) if major else "needs CUDA",
        "nccl": _nvidia.where(_nvidia.NCCL, major) if major else "needs CUDA",
        "mpiexec": shutil.which("mpiexec") or "not in PATH",
    }
    info["package"] = _abi.HERE
    info["python"] = "%s %s, %s" % (platform.python_implementation(), platform.python_version(), platform.platform())
    info["packages"] = _versions()
    return info


if __name__ == "__main__":
    print(json.dumps(diagnosis(), indent=2))
