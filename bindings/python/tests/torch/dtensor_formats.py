# SPDX-License-Identifier: Apache-2.0
"""Cases of test_dtensor_formats.py: moments and masters in formats other than float32, of DTensors."""
import copy
import os

import torch
import torch.distributed.checkpoint as dcp
from dtensors import (DTensor, Replicate, Shard, Twins, assert_equal, line, place, raises, random, shard_model, square,
                      whole)
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_optimizer_state_dict, get_state_dict,
                                                     set_optimizer_state_dict, set_state_dict)

import dsopt
from dsopt.torch import SGD, AdamW, AdamW8bit, Lion

FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
KINDS = ((AdamW, dict(lr=0.02, exp_avg_format="e4m3", exp_avg_sq_format="bf16_random", seed=5)),
         (AdamW, dict(lr=0.02, exp_avg_format="bf16_random", exp_avg_sq_format="q8")),
         (AdamW8bit, dict(lr=0.02)), (SGD, dict(lr=0.02, momentum=0.9, exp_avg_format="e4m3")),
         (Lion, dict(lr=0.01, exp_avg_format="q8")))


def bits(tensor):
    """Returns a whole tensor as a flat one of a dtype that gloo sends and that has operations."""
    view = {torch.float8_e4m3fn: lambda x: x.view(torch.uint8), torch.int16: torch.Tensor.int}
    change = view.get(tensor.dtype, lambda x: x)
    if isinstance(tensor, DTensor):
        tensor = DTensor.from_local(change(tensor._local_tensor), tensor.device_mesh, tensor.placements,
                                    run_check=False, shape=tensor.shape, stride=tensor.stride())
        return whole(tensor).reshape(-1)
    return change(tensor.detach()).reshape(-1)


def assert_same_state(param, state, expected, what):
    assert set(state) == set(expected), (what, set(state), set(expected))
    for name, value in state.items():
        about = "%s: %s" % (what, name)
        assert value.dtype == expected[name].dtype, about
        if isinstance(param, DTensor) and name != "step":
            assert isinstance(value, DTensor) and value.device_mesh == param.device_mesh, about
            if not name.endswith("_scale"):
                assert value.placements == param.placements and value.shape == param.shape, about
        assert_equal(bits(value), bits(expected[name]), about)


def bits_are_those_of_unsharded_parameters(rank):
    one, two = line(), square()
    blocks = [((64, 256), one, [Shard(0)]), ((10, 512), one, [Shard(0)]), ((3, 256), one, [Shard(0)]),
              ((1, 9, 256), one, [Shard(1)]), ((16, 64), one, [Shard(0)]), ((2048,), one, [Shard(0)]),
              ((9, 256), two, [Replicate(), Shard(0)]), ((9, 2, 128), two, [Shard(0), Shard(0)]),
              ((300,), one, [Replicate()]), ((7, 2), two, [Replicate(), Replicate()]), ((0, 3), one, [Shard(0)]),
              ((11, 256), two["column"], [Shard(0)]), ((1, 8192), one, [Shard(0)]), ((1, 700), one, [Shard(0)]),
              ((5, 3), None, None)]
    variants = (("bfloat16", {"masters": "remainder"}), ("bfloat16", {"masters": "float32"}), ("float32", {}),
                ("bfloat16", {"stochastic_rounding": True}), ("bfloat16", {}))
    for (kind, options), (dtype, more) in zip(KINDS, variants):
        twins = Twins(blocks, getattr(torch, dtype), leave_out=4)
        optimizer, other = [kind(params, min_8bit_size=0, **options, **more) for params in (twins.params, twins.whole)]
        for _ in range(4):
            twins.give_grads()
            optimizer.step()
            other.step()
        what = "%s %s %s" % (kind.__name__, options, more)
        twins.assert_params(what)
        for param, its in zip(twins.params, twins.whole):
            assert_same_state(param, optimizer.state[param], other.state[its], what)


def sizes_are_those_of_whole_tensors(rank):
    """Each rank's shard has fewer elements than min_8bit_size, which the whole tensor has."""
    twins = Twins([((16, 256), line(), [Shard(0)]), ((15, 256), line(), [Shard(0)]), ((33, 7), line(), [Shard(1)])])
    optimizer = AdamW8bit(twins.params)
    twins.give_grads()
    optimizer.step()
    assert [optimizer.state[param]["exp_avg"].dtype for param in twins.params] == [torch.uint8] + [torch.float32] * 2
    assert tuple(optimizer.state[twins.params[0]]["exp_avg_scale"].shape) == (16, 1)


def refuses_shards_that_are_not_made_of_blocks(rank):
    one, two = line(), square()
    for layout in (((10, 5), one, [Shard(0)]), ((600,), one, [Shard(0)]), ((8, 512), one, [Shard(1)]),
                   ((9, 512), two, [Shard(0), Shard(1)]), ((1000,), two, [Shard(0), Shard(0)])):
        twins = Twins([((4, 4), one, [Replicate()]), layout])
        twins.give_grads()
        before = [whole(param).clone() for param in twins.params]
        raises(dsopt.UnsupportedError, r"params'\]\[1\].*need shards that are made of whole blocks of 256 elements",
               AdamW8bit(twins.params, min_8bit_size=0).step)
        for param, old in zip(twins.params, before):
            assert torch.equal(whole(param), old)
        AdamW(twins.params, exp_avg_format="bf16").step()
    twins = Twins([((8, 512), one, [Shard(1)])])
    twins.give_grads()
    raises(dsopt.UnsupportedError, "and the format 'bf16_random' needs shards that are intervals",
           AdamW(twins.params, exp_avg_sq_format="bf16_random").step)


def new_memory_and_placements_are_followed(rank):
    twins = Twins([((64, 256), line(), [Shard(0)])], torch.bfloat16)
    optimizer, other = [AdamW(params, lr=0.02, exp_avg_format="e4m3", exp_avg_sq_format="q8", masters="remainder")
                        for params in (twins.params, twins.whole)]
    for step in range(4):
        twins.give_grads()
        optimizer.step()
        other.step()
        twins.assert_params("step %d" % step)
        if step == 0:
            twins.params[0]._local_tensor = twins.params[0]._local_tensor.clone()
        if step == 1:  # gloo sends neither float8 nor int16
            new = torch.nn.Parameter(place(whole(twins.params[0]), line(), [Replicate()]))
            twins.params[0].grad = None
            torch.utils.swap_tensors(twins.params[0], new)
            twins.layouts = [((64, 256), line(), [Replicate()])]
    assert_same_state(twins.params[0], optimizer.state[twins.params[0]], other.state[twins.whole[0]], "at the end")


# -------------------------------------------------------------------------------------------------------- checkpoints
def model():
    """Rows are no multiple of the number of ranks. The first layer's rows are whole blocks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 30, bias=False), torch.nn.Tanh(),
                               torch.nn.Linear(30, 9)).to(torch.bfloat16)


def optimizer_of(net, options):
    kind, given = options
    return kind(net.parameters(), min_8bit_size=1000, masters="remainder", **given)


def train(net, optimizer, steps):
    for step in steps:
        for i, param in enumerate(net.parameters()):
            grad = random(param.shape, 1000 * step + i, torch.bfloat16)
            param.grad = place(grad, param.device_mesh, param.placements) if isinstance(param, DTensor) else grad
        optimizer.step()


def reference(options, steps):
    net = model()
    optimizer = optimizer_of(net, options)
    train(net, optimizer, range(steps))
    return net, optimizer


def assert_trained(net, optimizer, options, what):
    """Compares parameters and state with those of one process after steps 0 to 4."""
    other, theirs = reference(options, 5)
    for (key, param), its in zip(net.named_parameters(), other.parameters()):
        assert_equal(whole(param), its.detach(), "%s: %s" % (what, key))
        assert_same_state(param, optimizer.state[param], theirs.state[its], "%s: %s" % (what, key))


def folder_of(i):
    return os.path.join(os.environ["DSOPT_TEST_CHECKPOINTS"], "formats-%d" % i)


def saves(rank):
    for i, options in enumerate(KINDS):
        net = shard_model(model(), line())
        optimizer = optimizer_of(net, options)
        train(net, optimizer, range(3))
        weights, state = get_state_dict(net, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder_of(i))


def loads(rank):
    """With another number of ranks."""
    for i, options in enumerate(KINDS):
        for mesh in (line(), square()):
            net = shard_model(model(), mesh)
            with torch.no_grad():
                for param in net.parameters():
                    param.fill_(7)
            optimizer = optimizer_of(net, options)
            weights, state = get_state_dict(net, optimizer)
            loaded = {"model": weights, "optimizer": state}
            dcp.load(loaded, checkpoint_id=folder_of(i))
            set_state_dict(net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            train(net, optimizer, range(3, 5))
            assert_trained(net, optimizer, options, "%s on %d dims" % (options, mesh.ndim))


def resumes(rank):
    for options in KINDS:
        net = shard_model(model(), line())
        optimizer = optimizer_of(net, options)
        train(net, optimizer, range(3))
        again = shard_model(model(), line())
        again.load_state_dict(net.state_dict())
        other = optimizer_of(again, options)
        saved = get_optimizer_state_dict(net, optimizer, options=FLAT)
        set_optimizer_state_dict(again, other, copy.deepcopy(saved), options=FLAT)
        train(again, other, range(3, 5))
        assert_trained(again, other, options, "%s" % (options,))


def shards_of_tensor_parallelism_are_sharded_by_rows(rank):
    """FSDP2 shards the shards of tensor parallelism: ranks do not have the rows in their order."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    def wide():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(512, 37, bias=False), torch.nn.Tanh(),
                                   torch.nn.Linear(37, 3, bias=False)).bfloat16()

    two = square()
    for options in KINDS:
        net, plain = wide(), wide()
        parallelize_module(net, two["column"], {"0": ColwiseParallel()})
        shard_model(net, two["row"])
        optimizer, its = optimizer_of(net, options), optimizer_of(plain, options)
        train(net, optimizer, range(3))
        train(plain, its, range(3))
        for param, other in zip(net.parameters(), plain.parameters()):
            assert_equal(whole(param), other.detach(), "%s" % (options,))
            assert_same_state(param, optimizer.state[param], its.state[other], "%s" % (options,))


def loads_convert_formats(rank):
    """As without DTensors: a state dict in one format loads into an optimizer with another."""
    for dtype, given in ((torch.float32, {}), (torch.uint8, KINDS[2][1])):
        results = []
        for sharded in (True, False):
            net = shard_model(model(), line()) if sharded else model()
            optimizer = AdamW(net.parameters(), lr=0.02, exp_avg_format="e4m3", min_8bit_size=1000)
            train(net, optimizer, range(3))
            kind = AdamW8bit if given else AdamW
            more = {"min_8bit_size": 1000} if given else {}
            other = kind(net.parameters(), lr=0.02, **more)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            first = next(net.parameters())
            assert other.state[first]["exp_avg"].dtype == dtype
            train(net, other, range(3, 5))
            results.append((net, other))
        (net, optimizer), (plain, theirs) = results
        for param, its in zip(net.parameters(), plain.parameters()):
            assert_equal(whole(param), its.detach(), "%s" % given)
            assert_same_state(param, optimizer.state[param], theirs.state[its], "%s" % given)


def full_state_dicts_have_whole_scales(rank):
    """set_optimizer_state_dict converts full state dicts to DTensors, and get_optimizer_state_dict the reverse."""
    def wide():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(768, 5, bias=False)).bfloat16()

    plain, net = wide(), shard_model(wide(), line())
    its, optimizer = [AdamW8bit(some.parameters(), min_8bit_size=0, lr=0.02) for some in (plain, net)]
    train(plain, its, range(3))
    net.load_state_dict({key: place(value, line(), [Shard(0)]) for key, value in plain.state_dict().items()})
    saved = copy.deepcopy(get_optimizer_state_dict(plain, its))  # otherwise shards are views of its tensors
    set_optimizer_state_dict(net, optimizer, saved, options=FULL)
    train(plain, its, range(3, 5))
    train(net, optimizer, range(3, 5))
    param, other = next(net.parameters()), next(plain.parameters())
    assert_equal(whole(param), other.detach(), "weights")
    assert_same_state(param, optimizer.state[param], its.state[other], "from a full state dict")
    full = get_optimizer_state_dict(net, optimizer, options=FULL)
    if rank == 0:
        again = AdamW8bit(plain.parameters(), min_8bit_size=0, lr=0.02)
        set_optimizer_state_dict(plain, again, full)
        train(plain, again, range(5, 6))
        assert tuple(again.state[other]["exp_avg_scale"].shape) == (15,)
    train(net, optimizer, range(5, 6))
    weights = whole(param)
    if rank == 0:
        assert_equal(weights, other.detach(), "weights after a step from a full state dict")


STEPS = [
    bits_are_those_of_unsharded_parameters, sizes_are_those_of_whole_tensors,
    refuses_shards_that_are_not_made_of_blocks, new_memory_and_placements_are_followed,
    shards_of_tensor_parallelism_are_sharded_by_rows, loads_convert_formats,
    full_state_dicts_have_whole_scales
]
SAVE = [saves, resumes]
LOAD = [loads]
