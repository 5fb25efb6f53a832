#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_report.py SEEN RESULTS: writes the results of gpu.sh on a GPU as a Markdown page RESULTS/<gpu>.md."""
import csv
import glob
import json
import os
import re
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
import gpu_model
from lists import shapes

# Rows of bench_cuda, bytes per element, PyTorch's counterpart, and the model's name of the step.
ROWS = [
    ("Fp32", 28, "fused", "Fp32"), ("Fp32/graph", 28, None, "Fp32"), ("Chunked", 28, "foreach", None),
    ("Mixed/f16", 30, "mixed f16", "Mixed/f16"), ("Mixed/f16/graph", 30, "deepspeed f16", "Mixed/f16"),
    ("Mixed/bf16", 30, "mixed bf16", "Mixed/bf16"), ("Mixed/bf16/graph", 30, None, "Mixed/bf16"),
    ("MixedUpdate/f16", 28, None, None), ("MixedUpdate/bf16", 28, None, None), ("Pass1/f16", 2, None, None),
    ("Pass1/bf16", 2, None, None), ("Memset", 4, None, None), ("Lamb", 40, None, "Lamb"),
    ("Lamb/graph", 40, None, "Lamb"), ("Lamb/clip", 44, None, "Lamb/clip"), ("Sgd", 12, None, "Sgd"),
    ("Adagrad", 20, None, None), ("Lion", 20, None, "Lion"), ("Compressed", 17, "compress", "Compressed"),
    ("OnebitAdam", 33, None, "OnebitAdam"), ("OnebitAdam/bits", 25, None, "OnebitAdam/bits"),
    ("ZeroOneAdam/local", 24, None, None), ("OnebitLamb", 57, None, "OnebitLamb")]
PARTS = [("build", "build"), ("tests", "suite on the device"), ("unit", "unit tests on the device"),
         ("golden", "recorded cases"), ("digests", "trainings compared with the CPU's"), ("nccl", "one rank with the real NCCL"),
         ("wheel", "trainings with the wheel"), ("wheel-numpy", "short suite of the package, from the wheel"),
         ("wheel-torch", "that of dsopt.torch"), ("wheel-jax", "that of dsopt.jax")]
PROFILED = ["Fp32", "Mixed/f16", "Lamb/clip", "Compressed", "OnebitAdam"]


def text(folder, name):
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


def number(value, form="%.3f"):
    return "-" if value is None else form % value


def quotient(a, b):
    return None if not a or not b else a / b


def read_bench(path):
    """Returns the times of each row's repetitions in ms, host time per call in microseconds, and why rows were not
    timed."""
    times, host, errors = {}, {}, {}
    for row in json.loads(text(os.path.dirname(path), os.path.basename(path)))["benchmarks"]:
        if row.get("run_type") != "iteration":
            continue
        name = re.sub(r"/[^/]+/iterations:1/manual_time$", "", row["run_name"])
        if row.get("error_occurred"):
            errors[name] = row["error_message"]
            continue
        times.setdefault(name, []).append(row["real_time"])
        host.setdefault(name, []).append(row["host_us"])
    return times, host, errors


def spread(values):
    if len(values) < 4:
        return "%.3f to %.3f" % (min(values), max(values))
    low, _, high = statistics.quantiles(values, n=4)
    return "%.3f to %.3f" % (low, high)


def bench_tables(seen, machine):
    lines = []
    for path in sorted(glob.glob(os.path.join(seen, "bench.*.json"))):
        name = os.path.basename(path)[len("bench."):-len(".json")]
        times, host, errors = read_bench(path)
        torch_text = text(seen, "torch.%s.json" % name)
        peers = json.loads(torch_text) if torch_text else {"version": "none", "ms": {}}
        sizes = shapes(name)
        lines += ["### %s" % name, "",
                  "%d tensors, %d elements. PyTorch: %s." % (len(sizes), sum(sizes), peers["version"]), "",
                  "| step | ms | quartiles | copy ms | copy / step | predicted | GB/s | host µs | PyTorch ms | "
                  "PyTorch / step |", "|" + " --- |" * 10]
        for row, size, peer, step in ROWS:
            if row in errors:
                lines.append("| %s | %s |%s" % (row, errors[row], " |" * 8))
            if row not in times:
                continue
            mine = statistics.median(times[row])
            copies = times.get("Copy/%d" % size)
            copy = statistics.median(copies) if copies else None
            mode = "graph" if row.endswith("/graph") else "plain"
            predicted = gpu_model.span(gpu_model.share_of_copy(step, sizes, machine, mode), "%.2f") if step else "-"
            other = peers["ms"].get(peer) if peer else None
            lines.append("| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s |" % (
                row, number(mine), spread(times[row]), number(copy), number(quotient(copy, mine), "%.2f"),
                predicted, number(quotient(size * sum(sizes) / 1e6, mine), "%.0f"),
                number(statistics.median(host[row]), "%.0f"),
                "-" if other is None else "%.3f (%s)" % (other, peer), number(quotient(other, mine), "%.2f")))
        lines.append("")
    return lines or ["Not run.", ""]


CLOCKS = ("SM clock %s MHz", "memory clock %s MHz", "power %s W", "temperature %s °C")


def clocks_line(seen):
    """Returns nvidia-smi's values while the benches ran: smallest, median and largest."""
    columns = [[] for _ in CLOCKS]
    for row in csv.reader(text(seen, "clocks").splitlines()):
        for column, entry in zip(columns, row):
            try:
                column.append(float(entry))
            except ValueError:  # "[N/A]": this GPU, or a slice of it, does not report it
                pass
    known = [form % ("%.0f/%.0f/%.0f" % (min(values), statistics.median(values), max(values)))
             for form, values in zip(CLOCKS, columns) if values]
    if not known:
        return "Clocks and power are not known: nvidia-smi did not report them."
    return "While `bench_cuda` ran, minimum/median/maximum of %d samples: %s." % (
        max(map(len, columns)), ", ".join(known))


COUNTED = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "launch__registers_per_thread",
           "launch__grid_size")


def profile_lines(seen):
    """Returns a line per kernel of each step; with --print-units base times are ns, so bytes per time are GB/s."""
    lines = []
    for step in PROFILED:
        name = "profile.%s.csv" % step.replace("/", "-")
        rows = [line for line in text(seen, name).splitlines() if line.startswith('"')]
        kernels = {}
        for row in list(csv.DictReader(rows))[1:]:  # the first line has units
            entry = kernels.setdefault(re.sub(r"[<(].*", "", row["Kernel Name"]).strip(), [])
            try:
                entry.append([float(row[key].replace(",", "")) for key in COUNTED])
            except (KeyError, ValueError, AttributeError):
                pass  # a line that was cut when the program was killed, or a counter without a value
        for kernel, values in sorted(kernels.items()):
            if values:
                time, read, written, registers, grid = (statistics.median(column) for column in zip(*values))
                lines.append("| %s | %s | %d | %.1f | %.4g | %.4g | %s | %.0f | %.0f |" % (
                    step, kernel, len(values), time / 1e3, read / 1e6, written / 1e6,
                    number(quotient(read + written, time), "%.0f"), registers, grid))
    return lines


def profile_table(seen):
    lines = text(seen, "profile").splitlines()
    lines = lines + [""] if lines else []
    table = profile_lines(seen)
    if not table:
        return lines or ["Not run."]
    return lines + ["| step | kernel | launches | µs | MB read | MB written | GB/s | registers | grid |",
                    "|" + " --- |" * 9] + table


def main():
    seen, results = sys.argv[1:]
    name, capability, supported, runtime, _ = [part.strip() for part in text(seen, "gpu").split(",")]
    machine = "h100" if "H100" in name else "h200"
    lines = ["# %s, %s" % (name, text(seen, "date")), "",
             "Compute capability %s, driver %s for CUDA %s, CUDA toolkit %s with runtime %s. Written by `./dev gpu`."
             % (capability, text(seen, "driver"), supported, text(seen, "toolkit"), runtime), "",
             "| part | result |", "| --- | --- |"]
    for part, what in PARTS:
        lines.append("| %s | %s |" % (what, text(seen, part) or "not run"))
    for line in text(seen, "sanitizer").splitlines():
        check, colon, result = line.partition(": ")
        lines.append("| compute-sanitizer%s | %s |" % ((", " + check, result) if colon else ("", line)))
    lines += ["", "## Benches: `bench/bench_cuda`, `bench/torch_cuda.py`", "",
              "Times are device times in ms per step: medians with quartiles over rows that run in random order. "
              "\"copy\" is a copy on the device that moves as many bytes; \"predicted\" is copy / step by "
              "`bench/gpu_model.py` for an %s; host is the host time of a call." % machine.upper(), "", clocks_line(seen), ""]
    for line in text(seen, "bench").splitlines():
        lines += ["Not measured: %s." % line, ""]
    lines += bench_tables(seen, machine)
    lines += ["## Kernels on GPT-2's list, by ncu", ""] + profile_table(seen)
    path = os.path.join(results, re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".md")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print("wrote " + path)


main()
