# SPDX-License-Identifier: Apache-2.0
"""Algorithms with their hyper-parameters. The defaults are the library's, dsopt_group_init."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Tuple

from . import _abi as abi
from ._errors import ArgumentTypeError

_FLAGS = {
    "eps_inside_sqrt": abi.DSOPT_GROUP_EPS_INSIDE_SQRT,
    "eps_uncorrected": abi.DSOPT_GROUP_EPS_UNCORRECTED,
    "non_freeze": abi.DSOPT_GROUP_NON_FREEZE,
    "nesterov": abi.DSOPT_GROUP_NESTEROV,
}
_KEYS = {
    number: name[len("DSOPT_KEY_") :].lower()
    for name, number in abi.description["constants"].items()
    if name.startswith("DSOPT_KEY_")
}


def _pair(value: Any, label: str) -> Tuple[Any, Any]:
    try:
        first, second = value
    except (TypeError, ValueError) as problem:
        raise ArgumentTypeError("%s is %r: %s" % (label, value, problem), 10, "DSOPT_ERR_ARGUMENT") from problem
    return first, second


@dataclass
class Group:
    """Hyper-parameters of some parameters. In all algorithms `max_norm` clips by the norm of this group's gradients
    alone; 0 = off."""

    algorithm: ClassVar[int]
    lr: float = 1e-3

    def struct(self) -> Any:
        """As a dsopt_group."""
        group = abi.dsopt_group()
        abi.check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group), self.algorithm))
        for field in fields(self):
            value, label = getattr(self, field.name), "%s of %s" % (field.name, type(self).__name__)
            if field.name == "betas":
                for place, beta in zip(("beta1", "beta2"), _pair(value, label)):
                    abi.assign(group, place, beta, label)
            elif field.name == "bias_correction":
                group.flags |= 0 if value else abi.DSOPT_GROUP_NO_BIAS_CORRECTION
            elif field.name in _FLAGS:
                group.flags |= _FLAGS[field.name] if value else 0
            else:
                abi.assign(group, field.name, value, label)
        return group


@dataclass
class _Adaptive(Group):
    """Two moments."""

    betas: Tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 0.0


@dataclass
class Adam(_Adaptive):
    """Weight decay as L2. `eps_uncorrected`: eps beside the uncorrected variance, as in Keras."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAM
    bias_correction: bool = True
    eps_uncorrected: bool = False


@dataclass
class AdamW(_Adaptive):
    """Decoupled weight decay. `eps_uncorrected`: eps beside the uncorrected variance, as in Keras."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAMW
    bias_correction: bool = True
    eps_uncorrected: bool = False


@dataclass
class AdamLegacy(_Adaptive):
    """The first fused Adam of apex: eps acts on the uncorrected variance."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAM_LEGACY
    bias_correction: bool = True
    eps_inside_sqrt: bool = False


@dataclass
class Lamb(_Adaptive):
    """Adam with one trust ratio per tensor."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_LAMB
    min_trust: float = 0.01
    max_trust: float = 10.0
    bias_correction: bool = True
    eps_inside_sqrt: bool = False


@dataclass
class OnebitAdam(_Adaptive):
    """1-bit Adam. `non_freeze`: never compressed."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ONEBIT_ADAM
    freeze_step: int = 100000
    non_freeze: bool = False


@dataclass
class ZeroOneAdam(_Adaptive):
    """0/1 Adam."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM
    freeze_step: int = 100000
    var_interval_steps: int = 16
    local_interval_steps: int = 32678
    max_local_interval: int = 16


@dataclass
class OnebitLamb(_Adaptive):
    """1-bit LAMB."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ONEBIT_LAMB
    min_trust: float = 0.01
    max_trust: float = 10.0
    freeze_step: int = 100000
    trust_beta: float = 0.9
    trust_threshold: float = 0.1
    trust_min_change: float = 0.5
    trust_max_change: float = 4.0


@dataclass
class Sgd(Group):
    """Stochastic gradient descent as in torch.optim.SGD, weight decay as L2. Without momentum there is no state."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_SGD
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    max_norm: float = 0.0


@dataclass
class Adagrad(Group):
    """As in torch.optim.Adagrad, weight decay as L2. `eps_inside_sqrt`: as in optax."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAGRAD
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    eps_inside_sqrt: bool = False
    max_norm: float = 0.0


@dataclass
class Lion(Group):
    """As in optax.lion, decoupled weight decay."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_LION
    lr: float = 1e-4
    betas: Tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    max_norm: float = 0.0


class GroupView:
    """The hyper-parameters of one group, or of all, as they are set now. A change counts from the next step on."""

    __slots__ = ("_optimizer", "_index")  # a name that is none is refused

    def __init__(self, optimizer: Any, index: int) -> None:
        self._optimizer, self._index = optimizer, index

    def _get(self, key: int) -> float:
        value = ctypes.c_double()
        abi.check(abi.lib.dsopt_optimizer_get(self._optimizer.handle, self._index, key, ctypes.byref(value)))
        return value.value

    def _set(self, key: int, value: float) -> None:
        number = abi.number(value, ctypes.c_double, _KEYS[key])
        abi.check(abi.lib.dsopt_optimizer_set(self._optimizer.handle, self._index, key, number))

    @property
    def betas(self) -> Tuple[float, float]:
        return self._get(abi.DSOPT_KEY_BETA1), self._get(abi.DSOPT_KEY_BETA2)

    @betas.setter
    def betas(self, value: Tuple[float, float]) -> None:
        before, after = self.betas, _pair(value, "betas")
        self._set(abi.DSOPT_KEY_BETA1, after[0])
        try:
            self._set(abi.DSOPT_KEY_BETA2, after[1])
        except BaseException:
            self._set(abi.DSOPT_KEY_BETA1, before[0])
            raise

    @property
    def algorithm(self) -> int:
        """enum dsopt_algorithm."""
        return int(self._get(abi.DSOPT_KEY_ALGORITHM))

    def __repr__(self) -> str:
        kind = next(kind for kind in ALGORITHMS if kind.algorithm == self.algorithm)
        shown = [field.name for field in fields(kind) if field.name in _SHOWN]
        return "<%s %s>" % (kind.__name__, " ".join("%s=%r" % (name, getattr(self, name)) for name in shown))

    @property
    def lr(self) -> float:
        """Learning rate."""
        return self._get(abi.DSOPT_KEY_LR)

    @lr.setter
    def lr(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_LR, value)

    @property
    def eps(self) -> float:
        return self._get(abi.DSOPT_KEY_EPS)

    @eps.setter
    def eps(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_EPS, value)

    @property
    def weight_decay(self) -> float:
        return self._get(abi.DSOPT_KEY_WEIGHT_DECAY)

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_WEIGHT_DECAY, value)

    @property
    def max_norm(self) -> float:
        """Clip by the norm of this group's gradients. 0 = off."""
        return self._get(abi.DSOPT_KEY_GROUP_MAX_NORM)

    @max_norm.setter
    def max_norm(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_GROUP_MAX_NORM, value)

    @property
    def min_trust(self) -> float:
        """LAMB."""
        return self._get(abi.DSOPT_KEY_MIN_TRUST)

    @min_trust.setter
    def min_trust(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_MIN_TRUST, value)

    @property
    def max_trust(self) -> float:
        """LAMB."""
        return self._get(abi.DSOPT_KEY_MAX_TRUST)

    @max_trust.setter
    def max_trust(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_MAX_TRUST, value)

    @property
    def bias_correction(self) -> bool:
        return bool(self._get(abi.DSOPT_KEY_BIAS_CORRECTION))

    @bias_correction.setter
    def bias_correction(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_BIAS_CORRECTION, value)

    @property
    def eps_inside_sqrt(self) -> bool:
        """LAMB, AdamLegacy and Adagrad."""
        return bool(self._get(abi.DSOPT_KEY_EPS_INSIDE_SQRT))

    @eps_inside_sqrt.setter
    def eps_inside_sqrt(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_EPS_INSIDE_SQRT, value)

    @property
    def eps_uncorrected(self) -> bool:
        """Adam and AdamW."""
        return bool(self._get(abi.DSOPT_KEY_EPS_UNCORRECTED))

    @eps_uncorrected.setter
    def eps_uncorrected(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_EPS_UNCORRECTED, value)

    @property
    def momentum(self) -> float:
        """SGD. Cannot change between 0 and another value."""
        return self._get(abi.DSOPT_KEY_MOMENTUM)

    @momentum.setter
    def momentum(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_MOMENTUM, value)

    @property
    def dampening(self) -> float:
        """SGD."""
        return self._get(abi.DSOPT_KEY_DAMPENING)

    @dampening.setter
    def dampening(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_DAMPENING, value)

    @property
    def nesterov(self) -> bool:
        """SGD."""
        return bool(self._get(abi.DSOPT_KEY_NESTEROV))

    @nesterov.setter
    def nesterov(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_NESTEROV, value)

    @property
    def lr_decay(self) -> float:
        """Adagrad."""
        return self._get(abi.DSOPT_KEY_LR_DECAY)

    @lr_decay.setter
    def lr_decay(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_LR_DECAY, value)

    @property
    def initial_accumulator_value(self) -> float:
        """Adagrad: of sums that are made or reset from now on."""
        return self._get(abi.DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE)

    @initial_accumulator_value.setter
    def initial_accumulator_value(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE, value)


ALGORITHMS = (Adam, AdamW, AdamLegacy, Lamb, Sgd, Adagrad, Lion, OnebitAdam, ZeroOneAdam, OnebitLamb)
_SHOWN = ("lr", "betas", "eps", "momentum", "lr_decay", "weight_decay")  # in the representation of a GroupView
