# SPDX-License-Identifier: Apache-2.0
"""bench_tf.py [CALL_COST] [SHAPES.CSV]: compares the time of a step of dsopt.tf.AdamW and keras.optimizers.AdamW.

Two models: 148 variables of 4 elements, where only the cost of a call matters, and the shapes of a file (GPT-2's).
Steps of the two optimizers alternate; medians are printed. CALL_COST is the program bench/call_cost, which times the
same step from C; - omits it.
"""
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

import dsopt.tf  # noqa: E402


def shapes_of(path):
    with open(path, encoding="utf-8") as file:
        rows = [line.strip().split(",") for line in file][1:]
    return [[int(extent) for extent in row[1].split("x")] for row in rows]


def stepper(make, shapes, graph):
    params = [tf.Variable(tf.ones(shape)) for shape in shapes]
    grads = [tf.fill(shape, 1e-3) for shape in shapes]
    optimizer = make(1e-3)
    optimizer.build(params)

    def step():
        optimizer.apply(grads)

    return tf.function(step) if graph else step


def medians(steppers, rounds):
    times = [[] for _ in steppers]
    for step in steppers:
        for _ in range(3):
            step()
    for _ in range(rounds):
        for kept, step in zip(times, steppers):
            begin = time.perf_counter()
            step()
            kept.append((time.perf_counter() - begin) * 1e6)
    return [statistics.median(kept) for kept in times]


def main(call_cost=None, shapes=os.path.join(HERE, "..", "..", "bench", "shapes", "gpt2-124m.csv")):
    if call_cost and call_cost != "-":
        print(subprocess.run([call_cost], check=True, text=True, stdout=subprocess.PIPE).stdout.strip())
    kinds = (dsopt.tf.AdamW, keras.optimizers.AdamW)
    for name, model, rounds in (("148 x 4", [[4]] * 148, 200), (os.path.basename(shapes), shapes_of(shapes), 15)):
        for graph in (True, False):
            steppers = [stepper(kind, model, graph) for kind in kinds]
            ours, theirs = medians(steppers, rounds if graph else max(rounds // 4, 5))
            print("%s, %s: dsopt %.0f us, keras %.0f us, ratio %.2f"
                  % (name, "tf.function" if graph else "eager", ours, theirs, theirs / ours), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
