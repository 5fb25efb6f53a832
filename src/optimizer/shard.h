// SPDX-License-Identifier: Apache-2.0
// Sharded state (DSOPT_OPTIMIZER_SHARD, _SHARD_NODE): the part of every parameter whose state a data-parallel rank keeps.
#pragma once
#include "device/phases.h"
#include "device/plan.h"
#include "exchange/layout.h"
#include "optimizer/participation.h"
#include "step/rows.h"
#include <utility>

namespace dsopt {

/// Returns how an optimizer of several ranks shards its state.
constexpr Sharding sharding_of(const dsopt_optimizer_desc &desc) {
    return desc.flags & DSOPT_OPTIMIZER_SHARD        ? Sharding::ranks
           : desc.flags & DSOPT_OPTIMIZER_SHARD_NODE ? Sharding::in_node
                                                     : Sharding::none;
}
/// Returns the same for an optimizer of these ranks: a single rank, or one in a node of one rank, has everything.
Sharding effective_sharding(const dsopt_optimizer_desc &desc, const DataRank &local);
constexpr bool is_sharded(const dsopt_optimizer_desc &desc) { return sharding_of(desc) != Sharding::none; }
/// Assigns items to `count` owners: the most expensive item first, each to the owner with the lowest sum of costs; of
/// equal ones, the first. Returns the owner of each item.
std::vector<int> partition_by_cost(const std::vector<double> &costs, int count);
/// Returns the vector of a list of parameters, none of which is whole on one rank.
ListVector vector_of(const std::vector<Param> &params);

/// This rank's parts of the parameters, and the rows in which ranks exchange parts. They follow from the list, the
/// ranks and the size of buckets. A bucket is a run of consecutive parameters; without a size there is one. A part is
/// one interval of the vector of its bucket. Without sharded state every part is the whole parameter, and the rows are
/// for means of gradients. Tensors of matrices are whole on one rank, and have no place in a vector.
class RankParts {
public:
    RankParts(const std::vector<Param> &params, const std::vector<Participation> &participation,
              const dsopt_optimizer_desc &desc, const DataRank &local, bool on_host);
    Sharding sharding() const { return sharding_; }
    /// Returns the elements of a parameter that are in the part of a rank.
    Range part(size_t param, int rank) const;
    /// The same for this rank.
    const Range &part(size_t param) const { return parts_[param]; }
    /// True if several ranks have parts of a parameter.
    bool is_split(size_t param) const;
    /// Returns the index of a parameter's bucket. Tensors that one rank has as a whole are in none.
    bool is_in_bucket(size_t param) const { return owners_[param] < 0; }
    int bucket_of(size_t param) const;
    /// Returns the parameters of a bucket, and tensors among them that one rank has as a whole.
    TensorInterval tensors_of(int bucket) const;
    int buckets() const { return int(buckets_.size()) - 1; }
    /// Returns the number of leaves of this rank's parts, without those of whole tensors of matrices, and with them.
    int64_t leaves() const { return leaves_; }
    int64_t inspected_leaves() const { return inspected_leaves_; }
    /// Returns the position of a part's first leaf among the leaves of all parts. Whole tensors of matrices come last.
    int64_t position(size_t param) const { return positions_[param]; }
    /// Returns the elements of a parameter that are in this rank's slice of its node; the number of leaves of the
    /// slice, and the position of the first one of a parameter among them.
    Range slice(size_t param) const;
    int64_t slice_leaves() const { return slice_leaves_; }
    int64_t slice_position(size_t param) const { return slice_positions_[param]; }
    const RowLayout &layout() const { return layout_; }
    /// Returns the index of the mean of a parameter's gradient in StepMemory::mean. -1: its gradient is never averaged.
    int64_t mean(size_t param) const { return means_[param]; }
    int64_t mean_numel() const { return mean_numel_; }

private:
    /// Returns the number of owners of whole tensors, and of consecutive ranks of each.
    int owners() const { return sharding_ == Sharding::in_node ? local_.node_ranks : local_.ranks; }
    int ranks_of_owner() const { return sharding_ == Sharding::in_node ? local_.nodes() : 1; }

    /// Returns the range of a parameter in the vector of its bucket.
    Range in_bucket(size_t param) const;

    const DataRank local_;
    const Sharding sharding_;
    const std::vector<int> owners_;     // of each parameter; -1: it is in the vector of its bucket
    const std::vector<size_t> buckets_; // the first parameter of each, and the number of parameters
    const RowLayout layout_;            // sections: the buckets, then the tensors with an owner
    std::vector<int64_t> numels_;       // of the parameters
    std::vector<Range> parts_;
    std::vector<int64_t> positions_, slice_positions_;
    int64_t leaves_ = 0, inspected_leaves_ = 0, slice_leaves_ = 0;
    std::vector<int64_t> means_;
    int64_t mean_numel_ = 0;
};

} // namespace dsopt
