# SPDX-License-Identifier: Apache-2.0
"""Times a step inside jax.jit and optax.adamw: medians of alternating rounds, in one process.

    PYTHONPATH=bindings/python DSOPT_LIBRARY=.../libdsopt.so python bindings/python/bench_jax.py
        [--shapes FILE.csv] [--rounds N]

A row is `name, milliseconds per step, optax / name`. Donated: the step may overwrite parameters and state.
"""

import argparse
import csv
import os
import re
import statistics
import time

import jax
import jax.numpy as jnp
import optax

import dsopt.jax

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = os.path.join(HERE, "..", "..", "bench", "shapes", "gpt2-124m.csv")
SETTINGS = {"weight_decay": 0.1, "b1": 0.9, "b2": 0.95}


def read_shapes(path):
    """Returns the shapes of a model: rows of name, dimensions joined by "x", number of elements."""
    with open(path, encoding="utf-8", newline="") as file:
        return [tuple(map(int, row["shape"].split("x"))) for row in csv.DictReader(file)]


def by_transformation(tx):
    """Returns step and state of an optax transformation."""

    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init


def by_fused(optimizer):
    """Returns step and state of a FusedStep."""

    def step(params, grads, state):
        params, state, _ = optimizer.step(params, grads, state)
        return params, state

    return step, optimizer.init


def contestants():
    """Returns the optimizers; optax is the first, with which the others are compared."""
    return {
        "optax.adamw": by_transformation(optax.adamw(1e-3, **SETTINGS)),
        "dsopt.jax.FusedStep": by_fused(dsopt.jax.FusedStep("adamw", 1e-3, **SETTINGS)),
        "dsopt.jax.adamw": by_transformation(dsopt.jax.adamw(1e-3, **SETTINGS)),
    }


def backward(param):
    """Returns a gradient like a dense layer's, from a product, which XLA cannot fuse into the update."""
    return param * 0.01 if param.ndim < 2 else (param[:, :8] * 0.01) @ param[:8, :]


class Runner:
    """One compiled optimizer with its arrays."""

    def __init__(self, step, init, shapes, donate, loops=1, inside=False):
        def run(params, grads, state):
            if inside:
                grads = jax.tree.map(backward, params)
            if loops == 1:
                return step(params, grads, state)
            return jax.lax.fori_loop(0, loops, lambda _, carry: step(carry[0], grads, carry[1]), (params, state))

        self.loops = loops
        self.params = {"p%03d" % i: jnp.full(shape, 0.02) for i, shape in enumerate(shapes)}
        self.grads = {} if inside else jax.tree.map(lambda p: p * 0.01, self.params)
        self.state = jax.jit(init)(self.params)
        self.run = (
            jax.jit(run, donate_argnums=(0, 2) if donate else ()).lower(self.params, self.grads, self.state).compile()
        )
        self.once()

    def once(self):
        start = time.perf_counter()
        self.params, self.state = jax.block_until_ready(self.run(self.params, self.grads, self.state))
        return (time.perf_counter() - start) / self.loops


def copies_in(text):
    """Counts the copies of a program. A copy at the end of a fusion is not counted: it writes the array."""
    computations = text.split("\n\n")
    fused = set(re.findall(r"kind=k\w+, calls=(%[\w.-]+)", text))
    return sum(part.count(" copy(") for part in computations if part.split(" ")[0] not in fused)


def compare(title, shapes, rounds, donate, loops=1, inside=False):
    """Prints a row for each optimizer."""
    runners = {name: Runner(step, init, shapes, donate, loops, inside) for name, (step, init) in contestants().items()}
    times = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            times[name].append(runner.once())
    print(
        "%s: %d tensors, %d elements"
        % (title, len(shapes), sum(p.size for p in runners["optax.adamw"].params.values()))
    )
    base = statistics.median(times["optax.adamw"])
    for name, values in times.items():
        copies = copies_in(runners[name].run.as_text())
        print(
            "  %-20s %10.3f ms  %5.2f  %d copies"
            % (name, statistics.median(values) * 1e3, base / statistics.median(values), copies),
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    shapes = read_shapes(arguments.shapes)
    name = os.path.basename(arguments.shapes)
    compare(name + ", donated", shapes, arguments.rounds, True)
    compare(name + ", not donated", shapes, arguments.rounds, False)
    compare(name + ", donated, gradients made inside", shapes, arguments.rounds, True, inside=True)
    compare("148 x 4, one step per call, donated", [(4,)] * 148, 10 * arguments.rounds, True)
    compare("148 x 4, in lax.fori_loop, donated", [(4,)] * 148, arguments.rounds, True, loops=200)


if __name__ == "__main__":
    main()
