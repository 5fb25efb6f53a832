# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW with Keras' arguments, formula and variables."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import keras

from .. import _abi as abi
from .._groups import AdamW as AdamWGroup
from ._base import Base, Rule, error


@keras.saving.register_keras_serializable(package="dsopt")
class Adam(Base):
    """keras.optimizers.Adam with dsopt: the same arguments and defaults, and the same formula up to rounding.

    Its variables have the names, shapes and meaning of Keras', so checkpoints of either continue with the other.
    Moments are float32 for all variable dtypes, unless they have another format. A step is one op, which updates all
    variables in place.

    learning_rate                a number, a keras.optimizers.schedules.LearningRateSchedule, or a function without
                                 arguments
    beta_1, beta_2               decays of the first and the second moment
    epsilon                      added to the root of the second moment
    amsgrad                      must be False: use keras.optimizers for True
    weight_decay                 decoupled decay, times the learning rate; None = none
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
    exp_avg_format               the first moment in memory: "f32", "bf16", "bf16_random", "e4m3" or "q8"
    exp_avg_sq_format            the second moment in memory: "f32", "bf16_random" or "q8"
    f32_moments                  list of words: variables with one of them in their name have float32 moments, for
                                 example ["embedding", "bias"]
    masters                      None, or "remainder" = a bfloat16 variable has a float32 master, which consists of the
                                 variable and of 16 more bits
    seed                         seed of the format "bf16_random"
    kwargs                       Keras refuses all further arguments by name
    """

    def __init__(self, learning_rate: Any = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7,
                 amsgrad: bool = False, weight_decay: Optional[float] = None, clipnorm: Optional[float] = None,
                 clipvalue: Optional[float] = None, global_clipnorm: Optional[float] = None, use_ema: bool = False,
                 ema_momentum: float = 0.99, ema_overwrite_frequency: Optional[int] = None,
                 loss_scale_factor: Optional[float] = None, gradient_accumulation_steps: Optional[int] = None,
                 name: Optional[str] = None, *, exp_avg_format: str = "f32", exp_avg_sq_format: str = "f32",
                 f32_moments: Sequence[str] = (), masters: Optional[str] = None, seed: int = 0, **kwargs: Any) -> None:
        if amsgrad:
            raise error(abi.DSOPT_ERR_UNSUPPORTED, "dsopt.tf does not support amsgrad=True: leave it False, or use "
                        "keras.optimizers.%s" % type(self).__name__)
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, clipnorm=clipnorm,
                         clipvalue=clipvalue, global_clipnorm=global_clipnorm, use_ema=use_ema,
                         ema_momentum=ema_momentum, ema_overwrite_frequency=ema_overwrite_frequency,
                         loss_scale_factor=loss_scale_factor, name=name,
                         gradient_accumulation_steps=gradient_accumulation_steps, **kwargs)
        self.beta_1, self.beta_2, self.epsilon, self.amsgrad = beta_1, beta_2, epsilon, amsgrad
        self._start(exp_avg_format, exp_avg_sq_format, f32_moments, masters, seed)

    def _hyper(self) -> Tuple:
        return self.beta_1, self.beta_2, self.epsilon, self.weight_decay

    def _rules(self) -> List[Rule]:
        group = AdamWGroup(betas=(self.beta_1, self.beta_2), eps=self.epsilon, eps_uncorrected=True,
                           exp_avg_format=self.exp_avg_format, exp_avg_sq_format=self.exp_avg_sq_format)
        return [Rule(group, float(self.weight_decay or 0))]

    def _decays(self, rule: int) -> bool:
        return self.weight_decay is not None

    def get_config(self) -> Dict[str, Any]:
        """Return the arguments of a new optimizer with the same hyper-parameters."""
        config = super().get_config()
        config.update(beta_1=self.beta_1, beta_2=self.beta_2, epsilon=self.epsilon, amsgrad=self.amsgrad)
        return config


@keras.saving.register_keras_serializable(package="dsopt")
class AdamW(Adam):
    """keras.optimizers.AdamW with dsopt. See `Adam`.

    weight_decay  decoupled decay, times the learning rate; it must be a number

    The other arguments are those of `Adam`: `learning_rate`, `beta_1`, `beta_2`, `epsilon`, `amsgrad`, `clipnorm`,
    `clipvalue`, `global_clipnorm`, `use_ema`, `ema_momentum`, `ema_overwrite_frequency`, `loss_scale_factor`,
    `gradient_accumulation_steps`, `name`, `exp_avg_format`, `exp_avg_sq_format`, `f32_moments`, `masters`, `seed`,
    `kwargs`.
    """

    def __init__(self, learning_rate: Any = 0.001, weight_decay: float = 0.004, beta_1: float = 0.9,
                 beta_2: float = 0.999, epsilon: float = 1e-7, amsgrad: bool = False, clipnorm: Optional[float] = None,
                 clipvalue: Optional[float] = None, global_clipnorm: Optional[float] = None, use_ema: bool = False,
                 ema_momentum: float = 0.99, ema_overwrite_frequency: Optional[int] = None,
                 loss_scale_factor: Optional[float] = None, gradient_accumulation_steps: Optional[int] = None,
                 name: Optional[str] = None, *, exp_avg_format: str = "f32", exp_avg_sq_format: str = "f32",
                 f32_moments: Sequence[str] = (), masters: Optional[str] = None, seed: int = 0, **kwargs: Any) -> None:
        if weight_decay is None:
            raise ValueError("Argument `weight_decay` must be a float. Received: weight_decay=None")
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay, clipnorm, clipvalue,
                         global_clipnorm, use_ema, ema_momentum, ema_overwrite_frequency, loss_scale_factor,
                         gradient_accumulation_steps, name, exp_avg_format=exp_avg_format,
                         exp_avg_sq_format=exp_avg_sq_format, f32_moments=f32_moments, masters=masters, seed=seed,
                         **kwargs)
