# SPDX-License-Identifier: Apache-2.0
import concurrent.futures
import gc
import os
import signal
import sys
import threading
import unittest
import weakref

import numpy as np

import dsopt
from support import arrays


def large(seed=0):
    return arrays((200000,), seed=seed)


def stepped(**options):
    weights = large()
    opt = dsopt.Optimizer(weights, dsopt.AdamW(lr=0.1), context=dsopt.Context(**options))
    opt.step(large(1))
    return weights[0]


class ParallelFor(unittest.TestCase):
    def test_any_pool_gives_same_bits(self):
        expected = stepped(threads=1)
        with concurrent.futures.ThreadPoolExecutor(3) as pool:

            def run(n, body):
                others = [pool.submit(body, i) for i in range(1, n)]
                body(0)
                for other in others:
                    other.result()

            np.testing.assert_array_equal(stepped(threads=4, parallel_for=run), expected)

        def backwards(n, body):
            for i in reversed(range(n)):
                body(i)

        np.testing.assert_array_equal(stepped(threads=4, parallel_for=backwards), expected)

    def test_exceptions_of_the_hook_reach_the_caller(self):
        class Unusual(BaseException):
            pass

        for kind in (RuntimeError, KeyboardInterrupt, SystemExit, Unusual):

            def run(n, body):
                body(0)
                raise kind("the pool is down")

            opt = dsopt.Optimizer(large(), dsopt.AdamW(), context=dsopt.Context(threads=4, parallel_for=run))
            with self.assertRaisesRegex(kind, "the pool is down") as caught:
                opt.step(large(1))
            self.assertIsInstance(caught.exception.__cause__, dsopt.StateError)
            self.assertEqual(caught.exception.__cause__.name, "DSOPT_ERR_HOOK")

    def test_interrupt_in_a_piece_reaches_the_caller(self):
        """Control-C while a piece runs. The interpreter raises the exception in the main thread, between two bytecode
        instructions."""

        def run(n, body):
            signal.raise_signal(signal.SIGINT)
            for i in range(n):
                body(i)

        # A shell starts background commands with SIGINT ignored, and Python keeps that.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
        opt = dsopt.Optimizer(large(), dsopt.AdamW(), context=dsopt.Context(threads=4, parallel_for=run))
        with self.assertRaises(KeyboardInterrupt):
            opt.step(large(1))

    def test_interrupts_do_not_split_a_collective(self):
        """A call that returns has completed its collective, whenever control-C came, also before the collective."""

        class Slow:
            completed = 0

            def all_reduce(self, *_):
                for _ in range(50):
                    pass
                self.completed += 1

        armed, stop = [], threading.Event()
        self.addCleanup(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(1e-5)  # interrupts arrive at more places

        def handle(*_):
            if armed:
                armed.clear()
                raise KeyboardInterrupt

        def interrupt():
            while not stop.wait(0.0002):
                os.kill(os.getpid(), signal.SIGINT)

        context, gradient = dsopt.Context(), arrays((5,))
        previous = signal.signal(signal.SIGINT, handle)
        thread = threading.Thread(target=interrupt)
        thread.start()
        interrupted = rounds = 0
        try:
            while rounds < 2000 or interrupted == 0:
                rounds += 1
                slow = Slow()
                comm = dsopt.Comm.table(context, slow, 0, 2)
                try:
                    armed.append(None)
                    comm.all_reduce(gradient)
                    armed.clear()
                except KeyboardInterrupt:
                    interrupted += 1
                    continue
                self.assertEqual(slow.completed, 1)
        finally:
            stop.set()
            thread.join()
            signal.signal(signal.SIGINT, previous)

    def test_pools_that_omit_or_repeat_pieces_are_detected(self):
        kept = []

        def late(n, body):
            kept.append(body)

        def beyond(n, body):
            for i in range(n + 1):
                body(i)

        def twice(n, body):
            for i in [0, *range(n)]:
                body(i)

        for pool, kind, text in (
            (late, dsopt.StateError, "HOOK"),
            (beyond, IndexError, "pieces"),
            (twice, dsopt.StateError, "HOOK"),
        ):
            opt = dsopt.Optimizer(large(), dsopt.AdamW(), context=dsopt.Context(threads=4, parallel_for=pool))
            with self.assertRaisesRegex(kind, text):
                opt.step(large(1))
        with self.assertRaisesRegex(dsopt.StateError, "after parallel_for had returned"):
            kept[0](0)

    def test_nested_step_raises(self):
        def run(n, body):
            opt.step(grads)

        grads = large(1)
        opt = dsopt.Optimizer(large(), dsopt.AdamW(), context=dsopt.Context(threads=4, parallel_for=run))
        with self.assertRaisesRegex(dsopt.StateError, "hook"):
            opt.step(grads)

    def test_library_keeps_references_to_hooks(self):
        class Pool:
            def __call__(self, n, body):
                for i in range(n):
                    body(i)

        pool = Pool()
        watch = weakref.ref(pool)
        opt = dsopt.Optimizer(large(), dsopt.AdamW(), context=dsopt.Context(threads=4, parallel_for=pool))
        del pool
        opt.context.close()
        gc.collect()
        opt.step(large(1))
        view = opt.state["p0.exp_avg"]
        del opt
        gc.collect()
        self.assertTrue(view.any())
        del view
        gc.collect()
        self.assertIsNone(watch())


class Log(unittest.TestCase):
    def test_log_receives_messages(self):
        messages = []
        context = dsopt.Context(log=lambda level, text: messages.append((level, text)), log_level=4)
        opt = dsopt.Optimizer(large(), dsopt.AdamW(), context=context, nonfinite="skip")
        opt.step([np.full(200000, np.nan, np.float32)])
        opt.report()
        self.assertTrue(messages)
        self.assertTrue(all(level in (1, 2, 3, 4) and text for level, text in messages), messages)

    def test_exception_of_the_log_reaches_the_caller(self):
        def write(level, text):
            raise OSError("no space for logs")

        with self.assertRaisesRegex(OSError, "no space for logs"):
            dsopt.Context(log=write, log_level=4)

    def test_hook_cannot_close_an_object_in_use(self):
        """An object that is in a call cannot be closed; an object to which the library has a reference can."""

        def run(n, body):
            closing.close()
            for i in range(n):
                body(i)

        context = dsopt.Context(threads=2, parallel_for=run)
        (w,), (g,) = np.ones((1, 300000), np.float32), np.ones((1, 300000), np.float32)
        opt = closing = dsopt.Optimizer([w], dsopt.AdamW(), context=context)
        with self.assertRaises(dsopt.StateError):
            opt.step([g])
        state = opt.init_state([w])
        with self.assertRaises(dsopt.StateError):
            opt.apply([w], [g], state)
        self.assertFalse(opt.closed)
        closing = context
        opt.step([g])  # the optimizer keeps a reference to the context
        self.assertTrue(context.closed)
        context = closing = dsopt.Context(threads=2, parallel_for=run)
        with self.assertRaisesRegex(dsopt.StateError, "Context is in a call"):
            dsopt.zero([w], context=context)
        self.assertFalse(context.closed)

    def test_memory_outlives_pieces_after_parallel_for(self):
        """The memory of a call remains valid while a piece runs, even if the hook did not wait for its threads."""
        refused = []

        def piece(body, i):
            try:
                body(i)
            except dsopt.StateError as problem:
                refused.append(problem)

        def run(n, body):
            for i in range(n):
                threading.Thread(target=piece, args=(body, i)).start()

        context = dsopt.Context(threads=4, parallel_for=run)
        done = 0
        for _ in range(100):
            opt = dsopt.Optimizer([np.ones(100000, np.float32)], dsopt.AdamW(), context=context)
            try:
                opt.step([np.ones(100000, np.float32)])
                done += 1
            except dsopt.StateError as problem:
                self.assertIn("parallel_for", str(problem))
        self.assertTrue(done or refused)


if __name__ == "__main__":
    unittest.main()
