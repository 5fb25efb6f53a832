# SPDX-License-Identifier: Apache-2.0
"""Steps that update parameters and state in place, with all other functions of the engine."""

import dataclasses
from typing import Any, NamedTuple, Optional, Union

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import _abi as abi
from .._groups import ADJUST, FORMATS, NS_DTYPE, NS_SCHEDULE
from .._handle import choice
from . import _call, _comms, _remainders, _step
from ._tree import Tree

# Bits of dsopt_group.flags, and the value of the option that sets them.
_GROUP_FLAGS = {
    "eps_inside_sqrt": (abi.DSOPT_GROUP_EPS_INSIDE_SQRT, True),
    "no_bias_correction": (abi.DSOPT_GROUP_NO_BIAS_CORRECTION, True),
    "bias_correction": (abi.DSOPT_GROUP_NO_BIAS_CORRECTION, False),
    "nesterov": (abi.DSOPT_GROUP_NESTEROV, True),
}
_GROUP_WORDS = {"ns_schedule": NS_SCHEDULE, "ns_dtype": NS_DTYPE, "adjust": ADJUST}
# Fields of dsopt_group that are options under their own names. The others have an argument or a word.
_GROUP_OPTIONS = (
    {*_call.GROUP_NUMBERS, *_call.GROUP_REALS}
    - {"lr", "beta1", "beta2", "eps", "weight_decay", "max_norm", "ns_a", "ns_b", "ns_c"}
    - {*_call.FORMAT_FIELDS, *_GROUP_WORDS}
)
_OPTIONS = _GROUP_OPTIONS | set(_GROUP_FLAGS) | set(_GROUP_WORDS) | {"ns_coefficients"}
_NONFINITE = {None: abi.DSOPT_NONFINITE_AUTO, "skip": abi.DSOPT_NONFINITE_SKIP, "apply": abi.DSOPT_NONFINITE_APPLY}


class DynamicScale(NamedTuple):
    """A loss scale that shrinks after overflows and grows after good steps.

    init        scale of the first step
    factor      factor by which the scale is divided or multiplied
    window      number of good steps before the scale grows
    min, max    bounds of the scale; a max of 0 = none
    hysteresis  number of overflows before the scale shrinks
    """

    init: float = 2.0**16
    factor: float = 2.0
    window: int = 1000
    min: float = 1.0
    max: float = 0.0  # 0 = none
    hysteresis: int = 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """Report of a step.

    values  array indexed by enum dsopt_report_index, -1 where nothing was computed
    """

    values: jax.Array

    def _at(self, place):
        return self.values[..., place]

    skipped = property(
        lambda self: self._at(abi.DSOPT_REPORT_SKIPPED) != 0, doc="Nothing was changed except the loss scale."
    )
    reasons = property(
        lambda self: self._at(abi.DSOPT_REPORT_REASONS).astype(jnp.int32), doc="Why: an OR of DSOPT_SKIP_*."
    )
    grad_norm = property(
        lambda self: self._at(abi.DSOPT_REPORT_GRAD_NORM), doc="Before clipping, without the loss scale."
    )
    weight_norm = property(
        lambda self: self._at(abi.DSOPT_REPORT_WEIGHT_NORM), doc="Before the step, with report_norms."
    )
    update_norm = property(lambda self: self._at(abi.DSOPT_REPORT_UPDATE_NORM), doc="|new - old|, with report_norms.")
    nonfinite = property(
        lambda self: self._at(abi.DSOPT_REPORT_NONFINITE), doc="Number of Inf and NaN in the gradients."
    )
    first_bad = property(
        lambda self: self._at(abi.DSOPT_REPORT_FIRST_BAD).astype(jnp.int32),
        doc="Index of the first parameter with one, in the order of jax.tree.leaves; -1 = none.",
    )
    loss_scale = property(lambda self: self._at(abi.DSOPT_REPORT_SCALE_NEXT), doc="For the next backward pass.")


class FusedStep:
    """An optimizer whose step writes new parameters and state over the old ones. Donate them, so that XLA does not
    copy.

        opt = FusedStep("adamw", 3e-4, weight_decay=0.1, max_norm=1.0)
        state = opt.init(params)
        step = jax.jit(opt.step, donate_argnums=(0, 2))
        params, state, report = step(params, grads, state)

    The state is a dict by the names of dsopt.h, such as state["exp_avg"], which has the structure of the parameters.

    Numbers, arrays, or functions of the number of steps, where None is the engine's default:

    learning_rate  step size
    b1             decay of the first moment; of Lion the weight of the moment in the direction
    b2             decay of the second moment, and of Lion's moment
    eps            added to the denominator
    weight_decay   decay of the parameters

    Known when the program is traced:

    algorithm            "adamw", "adam", "lamb", "adam_legacy", "sgd", "adagrad", "lion", "muon", "onebit_adam",
                         "zero_one_adam" or "onebit_lamb"
    mask                 which parameters decay: a tree of bools, a prefix of one, or a function of the parameters
    max_norm             clip by the L2 norm of the gradients of the call, in a shard_map of the shard unless there
                         is a model_axis; 0 = off
    max_value            clip every element of the gradients; 0 = off
    loss_scale           a number or a DynamicScale: gradients are those of opt.loss_scale(state) * loss
    masters              True = fp32 copies of 16-bit parameters in the state, which steps update; "remainder" = the
                         master of a bfloat16 parameter is the parameter and 16 more bits in state["remainder"]; False =
                         no masters
    exp_avg_format       exp_avg or momentum_buffer in the state: "f32", "bf16", "bf16_random", "e4m3" or "q8". With the
                         last two, state["exp_avg_scale"] has a scale per 256 elements
    exp_avg_sq_format    exp_avg_sq in the state: "f32", "bf16_random" or "q8"; sum of Adagrad: "f32" or "bf16_random"
    f32_moments          which parameters have float32 moments whatever the formats, such as embeddings, norms and
                         biases: a mask as above; None = none
    stochastic_rounding  round 16-bit parameters without masters up or down at random
    seed                 of the stochastic rounding, and of moments in "bf16_random"
    nonfinite            policy for Inf and NaN: None (skip if the gradients are read anyway), "skip" or "apply"
    report_norms         report.weight_norm and report.update_norm are computed
    check_ranks          ranks of the 1-bit family compare lists and options before an exchange; all fail if they differ
    axis_name            1-bit family: mesh axis of the ranks, inside a shard_map or pmap
    model_axis           not of the 1-bit family: mesh axis over which parameters are sharded, inside a shard_map. Norms
                         of gradients, the check for Inf and NaN, and LAMB's trust ratios are then those of whole
                         tensors; norms of report_norms are those of the shard
    replicated           with model_axis: which parameters each device of the axis has as a whole: a mask as above;
                         None = none
    other                Muon: a FusedStep for the parameters that are not in muon_mask, such as
                         FusedStep("adamw", 3e-4). Its algorithm, hyper-parameters, mask, formats, f32_moments and
                         options are used; what concerns the whole step is set in this object
    muon_mask            Muon: which parameters are stepped by it: a mask as above; None = those of two dimensions.
                         Embeddings have two, and train better with `other`
    blocks               Muon: a tree with (rows, cols) for parameters that are partitioned into matrices of that size,
                         and None for the others, or a function of the parameters that returns it. If `cols` is the
                         product of the last dimensions, every `rows` consecutive rows are a matrix: a stack (layers,
                         in, out) with (in, out). Otherwise a matrix is `cols` columns of `rows` rows: fused queries,
                         keys and values (d, 3 d) with (d, d). Required for parameters that do not have two dimensions
    rows_are_inputs      Muon: which matrices are used as x @ W, so that columns are outputs, which `adjust` needs: True
                         or False for all, or a mask as above. The default is True, because kernels of Flax and Haiku
                         have the shape (in, out), which optax.contrib.muon assumes, too. It is False for weights of
                         (out, in), as in Equinox and PyTorch
    comm                 with an axis: name of a comm from register_comm; "" = the program makes one
    timeout_ms           with an axis: time-out of waits for other ranks; 0 = 600000, -1 = no limit

    `options`, numbers that some algorithms have; an option without effect is refused:

    momentum                   SGD: decay of the momentum; 0 = none. Muon: in (0, 1)
    dampening                  SGD: fraction of the gradient that is not added to the momentum after the first step
    nesterov                   SGD and Muon, where it is the default: True = Nesterov's momentum
    lr_decay                   Adagrad: learning rate / (1 + lr_decay * steps)
    initial_accumulator_value  Adagrad: initial sum of squares
    eps_inside_sqrt            Adagrad and adam_legacy: True = eps is added under the root
    no_bias_correction         Adam and LAMB: True = moments without bias correction
    bias_correction            Muon: True = Nesterov's mixture of optax.contrib.muon
    ns_steps                   Muon: number of Newton-Schulz iterations
    ns_schedule                Muon: "constant", or five triples of coefficients, "polar_express" or "you"
    ns_coefficients            Muon: triple of the constant schedule; None = 3.4445, -4.775, 2.0315
    ns_dtype                   Muon: dtype of the inputs of products, "bfloat16", "float16" or "float32"
    adjust                     Muon: factor of the learning rate by the shape of a matrix, "original",
                               "match_rms_adamw", "spectral_unclamped" or "none"
    min_trust, max_trust       LAMB: bounds of the trust ratio
    freeze_step                1-bit family: number of the last step that changes the variance
    var_interval_steps         0/1 Adam: DeepSpeed's var_update_scaler
    local_interval_steps       0/1 Adam: DeepSpeed's local_step_scaler
    max_local_interval         0/1 Adam: DeepSpeed's local_step_clipper
    trust_beta                 1-bit LAMB: decay of the mean trust ratio, DeepSpeed's coeff_beta
    trust_threshold            1-bit LAMB: largest relative change of the factor per step, DeepSpeed's factor_threshold
    trust_min_change, trust_max_change  1-bit LAMB: bounds of the factor
    """

    def __init__(
        self,
        algorithm: str = "adamw",
        learning_rate: Any = None,
        *,
        b1: Any = None,
        b2: Any = None,
        eps: Any = None,
        weight_decay: Any = None,
        mask: Any = None,
        max_norm: float = 0.0,
        max_value: float = 0.0,
        loss_scale: Union[None, float, DynamicScale] = None,
        masters: Union[bool, str] = True,
        exp_avg_format: str = "f32",
        exp_avg_sq_format: str = "f32",
        f32_moments: Any = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        nonfinite: Optional[str] = None,
        report_norms: bool = False,
        check_ranks: bool = False,
        axis_name: Optional[str] = None,
        model_axis: Optional[str] = None,
        replicated: Any = None,
        other: Optional["FusedStep"] = None,
        muon_mask: Any = None,
        blocks: Any = None,
        rows_are_inputs: Any = True,
        comm: str = "",
        timeout_ms: int = 0,
        **options: Any,
    ):
        number = abi.description["constants"].get("DSOPT_ALGORITHM_" + algorithm.upper())
        if not number or number < 0:
            raise _call.argument_error("dsopt has no algorithm %r: it must be one of %s" % (algorithm, _names()))
        if nonfinite not in _NONFINITE:
            raise _call.argument_error("nonfinite is %r: it must be None, 'skip' or 'apply'" % (nonfinite,))
        if masters not in (True, False, "remainder"):
            raise _call.argument_error("masters is %r: it must be True, False or 'remainder'" % (masters,))
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise TypeError("FusedStep() got an unexpected keyword argument %r" % unknown[0])
        exchanges = number in _comms.FAMILY
        if exchanges != (axis_name is not None):
            raise _call.argument_error(
                "%s needs axis_name: pass the name of the mesh axis of its ranks" % algorithm
                if exchanges
                else "axis_name is for the 1-bit family: average gradients with jax.lax.pmean for %s" % algorithm
            )
        if exchanges and model_axis is not None:
            raise _call.unsupported("model_axis is not supported by the 1-bit family: leave it out for %s" % algorithm)
        if replicated is not None and model_axis is None:
            raise _call.argument_error("replicated has no effect without model_axis: leave it out")
        self._model_axis, self._replicated = model_axis, replicated
        self._axis = axis_name if exchanges else model_axis
        self._name, self._algorithm, self._comm, self._timeout_ms = algorithm, number, comm, timeout_ms
        self._hyper = (learning_rate, b1, b2, eps, weight_decay)
        self._mask, self._max_norm = mask, float(max_norm)
        self._f32_moments = f32_moments
        is_muon = number == abi.DSOPT_ALGORITHM_MUON
        given = {"other": other, "muon_mask": muon_mask, "blocks": blocks}
        for name in (name for name, value in given.items() if value is not None and not is_muon):
            raise _call.argument_error("%s is for muon, and has no effect in %s: leave it out" % (name, algorithm))
        self._other, self._muon_mask, self._blocks = other, muon_mask if is_muon else True, blocks
        self._rows_are_inputs = rows_are_inputs if is_muon else False
        self._options = {name: value for name, value in options.items() if name in _GROUP_OPTIONS}
        self._options.update(_ns_options(options))
        for name, value in (("exp_avg_format", exp_avg_format), ("exp_avg_sq_format", exp_avg_sq_format)):
            self._options[name] = choice(name, value, FORMATS)
        self._group_flags = _call.group(number)[0][1]  # also loads and checks the library
        for name, (bit, sets) in _GROUP_FLAGS.items():
            if name in options:
                self._group_flags &= ~bit
                self._group_flags |= bit if bool(options[name]) == sets else 0
        self._of_step = {
            "max_norm": max_norm,
            "max_value": max_value,
            "loss_scale": loss_scale,
            "masters": masters,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "nonfinite": nonfinite,
            "report_norms": report_norms,
            "check_ranks": check_ranks,
        }
        flags = [
            (not masters, abi.DSOPT_OPTIMIZER_NO_MASTER),
            (report_norms, abi.DSOPT_OPTIMIZER_REPORT_NORMS),
            (stochastic_rounding, abi.DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING),
            (exchanges, abi.DSOPT_OPTIMIZER_AVERAGES),
            (check_ranks, abi.DSOPT_OPTIMIZER_CHECK_RANKS),
        ]
        self._desc = {
            "flags": sum(bit for on, bit in flags if on),
            "nonfinite": _NONFINITE[nonfinite],
            "masters": abi.DSOPT_MASTERS_REMAINDER if masters == "remainder" else abi.DSOPT_MASTERS_PER_TENSOR,
            "max_norm": self._max_norm,
            "max_value": float(max_value),
            "seed": int(seed),
            "scaler": _scaler(loss_scale),
        }
        if other is not None:
            other._check_as_other()

    def _check_as_other(self):
        """Refuses options of the whole step, which the object with this one as `other` has."""
        if self._algorithm == abi.DSOPT_ALGORITHM_MUON or self._axis is not None:
            raise _call.argument_error(
                "other is %s: it must be another rule than muon, without axis_name and model_axis" % self._name
            )
        default = FusedStep(self._name)._of_step
        for name in (name for name, value in self._of_step.items() if value != default[name]):
            raise _call.argument_error("other has %s, which concerns the whole step: pass it with muon" % name)

    # ------------------------------------------------------------------------------------------------------------ state
    def init(self, params, masters=None) -> dict:
        """Return the initial state. With axis_name or model_axis inside the shard_map or pmap of the steps.

        params   tree of float32, float16 or bfloat16 arrays
        masters  tree of fp32 weights that 16-bit parameters were rounded from; None = the parameters are exact. A
                 remainder holds such a weight exactly, except halfway between two bfloat16: then off by one unit in the
                 last place of fp32 if it was rounded towards 0
        """
        tree = Tree(params)
        recipe = self._recipe(tree)
        state = tree.pack(recipe, _step.init(recipe, tree.leaves, _comms.rank(self._axis)))
        if masters is not None:
            given = tree.treedef.flatten_up_to(masters)
            of = {
                "master": lambda leaf, weight: jnp.array(weight, jnp.float32),
                "remainder": _remainders.of_rounded,
            }
            for name in of.keys() & state.keys():
                kept = tree.treedef.flatten_up_to(state[name])
                new = [k if k is None else of[name](leaf, g) for k, leaf, g in zip(kept, tree.leaves, given)]
                state[name] = tree.treedef.unflatten(new)
        return state

    def specs(self, params, param_specs=PartitionSpec(), *, ranks: int = 1) -> dict:
        """Return the PartitionSpec of each state array: its parameter's; along all axes of the parameter for scales, of
        which each shard has its own; along the axis for state that differs between ranks, which has an additional
        leading axis; replicated for the rest.

        params       the parameters, or their shapes
        param_specs  the PartitionSpec of all, or a tree of them
        ranks        number of ranks of the 1-bit family
        """
        tree = Tree(params)
        specs = tree.treedef.flatten_up_to(
            jax.tree.broadcast(param_specs, params, is_leaf=lambda x: isinstance(x, PartitionSpec))
        )
        recipe = self._recipe(tree, ranks=ranks)

        def of(entry):
            if entry.rank_local:
                return PartitionSpec(self._axis)
            if entry.param < 0:
                return PartitionSpec()
            return specs[entry.param] if entry.block == 1 else _along_all_axes(specs[entry.param])

        return tree.pack(recipe, list(map(of, recipe.layout.entries)), expand=False)

    def loss_scale(self, state) -> jax.Array:
        """Return the factor of the loss: a scalar.

        state  from init or step
        """
        if "loss_scale" not in state:
            raise _call.argument_error("this optimizer has no loss scale: pass loss_scale to FusedStep")
        return state["loss_scale"][0]

    # ------------------------------------------------------------------------------------------------------------- step
    def step(
        self,
        params,
        grads,
        state,
        *,
        learning_rate=None,
        other_learning_rate=None,
        grad_scale=None,
        skip=None,
        after=None,
    ):
        """Step once. Returns (params, state, report).

        params               tree of arrays; donate it
        grads                tree of gradients of the same structure and shapes, of any of the three float dtypes
        state                from init or the step before; donate it
        learning_rate        replaces the optimizer's; None = keep it
        other_learning_rate  replaces that of `other`; None = keep it
        grad_scale           gradients are divided by this number, such as the number of micro-batches; None = 1
        skip                 a number or bool: the step is skipped unless it is 0; None = 0
        after                an array of an earlier call: with an axis every rank then makes the two calls in that
                             order, as steps in one function always do
        """
        tree = Tree(params)
        if other_learning_rate is not None and self._other is None:
            raise _call.argument_error("other_learning_rate has no effect without `other`: leave it out")
        hypers = [self._values(state, learning_rate)]
        if self._other is not None:
            hypers.append(self._other._values(state, other_learning_rate))
        recipe = self._recipe(tree, hypers)
        gradients = [jnp.asarray(grad) for grad in tree.up_to(grads, "gradients")]
        tree.check_gradients(gradients)
        entries = tree.unpack(recipe, state)
        values = {
            **_call.values_of([(hypers[rule], decays) for rule, decays in _used(self._groups(tree))]),
            "rank": _comms.rank(self._axis),
            "grad_scale": grad_scale,
            "skip": skip,
            "after": after,
        }
        if self._axis is not None and after is None:
            values["after"] = _comms.previous(gradients)
        leaves, entries, report = _step.step(recipe, tree.leaves, gradients, entries, values)
        if self._axis is not None:
            _comms.remember([report, *entries, *leaves])  # the report first: no later call overwrites it
        return tree.treedef.unflatten(leaves), tree.pack(recipe, entries), Report(report)

    def _values(self, state, learning_rate=None) -> _call.Hyper:
        """Returns the hyper-parameters of a step; without a state only those that are numbers."""
        default = dict(zip(("lr", "beta1", "beta2", "eps", "weight_decay"), _call.group(self._algorithm)[1]))
        given = list(self._hyper)
        if learning_rate is not None:
            given[0] = learning_rate
        values = []
        for value, start in zip(given, default.values()):
            if callable(value):
                value = start if state is None else value(self._count(state))
            values.append(start if value is None or (state is None and _call.fixed(value) is None) else value)
        return _call.Hyper(*values, max_norm=self._max_norm)

    @staticmethod
    def _count(state):
        if "step" not in state:
            raise _call.argument_error("the state has no 'step': make one with init of this optimizer")
        return jnp.max(state["step"], initial=0)

    @property
    def _rules(self) -> tuple:
        """The objects with the hyper-parameters of groups."""
        return (self,) if self._other is None else (self, self._other)

    def _groups(self, tree) -> list:
        """Returns the group of each parameter: index of its rule, and True if it decays."""
        is_first = tree.chosen(_is_matrix if self._muon_mask is None else self._muon_mask, True)
        if not any(is_first):
            raise _call.argument_error("no parameter is in muon_mask: pass a mask, or use another algorithm than muon")
        if not all(is_first) and self._other is None:
            raise _call.argument_error(
                'parameter %s is not in muon_mask: pass other=FusedStep("adamw"), or another algorithm'
                % tree.names[is_first.index(False)]
            )
        decays = [tree.chosen(rule._mask, True) for rule in self._rules]
        return [(0, decays[0][i]) if first else (1, decays[1][i]) for i, first in enumerate(is_first)]

    def _recipe(self, tree, hypers=None, ranks=None) -> _call.Recipe:
        rules = self._rules
        hypers = [rule._values(None) for rule in rules] if hypers is None else hypers
        known = [{**hyper.known(), **rule._options} for rule, hyper in zip(rules, hypers)]
        no_decay = {"weight_decay": 0.0}
        groups = self._groups(tree)
        used = _used(groups)
        f32_moments = [tree.chosen(rule._f32_moments, False) for rule in rules]
        over_model = self._model_axis is not None
        replicated = tree.chosen(self._replicated, not over_model)
        are_inputs = tree.chosen(self._rows_are_inputs, False)
        blocks = tree.blocks(self._blocks)
        return _call.Recipe(
            groups=tuple(
                _call.group(
                    rules[rule]._algorithm, rules[rule]._group_flags, **{**known[rule], **({} if decays else no_decay)}
                )
                for rule, decays in used
            ),
            params=tuple(
                _call.Param(
                    name,
                    jnp.shape(leaf),
                    leaf.dtype.name,
                    used.index(groups[i]),
                    f32_moments[groups[i][0]][i],
                    not replicated[i],
                    *blocks[i],
                    rows_are_inputs=are_inputs[i] and groups[i][0] == 0,
                )
                for i, (name, leaf) in enumerate(zip(tree.names, tree.leaves))
            ),
            ranks=_comms.ranks(self._axis, self._comm) if ranks is None else ranks,
            replicas=_comms.replicas(self._axis) if ranks is None else 1,
            over_model=over_model,
            comm=self._comm,
            timeout_ms=self._timeout_ms,
            **self._desc,
        )


def _is_matrix(params):
    """The default of muon_mask."""
    return jax.tree.map(lambda leaf: len(jnp.shape(leaf)) == 2, params)


def _used(groups) -> list:
    """Returns the groups that have parameters, in the engine's order: of each rule those that decay first."""
    return sorted(set(groups), key=lambda group: (group[0], not group[1]))


def _ns_options(options) -> dict:
    """Returns the fields of dsopt_group for Muon's options that are not numbers."""
    fields = {name: choice(name, options[name], words) for name, words in _GROUP_WORDS.items() if name in options}
    triple = options.get("ns_coefficients")
    if triple is None and fields.get("ns_schedule", abi.DSOPT_NS_CONSTANT) != abi.DSOPT_NS_CONSTANT:
        triple = 0.0, 0.0, 0.0  # a preset has its own
    if triple is not None:
        if len(triple) != 3:
            raise _call.argument_error("ns_coefficients is %r: it must be three numbers" % (triple,))
        fields.update(zip(("ns_a", "ns_b", "ns_c"), map(float, triple)))
    return fields


def _names() -> str:
    """Returns the algorithms of FusedStep."""
    found = ((value, name) for name, value in abi.description["constants"].items() if value > 0)
    prefix = "DSOPT_ALGORITHM_"
    return ", ".join(name[len(prefix) :].lower() for _, name in sorted(found) if name.startswith(prefix))


def _scaler(scale) -> tuple:
    if scale is None:
        return ()
    if isinstance(scale, DynamicScale):
        return tuple(scale._asdict().items())
    return (("flags", abi.DSOPT_SCALER_STATIC), ("init", float(scale)))


def _along_all_axes(spec) -> PartitionSpec:
    """Returns the spec of one dimension that is sharded over every axis of `spec`."""
    parts = [part if isinstance(part, tuple) else (part,) for part in spec]
    axes = tuple(axis for part in parts for axis in part if isinstance(axis, str))
    return PartitionSpec(axes) if axes else PartitionSpec()


def onebit_adam(learning_rate: Any = None, *, axis_name: str, **options: Any) -> FusedStep:
    """1-bit Adam over the devices of a mesh axis, in place. Gradients are local to the rank: do not average them.

    learning_rate  as in FusedStep
    axis_name      mesh axis of the ranks, inside a shard_map or pmap
    options        further arguments of FusedStep, such as freeze_step
    """
    return FusedStep("onebit_adam", learning_rate, axis_name=axis_name, **options)


def zero_one_adam(learning_rate: Any = None, *, axis_name: str, **options: Any) -> FusedStep:
    """0/1 Adam over the devices of a mesh axis, in place. Gradients are local to the rank: do not average them.

    learning_rate  as in FusedStep
    axis_name      mesh axis of the ranks, inside a shard_map or pmap
    options        further arguments of FusedStep, such as var_interval_steps
    """
    return FusedStep("zero_one_adam", learning_rate, axis_name=axis_name, **options)


def onebit_lamb(learning_rate: Any = None, *, axis_name: str, **options: Any) -> FusedStep:
    """1-bit LAMB over the devices of a mesh axis, in place. Gradients are local to the rank: do not average them.

    learning_rate  as in FusedStep
    axis_name      mesh axis of the ranks, inside a shard_map or pmap
    options        further arguments of FusedStep, such as freeze_step
    """
    return FusedStep("onebit_lamb", learning_rate, axis_name=axis_name, **options)
