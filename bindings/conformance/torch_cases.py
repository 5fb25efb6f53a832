# SPDX-License-Identifier: Apache-2.0
"""Runs the cases of README.md with dsopt.torch. Ranks are processes with gloo."""
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

from dsopt.torch import AdamW, FP16_Optimizer, FusedAdam, Muon, OnebitAdam


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


def step(optimizer, params, gradients):
    """Steps with gradients in float32, whatever the dtype of the parameters."""
    for param in params:
        param.grad = torch.zeros_like(param)
        param.grad.data = gradients.numbers(param.numel()).view(param.shape)  # an assigned gradient needs the dtype
    optimizer.step()


def moments(optimizer, params, names=("exp_avg", "exp_avg_sq")):
    return [optimizer.state[param][name] for name in names for param in params if name in optimizer.state[param]]


def adamw():
    start, gradients = Generator(12345), Generator(1000)
    params = [torch.nn.Parameter(start.numbers(count)) for count in (1, 7, 4099)]
    inner = FusedAdam(params, lr=0.015625, weight_decay=0.125)
    optimizer = FP16_Optimizer(inner, low_precision_dtype=torch.float32, clip_grad=1.0)
    for _ in range(10):
        step(optimizer, params, gradients)
    return bytes_of(params + moments(inner, params))


def run_rank(rank, folder):
    """Runs one process, which writes the results of the cases with ranks into the folder."""
    dist.init_process_group("gloo", init_method="file://%s/rendezvous" % folder, rank=rank, world_size=2)

    def write(case, params, more=()):
        for name, tensors in (("weights", params), *more):
            with open(os.path.join(folder, "%s.%s.%d" % (case, name, rank)), "wb") as file:
                file.write(bytes_of(tensors))

    start, gradients = Generator(54321), Generator(2000 + rank)
    params = [torch.nn.Parameter(start.numbers(count)) for count in (5, 130)]
    optimizer = OnebitAdam(params, lr=0.015625, freeze_step=3)
    for _ in range(6):
        step(optimizer, params, gradients)
    write("onebit", params)

    start, gradients = Generator(54321), Generator(3000 + rank)
    params = [torch.nn.Parameter(start.numbers(count)) for count in (6, 9000, 130)]
    optimizer = AdamW(params, lr=0.015625, weight_decay=0.125, shard=True, average=True, max_grad_norm=1.0)
    for _ in range(5):
        step(optimizer, params, gradients)
    write("sharded", params, [(name, moments(optimizer, params, (name,))) for name in ("exp_avg", "exp_avg_sq")])

    start, gradients = Generator(54321), Generator(4000)
    params = [torch.nn.Parameter(start.numbers(count)) for count in (6, 9000, 130)]
    optimizer = AdamW(params, lr=0.015625, weight_decay=0.125, shard=True)
    for _ in range(3):
        step(optimizer, params, gradients)
    optimizer.save(os.path.join(folder, "%d.safetensors" % rank))
    write("resharded", params)
    dist.barrier()
    dist.destroy_process_group()


def read(folder, case, name):
    results = []
    for rank in range(2):
        with open(os.path.join(folder, "%s.%s.%d" % (case, name, rank)), "rb") as file:
            results.append(file.read())
    return results


def weights_of(folder, case):
    first, second = read(folder, case, "weights")
    if first != second:
        sys.exit("%s: the ranks end with different bits" % case)
    return first


def sharded(folder):
    return weights_of(folder, "sharded") + b"".join(b"".join(read(folder, "sharded", name))
                                                    for name in ("exp_avg", "exp_avg_sq"))


def resharded(folder):
    gradients, counts = Generator(4000), (6, 9000, 130)
    gradients.numbers(3 * sum(counts))  # those of the ranks that saved
    weights = torch.tensor(list(weights_of(folder, "resharded")), dtype=torch.uint8).view(torch.float32)
    params = [torch.nn.Parameter(part.clone()) for part in weights.split(counts)]
    optimizer = AdamW(params, lr=0.015625, weight_decay=0.125)
    optimizer.load([os.path.join(folder, "%d.safetensors" % rank) for rank in range(2)])
    for _ in range(3):
        step(optimizer, params, gradients)
    return bytes_of(params + moments(optimizer, params))


def low_precision():
    start, gradients = Generator(12345), Generator(1000)
    params = [torch.nn.Parameter(start.numbers(count).bfloat16()) for count in (1, 7, 4099)]
    groups = [{"params": params[:2], "param_names": ["a", "b"], "exp_avg_format": "e4m3",
               "exp_avg_sq_format": "bf16_random", "min_8bit_size": 0},
              {"params": params[2:], "param_names": ["c"], "exp_avg_format": "q8", "exp_avg_sq_format": "q8"}]
    optimizer = AdamW([{**group, "seed": 7} for group in groups], lr=0.015625, weight_decay=0.125, masters="remainder")
    for _ in range(10):
        step(optimizer, params, gradients)
    names = ("remainder", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    return bytes_of(params + moments(optimizer, params, names))


def muon():
    start, gradients = Generator(777), Generator(888)
    qkv, w, bias = params = [torch.nn.Parameter(start.numbers(torch.Size(shape).numel()).view(shape))
                             for shape in ((48, 16), (20, 17), (130,))]
    optimizer = Muon([{"params": [qkv], "rows": 16, "cols": 16}, {"params": [w]},
                      {"params": [bias], "use_muon": False, "lr": 0.0078125, "betas": (0.9, 0.999), "eps": 0.0,
                       "weight_decay": 0.25}], lr=0.015625, momentum=0.9375, weight_decay=0.125)
    for _ in range(5):
        step(optimizer, params, gradients)
    return bytes_of(params + moments(optimizer, params, ("momentum_buffer", "exp_avg", "exp_avg_sq")))


def accumulation():
    start, gradients = Generator(12345), Generator(5000)
    params = [torch.nn.Parameter((start.numbers(count) * 1024).floor().div(1024).half()) for count in (1, 7, 4099)]
    inner = FusedAdam(params, lr=0.015625, weight_decay=0.125)
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, clip_grad=1.0,
                               dynamic_loss_args={"init_scale": 1024, "scale_window": 2})
    for number in range(8):
        sums = [torch.zeros(param.numel()) for param in params]
        scale = optimizer.loss_scale
        for micro in range(3):
            for total in sums:
                total += gradients.numbers(total.numel()) * scale
            if (number, micro) == (3, 1):
                sums[2][0] = float("inf")
        for param, total in zip(params, sums):
            param.grad = torch.zeros_like(param)
            param.grad.data = total
        optimizer.step()
    state = moments(inner, params, ("master", "exp_avg", "exp_avg_sq"))
    return bytes_of(params + state + [torch.tensor([optimizer.loss_scale], dtype=torch.float32)])


def main():
    with tempfile.TemporaryDirectory() as folder:
        both = [subprocess.Popen([sys.executable, os.path.abspath(__file__), str(rank), folder]) for rank in range(2)]
        if any([process.wait() for process in both]):
            sys.exit("a process of the cases with ranks failed")
        results = {"onebit": weights_of(folder, "onebit"), "sharded": sharded(folder), "resharded": resharded(folder)}
    for case in (adamw, low_precision, muon, accumulation):
        results[case.__name__] = case()
    for name, data in results.items():
        print("torch", name, digest_of(data))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run_rank(int(sys.argv[1]), sys.argv[2])
    else:
        main()
