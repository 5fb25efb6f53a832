// SPDX-License-Identifier: Apache-2.0
// Reports: dsopt_optimizer_report, the report that a step writes to memory, and log messages.
#include "clip.h"

using namespace test;

namespace clip_report_tests {

const std::vector<int64_t> kSizes = {5000, 0, 33, 4097};

TEST(Report, HasInitialValuesBeforeTheFirstStep) {
    const Trainer trainer(shapes_of({3, 4}), make_group(DSOPT_ALGORITHM_ADAMW));
    const dsopt_report report = report_of(trainer.opt());
    EXPECT_EQ(report.calls, 0);
    EXPECT_EQ(report.skipped, 0);
    EXPECT_EQ(report.skipped_in_row, 0);
    EXPECT_EQ(report.nonfinite, 0);
    EXPECT_EQ(report.first_bad, -1);
    EXPECT_EQ(report.last_skipped, 0);
    EXPECT_TRUE(std::isnan(report.grad_norm) && std::isnan(report.weight_norm) && std::isnan(report.update_norm));
    EXPECT_EQ(report.state_bytes, 2 * 4 * 7 + 2 * 4); // moments and step counts
    size_t workspace = 0;
    must(dsopt_optimizer_workspace(trainer.opt(), &workspace));
    EXPECT_EQ(report.workspace_bytes, int64_t(workspace));
}

TEST(Report, OmitsNormsThatAreNotRequested) {
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

class ReportNorms : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, ReportNorms, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST_P(ReportNorms, AgreeWithDoublePrecision) {
    for (const int32_t param : kDtypes)
        for (const int32_t grad : kDtypes) {
            const Trainer trainer(shapes_of(kSizes, param, grad), make_group(GetParam()),
                                  optimizer_desc(1e9, DSOPT_OPTIMIZER_REPORT_NORMS), context_desc(3));
            std::vector<Array> before, after; // the masters, or fp32 parameters
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
            EXPECT_NEAR(report.grad_norm, exact_norm(trainer.model.grads), 1e-13 * report.grad_norm);
            EXPECT_NEAR(report.weight_norm, exact_norm(before), 1e-13 * report.weight_norm);
            // For LAMB, the report contains the norm of the update before it is subtracted and rounded.
            EXPECT_NEAR(report.update_norm, std::sqrt(change),
                        (GetParam() == DSOPT_ALGORITHM_LAMB ? 1e-4 : 1e-7) * report.update_norm);
            EXPECT_EQ(report.dense_norm, report.grad_norm); // there are no expert parameters
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

TEST_P(ReportNorms, IgnoreAbsentGradients) {
    Trainer trainer(shapes_of(kSizes), make_group(GetParam()), optimizer_desc(1e9));
    trainer.model.grads[0].set(0, NAN);
    trainer.grads[0].data = nullptr;
    must(trainer.step(trainer.arguments()));
    const double norm = exact_norm(trainer.model.grads, 1);
    EXPECT_NEAR(report_of(trainer.opt()).grad_norm, norm, 1e-13 * norm);
    EXPECT_EQ(report_of(trainer.opt()).nonfinite, 0);
}

TEST(ReportNormsRange, NeitherOverflowsNorUnderflows) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16})
        for (const double max_norm : {1e30, 1.0}) { // the square of 1e30 overflows fp32
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
                if (g == 3e38f) { // the first step: exp_avg is a tenth of the clipped gradient
                    EXPECT_NEAR(trainer.first("exp_avg") / (0.1 * stored / wanted), 1, 1e-6);
                }
            }
        }
}

TEST(Report, HasNoUpdateNormBeforeAStepOrAfterASkippedOne) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_LAMB}) {
        const Trainer trainer(shapes_of({33}), make_group(algorithm), optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS));
        EXPECT_TRUE(std::isnan(trainer.report().weight_norm) && std::isnan(trainer.report().update_norm));
        const std::vector<float> floats = step_with_report(trainer, trainer.arguments());
        EXPECT_FALSE(std::isnan(trainer.report().weight_norm) || std::isnan(trainer.report().update_norm));
        EXPECT_EQ(floats[DSOPT_REPORT_UPDATE_NORM], float(trainer.report().update_norm));
        EXPECT_TRUE(std::isnan(floats[DSOPT_REPORT_GRAD_NORM])) << "not requested";
        const int32_t skip = 1;
        dsopt_step step = trainer.arguments();
        step.skip = on_device(skip);
        must(trainer.step(step));
        EXPECT_TRUE(std::isnan(trainer.report().update_norm));
    }
}

TEST(Report, TimesPhasesOnlyIfRequested) {
    const Context ctx = make_context(2);
    dsopt_optimizer_desc desc = optimizer_desc(1);
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

TEST(ReportInMemory, MatchesTheReportOfTheHost) {
    Random random(3);
    const Context ctx = make_context(2);
    const Scaler scaler = make_scaler(ctx, 16, 1);
    dsopt_optimizer_desc desc = optimizer_desc(0.5);
    desc.scaler = scaler.get();
    Trainer trainer(ctx, desc, group_of(DSOPT_ALGORITHM_ADAM), mixed_arrays(random));
    for (int step = 0; step < 6; ++step) {
        std::vector<Array> g = mixed_arrays(random, 16);
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

// -------------------------------------------------------------------------------------------------------- log messages
/// A context that collects log messages, and an optimizer with one parameter and a scaler.
struct Logged {
    std::vector<std::string> lines;
    Context context;
    Scaler scaler;
    std::unique_ptr<Trainer> trainer;

    explicit Logged(int32_t level = DSOPT_LOG_INFO, bool scaled = true) {
        dsopt_context_desc with_log = context_desc();
        with_log.log_level = level;
        with_log.user = this;
        with_log.log = [](void *user, int32_t level, const char *text) {
            EXPECT_EQ(level, DSOPT_LOG_INFO);
            static_cast<Logged *>(user)->lines.emplace_back(text);
        };
        context = make_context(with_log);
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.nonfinite = DSOPT_NONFINITE_SKIP;
        if (scaled) desc.scaler = new_scaler();
        trainer = std::make_unique<Trainer>(context, desc, make_group(DSOPT_ALGORITHM_ADAMW),
                                            std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
        lines.clear(); // messages of the context
    }
    dsopt_scaler *new_scaler() {
        DSOPT_NEW(dsopt_scaler_desc, scaler_desc);
        scaler_desc.init = 1024;
        scaler_desc.window = 2;
        dsopt_scaler *created = nullptr;
        must(dsopt_scaler_create(context.get(), &scaler_desc, &created));
        scaler.reset(created);
        return created;
    }
    void step(double value) { must(trainer->step({Array(DSOPT_DTYPE_F32, 3, float(value))})); }
    /// Returns the messages that a report logs.
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
    EXPECT_EQ(logged.report(), Lines{}) << "nothing has changed";
    logged.step(kInf);
    logged.step(1);
    logged.step(kInf);
    EXPECT_EQ(logged.report(), Lines{"call 4: 2 steps were skipped since the last report; "
                                     "the loss scale changed from 512 to 128"});
    logged.step(1);
    EXPECT_EQ(logged.report(), Lines{}) << "neither has changed";
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

TEST(ReportLog, StartsFromTheScaleAtCreationOfTheOptimizer) {
    Logged logged(DSOPT_LOG_INFO, false);
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.scaler = logged.new_scaler();
    must(dsopt_scaler_set(desc.scaler, DSOPT_SCALE_VALUE, 32, nullptr));
    logged.trainer = std::make_unique<Trainer>(logged.context, desc, make_group(DSOPT_ALGORITHM_ADAMW),
                                               std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
    EXPECT_EQ(logged.report(), Lines{});
}

TEST(ReportLog, StartsFromTheFirstReportIfTheScalerWasInUse) {
    Logged logged;
    logged.step(kInf);
    must(dsopt_scaler_detach(logged.scaler.get()));
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.nonfinite = DSOPT_NONFINITE_SKIP;
    desc.scaler = logged.scaler.get();
    const auto make = [&] {
        logged.trainer = std::make_unique<Trainer>(logged.context, desc, make_group(DSOPT_ALGORITHM_ADAMW),
                                                   std::vector<Array>{Array(DSOPT_DTYPE_F32, 3, 1)});
    };
    make();
    EXPECT_EQ(logged.report(), Lines{}) << "another optimizer changed the scale";
    logged.step(kInf);
    EXPECT_EQ(logged.report(), Lines{"call 1: 1 step was skipped since the last report; "
                                     "the loss scale changed from 512 to 256"});
    // The caller changes the scale with dsopt_scaler_update.
    desc.scaler = logged.new_scaler();
    const int32_t overflow = 1;
    must(dsopt_scaler_update(desc.scaler, on_device(overflow), nullptr));
    make();
    EXPECT_EQ(logged.report(), Lines{});
}

TEST(ReportLog, WritesAllDigitsOfAScale) {
    Logged logged;
    const auto report = [&](double scale) {
        must(dsopt_scaler_set(logged.scaler.get(), DSOPT_SCALE_OVERRIDE, scale, nullptr));
        return logged.report();
    };
    EXPECT_EQ(report(4194304), Lines{"call 0: the loss scale changed from 1024 to 4194304"});
    EXPECT_EQ(report(2147483648), Lines{"call 0: the loss scale changed from 4194304 to 2147483648"});
    EXPECT_EQ(report(4294967296), Lines{"call 0: the loss scale changed from 2147483648 to 4294967296"});
}

TEST(ReportLog, LogsOnlySkippedStepsWithoutAScaler) {
    Logged logged(DSOPT_LOG_INFO, false);
    logged.step(NAN);
    logged.step(NAN);
    EXPECT_EQ(logged.report(), Lines{"call 2: 2 steps were skipped since the last report"});
}

TEST(ReportLog, CountsFromZeroAfterAResetOfTheCounters) {
    Logged logged(DSOPT_LOG_INFO, false);
    for (int i = 0; i < 3; ++i) logged.step(kInf);
    EXPECT_EQ(logged.report().size(), 1u);
    must(dsopt_optimizer_reset(logged.trainer->opt(), DSOPT_RESET_COUNTERS, nullptr));
    EXPECT_EQ(logged.report(), Lines{});
    logged.step(kInf);
    EXPECT_EQ(logged.report(), Lines{"call 1: 1 step was skipped since the last report"});
}

TEST(ReportLog, LogsNothingBelowInfoOrIfTheReportFails) {
    Logged quiet(DSOPT_LOG_WARN);
    quiet.step(kInf);
    EXPECT_EQ(quiet.report(), Lines{});
    Logged logged;
    logged.step(kInf);
    logged.lines.clear();
    dsopt_report report{}; // without a size
    EXPECT_EQ(dsopt_optimizer_report(logged.trainer->opt(), &report), DSOPT_ERR_VERSION);
    EXPECT_EQ(logged.lines, Lines{});
    EXPECT_EQ(logged.report().size(), 1u) << "a failed report does not drop messages";
}

} // namespace clip_report_tests
