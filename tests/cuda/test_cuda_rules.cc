// SPDX-License-Identifier: Apache-2.0
// Rules with one moment or none on a device: same bits as on the CPU, in all combinations.
#include "side.h"

using namespace cuda_test;

namespace {

void momentum_free(dsopt_group &group, int) { group.beta1 = group.beta2 = 0; }
void with_momentum(dsopt_group &group, int index) {
    momentum_free(group, index);
    group.momentum = 0.9;
    group.dampening = 0.25;
}
void with_nesterov(dsopt_group &group, int index) { // next to a group without state
    momentum_free(group, index);
    group.momentum = index == 0 ? 0.8 : 0;
    group.flags = index == 0 ? DSOPT_GROUP_NESTEROV : 0;
}
void from_above_zero(dsopt_group &group, int index) {
    momentum_free(group, index);
    group.initial_accumulator_value = 0.1;
    group.lr_decay = 0.2;
}
void like_optax(dsopt_group &group, int index) {
    from_above_zero(group, index);
    group.flags = DSOPT_GROUP_EPS_INSIDE_SQRT;
}

void expect_same_bits_everywhere(int32_t algorithm, void (*change)(dsopt_group &, int), const char *what) {
    Setting setting;
    setting.algorithm = algorithm;
    setting.change = change;
    expect_same_bits(setting, what);
    setting.mixed = true;
    setting.shifted = true;
    setting.desc.max_norm = 1;
    setting.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
    setting.scaler = true;
    setting.out = DSOPT_DTYPE_BF16;
    setting.step_flags = DSOPT_STEP_ZERO_GRADS;
    expect_same_bits(setting, what);
    setting.desc.flags = DSOPT_OPTIMIZER_NO_MASTER;
    setting.desc.max_value = 0.5;
    expect_same_bits(setting, what);
    Setting random;
    random.algorithm = algorithm;
    random.change = change;
    random.param = random.grad = DSOPT_DTYPE_BF16;
    random.desc.flags = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    random.desc.seed = 5;
    expect_same_bits(random, what);
}

class CudaRules : public Cuda {};

TEST_F(CudaRules, StepSgdLikeTheCpu) {
    expect_same_bits_everywhere(DSOPT_ALGORITHM_SGD, momentum_free, "SGD");
    expect_same_bits_everywhere(DSOPT_ALGORITHM_SGD, with_momentum, "SGD with momentum");
    expect_same_bits_everywhere(DSOPT_ALGORITHM_SGD, with_nesterov, "SGD with Nesterov's momentum");
}

TEST_F(CudaRules, StepAdagradLikeTheCpu) {
    expect_same_bits_everywhere(DSOPT_ALGORITHM_ADAGRAD, from_above_zero, "Adagrad");
    expect_same_bits_everywhere(DSOPT_ALGORITHM_ADAGRAD, like_optax, "Adagrad with eps inside");
}

TEST_F(CudaRules, StepLionLikeTheCpu) { expect_same_bits_everywhere(DSOPT_ALGORITHM_LION, nullptr, "Lion"); }

} // namespace
