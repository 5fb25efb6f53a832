// SPDX-License-Identifier: Apache-2.0
// With two comms values go in full precision inside a node, and as one bit an element between nodes. Of the vector only
// a slice a rank leaves its node, so the bytes on the link that a node's ranks share fall by their number.
#include "exchange/exchange.h"
#include "base/sizes.h"
#include "rules/onebit.h"
#include <algorithm>

namespace dsopt {

const Comm *check_node(const Comm *data, const Comm *node, int32_t compat) {
    if (node == nullptr) return nullptr;
    if (node == data) throw Error(DSOPT_ERR_ARGUMENT, "one comm is given for the ranks of a node and for the nodes");
    if (compat != DSOPT_COMPAT_NONE)
        throw Error(DSOPT_ERR_UNSUPPORTED, "the original has no exchange in two levels: no node comm in compat mode");
    if (data_ranks(data, node) > kMostDataRanks)
        throw Error(DSOPT_ERR_UNSUPPORTED, "%lld data-parallel ranks: more than 2^24", ll(data_ranks(data, node)));
    return node->ranks() > 1 ? node : nullptr;
}

DataRank data_rank_of(const Comm *data, const Comm *node) {
    const int count = data != nullptr ? data->ranks() : 1, node_ranks = node != nullptr ? node->ranks() : 1;
    const int in_data = data != nullptr ? data->rank() : 0, in_node = node != nullptr ? node->rank() : 0;
    return {in_data + in_node * count, count * node_ranks, node_ranks};
}

CompressLayout layout_for(const DataRank &own, bool compat, const std::vector<int64_t> &numels) {
    const auto [rank, ranks, node_ranks] = own;
    const int nodes = ranks / node_ranks;
    if (node_ranks > 1) return CompressLayout::two_level(nodes, rank % nodes, node_ranks, rank / nodes, numels);
    return compat ? CompressLayout::padded(ranks, rank, numels) : CompressLayout::bucket(ranks, rank, numels);
}

namespace {
/// From rows to rows of results on every rank of `comm`.
void exchange_rows(const Device &device, Comm &comm, const ExchangeBuffers &buffers, const Parallel &parallel,
                   void *stream) {
    const int64_t bytes = buffers.layout->row_bytes();
    comm.all_to_all(buffers.send, buffers.recv, bytes, stream, Place::backend);
    device.loops().compress_serve(buffers, parallel, stream);
    comm.all_gather(buffers.result, buffers.slice_results, bytes, stream, Place::backend);
}
} // namespace

void exchange(const Context &context, Comm *data, Comm *node, const ExchangeBuffers &buffers, const Parallel &parallel,
              void *stream) {
    const Device &device = context.device();
    if (node == nullptr) return exchange_rows(device, *data, buffers, parallel, stream);
    const CompressLayout &layout = *buffers.layout;
    const int64_t bytes = layout.slice * int64_t(sizeof(float));
    // A reduce-scatter with the sum made here: the same bytes, and one order of additions with every provider.
    node->all_to_all(buffers.message, buffers.slices, bytes, stream, Place::backend);
    device.loops().compress_slice(buffers, parallel, stream);
    if (layout.is_exact()) return node->all_gather(buffers.slices, buffers.message, bytes, stream, Place::backend);
    exchange_rows(device, *data, buffers, parallel, stream);
    node->all_gather(buffers.slice_results, buffers.results, layout.row_bytes() * layout.ranks, stream, Place::backend);
}

void reserve_exchange(Comm *data, Comm *node, const CompressLayout &layout, void *stream) {
    const int64_t row = layout.row_bytes();
    if (data != nullptr && !layout.is_exact())
        data->reserve({.all_to_all = row, .all_gather = row}, stream, Place::backend);
    if (node == nullptr) return;
    const int64_t slice = layout.slice * int64_t(sizeof(float));
    node->reserve({.all_to_all = slice, .all_gather = layout.is_exact() ? slice : row * layout.ranks}, stream,
                  Place::backend);
}

void reserve_sum(Comm *data, Comm *node, int64_t numel, void *stream) {
    const int64_t slice = (node != nullptr ? numel / node->ranks() : numel) * int64_t(sizeof(float));
    if (data != nullptr) data->reserve({.all_reduce = slice}, stream, Place::backend);
    if (node != nullptr) node->reserve({.all_to_all = slice, .all_gather = slice}, stream, Place::backend);
}

void sum_over_ranks(const Context &context, Comm *data, Comm *node, float *values, int64_t numel, float *scratch,
                    const Parallel &parallel, void *stream) {
    if (node == nullptr) return data->all_reduce(values, numel, DSOPT_DTYPE_F32, DSOPT_OP_SUM, stream, Place::backend);
    if (numel == 0) return;
    const int64_t slice = numel / node->ranks(), bytes = slice * int64_t(sizeof(float));
    node->all_to_all(values, scratch, bytes, stream, Place::backend);
    context.device().loops().add_up_rows(scratch, slice, node->ranks(), slice, scratch, parallel, stream);
    if (data != nullptr) data->all_reduce(scratch, slice, DSOPT_DTYPE_F32, DSOPT_OP_SUM, stream, Place::backend);
    node->all_gather(scratch, values, bytes, stream, Place::backend);
}

void owed_errors(const Device &device, const ExchangeBuffers &buffers, float *worker, float *server) {
    const CompressLayout &layout = *buffers.layout;
    const auto on_host = [&]<class T>(const T *data, int64_t count, std::vector<T> &copy) -> const T * {
        if (device.is_host() || data == nullptr) return data;
        copy.resize(size_t(count));
        device.copy(copy.data(), data, size_t(count) * sizeof(T));
        return copy.data();
    };
    std::vector<float> copy;
    std::vector<int32_t> copy_of_active;
    const int32_t *const active = on_host(buffers.active, layout.used_words(), copy_of_active);
    const auto owe = [&](const float *kept, float scale, int64_t begin, int64_t n, float *errors) {
        for (int64_t k = 0; k < n; ++k) // what takes no part is kept at 0, and the others' scale is not its own
            errors[k] = takes_part(active, layout.slice_begin + begin + k) ? error_of(kept[k], scale) : 0;
    };
    if (worker != nullptr) {
        const float *kept = on_host(buffers.worker, layout.worker_floats(), copy), *scales = kept + layout.worker_numel;
        std::fill_n(worker, layout.worker_numel, 0.0f);
        for (size_t i = 0; i < layout.parts.size(); ++i) {
            const auto &[begin, numel, used, unit] = layout.parts[i];
            owe(kept + begin, scales[i], begin, numel, worker + begin);
        }
    }
    if (server == nullptr) return;
    const float *kept = on_host(buffers.server, layout.server_floats(), copy), *scales = kept + layout.server_numel;
    std::fill_n(server, layout.server_numel, 0.0f);
    for (const CompressLayout::Segment &segment : layout.own_segments())
        owe(kept + segment.server, scales[segment.part - layout.first_part[size_t(layout.rank)]], segment.begin,
            segment.numel, server + segment.server);
}

} // namespace dsopt
