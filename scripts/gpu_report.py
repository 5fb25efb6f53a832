#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""gpu_report.py SEEN RESULTS: what gpu.sh saw on a GPU, as a Markdown page RESULTS/<gpu>.md."""
import json
import os
import re
import sys

ROWS = [("Fp32", 28, "fused"), ("Mixed/f16", 30, "mixed f16"), ("Mixed/bf16", 30, "mixed bf16"), ("MixedUpdate/f16", 28, None),
        ("Lamb", 40, None), ("Compressed", 17, None), ("OnebitAdam", 33, None), ("OnebitAdam/bits", 25, None),
        ("ZeroOneAdam/local", 24, None), ("OnebitLamb", 57, None)]  # of bench_cuda, bytes an element, and PyTorch's counterpart


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


def bench_table(seen):
    bench, torch = text(seen, "bench.json"), text(seen, "torch.json")
    if not bench:
        return ["Not run."]
    times, host = {}, {}
    for row in json.loads(bench)["benchmarks"]:
        if row.get("run_type") == "iteration" and not row.get("error_occurred"):
            name = row["name"].replace("BM_", "").replace("/manual_time", "")
            times[name], host[name] = row["real_time"], row.get("host_us")
    peers = json.loads(torch) if torch else {"version": "none", "ms": {}}
    lists = []
    for name in times:
        if name.rsplit("/", 1)[1] not in lists:
            lists.append(name.rsplit("/", 1)[1])
    lines = ["PyTorch: %s. Times are of the device, ms a step; \"copy\" is a copy on the device that moves as many bytes; host is what "
             "a call takes." % peers["version"], "",
             "| list | step | ms | copy ms | copy / step | host µs | torch ms | torch / step | torch foreach ms |",
             "|" + " --- |" * 9]
    for shape in lists:
        for row, size, peer in ROWS:
            step, copy = times.get(row + "/" + shape), times.get("Copy/%d/%s" % (size, shape))
            other = peers["ms"].get("%s/%s" % (peer, shape)) if peer else None
            foreach = peers["ms"].get("foreach/" + shape) if row == "Fp32" else None
            lines.append("| %s | %s | %s | %s | %s | %s | %s | %s | %s |" % (
                shape, row, number(step), number(copy), number(quotient(copy, step), "%.2f"),
                number(host.get(row + "/" + shape), "%.0f"), number(other), number(quotient(other, step), "%.2f"),
                number(foreach)))
    return lines


def main():
    seen, results = sys.argv[1:]
    name, driver, capability = [part.strip() for part in text(seen, "gpu").split(",")]
    lines = ["# %s, %s" % (name, text(seen, "date")), "",
             "Compute capability %s, driver %s, CUDA toolkit %s. Written by `./dev gpu`." % (
                 capability, driver, text(seen, "toolkit")), "",
             "## Suite on the device", "", text(seen, "tests") or "Not run.", "",
             "## compute-sanitizer on the small suite", ""]
    lines += ["- " + line for line in text(seen, "sanitizer").splitlines()] or ["Not run."]
    lines += ["", "## Benches: `build-gpu/bench/bench_cuda`, `bench/torch_cuda.py`", ""] + bench_table(seen)
    path = os.path.join(results, re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".md")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print("wrote " + path)


main()
