# SPDX-License-Identifier: Apache-2.0
"""One step: the formula, in eager mode and in tf.function, and the memory of the variables."""
import threading
import unittest

import keras
import numpy as np
import tensorflow as tf

import dsopt.tf
from support import Reference, distance, gradients, same, variables, weights

SHAPES = ((7, 3), (1,), (), (0,), (5000,), (33, 64))


class Formula(unittest.TestCase):
    def follow(self, optimizer, reference, params, steps=12, tolerance=1e-6, scale=1.0):
        for step in range(steps):
            grads = gradients(params, step, scale)
            optimizer.apply_gradients(zip(grads, params))
            reference.step([g.numpy() for g in grads])
        used = [p for p in params if p.shape.num_elements()]
        wanted = [p for p in reference.p if p.size]
        self.assertLess(distance(weights(used), wanted), tolerance)

    def test_matches_keras_in_double_precision(self):
        for options in ({}, {"beta_1": 0.5, "beta_2": 0.9}, {"epsilon": 1e-3}, {"epsilon": 1e-12}):
            with self.subTest(options):
                params = variables(*SHAPES)
                self.follow(dsopt.tf.Adam(0.01, **options), Reference(params, **options), params)
                params = variables(*SHAPES)
                optimizer = dsopt.tf.AdamW(0.01, weight_decay=0.1, **options)
                self.follow(optimizer, Reference(params, decay=0.1, **options), params)

    def test_distinguishes_placements_of_eps(self):
        """The corrected variance under the root gives another result, so the test above can fail."""
        params = variables((5000,))
        for p in params:
            p.assign(tf.zeros_like(p))
        wrong, optimizer = Reference(params), dsopt.tf.Adam(0.01)
        wrong.epsilon = 1e-7 * np.sqrt(1 - 0.999)
        grads = gradients(params, 0)
        optimizer.apply_gradients(zip(grads, params))
        wrong.step([g.numpy() for g in grads])
        self.assertGreater(distance(weights(params), wrong.p), 1e-3)

    def test_decay_of_adam_is_decoupled(self):
        params = variables(*SHAPES)
        self.follow(dsopt.tf.Adam(0.01, weight_decay=0.2), Reference(params, decay=0.2), params)

    def test_state_matches_keras(self):
        ours, theirs = variables((40, 3), (5,)), variables((40, 3), (5,))
        a, b = dsopt.tf.AdamW(0.01), keras.optimizers.AdamW(0.01)
        for step in range(5):
            a.apply_gradients(zip(gradients(ours, step), ours))
            b.apply_gradients(zip(gradients(theirs, step), theirs))
        self.assertEqual([v.path.split("/")[1] for v in a.variables], [v.path.split("/")[1] for v in b.variables])
        self.assertEqual([v.dtype for v in a.variables], [v.dtype for v in b.variables])
        self.assertLess(distance(weights(a.variables), weights(b.variables)), 1e-6)
        self.assertEqual(int(a.iterations), 5)

    def test_excluded_variables_do_not_decay(self):
        for by_name in (False, True):
            params = variables((50,), (60,))
            optimizer = dsopt.tf.AdamW(0.01, weight_decay=0.5)
            optimizer.exclude_from_weight_decay(**({"var_names": ["w1"]} if by_name else {"var_list": [params[1]]}))
            first, second = Reference(params[:1], decay=0.5), Reference(params[1:])
            for step in range(4):
                grads = gradients(params, step)
                optimizer.apply_gradients(zip(grads, params))
                first.step([grads[0].numpy()])
                second.step([grads[1].numpy()])
            self.assertLess(distance(weights(params), first.p + second.p), 1e-6)

    def test_16_bit_variables_have_fp32_moments(self):
        for dtype in ("float16", "bfloat16"):
            params = variables((300,), dtype=dtype)
            reference, optimizer = Reference(params, lr=0.1), dsopt.tf.Adam(0.1)
            for step in range(3):
                grads = gradients(params, step)
                optimizer.apply_gradients(zip(grads, params))
                reference.step([g.numpy() for g in grads])
                reference.p = [tf.cast(p, dtype).numpy().astype("float64") for p in reference.p]
            self.assertEqual({v.dtype for v in optimizer._momentums}, {"float32"})
            self.assertLess(distance(weights(params), reference.p), 2.0**-7 if dtype == "bfloat16" else 2.0**-10)

    def test_accepts_gradients_of_other_dtypes(self):
        for dtype in ("float16", "bfloat16", "float64"):
            params, optimizer = variables((300,)), dsopt.tf.Adam(0.01)
            reference = Reference(params)
            grads = [tf.cast(g, dtype) for g in gradients(params, 0)]
            optimizer.apply_gradients(zip(grads, params))
            reference.step([tf.cast(g, "float32").numpy() for g in grads])
            self.assertLess(distance(weights(params), reference.p), 1e-6)

    def test_sparse_gradients_become_dense(self):
        """A row that occurs twice counts as the sum. Keras squares the two terms separately."""
        for twice in (False, True):
            ours, theirs = variables((30, 4)), variables((30, 4))
            a, b = dsopt.tf.Adam(0.01), keras.optimizers.Adam(0.01)
            for step in range(3):
                rows = tf.constant([5, 7, 7 if twice else 8 + step])
                slices = tf.IndexedSlices(tf.ones((3, 4)) * (step + 1), rows, tf.constant([30, 4]))
                a.apply_gradients([(slices, ours[0])])
                b.apply_gradients([(tf.convert_to_tensor(slices) if twice else slices, theirs[0])])
            self.assertLess(distance(weights(ours), weights(theirs)), 1e-5)
            self.assertEqual(float(ours[0][0, 0]), float(variables((30, 4))[0][0, 0]))

    def test_absent_gradients_leave_variables_unchanged(self):
        params, optimizer = variables((20,), (30,)), dsopt.tf.AdamW(0.01)
        before = weights(params)
        with self.assertWarns(UserWarning):
            optimizer.apply_gradients([(None, params[0]), (gradients(params, 0)[1], params[1])])
        self.assertTrue(same(weights(params[:1]), before[:1]))
        self.assertFalse(same(weights(params[1:]), before[1:]))


class Clipping(unittest.TestCase):
    def test_each_kind_of_clipping_matches_keras(self):
        for options in ({"clipnorm": 0.05}, {"global_clipnorm": 0.05}, {"clipvalue": 0.01}, {"global_clipnorm": 1e6}):
            with self.subTest(options):
                ours, theirs = variables((40, 5), (9,)), variables((40, 5), (9,))
                a, b = dsopt.tf.AdamW(0.01, **options), keras.optimizers.AdamW(0.01, **options)
                for step in range(6):
                    a.apply_gradients(zip(gradients(ours, step, 10.0**-step), ours))
                    b.apply_gradients(zip(gradients(theirs, step, 10.0**-step), theirs))
                self.assertLess(distance(weights(a.variables), weights(b.variables)), 2e-6)
                self.assertLess(distance(weights(ours), weights(theirs)), 1e-4)

    def test_nonfinite_norm_changes_nothing(self):
        for value in (np.inf, np.nan):
            params, optimizer = variables((10,), (3,)), dsopt.tf.AdamW(0.01, global_clipnorm=1.0)
            optimizer.apply_gradients(zip(gradients(params, 0), params))
            everything = params + list(optimizer._momentums) + list(optimizer._velocities)
            before = weights(everything)
            bad = gradients(params, 1)
            bad[1] = tf.constant([1.0, value, 1.0])
            optimizer.apply_gradients(zip(bad, params))
            self.assertTrue(same(weights(everything), before))


class Memory(unittest.TestCase):
    def test_graph_and_eager_give_the_same_bits(self):
        results = []
        for graph in (False, True):
            params, optimizer = variables(*SHAPES), dsopt.tf.AdamW(0.01, global_clipnorm=1.0)
            optimizer.build(params)
            step = lambda grads: optimizer.apply_gradients(zip(grads, params))  # noqa: E731
            step = tf.function(step) if graph else step
            for i in range(4):
                step(gradients(params, i))
            results.append(weights(params) + weights(optimizer.variables))
        self.assertTrue(same(*results))

    def test_graph_has_one_op_without_addresses(self):
        params, optimizer = variables(*SHAPES), dsopt.tf.AdamW(0.01)
        optimizer.build(params)
        traced = tf.function(lambda grads: optimizer.apply_gradients(zip(grads, params))).get_concrete_function(
            gradients(params, 0))
        nodes = [node for node in traced.graph.as_graph_def().node if node.op == "DsoptStep"]
        self.assertEqual(len(nodes), 1)
        self.assertEqual(list(nodes[0].attr["fields"].list.s).count(b"beta2=0.999"), 2)
        self.assertEqual(list(nodes[0].attr["group_of"].list.i), [1] * len(SHAPES))

    def test_values_read_before_a_step_do_not_change(self):
        params, optimizer = variables((6000,), (3,)), dsopt.tf.Adam(0.1)
        optimizer.build(params)
        slots = optimizer._momentums + optimizer._velocities
        before = [variable.read_value() for variable in params] + [slot.value.read_value() for slot in slots]
        copies = [value.numpy().copy() for value in before]
        optimizer.apply_gradients(zip(gradients(params, 0), params))
        self.assertTrue(same([value.numpy() for value in before], copies))
        self.assertFalse(same(weights(params), copies[:2]))

    def test_steps_variables_written_sparsely(self):
        params, plain = variables((40, 4)), variables((40, 4))
        a, b = dsopt.tf.Adam(0.1), dsopt.tf.Adam(0.1)
        for step in range(3):
            row = tf.IndexedSlices(tf.ones((1, 4)), tf.constant([step]))
            params[0].scatter_add(row)  # reads of it copy from now on
            plain[0].assign_add(tf.convert_to_tensor(tf.IndexedSlices(row.values, row.indices, tf.constant([40, 4]))))
            read, copy = params[0].read_value(), params[0].numpy().copy()
            a.apply_gradients(zip(gradients(params, step), params))
            b.apply_gradients(zip(gradients(plain, step), plain))
            self.assertEqual(read.numpy().tobytes(), copy.tobytes())
        self.assertTrue(same(weights(params), weights(plain)))

    def test_threads_may_step_variables_in_other_orders(self):
        params = variables((5000,), (5000,), (5000,))
        optimizers = [dsopt.tf.Adam(0.001) for _ in range(4)]
        for optimizer in optimizers:
            optimizer.build(params)
        failures = []

        def work(index):
            order = [params[(k + index) % 3] for k in range(3)]
            if index % 2:
                order.reverse()
            try:
                for step in range(30):
                    optimizers[index].apply_gradients(zip(gradients(order, step), order))
            except Exception as problem:  # noqa: BLE001 - of any type
                failures.append(problem)

        threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            self.assertFalse(thread.is_alive(), "a step hangs")
        self.assertEqual(failures, [])
        self.assertTrue(all(np.isfinite(w).all() for w in weights(params)))


if __name__ == "__main__":
    unittest.main()
