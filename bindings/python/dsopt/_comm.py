# SPDX-License-Identifier: Apache-2.0
"""Comms, and comms whose collectives are methods of a Python object."""

from __future__ import annotations

import ctypes
import itertools
from ctypes import byref
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence

from . import _abi as abi
from . import _hooks, _nvidia
from ._errors import ArgumentError
from ._handle import Handle, choice, require_handle

if TYPE_CHECKING:
    from ._handles import Context

KINDS = {"local": abi.DSOPT_COMM_KIND_LOCAL, "nccl": abi.DSOPT_COMM_KIND_NCCL, "hccl": abi.DSOPT_COMM_KIND_HCCL}
MEMORY = {"host": abi.DSOPT_MEMORY_HOST, "backend": abi.DSOPT_MEMORY_BACKEND}


class Comm(Handle):
    """One rank's handle to a group of ranks that communicate. Made by one of the class methods, which fill a
    description.

    context  the arrays of its collectives are in its memory
    desc     a dsopt_comm_desc
    needed   objects that are kept as long as the comm
    hooked   True if calls may lead to a Python function
    """

    rank: int
    ranks: int

    def __init__(self, context: Context, desc: Any, *needed: object, hooked: bool = False) -> None:
        from ._handles import Context  # which needs this module

        self.context = require_handle(context, Context, "context")
        self.hooked = hooked or context.hooked
        with _hooks.gated(self):
            self._create(
                abi.lib.dsopt_comm_create,
                context.handle,
                byref(desc),
                destroy=abi.lib.dsopt_comm_destroy,
                needed=(context, *needed),
            )
        info = self.query()
        self.rank, self.ranks = info.rank, info.ranks

    def _shown(self) -> str:
        return "rank %d of %d" % (self.rank, self.ranks)

    @classmethod
    def single(cls, context: Context) -> Comm:
        """Returns a comm of one rank, on the device of `context`."""
        return cls(context, abi.dsopt_comm_desc(kind=abi.DSOPT_COMM_KIND_SELF))

    @staticmethod
    def unique_id(kind: str = "local") -> bytes:
        """Returns the bytes that one rank creates and all ranks need. `kind` is "local", "nccl" or "hccl"."""
        number = choice("kind", kind, KINDS)
        if number == abi.DSOPT_COMM_KIND_NCCL:
            _nvidia.load(_nvidia.NCCL)
        size = ctypes.c_size_t()
        abi.check(abi.lib.dsopt_comm_unique_id(number, None, byref(size)))
        id = ctypes.create_string_buffer(size.value)
        abi.check(abi.lib.dsopt_comm_unique_id(number, id, byref(size)))
        return id.raw[: size.value]

    @classmethod
    def _from_id(
        cls, context: Context, kind: int, id: bytes, rank: int, ranks: int, timeout_ms: int, flags: int = 0
    ) -> Comm:
        if not isinstance(id, bytes):
            raise ArgumentError(
                "id is %s, and must be the bytes of unique_id" % type(id).__name__, 10, "DSOPT_ERR_ARGUMENT"
            )
        if kind == abi.DSOPT_COMM_KIND_NCCL:
            _nvidia.load(_nvidia.NCCL)
        place = ctypes.create_string_buffer(id, len(id))
        return cls(
            context,
            abi.dsopt_comm_desc(
                kind=kind,
                rank=rank,
                ranks=ranks,
                timeout_ms=timeout_ms,
                flags=flags,
                id=ctypes.addressof(place),
                id_bytes=len(id),
            ),
        )

    @classmethod
    def local(cls, context: Context, id: bytes, rank: int, ranks: int, *, timeout_ms: int = 0) -> Comm:
        """Ranks are threads of this process. Collective.

        context     the context of this rank; ranks may share it
        id          the bytes of unique_id("local"), the same on all ranks
        rank        number of this rank, from 0 on
        ranks       number of ranks
        timeout_ms  time-out of a call; 0 = 600000, -1 = no limit
        """
        return cls._from_id(context, abi.DSOPT_COMM_KIND_LOCAL, id, rank, ranks, timeout_ms)

    @classmethod
    def nccl(
        cls,
        context: Context,
        id: bytes,
        rank: int,
        ranks: int,
        *,
        timeout_ms: int = 0,
        enqueue: bool = False,
        provider_sums: bool = False,
    ) -> Comm:
        """Ranks are processes, one per GPU, and NCCL is made here. Collective.

        context        a CUDA context
        id             the bytes of unique_id("nccl"), the same on all ranks
        rank           number of this rank, from 0 on
        ranks          number of ranks
        timeout_ms     time-out of a call; 0 = 600000, -1 = no limit
        enqueue        exchanges are enqueued and the host does not wait for them (DSOPT_COMM_FLAG_ENQUEUE)
        provider_sums  NCCL adds up means of gradients, in its order (DSOPT_COMM_FLAG_PROVIDER_SUMS)
        """
        flags = _flags(enqueue, provider_sums=provider_sums)
        return cls._from_id(context, abi.DSOPT_COMM_KIND_NCCL, id, rank, ranks, timeout_ms, flags)

    @classmethod
    def hccl(
        cls,
        context: Context,
        id: bytes,
        rank: int,
        ranks: int,
        *,
        timeout_ms: int = 0,
        provider_sums: bool = False,
    ) -> Comm:
        """Ranks are processes, one per Ascend NPU, and HCCL is made here. Collective.

        context        a CPU context; the exchange is staged through device memory
        id             the bytes of unique_id("hccl"), the same on all ranks
        rank           number of this rank, from 0 on
        ranks          number of ranks
        timeout_ms     time-out of a call; 0 = 600000, -1 = no limit
        provider_sums  HCCL adds up means of gradients, in its order (DSOPT_COMM_FLAG_PROVIDER_SUMS)
        """
        flags = _flags(provider_sums=provider_sums)
        return cls._from_id(context, abi.DSOPT_COMM_KIND_HCCL, id, rank, ranks, timeout_ms, flags)

    @classmethod
    def native(
        cls,
        context: Context,
        kind: str,
        address: int,
        *,
        owner: object = None,
        timeout_ms: int = 0,
        enqueue: bool = False,
        provider_sums: bool = False,
    ) -> Comm:
        """A communicator of the caller.

        context        the arrays of its collectives are in its memory
        kind           "nccl" or "hccl"
        address        address of the communicator, such as an ncclComm_t, as a number
        owner          any object, kept as long as the comm, such as one that keeps the communicator alive
        timeout_ms     time-out of a call; 0 = 600000, -1 = no limit
        enqueue        NCCL: exchanges are enqueued and the host does not wait for them (DSOPT_COMM_FLAG_ENQUEUE)
        provider_sums  the communicator adds up means of gradients, in its order (DSOPT_COMM_FLAG_PROVIDER_SUMS)
        """
        if not isinstance(address, int):
            raise ArgumentError(
                "address is %s, and must be a number" % type(address).__name__, 10, "DSOPT_ERR_ARGUMENT"
            )
        choices = {"nccl": abi.DSOPT_COMM_KIND_NCCL, "hccl": abi.DSOPT_COMM_KIND_HCCL}
        return cls(
            context,
            abi.dsopt_comm_desc(
                kind=choice("kind", kind, choices),
                native=address,
                timeout_ms=timeout_ms,
                flags=_flags(enqueue, provider_sums=provider_sums),
            ),
            owner,
        )

    @classmethod
    def table(
        cls,
        context: Context,
        collectives: object,
        rank: int,
        ranks: int,
        *,
        memory: str = "host",
        enqueue: bool = False,
        synchronize: bool = False,
        provider_sums: bool = False,
    ) -> Comm:
        """Collectives that are methods of a Python object.

        context        the arrays of its collectives are in its memory
        collectives    the object, with the methods below
        rank           number of this rank, from 0 on
        ranks          number of ranks
        memory         "host" or "backend": where `send` and `recv` are
        enqueue        with memory of a device: methods enqueue, and the host does not wait (DSOPT_COMM_FLAG_ENQUEUE)
        synchronize    with memory of a device: for methods that cannot use the stream; the host waits for the stream
                       before each of them (DSOPT_COMM_FLAG_SYNCHRONIZE)
        provider_sums  reduce_scatter adds up means of gradients, in its order (DSOPT_COMM_FLAG_PROVIDER_SUMS)

        Its methods:

        all_reduce(send, recv, count, dtype, op, stream)   dtype F32, F64 or I32 and op SUM or MAX as numbers of dsopt.h
        all_to_all(send, recv, bytes_per_rank, stream)     optional
        all_gather(send, recv, bytes_per_rank, stream)     optional
        reduce_scatter(send, recv, count, dtype, op, stream)  optional: `recv` gets the sum over all ranks of row `rank`
            of `send`, whose rows have `count` elements each; F32, SUM. For provider_sums
        error()    optional, any thread: None if there is no error, else a text
        abort()    optional, any thread, more than once: makes blocked calls return
        destroy()  optional, the last call

        `send` and `recv` are addresses, and may be the same. A method returns when it is done. An exception of a method
        is raised again by the call that led to it, and makes the comm unusable; a TimeoutError counts as a time-out.
        """
        table = _table(collectives, rank, ranks, choice("memory", memory, MEMORY))
        key = table.self
        try:
            return cls(
                context,
                abi.dsopt_comm_desc(
                    kind=abi.DSOPT_COMM_KIND_TABLE,
                    table=ctypes.addressof(table),
                    flags=_flags(enqueue, synchronize, provider_sums),
                ),
                hooked=True,
            )
        except BaseException:
            _tables.pop(key, None)
            raise

    def query(self) -> Any:
        """Returns the current dsopt_comm_info: rank, ranks, status, calls, bytes_sent, bytes_received, and lists by
        collective. Any thread may call it."""
        info = abi.dsopt_comm_info()
        abi.check(abi.lib.dsopt_comm_query(self.handle, byref(info)))
        return info

    def all_reduce(self, arrays: Sequence[Any], op: str = "sum", *, stream: Optional[int] = None) -> None:
        """All-reduce a list in place. Collective: the same sizes on all ranks.

        arrays  float32, float16 or bfloat16; None = ignored
        op      "sum", "max" or "mean"
        stream  the CUDA stream on which they are used
        """
        from ._functions import all_reduce  # which needs this module

        all_reduce(self, arrays, op, stream=stream)

    def abort(self) -> None:
        """Make every blocked or later call on this comm fail. Any thread may call it."""
        abi.lib.dsopt_comm_abort(self.handle)


# Tables whose `destroy` was not called yet, by the number that is their `self`: the library keeps a comm that an
# optimizer uses, even if its owner here is collected. A function must not be freed while it runs, so tables of
# destroyed comms stay in `_done` until the next table is made.
_tables: Dict[int, Any] = {}
_done: List[Any] = []
_numbers = itertools.count(1)


def _flags(enqueue: bool = False, synchronize: bool = False, provider_sums: bool = False) -> int:
    return int(
        abi.DSOPT_COMM_FLAG_ENQUEUE * bool(enqueue)
        | abi.DSOPT_COMM_FLAG_SYNCHRONIZE * bool(synchronize)
        | abi.DSOPT_COMM_FLAG_PROVIDER_SUMS * bool(provider_sums)
    )


def _failure(problem: BaseException) -> int:
    return -int(abi.DSOPT_ERR_TIMEOUT if isinstance(problem, TimeoutError) else abi.DSOPT_ERR_COMM)


def _nothing(_: object) -> None:
    return None


def _table(collectives: object, rank: int, ranks: int, memory: int) -> Any:
    """Returns the dsopt_comm_table of an object. It lives in _tables until its `destroy`. Exceptions of `abort` and
    `destroy`, which are called at any time, go to sys.unraisablehook, as in ctypes."""
    _done.clear()
    number = next(_numbers)
    table = abi.dsopt_comm_table(self=number, rank=rank, ranks=ranks, memory=memory)
    kinds = dict(abi.dsopt_comm_table._fields_)
    for name in ("all_reduce", "all_to_all", "all_gather", "reduce_scatter"):
        method = getattr(collectives, name, None)
        if method is not None:
            setattr(table, name, kinds[name](_collective(method)))
        elif name == "all_reduce":
            text = "collectives is %s, and must have a method all_reduce" % type(collectives).__name__
            raise ArgumentError(text, 10, "DSOPT_ERR_ARGUMENT")
    error = getattr(collectives, "error", None)
    if error is not None:
        table.error = kinds["error"](_error(error))
    abort = getattr(collectives, "abort", None)
    if abort is not None:
        table.abort = kinds["abort"](lambda _self: _nothing(abort()))
    destroy = getattr(collectives, "destroy", None)

    def last(_self: int) -> None:
        entry = _tables.pop(number, None)
        if entry is not None:
            _done.append(entry)
        if destroy is not None:
            destroy()

    table.destroy = kinds["destroy"](last)
    _tables[number] = table, collectives
    return table


def _collective(method: Callable[..., Any]) -> Callable[..., int]:
    def call(_self: int, *arguments: Any) -> int:
        result = method(*arguments)
        return 0 if result is None else int(abi.number(result, ctypes.c_int, "what a collective returned"))

    return _hooks.guarded(call, _failure)


def _error(method: Callable[[], Optional[str]]) -> Callable[[int, int, int], int]:
    def error(_self: int, text: int, capacity: int) -> int:
        problem = method()
        if problem is None:
            return 0
        encoded = str(problem).encode()[: max(capacity - 1, 0)] + b"\0"
        ctypes.memmove(text, encoded, min(len(encoded), capacity))
        return -int(abi.DSOPT_ERR_COMM)

    return _hooks.guarded(error, _failure)
