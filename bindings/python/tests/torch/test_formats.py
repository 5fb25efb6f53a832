# SPDX-License-Identifier: Apache-2.0
"""Formats of moments: exp_avg_format, exp_avg_sq_format and min_8bit_size."""
import copy
import io
import pickle

from support import NO_FUSED, VERSION, TestCase, fused_on, give_grads, main, params_of, torch

import dsopt
import dsopt.torch
from dsopt.torch import (SGD, Adagrad, Adam, AdamW, FP16_Optimizer, FP16_UnfusedOptimizer, FusedAdam, FusedLamb,
                         FusedLion, Lion, OnebitAdam, _codes)

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
E4M3 = getattr(torch, "float8_e4m3fn", U8)
SHAPES = ((600,), (20, 33), (1,), (), (0,), (257,))
E4M3_RANDOM = {"exp_avg_format": "e4m3", "exp_avg_sq_format": "bf16_random"}
# Each class with formats, the group of dsopt that has the same arithmetic, and the dtypes of the state.
SAME = [
    (AdamW, {"weight_decay": 0.1, "min_8bit_size": 0, **E4M3_RANDOM},
     lambda: dsopt.AdamW(lr=0.01, weight_decay=0.1, **E4M3_RANDOM), {"exp_avg": E4M3, "exp_avg_sq": BF16}),
    (AdamW, {"exp_avg_format": "q8", "exp_avg_sq_format": "q8", "min_8bit_size": 0},
     lambda: dsopt.AdamW(lr=0.01, weight_decay=0.01, exp_avg_format="q8", exp_avg_sq_format="q8"),
     {"exp_avg": U8, "exp_avg_sq": U8}),
    (Adam, {"exp_avg_format": "bf16", "weight_decay": 0.1},
     lambda: dsopt.Adam(lr=0.01, weight_decay=0.1, exp_avg_format="bf16"), {"exp_avg": BF16, "exp_avg_sq": F32}),
    (Adam, {"exp_avg_format": "bf16_random", "exp_avg_sq_format": "q8", "min_8bit_size": 0},
     lambda: dsopt.Adam(lr=0.01, exp_avg_format="bf16_random", exp_avg_sq_format="q8"),
     {"exp_avg": BF16, "exp_avg_sq": U8}),
    (SGD, {"momentum": 0.9, "dampening": 0.5, "exp_avg_format": "e4m3", "min_8bit_size": 0},
     lambda: dsopt.Sgd(lr=0.01, momentum=0.9, dampening=0.5, exp_avg_format="e4m3"), {"momentum_buffer": E4M3}),
    (SGD, {"momentum": 0.9, "exp_avg_format": "bf16_random"},
     lambda: dsopt.Sgd(lr=0.01, momentum=0.9, exp_avg_format="bf16_random"), {"momentum_buffer": BF16}),
    (Lion, {"exp_avg_format": "q8", "min_8bit_size": 0}, lambda: dsopt.Lion(lr=0.01, exp_avg_format="q8"),
     {"exp_avg": U8}),
    (Lion, {"exp_avg_format": "bf16"}, lambda: dsopt.Lion(lr=0.01, exp_avg_format="bf16"), {"exp_avg": BF16}),
    (Adagrad, {"initial_accumulator_value": 0.1, "exp_avg_sq_format": "bf16_random"},
     lambda: dsopt.Adagrad(lr=0.01, initial_accumulator_value=0.1, eps=1e-10, exp_avg_sq_format="bf16_random"),
     {"sum": BF16}),
]


KEYS_OF_ADAM = ("exp_avg", "exp_avg_sq")


def bytes_of(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(U8)


def run(optimizer, params, steps, begin=0):
    for i in range(begin, begin + steps):
        give_grads(params, seed=i)
        optimizer.step()


def is_random(options):
    return "bf16_random" in options.values()


class Formats(TestCase):
    def each(self, **more):
        for kind, options, group, dtypes in SAME:
            with self.subTest(kind.__name__, **options):
                yield kind, {"lr": 0.01, **options, **more}, group(), dtypes

    def trained(self, kind, options, steps=4, dtype=F32, shapes=SHAPES):
        params = params_of(*shapes, dtype=dtype)
        seed = {"seed": 5} if is_random(options) else {}
        optimizer = kind(params, **{**seed, **options})
        run(optimizer, params, steps)
        return optimizer, params

    def assert_same_state(self, one, other):
        for a, b in zip(one.param_groups[0]["params"], other.param_groups[0]["params"]):
            self.assertEqual(set(one.state[a]), set(other.state[b]))
            for name, value in one.state[a].items():
                self.assertEqual(value.dtype, other.state[b][name].dtype, name)
                self.assertTrue(torch.equal(bytes_of(value), bytes_of(other.state[b][name])), name)

    # -------------------------------------------------------------------------------------------------------- steps
    def test_state_has_the_dtypes_of_the_formats(self):
        for dtype in (F32, BF16, torch.float16):
            for kind, options, _, dtypes in self.each():
                optimizer, params = self.trained(kind, options, steps=2, dtype=dtype)
                for param in params:
                    state = optimizer.state[param]
                    self.assertTrue(all(map(torch.is_tensor, state.values())))
                    if "step" in state:
                        self.assertEqual((state["step"].dtype, state["step"].dim()), (F32, 0))
                    self.assertEqual({name: state[name].dtype for name in dtypes}, dtypes)
                    scales = {name + "_scale" for name, dtype in dtypes.items() if dtype in (E4M3, U8)}
                    self.assertEqual(set(state) - {"step"}, set(dtypes) | scales)
                    for name in dtypes:
                        self.assertEqual(state[name].shape, param.shape)
                    for name in scales:
                        self.assertEqual((state[name].dtype, tuple(state[name].shape)),
                                         (F32, (-(-param.numel() // 256),)))

    def test_gives_same_bits_as_the_engine_with_equal_names(self):
        for dtype in (F32, BF16):
            for kind, options, group, dtypes in self.each():
                optimizer, params = self.trained(kind, options, dtype=dtype)
                name_of = "param_groups[0]['params'][%d]"
                arrays = {name_of % i: p.detach() for i, p in enumerate(params_of(*SHAPES, dtype=dtype)) if p.numel()}
                engine = dsopt.Optimizer(arrays, group, no_master=True, seed=5 if is_random(options) else 0)
                for i in range(4):
                    give_grads(params, seed=i)
                    engine.step([p.grad for p in params if p.numel()])
                for i, param in enumerate(params):
                    if not param.numel():
                        continue
                    self.assert_same([param], [arrays[name_of % i]])
                    for name in dtypes:
                        if optimizer.state[param][name].dtype == F32:
                            continue
                        expected = engine.state["%s.%s" % (name_of % i, name)].tobytes()
                        self.assertEqual(bytes(bytes_of(optimizer.state[param][name]).tolist()), expected, name)

    def test_random_moments_depend_on_the_seed(self):
        for kind, options, _, dtypes in self.each():
            if is_random(options):
                results = [self.trained(kind, {**options, "seed": seed}) for seed in (3, 3, 4)]
                (first, params), (same, others), (other, _) = results
                self.assert_same(params, others)
                self.assert_same_state(first, same)
                with self.assertRaises(AssertionError):
                    self.assert_same_state(first, other)

    def test_small_tensors_have_float32_moments(self):
        params = params_of((4095,), (4096,), (64, 64), (7,))
        exact = params_of((4095,), (4096,), (64, 64), (7,))
        optimizer, reference = AdamW(params, **E4M3_RANDOM), AdamW(exact)
        run(optimizer, params, 3)
        run(reference, exact, 3)
        dtypes = [(state["exp_avg"].dtype, state["exp_avg_sq"].dtype)
                  for state in (optimizer.state[param] for param in params)]
        self.assertEqual(dtypes, [(F32, F32), (E4M3, BF16), (E4M3, BF16), (F32, F32)])
        self.assert_same([params[0], params[3]], [exact[0], exact[3]])
        self.assertNotIn("exp_avg_scale", optimizer.state[params[0]])

    def test_small_tensors_have_bfloat16_moments_too(self):
        optimizer, params = self.trained(AdamW, {"exp_avg_format": "bf16", "exp_avg_sq_format": "bf16_random"})
        for param in params:
            self.assertEqual(optimizer.state[param]["exp_avg"].dtype, BF16)

    def test_groups_have_formats_of_their_own(self):
        params = params_of((300,), (300,), (300,), (300,))
        optimizer = AdamW([{"params": params[:1]},
                           {"params": params[1:2], "exp_avg_format": "f32", "exp_avg_sq_format": "f32"},
                           {"params": params[2:3], "exp_avg_sq_format": "q8", "min_8bit_size": 301},
                           {"params": params[3:], "exp_avg_sq_format": "q8"}], min_8bit_size=0, **E4M3_RANDOM)
        run(optimizer, params, 2)
        self.assertEqual([(optimizer.state[p]["exp_avg"].dtype, optimizer.state[p]["exp_avg_sq"].dtype)
                          for p in params], [(E4M3, BF16), (F32, F32), (F32, F32), (E4M3, U8)])
        self.assertEqual(len(optimizer._plans), 1)  # groups that use no seed join those that do
        optimizer.add_param_group({"params": params_of((500,)), "exp_avg_format": "q8"})
        added = optimizer.param_groups[4]["params"]
        run(optimizer, params + added, 1, begin=2)
        self.assertEqual(optimizer.state[added[0]]["exp_avg"].dtype, U8)
        plain = AdamW([{"params": params_of((300,)), "exp_avg_format": "bf16"}, {"params": params_of((300,))}])
        run(plain, plain.param_groups[0]["params"] + plain.param_groups[1]["params"], 1)
        self.assertEqual([plain.state[group["params"][0]]["exp_avg"].dtype for group in plain.param_groups],
                         [BF16, F32])

    def test_groups_without_formats_have_no_keys(self):
        keys = set(dsopt.torch._formats.KEYS) | {"seed"}
        for kind in (AdamW, Adam, SGD, Lion, Adagrad):
            self.assertFalse(keys & set(kind(params_of((3,))).state_dict()["param_groups"][0]))
        group = AdamW(params_of((3,)), exp_avg_format="bf16").state_dict()["param_groups"][0]
        self.assertEqual(keys & set(group), {"exp_avg_format"})

    def test_groups_without_a_seed_have_no_step(self):
        """As in torch: only random numbers need it."""
        params = params_of((300,), (300,))
        optimizer = SGD([{"params": params[:1], "exp_avg_format": "bf16_random"}, {"params": params[1:]}],
                        momentum=0.9)
        run(optimizer, params, 2)
        self.assertEqual([sorted(optimizer.state[p]) for p in params],
                         [["momentum_buffer", "step"], ["momentum_buffer"]])
        self.assertEqual(len(optimizer._plans), 1)

    def test_zero_gradients_keep_zero_state(self):
        for kind, options, _, dtypes in self.each():
            if kind is Adagrad:
                continue
            params = params_of((600,))
            before = params[0].detach().clone()
            optimizer = kind(params, **{**options, "weight_decay": 0})
            for _ in range(3):
                params[0].grad = torch.zeros(600)
                optimizer.step()
            self.assert_same(params, [before])
            for name, value in optimizer.state[params[0]].items():
                self.assertTrue(name == "step" or not bytes_of(value).any(), name)

    def test_skipped_steps_change_nothing(self):
        if VERSION < (2, 0):
            self.skipTest("torch %s has another protocol of GradScaler" % torch.__version__)
        if not fused_on("cpu"):
            self.skipTest(NO_FUSED % (torch.__version__, "cpu"))
        for kind, options, _, _ in self.each(**{}):
            if kind is Lion:
                continue
            optimizer, params = self.trained(kind, {**options, "fused": True}, steps=2)
            expected, others = self.trained(kind, {**options, "fused": True}, steps=2)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
            run(optimizer, params, 1, begin=9)
            self.assert_same_state(optimizer, expected)
            self.assert_same(params, others)

    # --------------------------------------------------------------------------------------------------------- order
    def test_state_follows_another_memory_order(self):
        """A block is elements that are consecutive in memory, so codes and scales change with the order."""
        for kind, options, _, dtypes in self.each():
            optimizer, params = self.trained(kind, options, steps=3, shapes=((4, 3, 5, 6),))
            # Another optimizer gets the same values, and stores them in the new order from the start.
            saved = as_float32(optimizer, options)
            params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
            others = [torch.nn.Parameter(params[0].detach().clone())]
            seed = {"seed": 5} if is_random(options) else {}
            other = kind(others, **{**seed, **options})
            other.load_state_dict(saved)
            run(optimizer, params, 1, begin=3)
            run(other, others, 1, begin=3)
            self.assertEqual(params[0].stride(), others[0].stride())
            for name in dtypes:
                self.assertEqual(optimizer.state[params[0]][name].stride(), params[0].stride(), name)
            self.assert_same(params, others)
            for name, value in optimizer.state[params[0]].items():
                self.assertTrue(torch.equal(value.contiguous().view(U8) if value.dim() else value,
                                            other.state[others[0]][name].contiguous().view(U8) if value.dim() else
                                            other.state[others[0]][name]), name)

    def test_parameters_with_gaps_are_stepped(self):
        for kind, options, _, dtypes in self.each():
            (whole,), (plain,) = params_of((40, 33)), params_of((40, 33))
            param = torch.nn.Parameter(whole.detach()[:, ::2])
            plain = torch.nn.Parameter(plain.detach()[:, ::2].contiguous())
            for each in (param, plain):
                run(kind([each], **options), [each], 3)
            self.assert_same([param], [plain])

    # ---------------------------------------------------------------------------------------------- saving and loading
    def test_resumes_with_same_bits(self):
        for dtype in (F32, BF16):
            for kind, options, _, dtypes in self.each():
                optimizer, params = self.trained(kind, options, steps=3, dtype=dtype)
                file = io.BytesIO()
                torch.save({"optimizer": optimizer.state_dict(), "weights": [p.detach().clone() for p in params]}, file)
                file.seek(0)
                saved = torch.load(file)
                others = [torch.nn.Parameter(w) for w in saved["weights"]]
                resumed = kind(others, **options)  # the seed is that of the state dict
                resumed.load_state_dict(saved["optimizer"])
                self.assert_same_state(resumed, optimizer)
                run(optimizer, params, 2, begin=3)
                run(resumed, others, 2, begin=3)
                self.assert_same(others, params)
                self.assert_same_state(resumed, optimizer)

    def test_copies_and_pickles_resume_with_same_bits(self):
        for kind, options, _, dtypes in self.each():
            expected, params = self.trained(kind, options, steps=5)
            twins = [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
            if E4M3 != U8 and E4M3 in dtypes.values():
                del twins[1]  # torch.save has float8, pickle not
            for twin in twins:
                optimizer, _ = self.trained(kind, options, steps=3)
                again = twin(optimizer)
                others = again.param_groups[0]["params"]
                run(again, others, 2, begin=3)
                self.assert_same(others, params)
                self.assert_same_state(again, expected)

    def test_loads_convert_to_the_formats_of_the_optimizer(self):
        """To nearest, as import_f32 of the engine does."""
        adam = [(kind, options) for kind, options, _, _ in self.each() if kind in (Adam, AdamW)]
        for kind, options in adam:
            optimizer, params = self.trained(kind, options, steps=3)
            for _, wanted in adam + [(AdamW, {})]:
                others = [torch.nn.Parameter(p.detach().clone()) for p in params]
                other = kind(others, **{"lr": 0.01, **{key: value for key, value in wanted.items() if key in KEYS}})
                other.load_state_dict(optimizer.state_dict())
                group = other.param_groups[0]
                self.assertEqual({key: group[key] for key in KEYS if key in group},
                                 {key: wanted[key] for key in KEYS if key in wanted})
                for param, its in zip(params, others):
                    for name in ("exp_avg", "exp_avg_sq"):
                        fmt, want = format_of(name, options), format_of(name, wanted)
                        before = values_of(name, fmt, optimizer.state[param])
                        after = values_of(name, want, other.state[its])
                        if want in ("f32", fmt):
                            self.assertTrue(torch.equal(after, before))
                        elif want.startswith("bf16"):
                            self.assertTrue(torch.equal(after, before.to(BF16).float()))
                        else:
                            codes, scales = engine_codes(name, want, before)
                            self.assertEqual(bytes(bytes_of(other.state[its][name]).tolist()), codes)
                            self.assertEqual(bytes(bytes_of(other.state[its][name + "_scale"]).tolist()), scales)
                run(other, others, 1, begin=3)

    def test_loads_state_of_torch(self):
        for kind, ours in ((torch.optim.AdamW, AdamW), (torch.optim.Adam, Adam)):
            for dtype in (F32, BF16):
                params = params_of((5000,), (10,), dtype=dtype)
                theirs = kind(params, lr=0.01)
                run(theirs, params, 3)
                others = [torch.nn.Parameter(p.detach().clone()) for p in params]
                optimizer = ours(others, min_8bit_size=100, **E4M3_RANDOM)
                optimizer.load_state_dict(theirs.state_dict())
                first, small = (optimizer.state[p] for p in others)
                self.assertEqual((first["exp_avg"].dtype, first["exp_avg_sq"].dtype), (E4M3, BF16))
                run(optimizer, others, 1, begin=3)
                self.assertEqual(small["exp_avg"].dtype, F32)
                run(theirs, params, 1, begin=3)
                self.assert_close(others[0].float(), params[0].float(), rtol=1e-2, atol=5e-3)

    def test_float32_moments_of_a_group_with_codes_stay_float32(self):
        """They were small, or are those of a parameter that had float32 moments in bitsandbytes."""
        params = params_of((5000,), (5000,))
        optimizer = AdamW([{"params": params[:1], "min_8bit_size": 9999}, {"params": params[1:]}], **E4M3_RANDOM)
        run(optimizer, params, 2)
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = AdamW([{"params": others[:1]}, {"params": others[1:]}], **E4M3_RANDOM)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(optimizer, params, 2, begin=2)
        run(other, others, 2, begin=2)
        self.assertEqual([other.state[p]["exp_avg"].dtype for p in others], [F32, E4M3])
        self.assert_same(others, params)

    def test_refused_loads_change_nothing(self):
        for kind, options, _, dtypes in self.each():
            if not set(dtypes.values()) & {E4M3, U8}:
                continue
            optimizer, params = self.trained(kind, options, steps=2)
            name = next(name for name, dtype in dtypes.items() if dtype in (E4M3, U8))
            saved = copy.deepcopy(optimizer.state_dict())
            for wanted in (options, {"lr": 0.01}):
                other, others = self.trained(kind, wanted, steps=1)
                before, weights = copy.deepcopy(other), [p.detach().clone() for p in others]
                broken = copy.deepcopy(saved)
                del broken["state"][0][name + "_scale"]
                with self.assertRaisesRegex(dsopt.CheckpointError, "state '%s' of param_groups.0...params.*0.* has "
                                            "codes, and there is no '%s_scale'" % (name, name)):
                    other.load_state_dict(broken)
                self.assert_same(others, weights)
                self.assert_same_state(other, before)
            broken = copy.deepcopy(saved)
            broken["state"][0][name] = broken["state"][0][name][:-1]
            with self.assertRaisesRegex(dsopt.TensorError, "has shape .599,., and the parameter .600,."):
                other.load_state_dict(broken)
            broken = copy.deepcopy(saved)
            broken["state"][0][name + "_scale"] = torch.ones(2)
            with self.assertRaisesRegex(dsopt.TensorError, "state '%s' of .* has 2 scales, and must have 3" % name):
                other.load_state_dict(broken)
            optimizer.state[params[0]][name + "_scale"] = torch.ones(2)
            with self.assertRaisesRegex(dsopt.TensorError, "'%s_scale' of .* has 2 elements, and must have 3" % name):
                run(optimizer, params, 1)

    # -------------------------------------------------------------------------------------------------------- refusals
    def test_a_change_once_there_is_state_raises(self):
        for kind, options, _, dtypes in self.each():
            for key in ("exp_avg_format", "exp_avg_sq_format"):
                if key not in kind._stores:
                    continue
                for value in ("bf16_random", "f32"):
                    optimizer, params = self.trained(kind, options, steps=2)
                    group = optimizer.param_groups[0]
                    before, weights = group.get(key, "f32"), [p.detach().clone() for p in params]
                    if before == value:
                        continue
                    group[key] = value
                    text = r"param_groups\[0\]: %s is '%s', and the state has '%s': a format cannot change once" % (
                        key, value, before)
                    for _ in range(2):
                        with self.assertRaisesRegex(dsopt.StateError, text):
                            run(optimizer, params, 1)
                    self.assert_same(params, weights)
                    group[key] = before
                    run(optimizer, params, 1)

    def test_a_change_after_a_load_or_in_a_copy_raises(self):
        params = params_of((600,), (600,))
        optimizer = AdamW(params)
        run(optimizer, params, 2)
        loaded = AdamW(params)
        loaded.load_state_dict(optimizer.state_dict())
        for other in (optimizer, loaded, copy.deepcopy(optimizer)):
            for value in ("q8", "e4m3", "bf16"):
                other.param_groups[0]["exp_avg_format"] = value
                text = "exp_avg_format is '%s', and the state has 'f32'" % value
                with self.assertRaisesRegex(dsopt.StateError, text):
                    run(other, other.param_groups[0]["params"], 1)

    def test_codes_that_torch_converted_are_refused(self):
        for formats in ({"exp_avg_format": "q8", "exp_avg_sq_format": "q8"}, {"exp_avg_format": "e4m3"}):
            params = params_of((600,))
            optimizer = AdamW(params, min_8bit_size=0, **formats)
            run(optimizer, params, 2)
            other = torch.optim.AdamW(params)
            other.load_state_dict(optimizer.state_dict())  # converts codes to the dtype of the parameter
            text = "'exp_avg' of .* is float32 next to 'exp_avg_scale': it was converted, and codes are no numbers"
            with self.assertRaisesRegex(dsopt.TensorError, text):
                optimizer.load_state_dict(other.state_dict())
            run(optimizer, params, 1)
            state = optimizer.state[params[0]]
            for name in KEYS_OF_ADAM:
                state[name] = state[name].to(torch.float32)
            with self.assertRaisesRegex(dsopt.Error, "converted, and codes are no numbers|its format is"):
                run(optimizer, params, 1)

    def test_a_remainder_that_was_converted_is_refused(self):
        params = [torch.nn.Parameter(p.detach().bfloat16()) for p in params_of((600,))]
        optimizer = AdamW(params, masters="remainder")
        run(optimizer, params, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["remainder"] = saved["state"][0]["remainder"].bfloat16()
        with self.assertRaisesRegex(dsopt.TensorError, "'remainder' of .* is bfloat16: it was converted"):
            optimizer.load_state_dict(saved)

    def test_a_loaded_state_shares_neither_codes_nor_scales(self):
        params = params_of((600,))
        optimizer = AdamW(params, exp_avg_format="q8", exp_avg_sq_format="q8", min_8bit_size=0)
        run(optimizer, params, 2)
        saved = optimizer.state_dict()
        before = copy.deepcopy(saved["state"])
        others = params_of((600,))
        other = AdamW(others, exp_avg_format="q8", exp_avg_sq_format="q8", min_8bit_size=0)
        other.load_state_dict(saved)
        run(other, others, 5)
        for name in KEYS_OF_ADAM:
            for key in (name, name + "_scale"):
                self.assertTrue(torch.equal(optimizer.state[params[0]][key], before[0][key]), key)
                self.assertFalse(torch.equal(other.state[others[0]][key], before[0][key]), key)

    def test_a_change_before_there_is_state_is_followed(self):
        params = params_of((600,), (600,))
        optimizer = AdamW([{"params": params[:1]}, {"params": params[1:]}])
        give_grads(params[:1])
        optimizer.step()
        optimizer.param_groups[1]["exp_avg_format"] = "bf16"
        run(optimizer, params, 1)
        self.assertEqual([optimizer.state[p]["exp_avg"].dtype for p in params], [F32, BF16])

    def test_state_of_another_dtype_raises(self):
        for kind, options, _, dtypes in self.each():
            for name, dtype in dtypes.items():
                optimizer, params = self.trained(kind, options, steps=2)
                state, weights = optimizer.state[params[0]], [p.detach().clone() for p in params]
                if dtype == F32:
                    state[name] = torch.zeros(600, dtype=U8)
                elif dtype in (E4M3, U8):
                    state[name] = state[name].view(torch.int8)
                else:
                    state[name] = state[name].float()
                with self.assertRaisesRegex(dsopt.StateError, "state '%s' of .* is .*, and its format is" % name):
                    run(optimizer, params, 1)
                self.assert_same(params, weights)
                if dtype in (E4M3, U8):
                    state[name] = state[name].view(dtype)
                    del state[name + "_scale"]
                    with self.assertRaisesRegex(dsopt.StateError, "'%s' of .* has codes, and there is no" % name):
                        run(optimizer, params, 1)

    def test_moments_without_state_start_with_zeros(self):
        """Scales without codes belong to nothing."""
        optimizer, params = self.trained(AdamW, {"min_8bit_size": 0, **E4M3_RANDOM}, steps=2)
        del optimizer.state[params[0]]["exp_avg"]
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        self.assertFalse(bytes_of(optimizer.state[params[0]]["exp_avg"]).any())
        self.assertFalse(optimizer.state[params[0]]["exp_avg_scale"].any())

    def test_complex_and_float64_parameters_are_refused(self):
        for kind, options, _, _ in self.each():
            for dtype in (torch.complex64, torch.complex128, torch.float64):
                params = params_of((5,)) + [torch.nn.Parameter(torch.ones(5, dtype=dtype))]
                optimizer = kind(params, **options)
                for param in params:
                    param.grad = torch.ones_like(param)
                with self.assertRaisesRegex(dsopt.UnsupportedError, r"params'\]\[1\] is %s, and exp_avg.*=.* is for "
                                            "float32, float16 and bfloat16" % str(dtype).replace("torch.", "")):
                    optimizer.step()
        params = params_of((500,)) + [torch.nn.Parameter(torch.ones(5, dtype=torch.complex64))]
        optimizer = AdamW([{"params": params[:1], "exp_avg_format": "bf16"}, {"params": params[1:]}])
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()

    def test_invalid_arguments_are_refused(self):
        params = params_of((5,))
        for kind, key in ((AdamW, "exp_avg_format"), (AdamW, "exp_avg_sq_format"), (Adam, "exp_avg_format"),
                          (SGD, "exp_avg_format"), (Lion, "exp_avg_format"), (Adagrad, "exp_avg_sq_format")):
            for value in ("fp8", "E4M3", None, 3):
                with self.assertRaisesRegex(dsopt.ArgumentError, "%s is %r, and must be one of 'f32', 'bf16', "
                                            "'bf16_random', 'e4m3', 'q8'" % (key, value)):
                    kind(params, **{key: value})
            optimizer = kind([{"params": params, key: "fp8"}])
            give_grads(params)
            with self.assertRaisesRegex(dsopt.ArgumentError, r"param_groups\[0\]: %s is 'fp8'" % key):
                optimizer.step()
        for kind, key in ((SGD, "exp_avg_sq_format"), (Lion, "exp_avg_sq_format"), (Adagrad, "exp_avg_format"),
                          (Adagrad, "min_8bit_size"), (FusedAdam, "exp_avg_format"), (FusedLion, "exp_avg_format")):
            with self.assertRaises(TypeError):
                kind(params, **{key: "bf16"})
        for value in (-1, 2**63, 1.5, None):
            with self.assertRaisesRegex(dsopt.ArgumentError, "min_8bit_size is .*, and must be a whole number"):
                AdamW(params, exp_avg_format="q8", min_8bit_size=value)
        with self.assertRaisesRegex(dsopt.UnsupportedError, "min_8bit_size is 5, which has no effect without"):
            AdamW(params, exp_avg_format="bf16", min_8bit_size=5)
        with self.assertRaisesRegex(dsopt.UnsupportedError, "seed is 5, which has no effect without stochastic_rounding"
                                    "=True or a moment in 'bf16_random'"):
            AdamW(params, exp_avg_format="bf16", seed=5)

    def test_formats_that_a_rule_does_not_support_are_refused(self):
        params = params_of((5,))
        give_grads(params)
        for kind, options, text in (
            (AdamW, {"exp_avg_sq_format": "e4m3"}, "exp_avg_sq_format is E4M3"),
            (AdamW, {"exp_avg_sq_format": "bf16"}, "exp_avg_sq_format is BF16"),
            (Adagrad, {"exp_avg_sq_format": "q8"}, "exp_avg_sq_format is Q8"),
            (SGD, {"exp_avg_format": "bf16"}, "exp_avg_format has no effect"),
        ):
            with self.subTest(text), self.assertRaisesRegex(dsopt.UnsupportedError, r"param_groups\[0\]: " + text):
                kind(params, **options).step()

    def test_other_classes_are_refused(self):
        params = params_of((5,))
        give_grads(params)
        for kind in (FusedAdam, FusedLamb, FusedLion, OnebitAdam, dsopt.torch.DeepSpeedCPUAdam,
                     dsopt.torch.DeepSpeedCPULion):
            for key, value in (("exp_avg_format", "bf16"), ("exp_avg_sq_format", "q8"), ("masters", "float32")):
                with self.assertRaisesRegex(dsopt.UnsupportedError, r"param_groups\[0\]: %s is '%s', which %s does not "
                                            "have" % (key, value, kind.__name__)):
                    kind([{"params": params, key: value}]).step()
        for kind in (SGD, Lion):
            with self.assertRaisesRegex(dsopt.UnsupportedError, "exp_avg_sq_format is 'q8', which"):
                kind([{"params": params, "exp_avg_sq_format": "q8"}]).step()

    def test_wrappers_refuse_formats(self):
        for wrapper in (FP16_Optimizer, FP16_UnfusedOptimizer):
            for options in ({"exp_avg_format": "bf16"}, {"exp_avg_sq_format": "q8"}, {"masters": "float32"}):
                params = params_of((5,), dtype=BF16)
                with self.assertRaisesRegex(dsopt.UnsupportedError, "is not supported in %s" % wrapper.__name__):
                    wrapper(AdamW(params, **options), low_precision_dtype=BF16)

    def test_state_of_formats_loads_into_other_classes(self):
        """They have float32 moments."""
        optimizer, params = self.trained(AdamW, {"lr": 0.01, "weight_decay": 0, "min_8bit_size": 0, **E4M3_RANDOM})
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["bias_correction"] = True
        other = FusedAdam([torch.nn.Parameter(p.detach().clone()) for p in params], lr=0.01)
        other.load_state_dict(saved)
        run(other, other.param_groups[0]["params"], 1)
        self.assertEqual(other.state[other.param_groups[0]["params"][0]]["exp_avg"].dtype, F32)


KEYS = ("exp_avg_format", "exp_avg_sq_format", "min_8bit_size")


def format_of(name, options):
    key = "exp_avg_format" if name in ("exp_avg", "momentum_buffer") else "exp_avg_sq_format"
    return options.get(key, "f32")


def values_of(name, fmt, state):
    """Returns the values of a moment as float32."""
    tensor = state[name]
    return tensor.float() if fmt not in ("e4m3", "q8") else _codes.values_of(name, fmt, tensor, state[name + "_scale"])


def as_float32(optimizer, options):
    """Returns a state dict with float32 moments, as of an optimizer without formats."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state, original in zip(saved["state"].values(), optimizer.state.values()):
        for name in [name for name in state if name.endswith("_scale")]:
            del state[name]
        for name in set(state) - {"step"}:
            state[name] = values_of(name, format_of(name, options), original)
    for group in saved["param_groups"]:
        for key in KEYS:
            group.pop(key, None)
    return saved


def engine_codes(name, fmt, values):
    """Returns the bytes of codes and scales that the package without torch stores."""
    group = dsopt.AdamW(**{name + "_format": fmt})
    opt = dsopt.Optimizer({"x": dsopt.Param(shape=(values.numel(),))}, group)
    opt.state.import_f32("x." + name, values.contiguous().numpy().reshape(-1))
    return tuple(opt.state.copy("x.%s%s" % (name, end)).tobytes() for end in ("", "_scale"))


if __name__ == "__main__":
    main()
