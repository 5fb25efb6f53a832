# SPDX-License-Identifier: Apache-2.0
"""Lists of tensors for the benches: the lists of bench/shapes by name, and NxM for N tensors of M elements."""
import os
import re

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes")


def shapes(name):
    """Returns element counts."""
    if "x" in name and name.replace("x", "").isdigit():
        count, numel = name.split("x")
        return [int(numel)] * int(count)
    with open(os.path.join(FOLDER, name + ".csv"), encoding="utf-8") as file:
        return [int(line.rsplit(",", 1)[1]) for line in file.read().splitlines()[1:]]


def matrices(name):
    """Returns rows and columns of the matrices of a list of bench/shapes: the tensors of two dimensions of its numbered
    layers, which embeddings and heads are not."""
    with open(os.path.join(FOLDER, name + ".csv"), encoding="utf-8") as file:
        lines = [line.split(",") for line in file.read().splitlines()[1:]]
    dims = [tuple(map(int, shape.split("x"))) for tensor, shape, _ in lines if re.search(r"[._]\d+\.", tensor)]
    return [each for each in dims if len(each) == 2]
