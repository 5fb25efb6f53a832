// SPDX-License-Identifier: Apache-2.0
// Compares SGD with the documented formula of torch.optim.SGD.
#include "support/rules.h"

using namespace test;

LABEL_FILE(one_thread);

namespace rules_sgd_tests {

double reference(const dsopt_group &c, int64_t t, double g, double &p, double &buffer) {
    double size = std::fabs(p) + c.lr * (std::fabs(g) + c.weight_decay * std::fabs(p) + 2 * std::fabs(buffer));
    g += c.weight_decay * p;
    if (c.momentum != 0) {
        buffer = t == 1 ? g : c.momentum * buffer + (1 - c.dampening) * g;
        g = c.flags & DSOPT_GROUP_NESTEROV ? g + c.momentum * buffer : buffer;
    }
    p -= c.lr * g;
    return size + std::fabs(g);
}

dsopt_group sgd_group(double momentum = 0, double dampening = 0, int32_t flags = 0, double decay = 0) {
    dsopt_group group = make_group(DSOPT_ALGORITHM_SGD, decay, uint32_t(flags));
    group.lr = 0.05;
    group.momentum = momentum;
    group.dampening = dampening;
    return group;
}

const std::vector<RuleCase> kCases = {
    {"Plain", sgd_group(), "", reference},
    {"PlainWithDecay", sgd_group(0, 0, 0, 0.1), "", reference},
    {"Momentum", sgd_group(0.9), "momentum_buffer", reference},
    {"MomentumWithDecay", sgd_group(0.9, 0, 0, 0.1), "momentum_buffer", reference},
    {"Dampened", sgd_group(0.8, 0.3), "momentum_buffer", reference},
    {"FullyDampened", sgd_group(0.5, 1), "momentum_buffer", reference},
    {"Nesterov", sgd_group(0.9, 0, DSOPT_GROUP_NESTEROV), "momentum_buffer", reference},
    {"NesterovWithDecay", sgd_group(0.7, 0, DSOPT_GROUP_NESTEROV, 0.2), "momentum_buffer", reference},
};
RULE_SUITE(Sgd, kCases)

TEST(SgdRule, HasTheDefaultsOfTorch) {
    const dsopt_group group = make_group(DSOPT_ALGORITHM_SGD, 0);
    EXPECT_EQ(group.lr, 1e-3);
    for (const double zero : {group.beta1, group.beta2, group.eps, group.momentum, group.dampening}) EXPECT_EQ(zero, 0);
}

// torch.optim.SGD(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01) on p = 1 with gradients 0.5, -0.25, 1:
// computed by hand from the documented algorithm.
TEST(SgdRule, MatchesStepsComputedByHand) {
    dsopt_group group = sgd_group(0.9, 0.5, 0, 0.01);
    group.lr = 0.1;
    const Trainer trainer(shapes_of({1}), group);
    trainer.model.params[0].set(0, 1);
    const double wanted[] = {0.949, 0.9151255, 0.83418088725}, buffers[] = {0.51, 0.338745, 0.8094461275};
    const float gradients[] = {0.5f, -0.25f, 1.0f};
    for (int t = 0; t < 3; ++t) {
        trainer.model.grads[0].set(0, gradients[t]);
        must(trainer.step(trainer.arguments()));
        EXPECT_NEAR(exported(trainer.opt(), 0, "momentum_buffer")[0], buffers[t], 1e-7);
        EXPECT_NEAR(trainer.model.params[0][0], wanted[t], 1e-7);
    }
}

// The first step is the first one that updates the tensor. Steps without its gradient and skipped steps do not count.
TEST(SgdRule, InitializesTheBufferWithTheFirstGradient) {
    const Trainer trainer(shapes_of({3, 3}), sgd_group(0.9, 0.5));
    dsopt_step step = trainer.arguments();
    std::vector<dsopt_tensor> grads = trainer.grads;
    grads[1].data = nullptr;
    step.grads = grads.data();
    must(trainer.step(step));
    const int32_t skip = 1;
    dsopt_step skipped = trainer.arguments();
    skipped.skip = on_device(skip);
    must(trainer.step(skipped));
    must(trainer.step(trainer.arguments()));
    EXPECT_EQ(steps(trainer.opt()), (std::vector<int32_t>{2, 1}));
    for (int64_t k = 0; k < 3; ++k) {
        EXPECT_EQ(exported(trainer.opt(), 1, "momentum_buffer")[size_t(k)], trainer.model.grads[1][size_t(k)]);
        EXPECT_NE(exported(trainer.opt(), 0, "momentum_buffer")[size_t(k)], trainer.model.grads[0][size_t(k)]);
    }
}

TEST(SgdRule, RefusesValuesOutOfRangeOrWithoutEffect) {
    expect_refused(sgd_group(-0.1), DSOPT_ERR_ARGUMENT, "momentum|-0.1");
    expect_refused(sgd_group(INFINITY), DSOPT_ERR_ARGUMENT, "momentum|inf");
    expect_refused(sgd_group(0.9, 1.5), DSOPT_ERR_ARGUMENT, "dampening|1.5");
    expect_refused(sgd_group(0, 0.5), DSOPT_ERR_UNSUPPORTED, "dampening|without momentum");
    expect_refused(sgd_group(0, 0, DSOPT_GROUP_NESTEROV), DSOPT_ERR_UNSUPPORTED, "nesterov|without momentum");
    expect_refused(sgd_group(0.9, 0.1, DSOPT_GROUP_NESTEROV), DSOPT_ERR_ARGUMENT, "dampening|0.1|nesterov");
    expect_refused(sgd_group(0, 0, DSOPT_GROUP_NO_BIAS_CORRECTION), DSOPT_ERR_UNSUPPORTED, "no_bias_correction|sgd");
    dsopt_group group = sgd_group();
    group.beta1 = 0.9;
    expect_refused(group, DSOPT_ERR_UNSUPPORTED, "beta1|sgd");
    group = make_group(DSOPT_ALGORITHM_ADAMW);
    group.momentum = 0.9;
    expect_refused(group, DSOPT_ERR_UNSUPPORTED, "momentum|adamw");
    expect_refused(make_group(DSOPT_ALGORITHM_ADAM, 0, DSOPT_GROUP_NESTEROV), DSOPT_ERR_UNSUPPORTED, "nesterov|adam");
    expect_refused(sgd_group(0.9), DSOPT_ERR_UNSUPPORTED, "sgd|standard mode", DSOPT_COMPAT_DEEPSPEED);
}

TEST(SgdRule, ReadsAndSetsItsHyperParameters) {
    const Trainer trainer(shapes_of({4}), sgd_group(0.9));
    dsopt_optimizer *const opt = trainer.opt();
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_MOMENTUM, 0.5));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_MOMENTUM), 0.5);
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_DAMPENING, 0.25));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_DAMPENING), 0.25);
    EXPECT_TRUE(refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NESTEROV, 1), DSOPT_ERR_ARGUMENT, "dampening|0.25"));
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_DAMPENING, 0));
    EXPECT_OK(dsopt_optimizer_set(opt, 0, DSOPT_KEY_NESTEROV, 1));
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_NESTEROV), 1);
    EXPECT_EQ(get(opt, 0, DSOPT_KEY_BIAS_CORRECTION), 0);
    double value = 7;
    EXPECT_TRUE(refused(dsopt_optimizer_get(opt, 0, DSOPT_KEY_BETA2, &value), DSOPT_ERR_UNSUPPORTED, "sgd|beta2"));
    EXPECT_TRUE(
        refused(dsopt_optimizer_set(opt, 0, DSOPT_KEY_BIAS_CORRECTION, 1), DSOPT_ERR_UNSUPPORTED, "bias correction"));
    EXPECT_EQ(value, 7);
}

// The momentum buffer cannot be added or removed after the group was created.
TEST(SgdRule, CannotAddOrRemoveTheMomentumBuffer) {
    const Trainer with(shapes_of({4}), sgd_group(0.9)), without(shapes_of({4}), sgd_group());
    EXPECT_TRUE(refused(dsopt_optimizer_set(with.opt(), 0, DSOPT_KEY_MOMENTUM, 0), DSOPT_ERR_UNSUPPORTED,
                        "momentum_buffer|group 0"));
    EXPECT_TRUE(refused(dsopt_optimizer_set(without.opt(), 0, DSOPT_KEY_MOMENTUM, 0.5), DSOPT_ERR_UNSUPPORTED,
                        "momentum_buffer|group 0"));
    EXPECT_EQ(get(with.opt(), 0, DSOPT_KEY_MOMENTUM), 0.9);
    const Folder folder;
    const std::string path = folder / "sgd.safetensors";
    with.train(1);
    EXPECT_OK(dsopt_optimizer_save(with.opt(), path.c_str(), nullptr));
    EXPECT_TRUE(refused(dsopt_optimizer_load(without.opt(), path.c_str(), nullptr), DSOPT_ERR_MISMATCH,
                        "group 0|momentum_buffer"));
    EXPECT_OK(dsopt_optimizer_save(without.opt(), path.c_str(), nullptr));
    EXPECT_TRUE(refused(dsopt_optimizer_load(with.opt(), path.c_str(), nullptr), DSOPT_ERR_MISMATCH,
                        "group 0|momentum_buffer"));
}

TEST(SgdRule, ReadsMomentumFromBackendMemory) {
    const Trainer host(shapes_of({100}), sgd_group(0.9)), device(shapes_of({100}), sgd_group(0.9));
    std::vector<float> row(DSOPT_HYPER_FLOATS, NAN);
    for (int t = 1; t <= 4; ++t) {
        const float momentum = 0.5f + 0.1f * float(t);
        must(dsopt_optimizer_set(host.opt(), 0, DSOPT_KEY_MOMENTUM, double(momentum)));
        host.train(uint64_t(t));
        row[DSOPT_HYPER_MOMENTUM] = momentum;
        device.model.make_gradients(uint64_t(t));
        dsopt_step step = device.arguments();
        step.hyper = on_device(row);
        must(device.step(step));
    }
    EXPECT_TRUE(same(device.text(), host.text()));
    const std::string before = device.text();
    for (const float bad : {0.0f, -0.5f, INFINITY}) { // 0: the momentum buffer would be unused
        row[DSOPT_HYPER_MOMENTUM] = bad;
        dsopt_step step = device.arguments();
        step.hyper = on_device(row);
        must(device.step(step));
        EXPECT_EQ(report_of(device.opt()).reasons, DSOPT_SKIP_HYPER) << bad;
    }
    EXPECT_TRUE(same(device.text(), before));
    const Trainer plain(shapes_of({100}), sgd_group());
    row[DSOPT_HYPER_MOMENTUM] = 0.5f;
    dsopt_step step = plain.arguments();
    step.hyper = on_device(row);
    must(plain.step(step));
    EXPECT_EQ(report_of(plain.opt()).reasons, DSOPT_SKIP_HYPER);
    row[DSOPT_HYPER_MOMENTUM] = 0;
    step.hyper = on_device(row);
    must(plain.step(step));
    EXPECT_EQ(report_of(plain.opt()).reasons, 0);
}

} // namespace rules_sgd_tests
