# SPDX-License-Identifier: Apache-2.0
"""Attributes of DeepSpeed's 1-bit optimizers, read-only where they follow from the state or from the arguments."""
from __future__ import annotations

from math import gcd, prod
from typing import Any

from ._deepspeed import Named, ReadOnly
from ._process_group import Default, ranks_of

NCCL = Default("nccl")


class OnebitNames(Named):
    """Base class of the three classes."""

    _levels: Any  # a method
    _group: Any = None
    _engine: Any = None
    _comm: Any = None
    _eps_mode = 1
    _comm_backend_name: str = NCCL

    def _schedule(self) -> Any:
        raise NotImplementedError

    def _reset_engine_flag(self) -> None:
        raise NotImplementedError

    def _update_engine_flag(self) -> None:
        raise NotImplementedError

    @ReadOnly
    def initialize(self) -> bool:
        """True after the first step."""
        return bool(self.state) and self._schedule().step > 0

    @ReadOnly
    def size(self) -> int:
        """Number of data-parallel ranks, of all nodes."""
        return prod(ranks_of(group) for _, group in self._levels())

    @ReadOnly
    def divider(self) -> int:
        """In compat mode a tensor is padded to a multiple of size times this."""
        return int(self.size * 8 // gcd(self.size, 8))

    @ReadOnly
    def eps_mode(self) -> int:
        """0 with eps_inside_sqrt, which has no effect."""
        return self._eps_mode

    @ReadOnly
    def cuda_aware(self) -> bool:
        """False: the backend of the process group decides which memory is sent."""
        return False

    @ReadOnly
    def comm_backend_name(self) -> str:
        """The constructor's argument of this name."""
        return str(self._comm_backend_name)

    @ReadOnly
    def comm_backend_handle(self) -> Any:
        """The dsopt.Comm over `group`, or in one node over node_group; None on one rank and before the first step."""
        return self._comm

    @ReadOnly
    def using_pipeline(self) -> bool:
        """True if the engine has `pipeline_enable_backward_allreduce`, and comm_backend_name is not "mpi"."""
        return self._comm_backend_name != "mpi" and hasattr(self._engine, "pipeline_enable_backward_allreduce")

    @property
    def deepspeed(self) -> Any:
        """The argument. Setting it sets the engine's flag as the next step requires."""
        return self._engine

    @deepspeed.setter
    def deepspeed(self, value: Any) -> None:
        self._engine = value
        self._plans = None  # a flag of the engine's optimizer determines if the step averages
        if self.state:
            self._update_engine_flag()
        else:
            self._reset_engine_flag()
