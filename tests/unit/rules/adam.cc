// SPDX-License-Identifier: Apache-2.0
// Errors of Adam and AdamW after many steps, relative to float64 and to compat mode's formula with three divisions. See
// unit/step/reference.cc for single steps.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace rules_adam_tests {

constexpr size_t kElements = 1000;
constexpr int kSteps = 100;

struct Drift {
    double largest = 0, squares = 0;
    void add(double error) {
        largest = std::max(largest, std::fabs(error));
        squares += error * error;
    }
};

template <class T> struct Moments { std::vector<T> m = std::vector<T>(kElements), v = std::vector<T>(kElements); };

/// Computes one step of every element in double.
void exact_step(const dsopt_group &c, int t, const std::vector<float> &g, std::vector<double> &p,
                Moments<double> &moments) {
    const double c1 = 1 - std::pow(c.beta1, t), c2 = 1 - std::pow(c.beta2, t);
    const bool decoupled = c.algorithm == DSOPT_ALGORITHM_ADAMW;
    for (size_t i = 0; i < kElements; ++i) {
        const double x = decoupled ? g[i] : g[i] + c.weight_decay * p[i];
        moments.m[i] = c.beta1 * moments.m[i] + (1 - c.beta1) * x;
        moments.v[i] = c.beta2 * moments.v[i] + (1 - c.beta2) * x * x;
        const double update = moments.m[i] / c1 / (std::sqrt(moments.v[i] / c2) + c.eps);
        p[i] -= c.lr * (decoupled ? update + c.weight_decay * p[i] : update);
    }
}

/// Computes one step of every element in fp32 with three divisions.
void three_divisions_step(const dsopt_group &c, int t, const std::vector<float> &g, std::vector<float> &p,
                          Moments<float> &moments) {
    const auto c1 = float(1 - std::pow(c.beta1, t)), c2 = float(1 - std::pow(c.beta2, t));
    const auto beta1 = float(c.beta1), beta2 = float(c.beta2), a1 = float(1 - c.beta1), a2 = float(1 - c.beta2);
    const auto lr = float(c.lr), eps = float(c.eps), wd = float(c.weight_decay);
    const bool decoupled = c.algorithm == DSOPT_ALGORITHM_ADAMW;
    for (size_t i = 0; i < kElements; ++i) {
        const float x = decoupled ? g[i] : g[i] + wd * p[i];
        moments.m[i] = beta1 * moments.m[i] + a1 * x;
        moments.v[i] = beta2 * moments.v[i] + (a2 * x) * x;
        const float update = (moments.m[i] / c1) / (std::sqrt(moments.v[i] / c2) + eps);
        p[i] -= lr * (decoupled ? update + wd * p[i] : update);
    }
}

class AdamDrift : public testing::TestWithParam<int32_t> {};

// A formula with one division and one root per element must not be less accurate. Over rates, decays and magnitudes of
// weights, its largest and its root-mean-square error after 100 steps are at most those of the formula with three
// divisions. The engine, in standard mode, computes the former.
LABEL(long_emulated);
TEST_P(AdamDrift, IsNoLargerWithOneDivisionThanWithThree) {
    Drift engine, reference;
    uint64_t seed = 0;
    for (const double lr : {1e-4, 3e-4, 1e-3, 3e-3, 1e-2})
        for (const double decay : {0.0, 0.01, 0.1})
            for (const double scale : {1.0, 0.1, 0.02}) {
                dsopt_group group = make_group(GetParam(), decay);
                group.lr = lr;
                Random random(++seed);
                const Trainer trainer(shapes_of({int64_t(kElements)}), group);
                std::vector<float> weights = random.floats(kElements, -scale, scale);
                for (size_t i = 0; i < kElements; ++i) trainer.model.params[0].set(int64_t(i), weights[i]);
                std::vector<double> exact(weights.begin(), weights.end());
                Moments<double> exact_moments;
                Moments<float> moments;
                for (int t = 1; t <= kSteps; ++t) {
                    const std::vector<float> g = random.floats(kElements, -0.01, 0.011);
                    for (size_t i = 0; i < kElements; ++i) trainer.model.grads[0].set(int64_t(i), g[i]);
                    must(trainer.step(trainer.arguments()));
                    exact_step(group, t, g, exact, exact_moments);
                    three_divisions_step(group, t, g, weights, moments);
                }
                for (size_t i = 0; i < kElements; ++i) {
                    engine.add((double(trainer.model.params[0][int64_t(i)]) - exact[i]) / scale);
                    reference.add((double(weights[i]) - exact[i]) / scale);
                }
            }
    EXPECT_LE(engine.largest, reference.largest);
    EXPECT_LE(engine.squares, reference.squares);
    EXPECT_GT(engine.squares, 0);
    const auto text = [](const Drift &drift) {
        return std::to_string(drift.largest) + " " + std::to_string(std::sqrt(drift.squares / (45 * kElements)));
    };
    RecordProperty("engine", text(engine));
    RecordProperty("three_divisions", text(reference));
}

INSTANTIATE_TEST_SUITE_P(Both, AdamDrift, testing::Values(DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW),
                         [](const auto &info) { return name_of(info.param); });

} // namespace rules_adam_tests
