# SPDX-License-Identifier: Apache-2.0
"""Custom calls with operands, results and attributes that do not match each other."""

import unittest

import support  # noqa: F401 - first, it sets up the devices  pylint: disable=unused-import

import jax  # pylint: disable=wrong-import-order
import jax.numpy as jnp
import numpy as np

import dsopt
import dsopt.jax
from dsopt import _abi as abi
from dsopt.jax import _build, _call, _step

SHAPES = {"w": (4, 3), "b": (5,)}
RECIPE = _call.Recipe(
    groups=(_call.group(abi.DSOPT_ALGORITHM_ADAMW, lr=0.1),) * 2,
    params=(_call.Param("w", SHAPES["w"], "float32", 0), _call.Param("b", SHAPES["b"], "bfloat16", 1)),
    flags=abi.DSOPT_OPTIMIZER_NO_MASTER,
)
LOW_PRECISION = _call.Recipe(
    groups=(
        _call.group(
            abi.DSOPT_ALGORITHM_ADAMW,
            exp_avg_format=abi.DSOPT_MOMENT_E4M3,
            exp_avg_sq_format=abi.DSOPT_MOMENT_Q8,
        ),
    ),
    params=(_call.Param("w", SHAPES["w"], "bfloat16", 0),),
    masters=abi.DSOPT_MASTERS_REMAINDER,
)
VALUES = {
    "rank": jnp.int32(0),
    "lr": jnp.full(2, 0.1, jnp.float32),
    "hyper": jnp.full((2, 16), np.nan, jnp.float32),
    "grad_scale": jnp.float32(1),
    "skip": jnp.int32(0),
    "after": jnp.zeros(3),
    "grad_norms": jnp.ones(2),
}
HLO = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int32": "s32", "uint8": "u8"}


def hlo(dtype, shape):
    return "%s[%s]" % (HLO[jnp.dtype(dtype).name], ",".join(map(str, shape)))


class Call:
    """A dsopt_step or dsopt_init call that dsopt.jax did not create: arrays and results by name, in order."""

    def __init__(self, name="dsopt_step", values=(), recipe=RECIPE, out=False, zeros=False):
        _build.library()
        params = {param.name: jnp.ones(param.shape, param.dtype) for param in recipe.params}
        state = _step.init(recipe, list(params.values()))
        entries = [
            (entry.name if entry.param < 0 else "%s of '%s'" % (entry.name, recipe.params[entry.param].name), x)
            for entry, x in zip(recipe.layout.entries, state)
            if not (zeros and entry.name == "step")
        ]
        state = {"state 'step'" if role == "step" else role: x for role, x in entries}
        self.name, self.attributes, self.aliases = name, dict(recipe.attributes), {}
        self.attributes["options"] = np.int64(sum(_call.OPTIONS[value] for value in values))
        self.operands = {"operand '%s'" % value: VALUES[value] for value in _call.OPTIONS if value in values}
        given = {} if zeros else {"parameter '%s'" % name: x for name, x in params.items()}
        self.operands.update(given)
        self.results = {}
        if name == "dsopt_init":
            self.results = {role: _call.like(x) for role, x in state.items()}
            return
        self.attributes["flags"] = np.int64(abi.DSOPT_STEP_NO_NAN | (abi.DSOPT_STEP_DELTA if out else 0))
        self.attributes["options"] += _call.OUT * out + _call.ZEROS * zeros
        grads = {"gradient of '%s'" % name: jnp.full(x.shape, 0.5, x.dtype) for name, x in params.items()}
        self.operands.update({**grads, **state})
        for name, x in params.items():
            role = "%s of '%s'" % ("update" if out else "new value", name)
            self.results[role] = _call.like(x)
            if not out:
                self.aliases["parameter '%s'" % name] = role
        for role, x in state.items():
            self.results[role] = _call.like(x)
            self.aliases[role] = role
        self.results["result 'report'"] = jax.ShapeDtypeStruct((abi.DSOPT_REPORT_FLOATS,), jnp.float32)
        self.results["result 'workspace'"] = jax.ShapeDtypeStruct((recipe.layout.workspace,), jnp.uint8)

    def change(self, role, dtype, shape):
        """Replaces an operand and the result in its memory, or a result."""
        if role in self.operands:
            self.operands[role] = jnp.ones(shape, dtype)
            role = self.aliases.get(role)
        else:
            self.aliases = {a: b for a, b in self.aliases.items() if b != role}
        if role is not None:
            self.results[role] = jax.ShapeDtypeStruct(shape, dtype)

    def run(self):
        operands, results = list(self.operands), list(self.results)
        call = jax.ffi.ffi_call(
            self.name,
            list(self.results.values()),
            input_output_aliases={operands.index(a): results.index(b) for a, b in self.aliases.items()},
        )
        done = jax.jit(lambda *arrays: call(*arrays, **self.attributes))(*self.operands.values())
        return dict(zip(results, jax.block_until_ready(done)))


class Operands(unittest.TestCase):
    EVERY = ("rank", "lr", "grad_scale", "skip", "after")

    def refused(self, call, *words):
        with self.assertRaises(jax.errors.JaxRuntimeError) as caught:
            call.run()
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_valid_calls_run(self):
        done = Call(values=self.EVERY).run()
        self.assertLess(float(done["new value of 'w'"][0, 0]), 0.95)
        self.assertEqual(done["state 'step'"].tolist(), [1, 1])
        done = Call(values=("hyper",)).run()
        self.assertLess(float(done["new value of 'b'"][0]), 1)
        for zeros in (False, True):
            done = Call(out=True, zeros=zeros).run()
            self.assertLess(float(done["update of 'b'"][0]), 0)
        self.assertEqual(Call("dsopt_init", ("rank",)).run()["state 'step'"].tolist(), [0, 0])

    def test_every_operand_and_result_is_checked(self):
        """Another dtype, too few elements, none, too many, another number of dimensions."""
        for options in (
            {"values": self.EVERY},
            {"values": ("hyper",)},
            {"out": True},
            {"out": True, "zeros": True},
            {"name": "dsopt_init", "values": ("rank",)},
        ):
            roles = {**Call(**options).results, **Call(**options).operands}
            for role, x in roles.items():
                other = jnp.float32 if x.dtype in (jnp.int32, jnp.uint8) else jnp.int32
                # The number of elements of a parameter is registered; its shape must be that of its gradient and state.
                shapes = [tuple(n - 1 for n in x.shape), tuple(n + 1 for n in x.shape), x.shape + (2,), (0,) + x.shape]
                if role == "result 'workspace'":
                    shapes[:2] = [(x.size - 256,)]  # a larger one is valid, and 255 bytes are for alignment
                cases = [(other, x.shape)] + [(x.dtype, shape) for shape in shapes if shape != x.shape]
                if x.dtype == jnp.float32:
                    cases.append((jnp.complex64, x.shape))
                for dtype, shape in cases:
                    with self.subTest(**options, role=role, dtype=jnp.dtype(dtype).name, shape=shape):
                        call = Call(**options)
                        call.change(role, dtype, shape)
                        if role == "operand 'after'":
                            call.run()  # not checked
                        elif role == "result 'workspace'" and dtype == x.dtype and len(shape) == 1:
                            self.refused(call, "workspace has %d bytes" % shape, "are needed")
                        else:
                            words = ["c64"] if dtype == jnp.complex64 else [hlo(dtype, shape)]
                            self.refused(call, "dsopt: " + role + " is " + words[0], "must be ")

    def test_error_names_the_expected_operand(self):
        for role, dtype, shape, wanted in (
            ("operand 'lr'", "float32", (1,), "f32[1], must be f32[2]"),
            ("operand 'skip'", "int32", (0,), "s32[0], must be s32[]"),
            ("parameter 'w'", "float16", (4, 3), "f16[4,3], must be f32[12] or another shape with as many elements"),
            ("gradient of 'b'", "int32", (5,), "s32[5], must be f32, f16 or bf16, and the shape [5]"),
            ("gradient of 'w'", "float32", (3, 4), "f32[3,4], must be f32, f16 or bf16, and the shape [4,3]"),
            ("exp_avg of 'b'", "bfloat16", (5,), "bf16[5], must be f32[5]"),
            ("state 'step'", "int32", (3,), "s32[3], must be s32[2]"),
            ("result 'report'", "float32", (1,), "f32[1], must be f32[16]"),
        ):
            with self.subTest(role):
                call = Call(values=self.EVERY)
                call.change(role, jnp.dtype(dtype), shape)
                self.refused(call, "dsopt: " + role + " is " + wanted)

    def test_codes_remainders_and_scales_are_checked(self):
        done = Call(recipe=LOW_PRECISION).run()
        self.assertEqual(done["exp_avg_scale of 'w'"].shape, (1,))
        for role, dtype, shape, wanted in (
            ("exp_avg of 'w'", "uint8", (4, 3), "u8[4,3], must be f8e4m3fn[4,3]"),
            ("exp_avg of 'w'", "float8_e5m2", (4, 3), "f8e5m2[4,3], must be f8e4m3fn[4,3]"),
            ("exp_avg_sq of 'w'", "float8_e4m3fn", (4, 3), "f8e4m3fn[4,3], must be u8[4,3]"),
            ("exp_avg_scale of 'w'", "float32", (2,), "f32[2], must be f32[1]"),
            ("exp_avg_sq_scale of 'w'", "float32", (4, 3), "f32[4,3], must be f32[1]"),
            ("remainder of 'w'", "uint16", (4, 3), "u16[4,3], must be s16[4,3]"),
            ("gradient of 'w'", "uint8", (4, 3), "u8[4,3], must be f32, f16 or bf16"),
            ("gradient of 'w'", "float8_e4m3fn", (4, 3), "f8e4m3fn[4,3], must be f32, f16 or bf16"),
        ):
            with self.subTest(role, wanted=wanted):
                call = Call(recipe=LOW_PRECISION)
                call.change(role, jnp.dtype(dtype), shape)
                self.refused(call, "dsopt: " + role + " is " + wanted)

    def test_gradients_may_have_another_float_dtype(self):
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16):
            call = Call()
            call.change("gradient of 'b'", dtype, (5,))
            self.assertLess(float(call.run()["new value of 'b'"][0]), 1)

    def test_rejects_missing_and_extra_buffers(self):
        for name in ("dsopt_step", "dsopt_init"):
            call = Call(name)
            last = list(call.operands)[-1]
            del call.operands[last]
            call.aliases.pop(last, None)
            self.refused(call, "dsopt: %s is missing: the call has %d operands" % (last, len(call.operands)))
            call = Call(name)
            call.operands["more"] = jnp.ones(1)
            n = len(call.operands)
            self.refused(call, "the call has %d operands, must have %d" % (n, n - 1))
            call = Call(name)
            last = list(call.results)[-1]
            del call.results[last]
            self.refused(call, "dsopt: %s is missing: the call has %d results" % (last, len(call.results)))
            call = Call(name)
            call.results["more"] = jax.ShapeDtypeStruct((1,), jnp.float32)
            n = len(call.results)
            self.refused(call, "the call has %d results, must have %d" % (n, n - 1))

    def test_rejects_results_that_are_not_aliased(self):
        for role in ("parameter 'w'", "exp_avg_sq of 'b'"):
            call = Call()
            result = call.aliases.pop(role)
            self.refused(call, "dsopt: %s is in other memory than its operand" % result)

    def test_rejects_ranks_out_of_range(self):
        for rank in (1, 7, -1):
            call = Call(values=("rank",))
            call.operands["operand 'rank'"] = jnp.int32(rank)
            self.refused(call, "operand 'rank' is %d, must be from 0 to 0" % rank)

    def test_rejects_flags_that_write_operands(self):
        for flag in (abi.DSOPT_STEP_ZERO_GRADS, abi.DSOPT_STEP_ACCUMULATED, abi.DSOPT_STEP_DELTA, 1 << 40):
            call = Call()
            call.attributes["flags"] |= np.int64(flag)
            self.refused(call, "attribute flags is %d" % call.attributes["flags"])
        call = Call(out=True, zeros=True)  # the zeros are read-only memory
        call.attributes["flags"] = np.int64(abi.DSOPT_STEP_NO_NAN)
        self.refused(call, "attribute flags is 16 with options 288")

    def test_rejects_unknown_options(self):
        for name, value in (
            ("dsopt_step", 2048),
            ("dsopt_step", _call.ZEROS),
            ("dsopt_step", _call.NORMS | 1),
            ("dsopt_init", 2),
        ):
            call = Call(name)
            call.attributes["options"] = np.int64(value)
            self.refused(call, "attribute options is %d" % value)

    def test_rejects_attribute_lists_of_wrong_length(self):
        def change(name, index, value):
            call = Call()
            call.attributes[name] = call.attributes[name].copy()
            call.attributes[name][index] = value
            return call

        self.refused(change("params", 0, -5), "the name of parameter 0 has -5 bytes")
        self.refused(change("params", 0, 0), "attribute names has 1 bytes more")
        self.refused(change("params", 8, 2), "the name of parameter 1 has 2 bytes, of which the attribute names has 1")
        self.refused(change("params", 1, -1), "parameter 'w' has numel -1")
        self.refused(change("params", 1, 13), "dims of parameter 'w' multiply to 12")
        call = change("params", 1, 13)
        call.attributes["dims"] = np.array([13, 1, *call.attributes["dims"][2:]])
        self.refused(call, "parameter 'w' is f32[4,3], must be f32[13]")
        self.refused(change("params", 1, 1 << 61), "parameter 'w' has numel", "its size overflows")
        self.refused(change("params", 2, (1 << 32) + 1), "attribute params: dtype is 4294967297, must fit into 32 bits")
        self.refused(change("params", 3, 2), "parameter 0 is 2, there are 2 groups")
        self.refused(change("params", 4, 1 << 40), "attribute params: flags is 1099511627776")
        self.refused(change("numbers", 10, 1 << 40), "attribute numbers: masters is 1099511627776")
        self.refused(change("group_numbers", 0, 1 << 40), "attribute group_numbers: algorithm is 1099511627776")
        self.refused(change("group_numbers", 6, 5), "exp_avg_format")
        call = Call()
        call.attributes["offsets"] = np.zeros(3, np.int64)  # not a number for each of the two parameters
        self.refused(call, "the attributes are from another version of dsopt.jax")
        for name in ("numbers", "reals", "group_numbers", "group_reals", "params", "dims"):
            call = Call()
            call.attributes[name] = call.attributes[name][:-1]
            self.refused(call, "the attributes are from another version of dsopt.jax")


class Norms(unittest.TestCase):
    @staticmethod
    def run_with(result, grads):
        call = jax.ffi.ffi_call("dsopt_step", result)
        return call(*grads, options=np.int64(_call.NORMS), **RECIPE.attributes)

    def test_computes_norms_of_all_gradients_and_of_each(self):
        _build.library()
        grads = [jnp.full(SHAPES["w"], 2.0), jnp.full(SHAPES["b"], np.inf, jnp.bfloat16)]
        for rows, norms, bad in ((1, [np.inf], [5]), (2, [48**0.5, np.inf], [0, 5])):
            found = np.asarray(self.run_with(jax.ShapeDtypeStruct((rows, 8), jnp.uint32), grads))
            np.testing.assert_allclose(found[:, :2].copy().view(np.float64).ravel(), norms, rtol=1e-15)
            np.testing.assert_array_equal(found[:, 4:6].copy().view(np.int64).ravel(), bad)

    def test_rejects_other_gradients_and_results(self):
        _build.library()
        grads = [jnp.ones(SHAPES["w"]), jnp.ones(SHAPES["b"])]
        good = jax.ShapeDtypeStruct((2, 8), jnp.uint32)
        for result, given, text in (
            (jax.ShapeDtypeStruct((3, 8), jnp.uint32), grads, r"result 'norms' is u32\[3,8\], must be u32\[1,8\] or"),
            (jax.ShapeDtypeStruct((2, 8), jnp.float32), grads, r"result 'norms' is f32\[2,8\]"),
            (good, grads[:1], "gradient of 'b' is missing"),
            (good, [*grads, grads[0]], "the call has 3 operands, must have 2"),
            (good, [grads[0], jnp.ones(6)], r"gradient of 'b' is f32\[6\]"),
            (good, [grads[0], jnp.ones(5, jnp.int32)], r"gradient of 'b' is s32\[5\]"),
        ):
            with self.assertRaisesRegex(jax.errors.JaxRuntimeError, text):
                jax.block_until_ready(self.run_with(result, given))


class FusedStep(unittest.TestCase):
    def test_accepts_only_single_real_numbers(self):
        opt = dsopt.jax.FusedStep("adamw", 0.1)
        params, grads = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
        state = opt.init(params)
        for name in ("learning_rate", "grad_scale", "skip"):
            for value in (jnp.ones(2), jnp.ones(0), jnp.complex64(1)):
                with self.subTest(name=name, value=value):
                    with self.assertRaisesRegex(dsopt.ArgumentError, r"^%s is \w+\[.*: pass one real number" % name):
                        opt.step(params, grads, state, **{name: value})
            opt.step(params, grads, state, **{name: jnp.ones(1)})

    def test_any_nonzero_value_skips(self):
        opt = dsopt.jax.FusedStep("adamw", 0.1)
        params, grads = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}
        for value, skipped in ((0.5, True), (True, True), (-1, True), (0.0, False), (False, False)):
            _, _, report = opt.step(params, grads, opt.init(params), skip=value)
            self.assertEqual(bool(report.skipped), skipped, value)


if __name__ == "__main__":
    unittest.main()
