# SPDX-License-Identifier: Apache-2.0
"""`shard` and `average`: state in parts, and means of gradients, over one, two and four processes with gloo."""
import contextlib
import copy
import functools
import glob
import io
import os
import pathlib
import pickle
import re
import shutil
import sys
import tempfile
import unittest
from unittest import mock

from support import VERSION, TestCase, child, main, params_of, run_ranks, run_save_and_load, torch

import dsopt
from dsopt.torch import (SGD, Adagrad, Adam, Adam8bit, AdamW, AdamW8bit, DeepSpeedCPUAdam, DeepSpeedCPULion,
                         FusedAdam, FusedLamb, FusedLion, Lion, Muon, OnebitAdam)

dist = torch.distributed
GLOO = dist.is_available() and dist.is_gloo_available()
SHAPES = ((130, 70), (), (0, 3), (4097,), (5,), (64, 200), (3, 3))
check = unittest.TestCase()
F32, BF16 = torch.float32, torch.bfloat16
# Name: class, arguments, dtype of the parameters.
RULES = {
    "adamw": (AdamW, dict(lr=0.01), F32), "adam": (Adam, dict(lr=0.01, weight_decay=0.1), F32),
    "sgd": (SGD, dict(lr=0.01, momentum=0.9, dampening=0.5), F32), "plain sgd": (SGD, dict(lr=0.01), F32),
    "adagrad": (Adagrad, dict(lr=0.01, initial_accumulator_value=0.5), F32), "lion": (Lion, dict(lr=0.001), F32),
    "8 bit": (AdamW8bit, dict(lr=0.01), F32), "adam 8 bit": (Adam8bit, dict(lr=0.01), BF16),
    "fused adam": (FusedAdam, dict(lr=0.01), F32), "fused lion": (FusedLion, dict(lr=0.001), F32),
    "lamb": (FusedLamb, dict(lr=0.01, max_grad_norm=0.5), F32), "lamb bf16": (FusedLamb, dict(lr=0.01), BF16),
    "cpu adam": (DeepSpeedCPUAdam, dict(lr=0.01, fp32_optimizer_states=False), BF16),
    "cpu lion": (DeepSpeedCPULion, dict(lr=0.01), BF16),
    "random": (AdamW, dict(lr=0.01, stochastic_rounding=True, seed=7, exp_avg_sq_format="bf16_random"), BF16),
    "remainder": (AdamW, dict(lr=0.01, masters="remainder", exp_avg_format="e4m3"), BF16),
    "masters": (Adagrad, dict(lr=0.01, masters="float32"), BF16),
}


def gradients(params, *seed):
    generator = torch.Generator().manual_seed(sum(1000**i * x for i, x in enumerate(seed)))
    return [torch.randn(param.shape, generator=generator).to(param.dtype) for param in params]


def give(grads, *lists):
    for params in lists:
        for param, grad in zip(params, grads):
            param.grad = None if grad is None else grad.clone()


def same(some, others, what=""):
    check.assertEqual(len(some), len(others))
    for i, (a, b) in enumerate(zip(some, others)):
        check.assertTrue(torch.equal(a.detach(), b.detach()), "%s: tensor %d differs" % (what, i))


def joined(tensor):
    """Returns the parts of all ranks, one after the other. Collective."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.detach().clone().view(torch.uint8).numpy())  # pickle has no float8
    return torch.cat([torch.from_numpy(part) for part in parts]).view(tensor.dtype)


def same_state(sharded, whole, params, others, ranks=True):
    for param, other in zip(params, others):
        ours, theirs = sharded.state[param], whole.state[other]
        check.assertEqual(set(ours), set(theirs))
        for name, tensor in theirs.items():
            if name == "step":
                check.assertEqual(ours[name], tensor)
                continue
            check.assertEqual(ours[name].dim(), 1)
            check.assertEqual(ours[name].dtype, tensor.dtype)
            found = joined(ours[name]) if ranks else ours[name]
            check.assertTrue(torch.equal(found.view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name)


# --------------------------------------------------------------------------------------------------- averaged elsewhere
def module(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 33))


def loss_of(model, rank, step):
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.nn.functional.mse_loss(model(x), x[:, :33] * x[:, 1:34])


def under_ddp_has_the_bits_of_the_whole_state(rank):
    models = [torch.nn.parallel.DistributedDataParallel(module()) for _ in range(2)]
    optimizers = [AdamW(model.parameters(), lr=0.01, shard=shard) for model, shard in zip(models, (True, False))]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
    first = loss_of(models[0], rank, 0).item()
    for step in range(8):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
        same(*[list(model.parameters()) for model in models], what=step)
    same_state(*optimizers, *[list(model.parameters()) for model in models])
    check.assertLess(loss_of(models[0], rank, 0).item(), first)
    # The part of a rank is near its share.
    numel = sum(optimizers[0].state[param]["exp_avg"].numel() for param in models[0].parameters())
    total = sum(param.numel() for param in models[0].parameters())
    check.assertLessEqual(numel, total / dist.get_world_size() + 4096)


def has_the_bits_of_the_whole_state(rank, name):
    kind, options, dtype = RULES[name]
    params, others = params_of(*SHAPES, dtype=dtype), params_of(*SHAPES, dtype=dtype)
    groups = [[{"params": some[:3]}, {"params": some[3:], "lr": 0.02}] for some in (params, others)]
    sharded, whole = kind(groups[0], shard=True, **options), kind(groups[1], **options)
    whole._at_once = whole._counts = True  # with shard every parameter has state, with `step`, from the first step on
    for step in range(6):
        grads = gradients(params, step)
        grads[5] = None if step in (0, 3) else grads[5]
        give(grads, params, others)
        for optimizer in (sharded, whole):
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.step()
        same(params, others, (name, step))
    same_state(sharded, whole, params, others)


def memory_orders(rank):
    """A parameter that is not contiguous is stepped in a copy; its part is in row-major order."""
    def make():
        conv, flipped, gaps = params_of((32, 16, 5, 5), (90, 70), (60, 80))
        conv.data = conv.data.contiguous(memory_format=torch.channels_last)
        flipped.data = flipped.data.t().contiguous().t()
        gaps.data = torch.zeros(60, 160)[:, ::2].copy_(gaps.data)
        return [conv, flipped, gaps]

    params, others = make(), make()
    sharded, whole = AdamW(params, lr=0.01, shard=True), AdamW(others, lr=0.01)
    for step in range(4):
        give(gradients(params, step), params, others)
        sharded.step()
        whole.step()
        same(params, others, step)
    for param, other in zip(params, others):
        check.assertTrue(torch.equal(joined(sharded.state[param]["exp_avg"]),
                                     whole.state[other]["exp_avg"].contiguous().reshape(-1)))
        check.assertEqual(param.stride(), other.stride())
    params[0].data = params[0].data.contiguous()  # the plan follows, and the part stays
    give(gradients(params, 9), params, others)
    sharded.step()
    whole.step()
    same(params, others)


def complex_parameters(rank):
    params, others = [[torch.nn.Parameter(torch.view_as_complex(torch.ones(5000, 2)))] for _ in range(2)]
    sharded, whole = AdamW(params, lr=0.01, shard=True), AdamW(others, lr=0.01)
    for step in range(3):
        grad = torch.view_as_complex(torch.randn(5000, 2, generator=torch.Generator().manual_seed(step)))
        give([grad], params, others)
        sharded.step()
        whole.step()
        same(params, others)
    check.assertEqual(sharded.state[params[0]]["exp_avg"].dtype, torch.complex64)


def skips_with_found_inf(rank):
    """As GradScaler does with fused=True. All ranks have the same averages."""
    params, others = params_of(*SHAPES), params_of(*SHAPES)
    sharded, whole = AdamW(params, fused=True, shard=True), AdamW(others, fused=True)
    for step in range(4):
        give([grad * 8 for grad in gradients(params, step)], params, others)
        for optimizer in (sharded, whole):
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(float(step == 2))
            optimizer.step()
        same(params, others, step)
    check.assertEqual(sharded.state[params[0]]["step"], 3)


def grad_scaler_under_ddp(rank):
    if VERSION < (2, 4):
        return
    models = [torch.nn.parallel.DistributedDataParallel(module()) for _ in range(2)]
    for fused in (False, True):
        optimizers = [AdamW(model.parameters(), fused=fused, shard=shard)
                      for model, shard in zip(models, (True, False))]
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in models]
        for step in range(5):
            for model, optimizer, scaler in zip(models, optimizers, scalers):
                optimizer.zero_grad()
                loss = loss_of(model, rank, step) * (float("inf") if step == 2 and rank == 1 else 1)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            same(*[list(model.parameters()) for model in models], what=(fused, step))
        check.assertEqual(scalers[0].get_scale(), scalers[1].get_scale())


def node_of(rank):
    """Returns the process groups of two nodes: ranks with the same rank in their nodes, and this rank's node."""
    ranks = dist.get_world_size() // 2
    data = [dist.new_group([r, r + ranks]) for r in range(ranks)]
    nodes = [dist.new_group(range(first, first + ranks)) for first in (0, ranks)]
    return data[rank % ranks], nodes[rank // ranks]


def shards_in_the_node(rank):
    data, node = node_of(rank)
    params, others = params_of(*SHAPES), params_of(*SHAPES)
    sharded, whole = AdamW(params, lr=0.01, shard="node", group=data, node_group=node), AdamW(others, lr=0.01)
    for step in range(4):
        give(gradients(params, step), params, others)
        sharded.step()
        whole.step()
        same(params, others, step)
    ranks = dist.get_world_size()
    node_ranks = ranks // 2
    check.assertEqual(sharded.state_dict()["shard"], [rank // node_ranks + 2 * (rank % node_ranks), ranks, node_ranks])
    numel = torch.tensor([sharded.state[param]["exp_avg"].numel() for param in params])
    dist.all_reduce(numel, group=node)
    check.assertEqual(numel.tolist(), [param.numel() for param in params])
    # With AVERAGES: the bits of two levels without shard.
    everything = [params_of(*SHAPES) for _ in range(3)]
    optimizers = [AdamW(some, lr=0.01, average=True, max_grad_norm=0.5, group=data, node_group=node, shard=shard)
                  for some, shard in zip(everything, (False, True, "node"))]
    for step in range(4):
        give(gradients(params, step, rank), *everything)
        for optimizer in optimizers:
            optimizer.step()
        same(everything[0], everything[1])
        same(everything[0], everything[2])
    # One node: `group` may be left out.
    alone = params_of(*SHAPES)
    optimizer = AdamW(alone, shard="node", node_group=dist.group.WORLD)
    give(gradients(alone, 1), alone)
    optimizer.step()
    check.assertEqual(optimizer.state_dict()["shard"], [rank, ranks, ranks])
    with check.assertRaisesRegex(ValueError, "node_group has %d of %d ranks, and group is None" % (node_ranks, ranks)):
        optimizer = AdamW(alone, shard="node", node_group=node)
        optimizer.step()


# ------------------------------------------------------------------------------------------------------- averaged here
def means_of(params, step, absent=()):
    """Returns the means of the gradients of all ranks: the sum in the order of ranks in float32, times 1 / ranks."""
    ranks = dist.get_world_size()
    totals = None
    for rank in range(ranks):
        grads = [torch.zeros_like(g) if (rank, i) in absent else g
                 for i, g in enumerate(gradients(params, step, rank))]
        totals = grads if totals is None else [total + grad for total, grad in zip(totals, grads)]
    return [total * torch.tensor(1 / ranks, dtype=torch.float32) for total in totals]


def averages_in_rank_order(rank, name, shard):
    kind, options, dtype = RULES[name]
    params, others = params_of(*SHAPES), params_of(*SHAPES)
    optimizer, one = kind(params, average=True, shard=shard, **options), kind(others, **options)
    one._at_once = one._counts = True
    absent = {(1, 5), (0, 0)}
    for step in range(5):
        grads = gradients(params, step, rank)
        give([None if (rank, i) in absent else grad for i, grad in enumerate(grads)], params)
        give(means_of(params, step, absent), others)
        optimizer.step()
        one.step()
        same(params, others, (name, step))
    if shard:
        same_state(optimizer, one, params, others)


def averages_of_16_bit_are_the_same_in_parts(rank):
    everything = [params_of(*SHAPES, dtype=BF16) for _ in range(2)]
    optimizers = [AdamW(some, lr=0.01, average=True, shard=shard, masters="float32")
                  for some, shard in zip(everything, (False, True))]
    for step in range(4):
        grads = gradients(everything[0], step, rank)
        grads[3] = None if rank == 0 else grads[3]
        give(grads, *everything)
        for optimizer in optimizers:
            optimizer.step()
        same(*everything, what=step)


def averages_like_ddp(rank, shard):
    """With two ranks the bits of DistributedDataParallel, with more about the same losses."""
    ddp, plain = torch.nn.parallel.DistributedDataParallel(module()), module()
    optimizers = AdamW(ddp.parameters(), lr=0.01), AdamW(plain.parameters(), lr=0.01, average=True, shard=shard)
    for step in range(10):
        losses = []
        for model, optimizer in zip((ddp, plain), optimizers):
            optimizer.zero_grad()
            losses.append(loss_of(model, rank, step))
            losses[-1].backward()
            optimizer.step()
        check.assertLess(abs(losses[0].item() - losses[1].item()), 1e-5, step)
        if dist.get_world_size() == 2:
            same(list(ddp.parameters()), list(plain.parameters()), step)


def clips_the_mean(rank, shard):
    params, others = params_of(*SHAPES), params_of(*SHAPES)
    optimizer = AdamW(params, lr=0.01, average=True, shard=shard, max_grad_norm=0.5)
    one = AdamW(others, lr=0.01)
    for step in range(4):
        give(gradients(params, step, rank), params)
        give(means_of(params, step), others)
        torch.nn.utils.clip_grad_norm_(others, 0.5)
        optimizer.step()
        one.step()
        torch.testing.assert_close([p.detach() for p in params], [p.detach() for p in others], rtol=1e-5, atol=1e-6)
    before = [param.detach().clone() for param in params]
    give(gradients(params, 9, rank), params)
    if rank == 1:
        params[0].grad[0, 0] = float("nan")
    optimizer.step()  # the norm is not finite, on all ranks
    same(params, before)


def refuses_grad_scaler(rank):
    params = params_of((5,))
    for kind in (AdamW, SGD, FusedAdam, FusedLamb):
        optimizer = kind(params, lr=0.01, average=True)
        give(gradients(params, 1), params)
        pattern = kind.__name__ + ": average=True is not supported with GradScaler"
        if VERSION < (2, 0):
            with check.assertRaisesRegex(NotImplementedError, pattern):
                getattr(optimizer, "_step_supports_amp_scaling", False)
        elif VERSION >= (2, 4):
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            with check.assertRaisesRegex(NotImplementedError, pattern):
                scaler.step(optimizer)


def compares_ranks(rank):
    """The first step finds different weights, lists and options, on all ranks, and changes nothing."""
    for change, pattern in (("weights", "the weights of the ranks differ"), ("count", "ranks have from 1 to 2 param"),
                            ("shape", "rank %d of AdamW has other parameters" % rank), ("rule", "has other parameters"),
                            ("option", "has other parameters")):
        params = params_of((5,), (4097,), seed=rank if change == "weights" else 0)
        if change == "count" and rank == 0:
            params = params[:1]
        if change == "shape" and rank == 0:
            params[1].data = params[1].data[:4096].clone()
        kind = AdamW if change != "rule" or rank else Adam
        optimizer = kind(params, average=True, shard=change == "option" and rank == 0)
        give(gradients(params, 1), params)
        before = [param.detach().clone() for param in params]
        with check.assertRaisesRegex(dsopt.Error, pattern) as caught:
            optimizer.step()
        check.assertIn("DSOPT_ERR_MISMATCH", str(caught.exception))
        same(params, before)


def compares_ranks_in_each_step(rank):
    """With check_ranks: all ranks refuse steps in which one differs, and then go on together."""
    for kind, options in ((AdamW, dict(shard=True)), (FusedLamb, dict(shard=True)), (Muon, dict(split_matrices=True)),
                          (AdamW, dict(average=True)), (OnebitAdam, dict(comm_backend_name="gloo"))):
        params = params_of((5, 4), (70, 60))
        optimizer = kind(params, lr=0.01, check_ranks=True, **options)
        give(gradients(params, 1), params)
        optimizer.step()
        before = [param.detach().clone() for param in params]
        if rank == 0:
            optimizer.param_groups[0]["lr"] = 0.5
        refuses_on_all_ranks(optimizer, "lr of group 0 is ")
        optimizer.param_groups[0]["lr"] = 0.01
        if "average" not in options and kind is not OnebitAdam:  # there a missing gradient counts as zeros
            if rank == 0:
                params[0].grad = None
            refuses_on_all_ranks(optimizer, r"the gradient of 'param_groups\[0\]\['params'\]\[0\]' is")
        same(params, before)
        give(gradients(params, 2), params)
        optimizer.step()
        check.assertFalse(torch.equal(params[0], before[0]))
        if kind is OnebitAdam:
            check.assertTrue(copy.deepcopy(optimizer)._checks_ranks)
        if options == dict(average=True):  # one rank alone has more parameters, then all have
            before, (more,) = [param.detach().clone() for param in params], params_of((3,))
            for adds in (rank == 0, rank != 0):
                if adds:
                    optimizer.add_param_group({"params": [more]})
                give(gradients([*params, more], 3), [*params, more])
                if adds == (rank == 0):
                    refuses_on_all_ranks(optimizer, "ranks have from 2 to 3 parameters in 1 to 2 groups")
                    same(params, before)
            optimizer.step()
            check.assertFalse(torch.equal(params[0], before[0]))
    params = params_of((5, 4))
    with check.assertRaisesRegex(NotImplementedError, "AdamW: check_ranks has no effect without shard or average"):
        AdamW(params, check_ranks=True)


def refuses_on_all_ranks(optimizer, pattern):
    with check.assertRaisesRegex(dsopt.Error, pattern) as caught:
        optimizer.step()
    check.assertIn("DSOPT_ERR_MISMATCH", str(caught.exception))


def state_dicts(rank):
    params = params_of(*SHAPES)
    optimizer = AdamW(params, lr=0.01, shard=True)
    check.assertNotIn("shard", optimizer.state_dict())
    AdamW(params_of(*SHAPES), shard=True).load_state_dict(optimizer.state_dict())
    for step in range(3):
        give(gradients(params, step), params)
        optimizer.step()
    saved = optimizer.state_dict()
    ranks = dist.get_world_size()
    check.assertEqual(saved["shard"], [rank, ranks, 1])
    others = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = AdamW(others, shard=True)
    other.load_state_dict(copy.deepcopy(saved))
    for step in range(3, 6):
        give(gradients(params, step), params, others)
        optimizer.step()
        other.step()
        same(params, others)
    before = copy.deepcopy(other.state_dict())
    every = [None] * ranks
    dist.all_gather_object(every, saved)
    unsharded = AdamW(params_of(*SHAPES))
    whole = AdamW(params_of(*SHAPES))
    give(gradients(params, 1), whole.param_groups[0]["params"])
    whole.step()
    for loads, found, text in ((other, every[(rank + 1) % ranks], "the parts of rank %d of" % ((rank + 1) % ranks)),
                               (other, whole.state_dict(), "has whole tensors, and"), (other, {**saved, "shard": [
                                   rank, ranks, ranks]}, "in nodes of %d ranks" % ranks),
                               (unsharded, saved, "and this optimizer whole tensors")):
        with check.assertRaisesRegex(NotImplementedError, text) as caught:
            loads.load_state_dict(copy.deepcopy(found))
        check.assertIn("save with opt.save(path) and load with opt.load(paths)", str(caught.exception))
    check.assertEqual(len(unsharded.state), 0)
    for name, tensor in before["state"][0].items():
        check.assertTrue(torch.equal(tensor, other.state_dict()["state"][0][name]))
    if VERSION >= (2, 3):
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
        model = module()
        sharded = AdamW(model.parameters(), shard=True)
        give(gradients(list(model.parameters()), 1), list(model.parameters()))
        sharded.step()
        found = get_optimizer_state_dict(model, sharded)
        with check.assertRaisesRegex(NotImplementedError, "opt.load"):
            set_optimizer_state_dict(model, sharded, found)


def dtensors_are_refused(rank):
    import dtensors
    if dtensors.ABSENT:
        return
    param = torch.nn.Parameter(dtensors.place(torch.randn(8, 4), dtensors.line(), [dtensors.Shard(0)]))
    for argument in ("shard", "average"):
        optimizer = AdamW([param], **{argument: True})
        param.grad = torch.zeros_like(param)
        with check.assertRaisesRegex(NotImplementedError, "is a DTensor, and %s is for" % argument):
            optimizer.step()
    AdamW([param]).step()


def program_of_the_readme(rank):
    readme = pathlib.Path(__file__).resolve().parents[2] / "dsopt" / "torch" / "README.md"
    programs = re.findall(r"^```py\n(.*?)^```$", readme.read_text(encoding="utf-8"), flags=re.M | re.S)
    program, = [found for found in programs if "shard=True" in found]
    said, folder, before = io.StringIO(), [tempfile.mkdtemp() if rank == 0 else None], os.getcwd()
    dist.broadcast_object_list(folder)
    os.chdir(folder[0])
    try:  # the test has already created the process group, without an address
        with mock.patch.object(dist, "init_process_group"), contextlib.redirect_stdout(said):
            exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
        dist.barrier()
    finally:
        os.chdir(before)
        if rank == 0:
            shutil.rmtree(folder[0])
    check.assertEqual(said.getvalue(), "trained: True\n")


# --------------------------------------------------------------------------------------------------------------- files
SAVED = ("adamw", "sgd", "8 bit", "remainder", "masters", "random", "lamb", "adagrad")


def begun(name, steps, **options):
    """Returns an optimizer, its parameters, and the next step, after some steps with averaged gradients."""
    kind, given, dtype = RULES[name]
    params = params_of(*SHAPES, dtype=dtype)
    optimizer = kind(params, **given, **options)
    optimizer._at_once = optimizer._counts = True
    go_on(optimizer, params, range(steps))
    return optimizer, params


def go_on(optimizer, params, steps):
    for step in steps:
        give(gradients(params, step), params)
        optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.step()


def path_of(name, rank):
    return os.path.join(os.environ["DSOPT_TEST_CHECKPOINTS"], "%s.%d.safetensors" % (name, rank))


def save_case(rank, name):
    optimizer, params = begun(name, 5, shard=True)
    optimizer.save(path_of(name, rank))
    if rank == 0:
        torch.save(params, path_of(name, rank) + ".weights")
    go_on(optimizer, params, range(5, 6))  # saving changes nothing
    same(params, begun(name, 6)[1])


def load_case(rank, name):
    paths = sorted(glob.glob(path_of(name, 0).replace(".0.", ".*.")))
    kind, options, _ = RULES[name]
    whole, others = begun(name, 5)
    for shard in (True, False):
        params = torch.load(path_of(name, 0) + ".weights", **({"weights_only": False} if VERSION >= (2, 0) else {}))
        optimizer = kind(params, shard=shard, **{**options, "lr": 77.0})
        optimizer.load(paths)
        check.assertEqual(optimizer.param_groups[0]["lr"], whole.param_groups[0]["lr"])
        same(params, others, name)
        if shard:
            same_state(optimizer, whole, params, others)
        copied = copy.deepcopy(others)
        reference = kind(copied, **options)
        reference.load_state_dict(copy.deepcopy(whole.state_dict()))
        reference._at_once = reference._counts = True
        go_on(optimizer, params, range(5, 9))
        go_on(reference, copied, range(5, 9))
        same(params, copied, (name, shard))
    if len(paths) > 1:
        before = copy.deepcopy(optimizer.state_dict()["state"])
        with check.assertRaisesRegex(dsopt.Error, "."):
            optimizer.load(paths[:-1])
        after = optimizer.state_dict()["state"]
        for i, state in before.items():
            same(list(state.values()), list(after[i].values()))


FILES = {what: [functools.partial(case, name=name) for name in SAVED] for what, case in (("save", save_case),
                                                                                         ("load", load_case))}
BOTH = [under_ddp_has_the_bits_of_the_whole_state, memory_orders, complex_parameters, skips_with_found_inf,
        grad_scaler_under_ddp, averages_of_16_bit_are_the_same_in_parts, refuses_grad_scaler, compares_ranks,
        compares_ranks_in_each_step,
        state_dicts, dtensors_are_refused, program_of_the_readme]
BOTH += [functools.partial(has_the_bits_of_the_whole_state, name=name) for name in RULES]
BOTH += [functools.partial(averages_in_rank_order, name=name, shard=shard) for shard in (False, True)
         for name in ("adamw", "sgd", "lamb", "8 bit")]
BOTH += [functools.partial(case, shard=shard) for shard in (False, True)
         for case in (averages_like_ddp, clips_the_mean)]
FOUR = BOTH + [shards_in_the_node]


@unittest.skipUnless(GLOO, "torch is built without gloo")
class Processes(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "two")

    def test_cases_pass_on_four_ranks(self):
        run_ranks(self, __file__, "four", ranks=4)

    def test_two_and_one_ranks_load_what_four_saved(self):
        with tempfile.TemporaryDirectory() as folder:
            environment = {"DSOPT_TEST_CHECKPOINTS": folder}
            run_ranks(self, __file__, "save:4", 4, environment)
            for ranks in (2, 1, 4):
                run_ranks(self, __file__, "load:%d" % ranks, ranks, environment)

    def test_four_ranks_load_what_one_saved(self):
        run_save_and_load(self, __file__, 1, 4)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        what, _, count = sys.argv[2].partition(":")
        cases, ranks = {"two": (BOTH, 2), "four": (FOUR, 4)}.get(what) or (FILES[what], int(count))
        child(cases, int(sys.argv[3]), sys.argv[4], ranks)
    else:
        main()
