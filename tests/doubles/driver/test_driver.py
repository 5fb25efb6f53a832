# SPDX-License-Identifier: Apache-2.0
"""test_driver.py LIBDSOPT.SO DOUBLE DSOPT-INFO: what a build with CUDA says without a driver or a device, and what
starts the driver. DOUBLE is the test double of libcuda.so.1 (fake_driver.c). In a child of a process that has started
the driver CUDA cannot be used, so an import, a class or an error text must not start it."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

LIBRARY, DOUBLE, INFO = map(os.path.realpath, sys.argv[1:4])
PACKAGE = pathlib.Path(__file__).resolve().parents[3] / "bindings" / "python"

QUIET = """
import array, os, sys, tempfile
import dsopt

def matrix():
    return memoryview(array.array("f", [0.5] * 16)).cast("B").cast("f", (4, 4))

class OnDevice:  # an array in memory of a device
    __cuda_array_interface__ = {"version": 3, "shape": (4,), "typestr": "<f4", "data": (4096, False), "strides": None}

for group in (dsopt.AdamW(), dsopt.Muon()):
    opt = dsopt.Optimizer({"w": matrix()}, group, context=dsopt.Context(threads=2), max_norm=1)
    opt.step([matrix()])
    opt.report()
    with tempfile.TemporaryDirectory() as folder:
        opt.save(folder + "/run.safetensors")
        opt.load(folder + "/run.safetensors")
context = dsopt.Context()
comm = dsopt.Comm.single(context)
dsopt.Comm.local(context, dsopt.Comm.unique_id(), 0, 1)
dsopt.norm([matrix()])
dsopt.version()
refused = 0
for call in (lambda: opt.step([OnDevice()]), lambda: dsopt.Optimizer({"w": OnDevice()}, dsopt.AdamW()),
             lambda: dsopt.norm([OnDevice()]), lambda: dsopt.Context("gpu"),
             lambda: dsopt.Comm.nccl(context, bytes(128), 0, 1), lambda: dsopt.Comm.native(context, "nccl", 4096)):
    try:
        call()
    except dsopt.Error as problem:
        refused += bool(str(problem) and repr(problem))
assert refused == 6, refused
try:
    import torch
    assert torch.version.cuda is None, "it may use the driver itself"
except (ImportError, AssertionError):
    pass
else:
    import dsopt.torch
    p = torch.nn.Parameter(torch.ones(4, 4))
    for kind in (dsopt.torch.AdamW, dsopt.torch.FusedAdam, dsopt.torch.Muon):
        opt = kind([p])
        p.grad = torch.ones(4, 4)
        opt.step()
pid = os.fork()
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


class Driver(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        (self.folder / "libcuda.so.1").symlink_to(DOUBLE)
        self.trace = self.folder / "trace"

    def run_with(self, *command, version="13000", init="0"):
        """Runs a program with this driver. Returns its output, and the calls of the driver."""
        if self.trace.exists():
            self.trace.unlink()
        environment = dict(os.environ, LD_LIBRARY_PATH=str(self.folder), DSOPT_LIBRARY=LIBRARY, PYTHONPATH=str(PACKAGE),
                           PYTHONDONTWRITEBYTECODE="1", FAKE_DRIVER_VERSION=version, FAKE_DRIVER_INIT=init,
                           FAKE_DRIVER_TRACE=str(self.trace), DSOPT_CUBLASLT_LIBRARY=LIBRARY)  # that of CUDA is large
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True, timeout=120)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout, self.trace.read_text().split("\n")[:-1] if self.trace.exists() else []

    def python(self, program, **driver):
        return self.run_with(sys.executable, "-c", program, **driver)

    def test_imports_steps_and_errors_do_not_load_the_driver(self):
        self.assertEqual(self.python(QUIET), ("", []))
        for option in ("--version", "--help"):
            self.assertEqual(self.run_with(INFO, option)[1], [])

    def test_descriptions_start_the_driver(self):
        for command in ((INFO,), (INFO, "--json"), (sys.executable, "-m", "dsopt"),
                        (sys.executable, "-c", "import dsopt; dsopt.build_info()")):
            with self.subTest(command=command):
                out, calls = self.run_with(*command, init="100")
                self.assertEqual(calls[0], "load")
                self.assertIn("cuInit", calls)
                if command[-1] in ("--json", "dsopt"):
                    self.assertEqual(json.loads(out)["cuda"], "no device")

    def reasons(self, **driver):
        """Returns the reason in the error of a context, after checking that all descriptions have it."""
        out, _ = self.python("import dsopt\ntry:\n    dsopt.Context('cuda')\nexcept dsopt.MissingError as problem:\n"
                             "    print(problem)", **driver)
        begin, end = "no CUDA device can be used here: ", " (DSOPT_ERR_MISSING)\n"
        self.assertTrue(out.startswith(begin), out)
        reason = out[len(begin):].replace(end, "").rstrip("\n")
        self.assertEqual(json.loads(self.run_with(INFO, "--json", **driver)[0])["cuda_reason"], reason)
        self.assertEqual(json.loads(self.run_with(sys.executable, "-m", "dsopt", **driver)[0])["cuda_reason"], reason)
        self.assertIn("device cuda:0    " + begin + reason, self.run_with(INFO, **driver)[0])
        return reason

    def test_reasons_why_there_is_no_device(self):
        info = json.loads(self.run_with(INFO, "--json")[0])
        major = int(info["cuda_runtime"].partition(".")[0])
        for version, init, words in (
            ((major - 1) * 1000 + 80, 0, ("the driver is for CUDA %d.8, and this build needs one for CUDA %d.0 or later"
                                          % (major - 1, major), "update the driver", "12.5 or later")),
            (13000, 100, ("no CUDA-capable device is detected",)),
            (13000, 803, ("driver",)),
            (13000, 804, ("forward compatibility",)),
            (13000, 999, ("unknown error",)),
        ):
            with self.subTest(version=version, init=init):
                reason = self.reasons(version=str(version), init=str(init))
                for word in words:
                    self.assertIn(word, reason)

    def test_no_driver_is_not_an_old_driver(self):
        (self.folder / "libcuda.so.1").unlink()
        (self.folder / "libcuda.so.1").write_bytes(b"")  # hides the driver of this machine
        self.assertIn("there is no CUDA driver (libcuda.so.1)", self.reasons())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
