// SPDX-License-Identifier: Apache-2.0
// DSOPT_OPTIMIZER_AVERAGES: the step averages the gradients of all ranks, with sharded state or without.
#include "support/shard.h"

using namespace test;

namespace shard_averages_tests {

std::vector<Topology> all_topologies() {
    std::vector<Topology> list = kTopologies;
    for (const Topology &topology : kTopologies)
        if (topology.flag == DSOPT_OPTIMIZER_SHARD)
            list.push_back({topology.per_node, topology.nodes, 0, topology.bucket});
    return list;
}
const std::vector<Topology> kFew = {{1, 3},    {2, 2},    {2, 3, DSOPT_OPTIMIZER_SHARD_NODE},
                                    {1, 3, 0}, {2, 3, 0}, {1, 3, 0, 4096}};

class Averages : public testing::TestWithParam<Topology> {};
INSTANTIATE_TEST_SUITE_P(, Averages, testing::ValuesIn(all_topologies()), topology_name);

LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(Averages, GiveTheBitsOfTheMean) {
    expect_bits_of_mean({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .desc = optimizer_desc(0.5), .absent = 4},
                        GetParam());
}

LABEL_PARAMS(long_emulated, "[58]x*");
LABEL_PARAMS(long_emulated, "2x[23]Unsharded");
LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(Averages, GiveTheBitsOfTheMeanInMixedPrecision) {
    expect_bits_of_mean({.groups = {group_of(DSOPT_ALGORITHM_LAMB), group_of(DSOPT_ALGORITHM_ADAMW)},
                         .param = DSOPT_DTYPE_BF16,
                         .grad = DSOPT_DTYPE_BF16,
                         .desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS),
                         .scaled = true,
                         .bad_step = 3,
                         .absent = 6},
                        GetParam());
}

TEST(AveragesOfDtypes, AreOfWidenedGradients) {
    for (const int32_t dtype : kDtypes)
        for (const Topology &topology : kFew)
            expect_bits_of_mean({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .grad = dtype, .steps = 2}, topology);
}

LABEL(one_of_many);
LABEL(long_emulated);
LABEL(slow);
TEST(AveragesOfLongLists, AreMadeInStripes) {
    for (const Topology &topology : kFew)
        expect_bits_of_mean({.groups = {group_of(DSOPT_ALGORITHM_SGD)}, .sizes = {1500000, 700, 4097}, .steps = 1},
                            topology);
}

TEST(AveragesOfAccumulators, AreOfWholeSums) {
    for (const Topology &topology : kFew)
        with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
            const ShardTraining training{.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}};
            dsopt_optimizer_desc desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_AVERAGES | topology.flag);
            desc.bucket = topology.bucket;
            desc.data = rank.data.get();
            if (topology.per_node > 1) desc.node = rank.node.get();
            Scaler none;
            Trainer plain = training.trainer(rank.ctx, desc, none);
            desc.flags |= DSOPT_OPTIMIZER_ACCUMULATE;
            Trainer sums = training.trainer(rank.ctx, desc, none);
            for (int64_t step = 1; step <= 3; ++step) {
                ASSERT_OK(plain.step(own_gradients(training, step, rank)));
                ASSERT_OK(sums.accumulate(own_gradients(training, step, rank)));
                ASSERT_OK(sums.step_accumulated());
                ASSERT_TRUE(same(sums.model.text(), plain.model.text()));
            }
            for (const dsopt_state_info &info : sums.state())
                if (std::string(info.name) == "grad_accum") {
                    EXPECT_EQ(info.tensor.numel, training.sizes[size_t(info.param)]);
                    EXPECT_EQ(info.flags, DSOPT_STATE_RANK_LOCAL);
                }
        });
}

TEST(AveragesOfOneRank, CountAbsentGradientsAsZeros) {
    const Context context = make_context(1);
    const Comm self = self_comm(context);
    dsopt_optimizer_desc desc = desc_with(self, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_AVERAGES);
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const bool non_freeze : {false, true}) {
            if (non_freeze && algorithm != DSOPT_ALGORITHM_ONEBIT_ADAM) continue;
            SCOPED_TRACE(name_of(algorithm));
            dsopt_group group = group_of(algorithm);
            if (algorithm != DSOPT_ALGORITHM_ADAMW) group.freeze_step = 3; // of five steps
            if (non_freeze) group.flags |= DSOPT_GROUP_NON_FREEZE;
            const std::vector<Array> weights{Array(DSOPT_DTYPE_F32, 10, 1), Array(DSOPT_DTYPE_F32, 10, 2)};
            Trainer trainer(context, desc, group, weights), zeros(context, desc, group, weights);
            for (int step = 0; step < 5; ++step) {
                const Array used(DSOPT_DTYPE_F32, 10, float(step + 1));
                ASSERT_OK(trainer.step({step == 0 ? used : Array::absent(10), used}));
                ASSERT_OK(zeros.step({step == 0 ? used : Array(DSOPT_DTYPE_F32, 10, 0), used}));
            }
            EXPECT_TRUE(same(trainer.text(), zeros.text()));
        }
}

TEST(AveragesOfAbsentGradients, NeedADtype) {
    with_ranks(2, [](int, const Context &context, const Comm &comm) {
        Trainer trainer(context, desc_with(comm, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_AVERAGES),
                        group_of(DSOPT_ALGORITHM_ADAMW), {Array(DSOPT_DTYPE_F32, 10, 1)});
        dsopt_tensor gradient{};
        DSOPT_NEW(dsopt_step, step);
        step.grads = &gradient;
        step.count = 1;
        EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_DTYPE, "absent gradient of 'p0'"));
        gradient.dtype = DSOPT_DTYPE_F32;
        EXPECT_TRUE(refused(trainer.step(step), DSOPT_ERR_SHAPE, "absent gradient of 'p0'"));
    });
}

TEST(AveragesOfDifferentDtypes, AreRefusedByEveryRank) {
    for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_CHECK_RANKS)})
        with_ranks(3, [&](int rank, const Context &context, const Comm &comm) {
            Trainer trainer(context, desc_with(comm, DSOPT_COMPAT_NONE, DSOPT_OPTIMIZER_AVERAGES | flags),
                            group_of(DSOPT_ALGORITHM_ADAMW), {Array(DSOPT_DTYPE_F32, 10, 1)});
            const std::vector<Array> gradients = {Array(rank == 1 ? DSOPT_DTYPE_BF16 : DSOPT_DTYPE_F32, 10, 1.0f)};
            const std::string before = trainer.model.text();
            EXPECT_TRUE(refused(trainer.step(gradients), DSOPT_ERR_MISMATCH, "gradient of 'p0' has dtype"));
            EXPECT_EQ(trainer.model.text(), before);
        });
}

} // namespace shard_averages_tests
