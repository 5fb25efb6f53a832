# SPDX-License-Identifier: Apache-2.0
"""Steps of DTensors: cases of test_dtensor.py, each run by every rank. Element-wise rules must give the same bits as on
unsharded parameters."""
import contextlib
import io
import itertools
import pathlib
import re
from unittest import mock

import torch
from dtensors import (DTensor, Partial, Replicate, Shard, Twins, assert_equal, batch, layouts, line, mlp, place, raises,
                      random, shard_model, square, whole)

import dsopt
from dsopt.torch import (SGD, Adagrad, Adam, AdamW, DeepSpeedCPUAdam, DeepSpeedCPULion, FP16_Optimizer,
                         FP16_UnfusedOptimizer, FusedAdam, FusedLamb, FusedLion, Lion, OnebitAdam, OnebitLamb,
                         ZeroOneAdam)
from dsopt.torch._mesh import interval_of

ELEMENT_WISE = [
    (AdamW, dict(lr=0.02)), (Adam, dict(lr=0.02, weight_decay=0.1)), (SGD, dict(lr=0.02, weight_decay=0.1)),
    (SGD, dict(lr=0.02, momentum=0.9, nesterov=True)), (SGD, dict(lr=0.02, momentum=0.9, dampening=0.5)),
    (Adagrad, dict(lr=0.02, initial_accumulator_value=0.1)), (Lion, dict(lr=0.01, weight_decay=0.1)),
    (FusedAdam, dict(lr=0.02, weight_decay=0.1)), (FusedAdam, dict(lr=0.02, adam_w_mode=False, compat="deepspeed")),
    (FusedLion, dict(lr=0.01)), (DeepSpeedCPUAdam, dict(lr=0.02)), (DeepSpeedCPULion, dict(lr=0.01))
]


def element_wise_rules_have_the_bits_of_unsharded_parameters(rank):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for kind, options in ELEMENT_WISE:
            if dtype == torch.float64 and "compat" in options:  # which does not support float64
                continue
            for leave_out in (0, 3) if dtype == torch.float32 else (3,):
                what = "%s %s %s" % (kind.__name__, options, dtype)
                twins = Twins(layouts(), dtype, leave_out)
                optimizer, other = kind(twins.params, **options), kind(twins.whole, **options)
                for _ in range(4):
                    twins.give_grads()
                    optimizer.step()
                    other.step()
                twins.assert_params(what)
                twins.assert_states(what, optimizer, other)
                optimizer.zero_grad()
                assert all(param.grad is None for param in twins.params)


def element_wise_rules_agree_with_torch_on_dtensors(rank):
    for (name, options), dtype in itertools.product(
            (("AdamW", dict(lr=0.02)), ("Adam", dict(lr=0.02, weight_decay=0.1)), ("SGD", dict(lr=0.02, momentum=0.9)),
             ("Adagrad", dict(lr=0.02))), (torch.float32, torch.float64)):
        twins, others = [Twins([x for x in layouts() if x[1] is not None], dtype) for _ in range(2)]
        # In torch 2.15 foreach requires all DTensors of a list to be on one mesh.
        optimizer = getattr(dsopt.torch, name)(twins.params, **options)
        theirs = getattr(torch.optim, name)(others.params, foreach=False, **options)
        for _ in range(4):
            for some, its in ((twins, optimizer), (others, theirs)):
                some.give_grads()
                its.step()
        for param, expected in zip(twins.params, others.params):
            torch.testing.assert_close(whole(param), whole(expected))
            for key, value in theirs.state[expected].items():
                ours = optimizer.state[param][key]
                assert isinstance(ours, DTensor) == isinstance(value, DTensor), key
                torch.testing.assert_close(whole(ours), whole(value))
            assert set(optimizer.state[param]) == set(theirs.state[expected])


def complex_parameters_and_any_memory_order(rank):
    mesh = line()
    values = [torch.complex(random((5, 3), 1), random((5, 3), 2)), random((6, 4), 3).t()]
    grads = [torch.complex(random((5, 3), 4), random((5, 3), 5)), random((4, 6), 6)]
    whole_params = [torch.nn.Parameter(value.clone(memory_format=torch.preserve_format)) for value in values]
    column_major = DTensor.from_local(values[1].clone(memory_format=torch.preserve_format), mesh, [Replicate()],
                                      run_check=False)
    params = [torch.nn.Parameter(place(values[0], mesh, [Shard(0)])), torch.nn.Parameter(column_major)]
    optimizer, other = AdamW(params, lr=0.1), AdamW(whole_params, lr=0.1)
    for _ in range(3):
        for param, its, grad, placement in zip(params, whole_params, grads, (Shard(0), Replicate())):
            param.grad, its.grad = place(grad, mesh, [placement]), grad.clone()
        optimizer.step()
        other.step()
    for param, its in zip(params, whole_params):
        assert_equal(whole(param), its.detach(), "parameter")
        state = optimizer.state[param]["exp_avg"]
        assert state.stride() == param.stride() and state.dtype == param.dtype
        assert_equal(whole(state), other.state[its]["exp_avg"], "state")


def gradients_of_other_placements_are_redistributed(rank):
    """Same as torch.optim, including its sums of a Partial."""
    mesh = line()
    ranks = mesh.size()
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        for passed in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
            twins = Twins([((5, 3), mesh, placements), ((4, 4), mesh, [Shard(0)])])
            optimizer, other = AdamW(twins.params, lr=0.1), AdamW(twins.whole, lr=0.1)
            for step in range(3):
                twins.give_grads()
                if step != 1:
                    grad = twins.whole[0].grad
                    # With a power of two as the number of ranks the shares add up without rounding.
                    twins.params[0].grad = (DTensor.from_local(grad / ranks, mesh, passed, run_check=False)
                                            if passed[0].is_partial() else place(grad, mesh, passed))
                optimizer.step()
                other.step()
            twins.assert_params("%s %s" % (placements, passed))


def gradients_may_be_absent_on_some_ranks(rank):
    """A shard without a gradient is unchanged, and the others are stepped."""
    mesh = line()
    twins = Twins([((8, 3), mesh, [Shard(0)]), ((8,), mesh, [Shard(0)])])
    optimizer, other = AdamW(twins.params, lr=0.1), AdamW(twins.whole, lr=0.1)
    before = twins.params[0]._local_tensor.clone()
    for _ in range(2):
        twins.give_grads()
        if rank == 0:
            twins.params[0].grad = None
        optimizer.step()
        other.step()
    mine = place(twins.whole[0].detach(), mesh, [Shard(0)])._local_tensor
    assert torch.equal(twins.params[0]._local_tensor, before if rank == 0 else mine)
    assert_equal(whole(twins.params[1]), twins.whole[1].detach(), "the other parameter")
    for param in twins.params:
        param.grad = None
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def memory_may_be_replaced(rank):
    """Replaces memory of parameters, gradients and state, also with the same tensor object."""
    mesh = line()
    twins = Twins([((10, 3), mesh, [Shard(0)]), ((6, 4), mesh, [Shard(1)]), ((5,), None, None)])
    optimizer, other = AdamW(twins.params, lr=0.1), AdamW(twins.whole, lr=0.1)

    def step(what):
        twins.give_grads()
        versions = [param._version for param in twins.params]
        optimizer.step()
        other.step()
        assert all(param._version > old for param, old in zip(twins.params, versions)), what
        twins.assert_params(what)
        twins.assert_states(what, optimizer, other)

    step("first")
    step("second")
    twins.params[0]._local_tensor = twins.params[0]._local_tensor.clone()  # like FSDP2
    step("another local tensor")
    with torch.no_grad():
        twins.params[0].data = place(whole(twins.params[0]), mesh, [Shard(0)])
    step("another .data")
    state = optimizer.state[twins.params[0]]
    state["exp_avg"] = place(whole(state["exp_avg"]), mesh, [Shard(0)])
    step("another state tensor")
    state["exp_avg_sq"]._local_tensor = state["exp_avg_sq"]._local_tensor.clone()
    step("another local tensor of the state")
    state["exp_avg"] = place(whole(state["exp_avg"]), mesh, [Replicate()])
    step("state of another placement")
    # The same parameter with other placements.
    new = torch.nn.Parameter(place(whole(twins.params[0]), mesh, [Replicate()]))
    twins.params[0].grad = None
    torch.utils.swap_tensors(twins.params[0], new)
    twins.layouts[0] = twins.layouts[0][0], mesh, [Replicate()]
    step("swapped parameter")


def an_optimizer_of_parameters_on_the_meta_device(rank):
    """to_empty() keeps the parameter objects, and fully_shard allocates their memory."""
    mesh = line()
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    shard_model(net, mesh)
    optimizer = AdamW(net.parameters(), lr=0.1)
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    raises(dsopt.Error, "on device meta; the engine has cpu and cuda", optimizer.step)
    optimizer.zero_grad()
    net.to_empty(device="cpu")
    with torch.no_grad():
        for param in net.parameters():
            param.fill_(0.5)
    for _ in range(2):
        net(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(bool((whole(param) < 0.5).all()) for param in net.parameters())


def refusals_name_what_is_wrong(rank):
    mesh = line()

    def params(dtype=torch.float32, placements=None):
        return Twins([((6, 4), mesh, placements or [Shard(0)]), ((5,), None, None)], dtype)

    def refuse(pattern, change, kind=AdamW, error=dsopt.UnsupportedError, twins=None, **options):
        twins = twins or params()
        twins.give_grads()
        optimizer = kind(twins.params, **options)
        change(twins.params, optimizer)
        before = [whole(param).clone() for param in twins.params]
        raises(error, pattern, optimizer.step)
        for param, old in zip(twins.params, before):
            assert torch.equal(whole(param), old)

    def keep(params, optimizer):
        pass

    for kind in (OnebitAdam, ZeroOneAdam, OnebitLamb):
        refuse(r"params'\]\[0\] is a DTensor, and %s exchanges momenta of whole" % kind.__name__, keep, kind)
    for kind in (FP16_Optimizer, FP16_UnfusedOptimizer):
        inner = FusedAdam(params(torch.bfloat16).params)
        raises(dsopt.UnsupportedError, "is a DTensor, and %s has masters of plain" % kind.__name__, kind, inner,
               low_precision_dtype=torch.bfloat16)
        assert inner._wrapper is None
    refuse("FusedLamb with compat='deepspeed' takes one trust ratio per shard", keep, FusedLamb, compat="deepspeed")

    refuse(r"\[0\] is a float64 DTensor, and FusedLamb takes norms of whole DTensors, which must be float32", keep,
           FusedLamb, twins=params(torch.float64))
    twins = params(torch.bfloat16)
    twins.give_grads()
    lamb = FusedLamb([{"params": twins.params[:1], "seed": 1}, {"params": twins.params[1:]}], stochastic_rounding=True)
    raises(dsopt.UnsupportedError, "FusedLamb takes norms of whole DTensors in one engine, and .* differ in stochastic",
           lamb.step)

    def plain_grad(params, optimizer):
        params[0].grad = torch.zeros(6, 4)

    def dtensor_grad(params, optimizer):
        params[1].grad = place(torch.zeros(5), mesh, [Shard(0)])

    def other_mesh(params, optimizer):
        params[0].grad = place(torch.zeros(6, 4), square(), [Shard(0), Replicate()])

    def plain_state(params, optimizer):
        optimizer.step()
        optimizer.state[params[0]]["exp_avg"] = torch.zeros(6, 4)

    def dtensor_state(params, optimizer):
        optimizer.step()
        optimizer.state[params[1]]["exp_avg"] = place(torch.zeros(5), mesh, [Shard(0)])

    def state_of_another_shape(params, optimizer):
        optimizer.step()
        optimizer.state[params[0]]["exp_avg"] = place(torch.zeros(6, 5), mesh, [Shard(0)])

    def only_plain(params, optimizer):
        del optimizer.param_groups[0]["params"][0]
        dtensor_grad(params, optimizer)

    refuse(r"gradient of .*\[0\] is a plain tensor, and the parameter a DTensor", plain_grad)
    refuse(r"gradient of .*\[1\] is a DTensor, and the parameter a plain tensor", dtensor_grad)
    refuse(r"gradient of .*\[0\] is a DTensor, and the parameter a plain tensor", only_plain)
    refuse(r"gradient of .*\[0\] is on the mesh .*, and the parameter on", other_mesh)
    refuse(r"state 'exp_avg' of .*\[0\] is a plain tensor, and the parameter a DTensor", plain_state)
    refuse(r"state 'exp_avg' of .*\[1\] is a DTensor, and the parameter a plain", dtensor_state)
    refuse(r"state 'exp_avg' of .*\[0\] has shape \(6, 5\), and the parameter \(6, 4\)", state_of_another_shape,
           error=dsopt.TensorError)
    twins = params()
    partial = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()], run_check=False)
    twins.params[0] = torch.nn.Parameter(partial)
    refuse(r"placements \(.*artial.*\), and a parameter cannot be a Partial", keep, twins=twins)
    twins = Twins([((6, 4), mesh, [Shard(0)])])
    twins.give_grads()
    lamb = FusedLamb(twins.params)
    raises(dsopt.UnsupportedError, r"output_params has a tensor for .*\[0\], which is a DTensor", lamb.step,
           output_params=[torch.zeros(6, 4)])


def place_of_a_shard_in_its_tensor(rank):
    """The offset is needed for stochastic rounding."""
    one, two = line(), square()
    known = [((10, 5), one, [Shard(0)]), ((3, 2), one, [Shard(0)]), ((1,), one, [Shard(0)]), ((), one, [Replicate()]),
             ((1, 7, 2), one, [Shard(1)]), ((9, 4), two, [Replicate(), Shard(0)]), ((11,), two, [Shard(0), Shard(0)]),
             ((0, 3), one, [Shard(0)]), ((7, 3), two["column"], [Shard(0)]), ((4, 1), two, [Shard(0), Shard(1)])]
    for shape, mesh, placements in known:
        numbers = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        shard = place(numbers, mesh, placements)
        flat = shard._local_tensor.reshape(-1)
        begin = interval_of(shard)
        assert torch.equal(flat, numbers.reshape(-1)[begin:begin + flat.numel()]), (shape, placements, begin)
    for shape, mesh, placements in ((4, 6), one, [Shard(1)]), ((9, 5), two, [Shard(0), Shard(1)]):
        assert interval_of(place(torch.zeros(shape), mesh, placements)) is None, shape
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    for rows in (4, 5, 7, 9):
        net = torch.nn.Sequential(torch.nn.Linear(3, rows))
        parallelize_module(net, two["column"], {"0": ColwiseParallel()})
        with torch.no_grad():
            net[0].weight.copy_(place(torch.arange(3.0 * rows).reshape(rows, 3), two["column"], [Shard(0)]))
        shard_model(net, two["row"])
        flat = net[0].weight._local_tensor.reshape(-1)
        begin = interval_of(net[0].weight)
        assert torch.equal(flat, torch.arange(3.0 * rows)[begin:begin + flat.numel()]), (rows, begin, flat)


def train(net, optimizer, steps, rank, whole_net, whole_optimizer, begin=0, clip=None, relative=None, width=6):
    """Steps a sharded model, and passes its gradients to a whole one."""
    for step in range(begin, begin + steps):
        x, y = batch(step, rank, width)
        optimizer.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        for param, other in zip(net.parameters(), whole_net.parameters()):
            other.grad = None if param.grad is None else whole(param.grad).clone()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            # torch's own sum of squares over shards rounds in another order
            for param, other in zip(net.parameters(), whole_net.parameters()):
                other.grad = whole(param.grad).clone()
        optimizer.step()
        whole_optimizer.step()
        for (name, param), other in zip(net.named_parameters(), whole_net.parameters()):
            assert_equal(whole(param), other.detach(), "%s at step %d" % (name, step), relative)


def meshes_of_fsdp():
    """Returns meshes for plain FSDP2 and for HSDP, which has copies of shards."""
    return [line(), square()]


def fsdp2(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    policies = [{}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
                {"reshard_after_forward": False}]
    for mesh in meshes_of_fsdp():
        for policy in policies:
            for kind, options in ELEMENT_WISE[0], ELEMENT_WISE[3]:
                net, other = mlp(), mlp()
                shard_model(net, mesh, **policy)
                optimizer = kind(net.parameters(), **options)
                train(net, optimizer, 3, rank, other, kind(other.parameters(), **options), clip=0.1)
                assert all(type(param._local_tensor) is torch.Tensor for param in net.parameters())


def fsdp2_of_bfloat16_parameters(rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    net, other = mlp(torch.bfloat16), mlp(torch.bfloat16)
    shard_model(net, line(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    optimizer, reference = AdamW(net.parameters(), lr=0.02), AdamW(other.parameters(), lr=0.02)
    for step in range(4):
        x, _ = batch(step, rank)
        optimizer.zero_grad()
        net(x.bfloat16()).float().square().mean().backward()
        for param, its in zip(net.parameters(), other.parameters()):
            its.grad = whole(param.grad).clone()
        optimizer.step()
        reference.step()
        for param, its in zip(net.parameters(), other.parameters()):
            assert_equal(whole(param), its.detach(), "step %d" % step)
    assert optimizer.state[net[0].weight]["exp_avg"].dtype == torch.float32


def tensor_parallel(mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    net = mlp(widths=(6, 10, 8, 5))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # the last layer is not sharded
    return net


def tensor_parallel_with_plain_parameters(rank):
    net, other = tensor_parallel(square()["column"]), mlp(widths=(6, 10, 8, 5))
    assert not isinstance(net[4].weight, DTensor) and isinstance(net[2].bias, DTensor)
    train(net, AdamW(net.parameters(), lr=0.02), 4, 0, other, AdamW(other.parameters(), lr=0.02))


def fsdp2_of_tensor_parallel(rank):
    """Shards of shards, on a mesh of two dims; plain parameters become shards along one dim of it."""
    two = square()
    for clip in (None, 0.1):
        net, other = tensor_parallel(two["column"]), mlp(widths=(6, 10, 8, 5))
        if clip:  # torch clips only DTensors of one mesh
            net, other = net[:4], other[:4]
        shard_model(net, two["row"])
        train(net, AdamW(net.parameters(), lr=0.02), 4, rank // 2, other, AdamW(other.parameters(), lr=0.02), clip=clip)


def grad_scaler_skips_on_all_ranks(rank):
    """Only one rank finds an overflow."""
    for fused in (False, True):
        for kind in (AdamW, SGD):
            net, other = mlp(), mlp()
            shard_model(net, line())
            optimizer, reference = kind(net.parameters(), lr=0.1, fused=fused), kind(other.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            assert optimizer._step_supports_amp_scaling == fused
            for step in range(4):
                x, y = batch(step, rank)
                optimizer.zero_grad()
                scaler.scale(((net(x) - y) ** 2).mean()).backward()
                if step == 2 and rank == 1:
                    net[0].weight.grad._local_tensor[0, 0] = float("inf")
                for param, its in zip(net.parameters(), other.parameters()):
                    its.grad = whole(param.grad) / scaler.get_scale()
                before = [whole(param).clone() for param in net.parameters()]
                scaler.step(optimizer)
                scaler.update()
                if step == 2:
                    assert scaler.get_scale() == 512.0
                    for param, old in zip(net.parameters(), before):
                        assert torch.equal(whole(param), old)
                else:
                    reference.step()
                    for param, its in zip(net.parameters(), other.parameters()):
                        assert_equal(whole(param), its.detach(), "fused=%s at step %d" % (fused, step))


def gradients_with_a_scale_next_to_other_plans(rank):
    """float64 parameters and groups with another seed are stepped separately; the scale applies to all."""
    mesh = line()

    def double(twins):
        for params in (twins.params, twins.whole):
            params.append(torch.nn.Parameter(random((5,), 3).double()))
        twins.layouts = [*twins.layouts, ((5,), None, None)]

    def seeds(params):
        return AdamW([{"params": params[:1], "seed": 1}, {"params": params[1:]}], lr=0.1, stochastic_rounding=True,
                     fused=True)

    for dtype, change, make in ((torch.bfloat16, lambda twins: None, seeds),
                                (torch.float32, double, lambda params: AdamW(params, lr=0.1, fused=True))):
        twins = Twins([((9, 4), mesh, [Shard(0)]), ((5, 3), mesh, [Shard(0)])], dtype)
        change(twins)
        optimizer, other = make(twins.params), make(twins.whole)
        for found_inf in (None, torch.tensor(0.0), torch.tensor(1.0), None):
            twins.give_grads(scale=4.0)
            for each in (optimizer, other):
                each.grad_scale, each.found_inf = torch.tensor(4.0), found_inf
                each.step()
            twins.assert_params("%s, found_inf=%s" % (dtype, found_inf))
        twins.assert_states(str(dtype), optimizer, other)
        assert all(state["step"].item() == 3 for state in optimizer.state.values())
        # An error in the last plan leaves all parameters unchanged.
        twins.give_grads()
        twins.params[-1].grad = (torch.zeros(5, 3, dtype=dtype) if dtype == torch.bfloat16 else
                                 twins.params[-1].grad.to_sparse())
        before = [whole(param).clone() for param in twins.params]
        optimizer.grad_scale = None
        raises(dsopt.UnsupportedError, "is a plain tensor, and the parameter a DTensor|is sparse", optimizer.step)
        assert all(torch.equal(whole(param), old) for param, old in zip(twins.params, before))


def program_of_the_readme(rank):
    text = (pathlib.Path(__file__).resolve().parents[2] / "dsopt" / "torch" / "README.md").read_text(encoding="utf-8")
    program, = [found for found in re.findall(r"^```py\n(.*?)^```$", text, flags=re.M | re.S) if "fully_shard" in found]
    said = io.StringIO()
    # The test has already created the process group, without an address.
    with mock.patch.object(torch.distributed, "init_process_group"), contextlib.redirect_stdout(said):
        exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    assert said.getvalue() == "trained: True\n", said.getvalue()


STEPS = [
    element_wise_rules_have_the_bits_of_unsharded_parameters, element_wise_rules_agree_with_torch_on_dtensors,
    complex_parameters_and_any_memory_order, gradients_of_other_placements_are_redistributed,
    gradients_may_be_absent_on_some_ranks, memory_may_be_replaced, an_optimizer_of_parameters_on_the_meta_device,
    refusals_name_what_is_wrong, place_of_a_shard_in_its_tensor, fsdp2, fsdp2_of_bfloat16_parameters,
    tensor_parallel_with_plain_parameters, fsdp2_of_tensor_parallel, grad_scaler_skips_on_all_ranks,
    gradients_with_a_scale_next_to_other_plans, program_of_the_readme
]
