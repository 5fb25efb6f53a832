# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the tests of dsopt.torch. Importing it exits with 77 if torch is not installed."""
import faulthandler
import os
import subprocess
import sys
import tempfile
import unittest

if not os.environ.get("DSOPT_INSTALLED"):  # otherwise the installed package
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

try:
    import torch
except ImportError as problem:
    print("skipped: torch is not installed (%s)" % problem)
    sys.exit(77)

import dsopt.torch  # noqa: E402 - found by the path above

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
NO_FUSED = "torch %s refuses fused=True on the device %s"
PAIRS = ((dsopt.torch.AdamW, torch.optim.AdamW), (dsopt.torch.Adam, torch.optim.Adam))
SHAPES = ((10, 5), (10,), (), (3, 0), (1000,))


def fused_on(device):
    """True if torch's Adam and AdamW accept fused=True for parameters on the device. Their constructors check this, and
    those of dsopt.torch call them."""
    try:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1, device=device))], fused=True)
    except (RuntimeError, TypeError):
        return False
    return True


def params_of(*shapes, dtype=torch.float32, seed=0):
    """Returns parameters with different values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_grads(*lists, seed=0, scale=1.0):
    """Sets equal gradients for the parameters of each list."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for same in zip(*lists):
        grad = torch.randn(same[0].shape, generator=generator) * scale
        for param in same:
            param.grad = grad.to(param.dtype).clone()


def step_both(ours, theirs, params, others, steps, begin=0):
    for i in range(begin, begin + steps):
        give_grads(params, others, seed=i)
        ours.step()
        theirs.step()


class TestCase(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def assert_close(self, actual, expected, **tolerance):
        torch.testing.assert_close(actual, expected, **tolerance)

    def assert_same(self, actual, expected):
        """Asserts the same bits."""
        for a, b in zip(actual, expected):
            self.assertTrue(torch.equal(a.detach(), b.detach()), "%s and %s" % (a, b))
        self.assertEqual(len(actual), len(expected))


def run_ranks(test, program, which, ranks=2, environment=None):
    """Runs `program --child WHICH RANK FILE` once per rank, with additional environment variables. If a rank fails,
    fails
    with its output. Returns the outputs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.abspath(program), "--child", which]
        every = [subprocess.Popen(command + [str(rank), os.path.join(folder, "rendezvous")], stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, text=True, env={**os.environ, **(environment or {})})
                 for rank in range(ranks)]
        said = [process.communicate(timeout=1500)[0] for process in every]
    for rank, process in enumerate(every):
        test.assertEqual(process.returncode, 0, "rank %d: %s" % (rank, said[rank]))
    return said


def run_save_and_load(test, program, saving, loading):
    """Runs the cases `save` of such a program in `saving` processes and `load` in `loading`, with one folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"DSOPT_TEST_CHECKPOINTS": folder}
        run_ranks(test, program, "save:%d" % saving, saving, environment)
        run_ranks(test, program, "load:%d" % loading, loading, environment)


def child(cases, rank, file, ranks=2):
    """Runs in such a process: calls each case with its rank, over gloo."""
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=ranks)
    for case in cases:
        print(case, flush=True)
        case(rank)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    # Skips the interpreter's shutdown: before Python 3.14 it unwinds a gloo thread that waits for the GIL to release a
    # tensor, and C++ then calls std::terminate.
    sys.stdout.flush()
    os._exit(0)


def main():
    """unittest.main that exits with 77 if no test could run."""
    program = unittest.main(exit=False, module="__main__")
    result = program.result
    sys.exit(1 if not result.wasSuccessful() else 77 if result.testsRun == len(result.skipped) else 0)
