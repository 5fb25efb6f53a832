// SPDX-License-Identifier: Apache-2.0
// State tensor "step": one count per parameter, whichever counter a step takes it from.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace {

enum class Mode { standard, compat };
constexpr Mode kModes[] = {Mode::standard, Mode::compat};
using Counts = std::vector<int32_t>;

dsopt_group adam() {
    dsopt_group group = make_group(DSOPT_ALGORITHM_ADAMW);
    group.lr = 0.125;
    group.beta1 = 0.5;
    group.beta2 = 0.75;
    return group;
}
dsopt_optimizer_desc desc_of(Mode mode) {
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.compat = mode == Mode::compat ? DSOPT_COMPAT_DEEPSPEED : DSOPT_COMPAT_NONE;
    desc.nonfinite = DSOPT_NONFINITE_SKIP;
    return desc;
}
Trainer three(Mode mode) { return {shapes_of({3, 70, 5}), adam(), desc_of(mode)}; }

void import_counts(const Trainer &trainer, const Counts &counts) {
    const int64_t index = state_index(trainer.opt(), -1, "step");
    ASSERT_OK(dsopt_optimizer_import(trainer.opt(), index, counts.data(), counts.size() * sizeof(int32_t)));
}
void zero_moments(const Trainer &trainer, int64_t param) {
    for (const char *name : {"exp_avg", "exp_avg_sq"}) {
        const int64_t index = state_index(trainer.opt(), param, name);
        const std::vector<float> zeros(size_t(state_info(trainer.opt(), index).tensor.numel), 0.0f);
        ASSERT_OK(dsopt_optimizer_import(trainer.opt(), index, zeros.data(), zeros.size() * sizeof(float)));
    }
}
void copy_tensor(const Trainer &from, Trainer &to, size_t param) {
    to.model.params[param].write(from.model.params[param].text());
}

TEST(StepCount, DoesNotChangeInASkippedStepWithAbsentGradients) {
    for (const Mode mode : kModes) {
        Trainer trainer = three(mode);
        trainer.train(1);
        const Counts before = steps(trainer.opt());
        EXPECT_EQ(before, mode == Mode::standard ? (Counts{1, 1, 1}) : (Counts{0, 0, 1}));
        trainer.model.make_gradients(2);
        trainer.model.grads[0].set(1, NAN);
        trainer.grads[2].data = nullptr;
        ASSERT_OK(trainer.step(trainer.arguments()));
        EXPECT_EQ(trainer.report().skipped, 1);
        EXPECT_EQ(steps(trainer.opt()), before);
        trainer.model.make_gradients(3);
        ASSERT_OK(trainer.step(trainer.arguments()));
        // Compat mode counts in the last tensor that has a gradient.
        EXPECT_EQ(steps(trainer.opt()), mode == Mode::standard ? (Counts{2, 2, 1}) : (Counts{0, 1, 1}));
    }
}

TEST(StepCount, IsTakenFromAnImport) {
    for (const Mode mode : kModes) {
        Trainer trainer = three(mode);
        trainer.train(1, 2);
        import_counts(trainer, {4, 0, 9});
        // The same tensors in optimizers in which all counts are those that a step takes.
        std::vector<Trainer> others;
        for (const int32_t count : {4, 0, 9}) {
            others.push_back(three(mode));
            others.back().train(1, 2);
            import_counts(others.back(), Counts(3, mode == Mode::standard ? count : 9));
        }
        trainer.train(3);
        for (const Trainer &other : others) other.train(3);
        EXPECT_EQ(steps(trainer.opt()), mode == Mode::standard ? (Counts{5, 1, 10}) : (Counts{4, 0, 10}));
        for (size_t i = 0; i < 3; ++i) EXPECT_EQ(trainer.model.params[i].text(), others[i].model.params[i].text()) << i;
    }
}

TEST(StepCount, OfOneTensorIsResetWithoutTheOthers) {
    Trainer trainer = three(Mode::standard), going_on = three(Mode::standard), fresh = three(Mode::standard);
    trainer.train(1, 3);
    going_on.train(1, 3);
    import_counts(trainer, {3, 0, 3});
    zero_moments(trainer, 1);
    copy_tensor(trainer, fresh, 1);
    trainer.train(4);
    going_on.train(4);
    fresh.train(4);
    EXPECT_EQ(steps(trainer.opt()), (Counts{4, 1, 4}));
    EXPECT_EQ(trainer.model.params[0].text(), going_on.model.params[0].text());
    EXPECT_EQ(trainer.model.params[1].text(), fresh.model.params[1].text());
    EXPECT_EQ(trainer.model.params[2].text(), going_on.model.params[2].text());
}

} // namespace
