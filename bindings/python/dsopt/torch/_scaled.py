# SPDX-License-Identifier: Apache-2.0
"""The loss scale of FP16_Optimizer and FP16_UnfusedOptimizer: its values, and functions that change them."""
from __future__ import annotations

import struct
from ctypes import byref
from typing import Any, Callable, Dict, Optional

import torch

from .. import _abi as abi
from ._base import number
from ._loss_scale import LossScaleConfig
from ._plan import Plan
from ._tensors import asserted, unsupported, wrong
from ._watch import LOG


class Scaled:
    """The loss scale of a wrapper. The scaler is a state tensor of the plan, which steps update on the device."""

    verbose: bool
    optimizer: Any
    clip_grad: float
    low_precision_dtype: torch.dtype
    _plan: Callable[[], Plan]
    _profile = ""
    _scale_args: Optional[Dict[str, Any]]  # fields of dsopt_scaler_desc; None: no loss scale
    _external: Optional[float]  # with compat="deepspeed": the override, which only the backward pass uses

    def _words(self) -> torch.Tensor:
        return self._plan().whole["scaler"].cpu()

    def _scaler(self) -> Any:
        info = abi.dsopt_scaler_info()
        words = self._words()
        abi.check(abi.lib.dsopt_scaler_decode(words.data_ptr(), byref(info)))
        return info

    def _write_scaler(self, own: float, override: Optional[float], **counters: int) -> None:
        """Writes the words of the state tensor "scaler", as listed in dsopt.h."""
        words = list(self._words().tolist())
        words[0:2] = struct.unpack("<2i", struct.pack("<d", own))
        words[2:4] = struct.unpack("<2i", struct.pack("<d", override or 0))
        words[8] = override is not None
        for place, name in ((4, "updates"), (5, "last_overflow")):
            words[place] = counters.get(name, words[place])
        whole = self._plan().whole
        whole["scaler"].copy_(torch.tensor(words, dtype=torch.int32))
        whole["loss_scale"].fill_(own if override is None else override)

    def _scale_of(self, value: Any) -> float:
        scale = number(value, 0, "loss_scale")
        if not 0 < scale < 3.4e38:
            raise wrong("the loss scale is %r, and must be positive and finite" % value)
        if self._scale_args is None:
            raise unsupported("there is no loss scale with %s; only torch.float16 parameters have one" %
                              self.low_precision_dtype)
        return scale

    @property
    def cur_scale(self) -> float:
        """The dynamic scale, without an override."""
        return float(self._scaler().dynamic) if self._scale_args is not None else 1.0

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        info = self._scaler() if self._scale_args is not None else None
        scale = self._scale_of(value)
        self._write_scaler(scale, info.scale if info.overridden else None)  # type: ignore[union-attr]

    def _scale_in_use(self) -> float:
        """Returns the divisor of gradients."""
        return float(self._scaler().scale) if self._scale_args is not None else 1.0

    @property
    def loss_scale(self) -> Optional[float]:
        """Factor of the loss."""
        return self._scale_in_use() if self._external is None else self._external

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.cur_scale = value

    def override_loss_scale(self, loss_scale: Optional[float]) -> None:
        """Use another loss scale. The dynamic scale is kept meanwhile. With compat="deepspeed" only the backward pass
        uses it: the step divides gradients by the dynamic scale, which keeps adapting.

        loss_scale  a number, or None for the dynamic scale
        """
        if self._scale_args is None:
            refuse = asserted if self._profile == "fused" else unsupported
            raise refuse("override_loss_scale: there is no loss scale with %s; only torch.float16 parameters have one" %
                         self.low_precision_dtype)
        scale, before = None if loss_scale is None else self._scale_of(loss_scale), self.external_loss_scale
        if self.verbose and scale != before:
            LOG.info("the override of the loss scale changed from %s to %s", before, scale)
        if getattr(self.optimizer, "_compat", None) == "deepspeed":
            self._external, scale = scale, None
        self._write_scaler(self.cur_scale, scale)

    @property
    def custom_loss_scaler(self) -> bool:
        """True if override_loss_scale has set the scale."""
        return self._external is not None or (self._scale_args is not None and bool(self._scaler().overridden))

    @property
    def external_loss_scale(self) -> Optional[float]:
        """The scale that override_loss_scale has set, or None."""
        return self.loss_scale if self.custom_loss_scaler else None

    @property
    def cur_iter(self) -> int:
        """Steps so far, skipped ones included; 0 without gradient scaling."""
        return int(self._scaler().updates) if self._scale_args is not None else 0

    @property
    def last_overflow_iter(self) -> int:
        """Number of the last skipped step; -1 = none."""
        return int(self._scaler().last_overflow) if self._scale_args is not None else -1

    @property
    def scale_factor(self) -> float:
        """Factor by which a dynamic scale is multiplied or divided."""
        return float((self._scale_args or {}).get("factor", 2.0))

    @property
    def scale_window(self) -> int:
        """Number of good steps after which a dynamic scale grows."""
        return int((self._scale_args or {}).get("window", 1000))

    @property
    def min_loss_scale(self) -> Optional[float]:
        """The smallest dynamic scale; None with a static one."""
        return self.loss_scale_config.min_loss_scale

    @property
    def loss_scale_config(self) -> LossScaleConfig:
        """The current loss scale, under the names of DeepSpeed's LossScaleConfig."""
        return LossScaleConfig(self)

    def scale_if_loss(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the loss `value` times the loss scale, without its backward pass. Waits for the device."""
        return value * (self.loss_scale or 1.0)

    def _combined_scale(self, total_norm: Any) -> float:
        """Returns the divisor of gradients: the loss scale, times the excess of the scaled `total_norm` over
        clip_grad."""
        scale = self._scale_in_use()
        if self.clip_grad > 0:
            scale *= max((float(total_norm) / scale + 1e-6) / self.clip_grad, 1.0)
        return scale
