# SPDX-License-Identifier: Apache-2.0
"""Masters of 16-bit parameters: masters="float32" and masters="remainder"."""
import copy
import io
import pickle

from support import TestCase, give_grads, main, params_of, torch

import dsopt
from dsopt.torch import SGD, Adagrad, Adam, AdamW, Lion, _formats

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
SHAPES = ((600,), (20, 33), (), (0,))
KINDS = ((AdamW, {}), (Adam, {"exp_avg_format": "bf16", "exp_avg_sq_format": "bf16_random"}),
         (SGD, {"momentum": 0.9}), (SGD, {}), (Lion, {"exp_avg_format": "q8", "min_8bit_size": 0}),
         (AdamW, {"exp_avg_format": "q8", "exp_avg_sq_format": "q8", "min_8bit_size": 0}),
         (Adagrad, {"initial_accumulator_value": 3.0}))


def run(optimizer, params, steps, begin=0):
    for i in range(begin, begin + steps):
        give_grads(params, seed=i)
        optimizer.step()


def all_masters():
    """Returns float32 values with every exponent and both signs, next to ties, and infinities."""
    high = torch.arange(-2**15, 2**15, 37, dtype=torch.int32)
    low = torch.tensor([0, 1, 0x7fff, 0x8000, 0x8001, 0xffff], dtype=torch.int32)
    values = ((high[:, None] << 16) | low).reshape(-1).view(F32)
    return values[~values.isnan()]


class Masters(TestCase):
    def each(self):
        for kind, options in KINDS:
            with self.subTest(kind.__name__, **options):
                yield kind, {"lr": 0.01, **options}

    def trained(self, kind, masters, options, steps=4, dtype=BF16):
        params = params_of(*SHAPES, dtype=dtype)
        optimizer = kind(params, masters=masters, **options)
        run(optimizer, params, steps)
        return optimizer, params

    def masters_of(self, optimizer, params=None):
        """Returns the masters of parameters, of either kind."""
        states = [(param, optimizer.state[param]) for param in params or optimizer.param_groups[0]["params"]]
        return [state["master"].clone() if "master" in state else _formats.joined(param.detach(), state["remainder"])
                for param, state in states]

    def test_both_kinds_have_the_bits_of_float32_parameters(self):
        for kind, options in self.each():
            params = params_of(*SHAPES, dtype=BF16)
            wide = [torch.nn.Parameter(p.detach().float()) for p in params]
            reference = kind(wide, **options)
            float32, first = self.trained(kind, "float32", options)
            remainder, second = self.trained(kind, "remainder", options)
            for i in range(4):
                give_grads(params, seed=i)
                for param, its in zip(wide, params):
                    param.grad = its.grad.float()
                reference.step()
            self.assert_same(self.masters_of(float32), wide)
            self.assert_same(self.masters_of(remainder), wide)
            self.assert_same(first, [p.detach().to(BF16) for p in wide])
            self.assert_close([p.detach() for p in second], [p.detach() for p in first], rtol=2**-7, atol=0)

    def test_without_masters_small_updates_are_lost(self):
        results = {}
        for masters in (None, "float32", "remainder"):
            param = torch.nn.Parameter(torch.ones(300, dtype=BF16))
            optimizer = AdamW([param], lr=1e-4, weight_decay=0, masters=masters)
            for _ in range(100):
                param.grad = torch.ones_like(param)
                optimizer.step()
            results[masters] = param.detach().float().mean().item()
        self.assertEqual(results[None], 1)
        self.assertAlmostEqual(results["float32"], 0.99, delta=0.004)
        self.assertEqual(results["remainder"], results["float32"])

    def test_state_has_the_dtypes_of_the_kinds(self):
        for kind, options in self.each():
            for masters, name, dtype in (("float32", "master", F32), ("remainder", "remainder", torch.int16)):
                params = params_of((600,), dtype=BF16) + params_of((600,))
                optimizer = kind(params, masters=masters, **options)
                run(optimizer, params, 1)
                state = optimizer.state[params[0]]
                self.assertEqual((state[name].dtype, state[name].shape), (dtype, params[0].shape))
                self.assertNotIn(name, optimizer.state[params[1]])  # float32 parameters are their own masters

    def test_kinds_are_chosen_per_group(self):
        params = params_of((600,), (600,), (600,), dtype=BF16)
        optimizer = AdamW([{"params": params[:1]}, {"params": params[1:2], "masters": "float32"},
                           {"params": params[2:], "masters": None}], masters="remainder")
        run(optimizer, params, 2)
        self.assertEqual([sorted(set(optimizer.state[p]) & {"master", "remainder"}) for p in params],
                         [["remainder"], ["master"], []])
        optimizer.param_groups[0]["masters"], optimizer.param_groups[1]["masters"] = "float32", "remainder"
        before = self.masters_of(optimizer, params[:2])
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.0, 0.0
        run(optimizer, params, 1)
        self.assertEqual([sorted(set(optimizer.state[p]) & {"master", "remainder"}) for p in params],
                         [["master"], ["remainder"], []])
        for new, old in zip(self.masters_of(optimizer, params[:2]), before):
            self.assert_close(new, old, rtol=2**-23, atol=0)

    def test_resumes_with_same_bits(self):
        for masters in ("float32", "remainder"):
            for kind, options in self.each():
                optimizer, params = self.trained(kind, masters, options, steps=3)
                file = io.BytesIO()
                torch.save({"optimizer": optimizer.state_dict(), "weights": [p.detach().clone() for p in params]}, file)
                for weights_first in (True, False):
                    file.seek(0)
                    saved = torch.load(file)
                    others = params_of(*SHAPES, dtype=BF16, seed=9)
                    resumed = kind(others, masters=masters, **options)
                    for step in (0, 1) if weights_first else (1, 0):
                        if step:
                            resumed.load_state_dict(saved["optimizer"])
                            continue
                        for param, weight in zip(others, saved["weights"]):
                            param.data.copy_(weight)
                    self.assert_same(self.masters_of(resumed), self.masters_of(optimizer))
                    expected, weights = copy.deepcopy(optimizer), [p.detach().clone() for p in params]
                    run(expected, expected.param_groups[0]["params"], 2, begin=3)
                    run(resumed, others, 2, begin=3)
                    self.assert_same(others, expected.param_groups[0]["params"])
                    self.assert_same(params, weights)

    def test_copies_and_pickles_keep_the_masters(self):
        for masters in ("float32", "remainder"):
            expected, params = self.trained(AdamW, masters, {"lr": 0.01}, steps=5)
            for twin in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
                optimizer, _ = self.trained(AdamW, masters, {"lr": 0.01}, steps=3)
                again = twin(optimizer)
                others = again.param_groups[0]["params"]
                run(again, others, 2, begin=3)
                self.assert_same(others, params)
                self.assert_same(self.masters_of(again), self.masters_of(expected))

    def test_loads_convert_between_the_kinds(self):
        for kind, options in self.each():
            for have, want in (("float32", "remainder"), ("remainder", "float32")):
                optimizer, params = self.trained(kind, have, options, steps=3)
                others = params_of(*SHAPES, dtype=BF16, seed=9)
                other = kind(others, masters=want, **options)
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                for param, its in zip(others, params):  # weights may be loaded after the state
                    param.data.copy_(its.data)
                self.assertEqual(other.param_groups[0]["masters"], want)
                run(optimizer, params, 1, begin=3)
                run(other, others, 1, begin=3)
                state = other.state[others[0]]
                self.assertEqual([name for name in ("master", "remainder") if name in state],
                                 ["master" if want == "float32" else "remainder"])
                for new, old in zip(self.masters_of(other), self.masters_of(optimizer)):
                    self.assert_close(new, old, rtol=2**-22, atol=1e-12)

    def test_remainders_of_rounded_weights_give_the_masters(self):
        masters = all_masters()
        weights, remainders = masters.to(BF16), _formats.remainders_of(masters)
        again = _formats.joined(weights, remainders)
        bits, found = masters.view(torch.int32), again.view(torch.int32)
        ties = (bits & 0x1ffff) == 0x8000  # rounded down, to even
        self.assertTrue(torch.equal(found[~ties], bits[~ties]))
        self.assertTrue(torch.equal(found[ties], bits[ties] - 1))
        self.assertGreater(int(ties.sum()), 100)
        nan = torch.tensor([float("nan")])
        self.assertEqual(int(_formats.remainders_of(nan)), 0)
        self.assertTrue(bool(_formats.joined(nan.to(BF16), torch.zeros(1, dtype=torch.int16)).isnan()))

    def test_loads_without_masters_start_from_the_weights(self):
        """As of the first step, not from masters of before the load."""
        for masters in ("float32", "remainder"):
            params = params_of(*SHAPES, dtype=BF16)
            theirs = torch.optim.AdamW(params, lr=0.01)
            run(theirs, params, 3)
            optimizer, others = self.trained(AdamW, masters, {"lr": 0.01}, steps=2)
            optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
            for param, its in zip(others, params):
                param.data.copy_(its.data)
            expected = AdamW([torch.nn.Parameter(p.detach().float()) for p in params], lr=0.01)
            saved = copy.deepcopy(theirs.state_dict())
            expected.load_state_dict(saved)
            give_grads(others, seed=7)
            for param, its in zip(expected.param_groups[0]["params"], others):
                param.grad = its.grad.float()
            optimizer.step()
            expected.step()
            self.assert_same(self.masters_of(optimizer), expected.param_groups[0]["params"])

    def test_optimizers_without_masters_drop_those_of_a_state_dict(self):
        """Weights change without them, and a later load would restore old weights."""
        for masters in ("float32", "remainder"):
            optimizer, params = self.trained(AdamW, masters, {"lr": 0.01}, steps=2)
            other = AdamW([torch.nn.Parameter(p.detach().clone()) for p in params], lr=0.01)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            run(other, other.param_groups[0]["params"], 1)
            for state in other.state_dict()["state"].values():
                self.assertEqual(sorted(state), ["exp_avg", "exp_avg_sq", "step"])
            self.assertNotIn("masters", other.param_groups[0])

    def test_memory_order_is_followed(self):
        for masters in ("float32", "remainder"):
            for kind, options in ((AdamW, {}), (SGD, {"momentum": 0.9}), (Adagrad, {})):
                results = []
                for order in (torch.contiguous_format, torch.channels_last):
                    params = params_of((4, 3, 5, 6), dtype=BF16)
                    optimizer = kind(params, masters=masters, lr=0.01, **options)
                    run(optimizer, params, 2)
                    params[0].data = params[0].data.contiguous(memory_format=order)
                    run(optimizer, params, 2, begin=2)
                    results.append(params[0])
                self.assert_same(results[:1], results[1:])

    def test_float16_parameters_have_float32_masters_only(self):
        optimizer, params = self.trained(AdamW, "float32", {"lr": 0.01}, dtype=F16)
        self.assertEqual(optimizer.state[params[0]]["master"].dtype, F32)
        self.assert_same(params, [m.to(F16) for m in self.masters_of(optimizer)])
        params = params_of((3,), dtype=F16) + params_of((3,), dtype=BF16)
        give_grads(params)
        with self.assertRaisesRegex(dsopt.UnsupportedError, "param_groups.0.: .*is F16"):
            AdamW(params, masters="remainder").step()

    def test_refusals(self):
        for value in ("bf16", "per_tensor", 32, True):
            with self.assertRaisesRegex(dsopt.ArgumentError, "masters is %r, and must be one of 'float32', "
                                        "'remainder'" % (value,)):
                AdamW(params_of((3,)), masters=value)
        for dtype, masters, text in ((F32, "float32", "no parameter is bfloat16 or float16"),
                                     (F32, "remainder", "no parameter is bfloat16"),
                                     (F16, "remainder", "no parameter is bfloat16")):
            params = params_of((3,), dtype=dtype)
            give_grads(params)
            with self.assertRaisesRegex(dsopt.UnsupportedError, "masters='%s' has no effect, as %s" % (masters, text)):
                AdamW(params, masters=masters).step()
        params = params_of((3,), dtype=BF16)
        give_grads(params)
        for masters in ("float32", "remainder"):
            with self.assertRaisesRegex(dsopt.UnsupportedError, r"param_groups\[0\]: stochastic_rounding=True has no "
                                        "effect with masters='%s'" % masters):
                AdamW(params, masters=masters, stochastic_rounding=True).step()
        with self.assertRaisesRegex(dsopt.ArgumentError, r"param_groups\[0\]: masters is 'flat'"):
            AdamW([{"params": params, "masters": "flat"}]).step()


if __name__ == "__main__":
    main()
