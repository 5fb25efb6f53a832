# SPDX-License-Identifier: Apache-2.0
"""The 1-bit family over two processes with gloo."""
import functools
import os
import sys
import tempfile
import unittest

from support import TestCase, child, main, run_ranks, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FusedAdam, OnebitAdam, OnebitLamb, ZeroOneAdam

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
GRAD_SCALER = hasattr(torch, "amp") and hasattr(torch.amp, "GradScaler")  # for the CPU
KINDS = {"adam": (OnebitAdam, {"freeze_step": 3}), "lamb": (OnebitLamb, {"freeze_step": 3}),
         "zero_one": (ZeroOneAdam, {"var_freeze_step": 4, "local_step_scaler": 3})}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))


def batches(rank, steps, begin=0):
    generator = torch.Generator().manual_seed(50 + rank)
    for i in range(begin + steps):
        x = torch.randn(32, 6, generator=generator)
        if i >= begin:
            yield x, x[:, :1] * x[:, 1:2]


def same_everywhere(tensors):
    """Asserts the same bits on both ranks."""
    flat = torch.cat([t.detach().float().reshape(-1) for t in tensors])
    both = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(both, flat)
    assert torch.equal(both[0], both[1]), "the ranks differ by %g" % (both[0] - both[1]).abs().max()


def train(net, optimizer, rank, steps, begin=0):
    losses = []
    for x, y in batches(rank, steps, begin):
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ranks_agree(rank, name):
    kind, options = KINDS[name]
    net = model()
    optimizer = kind(net.parameters(), lr=5e-3, **options)
    losses = train(net, optimizer, rank, 60)
    assert optimizer.frozen
    while optimizer.next_reduction() == "local":  # 0/1 Adam: until the ranks exchange again
        train(net, optimizer, rank, 1)
    train(net, optimizer, rank, 1)
    same_everywhere(net.parameters())
    assert min(losses[-5:]) < 0.9 * losses[0], losses
    first = optimizer.state[next(net.parameters())]
    assert first["worker_error_rank%dof2" % rank].abs().max() > 0


def full_steps_are_adamw_on_means(rank):
    """Before the freeze: AdamW without bias correction on averaged gradients."""
    net, other = model(), model()
    optimizer = OnebitAdam(net.parameters(), lr=5e-3, freeze_step=100)
    reference = FusedAdam(other.parameters(), lr=5e-3, bias_correction=False)
    for x, y in batches(rank, 5):
        for some, kind in ((net, optimizer), (other, reference)):
            some.zero_grad()
            ((some(x) - y) ** 2).mean().backward()
        for param in other.parameters():
            torch.distributed.all_reduce(param.grad)
            param.grad /= 2
        optimizer.step()
        reference.step()
    torch.testing.assert_close(list(net.parameters()), list(other.parameters()))


def continues_from_state(rank):
    net = model()
    optimizer = OnebitAdam(net.parameters(), lr=5e-3, freeze_step=3)
    train(net, optimizer, rank, 8)
    file = tempfile.TemporaryFile()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    other = model()
    other.load_state_dict(saved["net"])
    again = OnebitAdam(other.parameters(), lr=5e-3, freeze_step=3)
    again.load_state_dict(saved["optimizer"])
    for some, kind in ((net, optimizer), (other, again)):
        train(some, kind, rank, 4, begin=8)
    for a, b in zip(net.parameters(), other.parameters()):
        assert torch.equal(a, b)


def flag_of_the_engine_follows_the_stage(rank):
    """With `deepspeed` the caller averages in the steps that need it."""
    class Engine:
        enable_backward_allreduce = True

    net, engine = model(), Engine()
    optimizer = OnebitAdam(net.parameters(), engine, lr=5e-3, freeze_step=3)
    seen = []
    for x, y in batches(rank, 6):
        optimizer.zero_grad()
        ((net(x) - y) ** 2).mean().backward()
        seen.append(engine.enable_backward_allreduce)
        if engine.enable_backward_allreduce:
            for param in net.parameters():
                torch.distributed.all_reduce(param.grad)
                param.grad /= 2
        optimizer.step()
    assert seen == [True, True, True, False, False, False], seen
    same_everywhere(net.parameters())


def masters_and_scale(rank):
    net = model().half()
    optimizer = FP16_Optimizer(OnebitAdam(net.parameters(), lr=5e-3, freeze_step=3), dynamic_loss_scale=True,
                               dynamic_loss_args={"init_scale": 2.0 ** 8, "scale_window": 100}, clip_grad=1.0)
    skipped = []
    for i, (x, y) in enumerate(batches(rank, 10)):
        hidden = torch.nn.functional.linear(x, net[0].weight.float(), net[0].bias.float()).tanh()
        loss = ((torch.nn.functional.linear(hidden, net[2].weight.float(), net[2].bias.float()) - y) ** 2).mean()
        optimizer.backward(loss * (float("inf") if i == 5 and rank == 1 else 1))  # one rank overflows, and all skip
        skipped.append(optimizer.step())
    assert skipped == [i == 5 for i in range(10)], skipped
    assert optimizer.cur_scale == 2.0 ** 7, optimizer.cur_scale
    same_everywhere(net.parameters())


def grad_scaler_skips_on_all_ranks(rank):
    """GradScaler leaves the decision to the step; otherwise the other rank would wait in the exchange."""
    net = model()
    optimizer = OnebitAdam(net.parameters(), lr=5e-3, freeze_step=3)
    assert optimizer._step_supports_amp_scaling
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8)
    for i, (x, y) in enumerate(batches(rank, 8)):
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.zero_grad()
        bad = i in (1, 5) and rank == 1
        scaler.scale(((net(x) - y) ** 2).mean() * (float("inf") if bad else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped = all(torch.equal(p, old) for p, old in zip(net.parameters(), before))
        assert skipped == (i in (1, 5)), (i, skipped)
    same_everywhere(net.parameters())


def grad_scale_of_float16_gradients_is_refused(rank):
    """1/scale underflows in float16. Nothing is changed."""
    params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, dtype=torch.float16))]
    optimizer = OnebitAdam(params, lr=5e-3, freeze_step=3)
    for param in params:
        param.grad = torch.full_like(param, 65.5)
    optimizer.grad_scale = torch.tensor(65536.0)
    try:
        optimizer.step()
        raise AssertionError("no exception")
    except dsopt.UnsupportedError as problem:
        assert "['params'][1] has dtype float16" in str(problem) and "FP16_Optimizer" in str(problem), problem
    for param in params:
        assert bool((param == 1).all()) and bool((param.grad == 65.5).all())


def masks_of_a_load(rank):
    """The user's mask is kept. Error feedback continues if the masks are equal, and restarts otherwise."""
    def optimizer_of(net, mask, **options):
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
        for group, value in zip(groups, (mask, None)):
            if value is not None:
                group["exp_avg_mask"] = value
        return OnebitAdam(groups, lr=5e-3, freeze_step=3, **options)

    def half(width):
        mask = torch.ones(33, 1)
        mask[width:] = 0
        return mask

    for compat in (None, "deepspeed"):
        net = model()
        net[0].bias = None
        optimizer = optimizer_of(net, half(20), compat=compat)
        train(net, optimizer, rank, 8)
        key = "worker_error_rank%dof2" % rank
        error = optimizer.state[net[0].weight][key].clone()
        assert error.abs().max() > 0
        saved = optimizer.state_dict()
        assert torch.equal(saved["param_groups"][0]["exp_avg_mask"], half(20))
        for mask, continues in ((half(20), True), (half(30), False), (None, False)):
            other = model()
            other[0].bias = None
            other.load_state_dict(net.state_dict())
            again = optimizer_of(other, mask, compat=compat)
            again.load_state_dict(saved)
            now = again.param_groups[0].get("exp_avg_mask")
            assert ("exp_avg_mask" in again.param_groups[0]) == (mask is not None)
            assert "exp_avg_mask" not in again.param_groups[1]
            assert mask is None or torch.equal(now, mask)
            again.next_reduction()
            continues = continues and compat is None  # the original's load drops the residuals
            got = again.state[other[0].weight][key]
            assert torch.equal(got, error if continues else torch.zeros_like(error)), (compat, continues)
            start = other[0].weight.detach().clone()
            train(other, again, rank, 4, begin=8)
            moved = (other[0].weight.detach() - start).abs().amax(1) > 0
            assert moved.tolist() == [bool(mask is None or mask[i]) for i in range(33)], (compat, moved)
            assert ("mask" in again.state[other[0].weight]) == (mask is not None)
            same_everywhere(other.parameters())


def absent_gradient_of_a_parameter_with_gaps(rank):
    """On ranks that exchange it counts as zeros, and memory between the elements is not written."""
    torch.manual_seed(rank)
    big = torch.arange(60.0).reshape(6, 10)
    params, others = [torch.nn.Parameter(big[:, ::2])], [torch.nn.Parameter(big[:, ::2].clone())]
    optimizers = [OnebitAdam(some, lr=0.1, freeze_step=2) for some in (params, others)]
    for i in range(5):
        grad = torch.randn(6, 5)
        params[0].grad, others[0].grad = (grad.clone(), grad) if i % 2 == 0 else (None, torch.zeros(6, 5))
        for optimizer in optimizers:
            optimizer.step()
        assert torch.equal(params[0], others[0]), i
    assert torch.equal(big[:, 1::2], torch.arange(60.0).reshape(6, 10)[:, 1::2])


def subgroups(rank):
    """Groups of one rank exchange nothing."""
    groups = [torch.distributed.new_group([r]) for r in range(2)]
    net = model()
    optimizer = OnebitAdam(net.parameters(), lr=5e-3, freeze_step=3, group=groups[rank])
    train(net, optimizer, rank, 5)
    assert not any("error" in name for state in optimizer.state.values() for name in state)


def a_peer_has_exited(rank):
    net = model()
    optimizer = OnebitAdam(net.parameters(), lr=5e-3, freeze_step=3)
    train(net, optimizer, rank, 2)
    torch.distributed.barrier()
    if rank == 1:
        os._exit(0)
    try:
        train(net, optimizer, rank, 20)
    except (RuntimeError, ConnectionError):
        os._exit(0)  # gloo may wait for the peer at the end
    raise AssertionError("no exception")


CASES = [functools.partial(ranks_agree, name=name) for name in KINDS]
CASES += [full_steps_are_adamw_on_means, continues_from_state, flag_of_the_engine_follows_the_stage,
          masters_and_scale, masks_of_a_load, grad_scale_of_float16_gradients_is_refused, subgroups,
          absent_gradient_of_a_parameter_with_gaps]
CASES += [grad_scaler_skips_on_all_ranks] if GRAD_SCALER else []


@unittest.skipUnless(GLOO, "torch is built without gloo")
class TwoProcesses(TestCase):
    def test_cases_pass_on_two_ranks(self):
        run_ranks(self, __file__, "all")

    def test_step_fails_if_the_peer_has_exited(self):
        run_ranks(self, __file__, "peer")


class OneProcess(TestCase):
    def test_rejects_a_group_without_torch_distributed(self):
        net = model()
        optimizer = OnebitAdam(net.parameters(), group=object())
        net(torch.zeros(1, 6)).sum().backward()
        with self.assertRaisesRegex(dsopt.UnsupportedError, "not initialized"):
            optimizer.step()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(CASES if sys.argv[2] == "all" else [a_peer_has_exited], int(sys.argv[3]), sys.argv[4])
    else:
        main()
