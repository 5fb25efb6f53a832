#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that dsopt-replay detects wrong records: runs it on copies of golden cases, each of which has one error.

usage: altered.py [--backend NAME] REPLAY FILE...

Each quantity that replay compares gets a copy of its file with one value changed, in a tensor of any parameter and
rank: by 3e-5 of the tensor's peak (F32, F64), by three units in the last place (16 bit), by one (integers), to the
other one (flags), to twice itself (loss scales). In records of Muon, changes are as large as their tolerances require,
and further copies have other options than those that were recorded. Replay must fail each copy and name that tensor.
The engine computes the trajectory from the inputs only, so a change in any row of an output is a difference of that
value alone. Further copies have errors in their structure that a reader without checks would accept. The exit status is
1 unless replay detects all errors.
"""
import argparse
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import tempfile

# dtype: struct code of one element. 16-bit floats are handled as bit patterns.
CODES = {"F64": "d", "F32": "f", "F16": "H", "BF16": "H", "I64": "q", "I32": "i", "I16": "h", "U8": "B",
         "F8_E4M3": "B"}
SMALLEST_INF = {"F16": 0x7C00, "BF16": 0x7F80}
INPUTS = {"grad", "grad16", "grads_averaged", "grad_present", "lr", "param_init", "param16_init", "exp_avg_mask",
          "input", "x", "split_x", "skip", "grad_u8", "original_error"}
OPTIONAL = {"grad_present", "original_error"}  # tensors that a record may lack
# muon: change of one value, as a fraction of the peak. Weights are compared by the norm of their difference, recorded
# weights within the error of the original.
MUON_CHANGES = {"exact": 4e-3, "exact_last": 4e-3, "param": 8, "param_last": 8, "momentum_last": 1e-4,
                "update_length": 1e-2}
SCALES = {"loss_scale", "loss_scale_used"}
BATCH = 128  # files per run of replay: few processes, little disk space


class Golden:
    """A safetensors file whose header and bytes can be changed."""

    def __init__(self, path):
        with open(path, "rb") as stream:
            raw = stream.read()
        (length,) = struct.unpack_from("<Q", raw)
        self.header = json.loads(raw[8:8 + length])
        self.data = bytearray(raw[8 + length:])

    def metadata(self):
        return self.header["__metadata__"]

    def tensors(self):
        return [name for name in self.header if name != "__metadata__"]

    def compared(self):
        inputs = set(INPUTS)
        if self.metadata()["algorithm"] in ("dynamic_loss_scaler", "fp16_scale_rule"):
            inputs.add("overflow")  # an output of the wrappers, but an input of the bare scalers
        if self.metadata()["algorithm"] == "low_precision_import":
            inputs |= {"param", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"}
        return [name for name in self.tensors() if name.split("/")[0] not in inputs]

    def bytes(self):
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + bytes(self.data)

    def drop(self, name):
        begin, end = self.header.pop(name)["data_offsets"]
        del self.data[begin:end]
        for other in self.tensors():
            offsets = self.header[other]["data_offsets"]
            if offsets[0] >= end:
                self.header[other]["data_offsets"] = [offset - (end - begin) for offset in offsets]

    def values(self, name):
        """Returns the values of a tensor, which may be shared by the ranks."""
        if name not in self.header:
            head, _, tail = name.split("/")
            name = f"{head}/all/{tail}"
        if name not in self.header:
            head, _, tail = name.split("/")
            return [value for other in self.tensors() if other.startswith(head + "/") and other.endswith("/" + tail)
                    for value in self.values(other)]
        begin, end = self.header[name]["data_offsets"]
        code = CODES[self.header[name]["dtype"]]
        return struct.unpack_from(f"<{(end - begin) // struct.calcsize(code)}{code}", self.data, begin)

    def alter(self, name, rng):
        """Changes one value. Returns False if the tensor is empty."""
        dtype = self.header[name]["dtype"]
        begin, end = self.header[name]["data_offsets"]
        code = CODES[dtype]
        values = list(struct.unpack_from(f"<{(end - begin) // struct.calcsize(code)}{code}", self.data, begin))
        if not values:
            return False
        change = {"d": change_float, "f": change_float, "H": change_half, "B": change_flag}.get(code, change_integer)
        if name.split("/")[0] in SCALES:
            change = change_scale
        if name.split("/")[0] in ("worker_error", "server_error"):
            # Errors are the rounding residuals of much larger numbers: their tolerance follows from their scale.
            scale = max(map(abs, self.values(name.replace("_error", "_scale"))), default=0)
            peak = max(map(abs, values))
            index = rng.randrange(len(values))
            delta = 3e-5 * max(peak, 0.1 * scale) if max(peak, scale) > 0 else 1.0
            value = values[index] + delta
        elif self.metadata()["algorithm"] == "muon":
            index, value = change_of_muon(values, dtype, MUON_CHANGES[name.split("/")[0]], rng)
        else:
            index, value = change(values, dtype, rng)
        struct.pack_into("<" + code, self.data, begin + index * struct.calcsize(code), value)
        return True


def pick(indices, count, rng):
    """Returns one of the wanted indices, or any index if there are none."""
    return rng.choice(indices) if indices else rng.randrange(count)


def change_float(values, dtype, rng):
    largest = 3.4e38 if dtype == "F32" else 1.7e308
    finite = [i for i, value in enumerate(values) if math.isfinite(value)]
    index = pick(finite, len(values), rng)
    if not finite:
        return index, 1.0
    peak = max(abs(values[i]) for i in finite)
    # If all values are zero, any change counts, and the altered value is the new peak.
    delta = 3e-5 * peak if peak > 0 else 1.0
    if values[index] + delta > largest:
        delta = -delta
    return index, values[index] + delta


def change_half(bits, dtype, rng):
    # One unit is allowed, and the engine may be off by one in the other direction: a change by three is always noticed.
    infinity = SMALLEST_INF[dtype]
    finite = [i for i, value in enumerate(bits) if value & 0x7FFF < infinity]
    index = pick(finite, len(bits), rng)
    magnitude, sign = bits[index] & 0x7FFF, bits[index] & 0x8000
    if magnitude >= infinity:
        return index, 0
    return index, sign | (magnitude + 3 if magnitude + 3 < infinity else magnitude - 3)


def change_of_muon(values, dtype, fraction, rng):
    """Changes one value by a fraction of the peak. A momentum in BF16 may differ by its rounding in ten steps."""
    index = rng.randrange(len(values))
    if dtype != "BF16":
        peak = max(map(abs, values))
        return index, values[index] + fraction * (peak if peak > 0 else 1.0)
    floats = [struct.unpack("<f", struct.pack("<I", bits << 16))[0] for bits in values]
    changed = floats[index] + max(fraction, 0.1) * (max(map(abs, floats)) or 1.0)
    return index, struct.unpack("<I", struct.pack("<f", changed))[0] >> 16


def change_integer(values, dtype, rng):
    index = rng.randrange(len(values))
    limit = {"I64": 2**63, "I32": 2**31, "I16": 2**15}[dtype]
    return index, values[index] + 1 if values[index] + 1 < limit else values[index] - 1


def change_flag(values, dtype, rng):
    index = rng.randrange(len(values))
    return index, values[index] ^ 1


def change_scale(values, dtype, rng):
    index = rng.randrange(len(values))
    return index, 2 * values[index]


def damaged(path):
    """Yields copies of one file with an error in its structure: (description, bytes, text in replay's line)."""
    golden = Golden(path)
    size = len(golden.data)
    golden.header["unexpected_entry"] = {"dtype": "U8", "shape": [1], "data_offsets": [size, size + 1]}
    golden.data.append(0)
    yield "one more tensor", golden.bytes(), "unexpected_entry"

    required = [name for name in golden.tensors() if name.split("/")[0] not in OPTIONAL]
    for name in dict.fromkeys((golden.compared()[0], required[0])):
        golden = Golden(path)
        golden.drop(name)
        # A tensor that the rank does not have is looked up by the name shared by all ranks.
        shared = re.sub(r"/r\d+$", "", re.sub(r"/r\d+/", "/all/", name))
        yield f"without tensor {name}", golden.bytes(), shared

    golden = Golden(path)
    golden.metadata()["unexpected_entry"] = "1"
    yield "one more metadata key", golden.bytes(), "unexpected_entry"

    golden = Golden(path)
    if "groups" in golden.metadata():
        groups = json.loads(golden.metadata()["groups"])
        groups[-1]["unexpected_entry"] = 1
        golden.metadata()["groups"] = json.dumps(groups)
        yield "one more override in a group", golden.bytes(), "unexpected_entry"

    golden = Golden(path)
    golden.metadata()["algorithm"] = "unexpected_entry"
    yield "an unknown algorithm", golden.bytes(), "unexpected_entry"
    yield "its last byte cut off", Golden(path).bytes()[:-1], ""


def other_options(path):
    """Yields copies of one record of Muon with options other than the recorded ones: (description, bytes)."""
    def changed(change):
        golden = Golden(path)
        groups = json.loads(golden.metadata()["groups"])
        for group in groups:
            change(group, {**golden.metadata(), **group})
        golden.metadata()["groups"] = json.dumps(groups)
        return golden.bytes()

    if Golden(path).metadata()["bias_correction"] == "0":
        yield "another momentum rule", changed(
            lambda group, old: group.update(nesterov=1 - int(old["nesterov"])))
    yield "another adjustment", changed(
        lambda group, old: group.update(adjust="none" if old["adjust"] == "match_rms_adamw" else "match_rms_adamw"))
    yield "another decay", changed(
        lambda group, old: group.update(weight_decay=0.0 if float(old["weight_decay"]) > 0 else 0.1))
    yield "another number of iterations", changed(lambda group, old: group.update(ns_steps=8 - int(old["ns_steps"])))

    golden = Golden(path)
    shapes = json.loads(golden.metadata()["param_shapes"])
    transposed = [shape[::-1] for shape in shapes]
    if transposed != shapes:
        golden.metadata()["param_shapes"] = json.dumps(transposed)
        yield "transposed shapes", golden.bytes()

    golden = Golden(path)
    if any(name.startswith("momentum_last/") and golden.header[name]["dtype"] == "F32" for name in golden.tensors()):
        golden.metadata()["momentum"] = str(1.0001 * float(golden.metadata()["momentum"]))
        yield "a momentum that is 1e-4 larger", golden.bytes()

    if "grad_present" not in golden.header:
        return
    golden = Golden(path)
    begin, end = golden.header["grad_present"]["data_offsets"]
    present = golden.values("grad_present")
    golden.data[begin:end] = struct.pack(f"<{len(present)}{CODES[golden.header['grad_present']['dtype']]}",
                                         *[1] * len(present))
    if 0 in present:
        yield "absent gradients taken as they are", golden.bytes()
        for row, param in (divmod(place, len(shapes)) for place, value in enumerate(present) if value == 0):
            begin, end = golden.header[f"grad/p{param}"]["data_offsets"]
            size = (end - begin) // int(golden.metadata()["steps"])
            golden.data[begin + row * size:begin + (row + 1) * size] = bytes(size)
        yield "absent gradients taken for zeros", golden.bytes()


def checks(paths):
    """Yields the checks: (description, bytes of the file, verdict, tensor to be named or None, text in the line)."""
    for path in paths:
        stem = os.path.basename(path)
        yield stem, Golden(path).bytes(), "PASS", None, ""
        # A copy costs a training: one tensor of each quantity, of any parameter and rank.
        names = [name for name in Golden(path).compared() if Golden(path).values(name)]
        for name in {name.split("/")[0]: name for name in random.Random(stem).sample(names, len(names))}.values():
            golden = Golden(path)
            if golden.alter(name, random.Random(f"{stem}/{name}")):
                yield f"{stem} with one value of {name} changed", golden.bytes(), "FAIL", name, ""
        for what, raw, expected_text in damaged(path):
            yield f"{stem}, {what}", raw, "FAIL", None, expected_text
        if Golden(path).metadata()["algorithm"] == "muon":
            for what, raw in other_options(path):
                yield f"{stem} with {what}", raw, "FAIL", None, ""


def run_batch(command, batch, folder):
    """Returns the number of checks in which replay's output is as expected."""
    paths = []
    for index, (_, raw, _, _, _) in enumerate(batch):
        paths.append(os.path.join(folder, f"{index}.safetensors"))
        with open(paths[-1], "wb") as stream:
            stream.write(raw)
    result = subprocess.run(command + paths, stdout=subprocess.PIPE, text=True, check=False)
    lines = result.stdout.splitlines()
    wanted_status = 1 if any(line.startswith("FAIL") for line in lines) else 0
    if len(lines) != len(batch) + 1 or result.returncode != wanted_status:
        print(f"replay printed {len(lines)} lines for {len(batch)} files and ended with status {result.returncode}")
        return 0
    good = 0
    for index, (what, _, verdict, tensor, expected_text) in enumerate(batch):
        words = lines[index].split(" ")
        as_expected = words[:2] == [verdict, str(index)] and expected_text in lines[index]
        if as_expected and tensor is not None:
            as_expected = words[3:4] == [tensor]  # FAIL name difference tensor (...)
        good += as_expected
        if not as_expected:
            print(f"{what}: expected {verdict} {tensor or expected_text}, replay printed: {lines[index]}")
    return good


def main():
    parser = argparse.ArgumentParser(description="Checks that dsopt-replay detects wrong records.")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("replay")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    command = [arguments.replay, "--backend", arguments.backend]

    passed = total = 0
    with tempfile.TemporaryDirectory() as folder:
        batch = []
        for check in checks(arguments.files):
            batch.append(check)
            if len(batch) == BATCH:
                passed += run_batch(command, batch, folder)
                total += len(batch)
                batch = []
        if batch:
            passed += run_batch(command, batch, folder)
            total += len(batch)
    print(f"{passed} passed, {total - passed} failed")
    return 0 if passed == total else 1


if __name__ == "__main__":
    sys.exit(main())
