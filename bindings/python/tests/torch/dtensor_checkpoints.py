# SPDX-License-Identifier: Apache-2.0
"""Cases of test_dtensor_checkpoint.py: torch.distributed.checkpoint with DTensors, with equal and different numbers of
ranks, placements and optimizers. One set of processes saves a checkpoint and another one loads it."""
import copy
import os

import torch
import torch.distributed.checkpoint as dcp
from dtensors import DTensor, Shard, assert_equal, line, mlp, place, raises, random, shard_model, square, whole
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     get_state_dict, set_optimizer_state_dict, set_state_dict)

import dsopt
import dsopt.torch

FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WIDTHS = (6, 3, 10, 8, 5, 1)  # one layer has fewer rows than four ranks, and for two ranks the rows are no multiple

KINDS = {
    "AdamW": dict(lr=0.02), "Adam": dict(lr=0.02, weight_decay=0.1), "SGD": dict(lr=0.02, momentum=0.9),
    "Adagrad": dict(lr=0.02), "Lion": dict(lr=0.01), "FusedAdam": dict(lr=0.02),
    "FusedLamb": dict(lr=0.02, max_grad_norm=0.5)
}
TORCH = ("AdamW", "Adam", "SGD", "Adagrad")


def optimizer_of(net, name, of_torch=False):
    return getattr(torch.optim if of_torch else dsopt.torch, name)(net.parameters(), **KINDS[name])


def sharded(layout):
    net = mlp(widths=WIDTHS)
    if layout == "fsdp":
        return shard_model(net, line())
    if layout == "hsdp":
        return shard_model(net, square())
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    two = square()
    parallelize_module(net, two["column"], {"2": ColwiseParallel(), "4": RowwiseParallel()})
    return shard_model(net, two["row"])


def train(net, optimizer, steps):
    """Trains on gradients that depend only on the step, not on the number of ranks."""
    for step in steps:
        for i, param in enumerate(net.parameters()):
            grad = random(param.shape, 1000 * step + i)
            param.grad = place(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad
        optimizer.step()


def reference(name, of_torch=False):
    net = mlp(widths=WIDTHS)
    optimizer = optimizer_of(net, name, of_torch)
    train(net, optimizer, range(3))
    return net, optimizer


def assert_trained(net, optimizer, name, what, relative=None):
    """Compares parameters and state with those of one process after steps 0 to 4."""
    other, theirs = reference(name)
    train(other, theirs, range(3, 5))
    for (key, param), its in zip(net.named_parameters(), other.parameters()):
        assert_equal(whole(param), its.detach(), "%s: %s" % (what, key), relative)
        state, expected = optimizer.state[param], theirs.state[its]
        assert set(state) == set(expected), (what, set(state), set(expected))
        for entry, value in state.items():
            assert_equal(whole(value), expected[entry], "%s: %s of %s" % (what, entry, key), relative)
            assert entry == "step" or value.placements == param.placements, (what, entry, key)


def tolerance(name, of_torch=False):
    return 1e-5 if of_torch or name == "FusedLamb" else None


def saves(rank):
    """Saves checkpoints for the other set of processes, in the folder of the rendezvous."""
    folder = os.environ["DSOPT_TEST_CHECKPOINTS"]
    for layout in ("fsdp", "hsdp", "both"):
        for name in KINDS:
            for of_torch in (False, True) if name in TORCH else (False,):
                net = sharded(layout)
                optimizer = optimizer_of(net, name, of_torch)
                train(net, optimizer, range(3))
                model, state = get_state_dict(net, optimizer)
                dcp.save({"model": model, "optimizer": state},
                         checkpoint_id=os.path.join(folder, "%s-%s-%d" % (layout, name, of_torch)))


def loads(rank):
    """Loads with another number of ranks, and with other placements."""
    folder = os.environ["DSOPT_TEST_CHECKPOINTS"]
    others = {"fsdp": "both", "hsdp": "fsdp", "both": "hsdp"}
    for layout in others:
        for name in KINDS:
            for of_torch in (False, True) if name in TORCH else (False,):
                what = "%s-%s-%d" % (layout, name, of_torch)
                for into_torch in (False, True) if name in TORCH and not of_torch and layout == "fsdp" else (False,):
                    net = sharded(others[layout] if not into_torch else layout)
                    with torch.no_grad():
                        for param in net.parameters():
                            param.fill_(7)
                    optimizer = optimizer_of(net, name, into_torch)
                    model, state = get_state_dict(net, optimizer)
                    loaded = {"model": model, "optimizer": state}
                    dcp.load(loaded, checkpoint_id=os.path.join(folder, what))
                    set_state_dict(net, optimizer, model_state_dict=loaded["model"],
                                   optim_state_dict=loaded["optimizer"])
                    train(net, optimizer, range(3, 5))
                    assert_trained(net, optimizer, name, what, tolerance(name, of_torch or into_torch))


def resumes(rank):
    """In the same processes the next steps must have the same bits, also with LAMB."""
    for name in KINDS:
        for layout in ("fsdp", "both"):
            net = sharded(layout)
            optimizer = optimizer_of(net, name)
            train(net, optimizer, range(3))
            saved = get_optimizer_state_dict(net, optimizer, options=FLAT)
            weights = get_model_state_dict(net)
            again = sharded(layout)
            again.load_state_dict(weights)
            other = optimizer_of(again, name)
            set_optimizer_state_dict(again, other, copy.deepcopy(saved), options=FLAT)
            train(net, optimizer, range(3, 6))
            train(again, other, range(3, 6))
            for param, its in zip(net.parameters(), again.parameters()):
                assert torch.equal(whole(param), whole(its)), (name, layout)


def plain_state_dicts(rank):
    """full_state_dict saves and loads the whole state dicts of one process; load_state_dict loads those with
    DTensors."""
    for name in KINDS:
        plain, its = reference(name)
        net = sharded("fsdp")
        net_state = {key: place(value, line(), [Shard(0)]) for key, value in plain.state_dict().items()}
        net.load_state_dict(net_state)
        optimizer = optimizer_of(net, name)
        set_optimizer_state_dict(net, optimizer, get_optimizer_state_dict(plain, its), options=FULL)
        train(net, optimizer, range(3, 5))
        assert_trained(net, optimizer, name, "from one process", tolerance(name))
        full = get_optimizer_state_dict(net, optimizer, options=FULL)
        if rank == 0:
            train(plain, its, range(3, 5))
            for key, state in get_optimizer_state_dict(plain, its)["state"].items():
                for entry, value in state.items():
                    assert type(full["state"][key][entry]) is torch.Tensor
                    assert_equal(full["state"][key][entry], value, "%s of %s" % (entry, key), tolerance(name))

        again = sharded("fsdp")
        again.load_state_dict(net.state_dict())
        other = optimizer_of(again, name)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # like torch.optim, a load does not copy
        train(net, optimizer, range(5, 7))
        train(again, other, range(5, 7))
        for param, its in zip(net.parameters(), again.parameters()):
            assert torch.equal(whole(param), whole(its)), name
    plain, theirs = reference("AdamW")
    net = sharded("fsdp")
    optimizer = optimizer_of(net, "AdamW")
    train(net, optimizer, range(2))
    for some, its, pattern in ((optimizer, theirs, "a plain tensor, and the parameter a DTensor"),
                               (theirs, optimizer, "a DTensor, and the parameter a plain tensor")):
        before = copy.deepcopy(some.state_dict()["state"])
        raises(dsopt.UnsupportedError, "state 'exp_avg' of parameter 0 is %s; load it with "
               "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict" % pattern, some.load_state_dict,
               its.state_dict())
        for key, state in some.state_dict()["state"].items():
            for entry, value in state.items():
                assert_equal(whole(value), whole(before[key][entry]), "%s of %s" % (entry, key))
    train(net, optimizer, range(2, 3))


def stochastic_rounding_resumes(rank):
    """The state dict has the seed and the number of steps."""
    def one():
        net = shard_model(mlp(torch.bfloat16), line())
        return net, dsopt.torch.Lion(net.parameters(), lr=0.01, stochastic_rounding=True, seed=3)

    def steps(net, optimizer, range_):
        for step in range_:
            for i, param in enumerate(net.parameters()):
                grad = random(param.shape, 1000 * step + i, torch.bfloat16)
                param.grad = place(grad, param.device_mesh, param.placements)
            optimizer.step()

    net, optimizer = one()
    steps(net, optimizer, range(3))
    again, other = one()
    again.load_state_dict(net.state_dict())
    set_optimizer_state_dict(again, other, copy.deepcopy(get_optimizer_state_dict(net, optimizer)))
    steps(net, optimizer, range(3, 6))
    steps(again, other, range(3, 6))
    for param, its in zip(net.parameters(), again.parameters()):
        assert torch.equal(whole(param), whole(its))


SAVE = [saves, resumes, plain_state_dicts, stochastic_rounding_resumes]
LOAD = [loads]
