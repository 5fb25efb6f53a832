// SPDX-License-Identifier: Apache-2.0
// State tensor "step": one step count per parameter, in standard and in compat mode.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace step_counting_tests {

enum class Mode { standard, compat };
constexpr Mode kModes[] = {Mode::standard, Mode::compat};
using Counts = std::vector<int32_t>;

dsopt_group adam_group() {
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
Trainer make_trainer(Mode mode) { return {shapes_of({3, 70, 5}), adam_group(), desc_of(mode)}; }

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
        Trainer trainer = make_trainer(mode);
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
        // Compat mode increments the count of the last tensor that has a gradient.
        EXPECT_EQ(steps(trainer.opt()), mode == Mode::standard ? (Counts{2, 2, 1}) : (Counts{0, 1, 1}));
    }
}

TEST(StepCount, IsReadFromImportedState) {
    for (const Mode mode : kModes) {
        Trainer trainer = make_trainer(mode);
        trainer.train(1, 2);
        import_counts(trainer, {4, 0, 9});
        // The same tensors in optimizers in which all parameters have one count.
        std::vector<Trainer> others;
        for (const int32_t count : {4, 0, 9}) {
            others.push_back(make_trainer(mode));
            others.back().train(1, 2);
            import_counts(others.back(), Counts(3, mode == Mode::standard ? count : 9));
        }
        trainer.train(3);
        for (const Trainer &other : others) other.train(3);
        EXPECT_EQ(steps(trainer.opt()), mode == Mode::standard ? (Counts{5, 1, 10}) : (Counts{4, 0, 10}));
        for (size_t i = 0; i < 3; ++i) EXPECT_EQ(trainer.model.params[i].text(), others[i].model.params[i].text()) << i;
    }
}

TEST(StepCount, CanBeResetForOneTensor) {
    Trainer trainer = make_trainer(Mode::standard), continued = make_trainer(Mode::standard),
            restarted = make_trainer(Mode::standard);
    trainer.train(1, 3);
    continued.train(1, 3);
    import_counts(trainer, {3, 0, 3});
    zero_moments(trainer, 1);
    copy_tensor(trainer, restarted, 1);
    trainer.train(4);
    continued.train(4);
    restarted.train(4);
    EXPECT_EQ(steps(trainer.opt()), (Counts{4, 1, 4}));
    EXPECT_EQ(trainer.model.params[0].text(), continued.model.params[0].text());
    EXPECT_EQ(trainer.model.params[1].text(), restarted.model.params[1].text());
    EXPECT_EQ(trainer.model.params[2].text(), continued.model.params[2].text());
}

} // namespace step_counting_tests
