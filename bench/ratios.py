#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ratios.py BENCH [LIST...]: run bench_mixed interleaved and print medians and ratios as a Markdown table.

Absolute times of a shared machine are worth little; rows of one run, taken in turns, compare well.
Environment: REPETITIONS (default 15), MIN_TIME in seconds a repetition (default 0.2), OMP_NUM_THREADS.
"""
import json
import os
import statistics
import subprocess
import sys

LISTS = ["gpt2-124m", "bert-large", "resnet50", "10000x1000", "1x1048576"]


def run(bench, name):
    command = [bench, name, "--benchmark_enable_random_interleaving=true",
               "--benchmark_repetitions=" + os.environ.get("REPETITIONS", "15"),
               "--benchmark_min_time=" + os.environ.get("MIN_TIME", "0.2"), "--benchmark_format=json"]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    times = {}
    for row in json.loads(result.stdout)["benchmarks"]:
        if row.get("run_type") == "iteration":
            times.setdefault(row["name"].replace("/" + name + "/real_time", ""), []).append(row["real_time"])
    return {key: statistics.median(values) for key, values in times.items()}


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    print("| list | fp32 step ms | probe 30 B ms | fp16 step ms | bf16 step ms | probe / fp16 | probe / bf16 "
          "| fp16 / fp32 | seven passes / fp16 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in sys.argv[2:] or LISTS:
        t = run(sys.argv[1], name)
        f16, bf16, probe, fp32 = t["BM_Mixed/f16"], t["BM_Mixed/bf16"], t["BM_Probe30"], t["BM_Fp32"]
        print("| %s | %.3f | %.3f | %.3f | %.3f | %.2f | %.2f | %.2f | %.2f |" %
              (name, fp32, probe, f16, bf16, probe / f16, probe / bf16, f16 / fp32, t["BM_SevenPass"] / f16), flush=True)


if __name__ == "__main__":
    main()
