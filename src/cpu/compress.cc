// SPDX-License-Identifier: Apache-2.0
#include "cpu/compress.h"
#include "cpu/partition.h"
#include "rules/lane_sum.h"
#include <algorithm>
#include <cstring>

namespace dsopt::cpu {
namespace {

/// Calls visit(index, leaf) for every leaf of `count` ranges, partitioned evenly among threads. `leaf` is counted from
/// the start of range `index`. `first`: prefix sums of the ranges' leaf counts, whose total is `leaves`.
template <class Visit>
void for_each_leaf(const int64_t *first, int64_t count, int64_t leaves, const Parallel &parallel, const Visit &visit) {
    const int64_t threads = threads_for(leaves * kLeaf * int64_t(sizeof(float)), parallel);
    parallel.run(threads, [&](int64_t thread) {
        const DefaultFloatEnvironment environment;
        const int64_t begin = leaves * thread / threads, end = leaves * (thread + 1) / threads;
        auto index = int64_t(std::upper_bound(first, first + count + 1, begin) - first) - 1;
        for (int64_t leaf = begin; leaf < end; ++leaf) {
            while (first[index + 1] <= leaf) ++index;
            visit(index, leaf - first[index]);
        }
    });
}
/// The same for the leaves of all scale groups.
template <class Visit> void for_each_leaf(const CompressLayout &layout, const Parallel &parallel, const Visit &visit) {
    for_each_leaf(layout.group_leaf, layout.group_count, layout.group_leaves, parallel, visit);
}

int32_t count_active(const int32_t *active, int64_t begin, int64_t numel) {
    if (active == nullptr) return int32_t(numel);
    int32_t count = 0;
    int64_t index = begin; // a multiple of 32
    // Words with all bits set, which most are, skip the population count: this file is compiled for any processor, so
    // the count is a function call and not an instruction.
    for (; index + 32 <= begin + numel; index += 32) {
        const uint32_t word = active_from(active, index);
        count += word == ~0u ? 32 : __builtin_popcount(word);
    }
    const auto rest = unsigned(begin + numel - index);
    if (rest != 0) count += __builtin_popcount(active_from(active, index) & ((1u << rest) - 1));
    return count;
}

/// Returns the root mean square over leaves [begin, end), from their sums of squares and counts of active elements.
float rms(const Compression &local, int64_t begin, int64_t end) {
    int64_t count = 0;
    for (int64_t leaf = begin; leaf < end; ++leaf) count += local.counts[leaf];
    return rms_of(add_in_lanes(end - begin, [&](int64_t leaf) { return local.sums[begin + leaf]; }), count);
}

} // namespace

void pack_leaf(const OneBitKernels &kernels, const Compression &local, int64_t i, int64_t leaf,
               const FeedInputs *added) {
    const CompressLayout &layout = local.layout;
    const CompressLayout::ScaleGroup &group = layout.groups[i];
    const CompressLayout::Unit &unit = group.unit;
    int64_t worker = group.begin + leaf * kLeaf, n = std::min(kLeaf, group.numel - leaf * kLeaf);
    uint8_t bits[kLeaf / 8];
    local.sums[layout.group_leaf[i] + leaf] = kernels.pack(added, local.worker + worker, n, bits);
    local.counts[layout.group_leaf[i] + leaf] = count_active(local.active, worker, n);
    for (const uint8_t *from = bits; n > 0;) { // chunks begin at whole bytes
        const int64_t d = (worker - unit.begin) / unit.chunk, in_chunk = worker - unit.begin - d * unit.chunk;
        const int64_t size = std::min(n, unit.chunk - in_chunk), bytes = (size + 7) / 8;
        std::memcpy(layout.bits(local.message_to(d)) + (unit.server + in_chunk) / 8, from, size_t(bytes));
        from += bytes;
        worker += size;
        n -= size;
    }
}

/// Packs every leaf. First adds a list or a node's slices to the leaf, so that the leaf is in the first-level cache
/// when it is packed.
void ExchangeRun::pack(const float *slices, bool adds_list) const {
    const Compression &local = buffers.local;
    const CompressLayout &layout = local.layout;
    if (local.skipped()) return;
    for_each_leaf(layout, parallel, [&](int64_t i, int64_t leaf) {
        const int64_t begin = leaf * kLeaf;
        if (adds_list) {
            const bool any = begin < list[i].numel; // the padding after the tensor has a residual, too
            const FeedInputs added{.x = any ? static_cast<const float *>(list[i].data) + begin : nullptr,
                                   .numel = any ? list[i].numel - begin : 0,
                                   .scale = local.worker_scales()[i]};
            return pack_leaf(kernels, local, i, leaf, &added);
        }
        if (slices != nullptr) {
            const CompressLayout::ScaleGroup &group = layout.groups[i];
            const int64_t worker = group.begin + begin, n = std::min(kLeaf, group.numel - begin);
            kernels.add_slices(slices + worker, buffers.node.numel, buffers.node.ranks, n, local.worker + worker,
                               local.worker_scales()[i],
                               local.active != nullptr ? local.active + worker / 32 : nullptr);
        }
        pack_leaf(kernels, local, i, leaf);
    });
}

void ExchangeRun::message_scales() const {
    const Compression &local = buffers.local;
    const CompressLayout &layout = local.layout;
    if (local.skipped()) return;
    float *scales = local.worker_scales();
    for (int32_t i = 0; i < layout.group_count; ++i)
        scales[i] = rms(local, layout.group_leaf[i], layout.group_leaf[i + 1]);
    for (int32_t d = 0; d < layout.ranks; ++d) {
        float *const to = CompressLayout::scales(local.message_to(d));
        const CompressLayout::Chunk &chunk = layout.chunks[d];
        std::copy_n(scales + chunk.first_group, chunk.scales, to);
        std::fill(to + chunk.scales, to + layout.message_scales, 0.0f);
    }
}

void ExchangeRun::reduce_messages() const {
    const Compression &local = buffers.local;
    const CompressLayout &layout = local.layout;
    if (local.skipped()) return;
    uint8_t *const bits = layout.bits(local.result);
    const auto visit = [&](int64_t i, int64_t leaf) {
        const CompressLayout::Segment &segment = layout.segments[i];
        const int64_t begin = leaf * kLeaf, n = std::min(kLeaf, segment.numel - begin), worker = segment.begin + begin;
        const int64_t index = layout.segment_leaf[i] + leaf;
        local.counts[index] = count_active(local.active, worker, n);
        local.sums[index] = kernels.reduce_messages(
            local.recv, layout.message_bytes, layout.message_scales, layout.ranks, i, segment.server + begin, n,
            local.server + segment.server + begin, local.server_scales()[i],
            local.active != nullptr ? local.active + worker / 32 : nullptr, bits);
    };
    for_each_leaf(layout.segment_leaf, layout.segment_count, layout.segment_leaves, parallel, visit);
}

void ExchangeRun::result_scales() const {
    const Compression &local = buffers.local;
    const CompressLayout &layout = local.layout;
    if (local.skipped()) return;
    float *const to = CompressLayout::scales(local.result);
    std::fill_n(to, layout.message_scales, 0.0f);
    for (int32_t i = 0; i < layout.segment_count; ++i)
        to[i] = local.server_scales()[i] = rms(local, layout.segment_leaf[i], layout.segment_leaf[i + 1]);
}

void ExchangeRun::decode() const {
    const CompressLayout &layout = buffers.mean.layout;
    int64_t bytes = 0;
    for (int32_t i = 0; i < layout.group_count; ++i) bytes += list[i].numel * int64_t(sizeof(float));
    for_each_leaf(layout, parallel, [&](int64_t i, int64_t leaf) {
        const int64_t begin = leaf * kLeaf, end = std::min(begin + kLeaf, list[i].numel);
        if (begin < end)
            kernels.mean({&buffers.mean, buffers.mean.results, int32_t(i)}, layout.groups[i].begin + begin, end - begin,
                         static_cast<float *>(list[i].data) + begin, buffers.mean.active, bytes > last_cache);
    });
}

void ExchangeRun::clear_gaps() const {
    const CompressLayout &layout = buffers.mean.layout;
    float *const vector = buffers.node.vector;
    int64_t end = 0;
    for (int32_t i = 0; i < layout.group_count; ++i) {
        const CompressLayout::ScaleGroup &group = layout.groups[i];
        std::fill(vector + end, vector + group.begin, 0.0f);
        end = group.end();
    }
    std::fill(vector + end, vector + layout.worker_numel, 0.0f);
}

void ExchangeRun::copy_list() const {
    const CompressLayout &layout = buffers.mean.layout;
    for_each_leaf(layout, parallel, [&](int64_t i, int64_t leaf) {
        const int64_t begin = leaf * kLeaf, n = std::min(kLeaf, list[i].numel - begin);
        std::memcpy(buffers.node.vector + layout.groups[i].begin + begin,
                    static_cast<const float *>(list[i].data) + begin, size_t(n) * sizeof(float));
    });
}

void ExchangeRun::average_slice() const {
    const auto &[ranks, numel, vector, slices] = buffers.node;
    const int64_t first[] = {0, leaves_of(numel)};
    for_each_leaf(
        first, 1, first[1], parallel, [&, ranks = ranks, numel = numel, slices = slices](int64_t, int64_t leaf) {
            float *const slice = slices + leaf * kLeaf;
            kernels.sum_slices(slice, numel, ranks, 1.0f / float(ranks), std::min(kLeaf, numel - leaf * kLeaf), slice);
        });
}

void ExchangeRun::run(ExchangePass pass) {
    const CompressLayout &compressed = buffers.local.layout;
    switch (pass) {
    case ExchangePass::clear_messages:
        std::memset(buffers.local.send, 0xff, size_t(compressed.messages_bytes()));
        return;
    case ExchangePass::pack_list: return pack(nullptr, true);
    case ExchangePass::pack_values: return pack(nullptr, false);
    case ExchangePass::message_scales: return message_scales();
    case ExchangePass::clear_result: std::memset(buffers.local.result, 0xff, size_t(compressed.message_bytes)); return;
    case ExchangePass::reduce_messages: return reduce_messages();
    case ExchangePass::result_scales: return result_scales();
    case ExchangePass::decode: return decode();
    case ExchangePass::clear_gaps: return clear_gaps();
    case ExchangePass::copy_list: return copy_list();
    case ExchangePass::pack_slice: return pack(buffers.node.slices, false);
    case ExchangePass::average_slice: return average_slice();
    }
}

} // namespace dsopt::cpu
