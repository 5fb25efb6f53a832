# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for other variables, with Keras' arguments and variables."""
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import keras

from .. import _abi as abi
from .._groups import AdamW as AdamWGroup
from .._groups import Muon as MuonGroup
from ._base import Base, Rule, error, name_of

_ADAMW, _MUON = 0, 1
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_RMS_RATE = 0.2  # that of match_rms_adamw


@keras.saving.register_keras_serializable(package="dsopt")
class Muon(Base):
    """keras.optimizers.Muon with dsopt: the same arguments and defaults, and the same variables.

    Variables with two dimensions are orthogonalised by Newton-Schulz iterations; the others, and embeddings, are
    stepped by AdamW. Both are one op. The momentum in the optimizer's variables is Keras', so checkpoints of either
    continue with the other. The inputs of products are bfloat16 unless `ns_dtype` is "float32"; their sums are float32.
    docs/muon.md describes blocks, and the factor of the learning rate.

    learning_rate                a number, a keras.optimizers.schedules.LearningRateSchedule, or a function without
                                 arguments
    adam_beta_1, adam_beta_2     AdamW: decays of the first and the second moment
    adam_weight_decay            AdamW: decoupled decay, times the learning rate; None = none
    epsilon                      AdamW: added to the root of the second moment
    weight_decay                 Muon: decoupled decay, times the learning rate; None = none
    clipnorm                     each gradient is clipped to this L2 norm; None = off
    clipvalue                    each element of the gradients is clipped to this value; None = off
    global_clipnorm              all gradients are clipped to this L2 norm together; None = off
    use_ema                      keep a moving average of the variables
    ema_momentum                 decay of that average
    ema_overwrite_frequency      number of steps after which variables are set to their average; None = at the end
                                 of fit
    loss_scale_factor            multiplies the loss, and gradients are divided by it; None = 1
    gradient_accumulation_steps  number of calls per update, which uses the mean gradient; None = 1
    name                         name of the optimizer; None = name of the class
    exclude_layers               regular expressions: variables whose path has a match are stepped by AdamW; None = none
    exclude_embeddings           variables with "embedding" in their path are stepped by AdamW
    muon_a, muon_b, muon_c       coefficients of each iteration
    adam_lr_ratio                AdamW: factor of the learning rate, above 0
    momentum                     Muon: decay of the momentum, in (0, 1)
    ns_steps                     number of iterations
    nesterov                     Muon: Nesterov's momentum
    rms_rate                     the learning rate of a matrix is multiplied by this number and by the root of the
                                 larger of its two dimensions; None = by the factor `adjust`
    ns_schedule                  "constant", or a preset with five triples of coefficients, "polar_express" or "you"
    ns_dtype                     dtype of the inputs of products: "bfloat16", "float16" or "float32"
    adjust                       with rms_rate=None: "original", "match_rms_adamw", "spectral_unclamped" or "none"
    rows_are_inputs              weights are used as x @ W, as in Keras' layers, so a matrix has `cols` outputs, which
                                 `adjust` needs
    blocks                       dict of regular expressions and (rows, cols): variables whose path has a match are
                                 partitioned into matrices of this size, for example {"query/kernel": (512, 512)},
                                 unless they are excluded; None = none
    exp_avg_format               momentum, of both algorithms, in memory: "f32", "bf16" or "bf16_random"
    exp_avg_sq_format            AdamW's second moment in memory: "f32", "bf16_random" or "q8"
    f32_moments                  list of words: variables with one of them in their name have float32 moments
    masters                      None, or "remainder" = a bfloat16 variable has a float32 master, which consists of the
                                 variable and of 16 more bits
    seed                         seed of the format "bf16_random"
    kwargs                       Keras refuses all further arguments by name
    """

    _MOMENTS = "momentums", "adam_velocities"
    _CLIPS_VALUES = False  # it would clip the gradients of matrices after their division by 1 - momentum

    def __init__(self, learning_rate: Any = 0.001, adam_beta_1: float = 0.9, adam_beta_2: float = 0.999,
                 adam_weight_decay: Optional[float] = 0.004, epsilon: float = 1e-7,
                 weight_decay: Optional[float] = 0.004, clipnorm: Optional[float] = None,
                 clipvalue: Optional[float] = None, global_clipnorm: Optional[float] = None, use_ema: bool = False,
                 ema_momentum: float = 0.99, ema_overwrite_frequency: Optional[int] = None,
                 loss_scale_factor: Optional[float] = None, gradient_accumulation_steps: Optional[int] = None,
                 name: Optional[str] = None, exclude_layers: Optional[Sequence[str]] = None,
                 exclude_embeddings: bool = True, muon_a: float = _COEFFICIENTS[0], muon_b: float = _COEFFICIENTS[1],
                 muon_c: float = _COEFFICIENTS[2], adam_lr_ratio: float = 1, momentum: float = 0.95, ns_steps: int = 5,
                 nesterov: bool = True, rms_rate: Optional[float] = _RMS_RATE, *, ns_schedule: str = "constant",
                 ns_dtype: str = "bfloat16", adjust: str = "none", rows_are_inputs: bool = True,
                 blocks: Optional[Mapping[str, Sequence[int]]] = None, exp_avg_format: str = "f32",
                 exp_avg_sq_format: str = "f32", f32_moments: Sequence[str] = (), masters: Optional[str] = None,
                 seed: int = 0, **kwargs: Any) -> None:
        if exclude_layers is not None and not isinstance(exclude_layers, (list, tuple)):
            raise error(abi.DSOPT_ERR_ARGUMENT, "exclude_layers is %r, must be a list" % (exclude_layers,))
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, clipnorm=clipnorm,
                         clipvalue=clipvalue, global_clipnorm=global_clipnorm, use_ema=use_ema,
                         ema_momentum=ema_momentum, ema_overwrite_frequency=ema_overwrite_frequency,
                         loss_scale_factor=loss_scale_factor, name=name,
                         gradient_accumulation_steps=gradient_accumulation_steps, **kwargs)
        self.adam_beta_1, self.adam_beta_2, self.epsilon = adam_beta_1, adam_beta_2, epsilon
        self.adam_weight_decay, self.adam_lr_ratio = adam_weight_decay, adam_lr_ratio
        self.exclude_layers, self.exclude_embeddings = list(exclude_layers or []), exclude_embeddings
        self.muon_a, self.muon_b, self.muon_c = muon_a, muon_b, muon_c
        self.momentum, self.ns_steps, self.nesterov, self.rms_rate = momentum, ns_steps, nesterov, rms_rate
        self.ns_schedule, self.ns_dtype, self.adjust = ns_schedule, ns_dtype, adjust
        self.rows_are_inputs = rows_are_inputs
        self._start(exp_avg_format, exp_avg_sq_format, f32_moments, masters, seed)
        self._lists.blocks = {pattern: _pair(pattern, size) for pattern, size in (blocks or {}).items()}

    @property
    def blocks(self) -> Dict[str, Tuple[int, int]]:
        """Sizes of the matrices of variables, by regular expressions."""
        return self._lists.blocks

    def _hyper(self) -> Tuple:
        return (self.adam_beta_1, self.adam_beta_2, self.epsilon, self.adam_weight_decay, self.adam_lr_ratio,
                self.weight_decay, self.muon_a, self.muon_b, self.muon_c, self.momentum, self.ns_steps, self.nesterov,
                self.rms_rate, self.ns_schedule, self.ns_dtype, self.adjust)

    def _rules(self) -> List[Rule]:
        if not self.adam_lr_ratio > 0:
            raise error(abi.DSOPT_ERR_ARGUMENT, "adam_lr_ratio is %r, must be above 0" % (self.adam_lr_ratio,))
        if self.rms_rate is not None and not self.rms_rate > 0:
            raise error(abi.DSOPT_ERR_ARGUMENT, "rms_rate is %r, must be above 0, or None" % (self.rms_rate,))
        if self.rms_rate is not None and self.adjust != "none":
            raise error(abi.DSOPT_ERR_ARGUMENT, "adjust=%r has no effect with rms_rate: pass rms_rate=None"
                        % (self.adjust,))
        if not 0 < self.momentum < 1:
            raise error(abi.DSOPT_ERR_ARGUMENT, "momentum is %r, must be above 0 and below 1" % (self.momentum,))
        ratio = float(self.adam_lr_ratio)
        adamw = AdamWGroup(betas=(self.adam_beta_1, self.adam_beta_2), eps=self.epsilon, eps_uncorrected=True,
                           exp_avg_format=self.exp_avg_format, exp_avg_sq_format=self.exp_avg_sq_format)
        given = (self.muon_a, self.muon_b, self.muon_c)
        muon = MuonGroup(momentum=self.momentum, nesterov=self.nesterov, ns_steps=self.ns_steps,
                         ns_schedule=self.ns_schedule, ns_dtype=self.ns_dtype,
                         ns_coefficients=None if given == _COEFFICIENTS else given,
                         adjust=self.adjust if self.rms_rate is None else "match_rms_adamw",
                         exp_avg_format=self.exp_avg_format)
        rate = 1.0 if self.rms_rate is None else self.rms_rate / _RMS_RATE
        # Weight decay is multiplied by the optimizer's learning rate alone. The engine's momentum is a mean: with
        # gradients divided by 1 - momentum it is Keras' sum.
        return [Rule(adamw, float(self.adam_weight_decay or 0) / ratio, ratio),
                Rule(muon, float(self.weight_decay or 0) / rate, rate, 1 / (1 - self.momentum))]

    def _decays(self, rule: int) -> bool:
        return (self.weight_decay if rule == _MUON else self.adam_weight_decay) is not None

    def _block_of(self, variable: Any) -> Optional[Tuple[int, int]]:
        path = name_of(variable)
        return next((size for pattern, size in self.blocks.items() if re.search(pattern, path)), None)

    def _rule_of(self, variable: Any) -> int:
        path = name_of(variable)
        if self.exclude_embeddings and "embedding" in path.lower():
            return _ADAMW
        if any(re.search(pattern, path) for pattern in self.exclude_layers):
            return _ADAMW
        return _MUON if self._block_of(variable) or len(variable.shape) == 2 else _ADAMW

    def _layout(self, variable: Any) -> Dict[str, Any]:
        if self._rule_of(variable) == _ADAMW:
            return {}
        rows, cols = self._block_of(variable) or (0, 0)
        return {"rows": rows, "cols": cols, "rows_are_inputs": bool(self.rows_are_inputs)}

    def get_config(self) -> Dict[str, Any]:
        """Return the arguments of a new optimizer with the same hyper-parameters."""
        config = super().get_config()
        for name in ("adam_beta_1", "adam_beta_2", "epsilon", "exclude_layers", "muon_a", "muon_b", "muon_c",
                     "adam_lr_ratio", "momentum", "ns_steps", "nesterov", "exclude_embeddings", "adam_weight_decay",
                     "rms_rate"):
            config[name] = getattr(self, name)
        for name, default in (("ns_schedule", "constant"), ("ns_dtype", "bfloat16"), ("adjust", "none"),
                              ("rows_are_inputs", True)):
            if getattr(self, name) != default:
                config[name] = getattr(self, name)
        if self.blocks:
            config["blocks"] = {pattern: list(size) for pattern, size in self.blocks.items()}
        return config


def _pair(pattern: str, size: Any) -> Tuple[int, int]:
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(isinstance(n, int) for n in size):
        return size[0], size[1]
    raise error(abi.DSOPT_ERR_ARGUMENT, "blocks[%r] is %r, must be (rows, cols)" % (pattern, size))
