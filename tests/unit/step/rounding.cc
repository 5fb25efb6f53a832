// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding of BF16 parameters without masters.
#include "support/harness.h"
#include <bit>
#include <numeric>

using namespace test;

namespace step_rounding_tests {

constexpr double kUlp = 0x1p-7; // of bf16 numbers in [1, 2)

/// Every step subtracts exactly lr: the betas are 0, and the gradient is 1.
dsopt_group constant_update(double lr) {
    dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, lr, 0);
    group.beta1 = group.beta2 = group.eps = 0;
    return group;
}
dsopt_optimizer_desc stochastic_desc(uint64_t seed = 1) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.flags = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    desc.seed = seed;
    return desc;
}
/// Returns the weights after `steps` steps from `start`, each of which subtracts lr.
std::vector<float> weights_after(const Context &ctx, float start, size_t numel, double lr, uint64_t seed = 1,
                                 const char *name = "w", int64_t offset = 0, int steps = 1) {
    Trainer trainer(ctx, stochastic_desc(seed), constant_update(lr),
                    {{Array(DSOPT_DTYPE_BF16, numel, start), name, 0, 0, offset}});
    for (int step = 0; step < steps; ++step) must(trainer.step({Array(DSOPT_DTYPE_F32, numel, 1)}));
    return trainer.weight().floats();
}
double mean_of(const std::vector<float> &values) {
    return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

LABEL(numbers_only);
TEST(StochasticRounding, IsUnbiasedBetweenTheTwoNeighbours) {
    const Context ctx = make_context(2);
    constexpr size_t n = 200000;
    for (const float sign : {1.0f, -1.0f})
        for (const double fraction : {1.0 / 256, 0.1, 0.3, 0.5, 0.77, 0.999}) {
            const double lr = fraction * kUlp;
            const std::vector<float> values = weights_after(ctx, sign * 1.5f, n, lr);
            const double exact = double(float(double(sign) * 1.5 - double(float(lr))));
            const double below = std::floor(exact / kUlp) * kUlp;
            for (const float value : values)
                ASSERT_TRUE(double(value) == below || double(value) == below + kUlp) << value;
            const double up = (exact - below) / kUlp;
            EXPECT_NEAR((mean_of(values) - below) / kUlp, up, 5 * std::sqrt(up * (1 - up) / n))
                << "lr " << fraction << " ulp"
                << ", sign " << sign;
        }
}

TEST(StochasticRounding, AccumulatesSmallUpdatesThatNearestLoses) {
    const Context ctx = make_context(2);
    constexpr size_t n = 20000;
    constexpr int steps = 50;
    const double lr = kUlp / 40;
    EXPECT_NEAR(mean_of(weights_after(ctx, 1.5f, n, lr, 3, "w", 0, steps)), 1.5 - steps * lr,
                5 * kUlp * std::sqrt(steps / 160.0 / n));
    DSOPT_NEW(dsopt_optimizer_desc, nearest);
    nearest.flags = DSOPT_OPTIMIZER_NO_MASTER;
    Trainer trainer(ctx, nearest, constant_update(lr), std::vector<Array>{Array(DSOPT_DTYPE_BF16, 1, 1.5f)});
    for (int step = 0; step < steps; ++step) must(trainer.step({Array(DSOPT_DTYPE_F32, 1, 1)}));
    EXPECT_EQ(trainer.weight()[0], 1.5f);
}

TEST(StochasticRounding, IsIndependentByElementStepNameAndSeed) {
    const Context ctx = make_context(2);
    constexpr size_t n = 65536;
    const auto bits = [&](uint64_t seed, const char *name, int64_t offset = 0) {
        std::vector<float> values = weights_after(ctx, 1.5f, n, kUlp / 2, seed, name, offset);
        for (float &value : values) value = value == 1.5f ? 1.0f : -1.0f;
        return values;
    };
    const auto correlation = [&](const std::vector<float> &a, const std::vector<float> &b, size_t lag) {
        double sum = 0;
        for (size_t i = 0; i + lag < n; ++i) sum += double(a[i]) * double(b[i + lag]);
        return sum / double(n - lag);
    };
    const double limit = 5 / std::sqrt(double(n) / 2);
    const std::vector<float> reference_bits = bits(1, "w");
    for (const size_t lag : {1, 2, 3, 4, 8, 16, 31, 32, 64, 1024, 4096, 32768})
        EXPECT_LT(std::fabs(correlation(reference_bits, reference_bits, lag)), limit) << lag;
    const std::vector<std::vector<float>> others = {bits(2, "w"),
                                                    bits(1ull << 40, "w"),
                                                    bits(1, "v"),
                                                    bits(1, "ww"),
                                                    bits(1, "w", n),
                                                    bits(1, "w", int64_t(1) << 32),
                                                    bits(1, "w", int64_t(1) << 40)};
    for (size_t i = 0; i < others.size(); ++i)
        EXPECT_LT(std::fabs(correlation(reference_bits, others[i], 0)), limit) << i;

    // Every step computes the same fp32 weight.
    Trainer trainer(ctx, stochastic_desc(), constant_update(kUlp / 2), {{Array(DSOPT_DTYPE_BF16, n, 1.5f), "w"}});
    std::vector<std::vector<float>> steps;
    for (int step = 0; step < 3; ++step) {
        for (size_t i = 0; i < n; ++i) trainer.weight().set(i, 1.5f);
        must(trainer.step({Array(DSOPT_DTYPE_F32, n, 1)}));
        steps.push_back(trainer.weight().floats());
        for (float &value : steps.back()) value = value == 1.5f ? 1.0f : -1.0f;
    }
    EXPECT_EQ(steps[0], reference_bits);
    EXPECT_LT(std::fabs(correlation(steps[0], steps[1], 0)), limit);
    EXPECT_LT(std::fabs(correlation(steps[1], steps[2], 0)), limit);
    EXPECT_LT(std::fabs(correlation(steps[0], steps[1], 1)), limit);
}

class ShardedRounding : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, ShardedRounding, testing::ValuesIn(kStandardRules), algorithm_name);

TEST_P(ShardedRounding, GivesTheSameBitsInSeparateOptimizers) {
    const std::vector<size_t> sizes = {3, 70000, 4097, 0, 1};
    Random random(5);
    std::vector<Param> params;
    for (const size_t size : sizes)
        params.push_back({Array(DSOPT_DTYPE_BF16, random.floats(size)), "t" + std::to_string(params.size())});
    std::vector<std::vector<Array>> grads(4);
    for (auto &list : grads)
        for (const size_t size : sizes) list.emplace_back(DSOPT_DTYPE_BF16, random.floats(size));

    const Context reference_context = make_context(1);
    Trainer whole(reference_context, stochastic_desc(9), group_of(GetParam()), params);
    for (const auto &list : grads) ASSERT_OK(whole.step(list));
    for (const int threads : {1, 3, 8}) {
        const Context ctx = make_context(threads);
        for (size_t i = 0; i < sizes.size(); ++i) {
            Trainer part(ctx, stochastic_desc(9), group_of(GetParam()), {params[i]});
            for (const auto &list : grads) ASSERT_OK(part.step({list[i]}));
            EXPECT_EQ(part.weight().text(), whole.weight(i).text()) << "tensor " << i;
        }
        std::vector<Param> reversed(params.rbegin(), params.rend());
        Trainer backwards(ctx, stochastic_desc(9), group_of(GetParam()), reversed);
        for (const auto &list : grads) ASSERT_OK(backwards.step({list.rbegin(), list.rend()}));
        for (size_t i = 0; i < sizes.size(); ++i)
            EXPECT_EQ(backwards.weight(sizes.size() - 1 - i).text(), whole.weight(i).text()) << "tensor " << i;
    }
}

TEST(StochasticRounding, GivesTheSameBitsForSlicesWithOffsets) {
    Random random(6);
    constexpr size_t n = 30000;
    const Array weight(DSOPT_DTYPE_BF16, random.floats(n));
    for (const char *isa : kIsas) {
        const Context ctx = make_context(3, isa);
        Random again(7);
        Trainer whole(ctx, stochastic_desc(4), group_of(DSOPT_ALGORITHM_ADAMW), {{weight, "layer.weight"}});
        std::vector<Array> grads;
        for (int step = 0; step < 3; ++step) {
            grads.emplace_back(DSOPT_DTYPE_BF16, again.floats(n));
            must(whole.step({grads.back()}));
        }
        for (const size_t cut : {size_t(1), size_t(1023), size_t(4096), size_t(12345), n - 1}) {
            const auto slice = [&](const Array &from, size_t begin, size_t end) {
                const std::vector<float> values = from.floats();
                return Array(DSOPT_DTYPE_BF16,
                             std::vector<float>(values.begin() + int64_t(begin), values.begin() + int64_t(end)));
            };
            Trainer first(ctx, stochastic_desc(4), group_of(DSOPT_ALGORITHM_ADAMW),
                          {{slice(weight, 0, cut), "layer.weight"}});
            Trainer second(ctx, stochastic_desc(4), group_of(DSOPT_ALGORITHM_ADAMW),
                           {{slice(weight, cut, n), "layer.weight", 0, 0, int64_t(cut)}});
            for (const Array &grad : grads) {
                must(first.step({slice(grad, 0, cut)}));
                must(second.step({slice(grad, cut, n)}));
            }
            EXPECT_EQ(first.weight().text() + second.weight().text(), whole.weight().text())
                << isa << ", cut at " << cut;
        }
    }
}

TEST(StochasticRounding, KeepsRepresentableNumbersInfAndNan) {
    const Context ctx = make_context(2);
    const Array start(DSOPT_DTYPE_BF16, {0.0f, -0.0f, 1.0f, -3.0f, 0x1p-133f, -0x1p-126f, 0x1.fep127f, kNaN});
    Trainer still(ctx, stochastic_desc(), group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0), std::vector<Array>{start});
    for (int step = 0; step < 50; ++step) must(still.step({Array(DSOPT_DTYPE_F32, 8, 0)}));
    EXPECT_TRUE(same_bits(still.weight().floats(), start.floats()));
    // Every payload bit of the NaN is set: adding random bits would carry into the sign.
    Trainer nan(ctx, stochastic_desc(), constant_update(1), std::vector<Array>{Array(DSOPT_DTYPE_BF16, 1000, 1)});
    must(nan.step({Array(DSOPT_DTYPE_F32, 1000, std::bit_cast<float>(0x7fffffffu))}));
    for (const float value : nan.weight().floats()) ASSERT_TRUE(std::isnan(value)) << value;
    // The update makes weights overflow fp32.
    Trainer trainer(ctx, stochastic_desc(), constant_update(3e38),
                    std::vector<Array>{Array(DSOPT_DTYPE_BF16, {3e38f, -3e38f})});
    must(trainer.step({Array(DSOPT_DTYPE_F32, {-1, 1})}));
    EXPECT_EQ(trainer.weight().floats(), (std::vector<float>{kInf, -kInf}));
}

TEST(StochasticRounding, RoundsNeitherFp32NorAbsentParameters) {
    const Context ctx = make_context(2);
    DSOPT_NEW(dsopt_optimizer_desc, plain);
    Random random(8);
    const Array weight(DSOPT_DTYPE_F32, random.floats(5000));
    Trainer trainer(ctx, stochastic_desc(), group_of(DSOPT_ALGORITHM_ADAM),
                    std::vector<Array>{weight, Array(DSOPT_DTYPE_BF16, random.floats(40))});
    Trainer reference(ctx, plain, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{weight});
    const std::string absent = trainer.weight(1).text();
    for (int step = 0; step < 3; ++step) {
        const Array grad(DSOPT_DTYPE_F32, random.floats(5000));
        must(trainer.step({grad, Array::absent(40)}));
        must(reference.step({grad}));
    }
    EXPECT_EQ(trainer.weight(0).text(), reference.weight(0).text());
    EXPECT_EQ(trainer.weight(1).text(), absent);
}

TEST(StochasticRounding, SetsOutputAndDeltaFromRoundedWeights) {
    const Context ctx = make_context(2);
    Random random(9);
    const Array start(DSOPT_DTYPE_BF16, random.floats(3000, 1, 2));
    for (const int32_t algorithm : kStandardRules) {
        Trainer written(ctx, stochastic_desc(), group_of(algorithm), {{start, "w"}}),
            apart(ctx, stochastic_desc(), group_of(algorithm), {{start, "w"}});
        const std::vector<Array> grad = {Array(DSOPT_DTYPE_BF16, random.floats(3000))};
        Array out(DSOPT_DTYPE_F32, 3000, 0), delta(DSOPT_DTYPE_F32, 3000, 0);
        const dsopt_tensor to = out.tensor(), change = delta.tensor();
        ASSERT_OK(written.step(grad, [&](dsopt_step &step) { step.out = &to; }));
        ASSERT_OK(apart.step(grad, [&](dsopt_step &step) {
            step.out = &change;
            step.flags = DSOPT_STEP_DELTA;
        }));
        EXPECT_TRUE(same_bits(out.floats(), written.weight().floats()));
        EXPECT_EQ(apart.weight().text(), start.text());
        for (size_t i = 0; i < 3000; ++i) ASSERT_EQ(delta[i], out[i] - start[i]);
    }
}

TEST(StochasticRounding, IsRefusedIfItHasNoEffect) {
    const Context ctx = make_context(2);
    dsopt_optimizer *opt = nullptr;
    dsopt_optimizer_desc desc = stochastic_desc();
    desc.flags = DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED, "master"));
    desc = stochastic_desc();
    desc.compat = DSOPT_COMPAT_DEEPSPEED;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_UNSUPPORTED));
    desc.compat = DSOPT_COMPAT_NONE;
    desc.flags = DSOPT_OPTIMIZER_NO_MASTER; // the seed may be that of moments of groups that come later
    Trainer nearest(ctx, desc);
    EXPECT_TRUE(
        refused(nearest.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_BF16, 4, 1), "w", 0, 0, 8}}),
                DSOPT_ERR_UNSUPPORTED, "offset"));
    Trainer random(ctx, stochastic_desc());
    EXPECT_TRUE(refused(
        random.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_BF16, 4, 1), "w", 0, 0, INT64_MAX - 3}}),
        DSOPT_ERR_SHAPE, "offset"));
    EXPECT_TRUE(refused(random.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_F16, 4, 1), "half"}}),
                        DSOPT_ERR_UNSUPPORTED, "half"));
    EXPECT_NE(random.add_group(group_of(DSOPT_ALGORITHM_ADAM), {{Array(DSOPT_DTYPE_BF16, 4, 1), "w", 0, 0, -8}}),
              DSOPT_OK);
    DSOPT_NEW(dsopt_optimizer_desc, flat);
    flat.flags = DSOPT_OPTIMIZER_NO_MASTER;
    flat.masters = DSOPT_MASTERS_FLAT;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &flat, &opt), DSOPT_ERR_UNSUPPORTED, "masters"));
    EXPECT_EQ(opt, nullptr);
}

} // namespace step_rounding_tests
