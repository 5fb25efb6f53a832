# SPDX-License-Identifier: Apache-2.0
"""torch.set_default_dtype changes the dtype of every tensor that is made without one, also of those of the package."""
import contextlib
import unittest

import torch

import dsopt.torch
from dsopt.torch import FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb
from support import TestCase

SHAPES = ((5, 3), (7,))
# Options of each class; all others have their defaults.
CLASSES = {"Adagrad": {}, "Adam": {}, "Adam8bit": {}, "AdamW": {}, "AdamW8bit": {}, "DeepSpeedCPUAdam": {},
           "DeepSpeedCPULion": {}, "FusedAdam": {}, "FusedLamb": {"max_grad_norm": 0.5}, "FusedLion": {}, "Lion": {},
           "Muon": {}, "OnebitAdam": {"freeze_step": 2}, "OnebitLamb": {"freeze_step": 2},
           "SGD": {"lr": 0.1, "momentum": 0.9}, "ZeroOneAdam": {"var_freeze_step": 2}}


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def params_of(dtype):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype))
            for shape in SHAPES]


def give_grads(params, call, scale):
    generator = torch.Generator().manual_seed(call)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float32) * scale
        param.grad = grad.to(param.dtype)


def bytes_of(tensors):
    return [(tensor.dtype, bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())) for tensor in tensors]


def all_of(optimizer, params):
    """`step` has a dtype of torch.optim, which depends on the default: float32, or float64."""
    state = [optimizer.state[param] for param in params]
    tensors = [value for each in state for key, value in sorted(each.items())
               if torch.is_tensor(value) and value.numel() and key != "step"]
    return bytes_of(params + tensors), [float(each["step"]) for each in state if "step" in each]


def trained(name):
    """Returns parameters and state after some steps, a state dict that is loaded, and a step more."""
    kind, params = getattr(dsopt.torch, name), params_of(torch.float32)
    if name == "Muon":
        params = params[:1]  # matrices
    optimizer = kind(params, **CLASSES[name])
    for call in range(3):
        give_grads(params, call, 1)
        optimizer.step()
    other = kind(params, **CLASSES[name])
    other.load_state_dict(optimizer.state_dict())
    give_grads(params, 3, 1)
    other.step()
    return all_of(other, params)


def wrapped(kind, inner, dtype):
    """The same with a wrapper, and what it reports of each step; the second one overflows."""
    params = params_of(dtype)
    scales = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 256}} if dtype == torch.float16 else \
        {"low_precision_dtype": dtype} if kind is FP16_Optimizer else {}
    optimizer = kind(inner(params), clip_grad=1.0, **scales)
    reports = []
    for call in range(3):
        give_grads(params, call, 256)
        if call == 1 and dtype == torch.float16:
            params[0].grad[0, 0] = float("inf")
        skipped = optimizer.step()
        reports.append((bool(skipped), bool(optimizer.overflow), float(optimizer.cur_scale)))
    return bytes_of(params), reports


class DefaultDtype(TestCase):
    def test_classes_give_the_same_bits_and_dtypes(self):
        self.assertEqual(set(CLASSES), {name for name in dsopt.torch.__all__ if isinstance(getattr(dsopt.torch, name), type)
                                        and "FP16" not in name})
        for name in CLASSES:
            wanted = trained(name)
            for dtype in (torch.bfloat16, torch.float64):
                with self.subTest(name=name, default=dtype), default(dtype):
                    self.assertEqual(trained(name), wanted)

    def test_wrappers_give_the_same_bits_and_reports(self):
        cases = [(FP16_Optimizer, FusedAdam, torch.float16), (FP16_UnfusedOptimizer, FusedLamb, torch.float16),
                 (FP16_Optimizer, FusedAdam, torch.bfloat16)]
        for kind, inner, parameters in cases:
            wanted = wrapped(kind, inner, parameters)
            self.assertEqual([skipped for skipped, _, _ in wanted[1]], [False, parameters == torch.float16, False])
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                with self.subTest(kind=kind.__name__, parameters=parameters, default=dtype), default(dtype):
                    self.assertEqual(wrapped(kind, inner, parameters), wanted)


if __name__ == "__main__":
    unittest.main()
