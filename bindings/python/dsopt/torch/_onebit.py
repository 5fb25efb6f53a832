# SPDX-License-Identifier: Apache-2.0
"""The 1-bit family with the arguments of DeepSpeed. Ranks are those of a process group (docs/onebit.md)."""
from __future__ import annotations

import copy
from ctypes import byref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._errors import StateError, UnsupportedError
from ._base import VERSION, number
from ._deepspeed import COMMON, DECAY, LAMB, Named, ReadOnly, TrustRatios
from ._onebit_names import NCCL, OnebitNames
from ._onebit_ranks import OnebitRanks
from ._originals import check_class, converted, is_original
from ._parallel import data_group_of
from ._resume import resume
from ._tensors import unsupported, wrong

REDUCTIONS = {abi.DSOPT_REDUCTION_FULL: "full", abi.DSOPT_REDUCTION_COMPRESSED: "compressed",
              abi.DSOPT_REDUCTION_LOCAL: "local"}
# Arguments that the originals accept and ignore. Standard mode refuses arguments without effect.
IGNORED = {"eps_inside_sqrt": "eps is added to the root", "max_grad_norm": "use clip_grad of FP16_Optimizer"}


# Attributes of DeepSpeed's engines that enable averaging of gradients, by using_pipeline.
ENGINE_FLAGS = ("enable_backward_allreduce", "pipeline_enable_backward_allreduce")

# Shared by the docstrings below.
NOTES = """
    DeepSpeed 0.19.8 no longer has these optimizers. The step averages the gradients itself if needed: do not use
    DistributedDataParallel, and do not average elsewhere (docs/onebit.md). Gradients with Inf or NaN skip the step on
    all ranks. There is no bias correction. Groups may have two more keys:

    exp_avg_mask        a tensor by which the momentum is multiplied after each exchange. A 1-bit message cannot
                        represent 0, so an element whose gradient is always 0, such as a position that no sequence
                        reaches, would be changed by noise; a 0 in the mask prevents that. The mask is broadcastable to
                        each parameter, or with FP16_Optimizer a vector for all parameters of the group. load_state_dict
                        keeps the mask of this optimizer and ignores the checkpoint's; if they differ, error feedback
                        restarts with zeros. Each step reads the mask, so it can be set, replaced, changed in place or
                        removed at any time
    non_freeze          True: the group is never compressed, and its variance never freezes (OnebitAdam)

    The constructor's arguments:
"""
MORE = """
    deepspeed           None: the step averages gradients. Otherwise an engine that averages them while its attribute
                        enable_backward_allreduce is set; each step sets or clears the attribute
    bias_correction     no effect
    eps_inside_sqrt     must be False; with compat="deepspeed" it is ignored
    max_grad_norm       must be 0; clip with FP16_Optimizer(..., clip_grad=...). With compat="deepspeed" it is ignored
    amsgrad             must be False
    cuda_aware          must be False: the backend of `group` decides which memory is sent
    comm_backend_name   "nccl", "mpi", "hccl", "gloo" or "compressed". The exchange uses `group`. A name other than that
                        of the group's backend is an error, except "compressed", which is valid for every backend. By
                        default any backend is valid
    group               process group of the data-parallel ranks; None: the group of deepspeed.mpu, or of a wrapper's
                        mpu. Without an mpu: the default group of torch.distributed, or one rank if there is none
    compat              None: standard mode; "deepspeed": also reproduces the original's quirks (docs/compat.md). A load
                        then restarts error feedback with zeros
    stochastic_rounding must be False: 16-bit parameters have float32 masters
    shard               "node": each rank of node_group keeps the state of its part of the parameters, and the step
                        gathers the weights in the node. True is refused, and ZeroOneAdam is not sharded
    node_group          process group of the ranks of this node, which exchange gradients in full precision; `group` has
                        the ranks with the same rank in their nodes, which exchange bits, and may be left out if there
                        is one node. None: one level. Not with compat="deepspeed"
    check_ranks         True: ranks compare their calls before each step, and all raise if they differ
    """
FREEZE = """
    freeze_step         number of full-precision steps, in which the gradients are averaged and the variance is adapted.
                        After that the variance is frozen, and ranks exchange the momentum with 1 bit per element. With
                        the default 100,000 steps are not compressed: use the length of the learning rate's warm-up, or
                        15 to 25 % of all steps"""


def same_mask(a: Optional[torch.Tensor], b: Optional[torch.Tensor]) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(a.detach().cpu().float(), b.detach().cpu().float())


class Onebit(OnebitNames, OnebitRanks):
    """Base class of the 1-bit family."""

    # GradScaler would skip the step on a rank whose gradients are not finite, and the other ranks would wait for it in
    # the exchange. With this attribute the step decides about skipping, and ranks agree on it.
    _step_supports_amp_scaling = VERSION >= (2, 0)
    _fields = Named._fields[:-1]
    _kept = Named._kept + ("_eps_mode", "_comm_backend_name")
    _at_once = True
    _rounds = False
    _algorithm = 0
    _own_masks: List[Dict[str, Any]] = []  # masks of the groups, during a load
    _masked: List[int] = []  # indices of the groups that had a mask when the plans were made
    _may_lack: Tuple[str, ...] = ("anchor", )
    _no_anchors = False  # the loaded state lacks the weights of the last exchange

    def _begin(self, params: Any, compat: Optional[str], group: Any, deepspeed: Any, lr: Any, betas: Any, eps: float,
               weight_decay: float, bias_correction: bool, eps_inside_sqrt: bool, max_grad_norm: float, amsgrad: bool,
               cuda_aware: bool, comm_backend_name: str, stochastic_rounding: bool, **more: Any) -> None:
        if eps_inside_sqrt and not compat:
            raise self._ignored(type(self).__name__, "eps_inside_sqrt", eps_inside_sqrt)
        if max_grad_norm and not compat:
            raise self._ignored(type(self).__name__, "max_grad_norm", max_grad_norm)
        if compat and self._nodes is not None:
            raise unsupported("%s: node_group is not supported with compat='deepspeed', as the original has one level "
                              "of ranks; leave compat out" % type(self).__name__)
        if stochastic_rounding:
            raise unsupported("%s: stochastic_rounding=True is not supported, as its 16-bit parameters have float32 "
                              "masters; leave it out" % type(self).__name__)
        if cuda_aware:
            raise unsupported("%s: cuda_aware=%r is not supported; a process group with backend nccl exchanges device "
                              "memory, and all others host memory" % (type(self).__name__, cuda_aware))
        self._eps_mode, self._comm_backend_name = 0 if eps_inside_sqrt else 1, comm_backend_name
        self._group, self._engine = group, deepspeed
        self._check_backends()
        self._reset_engine_flag()
        self._start(params, compat, amsgrad, dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
                                                  weight_decay=weight_decay, max_grad_norm=max_grad_norm, **more))

    @staticmethod
    def _ignored(where: str, name: str, value: Any) -> UnsupportedError:
        return unsupported("%s: %s=%r is not supported; %s" % (where, name, value, IGNORED[name]))

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        return super()._hyper(group, g)[:5]

    def _schedule_fields(self) -> Dict[str, Any]:
        """Returns the fields of dsopt_group that are attributes here."""
        raise NotImplementedError

    def _value(self, name: str, low: float, below: float, whole: bool = False) -> Any:
        """Returns an attribute that a program may have set, after a check."""
        value = getattr(self, name)
        try:
            found = float("nan") if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            found = float("nan")
        if not low <= found < below or (whole and found != int(found)):
            raise wrong("%s of %s is %r, and must be a %snumber in [%g, %g)" %
                        (name, type(self).__name__, value, "whole " if whole else "", low, below))
        return int(found) if whole else found

    def _count(self, name: str) -> int:
        return self._value(name, 1, 2**31 - 1, whole=True)  # type: ignore[no-any-return]

    def _freeze_step(self, name: str) -> int:
        if not self._compat:
            return self._count(name)
        # The original first checks it after its second call, so all numbers below 1 act as 1.
        return max(1, self._value(name, -2**31, 2**31 - 1, whole=True))

    def _rule(self, group: Dict[str, Any]) -> Tuple[int, int, Dict[str, Any]]:
        if group.get("max_grad_norm") and not self._compat:
            raise self._ignored("a group of " + type(self).__name__, "max_grad_norm", group["max_grad_norm"])
        flags = abi.DSOPT_GROUP_NON_FREEZE if group.get("non_freeze") else 0
        return self._algorithm, flags, self._schedule_fields()

    def _freezes(self, group: Dict[str, Any]) -> bool:
        return not group.get("non_freeze")

    def _is_frozen_at(self, steps: float) -> bool:
        frozen_after = self._schedule_fields()["freeze_step"]
        return steps > frozen_after if self._algorithm == abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM else steps >= frozen_after

    def _param_flags(self, group: Dict[str, Any], param: torch.Tensor) -> int:
        masked = abi.DSOPT_PARAM_MASKED if group.get("exp_avg_mask") is not None else 0
        return super()._param_flags(group, param) | masked

    def _engine_desc(self, context: Any) -> Tuple[Any, Tuple[object, ...], bool]:
        desc, needed, hooked = super()._engine_desc(context)
        desc.flags &= ~abi.DSOPT_OPTIMIZER_NO_MASTER  # the family always has masters
        desc.nonfinite = abi.DSOPT_NONFINITE_SKIP  # non-finite values would stay in the error feedback
        self._check_backends()
        comms = self._add_comms(desc, context)
        return desc, (*needed, *comms), hooked or any(comm.hooked for comm in comms)

    def _plan(self) -> None:
        has_active = any(map(self._has_active, self.state.values()))
        self._masked = []
        for g, group in enumerate(self.param_groups):
            if group.get("exp_avg_mask") is not None:
                self._masked.append(g)
                continue
            for param in group["params"]:
                if "mask" in self.state.get(param, {}):
                    del self.state[param]["mask"]  # its mask was removed
        self._calls_left = 0
        super()._plan()
        if not has_active:
            self._find_active()
        if self._no_anchors:
            self._set_anchors()
        try:
            self._fill_masks()
        except BaseException:
            self._plans = None
            raise

    def _run(self, i: int, scale: Optional[torch.Tensor], found_inf: Optional[torch.Tensor]) -> None:
        # In each step: a write through `.data` or NumPy does not change the tensor's version.
        self._fill_masks()
        super()._run(i, scale, found_inf)

    def _fill_masks(self) -> None:
        for g in self._masked:
            self._fill_mask(g)

    def _fill_mask(self, g: int) -> None:
        """Copy exp_avg_mask of a group to the state. With FP16_Optimizer, whose original has one flat master per group,
        it may be one flat tensor for all parameters of the group."""
        params = [param for param in self.param_groups[g]["params"] if "mask" in self.state.get(param, {})]
        mask = self.param_groups[g]["exp_avg_mask"]
        if not torch.is_tensor(mask):
            raise wrong("param_groups[%d]: exp_avg_mask is a %s, and must be a tensor or None" %
                        (g, type(mask).__name__))
        if params and mask.device != params[0].device:
            # Once, as the original does: a copy from the host in each step would wait for the device.
            mask = self.param_groups[g]["exp_avg_mask"] = mask.to(params[0].device)
        sizes = [param.numel() for param in params]
        flat = getattr(self._wrapper, "_masters", None) == abi.DSOPT_MASTERS_FLAT and mask.shape == (sum(sizes), )
        for param, part in zip(params, mask.split(sizes) if flat else [mask] * len(params)):
            try:
                if self._shards:
                    part = self._part_of_mask(param, part)
                self.state[param]["mask"].copy_(part.detach().reshape(param.shape) if flat else part.detach())
            except RuntimeError:
                raise wrong("param_groups[%d]: exp_avg_mask has shape %s, and must be broadcastable to that of each "
                            "parameter, %s" % (g, tuple(mask.shape), tuple(param.shape)), "SHAPE") from None

    def _fixed(self) -> List[Any]:
        return super()._fixed() + list(self._schedule_fields().values()) + [getattr(self._engine, "mpu", None)] + [
            (bool(group.get("non_freeze")), group.get("exp_avg_mask") is not None, bool(group.get("max_grad_norm")))
            for group in self.param_groups]

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Load `state_dict`, which may be one of the original. The stage follows from `step`. The groups keep their
        exp_avg_mask, as in the original: a run that continues with longer sequences trains positions that were masked
        before."""
        self._own_masks = [{key: group[key] for key in group if key == "exp_avg_mask"} for group in self.param_groups]
        if is_original(state_dict):
            fields = self._schedule_fields()
            state_dict = converted(state_dict, self._algorithm, fields["freeze_step"], fields.get("trust_beta"),
                                   bool(self._compat))
            self._may_lack = type(self)._may_lack + ("momentum_accumulator", )
        else:
            check_class(state_dict, self._algorithm)
        before = self._no_anchors
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            self._no_anchors = before
            raise
        finally:
            self.__dict__.pop("_may_lack", None)

    def load(self, paths: Any) -> None:
        """Read state and hyper-parameters that `save` wrote. `paths`: a list of the files of all ranks that saved, of
        any number, or the file of one rank. All ranks must call this function together. Load the weights first. The
        stage follows from the step and the freeze step of this optimizer. With another number of ranks or nodes error
        feedback is averaged. If exp_avg_mask differs from that of the run that saved, error feedback restarts with
        zeros."""
        self._file_plan("load")
        masks = [(state, state["mask"].clone()) for state in self.state.values() if "mask" in state]
        super().load(paths)
        states = [state for state in self.state.values() if state]
        resume(states, self._algorithm, self._schedule_fields()["freeze_step"], compat=False)
        if any(not torch.equal(state["mask"], mask) for state, mask in masks):
            self._reset_errors()
        self._drop_active(states)
        self._unchecked = True
        self._update_engine_flag()

    def _after_load(self) -> None:
        super()._after_load()
        self._unchecked = True
        self._update_engine_flag()

    def __getstate__(self) -> Dict[str, Any]:
        """Returns the state for pickling. A process group or an engine belongs to this process."""
        if self._engine is not None or self._nodes is not None or data_group_of(self) is not None:
            raise StateError("a %s with %s cannot be pickled; use state_dict (DSOPT_ERR_STATE)" %
                             (type(self).__name__, "a process group" if self._engine is None else "deepspeed=..."),
                             abi.DSOPT_ERR_STATE, "DSOPT_ERR_STATE")
        return super().__getstate__()

    def __deepcopy__(self, memo: Dict[int, Any]) -> Any:
        """Returns a copy that exchanges over the same process group and has the same engine."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__setstate__(copy.deepcopy(super().__getstate__(), memo))
        copied._engine, copied._nodes, copied._checks_ranks = self._engine, self._nodes, self._checks_ranks
        copied._group = self._group if self._wrapper is None else data_group_of(self)
        return copied

    def state_dict(self) -> Dict[str, Any]:
        """Returns the state and the groups, as torch's."""
        if self._no_anchors and self._plans:
            self._set_anchors()
        return super().state_dict()  # type: ignore[no-any-return]

    def _restore(self, loaded: Dict[str, Any]) -> None:
        super()._restore(loaded)
        changed = False
        for group, own in zip(self.param_groups, self._own_masks):
            changed |= not same_mask(own.get("exp_avg_mask"), group.pop("exp_avg_mask", None))
            group.update(own)
            for param in group["params"]:
                if own.get("exp_avg_mask") is None and param in self.state:
                    self.state[param].pop("mask", None)
        params = [param for group in self.param_groups for param in group["params"]]
        states = [self.state[param] for param in params if self.state.get(param)]
        resume(states, self._algorithm, self._schedule_fields()["freeze_step"], bool(self._compat))
        if changed:
            self._reset_errors()
        self._drop_active(states)
        self._no_anchors = not all("anchor" in state for state in states)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Add a group, as torch's. `param_group` is a dict of its parameters and its hyper-parameters. Once
        the variance is frozen, only groups with non_freeze=True can be added."""
        if param_group.get("max_grad_norm") and not self._compat:
            raise self._ignored("a group of " + type(self).__name__, "max_grad_norm", param_group["max_grad_norm"])
        if self.__dict__.get("_plans") and not param_group.get("non_freeze") and self._schedule().frozen:
            raise StateError("the variance is frozen, and new parameters would have none; add groups before the "
                             "freeze, or with non_freeze=True (DSOPT_ERR_STATE)", abi.DSOPT_ERR_STATE,
                             "DSOPT_ERR_STATE")
        super().add_param_group(param_group)

    def step(self, closure: Optional[Callable[[], Any]] = None, grads: Any = None) -> Any:
        """Step once. Calls `closure` first and returns its result. `grads` are gradients: None: those of the
        parameters; a list or generator for group 0; a list of such lists, one per group. An entry None means the
        parameter's gradient. Parameters past the end of a list have no gradient."""
        if grads is not None and getattr(self, "grad_scale", None) is not None:
            raise unsupported("%s.step: grads is not supported with GradScaler, which looks at the gradients of the "
                              "parameters; use FP16_Optimizer" % type(self).__name__)
        return self._step(closure, grads)

    def _advance(self) -> None:
        if self._no_anchors:  # set from the current weights, which may have been loaded after the state
            if self._plans is None or not self._is_current():
                self._plan()
            self._set_anchors()
            self._no_anchors = False
        if getattr(self, "grad_scale", None) is not None:
            self._unscale()
        super()._advance()
        self._update_engine_flag()

    def _unscale(self) -> None:
        """Unscales gradients: each rank's GradScaler has its own scale, and an exchange needs unscaled gradients."""
        if self._plans is None or not self._is_current():
            self._plan()
        if self._rank_key:
            for plan in self._plans or ():
                for entry in plan.entries:
                    if entry.param.grad is not None and entry.param.grad.dtype == torch.float16:
                        raise unsupported("the gradient of %s has dtype float16, for which GradScaler with more than "
                                          "one rank is not supported, as 1/scale underflows; use FP16_Optimizer" %
                                          entry.name)
            for plan in self._plans or ():
                for grad in [param.grad.detach() for param in plan.params if param.grad is not None]:
                    grad.mul_((1 / self.grad_scale).to(grad.device))
            self.grad_scale = None

    def _set_anchors(self) -> None:
        """0/1 Adam: sets the anchors to the weights, as after an exchange. The originals do not save anchors."""
        for state, param in [(self.state[param], param) for group in self.param_groups for param in group["params"]
                             if "anchor" in self.state.get(param, {})]:
            state["anchor"].copy_(state.get("master", param.detach()))

    def _reset_engine_flag(self) -> None:
        """Resets the engine's flag: the first step needs averaged gradients, and an earlier optimizer may have left the
        flag False."""
        name = ENGINE_FLAGS[self.using_pipeline]
        if hasattr(self._engine, name):
            setattr(self._engine, name, True)

    def _update_engine_flag(self) -> None:
        if self._engine is not None:
            setattr(self._engine, ENGINE_FLAGS[self.using_pipeline], self.next_reduction() == "full")

    def _schedule(self) -> Any:
        """Returns dsopt_schedule_info. Waits for the device."""
        if not self._plans or not self._is_current():
            self._plan()
        info = abi.dsopt_schedule_info()
        if not self._plans:  # no parameter is trained
            info.reduction = abi.DSOPT_REDUCTION_FULL
            return info
        plan = self._plans[0]
        words = plan.whole["schedule"].cpu()
        abi.check(abi.lib.dsopt_schedule_decode(plan.handle, words.data_ptr(), byref(info)))
        return info

    def next_reduction(self) -> str:
        """Returns the reduction of the next step. "full": it needs averaged gradients. "compressed" or "local": it
        needs local gradients. Without `deepspeed` the step averages, and always needs local gradients."""
        return REDUCTIONS[self._schedule().reduction]

    @ReadOnly
    def frozen(self) -> bool:
        """True once the variance is frozen."""
        return bool(self.state) and bool(self._schedule().frozen)


class OnebitAdam(Onebit):
    __doc__ = """deepspeed.runtime.fp16.onebit.adam.OnebitAdam (Tang et al. 2021): AdamW whose variance freezes, after
    which ranks exchange 1 bit per element.
    """ + NOTES + COMMON + DECAY + FREEZE + MORE
    _algorithm = abi.DSOPT_ALGORITHM_ONEBIT_ADAM
    _kept = Onebit._kept + ("freeze_step",)

    def __init__(self,
                 params: Any,
                 deepspeed: Any = None,
                 lr: Any = 1e-3,
                 freeze_step: int = 100000,
                 bias_correction: bool = True,
                 betas: Tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8,
                 eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.,
                 max_grad_norm: float = 0.,
                 amsgrad: bool = False,
                 cuda_aware: bool = False,
                 comm_backend_name: str = NCCL,
                 *,
                 group: Any = None,
                 compat: Optional[str] = None,
                 stochastic_rounding: bool = False,
                 shard: Any = False,
                 node_group: Any = None,
                 check_ranks: bool = False) -> None:
        self._begin_nodes(group, shard, node_group, check_ranks)
        self.freeze_step = freeze_step
        self._begin(params, compat, group, deepspeed, lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt,
                    max_grad_norm, amsgrad, cuda_aware, comm_backend_name, stochastic_rounding)

    def _schedule_fields(self) -> Dict[str, Any]:
        return {"freeze_step": self._freeze_step("freeze_step")}

    # Constants, as in the original.
    comm_time = step_time = bk_time = 0.0
    ave_step = 1

    @ReadOnly
    def adam_freeze_key(self) -> bool:
        """The original's name of `frozen`."""
        return self.frozen


class ZeroOneAdam(Onebit):
    __doc__ = """deepspeed.runtime.fp16.onebit.zoadam.ZeroOneAdam (Lu et al. 2022): 0/1 Adam, which adapts the variance
    less and less often, and after it is frozen exchanges only in some of the steps.
    """ + NOTES + COMMON + DECAY + """
    var_freeze_step     number of steps before the variance is frozen. It is adapted at growing intervals; in the steps
                        between, ranks exchange gradients with 1 bit per element. After the freeze, ranks exchange at
                        growing intervals, and step with their local gradients in between
    var_update_scaler   number of adaptations of the variance after which the interval between them doubles, from 1
    local_step_scaler   number of steps after which the interval between exchanges doubles, from 1
    local_step_clipper  largest interval between exchanges""" + MORE
    _algorithm = abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM
    _kept = Onebit._kept + ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")

    def __init__(self,
                 params: Any,
                 deepspeed: Any = None,
                 lr: Any = 1e-3,
                 bias_correction: bool = True,
                 betas: Tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8,
                 eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.,
                 max_grad_norm: float = 0.,
                 var_freeze_step: int = 100000,
                 var_update_scaler: int = 16,
                 local_step_scaler: int = 32678,
                 local_step_clipper: int = 16,
                 amsgrad: bool = False,
                 cuda_aware: bool = False,
                 comm_backend_name: str = NCCL,
                 *,
                 group: Any = None,
                 compat: Optional[str] = None,
                 stochastic_rounding: bool = False,
                 shard: Any = False,
                 node_group: Any = None,
                 check_ranks: bool = False) -> None:
        self._begin_nodes(group, shard, node_group, check_ranks)
        self.var_freeze_step, self.var_update_scaler = var_freeze_step, var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        self._begin(params, compat, group, deepspeed, lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt,
                    max_grad_norm, amsgrad, cuda_aware, comm_backend_name, stochastic_rounding)

    def _schedule_fields(self) -> Dict[str, Any]:
        return {"freeze_step": self._freeze_step("var_freeze_step"),
                "var_interval_steps": self._count("var_update_scaler"),
                "local_interval_steps": self._count("local_step_scaler"),
                "max_local_interval": self._count("local_step_clipper")}

    @ReadOnly
    def freeze_key(self) -> bool:
        """The original's name of `frozen`."""
        return self.frozen

    @ReadOnly
    def reinitial_error_buffer(self) -> bool:
        """True if error feedback was reset, which happens when the variance freezes."""
        return self.frozen


class OnebitLamb(TrustRatios, Onebit):
    __doc__ = """deepspeed.runtime.fp16.onebit.lamb.OnebitLamb (Li et al. 2021): LAMB whose variance freezes, after
    which ranks exchange 1 bit per element. After that a parameter's trust ratio is the running mean of its ratios,
    times a factor computed from an estimate of the unfrozen variance.
    """ + NOTES + COMMON + LAMB + FREEZE + """
    coeff_beta          decay of the running mean of trust ratios
    factor_max          largest factor
    factor_min          smallest factor
    factor_threshold    largest relative change of a factor per step""" + MORE
    _algorithm = abi.DSOPT_ALGORITHM_ONEBIT_LAMB
    _fields = Onebit._fields + ("min_trust", "max_trust")
    _kept = Onebit._kept + ("freeze_step", "coeff_beta", "factor_max", "factor_min", "factor_threshold")

    def __init__(self,
                 params: Any,
                 deepspeed: Any = None,
                 lr: Any = 1e-3,
                 freeze_step: int = 100000,
                 bias_correction: bool = True,
                 betas: Tuple[Any, Any] = (0.9, 0.999),
                 eps: float = 1e-8,
                 eps_inside_sqrt: bool = False,
                 weight_decay: float = 0.,
                 max_grad_norm: float = 0.,
                 max_coeff: float = 10.,
                 min_coeff: float = 0.01,
                 amsgrad: bool = False,
                 cuda_aware: bool = False,
                 comm_backend_name: str = NCCL,
                 coeff_beta: float = 0.9,
                 factor_max: float = 4.,
                 factor_min: float = 0.5,
                 factor_threshold: float = 0.1,
                 *,
                 group: Any = None,
                 compat: Optional[str] = None,
                 stochastic_rounding: bool = False,
                 shard: Any = False,
                 node_group: Any = None,
                 check_ranks: bool = False) -> None:
        self._begin_nodes(group, shard, node_group, check_ranks)
        self.freeze_step, self.coeff_beta = freeze_step, coeff_beta
        self.factor_max, self.factor_min, self.factor_threshold = factor_max, factor_min, factor_threshold
        self._begin(params, compat, group, deepspeed, lr, betas, eps, weight_decay, bias_correction, eps_inside_sqrt,
                    max_grad_norm, amsgrad, cuda_aware, comm_backend_name, stochastic_rounding, max_coeff=max_coeff,
                    min_coeff=min_coeff)

    def _hyper(self, group: Dict[str, Any], g: int) -> Tuple[float, ...]:
        return super()._hyper(group, g) + tuple(number(group[key], g, key) for key in ("min_coeff", "max_coeff"))

    def _schedule_fields(self) -> Dict[str, Any]:
        largest = self._value("factor_max", 0, float("inf"))
        if self._value("factor_min", 0, float("inf")) > largest:
            raise wrong("factor_min of OnebitLamb is %r, and must not be above factor_max, %r" %
                        (self.factor_min, self.factor_max))
        return {"freeze_step": self._freeze_step("freeze_step"), "trust_beta": self._value("coeff_beta", 0, 1),
                "trust_threshold": self._value("factor_threshold", 0, 1), "trust_min_change": float(self.factor_min),
                "trust_max_change": largest}

    @ReadOnly
    def lamb_freeze_key(self) -> bool:
        """The original's name of `frozen`."""
        return self.frozen
