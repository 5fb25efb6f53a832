// SPDX-License-Identifier: Apache-2.0
// With two comms, values are sent in full precision inside a node, and as one bit per element between nodes. Each rank
// sends only its slice of the vector to other nodes, so the number of bytes between nodes does not grow with the ranks
// per node.
#include "exchange/exchange.h"
#include "base/sizes.h"
#include "rules/onebit.h"
#include "rules/options.h"
#include <algorithm>

namespace dsopt {

const Comm *check_node(const Comm *data, const Comm *node, int32_t compat) {
    if (node == nullptr) return nullptr;
    if (node == data) throw Error(DSOPT_ERR_ARGUMENT, "one comm is given for the ranks of a node and for the nodes");
    check_options<At::optimizer>(Facts{facts::node}.add(facts::compat, compat != DSOPT_COMPAT_NONE));
    if (data_ranks(data, node) > kMaxDataRanks)
        throw Error(DSOPT_ERR_UNSUPPORTED, "%lld data-parallel ranks: more than 2^24", ll(data_ranks(data, node)));
    return node->ranks() > 1 ? node : nullptr;
}

DataRank data_rank_of(const Comm *data, const Comm *node) {
    const int count = data != nullptr ? data->ranks() : 1, node_ranks = node != nullptr ? node->ranks() : 1;
    const int in_data = data != nullptr ? data->rank() : 0, in_node = node != nullptr ? node->rank() : 0;
    return {in_data + in_node * count, count * node_ranks, node_ranks};
}

void exchange_messages(Comm &comm, ExchangeKernels &kernels, const Compression &local, void *stream) {
    const int64_t bytes = local.layout.message_bytes;
    comm.all_to_all(local.send, local.recv, bytes, stream, Place::backend);
    kernels.run(ExchangePass::clear_result);
    kernels.run(ExchangePass::reduce_messages);
    kernels.run(ExchangePass::result_scales);
    comm.all_gather(local.result, local.results, bytes, stream, Place::backend);
}

void pack_messages(ExchangeKernels &kernels, FunctionRef<void()> feed) {
    kernels.run(ExchangePass::clear_messages);
    feed();
    kernels.run(ExchangePass::message_scales);
}

void prepare_exchange(ExchangeKernels &kernels, const Exchange &buffers, FunctionRef<void()> feed) {
    if (!buffers.layout->has_levels()) return pack_messages(kernels, feed);
    kernels.run(ExchangePass::clear_gaps);
    feed();
}

void exchange(Comm *data, Comm *node, ExchangeKernels &kernels, const Exchange &buffers, void *stream) {
    if (node == nullptr) return exchange_messages(*data, kernels, buffers.local, stream);
    const auto &[ranks, numel, vector, slices] = buffers.node;
    const int64_t bytes = numel * int64_t(sizeof(float));
    // A reduce-scatter whose sum is computed by the engine's kernels: it sends the same bytes, and the order of
    // additions is the same with every provider.
    node->all_to_all(vector, slices, bytes, stream, Place::backend);
    if (buffers.layout->is_exact()) {
        kernels.run(ExchangePass::average_slice);
        return node->all_gather(slices, vector, bytes, stream, Place::backend);
    }
    pack_messages(kernels, [&] { kernels.run(ExchangePass::pack_slice); });
    exchange_messages(*data, kernels, buffers.local, stream);
    node->all_gather(buffers.local.results, buffers.mean.results, buffers.local.layout.messages_bytes(), stream,
                     Place::backend);
}

void reserve_exchange(Comm *data, Comm *node, const ExchangeLayout &layout, ExchangeUse use, void *stream) {
    const int64_t message = layout.slice.message_bytes;
    if (data != nullptr && !layout.is_exact())
        data->reserve({.all_to_all = message, .all_gather = message}, stream, Place::backend);
    if (node == nullptr || use == ExchangeUse::sharded_step) return;
    if (use == ExchangeUse::step)
        return node->reserve({.all_gather = layout.slice.messages_bytes()}, stream, Place::backend);
    const int64_t slice = layout.slice_range().numel * int64_t(sizeof(float)),
                  results = layout.is_exact() ? slice : layout.slice.messages_bytes();
    node->reserve({.all_to_all = slice, .all_gather = results}, stream, Place::backend);
}

void read_residuals(const Device &device, const Exchange &buffers, float *worker, float *server) {
    const Compression &local = buffers.local;
    const CompressLayout &layout = local.layout;
    const auto on_host = [&]<class T>(const T *data, int64_t count, std::vector<T> &copy) -> const T * {
        if (device.is_host() || data == nullptr) return data;
        copy.resize(size_t(count));
        device.copy(copy.data(), data, size_t(count) * sizeof(T));
        return copy.data();
    };
    std::vector<float> copy;
    std::vector<int32_t> copy_of_active;
    const int32_t *const active = on_host(buffers.mean.active, buffers.active_words(), copy_of_active);
    const int64_t first = buffers.layout->slice_range().begin - buffers.mean.begin;
    const auto read = [&](const float *values, float scale, int64_t begin, int64_t n, float *residuals) {
        for (int64_t k = 0; k < n; ++k) // inactive elements have no residual, although error_of() is not 0
            residuals[k] = is_active(active, first + begin + k) ? error_of(values[k], scale) : 0;
    };
    if (worker != nullptr) {
        const float *values = on_host(local.worker, layout.worker_floats(), copy),
                    *scales = values + layout.worker_numel;
        std::fill_n(worker, layout.worker_numel, 0.0f);
        for (int32_t i = 0; i < layout.group_count; ++i) {
            const Range &group = layout.groups[i];
            read(values + group.begin, scales[i], group.begin, group.numel, worker + group.begin);
        }
    }
    if (server == nullptr) return;
    const float *values = on_host(local.server, layout.server_floats(), copy), *scales = values + layout.server_numel;
    std::fill_n(server, layout.server_numel, 0.0f);
    for (int32_t i = 0; i < layout.segment_count; ++i) {
        const CompressLayout::Segment &segment = layout.segments[i];
        read(values + segment.server, scales[i], segment.begin, segment.numel, server + segment.server);
    }
}

} // namespace dsopt
