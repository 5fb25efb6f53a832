// SPDX-License-Identifier: Apache-2.0
// A load of sharded state in which one rank has no memory: no rank loads.
#include "support/alloc.h"
#include "support/file.h"
#include "support/shard.h"

using namespace test;

namespace memory_load_tests {

// The optimizers are new, so the load allocates their state.
TEST(ShardedLoad, IsRefusedByAllRanksIfOneHasNoMemory) {
    const ShardTraining training{.groups = {make_group(DSOPT_ALGORITHM_ADAMW)}};
    MemoryFile files[2];
    std::array<HookCounter, 2> hooks;
    with_nodes(
        1, 2,
        [&](const NodeRank &rank) {
            const auto trainer = [&] {
                Scaler none;
                dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_SHARD);
                desc.data = rank.data.get();
                return training.trainer(rank.ctx, desc, none);
            };
            Trainer saved = trainer();
            must(saved.step(training.gradients(1)));
            must(files[rank.d].save(saved));
            Trainer loaded = trainer();
            HookCounter &hook = hooks[size_t(rank.d)];
            if (rank.d == 1) hook.failure = {hook.calls, true};
            const std::string before = loaded.model.text();
            const dsopt_status status = load_all(loaded.opt(), {&files[0], &files[1]});
            if (rank.d == 1)
                EXPECT_TRUE(refused(status, DSOPT_ERR_NOMEM));
            else
                EXPECT_TRUE(refused(status, DSOPT_ERR_MISMATCH, "rank 1 refuses its files, so no rank loads"));
            EXPECT_EQ(loaded.report().calls, 0);
            for (int64_t i = 0; i < state_count(loaded.opt()); ++i)
                EXPECT_EQ(state_info(loaded.opt(), i).tensor.data, nullptr);
            EXPECT_EQ(loaded.model.text(), before);
            hook.failure = {};
            EXPECT_OK(load_all(loaded.opt(), {&files[0], &files[1]}));
            EXPECT_EQ(loaded.report().calls, 1);
        },
        [&](int rank) {
            dsopt_context_desc desc = context_desc(1);
            hooks[size_t(rank)].attach(desc);
            return make_context(desc);
        });
}

} // namespace memory_load_tests
