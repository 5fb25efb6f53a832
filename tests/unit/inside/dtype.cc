// SPDX-License-Identifier: Apache-2.0
// Conversions between storage types. Scalar conversions of src/base/dtype.h are compared with arithmetic in double
// (support/numbers.h). Vectorized conversions of the engine, observed in outputs, masters and gradients, are compared
// with the scalar conversions.
#include "base/dtype.h"
#include "support/harness.h"

using namespace test;

namespace inside_dtype_tests {

constexpr int32_t k16BitDtypes[] = {DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};

float to_float(uint16_t bits, int32_t dtype) {
    return dtype == DSOPT_DTYPE_F16 ? dsopt::f16_to_f32(bits) : dsopt::bf16_to_f32(bits);
}
uint16_t to_16_bits(float value, int32_t dtype) {
    return dtype == DSOPT_DTYPE_F16 ? dsopt::f32_to_f16(value) : dsopt::f32_to_bf16(value);
}
int fraction_bits(int32_t dtype) { return dtype == DSOPT_DTYPE_F16 ? 10 : 7; }
bool is_nan(uint16_t bits, int32_t dtype) { return (bits & 0x7fff) > (dtype == DSOPT_DTYPE_F16 ? 0x7c00 : 0x7f80); }
uint16_t quiet(uint16_t bits, int32_t dtype) {
    return uint16_t(bits | (is_nan(bits, dtype) ? 1 << (fraction_bits(dtype) - 1) : 0));
}

TEST(Dtype, HasSizeUnlessUnknown) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16, DSOPT_DTYPE_I32, DSOPT_DTYPE_F64,
                                DSOPT_DTYPE_I16, DSOPT_DTYPE_U8, DSOPT_DTYPE_F8_E4M3})
        EXPECT_EQ(dsopt::dtype_size(dtype), size_of(dtype));
    EXPECT_EQ(dsopt::dtype_size(dsopt::kI64), 8u);
    for (const int32_t dtype : {0, -1, 9, INT32_MAX, INT32_MIN}) EXPECT_EQ(dsopt::dtype_size(dtype), 0u);
    for (int32_t dtype = -1; dtype < 10; ++dtype)
        EXPECT_EQ(dsopt::is_float_dtype(dtype), dtype >= DSOPT_DTYPE_F32 && dtype <= DSOPT_DTYPE_BF16);
}

TEST(Dtype, ConvertsEvery16BitValueToFp32) {
    for (const int32_t dtype : k16BitDtypes)
        for (uint32_t i = 0; i < 65536; ++i) {
            const auto bits = uint16_t(i);
            const uint32_t got = bits_of(to_float(bits, dtype));
            if (is_nan(bits, dtype)) {
                // Sign and payload become the upper bits. A signalling NaN becomes quiet in f16; bf16 is only shifted.
                const uint32_t payload = (bits & ((1u << fraction_bits(dtype)) - 1)) << (23 - fraction_bits(dtype));
                ASSERT_EQ(got, (uint32_t(bits) & 0x8000u) << 16 | 0x7f800000u | payload |
                                   (dtype == DSOPT_DTYPE_F16 ? 0x400000u : 0u))
                    << i;
            } else {
                ASSERT_EQ(got, bits_of(to_fp32(bits, dtype))) << i;
            }
        }
}

TEST(Dtype, RoundTripsEvery16BitValue) {
    for (const int32_t dtype : k16BitDtypes)
        for (uint32_t i = 0; i < 65536; ++i)
            ASSERT_EQ(to_16_bits(to_float(uint16_t(i), dtype), dtype), quiet(uint16_t(i), dtype)) << i;
}

void expect_rounded(uint32_t bits, int32_t dtype) {
    ASSERT_EQ(to_16_bits(float_of(bits), dtype), to_nearest_16_bits(float_of(bits), dtype))
        << std::hex << bits << " to dtype " << dtype;
}

LABEL(slow);
TEST(Dtype, RoundsRandomFloatsToNearest) {
    Random random(11);
    for (int i = 0; i < (kSanitized ? 200000 : 5000000); ++i) {
        const uint64_t r = random.next();
        for (const auto bits : {uint32_t(r), uint32_t(r >> 32)})
            for (const int32_t dtype : k16BitDtypes) expect_rounded(bits, dtype);
        if (HasFatalFailure()) return;
    }
}

// Tests every 16-bit value, every midpoint between two of them, and the floats next to both.
TEST(Dtype, RoundsFloatsAroundValuesAndTiesToNearest) {
    for (const int32_t dtype : k16BitDtypes)
        for (uint32_t i = 0; i < 65536; ++i) {
            const auto bits = uint16_t(i);
            const float value16 = to_fp32(bits, dtype);
            if (!std::isfinite(value16)) continue;
            float next16 = to_fp32(uint16_t(bits + 1), dtype);
            if (std::isinf(next16))
                // The next value, if the exponent did not overflow.
                next16 = float(2 * double(value16) - double(to_fp32(uint16_t(bits - 1), dtype)));
            const auto middle = float(
                (double(value16) + (std::isinf(next16) ? std::copysign(0x1p128, double(value16)) : double(next16))) /
                2);
            for (const float value : {value16, middle})
                for (int32_t d = -3; d <= 3; ++d) expect_rounded(bits_of(value) + uint32_t(d), dtype);
            if (HasFatalFailure()) return;
        }
}

TEST(Dtype, KeepsUpperBitsOfNanPayloads) {
    for (uint32_t payload = 1; payload < 0x800000; payload += 61)
        for (const uint32_t sign : {0u, 0x80000000u})
            for (const int32_t dtype : k16BitDtypes) expect_rounded(sign | 0x7f800000u | payload, dtype);
}

// ------------------------------------------------------------------------------------------- conversions of the engine
class VectorConversion : public testing::TestWithParam<const char *> {
protected:
    VectorConversion() : isa_(GetParam()) {}
    Isa isa_;
    /// Makes a skipped step with outputs, which only converts.
    static void convert(const Trainer &trainer, const std::vector<Array> &outs) {
        const std::vector<dsopt_tensor> list = list_of(outs);
        const int32_t skip = 1;
        dsopt_step step = trainer.arguments();
        step.skip = &skip;
        step.out = list.data();
        must(trainer.step(step));
    }
};
INSTANTIATE_TEST_SUITE_P(Isas, VectorConversion, testing::ValuesIn(kIsas),
                         [](const auto &info) { return std::string(info.param); });

TEST_P(VectorConversion, RoundsOutputsLikeScalarCode) {
    for (const int32_t dtype : k16BitDtypes)
        for (const int64_t numel : {int64_t(1), int64_t(7), int64_t(8), int64_t(1023), int64_t(300007)}) {
            const Trainer trainer({{numel, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32, 4}}, make_group(DSOPT_ALGORITHM_ADAMW));
            uint32_t *const bits = trainer.model.params[0].as<uint32_t>();
            Random random(uint64_t(numel) + 1);
            for (int64_t i = 0; i < numel; ++i) {
                bits[i] = uint32_t(random.next());
                if (i % 5 == 1) bits[i] = (bits[i] & 0x80ffffffu) | 0x38000000u; // around the smallest normal f16
                if (i % 5 == 2) bits[i] |= 0x7f800000u;                          // NaN with any payload
                if (i % 5 == 3) bits[i] = (bits[i] & 0x80ffffffu) | 0x47000000u; // around the largest f16
            }
            std::vector<Array> outs;
            outs.emplace_back(dtype, size_t(numel), 0.0f, 2);
            convert(trainer, outs);
            for (int64_t i = 0; i < numel; ++i)
                ASSERT_EQ(outs[0].as<uint16_t>()[i], to_16_bits(float_of(bits[i]), dtype)) << std::hex << bits[i];
            EXPECT_TRUE(outs[0].intact());
        }
}

TEST_P(VectorConversion, ConvertsOutputsAndMastersLikeScalarCode) {
    for (const int32_t dtype : k16BitDtypes)
        for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_NO_MASTER)}) {
            const Trainer trainer(shapes_of({65536}, dtype), make_group(DSOPT_ALGORITHM_ADAMW),
                                  optimizer_desc(0, flags), context_desc(2));
            for (uint32_t i = 0; i < 65536; ++i) trainer.model.params[0].as<uint16_t>()[i] = uint16_t(i);
            std::vector<Array> outs;
            outs.emplace_back(DSOPT_DTYPE_F32, 65536, 0.0f);
            convert(trainer, outs);
            // Masters are computed by arithmetic, which makes a signalling NaN quiet and keeps its payload.
            const auto expected = [&](uint32_t i) {
                const uint32_t bits = bits_of(to_float(uint16_t(i), dtype));
                return is_nan(uint16_t(i), dtype) && flags == 0 ? bits | 0x400000u : bits;
            };
            for (uint32_t i = 0; i < 65536; ++i) ASSERT_EQ(outs[0].as<uint32_t>()[i], expected(i)) << i;
            if (flags != 0) continue;
            const std::vector<float> master = exported(trainer.opt(), 0, "master");
            for (uint32_t i = 0; i < 65536; ++i) ASSERT_EQ(bits_of(master[i]), expected(i)) << i;
        }
}

TEST_P(VectorConversion, RoundsMastersLikeScalarCode) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW, 0);
    group.lr = 0; // the step does not change the master
    for (const int32_t dtype : k16BitDtypes) {
        const Trainer trainer(shapes_of({100003}, dtype), group, optimizer_desc(), context_desc(2));
        std::vector<uint32_t> master(100003);
        Random random(3);
        for (uint32_t &bits : master) bits = uint32_t(random.next());
        must(dsopt_optimizer_import(trainer.opt(), 0, master.data(), master.size() * 4));
        trainer.train(1);
        for (size_t i = 0; i < master.size(); ++i)
            ASSERT_EQ(trainer.model.params[0].as<uint16_t>()[i], to_16_bits(float_of(master[i]), dtype))
                << std::hex << master[i];
    }
}

TEST_P(VectorConversion, ConvertsGradientsLikeScalarCode) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW, 0);
    group.beta1 = 0; // the first moment equals the gradient
    for (const int32_t dtype : k16BitDtypes) {
        const Trainer trainer(shapes_of({65536}, DSOPT_DTYPE_F32, dtype), group);
        for (uint32_t i = 0; i < 65536; ++i) trainer.model.grads[0].as<uint16_t>()[i] = uint16_t(i);
        must(trainer.step(trainer.arguments()));
        const std::vector<float> m = exported(trainer.opt(), 0, "exp_avg");
        for (uint32_t i = 0; i < 65536; ++i) {
            const float expected = to_float(uint16_t(i), dtype);
            ASSERT_TRUE(m[i] == expected || (std::isnan(m[i]) && std::isnan(expected))) << i;
        }
    }
}

} // namespace inside_dtype_tests
