# SPDX-License-Identifier: Apache-2.0
"""The loss scale of FP16_Optimizer and FP16_UnfusedOptimizer as DeepSpeed's engine passes and reads it."""
from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch

from ._originals import mismatch
from ._tensors import wrong

if TYPE_CHECKING:
    from ._fp16 import Wrapper

READ = ("use_grad_scaling", "dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor",
        "scale_window", "min_loss_scale")


class LossScaleConfig:
    """deepspeed.runtime.fp16.loss_scaler.LossScaleConfig of a wrapper. Each attribute is the current value, so reading
    cur_scale, cur_iter and last_overflow_iter waits for the device. cur_scale can be set."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def __repr__(self) -> str:
        return "LossScaleConfig(%s)" % ", ".join("%s=%r" % (name, getattr(self, name)) for name in READ)

    def _option(self, name: str, otherwise: Any) -> Any:
        return (self._wrapper._scale_args or {}).get(name) or otherwise if self.dynamic_loss_scale else None

    @property
    def use_grad_scaling(self) -> bool:
        """True if gradients have a loss scale: with float16 parameters."""
        return self._wrapper._scale_args is not None

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the scale adapts to overflows."""
        return self._wrapper.dynamic_loss_scale

    @property
    def cur_scale(self) -> float:
        """The dynamic scale without an override; 1 without gradient scaling."""
        return self._wrapper.cur_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._wrapper.cur_scale = value

    @property
    def cur_iter(self) -> int:
        """Steps so far, skipped ones included."""
        return self._wrapper.cur_iter

    @property
    def last_overflow_iter(self) -> Optional[int]:
        """Number of the last skipped step, -1 = none; None with a static scale."""
        return self._wrapper.last_overflow_iter if self.dynamic_loss_scale else None

    @property
    def scale_factor(self) -> Optional[float]:
        """Factor by which the scale grows and shrinks; None with a static scale."""
        return self._option("factor", 2.0)

    @property
    def scale_window(self) -> Optional[int]:
        """Number of good steps until the scale grows; None with a static scale."""
        return self._option("window", 1000)

    @property
    def min_loss_scale(self) -> Optional[float]:
        """Lower bound of the scale; None with a static scale."""
        return self._option("min", 1.0 if self._wrapper._profile == "fused" else 0.25)


def options_of(config: Any, profile: str, dtype: torch.dtype) -> Optional[Dict[str, Any]]:
    """Returns the arguments of dsopt.Scaler for a LossScaleConfig, ours or DeepSpeed's. None: no scale."""
    for name in READ:
        if not hasattr(config, name):
            raise wrong("loss_scale_config is a %s without %s, and must be a LossScaleConfig of DeepSpeed" %
                        (type(config).__name__, name))
    if bool(config.use_grad_scaling) != (dtype == torch.float16):
        raise wrong("loss_scale_config.use_grad_scaling is %r, and low_precision_dtype is %s: only torch.float16 has a "
                    "loss scale" % (config.use_grad_scaling, dtype))
    if not config.use_grad_scaling:
        return None
    if not config.dynamic_loss_scale:
        return {"static": True, "init": config.cur_scale}
    return {"profile": profile, "init": config.cur_scale, "factor": config.scale_factor or 2.0,
            "window": config.scale_window or 1000, "min": config.min_loss_scale or 0}


def more_of_scale(wrapper: Wrapper) -> Dict[str, Any]:
    """Returns the entries of a dynamic scale that the original does not save, and on which the next steps depend."""
    if not wrapper.dynamic_loss_scale:
        return {}
    return {"min_loss_scale": wrapper.loss_scale_config.min_loss_scale,
            "cur_hysteresis": int(wrapper._scaler().hysteresis)}


def saved_scale(saved: Dict[str, Any], arguments: Dict[str, Any],
                words: List[int]) -> Tuple[Dict[str, Any], List[int]]:
    """Returns the scale of a wrapper's state dict: arguments of dsopt.Scaler, and the words of the state tensor
    "scaler". `words` are the current words: an override, and values that the state dict lacks, are kept."""
    def value(key: str, least: float, most: float = 3.4e38, above: bool = False) -> Any:
        if key not in saved:
            raise mismatch("the state dict has no %r, and this wrapper has a %s loss scale" %
                           (key, "static" if static else "dynamic"))
        try:
            found = float(saved[key])
        except (TypeError, ValueError, RuntimeError):
            found = float("nan")
        if not (least < found if above else least <= found) or not found <= most:
            raise mismatch("%s of the state dict is %r, and must be a number %s %g" %
                           (key, saved[key], "above" if above else "of at least", least))
        return found

    static = bool(arguments.get("static"))
    if bool(saved.get("dynamic_loss_scale", not static)) == static:
        raise mismatch("dynamic_loss_scale of the state dict is %r, and the loss scale of this wrapper is %s; make the "
                       "wrapper with dynamic_loss_scale=%s" % (saved["dynamic_loss_scale"], "static" if static else
                                                               "dynamic", static))
    arguments, words = dict(arguments), list(words)
    scale = value("cur_scale", 0, above=True)
    words[0:2] = struct.unpack("<2i", struct.pack("<d", scale))
    words[4] = int(value("cur_iter", 0, 2 ** 31 - 1))
    if not static:
        words[5] = int(value("last_overflow_iter", -1, 2 ** 31 - 1))
        arguments["factor"] = value("scale_factor", 1, above=True)
        arguments["window"] = int(value("scale_window", 1, 2 ** 31 - 1))
        if "min_loss_scale" in saved:
            arguments["min"] = value("min_loss_scale", 0)
        arguments["init"] = max(scale, arguments["min"] or 1)  # no longer used, but must not be below the minimum
        budget = arguments.get("hysteresis", 1)
        words[6] = min(int(value("cur_hysteresis", 1)), budget) if "cur_hysteresis" in saved else budget
    return arguments, words
