# SPDX-License-Identifier: Apache-2.0
"""Runs the inputs with which torch tests its own optimizers (torch.testing._internal.common_optimizers)."""
import copy
import unittest
import warnings

from support import TestCase, main, torch

try:
    from torch.testing._internal.common_optimizers import optim_db
except ImportError:
    optim_db = None

from dsopt.torch import SGD, Adagrad, Adam, AdamW

OURS = {torch.optim.Adam: Adam, torch.optim.AdamW: AdamW, torch.optim.SGD: SGD, torch.optim.Adagrad: Adagrad}
REFUSED = ("amsgrad", "maximize", "differentiable")


def inputs(device="cpu", dtype=torch.float32):
    """Yields our class, torch's class, arguments, description."""
    for info in optim_db:
        if info.optim_cls in OURS:
            for passed in info.optim_inputs_func(device=device, dtype=dtype):
                yield OURS[info.optim_cls], info, passed.kwargs, "%s: %s" % (info.optim_cls.__name__, passed.desc)


@unittest.skipIf(optim_db is None, "torch %s has no common_optimizers" % torch.__version__)
class CommonOptimizers(TestCase):
    def each(self):
        count = 0
        for ours, info, options, said in inputs():
            if any(options.get(name) for name in REFUSED):
                with self.assertRaises(NotImplementedError, msg=said):
                    ours([torch.nn.Parameter(torch.zeros(1))], **options)
                continue
            count += 1
            with self.subTest(said):
                yield ours, info, options
        self.assertGreater(count, 4)

    def test_raises_the_errors_of_torch(self):
        for info in optim_db:
            for passed in info.optim_error_inputs_func("cpu", torch.float32) if info.optim_cls in OURS else ():
                params = passed.optimizer_error_input.params
                params = [torch.nn.Parameter(torch.randn(1))] if params is None else params
                kind = OURS[info.optim_cls]
                with self.subTest(passed.optimizer_error_input.desc):
                    if issubclass(passed.error_type, Warning):
                        with self.assertWarnsRegex(passed.error_type, passed.error_regex):
                            kind(params, **passed.optimizer_error_input.kwargs)
                    else:
                        with self.assertRaisesRegex(passed.error_type, passed.error_regex), warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            kind(params, **passed.optimizer_error_input.kwargs)

    def trajectory(self, kind, options, steps=7, dtype=torch.float32, **more):
        """Trains a small network on fixed data; returns weights and state."""
        torch.manual_seed(1)
        layers = torch.nn.Linear(5, 7), torch.nn.Sigmoid(), torch.nn.Linear(7, 1), torch.nn.Sigmoid()
        model = torch.nn.Sequential(*layers).to(dtype)
        optimizer = kind(model.parameters(), **options, **more)
        x = torch.arange(15.0).reshape(3, 5).to(dtype) / 10
        for i in range(steps):
            optimizer.zero_grad()
            model(x).sum().backward()
            if i == 3:  # one parameter without gradient
                model[2].bias.grad = None
            optimizer.step()
        return list(model.parameters()), optimizer

    def test_agrees_with_every_implementation(self):
        for ours, info, options in self.each():
            params, optimizer = self.trajectory(ours, options)
            for implementation in ({"foreach": False}, {"foreach": True}, {"fused": True}):
                others, theirs = self.trajectory(info.optim_cls, options, **implementation)
                self.assert_close(params, others)
                for p, q in zip(params, others):
                    for key in theirs.state[q]:
                        self.assert_close(optimizer.state[p][key], theirs.state[q][key])

    def test_flags_change_nothing(self):
        for ours, info, options in self.each():
            params, _ = self.trajectory(ours, options)
            for flag in ({"foreach": True}, {"fused": True}, {"foreach": False, "fused": False}):
                if not (flag.get("foreach") and isinstance(options.get("lr"), torch.Tensor)):
                    self.assert_same(self.trajectory(ours, options, **flag)[0], params)

    def test_works_with_schedulers(self):
        for ours, info, options in self.each():
            for schedulers in info.scheduler_inputs:
                weight = torch.nn.Parameter(torch.randn(10, 5))
                optimizer = ours([weight], **{**options, "lr": 0.01})
                going = [scheduler(optimizer) for scheduler in schedulers]
                first = weight.detach().pow(2).sum().item()
                for _ in range(20):
                    weight.grad = 2 * weight.detach()
                    optimizer.step()
                    for scheduler in going:
                        plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                        scheduler.step(*([1.0] if plateau else []))
                self.assertLess(weight.detach().pow(2).sum().item(), first)

    def test_copy_has_the_same_state_dict(self):
        for ours, info, options in self.each():
            params, optimizer = self.trajectory(ours, options)
            others = [torch.nn.Parameter(p.detach().clone()) for p in params]
            again = ours(others, **options)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for i in range(5):
                for p, q in zip(params, others):
                    p.grad = torch.randn(p.shape)
                    q.grad = p.grad.clone()
                optimizer.step()
                again.step()
                self.assert_same(others, params)

    def test_found_inf_skips_the_step(self):
        for ours, info, options in self.each():
            params = [torch.ones(1) for _ in range(5)]
            for p in params:
                p.grad = torch.ones(1)
            optimizer = ours(params, **options)
            optimizer.grad_scale, optimizer.found_inf = torch.ones(1), torch.ones(())
            optimizer.step()
            self.assert_same(params, [torch.ones(1)] * 5)
            if ours is not SGD:  # SGD has no step counter
                self.assertEqual([optimizer.state[p]["step"].item() for p in params], [0.0] * 5)


if __name__ == "__main__":
    main()
