# SPDX-License-Identifier: Apache-2.0
"""The 1-bit family over two processes with gloo."""
import functools
import os
import subprocess
import sys
import tempfile

from support import TestCase, main, torch

import dsopt
from dsopt.torch import FP16_Optimizer, FusedAdam, OnebitAdam, OnebitLamb, ZeroOneAdam

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    print("skipped: torch is built without gloo")
    sys.exit(77)

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
    """The same bits on both ranks."""
    flat = torch.cat([t.detach().float().reshape(-1) for t in tensors])
    both = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(both, flat)
    assert torch.equal(both[0], both[1]), "the ranks have gone apart by %g" % (both[0] - both[1]).abs().max()


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
    while optimizer.next_reduction() == "local":  # 0/1 Adam: until the ranks meet again
        train(net, optimizer, rank, 1)
    train(net, optimizer, rank, 1)
    same_everywhere(net.parameters())
    assert min(losses[-5:]) < 0.9 * losses[0], losses
    assert optimizer.state["dsopt"]["worker_error"].abs().max() > 0


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


def engine_is_told(rank):
    """With `deepspeed` the caller averages, when the optimizer says so."""
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
        optimizer.backward(loss * (float("inf") if i == 5 and rank == 1 else 1))  # one rank, and all skip
        skipped.append(optimizer.step())
    assert skipped == [i == 5 for i in range(10)], skipped
    assert optimizer.cur_scale == 2.0 ** 7, optimizer.cur_scale
    same_everywhere(net.parameters())


def subgroups(rank):
    """Groups of one rank exchange nothing."""
    groups = [torch.distributed.new_group([r]) for r in range(2)]
    net = model()
    optimizer = OnebitAdam(net.parameters(), lr=5e-3, freeze_step=3, group=groups[rank])
    train(net, optimizer, rank, 5)
    assert "worker_error" not in optimizer.state["dsopt"]


def a_peer_is_gone(rank):
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
CASES += [full_steps_are_adamw_on_means, continues_from_state, engine_is_told, masters_and_scale, subgroups]


def child(cases, rank, file):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=2)
    for case in cases:
        print(case, flush=True)
        case(rank)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class TwoProcesses(TestCase):
    def run_cases(self, which):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, os.path.abspath(__file__), "--child", which]
            both = [subprocess.Popen(command + [str(rank), os.path.join(folder, "meet")], stdout=subprocess.PIPE,
                                     stderr=subprocess.STDOUT, text=True) for rank in range(2)]
            said = [process.communicate(timeout=500)[0] for process in both]
        for rank, process in enumerate(both):
            self.assertEqual(process.returncode, 0, "rank %d: %s" % (rank, said[rank]))

    def test_cases(self):
        self.run_cases("all")

    def test_a_peer_is_gone(self):
        self.run_cases("peer")


class OneProcess(TestCase):
    def test_a_group_without_torch_distributed(self):
        net = model()
        optimizer = OnebitAdam(net.parameters(), group=object())
        net(torch.zeros(1, 6)).sum().backward()
        with self.assertRaisesRegex(dsopt.UnsupportedError, "not initialized"):
            optimizer.step()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(CASES if sys.argv[2] == "all" else [a_peer_is_gone], int(sys.argv[3]), sys.argv[4])
    else:
        main()
