# SPDX-License-Identifier: Apache-2.0
"""Algorithms with their hyper-parameters. The defaults are the library's, dsopt_group_init."""

from __future__ import annotations

import ctypes
import inspect
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Dict, Optional, Tuple

from . import _abi as abi
from ._errors import ArgumentTypeError, Error
from ._handle import choice

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_):
        return lambda kind: kind


_FLAGS = {
    "eps_inside_sqrt": abi.DSOPT_GROUP_EPS_INSIDE_SQRT,
    "eps_uncorrected": abi.DSOPT_GROUP_EPS_UNCORRECTED,
    "non_freeze": abi.DSOPT_GROUP_NON_FREEZE,
    "nesterov": abi.DSOPT_GROUP_NESTEROV,
}


def _words(prefix: str) -> Dict[str, int]:
    """Returns the constants of an enum by the rest of their names, without _SIGNED."""
    constants = {name: number for name, number in abi.description["constants"].items() if name.startswith(prefix)}
    return {name[len(prefix) :].lower(): number for name, number in constants.items() if number >= 0}


_KEYS = {number: name for name, number in _words("DSOPT_KEY_").items()}
FORMATS = _words("DSOPT_MOMENT_")
SCALED = tuple(name for name in FORMATS if name not in ("f32", "bf16", "bf16_random"))  # codes, with a scale per block
ADJUST = {
    "original": abi.DSOPT_ADJUST_ORIGINAL,
    "match_rms_adamw": abi.DSOPT_ADJUST_MATCH_RMS_ADAMW,
    "spectral_unclamped": abi.DSOPT_ADJUST_SPECTRAL,
    "none": abi.DSOPT_ADJUST_NONE,
}
NS_SCHEDULE = _words("DSOPT_NS_")
NS_DTYPE = {
    "bfloat16": abi.DSOPT_DTYPE_BF16,
    "float16": abi.DSOPT_DTYPE_F16,
    "float32": abi.DSOPT_DTYPE_F32,
}
_TRIPLE = ("ns_a", "ns_b", "ns_c")
_FORMAT_FIELDS = ("exp_avg_format", "exp_avg_sq_format")
_WORDS = {  # fields that are numbers in dsopt_group and words here
    "exp_avg_format": FORMATS,
    "exp_avg_sq_format": FORMATS,
    "adjust": ADJUST,
    "ns_schedule": NS_SCHEDULE,
    "ns_dtype": NS_DTYPE,
}
_DEFAULT: Any = object()  # replaced by the library's default when the class is created
_MEANING = {
    "lr": "learning rate",
    "betas": "decay of the first and of the second moment per step; for Lion: of the update and of the moment",
    "eps": "added to the square root of the second moment",
    "weight_decay": "coefficient of the weight decay",
    "max_norm": "clip by the norm of this group's gradients; 0 = off",
    "bias_correction": "divide the moments by 1 - beta^step",
    "eps_uncorrected": "add eps to the square root of the variance before its bias correction, as in Keras",
    "eps_inside_sqrt": "sqrt(v + eps) in place of sqrt(v) + eps",
    "min_trust": "smallest trust ratio of a tensor",
    "max_trust": "largest trust ratio of a tensor",
    "freeze_step": "last step that changes the variance",
    "non_freeze": "the group is never compressed and its variance never frozen",
    "var_interval_steps": "updates of the variance after which the interval between them doubles",
    "local_interval_steps": "steps after which the interval between synchronizations doubles",
    "max_local_interval": "longest interval between synchronizations, in steps",
    "trust_beta": "decay of the running mean of the trust ratio",
    "trust_threshold": "largest relative change per step of the factor that corrects the frozen trust ratio",
    "trust_min_change": "smallest value of that factor",
    "trust_max_change": "largest value of that factor",
    "momentum": "decay of the momentum per step; 0 = no momentum and no state",
    "dampening": "fraction of the gradient that does not enter the momentum after the first step",
    "nesterov": "Nesterov's momentum, which needs momentum above 0 and dampening 0",
    "lr_decay": "lr is divided by 1 + lr_decay * (step - 1)",
    "initial_accumulator_value": "initial value of the sum of squares",
    "ns_steps": "number of Newton-Schulz iterations",
    "ns_coefficients": "(a, b, c) of each iteration; None = those of ns_schedule. Presets have no other",
    "ns_schedule": "constant, or a preset with a triple for each of five iterations: polar_express or you",
    "ns_dtype": "dtype of the inputs of products: bfloat16, float16 or float32",
    "adjust": "factor of lr by the shape of a matrix: original, match_rms_adamw, spectral_unclamped or none",
    "exp_avg_format": "format of exp_avg or momentum_buffer in memory: f32, bf16, bf16_random, e4m3 or q8",
    "exp_avg_sq_format": "format of exp_avg_sq or sum in memory: f32, bf16_random or q8 (sum: not q8)",
}


def _pair(value: Any, label: str) -> Tuple[Any, Any]:
    try:
        first, second = value
    except (TypeError, ValueError) as problem:
        text = "%s is %s, and must be a pair of numbers" % (label, abi.shown(value))
        raise ArgumentTypeError(text, 10, "DSOPT_ERR_ARGUMENT") from problem
    return first, second


def _triple(value: Any, label: str) -> Tuple[Any, Any, Any]:
    try:
        a, b, c = value
    except (TypeError, ValueError) as problem:
        text = "%s is %s, and must be three numbers" % (label, abi.shown(value))
        raise ArgumentTypeError(text, 10, "DSOPT_ERR_ARGUMENT") from problem
    return a, b, c


def _flag(value: Any, label: str) -> bool:
    numpy = sys.modules.get("numpy")
    if isinstance(value, bool) or numpy is not None and isinstance(value, numpy.bool_):
        return bool(value)
    text = "%s is %s, and must be True or False" % (label, abi.shown(value))
    raise ArgumentTypeError(text, 10, "DSOPT_ERR_ARGUMENT")


def _initial(algorithm: int) -> Any:
    group = abi.dsopt_group()
    abi.check(abi.lib.dsopt_group_init(ctypes.byref(group), ctypes.sizeof(group), algorithm))
    return group


def _word_of(words: Dict[str, int], number: float) -> str:
    return next(word for word, value in words.items() if value == number)


def _default_of(group: Any, field: str) -> Any:
    if field == "betas":
        return group.beta1, group.beta2
    if field == "bias_correction":
        return not group.flags & abi.DSOPT_GROUP_NO_BIAS_CORRECTION
    if field == "ns_coefficients":
        return None
    if field in _WORDS:
        return _word_of(_WORDS[field], getattr(group, field))
    return bool(group.flags & _FLAGS[field]) if field in _FLAGS else getattr(group, field)


@dataclass_transform(kw_only_default=True)
class Group:
    """Hyper-parameters of a group of parameters. The algorithms are its subclasses. Their fields are passed by name,
    and can be changed until the group is passed to an Optimizer. Positional `values` are refused."""

    algorithm: ClassVar[int]
    meanings: ClassVar[Dict[str, str]] = {}  # of fields whose meaning differs from that in other algorithms

    if not TYPE_CHECKING:  # type checkers derive the arguments from the fields

        def __new__(cls, *values, **named):
            name = cls.__name__
            known = [field.name for field in fields(cls)] if cls is not Group else []
            text = ""
            if values:
                text = "%s takes its fields by name, as in %s(lr=1e-3); parameters go to the optimizer, as in "
                text = (text + "Optimizer(params, %s(lr=1e-3))") % (name, name, name)
            for field in named:
                if field not in known:
                    text = "%s has no field %r; it has %s" % (name, field, ", ".join(known) or "none")
            if text:
                raise ArgumentTypeError(text, 10, "DSOPT_ERR_ARGUMENT")
            return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "algorithm" in vars(cls):
            group = _initial(cls.algorithm)
            for name, value in list(vars(cls).items()):
                if value is _DEFAULT:
                    setattr(cls, name, _default_of(group, name))
        dataclass(cls)
        shown = inspect.signature(cls.__init__)
        arguments = [p.replace(kind=p.KEYWORD_ONLY) for p in list(shown.parameters.values())[1:]]
        cls.__signature__ = shown.replace(parameters=arguments)  # type: ignore[attr-defined]
        meanings = {**_MEANING, **cls.meanings}
        rows = ["%-26s %s (%r)" % (p.name, meanings.get(p.name, "see the class"), p.default) for p in arguments]
        cls.__doc__ = "%s\n\n    Fields and their defaults:\n\n    %s\n" % (cls.__doc__, "\n    ".join(rows))

    def __post_init__(self) -> None:
        self.struct()  # refuses fields of the wrong type

    def formats(self) -> Dict[str, str]:
        """Return the formats of the moments, by field."""
        return {name: getattr(self, name) for name in _FORMAT_FIELDS if hasattr(self, name)}

    def struct(self) -> Any:
        """Returns a dsopt_group."""
        group = _initial(self.algorithm)
        for field in fields(self):  # type: ignore[arg-type]
            value, label = getattr(self, field.name), "%s of %s" % (field.name, type(self).__name__)
            if field.name == "betas":
                for place, beta in zip(("beta1", "beta2"), _pair(value, label)):
                    abi.assign(group, place, beta, label)
            elif field.name == "bias_correction":
                group.flags &= ~abi.DSOPT_GROUP_NO_BIAS_CORRECTION
                group.flags |= 0 if _flag(value, label) else abi.DSOPT_GROUP_NO_BIAS_CORRECTION
            elif field.name in _FLAGS:
                group.flags &= ~_FLAGS[field.name]
                group.flags |= _FLAGS[field.name] if _flag(value, label) else 0
            elif field.name in _WORDS:
                setattr(group, field.name, choice(label, value, _WORDS[field.name]))
            elif field.name == "ns_coefficients":
                self._set_triple(group, value, label)
            else:
                abi.assign(group, field.name, value, label)
        return group

    def _set_triple(self, group: Any, value: Any, label: str) -> None:
        if value is None and group.ns_schedule == abi.DSOPT_NS_CONSTANT:
            return  # the library's
        for place, number in zip(_TRIPLE, (0.0, 0.0, 0.0) if value is None else _triple(value, label)):
            abi.assign(group, place, number, label)


class Adam(Group):
    """Adam. Weight decay is L2 regularization: it is added to the gradient."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAM
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    eps: float = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    bias_correction: bool = _DEFAULT
    eps_uncorrected: bool = _DEFAULT
    exp_avg_format: str = _DEFAULT
    exp_avg_sq_format: str = _DEFAULT


class AdamW(Group):
    """Adam with decoupled weight decay."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAMW
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    eps: float = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    bias_correction: bool = _DEFAULT
    eps_uncorrected: bool = _DEFAULT
    exp_avg_format: str = _DEFAULT
    exp_avg_sq_format: str = _DEFAULT


class AdamLegacy(Group):
    """The first fused Adam of apex: eps acts on the uncorrected variance. Weight decay is decoupled."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAM_LEGACY
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    eps: float = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    bias_correction: bool = _DEFAULT
    eps_inside_sqrt: bool = _DEFAULT
    exp_avg_format: str = _DEFAULT
    exp_avg_sq_format: str = _DEFAULT


class Lamb(Group):
    """Adam with a trust ratio per tensor."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_LAMB
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    eps: float = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    min_trust: float = _DEFAULT
    max_trust: float = _DEFAULT
    bias_correction: bool = _DEFAULT
    eps_inside_sqrt: bool = _DEFAULT
    exp_avg_format: str = _DEFAULT
    exp_avg_sq_format: str = _DEFAULT


class OnebitAdam(Group):
    """1-bit Adam: Adam until freeze_step, then ranks exchange the signs of the momentum (docs/onebit.md)."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ONEBIT_ADAM
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    eps: float = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    freeze_step: int = _DEFAULT
    non_freeze: bool = _DEFAULT


class ZeroOneAdam(Group):
    """0/1 Adam: like 1-bit Adam, with local steps in which nothing is exchanged (docs/onebit.md)."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    eps: float = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    freeze_step: int = _DEFAULT
    var_interval_steps: int = _DEFAULT
    local_interval_steps: int = _DEFAULT
    max_local_interval: int = _DEFAULT


class OnebitLamb(Group):
    """1-bit LAMB: LAMB until freeze_step, then with compressed momentum (docs/onebit.md)."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ONEBIT_LAMB
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    eps: float = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    min_trust: float = _DEFAULT
    max_trust: float = _DEFAULT
    freeze_step: int = _DEFAULT
    trust_beta: float = _DEFAULT
    trust_threshold: float = _DEFAULT
    trust_min_change: float = _DEFAULT
    trust_max_change: float = _DEFAULT


class Sgd(Group):
    """Stochastic gradient descent as in torch.optim.SGD, weight decay as L2. Without momentum there is no state."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_SGD
    lr: float = _DEFAULT
    momentum: float = _DEFAULT
    dampening: float = _DEFAULT
    weight_decay: float = _DEFAULT
    nesterov: bool = _DEFAULT
    max_norm: float = _DEFAULT
    exp_avg_format: str = _DEFAULT


class Adagrad(Group):
    """As in torch.optim.Adagrad, weight decay as L2. With eps_inside_sqrt as in optax."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_ADAGRAD
    lr: float = _DEFAULT
    lr_decay: float = _DEFAULT
    weight_decay: float = _DEFAULT
    initial_accumulator_value: float = _DEFAULT
    eps: float = _DEFAULT
    eps_inside_sqrt: bool = _DEFAULT
    max_norm: float = _DEFAULT
    exp_avg_sq_format: str = _DEFAULT


class Lion(Group):
    """As in optax.lion, with decoupled weight decay."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_LION
    lr: float = _DEFAULT
    betas: Tuple[float, float] = _DEFAULT
    weight_decay: float = _DEFAULT
    max_norm: float = _DEFAULT
    exp_avg_format: str = _DEFAULT


class Muon(Group):
    """As in torch.optim.Muon, for matrices: the momentum of each is orthogonalised (docs/muon.md). Other parameters,
    such as embeddings, norms and biases, go into a group of another algorithm. Blocks of a tensor: Param."""

    algorithm: ClassVar[int] = abi.DSOPT_ALGORITHM_MUON
    meanings: ClassVar[Dict[str, str]] = {
        "eps": "smallest divisor of a matrix that is normalized",
        "momentum": "decay of the momentum per step, in (0, 1)",
        "nesterov": "Nesterov's momentum",
        "bias_correction": "the mixture of optax, which divides by 1 - momentum^step; needs nesterov",
        "exp_avg_format": "format of momentum_buffer in memory: f32, bf16 or bf16_random",
    }
    lr: float = _DEFAULT
    momentum: float = _DEFAULT
    nesterov: bool = _DEFAULT
    weight_decay: float = _DEFAULT
    eps: float = _DEFAULT
    ns_steps: int = _DEFAULT
    ns_schedule: str = _DEFAULT
    ns_coefficients: Optional[Tuple[float, float, float]] = _DEFAULT
    ns_dtype: str = _DEFAULT
    adjust: str = _DEFAULT
    bias_correction: bool = _DEFAULT
    max_norm: float = _DEFAULT
    exp_avg_format: str = _DEFAULT


class GroupView:
    """The current hyper-parameters of one group, or of all. A change takes effect with the next step.

    optimizer  the Optimizer; `opt.groups` passes it
    index      index of the group; -1 = all
    """

    __slots__ = ("_optimizer", "_index")  # unknown names are refused

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
        """Decay of the first and of the second moment per step."""
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
        """Number of the algorithm in enum dsopt_algorithm."""
        return int(self._get(abi.DSOPT_KEY_ALGORITHM))

    def __repr__(self) -> str:
        try:
            kind = next(kind for kind in ALGORITHMS if kind.algorithm == self.algorithm)
            shown = [field.name for field in fields(kind) if field.name in _SHOWN]
            return "<%s %s>" % (kind.__name__, " ".join("%s=%r" % (name, getattr(self, name)) for name in shown))
        except Error:  # closed, or in a call
            return "<group %d of %r>" % (self._index, self._optimizer)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._get(abi.DSOPT_KEY_LR)

    @lr.setter
    def lr(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_LR, value)

    @property
    def eps(self) -> float:
        """Added to the root of the second moment. Muon: smallest divisor of a matrix."""
        return self._get(abi.DSOPT_KEY_EPS)

    @eps.setter
    def eps(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_EPS, value)

    @property
    def weight_decay(self) -> float:
        """Coefficient of the weight decay."""
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
        """LAMB: smallest trust ratio of a tensor."""
        return self._get(abi.DSOPT_KEY_MIN_TRUST)

    @min_trust.setter
    def min_trust(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_MIN_TRUST, value)

    @property
    def max_trust(self) -> float:
        """LAMB: largest trust ratio of a tensor."""
        return self._get(abi.DSOPT_KEY_MAX_TRUST)

    @max_trust.setter
    def max_trust(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_MAX_TRUST, value)

    @property
    def bias_correction(self) -> bool:
        """Divide the moments by 1 - beta^step."""
        return bool(self._get(abi.DSOPT_KEY_BIAS_CORRECTION))

    @bias_correction.setter
    def bias_correction(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_BIAS_CORRECTION, value)

    @property
    def eps_inside_sqrt(self) -> bool:
        """LAMB, AdamLegacy and Adagrad: sqrt(v + eps) in place of sqrt(v) + eps."""
        return bool(self._get(abi.DSOPT_KEY_EPS_INSIDE_SQRT))

    @eps_inside_sqrt.setter
    def eps_inside_sqrt(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_EPS_INSIDE_SQRT, value)

    @property
    def eps_uncorrected(self) -> bool:
        """Adam and AdamW: eps is added before the bias correction of the variance."""
        return bool(self._get(abi.DSOPT_KEY_EPS_UNCORRECTED))

    @eps_uncorrected.setter
    def eps_uncorrected(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_EPS_UNCORRECTED, value)

    @property
    def momentum(self) -> float:
        """SGD and Muon: decay of the momentum per step. Of SGD it cannot change between 0 and another value."""
        return self._get(abi.DSOPT_KEY_MOMENTUM)

    @momentum.setter
    def momentum(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_MOMENTUM, value)

    @property
    def dampening(self) -> float:
        """SGD: fraction of the gradient that is not added to the momentum."""
        return self._get(abi.DSOPT_KEY_DAMPENING)

    @dampening.setter
    def dampening(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_DAMPENING, value)

    @property
    def nesterov(self) -> bool:
        """SGD and Muon: Nesterov's momentum."""
        return bool(self._get(abi.DSOPT_KEY_NESTEROV))

    @nesterov.setter
    def nesterov(self, value: bool) -> None:
        self._set(abi.DSOPT_KEY_NESTEROV, value)

    @property
    def lr_decay(self) -> float:
        """Adagrad: lr is divided by 1 + lr_decay * (step - 1)."""
        return self._get(abi.DSOPT_KEY_LR_DECAY)

    @lr_decay.setter
    def lr_decay(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_LR_DECAY, value)

    @property
    def initial_accumulator_value(self) -> float:
        """Adagrad: initial sum of squares of state that is created or reset from now on."""
        return self._get(abi.DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE)

    @initial_accumulator_value.setter
    def initial_accumulator_value(self, value: float) -> None:
        self._set(abi.DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE, value)

    @property
    def ns_steps(self) -> int:
        """Muon: number of Newton-Schulz iterations."""
        return int(self._get(abi.DSOPT_KEY_NS_STEPS))

    @ns_steps.setter
    def ns_steps(self, value: int) -> None:
        self._set(abi.DSOPT_KEY_NS_STEPS, value)

    @property
    def ns_schedule(self) -> str:
        """Muon: "constant", "polar_express" or "you". Setting it sets ns_coefficients to those of the schedule."""
        return _word_of(NS_SCHEDULE, self._get(abi.DSOPT_KEY_NS_SCHEDULE))

    @ns_schedule.setter
    def ns_schedule(self, value: str) -> None:
        self._set(abi.DSOPT_KEY_NS_SCHEDULE, choice("ns_schedule", value, NS_SCHEDULE))

    @property
    def ns_coefficients(self) -> Optional[Tuple[float, float, float]]:
        """Muon: (a, b, c) of each Newton-Schulz iteration; None with a preset of ns_schedule."""
        if self.ns_schedule != "constant":
            return None
        return self._get(abi.DSOPT_KEY_NS_A), self._get(abi.DSOPT_KEY_NS_B), self._get(abi.DSOPT_KEY_NS_C)

    @ns_coefficients.setter
    def ns_coefficients(self, value: Tuple[float, float, float]) -> None:
        keys = abi.DSOPT_KEY_NS_A, abi.DSOPT_KEY_NS_B, abi.DSOPT_KEY_NS_C
        before, after = list(map(self._get, keys)), _triple(value, "ns_coefficients")
        try:
            for key, number in zip(keys, after):
                self._set(key, number)
        except BaseException:
            for key, number in zip(keys, before):
                self._set(key, number)
            raise

    @property
    def ns_dtype(self) -> str:
        """Muon: dtype of the inputs of products: "bfloat16", "float16" or "float32". Cannot change."""
        return _word_of(NS_DTYPE, self._get(abi.DSOPT_KEY_NS_DTYPE))

    @property
    def adjust(self) -> str:
        """Muon: factor of lr by the shape of a matrix: "original", "match_rms_adamw", "spectral_unclamped" or
        "none"."""
        return _word_of(ADJUST, self._get(abi.DSOPT_KEY_ADJUST))

    @adjust.setter
    def adjust(self, value: str) -> None:
        self._set(abi.DSOPT_KEY_ADJUST, choice("adjust", value, ADJUST))


ALGORITHMS = (Adam, AdamW, AdamLegacy, Lamb, Sgd, Adagrad, Lion, Muon, OnebitAdam, ZeroOneAdam, OnebitLamb)
_SHOWN = ("lr", "betas", "eps", "momentum", "lr_decay", "weight_decay", "adjust")  # in repr(GroupView)
