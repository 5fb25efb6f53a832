# SPDX-License-Identifier: Apache-2.0
"""Model and expert parallelism: the process groups over which ranks agree on norms and on skipping a step, and the
distribution of parameters over them."""
from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

import torch

from .. import _abi as abi
from .._handles import Comm
from ._formats import Pair
from ._process_group import comm_of
from ._tensors import unsupported, wrong

if TYPE_CHECKING:
    from ._base import EngineOptimizer
    from ._plan import Entry

LAMBS = (abi.DSOPT_ALGORITHM_LAMB, abi.DSOPT_ALGORITHM_ONEBIT_LAMB)
# Names of a method of mpu objects: Megatron's, DeepSpeed's with pipelines, and both before pipelines.
TENSOR_RANK = ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank")
TENSOR_RANKS = ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size",
                "get_model_parallel_world_size")


def _mpus(owner: EngineOptimizer) -> Tuple[Any, Any]:
    """Returns the mpu of the wrapper's arguments, and the mpu of the optimizer's argument `deepspeed`, or None."""
    return getattr(owner._wrapper, "mpu", None), getattr(getattr(owner, "_engine", None), "mpu", None)


def _first(mpu: Any, names: Tuple[str, ...], otherwise: int) -> int:
    for name in names:
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return otherwise


class Planned:
    """An attribute of a wrapper that is read when a plan is made. After it is set, the next step makes a new plan."""

    def __init__(self, default: Any = None) -> None:
        self._default, self._name = default, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: Optional[type] = None) -> Any:
        return self._default if wrapper is None else vars(wrapper).get(self._name, self._default)

    def __set__(self, wrapper: Any, value: Any) -> None:
        vars(wrapper)[self._name] = value
        if "optimizer" in vars(wrapper):  # otherwise the constructor sets it
            wrapper.optimizer._plans = None


def _group_of(mpu: Any, remedy: str = "") -> Any:
    """Returns the data-parallel group of an mpu. None: all ranks."""
    if mpu is None:
        return None
    if not hasattr(mpu, "get_data_parallel_group"):
        raise wrong("mpu is a %s without get_data_parallel_group(), so the data-parallel ranks are unknown%s" %
                    (type(mpu).__name__, remedy))
    return mpu.get_data_parallel_group()


def data_group_of(owner: Any) -> Any:
    """Returns the process group of an optimizer's exchange: `group`, else the data-parallel group of the engine's mpu,
    else of the wrapper's mpu. None: all ranks."""
    if owner._group is not None:
        return owner._group
    wrapper, engine = _mpus(owner)
    mpu = wrapper if engine is None else engine
    return _group_of(mpu, "; give the process group to %s as group=..." % type(owner).__name__)


def agrees_over_data(owner: EngineOptimizer) -> bool:
    """True while the engine of a wrapper does not average gradients in its backward pass. Data-parallel ranks may then
    have different overflows, and agree on skipping, as in DeepSpeed's CheckOverflow. The 1-bit family always agrees."""
    engine = getattr(owner._wrapper, "deepspeed", None)
    if engine is None or hasattr(owner, "_group"):
        return False
    name = "pipeline_enable_backward_allreduce"
    if owner._wrapper.mpu is None or not hasattr(engine, name):
        name = "enable_backward_allreduce"
    return getattr(engine, name, None) is False


def is_expert(param: torch.Tensor) -> bool:
    """True if ranks of an expert-parallel group hold different parameters under this name, by DeepSpeed's mark."""
    return not getattr(param, "allreduce", True)


def _loaded(name: str, otherwise: Any) -> Any:
    """Returns a global of deepspeed.utils.groups, if the program has imported it. It has the groups that MoE layers
    made."""
    return getattr(sys.modules.get("deepspeed.utils.groups"), name, otherwise)


def mean_of_data_ranks(value: Any, wrapper: Any) -> float:
    """Returns the mean of a number over the data-parallel ranks: those of the wrapper's mpu or of its engine's; else
    all."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return float(value)
    mpu = getattr(wrapper.deepspeed, "mpu", None) if wrapper.mpu is None else wrapper.mpu
    group = _group_of(mpu)
    share = torch.tensor(float(value), dtype=torch.float32, device=wrapper._plan().device)
    share /= torch.distributed.get_world_size(group)
    torch.distributed.all_reduce(share, group=group)
    return float(share)


class Parallel:
    """Adds the comms of a plan to a dsopt_optimizer_desc, and describes parameters accordingly."""

    def __init__(self, owner: EngineOptimizer, context: Any, device: torch.device, entries: List[Entry],
                 desc: Any) -> None:
        self.owner, self.context, self.device, self.desc = owner, context, device, desc
        self.comms: List[Comm] = []
        self.hooked = False
        self.has_model = self.spans_stages = False
        self.model_rank = self.tensor_rank = 0
        self.loses_marks = (getattr(owner, "_compat", None) is not None and
                            getattr(owner._wrapper, "_profile", None) == "unfused")
        if agrees_over_data(owner):
            self._add_data(owner._wrapper.mpu)
        self._add_model()
        self.index: Dict[str, int] = {}  # indices of the expert comms, by the names of their groups
        self.handles: Any = None
        self._add_experts(entries)

    def _comm(self, group: Any, what: str) -> Optional[Comm]:
        comm = comm_of(group, self.context, self.device, what)
        if comm is not None:
            self.comms.append(comm)
            self.hooked = True
        return comm

    def _add_data(self, mpu: Any) -> None:
        comm = self._comm(_group_of(mpu), "mpu.get_data_parallel_group()")
        if comm is not None:
            self.desc.data = comm.handle

    # --------------------------------------------------------------------------------------------------------- model
    def _add_model(self) -> None:
        wrapper, engine = _mpus(self.owner)
        mpu = engine if wrapper is None else wrapper
        self.has_model = mpu is not None
        if not hasattr(mpu, "get_model_parallel_group"):
            if wrapper is not None:
                raise wrong("mpu is a %s without get_model_parallel_group()" % type(mpu).__name__)
            return  # without a wrapper the 1-bit family needs only the data-parallel group
        group = mpu.get_model_parallel_group()
        comm = None if group is None else self._comm(group, "mpu.get_model_parallel_group()")
        if comm is None:
            return
        self.desc.model = comm.handle
        self.model_rank = comm.rank
        self.tensor_rank = _first(mpu, TENSOR_RANK, comm.rank)
        self.spans_stages = _first(mpu, TENSOR_RANKS, comm.ranks) < comm.ranks
        lamb = any(self.owner._rule(group)[0] in LAMBS for group in self.owner.param_groups)
        if self.spans_stages and lamb and not getattr(self.owner, "_compat", None):
            # The engine sums the shards of a tensor over all ranks of the model group.
            raise unsupported("mpu.get_model_parallel_group() has the ranks of several pipeline stages, and %s takes "
                              "one trust ratio per tensor over all of them; use compat='deepspeed', which takes one "
                              "per shard" % type(self.owner).__name__)

    def _flags(self, param: torch.Tensor, expert: bool) -> int:
        """Returns the flags of dsopt_param. In norms a tensor counts on tensor-parallel rank 0, a shard on every rank,
        and a copy of another pipeline stage's tensor on no rank. The engine counts tensors that are not sharded on rank
        0 of the model group, which is in one pipeline stage only: in other stages they count as shards.
        FP16_UnfusedOptimizer of DeepSpeed reads the marks of the gradients, which have none: compat mode counts
        everything on tensor-parallel rank 0, and nothing elsewhere."""
        sharded = getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
        sharded = sharded or (expert and _loaded("expert_tensor_parallel_world_size", 1) > 1)
        copied = getattr(param, "ds_pipe_replicated", False)
        if self.loses_marks:
            sharded = copied = False
        copied = copied or (not sharded and self.tensor_rank > 0)
        counts = sharded or (self.model_rank > 0 and self.spans_stages)
        return (abi.DSOPT_PARAM_MODEL_PARALLEL * bool(counts and self.has_model) |
                abi.DSOPT_PARAM_REPLICATED * bool(copied))

    # ------------------------------------------------------------------------------------------------------- experts
    def _add_experts(self, entries: List[Entry]) -> None:
        wrapper = self.owner._wrapper
        experts = [entry for entry in entries if self._is_expert(entry)]
        if experts and (self.desc.data or self.desc.node) and hasattr(self.owner, "_group"):
            raise unsupported("%s is a parameter of experts, and the exchange of %s would average it with other "
                              "experts of other ranks; use another optimizer for it" %
                              (experts[0].name, type(self.owner).__name__))
        if wrapper is None:  # no norms, and each rank steps independently
            return
        names: Dict[str, Entry] = {}
        for entry in experts:
            names.setdefault(self._expert_name(entry), entry)
        expert_groups = wrapper.expert_groups
        groups = expert_groups if expert_groups is not None else _loaded("_EXPERT_PARALLEL_GROUP", None) or {}
        # A rank without experts of a group also takes part in its collectives.
        for name in sorted(expert_groups if expert_groups is not None else names):
            comm = self._expert_comm(name, groups, names.get(name))
            self.index[name] = len(self.index) + 1
            self.handles = (ctypes.c_void_p * len(self.index))(*(self.handles or ()), comm.handle)
        for name, entry in names.items():
            if name not in self.index:
                raise wrong("%s is a parameter of experts of %r, and expert_groups has %s" %
                            (entry.name, name, ", ".join(map(repr, sorted(self.index))) or "no groups"))
        if self.index:
            self.desc.experts, self.desc.expert_count = ctypes.addressof(self.handles), len(self.index)

    def _expert_comm(self, name: str, groups: Dict[str, Any], entry: Optional[Entry]) -> Comm:
        alone = not torch.distributed.is_available() or not torch.distributed.is_initialized() or (
            torch.distributed.get_world_size() == 1)
        if name not in groups and not alone and entry is not None:
            raise wrong("%s is a parameter of experts of %r, and the process group of that name is unknown; give "
                        "expert_groups={%r: group}" % (entry.name, name, name))
        comm = None if alone and name not in groups else self._comm(groups[name], "expert_groups[%r]" % name)
        if comm is None:  # the norm of experts is separate even with one rank
            comm = Comm.single(self.context)
            self.comms.append(comm)
        return comm

    def _is_expert(self, entry: Entry) -> bool:
        return is_expert(entry.param) or bool(self.owner.param_groups[entry.group].get("moe"))

    def _expert_name(self, entry: Entry) -> str:
        """Returns the name of the expert-parallel group of a parameter."""
        group = self.owner.param_groups[entry.group]
        name = group.get("name") if group.get("moe") else getattr(entry.param, "group_name", None)
        if not isinstance(name, str):
            raise wrong("%s is a parameter of experts without the name of their process group: neither its group_name, "
                        "nor 'name' of param_groups[%d] with 'moe'" % (entry.name, entry.group))
        return name

    def describe(self, place: Any, entry: Entry, formats: Pair) -> None:
        """Completes a dsopt_param. `formats` are those of its moments."""
        expert = self.owner._wrapper is not None and self._is_expert(entry)
        place.flags |= self._flags(entry.param, expert)
        if expert and self._apart(entry):
            place.expert = self.index[self._expert_name(entry)]

    def _apart(self, entry: Entry) -> bool:
        """True if an expert parameter is summed separately in the norm. In compat mode the wrappers identify experts as
        the originals do; experts that FP16_Optimizer does not identify count as dense. Ranks agree on overflow over the
        experts' ranks in any case."""
        wrapper = self.owner._wrapper
        if not getattr(self.owner, "_compat", None):
            return True
        if wrapper._masters == abi.DSOPT_MASTERS_FLAT:
            return bool(wrapper.has_moe_layers and self.owner.param_groups[entry.group].get("moe"))
        return is_expert(entry.param)
