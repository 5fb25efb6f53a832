// SPDX-License-Identifier: Apache-2.0
#include "optimizer/shard.h"
#include "optimizer/optimizer.h"
#include "rules/group.h"

namespace dsopt {
namespace {

// Memory for a message of every rank in bytes. On a device longer messages use the links better.
constexpr int64_t kHostStaging = int64_t(4) << 20, kDeviceStaging = int64_t(64) << 20;

ListVector vector_of(const std::vector<Param> &params) {
    std::vector<int64_t> numels;
    for (const Param &param : params) numels.push_back(param.numel);
    return ListVector(numels);
}
int64_t largest_element(const std::vector<Param> &params) {
    int64_t size = 1;
    for (const Param &param : params) size = std::max(size, int64_t(dtype_size(param.dtype)));
    return size;
}

} // namespace

void check_shard(const dsopt_optimizer_desc &desc, bool has_data, bool has_node) {
    if (!is_sharded(desc)) return;
    const bool in_node = desc.flags & DSOPT_OPTIMIZER_SHARD_NODE;
    if (in_node && (desc.flags & DSOPT_OPTIMIZER_SHARD))
        throw Error(DSOPT_ERR_UNSUPPORTED, "SHARD and SHARD_NODE exclude one another");
    if (desc.compat != DSOPT_COMPAT_NONE)
        throw Error(DSOPT_ERR_UNSUPPORTED,
                    "the original's optimizers keep all state on every rank: SHARD is for standard mode");
    if (in_node && !has_node)
        throw Error(DSOPT_ERR_UNSUPPORTED, "SHARD_NODE has no effect without dsopt_optimizer_desc.node");
    if (!has_data && !has_node)
        throw Error(DSOPT_ERR_UNSUPPORTED, "SHARD has no effect without dsopt_optimizer_desc.data");
    if (desc.expert_count != 0)
        throw Error(DSOPT_ERR_UNSUPPORTED,
                    "experts do not go with SHARD: give them an optimizer of their own, on one SHARED scaler");
}

void check_shard_algorithm(const dsopt_optimizer_desc &desc, int32_t algorithm) {
    if (!is_sharded(desc) || !is_onebit(algorithm)) return;
    if (algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) throw Error(DSOPT_ERR_UNSUPPORTED, "0/1 Adam is not sharded");
    if (desc.flags & DSOPT_OPTIMIZER_SHARD)
        throw Error(DSOPT_ERR_UNSUPPORTED, "the 1-bit family is sharded in its node: DSOPT_OPTIMIZER_SHARD_NODE");
}

Shard::Shard(const std::vector<Param> &params, const dsopt_optimizer_desc &desc, const DataRank &local, bool on_host) :
    local_(local),
    in_node_(desc.flags & DSOPT_OPTIMIZER_SHARD_NODE),
    rows_(vector_of(params), local.ranks, largest_element(params), on_host ? kHostStaging : kDeviceStaging) {
    for (size_t i = 0; i < params.size(); ++i) {
        parts_.push_back(part(i, local.rank));
        const int64_t count = leaves_of(parts_[i].numel);
        if (leaves_.count == 0) leaves_.first = params[i].first_leaf + parts_[i].begin / kLeaf;
        leaves_.count += count;
    }
}

Range Shard::part(size_t param, int rank) const {
    const int chunks = in_node_ ? local_.ranks / local_.node_ranks : 1;
    return part_of(rows_.vector().range(param), rows_.partition().chunks(rank / chunks * chunks, chunks));
}

Range find_part(const Optimizer &optimizer, int64_t param, int32_t rank) {
    check_groups(optimizer);
    const auto count = int64_t(optimizer.params().size());
    if (param < 0 || param >= count)
        throw Error(DSOPT_ERR_ARGUMENT, "param is %lld, there are %lld parameters", ll(param), ll(count));
    const DataRank local = optimizer.data_rank();
    if (rank < -1 || rank >= local.ranks)
        throw Error(DSOPT_ERR_ARGUMENT, "rank is %d, there are %d data-parallel ranks", rank, local.ranks);
    const Shard *const shard = optimizer.shard();
    if (shard == nullptr) return whole_range(optimizer.params()[size_t(param)].numel);
    return shard->part(size_t(param), rank < 0 ? local.rank : rank);
}

} // namespace dsopt
