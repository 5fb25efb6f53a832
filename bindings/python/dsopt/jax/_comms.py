# SPDX-License-Identifier: Apache-2.0
"""The 1-bit family under shard_map and pmap: ranks, comms, and the order of calls."""

import weakref

import jax

from .. import _abi as abi
from . import _build, _call

FAMILY = (abi.DSOPT_ALGORITHM_ONEBIT_ADAM, abi.DSOPT_ALGORITHM_ZERO_ONE_ADAM, abi.DSOPT_ALGORITHM_ONEBIT_LAMB)


def rank(axis):
    """This device's place on the axis, as an array; None without one."""
    return None if axis is None else jax.lax.axis_index(axis)


def ranks(axis, comm: str) -> int:
    """How many there are on the axis."""
    if axis is None:
        return 1
    try:
        size = jax.lax.axis_size(axis)
    except NameError:
        raise _call.argument_error(
            "there is no axis %r here: call init and step of the 1-bit family inside a shard_map or pmap over it" % axis
        ) from None
    if jax.process_count() > 1 and not comm:
        raise _call.unsupported(
            "the ranks of a program's own comm are devices of one process; register comms of your own with "
            "dsopt.jax.register_comm, and name them in `comm`"
        )
    return size


def register_comm(name: str, rank: int, comm: int) -> None:  # pylint: disable=redefined-outer-name
    """Let programs find a comm under a name, as the `comm` of FusedStep says it.

    name  any text
    rank  the rank whose comm it is
    comm  address of a dsopt_comm, which must live until no program that names it can run any more; 0 takes it out
    """
    _build.library().dsopt_jax_register_comm(name.encode(), rank, comm or None)


# XLA promises no order of custom calls that do not depend on each other, and ranks that make two exchanges in different
# orders wait for one another for ever. So each call has a result of the one before it in the same trace as an operand.
# Only weak references are kept: a traced array must not outlive its trace.
_last = weakref.WeakKeyDictionary()
_NO_TRACE = type("NoTrace", (), {})()


def previous(operands):
    """A result of the last call in the trace of these operands, or None."""
    for operand in operands:
        for result in _last.get(getattr(operand, "_trace", _NO_TRACE), ()):
            if result() is not None:
                return result()
    return None


def remember(results) -> None:
    """Note the results of a call, best first."""
    trace = getattr(results[0], "_trace", None)
    if trace is not None:
        _last[trace] = [weakref.ref(result) for result in results]
