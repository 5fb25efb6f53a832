# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW with Keras' arguments, formula and variables, and one op per step."""
import ctypes
from typing import Any, Dict, List, Optional, Sequence, Tuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from .. import _abi as abi
from .._arrays import DTYPE_NAMES
from .._errors import Error, error_of
from .._groups import AdamW as AdamWGroup
from .._optimizer import Optimizer
from .._params import Param
from .._state import infos
from . import _build

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
# Names of state variables, by the names in dsopt.h.
_SUFFIXES = {"remainder": "remainder", "exp_avg": "momentum", "exp_avg_scale": "momentum_scale",
             "exp_avg_sq": "velocity", "exp_avg_sq_scale": "velocity_scale"}
_VALUES = {"momentum": "exp_avg", "velocity": "exp_avg_sq", "remainder": "remainder"}


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
        lists = optimizer._lists
        names = lists.names
        if len(set(places)) != len(places):
            twice = next(place for place in places if places.count(place) > 1)
            raise _error(abi.DSOPT_ERR_OVERLAP, "variable '%s' is in the list twice" % names[twice])
        decays = optimizer.weight_decay is not None
        self.params = list(variables)
        self.state = [_native(variable) for place in places for variable in lists.state[place]]
        self.names = [names[place] for place in places]
        self.f32_moments = [lists.has_f32_moments(names[place]) for place in places]
        self.dtypes = [variable.dtype for variable in variables]
        self.shapes = [variable.shape for variable in variables]
        self.decays = [decays and optimizer._use_weight_decay(variable) for variable in variables]


class _Lists:
    """Plain lists of an optimizer. TensorFlow would save attributes of the optimizer itself in its checkpoints."""

    def __init__(self, group: AdamWGroup, f32_moments: Sequence[str]) -> None:
        self.group, self.f32_moments = group, list(f32_moments)
        self.names: List[str] = []
        self.state: List[List[Any]] = []  # of each variable, in the order of dsopt.h
        self.plans: Dict[Tuple, _Plan] = {}

    def has_f32_moments(self, name: str) -> bool:
        return any(word in name for word in self.f32_moments)


@keras.saving.register_keras_serializable(package="dsopt")
class Adam(keras.optimizers.Optimizer):
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
    ema_overwrite_frequency      number of steps after which variables are set to their average; None = at the end of
    fit
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
            raise _error(abi.DSOPT_ERR_UNSUPPORTED, "dsopt.tf does not support amsgrad=True: leave it False, or use "
                         "keras.optimizers.%s" % type(self).__name__)
        if masters not in (None, "remainder"):
            raise _error(abi.DSOPT_ERR_ARGUMENT, "masters is %r, must be None or 'remainder'" % (masters,))
        if not isinstance(f32_moments, (list, tuple)) or not all(isinstance(word, str) for word in f32_moments):
            raise _error(abi.DSOPT_ERR_ARGUMENT, "f32_moments is %r, must be a list of words" % (f32_moments,))
        group = AdamWGroup(exp_avg_format=exp_avg_format, exp_avg_sq_format=exp_avg_sq_format)
        if f32_moments and set(group.formats().values()) == {"f32"}:
            raise _error(abi.DSOPT_ERR_UNSUPPORTED, "f32_moments has no effect: the formats of both moments are 'f32'")
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, clipnorm=clipnorm,
                         clipvalue=clipvalue, global_clipnorm=global_clipnorm, use_ema=use_ema,
                         ema_momentum=ema_momentum, ema_overwrite_frequency=ema_overwrite_frequency,
                         loss_scale_factor=loss_scale_factor, name=name,
                         gradient_accumulation_steps=gradient_accumulation_steps, **kwargs)
        self.beta_1, self.beta_2, self.epsilon, self.amsgrad = beta_1, beta_2, epsilon, amsgrad
        self.exp_avg_format, self.exp_avg_sq_format, self.masters = exp_avg_format, exp_avg_sq_format, masters
        self.seed = abi.number(seed, ctypes.c_uint64, "seed")
        self._lists = _Lists(group, f32_moments)

    @property
    def f32_moments(self) -> List[str]:
        """Words in the names of variables that have float32 moments."""
        return self._lists.f32_moments

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
        names: List[str] = []
        for index, variable in enumerate(variables):
            name = _name(variable)  # names need not be unique outside of models
            names.append(name if name not in names else "%s (number %d)" % (name, index))
        stepped = [index for index, variable in enumerate(variables)
                   if not self._overwrite_variable_with_gradient(variable)]
        entries = self._entries({names[index]: variables[index] for index in stepped})
        super().build(variables)
        state: List[Dict[str, Any]] = [{} for _ in variables]
        for entry in entries:
            index = stepped[entry.param]
            suffix = _SUFFIXES[entry.name[len(names[index]) + 1 :]]
            state[index][suffix] = self._state_variable(variables[index], suffix, entry)
        self._lists.names, self._lists.state = names, [list(each.values()) for each in state]
        self._momentums = [each.get("momentum") for each in state]
        self._velocities = [each.get("velocity") for each in state]

    def _engine(self, params: Dict[str, Param]) -> Optimizer:
        """Returns an optimizer of the package dsopt with the state that the op has."""
        options: Dict[str, Any] = {"masters": "remainder"} if self.masters else {"no_master": True}
        try:
            return Optimizer(params, self._lists.group, **options)
        except Error as problem:
            problem.ag_pass_through = True  # type: ignore[attr-defined]
            raise

    def _entries(self, variables: Dict[str, Any]) -> List[Any]:
        """Returns the state list of variables, without that of the whole optimizer."""
        params = {name: Param(shape=tuple(variable.shape), dtype=tf.as_dtype(variable.dtype).name,
                              f32_moments=self._lists.has_f32_moments(name)) for name, variable in variables.items()}
        return [entry for entry in infos(self._engine(params)) if entry.param >= 0]

    def _state_variable(self, variable: Any, suffix: str, entry: Any) -> Any:
        """Adds a variable of zeros. E4M3 codes are uint8, because Keras cannot load float8 from its files."""
        dtype = "uint8" if entry.dtype == abi.DSOPT_DTYPE_F8_E4M3 else DTYPE_NAMES[entry.dtype]
        name = "%s_%s" % (_name(variable).replace("/", "_").replace(":", "_"), suffix)
        with self._distribution_strategy.extended.colocate_vars_with(_native(variable)):
            return self.add_variable(shape=entry.shape, dtype=dtype, name=name)

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
            state=[variable.handle for variable in plan.state],
            grads=grads,
            steps=tf.fill([len(grads)], tf.cast(tf.convert_to_tensor(self.iterations), tf.int32)),
            lr=tf.fill([2], tf.cast(tf.convert_to_tensor(learning_rate), tf.float32)),
            grad_scale=self._global_divisor(grads),
            names=plan.names, dtypes=plan.dtypes, shapes=plan.shapes, decays=plan.decays,
            f32_moments=plan.f32_moments, exp_avg_format=self.exp_avg_format, exp_avg_sq_format=self.exp_avg_sq_format,
            remainders=self.masters is not None, seed=self.seed - (self.seed >> 63 << 64),
            beta_1=repr(float(self.beta_1)), beta_2=repr(float(self.beta_2)), epsilon=repr(float(self.epsilon)),
            weight_decay=repr(float(self.weight_decay or 0)), clipvalue=repr(float(self.clipvalue or 0)))

    def get_config(self) -> Dict[str, Any]:
        """Return the arguments of a new optimizer with the same hyper-parameters."""
        config = super().get_config()
        config.update(beta_1=self.beta_1, beta_2=self.beta_2, epsilon=self.epsilon, amsgrad=self.amsgrad)
        for name, default in (("exp_avg_format", "f32"), ("exp_avg_sq_format", "f32"), ("f32_moments", []),
                              ("masters", None), ("seed", 0)):
            if getattr(self, name) != default:  # without these the configuration is that of Keras
                config[name] = getattr(self, name)
        return config

    # ------------------------------------------------------------------------------------------------ state as float32
    def export_f32(self, variable: Any, name: str) -> Any:
        """Return the values of state as a float32 array of NumPy, in the shape of the variable, whatever the format.

        variable  one of the variables that are stepped
        name      "momentum", "velocity", or "remainder": the master
        """
        engine, *_ = self._on_host(variable)
        return engine.state.export_f32(self._value(engine, name))

    def import_f32(self, variable: Any, name: str, array: Any) -> None:
        """Set state from float32 values, in its format, rounded to nearest. A remainder sets the variable as well.

        variable  one of the variables that are stepped
        name      as in `export_f32`
        array     float32, with as many elements as the variable
        """
        engine, weights, state, own = self._on_host(variable)
        engine.state.import_f32(self._value(engine, name), np.asarray(array))
        for target, value in zip(own, state.values()):
            target.assign(value)
        if name == "remainder":
            _native(variable).assign(weights)

    def _on_host(self, variable: Any) -> Tuple[Optimizer, Any, Dict[str, Any], List[Any]]:
        """Returns an optimizer on copies, the copies of the variable and of its state, and the state variables."""
        if not self.built or self._var_key(variable) not in self._trainable_variables_indices:
            raise _error(abi.DSOPT_ERR_ARGUMENT, "variable '%s' is not stepped by this optimizer: pass one of those of "
                         "`build`" % _name(variable))
        place = self._get_variable_index(_native(variable))
        own, weights = self._lists.state[place], np.array(_native(variable).numpy())
        f32_moments = self._lists.has_f32_moments(self._lists.names[place])
        engine = self._engine({"variable": Param(weights, f32_moments=f32_moments)})
        state = engine.init_state({"variable": weights})
        for entry, copied in zip(infos(engine), own):
            state[entry.name] = np.array(_native(copied).numpy())
        engine.bind(state=state)
        return engine, weights, state, own

    @staticmethod
    def _value(engine: Optimizer, name: str) -> str:
        found = "variable.%s" % _VALUES.get(name)
        if found in engine.state:
            return found
        known = [repr(name) for name, kind in _VALUES.items() if "variable." + kind in engine.state]
        raise _error(abi.DSOPT_ERR_ARGUMENT, "name is %r, must be %s" % (name, " or ".join(known)))


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
