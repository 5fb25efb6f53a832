#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ratios.py BENCH [LIST...]: run bench_mixed in rounds and print medians and ratios as a Markdown table.

Absolute times of a shared machine are worth little, and its bandwidth drifts by half within a minute. So a round is
short, its rows are taken in turns, and ratios are formed within it; the table has the median of the rounds.
Environment: ROUNDS (default 11), REPETITIONS of one step in a round (default 9), OMP_NUM_THREADS.
"""
import json
import os
import statistics
import subprocess
import sys

LISTS = ["gpt2-124m", "bert-large", "resnet50", "10000x1000", "1x1048576"]
RATIOS = [("BM_Probe30", "BM_Mixed/f16"), ("BM_Probe30", "BM_Mixed/bf16"), ("BM_Mixed/f16", "BM_Fp32"),
          ("BM_Mixed/bf16", "BM_Fp32"), ("BM_SevenPass", "BM_Mixed/f16"), ("BM_SevenPass", "BM_Mixed/bf16")]


def one_round(bench, name):
    command = [bench, name, "--benchmark_filter=Probe|Mixed/|Fp32|Seven",
               "--benchmark_enable_random_interleaving=true",
               "--benchmark_repetitions=" + os.environ.get("REPETITIONS", "9"), "--benchmark_min_time=0.001",
               "--benchmark_format=json"]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    times = {}
    for row in json.loads(result.stdout)["benchmarks"]:
        if row.get("run_type") == "iteration":
            times.setdefault(row["name"].replace("/" + name + "/real_time", ""), []).append(row["real_time"])
    return {key: statistics.median(values) for key, values in times.items()}


def short(name):
    return name.replace("BM_", "").replace("Mixed/", "").lower()


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("| list | fp32 ms | f16 ms | " + " | ".join(short(a) + " / " + short(b) for a, b in RATIOS) + " |")
    print("|" + " --- |" * (3 + len(RATIOS)))
    for name in sys.argv[2:] or LISTS:
        rounds = [one_round(sys.argv[1], name) for _ in range(int(os.environ.get("ROUNDS", "11")))]
        cells = ["%.3f" % statistics.median(r[key] for r in rounds) for key in ("BM_Fp32", "BM_Mixed/f16")]
        cells += ["%.2f" % statistics.median(r[a] / r[b] for r in rounds) for a, b in RATIOS]
        print("| " + name + " | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
