// SPDX-License-Identifier: Apache-2.0
// Clipping by norm and by value, the policy for Inf and NaN, what the report tells, the skip budget.
#include "support/harness.h"

using namespace test;

namespace {

/// beta1 is 0, so exp_avg is the gradient as the rule saw it; no decay.
dsopt_group watching(double max_norm = 0) {
    dsopt_group group = group_of(DSOPT_ALGORITHM_ADAM, 1e-2, 0);
    group.beta1 = 0;
    group.max_norm = max_norm;
    return group;
}
double norm_of(const std::vector<Array> &grads) {
    long double sum = 0;
    for (const Array &grad : grads)
        for (const float g : grad.floats()) sum += static_cast<long double>(g) * g;
    return double(std::sqrt(sum));
}
void expect_near(double got, double wanted, double tolerance = 1e-12) {
    EXPECT_LE(std::fabs(got - wanted), tolerance * std::fabs(wanted)) << got << " instead of " << wanted;
}
std::vector<Array> times(const std::vector<Array> &grads, float factor) {
    std::vector<Array> list;
    for (const Array &grad : grads) {
        std::vector<float> values = grad.floats();
        for (float &value : values) value *= factor;
        list.emplace_back(DSOPT_DTYPE_F32, values);
    }
    return list;
}

class Clip : public testing::Test {
protected:
    Random random{3};
    const Context ctx = make_context(2);
    dsopt_optimizer_desc desc = empty();
    static dsopt_optimizer_desc empty() {
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        return desc;
    }
    std::vector<Array> grads(double size) { // of three dtypes
        return {Array(DSOPT_DTYPE_F16, random.floats(5000, -size, size)),
                Array(DSOPT_DTYPE_BF16, random.floats(9, -size, size)),
                Array(DSOPT_DTYPE_F32, random.floats(4096, -size, size))};
    }
    std::vector<Array> weights() {
        return {Array(DSOPT_DTYPE_F16, random.floats(5000)), Array(DSOPT_DTYPE_BF16, random.floats(9)),
                Array(DSOPT_DTYPE_F32, random.floats(4096))};
    }
};

TEST_F(Clip, DividesByNormOverMaxNormAndReportsTheUnscaledNorm) {
    const double scale = 64;
    for (const int32_t algorithm : kStandardRules)
        for (const double max_norm : {0.25, 1e6}) {
            const Scaler scaler = make_scaler(ctx, scale);
            desc.scaler = scaler.get();
            desc.max_norm = max_norm;
            const std::vector<Array> start = weights();
            Trainer clipped(ctx, desc, group_of(algorithm), start), reference(ctx, empty(), group_of(algorithm), start);
            for (int step = 0; step < 4; ++step) {
                const std::vector<Array> g = grads(8);
                ASSERT_OK(clipped.step(g));
                const dsopt_report report = clipped.report();
                const double norm = norm_of(g) / scale;
                expect_near(report.grad_norm, norm);
                expect_near(report.dense_norm, norm);
                EXPECT_EQ(report.expert_norm, 0);
                expect_near(report.divisor, scale * std::max(1.0, (norm + 1e-6) / max_norm));
                ASSERT_OK(reference.step(times(g, float(1 / report.divisor))));
                Snapshot got = clipped.snapshot();
                got.erase("scaler -1");
                got.erase("loss_scale -1");
                ASSERT_TRUE(same(got, reference.snapshot())) << "algorithm " << algorithm << ", max norm " << max_norm;
            }
        }
}

TEST_F(Clip, LeavesGradientsAloneUpToTheLimit) {
    desc.max_norm = 5.000002;
    Trainer trainer(ctx, desc, watching(), std::vector<Array>{Array(DSOPT_DTYPE_F32, 2, 1)});
    ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F32, {3, 4})}));
    EXPECT_EQ(trainer.report().divisor, 1);
    EXPECT_EQ(trainer.state("exp_avg", 0), (std::vector<float>{3, 4}));
    must(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 2.5)); // from the next step on
    ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F32, {3, 4})}));
    expect_near(trainer.report().divisor, (5 + 1e-6) / 2.5);
}

TEST_F(Clip, ByValueCutsUnscaledElementsAfterTheNorm) {
    const float scale = 8;
    const Scaler scaler = make_scaler(ctx, double(scale));
    desc.scaler = scaler.get();
    desc.max_value = 0.75;
    for (const double max_norm : {0.0, 2.0}) {
        desc.max_norm = max_norm;
        Trainer trainer(ctx, desc, watching(), std::vector<Array>{Array(DSOPT_DTYPE_F16, 5000, 1)});
        const Array given(DSOPT_DTYPE_F16, random.floats(5000, -10, 10));
        ASSERT_OK(trainer.step({given}));
        const float inverse = float(1 / trainer.report().divisor);
        std::vector<float> wanted = given.floats();
        for (float &g : wanted) g = std::clamp(g * inverse, -0.75f, 0.75f);
        EXPECT_TRUE(same_bits(trainer.state("exp_avg", 0), wanted));
        expect_near(trainer.report().grad_norm, norm_of({given}) / double(scale)); // before clipping by value
    }
}

TEST_F(Clip, ByValueLetsNanThroughAndCutsInfWhereThePolicyApplies) {
    desc.max_value = 2;
    desc.nonfinite = DSOPT_NONFINITE_APPLY;
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16}) {
        Trainer trainer(ctx, desc, watching(), std::vector<Array>{Array(dtype, 5, 1)});
        ASSERT_OK(trainer.step({Array(dtype, {kNaN, kInf, -kInf, 3, -1})}));
        EXPECT_TRUE(same_bits(trainer.state("exp_avg", 0), {kNaN, 2, -2, 2, -1})) << dtype_name(dtype);
    }
}

// --------------------------------------------------------------------------------------------------- Inf and NaN
class Nonfinite : public Clip {};

TEST_F(Nonfinite, AutoLooksOnlyWhereGradientsAreReadAnyway) {
    const Scaler scaler = make_scaler(ctx, 8, 1000, DSOPT_SCALER_SHARED);
    for (const int32_t policy : {DSOPT_NONFINITE_AUTO, DSOPT_NONFINITE_SKIP, DSOPT_NONFINITE_APPLY})
        for (int reader = 0; reader < 4; ++reader) { // nothing, clipping, clipping of the group, scaling
            desc.nonfinite = policy;
            desc.max_norm = reader == 1;
            desc.scaler = reader == 3 ? scaler.get() : nullptr;
            Trainer trainer(ctx, desc, watching(reader == 2),
                            std::vector<Array>{Array(DSOPT_DTYPE_BF16, 3, 1), Array(DSOPT_DTYPE_F32, 3, 1)});
            ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_BF16, 3, 1), Array(DSOPT_DTYPE_F32, {1, kNaN, kInf})}));
            const dsopt_report report = trainer.report();
            const bool looks = policy == DSOPT_NONFINITE_SKIP || reader != 0;
            const bool skips = policy != DSOPT_NONFINITE_APPLY && looks;
            SCOPED_TRACE(testing::Message() << "policy " << policy << ", reader " << reader);
            EXPECT_EQ(report.last_skipped, skips);
            EXPECT_EQ(report.nonfinite, looks ? 2 : 0);
            EXPECT_EQ(report.first_bad, looks ? 1 : -1);
            EXPECT_EQ(std::isnan(trainer.weight(1)[1]), !skips);
        }
}

TEST_F(Nonfinite, ReportNamesTheFirstBadTensorAndItsKind) {
    desc.nonfinite = DSOPT_NONFINITE_SKIP;
    Trainer trainer(ctx, desc);
    must(trainer.add_group(watching(), {{Array(DSOPT_DTYPE_F16, 3, 1), "a"},
                                        {Array(DSOPT_DTYPE_F16, 0, 1), "empty"},
                                        {Array(DSOPT_DTYPE_F32, 9000, 1), "Gewicht ü"},
                                        {Array(DSOPT_DTYPE_BF16, 3, 1), "c"}}));
    const auto step = [&](int64_t tensor, std::vector<std::pair<size_t, float>> bad) {
        std::vector<Array> grads = {Array(DSOPT_DTYPE_F16, 3, 1), Array(DSOPT_DTYPE_F16, 0, 1),
                                    Array(DSOPT_DTYPE_F32, 9000, 1), Array(DSOPT_DTYPE_BF16, 3, 1)};
        for (const auto &[place, value] : bad) grads[size_t(tensor)].set(place, value);
        must(trainer.step(grads));
        return trainer.report();
    };
    dsopt_report report = step(2, {{8999, -kInf}, {0, kInf}, {4096, kInf}});
    EXPECT_EQ(report.first_bad, 2);
    EXPECT_STREQ(report.first_bad_name, "Gewicht ü");
    EXPECT_EQ(report.kind, 1);
    EXPECT_EQ(report.nonfinite, 3);
    EXPECT_EQ(report.divisor, 0);
    report = step(2, {{8999, kNaN}, {0, kInf}}); // a NaN anywhere in the tensor
    EXPECT_EQ(report.kind, 2);
    report = step(3, {{2, kInf}});
    EXPECT_STREQ(report.first_bad_name, "c");
    report = step(0, {});
    EXPECT_EQ(report.first_bad, -1);
    EXPECT_EQ(report.first_bad_name, nullptr);
    EXPECT_EQ(report.kind, 0);
    EXPECT_EQ(report.nonfinite, 0);
    EXPECT_EQ(report.last_skipped, 0);
    EXPECT_EQ(report.skipped, 3);
    EXPECT_EQ(report.skipped_in_row, 0);
}

// -------------------------------------------------------------------------------------------------------- the report
class ClipReport : public Clip {};

TEST_F(ClipReport, TimesPhasesOnlyWhenAsked) {
    desc.max_norm = 1;
    for (const bool timing : {false, true}) {
        desc.flags = timing ? DSOPT_OPTIMIZER_TIMING : 0;
        Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM),
                        std::vector<Array>{Array(DSOPT_DTYPE_F16, 50000, 1)});
        ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_F16, 50000, 1)}));
        const dsopt_report report = trainer.report();
        for (const int phase :
             {DSOPT_MS_OVERFLOW_CHECK, DSOPT_MS_COMPUTE_NORM, DSOPT_MS_UNSCALE_AND_CLIP, DSOPT_MS_BASIC_STEP}) {
            EXPECT_EQ(report.ms[phase] > 0, timing) << phase;
            EXPECT_LT(report.ms[phase], 60000);
        }
        for (int phase = DSOPT_MS_COMPRESS; phase < 8; ++phase) EXPECT_EQ(report.ms[phase], 0);
    }
}

TEST_F(ClipReport, OnTheDeviceSaysTheSameAsTheHosts) {
    const Scaler scaler = make_scaler(ctx, 16, 1);
    desc.scaler = scaler.get();
    desc.max_norm = 0.5;
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), weights());
    for (int step = 0; step < 6; ++step) {
        std::vector<Array> g = grads(16);
        if (step == 2 || step == 3) g[1].set(0, kNaN);
        const Shared<float> device(DSOPT_REPORT_FLOATS, 77);
        ASSERT_OK(trainer.step(g, [&](dsopt_step &s) { s.report = device.data(); }));
        const dsopt_report host = trainer.report();
        std::vector<float> wanted(DSOPT_REPORT_FLOATS, 0.0f);
        wanted[DSOPT_REPORT_SKIPPED] = float(host.last_skipped);
        wanted[DSOPT_REPORT_GRAD_NORM] = float(host.grad_norm);
        wanted[DSOPT_REPORT_WEIGHT_NORM] = wanted[DSOPT_REPORT_UPDATE_NORM] = kNaN;
        wanted[DSOPT_REPORT_NONFINITE] = float(host.nonfinite);
        wanted[DSOPT_REPORT_FIRST_BAD] = float(host.first_bad);
        wanted[DSOPT_REPORT_DIVISOR] = float(host.divisor);
        wanted[DSOPT_REPORT_SCALE_USED] = float(host.scale_used);
        wanted[DSOPT_REPORT_SCALE_NEXT] = float(host.loss_scale);
        wanted[DSOPT_REPORT_SKIPPED_IN_ROW] = float(info_of(scaler).skipped_in_row);
        wanted[DSOPT_REPORT_REASONS] = float(host.reasons);
        EXPECT_TRUE(same_bits({device.begin(), device.end()}, wanted)) << "step " << step;
        EXPECT_EQ(host.last_skipped, step == 2 || step == 3);
        EXPECT_EQ(host.reasons & DSOPT_SKIP_GRADIENTS, host.last_skipped ? DSOPT_SKIP_GRADIENTS : 0);
    }
}

// ------------------------------------------------------------------------------------------------------- skip budget
TEST_F(ClipReport, SkipBudgetStopsTheRunUntilItIsForgiven) {
    const Scaler scaler = make_scaler(ctx, 1024);
    desc.scaler = scaler.get();
    desc.skip_budget = 3;
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), std::vector<Array>{Array(DSOPT_DTYPE_F16, 2, 1)});
    const std::vector<Array> good = {Array(DSOPT_DTYPE_F16, 2, 1)}, bad = {Array(DSOPT_DTYPE_F16, 2, kInf)};
    for (const auto *g : {&bad, &bad, &good, &bad, &bad, &bad}) ASSERT_OK(trainer.step(*g));
    const Snapshot before = trainer.snapshot();
    for (const auto *g : {&good, &bad}) {
        std::vector<Array> copy = *g;
        EXPECT_TRUE(refused(trainer.step(copy, [](dsopt_step &step) { step.flags = DSOPT_STEP_ZERO_GRADS; }),
                            DSOPT_ERR_SKIPS, "3"));
        EXPECT_EQ(copy[0].text(), (*g)[0].text());
    }
    EXPECT_TRUE(same(before, trainer.snapshot()));
    EXPECT_EQ(trainer.report().calls, 6);
    EXPECT_EQ(trainer.get(DSOPT_KEY_SKIP_BUDGET), 3);
    ASSERT_OK(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, 1));
    ASSERT_OK(trainer.step(bad));
    synchronize(); // a step does not wait for the one before
    EXPECT_TRUE(refused(trainer.step(good), DSOPT_ERR_SKIPS));
    ASSERT_OK(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, 0));
    for (int i = 0; i < 20; ++i) ASSERT_OK(trainer.step(bad));
    ASSERT_OK(trainer.step(good));
    EXPECT_EQ(trainer.report().skipped_in_row, 0);
}

TEST_F(Clip, RefusesLimitsThatAreNoLimits) {
    dsopt_optimizer *opt = nullptr;
    desc = empty();
    desc.max_value = 1e-60; // zero in fp32
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "max_value"));
    for (const double value : {-1.0, HUGE_VAL, double(kNaN)}) {
        desc = empty();
        desc.max_norm = value;
        EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "max_norm"));
        desc = empty();
        desc.max_value = value;
        EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "max_value"));
        Trainer trainer(ctx, empty(), watching(), std::vector<Array>{});
        for (const int32_t key : {DSOPT_KEY_MAX_NORM, DSOPT_KEY_MAX_VALUE, DSOPT_KEY_GROUP_MAX_NORM})
            EXPECT_TRUE(refused(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, key, value), DSOPT_ERR_ARGUMENT));
    }
    desc = empty();
    desc.skip_budget = -1;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "skip_budget"));
    desc = empty();
    desc.nonfinite = 3;
    EXPECT_TRUE(refused(dsopt_optimizer_create(ctx.get(), &desc, &opt), DSOPT_ERR_ARGUMENT, "nonfinite"));
    EXPECT_EQ(opt, nullptr);
}

} // namespace
