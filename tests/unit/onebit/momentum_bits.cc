// SPDX-License-Identifier: Apache-2.0
// DSOPT_OPTIMIZER_MOMENTUM_BITS: gives the bits of 1-bit Adam without the flag, and decodes exp_avg on export.
#include "support/caller_memory.h"
#include "support/onebit.h"

using namespace test;

namespace onebit_momentum_bits_tests {

constexpr int64_t kFreeze = 5;
constexpr uint32_t kBits = DSOPT_OPTIMIZER_MOMENTUM_BITS;

dsopt_group onebit_group() { return group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, kFreeze); }

/// Returns the gradients of a call. Some elements of the first tensor have no gradient in any call.
std::vector<Array> gradients(const Problem &problem, const Trainer &trainer, int rank, int64_t call) {
    std::vector<Array> grads = problem.gradients_for(reduction(trainer), rank, call);
    for (size_t i = 100; i < 140; ++i) grads[0].set(i, 0);
    return grads;
}
void step(Trainer &trainer, const Problem &problem, int rank, int64_t call, bool skip = false) {
    const int32_t skip_flag = 1;
    ASSERT_OK(trainer.step(gradients(problem, trainer, rank, call),
                           [&](dsopt_step &step) { step.skip = skip ? &skip_flag : nullptr; }));
}
/// Returns everything that a step changes except the encoded momentum.
Snapshot snapshot_without_bits(Trainer &trainer) {
    Snapshot all = trainer.snapshot();
    all.erase("exp_avg_bits -1");
    return all;
}
/// Returns exp_avg as it is in memory, without an export.
std::string memory_of_momentum(const Trainer &trainer) {
    for (const dsopt_state_info &info : trainer.state())
        if (std::strcmp(info.name, "exp_avg") == 0 && info.tensor.numel > 0)
            return device_text(info.tensor.data, size_t(info.tensor.numel) * 4);
    return "";
}

LABEL(long_emulated);
TEST(MomentumBits, GivesTheSameBitsAsWithoutTheFlag) {
    for (const int ranks : {1, 2, 3}) {
        const Problem problem = problem_of(ranks);
        with_ranks(ranks, [&](int rank, const Context &ctx, const Comm &comm) {
            Trainer with_bits = trainer_of(ctx, comm, onebit_group(), problem.weights(), kBits),
                    fp32 = trainer_of(ctx, comm, onebit_group(), problem.weights());
            for (int64_t call = 1; call <= 30; ++call) {
                const bool skip = call == kFreeze + 1 || call == 12; // the first compressed step, too
                step(with_bits, problem, rank, call, skip);
                step(fp32, problem, rank, call, skip);
                for (size_t t = 0; t < problem.sizes.size(); ++t)
                    ASSERT_TRUE(same_bits(with_bits.weight(t).floats(), fp32.weight(t).floats())) << call;
                if (call % 7 == 0) {
                    ASSERT_TRUE(same(snapshot_without_bits(with_bits), snapshot_without_bits(fp32)))
                        << "call " << call << ", " << ranks << " ranks";
                }
            }
        });
    }
}

TEST(MomentumBits, DecodesExpAvgOnExport) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer trainer = trainer_of(ctx, comm, onebit_group(), problem.weights(), kBits);
        for (int64_t call = 1; call <= kFreeze; ++call) step(trainer, problem, rank, call);
        const std::string frozen = memory_of_momentum(trainer);
        for (int64_t call = kFreeze + 1; call <= kFreeze + 4; ++call) step(trainer, problem, rank, call);
        EXPECT_EQ(memory_of_momentum(trainer), frozen);
        const std::vector<float> now = trainer.state("exp_avg", 0);
        EXPECT_NE(memory_of_momentum(trainer), frozen);
        for (size_t i = 0; i < now.size(); ++i)
            EXPECT_EQ(now[i] == 0, i >= 100 && i < 140) << "only an element without variance has no momentum, " << i;
    });
}

LABEL(long_emulated);
TEST(MomentumBits, ResumesFromACheckpointWithoutBits) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer first = trainer_of(ctx, comm, onebit_group(), problem.weights(), kBits);
        for (int64_t call = 1; call <= 9; ++call) step(first, problem, rank, call);
        MemoryFile file;
        ASSERT_OK(file.save(first, DSOPT_IO_PARAMS));
        EXPECT_EQ(file.data.find("exp_avg_bits"), std::string::npos);
        for (const uint32_t flags : {kBits, 0u}) {
            Trainer second = trainer_of(ctx, comm, onebit_group(), problem.weights(), flags);
            for (int64_t call = 1; call <= 7; ++call)
                step(second, problem, rank, call + 50); // loading replaces its bits
            ASSERT_OK(file.load(second, DSOPT_IO_PARAMS));
            Trainer third = trainer_of(ctx, comm, onebit_group(), problem.weights(), flags);
            ASSERT_OK(file.load(third, DSOPT_IO_PARAMS));
            for (int64_t call = 10; call <= 15; ++call) {
                step(second, problem, rank, call);
                step(third, problem, rank, call);
            }
            EXPECT_TRUE(same(snapshot_without_bits(second), snapshot_without_bits(third)));
        }
        for (int64_t call = 10; call <= 15; ++call) step(first, problem, rank, call);
        Trainer last = trainer_of(ctx, comm, onebit_group(), problem.weights());
        ASSERT_OK(file.load(last, DSOPT_IO_PARAMS));
        for (int64_t call = 10; call <= 15; ++call) step(last, problem, rank, call);
        EXPECT_TRUE(same(snapshot_without_bits(first), snapshot_without_bits(last)));
    });
}

TEST(MomentumBits, UsesAnImportedMomentumAndAReset) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        Trainer with_bits = trainer_of(ctx, comm, onebit_group(), problem.weights(), kBits),
                fp32 = trainer_of(ctx, comm, onebit_group(), problem.weights());
        int64_t call = 1;
        for (; call <= 9; ++call)
            for (Trainer *trainer : {&with_bits, &fp32}) step(*trainer, problem, rank, call);
        for (Trainer *trainer : {&with_bits, &fp32}) {
            const std::vector<dsopt_state_info> list = trainer->state();
            for (size_t i = 0; i < list.size(); ++i)
                if (std::strcmp(list[i].name, "exp_avg") == 0 && list[i].param == 0) {
                    const std::vector<float> values(size_t(list[i].tensor.numel), 0.25f);
                    must(dsopt_optimizer_import(trainer->opt(), int64_t(i), values.data(), values.size() * 4));
                }
        }
        for (; call <= 12; ++call)
            for (Trainer *trainer : {&with_bits, &fp32}) step(*trainer, problem, rank, call);
        ASSERT_TRUE(same(snapshot_without_bits(with_bits), snapshot_without_bits(fp32)));
        for (const uint32_t what : {DSOPT_RESET_ERRORS, DSOPT_RESET_COUNTERS, DSOPT_RESET_MOMENTS}) {
            for (; call % 10 != 0; ++call)
                for (Trainer *trainer : {&with_bits, &fp32}) step(*trainer, problem, rank, call);
            ++call;
            for (Trainer *trainer : {&with_bits, &fp32}) must(dsopt_optimizer_reset(trainer->opt(), what, nullptr));
            ASSERT_TRUE(same(snapshot_without_bits(with_bits), snapshot_without_bits(fp32))) << what;
            for (int k = 0; k < 3; ++k, ++call)
                for (Trainer *trainer : {&with_bits, &fp32}) step(*trainer, problem, rank, call);
            ASSERT_TRUE(same(snapshot_without_bits(with_bits), snapshot_without_bits(fp32))) << what;
        }
    });
}

TEST(MomentumBits, GrowsForAGroupAddedLater) {
    const Problem problem = problem_of(2);
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        std::vector<Snapshot> all;
        for (const uint32_t flags : {kBits, 0u}) {
            Trainer trainer = trainer_of(ctx, comm, onebit_group(), problem.weights(), flags);
            for (int64_t call = 1; call <= 8; ++call) step(trainer, problem, rank, call);
            Array weight(DSOPT_DTYPE_F32, size_t(70), 0.5f);
            dsopt_param param{};
            param.tensor = weight.tensor();
            param.name = "late";
            dsopt_group group = onebit_group();
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
            all.push_back(snapshot_without_bits(trainer));
        }
        EXPECT_TRUE(same(all[0], all[1]));
    });
}

TEST(MomentumBits, IsRefusedIfNoGroupCanUseIt) {
    const Context ctx = make_context(1);
    const Problem problem = problem_of(1);
    const auto create = [&](int32_t algorithm, int32_t compat, uint32_t param_flags) {
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
    EXPECT_EQ(create(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_NONE, 0), DSOPT_OK);
    EXPECT_EQ(create(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_DEEPSPEED, 0), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(create(DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_COMPAT_NONE, DSOPT_PARAM_MASKED), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(create(DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_COMPAT_NONE, 0), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(create(DSOPT_ALGORITHM_ONEBIT_LAMB, DSOPT_COMPAT_NONE, 0), DSOPT_ERR_UNSUPPORTED);
    EXPECT_EQ(create(DSOPT_ALGORITHM_ADAMW, DSOPT_COMPAT_NONE, 0), DSOPT_ERR_UNSUPPORTED);
}

TEST(MomentumBits, AppliesTheScheduleOfStepWithoutElements) {
    with_ranks(2, [](int, const Context &ctx, const Comm &comm) {
        const std::vector<Array> weights{Array(DSOPT_DTYPE_F32, 0, 1.0f), Array(DSOPT_DTYPE_F32, 0, 1.0f)};
        Trainer trainer = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights, kBits);
        const Trainer pure = trainer_of(ctx, comm, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), weights, kBits);
        CallerMemory caller_memory(pure.opt(), weights, 0);
        must(caller_memory.init());
        const auto remove_empty = [&](dsopt_step &) { // NULL for empty tensors
            for (dsopt_tensor &tensor : caller_memory.state)
                if (tensor.numel == 0) tensor.data = nullptr;
        };
        for (int call = 1; call <= 4; ++call) { // the second call freezes
            ASSERT_OK(trainer.step(weights));
            ASSERT_OK(caller_memory.apply(weights, remove_empty));
            // Reads memory because an export decodes the momentum first.
            const dsopt_state_info info = state_info(trainer.opt(), state_index(trainer.opt(), -1, "schedule"));
            const std::string words = device_text(info.tensor.data, 8 * sizeof(int32_t));
            EXPECT_EQ(words, caller_memory.blocks[caller_memory.index("schedule")].text()) << call;
        }
    });
}

} // namespace onebit_momentum_bits_tests
