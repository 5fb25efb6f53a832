# SPDX-License-Identifier: Apache-2.0
"""The transformations compared with optax's."""

import unittest
from unittest import mock

from support import model

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import dsopt
import dsopt.jax


def grads_at(params, i):
    return jax.tree.map(lambda p: jnp.cos(p * 3 + i), params)


def run(tx, params, steps=20, jit=True):
    """Returns parameters and state after steps with synthetic gradients."""
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for i in range(steps):
        updates, state = update(grads_at(params, i), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def worst(a, b):
    return max(
        float(jnp.max(jnp.abs(x.astype(jnp.float32) - y.astype(jnp.float32)), initial=0.0))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


class ComparedWithOptax(unittest.TestCase):
    PARAMS = {
        "dense": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4), "bias": jnp.zeros(4)},
        "scale": jnp.float32(2.0),
        "none": jnp.zeros((0, 3)),
    }
    CASES = [
        ("adam", {}),
        ("adamw", {"weight_decay": 0.1}),
        ("lamb", {}),
        ("lamb", {"weight_decay": 0.1}),
        ("adamw", {"weight_decay": lambda count: 0.1 / (1 + count)}),
        ("adamw", {"weight_decay": 0.1, "mask": lambda p: jax.tree.map(lambda x: x.ndim > 1, p)}),
        ("lamb", {"weight_decay": 0.1, "mask": {"dense": True, "scale": False, "none": False}}),
        ("adam", {"b1": 0.5, "b2": 0.9, "eps": 1e-3}),
        ("adamw", {"mu_dtype": jnp.bfloat16}),
        ("sgd", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("sgd", {"momentum": 0.5, "accumulator_dtype": jnp.bfloat16}),
        ("sgd", {"momentum": 0.0}),
        ("sgd", {"momentum": jnp.float32(0.9)}),
        ("adagrad", {}),
        ("adagrad", {"initial_accumulator_value": 0.0, "eps": 0.0}),
        ("adagrad", {"eps": 1e-2}),
        ("lion", {}),
        ("lion", {"b1": 0.5, "b2": 0.75, "weight_decay": 0.1}),
        ("lion", {"weight_decay": 0.1, "mask": {"dense": True, "scale": False, "none": False}}),
        ("lion", {"mu_dtype": jnp.bfloat16}),
    ]

    OTHERS = (("sgd", {"momentum": 0.9}), ("adagrad", {}), ("lion", {}))

    def test_matches_optax(self):
        decreasing, array = optax.exponential_decay(1e-2, 5, 0.5), jnp.float32(1e-2)
        for i, (name, options) in enumerate(self.CASES):
            for rate in (1e-2, (decreasing, array)[i % 2]):
                with self.subTest(name=name, options=options, rate=rate):
                    # 16-bit moments round differently where the last bits differ
                    limit = 4e-4 if {"mu_dtype", "accumulator_dtype"} & set(options) else 3e-6
                    ours = run(getattr(dsopt.jax, name)(rate, **options), self.PARAMS, 6)
                    theirs = run(getattr(optax, name)(rate, **options), self.PARAMS, 6)
                    self.assertLess(worst(ours[0], theirs[0]), limit)
                    self.assertEqual(
                        jax.tree.map(lambda x: (x.shape, x.dtype), ours[1]),
                        jax.tree.map(lambda x: (x.shape, x.dtype), theirs[1]),
                    )
                    for a, b in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1])):
                        half = a.dtype == jnp.bfloat16
                        np.testing.assert_allclose(
                            a.astype(jnp.float32),
                            b.astype(jnp.float32),
                            rtol=2e-2 if half else 2e-5,
                            atol=4e-3 if half else 1e-5,
                        )

    def test_works_without_jit(self):
        ours = run(dsopt.jax.adamw(lambda count: 1e-2 / (1 + count)), self.PARAMS, 3, jit=False)
        theirs = run(optax.adamw(lambda count: 1e-2 / (1 + count)), self.PARAMS, 3)
        self.assertLess(worst(ours[0], theirs[0]), 3e-6)

    def test_resumes_from_a_state_of_optax(self):
        for name, options in (("adamw", {}), *self.OTHERS):
            with self.subTest(name):
                ours, theirs = (getattr(package, name)(1e-2, **options) for package in (dsopt.jax, optax))
                params, state = run(theirs, self.PARAMS, 5)
                grads = grads_at(params, 9)
                a, state_a = ours.update(grads, state, params)
                b, state_b = theirs.update(grads, state, params)
                self.assertLess(worst(a, b), 1e-6)
                # In the other direction.
                params = optax.apply_updates(params, a)
                a, b = theirs.update(grads, state_a, params)[0], theirs.update(grads, state_b, params)[0]
                self.assertLess(worst(a, b), 1e-6)

    def test_adam_accepts_every_dtype(self):
        for name in ("adam", "adamw", "lamb"):
            for dtype in (jnp.bfloat16, jnp.complex64):
                with self.subTest(name=name, dtype=dtype):
                    params = {"w": jnp.linspace(0.5, 1, 6).astype(dtype), "f": jnp.ones(3)}
                    tx = getattr(dsopt.jax, name)(1e-2)
                    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
                    self.assertEqual(updates["w"].dtype, dtype)
                    self.assertEqual(optax.tree.get(state, "mu")["w"].dtype, dtype)
                    like = getattr(optax, name)(1e-2)
                    expected, _ = like.update(params, like.init(params), params)
                    np.testing.assert_allclose(
                        np.asarray(updates["w"], np.complex64), np.asarray(expected["w"], np.complex64), rtol=2e-2
                    )

    def test_squares_in_float16_are_refused_by_name(self):
        """Those of gradients below 2e-4 would be 0, and the step without bound."""
        params = {"layer": {"w": jnp.ones(6, jnp.float16)}, "f": jnp.ones(3)}
        for name, moment in (("adam", "nu"), ("adamw", "nu"), ("lamb", "nu"), ("adagrad", "sum_of_squares")):
            tx = getattr(dsopt.jax, name)(1e-2)
            with self.assertRaisesRegex(dsopt.UnsupportedError, moment + ".*'w'.*is float16.*FusedStep"):
                tx.init(params)
            state = getattr(optax, name)(1e-2).init(params)  # such as of a checkpoint
            with self.assertRaisesRegex(dsopt.UnsupportedError, moment + ".*'w'.*is float16"):
                jax.jit(tx.update)(params, state, params)

    def test_other_rules_accept_every_dtype(self):
        for name, options in self.OTHERS:
            for dtype in (jnp.float16, jnp.bfloat16, jnp.complex64):
                if name == "adagrad" and dtype == jnp.float16:
                    continue
                with self.subTest(name=name, dtype=dtype):
                    params = {"w": jnp.linspace(0.5, 1, 6).astype(dtype), "f": jnp.ones(3)}
                    tx, like = (getattr(package, name)(1e-2, **options) for package in (dsopt.jax, optax))
                    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
                    expected, theirs = like.update(params, like.init(params), params)
                    self.assertEqual(updates["w"].dtype, dtype)
                    self.assertEqual(*(jax.tree.map(lambda x: x.dtype, tree) for tree in (state, theirs)))
                    np.testing.assert_allclose(
                        np.asarray(updates["w"], np.complex64), np.asarray(expected["w"], np.complex64), rtol=2e-2
                    )

    def test_delegates_float64_to_optax(self):
        with jax.enable_x64(True):
            params = {"w": jnp.linspace(0, 1, 6, dtype=jnp.float64), "f": jnp.ones(3, jnp.float32)}
            ours, theirs = dsopt.jax.adamw(1e-2), optax.adamw(1e-2)
            a, b = (
                ours.update(params, ours.init(params), params)[0],
                theirs.update(params, theirs.init(params), params)[0],
            )
            self.assertEqual(a["w"].dtype, jnp.float64)
            np.testing.assert_allclose(a["w"], b["w"], rtol=1e-12)
            np.testing.assert_allclose(a["f"], b["f"], rtol=1e-4)

    def test_works_inside_other_transformations(self):
        params = self.PARAMS
        wrap = {
            "chain": lambda tx: optax.chain(optax.clip_by_global_norm(0.5), tx, optax.scale(0.5)),
            "masked": lambda tx: optax.masked(tx, jax.tree.map(lambda p: p.ndim > 0, params)),
            "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
            "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
            "multi_transform": lambda tx: optax.multi_transform(
                {"a": tx, "b": optax.sgd(0.1)}, {"dense": "a", "scale": "b", "none": "a"}
            ),
        }
        for name, make in wrap.items():
            with self.subTest(name):
                ours, theirs = make(dsopt.jax.adamw(1e-2)), make(optax.adamw(1e-2))
                self.assertLess(worst(run(ours, params, 6)[0], run(theirs, params, 6)[0]), 1e-5)

    def test_works_with_inject_hyperparams(self):
        for name in ("adam", "adamw", "lamb"):
            with self.subTest(name):
                options = {"learning_rate": optax.linear_schedule(1e-2, 1e-3, 10), "b1": 0.8}
                ours = run(optax.inject_hyperparams(getattr(dsopt.jax, name))(**options), self.PARAMS, 6)
                theirs = run(optax.inject_hyperparams(getattr(optax, name))(**options), self.PARAMS, 6)
                self.assertLess(worst(ours[0], theirs[0]), 1e-5)

    def test_works_with_tree_map_params(self):
        tx = dsopt.jax.adamw(1e-2)
        marked = optax.tree_map_params(tx, lambda _: "p", tx.init(self.PARAMS), transform_non_params=lambda _: "o")
        self.assertEqual(set(jax.tree.leaves(optax.tree.get(marked, "mu"))), {"p"})
        self.assertEqual(optax.tree.get(marked, "count"), "o")

    def test_accepts_empty_trees_and_missing_parameters(self):
        tx = dsopt.jax.adam(1e-2)
        self.assertEqual(tx.update({}, tx.init({}), {})[0], {})
        grads = {"w": jnp.ones(3)}
        np.testing.assert_allclose(tx.update(grads, tx.init(grads))[0]["w"], -1e-2, rtol=1e-5)
        tx = dsopt.jax.adamw(1e-2)
        with self.assertRaisesRegex(ValueError, "params"):
            tx.update(grads, tx.init(grads))

    def test_trains_like_optax(self):
        params, loss = model()
        for name, options in (("adam", {}), ("adamw", {}), ("lamb", {}), *self.OTHERS):
            ends = []
            for package in (dsopt.jax, optax):
                tx = getattr(package, name)(5e-3 if name != "adagrad" else 5e-2, **options)

                @jax.jit
                def step(p, s, tx=tx):
                    value, grads = jax.value_and_grad(loss)(p)
                    updates, s = tx.update(grads, s, p)
                    return optax.apply_updates(p, updates), s, value

                p, s = params, tx.init(params)
                for _ in range(100):
                    p, s, value = step(p, s)
                ends.append((p, float(value)))
            with self.subTest(name):
                self.assertLess(ends[0][1], 0.5 * float(loss(params)))
                self.assertLess(worst(ends[0][0], ends[1][0]), 2e-4)

    def test_updates_are_exact_for_large_parameters(self):
        """An update far below the last bit of its parameter keeps all of its bits."""
        params = {"w": jnp.full(1000, 1e6), "b": jnp.zeros(5)}
        without_decay = ("lion", {"weight_decay": 0.0})
        for name, options in (("adam", {}), ("adamw", {}), ("lamb", {}), without_decay, *self.OTHERS[:2]):
            ours, theirs = (getattr(package, name)(1e-6, **options) for package in (dsopt.jax, optax))
            a, b = ours.init(params), theirs.init(params)
            for i in range(3):
                grads = jax.tree.map(lambda p, i=i: jnp.cos(jnp.arange(p.size) + i).astype(p.dtype), params)
                x, a = ours.update(grads, a, params)
                y, b = theirs.update(grads, b, params)
                with self.subTest(name, step=i):
                    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=3e-5), x, y)

    def test_overwrites_only_gradients_computed_in_the_program(self):
        tx, params = dsopt.jax.adamw(1e-2), {"w": jnp.linspace(0.5, 2, 4096)}
        inside = jax.jit(lambda p, s: tx.update(jax.grad(lambda p: jnp.sum(p["w"] ** 3))(p), s, p))
        state, grads = tx.init(params), {"w": 3 * params["w"] ** 2}
        over_gradients = r"output_to_operand_aliasing=\{[^}]*\{0\}: \(1, "  # operand 0 are hyper-parameters
        self.assertRegex(inside.lower(params, state).compile().as_text(), over_gradients)
        given = jax.jit(tx.update)
        text = given.lower(grads, state, params).compile().as_text()
        self.assertNotRegex(text, over_gradients)
        self.assertNotIn("copy(%updates", text)
        self.assertLess(worst(inside(params, state)[0], given(grads, state, params)[0]), 1e-8)
        np.testing.assert_array_equal(grads["w"], 3 * params["w"] ** 2)

    def test_zeros_are_an_operand_only_on_cuda(self):
        """On CUDA the engine steps from an array of zeros; on the CPU the handler provides them. Lowered only, not
        run."""
        tx, params = dsopt.jax.adam(1e-2), {"w": jnp.ones(8), "b": jnp.ones(5)}
        traced = jax.jit(tx.update).trace(params, tx.init(params), params)
        for platform, zeros in (("cpu", 0), ("cuda", 2)):
            with self.subTest(platform):
                text = traced.lower(lowering_platforms=(platform,)).as_text()
                call = next(line for line in text.splitlines() if "@dsopt_step" in line)
                operands = call.rpartition(" : (")[2].partition(") -> ")[0]
                self.assertEqual(operands.count("bf16"), zeros, call)
                options = int(call.partition("options = ")[2].partition(" ")[0])
                self.assertEqual(bool(options & dsopt.jax._call.ZEROS), not zeros)

    def test_lion_has_optax_modes(self):
        for options in ({"mode": "hard"}, {"mode": "smooth", "smooth_beta": 2.0}, {"mode": "refined"}):
            with self.subTest(options):
                ours, theirs = (
                    run(package.scale_by_lion(**options), self.PARAMS, 3) for package in (dsopt.jax, optax)
                )
                self.assertLess(worst(ours[0], theirs[0]), 1e-6)

    def test_parts_group_adjacent_leaves_up_to_a_size(self):
        for sizes, parts in (
            ([0], [[0]]),
            ([9], [[9]]),
            ([4, 4], [[4, 4]]),
            ([4, 4, 1], [[4, 4], [1]]),
            ([9, 1], [[9], [1]]),
            ([1, 9, 0, 8, 0], [[1], [9], [0, 8, 0]]),
            ([7, 1, 9, 8, 8], [[7, 1], [9], [8], [8]]),
        ):
            with self.subTest(sizes=sizes), mock.patch.object(dsopt.jax._optax, "_PART", 8):
                self.assertEqual([sizes[part] for part in dsopt.jax._optax._parts(sizes)], parts)

    def test_parts_give_same_bits_as_one_call(self):
        params = {"p%d" % i: jnp.linspace(-1, 1, size) for i, size in enumerate((3, 6, 0, 8, 9, 1))}
        for name, options in (("adam", {}), ("adamw", {"mu_dtype": jnp.bfloat16}), ("lamb", {}), *self.OTHERS):
            whole = run(getattr(dsopt.jax, name)(1e-2, **options), params, 6)
            with self.subTest(name), mock.patch.object(dsopt.jax._optax, "_PART", 8):
                tx = getattr(dsopt.jax, name)(1e-2, **options)
                text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
                self.assertEqual(text.count('custom_call_target="dsopt_step"'), 5)
                jax.tree.map(np.testing.assert_array_equal, run(tx, params, 6), whole)
                jax.tree.map(np.testing.assert_array_equal, run(tx, params, 6, jit=False)[1], whole[1])

    def test_delegates_large_leaves_to_optax_on_the_cpu(self):
        params = {"p%d" % i: jnp.linspace(-1, 1, size) for i, size in enumerate((3, 9, 8, 0, 12))}
        cases = [("adam", {}), ("adamw", {"mu_dtype": jnp.bfloat16}), ("lamb", {}), *self.OTHERS]
        for name, options in cases:
            theirs = run(getattr(optax, name)(1e-2, **options), params, 6)
            with self.subTest(name), mock.patch.object(dsopt.jax._optax, "_LARGE", 8):
                tx = getattr(dsopt.jax, name)(1e-2, **options)
                traced = jax.jit(tx.update).trace(params, tx.init(params), params)
                for platform, calls in (("cpu", 1), ("cuda", 3)):
                    text = traced.lower(lowering_platforms=(platform,)).as_text()
                    self.assertEqual(text.count("@dsopt_step"), calls)
                close = 1e-4 if "mu_dtype" in options else 3e-6  # 16-bit moments may be rounded differently
                for jit in (True, False):
                    self.assertLess(worst(run(tx, params, 6, jit=jit)[0], theirs[0]), close)
                inside = jax.jit(lambda p, s, tx=tx: tx.update(jax.tree.map(jnp.cos, p), s, p))
                text = inside.lower(params, tx.init(params)).compile().as_text()
                self.assertEqual(text.count('custom_call_target="dsopt_step"'), 1)
                self.assertIn("f32[12]", text.partition('custom_call_target="dsopt_step"')[0].rpartition("\n")[2])

    def test_parts_mix_computed_and_passed_gradients(self):
        params = {"p%d" % i: jnp.linspace(-1, 1, size) for i, size in enumerate((3, 6, 8, 5, 9, 1))}
        tx = dsopt.jax.adam(1e-2)
        state = tx.init(params)

        def update(grads, state):
            """Every second gradient is a temporary of the program, and may be overwritten."""
            return tx.update({name: x + 0.5 if int(name[1]) % 2 else x for name, x in grads.items()}, state)

        whole = jax.jit(update)(params, state)
        with mock.patch.object(dsopt.jax._optax, "_PART", 12):
            in_parts = jax.jit(lambda *arguments: update(*arguments)).lower(params, state).compile()
            self.assertEqual(in_parts.as_text().count('custom_call_target="dsopt_step"'), 4)
            jax.tree.map(np.testing.assert_array_equal, in_parts(params, state), whole)

    @unittest.skipIf(
        jax.__version_info__ < (0, 9), "custom_partitioning of JAX %s drops explicit shardings" % jax.__version__
    )
    def test_parts_keep_explicit_shardings(self):
        mesh = jax.make_mesh((len(jax.devices()),), ("d",), axis_types=(AxisType.Explicit,))
        tx = dsopt.jax.adam(1e-2)
        with jax.set_mesh(mesh), mock.patch.object(dsopt.jax._optax, "_PART", 8):
            params = {
                name: jax.device_put(jnp.ones(8), NamedSharding(mesh, P(axis)))
                for name, axis in (("sharded", "d"), ("whole", None))
            }
            updates, _ = jax.jit(tx.update)(params, tx.init(params))
        for name, update in updates.items():
            self.assertEqual(jax.typeof(update), jax.typeof(params[name]))
            np.testing.assert_allclose(update, -1e-2, rtol=1e-5)

    def test_parts_need_less_memory(self):
        """Directions of gradients that are arguments need memory; XLA reuses the memory of a part for a later one."""
        part = dsopt.jax._optax._PART
        params = {"p%d" % i: jax.ShapeDtypeStruct((part // 4,), jnp.float32) for i in range(32)}
        tx = dsopt.jax.adamw(1e-2, weight_decay=0.1)

        def step(params, grads, state):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(tx.init, params)
        compiled = jax.jit(step, donate_argnums=(0, 2)).lower(params, params, state).compile()
        self.assertEqual(compiled.as_text().count('custom_call_target="dsopt_step"'), 8)
        self.assertLess(compiled.memory_analysis().temp_size_in_bytes, 4 * 4 * part)
        self.assertNotIn(" copy(", compiled.as_text())

    def test_updates_match_steps_in_place(self):
        """Old plus the update is new, except for the last bit."""
        params, loss = model()
        tx, fused = dsopt.jax.adamw(5e-3, weight_decay=0.1), dsopt.jax.FusedStep("adamw", 5e-3, weight_decay=0.1)
        state = tx.init(params)
        updates, _ = tx.update(jax.grad(loss)(params), state, params)
        ours = optax.apply_updates(params, updates)
        theirs, _, _ = fused.step(params, jax.grad(loss)(params), fused.init(params))
        self.assertLess(worst(ours, theirs), 2.5e-7)


    def test_other_rules_work_with_inject_hyperparams(self):
        rate = optax.linear_schedule(1e-2, 1e-3, 10)
        for name, options in (("sgd", {"momentum": 0.8}), ("adagrad", {"eps": 1e-3}), ("lion", {"b1": 0.8})):
            with self.subTest(name):
                options = {"learning_rate": rate, **options}
                ours, theirs = (
                    run(optax.inject_hyperparams(getattr(package, name))(**options), self.PARAMS, 6)
                    for package in (dsopt.jax, optax)
                )
                self.assertLess(worst(ours[0], theirs[0]), 3e-6)

    def test_other_rules_work_inside_transformations(self):
        masked = jax.tree.map(lambda p: p.ndim > 0, self.PARAMS)
        for name, options in self.OTHERS:
            with self.subTest(name):
                ours, theirs = (
                    optax.chain(
                        optax.clip_by_global_norm(0.5),
                        optax.masked(getattr(package, name)(1e-2, **options), masked),
                        optax.scale(0.5),
                    )
                    for package in (dsopt.jax, optax)
                )
                self.assertLess(worst(run(ours, self.PARAMS, 6)[0], run(theirs, self.PARAMS, 6)[0]), 1e-5)


class Refusals(unittest.TestCase):
    GRADS = {"a": {"b": jnp.ones(3)}}

    def update(self, tx, grads=None):
        return tx.update(grads or self.GRADS, tx.init(self.GRADS), self.GRADS)

    def test_rejects_unsupported_optax_options(self):
        for options in ({"nesterov": True}, {"eps_root": 1e-8}):
            with self.subTest(options), self.assertRaises(dsopt.UnsupportedError):
                dsopt.jax.adamw(1e-3, **options)

    def test_rejects_invalid_hyper_parameters(self):
        with self.assertRaisesRegex(dsopt.ArgumentError, "beta1 is -1"):
            self.update(dsopt.jax.adamw(1e-3, b1=-1.0))
        with self.assertRaisesRegex(dsopt.ArgumentError, "momentum is -1"):
            self.update(dsopt.jax.sgd(1e-3, momentum=-1.0))
        with self.assertRaisesRegex(dsopt.ArgumentError, "eps is -1"):
            self.update(dsopt.jax.adagrad(1e-3, eps=-1.0))
        with self.assertRaisesRegex(dsopt.ArgumentError, "beta2 is 2"):
            self.update(dsopt.jax.lion(1e-3, b2=2.0))
        for options in ({"b1": jnp.float32(-1)}, {"eps_root": jnp.float32(1e-8)}):
            with self.subTest(options), self.assertRaisesRegex(jax.errors.JaxRuntimeError, "out of range, or eps_root"):
                jax.block_until_ready(jax.jit(lambda o=options: self.update(dsopt.jax.adamw(1e-3, **o)))())

    def test_error_names_the_parameter(self):
        with self.assertRaisesRegex(dsopt.ArgumentError, r"\['a'\]\['b'\] has shape \(4,\)"):
            self.update(dsopt.jax.adamw(1e-3), {"a": {"b": jnp.ones(4)}})
        for tx in (dsopt.jax.sgd(1e-3, momentum=0.9), dsopt.jax.adagrad(1e-3), dsopt.jax.lion(1e-3)):
            with self.assertRaisesRegex(dsopt.ArgumentError, r"\['a'\]\['b'\] has shape \(4,\)"):
                self.update(tx, {"a": {"b": jnp.ones(4)}})

    def test_rejects_vmap_and_grad(self):
        tx = dsopt.jax.adam(1e-3)
        step = lambda g: tx.update([g, g], tx.init([g, g]), [g, g])[0][0]  # noqa: E731
        for part in (100, 3):
            with self.subTest(part=part), mock.patch.object(dsopt.jax._optax, "_PART", part):
                with self.assertRaisesRegex(NotImplementedError, "dsopt.jax: a step cannot be vectorised"):
                    jax.vmap(step)(jnp.ones((2, 3)))
                with self.assertRaisesRegex(NotImplementedError, "dsopt.jax: a step cannot be differentiated"):
                    jax.grad(lambda g: step(g).sum())(jnp.ones(3))


if __name__ == "__main__":
    unittest.main()
