# SPDX-License-Identifier: Apache-2.0
"""What the optimizers of dsopt.tf share: Keras variables for the engine's state, and one op per step."""
import ctypes
import dataclasses
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from .. import _abi as abi
from .. import _nvidia
from .._arrays import DTYPE_NAMES
from .._errors import Error, error_of
from .._groups import Group
from .._optimizer import Optimizer
from .._params import Param
from .._state import infos
from . import _build

_DTYPES = (tf.float32, tf.float16, tf.bfloat16)
# Names of state variables, by the names in dsopt.h.
_SUFFIXES = {"remainder": "remainder", "exp_avg": "momentum", "exp_avg_scale": "momentum_scale",
             "exp_avg_sq": "velocity", "exp_avg_sq_scale": "velocity_scale", "momentum_buffer": "momentum"}
_VALUES = {"momentum": ("exp_avg", "momentum_buffer"), "velocity": ("exp_avg_sq",), "remainder": ("remainder",)}
# Fields of dsopt_group that the op sets.
_FIELDS = ("algorithm", "flags", "beta1", "beta2", "eps", "weight_decay", "exp_avg_format", "exp_avg_sq_format",
           "momentum", "ns_a", "ns_b", "ns_c", "ns_steps", "ns_schedule", "ns_dtype", "adjust")


def error(status: int, text: str) -> Exception:
    problem = error_of(status, abi.lib.dsopt_status_name(status).decode(), text)
    problem.ag_pass_through = True  # AutoGraph would replace an unknown class by its own
    return problem


if keras.backend.backend() != "tensorflow":
    raise error(abi.DSOPT_ERR_MISSING, "dsopt.tf needs Keras on TensorFlow, and Keras runs on %s: set "
                "KERAS_BACKEND=tensorflow" % keras.backend.backend())


def _native(variable: Any) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def name_of(variable: Any) -> str:
    return getattr(variable, "path", None) or variable.name


def _in_xla() -> bool:
    """True while a function with jit_compile=True is being traced."""
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(graph)


class Rule(NamedTuple):
    """One algorithm of an optimizer.

    group       algorithm and hyper-parameters, without weight decay
    decay       weight decay of the variables that decay
    rate        factor of the optimizer's learning rate
    grad_scale  factor of the gradients
    """

    group: Group
    decay: float
    rate: float = 1.0
    grad_scale: float = 1.0


class _Plan:
    """Arguments of the op for one list of variables, computed once."""

    def __init__(self, optimizer: "Base", variables: Sequence[tf.Variable]) -> None:
        places = [optimizer._get_variable_index(variable) for variable in variables]
        lists = optimizer._lists
        names = lists.names
        if len(set(places)) != len(places):
            twice = next(place for place in places if places.count(place) > 1)
            raise error(abi.DSOPT_ERR_OVERLAP, "variable '%s' is in the list twice" % names[twice])
        self.params = list(variables)
        self.state = [_native(variable) for place in places for variable in lists.state[place]]
        self.names = [names[place] for place in places]
        found = [lists.params[place] for place in places]
        self.f32_moments = [param.f32_moments for param in found]
        self.blocks = [number for param in found for number in (param.rows, param.cols)]
        self.rows_are_inputs = [param.rows_are_inputs for param in found]
        self.dtypes = [variable.dtype for variable in variables]
        self.shapes = [variable.shape for variable in variables]
        self.rules = [lists.rules[place] for place in places]
        # each rule has a group without and one with decay
        self.groups = [2 * rule + (optimizer._decays(rule) and optimizer._use_weight_decay(variable))
                       for rule, variable in zip(self.rules, variables)]


class _Lists:
    """Plain lists of an optimizer. TensorFlow would save attributes of the optimizer itself in its checkpoints."""

    def __init__(self, f32_moments: Sequence[str]) -> None:
        self.f32_moments = list(f32_moments)
        # of each variable
        self.names: List[str] = []
        self.params: List[Param] = []
        self.rules: List[int] = []
        self.state: List[List[Any]] = []  # in the order of dsopt.h
        self.blocks: Dict[str, Tuple[int, int]] = {}  # Muon: by regular expressions
        self.plans: Dict[Tuple, _Plan] = {}
        self.groups: Dict[Tuple, Tuple[List[Rule], List[str]]] = {}  # by hyper-parameters

    def has_f32_moments(self, name: str) -> bool:
        return any(word in name for word in self.f32_moments)


class Base(keras.optimizers.Optimizer):
    """A Keras optimizer whose step is one op, which updates all variables in place. Subclasses have the rules."""

    _MOMENTS = "_momentums", "_velocities"  # attributes, which are part of checkpoints
    _CLIPS_VALUES = True  # the op applies clipvalue

    def _start(self, exp_avg_format: str, exp_avg_sq_format: str, f32_moments: Sequence[str], masters: Optional[str],
               seed: int) -> None:
        """Checks and stores the arguments that Keras does not have."""
        if masters not in (None, "remainder"):
            raise error(abi.DSOPT_ERR_ARGUMENT, "masters is %r, must be None or 'remainder'" % (masters,))
        if not isinstance(f32_moments, (list, tuple)) or not all(isinstance(word, str) for word in f32_moments):
            raise error(abi.DSOPT_ERR_ARGUMENT, "f32_moments is %r, must be a list of words" % (f32_moments,))
        if f32_moments and {exp_avg_format, exp_avg_sq_format} == {"f32"}:
            raise error(abi.DSOPT_ERR_UNSUPPORTED, "f32_moments has no effect: the formats of both moments are 'f32'")
        self.exp_avg_format, self.exp_avg_sq_format, self.masters = exp_avg_format, exp_avg_sq_format, masters
        self.seed = abi.number(seed, ctypes.c_uint64, "seed")
        self._lists = _Lists(f32_moments)
        self._current()  # refuses values of the wrong type

    # ----------------------------------------------------------------------------------------------- of each subclass
    def _hyper(self) -> Tuple:
        """Returns the attributes on which the rules depend."""
        raise NotImplementedError

    def _rules(self) -> List[Rule]:
        raise NotImplementedError

    def _decays(self, rule: int) -> bool:
        """True if variables of this rule decay unless they are excluded."""
        raise NotImplementedError

    def _rule_of(self, variable: Any) -> int:
        return 0

    def _layout(self, variable: Any) -> Dict[str, Any]:
        """Returns further arguments of `Param`."""
        return {}

    # ------------------------------------------------------------------------------------------------------- variables
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
                raise error(abi.DSOPT_ERR_DTYPE, "variable '%s' has dtype %s, must be float32, float16 or bfloat16"
                            % (name_of(variable), dtype.name))
            if self._var_key(variable) in seen:
                raise error(abi.DSOPT_ERR_OVERLAP, "variable '%s' is in the list twice" % name_of(variable))
            seen.add(self._var_key(variable))
        if tf.config.list_physical_devices("GPU"):
            for rule in self._current()[0]:
                _nvidia.load_for_group(rule.group.algorithm, "cuda")
        names: List[str] = []
        for index, variable in enumerate(variables):
            name = name_of(variable)  # names need not be unique outside of models
            names.append(name if name not in names else "%s (number %d)" % (name, index))
        params = [self._param(name, variable) for name, variable in zip(names, variables)]
        rules = [self._rule_of(variable) for variable in variables]
        stepped = [index for index, variable in enumerate(variables)
                   if not self._overwrite_variable_with_gradient(variable)]
        engine = self._engine({names[index]: params[index] for index in stepped}, [rules[index] for index in stepped])
        entries = [entry for entry in infos(engine) if entry.param >= 0]  # not those of the whole optimizer
        super().build(variables)
        state: List[Dict[str, Any]] = [{} for _ in variables]
        for entry in entries:
            index = stepped[entry.param]
            suffix = _SUFFIXES[entry.name[len(names[index]) + 1 :]]
            state[index][suffix] = self._state_variable(variables[index], suffix, entry)
        lists = self._lists
        lists.names, lists.params, lists.rules = names, params, rules
        lists.state = [list(each.values()) for each in state]
        for attribute, suffix in zip(self._MOMENTS, ("momentum", "velocity")):
            setattr(self, attribute, [each.get(suffix) for each in state])

    def _param(self, name: str, variable: Any) -> Param:
        # a variable that is assigned instead of stepped may have another dtype
        return Param(shape=tuple(variable.shape), dtype=tf.as_dtype(variable.dtype).name,
                     f32_moments=self._lists.has_f32_moments(name), **self._layout(variable))

    def _engine(self, params: Dict[str, Param], rules: Sequence[int]) -> Optimizer:
        """Returns an optimizer of the package dsopt with the state that the op has."""
        options: Dict[str, Any] = {"masters": "remainder"} if self.masters else {"no_master": True}
        try:
            engine = Optimizer(**options)
            for rule in self._current()[0]:
                engine.add_group(type(rule.group)(**rule.group.formats()))  # the op checks hyper-parameters
            engine.add_params(params, list(rules))
            return engine
        except Error as problem:
            problem.ag_pass_through = True  # type: ignore[attr-defined]
            raise

    def _state_variable(self, variable: Any, suffix: str, entry: Any) -> Any:
        """Adds a variable of zeros. E4M3 codes are uint8, because Keras cannot load float8 from its files."""
        dtype = "uint8" if entry.dtype == abi.DSOPT_DTYPE_F8_E4M3 else DTYPE_NAMES[entry.dtype]
        name = "%s_%s" % (name_of(variable).replace("/", "_").replace(":", "_"), suffix)
        with self._distribution_strategy.extended.colocate_vars_with(_native(variable)):
            return self.add_variable(shape=entry.shape, dtype=dtype, name=name)

    # ------------------------------------------------------------------------------------------------------------ step
    def _clip_gradients(self, grads: List[Any]) -> List[Any]:
        # Sparse gradients become dense, as in Keras, which also updates the moments of every row.
        grads = [tf.convert_to_tensor(grad) for grad in grads]
        clips = self.clipnorm or self.clipvalue and not self._CLIPS_VALUES  # the op applies the others
        return super()._clip_gradients(grads) if clips else grads

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        """Does nothing: the op applies weight decay."""

    def _global_divisor(self, grads: List[tf.Tensor]) -> List[tf.Tensor]:
        """Returns the divisor of global_clipnorm, as a list of one or no element."""
        if not self.global_clipnorm:
            return []
        norm = tf.linalg.global_norm([tf.cast(grad, tf.float32) for grad in grads])
        return [tf.maximum(norm / float(self.global_clipnorm), 1.0)]

    def _current(self) -> Tuple[List[Rule], List[str]]:
        """Returns the rules, and for the op the fields of their groups: of each rule without and with decay."""
        key, known = self._hyper(), self._lists.groups
        if key not in known:
            rules = self._rules()
            known[key] = rules, [word for rule in rules for decay in (0.0, rule.decay)
                                 for word in _fields_of(rule.group, decay)]
        return known[key]

    def _plan(self, variables: Sequence[tf.Variable]) -> _Plan:
        key = tuple(map(self._decays, range(len(self._current()[0])))) + tuple(map(self._var_key, variables))
        plans = self._lists.plans
        if key not in plans:
            plans[key] = _Plan(self, variables)
        return plans[key]

    def _backend_update_step(self, grads: List[tf.Tensor], trainable_variables: Sequence[Any],
                             learning_rate: Any) -> None:
        if tf.distribute.has_strategy():
            raise error(abi.DSOPT_ERR_UNSUPPORTED, "dsopt.tf does not support tf.distribute.Strategy: average the "
                        "gradients, and apply them outside of it")
        if _in_xla():
            raise error(abi.DSOPT_ERR_UNSUPPORTED, "the step of dsopt.tf is an op of TensorFlow that XLA cannot "
                        "compile: pass jit_compile=False to model.compile and to tf.function")
        plan = self._plan([_native(variable) for variable in trainable_variables])
        rules, fields = self._current()
        for grad, name in zip(grads, plan.names):
            if not grad.dtype.is_floating:
                raise error(abi.DSOPT_ERR_DTYPE, "gradient of '%s' has dtype %s, must be a float"
                            % (name, grad.dtype.name))
        grads = [grad if grad.dtype in _DTYPES else tf.cast(grad, tf.float32) for grad in grads]
        divisor = self._global_divisor(grads)
        scales = [rules[rule].grad_scale for rule in plan.rules]
        # in float32, because a factor above 1 could overflow in float16
        grads = [grad if scale == 1 else tf.cast(grad, tf.float32) * scale for grad, scale in zip(grads, scales)]
        rates = tf.constant([rule.rate for rule in rules for _ in (False, True)], tf.float32)
        _build.ops().dsopt_step(
            params=[variable.handle for variable in plan.params],
            state=[variable.handle for variable in plan.state],
            grads=grads,
            steps=tf.fill([len(grads)], tf.cast(tf.convert_to_tensor(self.iterations), tf.int32)),
            lr=tf.cast(tf.convert_to_tensor(learning_rate), tf.float32) * rates,
            grad_scale=divisor,
            names=plan.names, dtypes=plan.dtypes, shapes=plan.shapes, fields=fields, group_of=plan.groups,
            f32_moments=plan.f32_moments, blocks=plan.blocks, rows_are_inputs=plan.rows_are_inputs,
            remainders=self.masters is not None, seed=self.seed - (self.seed >> 63 << 64),
            clipvalue=repr(float(self.clipvalue or 0) if self._CLIPS_VALUES else 0.0))

    def get_config(self) -> Dict[str, Any]:
        """Return the arguments of a new optimizer with the same hyper-parameters."""
        config = super().get_config()
        for name, default in (("exp_avg_format", "f32"), ("exp_avg_sq_format", "f32"), ("f32_moments", []),
                              ("masters", None), ("seed", 0)):
            if getattr(self, name) != default:  # without these the configuration is that of Keras
                config[name] = getattr(self, name)
        return config

    def load_own_variables(self, store: Any) -> None:
        """Set the state from a file of Keras. State that is not of this optimizer is refused, with nothing changed.

        store  arrays by the index of their variable, "0", "1" and so on
        """
        if self.variables:  # else Keras warns that the optimizer is not built
            self._check_loaded(store)
        super().load_own_variables(store)

    def _check_loaded(self, store: Any) -> None:
        wanted, names = self.variables, set(store.keys())
        for index, variable in enumerate(wanted):
            what = "variable %d of the file, '%s' of %s," % (index, variable.path, self.name)
            if str(index) not in names:
                raise error(abi.DSOPT_ERR_MISMATCH, what + " is missing: the file has %d variables, and this optimizer "
                            "%d" % (len(names), len(wanted)))
            value = store[str(index)]
            if tuple(value.shape) != tuple(variable.shape):
                raise error(abi.DSOPT_ERR_SHAPE, what + " has shape %s, must be %s"
                            % (tuple(value.shape), tuple(variable.shape)))
            need, has = tf.as_dtype(variable.dtype), tf.as_dtype(value.dtype)
            # a file of float64 has the values; float16 and codes in another dtype have lost them
            if has != need and not (need.is_floating and has in (tf.float32, tf.float64)):
                raise error(abi.DSOPT_ERR_DTYPE, what + " is %s, must be %s" % (has.name, need.name))
            if variable is self.iterations and not 0 <= int(np.asarray(value)) < 2**31:
                raise error(abi.DSOPT_ERR_MISMATCH, what + " is %d, must be in [0, 2^31)" % int(np.asarray(value)))
        if len(names) > len(wanted):
            raise error(abi.DSOPT_ERR_MISMATCH, "the file has %d variables, and optimizer '%s' has %d: it is of "
                        "another optimizer, or of other variables" % (len(names), self.name, len(wanted)))

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
            raise error(abi.DSOPT_ERR_ARGUMENT, "variable '%s' is not stepped by this optimizer: pass one of those of "
                        "`build`" % name_of(variable))
        place = self._get_variable_index(_native(variable))
        lists = self._lists
        own, weights = lists.state[place], np.array(_native(variable).numpy())
        engine = self._engine({"variable": dataclasses.replace(lists.params[place], array=weights)},
                              [lists.rules[place]])
        state = engine.init_state({"variable": weights})
        for entry, copied in zip(infos(engine), own):
            state[entry.name] = np.array(_native(copied).numpy())
        engine.bind(state=state)
        return engine, weights, state, own

    @staticmethod
    def _value(engine: Optimizer, name: str) -> str:
        known = {word: "variable." + kind for word, kinds in _VALUES.items() for kind in kinds
                 if "variable." + kind in engine.state}
        if name in known:
            return known[name]
        raise error(abi.DSOPT_ERR_ARGUMENT, "name is %r, must be %s" % (name, " or ".join(map(repr, known))))


def _fields_of(group: Group, decay: float) -> List[str]:
    """Returns a group as words for the op: decimal numbers by the names of dsopt_group."""
    struct = group.struct()
    struct.weight_decay = decay
    return ["%s=%r" % (name, getattr(struct, name)) for name in _FIELDS]
