# SPDX-License-Identifier: Apache-2.0
"""Muon with the arguments of torch.optim.Muon, and AdamW for the groups that it does not step."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._groups import ADJUST, NS_DTYPE, NS_SCHEDULE
from .._handle import choice
from ._base import EngineOptimizer, number
from ._formats import FIRST, SECOND, Pair
from ._ranks import rows
from ._rounding import defaults_of
from ._tensors import integer, is_dtensor, unsupported, wrong

TRIPLE = (3.4445, -4.775, 2.0315)
SCALARS = ("lr", "weight_decay", "momentum", "eps")
NS_FIELDS = ("ns_a", "ns_b", "ns_c")
# Keys of torch's groups, and those that groups have only if they are given.
KEYS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
MORE = ("use_muon", "rows", "cols", "rows_are_inputs", "ns_schedule", "ns_dtype")
# Defaults of groups with use_muon=False: those of the author's implementation.
OTHER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def _is_muon(group: Dict[str, Any]) -> bool:
    return bool(group.get("use_muon", True))


def _triple(value: Any, g: int) -> Tuple[float, ...]:
    try:
        found = tuple(value)
    except TypeError:
        found = ()
    if len(found) != 3:
        raise wrong("param_groups[%d]: ns_coefficients is %r, and must be three numbers" % (g, value))
    return tuple(number(x, g, "ns_coefficients") for x in found)


class Muon(EngineOptimizer):
    __doc__ = """torch.optim.Muon, stepped by the engine (Jordan et al. 2024): the momentum of each matrix is
    orthogonalised. docs/muon.md says for which parameters it is.

    Parameters of Muon are float32, float16 or bfloat16 with two dimensions; groups may have more keys than torch's:

    use_muon            False: the group is stepped by AdamW, with the keys lr, betas, eps and weight_decay, whose
                        defaults are 3e-4, (0.9, 0.95), 1e-10 and 0, as in the author's implementation
    rows, cols          each parameter is partitioned into matrices of rows x cols: fused queries, keys and values,
                        stacks of experts, convolutions (cols = inputs * height * width). Then any number of dimensions
    rows_are_inputs     True: weights are used as y = x W, so columns are the outputs of adjust_lr_fn

    params              parameters, or dicts of parameters with separate values of the arguments below
    lr                  learning rate; a number, or a tensor that is read in each step
    weight_decay        decoupled decay per step, times lr
    momentum            decay of the running mean of gradients, in (0, 1)
    nesterov            True: Nesterov's momentum
    ns_coefficients     (a, b, c) of each Newton-Schulz iteration
    eps                 smallest divisor of a matrix that is normalized
    ns_steps            number of iterations, 1 to 99
    adjust_lr_fn        factor of lr for a matrix: None or "original", "match_rms_adamw", "spectral_unclamped", "none"
    ns_schedule         "constant": ns_coefficients in each iteration; "polar_express" or "you": a preset of five
                        triples
    ns_dtype            dtype of the inputs of products: "bfloat16", "float16" or "float32". Matrices stay float32
    stochastic_rounding True: bfloat16 parameters are rounded up or down with a probability proportional to
                        the distance, so that small updates are not lost; float32 ones are exact
    seed                of the random numbers, a whole number in [0, 2^64)
    exp_avg_format      format of the momentum: "f32"; "bf16", rounded to nearest; "bf16_random", rounded stochastically
    masters             of 16-bit parameters: None; "float32": copies in the state; "remainder": 16 more bits in
                        the state, with which a bfloat16 parameter is its own master
    """ + rows(24, also=("split_matrices",))

    _stores = (FIRST, SECOND, "masters")
    _counts = False  # torch's state is only the buffer; that of AdamW has counts
    _kept = KEYS + MORE + ("betas",)

    def __init__(self,
                 params: Any,
                 lr: Any = 1e-3,
                 weight_decay: float = 0.1,
                 momentum: float = 0.95,
                 nesterov: bool = True,
                 ns_coefficients: Tuple[float, float, float] = TRIPLE,
                 eps: float = 1e-7,
                 ns_steps: int = 5,
                 adjust_lr_fn: Optional[str] = None,
                 *,
                 ns_schedule: str = "constant",
                 ns_dtype: str = "bfloat16",
                 stochastic_rounding: bool = False,
                 seed: int = 0,
                 exp_avg_format: str = "f32",
                 masters: Optional[str] = None,
                 group: Any = None,
                 shard: Any = False,
                 average: bool = False,
                 node_group: Any = None,
                 split_matrices: bool = False,
                 max_grad_norm: float = 0.,
                 check_ranks: bool = False) -> None:
        self._begin_ranks(group, shard, average, node_group, max_grad_norm, split_matrices, check_ranks=check_ranks)
        extra = defaults_of(stochastic_rounding, seed, {FIRST: exp_avg_format}, masters=masters)
        more = {"ns_schedule": (ns_schedule, "constant"), "ns_dtype": (ns_dtype, "bfloat16")}
        extra.update((key, value) for key, (value, default) in more.items() if value != default)
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                                      ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps,
                                      adjust_lr_fn=adjust_lr_fn, **extra))

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a group, as torch's. `param_group` is a dict of its parameters and its hyper-parameters."""
        given = param_group
        if isinstance(given, dict) and not _is_muon(given):
            param_group = {**OTHER, **given}
        super().add_param_group(param_group)
        group, g = self.param_groups[-1], len(self.param_groups) - 1
        if not _is_muon(group):
            for key in (*KEYS, *MORE):
                if key not in OTHER and key not in given:
                    group.pop(key, None)
        try:
            self._check(group, g)
        except BaseException:
            del self.param_groups[-1]
            raise

    def _check(self, group: Dict[str, Any], g: int) -> None:
        """Refuses keys that are not those of a group of this kind, and values of the wrong type."""
        if not _is_muon(group):
            for key in MORE[1:]:
                if key in group:
                    raise unsupported("param_groups[%d]: %s has no effect with use_muon=False; leave it out" % (g, key))
        self._hyper(group, g)
        self._rule(group)
        self._block_of(group)

    # ----------------------------------------------------------------------------------- descriptions for the engine
    def _fields_in(self, group: Dict[str, Any]) -> Tuple[str, ...]:
        if not _is_muon(group):
            return self._fields
        return SCALARS + ("nesterov", "ns_steps", "adjust", "ns_schedule") + NS_FIELDS

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        if not _is_muon(group):
            return super()._hyper(group, g)
        where = "param_groups[%d]: " % g
        schedule = choice(where + "ns_schedule", group.get("ns_schedule", "constant"), NS_SCHEDULE)
        adjust = choice(where + "adjust_lr_fn", group["adjust_lr_fn"] or "original", ADJUST)
        triple = _triple(group["ns_coefficients"], g)
        if schedule != abi.DSOPT_NS_CONSTANT and triple == TRIPLE:  # the default
            triple = (0.0, 0.0, 0.0)
        steps = integer(where + "ns_steps", group["ns_steps"], 2**31)
        return (*(number(group[key], g, key) for key in SCALARS), bool(group["nesterov"]), steps, adjust, schedule,
                *triple)

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        if not _is_muon(group):
            return abi.DSOPT_ALGORITHM_ADAMW, 0, {}
        flags = abi.DSOPT_GROUP_NO_BIAS_CORRECTION | (abi.DSOPT_GROUP_NESTEROV if group["nesterov"] else 0)
        return abi.DSOPT_ALGORITHM_MUON, 0, {
            "flags": flags, "ns_dtype": choice("ns_dtype", group.get("ns_dtype", "bfloat16"), NS_DTYPE)}

    def _set_field(self, group: Dict[str, Any], field: str, value: float) -> None:
        if field == "adjust":
            group["adjust_lr_fn"] = next(word for word, code in ADJUST.items() if code == value)
        elif field == "ns_schedule":
            group[field] = next(word for word, code in NS_SCHEDULE.items() if code == value)
        elif field in NS_FIELDS:
            triple = list(group["ns_coefficients"])
            triple[NS_FIELDS.index(field)] = value
            group["ns_coefficients"] = tuple(triple)
        else:
            super()._set_field(group, field, int(value) if field == "ns_steps" else value)

    def _counts_in(self, group: Dict[str, Any]) -> bool:
        return self._counts or not _is_muon(group)

    def _formats_in(self, group: Dict[str, Any]) -> Pair:
        first, second = super()._formats_in(group)
        if _is_muon(group) and second != "f32":
            raise unsupported("%s is %r, and Muon has no second moment; leave it out" % (SECOND, second))
        return first, second

    def _param_flags(self, group: Dict[str, Any], param: torch.Tensor) -> int:
        inputs = abi.DSOPT_PARAM_ROWS_ARE_INPUTS if group.get("rows_are_inputs") else 0
        return super()._param_flags(group, param) | inputs

    def _block_of(self, group: Dict[str, Any]) -> Tuple[int, int]:
        rows_, cols = (integer(key, group.get(key) or 0, 2**63) for key in ("rows", "cols"))
        return rows_, cols

    def _is_row_major(self, group: Dict[str, Any]) -> bool:
        return _is_muon(group)

    def _fixed(self) -> List[Any]:
        return [[group.get(key) for key in MORE] for group in self.param_groups]

    def _plan(self) -> None:
        for g, group in enumerate(self.param_groups):
            self._check(group, g)
            for i, param in enumerate(group["params"] if _is_muon(group) else ()):
                self._check_param("param_groups[%d]['params'][%d]" % (g, i), param)
        super()._plan()

    def _check_param(self, name: str, param: torch.Tensor) -> None:
        kind = type(self).__name__
        if is_dtensor(param):
            raise unsupported("%s is a DTensor of shape %s, and %s orthogonalises whole matrices; use plain "
                              "parameters, with shard=True or split_matrices=True, or a group with use_muon=False" %
                              (name, tuple(param.shape), kind))
        if param.is_complex():
            raise wrong("%s is %s, and %s is for float32, float16 and bfloat16; put it into a group with "
                        "use_muon=False" % (name, str(param.dtype).replace("torch.", ""), kind), "DTYPE")
