// SPDX-License-Identifier: Apache-2.0
// What training needs of a format: zeros stay zeros, a steady gradient is reached, weights with small gradients move as
// far as with fp32 state, means of squares can fall, and rounding at random is not biased.
#include "support/formats.h"

using namespace test;

LABEL_FILE(one_thread);

namespace formats_properties_tests {

class FormatProperties : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(Rules, FormatProperties, testing::ValuesIn(all_format_cases()), format_case_name);

TEST_P(FormatProperties, ZeroGradientsLeaveZeroBytesAndWeights) {
    Trainer trainer(shapes_of({1, 256, 600}), GetParam().group(1e-2, 0));
    const std::string weights = trainer.model.text();
    std::vector<Array> zeros;
    for (const Array &grad : trainer.model.grads) zeros.emplace_back(DSOPT_DTYPE_F32, grad.size(), 0.0f);
    for (int t = 0; t < 5; ++t) must(trainer.step(zeros));
    EXPECT_TRUE(same(trainer.model.text(), weights));
    for (const dsopt_state_info &info : trainer.state()) {
        if (info.param < 0) continue;
        const std::string text = exported_text(trainer.opt(), state_index(trainer.opt(), info.param, info.name));
        EXPECT_EQ(text, std::string(text.size(), '\0')) << info.name;
    }
}

// Running means: the weight of the gradient is 1 - beta.
TEST_P(FormatProperties, MeanOfASteadyGradientReachesIt) {
    const FormatCase &c = GetParam();
    if (c.algorithm == DSOPT_ALGORITHM_SGD || c.algorithm == DSOPT_ALGORITHM_ADAGRAD) return;
    for (const float value : {1.0f, -1.0f}) {
        dsopt_group group = c.group(0, 0);
        if (c.algorithm == DSOPT_ALGORITHM_LION) group.beta2 = 0.9; // the decay of its mean
        Trainer trainer(shapes_of({300}), group);
        for (int t = 0; t < 200; ++t) must(trainer.step({Array(DSOPT_DTYPE_F32, 300, value)}));
        const double allowed = c.formats.first == DSOPT_MOMENT_BF16 ? 0.02 : 0.01;
        for (const float mean : f32_state(trainer.opt(), 0, "exp_avg")) ASSERT_NEAR(mean / value, 1, allowed);
    }
}

/// Returns how far the weights with small gradients move: one of 16 weights has a gradient of 1, the others of 1e-4.
double distance_of_small(const dsopt_group &group) {
    Trainer trainer(shapes_of({512}), group);
    const std::vector<float> start = trainer.weight().floats();
    Random random(3);
    for (int t = 0; t < 100; ++t) {
        std::vector<float> gradient(512);
        for (size_t i = 0; i < gradient.size(); ++i)
            gradient[i] = float((i % 16 == 0 ? 1 : 1e-4) * (1 + 0.5 * random.uniform(-1, 1)));
        must(trainer.step({Array(DSOPT_DTYPE_F32, gradient)}));
    }
    double sum = 0;
    for (size_t i = 0; i < start.size(); ++i)
        if (i % 16 != 0) sum += std::fabs(trainer.weight()[i] - start[i]);
    return sum;
}

LABEL(numbers_only);
LABEL(long_emulated);
TEST(FormatAccuracy, WeightsWithSmallGradientsDoNotMoveTooFar) {
    const auto distance = [](int32_t first, int32_t second) {
        return distance_of_small(FormatCase{DSOPT_ALGORITHM_ADAMW, {first, second}}.group(1e-3, 0));
    };
    const double exact = distance(DSOPT_MOMENT_F32, DSOPT_MOMENT_F32);
    const double bf16 = distance(DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM) / exact;
    const double e4m3 = distance(DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM) / exact;
    const double q8 = distance(DSOPT_MOMENT_Q8, DSOPT_MOMENT_Q8) / exact;
    EXPECT_TRUE(bf16 > 0.95 && bf16 < 1.05) << bf16;
    EXPECT_TRUE(e4m3 > 0.95 && e4m3 < 1.05) << e4m3;
    EXPECT_TRUE(q8 > 0.15 && q8 < 1.3) << q8;
}

LABEL(numbers_only);
LABEL(long_emulated);
TEST(FormatAccuracy, MeanOfSquaresFallsWithoutAGradient) {
    for (const int32_t format : {DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_Q8}) {
        const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_F32, format}};
        constexpr size_t n = 4096;
        Trainer trainer(shapes_of({int64_t(n)}), c.group(0, 0), format_desc());
        const std::vector<float> ones(n, 1);
        const int64_t index = state_index(trainer.opt(), 0, "exp_avg_sq");
        must(dsopt_optimizer_import_f32(trainer.opt(), index, ones.data(), int64_t(n)));
        for (int t = 0; t < 1000; ++t) must(trainer.step({Array(DSOPT_DTYPE_F32, n, 0.0f)}));
        double mean = 0;
        for (const float v : f32_state(trainer.opt(), 0, "exp_avg_sq")) mean += v / double(n);
        EXPECT_NEAR(mean / std::pow(0.999, 1000), 1, 0.05) << kFormatNames[format];
    }
}

LABEL(numbers_only);
LABEL(long_emulated);
TEST(FormatAccuracy, RoundingAtRandomIsUnbiasedAndIndependent) {
    constexpr size_t n = 1 << 16;
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_BF16_RANDOM}};
    dsopt_group group = c.group(0, 0);
    group.beta1 = group.beta2 = 0.5;
    const float gradient = 1 + 0x1p-9f; // its half is a quarter of a unit of bf16 above a number of bf16
    Trainer trainer(shapes_of({int64_t(n)}), group, format_desc());
    must(trainer.step({Array(DSOPT_DTYPE_F32, n, gradient)}));
    const auto ups = [&](const char *name, double exact) {
        std::vector<double> up;
        const std::vector<float> values = f32_state(trainer.opt(), 0, name);
        const float low = *std::min_element(values.begin(), values.end()),
                    high = *std::max_element(values.begin(), values.end());
        EXPECT_LT(low, high);
        double mean = 0;
        for (const float value : values) {
            EXPECT_TRUE(value == low || value == high);
            up.push_back(value == high);
            mean += value / double(n);
        }
        const double chance = (exact - low) / (high - low);
        EXPECT_NEAR(mean, exact, 4 * (high - low) * std::sqrt(chance * (1 - chance) / double(n))) << name;
        return up;
    };
    const auto correlation = [](const std::vector<double> &x, const std::vector<double> &y) {
        double mean_x = 0, mean_y = 0, xy = 0, xx = 0, yy = 0;
        for (size_t i = 0; i < n; ++i) mean_x += x[i] / n, mean_y += y[i] / n;
        for (size_t i = 0; i < n; ++i) {
            xy += (x[i] - mean_x) * (y[i] - mean_y);
            xx += (x[i] - mean_x) * (x[i] - mean_x);
            yy += (y[i] - mean_y) * (y[i] - mean_y);
        }
        return xy / std::sqrt(xx * yy);
    };
    const double square = double(gradient) * gradient;
    const std::vector<double> first = ups("exp_avg", 0.5 * gradient), second = ups("exp_avg_sq", 0.5 * square);
    std::vector<double> next(first.begin() + 1, first.end());
    next.push_back(first[0]);
    EXPECT_LT(std::fabs(correlation(first, second)), 4 / std::sqrt(double(n)));
    EXPECT_LT(std::fabs(correlation(first, next)), 4 / std::sqrt(double(n)));
}

// An Inf or NaN that is applied spoils its block of 256, and nothing else.
TEST(FormatNonfinite, SpoilsOneBlock) {
    for (const int32_t format : {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}) {
        for (const float bad : {kInf, -kInf, kNaN}) {
            const FormatCase c{DSOPT_ALGORITHM_SGD, {format, DSOPT_MOMENT_F32}};
            dsopt_optimizer_desc desc = format_desc();
            desc.nonfinite = DSOPT_NONFINITE_APPLY;
            Trainer trainer(shapes_of({700}), c.group(), desc);
            trainer.train(1);
            std::vector<float> gradient(700, 0.5f);
            gradient[300] = bad;
            must(trainer.step({Array(DSOPT_DTYPE_F32, gradient)}));
            const std::vector<float> momentum = f32_state(trainer.opt(), 0, "momentum_buffer");
            for (size_t i = 0; i < momentum.size(); ++i) ASSERT_EQ(std::isnan(momentum[i]), i >= 256 && i < 512) << i;
            must(dsopt_optimizer_reset(trainer.opt(), DSOPT_RESET_MOMENTS, nullptr));
            for (const float value : f32_state(trainer.opt(), 0, "momentum_buffer")) ASSERT_EQ(value, 0);
        }
    }
}

TEST(FormatNonfinite, LeavesStateIfTheStepIsSkipped) {
    for (const FormatCase &c : few_format_cases()) {
        dsopt_optimizer_desc desc = format_desc(DSOPT_MASTERS_REMAINDER);
        desc.nonfinite = DSOPT_NONFINITE_SKIP;
        Trainer trainer(shapes_of({700, 5}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), c.group(), desc);
        trainer.train(1, 2);
        const std::string before = trainer.text();
        trainer.model.make_gradients(3);
        trainer.model.grads[1].set(2, kNaN);
        must(trainer.step(trainer.arguments()));
        EXPECT_EQ(trainer.report().skipped, 1);
        EXPECT_TRUE(same(trainer.text(), before));
    }
}

TEST(FormatState, BytesAreCountedInTheReport) {
    const FormatCase c{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM}};
    Trainer trainer(shapes_of({1000}, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16), c.group(),
                    format_desc(DSOPT_MASTERS_REMAINDER));
    trainer.train(1);
    // remainder, codes, scales, squares, step
    EXPECT_EQ(trainer.report().state_bytes, 2000 + 1000 + 16 + 2000 + 4);
}

} // namespace formats_properties_tests
