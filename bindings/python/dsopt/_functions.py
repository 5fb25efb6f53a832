# SPDX-License-Identifier: Apache-2.0
"""Functions on lists of arrays, without an optimizer."""

from __future__ import annotations

import ctypes
import json
from ctypes import byref
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

from . import _abi as abi
from ._arrays import FLOATS, refuse, require, require_stream, tensor_of
from ._comm import Comm
from ._errors import ArgumentTypeError
from ._handle import choice, counted, require_handle
from ._handles import Context, default_context
from ._hooks import gated
from ._params import scalars
from ._state import array_at, aligned_zeros

NORMS = {"l2": abi.DSOPT_NORM_L2, "max": abi.DSOPT_NORM_MAX}
OPS = {"sum": abi.DSOPT_OP_SUM, "max": abi.DSOPT_OP_MAX, "mean": abi.DSOPT_OP_MEAN}


def version() -> str:
    """Returns the version of the loaded library, such as "0.3.0"."""
    number = int(abi.lib.dsopt_version())
    return "%d.%d.%d" % (number // 10000, number // 100 % 100, number % 100)


def build_info() -> Dict[str, Any]:
    """Returns a description of the library: version, backends and comms that work here, instruction set, ..."""
    info: Dict[str, Any] = json.loads(abi.lib.dsopt_build_info())
    return {**info, "library": abi.path}


def _listed(arrays: Any, label: str) -> List[Any]:
    try:
        return list(arrays)
    except TypeError:
        refuse(label, "is %s, and must be a list of arrays" % type(arrays).__name__, kind=ArgumentTypeError)


def tensors(
    arrays: Sequence[Any],
    label: str,
    context: Context,
    *,
    write: bool,
    dtypes: Sequence[int] = FLOATS,
    stream: Optional[int] = None,
) -> Tuple[Any, List[Any]]:
    """Returns a dsopt_tensor list of any arrays, and objects that must be kept alive; None is an entry without data."""
    arrays, stream = _listed(arrays, label), require_stream(stream)
    structs, owners = (abi.dsopt_tensor * len(arrays))(), []
    for i, array in enumerate(arrays):
        if array is None:
            structs[i].dtype = abi.DSOPT_DTYPE_F32
            continue
        name = "%s[%d]" % (label, i)
        tensor = require(tensor_of(array, name, stream=stream), name, context=context, write=write, dtypes=dtypes)
        structs[i] = tensor.struct()
        owners.append(tensor)
    return structs, owners


def _context(context: Optional[Context], comm: Optional[Comm] = None) -> Context:
    if comm is not None:
        require_handle(comm, Comm, "comm")
    if context is not None:
        return require_handle(context, Context, "context")
    return comm.context if comm is not None else default_context()


@dataclass(frozen=True)
class NormResult:
    """Result of dsopt.norm.

    norm         norm of all arrays; with a comm, of the arrays of all ranks
    coefficient  factor that clips: min(1, max_norm / (norm + 1e-6))
    nonfinite    number of elements that are Inf or NaN
    first_bad    index of the first array with an Inf or NaN, None without one
    """

    norm: float
    coefficient: float
    nonfinite: int
    first_bad: Optional[int]


def norm(
    arrays: Sequence[Any],
    *,
    kind: str = "l2",
    max_norm: float = 0,
    comm: Optional[Comm] = None,
    context: Optional[Context] = None,
) -> NormResult:
    """Norm and finite check of a list in one read. CPU backend.

    arrays    float32, float16 or bfloat16; None = ignored
    kind      "l2" or "max"
    max_norm  norm to which the `coefficient` of the result clips; 0 = the coefficient is 1
    comm      the norm is over the arrays of all its ranks. Collective
    context   None = the comm's, else the CPU with every default
    """
    result = _norm(arrays, kind, max_norm, comm, context)
    return NormResult(
        result.norm, result.coefficient, result.nonfinite, None if result.first_bad < 0 else result.first_bad
    )


def _norm(arrays: Sequence[Any], kind: str, max_norm: float, comm: Optional[Comm], context: Optional[Context]) -> Any:
    context = _context(context, comm)
    if context.backend != "cpu":
        text = "works on cuda, which norm and clip do not support: use Optimizer(max_norm=...) there, which clips"
        refuse("context", text, abi.DSOPT_ERR_UNSUPPORTED)
    limit = abi.number(max_norm, ctypes.c_double, "max_norm")
    structs, owners = tensors(arrays, "arrays", context, write=False)
    result = abi.dsopt_norm_result()
    with gated(context, comm):
        abi.check(
            abi.lib.dsopt_tensors_norm(
                context.handle,
                structs,
                len(structs),
                choice("kind", kind, NORMS),
                limit,
                None if comm is None else comm.handle,
                byref(result),
                None,
            )
        )
    return result


def clip(
    arrays: Sequence[Any], max_norm: float, *, comm: Optional[Comm] = None, context: Optional[Context] = None
) -> float:
    """Scale a list in place so that its L2 norm is at most `max_norm`. Returns the norm before. CPU backend.

    arrays   float32, float16 or bfloat16; None = ignored
    comm     the norm is over the arrays of all its ranks. Collective
    context  None = the comm's, else the CPU with every default
    """
    if not abi.number(max_norm, ctypes.c_double, "max_norm") > 0:
        refuse("max_norm", "is %r, and must be positive" % (max_norm,))
    context = _context(context, comm)
    arrays = _listed(arrays, "arrays")
    structs, owners = tensors(arrays, "arrays", context, write=True)
    result = _norm(arrays, "l2", max_norm, comm, context)
    if result.coefficient != 1:
        coefficient = ctypes.c_float(result.coefficient)
        with gated(context):
            abi.check(
                abi.lib.dsopt_tensors_axpby(
                    context.handle, byref(coefficient), structs, 0.0, structs, len(structs), None
                )
            )
    return float(result.norm)


def axpby(
    a: Any,
    x: Sequence[Any],
    b: float,
    y: Sequence[Any],
    *,
    context: Optional[Context] = None,
    stream: Optional[int] = None,
) -> None:
    """y = a * x + b * y, element by element in fp32, between any float dtypes.

    a        a number on the CPU backend, elsewhere an array of one float32; None = 1
    x        list of arrays; None = ignored
    b        a number; with 0 y is not read
    y        list of arrays of the sizes of x, which are overwritten
    context  None = the CPU with every default
    stream   the CUDA stream on which they are used
    """
    context = _context(context)
    x, y, b = _listed(x, "x"), _listed(y, "y"), abi.number(b, ctypes.c_double, "b")
    if len(x) != len(y):
        refuse("x", "has %d arrays, and y has %d" % (len(x), len(y)), abi.DSOPT_ERR_SHAPE)
    factor, memory = scalars(a, "a", 1, context, stream=stream)
    sources, owners = tensors(x, "x", context, write=False, stream=stream)
    targets, kept_too = tensors(y, "y", context, write=True, stream=stream)
    with gated(context):
        abi.check(abi.lib.dsopt_tensors_axpby(context.handle, factor, sources, b, targets, len(sources), stream))


def clamp(
    arrays: Sequence[Any], limit: float, *, context: Optional[Context] = None, stream: Optional[int] = None
) -> None:
    """Clip every element to [-limit, limit], in place. NaN stays.

    arrays   float32, float16 or bfloat16; None = ignored
    limit    positive
    context  None = the CPU with every default
    stream   the CUDA stream on which they are used
    """
    context, limit = _context(context), abi.number(limit, ctypes.c_double, "limit")
    structs, owners = tensors(arrays, "arrays", context, write=True, stream=stream)
    with gated(context):
        abi.check(abi.lib.dsopt_tensors_clamp(context.handle, structs, len(structs), limit, stream))


def zero(arrays: Sequence[Any], *, context: Optional[Context] = None, stream: Optional[int] = None) -> None:
    """Set every element to zero.

    arrays   float32, float16 or bfloat16; None = ignored
    context  None = the CPU with every default
    stream   the CUDA stream on which they are used
    """
    context = _context(context)
    structs, owners = tensors(arrays, "arrays", context, write=True, stream=stream)
    with gated(context):
        abi.check(abi.lib.dsopt_zero_grad(context.handle, structs, len(structs), abi.DSOPT_ZERO_FILL, stream))


def all_reduce(comm: Comm, arrays: Sequence[Any], op: str = "sum", *, stream: Optional[int] = None) -> None:
    """Comm.all_reduce."""
    structs, owners = tensors(arrays, "arrays", comm.context, write=True, stream=stream)
    number = choice("op", op, OPS)
    with gated(comm):
        abi.check(abi.lib.dsopt_comm_all_reduce(comm.handle, structs, len(structs), number, stream))


class CompressedAllReduce:
    """Error-compensated 1-bit mean over the ranks of a comm of lists with the sizes of `arrays`: docs/onebit.md.

    It keeps the residuals of this rank between calls, in host memory. CPU backend.

    comm    the ranks
    arrays  float32, with the sizes of all later calls; they are not kept
    compat  "none" or "deepspeed" (docs/compat.md)
    node    optional: the ranks of this node, which exchange among themselves first
    """

    def __init__(self, comm: Comm, arrays: Sequence[Any], *, compat: str = "none", node: Optional[Comm] = None) -> None:
        if node is not None:
            require_handle(node, Comm, "node")
        if require_handle(comm, Comm, "comm").context.backend != "cpu":
            text = "works on cuda, which CompressedAllReduce does not support: its residuals are in host memory"
            refuse("comm", text + ". Use a 1-bit algorithm in an Optimizer there", abi.DSOPT_ERR_UNSUPPORTED)
        self._comm, self._node = comm, node
        structs, _ = tensors(arrays, "arrays", comm.context, write=True, dtypes=(abi.DSOPT_DTYPE_F32,))
        self._numels = [struct.numel for struct in structs]
        self._args = abi.dsopt_compressed(
            tensors=ctypes.addressof(structs),
            count=len(structs),
            node=None if node is None else node.handle,
            compat=choice("compat", compat, {"none": abi.DSOPT_COMPAT_NONE, "deepspeed": abi.DSOPT_COMPAT_DEEPSPEED}),
        )
        worker, server, space = ctypes.c_int64(), ctypes.c_int64(), ctypes.c_size_t()
        abi.check(
            abi.lib.dsopt_compressed_sizes(comm.handle, byref(self._args), byref(worker), byref(server), byref(space))
        )
        (self._args.worker_error, self._args.server_error, self._args.workspace), self._memory = aligned_zeros(
            [4 * worker.value, 4 * server.value, space.value]
        )
        self._args.workspace_bytes = space.value
        self.worker_error = array_at(self._args.worker_error, abi.DSOPT_DTYPE_F32, (worker.value,), self._memory)
        """Sums and scales; `errors` makes the errors."""
        self.server_error = array_at(self._args.server_error, abi.DSOPT_DTYPE_F32, (server.value,), self._memory)

    def __repr__(self) -> str:
        return "<dsopt.CompressedAllReduce: %s, %s>" % (counted(len(self._numels), "array"), self._comm._shown())

    def __call__(self, arrays: Sequence[Any]) -> None:
        """Overwrite the arrays with their mean. Collective."""
        structs, owners = tensors(arrays, "arrays", self._comm.context, write=True, dtypes=(abi.DSOPT_DTYPE_F32,))
        if [struct.numel for struct in structs] != self._numels:
            refuse("arrays", "has other sizes than this object was made for; make another one", abi.DSOPT_ERR_SHAPE)
        self._args.tensors = ctypes.addressof(structs)
        with gated(self._comm, self._node):
            abi.check(abi.lib.dsopt_compressed_allreduce(self._comm.handle, byref(self._args)))
