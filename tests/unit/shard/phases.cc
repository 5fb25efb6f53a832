// SPDX-License-Identifier: Apache-2.0
// The phases of a step, which the log has at level TRACE when they change. docs/one-step.md has the same texts.
#include "support/two_level.h"

using namespace test;

namespace shard_phases_tests {

/// Log messages of the contexts of all ranks; those of rank 0 are kept.
struct Log {
    std::vector<std::string> lines;

    Context context(int rank) {
        dsopt_context_desc desc = context_desc();
        desc.log_level = DSOPT_LOG_TRACE;
        desc.user = rank == 0 ? this : nullptr;
        desc.log = [](void *user, int32_t level, const char *text) {
            constexpr std::string_view kBegin = "phases of a step: ";
            if (user == nullptr || std::string_view(text).substr(0, kBegin.size()) != kBegin) return;
            EXPECT_EQ(level, DSOPT_LOG_TRACE);
            static_cast<Log *>(user)->lines.emplace_back(text + kBegin.size());
        };
        return make_context(desc);
    }
};
using Lines = std::vector<std::string>;

std::vector<Array> arrays(int32_t dtype = DSOPT_DTYPE_F32) { return {Array(dtype, 700, 1), Array(dtype, 33, 1)}; }

/// Makes three steps on one rank and returns the log.
Lines phases_of(dsopt_optimizer_desc desc, const dsopt_group &group, int32_t dtype = DSOPT_DTYPE_F32,
                bool scaled = false) {
    Log log;
    const Context ctx = log.context(0);
    Scaler scaler;
    if (scaled) {
        scaler = make_scaler(ctx, 16);
        desc.scaler = scaler.get();
    }
    Trainer trainer(ctx, desc, group, arrays(dtype));
    for (int step = 0; step < 3; ++step) must(trainer.step(arrays(dtype)));
    return log.lines;
}

TEST(StepPhases, OfAdamWAreLoggedOnce) {
    EXPECT_EQ(phases_of(optimizer_desc(), make_group(DSOPT_ALGORITHM_ADAMW)), Lines{"fold, decide, update, finish"});
}

TEST(StepPhases, InMixedPrecisionInspectGradients) {
    EXPECT_EQ(phases_of(optimizer_desc(1), make_group(DSOPT_ALGORITHM_ADAMW), DSOPT_DTYPE_F16, true),
              Lines{"inspect, fold, decide, update, finish"});
}

TEST(StepPhases, OfLambHaveASecondPass) {
    EXPECT_EQ(phases_of(optimizer_desc(), make_group(DSOPT_ALGORITHM_LAMB)),
              Lines{"fold, decide, update, trust, weights, finish"});
}

TEST(StepPhases, AreNotLoggedBelowLevelTrace) {
    Log log;
    dsopt_context_desc desc = context_desc();
    desc.log_level = DSOPT_LOG_INFO;
    desc.user = &log;
    desc.log = [](void *user, int32_t, const char *text) { static_cast<Log *>(user)->lines.emplace_back(text); };
    const Context ctx = make_context(desc);
    Trainer trainer(ctx, optimizer_desc(), make_group(DSOPT_ALGORITHM_ADAMW), arrays());
    must(trainer.step(arrays()));
    for (const std::string &line : log.lines) EXPECT_EQ(line.find("phases"), std::string::npos) << line;
}

/// Calls body(rank) on each rank of `nodes` nodes of `per_node` ranks, and returns the log of the first one.
Lines phases_of_ranks(int per_node, int nodes, const std::function<void(const NodeRank &)> &body) {
    Log log;
    with_nodes(per_node, nodes, body, [&](int rank) { return log.context(rank); });
    return log.lines;
}

TEST(StepPhases, OfTwoLevelOneBitAdamChangeAtTheFreeze) {
    const Lines lines = phases_of_ranks(2, 2, [](const NodeRank &rank) {
        dsopt_optimizer_desc desc = optimizer_desc(1);
        desc.data = rank.data.get();
        desc.node = rank.node.get();
        Trainer trainer(rank.ctx, desc, group_for(DSOPT_ALGORITHM_ONEBIT_ADAM, 2), arrays());
        for (int step = 0; step < 4; ++step) must(trainer.step(arrays()));
    });
    EXPECT_EQ(lines, (Lines{"inspect, fold, agree (node, data), decide, update, finish, end 1-bit",
                            "average (node, data), clear squares, inspect, complete squares (node, data), fold, "
                            "agree (node, data), decide, 1-bit (node, data), update, finish, end 1-bit"}));
}

TEST(StepPhases, OfShardedStateAverageAndGather) {
    const Lines lines = phases_of_ranks(1, 2, [](const NodeRank &rank) {
        dsopt_optimizer_desc desc = optimizer_desc(1, DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES);
        desc.data = rank.data.get();
        Trainer trainer(rank.ctx, desc, make_group(DSOPT_ALGORITHM_LAMB), arrays());
        for (int step = 0; step < 2; ++step) must(trainer.step(arrays()));
    });
    EXPECT_EQ(lines,
              Lines{"average (data), clear squares, inspect, complete squares (data), fold, agree (data), decide, "
                    "clear sums, update, complete sums (data), trust, weights, finish, gather (data)"});
}

TEST(StepPhases, OfMuonSendMatrices) {
    const Lines lines = phases_of_ranks(1, 2, [](const NodeRank &rank) {
        dsopt_optimizer_desc desc = optimizer_desc(0, DSOPT_OPTIMIZER_SPLIT_MATRICES);
        desc.data = rank.data.get();
        Param matrix{Array(DSOPT_DTYPE_F32, 64, 1)};
        matrix.rows = matrix.cols = 8;
        dsopt_group group;
        must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_MUON));
        Trainer trainer(rank.ctx, desc, group, std::vector<Param>{matrix});
        must(trainer.step({Array(DSOPT_DTYPE_F32, 64, 1)}));
    });
    EXPECT_EQ(lines, Lines{"fold, agree (data), decide, update, matrices (data), finish"});
}

} // namespace shard_phases_tests
