// SPDX-License-Identifier: Apache-2.0
#include "optimizer/shard.h"
#include "optimizer/group.h"
#include "optimizer/optimizer.h"
#include <numeric>

namespace dsopt {
namespace {

// Memory for a message of every rank in bytes. On a device longer messages use the links better.
constexpr int64_t kHostStaging = int64_t(4) << 20, kDeviceStaging = int64_t(64) << 20;

/// Returns the bytes of the largest element in rows: F32 means, or weights.
int64_t largest_element(const std::vector<Param> &params, bool means) {
    int64_t size = means ? int64_t(sizeof(float)) : 1;
    for (const Param &param : params) size = std::max(size, int64_t(dtype_size(param.dtype)));
    return size;
}
/// Returns the owner of each tensor of matrices; -1: the parameter is in the list's vector.
std::vector<int> owners_of(const std::vector<Param> &params, bool shards, int count) {
    std::vector<size_t> whole;
    std::vector<double> costs;
    for (size_t i = 0; i < params.size() && shards; ++i) {
        const MatrixShape &shape = params[i].matrix;
        if (shape.rows == 0 || params[i].numel == 0) continue;
        whole.push_back(i);
        costs.push_back(shape.cost() * double(params[i].numel / shape.numel()));
    }
    const std::vector<int> assigned = partition_by_cost(costs, count);
    std::vector<int> owners(params.size(), -1);
    for (size_t k = 0; k < whole.size(); ++k) owners[whole[k]] = assigned[k];
    return owners;
}
/// Returns the first parameter of each bucket, and the number of parameters. A bucket ends once it has `size` elements;
/// 0: there is one bucket. Parameters with an owner have none in it.
std::vector<size_t> buckets_of(const std::vector<Param> &params, const std::vector<int> &owners, int64_t size) {
    std::vector<size_t> first{0};
    int64_t numel = 0;
    for (size_t i = 0; i < params.size(); ++i) {
        if (size != 0 && numel >= size) {
            first.push_back(i);
            numel = 0;
        }
        if (owners[i] < 0) numel += params[i].numel;
    }
    first.push_back(params.size());
    return first;
}
/// Returns the vector of consecutive tensors of one owner; -1: of those that no owner has as a whole.
ListVector vector_of(const std::vector<Param> &params, const std::vector<int> &owners, int owner, size_t begin,
                     size_t end) {
    std::vector<int64_t> numels;
    for (size_t i = begin; i < end; ++i) numels.push_back(owners[i] == owner ? params[i].numel : 0);
    return ListVector(numels);
}
/// Returns a section per bucket, and one with the tensors of `count` owners if there are any.
std::vector<RowSection> sections_of(const std::vector<Param> &params, const std::vector<int> &owners,
                                    const std::vector<size_t> &buckets, int count) {
    std::vector<RowSection> sections;
    for (size_t k = 0; k + 1 < buckets.size(); ++k)
        sections.push_back({{vector_of(params, owners, -1, buckets[k], buckets[k + 1])}, buckets[k]});
    if (std::all_of(owners.begin(), owners.end(), [](int owner) { return owner < 0; })) return sections;
    std::vector<ListVector> owned;
    for (int owner = 0; owner < count; ++owner) owned.push_back(vector_of(params, owners, owner, 0, params.size()));
    sections.push_back({std::move(owned), 0});
    return sections;
}
bool any_averaged(const std::vector<Participation> &participation) {
    return std::any_of(participation.begin(), participation.end(),
                       [](const Participation &p) { return p.is_averaged(); });
}

} // namespace

std::vector<int> partition_by_cost(const std::vector<double> &costs, int count) {
    std::vector<size_t> order(costs.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
    std::vector<double> work(size_t(count), 0.0);
    std::vector<int> owners(costs.size());
    for (const size_t i : order) {
        const auto least = std::min_element(work.begin(), work.end());
        owners[i] = int(least - work.begin());
        *least += costs[i];
    }
    return owners;
}

ListVector vector_of(const std::vector<Param> &params) {
    std::vector<int64_t> numels;
    for (const Param &param : params) numels.push_back(param.numel);
    return ListVector(numels);
}

Sharding effective_sharding(const dsopt_optimizer_desc &desc, const DataRank &local) {
    if (local.ranks == 1 || (sharding_of(desc) == Sharding::in_node && local.node_ranks == 1)) return Sharding::none;
    return sharding_of(desc);
}

RankParts::RankParts(const std::vector<Param> &params, const std::vector<Participation> &participation,
                     const dsopt_optimizer_desc &desc, const DataRank &local, bool on_host) :
    local_(local),
    sharding_(effective_sharding(desc, local)),
    owners_(owners_of(params, sharding_ != Sharding::none, owners())),
    buckets_(buckets_of(params, owners_, desc.bucket)),
    layout_(sections_of(params, owners_, buckets_, owners()), local.ranks,
            largest_element(params, any_averaged(participation)), on_host ? kHostStaging : kDeviceStaging) {
    for (const Param &param : params) numels_.push_back(param.numel);
    for (size_t i = 0; i < params.size(); ++i) {
        const Range &range = parts_.emplace_back(part(i, local.rank));
        positions_.push_back(leaves_);
        if (owners_[i] < 0) leaves_ += leaves_of(range.numel);
        slice_positions_.push_back(slice_leaves_);
        if (local.node_ranks > 1) slice_leaves_ += leaves_of(slice(i).numel);
        const Participation &p = participation[i];
        means_.push_back(p.is_averaged() && params[i].numel != 0 ? mean_numel_ : -1);
        if (p.is_averaged())
            mean_numel_ += round_up(p.mean_of_slice ? slice(i).numel : range.numel, ListVector::kAlignment);
    }
    inspected_leaves_ = leaves_;
    for (size_t i = 0; i < params.size(); ++i) {
        if (owners_[i] < 0) continue;
        positions_[i] = inspected_leaves_;
        inspected_leaves_ += leaves_of(parts_[i].numel);
    }
}

int RankParts::bucket_of(size_t param) const {
    return int(std::upper_bound(buckets_.begin(), buckets_.end() - 1, param) - buckets_.begin()) - 1;
}
Range RankParts::in_bucket(size_t param) const {
    const RowSection &section = layout_.section(bucket_of(param));
    return section.vectors[0].range(param - section.first);
}
TensorInterval RankParts::tensors_of(int bucket) const {
    const int64_t first = int64_t(buckets_[size_t(bucket)]);
    return {first, int64_t(buckets_[size_t(bucket) + 1]) - first};
}

Range RankParts::slice(size_t param) const {
    const Range chunks = layout_.partition(bucket_of(param)).chunks(local_.first_of_slice(), local_.nodes());
    return part_of(in_bucket(param), chunks);
}

Range RankParts::part(size_t param, int rank) const {
    const Range tensor = in_bucket(param);
    if (sharding_ == Sharding::none) return whole_range(tensor.numel);
    const int chunks = ranks_of_owner();
    if (owners_[param] >= 0) return {0, rank / chunks == owners_[param] ? numels_[param] : 0, numels_[param]};
    return part_of(tensor, layout_.partition(bucket_of(param)).chunks(rank / chunks * chunks, chunks));
}

bool RankParts::is_split(size_t param) const {
    const Range tensor = in_bucket(param);
    if (sharding_ == Sharding::none || tensor.numel == 0) return false;
    const int64_t size = layout_.partition(bucket_of(param)).chunk_numel() * ranks_of_owner();
    return tensor.begin / size != (tensor.end() - 1) / size;
}

Range find_part(const Optimizer &optimizer, int64_t param, int32_t rank) {
    check_groups(optimizer);
    const auto count = int64_t(optimizer.params().size());
    if (param < 0 || param >= count)
        throw Error(DSOPT_ERR_ARGUMENT, "param is %lld, there are %lld parameters", ll(param), ll(count));
    const DataRank local = optimizer.data_rank();
    if (rank < -1 || rank >= local.ranks)
        throw Error(DSOPT_ERR_ARGUMENT, "rank is %d, there are %d data-parallel ranks", rank, local.ranks);
    const RankParts *const parts = optimizer.parts();
    if (parts == nullptr) return whole_range(optimizer.params()[size_t(param)].numel);
    return parts->part(size_t(param), rank < 0 ? local.rank : rank);
}

} // namespace dsopt
