// SPDX-License-Identifier: Apache-2.0
// dsopt_step.hyper, rows of hyper-parameters in backend memory, and DSOPT_STEP_NO_NAN, in step and in apply.
#include "support/functional.h"

using namespace test;

namespace apply_hyper_rows_tests {

constexpr int kEntries = DSOPT_HYPER_FLOATS;

/// One row per group. NaN selects the value of the host.
struct Rows {
    float values[2][kEntries];
    /// Returns a copy in device memory.
    const float *data() const { return on_device(values)[0]; }
    Rows() {
        for (auto &row : values)
            for (float &value : row) value = kNaN;
    }
};

struct HyperEntry {
    int32_t index, key;
    const char *name;
    float values[3];
};
constexpr HyperEntry kHyperEntries[] = {
    {DSOPT_HYPER_LR, DSOPT_KEY_LR, "lr", {0.003f, 0.0f, 0.05f}},
    {DSOPT_HYPER_BETA1, DSOPT_KEY_BETA1, "beta1", {0.7f, 0.0f, 0.95f}},
    {DSOPT_HYPER_BETA2, DSOPT_KEY_BETA2, "beta2", {0.98f, 0.5f, 0.9999f}},
    {DSOPT_HYPER_EPS, DSOPT_KEY_EPS, "eps", {1e-3f, 1e-6f, 0.1f}},
    {DSOPT_HYPER_WEIGHT_DECAY, DSOPT_KEY_WEIGHT_DECAY, "weight decay", {0.3f, 0.0f, 0.01f}},
    {DSOPT_HYPER_GROUP_MAX_NORM, DSOPT_KEY_GROUP_MAX_NORM, "max_norm of a group", {0.3f, 5.0f, 0.01f}},
    {DSOPT_HYPER_MAX_NORM, DSOPT_KEY_MAX_NORM, "max_norm", {0.3f, 5.0f, 0.01f}},
};

/// Returns the state that a skipped step must not change. This excludes the scaler and, in standard mode, the schedule
/// of the 1-bit family with the state that the freezing call initializes.
Snapshot state_kept_by_skip(Snapshot all, const OptimizerSettings &settings) {
    std::erase_if(all, [&](const auto &entry) {
        const std::string name = entry.first.substr(0, entry.first.find(' '));
        const bool of_schedule = name == "schedule" || name == "active" || name == "anchor" ||
                                 name == "exp_avg_sq_fresh" || name == "worker_error" || name == "server_error";
        return name == "loss_scale" || name == "scaler" || (settings.compat == DSOPT_COMPAT_NONE && of_schedule);
    });
    return all;
}

std::vector<OptimizerSettings> all_settings() {
    std::vector<OptimizerSettings> list;
    for (const int32_t algorithm : kBothModes)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
            for (const bool masters : {false, true})
                for (const int ranks : {1, 2}) {
                    if (ranks == 2 && (!is_onebit(algorithm) || masters)) continue;
                    OptimizerSettings settings;
                    settings.algorithm = algorithm;
                    settings.compat = compat;
                    settings.kind = masters ? DtypeMix::flat : DtypeMix::f32;
                    settings.ranks = ranks;
                    settings.max_norm = 2;
                    settings.group_norm = 1;
                    settings.sizes = {70, 0, 33, 5};
                    list.push_back(settings);
                }
    return list;
}

class StepHyper : public testing::TestWithParam<OptimizerSettings> {
protected:
    const OptimizerSettings settings = GetParam();
    /// Runs body() on two identical optimizers, first with step and then with apply.
    void with_pairs(const OptimizerSettings &of,
                    const std::function<void(int rank, Stepper &, Stepper &)> &body) const {
        for (const bool pure : {false, true})
            with_settings(of, [&](int rank, const Context &ctx, const CommId *ids) {
                Stepper a(ctx, of, pure, false, ids, rank),
                    b(ctx, of, pure, false, ids != nullptr ? ids + 1 : nullptr, rank);
                if (!pure) a.allocate(), b.allocate();
                body(rank, a, b);
            });
    }
};
INSTANTIATE_TEST_SUITE_P(, StepHyper, testing::ValuesIn(all_settings()),
                         [](const auto &info) { return info.param.name(); });

LABEL(long_emulated);
TEST_P(StepHyper, IgnoresValuesOfNaN) {
    with_pairs(settings, [&](int rank, Stepper &with, Stepper &without) {
        Rows rows;
        for (int64_t call = 1; call <= 8; ++call) {
            if (call == 3) // unused entries may be 0
                rows.values[0][kEntries - 1] = rows.values[1][kEntries - 1] = rows.values[1][DSOPT_HYPER_MAX_NORM] = 0;
            const std::vector<Array> grads = gradients_of(settings, rank, call);
            must(with.step(grads, [&](dsopt_step &step) { step.hyper = rows.data(); }));
            must(without.step(grads));
            ASSERT_TRUE(same(with.snapshot(), without.snapshot())) << call;
        }
    });
}

LABEL(long_emulated);
TEST_P(StepHyper, MatchesOptimizerSet) {
    for (const HyperEntry &entry : kHyperEntries)
        for (const int group : {1, int(DSOPT_ALL_GROUPS)}) {
            if (entry.index == DSOPT_HYPER_MAX_NORM && group != DSOPT_ALL_GROUPS) continue;
            SCOPED_TRACE(std::string(entry.name) + " of group " + std::to_string(group));
            with_pairs(settings, [&](int rank, Stepper &with, Stepper &setting) {
                const Snapshot before = with.snapshot();
                for (int64_t call = 1; call <= 8; ++call) {
                    const float value = entry.values[call % 3];
                    Rows rows;
                    for (int g = 0; g < 2; ++g)
                        if ((group == DSOPT_ALL_GROUPS || group == g) &&
                            (entry.index != DSOPT_HYPER_MAX_NORM || g == 0))
                            rows.values[g][entry.index] = value;
                    const std::vector<Array> grads = gradients_of(settings, rank, call);
                    Shared<float> reports[2];
                    for (Stepper *side : {&with, &setting}) {
                        Shared<float> &report = reports[side == &setting];
                        report.assign(DSOPT_REPORT_FLOATS, -7);
                        if (side == &setting) must(dsopt_optimizer_set(side->opt(), group, entry.key, double(value)));
                        ASSERT_OK(side->step(grads, [&](dsopt_step &step) {
                            step.report = report.data();
                            if (side == &with) step.hyper = rows.data();
                        }));
                        EXPECT_EQ(report[DSOPT_REPORT_SKIPPED], 0) << call;
                    }
                    ASSERT_TRUE(same_bits(reports[0], reports[1])) << call;
                    ASSERT_TRUE(same(with.snapshot(), setting.snapshot())) << call;
                }
                EXPECT_FALSE(same(before, with.snapshot()));
            });
        }
}

LABEL_PARAMS(long_emulated, "*Flat*");
LABEL_PARAMS(long_emulated, "*Compat*");
TEST_P(StepHyper, MatchesOptimizerSetOfAllValuesAtOnce) {
    with_pairs(settings, [&](int rank, Stepper &with, Stepper &setting) {
        Random random(9);
        for (int64_t call = 1; call <= 12; ++call) {
            Rows rows;
            for (const HyperEntry &entry : kHyperEntries)
                for (int g = 0; g < 2; ++g) {
                    const float value = entry.values[random.below(3)];
                    const bool of_all = entry.index == DSOPT_HYPER_MAX_NORM;
                    if (of_all && g == 1) continue;
                    rows.values[g][entry.index] = value;
                    must(dsopt_optimizer_set(setting.opt(), of_all ? int(DSOPT_ALL_GROUPS) : g, entry.key,
                                             double(value)));
                }
            const std::vector<Array> grads = gradients_of(settings, rank, call);
            must(with.step(grads, [&](dsopt_step &step) { step.hyper = rows.data(); }));
            must(setting.step(grads));
            ASSERT_TRUE(same(with.snapshot(), setting.snapshot())) << call;
        }
    });
}

LABEL(long_emulated);
TEST_P(StepHyper, TurnsClippingOffWithZero) {
    with_pairs(settings, [&](int rank, Stepper &with, Stepper &setting) {
        Rows rows;
        rows.values[0][DSOPT_HYPER_GROUP_MAX_NORM] = rows.values[1][DSOPT_HYPER_GROUP_MAX_NORM] = 0;
        rows.values[0][DSOPT_HYPER_MAX_NORM] = 0;
        must(dsopt_optimizer_set(setting.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_GROUP_MAX_NORM, 0));
        must(dsopt_optimizer_set(setting.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 0));
        for (int64_t call = 1; call <= 6; ++call) {
            const std::vector<Array> grads = gradients_of(settings, rank, call);
            must(with.step(grads, [&](dsopt_step &step) { step.hyper = rows.data(); }));
            must(setting.step(grads));
            ASSERT_TRUE(same(with.snapshot(), setting.snapshot())) << call;
        }
    });
}

LABEL(long_emulated);
TEST_P(StepHyper, SkipsOnInvalidValues) {
    struct Bad {
        int group, index;
        float value;
    };
    std::vector<Bad> list;
    for (const int index : {DSOPT_HYPER_LR, DSOPT_HYPER_EPS, DSOPT_HYPER_WEIGHT_DECAY, DSOPT_HYPER_GROUP_MAX_NORM})
        for (const float value : {-1e-3f, kInf, -kInf})
            for (const int group : {0, 1}) list.push_back({group, index, value});
    for (const int index : {DSOPT_HYPER_BETA1, DSOPT_HYPER_BETA2})
        for (const float value : {1.0f, -0.1f, kInf, -kInf, 1.5f})
            for (const int group : {0, 1}) list.push_back({group, index, value});
    for (const float value : {-1e-3f, kInf}) list.push_back({0, DSOPT_HYPER_MAX_NORM, value});
    for (const float value : {1.0f, -1.0f, kInf}) list.push_back({1, DSOPT_HYPER_MAX_NORM, value});
    for (const float value : {1.0f, -1.0f, kInf})
        for (const int group : {0, 1}) list.push_back({group, kEntries - 1, value});
    OptimizerSettings scaled = settings;
    scaled.scaled = true;
    // One optimizer gets invalid rows, the other one `skip`. All state is identical, including scaler and schedules.
    with_pairs(scaled, [&](int rank, Stepper &with, Stepper &skipping) {
        int64_t call = 0;
        const auto good = [&] {
            const std::vector<Array> grads = gradients_of(scaled, rank, ++call);
            for (Stepper *side : {&with, &skipping}) must(side->step(grads));
            ASSERT_TRUE(same(with.snapshot(), skipping.snapshot())) << call;
        };
        for (size_t i = 0; i < list.size(); ++i) {
            if (i % 5 == 4) good(); // the first invalid values come before any good step
            Rows rows;
            rows.values[list[i].group][list[i].index] = list[i].value;
            SCOPED_TRACE("group " + std::to_string(list[i].group) + ", entry " + std::to_string(list[i].index) + ": " +
                         std::to_string(list[i].value));
            const std::vector<Array> grads = gradients_of(scaled, rank, ++call);
            const int32_t skip = 1;
            Shared<float> reports[2];
            const Snapshot before = with.snapshot();
            for (Stepper *side : {&with, &skipping}) {
                Shared<float> &report = reports[side == &skipping];
                report.assign(DSOPT_REPORT_FLOATS, -7);
                ASSERT_OK(side->step(grads, [&](dsopt_step &step) {
                    step.report = report.data();
                    if (side == &with) step.hyper = rows.data();
                    if (side == &skipping) step.skip = on_device(skip);
                }));
            }
            ASSERT_EQ(reports[0][DSOPT_REPORT_SKIPPED], 1);
            const int peer = settings.ranks > 1 ? DSOPT_SKIP_PEER : 0;
            EXPECT_EQ(int(reports[0][DSOPT_REPORT_REASONS]), DSOPT_SKIP_HYPER | peer);
            EXPECT_EQ(int(reports[1][DSOPT_REPORT_REASONS]), DSOPT_SKIP_CALLER | peer);
            EXPECT_EQ(reports[0][DSOPT_REPORT_DIVISOR], 0);
            reports[0][DSOPT_REPORT_REASONS] = reports[1][DSOPT_REPORT_REASONS];
            EXPECT_TRUE(same_bits(reports[0], reports[1]));
            const Snapshot after = with.snapshot();
            ASSERT_TRUE(same(after, skipping.snapshot()));
            EXPECT_NE(after.at("scaler -1"), before.at("scaler -1"));
            ASSERT_TRUE(same(state_kept_by_skip(before, settings), state_kept_by_skip(after, settings)));
        }
        good();
    });
}

TEST_P(StepHyper, CannotTurnClippingOn) {
    OptimizerSettings other = settings;
    other.max_norm = other.group_norm = 0;
    with_pairs(other, [&](int rank, Stepper &with, Stepper &) {
        const std::vector<Array> grads = gradients_of(other, rank, 1);
        for (const int index : {DSOPT_HYPER_GROUP_MAX_NORM, DSOPT_HYPER_MAX_NORM})
            for (const float value : {0.5f, 0.0f}) {
                Rows rows;
                rows.values[0][index] = value;
                Shared<float> report(DSOPT_REPORT_FLOATS, -7);
                const Snapshot before = with.snapshot();
                must(with.step(grads, [&](dsopt_step &step) {
                    step.hyper = rows.data();
                    step.report = report.data();
                }));
                EXPECT_EQ(report[DSOPT_REPORT_SKIPPED], value != 0);
                EXPECT_EQ((int(report[DSOPT_REPORT_REASONS]) & DSOPT_SKIP_HYPER) != 0, value != 0);
                if (value != 0) {
                    EXPECT_TRUE(
                        same(state_kept_by_skip(before, settings), state_kept_by_skip(with.snapshot(), settings)));
                }
            }
    });
}

TEST(StepHyperRow, SkipsOnEveryRankIfOneIsInvalid) {
    OptimizerSettings settings;
    settings.algorithm = DSOPT_ALGORITHM_ADAMW;
    settings.ranks = 2;
    with_settings(settings, [&](int rank, const Context &ctx, const CommId *ids) {
        Stepper side(ctx, settings, true, false, ids, rank);
        Rows rows;
        if (rank == 1) rows.values[1][DSOPT_HYPER_LR] = -1;
        Shared<float> report(DSOPT_REPORT_FLOATS);
        const Snapshot before = side.snapshot();
        must(side.step(gradients_of(settings, 0, 1), [&](dsopt_step &step) {
            step.hyper = rows.data();
            step.report = report.data();
        }));
        EXPECT_EQ(report[DSOPT_REPORT_SKIPPED], 1);
        EXPECT_EQ(int(report[DSOPT_REPORT_REASONS]), rank == 1 ? DSOPT_SKIP_HYPER : DSOPT_SKIP_PEER);
        EXPECT_TRUE(same(before, side.snapshot()));
    });
}

TEST(StepHyperRow, IsRefusedWithLrAndIfMisaligned) {
    const Context ctx = make_context(1);
    const OptimizerSettings settings;
    for (const bool pure : {false, true}) {
        Stepper side(ctx, settings, pure);
        const Rows rows;
        const float lr[2] = {0, 0};
        EXPECT_TRUE(refused(side.step(gradients_of(settings, 0, 1),
                                      [&](dsopt_step &step) { step.lr = on_device(lr), step.hyper = rows.data(); }),
                            DSOPT_ERR_ARGUMENT, "hyper"));
        const auto *misaligned = reinterpret_cast<const float *>(reinterpret_cast<uintptr_t>(rows.data()) + 2);
        EXPECT_TRUE(refused(side.step(gradients_of(settings, 0, 1), [&](dsopt_step &step) { step.hyper = misaligned; }),
                            DSOPT_ERR_ALIGNMENT));
    }
}

TEST_P(StepHyper, SkipsTheFirstCallOnInvalidRates) {
    with_pairs(settings, [&](int rank, Stepper &by_hyper, Stepper &by_lr) {
        Rows rows;
        rows.values[1][DSOPT_HYPER_LR] = kInf;
        const float rates[2] = {1e-3f, kNaN};
        const std::vector<Array> grads = gradients_of(settings, rank, 1);
        for (Stepper *side : {&by_hyper, &by_lr}) {
            Shared<float> report(DSOPT_REPORT_FLOATS, -7);
            must(side->step(grads, [&](dsopt_step &step) {
                step.report = report.data();
                (side == &by_hyper ? step.hyper : step.lr) = side == &by_hyper ? rows.data() : on_device(rates);
            }));
            EXPECT_EQ(report[DSOPT_REPORT_SKIPPED], 1);
            EXPECT_TRUE(int(report[DSOPT_REPORT_REASONS]) & DSOPT_SKIP_HYPER);
        }
    });
}

// ------------------------------------------------------------------------------------------------- reports without NaN
LABEL(long_emulated);
TEST(NoNan, ReportsMinusOneForNaN) {
    const Context ctx = make_context(1);
    for (const int32_t algorithm : kBothModes)
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
            for (const DtypeMix kind : {DtypeMix::f32, DtypeMix::per_tensor, DtypeMix::flat})
                for (const bool scaled : {false, true})
                    for (const double max_norm : {0.0, 0.5}) {
                        OptimizerSettings settings;
                        settings.algorithm = algorithm;
                        settings.compat = compat;
                        settings.kind = kind;
                        settings.scaled = scaled;
                        settings.max_norm = max_norm;
                        settings.sizes = {70, 0, 33, 5};
                        SCOPED_TRACE(settings.name());
                        for (const bool pure : {false, true}) {
                            Stepper plain(ctx, settings, pure), without(ctx, settings, pure);
                            for (int64_t call = 1; call <= 6; ++call) {
                                std::vector<Array> grads = gradients_of(settings, 0, call);
                                if (call == 3) grads[0].set(3, kNaN);
                                if (call == 4) grads[2].set(3, kInf);
                                const int32_t skip = call == 5;
                                const float scale = call == 6 ? kNaN : 2.0f;
                                Shared<float> reports[2];
                                for (Stepper *side : {&plain, &without}) {
                                    Shared<float> &report = reports[side == &without];
                                    report.assign(DSOPT_REPORT_FLOATS, kNaN);
                                    must(side->step(grads, [&](dsopt_step &step) {
                                        step.report = report.data();
                                        step.skip = on_device(skip);
                                        step.grad_scale = on_device(scale);
                                        step.flags = side == &without ? DSOPT_STEP_NO_NAN : 0;
                                    }));
                                }
                                for (size_t i = 0; i < reports[0].size(); ++i)
                                    EXPECT_EQ(reports[1][i], std::isnan(reports[0][i]) ? -1 : reports[0][i])
                                        << "call " << call << ", entry " << i;
                                ASSERT_TRUE(same(plain.snapshot(), without.snapshot()));
                            }
                        }
                    }
}

TEST(NoNan, ReportsALossScaleOfNaNAsMinusOne) {
    const Context ctx = make_context(1);
    OptimizerSettings settings;
    settings.scaled = true;
    Stepper side(ctx, settings, true);
    const float nan = kNaN;
    side.caller_memory->blocks[side.caller_memory->index("loss_scale")].write(
        {reinterpret_cast<const char *>(&nan), 4});
    Shared<float> report(DSOPT_REPORT_FLOATS);
    const Snapshot before = side.snapshot();
    must(side.step(gradients_of(settings, 0, 1), [&](dsopt_step &step) {
        step.report = report.data();
        step.flags = DSOPT_STEP_NO_NAN;
    }));
    for (const float value : report) EXPECT_FALSE(std::isnan(value));
    EXPECT_EQ(report[DSOPT_REPORT_SKIPPED], 1);
    EXPECT_EQ(report[DSOPT_REPORT_REASONS], DSOPT_SKIP_SCALE);
    EXPECT_EQ(report[DSOPT_REPORT_SCALE_USED], -1);
    EXPECT_EQ(side.snapshot().at("param 0"), before.at("param 0"));
}

TEST(NoNan, IsRefusedWithoutAReport) {
    const Context ctx = make_context(1);
    const OptimizerSettings settings;
    for (const bool pure : {false, true}) {
        Stepper side(ctx, settings, pure);
        EXPECT_TRUE(
            refused(side.step(gradients_of(settings, 0, 1), [](dsopt_step &step) { step.flags = DSOPT_STEP_NO_NAN; }),
                    DSOPT_ERR_UNSUPPORTED, "NO_NAN"));
    }
}

} // namespace apply_hyper_rows_tests
