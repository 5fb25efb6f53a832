# SPDX-License-Identifier: Apache-2.0
import unittest

from support import python


class Processes(unittest.TestCase):
    def runs(self, program, expected, timeout=300):
        status, said, complaint = python(program, timeout=timeout)
        self.assertEqual((status, said, complaint), (0, expected, ""))

    def test_child_can_use_only_new_objects(self):
        """In the child, the parent's objects report the fork; new objects work, also on threads."""
        self.runs(
            """
            import multiprocessing
            import numpy as np
            import dsopt

            size = 300000
            comm = dsopt.Comm.single(dsopt.Context())
            opt = dsopt.Optimizer([np.ones(size, np.float32)], dsopt.AdamW())
            grads = [np.ones(size, np.float32)]
            opt.step(grads)

            def child(connection):
                said = []
                for call in (lambda: opt.step(grads), opt.report,
                             lambda: dsopt.Optimizer([], dsopt.AdamW(), context=comm.context),
                             comm.query):
                    try:
                        call()
                        said.append("no error")
                    except dsopt.StateError as problem:
                        said.append(problem.name)
                w = np.ones(size, np.float32)
                mine = dsopt.Optimizer([w], dsopt.AdamW())
                mine.step(grads)
                said.append(bool((w == opt.params["p0"]).all()))
                connection.send(said)

            here, there = multiprocessing.Pipe()
            process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
            process.start()
            print(here.recv())
            process.join()
            print(process.exitcode)
            opt.step(grads)
            """,
            "['DSOPT_ERR_FORKED', 'DSOPT_ERR_FORKED', 'DSOPT_ERR_FORKED', 'DSOPT_ERR_FORKED', True]\n0\n",
        )

    def test_interpreter_exits_while_a_step_runs(self):
        """Daemon threads are inside a call, with and without Python callbacks, when the interpreter exits."""
        for pool in ("None", "lambda n, body: [body(i) for i in range(n)]"):
            for _ in range(3):
                self.runs(
                    """
                    import threading
                    import numpy as np
                    import dsopt

                    started = threading.Semaphore(0)

                    def train():
                        context = dsopt.Context(threads=3, parallel_for=%s)
                        opt = dsopt.Optimizer([np.ones(3000000, np.float32)], dsopt.AdamW(), context=context)
                        grads = [np.ones(3000000, np.float32)]
                        opt.step(grads)
                        started.release()
                        try:
                            while True:
                                opt.step(grads)
                        except dsopt.StateError:
                            pass  # the interpreter shuts down

                    for _ in range(3):
                        threading.Thread(target=train, daemon=True).start()
                    for _ in range(3):
                        started.acquire()
                    print("the end")
                    """ % pool,
                    "the end\n",
                )

    def test_objects_may_be_destroyed_in_any_order_at_exit(self):
        """The interpreter destroys globals, cycles and atexit functions in an unspecified order."""
        self.runs(
            """
            import atexit
            import sys
            import numpy as np
            import dsopt

            class Comm:
                def all_reduce(self, *arguments):
                    raise RuntimeError
                def destroy(self):
                    pass

            context = dsopt.Context(parallel_for=lambda n, body: [body(i) for i in range(n)])
            scaler = dsopt.Scaler(context)
            comm = dsopt.Comm.table(context, Comm(), 0, 1)
            weights = [np.ones(100000, np.float32)]
            opt = dsopt.Optimizer(weights, dsopt.AdamW(), context=context, scaler=scaler, data=comm)
            opt.cycle = opt
            view = opt.state["p0.exp_avg"]
            sys.kept = opt, view
            plain = dsopt.Optimizer([np.ones(4, np.float32)], dsopt.AdamW())
            atexit.register(lambda: (plain.step([np.ones(4, np.float32)]), print(plain.calls)))
            opt.step([np.ones(100000, np.float32)])
            """,
            "1\n",
        )

    def test_finalizers_run_in_threads(self):
        self.runs(
            """
            import threading
            import gc
            import numpy as np
            import dsopt

            def churn():
                for _ in range(200):
                    opt = dsopt.Optimizer([np.ones(50, np.float32)], dsopt.AdamW(), context=dsopt.Context())
                    opt.cycle = opt
                    opt.step([np.ones(50, np.float32)])

            threads = [threading.Thread(target=churn) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            gc.collect()
            print("done")
            """,
            "done\n",
        )


if __name__ == "__main__":
    unittest.main()
