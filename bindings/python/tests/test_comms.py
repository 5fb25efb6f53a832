# SPDX-License-Identifier: Apache-2.0
import ctypes
import gc
import sys
import threading
import unittest
from unittest import mock

import numpy as np

import dsopt
from dsopt import _abi as abi
from dsopt import _comm
from support import arrays, ranks


TYPES = {abi.DSOPT_DTYPE_F32: np.float32, abi.DSOPT_DTYPE_F64: np.float64, abi.DSOPT_DTYPE_I32: np.int32}


class Exchange:
    """Collectives between threads, in Python."""

    def __init__(self, count):
        self.rows, self.barrier = [None] * count, threading.Barrier(count, timeout=60)

    def gather(self, rank, row):
        self.rows[rank] = row
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        return rows


class Rank:
    def __init__(self, exchange, rank):
        self.exchange, self.rank, self.ended, self.sums = exchange, rank, 0, []

    def all_reduce(self, send, recv, count, dtype, op, stream):
        kind = np.dtype(TYPES[dtype])
        mine = np.frombuffer(ctypes.string_at(send, count * kind.itemsize), kind)
        rows = np.stack(self.exchange.gather(self.rank, mine))
        result = rows.max(0) if op == abi.DSOPT_OP_MAX else rows.sum(0, dtype=kind)
        ctypes.memmove(recv, result.tobytes(), result.nbytes)

    def all_gather(self, send, recv, size, stream):
        for i, row in enumerate(self.exchange.gather(self.rank, ctypes.string_at(send, size))):
            ctypes.memmove(recv + i * size, row, size)

    def reduce_scatter(self, send, recv, count, dtype, op, stream):
        self.sums.append((count, dtype, op))
        mine = np.frombuffer(ctypes.string_at(send, 4 * count * len(self.exchange.rows)), np.float32)
        rows = np.stack(self.exchange.gather(self.rank, mine)).reshape(len(self.exchange.rows), -1, count)
        ctypes.memmove(recv, rows[::-1, self.rank].sum(0).tobytes(), 4 * count)

    def destroy(self):
        self.ended += 1


class Comms(unittest.TestCase):
    def test_single_rank_comm_reduces(self):
        comm = dsopt.Comm.single(dsopt.Context())
        (x,) = arrays((5,))
        before = x.copy()
        comm.all_reduce([x], "mean")
        np.testing.assert_array_equal(x, before)
        self.assertEqual((comm.rank, comm.ranks, comm.query().status), (0, 1, 0))

    def test_table_gives_same_bits_as_local(self):
        def work(comm, rank):
            x = arrays((5,), (0,), (300,), seed=rank)
            comm.all_reduce([*x, None], "mean")
            y = arrays((5,), seed=rank)
            comm.all_reduce(y, "max")
            opt = dsopt.Optimizer(
                arrays((130,), (7,)),
                dsopt.OnebitAdam(lr=0.1, freeze_step=2),
                data=comm,
                averages=True,
                context=comm.context,
            )
            stages = []
            for t in range(5):
                stages.append(opt.next_reduction())
                opt.step(arrays((130,), (7,), seed=10 * t + rank))
            self.assertEqual(stages, ["full"] * 2 + ["compressed"] * 3)
            self.assertGreater(comm.query().bytes_sent, 0)
            return [*x, *y, *opt.params.values()]

        id = dsopt.Comm.unique_id()
        exchange = Exchange(2)
        peers = [Rank(exchange, rank) for rank in range(2)]
        local = ranks(2, lambda rank: work(dsopt.Comm.local(dsopt.Context(), id, rank, 2), rank))
        table = ranks(2, lambda rank: work(dsopt.Comm.table(dsopt.Context(), peers[rank], rank, 2), rank))
        for a, b, c in zip(local[0], local[1], table[0]):
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)
        np.testing.assert_allclose(local[0][0], (arrays((5,), seed=0)[0] + arrays((5,), seed=1)[0]) / 2, rtol=1e-6)
        gc.collect()
        self.assertEqual([peer.ended for peer in peers], [1, 1])
        self.assertFalse([entry for entry in _comm._tables.values() if entry[1] in peers])

    def test_provider_sums_are_those_of_reduce_scatter(self):
        exchange = Exchange(2)
        peers = [Rank(exchange, rank) for rank in range(2)]

        def work(rank):
            comm = dsopt.Comm.table(dsopt.Context(), peers[rank], rank, 2, provider_sums=True)
            w = np.array([1, 2], np.float32)
            opt = dsopt.Optimizer({"w": w}, dsopt.Sgd(lr=1), context=comm.context, data=comm, averages=True)
            opt.step([np.array([0.5 + rank, 1], np.float32)])
            self.assertEqual(comm.query().calls_of[abi.DSOPT_COLLECTIVE_REDUCE_SCATTER], 1)
            self.assertEqual([entry[1:] for entry in peers[rank].sums], [(abi.DSOPT_DTYPE_F32, abi.DSOPT_OP_SUM)])
            return w

        for w in ranks(2, work):
            np.testing.assert_array_equal(w, [0, 1])

    def test_provider_sums_need_reduce_scatter(self):
        class Without:
            def all_reduce(self, *_):
                pass

        with self.assertRaisesRegex(dsopt.UnsupportedError, "reduce_scatter is NULL"):
            dsopt.Comm.table(dsopt.Context(), Without(), 0, 2, provider_sums=True)

    def test_compressed_all_reduce_feeds_errors_back(self):
        id = dsopt.Comm.unique_id()

        def work(rank):
            comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2)
            x = arrays((100,), (3,), seed=rank)
            exchange = dsopt.CompressedAllReduce(comm, x)
            total = np.zeros(100, np.float32)
            for _ in range(60):
                x = arrays((100,), (3,), seed=rank)
                exchange(x)
                total += x[0]
            self.assertTrue(exchange.worker_error.any())
            with self.assertRaisesRegex(dsopt.ArgumentError, "sizes"):
                exchange(x[:1])
            return total / 60

        one, two = ranks(2, work)
        np.testing.assert_array_equal(one, two)
        mean = (arrays((100,), seed=0)[0] + arrays((100,), seed=1)[0]) / 2
        self.assertLess(
            abs(one - mean).mean(), 0.1 * abs(mean).mean()
        )  # with error feedback the mean is correct in the end

    def test_exceptions_of_collectives_reach_the_caller(self):
        class Broken(Rank):
            def all_reduce(self, *arguments):
                raise self.problem

        for problem, status in (
            (ValueError("the cable is cut"), "DSOPT_ERR_COMM"),
            (KeyboardInterrupt(), "DSOPT_ERR_COMM"),
            (TimeoutError("too late"), "DSOPT_ERR_TIMEOUT"),
        ):
            broken = Broken(None, 0)
            broken.problem = problem
            comm = dsopt.Comm.table(dsopt.Context(), broken, 0, 2)
            with self.assertRaises(type(problem)) as caught:
                comm.all_reduce(arrays((5,)))
            self.assertIs(caught.exception, problem)
            self.assertEqual(caught.exception.__cause__.name, status)
            with self.assertRaises(ConnectionError) as caught:  # the comm is unusable
                comm.all_reduce(arrays((5,)))
            self.assertEqual(caught.exception.name, status)
            self.assertIsInstance(caught.exception, dsopt.Error)
        number = Broken(None, 0)
        number.all_reduce = lambda *arguments: 99
        with self.assertRaisesRegex(dsopt.CommError, "99"):
            dsopt.Comm.table(dsopt.Context(), number, 0, 2).all_reduce(arrays((5,)))

    def test_exception_of_destroy_is_unraisable(self):
        class FailingDestroy(Rank):
            def destroy(self):
                raise ValueError("not now")

        with mock.patch.object(sys, "unraisablehook") as hook:
            dsopt.Comm.table(dsopt.Context(), FailingDestroy(None, 0), 0, 2).close()
        self.assertEqual(str(hook.call_args[0][0].exc_value), "not now")

    def test_abort_and_time_out_end_a_blocked_call(self):
        id = dsopt.Comm.unique_id()

        def work(rank):
            comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2, timeout_ms=300)
            if rank:
                return comm
            with self.assertRaises(TimeoutError) as caught:
                comm.all_reduce(arrays((5,)))
            self.assertIsInstance(caught.exception, dsopt.TimeoutError)
            return comm

        comms = ranks(2, work)
        comm = dsopt.Comm.single(comms[0].context)
        comm.abort()
        with self.assertRaisesRegex(dsopt.CommError, "ABORTED"):
            comm.all_reduce(arrays((5,)))

    def test_rejects_invalid_arguments(self):
        context, peer = dsopt.Context(), Rank(None, 0)
        for make, text in (
            (lambda: dsopt.Comm.local(context, "id", 0, 2), "id"),
            (lambda: dsopt.Comm.local(context, b"short", 0, 2), "id"),
            (lambda: dsopt.Comm.local(context, dsopt.Comm.unique_id(), 2, 2), "rank"),
            (lambda: dsopt.Comm.unique_id("mpi"), "kind.*'local'"),
            (lambda: dsopt.Comm.native(context, "mpi", 1), "kind"),
            (lambda: dsopt.Comm.table(context, object(), 0, 2), "all_reduce"),
            (lambda: dsopt.Comm.table(context, peer, 5, 2), "rank"),
            (lambda: dsopt.Comm.table(context, peer, 0, 2, memory="disk"), "memory"),
            (lambda: dsopt.Comm.single(context).all_reduce([np.zeros(3)]), r"arrays\[0\].*float64"),
            (lambda: dsopt.Comm.single(context).all_reduce([], "product"), "op.*'mean'"),
        ):
            with self.assertRaisesRegex(dsopt.ArgumentError, text):
                make()
        with self.assertRaisesRegex(dsopt.UnsupportedError, "DSOPT_COMM_FLAG_SYNCHRONIZE needs a CUDA context"):
            dsopt.Comm.table(context, peer, 0, 2, memory="backend", synchronize=True)
        self.assertFalse([entry for entry in _comm._tables.values() if entry[1] is peer])
        with self.assertRaises(dsopt.Error):  # no device, no library
            dsopt.Comm.nccl(context, b"\0" * 128, 0, 1)

    def test_rejects_invalid_results_of_collectives(self):
        class Collectives:
            def __init__(self, result):
                self.result = result

            def all_reduce(self, *_):
                return self.result

            def abort(self):
                raise ValueError("in abort")

        for result in (2**32, "x", object()):  # the first one would be 0, success, in C
            comm = dsopt.Comm.table(dsopt.Context(), Collectives(result), 0, 2)
            with self.assertRaisesRegex(dsopt.ArgumentError, "what a collective returned"):
                comm.all_reduce([np.ones(3, np.float32)])
        ignored = []
        with mock.patch.object(sys, "unraisablehook", ignored.append):
            dsopt.Comm.table(dsopt.Context(), Collectives(None), 0, 2).abort()
        self.assertIn("in abort", [str(one.exc_value) for one in ignored])

    def test_collective_cannot_close_its_comm(self):
        class Closes:
            def all_reduce(self, *_):
                comm.close()

        comm = dsopt.Comm.table(dsopt.Context(), Closes(), 0, 2)
        with self.assertRaisesRegex(dsopt.StateError, "Comm is in a call"):
            comm.all_reduce([np.ones(3, np.float32)])
        self.assertFalse(comm.closed)
        comm.close()


if __name__ == "__main__":
    unittest.main()
