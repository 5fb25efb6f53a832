# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by several test files."""

import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import types

import numpy as np

import dsopt

PACKAGE = pathlib.Path(dsopt.__file__).resolve().parent.parent


def arrays(*shapes, seed=0, dtype=np.float32, scale=1.0):
    rng = np.random.default_rng(seed)
    return [np.asarray(scale * rng.standard_normal(shape), dtype) for shape in shapes]


class Bfloat16:
    """An array of bfloat16 that needs no ml_dtypes: it has a name and an array interface as theirs, and its bits in
    `words`, uint16."""

    def __init__(self, values):
        bits = np.asarray(values, np.float32).reshape(-1).view(np.uint32)
        self.words = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # rounded to nearest
        self.dtype, shape = types.SimpleNamespace(name="bfloat16"), np.shape(values)
        data = (self.words.ctypes.data, False)
        self.__array_interface__ = {"version": 3, "typestr": "<V2", "shape": shape, "data": data}

    @property
    def values(self):
        """The values as float32."""
        return values_of_bfloat16(self.words)


def values_of_bfloat16(words):
    return (np.asarray(words).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def adamw(p, g, m, v, t, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, wd=0.0):
    """Takes one step of AdamW in float64, in place."""
    m += (1 - betas[0]) * (g - m)
    v += (1 - betas[1]) * (g * g - v)
    p -= lr * (m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + wd * p)


def python(program, *arguments, timeout=120, library=None, preload=False):
    """Runs a program in a new interpreter. Returns exit status, standard output and standard error."""
    environment = dict(os.environ, DSOPT_LIBRARY=library or dsopt._abi.path, PYTHONPATH=str(PACKAGE))
    if preload:  # a library loaded later has too little thread-local storage for it
        environment["LD_PRELOAD"] = environment["DSOPT_LIBRARY"]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout, done.stderr


def ranks(count, work):
    """Runs work(rank) on one thread per rank. Raises the exception of a rank, if any."""
    results, problems = [None] * count, []

    def run(rank):
        try:
            results[rank] = work(rank)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results
