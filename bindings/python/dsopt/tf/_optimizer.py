# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW with Keras' arguments, formula and variables, and one op per step."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from .. import _abi as abi
from .._errors import error_of
from . import _build

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)


def _error(status: int, text: str) -> Exception:
    problem = error_of(status, abi.lib.dsopt_status_name(status).decode(), text)
    problem.ag_pass_through = True  # AutoGraph would replace an unknown class by its own
    return problem


if keras.backend.backend() != "tensorflow":
    raise _error(abi.DSOPT_ERR_MISSING, "dsopt.tf needs Keras on TensorFlow, and Keras runs on %s: set "
                 "KERAS_BACKEND=tensorflow" % keras.backend.backend())


def _native(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _name(variable: Any) -> str:
    return getattr(variable, "path", None) or variable.name


def _in_xla() -> bool:
    """True while a function with jit_compile=True is being traced."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph)


class _Plan:
    """Arguments of the op for one list of variables, computed once."""

    def __init__(self, optimizer: "Adam", variables: Sequence[tf.Variable]) -> None:
        places = [optimizer._get_variable_index(variable) for variable in variables]
        names = optimizer._lists.names
        if len(set(places)) != len(places):
            twice = next(place for place in places if places.count(place) > 1)
            raise _error(abi.DSOPT_ERR_OVERLAP, "variable '%s' is in the list twice" % names[twice])
        decays = optimizer.weight_decay is not None
        self.params = list(variables)
        self.momentums = [_native(optimizer._momentums[place]) for place in places]
        self.velocities = [_native(optimizer._velocities[place]) for place in places]
        self.names = [names[place] for place in places]
        self.dtypes = [variable.dtype for variable in variables]
        self.shapes = [variable.shape for variable in variables]
        self.decays = [decays and optimizer._use_weight_decay(variable) for variable in variables]


class _Lists:
    """Plain lists of an optimizer. TensorFlow would save attributes of the optimizer itself in its checkpoints."""

    def __init__(self) -> None:
        self.names: List[str] = []
        self.plans: Dict[Tuple, _Plan] = {}


@keras.saving.register_keras_serializable(package="dsopt")
class Adam(keras.optimizers.Optimizer):
    """keras.optimizers.Adam with dsopt: the same arguments and defaults, and the same formula up to rounding.

    Its variables have the names, shapes and meaning of Keras', so checkpoints of either continue with the other.
    Moments are float32 for all variable dtypes. A step is one op, which updates all variables in place.

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
    ema_overwrite_frequency      number of steps after which variables are set to their average; None = at the end of
    fit
    loss_scale_factor            multiplies the loss, and gradients are divided by it; None = 1
    gradient_accumulation_steps  number of calls per update, which uses the mean gradient; None = 1
    name                         name of the optimizer; None = name of the class
    kwargs                       Keras refuses all further arguments by name
    """

    def __init__(self, learning_rate: Any = 0.001, beta_1: float = 0.9, beta_2: float = 0.999, epsilon: float = 1e-7,
                 amsgrad: bool = False, weight_decay: Optional[float] = None, clipnorm: Optional[float] = None,
                 clipvalue: Optional[float] = None, global_clipnorm: Optional[float] = None, use_ema: bool = False,
                 ema_momentum: float = 0.99, ema_overwrite_frequency: Optional[int] = None,
                 loss_scale_factor: Optional[float] = None, gradient_accumulation_steps: Optional[int] = None,
                 name: Optional[str] = None, **kwargs: Any) -> None:
        if amsgrad:
            raise _error(abi.DSOPT_ERR_UNSUPPORTED, "dsopt.tf does not support amsgrad=True: leave it False, or use "
                         "keras.optimizers.%s" % type(self).__name__)
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, clipnorm=clipnorm,
                         clipvalue=clipvalue, global_clipnorm=global_clipnorm, use_ema=use_ema,
                         ema_momentum=ema_momentum, ema_overwrite_frequency=ema_overwrite_frequency,
                         loss_scale_factor=loss_scale_factor, name=name,
                         gradient_accumulation_steps=gradient_accumulation_steps, **kwargs)
        self.beta_1, self.beta_2, self.epsilon, self.amsgrad = beta_1, beta_2, epsilon, amsgrad
        self._lists = _Lists()

    def build(self, variables: Sequence[Any]) -> None:
        """Create the moments. The first step does this too.

        variables  trainable variables of float32, float16 or bfloat16
        """
        if self.built:
            return
        _build.ops()
        seen = set()
        for variable in variables:
            dtype = tf.as_dtype(variable.dtype)
            if dtype not in _DTYPES and not self._overwrite_variable_with_gradient(variable):
                raise _error(abi.DSOPT_ERR_DTYPE, "variable '%s' has dtype %s, must be float32, float16 or bfloat16"
                             % (_name(variable), dtype.name))
            if self._var_key(variable) in seen:
                raise _error(abi.DSOPT_ERR_OVERLAP, "variable '%s' is in the list twice" % _name(variable))
            seen.add(self._var_key(variable))
        super().build(variables)
        names = self._lists.names
        slots: Tuple[List[Any], List[Any]] = ([], [])
        for index, variable in enumerate(variables):
            name = _name(variable)  # names need not be unique outside of models
            names.append(name if name not in names else "%s (number %d)" % (name, index))
            for slot, suffix in zip(slots, ("momentum", "velocity")):
                overwritten = self._overwrite_variable_with_gradient(variable)
                slot.append(None if overwritten else self._moment(variable, name, suffix))
        self._momentums, self._velocities = slots

    def _moment(self, variable: Any, name: str, suffix: str) -> Any:
        with self._distribution_strategy.extended.colocate_vars_with(_native(variable)):
            return self.add_variable(shape=variable.shape, dtype="float32",
                                     name="%s_%s" % (name.replace("/", "_").replace(":", "_"), suffix))

    def _clip_gradients(self, grads: List[Any]) -> List[Any]:
        # Sparse gradients become dense, as in Keras, which also updates the moments of every row.
        grads = [tf.convert_to_tensor(grad) for grad in grads]
        return super()._clip_gradients(grads) if self.clipnorm else grads  # the op applies the other two

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Does nothing: the op applies weight decay."""

    def _global_divisor(self, grads: List[tf.Tensor]) -> List[tf.Tensor]:
        """Returns the divisor of global_clipnorm, as a list of one or no element."""
        if not self.global_clipnorm:
            return []
        norm = tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in grads])
        return [tf.maximum(norm / float(self.global_clipnorm), 1.0)]

    def _plan(self, variables: Sequence[tf.Variable]) -> _Plan:
        key = (self.weight_decay is None,) + tuple(map(self._var_key, variables))
        plans = self._lists.plans
        if key not in plans:
            plans[key] = _Plan(self, variables)
        return plans[key]

    def _backend_update_step(self, grads: List[tf.Tensor], trainable_variables: Sequence[Any],
                             learning_rate: Any) -> None:
        if tf.distribute.has_strategy():
            raise _error(abi.DSOPT_ERR_UNSUPPORTED, "dsopt.tf does not support tf.distribute.Strategy: average the "
                         "gradients, and apply them outside of it")
        if _in_xla():
            raise _error(abi.DSOPT_ERR_UNSUPPORTED, "the step of dsopt.tf is an op of TensorFlow that XLA cannot "
                         "compile: pass jit_compile=False to model.compile and to tf.function")
        plan = self._plan([_native(variable) for variable in trainable_variables])
        for grad, name in zip(grads, plan.names):
            if not grad.dtype.is_floating:
                raise _error(abi.DSOPT_ERR_DTYPE, "gradient of '%s' has dtype %s, must be a float"
                             % (name, grad.dtype.name))
        grads = [grad if grad.dtype in _DTYPES else tf.cast(grad, tf.float32) for grad in grads]
        _build.ops().dsopt_adam(
            params=[variable.handle for variable in plan.params],
            momentums=[variable.handle for variable in plan.momentums],
            velocities=[variable.handle for variable in plan.velocities],
            grads=grads,
            steps=tf.fill([len(grads)], tf.cast(tf.convert_to_tensor(self.iterations), tf.int32)),
            lr=tf.fill([2], tf.cast(tf.convert_to_tensor(learning_rate), tf.float32)),
            grad_scale=self._global_divisor(grads),
            names=plan.names, dtypes=plan.dtypes, shapes=plan.shapes, decays=plan.decays,
            beta_1=repr(float(self.beta_1)), beta_2=repr(float(self.beta_2)), epsilon=repr(float(self.epsilon)),
            weight_decay=repr(float(self.weight_decay or 0)), clipvalue=repr(float(self.clipvalue or 0)))

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
    `gradient_accumulation_steps`, `name`, `kwargs`.
    """

    def __init__(self, learning_rate: Any = 0.001, weight_decay: float = 0.004, beta_1: float = 0.9,
                 beta_2: float = 0.999, epsilon: float = 1e-7, amsgrad: bool = False, clipnorm: Optional[float] = None,
                 clipvalue: Optional[float] = None, global_clipnorm: Optional[float] = None, use_ema: bool = False,
                 ema_momentum: float = 0.99, ema_overwrite_frequency: Optional[int] = None,
                 loss_scale_factor: Optional[float] = None, gradient_accumulation_steps: Optional[int] = None,
                 name: Optional[str] = None, **kwargs: Any) -> None:
        if weight_decay is None:
            raise ValueError("Argument `weight_decay` must be a float. Received: weight_decay=None")
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay, clipnorm, clipvalue,
                         global_clipnorm, use_ema, ema_momentum, ema_overwrite_frequency, loss_scale_factor,
                         gradient_accumulation_steps, name, **kwargs)
