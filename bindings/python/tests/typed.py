# SPDX-License-Identifier: Apache-2.0
"""A user's program, for `mypy --strict`. The last function has deliberate type errors."""

import sys
from typing import Dict, List

import dsopt


def train(params: Dict[str, memoryview], grads: List[memoryview]) -> float:
    with dsopt.Context("cpu", threads=2, parallel_for=serial) as context:
        scaler = dsopt.Scaler(context, init=1024.0)
        opt = dsopt.Optimizer(
            params, dsopt.AdamW(lr=1e-3, betas=(0.9, 0.95)), context=context, scaler=scaler, max_norm=1.0
        )
        opt.step(grads, lr=1e-4)
        for group in opt.groups:
            group.lr = group.lr / 2
        report: dsopt.Report = opt.report()
        names: List[str] = list(opt.state)
        opt.save("run.safetensors")
        return report.grad_norm if names else dsopt.norm(grads).norm


def serial(n: int, body: "dsopt.Piece") -> None:
    for i in range(n):
        body(i)


def wrong() -> None:
    dsopt.Optimizer([], dsopt.AdamW(learning_rate=1e-3))
    dsopt.Context(threads="two")


if sys.argv[1:]:
    print(train({}, []))
