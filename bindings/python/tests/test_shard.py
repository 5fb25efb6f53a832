# SPDX-License-Identifier: Apache-2.0
"""Sharded state and averages, over ranks that are threads. Their bits are cases of bindings/conformance."""

import os
import tempfile
import unittest

import numpy as np

import dsopt
from support import Bfloat16, arrays, ranks

SHAPES = {"a": (), "b": (7,), "c": (3, 4099), "d": (0,)}
RANKS = 3


def gradients(step, rank=0):
    return dict(zip(SHAPES, arrays(*SHAPES.values(), seed=1 + 10 * step + rank)))


def train(count, look=lambda opt, comm: None, *, steps=4, **options):
    """Trains on ranks that are threads, and returns the weights, and what `look` returns on each rank."""
    id = dsopt.Comm.unique_id()

    def work(rank):
        comm = dsopt.Comm.local(dsopt.Context(), id, rank, count)
        where = "node" if options.get("shard") == "node" else "data"
        weights = dict(zip(SHAPES, arrays(*SHAPES.values())))
        group = dsopt.Lamb(lr=0.01, weight_decay=0.1)
        opt = dsopt.Optimizer(weights, group, context=comm.context, max_norm=1, **{where: comm}, **options)
        for step in range(steps):
            opt.step(gradients(step))
        return weights, look(opt, comm)

    results = ranks(count, work)
    for weights, _ in results[1:]:
        for name in SHAPES:
            np.testing.assert_array_equal(weights[name], results[0][0][name])
    return results[0][0], [found for _, found in results]


class Shard(unittest.TestCase):
    def same(self, one, two):
        for name in SHAPES:
            np.testing.assert_array_equal(one[name], two[name])

    def test_state_is_the_part_of_the_rank(self):
        def look(opt, comm):
            for name in SHAPES:
                begin, numel = opt.shard(name)
                for state in ("exp_avg", "exp_avg_sq"):
                    view = opt.state["%s.%s" % (name, state)]
                    self.assertEqual(view.shape, (numel,))
                    np.testing.assert_array_equal(view, opt.state.export_f32("%s.%s" % (name, state)))
            self.assertEqual(opt.shard("c"), opt.shard(2, comm.rank))
            return opt.shard("c"), opt.state.copy("c.exp_avg"), opt.report().state_bytes

        _, whole = train(1, lambda opt, comm: (opt.state.copy("c.exp_avg").reshape(-1), opt.report().state_bytes))
        for shard in ("data", "node"):
            _, parts = train(RANKS, look, shard=shard)
            for (begin, numel), part, state_bytes in parts:
                np.testing.assert_array_equal(part, whole[0][0][begin : begin + numel])
                self.assertLess(state_bytes, whole[0][1])

    def test_parts_tile_every_parameter(self):
        def look(opt, comm):
            for i, name in enumerate(SHAPES):
                end = 0
                for rank in range(RANKS):
                    begin, numel = opt.shard(i, rank)
                    self.assertEqual(begin, end if numel else 0)
                    self.assertEqual(begin % 4096, 0)
                    end += numel
                self.assertEqual(end, int(np.prod(SHAPES[name])))

        train(RANKS, look, shard="data")

    def test_is_the_whole_parameter_without_it(self):
        opt = dsopt.Optimizer()
        with self.assertRaises(dsopt.StateError):
            opt.shard(0)
        opt.add_group(dsopt.AdamW(), {"w": np.ones(5000, np.float32)})
        self.assertEqual(opt.shard("w"), (0, 5000))
        self.assertEqual(opt.state["w.exp_avg"].shape, (5000,))

    def test_state_can_be_assigned_and_bound(self):
        def look(opt, comm):
            state = {name: np.array(opt.state.copy(name)) for name in opt.state}
            _, numel = opt.shard("c")
            state["c.exp_avg"] = np.full(numel, 2, np.float32)
            opt.state["c.exp_avg"] = state["c.exp_avg"]
            self.assertTrue((opt.state["c.exp_avg"] == 2).all())
            with self.assertRaisesRegex(dsopt.TensorError, "shape"):
                opt.state["c.exp_avg"] = np.ones(SHAPES["c"], np.float32)
            opt.bind(state=state)
            opt.step(gradients(9))
            return numel == 0 or (state["c.exp_avg"] != 2).any()

        _, changed = train(RANKS, look, shard="data")
        self.assertEqual(changed, [True] * RANKS)

    def test_functional_form_takes_the_part(self):
        expected, _ = train(2, steps=3, shard="data")
        id = dsopt.Comm.unique_id()

        def work(rank):
            comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2)
            params = {name: dsopt.Param(shape=shape) for name, shape in SHAPES.items()}
            group = dsopt.Lamb(lr=0.01, weight_decay=0.1)
            opt = dsopt.Optimizer(params, group, context=comm.context, max_norm=1, data=comm, shard="data")
            weights = dict(zip(SHAPES, arrays(*SHAPES.values())))
            state = opt.init_state(weights)
            for step in range(3):
                opt.apply(weights, gradients(step), state)
            return weights

        for weights in ranks(2, work):
            self.same(weights, expected)

    def test_files_are_loaded_by_another_number_of_ranks(self):
        expected, _ = train(1, steps=6)
        with tempfile.TemporaryDirectory() as folder:

            def path(rank):
                return os.path.join(folder, "rank%d.safetensors" % rank)

            train(RANKS, lambda opt, comm: opt.save(path(comm.rank), params=True), shard="data", steps=3)
            for count, options in ((1, {}), (2, {"shard": "data"})):
                id = dsopt.Comm.unique_id()

                def work(rank):
                    comm = dsopt.Comm.local(dsopt.Context(), id, rank, count)
                    weights = dict(zip(SHAPES, arrays(*SHAPES.values(), seed=99)))
                    group = dsopt.Lamb(lr=0.01, weight_decay=0.1)
                    opt = dsopt.Optimizer(weights, group, context=comm.context, max_norm=1, data=comm, **options)
                    opt.load([path(rank) for rank in range(RANKS)], params=True)
                    for step in range(3, 6):
                        opt.step(gradients(step))
                    return weights

                for weights in ranks(count, work):
                    self.same(weights, expected)

    def test_onebit_adam_is_sharded_in_its_node(self):
        def run(shard):
            nodes, columns = [[dsopt.Comm.unique_id() for _ in range(2)] for _ in range(2)]

            def work(rank):
                node, local = divmod(rank, 2)
                context = dsopt.Context(threads=1)
                weights = dict(zip(SHAPES, arrays(*SHAPES.values())))
                opt = dsopt.Optimizer(
                    weights,
                    dsopt.OnebitAdam(lr=0.01, freeze_step=3),
                    context=context,
                    node=dsopt.Comm.local(context, nodes[node], local, 2),
                    data=dsopt.Comm.local(context, columns[local], node, 2),
                    averages=True,
                    shard=shard,
                )
                for step in range(7):
                    opt.step(gradients(step, rank))
                _, numel = opt.shard("c")
                self.assertEqual(numel < 3 * 4099, shard is not None)
                self.assertEqual(opt.state["c.exp_avg"].size, numel)
                return weights

            return ranks(4, work)

        expected = run(None)
        for weights in run("node"):
            self.same(weights, expected[0])

    def test_refuses_what_cannot_be_sharded(self):
        context = dsopt.Context()
        comm, expert = dsopt.Comm.single(context), dsopt.Comm.single(context)
        for options, text in (
            ({"shard": "data"}, "SHARD has no effect without"),
            ({"shard": "node", "data": comm}, "SHARD_NODE has no effect without"),
            ({"shard": "data", "data": comm, "compat": "deepspeed"}, "SHARD is for standard mode"),
            ({"shard": "data", "data": comm, "experts": [expert]}, "experts do not go with SHARD"),
            ({"averages": True}, "AVERAGES has no effect without"),
        ):
            with self.assertRaisesRegex(dsopt.UnsupportedError, text):
                dsopt.Optimizer(context=context, **options)
        with self.assertRaisesRegex(dsopt.ArgumentError, "shard is 'all', and must be one of 'data', 'node'"):
            dsopt.Optimizer(context=context, data=comm, shard="all")
        w, g = np.ones(5, np.float32), np.ones(5, np.float32)
        opt = dsopt.Optimizer(context=context, data=comm, shard="data")
        for group, text in ((dsopt.OnebitAdam(), "1-bit family"), (dsopt.ZeroOneAdam(), "0/1 Adam is not sharded")):
            with self.assertRaisesRegex(dsopt.UnsupportedError, text):
                opt.add_group(group, {"w": w})
        opt.add_group(dsopt.AdamW(), {"w": w})
        with self.assertRaisesRegex(dsopt.UnsupportedError, "dsopt_step.out"):
            opt.step([g], out=[np.zeros(5, np.float32)])
        opt.step([g])
        with self.assertRaisesRegex(dsopt.StateError, "before the first step"):
            opt.add_group(dsopt.AdamW(), {"x": g})
        for arguments, text in (
            (("x",), "param is 'x', which is not registered"),
            ((1,), "param is 1"),
            ((0, 1), "rank is 1"),
            ((0, -1), "rank is -1"),
        ):
            with self.assertRaisesRegex(dsopt.ArgumentError, text):
                opt.shard(*arguments)
        with self.assertRaises(TypeError):
            opt.shard(0.5)

    def test_refuses_different_lists(self):
        id = dsopt.Comm.unique_id()

        def work(rank):
            comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2)
            w = np.ones(5000 + rank, np.float32)
            opt = dsopt.Optimizer({"w": w}, dsopt.AdamW(), context=comm.context, data=comm, shard="data")
            with self.assertRaisesRegex(dsopt.CheckpointError, "DSOPT_ERR_MISMATCH"):
                opt.step([w])
            self.assertTrue((w == 1).all())

        ranks(2, work)


class Averages(unittest.TestCase):
    """Steps that average the gradients of all ranks."""

    def test_absent_gradients_are_zeros_of_the_parameters_dtype(self):
        id = dsopt.Comm.unique_id()

        def work(rank):
            comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2)
            w, x = np.ones(3, np.float32), Bfloat16(np.ones(2))
            half = np.ones(4, np.float16)
            opt = dsopt.Optimizer(
                {"w": w, "x": x, "half": half},
                dsopt.Sgd(lr=1),
                context=comm.context,
                data=comm,
                averages=True,
                no_master=True,
            )
            grads = {"w": np.ones(3, np.float32), "x": Bfloat16(np.ones(2)), "half": np.ones(4, np.float16)}
            opt.step(grads if rank == 0 else {})
            opt.bind(grads=grads if rank == 1 else [None] * 3)
            opt.step()
            return [w, x.values, half]

        for weights in ranks(2, work):
            for weight in weights:
                np.testing.assert_array_equal(weight, np.zeros_like(weight))

    def test_refuses_gradients_of_different_dtypes(self):
        id = dsopt.Comm.unique_id()

        def work(rank):
            comm = dsopt.Comm.local(dsopt.Context(), id, rank, 2)
            w = np.ones(4, np.float16)
            opt = dsopt.Optimizer([w], dsopt.Sgd(lr=1), context=comm.context, data=comm, averages=True, no_master=True)
            with self.assertRaisesRegex(dsopt.CheckpointError, "gradient of 'p0' has dtype"):
                opt.step([np.ones(4, np.float32) if rank == 0 else None])
            opt.step([np.ones(4, np.float32) if rank == 0 else np.zeros(4, np.float32)])
            return w

        for w in ranks(2, work):
            np.testing.assert_array_equal(w, 0.5)


if __name__ == "__main__":
    unittest.main()
