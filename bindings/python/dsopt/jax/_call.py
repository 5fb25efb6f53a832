# SPDX-License-Identifier: Apache-2.0
"""The description of an optimizer (Recipe), its state, and the custom calls whose attributes carry it."""

import ctypes
import dataclasses
import functools
import math
from typing import NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np

from .. import _abi as abi
from .. import _nvidia
from .._errors import ArgumentError, Error, UnsupportedError
from .._groups import FORMATS, SCALED
from . import _build

DTYPES = {"float32": abi.DSOPT_DTYPE_F32, "float16": abi.DSOPT_DTYPE_F16, "bfloat16": abi.DSOPT_DTYPE_BF16}
_STATE_DTYPES = {
    abi.DSOPT_DTYPE_F32: jnp.float32,
    abi.DSOPT_DTYPE_F16: jnp.float16,
    abi.DSOPT_DTYPE_BF16: jnp.bfloat16,
    abi.DSOPT_DTYPE_I32: jnp.int32,
    abi.DSOPT_DTYPE_I16: jnp.int16,
    abi.DSOPT_DTYPE_U8: jnp.uint8,
    abi.DSOPT_DTYPE_F8_E4M3: jnp.float8_e4m3fn,
}
_RANDOM = {abi.DSOPT_MOMENT_BF16_RANDOM}
_SCALED = {FORMATS[name] for name in SCALED}

# enum Option of _handler.cc, by the name of the operand if it has one
OPTIONS = {"rank": 1, "lr": 2, "hyper": 4, "grad_scale": 8, "skip": 16, "after": 128, "grad_norms": 512}
OUT, HYPER_IS_ERROR, ZEROS, NORMS = 32, 64, 256, 1024
_SCALARS = ("rank", "grad_scale", "skip")

# Fields of dsopt_group in the order of the attribute lists, which is that of the struct
FORMAT_FIELDS = ("exp_avg_format", "exp_avg_sq_format")
_FIELDS = next(struct["fields"] for struct in abi.description["structs"] if struct["name"] == "dsopt_group")
GROUP_NUMBERS = tuple(
    field["name"]
    for field in _FIELDS
    if field["type"] in ("int32_t", "int64_t") and field["name"] not in ("algorithm", "flags")
)
GROUP_REALS = tuple(field["name"] for field in _FIELDS if field["type"] == "double")
_SCALER_NUMBERS = ("profile", "flags", "window", "hysteresis")
_SCALER_REALS = ("init", "factor", "min", "max")


def argument_error(text: str) -> ArgumentError:
    return ArgumentError(text, abi.DSOPT_ERR_ARGUMENT, "DSOPT_ERR_ARGUMENT")


def unsupported(text: str) -> UnsupportedError:
    return UnsupportedError(text, abi.DSOPT_ERR_UNSUPPORTED, "DSOPT_ERR_UNSUPPORTED")


class Param(NamedTuple):
    """A parameter as registered: `dtype` is a name such as "float32"."""

    name: str
    shape: tuple
    dtype: str
    group: int
    f32_moments: bool = False
    sharded: bool = False  # over the model comm
    rows: int = 0  # Muon: of the matrices into which it is partitioned; 0 = two dimensions are a matrix
    cols: int = 0
    rows_are_inputs: bool = False


class Entry(NamedTuple):
    """One state tensor. `param` is -1 for those of the whole optimizer. `block` is the number of elements of the
    parameter per element: 1, or more for scales, which have one dimension."""

    name: str
    param: int
    shape: tuple
    dtype: object
    rank_local: bool
    block: int

    @property
    def owner(self) -> Optional[int]:
        """Index of the parameter whose shape the tensor has; None for the others."""
        return self.param if self.block == 1 else None


def names_of(tree, is_leaf=None) -> list:
    """Returns a name for each leaf: its path, such as "['dense']['kernel']"."""
    names, seen = [], set()
    for path, _ in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = jax.tree_util.keystr(path) or "params"
        if len(name.encode()) > 1000 or name in seen or "\0" in name:
            name = "%d:%s" % (len(names), name.replace("\0", "").encode()[-900:].decode("utf-8", "ignore"))
        seen.add(name)
        names.append(name)
    return names


def group(algorithm: int, flags: Optional[int] = None, **fields) -> tuple:
    """Returns a dsopt_group with the library's defaults, as a hashable tuple: algorithm, flags, integers, reals."""
    made = abi.dsopt_group()
    abi.check(abi.lib.dsopt_group_init(ctypes.byref(made), ctypes.sizeof(made), algorithm))
    for name, value in fields.items():
        setattr(made, name, value)
    return (
        (algorithm, made.flags if flags is None else flags) + tuple(getattr(made, name) for name in GROUP_NUMBERS),
        tuple(float(getattr(made, name)) for name in GROUP_REALS),
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything from which the optimizer of a call is made. Hashable; holds no addresses."""

    groups: tuple
    params: tuple
    flags: int = 0
    nonfinite: int = 0
    max_norm: float = 0.0
    max_value: float = 0.0
    seed: int = 0
    masters: int = 0
    scaler: tuple = ()  # () = none, else the fields of dsopt_scaler_desc by name
    ranks: int = 1
    replicas: int = 1  # comms, each of `ranks` devices
    over_model: bool = False  # the comm is dsopt_optimizer_desc.model, not data
    timeout_ms: int = 0
    comm: str = ""  # "" = the program makes a LOCAL comm
    offsets: tuple = ()  # offsets of each rank's shards in their parameters, a row per rank; () = whole

    def of_shards(self, shapes, offsets=()) -> "Recipe":
        """Returns this recipe for parameters of other shapes."""
        params = tuple(param._replace(shape=shape) for param, shape in zip(self.params, shapes))
        return dataclasses.replace(self, params=params, offsets=offsets)

    @property
    def needs_whole_tensors(self) -> bool:
        """True if a step is not element-wise, or needs to know where a shard begins."""
        uses_norms = self.checks_nonfinite or self.is_lamb or self.reports_norms
        return uses_norms or self.rounds_at_random or self.has_scales or self.has_matrices

    @property
    def checks_nonfinite(self) -> bool:
        """True if a step reads all gradients before it decides whether to skip."""
        return self.nonfinite == abi.DSOPT_NONFINITE_SKIP or self.max_norm > 0 or bool(self.scaler)

    @property
    def is_lamb(self) -> bool:
        return any(numbers[0] == abi.DSOPT_ALGORITHM_LAMB for numbers, _ in self.groups)

    @property
    def has_matrices(self) -> bool:
        return any(map(self.is_matrix, range(len(self.params))))

    def is_matrix(self, i: int) -> bool:
        """True if parameter i is one of Muon."""
        return self.groups[self.params[i].group][0][0] == abi.DSOPT_ALGORITHM_MUON

    @property
    def reports_norms(self) -> bool:
        return bool(self.flags & abi.DSOPT_OPTIMIZER_REPORT_NORMS)

    @property
    def rounds_at_random(self) -> bool:
        return any(self.weight_is_random(i) or self.moment_is_random(i) for i in range(len(self.params)))

    @property
    def has_scales(self) -> bool:
        return any(self.is_scaled(i) for i in range(len(self.params)))

    def weight_is_random(self, i: int) -> bool:
        """True if parameter i is rounded at random."""
        return bool(self.flags & abi.DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING) and self.params[i].dtype != "float32"

    def moment_is_random(self, i: int) -> bool:
        """True if a moment of parameter i is rounded at random."""
        return bool(_RANDOM & self._formats(i))

    def is_scaled(self, i: int) -> bool:
        """True if a moment of parameter i has scales."""
        return bool(_SCALED & self._formats(i))

    def _formats(self, i: int) -> set:
        """Returns the formats of the moments of parameter i, other than F32."""
        param = self.params[i]
        numbers = self.groups[param.group][0][2:]
        formats = {number for name, number in zip(GROUP_NUMBERS, numbers) if name in FORMAT_FIELDS}
        return set() if param.f32_moments else formats

    @functools.cached_property
    def attributes(self) -> dict:
        scaler = dict(self.scaler)
        seed = self.seed - (1 << 64) if self.seed >= 1 << 63 else self.seed
        names = [param.name for param in self.params]
        rows = [
            (
                len(name.encode()),
                math.prod(param.shape),
                DTYPES[param.dtype],
                param.group,
                _flags_of(param),
                len(_dims_of(param)),
                param.rows,
                param.cols,
            )
            for name, param in zip(names, self.params)
        ]
        return {
            "numbers": np.array(
                [self.flags, self.nonfinite, seed, self.ranks, self.timeout_ms, bool(self.scaler)]
                + [scaler.get(name, 0) for name in _SCALER_NUMBERS]
                + [self.masters, self.replicas, self.over_model],
                np.int64,
            ),
            "reals": np.array(
                [self.max_norm, self.max_value] + [scaler.get(name, 0.0) for name in _SCALER_REALS], np.float64
            ),
            "group_numbers": np.array([numbers for numbers, _ in self.groups], np.int64).ravel(),
            "group_reals": np.array([reals for _, reals in self.groups], np.float64).ravel(),
            "params": np.array(rows, np.int64).ravel(),
            "dims": np.array([size for param in self.params for size in _dims_of(param)], np.int64),
            "names": "".join(names),
            "offsets": np.array(self.offsets, np.int64).ravel(),
            "comm": self.comm,
        }

    @functools.cached_property
    def layout(self) -> "Layout":
        return _layout(self)


def _flags_of(param: Param) -> int:
    return (
        abi.DSOPT_PARAM_F32_MOMENTS * param.f32_moments
        | abi.DSOPT_PARAM_MODEL_PARALLEL * param.sharded
        | abi.DSOPT_PARAM_ROWS_ARE_INPUTS * param.rows_are_inputs
    )


def _dims_of(param: Param) -> tuple:
    """Returns the shape as it is registered: the library has at most eight dimensions."""
    return param.shape if len(param.shape) <= 8 else ()


class Layout(NamedTuple):
    """State entries and workspace of a recipe, from the library."""

    entries: tuple
    workspace: int


@functools.lru_cache(maxsize=1024)  # an optax update can have a recipe for each leaf
def _layout(recipe: Recipe) -> Layout:
    """Raises the errors of the recipe."""
    layout = _layout_on(recipe, abi.DSOPT_BACKEND_CPU)
    if all(numbers[0] != abi.DSOPT_ALGORITHM_MUON for numbers, _ in recipe.groups) or not _has_cuda():
        return layout
    _nvidia.load(_nvidia.CUBLASLT)
    try:  # products of matrices need other workspace on a device
        return layout._replace(workspace=max(layout.workspace, _layout_on(recipe, abi.DSOPT_BACKEND_CUDA).workspace))
    except Error:  # such as without cuBLASLt
        return layout


def _has_cuda() -> bool:
    """True if JAX has CUDA devices. Without them libdsopt must not look for devices, which starts the CUDA driver."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _layout_on(recipe: Recipe, backend: int) -> Layout:
    """Makes a temporary optimizer without memory."""
    lib, handles = abi.lib, []

    def create(function, destroy, *arguments):
        handle = ctypes.c_void_p()
        abi.check(function(*arguments, ctypes.byref(handle)))
        handles.append((destroy, handle))
        return handle

    try:
        context_desc = abi.dsopt_context_desc(backend=backend)
        context = create(lib.dsopt_context_create, lib.dsopt_context_destroy, ctypes.byref(context_desc))
        desc = abi.dsopt_optimizer_desc(
            flags=recipe.flags,
            nonfinite=recipe.nonfinite,
            masters=recipe.masters,
            max_norm=recipe.max_norm,
            max_value=recipe.max_value,
            seed=recipe.seed,
        )
        if recipe.scaler:
            scaler = abi.dsopt_scaler_desc(**dict(recipe.scaler))
            desc.scaler = create(lib.dsopt_scaler_create, lib.dsopt_scaler_destroy, context, ctypes.byref(scaler))
        if recipe.ranks > 1:
            comm = create(
                lib.dsopt_comm_create, lib.dsopt_comm_destroy, context, ctypes.byref(_silent_comm(recipe.ranks))
            )
            setattr(desc, "model" if recipe.over_model else "data", comm)
        optimizer = create(lib.dsopt_optimizer_create, lib.dsopt_optimizer_destroy, context, ctypes.byref(desc))
        for numbers, reals in recipe.groups:
            made = abi.dsopt_group(
                algorithm=numbers[0],
                flags=numbers[1],
                **dict(zip(GROUP_NUMBERS, numbers[2:])),
                **dict(zip(GROUP_REALS, reals)),
            )
            abi.check(lib.dsopt_optimizer_add_group(optimizer, ctypes.byref(made), None, 0))
        params = (abi.dsopt_param * len(recipe.params))()
        dims = []
        for place, param in zip(params, recipe.params):
            place.tensor.numel, place.tensor.dtype = math.prod(param.shape), DTYPES[param.dtype]
            place.name, place.group, place.flags = param.name.encode(), param.group, _flags_of(param)
            place.rows, place.cols = param.rows, param.cols
            if _dims_of(param):
                dims.append((ctypes.c_int64 * len(param.shape))(*param.shape))
                place.dims, place.ndim = ctypes.addressof(dims[-1]), len(param.shape)
        abi.check(lib.dsopt_optimizer_add_params(optimizer, params, len(recipe.params)))
        return Layout(_entries(optimizer, recipe.params), _workspace(optimizer))
    finally:
        for destroy, handle in reversed(handles):
            destroy(handle)


def _entries(optimizer, params) -> tuple:
    count, entries = ctypes.c_int64(), []
    abi.check(abi.lib.dsopt_optimizer_state_count(optimizer, ctypes.byref(count)))
    for i in range(count.value):
        info = abi.dsopt_state_info()
        abi.check(abi.lib.dsopt_optimizer_state(optimizer, i, ctypes.byref(info)))
        shape = params[info.param].shape if info.block == 1 else (info.tensor.numel,)
        entries.append(
            Entry(
                info.name.decode(),
                info.param,
                shape,
                _STATE_DTYPES[info.tensor.dtype],
                bool(info.flags & abi.DSOPT_STATE_RANK_LOCAL),
                info.block,
            )
        )
    return tuple(entries)


def _workspace(optimizer) -> int:
    size = ctypes.c_size_t()
    abi.check(abi.lib.dsopt_optimizer_workspace(optimizer, ctypes.byref(size)))
    return size.value


_ALL_REDUCE = abi.dsopt_comm_table._fields_[[name for name, _ in abi.dsopt_comm_table._fields_].index("all_reduce")][1]


@_ALL_REDUCE
def _refuse(*_):
    return -abi.DSOPT_ERR_ABORTED


def _silent_comm(ranks: int):
    """Returns a comm that only has a number of ranks: sizes depend on nothing else."""
    table = abi.dsopt_comm_table(rank=0, ranks=ranks, all_reduce=_refuse)
    desc = abi.dsopt_comm_desc(kind=abi.DSOPT_COMM_KIND_TABLE, table=ctypes.addressof(table))
    desc.keep = table
    return desc


# --------------------------------------------------------------------------------------------------------------- calls
def like(x, dtype=None):
    """Returns shape, dtype and, in a mesh with explicit axes, the sharding of an array, for a result like it."""
    kind = jax.typeof(x)
    dtype = kind.dtype if dtype is None else dtype
    sharding = getattr(kind, "sharding", None)
    if sharding is None or sharding.mesh.empty or not sharding.mesh.explicit_axes:
        return jax.ShapeDtypeStruct(kind.shape, dtype)
    return jax.ShapeDtypeStruct(kind.shape, dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Init:
    """dsopt_init without its arrays: [rank] parameters -> state."""

    recipe: Recipe
    has_rank: bool = False
    gradient = out = None  # as in Step

    def __call__(self, *arrays) -> list:
        _build.library()
        params = arrays[self.has_rank :]
        results = [
            like(params[entry.param], entry.dtype)
            if entry.owner is not None and entry.shape == params[entry.param].shape
            else jax.ShapeDtypeStruct(entry.shape, entry.dtype)
            for entry in self.recipe.layout.entries
        ]
        call = jax.ffi.ffi_call("dsopt_init", results)
        return list(call(*arrays, options=np.int64(OPTIONS["rank"] * self.has_rank), **self.recipe.attributes))

    @property
    def needs_whole_tensors(self) -> bool:
        return self.recipe.has_scales or self.recipe.has_matrices

    def owners(self) -> tuple:
        """Returns the parameter whose shape each operand and each result has; None for the others."""
        operands = [None] * self.has_rank + list(range(len(self.recipe.params)))
        return operands, [entry.owner for entry in self.recipe.layout.entries]


@dataclasses.dataclass(frozen=True)
class Step:
    """dsopt_step without its arrays: [values] [parameters] gradients state -> parameters or `out`, state, report.

    out     dtypes of new arrays for the results; None = in place in the parameters
    over    the results that reuse the memory of their gradients
    zeros   the parameters are zeros, and the state has no "step", which counts as 1: on the CPU, with `out`
    values  operands by the names of OPTIONS, in that order
    """

    recipe: Recipe
    values: tuple = ()
    flags: int = 0
    options: int = 0
    out: Optional[tuple] = None
    over: tuple = ()
    zeros: bool = False

    def __call__(self, *arrays) -> list:
        _build.library()
        values, params, grads, state = self.split(arrays)
        options = self.options | sum(OPTIONS[name] for name in values)
        results = [
            *(map(like, params) if self.out is None else map(like, grads, self.out)),
            *map(like, state),
            jax.ShapeDtypeStruct((abi.DSOPT_REPORT_FLOATS,), jnp.float32),
            jax.ShapeDtypeStruct((self.recipe.layout.workspace,), jnp.uint8),
        ]
        first, n = len(values) + len(params), len(grads)
        aliases = {first + n + i: n + i for i in range(len(state))}
        if self.out is None:
            aliases.update({len(values) + i: i for i in range(n)})
        else:
            options |= OUT | ZEROS * self.zeros
            aliases.update({first + i: i for i in self.over})
        call = jax.ffi.ffi_call(
            "dsopt_step", results, input_output_aliases=aliases, has_side_effect=self.recipe.ranks > 1
        )
        attributes = {"flags": np.int64(self.flags | abi.DSOPT_STEP_NO_NAN), **self.recipe.attributes}
        return list(call(*arrays, options=np.int64(options), **attributes))[:-1]

    def split(self, arrays) -> tuple:
        """Returns the values by name, parameters, gradients and state of a list of operands."""
        n, begin = len(self.recipe.params), len(self.values)
        middle = begin if self.zeros else begin + n
        return dict(zip(self.values, arrays)), arrays[begin:middle], arrays[middle : middle + n], arrays[middle + n :]

    def entries(self) -> list:
        """Returns the state entries among the operands."""
        return [entry for entry in self.recipe.layout.entries if not (self.zeros and entry.name == "step")]

    @property
    def needs_whole_tensors(self) -> bool:
        return self.recipe.needs_whole_tensors

    @property
    def gradient(self) -> int:
        """Index of the gradient among the operands of a parameter."""
        return 0 if self.zeros else 1

    def owners(self) -> tuple:
        """As in Init."""
        leaves = list(range(len(self.recipe.params)))
        state = [entry.owner for entry in self.entries()]
        given = [] if self.zeros else leaves
        return [None] * len(self.values) + given + leaves + state, leaves + state + [None]


def norms(arrays, each: bool) -> jax.Array:
    """Returns the dsopt_norm_result of the list of arrays, or of each array, as rows of 32-bit words."""
    _build.library()
    recipe = Recipe(
        groups=(group(abi.DSOPT_ALGORITHM_SGD),),
        params=tuple(Param("p%d" % i, x.shape, x.dtype.name, 0) for i, x in enumerate(arrays)),
        flags=abi.DSOPT_OPTIMIZER_NO_MASTER,
    )
    rows = len(arrays) if each else 1
    call = jax.ffi.ffi_call("dsopt_step", jax.ShapeDtypeStruct((rows, 8), jnp.uint32))
    return call(*arrays, options=np.int64(NORMS), **recipe.attributes)


def one_number(name: str, value) -> jax.Array:
    """Returns the array as a scalar. Refuses arrays that do not have one element, and values that are not real."""
    array = jnp.asarray(value)
    if array.size != 1 or not jnp.isdtype(array.dtype, ("bool", "integral", "real floating")):
        raise argument_error("%s is %s%s: pass one real number" % (name, array.dtype, list(array.shape)))
    return array.reshape(())


def operand(name: str, value) -> jax.Array:
    if name in _SCALARS:
        value = one_number(name, value)
    if name == "skip":
        value = value != 0  # a conversion would turn 0.5 into 0
    return value if name == "after" else jnp.asarray(value, np.int32 if name in ("rank", "skip") else np.float32)


def temporary(x) -> bool:
    """True if the array is computed by the traced program. XLA would copy an argument of the program to preserve it; in
    a function inside the program the two cannot be distinguished."""
    return isinstance(x, jax.core.Tracer) and getattr(x, "parent", x) is not None


def fixed(value):
    """Returns a number that is known at trace time, in double; None for values that only the program knows."""
    if isinstance(value, (bool, int, float, np.number)) or (isinstance(value, np.ndarray) and value.ndim == 0):
        return float(value)
    return None


class Hyper(NamedTuple):
    """Hyper-parameters of a step by optax's names: numbers, or arrays for values that only the program knows."""

    lr: object
    b1: object
    b2: object
    eps: object
    weight_decay: object
    max_norm: float = 0.0
    eps_root: object = 0.0  # index 7 of a row, which must be 0 without momentum

    def known(self) -> dict:
        """Returns the fields of dsopt_group."""
        fields = (
            ("lr", self.lr),
            ("beta1", self.b1),
            ("beta2", self.b2),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
        )
        return {name: fixed(value) for name, value in fields if fixed(value) is not None}

    def unknown(self) -> dict:
        """Returns the other values, as scalars."""
        return {
            name: one_number("learning_rate" if name == "lr" else name, value)
            for name, value in self._asdict().items()
            if fixed(value) is None
        }


def values_of(groups) -> dict:
    """Returns the values that are not known at trace time, as arrays of `step`. `groups`: for each group its Hyper, and
    True if it has a weight decay."""
    unknown = [hyper.unknown() for hyper, _ in groups]
    if not any(unknown):
        return {}
    if all(list(each) == ["lr"] for each in unknown):
        return {"lr": jnp.stack([jnp.asarray(each["lr"], jnp.float32) for each in unknown])}
    rows = []
    for (_, decays), each in zip(groups, unknown):
        # NaN = the recipe's value, in double, for numbers known at trace time
        scalars = {name: each.get(name, np.nan) for name in Hyper._fields}
        rows.append(
            [
                scalars["lr"],
                scalars["b1"],
                scalars["b2"],
                scalars["eps"],
                scalars["weight_decay"] if decays else 0.0,
                0.0,
                0.0 if rows else scalars["max_norm"],
                scalars["eps_root"],
                *[0.0] * (abi.DSOPT_HYPER_FLOATS - abi.DSOPT_HYPER_MOMENTUM - 1),
            ]
        )
    return {"hyper": jnp.stack([jnp.stack([jnp.asarray(value, jnp.float32) for value in row]) for row in rows])}


def chosen(mask, tree, count: int, default: bool) -> list:
    """Returns a bool for each leaf from a mask as in optax: bools for a prefix of the tree, or a function. None = the
    default for all."""
    if mask is None:
        return [default] * count
    flags = jax.tree.broadcast(mask(tree) if callable(mask) else mask, tree, is_leaf=lambda x: x is None)
    return [bool(flag) for flag in jax.tree.leaves(flags, is_leaf=lambda x: x is None)]
