// SPDX-License-Identifier: Apache-2.0
#include "cpu/compress.h"
#include "cpu/cut.h"
#include "rules/lane_sum.h"
#include <algorithm>
#include <cstring>

namespace dsopt::cpu {
namespace {

/// visit(index, leaf) for leaf numbers of many stretches, shared out evenly. `first`: running numbers of their leaves.
template <class Visit>
void for_each_leaf(const std::vector<int64_t> &first, const Parallel &parallel, const Visit &visit) {
    const int64_t leaves = first.back();
    // A thread below 256 KiB is done before another one has woken up.
    const int64_t threads = std::clamp<int64_t>(leaves * kLeaf * 4 >> 18, 1, parallel.threads);
    parallel.run(threads, [&](int64_t thread) {
        const DefaultFloatEnvironment environment;
        const int64_t begin = leaves * thread / threads, end = leaves * (thread + 1) / threads;
        auto index = int64_t(std::upper_bound(first.begin(), first.end(), begin) - first.begin()) - 1;
        for (int64_t leaf = begin; leaf < end; ++leaf) {
            while (first[size_t(index) + 1] <= leaf) ++index;
            visit(index, leaf - first[size_t(index)]);
        }
    });
}

int32_t count_active(const int32_t *active, int64_t begin, int64_t numel) {
    if (active == nullptr) return int32_t(numel);
    int32_t count = 0;
    int64_t at = begin; // at a whole word
    // Most words are full, and this file is for any processor: without the instruction the compiler calls a function.
    for (; at + 32 <= begin + numel; at += 32) {
        const uint32_t word = active_from(active, at);
        count += word == ~0u ? 32 : __builtin_popcount(word);
    }
    const auto rest = unsigned(begin + numel - at);
    if (rest != 0) count += __builtin_popcount(active_from(active, at) & ((1u << rest) - 1));
    return count;
}

/// The exchange of a skipped step goes on, as other ranks expect, and changes nothing.
bool is_skipped(const ExchangeBuffers &exchange) { return exchange.skip != nullptr && *exchange.skip != 0; }

/// Of what the leaves [begin, end) found.
float rms(const ExchangeBuffers &exchange, int64_t begin, int64_t end) {
    int64_t count = 0;
    for (int64_t leaf = begin; leaf < end; ++leaf) count += exchange.counts[leaf];
    return rms_of(add_in_lanes(end - begin, [&](int64_t leaf) { return exchange.sums[begin + leaf]; }), count);
}

} // namespace

void begin_rows(const ExchangeBuffers &exchange) {
    // Bits between tensors, too.
    std::memset(exchange.send, 0xff, size_t(exchange.layout->row_bytes() * exchange.layout->ranks));
}

void pack_leaf(const OneBitKernels &kernels, const ExchangeBuffers &exchange, int64_t i, int64_t leaf,
               const Owed *owed) {
    const CompressLayout &layout = *exchange.layout;
    const CompressLayout::Part &part = layout.parts[size_t(i)];
    const CompressLayout::Unit &unit = layout.units[size_t(part.unit)];
    int64_t at = part.begin + leaf * kLeaf, n = std::min(kLeaf, part.numel - leaf * kLeaf);
    uint8_t bits[kLeaf / 8];
    exchange.sums[layout.part_leaf[size_t(i)] + leaf] = kernels.pack(owed, exchange.worker + at, n, bits);
    exchange.counts[layout.part_leaf[size_t(i)] + leaf] = count_active(exchange.own_active(), at, n);
    for (const uint8_t *from = bits; n > 0;) { // chunks begin at whole bytes
        const int64_t d = (at - unit.begin) / unit.chunk, in_chunk = at - unit.begin - d * unit.chunk;
        const int64_t size = std::min(n, unit.chunk - in_chunk), bytes = (size + 7) / 8;
        std::memcpy(exchange.bits(exchange.row(exchange.send, d)) + (unit.server + in_chunk) / 8, from, size_t(bytes));
        from += bytes;
        at += size;
        n -= size;
    }
}

void end_rows(const ExchangeBuffers &exchange) {
    if (is_skipped(exchange)) return;
    const CompressLayout &layout = *exchange.layout;
    float *scales = exchange.worker_scales();
    for (size_t i = 0; i < layout.parts.size(); ++i)
        scales[i] = rms(exchange, layout.part_leaf[i], layout.part_leaf[i + 1]);
    for (int d = 0; d < layout.ranks; ++d) {
        float *row = ExchangeBuffers::scales(exchange.row(exchange.send, d));
        std::memset(row, 0, size_t(layout.row_scales) * sizeof(float));
        for (const CompressLayout::Segment &segment : layout.chunks[size_t(d)])
            row[segment.part - layout.first_part[size_t(d)]] = scales[segment.part];
    }
}

void feed_and_pack(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const dsopt_tensor *list,
                   const Parallel &parallel) {
    const CompressLayout &layout = *exchange.layout;
    begin_rows(exchange);
    for_each_leaf(layout.part_leaf, parallel, [&](int64_t i, int64_t leaf) {
        const int64_t begin = leaf * kLeaf; // padding behind the tensor is kept, too
        const bool any = begin < list[i].numel;
        const Owed owed{.x = any ? static_cast<const float *>(list[i].data) + begin : nullptr,
                        .numel = any ? list[i].numel - begin : 0,
                        .scale = exchange.worker_scales()[i]};
        pack_leaf(kernels, exchange, i, leaf, &owed);
    });
    end_rows(exchange);
}

void pack(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const Parallel &parallel) {
    for_each_leaf(exchange.layout->part_leaf, parallel,
                  [&](int64_t i, int64_t leaf) { pack_leaf(kernels, exchange, i, leaf); });
    end_rows(exchange);
}

void clear_gaps(const ExchangeBuffers &exchange) {
    const CompressLayout &layout = exchange.layout->all();
    int64_t at = 0;
    for (const CompressLayout::Part &part : layout.parts) {
        std::fill(exchange.message + at, exchange.message + part.begin, 0.0f);
        at = part.begin + part.numel;
    }
    std::fill(exchange.message + at, exchange.message + layout.worker_numel, 0.0f);
}

void fill_message(const ExchangeBuffers &exchange, const dsopt_tensor *list, const Parallel &parallel) {
    const CompressLayout &layout = exchange.layout->all();
    clear_gaps(exchange);
    for_each_leaf(layout.part_leaf, parallel, [&](int64_t i, int64_t leaf) {
        const int64_t begin = leaf * kLeaf, n = std::min(kLeaf, list[i].numel - begin);
        std::memcpy(exchange.message + layout.parts[size_t(i)].begin + begin,
                    static_cast<const float *>(list[i].data) + begin, size_t(n) * sizeof(float));
    });
}

void pack_slice(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const Parallel &parallel) {
    const CompressLayout &layout = *exchange.layout;
    const int32_t *const active = exchange.own_active();
    if (layout.is_exact())
        return for_each_leaf(layout.part_leaf, parallel, [&](int64_t, int64_t leaf) {
            float *at = exchange.slices + leaf * kLeaf;
            kernels.add_up_rows(at, layout.slice, layout.node_ranks, 1.0f / float(layout.node_ranks),
                                std::min(kLeaf, layout.slice - leaf * kLeaf), at);
        });
    begin_rows(exchange);
    if (is_skipped(exchange)) return;
    for_each_leaf(layout.part_leaf, parallel, [&](int64_t i, int64_t leaf) {
        const CompressLayout::Part &part = layout.parts[size_t(i)];
        const int64_t at = part.begin + leaf * kLeaf, n = std::min(kLeaf, part.numel - leaf * kLeaf);
        kernels.add_rows(exchange.slices + at, layout.slice, layout.node_ranks, n, exchange.worker + at,
                         exchange.worker_scales()[i], active != nullptr ? active + at / 32 : nullptr);
        pack_leaf(kernels, exchange, i, leaf);
    });
    end_rows(exchange);
}

void serve(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const Parallel &parallel) {
    const CompressLayout &layout = *exchange.layout;
    const auto &segments = layout.own_segments();
    const int32_t *const active = exchange.own_active();
    const int32_t first_part = layout.first_part[size_t(layout.rank)];
    std::memset(exchange.result, 0xff, size_t(layout.row_bytes()));
    if (is_skipped(exchange)) return;
    float *scales = exchange.server_scales();
    uint8_t *bits = exchange.bits(exchange.result);
    for_each_leaf(layout.segment_leaf, parallel, [&](int64_t i, int64_t leaf) {
        const CompressLayout::Segment &segment = segments[size_t(i)];
        const int64_t begin = leaf * kLeaf, n = std::min(kLeaf, segment.numel - begin),
                      slot = segment.part - first_part;
        const int64_t index = layout.segment_leaf[size_t(i)] + leaf;
        exchange.counts[index] = count_active(active, segment.begin + begin, n);
        exchange.sums[index] =
            kernels.serve(exchange.recv, layout.row_bytes(), layout.row_scales, layout.ranks, slot,
                          segment.server + begin, n, exchange.server + segment.server + begin, scales[slot],
                          active != nullptr ? active + (segment.begin + begin) / 32 : nullptr, bits);
    });
    std::memset(ExchangeBuffers::scales(exchange.result), 0, size_t(layout.row_scales) * sizeof(float));
    for (size_t i = 0; i < segments.size(); ++i) {
        const int64_t slot = segments[i].part - first_part;
        scales[slot] = rms(exchange, layout.segment_leaf[i], layout.segment_leaf[i + 1]);
        ExchangeBuffers::scales(exchange.result)[slot] = scales[slot];
    }
}

void decode(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const dsopt_tensor *list, bool streaming,
            const Parallel &parallel) {
    const CompressLayout &layout = exchange.layout->all();
    for_each_leaf(layout.part_leaf, parallel, [&](int64_t i, int64_t leaf) {
        const int64_t begin = leaf * kLeaf, end = std::min(begin + kLeaf, list[i].numel);
        if (begin < end)
            kernels.mean(view_of(exchange, int32_t(i)), layout.parts[size_t(i)].begin + begin, end - begin,
                         static_cast<float *>(list[i].data) + begin, exchange.active, streaming);
    });
}

} // namespace dsopt::cpu
