// SPDX-License-Identifier: Apache-2.0
// With DSOPT_OPTIMIZER_CHECK_RANKS other ranks are told of a rank that runs out of memory in a step: none waits for it.
#include "support/onebit.h"

#include "support/alloc.h"

using namespace test;

namespace memory_ranks_tests {

/// Makes the first step of two ranks, in which allocation `n` of rank 1 fails once, then another step. Returns what
/// both ranks have then. Adds 1 to `refused_steps` if the first step was refused. `calls`: the allocations of rank 1 in
/// it.
std::string first_steps(const dsopt_group &group, uint32_t flags, int64_t n, int &refused_steps, int64_t &calls) {
    std::string texts[2];
    with_ranks(2, [&](int rank, const Context &ctx, const Comm &comm) {
        const std::vector<Array> grads = {Array(DSOPT_DTYPE_F32, 70, 0.5f), Array(DSOPT_DTYPE_F32, 30, float(rank))};
        Trainer trainer(ctx, desc_with(comm, DSOPT_COMPAT_NONE, flags | DSOPT_OPTIMIZER_CHECK_RANKS), group,
                        std::vector<Array>{Array(DSOPT_DTYPE_F32, 70, 1), Array(DSOPT_DTYPE_F32, 30, 2)});
        const std::vector<dsopt_tensor> list = list_of(grads);
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        dsopt_status status;
        if (rank == 1) {
            NewCounter::calls = 0;
            NewCounter::failure = {n, false};
            {
                const CountScope armed;
                status = dsopt_optimizer_step(trainer.opt(), &step);
            }
            NewCounter::failure = {};
            calls = NewCounter::calls;
        } else {
            status = dsopt_optimizer_step(trainer.opt(), &step);
        }
        if (status != DSOPT_OK) {
            if (rank == 1)
                EXPECT_EQ(status, DSOPT_ERR_NOMEM) << dsopt_last_error();
            else
                EXPECT_TRUE(refused(status, DSOPT_ERR_MISMATCH, "the step of rank 1 failed before"));
            refused_steps += rank;
            EXPECT_OK(dsopt_optimizer_step(trainer.opt(), &step)) << " after allocation " << n;
        }
        EXPECT_OK(dsopt_optimizer_step(trainer.opt(), &step));
        for (const auto &[key, bytes] : trainer.snapshot()) texts[rank] += key + bytes;
    });
    return texts[0] + texts[1];
}

TEST(OutOfMemoryRank, IsReportedToTheOtherRanks) {
    struct Case {
        dsopt_group group;
        uint32_t flags;
    };
    const Case cases[] = {{make_group(DSOPT_ALGORITHM_ADAMW), 0},
                          {make_group(DSOPT_ALGORITHM_LAMB), DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_SHARD},
                          {make_group(DSOPT_ALGORITHM_ONEBIT_ADAM), 0}};
    for (const auto &[group, flags] : cases) {
        int refused_steps = 0;
        int64_t total = 0, ignored = 0;
        const std::string wanted = first_steps(group, flags, -1, refused_steps, total);
        EXPECT_EQ(refused_steps, 0);
        EXPECT_GT(total, 5);
        for (int64_t n = 0; n < total && !HasFailure(); n += kSanitized ? 3 : 1)
            EXPECT_TRUE(same(first_steps(group, flags, n, refused_steps, ignored), wanted)) << "allocation " << n;
        // Some allocations are optional, such as a buffer to sort faster.
        EXPECT_GT(refused_steps, total / (kSanitized ? 6 : 2)) << "algorithm " << group.algorithm;
    }
}

} // namespace memory_ranks_tests
