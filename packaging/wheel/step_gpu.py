#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains on a GPU with the installed dsopt, in each framework that there is, and compares the parameters with a training
on the CPU: bit for bit, except for Muon, whose products are cuBLASLt's.

usage: step_gpu.py DEVICE       cuda; cpu is for a rehearsal without a GPU

The last line is `N passed, N failed`. Frameworks that are missing, or do not use the device, are named.
"""
import sys

STEPS = 10


def torch_trainings(device):
    import torch
    import dsopt.torch as opt

    def train(make, dtype, where):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype).to(where)) for shape in ((129, 65), (1000,), (3,))]
        optimizer = make(params)
        for _ in range(STEPS):
            for param in params:
                param.grad = (param.detach().float() * 0.5 + 0.125).to(dtype)
            optimizer.step()
        return [param.detach().float().cpu() for param in params]

    def muon(params):
        return opt.Muon([{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}], lr=0.02)

    rules = {"AdamW": opt.AdamW, "Adagrad": opt.Adagrad, "Lion": opt.Lion, "FusedLamb": opt.FusedLamb, "Muon": muon,
             "SGD": lambda params: opt.SGD(params, lr=0.1, momentum=0.9),
             "AdamW8bit": opt.AdamW8bit}
    for name, make in rules.items():
        for dtype in (torch.float32, torch.bfloat16):
            def compare(make=make, dtype=dtype, name=name):
                mine, expected = train(make, dtype, device), train(make, dtype, "cpu")
                for a, b in zip(mine, expected):
                    assert torch.isfinite(a).all()
                    assert torch.allclose(a, b, rtol=0.02, atol=0.02) if name == "Muon" else torch.equal(a, b), (
                        (a - b).abs().max())
            yield "torch %s: %s, %s" % (torch.__version__, name, str(dtype)[6:]), compare


def jax_trainings(device):
    import jax
    import jax.numpy as jnp
    import dsopt.jax
    from step_jax import train

    where = jax.devices("gpu" if device == "cuda" else "cpu")[0]  # RuntimeError if JAX has none

    def train_on(rule, where):
        with jax.default_device(where):
            return jax.device_get(train(rule))

    for name, rule in {"adamw": dsopt.jax.adamw(0.01), "lamb": dsopt.jax.lamb(0.01)}.items():
        def compare(rule=rule):
            # XLA contracts the caller's gradients on each device in its own way.
            mine, expected = train_on(rule, where), train_on(rule, jax.devices("cpu")[0])
            for key, value in expected.items():
                assert jnp.allclose(mine[key], value, rtol=1e-5, atol=1e-6), key
        yield "JAX %s: %s" % (jax.__version__, name), compare


def main():
    device = sys.argv[1]
    passed = failed = 0
    for framework, trainings in (("torch", torch_trainings), ("JAX", jax_trainings)):
        try:
            found = list(trainings(device))
        except (ImportError, RuntimeError) as error:
            print("%s: not available: %s" % (framework, str(error).splitlines()[0]))
            continue
        for name, compare in found:
            try:
                compare()
            except Exception as error:  # pylint: disable=broad-except # reported
                failed += 1
                print("%s: FAILED: %s: %s" % (name, type(error).__name__, error))
            else:
                passed += 1
                print("%s: passed" % name)
    print("%d passed, %d failed" % (passed, failed))
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
