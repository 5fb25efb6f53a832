// SPDX-License-Identifier: Apache-2.0
// DSOPT_OPTIMIZER_MOMENTUM_BITS: the bits of 1-bit Adam without it, and exp_avg whenever somebody asks.
#include "support/onebit.h"
#include "support/owned.h"

using namespace test;

namespace {

constexpr int64_t kFreeze = 5;
constexpr uint32_t kBits = DSOPT_OPTIMIZER_MOMENTUM_BITS;

dsopt_group group_here() { return group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, kFreeze); }

/// Gradients of a call; rows of the first tensor are never used.
std::vector<Array> gradients(const Problem &problem, const Trainer &trainer, int rank, int64_t call) {
    std::vector<Array> grads = problem.wanted(reduction(trainer), rank, call);
    for (size_t i = 100; i < 140; ++i) grads[0].set(i, 0);
    return grads;
}
void take(Trainer &trainer, const Problem &problem, int rank, int64_t call, bool skip = false) {
    const int32_t one = 1;
    ASSERT_OK(trainer.step(gradients(problem, trainer, rank, call),
                           [&](dsopt_step &step) { step.skip = skip ? &one : nullptr; }));
}
/// Everything that a step changes but the rows of bits themselves.
Snapshot seen(Trainer &trainer) {
    Snapshot all = trainer.snapshot();
    all.erase("exp_avg_bits -1");
    return all;
}
/// exp_avg as it is in memory, without asking for it.
std::string memory_of_momentum(const Trainer &trainer) {
    for (const dsopt_state_info &info : trainer.state())
        if (std::strcmp(info.name, "exp_avg") == 0 && info.tensor.numel > 0)
            return device_text(info.tensor.data, size_t(info.tensor.numel) * 4);
    return "";
}

LABEL(long_emulated);
TEST(MomentumBits, StepToTheSameBitsAsWithoutThem) {
    for (const int ranks : {1, 2, 3}) {
        const Problem problem = problem_of(ranks);
        with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
            Trainer with = trainer_of(ctx, comm, group_here(), problem.weights(), kBits),
                    without = trainer_of(ctx, comm, group_here(), problem.weights());
            for (int64_t call = 1; call <= 30; ++call) {
                const bool skip = call == kFreeze + 1 || call == 12; // the first exchange too
                take(with, problem, rank, call, skip);
                take(without, problem, rank, call, skip);
                for (size_t t = 0; t < problem.sizes.size(); ++t)
                    ASSERT_TRUE(same_bits(with.weight(t).floats(), without.weight(t).floats())) << call;
                if (call % 7 == 0) {
                    ASSERT_TRUE(same(seen(with), seen(without))) << "call " << call << ", " << ranks << " ranks";
                }
            }
        });
    }
}

TEST(MomentumBits, LeaveExpAvgAloneUntilSomebodyAsks) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, group_here(), problem.weights(), kBits);
        for (int64_t call = 1; call <= kFreeze; ++call) take(trainer, problem, rank, call);
        const std::string frozen = memory_of_momentum(trainer);
        for (int64_t call = kFreeze + 1; call <= kFreeze + 4; ++call) take(trainer, problem, rank, call);
        EXPECT_EQ(memory_of_momentum(trainer), frozen);
        const std::vector<float> now = trainer.state("exp_avg", 0);
        EXPECT_NE(memory_of_momentum(trainer), frozen);
        for (size_t i = 0; i < now.size(); ++i)
            EXPECT_EQ(now[i] == 0, i >= 100 && i < 140) << "only an element without variance has none, " << i;
    });
}

LABEL(long_emulated);
TEST(MomentumBits, ResumeFromACheckpointThatHasNoneOfThem) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer first = trainer_of(ctx, comm, group_here(), problem.weights(), kBits);
        for (int64_t call = 1; call <= 9; ++call) take(first, problem, rank, call);
        Tape file;
        ASSERT_OK(file.save(first, DSOPT_IO_PARAMS));
        EXPECT_EQ(file.data.find("exp_avg_bits"), std::string::npos);
        for (const uint32_t flags : {kBits, 0u}) {
            Trainer second = trainer_of(ctx, comm, group_here(), problem.weights(), flags);
            for (int64_t call = 1; call <= 7; ++call) take(second, problem, rank, call + 50); // it has bits of its own
            ASSERT_OK(file.load(second, DSOPT_IO_PARAMS));
            Trainer third = trainer_of(ctx, comm, group_here(), problem.weights(), flags);
            ASSERT_OK(file.load(third, DSOPT_IO_PARAMS));
            for (int64_t call = 10; call <= 15; ++call) {
                take(second, problem, rank, call);
                take(third, problem, rank, call);
            }
            EXPECT_TRUE(same(seen(second), seen(third)));
        }
        for (int64_t call = 10; call <= 15; ++call) take(first, problem, rank, call);
        Trainer last = trainer_of(ctx, comm, group_here(), problem.weights());
        ASSERT_OK(file.load(last, DSOPT_IO_PARAMS));
        for (int64_t call = 10; call <= 15; ++call) take(last, problem, rank, call);
        EXPECT_TRUE(same(seen(first), seen(last)));
    });
}

TEST(MomentumBits, GiveWayToAnImportedMomentumAndToAReset) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer with = trainer_of(ctx, comm, group_here(), problem.weights(), kBits),
                without = trainer_of(ctx, comm, group_here(), problem.weights());
        int64_t call = 1;
        for (; call <= 9; ++call)
            for (Trainer *trainer : {&with, &without}) take(*trainer, problem, rank, call);
        for (Trainer *trainer : {&with, &without}) {
            const std::vector<dsopt_state_info> list = trainer->state();
            for (size_t i = 0; i < list.size(); ++i)
                if (std::strcmp(list[i].name, "exp_avg") == 0 && list[i].param == 0) {
                    const std::vector<float> values(size_t(list[i].tensor.numel), 0.25f);
                    must(dsopt_optimizer_import(trainer->opt(), int64_t(i), values.data(), values.size() * 4));
                }
        }
        for (; call <= 12; ++call)
            for (Trainer *trainer : {&with, &without}) take(*trainer, problem, rank, call);
        ASSERT_TRUE(same(seen(with), seen(without)));
        for (const uint32_t what : {DSOPT_RESET_ERRORS, DSOPT_RESET_COUNTERS, DSOPT_RESET_MOMENTS}) {
            for (; call % 10 != 0; ++call)
                for (Trainer *trainer : {&with, &without}) take(*trainer, problem, rank, call);
            ++call;
            for (Trainer *trainer : {&with, &without}) must(dsopt_optimizer_reset(trainer->opt(), what, nullptr));
            ASSERT_TRUE(same(seen(with), seen(without))) << what;
            for (int k = 0; k < 3; ++k, ++call)
                for (Trainer *trainer : {&with, &without}) take(*trainer, problem, rank, call);
            ASSERT_TRUE(same(seen(with), seen(without))) << what;
        }
    });
}

TEST(MomentumBits, MakeRoomForAGroupThatComesLater) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        std::vector<Snapshot> all;
        for (const uint32_t flags : {kBits, 0u}) {
            Trainer trainer = trainer_of(ctx, comm, group_here(), problem.weights(), flags);
            for (int64_t call = 1; call <= 8; ++call) take(trainer, problem, rank, call);
            Array weight(DSOPT_DTYPE_F32, size_t(70), 0.5f);
            dsopt_param param{};
            param.tensor = weight.tensor();
            param.name = "late";
            dsopt_group group = group_here();
            group.flags |= DSOPT_GROUP_NON_FREEZE;
            must(dsopt_optimizer_add_group(trainer.opt(), &group, &param, 1));
            for (int64_t call = 9; call <= 12; ++call) {
                std::vector<Array> grads = gradients(problem, trainer, rank, call);
                grads.emplace_back(DSOPT_DTYPE_F32, size_t(70), 0.1f);
                const std::vector<dsopt_tensor> list = list_of(grads);
                DSOPT_NEW(dsopt_step, step);
                step.grads = list.data();
                step.count = int64_t(list.size());
                ASSERT_OK(dsopt_optimizer_step(trainer.opt(), &step));
            }
            all.push_back(seen(trainer));
        }
        EXPECT_TRUE(same(all[0], all[1]));
    });
}

TEST(MomentumBits, AreRefusedWhereNothingWouldUseThem) {
    const Context ctx = make_context(1);
    const Problem problem = problem_of(1);
    const auto made = [&](int32_t algorithm, int32_t compat, uint32_t param_flags) {
        dsopt_optimizer_desc desc = optimizer_desc(0, kBits);
        desc.compat = compat;
        dsopt_optimizer *opt = nullptr;
        dsopt_status status = dsopt_optimizer_create(ctx.get(), &desc, &opt);
        if (status == DSOPT_OK) {
            Array weight(DSOPT_DTYPE_F32, size_t(8), 1);
            dsopt_param param{};
            param.tensor = weight.tensor();
            param.flags = param_flags;
            const dsopt_group group = std::count(std::begin(kFamily), std::end(kFamily), algorithm) != 0
                                          ? group_for(algorithm, 5)
                                          : group_of(algorithm, 1e-3, 0);
            status = dsopt_optimizer_add_group(opt, &group, &param, 1);
        }
        dsopt_optimizer_destroy(opt);
        return status;
    };
    EXPECT_EQ(made(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_NONE, 0), DSOPT_OK);
    EXPECT_EQ(made(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_DEEPSPEED, 0), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(made(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_NONE, DSOPT_PARAM_MASKED), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(made(DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_COMPAT_NONE, 0), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(made(DSOPT_ALGORITHM_ONEBIT_LAMB, DSOPT_COMPAT_NONE, 0), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(made(DSOPT_ALGORITHM_ADAMW, DSOPT_COMPAT_NONE, 0), DSOPT_ERR_UNSUPPORTED);
}

TEST(MomentumBits, WithoutElementsStepAndApplyGiveTheSameWords) {
    with_ranks(2, [](int, const Context &ctx, const Comm &comm) {
        const std::vector<Array> weights{Array(DSOPT_DTYPE_F32, 0, 1.0f), Array(DSOPT_DTYPE_F32, 0, 1.0f)};
        Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights, kBits);
        const Trainer pure = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights, kBits);
        Owned owned(pure.opt(), weights, 0);
        must(owned.init());
        const auto without_memory = [&](dsopt_step &) { // of what is empty
            for (dsopt_tensor &tensor : owned.state)
                if (tensor.numel == 0) tensor.data = nullptr;
        };
        for (int call = 1; call <= 4; ++call) { // the second one freezes
            ASSERT_OK(trainer.step(weights));
            ASSERT_OK(owned.apply(weights, without_memory));
            // As it is in memory: an export decodes the momentum first.
            const dsopt_state_info info = state_info(trainer.opt(), state_index(trainer.opt(), -1, "schedule"));
            const std::string words = device_text(info.tensor.data, 8 * sizeof(int32_t));
            EXPECT_EQ(words, owned.blocks[owned.index("schedule")].text()) << call;
        }
    });
}

} // namespace
