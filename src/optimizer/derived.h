// SPDX-License-Identifier: Apache-2.0
// What follows from the groups and parameters of an optimizer, its options and its ranks.
#pragma once
#include "optimizer/matrices.h"
#include "optimizer/onebit.h"
#include "optimizer/participation.h"
#include "optimizer/registry.h"
#include "optimizer/shard.h"
#include "optimizer/step_memory.h"
#include <memory>
#include <vector>

namespace dsopt {

/// Computed once per list by derive(), and dropped as a whole when the list grows. Steps only read it, except for the
/// host's copy of the schedule in OneBit.
struct Derived {
    std::unique_ptr<OneBit> onebit;           // NULL without a group of the 1-bit family
    std::vector<Participation> participation; // of each parameter
    std::unique_ptr<RankParts> parts;         // NULL unless ranks average gradients or state is sharded
    std::unique_ptr<Matrices> matrices;       // NULL: this rank has no matrices
    StepSizes sizes;

    bool shards() const { return parts && parts->sharding() != Sharding::none; }
    /// True if messages of steps follow from the list: ranks with different lists would send different ones.
    bool sends_lists() const {
        return parts || (matrices && matrices->counts().split) || (onebit && onebit->setup().compresses);
    }
};

/// `between_matrices`: the comm of ranks that matrices are partitioned among, or NULL.
Derived derive(const Registry &registry, const dsopt_optimizer_desc &desc, const Context &context,
               const DataRank &local, const Comm *between_matrices);

} // namespace dsopt
