// SPDX-License-Identifier: Apache-2.0
// Muon over data-parallel ranks: with DSOPT_OPTIMIZER_SPLIT_MATRICES each rank orthogonalises some of the matrices, with
// sharded state it has some of the tensors. Bits do not depend on the number of ranks.
#include "support/caller_memory.h"
#include "support/shard.h"

using namespace test;

namespace shard_matrices_tests {

constexpr uint32_t kSplit = DSOPT_OPTIMIZER_SPLIT_MATRICES;

std::vector<Topology> topologies() {
    std::vector<Topology> list = kTopologies;
    for (const Topology &topology : kTopologies)
        if (topology.flag == DSOPT_OPTIMIZER_SHARD && topology.bucket == 0)
            list.push_back({topology.per_node, topology.nodes, kSplit});
    return list;
}
const std::vector<Topology> kFew = {{1, 3}, {2, 2}, {2, 3, DSOPT_OPTIMIZER_SHARD_NODE}, {1, 3, kSplit}, {2, 2, kSplit}};

/// One matrix, three of them, tall and wide ones, an empty tensor, a row; then tensors of AdamW.
const std::vector<std::array<int64_t, 2>> kBlocks = {{24, 40}, {16, 20}, {96, 16}, {8, 8}, {1, 33}, {20, 16}, {64, 64}};
const std::vector<int64_t> kSizes = {24 * 40, 3 * 16 * 20, 96 * 16, 0,    33,   20 * 16, 2 * 64 * 64,
                                     700,     1,           0,       5000, 4097, 33,      64};

dsopt_group muon(int32_t products = DSOPT_DTYPE_BF16) {
    dsopt_group group;
    must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON));
    group.lr = 0.02;
    group.ns_dtype = products;
    return group;
}
ShardTraining training_of(int32_t products = DSOPT_DTYPE_BF16) {
    return {.groups = {muon(products), group_of(DSOPT_ALGORITHM_ADAMW)}, .sizes = kSizes, .blocks = kBlocks};
}

class MatrixRanks : public testing::TestWithParam<Topology> {};
INSTANTIATE_TEST_SUITE_P(, MatrixRanks, testing::ValuesIn(topologies()), topology_name);

LABEL_PARAMS(long_emulated, "[1358]x*");
LABEL_PARAMS(long_emulated, "2x[13]*");
LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(MatrixRanks, GiveTheBitsOfOneRank) { expect_same_bits(training_of(), GetParam()); }

// Masters, a loss scale that overflows, a skipped step, norms, an absent gradient of matrices.
LABEL_PARAMS(long_emulated, "[1358]x*");
LABEL_PARAMS(long_emulated, "2x[13]*");
LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(MatrixRanks, GiveTheBitsOfOneRankInMixedPrecision) {
    ShardTraining training = training_of(DSOPT_DTYPE_F16);
    training.param = training.grad = DSOPT_DTYPE_BF16;
    training.desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS);
    training.scaled = true;
    training.bad_step = 3;
    training.absent = 1;
    expect_same_bits(training, GetParam());
}

LABEL_PARAMS(long_emulated, "[1358]x*");
LABEL_PARAMS(long_emulated, "2x[13]*");
LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(MatrixRanks, AverageGradients) {
    ShardTraining training = training_of();
    training.desc = optimizer_desc(0.5);
    training.absent = 2;
    expect_bits_of_mean(training, GetParam());
}

TEST(MatricesOfRanks, MayBeFewerThanRanks) {
    for (const uint32_t flag : {kSplit, uint32_t(DSOPT_OPTIMIZER_SHARD)})
        expect_same_bits({.groups = {muon(DSOPT_DTYPE_F32)}, .sizes = {24 * 40}, .blocks = {{24, 40}}}, {1, 5, flag});
}

TEST(MatricesOfRanks, AreNotNeededByEveryRank) {
    for (const uint32_t flag : {kSplit, uint32_t(DSOPT_OPTIMIZER_SHARD)})
        for (const std::vector<int64_t> &sizes : {std::vector<int64_t>{}, {0}})
            expect_same_bits({.groups = {muon()}, .sizes = sizes, .blocks = {{24, 40}}}, {1, 2, flag});
}

LABEL(one_of_many);
LABEL(long_emulated);
LABEL(slow);
TEST(MatricesOfRanks, AreGatheredInStripes) {
    ShardTraining training{
        .groups = {muon()}, .sizes = {4 * 250000, 4 * 100000}, .steps = 2, .blocks = {{4, 250000}, {4, 100000}}};
    training.groups[0].ns_steps = 1;
    for (const Topology &topology : kFew) expect_same_bits(training, topology);
}

LABEL(one_of_many);
LABEL(long_emulated);
TEST(MatricesOfRanks, DoNotDependOnThreads) {
    for (const int threads : {2, 3})
        for (const Topology &topology : kFew) expect_same_bits(training_of(), topology, threads);
}

TEST(MatricesOfRanks, ApplyWithTheBitsOfSteps) {
    for (const Topology &topology : kFew)
        with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
            ShardTraining training = training_of();
            training.desc = optimizer_desc(0.5, topology.flag);
            training.desc.bucket = topology.bucket;
            training.desc.data = rank.data.get();
            if (topology.per_node > 1) training.desc.node = rank.node.get();
            Scaler none;
            Trainer steps = training.trainer(rank.ctx, training.desc, none);
            const Trainer pure = training.trainer(rank.ctx, training.desc, none);
            CallerMemory memory(pure.opt(), steps.weights());
            must(memory.init());
            for (int64_t step = 1; step <= 3; ++step) {
                const std::vector<Array> gradients = training.gradients(step);
                ASSERT_OK(steps.step(gradients));
                ASSERT_OK(memory.apply(gradients));
                for (size_t t = 0; t < training.sizes.size(); ++t)
                    ASSERT_TRUE(same(memory.model.params[t].text(), steps.weight(t).text())) << t;
            }
            EXPECT_TRUE(memory.intact());
            EXPECT_TRUE(memory.workspace.intact());
        });
}

TEST(MatricesOfRanks, TakeAccumulatedGradients) {
    with_ranks(2, [](int, const Context &context, const Comm &comm) {
        dsopt_optimizer_desc desc = optimizer_desc(0, kSplit);
        desc.data = comm.get();
        ShardTraining training = training_of();
        Scaler none;
        Trainer plain = training.trainer(context, desc, none);
        desc.flags |= DSOPT_OPTIMIZER_ACCUMULATE;
        Trainer accumulating = training.trainer(context, desc, none);
        const std::vector<Array> gradients = training.gradients(1);
        ASSERT_OK(plain.step(gradients));
        ASSERT_OK(accumulating.accumulate(gradients));
        ASSERT_OK(accumulating.step_accumulated());
        for (size_t t = 0; t < training.sizes.size(); ++t)
            ASSERT_TRUE(same(plain.weight(t).text(), accumulating.weight(t).text())) << t;
    });
}

// Tensors of matrices have one owner: the cost of their iterations is partitioned evenly.
TEST(MatricesOfRanks, AreOwnedWhole) {
    with_ranks(3, [](int rank, const Context &context, const Comm &comm) {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_SHARD);
        desc.data = comm.get();
        ShardTraining training{.groups = {muon()},
                               .sizes = {64 * 64, 32 * 32, 64 * 64, 64 * 64, 32 * 32},
                               .blocks = {{64, 64}, {32, 32}, {64, 64}, {64, 64}, {32, 32}}};
        Scaler none;
        const Trainer trainer = training.trainer(context, desc, none);
        const int owners[] = {0, 0, 1, 2, 1};
        for (int64_t t = 0; t < 5; ++t)
            for (int r = -1; r < 3; ++r) {
                int64_t begin = -1, numel = -1;
                must(dsopt_optimizer_shard(trainer.opt(), t, r, &begin, &numel));
                EXPECT_EQ(begin, 0);
                EXPECT_EQ(numel, owners[t] == (r < 0 ? rank : r) ? training.sizes[size_t(t)] : 0) << t << " " << r;
            }
    });
}

TEST(MatricesOfRanks, MustHaveTheSameBlocks) {
    with_ranks(2, [](int rank, const Context &context, const Comm &comm) {
        dsopt_optimizer_desc desc = optimizer_desc(0, kSplit);
        desc.data = comm.get();
        Scaler none;
        ShardTraining training{.groups = {muon()}, .sizes = {64}, .blocks = {{rank == 0 ? 8 : 4, 8}}};
        Trainer trainer = training.trainer(context, desc, none);
        EXPECT_TRUE(refused(trainer.step(training.gradients(1)), DSOPT_ERR_MISMATCH, "ranks have different lists"));
    });
}

/// A comm of two ranks in one process, whose all-gather fails.
struct FailingGather {
    int gathers = 0;
    Comm comm(const Context &context) {
        DSOPT_NEW(dsopt_comm_table, table);
        table.self = this;
        table.ranks = 2;
        table.all_reduce = [](void *, const void *send, void *recv, int64_t count, int32_t dtype, int32_t, void *) {
            std::memmove(recv, send, size_t(count) * size_of(dtype));
            return 0;
        };
        table.all_gather = [](void *self, const void *, void *, int64_t, void *) {
            ++static_cast<FailingGather *>(self)->gathers;
            return 5;
        };
        return table_comm(context, table);
    }
};

// As after a failure between LAMB's passes: moments of the new step, weights as they were.
LABEL(cpu); // the collectives are on the host
TEST(MatricesOfRanks, KeepTheirWeightsIfTheExchangeFails) {
    const Context context = make_context(1);
    FailingGather failing;
    const Comm comm = failing.comm(context);
    dsopt_optimizer_desc desc = optimizer_desc(0, kSplit);
    desc.data = comm.get();
    Scaler none;
    const ShardTraining training{.groups = {muon()}, .sizes = {24 * 40, 16 * 16}, .blocks = {{24, 40}, {16, 16}}};
    Trainer trainer = training.trainer(context, desc, none);
    const std::string before = trainer.model.text();
    EXPECT_TRUE(refused(trainer.step(training.gradients(1)), DSOPT_ERR_COMM, "5"));
    EXPECT_EQ(failing.gathers, 1);
    EXPECT_EQ(trainer.model.text(), before);
    EXPECT_EQ(trainer.report().calls, 0);
    const std::vector<float> momentum = trainer.state("momentum_buffer", 0);
    EXPECT_TRUE(std::any_of(momentum.begin(), momentum.end(), [](float x) { return x != 0; }));
    EXPECT_TRUE(refused(trainer.step(training.gradients(1)), DSOPT_ERR_COMM, ""));
    EXPECT_EQ(failing.gathers, 1);
}

// Rank 1 fails between its passes. Rank 0 waits for it in the all-gather, and gets a status.
TEST(MatricesOfRanks, ReportAFailureOfAnotherRank) {
    with_ranks(2, [](int rank, const Context &context, const Comm &comm) {
        dsopt_optimizer_desc desc = optimizer_desc(0, kSplit);
        desc.data = comm.get();
        Scaler none;
        const ShardTraining training{
            .groups = {muon()}, .sizes = {24 * 40, 300 * 300}, .blocks = {{24, 40}, {300, 300}}};
        Trainer trainer = training.trainer(context, desc, none);
        ASSERT_OK(trainer.step(training.gradients(1)));
        if (rank == 1) dsopt_comm_abort(comm.get());
        EXPECT_NE(trainer.step(training.gradients(2)), DSOPT_OK);
    });
}

TEST(MatricesOfRanks, RefuseWhatHasNoEffect) {
    const Context context = make_context(1);
    const Comm comm = self_comm(context);
    const auto create = [&](uint32_t flags, bool with_comm) {
        dsopt_optimizer_desc desc = optimizer_desc(0, flags);
        if (with_comm) desc.data = comm.get();
        dsopt_optimizer *made = nullptr;
        const dsopt_status status = dsopt_optimizer_create(context.get(), &desc, &made);
        dsopt_optimizer_destroy(made);
        return status;
    };
    EXPECT_TRUE(refused(create(kSplit, false), DSOPT_ERR_UNSUPPORTED, "SPLIT_MATRICES has no effect without"));
    EXPECT_TRUE(refused(create(kSplit | DSOPT_OPTIMIZER_SHARD, true), DSOPT_ERR_UNSUPPORTED,
                        "SPLIT_MATRICES has no effect with SHARD"));
    dsopt_optimizer_desc desc = optimizer_desc(0, kSplit);
    desc.data = comm.get();
    Trainer trainer(context, desc, group_of(DSOPT_ALGORITHM_ADAMW), {Array(DSOPT_DTYPE_F32, 10, 1)});
    EXPECT_TRUE(refused(trainer.step({Array(DSOPT_DTYPE_F32, 10, 1)}), DSOPT_ERR_UNSUPPORTED,
                        "SPLIT_MATRICES has no effect without a group of muon"));
}

} // namespace shard_matrices_tests
