// SPDX-License-Identifier: Apache-2.0
// Where the elements of a list are in the buffers of an exchange, and where those are in a workspace.
#include "base/sizes.h"
#include "device/compress.h"
#include "device/plan.h"
#include <algorithm>
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
        layout.parts.push_back({layout.worker_numel, padded, numel, index});
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
        layout.parts.push_back({at, numel, numel, 0});
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

ExchangeBuffers::ExchangeBuffers(const CompressLayout &of, float *worker_buffer, float *server_buffer,
                                 void *workspace) :
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
        own.parts.push_back({from - own.slice_begin, to - from, to - from, 0});
    }
    for (int d = 0; d < ranks; ++d) {
        own.chunks[size_t(d)] = whole->chunks[size_t(first + d)];
        for (Segment &segment : own.chunks[size_t(d)]) segment.begin -= own.slice_begin;
        own.first_part.push_back(whole->first_part[size_t(first + d)]);
    }
    own.count_leaves();
    return own;
}

} // namespace dsopt
