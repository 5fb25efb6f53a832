#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ratios.py FOLDER [LIST...]: runs the benches in FOLDER (build/bench) in rounds; medians and ratios as Markdown.

First bench_steps: each rule in each precision and a probe that moves the same memory without the arithmetic. Rows whose
moments are in low precision, such as adamw_e4m3, also have the time of the step with fp32 moments divided by theirs.
Then bench_mixed: the mixed-precision step, fp32 and the original's passes.

Absolute times on a shared machine are not comparable: its bandwidth drifts by half within a minute. So a round is
short, its rows are interleaved, and ratios are formed within the round. The tables have the medians of the rounds.
Environment: ROUNDS (default 5 and 11), REPETITIONS of one step in a round (default 9), ONLY (a regular expression, of
rows like adamw/f32; those of muon are run only with it), OMP_NUM_THREADS.
"""
import json
import os
import re
import statistics
import subprocess
import sys

LISTS = ["1x67108864", "gpt2-124m", "bert-large", "resnet50", "10000x1000", "1x1048576", "1x65536"]
FORMS = ["f32", "f16", "bf16", "delta", "remainder", "random"]
FORMATS = re.compile("_(bf16|e4m3|q8)(?=/)")  # of moments
PASSES = [("BM_Probe30", "BM_Mixed/f16"), ("BM_Probe30", "BM_Mixed/bf16"), ("BM_Mixed/f16", "BM_Fp32"),
          ("BM_Mixed/bf16", "BM_Fp32"), ("BM_SevenPass", "BM_Mixed/f16"), ("BM_SevenPass", "BM_Mixed/bf16")]
ONLY = os.environ.get("ONLY", "")


def one_round(bench, name, rows):
    """Returns the median milliseconds of each row that the expression matches, interleaved in one process."""
    command = [bench, name, "--benchmark_filter=" + rows, "--benchmark_enable_random_interleaving=true",
               "--benchmark_repetitions=" + os.environ.get("REPETITIONS", "9"), "--benchmark_min_time=0.001",
               "--benchmark_format=json"]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    times = {}
    for row in json.loads(result.stdout)["benchmarks"]:
        if row.get("run_type") == "iteration":
            times.setdefault(row["name"].replace("/" + name + "/real_time", ""), []).append(row["real_time"])
    return {key: statistics.median(values) for key, values in times.items()}


def rounds(bench, name, rows, default):
    return [one_round(bench, name, rows) for _ in range(int(os.environ.get("ROUNDS", default)))]


def cases_of(bench, name):
    """Returns rule and precision of the rows of a bench on a list."""
    listed = subprocess.run([bench, name, "--benchmark_list_tests"], check=True, stdout=subprocess.PIPE,
                            universal_newlines=True).stdout
    cases = [case for case in re.findall(r"^Step/(\w+/\w+)/", listed, re.M) if re.search(ONLY, case)]
    return [case for case in cases if ONLY or not case.startswith("muon")]  # whose steps take seconds


def steps(bench, lists):
    print("| list | step | ms | probe / step | quartiles | fp32 moments / step |\n|" + " --- |" * 6)
    for name in lists:
        cases = cases_of(bench, name)
        for form in FORMS:
            selected = [case for case in cases if case.endswith("/" + form)]
            if not selected:
                continue
            results = rounds(bench, name, "/(%s)/" % "|".join(selected), 5)
            for case in selected:
                ratios = sorted(times["Probe/" + case] / times["Step/" + case] for times in results)
                low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
                fp32, to_fp32 = FORMATS.sub("", case), ""
                if fp32 != case and fp32 in selected:
                    to_fp32 = "%.2f" % statistics.median(t["Step/" + fp32] / t["Step/" + case] for t in results)
                print("| %s | %s | %.4g | %.2f | %.2f to %.2f | %s |" % (
                    name, case, statistics.median(times["Step/" + case] for times in results),
                    statistics.median(ratios), low, high, to_fp32),
                    flush=True)


def mixed(bench, lists):
    def short(row):
        return row.replace("BM_", "").replace("Mixed/", "").lower()

    print("| list | fp32 ms | f16 ms | " + " | ".join(short(a) + " / " + short(b) for a, b in PASSES) + " |")
    print("|" + " --- |" * (3 + len(PASSES)))
    for name in lists:
        results = rounds(bench, name, "Probe|Mixed/|Fp32|Seven", 11)
        cells = ["%.3f" % statistics.median(r[key] for r in results) for key in ("BM_Fp32", "BM_Mixed/f16")]
        cells += ["%.2f" % statistics.median(r[a] / r[b] for r in results) for a, b in PASSES]
        print("| " + name + " | " + " | ".join(cells) + " |", flush=True)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    lists = sys.argv[2:] or LISTS
    steps(os.path.join(sys.argv[1], "bench_steps"), lists)
    if not ONLY:
        print()
        mixed(os.path.join(sys.argv[1], "bench_mixed"), lists)


if __name__ == "__main__":
    main()
