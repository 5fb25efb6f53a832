# SPDX-License-Identifier: Apache-2.0
"""The 1-bit family over devices of this process, compared with threads that use the engine through ctypes."""

import threading
import unittest

from support import Engine, bits, local_comms, model

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

import dsopt
import dsopt.jax
from dsopt import _abi as abi

PARAMS = {"u": jnp.linspace(-1, 1, 5), "v": jnp.linspace(-2, 1, 130).reshape(10, 13)}
STEPS = 7
CASES = {
    "onebit_adam": {"freeze_step": 3},
    "zero_one_adam": {"freeze_step": 3, "local_interval_steps": 2},
    "onebit_lamb": {"freeze_step": 3},
}


def grads_at(i, rank):
    return jax.tree.map(lambda p: jnp.cos(p * 3 + i + rank), PARAMS)


def all_grads(ranks):
    """Returns the gradients of every step and rank, computed once: each program may round a cosine differently."""
    return jax.tree.map(
        lambda *x: jnp.stack(x),
        *[jax.tree.map(lambda *x: jnp.stack(x), *[grads_at(i, r) for r in range(ranks)]) for i in range(STEPS)],
    )


def by_threads(name, ranks, grads):
    """Returns the parameters of every rank after the steps."""
    create, results, problems = local_comms(ranks), [None] * ranks, []

    def work(rank):
        try:
            engine = Engine(
                jax.tree.leaves(PARAMS),
                abi.description["constants"]["DSOPT_ALGORITHM_" + name.upper()],
                create(rank),
                abi.DSOPT_OPTIMIZER_AVERAGES,
                lr=1e-2,
                **CASES[name],
            )
            for i in range(STEPS):
                engine.step([g[i, rank] for g in grads])
            results[rank] = [p.tobytes() for p in engine.params]
        except dsopt.Error as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    return results


def mesh_of(ranks):
    return Mesh(np.array(jax.devices()[:ranks]), ("dp",))


def start(opt, ranks, params=None):
    """Returns state over a mesh, and its specs."""
    specs = opt.specs(PARAMS if params is None else params, ranks=ranks)
    init = jax.jit(jax.shard_map(opt.init, mesh=mesh_of(ranks), in_specs=P(), out_specs=specs, check_vma=False))
    return init(PARAMS if params is None else params), specs


class Family(unittest.TestCase):
    def test_gives_same_bits_as_threads(self):
        for ranks in (2, 4):
            grads = all_grads(ranks)
            for name, options in CASES.items():
                if ranks == 4 and name == "onebit_lamb":
                    continue  # 2 ranks are enough, and each program costs seconds
                with self.subTest(name=name, ranks=ranks):
                    opt = getattr(dsopt.jax, name)(1e-2, axis_name="dp", timeout_ms=60000, **options)
                    state, specs = start(opt, ranks)

                    def body(params, grads, state, opt=opt):
                        params, state, report = opt.step(params, jax.tree.map(lambda g: g[0], grads), state)
                        return params, state, jax.tree.map(lambda x: x[None], report)

                    step = jax.jit(
                        jax.shard_map(
                            body,
                            mesh=mesh_of(ranks),
                            in_specs=(P(), P("dp"), specs),
                            out_specs=(P(), specs, P("dp")),
                            check_vma=False,
                        ),
                        donate_argnums=(2,),
                    )
                    params = PARAMS
                    for i in range(STEPS):
                        params, state, report = step(params, jax.tree.map(lambda g, i=i: g[i], grads), state)
                    self.assertFalse(np.asarray(report.skipped).any())
                    expected = by_threads(name, ranks, [np.asarray(g) for g in jax.tree.leaves(grads)])
                    for rank in range(ranks):
                        mine = [
                            np.asarray(leaf.addressable_shards[rank].data).tobytes() for leaf in jax.tree.leaves(params)
                        ]
                        self.assertEqual(mine, expected[rank])

    def test_each_index_on_another_axis_has_a_comm(self):
        grads = all_grads(2)
        results = []
        for mesh in (mesh_of(2), Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "other"))):
            opt = dsopt.jax.onebit_adam(1e-2, axis_name="dp", freeze_step=3, timeout_ms=60000)
            specs = opt.specs(PARAMS, ranks=2)
            over = {"mesh": mesh, "check_vma": False}
            state = jax.jit(jax.shard_map(opt.init, in_specs=P(), out_specs=specs, **over))(PARAMS)

            def body(params, grads, state, opt=opt):
                return opt.step(params, jax.tree.map(lambda g: g[0], grads), state)[:2]

            step = jax.jit(jax.shard_map(body, in_specs=(P(), P("dp"), specs), out_specs=(P(), specs), **over))
            params = PARAMS
            for i in range(STEPS):
                params, state = step(params, jax.tree.map(lambda g, i=i: g[i], grads), state)
            for leaf in jax.tree.leaves(params):
                self.assertEqual(len({np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}), 1)
            results.append(bits(params))
        self.assertEqual(*results)

    def test_orders_two_exchanges_in_one_program(self):
        """The second exchange reads the report of the first, so that every rank runs them in the same order."""
        opts = [dsopt.jax.onebit_adam(1e-2, axis_name="dp", freeze_step=2, timeout_ms=60000) for _ in range(2)]
        (state, specs), _ = start(opts[0], 2), None

        def body(p, q, s, t):
            g = jax.tree.map(lambda x: x * (1 + jax.lax.axis_index("dp")), p)
            q, t, _ = opts[1].step(q, g, t)
            p, s, _ = opts[0].step(p, g, s)
            return p, q, s, t

        f = jax.jit(
            jax.shard_map(
                body,
                mesh=mesh_of(2),
                in_specs=(P(), P(), specs, specs),
                out_specs=(P(), P(), specs, specs),
                check_vma=False,
            )
        )
        p, q, s, t = PARAMS, PARAMS, state, state
        for _ in range(4):
            p, q, s, t = f(p, q, s, t)
        self.assertEqual(bits(p), bits(q))
        calls = [line for line in f.lower(p, q, s, t).as_text().splitlines() if "custom_call @dsopt_step" in line]
        name = calls[0].split(":")[0].split("=")[0].strip()
        self.assertIn(name + "#", calls[1].split("custom_call")[1])

    def test_trains_inside_pmap(self):
        params, loss = model()
        opt = dsopt.jax.onebit_adam(5e-3, axis_name="dp", freeze_step=30, timeout_ms=60000)
        x = jax.random.normal(jax.random.key(9), (2, 64, 8))
        y = x[..., :1] * x[..., 1:2]

        def step(p, s, x, y):
            return opt.step(p, jax.grad(loss)(p, x, y), s)[:2]

        step = jax.pmap(step, axis_name="dp", donate_argnums=(0, 1), devices=jax.devices()[:2])
        p = jax.tree.map(lambda a: jnp.stack([a, a]), params)
        before = float(loss(params, x.reshape(128, 8), y.reshape(128, 1)))
        s = jax.pmap(opt.init, axis_name="dp", devices=jax.devices()[:2])(p)
        for _ in range(100):
            p, s = step(p, s, x, y)
        for leaf in jax.tree.leaves(p):
            np.testing.assert_array_equal(leaf[0], leaf[1])
        self.assertLess(
            float(loss(jax.tree.map(lambda a: a[0], p), x.reshape(128, 8), y.reshape(128, 1))), 0.5 * before
        )


class Refusals(unittest.TestCase):
    def test_rejects_calls_outside_of_the_axis(self):
        with self.assertRaisesRegex(dsopt.ArgumentError, "there is no axis 'dp' here"):
            dsopt.jax.onebit_adam(1e-2, axis_name="dp").init(PARAMS)

    def test_rejects_unregistered_comms(self):
        opt = dsopt.jax.onebit_adam(1e-2, axis_name="dp", comm="nobody")
        with self.assertRaisesRegex(jax.errors.JaxRuntimeError, "no comm 'nobody' of rank"):
            jax.block_until_ready(start(opt, 2)[0])

    def test_accepts_registered_comms(self):
        """Comms of the caller, one per rank, which must be created by one thread per rank."""
        create, comms = local_comms(2), [None, None]
        threads = [threading.Thread(target=lambda r=r: comms.__setitem__(r, create(r))) for r in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank, comm in enumerate(comms):
            dsopt.jax.register_comm("mine", rank, comm.value)
        opt = dsopt.jax.onebit_adam(1e-2, axis_name="dp", comm="mine", freeze_step=1)
        state, specs = start(opt, 2)
        step = jax.jit(
            jax.shard_map(
                lambda p, s: opt.step(p, p, s)[:2],
                mesh=mesh_of(2),
                in_specs=(P(), specs),
                out_specs=(P(), specs),
                check_vma=False,
            )
        )
        params = PARAMS
        for _ in range(3):
            params, state = step(params, state)
        info = abi.dsopt_comm_info()
        import ctypes  # pylint: disable=import-outside-toplevel

        abi.check(abi.lib.dsopt_comm_query(comms[0], ctypes.byref(info)))
        self.assertGreater(info.calls, 0)
        for rank in range(2):
            dsopt.jax.register_comm("mine", rank, 0)


if __name__ == "__main__":
    unittest.main()
