# SPDX-License-Identifier: Apache-2.0
"""example.py PROGRAM.c INCLUDE LIBRARY COMPILER... [-- RUNNER...]
example.py skip REASON

PROGRAM.c must compile without warnings and print what the comment at its end says:

    // Prints:
    // 2.00 -3.00 1.00
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SKIPPED = 77
FLAGS = ["-O1", "-Wall", "-Wextra", "-Werror"]


def fail(text):
    print("example:", text)
    sys.exit(1)


def run(command, folder, environment=None):
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=120)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def check(program, include, library, compiler, runner):
    source = program.read_text()
    expected = re.search(r"^// Prints[^\n]*:\n((?:// [^\n]+\n)+)\Z", source, flags=re.M)
    if expected is None:
        fail(f"{program.name} does not end with a comment of what it prints")
    expected = re.sub(r"^// ", "", expected[1], flags=re.M)
    include, library = (os.path.abspath(path) for path in (include, library))
    environment = dict(os.environ, LD_LIBRARY_PATH=os.path.dirname(library), OMPI_ALLOW_RUN_AS_ROOT="1",
                       OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                       OMPI_MCA_btl="self,vader", OMPI_MCA_btl_vader_single_copy_mechanism="none")
    with tempfile.TemporaryDirectory() as folder:
        name = "program.cc" if any(flag.startswith("-std=c++") for flag in compiler) else "program.c"
        pathlib.Path(folder, name).write_text(source)
        threads = ["-pthread"] if "pthread.h" in source else []
        run([*compiler, *FLAGS, *threads, name, "-o", "program", "-I" + include, library, "-lm"], folder)
        printed = run([*runner, "./program"], folder, environment)
    if printed != expected:
        fail(f"{program.name} printed\n{printed}and not\n{expected}")


def main():
    if sys.argv[1] == "skip":
        print("example: skipped,", " ".join(sys.argv[2:]))
        sys.exit(SKIPPED)
    program, include, library, *commands = sys.argv[1:]
    split = commands.index("--") if "--" in commands else len(commands)
    compiler, runner = commands[:split], commands[split + 1:]
    if shutil.which(compiler[0]) is None:
        fail(f"there is no {compiler[0]}")
    check(pathlib.Path(program), include, library, compiler, runner)


main()
