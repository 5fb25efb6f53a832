// SPDX-License-Identifier: Apache-2.0
// Compares Adagrad with the documented formulas of torch.optim.Adagrad and optax.adagrad.
#include "support/rules.h"

using namespace test;

LABEL_FILE(one_thread);

namespace rules_adagrad_tests {

double reference(const dsopt_group &c, int64_t t, double g, double &p, double &sum) {
    const double size = std::fabs(p) + std::fabs(g);
    g += c.weight_decay * p;
    sum += g * g;
    const bool inside = c.flags & DSOPT_GROUP_EPS_INSIDE_SQRT;
    const double root = inside ? std::sqrt(sum + c.eps) : std::sqrt(sum) + c.eps;
    const double update = c.lr / (1 + double(t - 1) * c.lr_decay) * (sum == 0 ? 0 : g / root);
    p -= update;
    // If decay and gradient cancel, the rounding error of their sum is divided by a small root.
    return size + std::fabs(update) + c.lr * size / std::max(root, 1e-30);
}

dsopt_group adagrad_group(double lr_decay = 0, double start = 0, double decay = 0, int32_t flags = 0,
                          double eps = 1e-10) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAGRAD, decay, uint32_t(flags));
    group.lr_decay = lr_decay;
    group.initial_accumulator_value = start;
    group.eps = eps;
    return group;
}
RuleCase case_of(const char *name, const dsopt_group &group) {
    return {name, group, "sum", reference, group.initial_accumulator_value};
}

const std::vector<RuleCase> kCases = {
    case_of("Plain", adagrad_group()),
    case_of("RateDecays", adagrad_group(0.25)),
    case_of("StartsAbove0", adagrad_group(0, 0.1)),
    case_of("WithDecay", adagrad_group(0.01, 0.5, 0.1)),
    case_of("LargeEps", adagrad_group(0, 0, 0, 0, 0.3)),
    case_of("LikeOptax", adagrad_group(0, 0.1, 0, DSOPT_GROUP_EPS_INSIDE_SQRT, 1e-7)),
    case_of("LikeOptaxFrom0", adagrad_group(0.1, 0, 0, DSOPT_GROUP_EPS_INSIDE_SQRT, 0)),
};
RULE_SUITE(Adagrad, kCases)

TEST(AdagradRule, HasTheDefaultsOfTorch) {
    const dsopt_group group = make_group(DSOPT_ALGORITHM_ADAGRAD, 0);
    EXPECT_EQ(group.lr, 1e-2);
    EXPECT_EQ(group.eps, 1e-10);
    for (const double zero : {group.beta1, group.beta2, group.lr_decay, group.initial_accumulator_value})
        EXPECT_EQ(zero, 0);
}

// torch.optim.Adagrad(lr=0.1, lr_decay=0.5, weight_decay=0.01, initial_accumulator_value=0.25, eps=0) on p = 1 with
// gradients 0.5, -0.25: computed by hand from the documented algorithm.
TEST(AdagradRule, MatchesStepsComputedByHand) {
    dsopt_group group = adagrad_group(0.5, 0.25, 0.01, 0, 0);
    group.lr = 0.1;
    const Trainer trainer(shapes_of({1}), group);
    trainer.model.params[0].set(0, 1);
    const double sums[] = {0.5101, 0.56804264281}, wanted[] = {0.92859284, 0.9498844};
    const float gradients[] = {0.5f, -0.25f};
    for (int t = 0; t < 2; ++t) {
        trainer.model.grads[0].set(0, gradients[t]);
        must(trainer.step(trainer.arguments()));
        EXPECT_NEAR(exported(trainer.opt(), 0, "sum")[0], sums[t], 1e-6);
        EXPECT_NEAR(trainer.model.params[0][0], wanted[t], 1e-6);
    }
}

TEST(AdagradRule, InitializesSumsAtStartAndReset) {
    const Trainer trainer(shapes_of({1, 255, 256, 257, 5000, 0}), adagrad_group(0, 0.1));
    dsopt_optimizer *const opt = trainer.opt();
    const auto expect_all = [&](float value) {
        for (int64_t i = 0; i < 6; ++i)
            for (const float element : exported(opt, i, "sum")) ASSERT_EQ(element, value) << i;
    };
    expect_all(0.1f);
    trainer.train(1);
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_INITIAL_ACCUMULATOR_VALUE, 0.75));
    EXPECT_GT(exported(opt, 0, "sum")[0], 0.1f);
    EXPECT_OK(dsopt_optimizer_reset(opt, DSOPT_RESET_MOMENTS, nullptr));
    expect_all(0.75f);
}

TEST(AdagradRule, ReadsAndSetsItsHyperParameters) {
    const Trainer trainer(shapes_of({4}), adagrad_group(0.5));
    dsopt_optimizer *const opt = trainer.opt();
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_LR_DECAY), 0.5);
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_LR_DECAY, 0.125));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_LR_DECAY), 0.125);
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_LR_DECAY, -1), DSOPT_ERR_ARGUMENT, "lr_decay|-1"));
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_MOMENTUM, 0.5), DSOPT_ERR_UNSUPPORTED, "momentum|SGD"));
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_EPS_INSIDE_SQRT, 1));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_EPS_INSIDE_SQRT), 1);
}

TEST(AdagradRule, RefusesValuesOutOfRangeOrWithoutEffect) {
    expect_refused(adagrad_group(-1), DSOPT_ERR_ARGUMENT, "lr_decay|-1");
    expect_refused(adagrad_group(0, -0.5), DSOPT_ERR_ARGUMENT, "initial_accumulator_value|-0.5");
    expect_refused(adagrad_group(0, 1e39), DSOPT_ERR_ARGUMENT, "initial_accumulator_value|1e+39");
    expect_refused(adagrad_group(0, 0, 0, DSOPT_GROUP_NESTEROV), DSOPT_ERR_UNSUPPORTED, "nesterov|adagrad");
    expect_refused(adagrad_group(), DSOPT_ERR_UNSUPPORTED, "adagrad|standard mode", DSOPT_COMPAT_DEEPSPEED);
    dsopt_group group = adagrad_group();
    group.beta1 = 0.9;
    expect_refused(group, DSOPT_ERR_UNSUPPORTED, "beta1|adagrad");
    group = make_group(DSOPT_ALGORITHM_SGD, 0);
    group.lr_decay = 0.1;
    expect_refused(group, DSOPT_ERR_UNSUPPORTED, "lr_decay|Adagrad");
}

} // namespace rules_adagrad_tests
