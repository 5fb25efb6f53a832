# SPDX-License-Identifier: Apache-2.0
"""State dicts that lack a tensor or a key, or have it under another name or in another dtype, for every class: the load
is refused by name and changes nothing, or the next step is right."""
import copy

from support import TestCase, give_grads, main, params_of, torch

import dsopt
import dsopt.torch as T

SHAPES = ((6, 4), (5, 3))
ONEBIT = {"freeze_step": 3}
CASES = {
    "AdamW": (T.AdamW, {}),
    "Adam": (T.Adam, {"weight_decay": 0.1}),
    "AdamW, float32 masters": (T.AdamW, {"masters": "float32"}),
    "AdamW, remainders": (T.AdamW, {"masters": "remainder"}),
    "AdamW, bf16 moments": (T.AdamW, {"exp_avg_format": "bf16", "exp_avg_sq_format": "bf16_random"}),
    "AdamW8bit": (T.AdamW8bit, {"min_8bit_size": 1}),
    "SGD": (T.SGD, {"momentum": 0.9}),
    "SGD without momentum": (T.SGD, {}),
    "Adagrad": (T.Adagrad, {"lr_decay": 0.1}),
    "Lion": (T.Lion, {}),
    "Muon": (T.Muon, {}),
    "FusedAdam": (T.FusedAdam, {}),
    "FusedLion": (T.FusedLion, {}),
    "FusedLamb": (T.FusedLamb, {}),
    "DeepSpeedCPUAdam": (T.DeepSpeedCPUAdam, {}),
    "DeepSpeedCPULion": (T.DeepSpeedCPULion, {}),
    "OnebitAdam": (T.OnebitAdam, {"freeze_step": 100}),
    "OnebitAdam, frozen": (T.OnebitAdam, ONEBIT),
    "ZeroOneAdam": (T.ZeroOneAdam, {"var_freeze_step": 3}),
    "OnebitLamb": (T.OnebitLamb, {"freeze_step": 100}),
    "OnebitLamb, frozen": (T.OnebitLamb, ONEBIT),
}
STEPS = 5


class StateDicts(TestCase):
    def start(self, name, weights=None):
        kind, options = CASES[name]
        dtype = torch.bfloat16 if "masters" in options else torch.float32
        params = params_of(*SHAPES, dtype=dtype)
        if weights is not None:
            for p, w in zip(params, weights):
                p.data.copy_(w)
        return params, kind(params, lr=0.01, **options)

    def step(self, params, optimizer, seed):
        give_grads(params, seed=seed)
        optimizer.step()

    def trained(self, name):
        """Returns weights, state dict, and the weights after the next step."""
        params, optimizer = self.start(name)
        for seed in range(STEPS):
            self.step(params, optimizer, seed)
        weights, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
        self.step(params, optimizer, STEPS)
        return weights, saved, [p.detach().clone() for p in params]

    def check(self, name, key, changed, weights, after, exact=False):
        """Loads, steps, and compares."""
        params, optimizer = self.start(name, weights)
        before = copy.deepcopy(optimizer.state_dict())
        try:
            optimizer.load_state_dict(copy.deepcopy(changed))
        except Exception as error:
            if key != "schedule":  # without it the state is taken for DeepSpeed's
                self.assertIn(repr(key), str(error))
            self.assertEqual(repr(optimizer.state_dict()), repr(before), "the load that failed has changed the optimizer")
            return
        self.step(params, optimizer, STEPS)
        for p, w, expected in zip(params, weights, after):
            expected, w, p = expected.float(), w.float(), p.detach().float()
            error, size = (p - expected).abs().max().item(), (expected - w).abs().max().item()
            ulp = w.abs().max().item() / 128 if "masters" in CASES[name][1] else 0.0  # of the bfloat16 weights
            self.assertLessEqual(error, 0.0 if exact else 0.1 * size + ulp)

    def test_each_tensor_is_removed_renamed_and_cast(self):
        for name in CASES:
            weights, saved, after = self.trained(name)
            self.check(name, "", saved, weights, after, exact=True)
            for place, state in saved["state"].items():
                for key, value in state.items():
                    for how in ("removed", "renamed", torch.float16, torch.bfloat16, torch.float64, torch.int64):
                        if isinstance(how, torch.dtype) and not torch.is_tensor(value):
                            continue
                        with self.subTest(name, parameter=place, key=key, how=how):
                            changed = copy.deepcopy(saved)
                            entry = changed["state"][place].pop(key)
                            if how in ("removed", "renamed") and not changed["state"][place]:
                                continue  # a parameter without state: the test below
                            if how == "renamed":
                                changed["state"][place]["my_" + key] = entry
                            elif how != "removed":
                                changed["state"][place][key] = entry.to(how)
                            self.check(name, key, changed, weights, after)

    def test_each_key_of_a_group_is_removed_and_renamed(self):
        for name in CASES:
            weights, saved, after = self.trained(name)
            for key in saved["param_groups"][0]:
                if key == "params":
                    continue
                for how in ("removed", "renamed"):
                    with self.subTest(name, key=key, how=how):
                        changed = copy.deepcopy(saved)
                        entry = changed["param_groups"][0].pop(key)
                        if how == "renamed":
                            changed["param_groups"][0]["my_" + key] = entry
                        self.check(name, key, changed, weights, after, exact=True)

    def test_a_parameter_without_state_starts_unless_the_variance_is_frozen(self):
        for name in CASES:
            weights, saved, _ = self.trained(name)
            if not saved["state"]:
                continue
            last = max(saved["state"])
            with self.subTest(name):
                del saved["state"][last]
                params, optimizer = self.start(name, weights)
                if "frozen" in name or name == "ZeroOneAdam":
                    with self.assertRaisesRegex(dsopt.CheckpointError, "no state of parameter %d: the variance" % last):
                        optimizer.load_state_dict(saved)
                    continue
                optimizer.load_state_dict(saved)
                self.step(params, optimizer, STEPS)
                moved = (params[last].detach().float() - weights[last].float()).abs().max().item()
                self.assertTrue(0 < moved < 0.05, moved)

    def test_step_counts_are_whole_numbers(self):
        for name in CASES:
            weights, saved, after = self.trained(name)
            for place, state in saved["state"].items():
                if "step" not in state:
                    continue
                for value in (float("nan"), -1.0, 2.5, 2.0 ** 31, torch.ones(2), "three", None):
                    with self.subTest(name, parameter=place, value=value):
                        changed = copy.deepcopy(saved)
                        changed["state"][place]["step"] = value if not isinstance(value, float) else torch.tensor(value)
                        _, optimizer = self.start(name, weights)
                        with self.assertRaisesRegex(dsopt.Error, "'step' of parameter %d" % place):
                            optimizer.load_state_dict(changed)

    def test_names_count_before_positions(self):
        """Four parameters of the same shape in two groups."""
        def make(order, groups=((0, 1), (2, 3))):
            params = params_of(*[(4, )] * 4)
            lists = [[order[i] for i in group] for group in groups]
            return params, T.AdamW([{"params": [params[i] for i in chosen], "param_names": ["p%d" % i for i in chosen],
                                     "lr": 0.01 * (1 + min(chosen))} for chosen in lists])

        params, optimizer = make((0, 1, 2, 3))
        self.step(params, optimizer, 0)
        weights, saved = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
        self.step(params, optimizer, 1)
        for order in ((1, 0, 2, 3), (3, 2, 1, 0), (2, 3, 1, 0)):
            others, other = make(order)
            for p, w in zip(others, weights):
                p.data.copy_(w)
            other.load_state_dict(copy.deepcopy(saved))
            self.step(others, other, 1)
            self.assert_same(others, params)
        _, other = make((0, 2, 1, 3))
        with self.assertRaisesRegex(dsopt.CheckpointError, "none of its groups has 'p0', 'p2' of param_groups.0. alone"):
            other.load_state_dict(saved)
        for group in saved["param_groups"]:
            group["param_names"] = ["model." + name for name in group["param_names"]]
        others, other = make((1, 0, 2, 3))  # other names: by position
        other.load_state_dict(saved)
        self.assert_same([other.state[others[1]]["exp_avg"]], [saved["state"][0]["exp_avg"]])

    def test_weight_decay_follows_the_key_of_torch(self):
        """decoupled_weight_decay of a group, which torch.optim.AdamW reads from 2.7 on."""
        results = []
        for kind, options in ((T.AdamW, {"decoupled_weight_decay": False}), (T.Adam, {}), (T.AdamW, {})):
            params = params_of(*SHAPES)
            optimizer = kind([{"params": params, "weight_decay": 0.5, **options}], lr=0.01)
            for seed in range(3):
                self.step(params, optimizer, seed)
            results.append(params)
        self.assert_same(results[0], results[1])
        self.assertFalse(torch.equal(results[0][0], results[2][0]))

    def test_names_do_not_count_if_the_parameters_are_given_by_name(self):
        """torch.distributed.checkpoint has them in the order of this optimizer, and param_names in the saved order."""
        params = params_of(*[(4, )] * 3)
        optimizer = T.AdamW([{"params": params, "param_names": ["c", "a", "b"]}])
        self.step(params, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        names = ["c", "a", "b"]
        saved["state"] = {names[place]: state for place, state in saved["state"].items()}
        saved["param_groups"][0].update(params=names, param_names=["a", "b", "c"])
        others = params_of(*[(4, )] * 3)
        other = T.AdamW([{"params": others, "param_names": ["c", "a", "b"]}])
        other.load_state_dict(saved)
        self.assert_same([other.state[p]["exp_avg"] for p in others], [optimizer.state[p]["exp_avg"] for p in params])

    def test_tensors_without_a_use_here_are_ignored(self):
        params = params_of(*SHAPES)
        other = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        self.step(params, other, 0)
        other.param_groups[0]["momentum"] = 0
        T.SGD(params_of(*SHAPES), lr=0.1).load_state_dict(other.state_dict())

        other = torch.optim.AdamW(params, lr=0.1, amsgrad=True)
        self.step(params, other, 0)
        other.param_groups[0]["amsgrad"] = False
        T.AdamW(params_of(*SHAPES), lr=0.1).load_state_dict(other.state_dict())

        other = T.DeepSpeedCPULion(params, lr=0.1)
        self.step(params, other, 0)
        saved = other.state_dict()
        for state in saved["state"].values():
            state["exp_avg_sq"] = torch.zeros_like(state["exp_avg"])  # as DeepSpeed's
        for kind in (T.DeepSpeedCPULion, T.FusedLion, T.Lion):
            kind(params_of(*SHAPES), lr=0.1).load_state_dict(copy.deepcopy(saved))

    def test_hyper_parameters_of_a_state_dict_are_checked_by_the_step(self):
        params, optimizer = self.start("AdamW")
        self.step(params, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = -1e-20  # a schedule sets it before the next step
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = 0.01
        self.step(params, optimizer, 1)

    def test_adamw_ignores_that_a_state_dict_is_of_adam(self):
        params, optimizer = self.start("Adam")
        self.step(params, optimizer, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["decoupled_weight_decay"] = False  # as torch 2.7
        others, other = self.start("AdamW")
        other.load_state_dict(copy.deepcopy(saved))
        again, reference = self.start("AdamW")
        del saved["param_groups"][0]["decoupled_weight_decay"]
        reference.load_state_dict(copy.deepcopy(saved))
        self.step(others, other, 1)
        self.step(again, reference, 1)
        self.assert_same(others, again)

    def test_state_of_another_class_is_refused(self):
        states = {name: self.trained(name)[:2] for name in ("AdamW", "SGD", "Adagrad", "Lion", "Muon")}
        for name in states:
            for other, (weights, saved) in states.items():
                if name == other:
                    continue
                with self.subTest(name, state=other):
                    _, optimizer = self.start(name, weights)
                    if {name, other} == {"SGD", "Muon"}:  # both have a momentum_buffer of the same meaning
                        continue
                    with self.assertRaisesRegex(dsopt.CheckpointError, "is of another optimizer|has no '|it is state of"):
                        optimizer.load_state_dict(copy.deepcopy(saved))


if __name__ == "__main__":
    main()
