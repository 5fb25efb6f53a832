# SPDX-License-Identifier: Apache-2.0
"""Runs the three cases of README.md with dsopt.torch: AdamW with clipping, 1-bit Adam on two processes with gloo, and
low-precision state."""
import os
import subprocess
import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
except ImportError as problem:
    print("torch is not installed (%s)" % problem)
    sys.exit(77)
if not dist.is_available() or not dist.is_gloo_available():
    print("torch is built without gloo")
    sys.exit(77)

from dsopt.torch import AdamW, FP16_Optimizer, FusedAdam, OnebitAdam


class Generator:
    def __init__(self, seed):
        self.x = seed

    def numbers(self, count):
        values = []
        for _ in range(count):
            self.x = (self.x * 1664525 + 1013904223) % 2 ** 32
            values.append((self.x >> 8) * 2.0 ** -24 - 0.5)
        return torch.tensor(values, dtype=torch.float32)


def bytes_of(tensors):
    return b"".join(bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist()) for tensor in tensors)


def digest_of(data):
    digest = 0xcbf29ce484222325
    for byte in data:
        digest = (digest ^ byte) * 0x100000001b3 % 2 ** 64
    return "%016x" % digest


def adamw():
    start, gradients = Generator(12345), Generator(1000)
    params = [torch.nn.Parameter(start.numbers(count)) for count in (1, 7, 4099)]
    inner = FusedAdam(params, lr=0.015625, weight_decay=0.125)
    optimizer = FP16_Optimizer(inner, low_precision_dtype=torch.float32, clip_grad=1.0)
    for _ in range(10):
        for param in params:
            param.grad = gradients.numbers(param.numel())
        optimizer.step()
    return bytes_of(params + [inner.state[p][name] for name in ("exp_avg", "exp_avg_sq") for p in params])


def onebit(rank, folder):
    """Runs one process, which writes the bytes of its parameters into the folder."""
    dist.init_process_group("gloo", init_method="file://%s/rendezvous" % folder, rank=rank, world_size=2)
    start, gradients = Generator(54321), Generator(2000 + rank)
    params = [torch.nn.Parameter(start.numbers(count)) for count in (5, 130)]
    optimizer = OnebitAdam(params, lr=0.015625, freeze_step=3)
    for _ in range(6):
        for param in params:
            param.grad = gradients.numbers(param.numel())
        optimizer.step()
    with open(os.path.join(folder, str(rank)), "wb") as file:
        file.write(bytes_of(params))
    dist.barrier()
    dist.destroy_process_group()


def low_precision():
    start, gradients = Generator(12345), Generator(1000)
    params = [torch.nn.Parameter(start.numbers(count).bfloat16()) for count in (1, 7, 4099)]
    groups = [{"params": params[:2], "param_names": ["a", "b"], "exp_avg_format": "e4m3",
               "exp_avg_sq_format": "bf16_random", "min_8bit_size": 0},
              {"params": params[2:], "param_names": ["c"], "exp_avg_format": "q8", "exp_avg_sq_format": "q8"}]
    optimizer = AdamW([{**group, "seed": 7} for group in groups], lr=0.015625, weight_decay=0.125, masters="remainder")
    for _ in range(10):
        for param in params:
            param.grad = torch.zeros_like(param)
            param.grad.data = gradients.numbers(param.numel())  # float32: a gradient that is assigned needs the dtype
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    names = ("remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq")
    return bytes_of(params + [state[name] for name in names for state in states] + [states[2]["exp_avg_sq_scale"]])


def main():
    with tempfile.TemporaryDirectory() as folder:
        both = [subprocess.Popen([sys.executable, os.path.abspath(__file__), str(rank), folder]) for rank in range(2)]
        if any([process.wait() for process in both]):
            sys.exit("a process of the 1-bit case failed")
        results = []
        for rank in range(2):
            with open(os.path.join(folder, str(rank)), "rb") as file:
                results.append(file.read())
    if results[0] != results[1]:
        sys.exit("the ranks end with different bits")
    print("torch", digest_of(adamw() + results[0] + low_precision()))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        onebit(int(sys.argv[1]), sys.argv[2])
    else:
        main()
