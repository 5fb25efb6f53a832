// SPDX-License-Identifier: Apache-2.0
// Options that sharded state excludes, and the query of parts.
#include "support/shard.h"

using namespace test;

namespace shard_refusals_tests {

constexpr int32_t kShard = DSOPT_OPTIMIZER_SHARD, kInNode = DSOPT_OPTIMIZER_SHARD_NODE;

dsopt_status create(const Context &context, const dsopt_optimizer_desc &desc) {
    dsopt_optimizer *optimizer = nullptr;
    const dsopt_status status = dsopt_optimizer_create(context.get(), &desc, &optimizer);
    dsopt_optimizer_destroy(optimizer);
    return status;
}
dsopt_optimizer_desc with_flags(int32_t flags, const Comm *data = nullptr, const Comm *node = nullptr) {
    dsopt_optimizer_desc desc = optimizer_desc(0, uint32_t(flags));
    if (data != nullptr) desc.data = data->get();
    if (node != nullptr) desc.node = node->get();
    return desc;
}

// The refusals hold with one rank, too.
TEST(ShardRefusals, NameWhatIsMissingOrExcluded) {
    const Context context = make_context(1);
    const Comm data = self_comm(context), node = self_comm(context);
    EXPECT_TRUE(refused(create(context, with_flags(kShard)), DSOPT_ERR_UNSUPPORTED,
                        "SHARD has no effect without dsopt_optimizer_desc.data"));
    EXPECT_TRUE(refused(create(context, with_flags(kInNode, &data)), DSOPT_ERR_UNSUPPORTED,
                        "SHARD_NODE has no effect without dsopt_optimizer_desc.node"));
    EXPECT_TRUE(refused(create(context, with_flags(kShard | kInNode, &data, &node)), DSOPT_ERR_UNSUPPORTED,
                        "SHARD and SHARD_NODE exclude one another"));
    EXPECT_TRUE(refused(create(context, with_flags(DSOPT_OPTIMIZER_AVERAGES)), DSOPT_ERR_UNSUPPORTED,
                        "AVERAGES has no effect without dsopt_optimizer_desc.data"));
    dsopt_optimizer_desc compat = with_flags(kShard, &data);
    compat.compat = DSOPT_COMPAT_DEEPSPEED;
    EXPECT_TRUE(refused(create(context, compat), DSOPT_ERR_UNSUPPORTED,
                        "the original's optimizers keep all state on every rank: SHARD is for standard mode"));
    dsopt_optimizer_desc experts = with_flags(kShard, &data);
    dsopt_comm *const expert = node.get();
    experts.experts = &expert;
    experts.expert_count = 1;
    EXPECT_TRUE(refused(create(context, experts), DSOPT_ERR_UNSUPPORTED,
                        "experts do not go with SHARD: give them an optimizer of their own, on one SHARED scaler"));
    for (const int32_t flags : {kShard, kInNode}) EXPECT_OK(create(context, with_flags(flags, &data, &node)));
}

TEST(ShardRefusals, NameAlgorithmsThatAreNotShardedInThisWay) {
    const Context context = make_context(1);
    const Comm data = self_comm(context), node = self_comm(context);
    const auto add = [&](int32_t flags, int32_t algorithm) {
        const Optimizer optimizer = make_optimizer(context, with_flags(flags, &data, &node));
        const dsopt_group group = make_group(algorithm);
        const dsopt_status status = dsopt_optimizer_add_group(optimizer.get(), &group, nullptr, 0);
        int64_t groups = -1;
        must(dsopt_optimizer_count(optimizer.get(), &groups, nullptr));
        EXPECT_EQ(groups, status == DSOPT_OK);
        return status;
    };
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        EXPECT_TRUE(refused(add(kShard, algorithm), DSOPT_ERR_UNSUPPORTED,
                            "the 1-bit family is sharded in its node: DSOPT_OPTIMIZER_SHARD_NODE"));
    for (const int32_t flags : {kShard, kInNode})
        EXPECT_TRUE(
            refused(add(flags, DSOPT_ALGORITHM_ZERO_ONE_ADAM), DSOPT_ERR_UNSUPPORTED, "0/1 Adam is not sharded"));
    for (const int32_t algorithm : kStandardRules) EXPECT_OK(add(kShard, algorithm));
}

TEST(ShardRefusals, AreOfOutputs) {
    const Context context = make_context(1);
    const Comm data = self_comm(context);
    Trainer trainer(context, with_flags(kShard, &data), group_of(DSOPT_ALGORITHM_ADAMW),
                    {Array(DSOPT_DTYPE_F32, 10, 1)});
    const Array gradient(DSOPT_DTYPE_F32, 10, 1), out(DSOPT_DTYPE_F32, 10, 1);
    const dsopt_tensor written = out.tensor();
    for (const uint32_t flags : {0u, uint32_t(DSOPT_STEP_OUT_ONLY), uint32_t(DSOPT_STEP_DELTA)})
        EXPECT_TRUE(refused(trainer.step({gradient},
                                         [&](dsopt_step &step) {
                                             step.out = &written;
                                             step.flags = int32_t(flags);
                                         }),
                            DSOPT_ERR_UNSUPPORTED,
                            "dsopt_step.out: with SHARD a rank computes new weights of its part only"));
    EXPECT_OK(trainer.step({gradient}));
}

TEST(ShardRefusals, AreOfParametersOnceThereIsState) {
    with_ranks(2, [](int, const Context &context, const Comm &comm) {
        Trainer trainer(context, desc_with(comm, DSOPT_COMPAT_NONE, uint32_t(kShard)), group_of(DSOPT_ALGORITHM_ADAMW),
                        {Array(DSOPT_DTYPE_F32, 5000, 1)});
        int64_t begin = -1, numel = -1;
        must(dsopt_optimizer_shard(trainer.opt(), 0, 1, &begin, &numel));
        EXPECT_EQ(begin, 4096);
        EXPECT_EQ(numel, 904);
        // Before the first step the parts follow the longer list.
        must(trainer.add_group(group_of(DSOPT_ALGORITHM_SGD), {{Array(DSOPT_DTYPE_F32, 9000, 1)}}));
        must(dsopt_optimizer_shard(trainer.opt(), 0, 1, &begin, &numel));
        EXPECT_EQ(begin, 0);
        EXPECT_EQ(numel, 0);
        must(dsopt_optimizer_shard(trainer.opt(), 1, 1, &begin, &numel));
        EXPECT_EQ(begin, 4096);
        EXPECT_EQ(numel, 9000 - 4096);
        must(trainer.step({Array(DSOPT_DTYPE_F32, 5000, 1), Array(DSOPT_DTYPE_F32, 9000, 1)}));
        EXPECT_TRUE(refused(trainer.add_group(group_of(DSOPT_ALGORITHM_SGD), {{Array(DSOPT_DTYPE_F32, 3, 1)}}),
                            DSOPT_ERR_STATE,
                            "state is sharded by the whole list: parameters come before the first step"));
    });
}

TEST(ShardRefusals, AreOfDifferentListsAndOptions) {
    const auto step_of = [](int rank, const Context &context, const Comm &comm, uint32_t others, int64_t others_numel) {
        const uint32_t flags = rank == 1 ? others : uint32_t(kShard);
        const auto numel = size_t(rank == 1 ? others_numel : 5000);
        Trainer trainer(context, desc_with(comm, DSOPT_COMPAT_NONE, flags), group_of(DSOPT_ALGORITHM_ADAMW),
                        {Array(DSOPT_DTYPE_F32, numel, 1)});
        const dsopt_status status = trainer.step({Array(DSOPT_DTYPE_F32, numel, 1)});
        for (const float value : trainer.weight().floats()) EXPECT_EQ(value, 1);
        return status;
    };
    with_ranks(3, [&](int rank, const Context &context, const Comm &comm) {
        EXPECT_TRUE(refused(step_of(rank, context, comm, uint32_t(kShard), 4000), DSOPT_ERR_MISMATCH,
                            "different lists: parameter 0"));
        EXPECT_TRUE(refused(step_of(rank, context, comm, uint32_t(kShard) | DSOPT_OPTIMIZER_AVERAGES, 5000),
                            DSOPT_ERR_MISMATCH, "different options"));
    });
}

// They decide which sums ranks complete together.
TEST(ShardRefusals, AreOfStepsThatReadGradientsOnOneRankOnly) {
    for (const bool has_norms : {false, true})
        with_ranks(2, [&](int rank, const Context &context, const Comm &comm) {
            dsopt_optimizer_desc desc = desc_with(comm, DSOPT_COMPAT_NONE, uint32_t(kShard));
            desc.max_norm = 1;
            if (!has_norms && rank == 1) desc.flags |= DSOPT_OPTIMIZER_REPORT_NORMS;
            Trainer trainer(context, desc, group_of(DSOPT_ALGORITHM_ADAMW), {Array(DSOPT_DTYPE_F32, 5000, 1)});
            const Array norms(DSOPT_DTYPE_F32, 1, 2);
            EXPECT_TRUE(refused(trainer.step({Array(DSOPT_DTYPE_F32, 5000, 1)},
                                             [&](dsopt_step &step) {
                                                 if (has_norms && rank == 1) step.grad_norms = norms.as<float>();
                                             }),
                                DSOPT_ERR_MISMATCH, "some read gradients before the update"));
            for (const float value : trainer.weight().floats()) ASSERT_EQ(value, 1);
            EXPECT_EQ(info_of(comm).status, DSOPT_OK);
        });
}

TEST(ShardNode, OfOneRankNeedsTheMemoryOfUnshardedState) {
    const Context context = make_context(1);
    const CommId id = new_id();
    size_t bytes[2] = {};
    run_ranks(2, [&](int rank) {
        const Context own = make_context(1);
        const Comm data = local_comm(own, id, rank, 2), node = self_comm(own);
        for (const int32_t flags : {0, kInNode}) {
            const Trainer trainer(own, with_flags(flags, &data, &node), group_of(DSOPT_ALGORITHM_ADAMW),
                                  {Array(DSOPT_DTYPE_F32, 5000, 1)});
            size_t needed = 0;
            must(dsopt_optimizer_workspace(trainer.opt(), &needed));
            if (rank == 0) bytes[flags != 0] = needed;
        }
    });
    EXPECT_EQ(bytes[1], bytes[0]);
}

TEST(ShardQuery, NamesTheParameterAndTheRank) {
    const Context context = make_context(1);
    int64_t begin = -1, numel = -1;
    const Optimizer empty = make_optimizer(context);
    EXPECT_TRUE(refused(dsopt_optimizer_shard(empty.get(), 0, -1, &begin, &numel), DSOPT_ERR_STATE, "no groups"));
    const Trainer trainer(shapes_of({5000}), group_of(DSOPT_ALGORITHM_ADAMW));
    EXPECT_TRUE(refused(dsopt_optimizer_shard(trainer.opt(), 1, -1, &begin, &numel), DSOPT_ERR_ARGUMENT, "param is 1"));
    EXPECT_TRUE(
        refused(dsopt_optimizer_shard(trainer.opt(), -1, -1, &begin, &numel), DSOPT_ERR_ARGUMENT, "param is -1"));
    for (const int32_t rank : {-2, 1})
        EXPECT_TRUE(refused(dsopt_optimizer_shard(trainer.opt(), 0, rank, &begin, &numel), DSOPT_ERR_ARGUMENT,
                            "rank is " + std::to_string(rank)));
    EXPECT_TRUE(refused(dsopt_optimizer_shard(trainer.opt(), 0, -1, nullptr, &numel), DSOPT_ERR_ARGUMENT, "begin"));
    EXPECT_TRUE(refused(dsopt_optimizer_shard(trainer.opt(), 0, -1, &begin, nullptr), DSOPT_ERR_ARGUMENT, "numel"));
    EXPECT_EQ(begin, -1);
    must(dsopt_optimizer_shard(trainer.opt(), 0, -1, &begin, &numel));
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(numel, 5000);
}

// Every element of every parameter is in the part of one rank, or with SHARD_NODE of one rank of every node.
TEST(ShardQuery, GivesPartsThatTile) {
    for (const Topology &topology : kTopologies)
        with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
            dsopt_optimizer_desc desc = optimizer_desc(0, topology.flag);
            desc.bucket = topology.bucket;
            desc.data = rank.data.get();
            desc.node = rank.node.get();
            const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
            Scaler none;
            const Trainer trainer = training.trainer(rank.ctx, desc, none);
            const bool in_node = topology.flag == DSOPT_OPTIMIZER_SHARD_NODE;
            for (size_t i = 0; i < kShardSizes.size(); ++i) {
                int64_t end = 0, begin = -1, numel = -1;
                for (int l = 0; l < topology.per_node; ++l)
                    for (int d = 0; d < topology.nodes; ++d) {
                        must(dsopt_optimizer_shard(trainer.opt(), int64_t(i), l * topology.nodes + d, &begin, &numel));
                        if (in_node && d != 0) continue; // as on the first node
                        if (numel == 0) {
                            EXPECT_EQ(begin, 0);
                            continue;
                        }
                        EXPECT_EQ(begin, end);
                        EXPECT_EQ(begin % 4096, 0);
                        end += numel;
                    }
                EXPECT_EQ(end, kShardSizes[i]);
            }
        });
}

// Without closed forms these calls would take minutes: they would visit every stripe of the vector.
TEST(ShardQueries, DoNotDependOnTheNumberOfElements) {
    const Context context = make_context(1);
    DSOPT_NEW(dsopt_comm_table, table);
    table.ranks = 4;
    table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
    const Comm comm = table_comm(context, table);
    for (const uint32_t flag : {uint32_t(DSOPT_OPTIMIZER_SHARD), uint32_t(DSOPT_OPTIMIZER_AVERAGES)}) {
        SCOPED_TRACE(flag);
        const Optimizer optimizer = make_optimizer(context, desc_with(comm, DSOPT_COMPAT_NONE, flag));
        const dsopt_group group = group_of(DSOPT_ALGORITHM_ADAMW);
        dsopt_param params[3]{};
        const int64_t numels[] = {int64_t(1) << 50, 77, (int64_t(1) << 49) + 5};
        for (size_t i = 0; i < 3; ++i) params[i].tensor = {nullptr, numels[i], DSOPT_DTYPE_F32, 0};
        ASSERT_OK(dsopt_optimizer_add_group(optimizer.get(), &group, params, 3));
        int64_t count = 0, begin = 0, numel = 0;
        EXPECT_OK(dsopt_optimizer_state_count(optimizer.get(), &count));
        EXPECT_GT(count, 6);
        size_t bytes = 0;
        EXPECT_OK(dsopt_optimizer_workspace(optimizer.get(), &bytes));
        EXPECT_OK(dsopt_optimizer_shard(optimizer.get(), 0, -1, &begin, &numel));
        EXPECT_GT(numel, 0);
    }
}

} // namespace shard_refusals_tests
