// SPDX-License-Identifier: Apache-2.0
// State as fp32: dsopt_optimizer_export_f32 and _import_f32, and the entries of the state list.
#include "support/formats.h"
#include <cfloat>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace test;

LABEL_FILE(one_thread);

namespace formats_values_tests {

constexpr int32_t kStored[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F8_E4M3,
                               DSOPT_DTYPE_U8}; // by enum dsopt_moment

TEST(FormatEntries, AreCodesFollowedByTheirScales) {
    for (const FormatCase &c : all_format_cases()) {
        Trainer trainer({{0}, {1}, {256}, {257}, {5000}}, c.group(), format_desc());
        const std::vector<dsopt_state_info> list = trainer.state();
        const std::vector<std::string> moments = c.moments();
        size_t i = 0;
        for (int64_t p = 0; p < 5; ++p) {
            for (const std::string &name : moments) {
                const bool squares = name == "exp_avg_sq" || name == "sum";
                const int32_t format = squares ? c.formats.second : c.formats.first;
                const dsopt_state_info &info = list[i++];
                EXPECT_EQ(info.name, name);
                EXPECT_EQ(info.param, p);
                EXPECT_EQ(info.tensor.dtype, kStored[format]);
                EXPECT_EQ(info.tensor.numel, trainer.weight(size_t(p)).numel());
                EXPECT_EQ(info.block, 1);
                EXPECT_EQ(info.reserved, 0);
                if (format < DSOPT_MOMENT_E4M3) continue;
                const dsopt_state_info &scale = list[i++];
                EXPECT_EQ(scale.name, name + "_scale");
                EXPECT_EQ(scale.param, p);
                EXPECT_EQ(scale.tensor.dtype, DSOPT_DTYPE_F32);
                EXPECT_EQ(scale.tensor.numel, (info.tensor.numel + 255) / 256);
                EXPECT_EQ(scale.block, 256);
                ASSERT_EQ(scale.ndim, 1);
                EXPECT_EQ(scale.dims[0], scale.tensor.numel);
            }
        }
        EXPECT_EQ(list.back().block, 0) << list.back().name;
    }
}

TEST(FormatEntries, HaveTheShapeOfTheirParameter) {
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context, format_desc());
    const dsopt_group group = FormatCase{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM}}.group();
    const int64_t dims[] = {20, 33};
    dsopt_param param = param_of({nullptr, 660, DSOPT_DTYPE_BF16, 0}, "w");
    param.dims = dims;
    param.ndim = 2;
    must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
    const dsopt_state_info codes = state_info(opt.get(), state_index(opt.get(), 0, "exp_avg"));
    const dsopt_state_info scales = state_info(opt.get(), state_index(opt.get(), 0, "exp_avg_scale"));
    const int64_t *const scale_dims = scales.dims;
    ASSERT_EQ(codes.ndim, 2);
    EXPECT_EQ(codes.dims[0], 20);
    EXPECT_EQ(codes.dims[1], 33);
    ASSERT_EQ(scales.ndim, 1);
    EXPECT_EQ(scale_dims[0], 3);
}

// Neither the parameter nor its state has memory.
TEST(FormatEntries, AreCountedBeyond32Bits) {
    constexpr int64_t numel = (int64_t(1) << 31) + 256 + 1;
    const Context context = make_context();
    const Optimizer opt = make_optimizer(context, format_desc(DSOPT_MASTERS_REMAINDER));
    const dsopt_group group = FormatCase{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}}.group();
    const dsopt_param param = param_of({nullptr, numel, DSOPT_DTYPE_BF16, 0});
    must(dsopt_optimizer_add_group(opt.get(), &group, &param, 1));
    const auto numel_of = [&](const char *name) {
        return state_info(opt.get(), state_index(opt.get(), 0, name)).tensor.numel;
    };
    for (const char *const name : {"remainder", "exp_avg", "exp_avg_sq"}) EXPECT_EQ(numel_of(name), numel) << name;
    for (const char *const name : {"exp_avg_scale", "exp_avg_sq_scale"})
        EXPECT_EQ(numel_of(name), (int64_t(1) << 23) + 2) << name;
}

TEST(FormatEntries, KeepF32MomentsOfAFlaggedParameter) {
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_Q8, DSOPT_MOMENT_Q8}};
    const Context context = make_context();
    const Trainer trainer(context, format_desc(), c.group(),
                          {{Array(DSOPT_DTYPE_F32, 300, 1), "embedding", DSOPT_PARAM_F32_MOMENTS},
                           {Array(DSOPT_DTYPE_F32, 300, 1), "weight"}});
    const auto dtype = [&](int64_t param, const char *name) {
        return state_info(trainer.opt(), state_index(trainer.opt(), param, name)).tensor.dtype;
    };
    EXPECT_EQ(dtype(0, "exp_avg"), DSOPT_DTYPE_F32);
    EXPECT_EQ(dtype(0, "exp_avg_sq"), DSOPT_DTYPE_F32);
    EXPECT_FALSE(has_state(trainer.opt(), 0, "exp_avg_scale"));
    EXPECT_EQ(dtype(1, "exp_avg"), DSOPT_DTYPE_U8);
}

// In Q8, the scale that is computed from a negative element differs from the first one by a rounding error.
TEST(FormatValues, ImportOfExportedValuesChangesNothing) {
    for (const FormatCase &c : all_format_cases()) {
        for (const int32_t masters : {DSOPT_MASTERS_PER_TENSOR, DSOPT_MASTERS_REMAINDER}) {
            Trainer trainer(shapes_of({1, 257, 5000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), c.group(),
                            format_desc(masters));
            trainer.train(1, 2);
            const Snapshot before = trainer.snapshot();
            std::vector<std::string> names = c.moments();
            names.push_back(masters == DSOPT_MASTERS_REMAINDER ? "remainder" : "master");
            for (int64_t p = 0; p < 3; ++p)
                for (const std::string &name : names) {
                    const std::vector<float> values = f32_state(trainer.opt(), p, name);
                    EXPECT_OK(dsopt_optimizer_import_f32(trainer.opt(), state_index(trainer.opt(), p, name),
                                                         values.data(), int64_t(values.size())));
                    const std::vector<float> again = f32_state(trainer.opt(), p, name);
                    for (size_t i = 0; i < values.size(); ++i)
                        ASSERT_LE(std::fabs(again[i] - values[i]), 2 * FLT_EPSILON * std::fabs(values[i])) << c.name();
                }
            if (c.formats.first != DSOPT_MOMENT_Q8) { EXPECT_TRUE(same(trainer.snapshot(), before)) << c.name(); }
        }
    }
}

TEST(FormatValues, ImportIsToTheNearestStoredValue) {
    for (int32_t format = DSOPT_MOMENT_F32; format <= DSOPT_MOMENT_Q8; ++format) {
        FormatCase c{DSOPT_ALGORITHM_LION, {format, DSOPT_MOMENT_F32}};
        Trainer trainer(shapes_of({600}), c.group(), format_desc());
        Random random(4);
        const std::vector<float> wanted = random.floats(600, -3, 3);
        const int64_t index = state_index(trainer.opt(), 0, "exp_avg");
        must(dsopt_optimizer_import_f32(trainer.opt(), index, wanted.data(), 600));
        const std::vector<float> got = f32_state(trainer.opt(), 0, "exp_avg");
        const auto allowed = [&](double x) {
            const double relative[] = {0, 1.0 / 256, 1.0 / 256, 1.0 / 16}; // half a unit in the last place
            if (format != DSOPT_MOMENT_Q8) return relative[format] * x + 3 * 0x1p-14;
            const double decade = std::max(std::ceil(std::log10(x / 3)), -6.0); // 2^(6 + decade) levels
            return 3 * 0.9 * std::pow(10, decade) / std::exp2(6 + decade);
        };
        for (size_t i = 0; i < 600; ++i)
            ASSERT_LE(std::fabs(got[i] - wanted[i]), allowed(std::fabs(wanted[i])))
                << kFormatNames[format] << ' ' << wanted[i];
    }
}

#if defined(__x86_64__)
TEST(FormatValues, DoNotDependOnTheCallersFloatingPointMode) {
    std::vector<float> values(600); // with subnormal codes of E4M3
    for (size_t i = 0; i < values.size(); ++i)
        values[i] = std::ldexp(1 + float(i) / 600, -int(i % 18)) * (i % 2 ? 1.0f : -1.0f);
    for (int32_t format = DSOPT_MOMENT_BF16; format <= DSOPT_MOMENT_Q8; ++format) {
        const FormatCase c{DSOPT_ALGORITHM_LION, {format, DSOPT_MOMENT_F32}};
        std::vector<float> wanted, got(600);
        for (const unsigned mode : {0x1f80u, 0x1f80u | 0x8040u | _MM_ROUND_TOWARD_ZERO}) { // the latter flushes, too
            const Trainer trainer(shapes_of({600}), c.group(), format_desc());
            const int64_t index = state_index(trainer.opt(), 0, "exp_avg");
            const unsigned saved = _mm_getcsr();
            _mm_setcsr(mode);
            const dsopt_status imported = dsopt_optimizer_import_f32(trainer.opt(), index, values.data(), 600);
            const dsopt_status exported = dsopt_optimizer_export_f32(trainer.opt(), index, got.data(), 600);
            _mm_setcsr(saved);
            must(imported);
            must(exported);
            if (mode == 0x1f80) wanted = got;
        }
        EXPECT_TRUE(same_bits(got, wanted)) << kFormatNames[format];
    }
}
#endif

// Conversions are in pieces of 2^20 elements.
LABEL(long_emulated);
TEST(FormatValues, OfSeveralPiecesAreThoseOfSlices) {
    constexpr int64_t total = (1 << 21) + 300, slice = 1 << 18;
    Random random(6);
    const std::vector<float> values = random.floats(size_t(total));
    const auto converted = [](const FormatCase &c, const std::string &name, const std::vector<float> &from) {
        const auto numel = int64_t(from.size());
        const Trainer trainer(shapes_of({numel}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), c.group(),
                              format_desc(DSOPT_MASTERS_REMAINDER));
        must(dsopt_optimizer_import_f32(trainer.opt(), state_index(trainer.opt(), 0, name), from.data(), numel));
        return f32_state(trainer.opt(), 0, name);
    };
    for (const int32_t format : {DSOPT_MOMENT_BF16, DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8})
        for (const std::string name : {"exp_avg", "remainder"}) {
            if (name == "remainder" && format != DSOPT_MOMENT_Q8) continue; // does not depend on the format
            const FormatCase c{DSOPT_ALGORITHM_LION, {format, DSOPT_MOMENT_F32}};
            const std::vector<float> whole = converted(c, name, values);
            for (int64_t first = 0; first < total; first += slice) {
                const auto begin = values.begin() + first, end = begin + std::min(slice, total - first);
                const std::vector<float> alone = converted(c, name, {begin, end});
                const auto same_slice = whole.begin() + first;
                ASSERT_TRUE(same_bits({same_slice, same_slice + (end - begin)}, alone)) << c.name() << ' ' << first;
            }
        }
}

TEST(FormatValues, OtherF32EntriesAreCopiedAsTheyAre) {
    const FormatCase c{DSOPT_ALGORITHM_LAMB, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}};
    Trainer trainer(shapes_of({300, 20}), c.group(), format_desc());
    trainer.train(1);
    EXPECT_EQ(f32_state(trainer.opt(), 0, "exp_avg_scale"), exported(trainer.opt(), 0, "exp_avg_scale"));
    EXPECT_EQ(f32_state(trainer.opt(), -1, "trust_ratio"), exported(trainer.opt(), -1, "trust_ratio"));
    const std::vector<float> scales = {2, 4};
    const int64_t index = state_index(trainer.opt(), 0, "exp_avg_scale");
    EXPECT_OK(dsopt_optimizer_import_f32(trainer.opt(), index, scales.data(), 2));
    EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg_scale"), scales);
}

TEST(FormatValues, AllocateStateBeforeTheFirstStep) {
    const FormatCase c{DSOPT_ALGORITHM_ADAGRAD, {DSOPT_MOMENT_F32, DSOPT_MOMENT_BF16_RANDOM}};
    dsopt_group group = c.group();
    group.initial_accumulator_value = 0.1;
    const Trainer trainer(shapes_of({300}), group, format_desc());
    for (const float value : f32_state(trainer.opt(), 0, "sum")) EXPECT_EQ(value, rounded(0.1f, DSOPT_DTYPE_BF16));
}

TEST(FormatValues, RefuseWrongArguments) {
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM}};
    Trainer trainer(shapes_of({300}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), c.group(),
                    format_desc(DSOPT_MASTERS_REMAINDER));
    trainer.train(1);
    dsopt_optimizer *const opt = trainer.opt();
    const std::string before = trainer.text();
    std::vector<float> values(400);
    const auto both = [&](const char *name, int64_t param, int64_t count, dsopt_status status, const char *words) {
        const int64_t index = state_index(opt, param, name);
        EXPECT_TRUE(refused(dsopt_optimizer_export_f32(opt, index, values.data(), count), status, words));
        EXPECT_TRUE(refused(dsopt_optimizer_import_f32(opt, index, values.data(), count), status, words));
    };
    both("step", -1, 1, DSOPT_ERR_DTYPE, "step");
    both("exp_avg", 0, 299, DSOPT_ERR_SHAPE, "exp_avg|299|300");
    both("exp_avg_scale", 0, 300, DSOPT_ERR_SHAPE, "exp_avg_scale|2");
    both("remainder", 0, 600, DSOPT_ERR_SHAPE, "remainder");
    const int64_t index = state_index(opt, 0, "exp_avg");
    EXPECT_TRUE(refused(dsopt_optimizer_export_f32(opt, index, nullptr, 300), DSOPT_ERR_ARGUMENT, "host"));
    EXPECT_TRUE(refused(dsopt_optimizer_import_f32(opt, 99, values.data(), 300), DSOPT_ERR_ARGUMENT, "99"));
    const dsopt_tensor none{nullptr, 300, DSOPT_DTYPE_BF16, 0};
    must(dsopt_optimizer_bind(opt, DSOPT_BIND_PARAMS, &none, 1));
    both("remainder", 0, 300, DSOPT_ERR_STATE, "p0|memory");
    const dsopt_tensor again = trainer.weight().tensor();
    must(dsopt_optimizer_bind(opt, DSOPT_BIND_PARAMS, &again, 1));
    EXPECT_TRUE(same(trainer.text(), before));
}

} // namespace formats_values_tests
