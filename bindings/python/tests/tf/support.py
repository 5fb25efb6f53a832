# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests: a small model and its data, variables with known contents, the formula in double precision."""
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf

BATCHES = 8


def data(batches=BATCHES, size=32):
    random = np.random.RandomState(3)
    x = random.randn(batches * size, 20).astype("float32")
    return x, (x[:, 0] * x[:, 1] > 0).astype("int32") + (x[:, 2] > 0.5)


def make_model(optimizer, seed=1, **compile_options):
    """Returns a model with the same weights for the same seed. It is smooth, so that a last bit cannot move a sample
    across a kink."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(48, "tanh"), keras.layers.Dense(32, "tanh"),
                              keras.layers.Dense(3, dtype="float32")])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compile_options)
    return model


def fit(model, epochs=5, **options):
    return model.fit(*data(), epochs=epochs, batch_size=32, shuffle=False, verbose=0, **options).history["loss"]


def weights(model_or_variables):
    variables = getattr(model_or_variables, "trainable_variables", model_or_variables)
    return [np.array(variable.numpy()) for variable in variables]


def distance(a, b):
    """Returns the largest difference of two lists of arrays, relative to the largest element of each array."""
    return max(float(np.abs(x.astype("float64") - y).max() / max(np.abs(y).max(), 1e-30)) for x, y in zip(a, b))


def same(a, b):
    return len(a) == len(b) and all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b))


def variables(*shapes, dtype="float32", seed=5):
    random = np.random.RandomState(seed)
    return [tf.Variable(tf.cast(random.randn(*shape), dtype), name="w%d" % i) for i, shape in enumerate(shapes)]


def gradients(like, step, scale=1.0):
    """Returns gradients of magnitudes from 1e-9 to 1, where eps matters."""
    random = np.random.RandomState(100 + step)
    return [tf.cast(scale * random.randn(*v.shape) * 10.0 ** random.uniform(-9, 0, v.shape), v.dtype) for v in like]


class Reference:
    """Keras' AdamW, in double precision."""

    def __init__(self, params, lr=0.01, beta_1=0.9, beta_2=0.999, epsilon=1e-7, decay=0.0):
        self.p = [p.numpy().astype("float64") for p in params]
        self.m, self.v = ([np.zeros_like(p) for p in self.p] for _ in range(2))
        self.lr, self.beta_1, self.beta_2, self.epsilon, self.decay, self.t = lr, beta_1, beta_2, epsilon, decay, 0

    def step(self, grads):
        self.t += 1
        alpha = self.lr * np.sqrt(1 - self.beta_2**self.t) / (1 - self.beta_1**self.t)
        for i, g in enumerate(grads):
            g = np.asarray(g, "float64")
            self.m[i] += (g - self.m[i]) * (1 - self.beta_1)
            self.v[i] += (g * g - self.v[i]) * (1 - self.beta_2)
            self.p[i] -= self.p[i] * self.decay * self.lr + alpha * self.m[i] / (np.sqrt(self.v[i]) + self.epsilon)
