# SPDX-License-Identifier: Apache-2.0
"""FP16_Optimizer and FP16_UnfusedOptimizer with the arguments of DeepSpeed: float32 masters, loss scale, clipping."""
from __future__ import annotations

from numbers import Real
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._errors import StateError
from .._handles import Scaler
from ._base import WRAPPED, EngineOptimizer
from ._gone import GONE
from ._loss_scale import more_of_scale, options_of, saved_scale
from ._originals import check_masters, kind_of, mismatch, per_parameter
from ._parallel import Planned, mean_of_data_ranks
from ._plan import Plan
from ._scaled import Scaled
from ._tensors import unsupported, wrong
from ._watch import Watched, measures, overflowed


# End of the docstrings of both wrappers.
EXPERTS = """expert_groups         a dict of process groups in which ranks have different experts. A parameter with the
                          attribute allreduce=False refers to its group by its attribute group_name (ep_size_2), or by
                          'name' of its parameter group with 'moe': True. None: the groups of deepspeed.utils.groups, if
                          it is imported. Set these attributes before constructing the wrapper, and replace the dict to
                          change it
    """


class Wrapper(Scaled, Watched):
    """Wraps an optimizer of this package. Steps read the 16-bit gradients, and write masters and 16-bit parameters, in
    one pass. Masters are in `state` of the optimizer, as "master".

    init_optimizer        an optimizer of dsopt.torch over parameters of low_precision_dtype
    deepspeed             an engine. While its enable_backward_allreduce is False, all data-parallel ranks agree on
                          overflow. With an mpu: its pipeline_enable_backward_allreduce, if the engine has it
    loss_scale_config     a number counts as static_loss_scale, which had this position in older versions of DeepSpeed.
                          Otherwise a LossScaleConfig, as DeepSpeed's engine passes it; it replaces static_loss_scale,
                          dynamic_loss_scale, dynamic_loss_args and initial_dynamic_scale, which must then be absent.
                          The attribute has the current loss scale
    low_precision_dtype   torch.float16, which has a loss scale; torch.bfloat16; or torch.float32: without masters,
                          for clipping
    static_loss_scale     the scale if dynamic_loss_scale is False
    dynamic_loss_scale    the scale is halved if a gradient is not finite, and doubled after scale_window good steps
    dynamic_loss_args     a dict of init_scale, scale_window, min_scale, delayed_shift and consecutive_hysteresis
    verbose               skipped steps and changes of the loss scale are logged by the logger "dsopt", at INFO
    mpu                   its get_model_parallel_group() returns the model-parallel process group, over which norms and
                          overflow are agreed. Parameters with `model_parallel` or `tensor_model_parallel` are shards;
                          those with `ds_pipe_replicated` are counted by another pipeline stage. Set these attributes
                          before constructing the wrapper: steps do not read them
    clip_grad             largest L2 norm of all gradients; 0 = off. Can be changed at any time, on all ranks before the
                          same step.
    """

    _masters = 0
    _profile = ""
    norm_type = 2
    mpu = Planned()
    has_moe_layers = Planned(False)
    expert_groups = Planned()
    clip_grad_norm = staticmethod(torch.nn.utils.clip_grad_norm_)

    def __init__(self, init_optimizer: Any, deepspeed: Any, loss_scale_config: Any, low_precision_dtype: torch.dtype,
                 static_loss_scale: float, dynamic_loss_scale: bool, initial_scale: float, default_scale: float,
                 dynamic_loss_args: Optional[Dict[str, Any]], verbose: bool, mpu: Any, clip_grad: float) -> None:
        if not isinstance(init_optimizer, EngineOptimizer):
            raise wrong("init_optimizer is a %s, and must be an optimizer of dsopt.torch" %
                        type(init_optimizer).__name__)
        if init_optimizer._wrapper is not None:
            raise wrong("init_optimizer is in another wrapper; give each wrapper its own optimizer")
        if not isinstance(low_precision_dtype, torch.dtype):  # dynamic_loss_scale once had this position
            raise wrong("low_precision_dtype is %r, and must be torch.float16, bfloat16 or float32; pass "
                        "dynamic_loss_scale and what follows it by name" % (low_precision_dtype, ))
        if low_precision_dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise wrong(
                "low_precision_dtype is %s, and must be torch.float16, bfloat16 or float32" % low_precision_dtype,
                "DTYPE")
        if isinstance(loss_scale_config, Real) and not isinstance(loss_scale_config, bool):
            if static_loss_scale != 1:  # static_loss_scale once had the position of loss_scale_config
                raise wrong("loss_scale_config is %r, which counts as static_loss_scale, and static_loss_scale is %r; "
                            "give one of them" % (loss_scale_config, static_loss_scale))
            static_loss_scale, loss_scale_config = float(loss_scale_config), None
        self.mpu, self.optimizer, self.low_precision_dtype = mpu, init_optimizer, low_precision_dtype
        self.deepspeed, self.verbose = deepspeed, verbose
        self._external: Optional[float] = None  # an override of only the backward pass, as in compat mode
        self.using_pipeline = bool(getattr(deepspeed, "pipeline_parallelism", False))
        self._clip_grad = float(clip_grad)
        if loss_scale_config is None:
            self.dynamic_loss_scale = bool(dynamic_loss_scale) and low_precision_dtype == torch.float16
            self._scale_args = self._options(static_loss_scale, initial_scale, dynamic_loss_args)
        else:
            if static_loss_scale != 1 or dynamic_loss_scale or dynamic_loss_args or initial_scale != default_scale:
                raise wrong("loss_scale_config is given next to another argument for the loss scale; give one of them")
            self._scale_args = options_of(loss_scale_config, self._profile, low_precision_dtype)
            self.dynamic_loss_scale = self._scale_args is not None and not self._scale_args.get("static")
        init_optimizer._wrapper = self
        init_optimizer._at_once = init_optimizer._reports = True
        init_optimizer._plans = None
        try:
            self._plan()
        except BaseException:
            del init_optimizer._at_once, init_optimizer._reports
            init_optimizer._wrapper = init_optimizer._plans = None
            raise
        if self._scale_args is not None and loss_scale_config is not None and loss_scale_config.cur_iter:
            last = loss_scale_config.last_overflow_iter
            self._write_scaler(loss_scale_config.cur_scale, None, updates=loss_scale_config.cur_iter,
                               last_overflow=-1 if last is None else last)

    def _options(self, static: float, initial: float, arguments: Optional[Dict[str, Any]]) -> Optional[Dict[str, Any]]:
        """Returns arguments of dsopt.Scaler. None: no scale."""
        if self.low_precision_dtype != torch.float16:
            return None
        if not self.dynamic_loss_scale:
            return {"static": True, "init": static}
        arguments = dict(arguments or {})
        options = {"profile": self._profile, "init": arguments.pop("init_scale", initial), "factor": 2.0,
                   "window": arguments.pop("scale_window", 1000), "min": arguments.pop("min_scale", 0)}
        shift, refill = arguments.pop("delayed_shift", 1), arguments.pop("consecutive_hysteresis", False)
        if shift != 1:  # the profiles of the original do not support it
            options.update(profile="default", hysteresis=shift, refill=bool(refill),
                           min=options["min"] or (1 if self._profile == "fused" else 0.25))
        if arguments:
            raise wrong("dynamic_loss_args: %s is unknown" % ", ".join(map(repr, arguments)))
        return options

    # ----------------------------------------------------------------------------------- descriptions for the engine
    def _check_dtypes(self) -> None:
        """Parameters that are not trained may have any dtype."""
        for g, group in enumerate(self.optimizer.param_groups):
            for i, param in enumerate(group["params"]):
                trained = param.requires_grad or param.grad is not None or self.optimizer.state.get(param)
                if trained and param.dtype != self.low_precision_dtype:
                    raise wrong("param_groups[%d]['params'][%d] is %s, and low_precision_dtype %s; set its "
                                "requires_grad to False, or train it with another optimizer" %
                                (g, i, param.dtype, self.low_precision_dtype), "DTYPE")

    def _extend(self, desc: Any, context: Any, device: torch.device, needed: Tuple[object, ...],
                hooked: bool) -> Tuple[Tuple[object, ...], bool]:
        self._check_dtypes()
        desc.flags &= ~abi.DSOPT_OPTIMIZER_NO_MASTER
        desc.masters, desc.max_norm = self._masters, self._clip_grad
        desc.flags |= abi.DSOPT_OPTIMIZER_TIMING * measures(self._timers)
        if self._scale_args is not None:
            scaler = Scaler(context, **self._scale_args)
            desc.scaler = scaler.handle
            needed += (scaler,)
        return needed, hooked

    def _plan(self) -> Plan:
        """Returns the plan. Makes it, and the masters, if necessary."""
        optimizer = self.optimizer
        if optimizer._plans is None or not optimizer._is_current():
            optimizer._plan()
        return self._only_plan()

    def _only_plan(self) -> Plan:
        """Returns the plan of the last step, even if something has changed since."""
        plans = self.optimizer._plans
        if len(plans) != 1:
            raise unsupported("%s has parameters on several devices, or none, and must have them on one" %
                              type(self).__name__)
        return plans[0]  # type: ignore[no-any-return]

    # ---------------------------------------------------------------------------------------------------------- step
    def backward(self, loss: torch.Tensor, create_graph: bool = False, retain_graph: bool = False) -> None:
        """Run the backward pass of the loss times the loss scale.

        loss          a scalar
        create_graph  as in torch.Tensor.backward
        retain_graph  as in torch.Tensor.backward
        """
        self._scaled(loss).backward(create_graph=create_graph, retain_graph=retain_graph)

    def _scaled(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a value times the loss scale, in float32. Does not wait for the device."""
        if self._external is not None:
            return value.float() * self._external
        if self._scale_args is None:
            return value
        return value.float() * self._plan().whole["loss_scale"].reshape(()).to(value.device)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> bool:
        """Step once, or skip if a gradient is not finite. Returns `overflow`.

        closure  must be None; any other value is not called, as in the original, and causes a warning
        """
        return overflowed(self._step(closure, False))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of the 16-bit parameters to None, or with `set_to_none` False to zero."""
        for group in self.param_groups:
            for param in group["params"]:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    if param.grad.grad_fn is not None:
                        param.grad = param.grad.detach()
                    param.grad.requires_grad_(False).zero_()  # detach_() does not support views

    def _reported(self, place: int) -> float:
        return float(self._plan().report[place])  # type: ignore[index]

    @property
    def overflow(self) -> bool:
        """True if the last step found a gradient that is not finite, and was skipped. Without a loss scale and without
        clip_grad, gradients are checked only by the 1-bit family and with compat="deepspeed". FP16_Optimizer with
        compat and without a loss scale executes the step, except with the 1-bit family. `overflow` is then that of this
        rank's gradients (docs/compat.md). Waits for the device, like the other properties."""
        return overflowed(self._plan().report.tolist())  # type: ignore[union-attr]

    @property
    def _global_grad_norm(self) -> float:
        """Norm of the last step's gradients, without the loss scale; NaN if it was not needed."""
        return self._reported(abi.DSOPT_REPORT_GRAD_NORM)

    # ----------------------------------------------------------------------------------------------- groups and state
    @property
    def clip_grad(self) -> float:
        """The largest L2 norm of all gradients; 0 = no clipping."""
        return self._clip_grad

    @clip_grad.setter
    def clip_grad(self, value: float) -> None:
        value = float(value)
        if value != self._clip_grad:  # a new plan costs one more collective with timers and the 1-bit family
            self._clip_grad = value
            self.optimizer._plans = None

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """The groups of the optimizer, with the 16-bit parameters."""
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, value: List[Dict[str, Any]]) -> None:
        self.optimizer.param_groups = value
        self.optimizer._plans = None

    @property
    def state(self) -> Dict[Any, Any]:
        """The state of the optimizer, with the masters. The keys are the 16-bit parameters."""
        return self.optimizer.state  # type: ignore[no-any-return]

    @state.setter
    def state(self, value: Dict[Any, Any]) -> None:
        self.optimizer.state = value
        self.optimizer._plans = None

    def initialize_optimizer_states(self) -> None:
        """Create missing state tensors. The constructor has done so already; no step is executed."""
        self._plan()

    @property
    def fp16_groups(self) -> List[List[torch.Tensor]]:
        """The trained parameters of each group."""
        return [[param for param in group["params"] if param.requires_grad] for group in self.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups to `lr`."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Returns the learning rate of the first group."""
        return self.param_groups[0]["lr"]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def masters(self) -> List[List[torch.Tensor]]:
        """The float32 copies of the parameters, per group. They are the state, not copies of it."""
        self._plan()
        return [[self.state[param]["master"] for param in group["params"] if "master" in self.state.get(param, {})]
                for group in self.param_groups]

    def refresh_fp32_params(self) -> None:
        """Copy the parameters to the masters, after new weights were loaded without state."""
        self._plan()
        for group in self.param_groups:
            for param in group["params"]:
                if "master" in self.state.get(param, {}):
                    self.state[param]["master"].copy_(param.detach())

    def _pack(self, masters: List[torch.Tensor]) -> Any:
        raise NotImplementedError

    def _unpack(self, saved: Any, masters: List[torch.Tensor]) -> List[torch.Tensor]:
        raise NotImplementedError

    _masters_key = ""

    def state_dict(self) -> Dict[str, Any]:
        """Returns a state dict with the original's keys. Masters are separate from the optimizer's state."""
        masters = self.masters()
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {key: {name: value for name, value in state.items() if name != "master"}
                              for key, state in optimizer["state"].items()}
        return {**self._saved_scaler(), "optimizer_state_dict": optimizer, "clip_grad": self.clip_grad,
                self._masters_key: [self._pack(group) for group in masters]}

    def _saved_scaler(self) -> Dict[str, Any]:
        """Returns the keys that the original writes: none in FP16_Optimizer without gradient scaling, and none of a
        dynamic scale in either class with a static scale."""
        if self._scale_args is None and self._profile == "fused":
            return {}
        saved = {"dynamic_loss_scale": self.dynamic_loss_scale, "cur_scale": self.cur_scale, "cur_iter": self.cur_iter}
        if self.dynamic_loss_scale:
            saved.update(last_overflow_iter=self.last_overflow_iter, scale_factor=self.scale_factor,
                         scale_window=self.scale_window)
        return {**saved, **more_of_scale(self)}

    def load_state_dict(self, state_dict: Dict[str, Any], load_optimizer_states: bool = True) -> None:
        """Load a state dict. A scale that override_loss_scale has set stays in use. A load that fails changes nothing.

        state_dict             from state_dict() of this class, or of the original
        load_optimizer_states  False: only the masters and the loss scale are loaded, not moments and counters
        """
        if not isinstance(state_dict, dict):
            raise mismatch("the state dict is %s, and must be a dict" % kind_of(state_dict))
        targets, values = self._saved_masters(state_dict)
        try:
            clip = float(state_dict.get("clip_grad", self.clip_grad))
        except (TypeError, ValueError):
            raise wrong("clip_grad of the state dict is %r, and must be a number" % state_dict["clip_grad"]) from None
        arguments, scaler = self._scale_args, None
        if arguments is not None:
            arguments, scaler = saved_scale(state_dict, arguments, self._words().tolist())
            Scaler(self._plan().context, **arguments)  # refuses values that a scaler does not support
        if load_optimizer_states:
            if "optimizer_state_dict" not in state_dict:
                raise mismatch("the state dict has no 'optimizer_state_dict'; give load_optimizer_states=False to load "
                               "the masters alone")
            inner = per_parameter(state_dict["optimizer_state_dict"], [group["params"] for group in self.param_groups],
                                  self._masters == abi.DSOPT_MASTERS_FLAT, self._has_master)
            # The wrapper's keys have these.
            inner["state"] = {key: {name: value for name, value in state.items() if name not in WRAPPED}
                              if isinstance(state, dict) else state for key, state in inner["state"].items()}
            self.optimizer.load_state_dict(inner)
        for new, old in zip(values, targets):
            for source, target in zip(new, old):
                target.copy_(source)
        self._scale_args = arguments
        self.optimizer._plans = None
        self.clip_grad = clip
        if scaler is not None:
            whole = self._plan().whole
            whole["scaler"].copy_(torch.tensor(scaler, dtype=torch.int32))
            info = self._scaler()
            whole["loss_scale"].fill_(info.scale)

    def _has_master(self, param: torch.Tensor) -> bool:
        """True for a parameter that was trained when the masters were made. float32 ones have none."""
        if self.low_precision_dtype == torch.float32:
            return bool(param.requires_grad)
        return "master" in self.optimizer.state.get(param, {})

    def _saved_masters(self, state_dict: Dict[str, Any]) -> Tuple[List[List[torch.Tensor]], List[List[torch.Tensor]]]:
        """Returns the masters, and their values in a state dict."""
        key, masters = self._masters_key, self.masters()
        if key not in state_dict:
            raise mismatch("the state dict has no %r, so it is not one of %s; it has %s" %
                           (key, type(self).__name__, ", ".join(map(str, state_dict))))
        saved = state_dict[key]
        if not isinstance(saved, (list, tuple)):
            raise mismatch("%s of the state dict is %s, and must be a list with an entry per group" %
                           (key, kind_of(saved)))
        if len(saved) != len(masters):
            raise wrong("%s has %d groups, and the optimizer %d" % (key, len(saved), len(masters)), "SHAPE")
        values = []
        for g, (new, old) in enumerate(zip(saved, masters)):
            check_masters("%s[%d]" % (key, g), new, self._masters == abi.DSOPT_MASTERS_FLAT)
            # A state dict of the original with float32 parameters has copies of them.
            if not old and len(new) and self.low_precision_dtype == torch.float32:
                old = masters[g] = [param.detach() for param in self.fp16_groups[g]]
            unpacked = self._unpack(new, old)
            shapes = [tuple(x.shape) for x in unpacked if torch.is_tensor(x)]
            if shapes != [tuple(x.shape) for x in old]:
                raise wrong("%s[%d] has tensors of shapes %s, and the optimizer's masters %s" %
                            (key, g, shapes, [tuple(x.shape) for x in old]), "SHAPE")
            values.append([self._checked("%s[%d]" % (key, g), x, target) for x, target in zip(unpacked, old)])
        return masters, values

    @staticmethod
    def _checked(what: str, saved: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        """Returns the values of a master, which can be copied to it, before anything is changed."""
        if saved.dtype == torch.float16 and master.dtype != torch.float16 or not saved.is_floating_point():
            raise wrong("%s of the state dict is %s, and must be float32" % (what, saved.dtype), "DTYPE")
        if saved.is_meta or saved.layout != torch.strided:
            raise mismatch("%s of the state dict cannot be copied: it is on device %s with layout %s" %
                           (what, saved.device, saved.layout))
        return saved.detach()

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError for missing attributes."""
        raise AttributeError("%s has no %s%s" % (type(self).__name__, name, GONE.get(name, "")))

    def __reduce__(self) -> Any:
        raise StateError("a %s cannot be pickled or copied; use state_dict (DSOPT_ERR_STATE)" % type(self).__name__,
                         abi.DSOPT_ERR_STATE, "DSOPT_ERR_STATE")


class FP16_Optimizer(Wrapper):  # noqa: N801 - DeepSpeed's name
    __doc__ = "deepspeed.runtime.fp16.fused_optimizer.FP16_Optimizer.\n\n    " + str(Wrapper.__doc__).rstrip() + """
    initial_dynamic_scale the initial dynamic scale, unless dynamic_loss_args has init_scale
    fused_adam_legacy     steps do not clear the gradients
    has_moe_layers        with compat="deepspeed": groups with 'moe' enter the norm as experts; False: they count as
                          dense parameters. Without compat, parameters of experts are detected
    timers                deepspeed.utils.timer.SynchronizedWallClockTimer, or a similar object, which receives
                          the times of the phases of each step. All ranks must have one, or none. With the 1-bit family
                          all ranks must change it, clip_grad, groups and state, and load, before the same step
    """ + EXPERTS
    _masters, _profile, _masters_key = abi.DSOPT_MASTERS_FLAT, "fused", "fp32_groups_flat"

    def __init__(self, init_optimizer: Any, deepspeed: Any = None, loss_scale_config: Any = None,
                 low_precision_dtype: torch.dtype = torch.float16, static_loss_scale: float = 1.0,
                 dynamic_loss_scale: bool = False, initial_dynamic_scale: float = 2.**32,
                 dynamic_loss_args: Optional[Dict[str, Any]] = None, verbose: bool = True, mpu: Any = None,
                 clip_grad: float = 0.0, fused_adam_legacy: bool = False, has_moe_layers: bool = False,
                 timers: Any = None, *, expert_groups: Optional[Dict[str, Any]] = None) -> None:
        self.fused_adam_legacy, self._timers, self.has_executed_step = fused_adam_legacy, timers, False
        self.has_moe_layers, self.expert_groups = bool(has_moe_layers), expert_groups
        super().__init__(init_optimizer, deepspeed, loss_scale_config, low_precision_dtype, static_loss_scale,
                         dynamic_loss_scale, initial_dynamic_scale, 2.**32, dynamic_loss_args, verbose, mpu, clip_grad)

    @property
    def loss_scale(self) -> Optional[float]:
        """Factor of the loss; None without gradient scaling."""
        return None if self._scale_args is None else super().loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.cur_scale = value

    def step(self, closure: Optional[Callable[[], Any]] = None) -> bool:
        """Step once, or skip if a gradient is not finite. Returns `overflow`. Sets the gradients to None, except with
        fused_adam_legacy.

        closure  must be None; any other value is not called, as in the original, and causes a warning
        """
        report = self._step(closure, not self.fused_adam_legacy)
        self.has_executed_step |= not (self.fused_adam_legacy or report[abi.DSOPT_REPORT_SKIPPED])
        return overflowed(report)

    def step_fused_adam(self, closure: Optional[Callable[[], Any]] = None) -> bool:
        """Step without changing the gradients.

        closure  must be None; any other value is not called, as in the original, and causes a warning
        """
        return overflowed(self._step(closure, False))

    def unscale_and_clip_grads(self, grad_groups_flat: List[torch.Tensor], total_norm: Any,
                               apply_scale: bool = True) -> float:
        """Returns the divisor of gradients with the norm `total_norm`. step() divides in its pass.

        grad_groups_flat  gradients of the caller
        total_norm        their L2 norm, with the loss scale
        apply_scale       True: `grad_groups_flat` is divided, in place
        """
        scale = self._combined_scale(total_norm)
        for grad in grad_groups_flat if apply_scale else ():
            grad.detach().mul_(1 / scale)
        return scale

    def _get_norm_with_moe_layers(self, all_groups_norm: Any) -> float:
        """Returns the mean of the data-parallel ranks' norms, by which DeepSpeed clipped in 2023 with experts.
        Collective. Steps use a norm over all experts instead (docs/compat.md)."""
        return mean_of_data_ranks(all_groups_norm, self)

    def _pack(self, masters: List[torch.Tensor]) -> torch.Tensor:
        return torch.cat([master.reshape(-1) for master in masters]) if masters else torch.empty(0, dtype=torch.float32)

    def _unpack(self, saved: Any, masters: List[torch.Tensor]) -> List[torch.Tensor]:
        if saved.numel() != sum(master.numel() for master in masters):
            raise wrong("fp32_groups_flat has %d elements in a group of %d" %
                        (saved.numel(), sum(master.numel() for master in masters)), "SHAPE")
        return [part.view(master.shape) for part, master in
                zip(saved.split([master.numel() for master in masters]), masters)] if masters else []

    @property
    def fp32_groups_flat(self) -> List[torch.Tensor]:
        """The masters of each group, copied into one tensor."""
        return [self._pack(group) for group in self.masters()]

    @property
    def fp16_groups_flat(self) -> List[torch.Tensor]:
        """The trained parameters of each group, copied into one tensor."""
        return [self._pack([param.detach() for param in group]) for group in self.fp16_groups]


class FP16_UnfusedOptimizer(Wrapper):  # noqa: N801 - DeepSpeed's name
    __doc__ = "deepspeed.runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer.\n\n    " + str(
        Wrapper.__doc__).rstrip() + """
    fused_lamb_legacy     only an attribute: steps are the same
    """ + EXPERTS
    _masters, _profile, _masters_key = abi.DSOPT_MASTERS_PER_TENSOR, "unfused", "fp32_groups"

    def __init__(self,
                 init_optimizer: Any,
                 deepspeed: Any = None,
                 loss_scale_config: Any = None,
                 low_precision_dtype: torch.dtype = torch.float16,
                 static_loss_scale: float = 1.0,
                 dynamic_loss_scale: bool = False,
                 dynamic_loss_args: Optional[Dict[str, Any]] = None,
                 verbose: bool = True,
                 mpu: Any = None,
                 clip_grad: float = 0.0,
                 fused_lamb_legacy: bool = False,
                 *,
                 expert_groups: Optional[Dict[str, Any]] = None) -> None:
        self.fused_lamb_legacy, self.expert_groups = fused_lamb_legacy, expert_groups
        super().__init__(init_optimizer, deepspeed, loss_scale_config, low_precision_dtype, static_loss_scale,
                         dynamic_loss_scale, 2.**16, 2.**16, dynamic_loss_args, verbose, mpu, clip_grad)

    def step_fused_lamb(self, closure: Optional[Callable[[], Any]] = None) -> bool:
        """The same as step().

        closure  must be None; any other value is not called, as in the original, and causes a warning
        """
        return overflowed(self._step(closure, False))

    def unscale_and_clip_grads(self, total_norm: Any, apply_scale: bool = True) -> float:
        """Returns the divisor of gradients with the norm `total_norm`. step() divides in its pass.

        total_norm   their L2 norm, with the loss scale
        apply_scale  True: the gradients of the masters, if a caller has set them, are divided in place
        """
        scale = self._combined_scale(total_norm)
        for grad in [master.grad for group in self.masters() for master in group] if apply_scale else ():
            if grad is not None:
                grad.detach().mul_(1 / scale)
        return scale

    def _pack(self, masters: List[torch.Tensor]) -> List[torch.Tensor]:
        return list(masters)

    def _unpack(self, saved: Any, masters: List[torch.Tensor]) -> List[torch.Tensor]:
        return list(saved)

    @property
    def fp32_groups(self) -> List[List[torch.Tensor]]:
        """The masters of each group: masters()."""
        return self.masters()
