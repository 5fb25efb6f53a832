// SPDX-License-Identifier: Apache-2.0
// Norms, clipping, non-finite gradients, and what the report says of them.
#include "support/harness.h"

using namespace test;

namespace {

const std::vector<int64_t> kSizes = {5000, 0, 33, 4097};
constexpr double kInf = std::numeric_limits<double>::infinity();

double squares(const Array &buffer) {
    double sum = 0;
    for (int64_t i = 0; i < buffer.numel(); ++i) sum += double(buffer[size_t(i)]) * double(buffer[size_t(i)]);
    return sum;
}
double norm_of(const std::vector<Array> &buffers, size_t begin = 0, size_t end = SIZE_MAX) {
    double sum = 0;
    for (size_t i = begin; i < std::min(end, buffers.size()); ++i) sum += squares(buffers[i]);
    return std::sqrt(sum);
}

/// A step with a report in memory beside that of the optimizer.
std::vector<float> step_with_report(const Trainer &trainer, dsopt_step step) {
    const Shared<float> report(DSOPT_REPORT_FLOATS, -7);
    step.report = report.data();
    must(trainer.step(step));
    return report;
}

// ---------------------------------------------------------------------------------------------------------- the report
TEST(Report, BeforeTheFirstStep) {
    const Trainer trainer(shapes_of({3, 4}), make_group(DSOPT_ALGORITHM_ADAMW));
    const dsopt_report report = report_of(trainer.opt());
    EXPECT_EQ(report.calls, 0);
    EXPECT_EQ(report.skipped, 0);
    EXPECT_EQ(report.skipped_in_row, 0);
    EXPECT_EQ(report.nonfinite, 0);
    EXPECT_EQ(report.first_bad, -1);
    EXPECT_EQ(report.last_skipped, 0);
    EXPECT_TRUE(std::isnan(report.grad_norm) && std::isnan(report.weight_norm) && std::isnan(report.update_norm));
    EXPECT_EQ(report.state_bytes, 2 * 4 * 7 + 2 * 4); // moments, counters
    size_t workspace = 0;
    must(dsopt_optimizer_workspace(trainer.opt(), &workspace));
    EXPECT_EQ(report.workspace_bytes, int64_t(workspace));
}

TEST(Report, NormsNotAskedForAreNotComputed) {
    const Trainer trainer(shapes_of(kSizes), make_group(DSOPT_ALGORITHM_ADAMW));
    const std::vector<float> floats = step_with_report(trainer, trainer.arguments());
    const dsopt_report report = report_of(trainer.opt());
    EXPECT_TRUE(std::isnan(report.grad_norm) && std::isnan(report.weight_norm) && std::isnan(report.update_norm));
    EXPECT_TRUE(std::isnan(floats[DSOPT_REPORT_GRAD_NORM]) && std::isnan(floats[DSOPT_REPORT_UPDATE_NORM]));
    EXPECT_EQ(report.divisor, 1);
    EXPECT_EQ(floats[DSOPT_REPORT_FIRST_BAD], -1);
    EXPECT_EQ(floats[DSOPT_REPORT_NONFINITE], 0);
    EXPECT_EQ(report.calls, 1);
}

TEST(Report, CountsNonFiniteGradientsThatAreApplied) {
    for (const bool reads : {true, false})
        for (const bool by_group : {false, true}) {
            dsopt_optimizer_desc desc = optimizer_desc(reads && !by_group ? 1.0 : 0.0);
            desc.nonfinite = DSOPT_NONFINITE_APPLY;
            dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
            group.max_norm = reads && by_group ? 1.0 : 0.0;
            Trainer trainer(shapes_of(kSizes), group, desc);
            trainer.model.make_gradients(1);
            for (const size_t i : {3, 7, 32}) trainer.model.grads[2].set(i, i == 7 ? INFINITY : NAN);
            const std::vector<float> floats = step_with_report(trainer, trainer.arguments());
            const dsopt_report report = report_of(trainer.opt());
            EXPECT_TRUE(std::isnan(trainer.weight(2)[3])) << "it is applied";
            EXPECT_EQ(report.last_skipped, 0);
            EXPECT_EQ(report.nonfinite, reads ? 3 : 0);
            EXPECT_EQ(report.first_bad, reads ? 2 : -1);
            EXPECT_EQ(report.kind, reads ? DSOPT_FOUND_NAN : DSOPT_FOUND_NOTHING);
            EXPECT_EQ(floats[DSOPT_REPORT_NONFINITE], reads ? 3 : 0);
            EXPECT_TRUE(std::isnan(report.grad_norm)) << "of a NaN, or not computed";
        }
}

class ReportNorms : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, ReportNorms, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST_P(ReportNorms, AgreeWithDoublePrecision) {
    for (const int32_t param : kDtypes)
        for (const int32_t grad : kDtypes) {
            const Trainer trainer(shapes_of(kSizes, param, grad), make_group(GetParam()),
                                  optimizer_desc(1e9, DSOPT_OPTIMIZER_REPORT_NORMS), context_desc(3));
            std::vector<Array> before, after; // in fp32: the masters, or the parameters
            const auto copy = [&](std::vector<Array> &to) {
                for (size_t i = 0; i < kSizes.size(); ++i) {
                    to.emplace_back(DSOPT_DTYPE_F32, size_t(kSizes[i]), 0.0f);
                    if (param == DSOPT_DTYPE_F32)
                        std::memcpy(to[i].data(), trainer.model.params[i].data(), to[i].bytes());
                    else
                        must(dsopt_optimizer_export(trainer.opt(), state_index(trainer.opt(), int64_t(i), "master"),
                                                    to[i].data(), to[i].bytes()));
                }
            };
            trainer.train(1);
            copy(before);
            trainer.model.make_gradients(2);
            const std::vector<float> floats = step_with_report(trainer, trainer.arguments());
            copy(after);
            double change = 0;
            for (size_t i = 0; i < kSizes.size(); ++i)
                for (int64_t k = 0; k < kSizes[i]; ++k)
                    change += std::pow(double(after[i][size_t(k)]) - double(before[i][size_t(k)]), 2);
            const dsopt_report report = report_of(trainer.opt());
            EXPECT_NEAR(report.grad_norm, norm_of(trainer.model.grads), 1e-13 * report.grad_norm);
            EXPECT_NEAR(report.weight_norm, norm_of(before), 1e-13 * report.weight_norm);
            // The subtraction of an element-wise rule is exact to fp32; LAMB's norm is that of the update before it is
            // subtracted.
            EXPECT_NEAR(report.update_norm, std::sqrt(change),
                        (GetParam() == DSOPT_ALGORITHM_LAMB ? 1e-4 : 1e-7) * report.update_norm);
            EXPECT_EQ(report.dense_norm, report.grad_norm); // there are no experts
            EXPECT_EQ(report.expert_norm, 0);
            EXPECT_EQ(floats[DSOPT_REPORT_SKIPPED], 0);
            EXPECT_EQ(floats[DSOPT_REPORT_GRAD_NORM], float(report.grad_norm));
            EXPECT_EQ(floats[DSOPT_REPORT_WEIGHT_NORM], float(report.weight_norm));
            EXPECT_EQ(floats[DSOPT_REPORT_UPDATE_NORM], float(report.update_norm));
            EXPECT_EQ(floats[DSOPT_REPORT_DIVISOR], float(report.divisor));
            EXPECT_EQ(floats[DSOPT_REPORT_SCALE_USED], 1); // there is no scaler
            EXPECT_EQ(floats[DSOPT_REPORT_SCALE_NEXT], 1);
            EXPECT_EQ(floats[DSOPT_REPORT_EXPERT_NORM], 0);
            for (int i = DSOPT_REPORT_SKIPPED_IN_ROW; i < DSOPT_REPORT_FLOATS; ++i)
                EXPECT_EQ(floats[size_t(i)], 0) << i;
        }
}

TEST_P(ReportNorms, AreThoseOfUnscaledGradients) {
    const Trainer trainer(shapes_of(kSizes), make_group(GetParam()), optimizer_desc(1e9));
    const float scale = 1000;
    dsopt_step step = trainer.arguments();
    step.grad_scale = on_device(scale);
    must(trainer.step(step));
    const double norm = norm_of(trainer.model.grads) / scale;
    EXPECT_NEAR(report_of(trainer.opt()).grad_norm, norm, 1e-13 * norm);
    EXPECT_EQ(report_of(trainer.opt()).divisor, 1000);
}

TEST_P(ReportNorms, LeaveAbsentGradientsOut) {
    Trainer trainer(shapes_of(kSizes), make_group(GetParam()), optimizer_desc(1e9));
    trainer.model.grads[0].set(0, NAN);
    trainer.grads[0].data = nullptr;
    must(trainer.step(trainer.arguments()));
    const double norm = norm_of(trainer.model.grads, 1);
    EXPECT_NEAR(report_of(trainer.opt()).grad_norm, norm, 1e-13 * norm);
    EXPECT_EQ(report_of(trainer.opt()).nonfinite, 0);
}

TEST(ReportNormsOfHugeAndTinyGradients, NeitherOverflowNorVanish) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16})
        for (const double max_norm : {1e30, 1.0}) { // the squares of 1e30 are past fp32
            const Trainer trainer(shapes_of({2, 2}, dtype, dtype), make_group(DSOPT_ALGORITHM_ADAMW, 0),
                                  optimizer_desc(max_norm));
            for (const float g : {3e38f, 1e30f, 1e-38f, 0x1p-133f}) {
                for (const Array &grad : trainer.model.grads)
                    for (size_t i = 0; i < 2; ++i) grad.set(i, g);
                must(trainer.step(trainer.arguments()));
                const double stored = double(trainer.model.grads[0][0]), norm = 2 * stored;
                EXPECT_EQ(trainer.report().grad_norm, norm);
                EXPECT_EQ(trainer.report().skipped, 0);
                const double wanted = std::max(1.0, (norm + 1e-6) / max_norm);
                EXPECT_NEAR(trainer.report().divisor, wanted, 1e-13 * wanted);
                if (g == 3e38f) { // the first step: the moment is a tenth of what was left of it
                    EXPECT_NEAR(trainer.first("exp_avg") / (0.1 * stored / wanted), 1, 1e-6);
                }
            }
        }
}

TEST(Report, NormOfAnUpdateIsUnknownBeforeTheFirstStepAndAfterASkippedOne) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_LAMB}) {
        const Trainer trainer(shapes_of({33}), make_group(algorithm), optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS));
        EXPECT_TRUE(std::isnan(trainer.report().weight_norm) && std::isnan(trainer.report().update_norm));
        const std::vector<float> floats = step_with_report(trainer, trainer.arguments());
        EXPECT_FALSE(std::isnan(trainer.report().weight_norm) || std::isnan(trainer.report().update_norm));
        EXPECT_EQ(floats[DSOPT_REPORT_UPDATE_NORM], float(trainer.report().update_norm));
        EXPECT_TRUE(std::isnan(floats[DSOPT_REPORT_GRAD_NORM])) << "nothing asks for it";
        const int32_t skip = 1;
        dsopt_step step = trainer.arguments();
        step.skip = on_device(skip);
        must(trainer.step(step));
        EXPECT_TRUE(std::isnan(trainer.report().update_norm));
    }
}

// ------------------------------------------------------------------------------------------------------------ clipping
class Clipping : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, Clipping, testing::ValuesIn(kAlgorithms), algorithm_name);

/// What gradients of a parameter were divided by, seen in the first moment after one step from zero.
double divisor_seen(const Trainer &trainer, int64_t param) {
    const std::vector<float> m = exported(trainer.opt(), param, "exp_avg");
    double with = 0, without = 0;
    for (size_t i = 0; i < m.size(); ++i) {
        with += std::fabs(double(m[i]));
        without += std::fabs(double(trainer.model.grads[size_t(param)][size_t(int64_t(i))]));
    }
    return 0.1 * without / with;
}

TEST_P(Clipping, GroupsClipByThemselvesAndTheLargerDivisorHolds) {
    dsopt_group tight = make_group(GetParam(), 0), loose = tight, none = tight;
    tight.max_norm = 0.01;
    loose.max_norm = 1e6;
    for (const double of_all : {0.0, 1e5, 0.5})
        for (const float scale : {1.0f, 2.0f})
            for (const bool tight_first : {true, false}) {
                SCOPED_TRACE(testing::Message() << of_all << ", scale " << scale << ", tight first " << tight_first);
                Trainer trainer(shapes_of({1000, 2000, 3000}), optimizer_desc(of_all));
                trainer.add(tight_first ? tight : none, 1);
                trainer.add(loose, 1);
                trainer.add(tight_first ? none : tight, 1);
                dsopt_step step = trainer.arguments();
                step.grad_scale = on_device(scale);
                must(trainer.step(step));
                const size_t place = tight_first ? 0 : 2;
                const auto divisor = [&](double norm, double limit) {
                    return scale * (limit > 0 ? std::max(1.0, (norm / double(scale) + 1e-6) / limit) : 1.0);
                };
                const double all = divisor(norm_of(trainer.model.grads), of_all),
                             own = divisor(norm_of(trainer.model.grads, place, place + 1), 0.01);
                ASSERT_GT(own, all);
                for (size_t i = 0; i < 3; ++i) {
                    const double wanted = i == place ? own : all;
                    EXPECT_NEAR(divisor_seen(trainer, int64_t(i)), wanted, 1e-6 * wanted) << "group " << i;
                }
                const double first = tight_first ? own : all; // group 0
                EXPECT_NEAR(report_of(trainer.opt()).divisor, first, 1e-13 * first);
            }
}

TEST_P(Clipping, WithAScaleUsesTheUnscaledNorm) {
    const float scale = 128;
    for (const double max_norm : {0.25, 1e5}) {
        const Trainer trainer(shapes_of(kSizes), make_group(GetParam(), 0), optimizer_desc(max_norm));
        dsopt_step step = trainer.arguments();
        step.grad_scale = on_device(scale);
        must(trainer.step(step));
        const double wanted = 128 * std::max(1.0, (norm_of(trainer.model.grads) / 128 + 1e-6) / max_norm);
        EXPECT_NEAR(report_of(trainer.opt()).divisor, wanted, 1e-13 * wanted);
        EXPECT_NEAR(divisor_seen(trainer, 0), wanted, 1e-6 * wanted);
    }
}

// Gradients of 3s and 4s, so that every norm is a whole number and the caller's fp32 norm has no error.
TEST_P(Clipping, ByGivenNormsHasTheBitsOfTheEnginesOwn) {
    dsopt_group group = make_group(GetParam());
    group.max_norm = 1.5;
    for (const float scale : {1.0f, 4.0f}) {
        Trainer own(shapes_of({2, 2}), optimizer_desc(2.0)), given(shapes_of({2, 2}), optimizer_desc(2.0));
        for (Trainer *trainer : {&own, &given}) {
            trainer->add(group, 1);
            trainer->add(group, 1);
            for (const Array &grad : trainer->model.grads) {
                grad.set(0, 3 * scale);
                grad.set(1, 4 * scale);
            }
        }
        const float norms[] = {5 * scale, 5 * scale};
        for (int t = 0; t < 3; ++t) {
            dsopt_step step = own.arguments();
            step.grad_scale = on_device(scale);
            must(own.step(step));
            step = given.arguments();
            step.grad_scale = on_device(scale);
            step.grad_norms = on_device(norms);
            must(given.step(step));
        }
        EXPECT_TRUE(same(own.text(), given.text()));
        EXPECT_EQ(report_of(given.opt()).divisor, report_of(own.opt()).divisor);
        EXPECT_EQ(report_of(given.opt()).grad_norm, report_of(own.opt()).grad_norm);
        EXPECT_EQ(report_of(given.opt()).grad_norm, 5 * std::sqrt(2.0));
    }
}

TEST_P(Clipping, GivenNormsReplaceReadingTheGradients) {
    const Trainer trainer(shapes_of({2}), make_group(GetParam(), 0), optimizer_desc(1.0));
    const float norm = 1e6f; // not theirs
    dsopt_step step = trainer.arguments();
    step.grad_norms = on_device(norm);
    must(trainer.step(step));
    EXPECT_NEAR(divisor_seen(trainer, 0), 1e6, 2);
    EXPECT_EQ(report_of(trainer.opt()).grad_norm, 1e6);
}

class GivenNorms : public testing::TestWithParam<float> {};
INSTANTIATE_TEST_SUITE_P(Overflows, GivenNorms,
                         testing::Values(-1.0f, -1e-30f, std::numeric_limits<float>::infinity(),
                                         -std::numeric_limits<float>::infinity(),
                                         std::numeric_limits<float>::quiet_NaN()));

TEST_P(GivenNorms, ThatSayOverflowSkipTheStepUnlessThePolicyIsApply) {
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
                    (void)trainer.snapshot();  // the state is there from now on
                    const auto watched = [&] { // of a skipped step; the scaler moves
                        Snapshot all = trainer.snapshot();
                        all.erase("scaler -1");
                        all.erase("loss_scale -1");
                        return all;
                    };
                    const Snapshot before = watched();
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
                    EXPECT_EQ(bool(same(watched(), before)), skipped);
                    EXPECT_EQ(info_of(scaler).scale, skipped && scaled ? 4 : 8);
                }
}

// ------------------------------------------------------------------------------------------------ non-finite gradients
struct Policy {
    int32_t policy;
    double max_norm;
    bool looks, skips;
};
class NonFinite : public testing::TestWithParam<Policy> {
protected:
    dsopt_optimizer_desc desc() const {
        dsopt_optimizer_desc desc = optimizer_desc(GetParam().max_norm);
        desc.nonfinite = GetParam().policy;
        return desc;
    }
};
INSTANTIATE_TEST_SUITE_P(
    Policies, NonFinite,
    testing::Values(Policy{DSOPT_NONFINITE_AUTO, 0, false, false}, Policy{DSOPT_NONFINITE_AUTO, 1, true, true},
                    Policy{DSOPT_NONFINITE_SKIP, 0, true, true}, Policy{DSOPT_NONFINITE_SKIP, 1, true, true},
                    Policy{DSOPT_NONFINITE_APPLY, 0, false, false}, Policy{DSOPT_NONFINITE_APPLY, 1, true, false}));

LABEL(one_of_many);
LABEL_PARAMS(long_emulated, "[1-5]");
TEST_P(NonFinite, OneBadElementAnywhere) {
    const auto [policy, max_norm, looks, skips] = GetParam();
    for (const int32_t algorithm : kAlgorithms)
        for (const int32_t grad : kDtypes)
            for (const double bad : {kInf, -kInf, double(NAN)})
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
                        EXPECT_EQ(report.nonfinite, looks);
                        EXPECT_EQ(report.first_bad, looks ? int64_t(tensor) : -1);
                        EXPECT_EQ(report.kind, !looks ? 0 : std::isnan(bad) ? 2 : 1);
                        EXPECT_EQ(report.first_bad_name == nullptr ? "" : report.first_bad_name,
                                  looks ? "p" + std::to_string(tensor) : "");
                        EXPECT_EQ(floats[DSOPT_REPORT_SKIPPED], skips);
                        EXPECT_EQ(floats[DSOPT_REPORT_NONFINITE], looks);
                        EXPECT_EQ(floats[DSOPT_REPORT_FIRST_BAD], looks ? float(tensor) : -1);
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
TEST_P(NonFinite, AreCountedByElementAndTheFirstTensorIsNamed) {
    const auto [policy, max_norm, looks, skips] = GetParam();
    const Trainer trainer(shapes_of({100, 50000, 3}), make_group(DSOPT_ALGORITHM_ADAMW), desc(), context_desc(4));
    int64_t count = 0;
    for (int64_t i = 17; i < 50000; i += 911, ++count) trainer.model.grads[1].set(i, i % 2 ? float(kInf) : NAN);
    trainer.model.grads[2].set(1, float(-kInf));
    must(trainer.step(trainer.arguments()));
    const dsopt_report report = report_of(trainer.opt());
    EXPECT_EQ(report.nonfinite, looks ? count + 1 : 0);
    EXPECT_EQ(report.first_bad, looks ? 1 : -1);
    EXPECT_EQ(report.last_skipped, skips);
    // Every element of several leaves.
    for (int64_t i = 0; i < 50000; ++i) trainer.model.grads[1].set(size_t(i), NAN);
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(report_of(trainer.opt()).nonfinite, looks ? 50001 : 0);
    EXPECT_EQ(report_of(trainer.opt()).kind, looks ? 2 : 0);
}

LABEL(one_of_many);
TEST_P(NonFinite, LargeFiniteGradientsAreNone) {
    const Trainer trainer(shapes_of({5000}), make_group(DSOPT_ALGORITHM_ADAMW), desc());
    for (int64_t i = 0; i < 5000; ++i) trainer.model.grads[0].set(i, i % 2 ? 3.4e38f : -3.4e38f);
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(report_of(trainer.opt()).last_skipped, 0);
    EXPECT_EQ(report_of(trainer.opt()).nonfinite, 0);
}

TEST(NonFiniteScale, SkipsTheStepWhereNormsAreKnown) {
    const Context context = make_context();
    for (const float scale : {0.0f, -1.0f, float(kInf), float(NAN)})
        for (const bool scaled : {false, true}) { // that they are known by
            const Scaler scaler = make_scaler(context, 8);
            dsopt_optimizer_desc desc = optimizer_desc(scaled ? 0 : 1);
            desc.scaler = scaled ? scaler.get() : nullptr;
            Trainer trainer(context, desc, make_group(DSOPT_ALGORITHM_ADAMW),
                            std::vector<Array>{Array(DSOPT_DTYPE_F16, 5000, 1), Array(DSOPT_DTYPE_F32, 33, 1)});
            const auto watched = [&] { // the scaler moves
                Snapshot all = trainer.snapshot();
                all.erase("scaler -1");
                all.erase("loss_scale -1");
                return all;
            };
            const Snapshot before = watched();
            must(trainer.step({Array(DSOPT_DTYPE_F16, 5000, 1), Array(DSOPT_DTYPE_F32, 33, 1)},
                              [&](dsopt_step &step) { step.grad_scale = on_device(scale); }));
            EXPECT_EQ(trainer.report().last_skipped, 1) << scale;
            EXPECT_TRUE(same(watched(), before));
        }
}

TEST(SkippedSteps, AreCountedInARowUntilOneIsTaken) {
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

// ------------------------------------------------------------------------------------------------------------- the log
/// A context with a log, an optimizer with a scaler, and one parameter.
struct Logged {
    std::vector<std::string> lines;
    Context context;
    Scaler scaler;
    std::unique_ptr<Trainer> trainer;

    explicit Logged(int32_t level = DSOPT_LOG_INFO, bool scaled = true) {
        dsopt_context_desc desc = context_desc();
        desc.log_level = level;
        desc.user = this;
        desc.log = [](void *user, int32_t level, const char *text) {
            EXPECT_EQ(level, DSOPT_LOG_INFO);
            static_cast<Logged *>(user)->lines.emplace_back(text);
        };
        context = make_context(desc);
        dsopt_optimizer_desc how = optimizer_desc();
        how.nonfinite = DSOPT_NONFINITE_SKIP;
        if (scaled) how.scaler = new_scaler();
        trainer = std::make_unique<Trainer>(context, how, make_group(DSOPT_ALGORITHM_ADAMW),
                                            std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
        lines.clear(); // of the context
    }
    dsopt_scaler *new_scaler() {
        DSOPT_NEW(dsopt_scaler_desc, rules);
        rules.init = 1024;
        rules.window = 2;
        dsopt_scaler *made = nullptr;
        must(dsopt_scaler_create(context.get(), &rules, &made));
        scaler.reset(made);
        return made;
    }
    void step(double value) { must(trainer->step({Array(DSOPT_DTYPE_F32, 3, float(value))})); }
    /// What a report logs.
    std::vector<std::string> report() {
        lines.clear();
        (void)trainer->report();
        return lines;
    }
};
using Lines = std::vector<std::string>;

TEST(ReportLog, LogsSkippedStepsAndTheLossScaleOnce) {
    Logged logged;
    EXPECT_EQ(logged.report(), Lines{}) << "before the first step";
    logged.step(kInf);
    EXPECT_EQ(logged.lines, Lines{}) << "a step logs nothing";
    EXPECT_EQ(logged.report(), Lines{"call 1: 1 step was skipped since the last report; "
                                     "the loss scale changed from 1024 to 512"});
    EXPECT_EQ(logged.report(), Lines{}) << "nothing is new";
    logged.step(kInf);
    logged.step(1);
    logged.step(kInf);
    EXPECT_EQ(logged.report(), Lines{"call 4: 2 steps were skipped since the last report; "
                                     "the loss scale changed from 512 to 128"});
    logged.step(1);
    EXPECT_EQ(logged.report(), Lines{}) << "a step that changes neither";
    logged.step(1);
    logged.step(1);
    EXPECT_EQ(logged.report(), Lines{"call 7: the loss scale changed from 128 to 256"});
}

TEST(ReportLog, LogsAScaleThatTheCallerSet) {
    Logged logged;
    must(dsopt_scaler_set(logged.scaler.get(), DSOPT_SCALE_OVERRIDE, 4, nullptr));
    EXPECT_EQ(logged.report(), Lines{"call 0: the loss scale changed from 1024 to 4"});
    must(dsopt_scaler_set(logged.scaler.get(), DSOPT_SCALE_CLEAR_OVERRIDE, 0, nullptr));
    EXPECT_EQ(logged.report(), Lines{"call 0: the loss scale changed from 4 to 1024"});
}

TEST(ReportLog, BeginsWithTheScaleThatTheScalerHasWhenTheOptimizerIsMade) {
    Logged logged(DSOPT_LOG_INFO, false);
    dsopt_optimizer_desc how = optimizer_desc();
    how.scaler = logged.new_scaler();
    must(dsopt_scaler_set(how.scaler, DSOPT_SCALE_VALUE, 32, nullptr));
    logged.trainer = std::make_unique<Trainer>(logged.context, how, make_group(DSOPT_ALGORITHM_ADAMW),
                                               std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
    EXPECT_EQ(logged.report(), Lines{});
}

TEST(ReportLog, BeginsWithTheFirstReportWhereTheScalerWasInUse) {
    Logged logged;
    logged.step(kInf);
    must(dsopt_scaler_detach(logged.scaler.get()));
    dsopt_optimizer_desc how = optimizer_desc();
    how.nonfinite = DSOPT_NONFINITE_SKIP;
    how.scaler = logged.scaler.get();
    const auto make = [&] {
        logged.trainer = std::make_unique<Trainer>(logged.context, how, make_group(DSOPT_ALGORITHM_ADAMW),
                                                   std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
    };
    make();
    EXPECT_EQ(logged.report(), Lines{}) << "another optimizer's step changed the scale";
    logged.step(kInf);
    EXPECT_EQ(logged.report(), Lines{"call 1: 1 step was skipped since the last report; "
                                     "the loss scale changed from 512 to 256"});
    // As the caller's own code moves it.
    how.scaler = logged.new_scaler();
    const int32_t overflow = 1;
    must(dsopt_scaler_update(how.scaler, on_device(overflow), nullptr));
    make();
    EXPECT_EQ(logged.report(), Lines{});
}

TEST(ReportLog, GivesAllDigitsOfAScale) {
    Logged logged;
    const auto report = [&](double scale) {
        must(dsopt_scaler_set(logged.scaler.get(), DSOPT_SCALE_OVERRIDE, scale, nullptr));
        return logged.report();
    };
    EXPECT_EQ(report(4194304), Lines{"call 0: the loss scale changed from 1024 to 4194304"});
    EXPECT_EQ(report(2147483648), Lines{"call 0: the loss scale changed from 4194304 to 2147483648"});
    EXPECT_EQ(report(4294967296), Lines{"call 0: the loss scale changed from 2147483648 to 4294967296"});
}

TEST(ReportLog, WithoutAScalerLogsSkippedStepsAlone) {
    Logged logged(DSOPT_LOG_INFO, false);
    logged.step(NAN);
    logged.step(NAN);
    EXPECT_EQ(logged.report(), Lines{"call 2: 2 steps were skipped since the last report"});
}

TEST(ReportLog, CountsAgainAfterAResetOfTheCounters) {
    Logged logged(DSOPT_LOG_INFO, false);
    for (int i = 0; i < 3; ++i) logged.step(kInf);
    EXPECT_EQ(logged.report().size(), 1u);
    must(dsopt_optimizer_reset(logged.trainer->opt(), DSOPT_RESET_COUNTERS, nullptr));
    EXPECT_EQ(logged.report(), Lines{});
    logged.step(kInf);
    EXPECT_EQ(logged.report(), Lines{"call 1: 1 step was skipped since the last report"});
}

TEST(ReportLog, IsSilentBelowInfoAndWhereTheReportFails) {
    Logged quiet(DSOPT_LOG_WARN);
    quiet.step(kInf);
    EXPECT_EQ(quiet.report(), Lines{});
    Logged logged;
    logged.step(kInf);
    logged.lines.clear();
    dsopt_report report{}; // without a size
    EXPECT_EQ(dsopt_optimizer_report(logged.trainer->opt(), &report), DSOPT_ERR_VERSION);
    EXPECT_EQ(logged.lines, Lines{});
    EXPECT_EQ(logged.report().size(), 1u) << "what the failed report found is still new";
}

} // namespace
