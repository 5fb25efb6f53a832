# SPDX-License-Identifier: Apache-2.0
"""Steps over a mesh axis, under shard_map and pmap: ranks, comms, and the order of calls."""

import math
import weakref

import jax

from .. import _abi as abi
from . import _build, _call

FAMILY = (abi.DSOPT_ALGORITHM_ONEBIT_ADAM, abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM, abi.DSOPT_ALGORITHM_ONEBIT_LAMB)


def rank(axis):
    """Returns this device's index on the axis, as an array; None without an axis. Each device with the same indices on
    the other axes of the shard_map is in another comm, and the number of ranks of the comms before is added."""
    if axis is None:
        return None
    index = 0
    for name in _other_axes(axis):
        index = index * jax.lax.axis_size(name) + jax.lax.axis_index(name)
    return index * jax.lax.axis_size(axis) + jax.lax.axis_index(axis)


def replicas(axis) -> int:
    """Returns the number of comms over the axis: one for each combination of indices on the other axes."""
    return 1 if axis is None else math.prod(map(jax.lax.axis_size, _other_axes(axis)))


def _other_axes(axis) -> list:
    """Returns the other axes of the shard_map around a call; none in a pmap."""
    mesh = jax.sharding.get_abstract_mesh()
    return [name for name in mesh.axis_names if name != axis and name in mesh.manual_axes]


def ranks(axis, comm: str) -> int:
    """Returns the number of ranks on the axis."""
    if axis is None:
        return 1
    try:
        size = jax.lax.axis_size(axis)
    except NameError:
        raise _call.argument_error(
            "there is no axis %r here: call init and step inside a shard_map or pmap over it" % axis
        ) from None
    if jax.process_count() > 1 and not comm:
        raise _call.unsupported(
            "the ranks of a program's own comm are devices of one process; register other comms with "
            "dsopt.jax.register_comm, and name them in `comm`"
        )
    return size


def register_comm(name: str, rank: int, comm: int) -> None:  # pylint: disable=redefined-outer-name
    """Let programs find a comm under a name, which is the `comm` of FusedStep.

    name  any text
    rank  the rank whose comm it is
    comm  address of a dsopt_comm, which must live as long as a program that names it can run; 0 removes the name
    """
    _build.library().dsopt_jax_register_comm(name.encode(), rank, comm or None)


# XLA does not order custom calls that do not depend on each other, and ranks that run two exchanges in different orders
# deadlock. So each call has a result of the previous call in the same trace as an operand. Only weak references are
# kept: a traced array must not outlive its trace.
_last = weakref.WeakKeyDictionary()
_NO_TRACE = type("NoTrace", (), {})()


def previous(operands):
    """Returns a result of the last call in the trace of these operands, or None."""
    for operand in operands:
        for result in _last.get(getattr(operand, "_trace", _NO_TRACE), ()):
            if result() is not None:
                return result()
    return None


def remember(results) -> None:
    """Stores the results of a call, preferred ones first."""
    trace = getattr(results[0], "_trace", None)
    if trace is not None:
        _last[trace] = [weakref.ref(result) for result in results]
