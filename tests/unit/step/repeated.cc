// SPDX-License-Identifier: Apache-2.0
// A step with the lists of the previous step reuses its checks and its plan. Each test compares with an optimizer that
// checks and plans every step, because a hyper-parameter is set before each of its steps.
#include "support/harness.h"

using namespace test;

LABEL_FILE(one_thread);

namespace step_repeated_tests {

const std::vector<int64_t> kSizes{1, 0, 7, 255, 256, 4097, 33};

struct Pair {
    Trainer repeated, replanned;
    explicit Pair(const dsopt_group &group, const dsopt_optimizer_desc &desc = optimizer_desc(),
                  int32_t dtype = DSOPT_DTYPE_F32, size_t added = SIZE_MAX) :
        repeated(shapes_of(kSizes, dtype, dtype), desc),
        replanned(shapes_of(kSizes, dtype, dtype), desc) {
        for (Trainer *trainer : {&repeated, &replanned}) trainer->add(group, std::min(added, kSizes.size()));
    }
    void train(uint64_t seed) const {
        repeated.train(seed);
        invalidate_plan();
        replanned.train(seed);
    }
    void invalidate_plan() const {
        must(dsopt_optimizer_set(replanned.opt(), 0, DSOPT_KEY_LR, get(replanned.opt(), 0, DSOPT_KEY_LR)));
    }
    void expect_same(const std::string &when) const { EXPECT_TRUE(repeated.text() == replanned.text()) << when; }
};

class PlanReuse : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Algorithms, PlanReuse, testing::ValuesIn(kAlgorithms), algorithm_name);

TEST_P(PlanReuse, GivesTheBitsOfNewPlans) {
    for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16})
        for (const double max_norm : {0.0, 0.5})
            for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
                dsopt_optimizer_desc desc = optimizer_desc(max_norm);
                desc.compat = compat;
                const Pair pair(make_group(GetParam()), desc, dtype);
                for (uint64_t seed = 1; seed <= 5; ++seed) pair.train(seed);
                pair.expect_same(std::to_string(dtype) + ", " + std::to_string(max_norm) + ", " +
                                 std::to_string(compat));
            }
}

TEST_P(PlanReuse, AppliesChangesFromTheNextStep) {
    const Pair pair(make_group(GetParam()));
    const auto both = [&](const std::function<void(const Trainer &)> &change) {
        change(pair.repeated);
        change(pair.replanned);
        pair.train(7);
    };
    pair.train(1);
    pair.train(2);
    both([](const Trainer &t) { must(dsopt_optimizer_set(t.opt(), 0, DSOPT_KEY_LR, 0.25)); });
    pair.expect_same("after setting lr");
    both([](const Trainer &t) { must(dsopt_optimizer_set(t.opt(), DSOPT_ALL_GROUPS, DSOPT_KEY_MAX_NORM, 0.125)); });
    pair.expect_same("after setting max_norm");
    both([](const Trainer &t) { must(dsopt_optimizer_reset(t.opt(), DSOPT_RESET_MOMENTS, nullptr)); });
    pair.expect_same("after a reset");
    for (int round = 0; round < 2; ++round)
        both([](const Trainer &t) {
            const double lr = get(t.opt(), 0, DSOPT_KEY_LR);
            MemoryFile memory_file;
            must(dsopt_optimizer_set(t.opt(), 0, DSOPT_KEY_LR, lr / 2));
            must(memory_file.save(t));
            must(dsopt_optimizer_set(t.opt(), 0, DSOPT_KEY_LR, lr));
            must(memory_file.load(t)); // sets lr / 2
        });
    pair.expect_same("after a load");
}

TEST(RepeatedStep, UpdatesNewlyBoundParameters) {
    const Pair pair(make_group(DSOPT_ALGORITHM_ADAMW));
    pair.train(1);
    pair.train(2);
    std::vector<std::vector<Array>> moved;
    for (const Trainer *trainer : {&pair.repeated, &pair.replanned}) {
        moved.emplace_back(trainer->model.params);
        const std::vector<dsopt_tensor> list = list_of(moved.back());
        must(dsopt_optimizer_bind(trainer->opt(), DSOPT_BIND_PARAMS, list.data(), int64_t(list.size())));
    }
    const std::string old = pair.repeated.model.text();
    pair.train(3);
    pair.expect_same("after bind");
    EXPECT_EQ(pair.repeated.model.text(), old) << "the old memory was written";
    for (size_t i = 0; i < kSizes.size(); ++i) EXPECT_EQ(moved[0][i].text(), moved[1][i].text()) << i;
}

TEST(RepeatedStep, ReadsAnotherGradientList) {
    const Pair pair(make_group(DSOPT_ALGORITHM_LAMB));
    pair.train(1);
    pair.train(2);
    std::vector<Array> others;
    for (const int64_t n : kSizes) others.emplace_back(DSOPT_DTYPE_F32, size_t(n), 0.25f);
    for (int round = 0; round < 3; ++round) {
        std::vector<dsopt_tensor> list = list_of(others);
        if (round == 1) list[3].data = nullptr; // absent in this round
        for (const Trainer *trainer : {&pair.repeated, &pair.replanned}) {
            dsopt_step step = trainer->arguments();
            step.grads = list.data();
            if (trainer == &pair.replanned) pair.invalidate_plan();
            ASSERT_OK(trainer->step(step));
            if (trainer == &pair.replanned) pair.invalidate_plan();
            ASSERT_OK(trainer->step(step)) << "second step";
        }
        pair.expect_same(std::to_string(round));
        EXPECT_EQ(steps(pair.repeated.opt()), steps(pair.replanned.opt()));
    }
}

TEST(RepeatedStep, ReadsGradientsAtNewAddresses) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_SGD})
        for (const int32_t dtype : {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16}) {
            const Pair pair(make_group(algorithm), optimizer_desc(0.5), dtype);
            pair.train(1);
            std::vector<std::vector<Array>> lists;
            for (int index = 0; index < 3; ++index) {
                lists.emplace_back();
                for (const int64_t n : kSizes)
                    lists.back().emplace_back(dtype, size_t(n), 0.25f + 0.125f * float(index));
            }
            for (const size_t index : {0, 1, 2, 2, 0, 1, 1}) {
                std::vector<dsopt_tensor> list = list_of(lists[index]);
                for (const Trainer *trainer : {&pair.repeated, &pair.replanned}) {
                    if (trainer == &pair.replanned) pair.invalidate_plan();
                    dsopt_step step = trainer->arguments();
                    step.grads = list.data();
                    ASSERT_OK(trainer->step(step));
                }
                list[2].data = nullptr; // the step must not read the list after it has returned
                pair.expect_same(std::to_string(algorithm) + ", " + std::to_string(dtype));
            }
        }
}

TEST(RepeatedStep, ReadsNoOtherFieldOfAnAbsentTensor) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        const Pair pair(make_group(algorithm));
        std::vector<std::vector<Array>> grads(2), outs(2); // at addresses that alternate
        for (size_t index : {0, 1})
            for (const int64_t n : kSizes) {
                grads[index].emplace_back(DSOPT_DTYPE_F32, size_t(n), 0.25f);
                outs[index].emplace_back(DSOPT_DTYPE_BF16, size_t(n), 0.0f);
            }
        for (const size_t index : {0, 1, 0, 0, 1}) {
            std::vector<dsopt_tensor> grad_list = list_of(grads[index]), out_list = list_of(outs[index]);
            grad_list[3] = out_list[2] = {}; // dtype 0 is none
            for (const Trainer *trainer : {&pair.repeated, &pair.replanned}) {
                if (trainer == &pair.replanned) pair.invalidate_plan();
                dsopt_step step = trainer->arguments();
                step.grads = grad_list.data();
                step.out = out_list.data();
                ASSERT_OK(trainer->step(step));
            }
            pair.expect_same(std::to_string(algorithm));
        }
    }
}

TEST(RepeatedStep, RefusesABadListAndContinuesWithAGoodOne) {
    const Pair pair(make_group(DSOPT_ALGORITHM_ADAMW));
    pair.train(1);
    pair.train(2);
    const std::string before = pair.repeated.text();
    dsopt_step step = pair.repeated.arguments();
    std::vector<dsopt_tensor> list(step.grads, step.grads + step.count);
    list[5].numel -= 1;
    step.grads = list.data();
    EXPECT_TRUE(refused(pair.repeated.step(step), DSOPT_ERR_SHAPE, "4096|4097"));
    list[5].numel += 1;
    list[5].dtype = DSOPT_DTYPE_I32;
    EXPECT_TRUE(refused(pair.repeated.step(step), DSOPT_ERR_DTYPE, "gradient"));
    list[5].dtype = DSOPT_DTYPE_F32;
    list[5].data = static_cast<char *>(list[5].data) + 2; // all other fields are valid
    EXPECT_TRUE(refused(pair.repeated.step(step), DSOPT_ERR_ALIGNMENT, "'p5'"));
    list[5].data = static_cast<char *>(list[5].data) - 2;
    list[5].reserved = 1;
    EXPECT_TRUE(refused(pair.repeated.step(step), DSOPT_ERR_ARGUMENT, "reserved"));
    list[5].reserved = 0;
    step.flags = 1 << 30;
    EXPECT_TRUE(refused(pair.repeated.step(step), DSOPT_ERR_ARGUMENT, "flags"));
    EXPECT_TRUE(pair.repeated.text() == before);
    pair.train(3);
    pair.expect_same("after refusals");
}

TEST(RepeatedStep, IncludesAGroupAddedInBetween) {
    Pair pair(make_group(DSOPT_ALGORITHM_ADAMW), optimizer_desc(1.0), DSOPT_DTYPE_F32, 4);
    const auto step = [&](uint64_t seed, size_t count) {
        for (const Trainer *trainer : {&pair.repeated, &pair.replanned}) {
            trainer->model.make_gradients(seed);
            dsopt_step arguments = trainer->arguments();
            arguments.count = int64_t(count);
            if (trainer == &pair.replanned) pair.invalidate_plan();
            ASSERT_OK(trainer->step(arguments));
        }
    };
    step(1, 4);
    step(2, 4);
    for (Trainer *trainer : {&pair.repeated, &pair.replanned})
        trainer->add(make_group(DSOPT_ALGORITHM_LAMB), kSizes.size() - 4);
    step(3, kSizes.size());
    step(4, kSizes.size());
    pair.expect_same("two groups");
}

TEST(RepeatedStep, AlternatesWithAccumulatedGradients) {
    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_ACCUMULATE);
    Pair pair(make_group(DSOPT_ALGORITHM_ADAMW), desc);
    pair.train(1);
    pair.train(2);
    for (int round = 0; round < 3; ++round) {
        for (Trainer *trainer : {&pair.repeated, &pair.replanned}) {
            trainer->model.make_gradients(uint64_t(20 + round));
            ASSERT_OK(trainer->accumulate(trainer->model.grads));
            if (trainer == &pair.replanned) pair.invalidate_plan();
            ASSERT_OK(trainer->step_accumulated());
        }
        pair.expect_same("accumulated " + std::to_string(round));
        pair.train(uint64_t(3 + round));
        pair.expect_same("ordinary step " + std::to_string(round));
    }
}

} // namespace step_repeated_tests
