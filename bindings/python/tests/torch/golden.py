# SPDX-License-Identifier: Apache-2.0
"""Recorded cases of tests/golden, and the comparison of an optimizer's steps with them.

The tolerances are those of tests/replay/compare.h: 2e-6 of the tensor's largest recorded magnitude for 32 and 64 bits,
one unit in the last place for 16 bits, and 0 for integers, flags and loss scales. NaN and Inf must be at the same
positions as in the record.
"""
import json
import math
import os
import struct

import torch

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), *[os.pardir] * 4, "tests", "golden")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "U8": torch.uint8, "I16": torch.int16, "I32": torch.int32,
          "F8_E4M3": getattr(torch, "float8_e4m3fn", torch.uint8)}
EXACT = 0.0  # as a tolerance

INPUTS = {"grad", "grad16", "grads_averaged", "grad_present", "lr", "param_init", "param16_init", "exp_avg_mask"}
# Recorded quantities that no class exposes. The C replay compares them (tests/replay).
HIDDEN = {
    "worker_scale": "sent between the ranks and not kept; the errors and the momentum depend on it",
    "server_scale": "as worker_scale",
    "compressed_calls": "the exchanges of a step are not counted",
    "raised": "a wrapper does not raise at the smallest scale",
}


def names():
    """Returns the names of the cases recorded from the originals; none if the package is tested without the source
    tree. Cases lowp_* follow from a model of the formats: low_precision_names() has them. Those of Muon have
    bounds in place of recorded bits: test_muon compares with torch.optim.Muon."""
    return [name for name in _all_names() if not name.startswith("lowp_") and "muon" not in name]


def low_precision_names():
    """Returns the names of the cases of steps with moments and masters in other formats than float32."""
    return [name for name in _all_names() if name.startswith("lowp_") and
            read(os.path.join(FOLDER, name + ".safetensors"))[0]["algorithm"] == "low_precision"]


def _all_names():
    if not os.path.isdir(FOLDER):
        return []
    return sorted(name[:-len(".safetensors")] for name in os.listdir(FOLDER) if name.endswith(".safetensors"))


def read(path):
    """Returns metadata and tensors of a file."""
    with open(path, "rb") as stream:
        length, = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        data = bytearray(stream.read())
    metadata, tensors = header.pop("__metadata__"), {}
    for key, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        count = math.prod(entry["shape"])
        values = torch.frombuffer(data, dtype=dtype, count=count, offset=begin) if end > begin else \
            torch.empty(0, dtype=dtype)
        tensors[key] = values.reshape(entry["shape"])
    return metadata, tensors


class Golden:
    """One case: `metadata`, and `tensors` by their names."""

    def __init__(self, name):
        self.metadata, self.tensors = read(os.path.join(FOLDER, name + ".safetensors"))
        self.steps, self.ranks = int(self.metadata["steps"]), int(self.metadata["world_size"])

    def number(self, key):
        """Returns a value of the metadata, which are strings, as a number, or None if it is missing."""
        text = self.metadata.get(key, "None")
        return None if text == "None" else json.loads(text)

    def name_of(self, quantity, rank=0, item=None):
        """Returns the name of a tensor for a rank. A value shared by all ranks is stored once."""
        end = [] if item is None else [item]
        tries = ["/".join([quantity, who, *end]) for who in ("all", "r%d" % rank)] + ["/".join([quantity, *end])]
        for name in tries:
            if name in self.tensors:
                return name
        raise KeyError("none of %s is recorded" % ", ".join(tries))

    def get(self, quantity, rank=0, item=None):
        return self.tensors[self.name_of(quantity, rank, item)]

    def has(self, quantity):
        return any(name.split("/")[0] == quantity for name in self.tensors)


def _order(values, dtype):
    """Returns the index of each value in the sorted list of all values of a 16-bit format."""
    bits = values.to(dtype).view(torch.int16).long()
    return torch.where(bits < 0, -(bits + 2 ** 15), bits)


class Comparison:
    """Compares the steps of one rank with the record. Collects differences, because a rank that stopped at the first
    one
    would leave the others waiting in an exchange."""

    def __init__(self, golden, rank=0):
        self.golden, self.rank = golden, rank
        self.compared, self.peaks, self.wrong, self.values = {}, {}, [], 0

    def peak(self, name):
        """Returns the largest finite magnitude in all rows of the tensor."""
        if name not in self.peaks:
            values = self.golden.tensors[name].double()
            values = values[values.isfinite()].abs()
            self.peaks[name] = values.max().item() if values.numel() else 0.0
        return self.peaks[name]

    def row(self, t, got, quantity, item=None, allowed=None):
        """Compares results of call t with its row; t = None: with a tensor that has no rows."""
        name = self.golden.name_of(quantity, self.rank, item)
        want = self.golden.tensors[name]
        self.compared.setdefault(name, set()).add(t)
        want = (want if t is None else want[t]).reshape(-1)
        got = torch.as_tensor(got, dtype=torch.float64).detach().reshape(-1)
        if got.shape != want.shape:
            self.wrong.append("%s has %d values, and is recorded with %d" % (name, got.numel(), want.numel()))
            return
        self.values += want.numel()
        exact = want.double()
        same = (got == exact) | (got.isnan() & exact.isnan())
        finite = got.isfinite() & exact.isfinite()
        if allowed is None and want.dtype in (torch.float16, torch.bfloat16):
            near = (_order(got, want.dtype) - _order(exact, want.dtype)).abs() <= 1
        elif allowed is None and not want.dtype.is_floating_point:
            near = same
        else:
            near = (got - exact).abs() <= (2e-6 * self.peak(name) if allowed is None else allowed)
        bad = ~(same | (finite & near))
        if bad.any():
            i = int(bad.nonzero()[0])
            self.wrong.append("%s, call %s, element %d: %.9g, and %.9g is recorded" % (name, t, i, got[i], exact[i]))

    def error_row(self, t, got, quantity, item):
        """Compares residuals. Their tolerance is relative to the largest scale from which they were computed or, if
        they are
        far below it, to their own peak."""
        name = self.golden.name_of(quantity, self.rank, item)
        largest = self.peak(self.golden.name_of(quantity.replace("error", "scale"), self.rank, item))
        self.row(t, got, quantity, item, min(4e-6 * largest, max(2e-5 * self.peak(name), 1e-6 * largest)))

    def finish(self, inputs=()):
        """Returns the differences, and the tensors recorded for this rank that were not compared."""
        left = []
        for name in self.golden.tensors:
            quantity, _, who = name.partition("/")
            who = who.split("/")[0]
            if quantity in INPUTS or quantity in HIDDEN or quantity in inputs:
                continue
            if who.startswith("r") and who != "r%d" % self.rank:
                continue
            rows = 1 if quantity.endswith("_init") else self.golden.steps
            if len(self.compared.get(name, ())) != rows:
                left.append("%s was compared in %d of %d calls" % (name, len(self.compared.get(name, ())), rows))
        if not self.values:
            left.append("nothing was compared")
        return self.wrong + left
