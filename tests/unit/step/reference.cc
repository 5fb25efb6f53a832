// SPDX-License-Identifier: Apache-2.0
// Compares single steps with the formulas in double precision. The allowed error comes from error analysis
// (support/reference.h).
#include "support/reference.h"
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace step_reference_tests {

template <class T> std::vector<double> doubles(const std::vector<T> &values) { return {values.begin(), values.end()}; }
std::vector<double> doubles(const Array &buffer) {
    std::vector<double> values(size_t(buffer.numel()));
    for (int64_t i = 0; i < buffer.numel(); ++i) values[size_t(i)] = buffer[size_t(i)];
    return values;
}

/// Returns the weights that the rule updates: the master if the parameter has one.
std::vector<double> weights(const Trainer &trainer, int64_t param) {
    const Array &buffer = trainer.model.params[size_t(param)];
    return buffer.dtype() == DSOPT_DTYPE_F32 ? doubles(buffer) : doubles(exported(trainer.opt(), param, "master"));
}
ReferenceState state_of(const Trainer &trainer, int64_t param) {
    dsopt_optimizer *const opt = trainer.opt();
    return {weights(trainer, param), doubles(exported(opt, param, "exp_avg")),
            doubles(exported(opt, param, "exp_avg_sq"))};
}

struct WorstErrors {
    double p = 0, m = 0, v = 0; // largest error, divided by the allowed error
    void add(const ReferenceStep &wanted, const ReferenceState &got, double extra_roundings) {
        for (size_t i = 0; i < got.p.size(); ++i) {
            const double p_budget =
                ulp(wanted.now.p[i]) + (wanted.roundings[i] + extra_roundings) * kRounding * wanted.size[i];
            p = std::max(p, std::fabs(got.p[i] - wanted.now.p[i]) / p_budget);
            m = std::max(m, std::fabs(got.m[i] - wanted.now.m[i]) / wanted.m_budget[i]);
            v = std::max(v, std::fabs(got.v[i] - wanted.now.v[i]) / wanted.v_budget[i]);
        }
    }
    void expect_within() const {
        EXPECT_LE(p, 1);
        EXPECT_LE(m, 1);
        EXPECT_LE(v, 1);
        testing::Test::RecordProperty("p", std::to_string(p));
        testing::Test::RecordProperty("m", std::to_string(m));
        testing::Test::RecordProperty("v", std::to_string(v));
    }
};

struct Case {
    dsopt_group group;
    std::string name;
    friend void PrintTo(const Case &c, std::ostream *out) { *out << c.name; }
};

std::vector<Case> cases() {
    std::vector<Case> list;
    for (const int32_t algorithm : kAlgorithms) {
        const std::string name = name_of(algorithm);
        const bool has_inside = algorithm == DSOPT_ALGORITHM_LAMB || algorithm == DSOPT_ALGORITHM_ADAM_LEGACY;
        const auto add = [&](const char *what, auto &&change) {
            dsopt_group group = make_group(algorithm);
            change(group);
            list.push_back({group, name + what});
        };
        add("", [](dsopt_group &) {});
        add("NoDecay", [](dsopt_group &g) { g.weight_decay = 0; });
        add("StrongDecay", [](dsopt_group &g) { g.weight_decay = 0.5; });
        add("NoBiasCorrection", [](dsopt_group &g) { g.flags = DSOPT_GROUP_NO_BIAS_CORRECTION; });
        add("LargeEps", [](dsopt_group &g) { g.eps = 0.1; });
        add("LargeRate", [](dsopt_group &g) { g.lr = 0.7; });
        add("OtherBetas", [](dsopt_group &g) { g.beta1 = 0.55, g.beta2 = 0.8; });
        add("ZeroBetas", [](dsopt_group &g) { g.beta1 = 0, g.beta2 = 0; });
        if (has_inside)
            add("EpsInsideSqrt", [](dsopt_group &g) { g.flags = DSOPT_GROUP_EPS_INSIDE_SQRT, g.eps = 1e-4; });
        else
            for (const double eps : {1e-7, 1e-2})
                add(eps < 1e-4 ? "EpsUncorrected" : "LargeEpsUncorrected",
                    [&](dsopt_group &g) { g.flags = DSOPT_GROUP_EPS_UNCORRECTED, g.eps = eps; });
        if (algorithm == DSOPT_ALGORITHM_LAMB) {
            add("TrustAtItsUpperBound", [](dsopt_group &g) { g.max_trust = 0.02; });
            add("TrustAtItsLowerBound", [](dsopt_group &g) { g.min_trust = 5; });
        }
    }
    return list;
}

class StepAccuracy : public testing::TestWithParam<Case> {};

// Runs eight steps and compares each with the reference from the engine's state before it, so that errors of earlier
// steps do not count.
void expect_reference(const Case &c, const dsopt_optimizer_desc &desc, int32_t param_type, int32_t grad_type) {
    const std::vector<int64_t> sizes = {3000, 1, 5, 4097};
    const Trainer trainer(shapes_of(sizes, param_type, grad_type), c.group, desc);
    const dsopt_group used = desc.compat == DSOPT_COMPAT_NONE ? c.group : rounded_to_float(c.group);
    // The original computes lr sqrt(c2)/c1 in fp32, with five roundings instead of one.
    const double extra = desc.compat == DSOPT_COMPAT_NONE ? 0 : 5;
    WorstErrors worst;
    for (int64_t t = 1; t <= 8; ++t) {
        trainer.model.make_gradients(uint64_t(t));
        std::vector<ReferenceStep> wanted;
        for (int64_t i = 0; i < int64_t(sizes.size()); ++i)
            wanted.push_back(reference_step(used, state_of(trainer, i), doubles(trainer.model.grads[size_t(i)]), t));
        must(trainer.step(trainer.arguments()));
        for (int64_t i = 0; i < int64_t(sizes.size()); ++i) worst.add(wanted[size_t(i)], state_of(trainer, i), extra);
    }
    worst.expect_within();
    EXPECT_TRUE(trainer.model.intact());
}

LABEL(long_emulated);
TEST_P(StepAccuracy, StaysWithinRoundingErrorsInFp32) {
    expect_reference(GetParam(), optimizer_desc(), DSOPT_DTYPE_F32, DSOPT_DTYPE_F32);
}

LABEL(long_emulated);
TEST_P(StepAccuracy, StaysWithinRoundingErrorsWithMasters) {
    expect_reference(GetParam(), optimizer_desc(), DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16);
    expect_reference(GetParam(), optimizer_desc(), DSOPT_DTYPE_F16, DSOPT_DTYPE_F32);
}

LABEL(long_emulated);
TEST_P(StepAccuracy, RoundsHyperParametersToFloatInCompatMode) {
    if (GetParam().group.flags & DSOPT_GROUP_EPS_UNCORRECTED) return; // refused in compat mode, see step/hyper.cc
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.compat = DSOPT_COMPAT_DEEPSPEED;
    expect_reference(GetParam(), desc, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32);
}

// The exponents of weight, gradient and moments are independent: every sum cancels for some elements, and updates are
// far above or far below the weight.
LABEL(long_emulated);
TEST_P(StepAccuracy, StaysWithinRoundingErrorsForMixedMagnitudes) {
    const Trainer trainer(shapes_of({4000}), GetParam().group);
    Random random(42);
    WorstErrors worst;
    for (int64_t t = 1; t <= 5; ++t) {
        std::vector<float> m(4000), v(4000);
        for (int64_t i = 0; i < 4000; ++i) {
            trainer.model.params[0].set(i, random.number(-20, 20));
            trainer.model.grads[0].set(i, random.number(-30, 30));
            m[size_t(i)] = random.number(-30, 30);
            v[size_t(i)] = std::fabs(random.number(-60, 60));
        }
        must(dsopt_optimizer_import(trainer.opt(), state_index(trainer.opt(), 0, "exp_avg"), m.data(), 16000));
        must(dsopt_optimizer_import(trainer.opt(), state_index(trainer.opt(), 0, "exp_avg_sq"), v.data(), 16000));
        const ReferenceStep wanted =
            reference_step(GetParam().group, state_of(trainer, 0), doubles(trainer.model.grads[0]), t);
        must(trainer.step(trainer.arguments()));
        worst.add(wanted, state_of(trainer, 0), 0);
    }
    worst.expect_within();
}

// The reference continues from its own state, not the engine's. This finds errors that repeat in every step, such as a
// count or state that is not kept.
TEST_P(StepAccuracy, FollowsAnIndependentReferenceFor20Steps) {
    const Trainer trainer(shapes_of({500}), GetParam().group);
    ReferenceState reference = state_of(trainer, 0);
    double movement = 0;
    const std::vector<double> start = reference.p;
    for (int64_t t = 1; t <= 20; ++t) {
        trainer.train(uint64_t(t));
        reference = reference_step(GetParam().group, reference, doubles(trainer.model.grads[0]), t).now;
    }
    const std::vector<double> got = weights(trainer, 0);
    for (size_t i = 0; i < got.size(); ++i) {
        movement = std::max(movement, std::fabs(got[i] - start[i]));
        ASSERT_NEAR(got[i], reference.p[i], 2e-6 * std::max(1.0, std::fabs(reference.p[i]))) << i;
    }
    EXPECT_GT(movement, 1e-4);
    EXPECT_EQ(steps(trainer.opt()), std::vector<int32_t>{20});
}

INSTANTIATE_TEST_SUITE_P(Cases, StepAccuracy, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<Case> &info) { return info.param.name; });

TEST(LambTrustRatio, IsTheClampedQuotientOfTheNorms) {
    const std::vector<int64_t> sizes = {1, 31, 32, 33, 1024, 4096, 4097, 10000};
    const Trainer trainer(shapes_of(sizes), make_group(DSOPT_ALGORITHM_LAMB));
    for (int64_t t = 1; t <= 3; ++t) {
        trainer.model.make_gradients(uint64_t(t));
        std::vector<double> wanted;
        for (size_t i = 0; i < sizes.size(); ++i)
            wanted.push_back(reference_step(make_group(DSOPT_ALGORITHM_LAMB), state_of(trainer, int64_t(i)),
                                            doubles(trainer.model.grads[i]), t)
                                 .trust);
        must(trainer.step(trainer.arguments()));
        const std::vector<float> got = exported(trainer.opt(), -1, "trust_ratio");
        for (size_t i = 0; i < sizes.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-6 * wanted[i]) << sizes[i];
    }
}

TEST(LambTrustRatio, IsOneIfANormIsZero) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_LAMB, 0);
    const Trainer trainer(shapes_of({10, 10, 10}), group);
    std::memset(trainer.model.params[0].data(), 0, 40);
    std::memset(trainer.model.grads[1].data(), 0, 40);
    const std::string second = trainer.model.params[1].text();
    must(trainer.step(trainer.arguments()));
    const std::vector<float> trust = exported(trainer.opt(), -1, "trust_ratio");
    EXPECT_EQ(trust[0], 1);
    EXPECT_EQ(trust[1], 1);
    EXPECT_NE(trust[2], 1);
    EXPECT_EQ(trainer.model.params[1].text(), second);
    EXPECT_NE(trainer.model.params[0][0], 0);
}

// --------------------------------------------------------------------------------------------------- 16-bit parameters
using Storage = std::tuple<int32_t, int32_t, int32_t>; // algorithm, parameter, gradient
class Step16BitParams : public testing::TestWithParam<Storage> {};

TEST_P(Step16BitParams, RoundsMastersToNearest) {
    const auto [algorithm, param, grad] = GetParam();
    const Trainer trainer(shapes_of({5000, 1, 17}, param, grad), make_group(algorithm));
    for (uint64_t t = 1; t <= 4; ++t) {
        trainer.train(t);
        for (size_t i = 0; i < 3; ++i) {
            const std::vector<float> master = exported(trainer.opt(), int64_t(i), "master");
            for (size_t k = 0; k < master.size(); ++k)
                ASSERT_EQ(trainer.model.params[i].as<uint16_t>()[k], to_nearest_16_bits(master[k], param))
                    << t << " " << i << " " << k;
        }
    }
}

TEST_P(Step16BitParams, ComputesMastersLikeFp32Weights) {
    const auto [algorithm, param, grad] = GetParam();
    const Trainer low(shapes_of({5000, 33}, param, grad), make_group(algorithm));
    const Trainer full(shapes_of({5000, 33}, DSOPT_DTYPE_F32, DSOPT_DTYPE_F32), make_group(algorithm));
    for (size_t i = 0; i < 2; ++i)
        for (int64_t k = 0; k < low.model.params[i].numel(); ++k)
            full.model.params[i].set(k, low.model.params[i][size_t(k)]);
    for (uint64_t t = 1; t <= 4; ++t) {
        low.model.make_gradients(t);
        for (size_t i = 0; i < 2; ++i)
            for (int64_t k = 0; k < low.model.grads[i].numel(); ++k)
                full.model.grads[i].set(k, low.model.grads[i][size_t(k)]);
        must(low.step(low.arguments()));
        must(full.step(full.arguments()));
    }
    for (size_t i = 0; i < 2; ++i) {
        const std::vector<float> master = exported(low.opt(), int64_t(i), "master");
        EXPECT_EQ(0, std::memcmp(master.data(), full.model.params[i].data(), master.size() * 4));
        EXPECT_EQ(exported(low.opt(), int64_t(i), "exp_avg_sq"), exported(full.opt(), int64_t(i), "exp_avg_sq"));
    }
}

TEST_P(Step16BitParams, RoundsNewWeightsEachStepWithoutMasters) {
    const auto [algorithm, param, grad] = GetParam();
    const dsopt_group group = make_group(algorithm);
    const Trainer trainer(shapes_of({3000}, param, grad), group, optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER));
    EXPECT_EQ(state_count(trainer.opt()), algorithm == DSOPT_ALGORITHM_LAMB ? 4 : 3);
    for (int64_t t = 1; t <= 4; ++t) {
        trainer.model.make_gradients(uint64_t(t));
        const ReferenceStep wanted = [&] {
            const auto m = exported(trainer.opt(), 0, "exp_avg"), v = exported(trainer.opt(), 0, "exp_avg_sq");
            return reference_step(group, {doubles(trainer.model.params[0]), doubles(m), doubles(v)},
                                  doubles(trainer.model.grads[0]), t);
        }();
        must(trainer.step(trainer.arguments()));
        for (size_t i = 0; i < 3000; ++i) {
            // The nearest 16-bit number, or its neighbour if the fp32 result is within its error bound of a tie.
            const double now = wanted.now.p[i], error = ulp(now) + wanted.roundings[i] * kRounding * wanted.size[i];
            const double low = to_fp32(to_nearest_16_bits(float(now - error), param), param),
                         high = to_fp32(to_nearest_16_bits(float(now + error), param), param);
            const double got = trainer.model.params[0][size_t(int64_t(i))];
            ASSERT_TRUE(low <= got && got <= high) << t << " " << i << ": " << got << " for " << now;
        }
    }
}

std::string storage_name(const testing::TestParamInfo<Storage> &info) {
    const auto [algorithm, param, grad] = info.param;
    return name_of(algorithm) + dtype_name(param) + "Grad" + dtype_name(grad);
}
INSTANTIATE_TEST_SUITE_P(Storages, Step16BitParams,
                         testing::Combine(testing::ValuesIn(kAlgorithms),
                                          testing::Values(DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16),
                                          testing::Values(DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16)),
                         storage_name);

// ------------------------------------------------------------------------------------------------------------ extremes
TEST(StepExtremes, DividesByEpsIfTheSecondMomentUnderflows) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW, 0);
    const Trainer trainer(shapes_of({1}), group);
    trainer.model.params[0].set(0, 0);
    trainer.model.grads[0].set(0, 1e-23f); // the square is 0 in fp32
    must(trainer.step(trainer.arguments()));
    const double wanted = -group.lr * double(1e-23f) / group.eps; // m/c1 = g
    EXPECT_NEAR(trainer.model.params[0][0], wanted, 1e-6 * std::fabs(wanted));
    EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg_sq")[0], 0);
}

TEST(StepExtremes, KeepsDenormals) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW, 0);
    group.lr = 0;
    const Trainer trainer(shapes_of({1}), group);
    trainer.model.params[0].set(0, 0x1p-149f);
    trainer.model.grads[0].set(0, 0x1p-140f);
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(trainer.model.params[0][0], 0x1p-149f);
    EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg")[0], float(double(0.1f) * 0x1p-140));
}

TEST(StepExtremes, KeepsAWeightWithoutGradientsIfEpsIsZero) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ADAM_LEGACY,
                                    DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAGRAD})
        for (const int32_t flags : {0, int32_t(DSOPT_GROUP_EPS_INSIDE_SQRT)})
            for (const double eps : {0.0, 1e-50}) { // both are 0 in fp32
                if (flags != 0 && (algorithm == DSOPT_ALGORITHM_ADAM || algorithm == DSOPT_ALGORITHM_ADAMW)) continue;
                SCOPED_TRACE(name_of(algorithm) + (flags != 0 ? ", eps inside the root" : ""));
                dsopt_group group = make_group(algorithm, 0, uint32_t(flags));
                group.eps = eps;
                const Trainer trainer(shapes_of({3}), group);
                const float before[] = {trainer.model.params[0][0], trainer.model.params[0][1]};
                trainer.model.grads[0].set(0, 0);
                trainer.model.grads[0].set(1, 1e-18f);
                must(trainer.step(trainer.arguments()));
                EXPECT_EQ(trainer.model.params[0][0], before[0]);
                EXPECT_NE(trainer.model.params[0][1], before[1]); // an ordinary step, however small the gradient
                EXPECT_TRUE(std::isfinite(trainer.model.params[0][1]));
                EXPECT_TRUE(std::isfinite(trainer.model.params[0][2]));
            }
}

TEST(StepExtremes, KeepsAWeightWhoseSecondMomentOverflows) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW, 0);
    const Trainer trainer(shapes_of({2}), group);
    const float before = trainer.model.params[0][0];
    trainer.model.grads[0].set(0, 1e25f);
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(trainer.model.params[0][0], before); // m / inf = 0
    EXPECT_TRUE(std::isinf(exported(trainer.opt(), 0, "exp_avg_sq")[0]));
}

// The flag matters if a gradient is far below eps in the first step, as in unused rows of an embedding.
TEST(StepExtremes, DampsSmallGradientsMoreWithEpsUncorrected) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW, 0);
    group.eps = 1e-7;
    const double expected_moves[] = {1e-3 * 1e-8 / (1e-8 + 1e-7),
                                     1e-3 * std::sqrt(1e-3) * 1e-8 / (std::sqrt(1e-3) * 1e-8 + 1e-7)};
    for (const int32_t flags : {0, int32_t(DSOPT_GROUP_EPS_UNCORRECTED)}) {
        group.flags = flags;
        const Trainer trainer(shapes_of({1}), group);
        trainer.model.params[0].set(0, 0);
        trainer.model.grads[0].set(0, 1e-8f);
        must(trainer.step(trainer.arguments()));
        EXPECT_NEAR(-trainer.model.params[0][0] / expected_moves[flags != 0], 1, 1e-4);
    }
}

// The step count is an integer from which beta^t is computed: after very many steps the corrections are exactly 1.
TEST(StepExtremes, CorrectsNoBiasAfterManySteps) {
    for (const int32_t algorithm : kAlgorithms) {
        const Trainer late(shapes_of({100}), make_group(algorithm));
        const Trainer plain(shapes_of({100}), make_group(algorithm, 0.01, DSOPT_GROUP_NO_BIAS_CORRECTION));
        const int32_t many = 2000000000;
        must(dsopt_optimizer_import(late.opt(), state_index(late.opt(), -1, "step"), &many, 4));
        late.train(7);
        plain.train(7);
        EXPECT_TRUE(same(late.model.text(), plain.model.text())) << name_of(algorithm);
        EXPECT_EQ(steps(late.opt())[0], many + 1);
        if (algorithm != DSOPT_ALGORITHM_ADAM && algorithm != DSOPT_ALGORITHM_ADAMW) continue;
        const Trainer uncorrected(shapes_of({100}), make_group(algorithm, 0.01, DSOPT_GROUP_EPS_UNCORRECTED));
        must(dsopt_optimizer_import(uncorrected.opt(), state_index(uncorrected.opt(), -1, "step"), &many, 4));
        uncorrected.train(7);
        EXPECT_TRUE(same(uncorrected.model.text(), plain.model.text())) << name_of(algorithm);
    }
}

} // namespace step_reference_tests
