// SPDX-License-Identifier: Apache-2.0
// The codecs of a step store and load what those of dsopt_optimizer_import_f32 and _export_f32 do, which are the
// reference: for every instruction set and on the device. An SGD step with a new momentum buffer stores the gradient,
// and one with momentum 1 and dampening 1 stores the buffer again and subtracts it from the weights.
#include "support/formats.h"

using namespace test;

LABEL_FILE(one_thread);

namespace formats_codecs_tests {

constexpr int32_t kStored[] = {DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8};

/// The parameter is an instruction set; "": that of the machine, or the device under test.
class FormatCodecs : public testing::TestWithParam<const char *> {
protected:
    const Context context = make_context(1, *GetParam() != 0 ? GetParam() : nullptr);
};
std::string isa_name(const testing::TestParamInfo<const char *> &info) {
    return *info.param != 0 ? "Isa_" + std::string(info.param) : "Default";
}
INSTANTIATE_TEST_SUITE_P(Isas, FormatCodecs, testing::Values("", "generic", "avx2", "avx512", "avx512_bf16"), isa_name);

std::string bytes(dsopt_optimizer *opt, const char *name) { return exported_text(opt, state_index(opt, 0, name)); }

/// Returns lists of numbers: all magnitudes, one magnitude, zeros, largest and subnormal numbers, tails of each length.
std::vector<std::vector<float>> lists() {
    std::vector<std::vector<float>> all;
    Random random(11);
    const auto add = [&](size_t n, const std::function<float(size_t)> &number) {
        std::vector<float> list(n);
        for (size_t i = 0; i < n; ++i) list[i] = number(i) + 0.0f; // the rule adds the decay, 0: -0 would become 0
        all.push_back(std::move(list));
    };
    for (const size_t n : {1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 300, 511, 1000})
        add(n, [&](size_t) { return random.number(-4, 0); });
    add(2048, [&](size_t) { return random.number(-20, 0); });
    add(2048, [&](size_t) { return random.number(-126, 127); });
    add(512, [&](size_t i) { return i % 2 ? 1.0f : -1.0f; });
    add(512, [&](size_t) { return 0.0f; });
    add(512, [&](size_t i) { return float_of(uint32_t(i) * 3); });
    add(512, [&](size_t i) { return i < 256 ? float_of(0x7f7fffffu) : -float_of(0x7f7fffffu); });
    add(512, [&](size_t i) { return i == 7 ? kInf : i == 300 ? kNaN : 1.0f; });
    add(512, [&](size_t i) { return i == 0 ? 1e30f : float_of(uint32_t(i)); });
    // Around each level of E4M3 and of the largest decades of the 8-bit map, and around the middles between levels.
    add(4096,
        [&](size_t i) { return i % 256 == 0 ? 448.0f : float(double(i) / 9 * (i % 2 ? -1 : 1) * (i < 4000 ? 1 : 0)); });
    add(4096, [&](size_t i) { return i % 256 == 0 ? 1.0f : float(double(i) / 4096 * (i % 2 ? -1 : 1)); });
    return all;
}

dsopt_group sgd(int32_t format) {
    dsopt_group group = FormatCase{DSOPT_ALGORITHM_SGD, {format, DSOPT_MOMENT_F32}}.group(1, 0);
    group.momentum = 1;
    group.dampening = 1;
    return group;
}
dsopt_optimizer_desc apply_desc() {
    dsopt_optimizer_desc desc = format_desc();
    desc.nonfinite = DSOPT_NONFINITE_APPLY;
    return desc;
}

LABEL_PARAMS(cpu, "Isa_*");
TEST_P(FormatCodecs, OfAStepStoreWhatAnImportStores) {
    for (const int32_t format : {DSOPT_MOMENT_BF16, DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8})
        for (const std::vector<float> &list : lists()) {
            const Array zeros(DSOPT_DTYPE_F32, list.size(), 0);
            Trainer stepped(context, apply_desc(), sgd(format), std::vector<Array>{zeros});
            const Trainer imported(context, apply_desc(), sgd(format), std::vector<Array>{zeros});
            must(stepped.step({Array(DSOPT_DTYPE_F32, list)}));
            must(dsopt_optimizer_import_f32(imported.opt(), state_index(imported.opt(), 0, "momentum_buffer"),
                                            list.data(), int64_t(list.size())));
            EXPECT_TRUE(same(bytes(stepped.opt(), "momentum_buffer"), bytes(imported.opt(), "momentum_buffer")))
                << kFormatNames[format] << ' ' << list.size();
            if (format == DSOPT_MOMENT_BF16) continue;
            EXPECT_TRUE(
                same(bytes(stepped.opt(), "momentum_buffer_scale"), bytes(imported.opt(), "momentum_buffer_scale")))
                << kFormatNames[format] << ' ' << list.size();
        }
}

// AdamW with beta2 = 0 stores the squares of the gradients.
LABEL_PARAMS(cpu, "Isa_*");
TEST_P(FormatCodecs, OfSquaresStoreWhatAnImportStores) {
    dsopt_group group = FormatCase{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_F32, DSOPT_MOMENT_Q8}}.group(0, 0);
    group.beta2 = 0;
    for (const std::vector<float> &list : lists()) {
        const Array zeros(DSOPT_DTYPE_F32, list.size(), 0);
        Trainer stepped(context, apply_desc(), group, std::vector<Array>{zeros});
        const Trainer imported(context, apply_desc(), group, std::vector<Array>{zeros});
        std::vector<float> squares = list;
        for (float &x : squares) x = x * x;
        must(stepped.step({Array(DSOPT_DTYPE_F32, list)}));
        must(dsopt_optimizer_import_f32(imported.opt(), state_index(imported.opt(), 0, "exp_avg_sq"), squares.data(),
                                        int64_t(squares.size())));
        for (const char *const name : {"exp_avg_sq", "exp_avg_sq_scale"})
            EXPECT_TRUE(same(bytes(stepped.opt(), name), bytes(imported.opt(), name))) << name << ' ' << list.size();
    }
}

// Every code, with scales of all sizes.
LABEL_PARAMS(cpu, "Isa_*");
TEST_P(FormatCodecs, OfAStepLoadEveryCode) {
    for (const int32_t format : kStored) {
        const bool scaled = format >= DSOPT_MOMENT_E4M3;
        const size_t n = scaled ? 4 * 256 : 65536, size = scaled ? 1 : 2;
        std::string codes(n * size, '\0');
        for (size_t i = 0; i < n; ++i)
            for (size_t byte = 0; byte < size; ++byte) codes[i * size + byte] = char(i >> 8 * byte & 0xff);
        const std::vector<float> scales = {1, 0x1p-100f, 3.7f, 1e30f};
        Trainer trainer(context, apply_desc(), sgd(format), std::vector<Array>{Array(DSOPT_DTYPE_F32, n, 0)});
        must(trainer.step({Array(DSOPT_DTYPE_F32, n, 0)})); // the first step, which stores the gradient
        dsopt_optimizer *const opt = trainer.opt();
        must(dsopt_optimizer_import(opt, state_index(opt, 0, "momentum_buffer"), codes.data(), codes.size()));
        if (scaled)
            must(dsopt_optimizer_import(opt, state_index(opt, 0, "momentum_buffer_scale"), scales.data(),
                                        scales.size() * sizeof(float)));
        const std::vector<float> values = f32_state(opt, 0, "momentum_buffer");
        must(trainer.step({Array(DSOPT_DTYPE_F32, n, 0)}));
        std::vector<float> weights = trainer.weight().floats();
        for (float &weight : weights) weight = 0 - weight;
        for (size_t i = 0; i < n; ++i) {
            if (std::isnan(values[i]))
                ASSERT_TRUE(std::isnan(weights[i])) << i;
            else
                ASSERT_EQ(weights[i], values[i]) << kFormatNames[format] << ' ' << i;
        }
    }
}

// A level is stored as itself: steps that do not change a moment leave its codes.
LABEL_PARAMS(cpu, "Isa_*");
TEST_P(FormatCodecs, StoreEveryLevelAsItsCode) {
    for (const int32_t format : {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}) {
        std::string codes(256, '\0');
        for (size_t i = 0; i < 256; ++i) codes[i] = char(i);
        if (format == DSOPT_MOMENT_E4M3) codes[0x7f] = 0x7e, codes[0xff] = char(0xfe); // no NaN
        if (format == DSOPT_MOMENT_E4M3) codes[0x80] = 0;                              // no negative zero
        Trainer trainer(context, apply_desc(), sgd(format), std::vector<Array>{Array(DSOPT_DTYPE_F32, 256, 0)});
        must(trainer.step({Array(DSOPT_DTYPE_F32, 256, 0)}));
        dsopt_optimizer *const opt = trainer.opt();
        const float one = 1;
        must(dsopt_optimizer_import(opt, state_index(opt, 0, "momentum_buffer"), codes.data(), codes.size()));
        must(dsopt_optimizer_import(opt, state_index(opt, 0, "momentum_buffer_scale"), &one, sizeof one));
        for (int t = 0; t < 3; ++t) must(trainer.step({Array(DSOPT_DTYPE_F32, 256, 0)}));
        EXPECT_TRUE(same(bytes(opt, "momentum_buffer"), codes)) << kFormatNames[format];
        EXPECT_EQ(exported(opt, 0, "momentum_buffer_scale"), std::vector<float>{1}) << kFormatNames[format];
    }
}

} // namespace formats_codecs_tests
