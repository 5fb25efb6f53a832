# SPDX-License-Identifier: Apache-2.0
"""float64 and complex128 parameters of an optimizer that are on one device, stepped by operations of torch.

The engine is fp32. It still checks the hyper-parameters, in a plan without parameters. For DTensors the local tensors
are stepped.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._double import Hyper, clipping, limits_of, moments_of, squares, update
from ._dtensor import is_placed_as, like, local_grad, local_of, refuse, spec_of, takes_norms
from ._formats import formats_of
from ._plan import Entry, Plan, Stale
from ._rounding import Kind
from ._tensors import DEVICES, FLOATS, bump, check_grad, check_kind, context_of, is_dtensor, unsupported, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer

DTYPES = (torch.float64, torch.complex128)


def is_double(param: torch.Tensor) -> bool:
    return param.dtype in DTYPES


def parts_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a real view of a tensor, for element-wise arithmetic."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def squares_of(grad: torch.Tensor) -> float:
    """Returns the sum of squares of a gradient of any dtype, in double."""
    return squares(parts_of(grad.detach()).to(torch.float64))


class Operations:
    """The functions of torch for dsopt._double."""
    sqrt, sign, where = torch.sqrt, torch.sign, torch.where

    @staticmethod
    def add(x: torch.Tensor, y: torch.Tensor, a: float) -> None:
        x.add_(y, alpha=a)

    @staticmethod
    def sum(x: torch.Tensor, y: torch.Tensor, a: float) -> torch.Tensor:
        return x.add(y, alpha=a)

    @staticmethod
    def lerp(x: torch.Tensor, y: torch.Tensor, a: float) -> None:
        x.lerp_(y, a)

    @staticmethod
    def addcmul(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, a: float) -> None:
        x.addcmul_(y, z, value=a)

    @staticmethod
    def addcdiv(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, a: float) -> None:
        x.addcdiv_(y, z, value=a)


class DoublePlan:
    def __init__(self, owner: EngineOptimizer, device: torch.device, entries: List[Entry]) -> None:
        self.device, self.entries = device, entries
        self.keys = self.params = [entry.param for entry in entries]
        self.dtypes, self.shapes = [p.dtype for p in self.params], [p.shape for p in self.params]
        self.specs = list(map(spec_of, self.params))
        self._refuse(owner)
        self.checked = Plan(owner, torch.device("cpu"), Kind(), [])
        self.rules: Dict[int, Tuple[int, int, Dict[str, Any]]] = {}
        for entry in entries:
            self.rules.setdefault(entry.group, owner._rule(owner.param_groups[entry.group]))
        self._take_steps(owner)
        self.moments = [self._moments_of(owner, entry) for entry in entries]
        # LAMB's report, as in Plan.whole.
        self.whole = {"trust_ratio": torch.ones(len(entries), dtype=torch.float64)}

    def _refuse(self, owner: EngineOptimizer) -> None:
        entry = self.entries[0]
        if self.device.type not in DEVICES:
            context_of(self.device, entry.name)
        if owner._wrapper is not None:
            owner._wrapper._check_dtypes()
        for other in self.entries:  # refuses formats
            formats_of(owner, owner.param_groups[other.group], other.name, other.param, ())
        for sharded in [entry for entry in self.entries if is_dtensor(entry.param)]:
            refuse(owner, sharded.name, sharded.param)
            if takes_norms(owner):
                raise unsupported("%s is a %s DTensor, and %s takes norms of whole DTensors, which must be float32, "
                                  "float16, bfloat16 or complex64 for that; convert it" %
                                  (sharded.name, _name_of(sharded.param.dtype), type(owner).__name__))
        what = "%s is %s, which " % (entry.name, _name_of(entry.param.dtype))
        if getattr(owner, "_compat", None):
            raise wrong(what + "compat='deepspeed' does not have, as the original does not; leave compat out", "DTYPE")
        for entry in self.entries:
            limit = limits_of(owner._rule(owner.param_groups[entry.group])[0])
            if limit:
                raise wrong(what + "%s does not have, as its %s float32; convert the parameter" %
                            (type(owner).__name__, limit + (" is" if limit == "exchange" else " are")), "DTYPE")

    def _take_steps(self, owner: EngineOptimizer) -> None:
        """As in Plan. Steps are in host memory, as in torch, because the host needs them."""
        groups, states = owner.param_groups, [owner.state[p] for p in self.params]
        old = [owner._steps_of(state) if state else owner._starts_at(groups[entry.group], entry.group)
               for entry, state in zip(self.entries, states)]
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        self.steps = torch.tensor(old, dtype=dtype, device="cpu")
        for entry, state, step in zip(self.entries, states, self.steps.unbind()):
            if owner._counts_in(groups[entry.group]) or groups[entry.group].get("stochastic_rounding"):
                state["step"] = step

    def _moments_of(self, owner: EngineOptimizer, entry: Entry) -> List[str]:
        group, state, param = owner.param_groups[entry.group], owner.state[entry.param], entry.param
        names = moments_of(self.rules[entry.group][0], float(group.get("momentum", 0)))
        for name in names:
            tensor, what = state.get(name), "state %r of %s" % (name, entry.name)
            if tensor is None:
                start = owner._starts_as(name, group)
                tensor = torch.full_like(param.detach(), complex(start, start) if param.is_complex() else start)
            elif tensor.shape != param.shape:
                raise wrong("%s has shape %s, and the parameter %s" %
                            (what, tuple(tensor.shape), tuple(param.shape)), "SHAPE")
            check_kind(what, tensor, param)
            if is_dtensor(param):
                tensor = like(param, tensor, what)
            state[name] = tensor.to(dtype=param.dtype, device=self.device)
        return list(names)

    def check_params(self) -> None:
        """As in Plan."""
        for param, dtype, shape, spec in zip(self.params, self.dtypes, self.shapes, self.specs):
            if (param.dtype != dtype or param.shape != shape or param.device != self.device or
                    not is_placed_as(spec_of(param), spec)):
                raise Stale

    # ---------------------------------------------------------------------------------------------------------- step
    def prepare(self, owner: EngineOptimizer, scale: Optional[torch.Tensor], skip: Optional[torch.Tensor]) -> Any:
        """As Plan.prepare. Waits for the device if `scale` or `skip` is on a device, and for norms."""
        self.check_params()
        for g, group in enumerate(owner.param_groups):
            now = owner._hyper(group, g)
            if now != self.checked.hyper[g]:
                self.checked._set(owner, g, now)
        passed = owner._passed
        grads = [self._examined(entry, entry.param.grad if passed is None else passed.grads.get(entry.param))
                 for entry in self.entries]
        outputs = {} if passed is None else passed.outputs
        for entry in self.entries:
            if entry.param in outputs:
                self._check_output(entry, outputs[entry.param])
        divisors = None if skip is not None and float(skip) else self._divisors(owner, scale, grads)
        return grads, divisors, outputs

    def step(self, owner: EngineOptimizer, prepared: Any) -> None:
        """As Plan.step."""
        grads, divisors, outputs = prepared
        if divisors is not None:
            self._update(owner, grads, divisors)
        for param in self.params:
            if param in outputs:
                outputs[param].detach().copy_(param.detach())

    def _hyper_of(self, owner: EngineOptimizer, g: int) -> Hyper:
        _, flags, _ = self.rules[g]
        values = dict(zip(owner._fields_in(owner.param_groups[g]), self.checked.hyper[g]))
        known = {name: values[name] for name in Hyper._fields if name in values}
        known.setdefault("bias_correction", not flags & abi.DSOPT_GROUP_NO_BIAS_CORRECTION)
        return Hyper(**known, eps_inside_sqrt=bool(flags & abi.DSOPT_GROUP_EPS_INSIDE_SQRT))

    def _largest(self, owner: EngineOptimizer) -> List[float]:
        """Returns max_norm of each group."""
        if "max_norm" not in owner._fields:
            return [0.0] * len(owner.param_groups)
        place = owner._fields.index("max_norm")
        return [hyper[place] for hyper in self.checked.hyper]

    def _divisors(self, owner: EngineOptimizer, scale: Optional[torch.Tensor],
                  grads: List[Optional[torch.Tensor]]) -> Optional[List[float]]:
        """Returns the divisor of each group's gradients. None: the step is skipped, as by the engine."""
        passed, largest = owner._passed, self._largest(owner)
        factor = (1.0 if scale is None else float(scale)) * (1.0 if passed is None else passed.scale)
        if not 0 < factor < math.inf:
            return None
        norms = None if passed is None else passed.norms
        if norms is None and (scale is not None or (passed is not None and passed.scale != 1) or any(largest)):
            sums = [0.0] * len(largest)
            for entry, grad in zip(self.entries, grads):
                if grad is not None:
                    sums[entry.group] += squares_of(grad)
            norms = [math.sqrt(total) for total in sums]
        if norms is None:
            return [factor] * len(largest)
        if not all(0 <= norm < math.inf for norm in norms):
            return None
        return [factor * clipping(norm / factor, limit) for norm, limit in zip(norms, largest)]

    def _examined(self, entry: Entry, grad: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if grad is None:
            return None
        what = "the gradient of " + entry.name
        if is_dtensor(entry.param):
            grad = local_grad(entry.param, grad, entry.name, [])
        else:
            check_grad(grad, entry.param, what, self.device)
        self._check_dtype(grad, what)
        return grad.detach()

    def _check_dtype(self, tensor: torch.Tensor, what: str) -> None:
        if tensor.dtype not in DTYPES and tensor.dtype not in FLOATS:
            raise wrong("%s is %s, and must be float64, float32, float16, bfloat16 or complex" %
                        (what, _name_of(tensor.dtype)), "DTYPE")

    def _check_output(self, entry: Entry, output: torch.Tensor) -> None:
        what = "the output of " + entry.name
        check_grad(output, entry.param, what, self.device)
        self._check_dtype(output, what)

    def _update(self, owner: EngineOptimizer, grads: List[Optional[torch.Tensor]], divisors: List[float]) -> None:
        counts, ratios = self.steps.tolist(), self.whole["trust_ratio"]
        hypers = {g: self._hyper_of(owner, g) for g in self.rules}
        for i, (entry, grad) in enumerate(zip(self.entries, grads)):
            if grad is None:
                continue
            state, divisor = owner.state[entry.param], divisors[entry.group]
            grad = parts_of(grad).to(torch.float64)
            ratio = update(Operations, self.rules[entry.group][0], hypers[entry.group], int(counts[i]) + 1,
                           parts_of(local_of(entry.param).detach()), grad if divisor == 1 else grad / divisor,
                           tuple(parts_of(local_of(state[name])) for name in self.moments[i]))
            if self.specs[i] is not None and bump is not None:  # the version of the local tensor is separate
                bump([entry.param])
            if ratio is not None:
                ratios[i] = ratio
            self.steps[i] += 1
