// SPDX-License-Identifier: Apache-2.0
// Compares trainings with the recurrence in double precision. An orthogonalised matrix may differ by a fraction of its
// norm, so weights may differ by that fraction of the path's length, plus the rounding of the weights.
#include "support/muon.h"

using namespace test;

LABEL_FILE(one_thread);

namespace muon_reference_tests {

/// Trains these parameters and checks every step.
void expect_reference(const std::vector<Cut> &cuts, const dsopt_group &group, int calls = 20) {
    const Trainer trainer = muon_trainer(cuts, group);
    std::vector<MuonReference> references;
    for (size_t i = 0; i < cuts.size(); ++i)
        references.push_back({group, cuts[i], doubles_of(trainer.model.params[i].floats())});
    std::vector<double> rounding(cuts.size());
    for (int t = 1; t <= calls; ++t) {
        trainer.train(uint64_t(t));
        for (size_t i = 0; i < cuts.size(); ++i) {
            MuonReference &reference = references[i];
            reference.step(doubles_of(trainer.model.grads[i].floats()));
            rounding[i] += 2 * 0x1p-24 * norm_of(reference.p);
            const Doubles p = doubles_of(trainer.model.params[i].floats());
            ASSERT_LE(norm_of(difference(p, reference.p)), ns_bound(group.ns_dtype) * reference.length + rounding[i])
                << "step " << t << ", parameter " << i;
            const Doubles m = doubles_of(trainer.state("momentum_buffer", int64_t(i)));
            ASSERT_LE(peak_of(difference(m, reference.m)), 2e-6 * peak_of(reference.m)) << "step " << t;
        }
    }
    EXPECT_TRUE(trainer.model.intact());
}

const std::vector<Cut> kShapes = {matrix(1, 1),   matrix(1, 7),   matrix(7, 1),   matrix(5, 3),  matrix(15, 15),
                                  matrix(16, 16), matrix(15, 40), matrix(16, 40), matrix(40, 17)};

class MuonReferences : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Products, MuonReferences, testing::ValuesIn(kDtypes),
                         [](const auto &info) { return dtype_name(info.param); });

TEST_P(MuonReferences, MatchesTwentySteps) { expect_reference(kShapes, muon_group(GetParam())); }
TEST_P(MuonReferences, MatchesWithoutNesterov) {
    dsopt_group group = muon_group(GetParam());
    group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
    expect_reference(kShapes, group);
}
TEST_P(MuonReferences, MatchesTheMixtureOfOptax) {
    dsopt_group group = muon_group(GetParam());
    group.flags = DSOPT_GROUP_NESTEROV;
    expect_reference(kShapes, group);
}
TEST_P(MuonReferences, MatchesPresets) {
    for (const int32_t preset : {DSOPT_NS_POLAR_EXPRESS, DSOPT_NS_YOU})
        for (const int32_t iterations : {1, 5, 7}) {
            dsopt_group group = muon_group(GetParam());
            group.ns_schedule = preset;
            group.ns_a = group.ns_b = group.ns_c = 0;
            group.ns_steps = iterations;
            expect_reference({matrix(16, 40), matrix(40, 17), matrix(5, 3)}, group, 5);
        }
}
TEST_P(MuonReferences, MatchesOtherCoefficientsAndIterations) {
    dsopt_group group = muon_group(GetParam());
    group.ns_a = 2, group.ns_b = -1.5, group.ns_c = 0.5;
    for (const int32_t iterations : {1, 2, 10}) {
        group.ns_steps = iterations;
        expect_reference({matrix(16, 40), matrix(40, 17), matrix(5, 3)}, group, 5);
    }
}
TEST_P(MuonReferences, MatchesAdjustments) {
    for (const int32_t adjust :
         {DSOPT_ADJUST_ORIGINAL, DSOPT_ADJUST_MATCH_RMS_ADAMW, DSOPT_ADJUST_SPECTRAL, DSOPT_ADJUST_NONE}) {
        dsopt_group group = muon_group(GetParam());
        group.adjust = adjust;
        std::vector<Cut> cuts = {matrix(16, 40), matrix(40, 17), matrix(3, 5), {{2, 3, 32}, 3, 16}};
        expect_reference(cuts, group, 3);
        for (Cut &cut : cuts) cut.flags = DSOPT_PARAM_ROWS_ARE_INPUTS;
        expect_reference(cuts, group, 3);
    }
}
LABEL(numbers_only);
TEST_P(MuonReferences, MatchesLargerMatrices) {
    expect_reference({matrix(64, 64), matrix(96, 70), matrix(65, 130)}, muon_group(GetParam()), 3);
}
TEST_P(MuonReferences, MatchesWithoutDecay) { expect_reference(kShapes, muon_group(GetParam(), 0), 5); }

// ------------------------------------------------------------------------------------------------------------- edges
TEST(Muon, KeepsAZeroMatrixZero) {
    for (const int32_t products : kDtypes) {
        const dsopt_group group = muon_group(products);
        const std::vector<Cut> cuts = {matrix(20, 30), matrix(1, 1), matrix(3, 7)};
        const Trainer trainer = muon_trainer(cuts, group);
        const auto decay = float(1 - group.lr * group.weight_decay);
        for (const Array &gradient : trainer.model.grads) gradient.corrupt(0);
        std::vector<std::vector<float>> wanted;
        for (const Array &weight : trainer.model.params) wanted.push_back(weight.floats());
        for (int t = 1; t <= 2; ++t) {
            must(trainer.step(trainer.arguments()));
            for (size_t i = 0; i < cuts.size(); ++i) {
                for (float &weight : wanted[i]) weight *= decay;
                EXPECT_TRUE(same_bits(trainer.model.params[i].floats(), wanted[i])) << i;
                for (const float m : trainer.state("momentum_buffer", int64_t(i))) EXPECT_EQ(m, 0);
            }
        }
    }
}

TEST(Muon, StepsZeroMatricesBesideOthers) {
    const Cut cut = {{2, 20, 18}, 20, 18};
    const Trainer trainer = muon_trainer({cut}, muon_group(DSOPT_DTYPE_BF16, 0));
    const std::vector<float> before = trainer.model.params[0].floats();
    for (size_t i = 0; i < 360; ++i) trainer.model.grads[0].set(i, 0);
    must(trainer.step(trainer.arguments()));
    for (size_t i = 0; i < 360; ++i) ASSERT_EQ(trainer.model.params[0][i], before[i]);
    int moved = 0;
    for (size_t i = 360; i < 720; ++i) moved += trainer.model.params[0][i] != before[i];
    EXPECT_GT(moved, 350);
}

TEST(Muon, AcceptsEmptyMatrices) {
    Cut flat;
    flat.rows = 4, flat.cols = 5;
    const std::vector<Cut> cuts = {{{0, 8}}, {{8, 0}}, {{0, 0}}, {{0, 3, 4}, 3, 4}, flat, matrix(3, 4)};
    const Trainer trainer = muon_trainer(cuts);
    Trainer other({{12, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32, 0, 5}}, optimizer_desc());
    other.add(muon_group(), params_of({matrix(3, 4)}));
    trainer.train(1, 3);
    other.train(1, 3);
    EXPECT_TRUE(same(trainer.model.params[5].text(), other.model.params[0].text()));
    EXPECT_EQ(steps(trainer.opt()), std::vector<int32_t>(6, 3));
    const Trainer nothing = muon_trainer({{{0, 8}}});
    nothing.train(1, 2);
    EXPECT_EQ(report_of(nothing.opt()).calls, 2);
}

// O of a 1 x 1 matrix is f(f(...f(+-1))) with f(x) = a x + b x^3 + c x^5, whatever the size of the gradient.
TEST(Muon, MovesASingleElementByItsSign) {
    double o = 1;
    for (int k = 0; k < 5; ++k) o = 3.4445 * o - 4.7750 * o * o * o + 2.0315 * std::pow(o, 5);
    for (const float gradient : {1.0f, -3.0f, 1e-5f, -1e30f, 1e-30f}) {
        const Trainer trainer = muon_trainer({matrix(1, 1)}, muon_group(DSOPT_DTYPE_BF16, 0));
        trainer.model.params[0].set(0, 1);
        trainer.model.grads[0].set(0, gradient);
        must(trainer.step(trainer.arguments()));
        const double u = 0.0975 * std::fabs(double(gradient)), size = u >= 1e-7 ? o : 0; // below eps: nearly nothing
        EXPECT_NEAR(trainer.model.params[0][0], 1 - std::copysign(0.02 * size, gradient), 2e-6) << gradient;
    }
}

// Below eps a matrix is divided by eps, as in torch: it stays small. A smaller eps orthogonalises it.
TEST(Muon, DividesByTheLargerOfNormAndEps) {
    for (const double eps : {1e-7, 0x1p-100, 1.0}) {
        dsopt_group group = muon_group(DSOPT_DTYPE_F32, 0);
        group.eps = eps;
        for (const float scale : {0x1p-60f, 0x1p-30f, 0x1p-20f, 1.0f, 0x1p30f}) {
            const Cut cut = matrix(17, 20);
            const Trainer trainer = muon_trainer({cut}, group);
            for (size_t i = 0; i < 340; ++i) trainer.model.grads[0].set(i, trainer.model.grads[0][i] * scale);
            MuonReference reference{group, cut, doubles_of(trainer.model.params[0].floats())};
            reference.step(doubles_of(trainer.model.grads[0].floats()));
            must(trainer.step(trainer.arguments()));
            EXPECT_LE(norm_of(difference(doubles_of(trainer.model.params[0].floats()), reference.p)),
                      5e-5 * reference.length + 4 * 0x1p-24 * norm_of(reference.p))
                << eps << " " << scale;
        }
    }
}

// A gradient times a power of two has the same orthogonalised matrix, to the bit, as long as nothing is denormal.
TEST(Muon, IgnoresPowersOfTwoInTheGradient) {
    for (const int32_t products : kDtypes) {
        const Trainer one = muon_trainer({matrix(20, 30)}, muon_group(products)),
                      other = muon_trainer({matrix(20, 30)}, muon_group(products));
        for (uint64_t t = 1; t <= 3; ++t) {
            one.train(t);
            other.model.make_gradients(t);
            for (size_t i = 0; i < 600; ++i) other.model.grads[0].set(i, other.model.grads[0][i] * 0x1p20f);
            must(other.step(other.arguments()));
        }
        EXPECT_TRUE(same(one.model.text(), other.model.text())) << dtype_name(products);
    }
}

TEST(Muon, GivesTransposedMatricesTheTransposedBits) {
    for (const int32_t products : kDtypes)
        for (const auto &[rows, cols] : {std::pair<int64_t, int64_t>{40, 17}, {20, 3}, {130, 70}, {9, 1}}) {
            dsopt_group group = muon_group(products);
            group.adjust = DSOPT_ADJUST_MATCH_RMS_ADAMW; // the same for both
            const Trainer tall = muon_trainer({matrix(rows, cols)}, group),
                          wide = muon_trainer({matrix(cols, rows)}, group);
            const auto transpose = [&, r = size_t(rows), c = size_t(cols)](const Array &from, const Array &to) {
                for (size_t i = 0; i < r; ++i)
                    for (size_t j = 0; j < c; ++j) to.set(j * r + i, from[i * c + j]);
            };
            transpose(tall.model.params[0], wide.model.params[0]);
            for (uint64_t t = 1; t <= 3; ++t) {
                tall.train(t);
                transpose(tall.model.grads[0], wide.model.grads[0]);
                must(wide.step(wide.arguments()));
            }
            const Array transposed = wide.model.params[0];
            transpose(tall.model.params[0], transposed);
            EXPECT_TRUE(same(wide.model.params[0].text(), transposed.text())) << rows << " x " << cols;
        }
}

TEST(Muon, SwapsRowsAndColsInTheAdjustmentOnly) {
    for (const int32_t adjust :
         {DSOPT_ADJUST_ORIGINAL, DSOPT_ADJUST_MATCH_RMS_ADAMW, DSOPT_ADJUST_SPECTRAL, DSOPT_ADJUST_NONE}) {
        dsopt_group group = muon_group(DSOPT_DTYPE_BF16, 0), same_factor = group;
        group.adjust = adjust;
        same_factor.adjust = DSOPT_ADJUST_NONE;
        Cut cut = matrix(20, 45);
        cut.flags = DSOPT_PARAM_ROWS_ARE_INPUTS;
        const double factors[] = {std::sqrt(45.0 / 20), 0.2 * std::sqrt(45.0), std::sqrt(45.0 / 20), 1};
        same_factor.lr *= factors[adjust];
        const Trainer inputs = muon_trainer({cut}, group), scaled = muon_trainer({matrix(20, 45)}, same_factor);
        inputs.train(1, 2);
        scaled.train(1, 2);
        EXPECT_TRUE(same(inputs.model.text(), scaled.model.text())) << adjust;
    }
}

TEST(Muon, LeavesTensorsWithoutGradientAlone) {
    const std::vector<Cut> cuts = {matrix(20, 30), matrix(20, 30), matrix(5, 5)};
    const Trainer trainer = muon_trainer(cuts);
    trainer.train(1);
    const Snapshot before = trainer.snapshot();
    std::vector<dsopt_tensor> grads = trainer.grads;
    grads[1].data = nullptr;
    dsopt_step step = trainer.arguments();
    step.grads = grads.data();
    must(trainer.step(step));
    const Snapshot after = trainer.snapshot();
    EXPECT_EQ(after.at("param 1"), before.at("param 1"));
    EXPECT_EQ(after.at("momentum_buffer 1"), before.at("momentum_buffer 1"));
    EXPECT_NE(after.at("param 0"), before.at("param 0"));
    EXPECT_NE(after.at("param 2"), before.at("param 2"));
    EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{2, 1, 2}));
    // The next step of the tensor is its second one.
    const Trainer without = muon_trainer(cuts);
    without.train(1);
    trainer.train(2);
    without.train(2);
    EXPECT_TRUE(same(trainer.model.params[1].text(), without.model.params[1].text()));
}

// Gradients of a batch of one are outer products.
TEST_P(MuonReferences, BoundTheErrorOfMatricesOfRankOne) {
    std::vector<Cut> cuts;
    for (const auto &[rows, cols] : {std::pair<int64_t, int64_t>{16, 200}, {100, 33}, {129, 16}, {140, 52}, {64, 64}})
        for (int kind = 0; kind < 3; ++kind) cuts.push_back(matrix(rows, cols));
    for (const int32_t schedule : {DSOPT_NS_CONSTANT, DSOPT_NS_POLAR_EXPRESS, DSOPT_NS_YOU}) {
        dsopt_group group = muon_group(GetParam(), 0);
        group.ns_schedule = schedule;
        if (schedule != DSOPT_NS_CONSTANT) group.ns_a = group.ns_b = group.ns_c = 0;
        group.lr = 1;
        group.adjust = DSOPT_ADJUST_NONE;
        const Trainer trainer = muon_trainer(cuts, group);
        for (size_t i = 0; i < cuts.size(); ++i) {
            const auto kind = i % 3; // ones, signs, noise
            const auto entry = [&](int64_t k) {
                return kind == 0 ? 1.0f : kind == 1 ? (k * 7 % 5 < 2 ? 1.0f : -1.0f) : std::sin(float(k * k + 1));
            };
            for (int64_t r = 0; r < cuts[i].dims[0]; ++r)
                for (int64_t c = 0; c < cuts[i].dims[1]; ++c)
                    trainer.model.grads[i].set(size_t(r * cuts[i].dims[1] + c), entry(r) * entry(c + 3));
            for (size_t k = 0; k < size_t(cuts[i].numel()); ++k) trainer.model.params[i].set(k, 0);
        }
        must(trainer.step(trainer.arguments()));
        for (size_t i = 0; i < cuts.size(); ++i) {
            MuonReference reference{group, cuts[i], Doubles(size_t(cuts[i].numel()))};
            reference.step(doubles_of(trainer.model.grads[i].floats()));
            const Doubles p = doubles_of(trainer.model.params[i].floats());
            EXPECT_LE(norm_of(difference(p, reference.p)), rank_1_bound(GetParam()) * reference.length)
                << "schedule " << schedule << ", parameter " << i;
        }
    }
}

} // namespace muon_reference_tests
