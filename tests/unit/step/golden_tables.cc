// SPDX-License-Identifier: Apache-2.0
// Compares Adam and LAMB in compat mode with the tables of their specification, to 1e-6 of each number. The tables were
// computed from the formulas with IEEE fp32 operations. dsopt-replay compares with recorded runs of the original.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace step_golden_tables_tests {

constexpr int64_t kNumel = 5;

/// The specification's test data: exactly representable numbers, computed from integers.
float weight(int64_t i, int64_t tensor) { return (float((3 * i + 2 * tensor) % 8) - 3.5f) / 8; }
float gradient(int64_t i, int64_t call, int64_t rank, int64_t tensor) {
    return (float((7 * i + 3 * call + 5 * rank + 11 * tensor) % 16) - 7.5f) / 64;
}

using Row = std::vector<double>;

void expect_near(const std::vector<float> &got, const Row &wanted, const std::string &what) {
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); ++i)
        EXPECT_NEAR(got[i], wanted[i], 1e-6 * std::fabs(wanted[i])) << what << " " << i;
}

struct Golden {
    Golden(int32_t algorithm, uint32_t flags) : trainer(shapes_of({kNumel}), group_of(algorithm, flags), desc()) {
        for (int64_t i = 0; i < kNumel; ++i) trainer.model.params[0].set(i, weight(i, 0));
    }
    static dsopt_group group_of(int32_t algorithm, uint32_t flags) {
        dsopt_group group = make_group(algorithm, 0.01, flags);
        group.lr = 0.01;
        return group;
    }
    static dsopt_optimizer_desc desc() {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_REPORT_NORMS);
        desc.compat = DSOPT_COMPAT_DEEPSPEED;
        return desc;
    }
    void step(int64_t call) {
        for (int64_t i = 0; i < kNumel; ++i) trainer.model.grads[0].set(i, gradient(i, call, 0, 0));
        must(trainer.step(trainer.arguments()));
    }
    std::vector<float> weights() const {
        return {trainer.model.params[0].as<float>(), trainer.model.params[0].as<float>() + kNumel};
    }
    std::vector<float> state(const char *name) const { return exported(trainer.opt(), 0, name); }
    Trainer trainer;
};

void expect_rows(int32_t algorithm, uint32_t flags, const std::vector<Row> &rows) {
    Golden golden(algorithm, flags);
    for (size_t t = 0; t < rows.size(); ++t) {
        golden.step(int64_t(t + 1));
        expect_near(golden.weights(), rows[t], "step " + std::to_string(t + 1));
    }
}

TEST(GoldenTables, UseTheTestDataOfTheSpecification) {
    EXPECT_EQ(weight(0, 0), -0.4375f);
    EXPECT_EQ(weight(2, 0), 0.3125f);
    EXPECT_EQ(gradient(0, 1, 0, 0), -0.0703125f);
    EXPECT_EQ(gradient(4, 1, 0, 0), 0.1171875f);
}

TEST(GoldenTables, MatchAdamW) {
    expect_rows(DSOPT_ALGORITHM_ADAMW, 0,
                {{-0.42745626, -0.072493747, 0.32246876, -0.32246873, 0.052493751},
                 {-0.41870287, -0.082033023, 0.33186483, -0.33075029, 0.051488049},
                 {-0.41416931, -0.081676498, 0.33953515, -0.3393991, 0.052395657}});
}

TEST(GoldenTables, MatchAdamWithL2Decay) {
    expect_rows(DSOPT_ALGORITHM_ADAM, 0,
                {{-0.42750001, -0.072499998, 0.32249999, -0.32249999, 0.052500002},
                 {-0.41862854, -0.082037784, 0.33188635, -0.33051822, 0.051445264},
                 {-0.41346496, -0.081605628, 0.33939454, -0.33905664, 0.052294265}});
}

TEST(GoldenTables, MatchAdamWWithoutBiasCorrection) {
    expect_rows(DSOPT_ALGORITHM_ADAMW, DSOPT_GROUP_NO_BIAS_CORRECTION,
                {{-0.40583339, -0.094116479, 0.34409165, -0.34409046, 0.030870847},
                 {-0.36877605, -0.13467602, 0.38412392, -0.37938631, 0.026616232}});
}

TEST(GoldenTables, MatchMomentsOfAdamWAndLamb) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        Golden golden(algorithm, 0);
        golden.step(1);
        expect_near(golden.state("exp_avg"), {-0.0070312517, 0.0039062509, -0.010156252, 0.00078125019, 0.011718753},
                    "m(1)");
        expect_near(golden.state("exp_avg_sq"),
                    {4.943784e-06, 1.5258593e-06, 1.0314809e-05, 6.103437e-08, 1.3732733e-05}, "v(1)");
        golden.step(2);
        golden.step(3);
        expect_near(golden.state("exp_avg"), {-0.0054609384, -0.00082031265, -0.01392969, 0.015710941, -0.0021484385},
                    "m(3)");
        expect_near(golden.state("exp_avg_sq"),
                    {6.0319712e-06, 2.2633316e-05, 1.3342918e-05, 1.3363415e-05, 2.2608914e-05}, "v(3)");
    }
}

struct LambRow {
    double step_size, weight_norm, update_norm, trust;
    Row weights;
};

void expect_lamb(uint32_t flags, const std::vector<LambRow> &rows) {
    Golden golden(DSOPT_ALGORITHM_LAMB, flags);
    for (size_t t = 0; t < rows.size(); ++t) {
        const LambRow &row = rows[t];
        golden.step(int64_t(t + 1));
        expect_near(golden.weights(), row.weights, "step " + std::to_string(t + 1));
        const double trust = exported(golden.trainer.opt(), -1, "trust_ratio")[0];
        EXPECT_NEAR(trust, row.trust, 1e-6 * row.trust);
        // The report contains the norm of the weight change, the table the norm of the update before it is scaled.
        const dsopt_report report = report_of(golden.trainer.opt());
        EXPECT_NEAR(report.weight_norm, row.weight_norm, 1e-6 * row.weight_norm);
        const double change = row.update_norm * row.step_size * row.trust;
        EXPECT_NEAR(report.update_norm, change, 2e-6 * change);
    }
}

TEST(GoldenTables, MatchLamb) {
    expect_lamb(0, {{0.00316225644,
                     0.628117204,
                     7.07019615,
                     0.0888401419,
                     {-0.43661037, -0.063388221, 0.31338751, -0.31338748, 0.061611425}},
                    {0.00235315156,
                     0.628383756,
                     7.67187834,
                     0.0819074214,
                     {-0.43589607, -0.064170025, 0.31415915, -0.31406784, 0.061529361}},
                    {0.00202009268,
                     0.628683984,
                     6.17728806,
                     0.101773463,
                     {-0.43543804, -0.064134441, 0.31494251, -0.31495079, 0.061622128}}});
}

TEST(GoldenTables, MatchLambWithEpsInsideSqrt) {
    expect_lamb(DSOPT_GROUP_EPS_INSIDE_SQRT, {{0.00316225644,
                                               0.628117204,
                                               6.96277523,
                                               0.0902107507,
                                               {-0.43659756, -0.063398987, 0.31340078, -0.3133353, 0.061598044}}});
}

// Quirk of the original: with several dtypes in a group, each dtype increments the count of the last parameter that has
// a gradient, so the second dtype gets the bias correction of step 2. Standard mode counts each parameter separately.
TEST(CompatStepCount, IsIncrementedPerDtypeInTheLastTensor) {
    const std::vector<Shape> shapes = {{4, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32},
                                       {4, DSOPT_DTYPE_F16, DSOPT_DTYPE_F16},
                                       {4, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16}};
    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER);
    desc.compat = DSOPT_COMPAT_DEEPSPEED;
    const Trainer compat(shapes, make_group(DSOPT_ALGORITHM_ADAMW), desc);
    compat.train(1);
    EXPECT_EQ(steps(compat.opt()), (std::vector<int32_t>{0, 0, 3}));
    EXPECT_EQ(state_info(compat.opt(), state_index(compat.opt(), 1, "exp_avg")).tensor.dtype, DSOPT_DTYPE_F16);
    EXPECT_EQ(state_info(compat.opt(), state_index(compat.opt(), 2, "exp_avg_sq")).tensor.dtype, DSOPT_DTYPE_BF16);

    const Trainer standard(shapes, make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER));
    standard.train(1);
    EXPECT_EQ(steps(standard.opt()), (std::vector<int32_t>{1, 1, 1}));
    EXPECT_EQ(state_info(standard.opt(), state_index(standard.opt(), 1, "exp_avg")).tensor.dtype, DSOPT_DTYPE_F32);
    // fp16 is counted first, so it is at step 1 in both modes; fp32 is counted third.
    EXPECT_EQ(exported(standard.opt(), 0, "exp_avg").size(), 4u);
    EXPECT_NE(compat.model.params[0].text(), standard.model.params[0].text());
}

} // namespace step_golden_tables_tests
