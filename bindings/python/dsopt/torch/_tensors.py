# SPDX-License-Identifier: Apache-2.0
"""Conversion of torch's tensors to the engine's: dtypes, memory layouts, devices."""
from __future__ import annotations

import ctypes
import operator
import os
import sys
import threading
from array import array
from ctypes import byref
from functools import partial
from operator import attrgetter
from typing import Any, Dict, List, Sequence, Tuple

import torch

from .. import _abi as abi
from .._errors import AssertedError, Error, error_of
from .._handle import Handle
from .._handles import Context

DEVICES = ("cpu", "cuda")
# dtype of the engine, and number of its elements per torch element
FLOATS: Dict[torch.dtype, Tuple[int, int]] = {
    torch.float32: (abi.DSOPT_DTYPE_F32, 1), torch.float16: (abi.DSOPT_DTYPE_F16, 1),
    torch.bfloat16: (abi.DSOPT_DTYPE_BF16, 1), torch.complex64: (abi.DSOPT_DTYPE_F32, 2)}
E4M3: torch.dtype = getattr(torch, "float8_e4m3fn", torch.uint8)  # torch before 2.1 does not have it
STATES = {abi.DSOPT_DTYPE_F32: torch.float32, abi.DSOPT_DTYPE_F16: torch.float16, abi.DSOPT_DTYPE_BF16: torch.bfloat16,
          abi.DSOPT_DTYPE_I32: torch.int32, abi.DSOPT_DTYPE_I16: torch.int16, abi.DSOPT_DTYPE_U8: torch.uint8,
          abi.DSOPT_DTYPE_F8_E4M3: E4M3}


def _bump() -> Any:
    """Returns torch.autograd.graph.increment_version for a list of tensors, or None before torch 2.1, which lacks it.
    From torch 2.5 on one call takes the whole list, and before only one tensor."""
    increment = getattr(torch._C, "_increment_version", None)
    if increment is not None:
        try:
            increment([torch.empty(0, device="cpu")])
        except RuntimeError:
            return partial(_bump_each, increment)
    return increment


def _bump_each(increment: Any, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        increment(tensor)


bump = _bump()


def wrong(text: str, name: str = "ARGUMENT") -> Error:
    return error_of(getattr(abi, "DSOPT_ERR_" + name), "DSOPT_ERR_" + name, text)


def unsupported(text: str) -> Error:
    return wrong(text, "UNSUPPORTED")


def asserted(text: str) -> Error:
    """Returns the error for an unsupported option for which the original has an assert statement."""
    return AssertedError("%s (DSOPT_ERR_UNSUPPORTED)" % text, abi.DSOPT_ERR_UNSUPPORTED, "DSOPT_ERR_UNSUPPORTED")


def integer(what: str, value: Any, end: int) -> int:
    """Returns a whole number in [0, end). `what` names it in the error."""
    try:
        found = operator.index(value)
    except TypeError:
        raise wrong("%s is %r, and must be a whole number" % (what, value)) from None
    if not 0 <= found < end:
        raise wrong("%s is %d, and must be a whole number in [0, 2^%d)" % (what, found, end.bit_length() - 1))
    return found


INSTEAD = {"amsgrad": "use torch.optim for it", "maximize": "minimize the negative loss",
           "differentiable": "use torch.optim for it"}


def refused(where: str, option: str) -> Error:
    """Returns the error for an option of torch.optim or DeepSpeed that the engine does not have."""
    return unsupported("%s: %s=True is not supported; %s" % (where, option, INSTEAD[option]))


def dtype_of(tensor: torch.Tensor, what: str) -> Tuple[int, int]:
    """Returns the entry of FLOATS. `what` names the tensor in the error."""
    try:
        return FLOATS[tensor.dtype]
    except KeyError:
        raise wrong("%s is %s, and must be float32, float16, bfloat16 or complex64; convert it, or leave it to an "
                    "optimizer of torch.optim" % (what, str(tensor.dtype).replace("torch.", "")), "DTYPE") from None


def dtensors() -> Any:
    """Returns the module with DTensor and its placements, or None before the program has imported it. Before torch 2.5
    it is torch.distributed._tensor; torch.distributed.tensor has only `parallel` there."""
    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):
        module = sys.modules.get(name)
        if hasattr(module, "DTensor"):
            return module
    return None


def is_dtensor(tensor: Any) -> bool:
    """True for a DTensor of torch.distributed.tensor. None exists before the program has imported that module."""
    module = dtensors()
    return module is not None and isinstance(tensor, module.DTensor)


def check_grad(grad: torch.Tensor, param: torch.Tensor, what: str, device: torch.device) -> None:
    """Refuses a gradient that does not match this parameter, except for its dtype. `what` names it in the error."""
    if is_dtensor(grad):
        raise unsupported("%s is a DTensor, and the parameter a plain tensor; give it the local tensor, or make the "
                          "parameter a DTensor" % what)
    if grad.layout != torch.strided:
        raise unsupported("%s is sparse, and must be dense; use torch.optim.SparseAdam or torch.optim.SGD for it, "
                          "or sparse=False in its torch.nn.Embedding" % what)
    if grad.shape != param.shape:
        raise wrong("%s has shape %s, and the parameter %s" % (what, tuple(grad.shape), tuple(param.shape)), "SHAPE")
    if grad.device != device:
        raise wrong("%s is on device %s, and the parameter on %s" % (what, grad.device, device), "DEVICE")
    if grad.is_complex() != param.is_complex():
        raise wrong("%s is %s, and the parameter %s" % (what, grad.dtype, param.dtype), "DTYPE")


def check_kind(what: str, state: torch.Tensor, param: torch.Tensor) -> None:
    """Refuses a plain state tensor of a DTensor, and the reverse."""
    if is_dtensor(state) != is_dtensor(param):
        kinds = ("a plain tensor", "a DTensor")
        raise unsupported("%s is %s, and the parameter %s; load it with "
                          "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict" %
                          (what, kinds[is_dtensor(state)], kinds[is_dtensor(param)]))


def strides_of(tensor: torch.Tensor) -> List[int]:
    """Returns the strides of dimensions with more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape) if size != 1]


def is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements are all elements of a memory range, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# The imaginary part of a conjugate has the negative bit. Complex gradients, which may have the conjugate bit, have no
# fast path.
ATTRIBUTES = (attrgetter("dtype"), attrgetter("shape"), torch.Tensor.stride, attrgetter("device"), torch.Tensor.is_neg)
# torch 2.1 and later compare all of these in one call. The class is private, so only performance depends on it.
_Guards = getattr(getattr(getattr(torch, "_C"), "_dynamo", None), "guards", None)


class Layouts:
    """dtype, shape, strides, device and negative bit of some tensors, to detect changes. Does not keep the tensors
    alive."""

    def __init__(self, tensors: List[torch.Tensor]) -> None:
        self.attributes = [list(map(attribute, tensors)) for attribute in ATTRIBUTES]
        self._prepare(tensors)

    def _prepare(self, tensors: List[torch.Tensor]) -> None:
        self.check: Any = None  # None: only the attributes are compared
        try:
            self.check = _Guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        except (AttributeError, TypeError, ValueError, RuntimeError):
            pass

    def equal(self, tensors: List[torch.Tensor]) -> bool:
        # The check also compares other properties, such as requires_grad and thread modes, so a failure is
        # inconclusive.
        if self.check is not None and self.check(*tensors):
            return True
        for attribute, expected in zip(ATTRIBUTES, self.attributes):
            if list(map(attribute, tensors)) != expected:
                return False
        if self.check is not None:
            self._prepare(tensors)
        return True


def words_of(tensors: Any) -> memoryview:
    """Returns an array of dsopt_tensor as 64-bit words, three per tensor: address, numel, dtype."""
    return memoryview(tensors).cast("B").cast("Q")


def put(words: memoryview, place: int, values: Sequence[int]) -> None:
    if values:
        words[place:3 * len(values):3] = array("Q", values)


_contexts: Dict[Tuple[Any, ...], Context] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """Replaces the lock: a thread that held it does not exist in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def context_of(device: torch.device, what: str) -> Context:
    """Returns the context of a device, with as many threads as torch uses; one for all optimizers of this process."""
    if device.type not in DEVICES:
        raise wrong("%s is on device %s; the engine has cpu and cuda" % (what, device), "DEVICE")
    key = os.getpid(), device.type, device.index, torch.get_num_threads()
    with _lock:
        if key not in _contexts:
            try:
                _contexts[key] = Context(device.type, device.index or 0, torch.get_num_threads())
            except Error as problem:
                problem.args = ("%s is on device %s: %s" % (what, device, problem.args[0]),) + problem.args[1:]
                raise
        return _contexts[key]


class Engine(Handle):
    """A dsopt_optimizer."""

    def __init__(self, context: Any, desc: Any, *needed: object) -> None:
        handle = ctypes.c_void_p()
        abi.check(abi.lib.dsopt_optimizer_create(context.handle, byref(desc), byref(handle)))
        self._own(handle, abi.lib.dsopt_optimizer_destroy, context, *needed)
