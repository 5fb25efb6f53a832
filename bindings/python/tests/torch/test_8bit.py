# SPDX-License-Identifier: Apache-2.0
"""AdamW8bit and Adam8bit, and state of bitsandbytes and torchao."""
import copy
import inspect
import os
import unittest

import golden
from support import TestCase, give_grads, main, params_of, torch

import dsopt
from dsopt.torch import Adam8bit, AdamW, AdamW8bit, _codes, _import

F32, U8 = torch.float32, torch.uint8
E4M3 = getattr(torch, "float8_e4m3fn", U8)
Q8 = {"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}
MOMENTS = ("exp_avg", "exp_avg_sq")
NESTED = "__bnb_optimizer_quant_state__"


def recorded(name):
    """Returns the tensors of a state that bitsandbytes or torchao left after 12 steps."""
    return golden.read(os.path.join(golden.FOLDER, "lowp_import_%s.safetensors" % name))[1]


def group_of(params, **more):
    return {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, **more, "params": params}


def of_bitsandbytes(*states, nested=True):
    """Returns a state dict of bitsandbytes 0.50.2 with these entries per parameter."""
    wrapped = [{"step": 12, NESTED: state} if nested else {"step": 12, **state} for state in states]
    return {"state": dict(enumerate(wrapped)),
            "param_groups": [group_of(list(range(len(states))), alpha=0.0, t_alpha=None, t_beta3=None)]}


def entries_of(tensors):
    """Returns the entries of a recorded state in bitsandbytes."""
    entries = {}
    for number, name in enumerate(MOMENTS, 1):
        entries["state%d" % number] = tensors[name].clone()
        entries["absmax%d" % number] = tensors[name + "_scale"].clone()
        entries["qmap%d" % number] = tensors[name + "_map"]
    return entries


class Codes:
    """As OptimState8bit and OptimStateFp8 of torchao, which are subclasses of Tensor."""

    def __init__(self, codes, scale, qmap=None, block_size=256):
        self.codes, self.scale, self.block_size = codes, scale, block_size
        if qmap is not None:
            self.qmap = qmap


def of_torchao(*states):
    """Returns a state dict of torchao 0.18.0 with these entries per parameter."""
    return {"state": {i: {"step": torch.tensor(12.0), **state} for i, state in enumerate(states)},
            "param_groups": [group_of(list(range(len(states))), lr=torch.tensor(1e-3), amsgrad=False)]}


def objects_of(tensors):
    return {name: Codes(tensors[name].clone(), tensors[name + "_scale"].clone(), tensors.get(name + "_map"))
            for name in MOMENTS}


def values_of(name, state):
    """Returns the values of a moment as float32, whatever its format."""
    if name + "_scale" not in state:
        return state[name].float()
    fmt = "e4m3" if name == "exp_avg" and state[name].dtype == E4M3 != U8 else "q8"
    return _codes.values_of(name, fmt, state[name], state[name + "_scale"])


def loaded(state_dict, params, kind=AdamW8bit, **options):
    """Returns an optimizer with this state, over copies of the parameters."""
    optimizer = kind([torch.nn.Parameter(param.detach().clone()) for param in params], **options)
    optimizer.load_state_dict(state_dict)
    return optimizer, [optimizer.state[param] for param in optimizer.param_groups[0]["params"]]


@unittest.skipUnless(golden.names(), "tests/golden is absent")
class Imports(TestCase):
    def assert_read(self, tensors, state, exact=False):
        for name in MOMENTS:
            want, found = tensors[name + "_value"], values_of(name, state)
            error = (found - want).abs()
            limit = 0 if exact else 3e-7
            self.assertTrue(bool((error <= limit * want.abs()).all()), "%s: %g" % (name, error.max()))
            self.assertGreater(int(want.count_nonzero()), 1000)

    def test_reads_recorded_states(self):
        for name, state_dict in (("bnb_adamw8bit_f32", lambda t: of_bitsandbytes(entries_of(t))),
                                 ("bnb_adamw8bit_f32", lambda t: of_bitsandbytes(entries_of(t), nested=False)),
                                 ("torchao_adamw8bit_f32", lambda t: of_torchao(objects_of(t)))):
            tensors = recorded(name)
            for kind, options in ((AdamW8bit, {}), (Adam8bit, {}), (AdamW, Q8)):
                optimizer, (state,) = loaded(state_dict(tensors), [tensors["param"]], kind, **options)
                self.assert_read(tensors, state)
                for moment in MOMENTS:
                    self.assertTrue(torch.equal(state[moment], tensors[moment]))  # the codes are the same
                    self.assertTrue(torch.equal(state[moment + "_scale"], tensors[moment + "_scale"]))
                self.assertEqual((state["step"].dtype, state["step"].dim(), float(state["step"])), (F32, 0, 12))
                self.assertEqual(set(state), {"step", *MOMENTS, "exp_avg_scale", "exp_avg_sq_scale"})
                self.assertEqual(optimizer.param_groups[0]["lr"], 1e-3)
            _, (state,) = loaded(state_dict(tensors), [tensors["param"]], AdamW)
            self.assert_read(tensors, state)
            self.assertEqual([state[moment].dtype for moment in MOMENTS], [F32, F32])

    def test_reads_recorded_states_of_fp8(self):
        tensors = recorded("torchao_adamwfp8_f32")
        _, (state,) = loaded(of_torchao(objects_of(tensors)), [tensors["param"]], AdamW, exp_avg_format="e4m3",
                             exp_avg_sq_format="bf16_random")
        self.assertEqual([state[moment].dtype for moment in MOMENTS], [E4M3, torch.bfloat16])
        self.assertTrue(torch.equal(state["exp_avg"].view(U8), tensors["exp_avg"].view(U8)))
        self.assert_close(state["exp_avg_scale"], tensors["exp_avg_scale"], rtol=2e-7, atol=1e-14)
        self.assertTrue(torch.equal(state["exp_avg_sq"], tensors["exp_avg_sq_value"].bfloat16()))
        _, (state,) = loaded(of_torchao(objects_of(tensors)), [tensors["param"]], AdamW)
        self.assert_read(tensors, state, exact=True)
        _, (state,) = loaded(of_torchao(objects_of(tensors)), [tensors["param"]])
        self.assertEqual([state[moment].dtype for moment in MOMENTS], [U8, U8])
        self.assert_close(values_of("exp_avg", state), tensors["exp_avg_value"], rtol=0.08,
                          atol=tensors["exp_avg_value"].abs().max().item() * 2e-4)

    def test_steps_go_on(self):
        """As with the same values in an optimizer of this package."""
        for name, state_dict in (("bnb_adamw8bit_f32", lambda t: of_bitsandbytes(entries_of(t))),
                                 ("torchao_adamw8bit_f32", lambda t: of_torchao(objects_of(t)))):
            tensors = recorded(name)
            optimizer, _ = loaded(state_dict(tensors), [tensors["param"]])
            exact, _ = loaded(state_dict(tensors), [tensors["param"]], AdamW)
            params = [o.param_groups[0]["params"][0] for o in (optimizer, exact)]
            for i in range(3):
                give_grads(params[:1], params[1:], seed=i, scale=0.1)
                optimizer.step()
                exact.step()
                if i == 0:  # both have the same moments but for 3e-7
                    self.assert_close(params[0], params[1], rtol=1e-5, atol=1e-7)
            self.assertEqual(float(optimizer.state[params[0]]["step"]), 15)
            moved = [(param.detach() - tensors["param"]).abs().mean().item() for param in params]
            self.assertLess(abs(moved[0] / moved[1] - 1), 0.2)

    def test_float32_moments_of_bitsandbytes_stay_float32(self):
        """Those of small tensors, and of parameters that GlobalOptimManager overrides, next to 8-bit ones."""
        tensors = recorded("bnb_adamw8bit_f32")
        moments = {"state1": torch.randn(5000), "state2": torch.rand(5000)}
        small = {"state1": torch.randn(10), "state2": torch.rand(10)}
        params = [tensors["param"], torch.zeros(5000), torch.zeros(10)]
        saved = of_bitsandbytes(entries_of(tensors), moments, small)
        optimizer, states = loaded(saved, params)
        self.assertEqual([state["exp_avg"].dtype for state in states], [U8, F32, F32])
        self.assertTrue(torch.equal(states[1]["exp_avg"], moments["state1"]))
        self.assertEqual(set(states[1]), {"step", *MOMENTS})
        for _ in range(2):  # also after another load
            twins = optimizer.param_groups[0]["params"]
            give_grads(twins)
            optimizer.step()
            self.assertEqual([optimizer.state[param]["exp_avg"].dtype for param in twins], [U8, F32, F32])
            optimizer, _ = loaded(copy.deepcopy(optimizer.state_dict()), twins)
        self.assertNotIn(NESTED, str(optimizer.state_dict()))

    def test_state_of_a_32_bit_class_is_converted(self):
        moments = {"state1": torch.randn(5000), "state2": torch.rand(5000)}
        small = {"state1": torch.randn(10), "state2": torch.rand(10)}
        params = [torch.zeros(5000), torch.zeros(10)]
        for nested in (False, True):
            _, states = loaded(of_bitsandbytes(moments, small, nested=nested), params)
            self.assertEqual([state["exp_avg"].dtype for state in states], [U8, F32])
            self.assert_close(values_of("exp_avg", states[0]), moments["state1"], rtol=0.1, atol=5e-3)

    def test_tensors_that_torchao_does_not_quantize_are_converted(self):
        """Their size is no multiple of 256, or they are small; they have the dtype of the parameter."""
        moments = {"exp_avg": torch.randn(5000).bfloat16(), "exp_avg_sq": torch.rand(5000).bfloat16()}
        small = {"exp_avg": torch.randn(10).bfloat16(), "exp_avg_sq": torch.rand(10).bfloat16()}
        tensors = recorded("torchao_adamw8bit_f32")
        params = [tensors["param"].bfloat16(), torch.zeros(5000).bfloat16(), torch.zeros(10).bfloat16()]
        optimizer, states = loaded(of_torchao(objects_of(tensors), moments, small), params)
        self.assertEqual([state["exp_avg"].dtype for state in states], [U8, U8, torch.bfloat16])
        twins = optimizer.param_groups[0]["params"]
        give_grads(twins)
        optimizer.step()
        self.assertEqual([optimizer.state[param]["exp_avg"].dtype for param in twins], [U8, U8, F32])

    def test_scales_of_larger_blocks_are_repeated(self):
        """bitsandbytes before 0.44 has blocks of 2048 elements."""
        tensors = recorded("bnb_adamw8bit_f32")
        entries = entries_of(tensors)
        for number in (1, 2):
            entries["absmax%d" % number] = torch.tensor([0.5, 2.0, 3.0])
        _, (state,) = loaded(of_bitsandbytes(entries), [tensors["param"]])
        for moment in MOMENTS:
            self.assertEqual(state[moment + "_scale"].tolist(), [0.5] * 8 + [2.0] * 8 + [3.0] * 4)
            self.assertTrue(torch.equal(state[moment], tensors[moment]))
            levels = tensors[moment + "_map"][tensors[moment].long()]
            expected = levels * torch.tensor([0.5, 2.0, 3.0]).repeat_interleave(2048)[:5120]
            self.assert_close(values_of(moment, state), expected, rtol=3e-7, atol=0)
        saved = of_torchao({name: Codes(tensors[name], torch.tensor([0.5, 2.0, 3.0, 1.0, 7.0]),
                                        tensors[name + "_map"], 1024) for name in MOMENTS})
        _, (state,) = loaded(saved, [tensors["param"]])
        self.assertEqual(state["exp_avg_scale"].tolist()[::4], [0.5, 2.0, 3.0, 1.0, 7.0])

    def test_scales_of_other_blocks_go_through_float32(self):
        """One scale per tensor, as with block_wise=False, or blocks that are no multiple of 256."""
        tensors = recorded("bnb_adamw8bit_f32")
        entries = entries_of(tensors)
        for number in (1, 2):
            del entries["absmax%d" % number]
            entries["max%d" % number] = torch.tensor([2.0])
            entries["new_max%d" % number] = torch.tensor([9.0])
        blocks = {name: Codes(tensors[name], torch.full((40,), 2.0), tensors[name + "_map"], 128) for name in MOMENTS}
        for saved in (of_bitsandbytes(entries), of_torchao(blocks)):
            _, (state,) = loaded(saved, [tensors["param"]], AdamW)
            for moment in MOMENTS:
                expected = tensors[moment + "_map"][tensors[moment].long()] * 2
                self.assert_close(state[moment], expected, rtol=3e-7, atol=0)

    def test_maps_with_other_levels_go_through_float32(self):
        tensors = recorded("bnb_adamw8bit_f32")
        for factor, same in ((1 + 5e-7, True), (1 + 3e-6, False)):
            entries = entries_of(tensors)
            for number in (1, 2):
                entries["qmap%d" % number] = entries["qmap%d" % number] * factor
            _, (state,) = loaded(of_bitsandbytes(entries), [tensors["param"]])
            for moment in MOMENTS:
                scales = torch.equal(state[moment + "_scale"], tensors[moment + "_scale"])
                self.assertEqual(scales, same, moment)
        # A linear map: the values are stored with the levels here.
        entries = entries_of(tensors)
        entries["qmap1"], entries["qmap2"] = torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)
        _, (state,) = loaded(of_bitsandbytes(entries), [tensors["param"]])
        for number, moment in enumerate(MOMENTS, 1):
            want = entries["qmap%d" % number][tensors[moment].long()]
            want = want * tensors[moment + "_scale"].repeat_interleave(256)
            top = tensors[moment + "_scale"].repeat_interleave(256)
            self.assertTrue(bool(((values_of(moment, state) - want).abs() <= 0.02 * top).all()), moment)

    def test_codes_of_bitsandbytes_are_in_the_order_of_memory(self):
        """Its step makes the parameter contiguous, not its codes."""
        tensors = recorded("bnb_adamw8bit_f32")
        shape = (8, 5, 16, 8)
        entries = entries_of(tensors)
        for number in (1, 2):
            codes = torch.empty(shape, dtype=U8).contiguous(memory_format=torch.channels_last)
            codes.as_strided((5120,), (1,)).copy_(entries["state%d" % number])
            entries["state%d" % number] = codes
        _, (state,) = loaded(of_bitsandbytes(entries), [tensors["param"].reshape(shape)])
        self.assert_read(tensors, {name: value.reshape(-1) if name in MOMENTS else value
                                   for name, value in state.items()})

    def test_parameters_in_another_order_get_other_blocks(self):
        tensors = recorded("torchao_adamw8bit_f32")
        shape = (8, 5, 16, 8)
        param = torch.nn.Parameter(tensors["param"].reshape(shape).contiguous(memory_format=torch.channels_last))
        optimizer = AdamW8bit([param])
        objects = objects_of(tensors)
        for value in objects.values():
            value.codes = value.codes.reshape(shape)
        optimizer.load_state_dict(of_torchao(objects))
        param.grad = torch.zeros_like(param)
        optimizer.param_groups[0]["betas"] = (0.999999, 0.999999)
        optimizer.step()
        state = optimizer.state[param]
        self.assertEqual(state["exp_avg"].stride(), param.stride())
        for moment in MOMENTS:
            want = tensors[moment + "_value"].reshape(shape)
            error = (values_of(moment, state) - want).abs()
            self.assertLess(error.max() / want.abs().max(), 0.01, moment)
            self.assertGreater(error.max(), 0)

    def test_hooks_see_the_original_state_dict(self):
        """And may return one of bitsandbytes."""
        tensors = recorded("bnb_adamw8bit_f32")
        optimizer = AdamW8bit([torch.nn.Parameter(tensors["param"].clone())])
        if not hasattr(optimizer, "register_load_state_dict_pre_hook"):
            self.skipTest("torch %s has no hooks" % torch.__version__)
        seen, saved = [], of_bitsandbytes(entries_of(tensors))
        optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: seen.append(state_dict["state"][0]) or saved)
        optimizer.load_state_dict(of_bitsandbytes(entries_of(tensors), nested=False))
        self.assertIn("state1", seen[0])
        self.assert_read(tensors, optimizer.state[optimizer.param_groups[0]["params"][0]])

    # -------------------------------------------------------------------------------------------------------- refusals
    def refuses(self, kind, text, saved, param):
        optimizer = AdamW8bit([torch.nn.Parameter(param.clone())], min_8bit_size=0)
        give_grads(optimizer.param_groups[0]["params"])
        optimizer.step()
        before = copy.deepcopy(optimizer.state_dict())
        with self.assertRaisesRegex(kind, text):
            optimizer.load_state_dict(saved)
        after = optimizer.state_dict()
        self.assertEqual(after["param_groups"], before["param_groups"])
        for name, value in before["state"][0].items():
            self.assertTrue(torch.equal(after["state"][0][name], value), name)

    def test_incomplete_states_are_refused(self):
        tensors = recorded("bnb_adamw8bit_f32")
        for key, text in (("state2", "has 'state1' without 'state2'.*only states of Adam and AdamW can be loaded"),
                          ("qmap1", "has codes in 'state1' without 'qmap1'"),
                          ("absmax2", "has codes in 'state2' without 'max2'")):
            entries = entries_of(tensors)
            del entries[key]
            self.refuses(dsopt.CheckpointError, "state of parameter 0 " + text, of_bitsandbytes(entries),
                         tensors["param"])
        entries = entries_of(tensors)
        entries["absmax1"] = torch.ones(7)
        self.refuses(dsopt.CheckpointError, "5120 elements, 7 scales in 'absmax1' and 256 levels in 'qmap1', and must "
                     "have 3 or 20 scales", of_bitsandbytes(entries), tensors["param"])
        entries["absmax1"], entries["qmap2"] = torch.ones(20), torch.ones(16)
        self.refuses(dsopt.CheckpointError, "16 levels in 'qmap2'", of_bitsandbytes(entries), tensors["param"])
        entries["state1"] = [1, 2]
        self.refuses(dsopt.CheckpointError, "'state1' is a list, and must be a tensor", of_bitsandbytes(entries),
                     tensors["param"])
        self.refuses(dsopt.TensorError, "has shape .5120,., and the parameter .5119,.",
                     of_bitsandbytes(entries_of(tensors)), tensors["param"][1:])
        objects = objects_of(recorded("torchao_adamw8bit_f32"))
        objects["exp_avg"].scale = torch.ones(7)
        self.refuses(dsopt.CheckpointError, "5120 codes and 7 scales of 256", of_torchao(objects), tensors["param"])

    def test_other_states_of_torchao_are_refused(self):
        tensors = recorded("torchao_adamw8bit_f32")
        four = {name: Codes(torch.zeros(2560, dtype=U8), torch.ones(40), torch.ones(16), 128) for name in MOMENTS}
        self.refuses(dsopt.UnsupportedError, "state of parameter 0: 'exp_avg' has codes of 4 bits", of_torchao(four),
                     tensors["param"])
        objects = objects_of(tensors)
        objects["max_exp_avg_sq"] = objects["exp_avg_sq"]
        self.refuses(dsopt.UnsupportedError, "has 'max_exp_avg_sq'", of_torchao(objects), tensors["param"])
        objects = objects_of(tensors)
        objects["exp_avg"], objects["exp_avg"]._local_tensor = Sharded(), objects["exp_avg"]
        self.refuses(dsopt.UnsupportedError, "'exp_avg' is a DTensor of torchao's codes", of_torchao(objects),
                     tensors["param"])

    def test_state_dicts_of_neither_are_unchanged(self):
        optimizer = AdamW8bit(params_of((5000,)))
        give_grads(optimizer.param_groups[0]["params"])
        optimizer.step()
        for saved in (optimizer.state_dict(), {}, {"state": {}, "param_groups": []}, {"state": []}, None):
            self.assertIs(_import.imported(saved), saved)


class Sharded:
    """As a DTensor, with a local tensor."""


class Arguments(TestCase):
    def test_moments_have_8_bits(self):
        params, others = params_of((64, 64), (4095,)), params_of((64, 64), (4095,))
        for kind, decay in ((AdamW8bit, 0.01), (Adam8bit, 0.0)):
            optimizer, reference = kind(params, lr=0.01), AdamW(others, lr=0.01, weight_decay=decay, **Q8)
            for i in range(3):
                give_grads(params, others, seed=i)
                optimizer.step()
                reference.step()
            self.assert_same(params, others)
            self.assertEqual([optimizer.state[param]["exp_avg"].dtype for param in params], [U8, F32])
            self.assertEqual(optimizer.param_groups[0]["weight_decay"], decay)

    def test_signatures_are_those_of_bitsandbytes(self):
        """Positional arguments up to min_8bit_size are the same in all versions."""
        for kind, decay in ((AdamW8bit, 1e-2), (Adam8bit, 0)):
            arguments = list(inspect.signature(kind.__init__).parameters.values())[1:]
            known = [(p.name, p.default) for p in arguments if p.kind == p.POSITIONAL_OR_KEYWORD]
            self.assertEqual(known, [("params", inspect.Parameter.empty), ("lr", 1e-3), ("betas", (0.9, 0.999)),
                                     ("eps", 1e-8), ("weight_decay", decay), ("amsgrad", False), ("optim_bits", 32),
                                     ("args", None), ("min_8bit_size", 4096)])
            named = {p.name: p.default for p in arguments if p.kind == p.KEYWORD_ONLY}
            self.assertEqual({key: named[key] for key in ("is_paged", "percentile_clipping", "block_wise")},
                             {"is_paged": False, "percentile_clipping": 100, "block_wise": True})

    def test_arguments_without_effect_are_accepted(self):
        class Args:
            min_8bit_size, optim_bits, percentile_clipping, max_unorm, skip_zeros = 100, 8, 100, 0.0, False

        for kind in (AdamW8bit, Adam8bit):
            params = params_of((100,), (99,))
            optimizer = kind(params, optim_bits=8, args=Args(), block_wise=False)
            give_grads(params)
            optimizer.step()
            self.assertEqual([optimizer.state[param]["exp_avg"].dtype for param in params], [U8, F32])

    def test_masters_and_stochastic_rounding(self):
        for options in ({"masters": "remainder"}, {"masters": "float32"}, {"stochastic_rounding": True, "seed": 3}):
            params = params_of((5000,), dtype=torch.bfloat16)
            others = params_of((5000,), dtype=torch.bfloat16)
            optimizer, reference = AdamW8bit(params, **options), AdamW(others, **options, **Q8)
            for i in range(2):
                give_grads(params, others, seed=i)
                optimizer.step()
                reference.step()
            self.assert_same(params, others)

    def test_refused_arguments(self):
        class Args:
            max_unorm, skip_zeros = 0.0, True

        params = params_of((3,))
        for kind in (AdamW8bit, Adam8bit):
            for options, text in (({"amsgrad": True}, "amsgrad=True is not supported"),
                                  ({"is_paged": True}, "is_paged=True is not supported"),
                                  ({"percentile_clipping": 5}, "percentile_clipping=5 is not supported"),
                                  ({"args": Args()}, "args.skip_zeros=True is not supported")):
                with self.assertRaisesRegex(dsopt.UnsupportedError, "%s: %s" % (kind.__name__, text)):
                    kind(params, **options)


if __name__ == "__main__":
    main()
