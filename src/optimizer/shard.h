// SPDX-License-Identifier: Apache-2.0
// Sharded state (DSOPT_OPTIMIZER_SHARD, _SHARD_NODE): the part of every parameter whose state a data-parallel rank keeps.
#pragma once
#include "device/plan.h"
#include "exchange/layout.h"
#include "optimizer/param.h"
#include "step/parts.h"

namespace dsopt {

/// True if flags of an optimizer ask for sharded state. With one rank the parts are whole parameters, and there is no
/// Shard.
constexpr bool is_sharded(const dsopt_optimizer_desc &desc) {
    return (desc.flags & (DSOPT_OPTIMIZER_SHARD | DSOPT_OPTIMIZER_SHARD_NODE)) != 0;
}
/// Number of different parts: all data-parallel ranks, or those of a node.
constexpr int parts_of(const dsopt_optimizer_desc &desc, const DataRank &local) {
    if (!is_sharded(desc)) return 1;
    return desc.flags & DSOPT_OPTIMIZER_SHARD_NODE ? local.node_ranks : local.ranks;
}
/// Throws UNSUPPORTED for options that cannot be combined with sharded state. `has_data`, `has_node`: there are comms.
void check_shard(const dsopt_optimizer_desc &desc, bool has_data, bool has_node);
/// Throws UNSUPPORTED for an algorithm that cannot be sharded in this way.
void check_shard_algorithm(const dsopt_optimizer_desc &desc, int32_t algorithm);

/// The parts, which follow from the list and the ranks. A part is one interval of the list's vector.
class Shard {
public:
    Shard(const std::vector<Param> &params, const dsopt_optimizer_desc &desc, const DataRank &local, bool on_host);
    /// Returns the elements of a parameter that are in the part of a rank.
    Range part(size_t param, int rank) const;
    /// The same for this rank.
    const Range &part(size_t param) const { return parts_[param]; }
    /// Returns the leaves of this rank's part.
    LeafInterval leaves() const { return leaves_; }
    const RowLayout &rows() const { return rows_; }
    bool in_node() const { return in_node_; }
    int64_t staging_bytes() const { return StepParts::staging_bytes(rows_, local_, in_node_); }

private:
    DataRank local_;
    bool in_node_;
    RowLayout rows_;
    std::vector<Range> parts_;
    LeafInterval leaves_{0, 0};
};

} // namespace dsopt
