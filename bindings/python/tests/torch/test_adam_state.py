# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW compared with torch.optim's: state, copies, hooks, loss scaling, processes."""
import copy
import functools
import io
import os
import pickle
import unittest
import unittest.mock

from support import PAIRS, SHAPES, VERSION, TestCase, fused_on, give_grads, main, params_of, step_both, torch

from dsopt.torch import SGD, Adagrad, Adam, AdamW, FusedAdam, FusedLamb, FusedLion, Lion


class State(TestCase):
    def test_state_is_compatible_with_torch(self):
        for kind, reference in PAIRS:
            params, others = params_of(*SHAPES), params_of(*SHAPES)
            ours, theirs = kind(params, lr=0.01), reference(others, lr=0.01)
            step_both(ours, theirs, params, others, 4)
            self.assertEqual(list(ours.state_dict()["param_groups"][0]), list(theirs.state_dict()["param_groups"][0]))
            crossed = kind(others, lr=0.5), reference(params, lr=0.5)
            crossed[0].load_state_dict(copy.deepcopy(theirs.state_dict()))
            crossed[1].load_state_dict(copy.deepcopy(ours.state_dict()))
            step_both(crossed[0], crossed[1], others, params, 4, begin=4)
            self.assert_close(params, others)
            self.assertEqual(float(crossed[0].state[others[0]]["step"]), 8)
            self.assertEqual(float(crossed[1].state[params[0]]["step"]), 8)
            self.assertEqual(crossed[0].param_groups[0]["lr"], 0.01)

    def continued(self, make, load):
        params = params_of((9,), (4, 2))
        first = make(params)
        for i in range(3):
            give_grads(params, seed=i)
            first.step()
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        second = make(others)
        load(first, second)
        for i in range(3, 6):
            give_grads(params, others, seed=i)
            first.step()
            second.step()
            self.assert_same(params, others)
        self.assertEqual(str(first.state_dict()), str(second.state_dict()))

    def test_resumes_with_same_bits(self):
        def by_file(first, second):
            file = io.BytesIO()
            torch.save(first.state_dict(), file)
            file.seek(0)
            second.load_state_dict(torch.load(file, **({"weights_only": True} if VERSION >= (2, 0) else {})))

        for kind, _ in PAIRS:
            self.continued(functools.partial(kind, lr=0.01),
                           lambda a, b: b.load_state_dict(copy.deepcopy(a.state_dict())))
            self.continued(functools.partial(kind, lr=0.01), by_file)

    def test_replaces_torch_optim_classes(self):
        """Assigns torch.optim.AdamW = dsopt.torch.AdamW, for code that cannot be changed."""
        for kind, reference in PAIRS:
            params, others = params_of((9,)), params_of((9,))
            theirs = reference(others, lr=0.01)
            with unittest.mock.patch.object(torch.optim, kind.__name__, kind):
                ours = getattr(torch.optim, kind.__name__)(params, lr=0.01)
                ours.load_state_dict(copy.deepcopy(ours).state_dict())
            step_both(ours, theirs, params, others, 3)
            self.assert_close(params, others)

    def test_loading_does_not_change_the_dict(self):
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved)
        AdamW(params_of((9,))).load_state_dict(saved)
        self.assertEqual(str(before), str(saved))

    def test_16_bit_parameters_keep_their_state(self):
        params = params_of((50,), dtype=torch.bfloat16)
        optimizer = AdamW(params, lr=0.01)
        for i in range(3):
            give_grads(params, seed=i)
            optimizer.step()
        again = AdamW(params, lr=0.01)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for key in ("exp_avg", "exp_avg_sq"):
            self.assert_same([again.state[params[0]][key]], [optimizer.state[params[0]][key]])
        if VERSION >= (2, 2):  # the state that hooks return is loaded
            def hook(optimizer, state_dict):
                state_dict = copy.deepcopy(state_dict)
                state_dict["state"][0]["exp_avg"].zero_()
                return state_dict
            again.register_load_state_dict_pre_hook(hook)
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            self.assert_same([again.state[params[0]]["exp_avg"]], [torch.zeros(50)])
            self.assert_same([again.state[params[0]]["exp_avg_sq"]], [optimizer.state[params[0]]["exp_avg_sq"]])

    def test_loads_state_of_older_versions(self):
        """State without the keys of newer versions, and with the step as a number."""
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for key in ("foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            saved["param_groups"][0].pop(key, None)
        saved["state"][0]["step"] = 5
        optimizer.load_state_dict(saved)
        optimizer.step()
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 6)

    def test_amsgrad_of_another_run_is_refused(self):
        params = params_of((9,))
        other = torch.optim.AdamW(params, amsgrad=True)
        give_grads(params)
        other.step()
        optimizer = AdamW(params)
        with self.assertRaisesRegex(NotImplementedError, "state of parameter 0.*amsgrad"):
            optimizer.load_state_dict(other.state_dict())

    def test_state_of_another_shape_is_refused(self):
        params = params_of((9,), (4,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        optimizer.state[params[1]]["exp_avg"] = torch.zeros(3)
        with self.assertRaisesRegex(ValueError, r"'exp_avg' of param_groups\[0\]\['params'\]\[1\]"):
            optimizer.step()

    def test_copies_step_like_the_original(self):
        for again in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            params = params_of((9,))
            optimizer = AdamW(params, lr=0.02)
            give_grads(params)
            optimizer.step()
            other = again(optimizer)
            copied = other.param_groups[0]["params"]
            self.assertIsNot(copied[0], params[0])
            self.assert_same(copied, params)
            self.assertEqual({key
                              for key in vars(optimizer) if key[0] != "_"},
                             {key
                              for key in vars(other) if key[0] != "_"})
            for i in range(3):
                give_grads(params, copied, seed=i)
                optimizer.step()
                other.step()
            self.assert_same(copied, params)
            self.assertEqual(repr(optimizer), repr(other))

    def test_works_with_default_dtype_float64(self):
        torch.set_default_dtype(torch.float64)
        try:
            param = torch.nn.Parameter(torch.zeros(3, dtype=torch.float32))
            optimizer = AdamW([param])
            param.grad = torch.ones(3, dtype=torch.float32)
            optimizer.step()
            self.assertEqual(optimizer.state[param]["exp_avg"].dtype, torch.float32)
            self.assertEqual(optimizer.state[param]["step"].item(), 1)
        finally:
            torch.set_default_dtype(torch.float32)


class Hooks(TestCase):
    def test_calls_step_hooks(self):
        if not hasattr(torch.optim.Optimizer, "register_step_pre_hook"):
            self.skipTest("torch %s has no hooks" % torch.__version__)
        params = params_of((3,))
        optimizer, seen = AdamW(params), []
        give_grads(params)
        handles = [optimizer.register_step_pre_hook(lambda *a: seen.append("before")),
                   optimizer.register_step_post_hook(lambda *a: seen.append("after"))]
        optimizer.step()
        self.assertEqual(seen, ["before", "after"])
        for handle in handles:
            handle.remove()
        optimizer.step()
        self.assertEqual(len(seen), 2)

    def test_calls_state_dict_hooks(self):
        if not hasattr(torch.optim.Optimizer, "register_state_dict_pre_hook"):
            self.skipTest("torch %s has no such hooks" % torch.__version__)
        params = params_of((3,))
        optimizer, seen = AdamW(params), []
        give_grads(params)
        optimizer.step()
        optimizer.register_state_dict_pre_hook(lambda o: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda o, s: seen.append("saved"))
        optimizer.register_load_state_dict_pre_hook(lambda o, s: seen.append("load"))
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append("loaded"))
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertEqual(seen, ["save", "saved", "load", "loaded"])
        self.assertEqual(len(optimizer._optimizer_load_state_dict_pre_hooks), 1)

    def test_profiler_names_the_step(self):
        params = params_of((3,))
        optimizer = AdamW(params)
        give_grads(params)
        with torch.autograd.profiler.profile() as profile:
            optimizer.step()
        self.assertIn("Optimizer.step#AdamW.step", [event.key for event in profile.key_averages()])

    def test_exception_of_a_closure_reaches_the_caller(self):
        def closure():
            raise KeyError("mine")
        optimizer = AdamW(params_of((3,)))
        with self.assertRaisesRegex(KeyError, "mine"):
            optimizer.step(closure)


class Scaling(TestCase):
    def test_reads_grad_scale_and_found_inf(self):
        params, others = params_of((9,)), params_of((9,))
        ours, theirs = AdamW(params), torch.optim.AdamW(others)
        give_grads(params, others)
        params[0].grad.mul_(1024)
        ours.grad_scale, ours.found_inf = torch.full((1,), 1024.0), torch.tensor(0.0)
        ours.step()
        theirs.step()
        self.assert_close(params, others)
        old, state = params[0].detach().clone(), copy.deepcopy(ours.state[params[0]])
        ours.found_inf = torch.tensor(1.0)
        ours.grad_scale = None
        ours.step()
        self.assert_same([params[0], *ours.state[params[0]].values()], [old, *state.values()])
        fresh = AdamW(others)
        fresh.grad_scale, fresh.found_inf = None, torch.tensor(1.0, dtype=torch.float64)
        fresh.step()
        self.assertEqual(fresh.state[others[0]]["step"].item(), 0)

    def scalers(self, count):
        try:
            return [torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=3) for _ in range(count)]
        except (AttributeError, TypeError, RuntimeError):
            self.skipTest("torch %s has no GradScaler for the CPU" % torch.__version__)

    def test_works_with_grad_scaler(self):
        for fused in (None, False, True)[: 3 if fused_on("cpu") else 2]:
            pair = self.scalers(2)
            models = [torch.nn.Linear(4, 2)]
            models.append(copy.deepcopy(models[0]))
            optimizers = [AdamW(models[0].parameters(), lr=0.1, fused=fused),
                          torch.optim.AdamW(models[1].parameters(), lr=0.1)]
            for i in range(8):
                x = torch.randn(3, 4) * (float("inf") if i == 4 else 1)
                for model, optimizer, scaler in zip(models, optimizers, pair):
                    optimizer.zero_grad()
                    scaler.scale(model(x).pow(2).mean()).backward()
                    if i == 6:
                        scaler.unscale_(optimizer)
                        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    scaler.step(optimizer)
                    scaler.update()
                self.assert_close(list(models[0].parameters()), list(models[1].parameters()))
                self.assertEqual(pair[0].get_scale(), pair[1].get_scale())
            self.assertEqual(optimizers[0].state[models[0].weight]["step"].item(), 7)
            self.assertFalse(hasattr(optimizers[0], "found_inf"))

    def test_grad_scaler_calls_skipped_steps_only_if_fused(self):
        """accelerate detects by the call whether a step was skipped."""
        for kind in (Adam, AdamW, SGD, Adagrad):
            for fused in (None, False, True)[: 3 if fused_on("cpu") else 2]:
                model = torch.nn.Linear(4, 2)
                optimizer, scaler, calls = kind(model.parameters(), fused=fused), self.scalers(1)[0], []
                optimizer.register_step_post_hook(lambda *_: calls.append(1))
                scaler.scale(model(torch.ones(1, 4)).sum()).backward()
                model.weight.grad.fill_(float("inf"))
                before = model.weight.detach().clone()
                scaler.step(optimizer)
                scaler.update()
                self.assert_same([model.weight], [before])
                self.assertEqual(len(calls), 1 if fused else 0)
                self.assertEqual(scaler.get_scale(), 2.0 ** 9)

    def test_fused_sets_the_flag_for_unscaling(self):
        """Lightning does not clip gradients if the step unscales them."""
        params = params_of((9,))
        for kind in (Adam, AdamW, SGD, Adagrad):
            for fused in (None, False, True)[: 3 if fused_on("cpu") else 2]:
                optimizer = kind(params, fused=fused)
                for some in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
                    self.assertEqual(some._step_supports_amp_scaling, bool(fused))
        for kind in (Lion, FusedAdam, FusedLamb, FusedLion):
            self.assertFalse(kind(params)._step_supports_amp_scaling)


class Processes(TestCase):
    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_forked_child_steps(self):
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        expected = copy.deepcopy(params)
        again = copy.deepcopy(optimizer)
        again.param_groups[0]["params"][0].grad = params[0].grad.clone()
        again.step()
        expected = again.param_groups[0]["params"][0].detach()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                optimizer.step()
                status = 0 if torch.equal(params[0].detach(), expected) else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        optimizer.step()
        self.assert_same(params, [expected])

    def test_steps_parameters_in_shared_memory(self):
        params = params_of((9,))
        optimizer = AdamW(params)
        give_grads(params)
        optimizer.step()
        for tensor in [params[0], params[0].grad, *optimizer.state[params[0]].values()]:
            tensor.share_memory_()
        optimizer.step()
        self.assertEqual(optimizer.state[params[0]]["step"].item(), 2)

    def test_steps_from_many_threads(self):
        import threading
        results = [None] * 4

        def work(k):
            params = params_of((2000,))
            optimizer = AdamW(params)
            for i in range(20):
                give_grads(params, seed=i)
                optimizer.step()
            results[k] = params[0].detach()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assert_same(results[1:], results[:1] * 3)


if __name__ == "__main__":
    main()
