# SPDX-License-Identifier: Apache-2.0
"""test_info.py DSOPT-INFO dsopt.json MAN-PAGE: tests that dsopt-info is consistent and agrees with the header."""

import json
import os
import re
import shutil
import subprocess
import sys

program, description, page = sys.argv[1:]
abi = json.load(open(description, encoding="utf-8"))


def run(*arguments, expected=0, environment=None, stdout=subprocess.PIPE):
    done = subprocess.run(
        [program, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        env=dict(os.environ, **(environment or {})),
    )
    if done.returncode != expected:
        sys.exit(
            f"dsopt-info {' '.join(arguments)} ended with {done.returncode}, not {expected}:\n"
            f"{done.stdout}{done.stderr}"
        )
    return done.stdout, done.stderr


def expect(condition, text):
    if not condition:
        sys.exit(f"dsopt-info: {text}")


said = json.loads(run("--json")[0])
expect(said["version"] == abi["version"] and said["abi"] == abi["abi_version"], f"--json says {said}")
expect(run("--version")[0] == f"dsopt {abi['version']}\n", "--version differs from dsopt.json")

text = run()[0]
report = dict(
    re.split(r"\s{2,}|(?<=:\d) ", line, maxsplit=1) for line in text.splitlines() if "  " in line or "device" in line
)
expect(("cuda_reason" in said) == (said["cuda"] != "cuda"), f"--json says {said}")
for name, value in (
    ("version", said["version"]),
    ("ABI", str(said["abi"])),
    ("compiler", said["compiler"]),
    ("backends", " ".join(said["backends"])),
    ("CUDA", said["cuda"]),
    ("CUDA reason", said.get("cuda_reason")),
    ("code for", said.get("cuda_code")),
    ("in use", said["isa"]),
    ("threads", said["threads"]),
    ("comms", " ".join(said["comms"])),
    ("checkpoint", str(said["checkpoint_format"])),
    ("device cpu:0", "usable"),
):
    expect(report.get(name) == value, f"{name} is {report.get(name)!r}, and --json says {value!r}:\n{text}")
expect(
    said["isa"] in report["processor has"].split(),
    f"{said['isa']} is in use, the processor has {report['processor has']}",
)
expect(int(report["processors"]) >= 1, text)
for name in ("system", "cuBLASLt", "NCCL", "HCCL", "MPI"):
    expect(report.get(name), f"nothing about {name}:\n{text}")
expect(("cuda_code" in said) == (report["cuBLASLt"] != "needs CUDA"), f"cuBLASLt is {report['cuBLASLt']}")
launcher = shutil.which("mpiexec") or "not in PATH"
expect(report["MPI"].endswith(f"mpiexec is {launcher}"), f"MPI is {report['MPI']}, and mpiexec is {launcher}")
expect(
    ("nccl" in said["comms"]) or report["NCCL"] == said["nccl"], f"NCCL is {report['NCCL']}, --json says {said['nccl']}"
)
cuda = report.get("device cuda:0")
expect(cuda, f"nothing about CUDA's devices:\n{text}")
expect("cuda" in said["backends"] or cuda != "usable", f"no CUDA backend, and its device is usable:\n{text}")

lowered = dict(environment={"DSOPT_ISA": "generic"})
expect(re.search(r"^in use +generic$", run(**lowered)[0], re.M), "DSOPT_ISA=generic has no effect")

options = re.findall(r"--\w+", run("--help")[0])
expect({"--json", "--version", "--help"} <= set(options), "--help does not name every option")
manual = open(page, encoding="utf-8").read()
for option in set(options):
    expect(f"Fl -{option[2:]}" in manual, f"the man page has no {option}")
for arguments in (["--jsn"], ["--json", "--json"], [""]):
    out, errors = run(*arguments, expected=2)
    expect(not out and "usage:" in errors, f"{arguments}: {out}{errors}")
if os.path.exists("/dev/full"):
    with open("/dev/full", "w", encoding="utf-8") as full:
        run("--json", expected=1, stdout=full)
if shutil.which("mandoc"):
    lint = subprocess.run(["mandoc", "-Tlint", "-Wwarning", page], stdout=subprocess.PIPE, text=True, check=False)
    expect(lint.returncode == 0, lint.stdout)
