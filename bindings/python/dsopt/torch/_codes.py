# SPDX-License-Identifier: Apache-2.0
"""Conversion of codes with scales to float32, and back, on the CPU by the engine.

A block is consecutive elements in memory, so these functions work in the memory order of their tensors.
"""
from __future__ import annotations

import ctypes
from ctypes import byref
from functools import lru_cache
from typing import Optional, Tuple

import torch

from .. import _abi as abi
from ._formats import BLOCK, FIRST, KEY_OF, NUMBERS, SECOND, scale_of, scales_in
from ._tensors import E4M3, Engine, context_of, is_dense

CHUNK = 2**20  # elements that are converted at a time, a multiple of BLOCK
MOMENTS = {FIRST: "exp_avg", SECOND: "exp_avg_sq"}
DTYPES = {"e4m3": E4M3, "q8": torch.uint8}


class Codec:
    """A parameter of the engine, of whose state one moment has the format `fmt`."""

    def __init__(self, key: str, fmt: str, numel: int) -> None:
        context, self.numel, self.moment = context_of(torch.device("cpu"), "a conversion"), numel, MOMENTS[key]
        self.engine = Engine(context, abi.dsopt_optimizer_desc(flags=abi.DSOPT_OPTIMIZER_NO_MASTER))
        group = abi.dsopt_group()
        abi.check(abi.lib.dsopt_group_init(byref(group), ctypes.sizeof(group), abi.DSOPT_ALGORITHM_ADAMW))
        setattr(group, key, NUMBERS[fmt])
        param = abi.dsopt_param(tensor=abi.dsopt_tensor(None, numel, abi.DSOPT_DTYPE_F32))
        abi.check(abi.lib.dsopt_optimizer_add_group(self.engine.handle, byref(group), byref(param), 1))
        count, info, self.index = ctypes.c_int64(), abi.dsopt_state_info(), {}
        abi.check(abi.lib.dsopt_optimizer_state_count(self.engine.handle, byref(count)))
        for i in range(count.value):
            abi.check(abi.lib.dsopt_optimizer_state(self.engine.handle, i, byref(info)))
            self.index[info.name.decode()] = i

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Writes codes and scales of float32 values. All tensors are contiguous and on the CPU."""
        handle = self.engine.handle
        abi.check(abi.lib.dsopt_optimizer_import_f32(handle, self.index[self.moment], values.data_ptr(), self.numel))
        for name, tensor in ((self.moment, codes), (scale_of(self.moment), scales)):
            size = tensor.numel() * tensor.element_size()
            abi.check(abi.lib.dsopt_optimizer_export(handle, self.index[name], tensor.data_ptr(), size))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Returns the float32 values of codes. All tensors are contiguous and on the CPU."""
        handle, values = self.engine.handle, torch.empty(self.numel, dtype=torch.float32)
        for name, tensor in ((self.moment, codes), (scale_of(self.moment), scales)):
            size = tensor.numel() * tensor.element_size()
            abi.check(abi.lib.dsopt_optimizer_import(handle, self.index[name], tensor.data_ptr(), size))
        abi.check(abi.lib.dsopt_optimizer_export_f32(handle, self.index[self.moment], values.data_ptr(), self.numel))
        return values


@lru_cache(maxsize=None)
def levels_of(name: str, fmt: str) -> torch.Tensor:
    """Returns the values of the 256 codes of a state tensor with this name and format."""
    codes = torch.arange(BLOCK, dtype=torch.int32).to(torch.uint8)
    return Codec(KEY_OF[name], fmt, BLOCK).decode(codes, torch.ones(1, dtype=torch.float32))


def _elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a dense tensor in memory order, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _arranged(elements: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Returns elements in memory order with the shape and the strides of a dense tensor, without a copy."""
    return elements.as_strided(order.shape, order.stride())


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a contiguous copy of one with gaps."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def decode(codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, block: int = BLOCK) -> torch.Tensor:
    """Returns the values of codes: levels times the scales of blocks of `block` elements. The codes are dense, and the
    values have their strides."""
    bits = _elements(codes).view(torch.uint8)
    values = torch.empty(bits.numel(), dtype=torch.float32, device=bits.device)
    levels, scales = levels.to(bits.device), scales.detach().reshape(-1)
    step = max(CHUNK // block, 1) * block
    for begin in range(0, bits.numel(), step):  # an index takes 4 bytes
        part = bits[begin:begin + step]
        factors = scales[begin // block:(begin + step) // block + 1].repeat_interleave(block)[:part.numel()]
        torch.mul(levels.index_select(0, part.int()), factors, out=values[begin:begin + step])
    return _arranged(values, codes)


def values_of(name: str, fmt: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the values of a state tensor with this name and format, with the strides of its codes."""
    return decode(codes, scales, levels_of(name, fmt))


def encode(name: str, fmt: str, values: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of the values of a state tensor with this name, rounded to nearest. The values are
    dense, and the codes have their strides."""
    numel, source = values.numel(), _elements(values)
    codec: Optional[Codec] = None
    codes = torch.empty(numel, dtype=torch.uint8)
    scales = torch.empty(scales_in(numel), dtype=torch.float32)
    for begin in range(0, numel, CHUNK):
        part = source[begin:begin + CHUNK].to("cpu", torch.float32)
        if codec is None or codec.numel != part.numel():
            codec = Codec(KEY_OF[name], fmt, part.numel())
        first = begin // BLOCK
        codec.encode(part, codes[begin:begin + CHUNK], scales[first:first + CHUNK // BLOCK])
    return _arranged(codes.to(values.device).view(DTYPES[fmt]), values), scales.to(values.device)


def reordered(name: str, fmt: str, codes: torch.Tensor, scales: torch.Tensor,
              order: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """Returns codes and scales of the same values with the strides of `order`. Other elements then share a block, so
    both change."""
    values = torch.empty_strided(order.shape, order.stride(), dtype=torch.float32, device=codes.device)
    return encode(name, fmt, values.copy_(values_of(name, fmt, codes, scales)))
