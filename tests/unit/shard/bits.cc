// SPDX-License-Identifier: Apache-2.0
// Sharded state: weights, state and reports have the bits of an optimizer that keeps all of the state.
#include "support/caller_memory.h"
#include "support/shard.h"

using namespace test;

namespace shard_bits_tests {

class ShardTopology : public testing::TestWithParam<Topology> {};
INSTANTIATE_TEST_SUITE_P(, ShardTopology, testing::ValuesIn(kTopologies), topology_name);

dsopt_group group_with_momentum(int32_t algorithm) {
    dsopt_group group = group_of(algorithm);
    if (algorithm == DSOPT_ALGORITHM_SGD) group.momentum = 0.9;
    return group;
}

LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(ShardTopology, GivesTheBitsOfOneRank) {
    expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .desc = optimizer_desc(0.5)}, GetParam());
}

// Masters, a loss scale that overflows, a skipped step, an absent gradient and two rules.
LABEL_PARAMS(long_emulated, "[158]x*");
LABEL_PARAMS(long_emulated, "2x1");
LABEL_PARAMS(long_emulated, "3x2");
LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(ShardTopology, GivesTheBitsOfOneRankInMixedPrecision) {
    expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW), group_with_momentum(DSOPT_ALGORITHM_SGD)},
                      .param = DSOPT_DTYPE_BF16,
                      .grad = DSOPT_DTYPE_BF16,
                      .desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS),
                      .scaled = true,
                      .bad_step = 3,
                      .absent = 6},
                     GetParam());
}

LABEL_PARAMS(one_of_many, "[158]x*");
TEST_P(ShardTopology, GivesTheBitsOfOneRankForTrustRatios) {
    expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_LAMB), group_of(DSOPT_ALGORITHM_ADAMW)},
                      .desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS),
                      .bad_step = 3,
                      .absent = 6},
                     GetParam());
}

class ShardRule : public testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(, ShardRule, testing::ValuesIn(kStandardRules), algorithm_name);

LABEL_PARAMS(long_emulated, "Adam");
LABEL_PARAMS(long_emulated, "AdamLegacy");
LABEL_PARAMS(long_emulated, "Adagrad");
TEST_P(ShardRule, GivesTheBitsOfOneRankForEveryDtype) {
    for (const int32_t dtype : kDtypes)
        for (const Topology &topology : kFewTopologies)
            expect_same_bits({.groups = {group_with_momentum(GetParam())}, .param = dtype, .grad = dtype, .steps = 3},
                             topology);
}

class ShardFormat : public testing::TestWithParam<FormatCase> {};
INSTANTIATE_TEST_SUITE_P(, ShardFormat, testing::ValuesIn(few_format_cases()), format_case_name);

LABEL_PARAMS(long_emulated, "AdamWE4M3*");
LABEL_PARAMS(long_emulated, "AdamWQ8*");
TEST_P(ShardFormat, GivesTheBitsOfOneRank) {
    for (const int32_t masters : {DSOPT_MASTERS_PER_TENSOR, DSOPT_MASTERS_REMAINDER})
        for (const Topology &topology : kFewTopologies)
            expect_same_bits({.groups = {GetParam().group()},
                              .param = DSOPT_DTYPE_BF16,
                              .grad = DSOPT_DTYPE_BF16,
                              .desc = format_desc(masters),
                              .absent = 4},
                             topology);
}

TEST(Shard, RoundsAtRandomAsOneRank) {
    dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING);
    desc.seed = 7;
    for (const Topology &topology : kFewTopologies)
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .param = DSOPT_DTYPE_BF16, .desc = desc},
                         topology);
}

TEST(Shard, ClipsGroupsAndValuesAsOneRank) {
    dsopt_group clipped = group_of(DSOPT_ALGORITHM_ADAMW);
    clipped.max_norm = 0.25;
    dsopt_optimizer_desc desc = optimizer_desc(2);
    desc.max_value = 0.02;
    for (const Topology &topology : kFewTopologies)
        expect_same_bits({.groups = {clipped, group_of(DSOPT_ALGORITHM_LION)}, .desc = desc}, topology);
}

TEST(Shard, KeepsFlatMastersContiguous) {
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.masters = DSOPT_MASTERS_FLAT;
    for (const Topology &topology : kFewTopologies)
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .param = DSOPT_DTYPE_F16, .desc = desc},
                         topology);
}

TEST(Shard, AccumulatesWholeGradients) {
    for (const Topology &topology : kFewTopologies)
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)},
                          .desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_ACCUMULATE),
                          .absent = 4},
                         topology, 1, [](Trainer &trainer, const std::vector<Array> &gradients) {
                             must(trainer.accumulate(gradients));
                             must(trainer.accumulate(gradients));
                             return trainer.step_accumulated();
                         });
}

TEST(Shard, ZeroesWholeGradients) {
    for (const Topology &topology : kFewTopologies)
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .bad_step = 3, .absent = 4}, topology, 1,
                         [](Trainer &trainer, const std::vector<Array> &gradients) {
                             const dsopt_status status =
                                 trainer.step(gradients, [](dsopt_step &step) { step.flags = DSOPT_STEP_ZERO_GRADS; });
                             for (const Array &gradient : gradients)
                                 if (gradient.tensor().data != nullptr) {
                                     EXPECT_EQ(gradient.text(), std::string(gradient.bytes(), '\0'));
                                 }
                             return status;
                         });
}

TEST(Shard, UsesGivenNorms) {
    for (const Topology &topology : kFewTopologies)
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .desc = optimizer_desc(0.5)}, topology, 1,
                         [](Trainer &trainer, const std::vector<Array> &gradients) {
                             const Array norm(DSOPT_DTYPE_F32, 1, 2.0f);
                             return trainer.step(gradients,
                                                 [&](dsopt_step &step) { step.grad_norms = norm.as<float>(); });
                         });
}

// Two model ranks have shards of all tensors, and the optimizer state of each shard is spread over the data ranks.
TEST(Shard, ReducesNormsAndTrustRatiosOverModelRanks) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB})
        for (const int data_ranks : {1, 2, 3})
            with_nodes(2, data_ranks, [&](const NodeRank &rank) {
                const Comm &model = rank.node;
                ShardTraining training{.groups = {group_of(algorithm)}, .param_flags = DSOPT_PARAM_MODEL_PARALLEL};
                if (rank.l == 1) training.bad_step = 3;
                dsopt_optimizer_desc desc = optimizer_desc(0.5, DSOPT_OPTIMIZER_REPORT_NORMS);
                desc.model = model.get();
                Scaler none;
                Trainer whole = training.trainer(rank.ctx, desc, none);
                desc.flags |= DSOPT_OPTIMIZER_SHARD;
                desc.data = rank.data.get();
                Trainer sharded = training.trainer(rank.ctx, desc, none);
                for (int64_t step = 1; step <= training.steps; ++step) {
                    std::vector<Array> gradients = training.gradients(step);
                    for (Array &gradient : gradients)
                        if (gradient.numel() != 0 && rank.l == 1 && step != training.bad_step)
                            gradient.fill(uint64_t(step) * 1000 + uint64_t(gradient.numel()));
                    ASSERT_OK(sharded.step(gradients));
                    ASSERT_OK(whole.step(gradients));
                    ASSERT_EQ(sharded.report().last_skipped, step == 3);
                    expect_same_training(sharded, whole);
                    if (testing::Test::HasFatalFailure()) return;
                }
            });
}

TEST(Shard, AppliesWithTheBitsOfSteps) {
    for (const Topology &topology : kFewTopologies)
        for (const uint32_t averages : {0u, uint32_t(DSOPT_OPTIMIZER_AVERAGES)})
            with_nodes(topology.per_node, topology.nodes, [&](const NodeRank &rank) {
                ShardTraining training{.groups = {make_group(DSOPT_ALGORITHM_LAMB)},
                                       .param = DSOPT_DTYPE_BF16,
                                       .grad = DSOPT_DTYPE_BF16,
                                       .desc = optimizer_desc(0.5, topology.flag | averages),
                                       .absent = 6};
                training.desc.bucket = topology.bucket;
                training.desc.data = rank.data.get();
                if (topology.per_node > 1) training.desc.node = rank.node.get();
                Scaler none;
                Trainer steps = training.trainer(rank.ctx, training.desc, none);
                const Optimizer pure =
                    make_pure(rank.ctx, shapes_of(training.sizes, DSOPT_DTYPE_BF16, DSOPT_DTYPE_BF16),
                              DSOPT_ALGORITHM_LAMB, training.desc);
                CallerMemory memory(pure.get(), steps.weights());
                must(memory.init());
                for (int64_t step = 1; step <= training.steps; ++step) {
                    const std::vector<Array> gradients =
                        averages != 0 ? own_gradients(training, step, rank) : training.gradients(step);
                    ASSERT_OK(steps.step(gradients));
                    ASSERT_OK(memory.apply(gradients));
                    for (size_t t = 0; t < training.sizes.size(); ++t)
                        ASSERT_TRUE(same(memory.model.params[t].text(), steps.weight(t).text())) << t;
                    for (size_t i = 0; i < memory.blocks.size(); ++i)
                        ASSERT_TRUE(same(memory.blocks[i].text(), exported_text(steps.opt(), int64_t(i)))) << i;
                }
                EXPECT_TRUE(memory.intact());
                EXPECT_TRUE(memory.workspace.intact());
            });
}

LABEL(one_of_many);
TEST(Shard, DoesNotDependOnThreads) {
    for (const int threads : {2, 3})
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_LAMB)},
                          .desc = optimizer_desc(0.5),
                          .sizes = {100000, 3, 5000, 70000}},
                         {1, 3}, threads);
}

// Rows of all ranks are larger than the memory for them, so weights are gathered in several messages.
LABEL(one_of_many);
LABEL(long_emulated);
TEST(Shard, GathersLongListsInStripes) {
    for (const Topology &topology : kFewTopologies)
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_SGD)}, .sizes = {1500000, 700, 900000, 4097}, .steps = 2},
                         topology);
}

TEST(Shard, TakesListsWithoutElements) {
    for (const Topology &topology : kFewTopologies) {
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_LAMB)}, .sizes = {0, 0}}, topology);
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .sizes = {}}, topology);
        expect_same_bits({.groups = {group_of(DSOPT_ALGORITHM_ADAMW)}, .desc = optimizer_desc(1), .sizes = {5}},
                         topology);
    }
}

} // namespace shard_bits_tests
