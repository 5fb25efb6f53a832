# SPDX-License-Identifier: Apache-2.0
"""readme.py links ROOT
readme.py programs|mpi|cuda README caller_c.c INCLUDE LIBRARY COMPILER... [-- RUNNER...]
readme.py same TEXT PROGRAM
readme.py skip REASON

links: every relative link of *.md and docs/*.md leads to a file, and to a heading if it names one.
same: the first C program of a text is a file that other tests compile and run.
programs, mpi, cuda: every C program of README.md compiles without a warning and prints what the README says. Which programs those are
follows from what they include. The first program must be caller_c.c, which other tests use too.
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
    print("readme:", text)
    sys.exit(1)


def links(root):
    """All files are looked at; a heading's anchor is made as GitHub makes it."""

    def anchors(page):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}

    wrong = []
    for page in [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                wrong.append(f"{page.name}: {link}: there is no such file")
            elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
                wrong.append(f"{page.name}: {link}: there is no such heading")
    if wrong:
        fail("\n".join(wrong))


def programs(readme):
    """Source and expected output of each, in order. The output is the ```text block that follows."""
    found = []
    for language, body in re.findall(r"^```(c|text)\n(.*?)^```$", readme, flags=re.M | re.S):
        if language == "c":
            found.append([body, None])
        elif found and found[-1][1] is None:
            found[-1][1] = body
    for source, expected in found:
        if expected is None:
            fail("a program is not followed by what it prints:\n" + source[:200])
    return found


def kind_of(source):
    return "mpi" if "dsopt_mpi.h" in source else "cuda" if "cuda_runtime.h" in source else "programs"


def run(command, folder, environment=None):
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          universal_newlines=True, timeout=120)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def check(kind, readme, caller, include, library, compiler, runner):
    found = programs(pathlib.Path(readme).read_text())
    if found[0][0] != pathlib.Path(caller).read_text():
        fail("the first program in it is not caller_c.c")
    mine = [program for program in found if kind_of(program[0]) == kind]
    if not mine:
        fail(f"it has no program of the kind '{kind}'")
    include, library = (os.path.abspath(path) for path in (include, library))
    environment = dict(os.environ, LD_LIBRARY_PATH=os.path.dirname(library), OMPI_ALLOW_RUN_AS_ROOT="1",
                       OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                       OMPI_MCA_btl="self,vader", OMPI_MCA_btl_vader_single_copy_mechanism="none")
    for number, (source, expected) in enumerate(mine):
        with tempfile.TemporaryDirectory() as folder:
            name = "program.cc" if any(flag.startswith("-std=c++") for flag in compiler) else "program.c"
            pathlib.Path(folder, name).write_text(source)
            threads = ["-pthread"] if "pthread.h" in source else []
            run([*compiler, *FLAGS, *threads, name, "-o", "program", "-I" + include, library, "-lm"], folder)
            said = run([*runner, "./program"], folder, environment)
        if said != expected:
            fail(f"program {number + 1} of the kind '{kind}' printed\n{said}and not\n{expected}")
    print(f"{len(mine)} programs print what the README says")


def main():
    kind, *rest = sys.argv[1:]
    if kind == "links":
        return links(pathlib.Path(rest[0]))
    if kind == "same":
        text, program = (pathlib.Path(path) for path in rest)
        found = re.search(r"^```c\n(.*?)^```$", text.read_text(), flags=re.M | re.S)
        if found is None or found[1] != program.read_text():
            fail(f"the C program in {text.name} is not {program.name}")
        return None
    if kind == "skip":
        print("readme: skipped,", " ".join(rest))
        sys.exit(SKIPPED)
    readme, caller, include, library, *commands = rest
    split = commands.index("--") if "--" in commands else len(commands)
    compiler, runner = commands[:split], commands[split + 1:]
    if shutil.which(compiler[0]) is None:
        fail(f"there is no {compiler[0]}")
    return check(kind, readme, caller, include, library, compiler, runner)


main()
