# SPDX-License-Identifier: Apache-2.0
"""Hashes of tensors, by which ranks find out whether they have the same values."""
from __future__ import annotations

from typing import Iterable, Tuple

import torch

CHUNK = 2**20  # elements that are hashed at a time
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers without structure, so that equal values at different indices have different products.
INDEX, TENSOR = 0x5851F42D4C957F2D, 0x14057B7EF767814F


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat: torch.Tensor = tensor.resolve_neg().contiguous().reshape(-1)
    return flat


def hash_of(tensors: Iterable[Tuple[int, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """Returns a 64-bit hash of numbered tensors, as a tensor on the device. It does not depend on the order of the
    sums, so it is equal for equal bits."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, tensor in tensors:
        for i, part in enumerate(torch.split(_flat(tensor), CHUNK)):
            bits = part.view(BITS[part.element_size()]).to(torch.int64) + 1
            index = torch.arange(i * CHUNK, i * CHUNK + len(part), dtype=torch.int64, device=part.device)
            total += (bits * ((index * INDEX + (number + 1) * TENSOR % 2**62) | 1)).sum().to(device)
    return total
