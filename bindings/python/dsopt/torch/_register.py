# SPDX-License-Identifier: Apache-2.0
"""register(): makes the 1-bit optimizers available under their names in an installed DeepSpeed's JSON configuration."""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import torch

from .. import _abi as abi
from .._errors import MissingError, StateError
from ._fp16 import FP16_Optimizer, FP16_UnfusedOptimizer, Wrapper
from ._onebit import Onebit, OnebitAdam, OnebitLamb, ZeroOneAdam
from ._tensors import asserted, unsupported, wrong

CLASSES = {"onebitadam": OnebitAdam, "zerooneadam": ZeroOneAdam, "onebitlamb": OnebitLamb}
# DeepSpeed compares names in lower case.
NAMES = {"onebitadam": "OneBitAdam", "zerooneadam": "ZeroOneAdam", "onebitlamb": "OneBitLamb"}

_registered: Optional[Registered] = None


class Registered:
    """The replacements of register(): methods of the engine's class, and names that its list of optimizers lacked."""

    def __init__(self, kind: Any, names: Any) -> None:
        self.kind, self.names = kind, names
        self.added = [name for name in CLASSES if name not in names]
        self.before: Dict[str, Callable[..., Any]] = {}
        self.ours: Dict[str, Callable[..., Any]] = {}


def _deepspeed() -> Tuple[Any, Any]:
    """Returns the engine's class, and the list of the optimizers that it makes by name."""
    try:
        from deepspeed.runtime import config, engine
        from deepspeed.runtime.fp16 import loss_scaler
    except ImportError as problem:
        raise MissingError("register: DeepSpeed cannot be imported (%s); install it (DSOPT_ERR_MISSING)" % problem,
                           abi.DSOPT_ERR_MISSING, "DSOPT_ERR_MISSING") from problem
    kind = getattr(engine, "DeepSpeedEngine", None)
    missing = ["DeepSpeedEngine." + name for name in METHODS if not callable(getattr(kind, name, None))]
    names = getattr(config, "DEEPSPEED_OPTIMIZERS", None)
    if not isinstance(names, list) or getattr(engine, "DEEPSPEED_OPTIMIZERS", None) is not names:
        missing.append("DEEPSPEED_OPTIMIZERS as one list of the modules config and engine")
    missing += ["runtime.fp16.loss_scaler.%s" % name for name in ("LossScaleConfig", "LossScaleProfile")
                if not hasattr(loss_scaler, name)]
    if missing:
        import deepspeed
        raise unsupported("register: DeepSpeed %s does not have %s; pass an optimizer of dsopt.torch to "
                          "deepspeed.initialize(optimizer=...)" % (deepspeed.__version__, ", ".join(missing)))
    return kind, names


def register() -> None:
    """Make deepspeed.initialize use the classes of this package for "OneBitAdam", "ZeroOneAdam" and "OneBitLamb" of the
    configuration's "optimizer", also if DeepSpeed no longer has these optimizers. "params" are the arguments of the
    class. With "fp16" or "bf16" the wrapper is FP16_Optimizer of this package (FP16_UnfusedOptimizer for OneBitLamb),
    also around an optimizer of these classes that is passed to deepspeed.initialize. ZeRO is refused.

    Call it once before deepspeed.initialize, on all ranks. Another call changes nothing. It replaces methods of
    DeepSpeedEngine for the whole process; unregister() restores them."""
    global _registered
    if _registered is not None:
        return
    found = Registered(*_deepspeed())
    for name, method in METHODS.items():
        found.before[name] = getattr(found.kind, name)
        found.ours[name] = method(found.before[name])
    for name, function in found.ours.items():
        setattr(found.kind, name, function)
    found.names += found.added
    _registered = found


def unregister() -> None:
    """Undo register(). Does nothing without register(). Existing engines keep their optimizers and wrappers."""
    global _registered
    found = _registered
    if found is None:
        return
    for name, function in found.ours.items():
        if found.kind.__dict__.get(name) is not function:
            raise StateError("unregister: DeepSpeedEngine.%s has been replaced since register(); restore it first "
                             "(DSOPT_ERR_STATE)" % name, abi.DSOPT_ERR_STATE, "DSOPT_ERR_STATE")
    for name, before in found.before.items():
        setattr(found.kind, name, before)
    for name in found.added:
        found.names.remove(name)
    _registered = None


# ----------------------------------------------------------------------------------------- methods of DeepSpeedEngine
def _basic(before: Callable[..., Any]) -> Callable[..., Any]:
    def _configure_basic_optimizer(self: Any, model_parameters: Any) -> Any:
        name = self.optimizer_name()
        if name not in CLASSES:
            return before(self, model_parameters)
        arguments = dict(self.optimizer_params() or {})
        if "max_grad_norm" in arguments:
            raise wrong("%s: 'max_grad_norm' is not supported in \"params\" of \"optimizer\"; set "
                        "\"gradient_clipping\" of the configuration" % NAMES[name])
        _check_zero(self, NAMES[name])
        return CLASSES[name](model_parameters, self, **arguments)

    return _configure_basic_optimizer


def _check_zero(engine: Any, name: str) -> None:
    if engine.zero_optimization():
        raise asserted("%s: ZeRO stage %s is not supported: it partitions the gradients, and the step exchanges whole "
                       "ones; set \"stage\" of \"zero_optimization\" to 0" % (name, engine.zero_optimization_stage()))


def _check(before: Callable[..., Any]) -> Callable[..., Any]:
    def _do_optimizer_sanity_check(self: Any, basic_optimizer: Any) -> Any:
        if not isinstance(basic_optimizer, Onebit):
            return before(self, basic_optimizer)
        name = type(basic_optimizer).__name__
        _check_zero(self, name)
        wrapper = before(self, basic_optimizer)
        if wrapper == "bf16":
            raise unsupported("%s: the BF16_Optimizer of DeepSpeed is not supported: it partitions the gradients as "
                              "ZeRO does, and the step exchanges whole ones; use \"fp16\", or bfloat16 without "
                              "pipeline parallelism" % name)
        return wrapper

    return _do_optimizer_sanity_check


def _wrap(before: Callable[..., Any]) -> Callable[..., Any]:
    def _configure_fp16_optimizer(self: Any, optimizer: Any, low_precision_dtype: torch.dtype) -> Any:
        if not isinstance(optimizer, Onebit):
            return before(self, optimizer, low_precision_dtype)
        from deepspeed.runtime.fp16.loss_scaler import LossScaleConfig, LossScaleProfile
        fused = not isinstance(optimizer, OnebitLamb)
        config = LossScaleConfig(low_precision_dtype=low_precision_dtype, dynamic_loss_scale=self.dynamic_loss_scale(),
                                 static_loss_scale=self.loss_scale(), dynamic_loss_args=self.dynamic_loss_scale_args(),
                                 profile=LossScaleProfile.FUSED if fused else LossScaleProfile.UNFUSED,
                                 initial_dynamic_scale=self.initial_dynamic_scale() if fused else None)
        common = dict(deepspeed=self, loss_scale_config=config, low_precision_dtype=low_precision_dtype, mpu=self.mpu,
                      clip_grad=self.gradient_clipping())
        if not fused:
            return FP16_UnfusedOptimizer(optimizer, **common)
        return FP16_Optimizer(optimizer, fused_adam_legacy=self.optimizer_legacy_fusion(),
                              has_moe_layers=self.has_moe_layers,
                              timers=self.timers if self.wall_clock_breakdown() else None, **common)

    return _configure_fp16_optimizer


def _scales(gradient: float, accumulated: float, scale: float) -> Tuple[bool, bool]:
    """Returns True if a gradient of the loss has the loss scale, and True if that is certain. Engines divide by the
    number of accumulated micro-batches before or after this gradient, so without the scale it is 1 or 1/accumulated."""
    without = (1.0, 1 / accumulated)

    def near(value: float, others: Iterable[float]) -> bool:
        return any(abs(value - other) <= 0.01 * other for other in others)

    return not near(gradient, without), not any(near(scale * x, without) for x in without)


def _backward(before: Callable[..., Any]) -> Callable[..., Any]:
    """Engines of DeepSpeed 0.19 multiply the loss by the loss scale only with ZeRO, and wrappers divide by it. Engines
    of later versions may always multiply: the gradient of the loss shows that."""

    def backward(self: Any, loss: Any, *args: Any, **more: Any) -> Any:
        wrapper = self.optimizer
        if not isinstance(wrapper, Wrapper) or not torch.is_tensor(loss) or not loss.requires_grad:
            return before(self, loss, *args, **more)

        def scale(gradient: torch.Tensor) -> torch.Tensor:
            scales = self.__dict__.get("_dsopt_scales")  # known after the first call, which waits for the device
            if scales is None:
                scales, sure = _scales(abs(float(gradient.detach())), self.gradient_accumulation_steps(),
                                       wrapper.loss_scale or 1.0)
                if sure:
                    self._dsopt_scales = scales
            return gradient if scales else wrapper._scaled(gradient).to(gradient.dtype)

        handle = loss.register_hook(scale)
        try:
            return before(self, loss, *args, **more)
        finally:
            handle.remove()

    return backward


METHODS = {"_configure_basic_optimizer": _basic, "_do_optimizer_sanity_check": _check,
           "_configure_fp16_optimizer": _wrap, "backward": _backward}
