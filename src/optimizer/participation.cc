// SPDX-License-Identifier: Apache-2.0
#include "optimizer/participation.h"
#include "optimizer/group.h"
#include "optimizer/onebit.h"
#include "optimizer/shard.h"
#include <algorithm>

namespace dsopt {

namespace {

/// Returns what a parameter of this group takes part in. `family`: there is a group of the 1-bit family.
Participation participation_of(const dsopt_group &group, const dsopt_optimizer_desc &desc, const DataRank &local,
                               bool family) {
    const Averages with_flag = desc.flags & DSOPT_OPTIMIZER_AVERAGES ? Averages::all : Averages::none;
    Participation p{.is_matrix = is_matrix_rule(group.algorithm), .full = with_flag};
    if (!family) return p;
    p.exchanged = is_exchanged(group);
    if (local.ranks == 1) {
        p.compressed = with_flag;
        p.local = p.exchanged ? Averages::none : with_flag;
        return p;
    }
    // Ranks have gradients of their own: the mean is of every tensor that is never compressed and, with a node comm, of
    // the node. One node is all ranks.
    p.compressed = !p.exchanged || local.ranks == local.node_ranks ? Averages::all
                   : local.node_ranks > 1                          ? Averages::in_node
                                                                   : Averages::none;
    p.local = p.compressed;
    // In local steps of 0/1 Adam each rank of a node needs the node's mean of every gradient.
    p.mean_of_slice = p.full == Averages::none && p.compressed == Averages::in_node &&
                      group.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM;
    return p;
}

} // namespace

std::vector<Participation> participation_of(const std::vector<Param> &params, const std::vector<dsopt_group> &groups,
                                            const dsopt_optimizer_desc &desc, const DataRank &local,
                                            const OneBitSetup *onebit) {
    std::vector<Participation> all;
    for (size_t i = 0; i < params.size(); ++i) {
        Participation &p =
            all.emplace_back(participation_of(groups[size_t(params[i].group)], desc, local, onebit != nullptr));
        if (onebit != nullptr) p.sent = onebit->worker[i] >= 0;
        if (onebit != nullptr && local.ranks > 1 && params[i].numel == 0)
            p.full = p.compressed = p.local = Averages::none;
    }
    return all;
}

bool exchanges_rows(const std::vector<dsopt_group> &groups, const dsopt_optimizer_desc &desc, const DataRank &local) {
    if (local.ranks == 1) return false;
    const bool family =
        std::any_of(groups.begin(), groups.end(), [](const dsopt_group &group) { return is_onebit(group.algorithm); });
    return effective_sharding(desc, local) != Sharding::none ||
           std::any_of(groups.begin(), groups.end(), [&](const dsopt_group &group) {
               return participation_of(group, desc, local, family).is_averaged();
           });
}

} // namespace dsopt
