# SPDX-License-Identifier: Apache-2.0
"""Why weights differ from Keras': the operation is identified by replacing it; the rest is feedback of the model."""
import unittest

import keras
import numpy as np
import tensorflow as tf

import dsopt.tf

BETA_1, BETA_2, EPSILON, DECAY, LR = 0.9, 0.999, 1e-7, 0.004, 0.01
KERAS, DSOPT = keras.optimizers.AdamW, dsopt.tf.AdamW


class Arithmetic:
    """Keras' AdamW in `dtype`, operation by operation, with the bias correction in `correction`."""

    def __init__(self, dtype, correction):
        self.dtype, self.correction = dtype, correction

    def __call__(self, learning_rate):
        self.lr, self.t = learning_rate, 0
        return self

    def build(self, variables):
        self.variables = variables
        self.p = [v.numpy().astype(self.dtype) for v in variables]
        self.m, self.v = ([np.zeros_like(p) for p in self.p] for _ in range(2))

    def alpha(self):
        power = [tf.pow(tf.constant(beta, self.correction), tf.constant(self.t, self.correction)).numpy()
                 for beta in (BETA_1, BETA_2)]
        lr = np.dtype(self.correction).type(self.lr)
        return (lr * np.sqrt(1 - power[1]) / (1 - power[0])).astype(self.dtype)

    def apply(self, grads):
        self.t += 1
        alpha, number = self.alpha(), np.dtype(self.dtype).type
        for i, g in enumerate(grads):
            g = g.numpy().astype(self.dtype)
            self.p[i] = self.p[i] - self.p[i] * number(DECAY) * number(self.lr)
            self.m[i] = self.m[i] + (g - self.m[i]) * number(1 - BETA_1)
            self.v[i] = self.v[i] + (g * g - self.v[i]) * number(1 - BETA_2)
            self.p[i] = self.p[i] - self.m[i] * alpha / (np.sqrt(self.v[i]) + number(EPSILON))
            self.variables[i].assign(self.p[i].astype("float32"))


IN_DOUBLE = Arithmetic("float64", "float64")


def train(make, gradients=None, learning_rate=LR, steps=24):
    """Returns weights and gradients of a model in mixed_bfloat16, from its gradients or from the passed ones."""
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(64, "relu"),
                              keras.layers.BatchNormalization(), keras.layers.Dense(2, dtype="float32")])
    keras.mixed_precision.set_global_policy("float32")
    random = np.random.RandomState(0)
    x = random.randn(512, 16).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype("int32")
    optimizer, variables = make(learning_rate), model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def backward(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        return tape.gradient(loss, variables)

    used = []
    for step in range(steps):
        batch = slice(64 * step % 512, 64 * step % 512 + 64)
        used.append(gradients[step] if gradients else backward(x[batch], y[batch]))
        optimizer.apply(used[-1])
    return [v.numpy() for v in variables], used


def worst(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b))


class MixedBfloat16(unittest.TestCase):
    def test_bias_correction_makes_the_difference_from_keras(self):
        """With equal gradients. 1 - beta_2^t in fp32 has an error of 1e-5 in the first steps."""
        theirs, gradients = train(KERAS)
        ours, exact = train(DSOPT, gradients)[0], train(IN_DOUBLE, gradients)[0]
        self.assertLess(worst(train(Arithmetic("float32", "float32"), gradients)[0], theirs), 1e-7)
        corrected = train(Arithmetic("float32", "float64"), gradients)[0]
        self.assertLess(1.5 * worst(corrected, ours), worst(corrected, theirs))
        self.assertLess(worst(ours, theirs), 5e-6)
        self.assertLess(2 * worst(ours, exact), worst(theirs, exact))

    def test_model_in_bfloat16_amplifies_last_bits(self):
        """Keras differs from itself by as much if the learning rate differs by 1e-5, a thousand times the difference of
        the
        optimizers: if a sum changes its sign, the gradient of a relu switches on or off."""
        theirs, gradients = train(KERAS)
        shares = [sign * share for share in (1e-6, 5e-6, 1e-5, 2e-5) for sign in (1, -1)]
        chaos = max(worst(train(KERAS, learning_rate=LR * (1 + share))[0], theirs) for share in shares)
        self.assertGreater(chaos, 10 * worst(train(DSOPT, gradients)[0], theirs))
        self.assertLess(worst(train(DSOPT)[0], theirs), 5 * chaos)


if __name__ == "__main__":
    unittest.main()
