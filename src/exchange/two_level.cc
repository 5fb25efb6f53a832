// SPDX-License-Identifier: Apache-2.0
// Exchanges over two comms: full precision inside a node, one bit an element between nodes. Of the vector only a slice
// a rank leaves its node, so the bytes on the link that a node's ranks share fall by their number.
#include "base/sizes.h"
#include "comm/comm.h"
#include "device/backend.h"
#include "exchange/exchange.h"
#include <algorithm>

namespace dsopt {

CompressLayout CompressLayout::two_level(int ranks, int rank, int node_ranks, int node_rank,
                                         const std::vector<int64_t> &numels) {
    const int first = node_rank * ranks; // chunk l * ranks + d is served by node rank l of node d
    const auto whole = std::make_shared<CompressLayout>(bucket(ranks * node_ranks, first + rank, numels));
    CompressLayout own;
    own.ranks = ranks;
    own.rank = rank;
    own.whole = whole;
    own.node_ranks = node_ranks;
    own.slice = ranks * whole->server_numel;
    own.slice_begin = node_rank * own.slice;
    own.chunks.resize(size_t(ranks));
    own.count_leaves();
    if (ranks == 1) {
        own.part_leaf.push_back(leaves_of(own.slice)); // how the slice is shared out among threads
        return own;
    }
    own.worker_numel = own.slice;
    own.server_numel = whole->server_numel;
    own.row_scales = whole->row_scales;
    own.units.push_back({0, whole->server_numel, 0});
    for (const Part &part : whole->parts) { // all of them, so that a part has the same number everywhere
        const int64_t end = own.slice_begin + own.slice, from = std::clamp(part.begin, own.slice_begin, end),
                      to = std::clamp(part.begin + part.numel, own.slice_begin, end);
        own.parts.push_back({from - own.slice_begin, to - from, 0});
    }
    for (int d = 0; d < ranks; ++d) {
        own.chunks[size_t(d)] = whole->chunks[size_t(first + d)];
        for (Segment &segment : own.chunks[size_t(d)]) segment.begin -= own.slice_begin;
        own.first_part.push_back(whole->first_part[size_t(first + d)]);
    }
    own.count_leaves();
    return own;
}

const Comm *check_node(const Comm *data, const Comm *node, int32_t compat) {
    if (node == nullptr) return nullptr;
    if (node == data) throw Error(DSOPT_ERR_ARGUMENT, "one comm is given for the ranks of a node and for the nodes");
    if (compat != DSOPT_COMPAT_NONE)
        throw Error(DSOPT_ERR_UNSUPPORTED, "the original has no exchange in two levels: no node comm in compat mode");
    if (data_ranks(data, node) > kMostDataRanks)
        throw Error(DSOPT_ERR_UNSUPPORTED, "%lld data-parallel ranks: more than 2^24", ll(data_ranks(data, node)));
    return node->ranks() > 1 ? node : nullptr;
}

void two_level_exchange(const Context &context, Comm *data, Comm &node, const Exchange &of, const Parallel &parallel,
                        void *stream) {
    const CompressLayout &layout = *of.layout;
    const int64_t bytes = layout.slice * int64_t(sizeof(float));
    // A reduce-scatter with the sum made here: the same bytes, and one order of additions with every provider.
    node.all_to_all(of.message, of.slices, bytes, stream, Place::backend);
    context.backend().compress_slice(of, parallel, stream);
    if (layout.is_exact()) return node.all_gather(of.slices, of.message, bytes, stream, Place::backend);
    exchange(context, *data, of, parallel, stream);
    node.all_gather(of.slice_results, of.results, layout.row_bytes() * layout.ranks, stream, Place::backend);
}

int64_t padded_numel(int node_ranks, int64_t numel) { return (numel + node_ranks - 1) / node_ranks * node_ranks; }

void sum_over_ranks(const Context &context, Comm *data, Comm *node, float *values, int64_t numel, float *scratch,
                    const Parallel &parallel, void *stream) {
    if (node == nullptr) return data->all_reduce(values, numel, DSOPT_DTYPE_F32, DSOPT_OP_SUM, stream, Place::backend);
    if (numel == 0) return;
    const int64_t slice = numel / node->ranks(), bytes = slice * int64_t(sizeof(float));
    node->all_to_all(values, scratch, bytes, stream, Place::backend);
    context.backend().add_up_rows(scratch, slice, node->ranks(), slice, scratch, parallel, stream);
    if (data != nullptr) data->all_reduce(scratch, slice, DSOPT_DTYPE_F32, DSOPT_OP_SUM, stream, Place::backend);
    node->all_gather(scratch, values, bytes, stream, Place::backend);
}

} // namespace dsopt
