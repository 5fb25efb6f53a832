// SPDX-License-Identifier: Apache-2.0
// Where the elements of a list are in the buffers of an exchange, and where those are in a workspace.
#include "base/sizes.h"
#include "device/compress.h"
#include "device/plan.h"
#include <algorithm>
#include <numeric>

namespace dsopt {

constexpr int64_t kWord = 32; // tensors and chunks begin at whole words of bits

CompressLayout CompressLayout::padded(int ranks, int rank, const std::vector<int64_t> &numels) {
    CompressLayout layout(ranks, rank);
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
    layout.count_leaves();
    return layout;
}

CompressLayout CompressLayout::bucket(int ranks, int rank, const std::vector<int64_t> &numels) {
    CompressLayout layout(ranks, rank);
    int64_t at = 0;
    for (const int64_t numel : numels) {
        layout.parts.push_back({at, numel, numel, 0});
        at += round_up(numel, kWord);
    }
    const int64_t chunk = round_up((at + ranks - 1) / ranks, kWord);
    layout.units.push_back({0, chunk, 0});
    layout.worker_numel = chunk * ranks;
    layout.server_numel = chunk;
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
    for (size_t d = 0; d < chunks.size(); ++d)
        slots[d] = chunks[d].empty() ? 0 : chunks[d].back().part - chunks[d].front().part + 1;
}

ExchangeBuffers::ExchangeBuffers(const CompressLayout &of, float *worker_buffer, float *server_buffer,
                                 void *workspace) :
    layout(&of),
    worker(worker_buffer),
    server(server_buffer) {
    (void)take_from(workspace);
}

/// Returns how many bytes it takes. NULL: it only counts them.
size_t ExchangeBuffers::take_from(void *workspace) {
    Pieces pieces(workspace);
    for (char **rows : {&send, &recv, &slice_results}) pieces.take(*rows, layout->rows_bytes());
    pieces.take(result, layout->row_bytes());
    pieces.take(sums, layout->leaves());
    pieces.take(counts, layout->leaves());
    results = slice_results;
    if (!layout->has_levels()) return pieces.bytes();
    pieces.take(results, layout->row_bytes() * layout->whole->ranks);
    pieces.take(message, layout->whole->worker_numel);
    pieces.take(slices, layout->whole->worker_numel);
    return pieces.bytes();
}

size_t CompressLayout::workspace_bytes() const {
    ExchangeBuffers buffers;
    buffers.layout = this;
    return buffers.take_from(nullptr);
}

CompressLayout CompressLayout::two_level(int ranks, int rank, int node_ranks, int node_rank,
                                         const std::vector<int64_t> &numels) {
    const int first = node_rank * ranks; // chunk l * ranks + d is served by node rank l of node d
    const auto whole = std::make_shared<CompressLayout>(bucket(ranks * node_ranks, first + rank, numels));
    CompressLayout own(ranks, rank);
    own.whole = whole;
    own.node_ranks = node_ranks;
    own.slice = ranks * whole->server_numel;
    own.slice_begin = node_rank * own.slice;
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
        own.first_part[size_t(d)] = whole->first_part[size_t(first + d)];
    }
    own.count_leaves();
    return own;
}

} // namespace dsopt
