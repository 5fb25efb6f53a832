#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Archives of inputs of the fuzz targets: corpus/TARGET.tar.xz, with an index in corpus/TARGET.txt.

corpus.py unpack TARGET FOLDER               extracts the inputs to FOLDER
corpus.py pack TARGET FOLDER PROGRAM         makes the archive and the index from the files of FOLDER
corpus.py run TARGET PROGRAM [ARGUMENT...]   runs replay_TARGET on the inputs, with further arguments, and compares its
                                             lines with the index

A line of the index is what PROGRAM --index prints for a file: its name, its size and the outcome of its calls. The
outcome of target "calls" depends on how often the compiled program allocates, so it is not compared.
"""
import io
import lzma
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

CORPUS = pathlib.Path(__file__).resolve().parent / "corpus"
UNSTABLE = {"calls"}


def unpack(target, folder):
    os.makedirs(folder, exist_ok=True)
    with tarfile.open(CORPUS / f"{target}.tar.xz") as archive:
        for member in archive:
            (pathlib.Path(folder) / os.path.basename(member.name)).write_bytes(archive.extractfile(member).read())


def index_of(program, folder, *arguments):
    """Returns the lines of the index, and what the program printed after them."""
    done = subprocess.run([program, "--index", *arguments, folder], stdout=subprocess.PIPE, encoding="utf-8",
                          errors="backslashreplace", check=False)
    if done.returncode != 0:
        print(done.stdout[-2000:])
        sys.exit(done.returncode if done.returncode > 0 else 128 - done.returncode)
    text = re.sub("0x[0-9a-f]+", "0x...", done.stdout)  # addresses
    # The size of a workspace depends on the build.
    lines = re.sub(r"has \d+ bytes, \d+ are needed", "has ... bytes, ... are needed", text).splitlines()
    return [line for line in lines if "\t" in line], [line for line in lines if "\t" not in line]


def pack(target, folder, program):
    # The same files give the same archive. The inputs repeat each other, so it has a few percent of their size.
    with tarfile.open(CORPUS / f"{target}.tar.xz", "w:xz", format=tarfile.USTAR_FORMAT,
                      preset=9 | lzma.PRESET_EXTREME) as archive:
        for path in sorted(pathlib.Path(folder).iterdir()):
            member = tarfile.TarInfo(path.name)
            content = path.read_bytes()
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    lines, _ = index_of(program, folder)
    (CORPUS / f"{target}.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def compared(target, lines):
    return [line.rpartition("\t")[0] if target in UNSTABLE else line for line in lines]


def run(target, program, *arguments):
    expected = (CORPUS / f"{target}.txt").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        unpack(target, folder)
        lines, rest = index_of(program, folder, *arguments)
    print("\n".join(rest))
    wrong = [pair for pair in zip(compared(target, lines), compared(target, expected)) if pair[0] != pair[1]]
    for line, other in wrong[:10]:
        print(f"now:   {line}\nindex: {other}")
    if wrong or len(lines) != len(expected):
        sys.exit(f"corpus/{target}.txt has {len(expected)} inputs, {len(lines)} were run, {len(wrong)} differ")


COMMANDS = {"unpack": (unpack, 2, 2), "pack": (pack, 3, 3), "run": (run, 2, 99)}

if __name__ == "__main__":
    command, least, most = COMMANDS.get(sys.argv[1] if len(sys.argv) > 1 else "", (None, 0, 0))
    if command is None or not least <= len(sys.argv) - 2 <= most:
        sys.exit(__doc__)
    command(*sys.argv[2:])
