// SPDX-License-Identifier: Apache-2.0
// What parameters take part in, for every combination of algorithms, ranks, flags, sizes and stages, against the rules as
// a reader would write them for one case at a time.
#include "optimizer/participation.h"
#include "optimizer/group.h"
#include "optimizer/onebit.h"
#include "optimizer/shard.h"
#include <gtest/gtest.h>

namespace inside_participation_tests {

using namespace dsopt;
using dsopt::Param; // several files are compiled as one, and others use namespace test

struct Case {
    std::vector<dsopt_group> groups;
    std::vector<dsopt::Param> params;
    dsopt_optimizer_desc desc{};
    DataRank local;
    bool family = false;
    bool averages() const { return (desc.flags & DSOPT_OPTIMIZER_AVERAGES) != 0; }
};

/// True if a gradient of the group is averaged in some stage: with the flag in all; in the 1-bit family also of tensors
/// that are never compressed and, with nodes, in the node.
bool may_average(const Case &c, const dsopt_group &group) {
    return c.averages() || (c.family && (!is_exchanged(group) || c.local.node_ranks > 1));
}
/// True if ranks exchange rows.
bool has_rows(const Case &c) {
    if (c.local.ranks == 1) return false;
    if (effective_sharding(c.desc, c.local) != Sharding::none) return true;
    for (const dsopt_group &group : c.groups)
        if (may_average(c, group)) return true;
    return false;
}
Averages averages(const Case &c, size_t i, Stage stage) {
    const dsopt_group &group = c.groups[size_t(c.params[i].group)];
    const Averages with_flag = c.averages() ? Averages::all : Averages::none;
    if (!c.family) return with_flag;
    const bool rows = has_rows(c);
    if (rows && (c.params[i].numel == 0 || !may_average(c, group))) return Averages::none;
    if (stage == Stage::full || stage == Stage::dry) return with_flag;
    if (!rows) return is_exchanged(group) && stage == Stage::local ? Averages::none : with_flag;
    if (!is_exchanged(group)) return Averages::all;
    if (c.local.node_ranks == 1) return Averages::none;
    return c.local.ranks == c.local.node_ranks ? Averages::all : Averages::in_node;
}
Owner owner(const Case &c, size_t i, Stage stage) {
    const dsopt_group &group = c.groups[size_t(c.params[i].group)];
    if (is_matrix_rule(group.algorithm)) return Owner::matrix;
    if (!c.family || !is_exchanged(group) || stage == Stage::full) return Owner::update;
    return stage == Stage::dry ? Owner::none : Owner::exchange;
}

constexpr Stage kStages[] = {Stage::dry, Stage::full, Stage::exchange, Stage::local, Stage::sync};

void check(const Case &c) {
    const std::unique_ptr<OneBitSetup> onebit =
        c.family ? std::make_unique<OneBitSetup>(c.groups, c.params, c.desc, c.local) : nullptr;
    const std::vector<Participation> found = participation_of(c.params, c.groups, c.desc, c.local, onebit.get());
    ASSERT_EQ(found.size(), c.params.size());
    ASSERT_EQ(exchanges_rows(c.groups, c.desc, c.local), has_rows(c));
    for (size_t i = 0; i < found.size(); ++i) {
        const dsopt_group &group = c.groups[size_t(c.params[i].group)];
        const Participation &p = found[i];
        SCOPED_TRACE(testing::Message() << "algorithm " << group.algorithm << ", group flags " << group.flags
                                        << ", flags " << c.desc.flags << ", numel " << c.params[i].numel << ", "
                                        << c.local.ranks << " ranks, " << c.local.node_ranks << " in a node");
        const bool sent = onebit != nullptr && onebit->worker[i] >= 0;
        ASSERT_EQ(p.sent, sent);
        ASSERT_EQ(p.exchanged, c.family && is_exchanged(group));
        bool ever = false;
        for (const Stage stage : kStages) {
            if (!c.family && stage != Stage::full) continue;
            const Averages wanted = averages(c, i, stage);
            ASSERT_EQ(p.averages(stage), wanted) << "stage " << int(stage);
            ASSERT_EQ(p.owner(stage), owner(c, i, stage)) << "stage " << int(stage);
            const bool in_message = sent && (stage == Stage::exchange || stage == Stage::sync);
            ASSERT_EQ(p.absent_is_zeros(stage), in_message || wanted != Averages::none) << "stage " << int(stage);
            ever = ever || wanted != Averages::none;
        }
        ASSERT_EQ(p.is_averaged(), ever);
        // The rows have room for a mean of each gradient that may be averaged, of the slice where that is enough.
        if (has_rows(c) && c.params[i].numel != 0) { ASSERT_EQ(p.is_averaged(), may_average(c, group)); }
        const bool slice = c.family && is_exchanged(group) && group.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM &&
                           !c.averages() && c.local.ranks > c.local.node_ranks;
        if (p.is_averaged()) { ASSERT_EQ(p.mean_of_slice, slice); }
    }
}

TEST(Participation, HoldsForEveryCombination) {
    using Groups = std::vector<std::pair<int32_t, int32_t>>; // algorithm and flags
    const Groups lists[] = {{{DSOPT_ALGORITHM_ADAMW, 0}},
                            {{DSOPT_ALGORITHM_LAMB, 0}, {DSOPT_ALGORITHM_MUON, 0}},
                            {{DSOPT_ALGORITHM_ONEBIT_ADAM, 0}},
                            {{DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_GROUP_NON_FREEZE}},
                            {{DSOPT_ALGORITHM_ONEBIT_ADAM, 0}, {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_GROUP_NON_FREEZE}},
                            {{DSOPT_ALGORITHM_ONEBIT_LAMB, 0}, {DSOPT_ALGORITHM_ADAMW, 0}},
                            {{DSOPT_ALGORITHM_ZERO_ONE_ADAM, 0}, {DSOPT_ALGORITHM_SGD, 0}}};
    const DataRank ranks[] = {{0, 1, 1}, {0, 2, 1}, {1, 2, 1}, {1, 2, 2}, {2, 4, 2}, {4, 6, 3}};
    int count = 0;
    for (const Groups &list : lists)
        for (const DataRank &local : ranks)
            for (const int32_t flags :
                 {0, int32_t(DSOPT_OPTIMIZER_AVERAGES), int32_t(DSOPT_OPTIMIZER_SHARD),
                  DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_AVERAGES, int32_t(DSOPT_OPTIMIZER_SHARD_NODE),
                  DSOPT_OPTIMIZER_SHARD_NODE | DSOPT_OPTIMIZER_AVERAGES})
                for (const bool with_params : {true, false}) {
                    Case c;
                    c.local = local;
                    c.desc.flags = flags;
                    for (const auto &[algorithm, group_flags] : list) {
                        c.groups.push_back(default_group(algorithm));
                        c.groups.back().flags |= group_flags;
                        c.family = c.family || is_onebit(algorithm);
                        for (const int64_t numel : {5000, 0, 33}) {
                            if (!with_params) continue;
                            dsopt::Param param{};
                            param.numel = numel;
                            param.group = int32_t(c.groups.size()) - 1;
                            param.trust_slot = -1;
                            c.params.push_back(param);
                        }
                    }
                    check(c);
                    if (HasFatalFailure()) return;
                    ++count;
                }
    EXPECT_EQ(count, 7 * 6 * 6 * 2);
}

} // namespace inside_participation_tests
