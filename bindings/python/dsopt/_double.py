# SPDX-License-Identifier: Apache-2.0
"""Update rules in double, for float64 parameters: the engine's arithmetic is fp32.

Arrays are NumPy's or torch's, and `ops` has the functions for them. Operations and their order are as in torch.optim
without foreach and fused.

ops.add(x, y, a)         x += a y
ops.sum(x, y, a)         returns x + a y
ops.lerp(x, y, a)        x += a (y - x)
ops.addcmul(x, y, z, a)  x += a y z
ops.addcdiv(x, y, z, a)  x += a y / z
ops.sqrt, sign, where    as in NumPy
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from . import _abi as abi


class Hyper(NamedTuple):
    """Hyper-parameters of a group, as in dsopt_group."""

    lr: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    bias_correction: bool = True
    eps_inside_sqrt: bool = False
    eps_uncorrected: bool = False
    min_trust: float = 0.0
    max_trust: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    lr_decay: float = 0.0


def squares(array: Any) -> float:
    """Returns the sum of squares, over all ranks that have a shard of a DTensor."""
    total = (array * array).sum()
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)


def norm(array: Any) -> float:
    """Returns the L2 norm."""
    return math.sqrt(squares(array))


def _corrections(h: Hyper, step: int) -> Tuple[float, float]:
    return (1 - h.beta1**step, 1 - h.beta2**step) if h.bias_correction else (1.0, 1.0)


def _take_gradient(ops: Any, h: Hyper, g: Any, m: Any, v: Any) -> None:
    ops.lerp(m, g, 1 - h.beta1)
    v *= h.beta2
    ops.addcmul(v, g, g, 1 - h.beta2)


def _adam(ops: Any, h: Hyper, step: int, g: Any, p: Any, m: Any, v: Any) -> None:
    if h.weight_decay:
        g = ops.sum(g, p, h.weight_decay)
    _adam_step(ops, h, step, g, p, m, v)


def _adamw(ops: Any, h: Hyper, step: int, g: Any, p: Any, m: Any, v: Any) -> None:
    if h.weight_decay:
        p *= 1 - h.lr * h.weight_decay
    _adam_step(ops, h, step, g, p, m, v)


def _adam_step(ops: Any, h: Hyper, step: int, g: Any, p: Any, m: Any, v: Any) -> None:
    _take_gradient(ops, h, g, m, v)
    c1, c2 = _corrections(h, step)
    eps = h.eps / c2**0.5 if h.eps_uncorrected else h.eps
    ops.addcdiv(p, m, ops.sqrt(v) / c2**0.5 + eps, -(h.lr / c1))


def _plain_update(ops: Any, h: Hyper, p: Any, m: Any, v: Any) -> Any:
    return m / (ops.sqrt(v + h.eps) if h.eps_inside_sqrt else ops.sqrt(v) + h.eps) + h.weight_decay * p


def _legacy(ops: Any, h: Hyper, step: int, g: Any, p: Any, m: Any, v: Any) -> None:
    _take_gradient(ops, h, g, m, v)
    c1, c2 = _corrections(h, step)
    ops.add(p, _plain_update(ops, h, p, m, v), -(h.lr * c2**0.5 / c1))


def _lamb(ops: Any, h: Hyper, step: int, g: Any, p: Any, m: Any, v: Any) -> float:
    """Returns the trust ratio."""
    _take_gradient(ops, h, g, m, v)
    update = _plain_update(ops, h, p, m, v)
    c1, c2 = _corrections(h, step)
    weight, change = norm(p), norm(update)
    ratio = min(max(weight / change, h.min_trust), h.max_trust) if weight and change else 1.0
    ops.add(p, update, -(h.lr * c2**0.5 / c1 * ratio))
    return ratio


def _sgd(ops: Any, h: Hyper, step: int, g: Any, p: Any, *momentum: Any) -> None:
    if h.weight_decay:
        g = ops.sum(g, p, h.weight_decay)
    if momentum:
        (m,) = momentum
        if step == 1:
            m[...] = g
        else:
            m *= h.momentum
            ops.add(m, g, 1 - h.dampening)
        g = ops.sum(g, m, h.momentum) if h.nesterov else m
    ops.add(p, g, -h.lr)


def _adagrad(ops: Any, h: Hyper, step: int, g: Any, p: Any, total: Any) -> None:
    if h.weight_decay:
        g = ops.sum(g, p, h.weight_decay)
    ops.addcmul(total, g, g, 1.0)
    lr = h.lr / (1 + (step - 1) * h.lr_decay)
    if h.eps_inside_sqrt:  # eps may be 0, and then the sum may be 0 too
        ops.addcdiv(p, g, ops.sqrt(ops.where(total == 0, total + 1, total + h.eps)), -lr)
    else:
        ops.addcdiv(p, g, ops.sqrt(total) + h.eps, -lr)


def _lion(ops: Any, h: Hyper, step: int, g: Any, p: Any, m: Any) -> None:
    if h.weight_decay:
        p *= 1 - h.lr * h.weight_decay
    c = ops.sum(h.beta1 * m, g, 1 - h.beta1)
    ops.add(p, ops.where(c != c, c, ops.sign(c)), -h.lr)  # keeps NaN
    m *= h.beta2
    ops.add(m, g, 1 - h.beta2)


MEANS = ("exp_avg", "exp_avg_sq")
_RULES: Dict[int, Tuple[Callable[..., Optional[float]], Tuple[str, ...]]] = {
    abi.DSOPT_ALGORITHM_ADAM: (_adam, MEANS),
    abi.DSOPT_ALGORITHM_ADAMW: (_adamw, MEANS),
    abi.DSOPT_ALGORITHM_ADAM_LEGACY: (_legacy, MEANS),
    abi.DSOPT_ALGORITHM_LAMB: (_lamb, MEANS),
    abi.DSOPT_ALGORITHM_SGD: (_sgd, ("momentum_buffer",)),
    abi.DSOPT_ALGORITHM_ADAGRAD: (_adagrad, ("sum",)),
    abi.DSOPT_ALGORITHM_LION: (_lion, ("exp_avg",)),
}


def limits_of(algorithm: int) -> str:
    """Returns what is fp32 in an algorithm that has no rule here; "" for the others."""
    if algorithm == abi.DSOPT_ALGORITHM_MUON:
        return "products"
    return "" if algorithm in _RULES else "exchange"


def moments_of(algorithm: int, momentum: float) -> Tuple[str, ...]:
    """Returns the names of a parameter's state tensors."""
    names = _RULES[algorithm][1]
    return names if algorithm != abi.DSOPT_ALGORITHM_SGD or momentum else ()


def clipping(total: float, largest: float) -> float:
    """Returns the divisor that clips gradients of norm `total` to `largest`; 0 = off."""
    return max(1.0, (total + 1e-6) / largest) if largest else 1.0


def update(
    ops: Any, algorithm: int, hyper: Hyper, step: int, param: Any, grad: Any, moments: Tuple[Any, ...]
) -> Optional[float]:
    """Step a parameter with an unscaled, clipped gradient. `step` counts from 1. Returns the trust ratio of LAMB."""
    return _RULES[algorithm][0](ops, hyper, step, grad, param, *moments)
