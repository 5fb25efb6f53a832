# SPDX-License-Identifier: Apache-2.0
"""`node_group` and `shard="node"` of the 1-bit family, over one, two and four processes with gloo."""
import copy
import functools
import glob
import os
import pickle
import sys
import tempfile
import unittest
import warnings

from support import TestCase, child, main, params_of, run_ranks, torch

import dsopt
from dsopt.torch import FP16_Optimizer, OnebitAdam, OnebitLamb, ZeroOneAdam

dist = torch.distributed
GLOO = dist.is_available() and dist.is_gloo_available()
SHAPES = ((130, 70), (), (0, 3), (4097,), (5,), (64, 200), (3, 3))
F32, BF16 = torch.float32, torch.bfloat16
FREEZE = 3
check = unittest.TestCase()
RULES = {
    "adam": (OnebitAdam, dict(lr=0.01, freeze_step=FREEZE, weight_decay=0.1), F32),
    "adam bf16": (OnebitAdam, dict(lr=0.01, freeze_step=FREEZE), BF16),
    "lamb": (OnebitLamb, dict(lr=0.01, freeze_step=FREEZE), F32),
    "lamb bf16": (OnebitLamb, dict(lr=0.01, freeze_step=FREEZE, weight_decay=0.1), BF16),
}


def gradients(params, *seed):
    """Returns gradients in which a row of the first parameter is 0: exchanges exclude it."""
    generator = torch.Generator().manual_seed(sum(1000**i * x for i, x in enumerate(seed)))
    grads = [torch.randn(param.shape, generator=generator).to(param.dtype) for param in params]
    grads[0].view(-1)[:50] = 0
    return grads


def give(grads, *lists):
    for params in lists:
        for param, grad in zip(params, grads):
            param.grad = None if grad is None else grad.clone()


def same(some, others, what=""):
    check.assertEqual(len(some), len(others))
    for i, (a, b) in enumerate(zip(some, others)):
        check.assertTrue(torch.equal(a.detach(), b.detach()), "%s: tensor %d differs" % (what, i))


@functools.lru_cache(maxsize=None)
def levels(nodes):
    """Returns `group` and `node_group` of this rank, with this number of nodes of successive ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = ranks // nodes
    data = [dist.new_group(range(r, ranks, size)) for r in range(size)]
    of_node = [dist.new_group(range(first, first + size)) for first in range(0, ranks, size)]
    return dict(group=data[rank % size], node_group=of_node[rank // size])


def made(name, nodes, params=None, groups=None, **options):
    """Returns an optimizer in two levels, and its parameters."""
    kind, given, dtype = RULES[name]
    params = params_of(*SHAPES, dtype=dtype) if params is None else params
    return kind(params if groups is None else groups(params), **{**given, **levels(nodes), **options}), params


def go_on(steps, *pairs, absent=()):
    for step in steps:
        for optimizer, params in pairs:
            grads = gradients(params, step, dist.get_rank())
            give([None if (step, i) in absent else grad for i, grad in enumerate(grads)], params)
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
        for _, params in pairs[1:]:
            same(pairs[0][1], params, step)


def same_state(sharded, whole, params, others, node):
    """Compares parts, joined in the node, with whole state. Collective."""
    for param, other in zip(params, others):
        ours, theirs = sharded.state[param], whole.state[other]
        for name in ("master", "exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "mask"):
            check.assertEqual(name in ours, name in theirs)
            if name in theirs:
                check.assertEqual(ours[name].dim(), 1)
                parts = [None] * dist.get_world_size(node)
                dist.all_gather_object(parts, ours[name], group=node)
                check.assertTrue(torch.equal(torch.cat(parts), theirs[name].reshape(-1)), name)
        check.assertEqual(ours["step"], theirs["step"])


def keys_of(optimizer):
    return {key for state in optimizer.state.values() for key in state}


# ---------------------------------------------------------------------------------------------------------------- steps
def in_the_node_has_the_bits_of_two_levels(rank, name, nodes):
    (sharded, params), (whole, others) = made(name, nodes, shard="node"), made(name, nodes)
    for steps in (range(FREEZE), range(FREEZE, 9)):
        go_on(steps, (sharded, params), (whole, others), absent={(1, 5), (4, 0), (4, 3)})
        check.assertEqual((sharded.frozen, whole.frozen), (steps.stop > FREEZE - 1,) * 2)
        same_state(sharded, whole, params, others, levels(nodes)["node_group"])
    ranks = dist.get_world_size()
    size = ranks // nodes
    number = rank // size + nodes * (rank % size)
    check.assertEqual(sharded.state_dict()["shard"], [number, ranks, size])
    check.assertNotIn("shard", whole.state_dict())
    check.assertEqual((sharded.size, whole.size), (ranks, ranks))
    suffix = "_rank%dof%d" % (number, ranks) + ("_nodes_of_%d" % size if size > 1 else "")
    for optimizer in (sharded, whole):
        check.assertEqual("worker_error" + suffix in keys_of(optimizer), nodes > 1)
    numel, total = sum(sharded.state[p]["exp_avg"].numel() for p in params), sum(p.numel() for p in params)
    check.assertLess(numel, total / size + 4096 * nodes + 1)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, [param.detach() for param in params])
    for each in everyone:
        same(each, params)


def groups_of(params):
    """One group with a mask, one that is never compressed, and one as usual."""
    mask = torch.ones(params[0].shape[1:])
    mask[7] = 0
    return [{"params": params[4:], "non_freeze": True}, {"params": params[:1], "exp_avg_mask": mask},
            {"params": params[1:4]}]


def masks_and_groups_without_freeze(rank):
    (sharded, params), (whole, others) = [made("adam", 2, groups=groups_of, shard=shard) for shard in ("node", False)]
    go_on(range(8), (sharded, params), (whole, others))
    same_state(sharded, whole, params, others, levels(2)["node_group"])
    for optimizer in (sharded, whole):
        optimizer.param_groups[1]["exp_avg_mask"] = torch.zeros(())
    go_on(range(8, 10), (sharded, params), (whole, others))
    for optimizer in (sharded, whole):
        optimizer.param_groups[1]["exp_avg_mask"] = torch.zeros(3)
        with check.assertRaisesRegex(ValueError, r"exp_avg_mask has shape \(3,\), and must be broadcastable"):
            optimizer.step()


def memory_orders(rank):
    def make():
        conv, flipped = params_of((32, 16, 5, 5), (90, 70))
        conv.data = conv.data.contiguous(memory_format=torch.channels_last)
        flipped.data = flipped.data.t().contiguous().t()
        return [conv, flipped]

    optimizer, params = made("adam", 2, make(), shard="node")
    other, others = made("adam", 2)[0].__class__, [torch.nn.Parameter(p.detach().contiguous()) for p in params]
    whole = other(others, **{**RULES["adam"][1], **levels(2)})
    go_on(range(7), (optimizer, params), (whole, others))


def full_steps_take_the_mean_of_nodes(rank):
    """The sums of the ranks of a node, then of the nodes, each in order, times 1 / ranks, in float32."""
    (optimizer, params), others = made("adam", 2), params_of(*SHAPES)
    one = OnebitAdam(others, group=alone(), **RULES["adam"][1])
    for step in range(FREEZE - 1):
        every = [gradients(params, step, r) for r in range(4)]
        give(every[rank], params)
        give([((a + b) + (c + d)) * 0.25 for a, b, c, d in zip(*every)], others)
        optimizer.step()
        one.step()
        same(params, others, step)
    check.assertFalse(optimizer.frozen)


@functools.lru_cache(maxsize=None)
def alone():
    """Returns a process group of this rank."""
    return [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]


def zero_one_adam_in_two_levels(rank):
    params = params_of(*SHAPES)
    optimizer = ZeroOneAdam(params, lr=0.01, var_freeze_step=4, var_update_scaler=1, local_step_scaler=2,
                            local_step_clipper=2, **levels(2))
    before = [param.detach().clone() for param in params]
    for step in range(12):
        give(gradients(params, step, rank), params)
        shared = optimizer.next_reduction() != "local"
        optimizer.step()
        if shared:
            everyone = [None] * 4
            dist.all_gather_object(everyone, [param.detach() for param in params])
            for each in everyone:
                same(each, params, step)
    check.assertFalse(torch.equal(before[0], params[0].detach()))


def two_levels_in_a_wrapper(rank):
    params = params_of(*SHAPES, dtype=BF16)
    optimizer = FP16_Optimizer(OnebitAdam(params, lr=0.01, freeze_step=FREEZE, **levels(2)), clip_grad=1.0,
                               low_precision_dtype=BF16)
    (plain, others) = made("adam bf16", 2)
    for step in range(6):
        give([grad * 1e-4 for grad in gradients(params, step, rank)], params, others)  # nothing to clip
        optimizer.step()
        plain.step()
        same(params, others, step)
    with check.assertRaisesRegex(NotImplementedError, "OnebitAdam with shard is not supported in FP16_Optimizer"):
        FP16_Optimizer(made("adam bf16", 2, shard="node")[0])


def one_node_needs_no_group(rank):
    ranks = dist.get_world_size()
    (sharded, params), (whole, others) = [made("adam", 1, group=None, node_group=dist.group.WORLD, shard=shard)
                                          for shard in ("node", False)]
    go_on(range(6), (sharded, params), (whole, others))
    check.assertEqual(sharded.state_dict()["shard"], [rank, ranks, ranks])
    check.assertEqual(sharded.comm_backend_handle.ranks, ranks)
    if ranks > 2:
        with check.assertRaisesRegex(ValueError, "node_group has 2 of 4 ranks, and group is None; give the process"):
            OnebitAdam(params, node_group=levels(2)["node_group"])


def finds_averaged_gradients(rank):
    for shard in ("node", False):
        optimizer, params = made("adam", 2, shard=shard)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for step in range(FREEZE + 1):
                give(gradients(params, step), params)
                optimizer.step()
        check.assertEqual([str(one.message)[:72] for one in found if "equal on all" in str(one.message)],
                          ["OnebitAdam: in the first step with local gradients they are equal on all"] * (rank == 0))


def compares_lists(rank):
    params = params_of((5,), (9000,))[:1 if rank == 0 else 2]
    optimizer = OnebitAdam(params, shard="node", **levels(2))
    give([torch.ones_like(param) for param in params], params)
    with check.assertRaisesRegex(dsopt.Error, "ranks have from 1 to 2 parameters to step, and rank . of OnebitAdam"):
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------------- state
def state_dicts(rank, name):
    for steps in (FREEZE - 1, FREEZE, FREEZE + 3):
        (sharded, params), (whole, others) = [made(name, 2, groups=groups_of if name == "adam" else None, shard=shard)
                                              for shard in ("node", False)]
        sharded.load_state_dict(sharded.state_dict())
        go_on(range(steps), (sharded, params), (whole, others))
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in (sharded, whole)]
        weights = [param.detach().clone() for param in params]
        go_on(range(steps, steps + 4), (sharded, params))
        # Also with another freeze_step: the variance is then frozen, or adapted again.
        for freeze in (FREEZE, FREEZE - 1, FREEZE + 5):
            both = []
            for found, shard in zip(copy.deepcopy(saved), ("node", False)):
                copies = [torch.nn.Parameter(weight.clone()) for weight in weights]
                both.append(made(name, 2, copies, groups_of if name == "adam" else None, shard=shard,
                                 freeze_step=freeze))
                both[-1][0].load_state_dict(found)
            go_on(range(steps, steps + 4), *both)
            if freeze == FREEZE:
                same(params, both[0][1], (name, steps))


def state_dicts_of_others_are_refused(rank):
    (sharded, params), (whole, others) = made("adam", 2, shard="node"), made("adam", 2)
    go_on(range(5), (sharded, params), (whole, others))
    every = [None] * 4
    dist.all_gather_object(every, sharded.state_dict())
    before = copy.deepcopy(sharded.state_dict()["state"])
    for optimizer, found, text in ((sharded, every[rank ^ 1], "has the parts of rank . of 4, in nodes of 2 ranks, and"),
                                   (sharded, whole.state_dict(), "has whole tensors, and this optimizer needs the"),
                                   (whole, every[rank], "nodes of 2 ranks, and this optimizer whole tensors")):
        with check.assertRaisesRegex(NotImplementedError, text) as caught:
            optimizer.load_state_dict(copy.deepcopy(found))
        check.assertIn("save with opt.save(path) and load with opt.load(paths)", str(caught.exception))
    for i, state in before.items():
        same(list(state.values()), list(sharded.state_dict()["state"][i].values()))
    for optimizer in (sharded, whole):
        with check.assertRaisesRegex(dsopt.StateError, "OnebitAdam with a process group cannot be pickled"):
            pickle.dumps(optimizer)
    with check.assertRaisesRegex(dsopt.StateError, "cannot be pickled or copied"):
        copy.deepcopy(sharded)
    twin = copy.deepcopy(whole)
    go_on(range(5, 8), (whole, others), (twin, [p for group in twin.param_groups for p in group["params"]]))
    sharded.add_param_group({"params": params_of((7,)), "non_freeze": True})
    with check.assertRaisesRegex(dsopt.StateError, r"param_groups\[1\]\['params'\]\[0\] has no state"):
        sharded.step()


def active_of_a_load_is_that_of_the_run(rank, shard=False):
    """With tensors of a group that is never compressed in front of the others, and complex ones. A load computes
    "active" as the engine did."""
    pair, = params_of((3000, 2))
    params = params_of(*SHAPES) + [torch.nn.Parameter(torch.view_as_complex(pair.detach()))]
    params = params[4:] + params[:4]
    groups = [{"params": params[:2], "non_freeze": True}, {"params": params[2:]}]
    optimizer = OnebitAdam(groups, lr=0.01, freeze_step=2, shard=shard, **(levels(2) if shard else {}))
    for step in range(4):
        for i, param in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * step + 10 * i + rank)
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            param.grad.view(-1)[:1 + i] = 0
            param.grad.view(-1)[4096::7] = 0
        optimizer.step()
    key, = {key for key in optimizer.state[params[0]] if key.startswith("active")}
    found = optimizer.state[params[0]][key].clone()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer._plan()
    check.assertTrue(torch.equal(found, optimizer.state[params[0]][key]))
    check.assertTrue(found.any())


# ---------------------------------------------------------------------------------------------------------------- files
BEGUN = (FREEZE - 1, FREEZE + 2)  # steps


def path_of(name, steps, kind, rank):
    folder = os.environ["DSOPT_TEST_CHECKPOINTS"]
    return os.path.join(folder, "%s.%d.%s.%s.safetensors" % (name, steps, kind, rank))


def go_on_alike(steps, optimizer, params):
    """Steps with the same gradients on all ranks."""
    for step in steps:
        give(gradients(params, step), params)
        optimizer.step()


def save_case(rank, name):
    warnings.simplefilter("ignore")  # the gradients are equal
    for steps in BEGUN:
        for kind, shard in (("node", "node"), ("whole", False)):
            optimizer, params = made(name, 2, shard=shard)
            go_on_alike(range(steps), optimizer, params)
            optimizer.save(path_of(name, steps, kind, rank))
            weights = [param.detach().clone() for param in params]
            after = []
            for step in range(steps, steps + 3):
                go_on_alike([step], optimizer, params)
                after.append([param.detach().clone() for param in params])
            if rank == 0:
                torch.save((weights, after), path_of(name, steps, kind, 0) + ".weights")


def load_case(rank, name):
    warnings.simplefilter("ignore")
    for steps in BEGUN:
        for kind in ("node", "whole"):
            files = sorted(glob.glob(path_of(name, steps, kind, "*")))
            check.assertEqual(len(files), 4)
            weights, after = torch.load(path_of(name, steps, kind, 0) + ".weights")
            for nodes in [nodes for nodes in (1, 2, 4) if nodes <= dist.get_world_size()]:
                pairs = []
                for shard in ("node", False):
                    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
                    optimizer, _ = made(name, nodes, params, shard=shard, lr=77.0)
                    optimizer.load(files)
                    check.assertEqual((optimizer.param_groups[0]["lr"], optimizer.frozen), (0.01, steps >= FREEZE))
                    pairs.append((optimizer, params))
                (sharded, params), (whole, others) = pairs
                same_state(sharded, whole, params, others, levels(nodes)["node_group"])
                for step in range(steps, steps + 3):
                    for pair in pairs:
                        go_on_alike([step], *pair)
                    same(params, others, (name, steps, kind, nodes))
                    if step < FREEZE or (dist.get_world_size(), nodes) == (4, 2):
                        same(params, after[step - steps], (name, steps, kind, nodes))


FILES = {what: [functools.partial(case, name=name) for name in RULES] for what, case in (("save", save_case),
                                                                                         ("load", load_case))}
TWO = [functools.partial(in_the_node_has_the_bits_of_two_levels, name=name, nodes=nodes) for name in RULES
       for nodes in (1, 2)] + [one_node_needs_no_group, active_of_a_load_is_that_of_the_run]
FOUR = TWO + [masks_and_groups_without_freeze, memory_orders, full_steps_take_the_mean_of_nodes,
              zero_one_adam_in_two_levels, two_levels_in_a_wrapper, finds_averaged_gradients, compares_lists,
              state_dicts_of_others_are_refused]
FOUR += [functools.partial(state_dicts, name=name) for name in ("adam", "lamb bf16")]
FOUR.append(functools.partial(active_of_a_load_is_that_of_the_run, shard="node"))


@unittest.skipUnless(GLOO, "torch is built without gloo")
class Processes(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "two")

    def test_cases_pass_on_four_ranks(self):
        run_ranks(self, __file__, "four", ranks=4)

    def test_four_two_and_one_ranks_load_what_four_saved(self):
        with tempfile.TemporaryDirectory() as folder:
            environment = {"DSOPT_TEST_CHECKPOINTS": folder}
            run_ranks(self, __file__, "save:4", 4, environment)
            for ranks in (4, 2, 1):
                run_ranks(self, __file__, "load:%d" % ranks, ranks, environment)


class OneProcess(TestCase):
    def refuses(self, kind, pattern, call, *arguments, **options):
        with self.assertRaisesRegex(kind, pattern):
            call(*arguments, **options)

    def test_refuses_arguments(self):
        params, unsupported = params_of((5,)), NotImplementedError
        for kind in (OnebitAdam, OnebitLamb):
            name = kind.__name__
            self.refuses(unsupported, name + ": the 1-bit family is sharded in its node: shard='node' with node_group",
                         kind, params, shard=True, node_group=1)
            self.refuses(ValueError, name + ": shard='node' needs node_group", kind, params, shard="node")
        for shard in (True, "node"):
            self.refuses(unsupported, "ZeroOneAdam: 0/1 Adam is not sharded", ZeroOneAdam, params, shard=shard,
                         node_group=1)
        for kind in (OnebitAdam, OnebitLamb, ZeroOneAdam):
            name = kind.__name__
            self.refuses(ValueError, name + ": shard is 'data', and must be False, True or 'node'", kind, params,
                         shard="data")
            self.refuses(unsupported, name + ": node_group is not supported with compat='deepspeed'", kind, params,
                         node_group=1, compat="deepspeed")
            self.refuses(unsupported, name + ": save is not supported with compat='deepspeed'; use state_dict",
                         kind(params, compat="deepspeed").save, "/nonexistent/file")
        optimizer = OnebitAdam(params, shard="node", node_group=1)
        self.refuses(unsupported, "node_group: torch.distributed is not initialized", optimizer.step)

    def test_saves_and_loads_one_rank(self):
        for kind in (OnebitAdam, OnebitLamb, ZeroOneAdam):
            options = {"var_freeze_step" if kind is ZeroOneAdam else "freeze_step": 2}
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            optimizer, other = kind(params, lr=0.01, **options), kind(others, lr=1.0, **options)
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "state.safetensors")
                for step in range(4):
                    give(gradients(params, step), params)
                    optimizer.step()
                optimizer.save(path)
                for param, source in zip(others, params):
                    param.data.copy_(source.data)
                other.load(path)
                # The class for NumPy reads the same file.
                arrays = {"param_groups[0]['params'][%d]" % i: param.detach().clone().numpy()
                          for i, param in enumerate(params)}
                one = dsopt.Optimizer(arrays, getattr(dsopt, kind.__name__)(lr=1.0, freeze_step=2), nonfinite="skip")
                one.load(path)
            self.assertTrue(other.frozen)
            for step in range(4, 7):
                grads = gradients(params, step)
                give(grads, params, others)
                optimizer.step()
                other.step()
                self.assert_same(params, others)
                one.step({name: grad.numpy() for name, grad in zip(arrays, grads)})
                for array, param in zip(arrays.values(), params):
                    self.assertTrue(torch.equal(torch.as_tensor(array), param.detach()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        what, _, count = sys.argv[2].partition(":")
        cases, ranks = {"two": (TWO, 2), "four": (FOUR, 4)}.get(what) or (FILES[what], int(count))
        child(cases, int(sys.argv[3]), sys.argv[4], ranks)
    else:
        main()
