# SPDX-License-Identifier: Apache-2.0
"""The keys of optimizer.state, and torch.distributed.checkpoint over two processes with gloo."""
import copy
import functools
import io
import shutil
import sys
import tempfile
import unittest

from support import VERSION, TestCase, child, main, params_of, run_ranks, torch

from dsopt.torch import (SGD, AdamW, FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb, Lion, OnebitAdam,
                         OnebitLamb, ZeroOneAdam)

try:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_optimizer_state_dict,
                                                         set_optimizer_state_dict)
except ImportError:
    dcp = None

GLOO = torch.distributed.is_available() and torch.distributed.is_gloo_available()
FAMILY = {"adam": (OnebitAdam, {"freeze_step": 4}), "lamb": (OnebitLamb, {"freeze_step": 4}),
          "zero_one": (ZeroOneAdam, {"var_freeze_step": 4, "local_step_scaler": 3})}
WRAPPERS = {"fused": FP16_Optimizer, "unfused": FP16_UnfusedOptimizer}


def model(dtype=torch.float32, width=33):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)).to(dtype)


class Run:
    """A model and its optimizer on one rank. Gradients depend on the rank and the step number."""

    def __init__(self, name, rank, wrapper=None):
        kind, options = FAMILY[name]
        self.rank, self.step, self.net = rank, 0, model(torch.float16 if wrapper else torch.float32)
        self.inner = kind(self.net.parameters(), lr=5e-3, **options)
        self.optimizer = WRAPPERS[wrapper](self.inner, dynamic_loss_scale=True, clip_grad=1.0, dynamic_loss_args={
            "init_scale": 2.0 ** 8, "scale_window": 4}) if wrapper else self.inner

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            generator = torch.Generator().manual_seed(100 * self.step + self.rank)
            scale = self.optimizer.loss_scale if self.optimizer is not self.inner else 1
            bad = self.step in (3, 9) and self.optimizer is not self.inner and self.rank == 1
            for param in self.net.parameters():
                grad = torch.randn(param.shape, generator=generator) * scale * (float("inf") if bad else 1)
                param.grad = grad.to(param.dtype)
            self.optimizer.step()

    def until_ranks_are_equal(self):
        """0/1 Adam: steps until an exchange has synchronized the ranks."""
        while self.inner.next_reduction() == "local":
            self.train(1)
        self.train(1)

    def everything(self):
        """Returns everything that affects the next steps."""
        state = self.inner.state_dict()["state"]
        tensors = {(i, name): value.clone() for i, of in state.items() for name, value in of.items()}
        return {**tensors, **{(i, "param"): p.detach().clone() for i, p in enumerate(self.net.parameters())}}


def assert_equal(got, expected):
    assert set(got) == set(expected), sorted(set(got) ^ set(expected), key=str)
    for key, value in expected.items():
        assert torch.equal(got[key], value), "%s differs" % (key,)


def survives(rank, name, wrapper=None, flat=False):
    """Ten steps after a load must be bit-identical to those of the run that was saved."""
    run = Run(name, rank, wrapper)
    run.train(13)
    run.until_ranks_are_equal()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    dcp.save({"net": run.net.state_dict(), "optimizer": get_optimizer_state_dict(run.net, run.inner, options=options)},
             checkpoint_id=folder[0])
    run.train(10)
    again = Run(name, rank, wrapper)
    with torch.no_grad():
        for param in again.net.parameters():
            param.fill_(7)
    loaded = {"net": again.net.state_dict(),
              "optimizer": get_optimizer_state_dict(again.net, again.inner, options=options)}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_optimizer_state_dict(again.net, again.inner, loaded["optimizer"], options=options)
    again.net.load_state_dict(loaded["net"])
    again.step = run.step - 10
    again.train(10)
    assert_equal(again.everything(), run.everything())
    if rank == 0:
        shutil.rmtree(folder[0])
    if name != "zero_one":
        errors = [value for key, value in run.everything().items() if "worker_error" in key[1]]
        assert len(errors) == 1 and errors[0].abs().max() > 0


def rank_0_for_all(rank):
    """A checkpoint of rank 0 only: other ranks restart error feedback, and continue with the same weights."""
    run = Run("adam", rank)
    run.train(10)
    saved = [copy.deepcopy(run.inner.state_dict()) if rank == 0 else None]
    torch.distributed.broadcast_object_list(saved)
    again = Run("adam", rank)
    again.net.load_state_dict(run.net.state_dict())
    again.inner.load_state_dict(saved[0])
    assert torch.equal(again.inner.state_dict()["state"][0]["schedule"], run.inner.state_dict()["state"][0]["schedule"])
    again.train(1)
    state = again.inner.state_dict()["state"]
    assert [name for of in state.values() for name in of if "worker_error" in name] == ["worker_error_rank%dof2" % rank]
    assert again.inner.frozen


def of_another_layout(rank):
    """State in the layout of versions before 0.2: under the key "dsopt"."""
    run = Run("lamb", rank)
    run.train(10)
    saved = copy.deepcopy(run.inner.state_dict())
    states = saved["state"]
    whole = {name: states[0].pop(name) for name in list(states[0]) if name in ("schedule", "active")}
    for name in ("worker_error", "server_error"):
        whole[name] = states[0].pop("%s_rank%dof2" % (name, rank))
    for name in [name for name in states[0] if name.startswith("trust_")]:
        whole[name] = torch.stack([of.pop(name) for of in states.values()])
    assert {"schedule", "active", "trust_average", "trust_factor", "trust_weight"} <= set(whole)
    states["dsopt"] = whole
    again = Run("lamb", rank)
    again.net.load_state_dict(run.net.state_dict())
    again.inner.load_state_dict(saved)
    again.step = run.step
    for some in (run, again):
        some.train(10)
    assert_equal(again.everything(), run.everything())


CASES = [functools.partial(survives, name=name) for name in FAMILY]
CASES += [functools.partial(survives, name=name, flat=True) for name in FAMILY]
CASES += [functools.partial(survives, name=name, wrapper=wrapper) for name in FAMILY for wrapper in WRAPPERS]


@unittest.skipUnless(GLOO and dcp is not None, "torch is built without gloo, or has no torch.distributed.checkpoint")
class TwoProcesses(TestCase):
    def test_ten_steps_after_a_load_match_the_saved_run(self):
        run_ranks(self, __file__, "dcp")

    def test_loads_state_dicts(self):
        run_ranks(self, __file__, "dicts")


class OneProcess(TestCase):
    EVERY = ((SGD, {"momentum": 0.9}), (AdamW, {}), (Lion, {}), (FusedAdam, {}), (FusedLamb, {}), *FAMILY.values())

    def each(self):
        """Yields optimizers after a step, with and without a wrapper."""
        for kind, options in self.EVERY:
            for wrapper in (None, FP16_Optimizer, FP16_UnfusedOptimizer):
                net = model(torch.float16 if wrapper else torch.float32)
                optimizer = inner = kind(net.parameters(), **options)
                if wrapper:
                    optimizer = wrapper(inner, dynamic_loss_scale=True)
                for param in net.parameters():
                    param.grad = torch.ones_like(param)
                optimizer.step()
                yield net, inner

    def test_keys_of_the_state_are_parameters(self):
        for net, optimizer in self.each():
            self.assertEqual(set(optimizer.state), set(net.parameters()))
            for param, state in optimizer.state.items():
                self.assertTrue(all(map(torch.is_tensor, state.values())), list(state))
                if not isinstance(optimizer, SGD):
                    self.assertEqual(state["exp_avg"].shape, param.shape)

    @unittest.skipIf(dcp is None, "torch %s has no torch.distributed.checkpoint.state_dict" % torch.__version__)
    def test_works_with_torch_distributed_checkpoint(self):
        for net, optimizer in self.each():
            state = get_optimizer_state_dict(net, optimizer)["state"]
            self.assertEqual(set(state), {name for name, _ in net.named_parameters()})

    def test_dtypes_of_counters_survive_a_load(self):
        """torch casts state to the dtype of its parameter, which would be float16."""
        params = params_of((5,), dtype=torch.float16)
        optimizer = FP16_Optimizer(OnebitAdam(params, freeze_step=2), dynamic_loss_scale=True)
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        file = io.BytesIO()
        torch.save(optimizer.optimizer.state_dict(), file)
        file.seek(0)
        others = params_of((5,), dtype=torch.float16)
        again = FP16_Optimizer(OnebitAdam(others, freeze_step=2), dynamic_loss_scale=True)
        again.optimizer.load_state_dict(torch.load(file, **{"weights_only": True} if VERSION >= (2, 0) else {}))
        for name, value in optimizer.state[params[0]].items():
            self.assertEqual(again.state[others[0]][name].dtype, value.dtype, name)
            self.assertTrue(torch.equal(again.state[others[0]][name], value), name)

    def test_optimizer_state_moves_if_the_first_parameter_changes(self):
        """State of the whole optimizer is stored with the first parameter, whichever that is."""
        params = params_of((4,), (6,))
        params[0].requires_grad_(False)
        optimizer = OnebitLamb(params, freeze_step=10)
        params[1].grad = torch.ones(6)
        for _ in range(3):
            optimizer.step()
        schedule = optimizer.state[params[1]]["schedule"].clone()
        average = optimizer.state[params[1]]["trust_average"].clone()
        params[0].requires_grad_(True)
        params[0].grad, params[1].grad = torch.ones(4), None
        optimizer.step()
        self.assertNotIn("schedule", optimizer.state[params[1]])
        self.assertEqual(optimizer.state[params[0]]["schedule"][0].item(), schedule[0].item() + 1)
        self.assert_same([optimizer.state[params[1]]["trust_average"]], [average])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:

        child(CASES if sys.argv[2] == "dcp" else [rank_0_for_all, of_another_layout], int(sys.argv[3]), sys.argv[4])
    else:
        main()
