# SPDX-License-Identifier: Apache-2.0
"""Runs the conformance cases that dsopt.tf offers. Its AdamW has the formula of Keras."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf

from dsopt.tf import AdamW, Muon


class Generator:
    def __init__(self, seed):
        self.x = seed

    def array(self, shape):
        values = np.empty(shape, np.float32)
        for i in range(values.size):
            self.x = (self.x * 1664525 + 1013904223) % 2**32
            values.flat[i] = (self.x >> 8) * 2.0**-24 - 0.5
        return values


def train(optimizer, variables, gradients, steps):
    for _ in range(steps):
        optimizer.apply_gradients([(tf.constant(gradients.array(v.shape)), v) for v in variables])


def fnv(arrays):
    digest = 0xCBF29CE484222325
    for byte in b"".join(np.asarray(array).tobytes() for array in arrays):
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


def muon():
    """Keras has one learning rate: that of AdamW is half of it. The decay of Keras is multiplied by the learning rate
    alone, so 0.125 is 0.25 times the rate of AdamW. The momentum of Keras is 1 / (1 - momentum) times the engine's."""
    start = Generator(777)
    shapes = {"qkv": (48, 16), "w": (20, 17), "bias": (130,)}
    variables = [tf.Variable(start.array(shape), name=name) for name, shape in shapes.items()]
    optimizer = Muon(0.015625, momentum=0.9375, weight_decay=0.125, adam_lr_ratio=0.5, adam_weight_decay=0.125,
                     epsilon=0.0, rms_rate=None, adjust="original", rows_are_inputs=False, blocks={"qkv": (16, 16)})
    train(optimizer, variables, Generator(888), 5)
    qkv, w, bias = (momentum.numpy() for momentum in optimizer.momentums)
    return [*(variable.numpy() for variable in variables), qkv / 16, w / 16, bias, optimizer.adam_velocities[2].numpy()]


def uncorrected():
    start = Generator(12345)
    variables = [tf.Variable(tf.cast(start.array((size,)), tf.bfloat16), name=name)
                 for name, size in (("a", 1), ("b", 7), ("c", 4099))]
    optimizer = AdamW(0.015625, weight_decay=0.125, epsilon=0.001, clipvalue=0.25, exp_avg_format="e4m3",
                      exp_avg_sq_format="q8", masters="remainder")
    train(optimizer, variables, Generator(1000), 10)
    state = {variable.name: variable.numpy() for variable in optimizer.variables}
    kinds = ("remainder", "momentum", "momentum_scale", "velocity", "velocity_scale")
    return [*(variable.numpy() for variable in variables),
            *(state["%s_0_%s" % (name, kind)] for kind in kinds for name in "abc")]


for case in (muon, uncorrected):
    print("tf %s %016x" % (case.__name__, fnv(case())))
