# SPDX-License-Identifier: Apache-2.0
"""Why 16-bit parameters and moments differ from optax: each operation of optax is reproduced, and then replaced.

optax computes in the dtype of the parameter, or of the moment, and rounds after each operation. The engine converts to
fp32, and rounds each result once."""

import unittest

import support  # noqa: F401 - first, it sets up the devices  pylint: disable=unused-import

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp
import numpy as np
import optax

import dsopt.jax

B1, B2, EPS, DECAY = 0.9, 0.999, 1e-8, 1e-4


def f32(x):
    return np.asarray(x).astype(np.float32)


def bf16(x):
    """Returns x rounded to bfloat16, as float32."""
    return np.asarray(x).astype(jnp.bfloat16).astype(np.float32)


def corrections(t):
    """Returns optax's bias corrections, in fp32."""
    count, one = jnp.int32(t), jnp.float32(1)
    return [f32(optax.tree.bias_correction(one, beta, count)) ** -1 for beta in (B1, B2)]


def moment(beta, old, new, rounds, coefficients):
    return rounds(rounds(coefficients(1 - beta) * new) + rounds(coefficients(beta) * old))


def optax_steps(p, grads, lr, coefficients=bf16, products=bf16):
    """optax.adamw on bfloat16. `coefficients` and `products` are the roundings in the moments."""
    p, m, v = f32(p), 0 * f32(p), 0 * f32(p)
    for t, g in enumerate(map(f32, grads), 1):
        m = bf16(moment(B1, m, g, products, coefficients))
        v = bf16(moment(B2, v, products(g * g), products, coefficients))
        c1, c2 = map(bf16, corrections(t))
        update = bf16(bf16(m / c1) / bf16(bf16(np.sqrt(bf16(v / c2))) + bf16(EPS)))
        p = add(p, update, lr)
    return p


def dsopt_steps(p, grads, lr):
    """dsopt.jax.adamw on bfloat16: moments and direction are computed in fp32 and rounded once."""
    p, m, v = f32(p), 0 * f32(p), 0 * f32(p)
    a1, a2 = f32(1 - B1), f32(1 - B2)
    for t, g in enumerate(map(f32, grads), 1):
        m, v = f32(B1) * m + a1 * g, f32(B2) * v + (a2 * g) * g
        c1, c2 = corrections(t)
        root = np.sqrt(c2)
        direction = bf16((root / c1) * (m / (np.sqrt(v) + f32(EPS) * root)))
        m, v = bf16(m), bf16(v)
        p = add(p, direction, lr)
    return p


def add(p, update, lr):
    """The rest of the chain, which is optax's in both: decay, learning rate and sum, each rounded."""
    update = bf16(update + bf16(bf16(DECAY) * p))
    return bf16(p + bf16(bf16(-lr) * update))


def double_steps(p, grads, lr, dtype=np.float64):
    """AdamW in double, with weights stored in `dtype`."""
    p = np.asarray(p).astype(np.float64)
    m = v = 0 * p
    for t, g in enumerate(grads, 1):
        g = np.asarray(g).astype(np.float64)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        p = p - lr * (m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + DECAY * p)
        p = p.astype(dtype).astype(np.float64)
    return p


def run(tx, params, grads, jit=True):
    def step(params, grads, state):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step, state = jax.jit(step) if jit else step, tx.init(params)
    for each in grads:
        params, state = step(params, each, state)
    return params


def rms(a, b):
    return float(np.sqrt(np.mean((np.asarray(a).astype(np.float64) - np.asarray(b).astype(np.float64)) ** 2)))


def problem(steps, dtype, n=4000):
    """Returns weights, and gradients that do not depend on the weights."""
    random = np.random.RandomState(0)
    mean = 0.3 * random.randn(n)
    grads = [jnp.asarray(0.01 * (mean + random.randn(n)), dtype) for _ in range(steps)]
    return jnp.asarray(0.1 * random.randn(n), dtype), grads


class Bfloat16Parameters(unittest.TestCase):
    LR = 3e-3

    def test_operations_of_optax_are_reproduced(self):
        params, grads = problem(10, jnp.bfloat16)
        theirs = run(optax.adamw(self.LR), params, grads, jit=False)
        np.testing.assert_array_equal(f32(theirs), optax_steps(params, grads, self.LR))

    def test_operations_of_dsopt_are_reproduced(self):
        params, grads = problem(10, jnp.bfloat16)
        ours = run(dsopt.jax.adamw(self.LR), params, grads, jit=False)
        np.testing.assert_array_equal(f32(ours), dsopt_steps(params, grads, self.LR))

    def test_moments_in_bfloat16_make_the_difference(self):
        """With products and sums of the moments in fp32, optax is close to dsopt."""
        params, grads = problem(200, jnp.bfloat16)
        ours, theirs = (f32(run(make(self.LR), params, grads)) for make in (dsopt.jax.adamw, optax.adamw))
        exact = double_steps(params, grads, self.LR, jnp.bfloat16)
        coefficients = optax_steps(params, grads, self.LR, coefficients=f32)
        moments = optax_steps(params, grads, self.LR, coefficients=f32, products=f32)
        self.assertGreater(rms(ours, theirs), 2e-3)
        self.assertLess(rms(coefficients, ours), 0.8 * rms(theirs, ours))
        self.assertLess(rms(moments, ours), 0.25 * rms(theirs, ours))
        self.assertLess(rms(ours, exact), 0.4 * rms(theirs, exact))

    def test_second_moment_of_optax_only_grows(self):
        """0.999 in bfloat16 is 1."""
        self.assertEqual(float(jnp.bfloat16(B2)), 1.0)
        params, grads = problem(200, jnp.bfloat16)
        exact = sum((1 - B2) * B2**i * f32(g).astype(np.float64) ** 2 for i, g in enumerate(reversed(grads)))
        median = {}
        for package in (optax, dsopt.jax):
            tx = package.scale_by_adam()
            state, update = tx.init(params), jax.jit(tx.update)
            for each in grads:
                _, state = update(each, state)
            median[package] = float(np.median(f32(state.nu) / exact))
        self.assertGreater(median[optax], 1.05)
        self.assertLess(abs(median[dsopt.jax] - 1), 0.02)

    def test_masters_keep_what_bfloat16_weights_lose(self):
        params, grads = problem(200, jnp.bfloat16)
        opt = dsopt.jax.FusedStep("adamw", self.LR, weight_decay=DECAY)
        state, step, weights = opt.init(params), jax.jit(opt.step), params
        for each in grads:
            weights, state, _ = step(weights, each, state)
        exact = double_steps(params, grads, self.LR)
        self.assertLess(rms(state["master"], exact), 1e-6)
        self.assertEqual(rms(weights, f32(state["master"]).astype(jnp.bfloat16)), 0)
        self.assertLess(10 * rms(weights, exact), rms(run(optax.adamw(self.LR), params, grads), exact))


class Bfloat16Moments(unittest.TestCase):
    """mu_dtype=bfloat16 with fp32 parameters."""

    LR = 1e-2

    def steps(self, params, grads, rounds):
        """optax's chain, in which the product of old moment and b1 is `rounds`."""
        p, m, v = f32(params), 0 * f32(params), 0 * f32(params)
        for t, g in enumerate(map(f32, grads), 1):
            m = f32(1 - B1) * g + rounds(rounds(B1) * m)
            v = f32(1 - B2) * (g * g) + f32(B2) * v
            c1, c2 = corrections(t)
            p = p - f32(self.LR) * ((m / c1) / (np.sqrt(v / c2) + f32(EPS)) + f32(DECAY) * p)
            m = bf16(m)
        return p

    def test_product_of_the_moment_makes_the_difference(self):
        params, grads = problem(10, jnp.float32)
        options = {"mu_dtype": jnp.bfloat16}
        ours, theirs = (run(m(self.LR, **options), params, grads, jit=False) for m in (dsopt.jax.adamw, optax.adamw))
        self.assertGreater(np.abs(ours - theirs).max(), 1e-4)
        np.testing.assert_allclose(theirs, self.steps(params, grads, bf16), rtol=0, atol=3e-6)
        np.testing.assert_allclose(ours, self.steps(params, grads, f32), rtol=0, atol=3e-6)
        exact = double_steps(params, grads, self.LR)
        self.assertLess(rms(ours, exact), 0.7 * rms(theirs, exact))


class Feedback(unittest.TestCase):
    """A gradient that is 0 in exact arithmetic is rounding noise, which Adam scales to steps of the learning rate."""

    def test_key_bias_of_attention_moves_by_rounding_noise(self):
        keys = jax.random.split(jax.random.key(0), 6)
        x = jax.random.normal(keys[0], (16, 24, 32))
        shapes = {"q": (32, 32), "k": (32, 32), "v": (32, 32), "bq": (32,), "bk": (32,)}
        exact = {name: 0.2 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys[1:], shapes.items())}

        def loss(p):
            y = x.astype(p["q"].dtype)
            scores = jnp.einsum("bid,bjd->bij", y @ p["q"] + p["bq"], y @ p["k"] + p["bk"]) / 6
            return jnp.mean((jax.nn.softmax(scores) @ (y @ p["v"]) - y[:, ::-1]).astype(jnp.float32) ** 2)

        def fit(params):
            grads, tx = jax.jit(jax.grad(loss)), optax.adamw(3e-3)
            state = tx.init(params)
            for _ in range(20):
                updates, state = tx.update(grads(params), state, params)
                params = optax.apply_updates(params, updates)
            return params

        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), exact)
        for params, share in ((exact, 1e-5), (half, 0.1)):
            grads = jax.grad(loss)(params)
            noise, signal = (float(jnp.abs(grads[name].astype(jnp.float32)).max()) for name in ("bk", "bq"))
            self.assertLess(noise, share * signal)
        self.assertGreater(noise, 0)
        # optax twice; the second run starts with one weight of "v" changed by one unit in the last place
        other = {**half, "v": half["v"].at[3, 4].set(jnp.nextafter(half["v"][3, 4], jnp.bfloat16(9)))}
        a, b = fit(half), fit(other)
        self.assertGreater(float(jnp.abs(a["bk"].astype(jnp.float32) - b["bk"].astype(jnp.float32)).max()), 3e-3)


if __name__ == "__main__":
    unittest.main()
