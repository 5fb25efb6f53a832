// SPDX-License-Identifier: Apache-2.0
// Policies for Inf and NaN in gradients, norms and scales, skipped steps, and the skip budget.
#include "clip.h"

using namespace test;

namespace clip_nonfinite_tests {

const std::vector<int64_t> kSizes = {5000, 0, 33, 4097};

/// Returns the state and parameters that a skipped step must not change: all except the loss scale.
Snapshot without_scaler(Trainer &trainer) {
    Snapshot all = trainer.snapshot();
    all.erase("scaler -1");
    all.erase("loss_scale -1");
    return all;
}

TEST(NonfinitePolicy, AutoChecksOnlyGradientsThatAreReadAnyway) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 8, 1000, DSOPT_SCALER_SHARED);
    dsopt_optimizer_desc desc = optimizer_desc();
    for (const int32_t policy : {DSOPT_NONFINITE_AUTO, DSOPT_NONFINITE_SKIP, DSOPT_NONFINITE_APPLY})
        for (int reader = 0; reader < 4; ++reader) { // none, max_norm, max_norm of the group, scaler
            desc.nonfinite = policy;
            desc.max_norm = reader == 1;
            desc.scaler = reader == 3 ? scaler.get() : nullptr;
            Trainer trainer(ctx, desc, gradient_as_moment(reader == 2),
                            std::vector<Array>{Array(DSOPT_DTYPE_BF16, 3, 1), Array(DSOPT_DTYPE_F32, 3, 1)});
            const Shared<float> floats(DSOPT_REPORT_FLOATS, -7);
            ASSERT_OK(trainer.step({Array(DSOPT_DTYPE_BF16, 3, 1), Array(DSOPT_DTYPE_F32, {1, kNaN, kInf})},
                                   [&](dsopt_step &step) { step.report = floats.data(); }));
            const dsopt_report report = trainer.report();
            const bool checks = policy == DSOPT_NONFINITE_SKIP || reader != 0;
            const bool skips = policy != DSOPT_NONFINITE_APPLY && checks;
            SCOPED_TRACE(testing::Message() << "policy " << policy << ", reader " << reader);
            EXPECT_EQ(report.last_skipped, skips);
            EXPECT_EQ(report.nonfinite, checks ? 2 : 0);
            EXPECT_EQ(floats[DSOPT_REPORT_NONFINITE], checks ? 2 : 0);
            EXPECT_EQ(report.first_bad, checks ? 1 : -1);
            EXPECT_EQ(report.kind, checks ? DSOPT_FOUND_NAN : DSOPT_FOUND_NOTHING);
            EXPECT_TRUE(std::isnan(report.grad_norm)) << "the norm is NaN or not computed";
            EXPECT_EQ(std::isnan(trainer.weight(1)[1]), !skips);
        }
}

TEST(NonfinitePolicy, ReportsTheFirstTensorAndTheKind) {
    const Context ctx = make_context(2);
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.nonfinite = DSOPT_NONFINITE_SKIP;
    Trainer trainer(ctx, desc);
    must(trainer.add_group(gradient_as_moment(), {{Array(DSOPT_DTYPE_F16, 3, 1), "a"},
                                                  {Array(DSOPT_DTYPE_F16, 0, 1), "empty"},
                                                  {Array(DSOPT_DTYPE_F32, 9000, 1), "Gewicht ü"},
                                                  {Array(DSOPT_DTYPE_BF16, 3, 1), "c"}}));
    const auto step = [&](int64_t tensor, std::vector<std::pair<size_t, float>> bad) {
        std::vector<Array> grads = {Array(DSOPT_DTYPE_F16, 3, 1), Array(DSOPT_DTYPE_F16, 0, 1),
                                    Array(DSOPT_DTYPE_F32, 9000, 1), Array(DSOPT_DTYPE_BF16, 3, 1)};
        for (const auto &[index, value] : bad) grads[size_t(tensor)].set(index, value);
        must(trainer.step(grads));
        return trainer.report();
    };
    dsopt_report report = step(2, {{8999, -kInf}, {0, kInf}, {4096, kInf}});
    EXPECT_EQ(report.first_bad, 2);
    EXPECT_STREQ(report.first_bad_name, "Gewicht ü");
    EXPECT_EQ(report.kind, 1);
    EXPECT_EQ(report.nonfinite, 3);
    EXPECT_EQ(report.divisor, 0);
    report = step(2, {{8999, kNaN}, {0, kInf}}); // any NaN of the tensor determines the kind
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

struct Policy {
    int32_t policy;
    double max_norm;
    bool checks, skips;
};
class NonfiniteGradients : public testing::TestWithParam<Policy> {
protected:
    dsopt_optimizer_desc desc() const {
        dsopt_optimizer_desc desc = optimizer_desc(GetParam().max_norm);
        desc.nonfinite = GetParam().policy;
        return desc;
    }
};
INSTANTIATE_TEST_SUITE_P(
    Policies, NonfiniteGradients,
    testing::Values(Policy{DSOPT_NONFINITE_AUTO, 0, false, false}, Policy{DSOPT_NONFINITE_AUTO, 1, true, true},
                    Policy{DSOPT_NONFINITE_SKIP, 0, true, true}, Policy{DSOPT_NONFINITE_SKIP, 1, true, true},
                    Policy{DSOPT_NONFINITE_APPLY, 0, false, false}, Policy{DSOPT_NONFINITE_APPLY, 1, true, false}));

LABEL(one_of_many);
LABEL_PARAMS(long_emulated, "[1-5]");
TEST_P(NonfiniteGradients, AreFoundInAnyElement) {
    const auto [policy, max_norm, checks, skips] = GetParam();
    for (const int32_t algorithm : kAlgorithms)
        for (const int32_t grad : kDtypes)
            for (const double bad : {double(kInf), -double(kInf), double(NAN)})
                for (const size_t tensor : {size_t(0), size_t(3)})
                    for (const bool last : {false, true}) {
                        const Trainer trainer(shapes_of(kSizes, DSOPT_DTYPE_F32, grad), make_group(algorithm), desc());
                        trainer.train(1);
                        const std::string before = trainer.text();
                        trainer.model.grads[tensor].set(last ? kSizes[tensor] - 1 : 0, float(bad));
                        const std::vector<float> floats = step_with_report(trainer, trainer.arguments());
                        const dsopt_report report = report_of(trainer.opt());
                        EXPECT_EQ(report.last_skipped, skips);
                        EXPECT_EQ(report.skipped, skips);
                        EXPECT_EQ(report.calls, 2);
                        EXPECT_EQ(report.nonfinite, checks);
                        EXPECT_EQ(report.first_bad, checks ? int64_t(tensor) : -1);
                        EXPECT_EQ(report.kind, !checks ? 0 : std::isnan(bad) ? 2 : 1);
                        EXPECT_EQ(report.first_bad_name == nullptr ? "" : report.first_bad_name,
                                  checks ? "p" + std::to_string(tensor) : "");
                        EXPECT_EQ(floats[DSOPT_REPORT_SKIPPED], skips);
                        EXPECT_EQ(floats[DSOPT_REPORT_NONFINITE], checks);
                        EXPECT_EQ(floats[DSOPT_REPORT_FIRST_BAD], checks ? float(tensor) : -1);
                        EXPECT_EQ(bool(same(trainer.text(), before)), skips);
                        if (skips) {
                            EXPECT_EQ(report.divisor, 0);
                            EXPECT_FALSE(std::isfinite(report.grad_norm));
                        } else {
                            EXPECT_EQ(steps(trainer.opt()), std::vector<int32_t>(4, 2));
                            EXPECT_TRUE(
                                std::isnan(trainer.model.params[tensor][size_t(last ? kSizes[tensor] - 1 : 0)]));
                        }
                    }
}

LABEL(one_of_many);
TEST_P(NonfiniteGradients, AreCountedAndTheFirstTensorIsReported) {
    const auto [policy, max_norm, checks, skips] = GetParam();
    const Trainer trainer(shapes_of({100, 50000, 3}), make_group(DSOPT_ALGORITHM_ADAMW), desc(), context_desc(4));
    int64_t count = 0;
    for (int64_t i = 17; i < 50000; i += 911, ++count) trainer.model.grads[1].set(i, i % 2 ? kInf : NAN);
    trainer.model.grads[2].set(1, -kInf);
    must(trainer.step(trainer.arguments()));
    const dsopt_report report = report_of(trainer.opt());
    EXPECT_EQ(report.nonfinite, checks ? count + 1 : 0);
    EXPECT_EQ(report.first_bad, checks ? 1 : -1);
    EXPECT_EQ(report.last_skipped, skips);
    // Every element of several leaves is NaN.
    for (int64_t i = 0; i < 50000; ++i) trainer.model.grads[1].set(size_t(i), NAN);
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(report_of(trainer.opt()).nonfinite, checks ? 50001 : 0);
    EXPECT_EQ(report_of(trainer.opt()).kind, checks ? 2 : 0);
}

LABEL(one_of_many);
TEST_P(NonfiniteGradients, ExcludeLargeFiniteOnes) {
    const Trainer trainer(shapes_of({5000}), make_group(DSOPT_ALGORITHM_ADAMW), desc());
    for (int64_t i = 0; i < 5000; ++i) trainer.model.grads[0].set(i, i % 2 ? 3.4e38f : -3.4e38f);
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(report_of(trainer.opt()).last_skipped, 0);
    EXPECT_EQ(report_of(trainer.opt()).nonfinite, 0);
}

// ---------------------------------------------------------------------------------------------------- norms and scales
class NonfiniteCallerNorms : public testing::TestWithParam<float> {};
INSTANTIATE_TEST_SUITE_P(Overflows, NonfiniteCallerNorms,
                         testing::Values(-1.0f, -1e-30f, std::numeric_limits<float>::infinity(),
                                         -std::numeric_limits<float>::infinity(),
                                         std::numeric_limits<float>::quiet_NaN()));

TEST_P(NonfiniteCallerNorms, SkipTheStepUnlessThePolicyIsApply) {
    const Context context = make_context();
    for (const int32_t policy : {DSOPT_NONFINITE_AUTO, DSOPT_NONFINITE_SKIP, DSOPT_NONFINITE_APPLY})
        for (const double max_norm : {0.0, 1.0})
            for (const size_t bad : {size_t(0), size_t(1)})
                for (const bool scaled : {false, true}) {
                    const Scaler scaler = make_scaler(context, 8);
                    dsopt_optimizer_desc desc = optimizer_desc(max_norm);
                    desc.nonfinite = policy;
                    desc.scaler = scaled ? scaler.get() : nullptr;
                    Trainer trainer(context, desc);
                    must(trainer.add_group(make_group(DSOPT_ALGORITHM_ADAMW), {{Array(DSOPT_DTYPE_F32, 10, 1)}}));
                    must(trainer.add_group(make_group(DSOPT_ALGORITHM_LAMB), {{Array(DSOPT_DTYPE_F16, 20, 1)}}));
                    (void)trainer.snapshot(); // allocates the state
                    const Snapshot before = without_scaler(trainer);
                    float norms[] = {1, 1};
                    norms[bad] = GetParam();
                    const Shared<float> floats(DSOPT_REPORT_FLOATS, -7);
                    must(trainer.step({Array(DSOPT_DTYPE_F32, 10, 1), Array(DSOPT_DTYPE_F16, 20, 1)},
                                      [&](dsopt_step &step) {
                                          step.grad_norms = on_device(norms);
                                          step.report = floats.data();
                                      }));
                    const bool skipped = policy != DSOPT_NONFINITE_APPLY;
                    EXPECT_EQ(floats[DSOPT_REPORT_SKIPPED], skipped);
                    EXPECT_EQ(trainer.report().last_skipped, skipped);
                    EXPECT_EQ(bool(same(without_scaler(trainer), before)), skipped);
                    EXPECT_EQ(info_of(scaler).scale, skipped && scaled ? 4 : 8);
                }
}

TEST(NonfiniteGradScale, SkipsTheStepIfNormsAreComputed) {
    const Context context = make_context();
    for (const float scale : {0.0f, -1.0f, kInf, kNaN})
        for (const bool scaled : {false, true}) { // norms are computed for the scaler, or for max_norm
            const Scaler scaler = make_scaler(context, 8);
            dsopt_optimizer_desc desc = optimizer_desc(scaled ? 0 : 1);
            desc.scaler = scaled ? scaler.get() : nullptr;
            Trainer trainer(context, desc, make_group(DSOPT_ALGORITHM_ADAMW),
                            std::vector<Array>{Array(DSOPT_DTYPE_F16, 5000, 1), Array(DSOPT_DTYPE_F32, 33, 1)});
            const Snapshot before = without_scaler(trainer);
            must(trainer.step({Array(DSOPT_DTYPE_F16, 5000, 1), Array(DSOPT_DTYPE_F32, 33, 1)},
                              [&](dsopt_step &step) { step.grad_scale = on_device(scale); }));
            EXPECT_EQ(trainer.report().last_skipped, 1) << scale;
            EXPECT_TRUE(same(without_scaler(trainer), before));
        }
}

// ------------------------------------------------------------------------------------------------------- skipped steps
TEST(SkippedSteps, AreCountedInARowUntilAStepIsTaken) {
    const Trainer trainer(shapes_of({10}), make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(1.0));
    const auto step = [&](bool bad) {
        trainer.model.make_gradients(1);
        if (bad) trainer.model.grads[0].set(3, NAN);
        must(trainer.step(trainer.arguments()));
        const dsopt_report report = report_of(trainer.opt());
        return std::vector<int64_t>{report.calls,        report.skipped,   report.skipped_in_row,
                                    report.last_skipped, report.nonfinite, report.first_bad};
    };
    using Row = std::vector<int64_t>;
    EXPECT_EQ(step(false), (Row{1, 0, 0, 0, 0, -1}));
    EXPECT_EQ(step(true), (Row{2, 1, 1, 1, 1, 0}));
    EXPECT_EQ(step(true), (Row{3, 2, 2, 1, 1, 0}));
    EXPECT_EQ(step(false), (Row{4, 2, 0, 0, 0, -1}));
    EXPECT_EQ(step(true), (Row{5, 3, 1, 1, 1, 0}));
    EXPECT_EQ(steps(trainer.opt()), std::vector<int32_t>{2});
    EXPECT_EQ(get(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_CALLS), 5);
}

TEST(SkipBudget, RefusesStepsUntilItIsSetAgain) {
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 1024);
    dsopt_optimizer_desc desc = optimizer_desc();
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
    synchronize(); // a step does not wait for the previous one
    EXPECT_TRUE(refused(trainer.step(good), DSOPT_ERR_SKIPS));
    ASSERT_OK(dsopt_optimizer_set(trainer.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, 0));
    for (int i = 0; i < 20; ++i) ASSERT_OK(trainer.step(bad));
    ASSERT_OK(trainer.step(good));
    EXPECT_EQ(trainer.report().skipped_in_row, 0);
}

} // namespace clip_nonfinite_tests
