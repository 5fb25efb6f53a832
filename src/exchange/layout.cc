// SPDX-License-Identifier: Apache-2.0
#include "exchange/layout.h"
#include "device/plan.h"
#include "exchange/vector.h"
#include <algorithm>
#include <numeric>

namespace dsopt {
namespace {

using ScaleGroup = CompressLayout::ScaleGroup;
using Chunk = CompressLayout::Chunk;
constexpr int64_t kWord = 32; // bits
static_assert(ListVector::kAlignment % kWord == 0, "tensors and chunks begin at whole words of bits");

/// A layout whose arrays are not in a block yet.
struct Draft {
    CompressLayout sizes;
    std::vector<ScaleGroup> groups;
    std::vector<Chunk> chunks;

    Draft(int ranks, int rank) {
        sizes.ranks = ranks;
        sizes.rank = rank;
    }
    /// Computes the chunks from all groups, which are in order. Chunks are in order, too, so each group is visited for
    /// few chunks.
    void finish() {
        sizes.group_count = int32_t(groups.size());
        size_t first = 0;
        for (int64_t d = 0; d < sizes.ranks; ++d) {
            Chunk chunk{};
            const auto end_of = [&](const ScaleGroup &group, int64_t chunks) {
                return group.unit.begin + chunks * group.unit.chunk;
            };
            while (first < groups.size() && groups[first].end() <= end_of(groups[first], d)) ++first;
            for (size_t i = first; i < groups.size() && groups[i].begin < end_of(groups[i], d + 1); ++i) {
                if (CompressLayout::segment_of(groups[i], d).numel == 0) continue;
                if (chunk.scales == 0) chunk.first_group = int32_t(i);
                chunk.scales = int32_t(i) - chunk.first_group + 1;
            }
            add_chunk(chunk);
        }
    }
    void add_chunk(const Chunk &chunk) {
        if (int64_t(chunks.size()) == sizes.rank) sizes.segment_count = chunk.scales;
        chunks.push_back(chunk);
        sizes.message_scales = std::max<int64_t>(sizes.message_scales, chunk.scales);
    }
    /// Copies the arrays to `layout`, which has memory for them, and counts their leaves.
    void write(CompressLayout &layout) const {
        std::copy(groups.begin(), groups.end(), layout.groups);
        std::copy(chunks.begin(), chunks.end(), layout.chunks);
        for (int32_t i = 0; i < layout.segment_count; ++i)
            layout.segments[i] =
                CompressLayout::segment_of(layout.groups[layout.local_chunk().first_group + i], layout.rank);
        const auto count_leaves = [](const auto *list, int32_t count, int64_t *first) {
            first[0] = 0;
            for (int32_t i = 0; i < count; ++i) first[i + 1] = first[i] + leaves_of(list[i].numel);
            return first[count];
        };
        layout.used_numel = layout.whole_words ? 0 : layout.worker_numel;
        for (const ScaleGroup &group : groups)
            if (layout.whole_words && group.numel != 0) layout.used_numel = round_up(group.end(), kWord);
        layout.group_leaves = count_leaves(layout.groups, layout.group_count, layout.group_leaf);
        layout.segment_leaves = count_leaves(layout.segments, layout.segment_count, layout.segment_leaf);
    }
};

/// Returns the draft of the original's layout: each tensor is padded, and has a part in every chunk.
Draft padded_draft(int ranks, int rank, const std::vector<int64_t> &numels) {
    Draft draft(ranks, rank);
    CompressLayout &sizes = draft.sizes;
    const int64_t alignment = ranks * std::lcm<int64_t>(ranks, 8);
    for (const int64_t numel : numels) {
        const int64_t all = round_up(numel, alignment), chunk = all / ranks;
        draft.groups.push_back({{sizes.worker_numel, all, 0}, numel, {sizes.worker_numel, chunk, sizes.server_numel}});
        sizes.worker_numel += all;
        sizes.server_numel += chunk;
    }
    for (ScaleGroup &group : draft.groups) group.whole = sizes.worker_numel;
    sizes.group_count = int32_t(numels.size());
    for (int d = 0; d < ranks; ++d) draft.add_chunk({0, sizes.group_count}); // each chunk has elements of all groups
    return draft;
}

/// Returns the draft of the layout in standard mode: all tensors form one vector, which is partitioned into chunks.
Draft bucket_draft(int ranks, int rank, const std::vector<int64_t> &numels, const std::vector<bool> &exchanged) {
    Draft draft(ranks, rank);
    const ListVector vector(numels);
    const int64_t chunk = VectorPartition{vector.blocks(), ranks}.chunk_numel();
    for (size_t i = 0; i < numels.size(); ++i) {
        const int64_t numel = exchanged.empty() || exchanged[i] ? numels[i] : 0;
        draft.groups.push_back({{vector.range(i).begin, numel, chunk * ranks}, numel, {0, chunk, 0}});
        draft.sizes.has_holes = draft.sizes.has_holes || numel != numels[i];
    }
    draft.sizes.worker_numel = chunk * ranks;
    draft.sizes.server_numel = chunk;
    draft.sizes.whole_words = true;
    draft.finish();
    return draft;
}

/// Returns the draft of the slice of the node's rank `node_rank`. A slice has one chunk per node.
Draft slice_draft(const Draft &whole, int nodes, int node, int node_rank) {
    Draft draft(nodes, node);
    if (nodes == 1) return draft; // nothing is compressed
    draft.sizes.server_numel = whole.sizes.server_numel;
    draft.sizes.worker_numel = draft.sizes.server_numel * nodes;
    draft.sizes.whole_words = true;
    draft.sizes.has_holes = whole.sizes.has_holes;
    draft.sizes.message_scales = whole.sizes.message_scales; // so that messages of all slices have the same size
    const int64_t numel = draft.sizes.worker_numel;
    const Range slice{node_rank * numel, numel, whole.sizes.worker_numel};
    for (const ScaleGroup &group : whole.groups) { // all groups, so that a group has the same index in all slices
        const Range range = intersection(group, slice).within(slice);
        draft.groups.push_back({range, range.numel, group.unit});
    }
    draft.finish();
    return draft;
}

OwnedLayout make_layout_of(const Draft &whole, const Draft *slice, int node_ranks, int node_rank) {
    OwnedLayout layout;
    layout.whole = whole.sizes;
    if (slice != nullptr) layout.slice = slice->sizes;
    for (CompressLayout *each : {&layout.whole, &layout.slice})
        each->message_bytes = round_up(each->message_scales * 4 + each->server_numel / 8, 16);
    layout.node_ranks = node_ranks;
    layout.node_rank = node_rank;
    layout.bytes = layout.place(nullptr);
    layout.block = std::make_unique<char[]>(layout.bytes); // zeros, also between the arrays
    (void)layout.place(layout.block.get());
    whole.write(layout.whole);
    if (slice != nullptr)
        slice->write(layout.slice);
    else
        layout.slice = layout.whole;
    return layout;
}

} // namespace

OwnedLayout layout_for(const DataRank &local, bool compat, const std::vector<int64_t> &numels,
                       const std::vector<bool> &exchanged) {
    const auto [rank, ranks, node_ranks] = local;
    const int nodes = local.nodes();
    const Draft whole =
        compat && node_ranks == 1 ? padded_draft(ranks, rank, numels) : bucket_draft(ranks, rank, numels, exchanged);
    if (node_ranks == 1) return make_layout_of(whole, nullptr, 1, 0);
    const Draft slice = slice_draft(whole, nodes, rank % nodes, rank / nodes);
    return make_layout_of(whole, &slice, node_ranks, rank / nodes);
}

} // namespace dsopt
