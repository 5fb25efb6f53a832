// SPDX-License-Identifier: Apache-2.0
// Compares Lion with the algorithm of Chen et al. 2023, which optax.lion implements.
#include "support/rules.h"

using namespace test;

LABEL_FILE(one_thread);

namespace rules_lion_tests {

double reference(const dsopt_group &c, int64_t, double g, double &p, double &m) {
    const double size = std::fabs(p) + std::fabs(g) + std::fabs(m);
    const double u = c.beta1 * m + (1 - c.beta1) * g;
    p -= c.lr * (double(u > 0) - double(u < 0) + c.weight_decay * p);
    m = c.beta2 * m + (1 - c.beta2) * g;
    return size;
}

dsopt_group lion_group(double beta1 = 0.9, double beta2 = 0.99, double decay = 0) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_LION, decay);
    group.beta1 = beta1;
    group.beta2 = beta2;
    return group;
}

const std::vector<RuleCase> kCases = {
    {"Plain", lion_group(), "exp_avg", reference},
    {"WithDecay", lion_group(0.9, 0.99, 0.1), "exp_avg", reference},
    {"OtherBetas", lion_group(0.5, 0.75), "exp_avg", reference},
    {"ZeroBetas", lion_group(0, 0), "exp_avg", reference},
};
RULE_SUITE(Lion, kCases)

TEST(LionRule, HasTheDefaultsOfThePaper) {
    const dsopt_group group = make_group(DSOPT_ALGORITHM_LION, 0);
    EXPECT_EQ(group.lr, 1e-4);
    EXPECT_EQ(group.beta1, 0.9);
    EXPECT_EQ(group.beta2, 0.99);
    EXPECT_EQ(group.eps, 0);
}

// Three steps: momentum is zero, has the opposite sign of the gradient, has the same sign.
TEST(LionRule, MatchesStepsComputedByHand) {
    dsopt_group group = lion_group(0.5, 0.75, 0.5);
    group.lr = 0.25;
    const Trainer trainer(shapes_of({1}), group);
    trainer.model.params[0].set(0, 1);
    const float gradients[] = {2, -1, 0.125f}, weights[] = {0.625f, 0.796875f, 0.447265625f},
                momenta[] = {0.5f, 0.125f, 0.125f};
    for (int t = 0; t < 3; ++t) {
        trainer.model.grads[0].set(0, gradients[t]);
        must(trainer.step(trainer.arguments()));
        EXPECT_EQ(trainer.model.params[0][0], weights[t]);
        EXPECT_EQ(exported(trainer.opt(), 0, "exp_avg")[0], momenta[t]);
    }
}

TEST(LionRule, KeepsAWeightIfMomentumAndGradientCancel) {
    dsopt_group group = lion_group(0.5, 0.5);
    const Trainer trainer(shapes_of({3}), group);
    for (int64_t k = 0; k < 3; ++k) trainer.model.grads[0].set(k, k == 0 ? 0.0f : 1.0f);
    must(trainer.step(trainer.arguments()));
    const float before = trainer.model.params[0][1], zero = trainer.model.params[0][0];
    for (int64_t k = 0; k < 3; ++k) trainer.model.grads[0].set(k, k == 1 ? -0.5f : 0.0f);
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(trainer.model.params[0][0], zero);
    EXPECT_EQ(trainer.model.params[0][1], before);
    EXPECT_NE(trainer.model.params[0][2], before);
}

TEST(LionRule, RefusesValuesOutOfRangeOrWithoutEffect) {
    dsopt_group group = lion_group();
    group.eps = 1e-8;
    expect_refused(group, DSOPT_ERR_UNSUPPORTED, "eps|lion");
    expect_refused(lion_group(1), DSOPT_ERR_ARGUMENT, "beta1|1");
    group = lion_group();
    group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
    expect_refused(group, DSOPT_ERR_UNSUPPORTED, "no_bias_correction|lion");
    group.flags = DSOPT_GROUP_NESTEROV;
    expect_refused(group, DSOPT_ERR_UNSUPPORTED, "nesterov|lion");
    expect_refused(lion_group(), DSOPT_ERR_UNSUPPORTED, "lion|standard mode", DSOPT_COMPAT_DEEPSPEED);
}

} // namespace rules_lion_tests
