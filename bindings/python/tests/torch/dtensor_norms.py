# SPDX-License-Identifier: Apache-2.0
"""Cases of test_dtensor.py in which a step depends on whole tensors: LAMB, its max_grad_norm, and the offset of a shard
for stochastic rounding."""
import torch
from dtensors import (DTensor, Replicate, Shard, Twins, assert_equal, batch, layouts, line, mlp, place, raises, random,
                      shard_model, square, whole)
from dtensor_steps import tensor_parallel, train
from torch.distributed.device_mesh import init_device_mesh

import dsopt
from dsopt.torch import SGD, Adagrad, Adam, AdamW, FusedAdam, FusedLamb, FusedLion, Lion
from dsopt.torch._mesh import Spread

RELATIVE = 1e-6


def assert_copies_are_equal(params):
    """Asserts that ranks with the same shard have the same bits."""
    for param in params:
        mesh, placements = param.device_mesh, param.placements
        for d, placement in enumerate(placements):
            if placement.is_replicate():
                local = param._local_tensor.detach().contiguous()
                copies = [torch.empty_like(local) for _ in range(mesh.size(d))]
                torch.distributed.all_gather(copies, local, group=mesh.get_group(d))
                assert all(torch.equal(copy, local) for copy in copies), placements


def lamb_takes_ratios_and_norms_of_whole_tensors(rank):
    for max_grad_norm in (0.0, 0.5, 1e6):
        for leave_out in (0, 3):
            twins = Twins(layouts(), leave_out=leave_out)
            half = len(twins.params) // 2
            optimizer, other = [FusedLamb([
                {"params": params[:half]}, {"params": params[half:], "max_grad_norm": 2 * max_grad_norm, "lr": 0.05}
            ], lr=0.02, weight_decay=0.1, max_grad_norm=max_grad_norm) for params in (twins.params, twins.whole)]
            for _ in range(4):
                twins.give_grads()
                optimizer.step()
                other.step()
                if not leave_out:
                    assert_equal(torch.tensor(optimizer.get_lamb_coeffs()), torch.tensor(other.get_lamb_coeffs()),
                                 "trust ratios", relative=RELATIVE)
            what = "max_grad_norm=%g, leave_out=%d" % (max_grad_norm, leave_out)
            twins.assert_params(what, relative=RELATIVE)
            twins.assert_states(what, optimizer, other, relative=RELATIVE)
            assert_copies_are_equal([param for param in twins.params if isinstance(param, DTensor)])


def lamb_of_bfloat16_parameters(rank):
    twins = Twins(layouts(), torch.bfloat16)
    optimizer, other = [FusedLamb(params, lr=0.02, max_grad_norm=0.5) for params in (twins.params, twins.whole)]
    for _ in range(3):
        twins.give_grads()
        optimizer.step()
        other.step()
    twins.assert_params("bfloat16", relative=2.0**-7)  # the last bit
    assert_copies_are_equal([param for param in twins.params if isinstance(param, DTensor)])


def a_shard_without_gradient_stays_in_lamb(rank):
    """The trust ratio is that of the other shards, as if the tensor consisted only of them."""
    mesh = line()
    twins = Twins([((8, 3), mesh, [Shard(0)]), ((3, 8), mesh, [Shard(1)]), ((6,), mesh, [Replicate()])])
    begin = 8 // mesh.size()  # of the shards of all ranks except rank 0
    others = [twins.whole[0].detach()[begin:], twins.whole[1].detach()[:, begin:].contiguous(), twins.whole[2].detach()]
    others = [torch.nn.Parameter(other.clone()) for other in others]
    optimizer, other = [FusedLamb(params, lr=0.1, max_grad_norm=0.5) for params in (twins.params, others)]
    before = [param._local_tensor.clone() for param in twins.params]
    for _ in range(3):
        twins.give_grads()
        others[0].grad, others[1].grad = twins.whole[0].grad[begin:], twins.whole[1].grad[:, begin:].contiguous()
        others[2].grad = twins.whole[2].grad
        if rank == 0:
            twins.params[0].grad = twins.params[1].grad = None
        optimizer.step()
        other.step()
    assert rank or all(torch.equal(param._local_tensor, old) for param, old in zip(twins.params[:2], before))
    assert_equal(whole(twins.params[0])[begin:], others[0].detach(), "rows", relative=RELATIVE)
    assert_equal(whole(twins.params[1])[:, begin:], others[1].detach(), "columns", relative=RELATIVE)
    assert_equal(whole(twins.params[2]), others[2].detach(), "copies", relative=RELATIVE)
    for param in twins.params:
        param.grad = None
    before = [whole(param).clone() for param in twins.params]
    optimizer.step()
    assert all(torch.equal(whole(param), old) for param, old in zip(twins.params, before))


def lamb_steps_fsdp2_and_tensor_parallelism(rank):
    options = dict(lr=0.02, max_grad_norm=0.05, weight_decay=0.01)
    for mesh in (line(), square()):
        net, other = shard_model(mlp(), mesh), mlp()
        train(net, FusedLamb(net.parameters(), **options), 4, rank, other, FusedLamb(other.parameters(), **options),
              relative=RELATIVE)
    two = square()
    for sharded in (False, True):
        net, other = tensor_parallel(two["column"]), mlp(widths=(6, 10, 8, 5))
        if sharded:
            shard_model(net, two["row"])
        train(net, FusedLamb(net.parameters(), **options), 4, rank // 2 if sharded else 0, other,
              FusedLamb(other.parameters(), **options), relative=RELATIVE)


def norms_are_taken_over_the_meshes_of_the_parameters_only(rank):
    """Ranks along another dim may have other parameters, like pipeline stages, and other numbers of steps."""
    two = square()
    stage = two.get_local_rank("row")
    twins = Twins([((5 + stage, 3), two["column"], [Shard(0)]), ((4,), two["column"], [Replicate()])] +
                  [((7,), two["column"], [Shard(0)])] * stage)
    optimizer, other = [FusedLamb(params, lr=0.1, max_grad_norm=0.5) for params in (twins.params, twins.whole)]
    for _ in range(2 + stage):
        twins.give_grads()
        optimizer.step()
        other.step()
    twins.assert_params("stage %d" % stage, relative=RELATIVE)
    if torch.distributed.get_world_size() == 4:
        cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("stage", "row", "column"))
        apart = cube["row", "column"]
        twins = Twins([((5, 6), apart, [Shard(0), Shard(1)]), ((9,), apart, [Replicate(), Shard(0)]),
                       ((4, 3), cube["column"], [Shard(1)]), ((3, 3), cube["row"], [Shard(0)])])
        optimizer, other = [FusedLamb(params, lr=0.1, max_grad_norm=0.5) for params in (twins.params, twins.whole)]
        for _ in range(3):
            twins.give_grads()
            optimizer.step()
            other.step()
        twins.assert_params("slices of a mesh of three dims", relative=RELATIVE)
        assert_copies_are_equal(twins.params)


def norms_are_added_up_over_one_dim_after_the_other(rank):
    """As in a world with more ranks than the mesh, in which there is no process group of exactly its ranks."""
    kept, Spread._has_all_ranks = Spread._has_all_ranks, lambda spread: False
    try:
        lamb_takes_ratios_and_norms_of_whole_tensors(rank)
        lamb_steps_fsdp2_and_tensor_parallelism(rank)
        norms_are_taken_over_the_meshes_of_the_parameters_only(rank)
    finally:
        Spread._has_all_ranks = kept


def lamb_refuses_meshes_without_a_common_one(rank):
    ranks = torch.distributed.get_world_size()
    if ranks < 4:
        return
    from torch.distributed.device_mesh import DeviceMesh
    meshes = [DeviceMesh("cpu", [0, 1], mesh_dim_names=("a",)), DeviceMesh("cpu", [2, 3], mesh_dim_names=("b",))]
    mine = meshes[rank // 2]
    param = torch.nn.Parameter(place(random((6, 2), 1), mine, [Shard(0)]))
    other = torch.nn.Parameter(place(random((6, 2), 1), square(), [Shard(0), Replicate()]))
    third = DeviceMesh("cpu", [0, 3, 1, 2], mesh_dim_names=("c",))
    shifted = torch.nn.Parameter(place(random((8, 2), 1), third, [Shard(0)]))
    param.grad, other.grad, shifted.grad = param.detach() * 0.5, other.detach() * 0.5, shifted.detach() * 0.5
    FusedLamb([other, shifted], lr=0.1).step()  # both have all ranks
    uneven = DeviceMesh("cpu", [[0, 1, 2]], mesh_dim_names=("d", "e"))
    odd = torch.nn.Parameter(DTensor.from_local(torch.ones(1, 2), uneven, [Replicate(), Shard(0)], run_check=False))
    odd.grad = odd.detach() * 0.5
    if rank == 3:
        raises(dsopt.UnsupportedError, r"this rank is not in the mesh of .*\[0\]", FusedLamb([odd]).step)
    else:
        raises(dsopt.UnsupportedError, r"\[0\] and .*\[1\] are on meshes without a common one",
               FusedLamb([odd, param]).step)


def stochastic_rounding_has_the_bits_of_unsharded_parameters(rank):
    one, two = line(), square()
    intervals = [((10, 5), one, [Shard(0)]), ((3, 2), one, [Shard(0)]), ((1,), one, [Shard(0)]),
                 ((), one, [Replicate()]), ((1, 7, 2), one, [Shard(1)]), ((9, 4), two, [Replicate(), Shard(0)]),
                 ((11,), two, [Shard(0), Shard(0)]), ((0, 3), one, [Shard(0)]), ((7, 300), two["column"], [Shard(0)]),
                 ((5, 3), None, None)]
    for kind, options in ((AdamW, dict(lr=0.02)), (Adam, dict(lr=0.02)), (SGD, dict(lr=0.02, momentum=0.9)),
                          (Adagrad, dict(lr=0.02)), (Lion, dict(lr=0.01)), (FusedAdam, dict(lr=0.02)),
                          (FusedLion, dict(lr=0.01))):
        twins = Twins(intervals, torch.bfloat16, leave_out=4)
        nearest = kind([torch.nn.Parameter(param.detach().clone()) for param in twins.whole], **options)
        optimizer, other = [kind(params, stochastic_rounding=True, seed=5, **options)
                            for params in (twins.params, twins.whole)]
        for _ in range(4):
            twins.give_grads()
            for param, its in zip(nearest.param_groups[0]["params"], twins.whole):
                param.grad = its.grad
            optimizer.step()
            other.step()
            nearest.step()
        twins.assert_params(kind.__name__)
        twins.assert_states(kind.__name__, optimizer, other)
        assert any(not torch.equal(param, its) for param, its in zip(nearest.param_groups[0]["params"], twins.whole))
    # Groups with several seeds have several engines; all of them check for new memory before any of them steps.
    twins = Twins(intervals, torch.bfloat16)
    optimizer, other = [AdamW([{"params": params[:4], "seed": 1}, {"params": params[4:]}], lr=0.1,
                              stochastic_rounding=True) for params in (twins.params, twins.whole)]
    for step in range(4):
        twins.give_grads()
        optimizer.step()
        other.step()
        twins.assert_params("two seeds, step %d" % step)
        last = 8  # for the second engine
        twins.params[last]._local_tensor = twins.params[last]._local_tensor.clone()
        if step == 1:
            new = torch.nn.Parameter(place(whole(twins.params[last]), two["column"], [Replicate()]))
            twins.params[last].grad = None
            torch.utils.swap_tensors(twins.params[last], new)
            twins.layouts = list(intervals)
            twins.layouts[last] = (*intervals[last][:2], [Replicate()])
    # LAMB's trust ratios agree with those of whole tensors only to 1e-6, so an element may be rounded the other way.
    twins = Twins(intervals, torch.bfloat16)
    lamb = FusedLamb(twins.params, lr=0.02, stochastic_rounding=True)
    twins.give_grads()
    lamb.step()
    assert_copies_are_equal([param for param in twins.params if isinstance(param, DTensor)])


def stochastic_rounding_refuses_shards_that_are_no_intervals(rank):
    one, two = line(), square()
    column_major = torch.randn(6, 4).t()
    odd = DTensor.from_local(column_major.clone(memory_format=torch.preserve_format), one, [Replicate()],
                             run_check=False)
    for shape, mesh, placements in ((6, 4), one, [Shard(1)]), ((9, 5), two, [Shard(0), Shard(1)]), ((4, 6), None, odd):
        twins = Twins([((4, 4), one, [Shard(0)]), (shape, mesh or one, placements if mesh else [Replicate()])],
                      torch.bfloat16)
        if mesh is None:
            twins.params[1] = torch.nn.Parameter(odd.bfloat16())
            assert twins.params[1].stride() == (1, 4)
        twins.give_grads()
        optimizer = AdamW(twins.params, stochastic_rounding=True)
        before = [whole(param).clone() for param in twins.params]
        raises(dsopt.UnsupportedError, r"params'\]\[1\] has shape .* and stochastic_rounding needs shards that are "
               "intervals", optimizer.step)
        for param, old in zip(twins.params, before):
            assert torch.equal(whole(param), old)
        AdamW(twins.params).step()
        # float32 parameters are exact, so they use no random numbers.
        twins.params[1] = torch.nn.Parameter(twins.params[1].detach().float())
        twins.params[1].grad = twins.params[1].detach() * 0.5
        AdamW(twins.params, stochastic_rounding=True).step()


def clip_grad_norm_of_torch(rank):
    """clip_grad_norm_ leaves DTensors as gradients, and computes the norm of whole tensors."""
    net, other = shard_model(mlp(), line()), mlp()
    x, y = batch(0, rank)
    ((net(x) - y) ** 2).mean().backward()
    for param, its in zip(net.parameters(), other.parameters()):
        its.grad = whole(param.grad).clone()
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.05)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    assert_equal(whole(norm), expected, "norm", relative=RELATIVE)
    AdamW(net.parameters(), lr=0.1).step()
    AdamW(other.parameters(), lr=0.1).step()
    for param, its in zip(net.parameters(), other.parameters()):
        assert_equal(whole(param), its.detach(), "parameter", relative=1e-5)


NORMS = [
    lamb_takes_ratios_and_norms_of_whole_tensors, lamb_of_bfloat16_parameters,
    a_shard_without_gradient_stays_in_lamb, lamb_steps_fsdp2_and_tensor_parallelism,
    norms_are_taken_over_the_meshes_of_the_parameters_only, norms_are_added_up_over_one_dim_after_the_other,
    lamb_refuses_meshes_without_a_common_one, stochastic_rounding_has_the_bits_of_unsharded_parameters,
    stochastic_rounding_refuses_shards_that_are_no_intervals, clip_grad_norm_of_torch
]
