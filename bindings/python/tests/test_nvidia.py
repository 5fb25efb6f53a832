# SPDX-License-Identifier: Apache-2.0
"""Where cuBLASLt and NCCL are looked for, with small libraries in folders like those of NVIDIA's packages."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from support import python

SOURCE = "const char *place(void) { return PLACE; }\nvoid cublasLtMatmul(void) {}\nvoid ncclGetUniqueId(void) {}\n"
LT13, LT12, NCCL = "libcublasLt.so.13", "libcublasLt.so.12", "libnccl.so.2"
BEGIN = """
import ctypes, os, sys
folder = sys.argv[1]
sys.path.insert(0, folder + "/site")
import dsopt
from dsopt import _nvidia

def place(file):
    try:
        library = ctypes.CDLL(file, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    library.place.restype = ctypes.c_char_p
    return library.place().decode()
"""


@unittest.skipUnless(shutil.which("cc"), "no C compiler")
class Search(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.built = pathlib.Path(temporary.name)
        cls.paths = {}
        for folder, file in (("package", LT13), ("package", LT12), ("package", NCCL), ("other", LT13), ("other", LT12),
                             ("other", NCCL)):
            path = cls.built / folder / file
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".c").write_text(SOURCE, encoding="utf-8")
            command = ["cc", "-shared", "-fPIC", "-Wl,-soname," + file, '-DPLACE="%s"' % folder]
            subprocess.run([*command, str(path.with_suffix(".c")), "-o", str(path)], check=True)

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def install(self, where, file, content="package"):
        """Copies a library, or writes a text, to a folder of NVIDIA's packages."""
        target = self.folder / "site" / "nvidia" / where / "lib" / file
        target.parent.mkdir(parents=True)
        if content is None:
            target.write_text("no library", encoding="utf-8")
        else:
            shutil.copy(self.built / content / file, target)
        # Importing a package of NVIDIA would fail.
        (target.parents[1] / "__init__.py").write_text("raise AssertionError('imported')", encoding="utf-8")
        return target

    def run_with(self, program, environment=None, folder=None):
        """Returns the output of a program in a new interpreter."""
        names = ("DSOPT_CUBLASLT_LIBRARY", "DSOPT_NCCL_LIBRARY", "LD_LIBRARY_PATH")
        before = {name: os.environ.pop(name) for name in names if name in os.environ}
        os.environ.update(environment or {})
        try:
            status, out, problem = python(BEGIN + program, str(folder or self.folder), str(self.built))
        finally:
            for name in names:
                os.environ.pop(name, None)
            os.environ.update(before)
        self.assertEqual((status, problem), (0, ""))
        return out.strip()

    LOAD = """
_nvidia.load(_nvidia.CUBLASLT)
print(place("libcublasLt.so.13"), place("libcublasLt.so.12"))
assert not [name for name in sys.modules if name.split(".")[0] in ("nvidia", "torch")]
"""

    def test_packages_are_searched_without_an_import(self):
        self.install("cu13", LT13)
        self.install("cublas", LT12)
        self.assertEqual(self.run_with(self.LOAD), "package None")

    def test_cuda_12_is_used_without_13(self):
        self.install("cublas", LT12)
        self.assertEqual(self.run_with(self.LOAD), "None package")

    def test_a_file_that_is_no_library_is_passed_over(self):
        self.install("a", LT13, None)
        self.install("b", LT13)
        self.assertEqual(self.run_with(self.LOAD), "package None")

    def test_the_copy_of_the_process_is_kept(self):
        self.install("cu13", LT13)
        for file, mode, expected in ((LT13, "0", "other None"), (LT12, "0", "None other"),
                                     (NCCL, "os.RTLD_GLOBAL", "None None")):  # the last one has the function, too
            with self.subTest(file):
                load = "ctypes.CDLL(sys.argv[2] + '/other/%s', mode=%s)\n" % (file, mode)
                self.assertEqual(self.run_with(load + self.LOAD), expected)

    def test_the_variable_comes_before_packages(self):
        self.install("cu13", LT13)
        chosen = {"DSOPT_CUBLASLT_LIBRARY": str(self.built / "other" / LT13)}
        self.assertEqual(self.run_with(self.LOAD, chosen), "None None")

    def test_no_package_is_no_error(self):
        for text in ("", "sys.modules['nvidia'] = None", "sys.modules['nvidia'] = type(sys)('nvidia')\n"
                     "del sys.modules['nvidia'].__spec__"):
            with self.subTest(text):
                program = text + "\n_nvidia.load(_nvidia.CUBLASLT)\nprint(place('libcublasLt.so.13'))"
                self.assertEqual(self.run_with(program), "None")
        (self.folder / "site").mkdir()
        (self.folder / "site" / "nvidia.py").write_text("", encoding="utf-8")
        self.assertEqual(self.run_with(self.LOAD), "None None")

    def test_id_of_nccl_loads_its_package(self):
        self.install("nccl", NCCL)
        program = """
for kind in ("local", "nccl"):
    try:
        dsopt.Comm.unique_id(kind)
    except dsopt.Error:  # a build without CUDA, or a library that lacks functions
        pass
    print(place("libnccl.so.2"))
"""
        self.assertEqual(self.run_with(program), "None\npackage")

    def test_import_and_build_info_load_nothing(self):
        self.install("cu13", LT13)
        self.install("nccl", NCCL)
        program = """
dsopt.build_info()
import numpy
w = numpy.ones((4, 4), numpy.float32)
dsopt.Optimizer({"w": w}, dsopt.Muon()).step([w / 2])
print(place("libcublasLt.so.13"), place("libnccl.so.2"))
"""
        self.assertEqual(self.run_with(program), "None None")

    WHERE = "print(_nvidia.where(_nvidia.CUBLASLT, '13'))"

    def test_where_names_file_and_reason(self):
        package = self.install("cu13", LT13)
        other = str(self.built / "other" / LT13)
        for program, environment, folder, expected in (
            ("", {}, None, "%s, of NVIDIA's packages" % package),
            ("ctypes.CDLL(%r)\n" % other, {}, None, "%s, which the process had loaded" % other),
            ("", {"DSOPT_CUBLASLT_LIBRARY": other}, None, "%s, named by DSOPT_CUBLASLT_LIBRARY" % other),
            ("", {"DSOPT_CUBLASLT_LIBRARY": "here.so"}, None, "here.so: not an absolute path"),
            ("", {"LD_LIBRARY_PATH": str(self.built / "other")}, "/nowhere", "%s, found by the dynamic linker" % other),
        ):
            with self.subTest(expected):
                self.assertEqual(self.run_with(program + self.WHERE, environment, folder), expected)
        missing = self.run_with(self.WHERE.replace("'13'", "'99'"), None, "/nowhere")
        self.assertEqual(missing, "not found")


if __name__ == "__main__":
    unittest.main()
