# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own classes on the CPU, for tests that compare them with dsopt.torch.

The 1-bit optimizers have backends for the exchange. Among those of DeepSpeed 0.19.6, `compressed` lacks the least on a
CPU. load() adds the packing of bits, with NumPy. It also reshapes tensors for gloo's all-gather, which unlike NCCL's
requires equal shapes. Everything else is DeepSpeed's code.
"""
import importlib.metadata
import os
import sys
import types
import unittest

VERSION = "0.19.6"  # the last version with the 1-bit optimizers
NEWER = "0.19.8"  # in a separate folder, which is in PYTHONPATH of processes that tests start
ASIDE = os.path.join(sys.prefix, "aside")


def _reason(version, requirements, **path):
    for found in importlib.metadata.distributions(name="deepspeed", **path):
        found = found.version.split("+")[0]
        return None if found == version else "DeepSpeed is %s, and the tests are for %s" % (found, version)
    return "DeepSpeed %s is not installed (scripts/requirements/%s.txt)" % (version, requirements)


REASON = _reason(VERSION, "torch-source")  # the reason why no DeepSpeed is available for comparison, or None
NEWER_REASON = _reason(NEWER, "torch-aside", path=[ASIDE])
needed = unittest.skipIf(REASON is not None, REASON)
newer_needed = unittest.skipIf(NEWER_REASON is not None, NEWER_REASON)


def newer():
    """Returns environment variables of a process that imports the newer DeepSpeed."""
    return {"PYTHONPATH": os.pathsep.join([ASIDE] + list(filter(None, [os.environ.get("PYTHONPATH")])))}


class Engine:
    """The attributes of a DeepSpeedEngine that the optimizers and wrappers read and set."""

    local_rank = 0
    pipeline_parallelism = False

    def __init__(self, mpu=None):
        self.mpu, self.enable_backward_allreduce = mpu, True


class PipelineEngine(Engine):
    """An engine that averages the gradients in its own pass."""

    pipeline_parallelism = True

    def __init__(self, mpu=None):
        super().__init__(mpu)
        self.enable_backward_allreduce, self.pipeline_enable_backward_allreduce = False, True


class _Packbits:
    """DeepSpeed has kernels for this only on devices. The first of eight elements is in the highest bit."""

    def load(self):
        return self

    def packbits(self, values, count, rank):
        import numpy
        import torch
        return torch.from_numpy(numpy.packbits(values.numpy() >= 0))

    def unpackbits(self, packed, count, rank):
        import numpy
        import torch
        return torch.from_numpy(numpy.unpackbits(packed.numpy()).astype(numpy.float32) * 2 - 1)


def start():
    """Returns the module deepspeed. Only for processes that tests start, after torch.distributed.init_process_group:
    the
    import of DeepSpeed takes seconds and changes settings of the whole process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    import deepspeed.comm

    # It would compile an all-reduce through shared memory.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def load():
    """Returns DeepSpeed's classes, in such a process."""
    if "deepspeed" in sys.modules:
        return load.found
    deepspeed = start()
    import deepspeed.ops.op_builder
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    load.found = types.SimpleNamespace(
        FusedAdam=FusedAdam, FusedLamb=FusedLamb, FusedLion=FusedLion, DeepSpeedCPUAdam=DeepSpeedCPUAdam,
        DeepSpeedCPULion=DeepSpeedCPULion, FP16_Optimizer=FP16_Optimizer, FP16_UnfusedOptimizer=FP16_UnfusedOptimizer)
    if deepspeed.__version__.split("+")[0] != VERSION:
        return load.found
    deepspeed.ops.op_builder.PackbitsBuilder = _Packbits
    import deepspeed.runtime.comm.compressed as compressed

    class Gloo:
        def __getattr__(self, name):
            return getattr(deepspeed.comm, name)

        def all_gather(self, out, tensor, group=None):
            return deepspeed.comm.all_gather(out, tensor.reshape(out[0].shape), group=group)

    compressed.dist = Gloo()
    from deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam
    vars(load.found).update(OnebitAdam=OnebitAdam, OnebitLamb=OnebitLamb, ZeroOneAdam=ZeroOneAdam)
    return load.found
