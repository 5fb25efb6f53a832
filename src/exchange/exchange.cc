// SPDX-License-Identifier: Apache-2.0
#include "exchange/exchange.h"
#include "base/sizes.h"
#include "base/tensor_list.h"
#include "comm/comm.h"
#include "device/backend.h"
#include "device/plan.h"
#include "rules/onebit.h"
#include <algorithm>
#include <cstring>
#include <numeric>

namespace dsopt {
namespace {

constexpr int64_t kWord = 32; // tensors and chunks begin at whole words of bits

} // namespace

CompressLayout CompressLayout::padded(int ranks, int rank, const std::vector<int64_t> &numels) {
    CompressLayout layout;
    layout.ranks = ranks;
    layout.rank = rank;
    layout.chunks.resize(size_t(ranks));
    const int64_t alignment = ranks * std::lcm<int64_t>(ranks, 8);
    for (const int64_t numel : numels) {
        const int64_t padded = round_up(numel, alignment), chunk = padded / ranks;
        const auto index = int32_t(layout.parts.size());
        layout.units.push_back({layout.worker_numel, chunk, layout.server_numel});
        layout.parts.push_back({layout.worker_numel, padded, index});
        for (int64_t d = 0; d < ranks; ++d)
            layout.chunks[size_t(d)].push_back({layout.worker_numel + d * chunk, chunk, layout.server_numel, index});
        layout.worker_numel += padded;
        layout.server_numel += chunk;
    }
    layout.row_scales = int64_t(numels.size());
    layout.first_part.assign(size_t(ranks), 0);
    layout.count_leaves();
    return layout;
}

CompressLayout CompressLayout::bucket(int ranks, int rank, const std::vector<int64_t> &numels) {
    CompressLayout layout;
    layout.ranks = ranks;
    layout.rank = rank;
    layout.chunks.resize(size_t(ranks));
    int64_t at = 0;
    for (const int64_t numel : numels) {
        layout.parts.push_back({at, numel, 0});
        at += round_up(numel, kWord);
    }
    const int64_t chunk = round_up((at + ranks - 1) / ranks, kWord);
    layout.units.push_back({0, chunk, 0});
    layout.worker_numel = chunk * ranks;
    layout.server_numel = chunk;
    layout.first_part.assign(size_t(ranks), 0);
    size_t part = 0;
    for (int64_t d = 0; d < ranks; ++d) {
        auto &segments = layout.chunks[size_t(d)];
        while (part < layout.parts.size() && layout.parts[part].begin + layout.parts[part].numel <= d * chunk) ++part;
        for (size_t i = part; i < layout.parts.size() && layout.parts[i].begin < (d + 1) * chunk; ++i) {
            const Part &p = layout.parts[i];
            const int64_t begin = std::max(p.begin, d * chunk), end = std::min(p.begin + p.numel, (d + 1) * chunk);
            if (begin < end) segments.push_back({begin, end - begin, begin - d * chunk, int32_t(i)});
        }
        if (segments.empty()) continue;
        layout.first_part[size_t(d)] = segments.front().part;
        layout.row_scales = std::max<int64_t>(layout.row_scales, segments.back().part - segments.front().part + 1);
    }
    layout.count_leaves();
    return layout;
}

void CompressLayout::count_leaves() {
    part_leaf.assign(1, 0);
    for (const Part &part : parts) part_leaf.push_back(part_leaf.back() + leaves_of(part.numel));
    segment_leaf.assign(1, 0);
    for (const Segment &segment : own_segments())
        segment_leaf.push_back(segment_leaf.back() + leaves_of(segment.numel));
}

size_t CompressLayout::workspace_bytes() const {
    const auto row = size_t(row_bytes());
    const size_t one_level = 3 * round_up(row * size_t(ranks)) + round_up(row) +
                             round_up(size_t(leaves()) * sizeof(double)) + round_up(size_t(leaves()) * sizeof(int32_t));
    if (!has_levels()) return one_level;
    return one_level + round_up(row * size_t(whole->ranks)) + 2 * round_up(size_t(whole->worker_numel) * sizeof(float));
}

Exchange::Exchange(const CompressLayout &of, float *worker_buffer, float *server_buffer, void *workspace) :
    layout(&of),
    worker(worker_buffer),
    server(server_buffer) {
    const size_t rows = round_up(size_t(of.row_bytes() * of.ranks));
    send = static_cast<char *>(workspace);
    recv = send + rows;
    results = recv + rows;
    result = results + rows;
    sums = reinterpret_cast<double *>(result + round_up(size_t(of.row_bytes())));
    counts =
        reinterpret_cast<int32_t *>(reinterpret_cast<char *>(sums) + round_up(size_t(of.leaves()) * sizeof(double)));
    slice_results = results;
    if (!of.has_levels()) return;
    results = reinterpret_cast<char *>(counts) + round_up(size_t(of.leaves()) * sizeof(int32_t));
    message = reinterpret_cast<float *>(results + round_up(size_t(of.row_bytes() * of.whole->ranks)));
    slices = message + round_up(size_t(of.whole->worker_numel) * sizeof(float)) / sizeof(float);
}

void exchange(const Context &context, Comm &comm, const Exchange &exchange, const Parallel &parallel, void *stream) {
    const Backend &backend = context.backend();
    const int64_t bytes = exchange.layout->row_bytes();
    comm.all_to_all(exchange.send, exchange.recv, bytes, stream, Place::backend);
    backend.compress_serve(exchange, parallel, stream);
    comm.all_gather(exchange.result, exchange.slice_results, bytes, stream, Place::backend);
}

void owed_errors(const Backend &backend, const Exchange &exchange, float *worker, float *server) {
    const CompressLayout &layout = *exchange.layout;
    std::vector<float> copy;
    const auto on_host = [&](const float *data, int64_t floats) -> const float * {
        if (backend.is_host()) return data;
        copy.resize(size_t(floats));
        backend.copy_to_host(copy.data(), data, size_t(floats) * sizeof(float), nullptr);
        return copy.data();
    };
    const auto owe = [](const float *kept, float scale, int64_t n, float *errors) {
        for (int64_t k = 0; k < n; ++k) errors[k] = error_of(kept[k], scale);
    };
    if (worker != nullptr) {
        const float *kept = on_host(exchange.worker, layout.worker_floats()), *scales = kept + layout.worker_numel;
        std::fill_n(worker, layout.worker_numel, 0.0f);
        for (size_t i = 0; i < layout.parts.size(); ++i)
            owe(kept + layout.parts[i].begin, scales[i], layout.parts[i].numel, worker + layout.parts[i].begin);
    }
    if (server == nullptr) return;
    const float *kept = on_host(exchange.server, layout.server_floats()), *scales = kept + layout.server_numel;
    std::fill_n(server, layout.server_numel, 0.0f);
    for (const CompressLayout::Segment &segment : layout.own_segments())
        owe(kept + segment.server, scales[segment.part - layout.first_part[size_t(layout.rank)]], segment.numel,
            server + segment.server);
}

// ------------------------------------------------------------------------------------------------------- stand-alone
CompressLayout make_layout(const Comm *comm, const Comm *node, const dsopt_compressed &args) {
    if (args.compat != DSOPT_COMPAT_NONE && args.compat != DSOPT_COMPAT_DEEPSPEED)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.compat is %d, which this library does not know", args.compat);
    if (args.reserved != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.reserved is %d, must be 0", args.reserved);
    if (args.count < 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.count is %lld", static_cast<long long>(args.count));
    if (args.count > 0 && args.tensors == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.tensors is NULL");
    std::vector<int64_t> numels;
    int64_t total = 0;
    for (int64_t i = 0; i < args.count; ++i) {
        const std::string name = std::to_string(i);
        const Label label{"compressed tensor", name.c_str()};
        check_tensor(args.tensors[i], label);
        if (args.tensors[i].dtype != DSOPT_DTYPE_F32)
            throw Error(DSOPT_ERR_DTYPE, "compressed tensor '%s' has dtype %d, must be F32", name.c_str(),
                        args.tensors[i].dtype);
        numels.push_back(args.tensors[i].numel);
        total += args.tensors[i].numel;
        if (total > (int64_t(1) << 56))
            throw Error(DSOPT_ERR_SHAPE, "the compressed tensors have more than 2^56 elements");
    }
    node = check_node(comm, node, args.compat);
    if (node != nullptr)
        return CompressLayout::two_level(comm->ranks(), comm->rank(), node->ranks(), node->rank(), numels);
    return args.compat == DSOPT_COMPAT_DEEPSPEED ? CompressLayout::padded(comm->ranks(), comm->rank(), numels)
                                                 : CompressLayout::bucket(comm->ranks(), comm->rank(), numels);
}

void compressed_allreduce(const Context &context, Comm &comm, Comm *node, const dsopt_compressed &args) {
    const CompressLayout layout = make_layout(&comm, node, args);
    for (int64_t i = 0; i < args.count; ++i)
        if (args.tensors[i].data == nullptr && args.tensors[i].numel != 0)
            throw Error(DSOPT_ERR_ARGUMENT, "compressed tensor '%lld' has no memory", static_cast<long long>(i));
    if (layout.all().worker_numel == 0) return; // nothing to send, on any rank
    if (!layout.is_exact() && (args.worker_error == nullptr || args.server_error == nullptr))
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.worker_error or server_error is NULL");
    for (const void *buffer :
         {static_cast<const void *>(args.worker_error), static_cast<const void *>(args.server_error)})
        if (reinterpret_cast<uintptr_t>(buffer) % 4 != 0)
            throw Error(DSOPT_ERR_ALIGNMENT, "an error buffer is at %p, not aligned to 4 bytes", buffer);
    const size_t slack = slack_of(args.workspace), needed = layout.workspace_bytes() + slack;
    if (args.workspace == nullptr || args.workspace_bytes < needed)
        throw Error(DSOPT_ERR_WORKSPACE, "dsopt_compressed.workspace has %zu bytes, %zu are needed",
                    args.workspace == nullptr ? size_t(0) : args.workspace_bytes, needed);
    const Backend &backend = context.backend();
    const Parallel parallel = context.parallel();
    const Exchange buffers(layout, args.worker_error, args.server_error, static_cast<char *>(args.workspace) + slack);
    backend.compress_feed(buffers, args.tensors, args.count, parallel, args.stream);
    if (layout.has_levels())
        two_level_exchange(context, &comm, *node, buffers, parallel, args.stream);
    else
        exchange(context, comm, buffers, parallel, args.stream);
    backend.compress_decode(buffers, args.tensors, args.count, parallel, args.stream);
}

void compressed_errors(const Context &context, const Comm &comm, const Comm *node, const dsopt_compressed &args,
                       float *worker, float *server) {
    const CompressLayout layout = make_layout(&comm, node, args);
    if (layout.worker_numel == 0) return; // or nothing is kept
    if (args.worker_error == nullptr || args.server_error == nullptr)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_compressed.worker_error or server_error is NULL");
    const Exchange buffers(layout, args.worker_error, args.server_error, nullptr);
    owed_errors(context.backend(), buffers, worker, server);
}

} // namespace dsopt
