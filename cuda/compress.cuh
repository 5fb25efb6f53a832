// SPDX-License-Identifier: Apache-2.0
// 1-bit compression with error feedback, compress.h: the compensated values of a rank to messages, messages of all
// ranks to one of results, results back to values. A block has a leaf at a time, in shared memory, so that it is summed up in
// the order that is part of the result and read once.
#pragma once
#include "device/step_loops.h"
#include "launcher.cuh"
#include "lists.cuh"

namespace dsopt::gpu {

/// By one warp: how many of a stretch take part. It begins at a whole word.
__device__ __forceinline__ int32_t count_active(const int32_t *active, int64_t begin, int n) {
    if (active == nullptr) return n;
    int32_t count = 0;
    for (int at = int(threadIdx.x % 32) * 32; at < n; at += 32 * 32) {
        const uint32_t word = active_from(active, begin + at);
        count += __popc(n - at < 32 ? word & ((1u << (n - at)) - 1) : word);
    }
    return fold_lanes(count);
}

/// Where an element of a unit is: its chunk, and its place there. Neighbours are found without dividing again.
struct InChunk {
    int64_t chunk, at;
    __device__ __forceinline__ InChunk(const CompressLayout::Unit &unit, int64_t worker) :
        chunk((worker - unit.begin) / unit.chunk),
        at(worker - unit.begin - chunk * unit.chunk) {}
    __device__ __forceinline__ void move(const CompressLayout::Unit &unit, int64_t by) {
        for (at += by; at >= unit.chunk; at -= unit.chunk) ++chunk;
    }
};

/// What of a leaf of a scale group is in the tensor; the rest is padding.
__device__ __forceinline__ int real_elements(const dsopt_tensor &tensor, const Leaf &leaf) {
    const int64_t left = tensor.numel - leaf.begin;
    return left < 0 ? 0 : left < leaf.n ? int(left) : leaf.n;
}

constexpr int kTurns = 2;
/// Two leaves in shared memory, in turns. The squares of a leaf are added by one warp, in 32 chains that cannot be split
/// without another order of additions. So the other warps go on to the next leaf meanwhile, and the warps take turns at
/// adding. Whoever passes a barrier behind filling a tile knows that the adder of the other one is done: it filled, too.
struct TileTurns {
    float *at;
    int turn = 0;
    __device__ __forceinline__ float *tile() const { return at + turn % kTurns * kLeaf; }
    __device__ __forceinline__ bool has_turn(int offset) const {
        return int(threadIdx.x / 32) == (turn + offset) % kWarps;
    }
};
/// The sum of squares of the leaf in the tile, whose first element is the `begin`-th of the own ones, and the number of
/// those that take part, by two warps.
__device__ __forceinline__ void sum_leaf(const Compression &own, const TileTurns &turns, int64_t begin, int n,
                                         int64_t leaf) {
    const bool lead = threadIdx.x % 32 == 0;
    if (turns.has_turn(0)) {
        const double sum = fold_lanes(add_squares(turns.tile(), n));
        if (lead) own.sums[leaf] = sum;
    } else if (turns.has_turn(kWarps / 2)) {
        const int32_t count = count_active(own.active, begin, n);
        if (lead) own.counts[leaf] = count;
    }
}

/// write(i, bits) by one thread for each 32 of the n signs in `tile` from the i-th one on: a byte for eight of them,
/// most significant bit first, the first byte lowest. Bits behind the end are 1. A warp has 512 neighbours, and lane l
/// the l-th 32 of them, so that all are written at once.
template <class Write> __device__ __forceinline__ void pack_signs(const float *tile, int n, const Write &write) {
    constexpr int words = int(kLeaf) / kThreads; // a warp
    const int lane = int(threadIdx.x % 32), begin = int(threadIdx.x / 32) * words * 32;
    unsigned own = 0;
    for (int k = 0; k < words && begin + k * 32 < n; ++k) {
        const int i = begin + k * 32 + lane;
        const unsigned word = __ballot_sync(0xffffffffu, i >= n || !(tile[i] < 0));
        if (lane == k) own = __byte_perm(__brev(word), 0, 0x0123);
    }
    if (lane < words && begin + lane * 32 < n) write(begin + lane * 32, own);
}
/// Bytes of such a word that hold any of `n` signs, at once where that is possible.
__device__ __forceinline__ void write_signs(uint8_t *to, unsigned bits, int n) {
    if (n >= 32 && reinterpret_cast<uintptr_t>(to) % 4 == 0)
        *reinterpret_cast<uint32_t *>(to) = bits;
    else
        for (int k = 0; k < 4 && k * 8 < n; ++k) to[k] = uint8_t(bits >> (8 * k));
}

/// The leaf of compensated values in the tile, which begins at `worker`: its signs to the messages, its sums to where
/// those of `leaf` are. For a whole block; the other tile is next.
__device__ inline void pack_leaf(const Compression &own, int32_t group, int64_t worker, int n, TileTurns &turns,
                                 int64_t leaf) {
    __syncthreads();
    const CompressLayout::Unit unit = own.layout.groups[group].unit;
    pack_signs(turns.tile(), n, [&](int i, unsigned bits) INLINED {
        InChunk where(unit, worker + i);
        const bool whole = where.at + 32 <= unit.chunk; // chunks begin at whole bytes
        for (int k = 0; k < 32 && i + k < n; k += 8, where.move(unit, 8)) {
            uint8_t *const to = own.layout.bits(own.message_to(where.chunk)) + (unit.server + where.at) / 8;
            if (whole) return write_signs(to, bits, n - i);
            write_signs(to, bits >> k, 8);
        }
    });
    sum_leaf(own, turns, worker, n, leaf);
    ++turns.turn;
}

/// body(group, where, leaf) for every leaf of the block's share of the scale groups.
template <class Body> __device__ __forceinline__ void for_group_leaves(const CompressLayout &layout, const Body &body) {
    const int64_t leaves = layout.group_leaf[layout.group_count]; // from memory: fewer registers than the argument
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t group = find_stretch(layout.group_leaf, layout.group_count, leaf);
        body(group, Leaf(layout.groups[group].numel, leaf - layout.group_leaf[group]), leaf);
    }
}

/// fill(group, where, worker, tile) for the block's share of the leaves of the scale groups: it puts the compensated
/// values from the `worker`-th on to the tile. Each leaf is then packed.
template <class Fill> __device__ __forceinline__ void pack_groups(const Compression &own, const Fill &fill) {
    __shared__ float tiles[kTurns * kLeaf];
    TileTurns turns{tiles};
    if (own.skipped()) return;
    for_group_leaves(own.layout, [&](int32_t group, const Leaf &where, int64_t leaf) INLINED {
        const int64_t worker = own.layout.groups[group].begin + where.begin;
        fill(group, where, worker, turns.tile());
        pack_leaf(own, group, worker, where.n, turns, leaf);
    });
}

/// The compensated values of V neighbours: new values and the residual. Zero where `active` says that one takes no
/// part.
template <int V>
__device__ __forceinline__ Pack<V> compensate(const Pack<V> &x, const Pack<V> &last, float scale, uint32_t active) {
    Pack<V> y;
    unrolled<V>([&](int k) INLINED { y.at[k] = (active >> k) & 1u ? x.at[k] + error_of(last.at[k], scale) : 0.0f; });
    return y;
}

/// Compensated values that are there already.
__global__ void __launch_bounds__(kThreads) pack_kernel(GRID_CONSTANT const Exchange x) {
    begin_kernel(true);
    pack_groups(x.own, [&](int32_t, const Leaf &where, int64_t worker, float *tile) INLINED {
        for (int k = int(threadIdx.x); k < where.n; k += kThreads) tile[k] = x.own.worker[worker + k];
    });
}

/// A list, a tensor a scale group, to compensated values and messages.
__global__ void __launch_bounds__(kThreads) feed_list_kernel(GRID_CONSTANT const Exchange x, const dsopt_tensor *list) {
    begin_kernel(true);
    const Compression &own = x.own;
    pack_groups(own, [&](int32_t group, const Leaf &where, int64_t worker, float *tile) INLINED {
        const float scale = own.worker_scales()[group];
        const float *values = static_cast<const float *>(list[group].data);
        const int real = real_elements(list[group], where);
        for_packs(real, all_aligned(values, own.worker), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> value = load<V>(values, where.begin + i);
            const Pack<V> sum = compensate(value, load<V>(own.worker, worker + i), scale, ~0u);
            to_tile(sum, tile + i);
            store(sum, own.worker, worker + i);
        });
        for (int i = real + int(threadIdx.x); i < where.n; i += kThreads)
            tile[i] = own.worker[worker + i] = error_of(own.worker[worker + i], scale);
    });
}

/// The scale of what leaves [begin, end) hold, by a warp; in all of its lanes.
__device__ __forceinline__ float scale_of(const Compression &own, int64_t begin, int64_t end) {
    const LeafFold<true> by{threadIdx.x % 32 == 0};
    const double sum = by.sum(own.sums + begin, int32_t(end - begin));
    return rms_of(
        sum, by.number(int32_t(end - begin), [&](int32_t leaf) INLINED { return int64_t(own.counts[begin + leaf]); }));
}

/// Scales of all groups, to where they are kept and to the messages of the chunks in which the group has elements.
__global__ void __launch_bounds__(kThreads, 4) message_scales_kernel(GRID_CONSTANT const Exchange x) {
    begin_kernel();
    const Compression &own = x.own;
    const CompressLayout &layout = own.layout;
    if (own.skipped()) return;
    const int lane = int(threadIdx.x % 32);
    for (int64_t i = grid_warp(); i < layout.group_count; i += grid_warps()) {
        const float scale = scale_of(own, layout.group_leaf[i], layout.group_leaf[i + 1]);
        if (lane == 0) own.worker_scales()[i] = scale;
        const CompressLayout::ScaleGroup group = layout.groups[i];
        if (group.numel == 0) continue;
        const int64_t first = InChunk(group.unit, group.begin).chunk,
                      last = InChunk(group.unit, group.begin + group.numel - 1).chunk;
        for (int64_t d = first + lane; d <= last; d += 32)
            CompressLayout::scales(own.message_to(d))[i - layout.chunks[d].first_group] = scale;
    }
    // Places in messages that no group has.
    const int64_t cells = layout.message_scales * layout.ranks;
    for (int64_t cell = grid_thread(); cell < cells; cell += grid_threads()) {
        const int64_t d = cell / layout.message_scales, slot = cell - d * layout.message_scales;
        if (slot >= layout.chunks[d].scales || layout.groups[layout.chunks[d].first_group + slot].numel == 0)
            CompressLayout::scales(own.message_to(d))[slot] = 0;
    }
}

constexpr int kRanksAtOnce = 8; // whose bits serve_kernel asks for side by side, as far as there are registers

/// The own chunk: the mean of what all ranks sent, in rank order, and the residual, to the compensated values and the
/// bits of the result.
__global__ void __launch_bounds__(kThreads) serve_kernel(GRID_CONSTANT const Exchange x) {
    begin_kernel(true);
    __shared__ float tiles[kTurns * kLeaf];
    TileTurns turns{tiles};
    const Compression &own = x.own;
    const CompressLayout &layout = own.layout;
    if (own.skipped()) return;
    const float share = 1.0f / float(layout.ranks);
    const int64_t leaves = layout.segment_leaf[layout.segment_count]; // as in for_group_leaves()
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t index = find_stretch(layout.segment_leaf, layout.segment_count, leaf);
        const CompressLayout::Segment segment = layout.segments[index];
        const Leaf where(segment.numel, leaf - layout.segment_leaf[index]);
        const int64_t server = segment.server + where.begin;
        const float scale = own.server_scales()[index];
        float *const tile = turns.tile();
        for_packs(where.n, all_aligned(own.server), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> old = load<V>(own.server, server + i);
            Pack<V> sum{};
            const uint8_t *bits_at = layout.bits(own.recv) + (server + i) / 8;
            const char *scale_at = own.recv + int64_t(index) * 4;
            for (int first = 0; first < layout.ranks; first += kRanksAtOnce) {
                unsigned bits[kRanksAtOnce];
                float values[kRanksAtOnce];
                unrolled<kRanksAtOnce>([&](int r) INLINED {
                    bits[r] = *bits_at;
                    values[r] = *reinterpret_cast<const float *>(scale_at);
                    // The last rank is read again in place of those that are not there: no load waits for a branch.
                    const int64_t next = first + r + 1 < layout.ranks ? layout.message_bytes : 0;
                    bits_at += next;
                    scale_at += next;
                });
                unrolled<kRanksAtOnce>([&](int r) INLINED {
                    const bool there = first + r < layout.ranks;
                    const float value = values[r] * share;
                    unrolled<V>([&](int k) INLINED {
                        const float signed_value = (bits[r] << (i % 8) >> (7 - k)) & 1u ? value : -value;
                        const float added = first + r == 0 ? signed_value : sum.at[k] + signed_value;
                        sum.at[k] = there ? added : sum.at[k];
                    });
                });
            }
            const uint32_t active = active_from(own.active, segment.begin + where.begin + i);
            sum = compensate(sum, old, scale, active);
            to_tile(sum, tile + i);
            store(sum, own.server, server + i);
        });
        __syncthreads();
        pack_signs(tile, where.n, [&](int i, unsigned bits) INLINED {
            write_signs(layout.bits(own.result) + (server + i) / 8, bits, where.n - i);
        });
        sum_leaf(own, turns, segment.begin + where.begin, where.n, leaf);
        ++turns.turn;
    }
}

__global__ void __launch_bounds__(kThreads, 4) result_scales_kernel(GRID_CONSTANT const Exchange x) {
    begin_kernel();
    const Compression &own = x.own;
    const CompressLayout &layout = own.layout;
    if (own.skipped()) return;
    float *const scales = CompressLayout::scales(own.result);
    for (int64_t i = grid_warp(); i < layout.segment_count; i += grid_warps()) {
        const float scale = scale_of(own, layout.segment_leaf[i], layout.segment_leaf[i + 1]);
        if (threadIdx.x % 32 == 0) own.server_scales()[i] = scales[i] = scale;
    }
    for (int64_t i = layout.segment_count + grid_thread(); i < layout.message_scales; i += grid_threads())
        scales[i] = 0;
}

/// The mean of V neighbours of a scale group, from results. For V = 4 or 8 their bits are in one byte.
template <int V>
__device__ __forceinline__ Pack<V> mean_at(const ListMean &mean, const char *results, int32_t group,
                                           const CompressLayout::Unit &unit, const InChunk &place) {
    const char *message = results + place.chunk * mean.layout.message_bytes;
    const float scale = CompressLayout::scales(message)[group - mean.layout.chunks[place.chunk].first_group];
    const int64_t bit = unit.server + place.at;
    const unsigned bits = unsigned(mean.layout.bits(message)[bit / 8]) << (bit % 8);
    Pack<V> y;
    unrolled<V>([&](int k) INLINED { y.at[k] = (bits >> (7 - k)) & 1u ? scale : -scale; });
    return y;
}
template <int V>
__device__ __forceinline__ Pack<V> mean_of(const ListMean &mean, const char *results, int32_t group, int64_t worker) {
    if (mean.values != nullptr) return load<V>(mean.values, worker);
    const CompressLayout::Unit &unit = mean.layout.groups[group].unit;
    return mean_at<V>(mean, results, group, unit, InChunk(unit, worker));
}

__global__ void __launch_bounds__(kThreads) decode_kernel(GRID_CONSTANT const Exchange x, const dsopt_tensor *list) {
    begin_kernel();
    const ListMean &mean = x.mean;
    for_group_leaves(mean.layout, [&](int32_t group, const Leaf &leaf, int64_t) INLINED {
        const int64_t worker = mean.layout.groups[group].begin + leaf.begin;
        const CompressLayout::Unit unit = mean.layout.groups[group].unit;
        const InChunk first(unit, worker);
        const int real = real_elements(list[group], leaf);
        for_packs(real, all_aligned(list[group].data, mean.values), [&]<int V>(Width<V>, int i) INLINED {
            InChunk where = first;
            where.move(unit, i);
            Pack<V> y = mean.values != nullptr ? load<V>(mean.values, worker + i)
                                               : mean_at<V>(mean, mean.results, group, unit, where);
            const uint32_t active = active_from(mean.active, worker + i);
            unrolled<V>([&](int k) INLINED { y.at[k] = (active >> k) & 1u ? y.at[k] : 0.0f; });
            store(y, static_cast<float *>(list[group].data), leaf.begin + i);
        });
    });
}

/// Two levels: zeros between tensors of the vector, and behind the last one.
__global__ void __launch_bounds__(kThreads) clear_gaps_kernel(GRID_CONSTANT const Exchange x) {
    begin_kernel();
    const CompressLayout &layout = x.mean.layout;
    float *const vector = x.node.vector;
    for (int64_t i = grid_thread(); i + 1 < layout.group_count; i += grid_threads())
        for (int64_t k = layout.groups[i].begin + layout.groups[i].numel; k < layout.groups[i + 1].begin; ++k)
            vector[k] = 0;
    const CompressLayout::ScaleGroup last = layout.groups[layout.group_count - 1];
    for (int64_t k = last.begin + last.numel + grid_thread(); k < layout.worker_numel; k += grid_threads())
        vector[k] = 0;
}

/// A list to the vector.
__global__ void __launch_bounds__(kThreads) copy_list_kernel(GRID_CONSTANT const Exchange x, const dsopt_tensor *list) {
    begin_kernel();
    for_group_leaves(x.mean.layout, [&](int32_t group, const Leaf &where, int64_t) INLINED {
        const float *values = static_cast<const float *>(list[group].data) + where.begin;
        float *to = x.node.vector + x.mean.layout.groups[group].begin + where.begin;
        for (int k = int(threadIdx.x); k < where.n; k += kThreads) to[k] = values[k];
    });
}

/// V neighbours of the own slice: the mean of what the ranks of the node sent, in rank order.
template <int V> __device__ __forceinline__ Pack<V> mean_of_slices(const NodeSlices &node, int64_t i) {
    const float share = 1.0f / float(node.ranks);
    Pack<V> sum = load<V>(node.slices, i);
    for (int rank = 1; rank < node.ranks; ++rank) {
        const Pack<V> other = load<V>(node.slices + rank * node.numel, i); // slices are multiples of 32 elements
        unrolled<V>([&](int k) INLINED { sum.at[k] += other.at[k]; });
    }
    unrolled<V>([&](int k) INLINED { sum.at[k] *= share; });
    return sum;
}

/// That mean and the residual to the compensated values, and their bits to the messages.
__global__ void __launch_bounds__(kThreads) feed_slice_kernel(GRID_CONSTANT const Exchange x) {
    begin_kernel(true);
    const Compression &own = x.own;
    pack_groups(own, [&](int32_t group, const Leaf &where, int64_t worker, float *tile) INLINED {
        const float scale = own.worker_scales()[group];
        for_packs(where.n, all_aligned(x.node.slices, own.worker), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> mean = mean_of_slices<V>(x.node, worker + i);
            const uint32_t active = active_from(own.active, worker + i); // `worker`: a multiple of 32
            const Pack<V> sum = compensate(mean, load<V>(own.worker, worker + i), scale, active);
            to_tile(sum, tile + i);
            store(sum, own.worker, worker + i);
        });
    });
}

/// One node: the mean is all, and goes to the first of the slices.
__global__ void __launch_bounds__(kThreads) mean_slice_kernel(GRID_CONSTANT const Exchange x) {
    begin_kernel();
    for (int64_t i = grid_thread() * 4; i < x.node.numel; i += grid_threads() * 4)
        store(mean_of_slices<4>(x.node, i), x.node.slices, i);
}

/// The passes of one exchange, whose layout is in device memory. The list is, too; a step has none.
struct ExchangeRun {
    const Launcher &launcher;
    Exchange x;
    const dsopt_tensor *list = nullptr;

    void run(ExchangePass pass) const {
        const CompressLayout &sent = x.own.layout, &all = x.mean.layout;
        switch (pass) {
        case ExchangePass::clear_messages: return launcher.fill(x.own.send, 0xff, size_t(sent.messages_bytes()));
        case ExchangePass::pack_list: return launcher.over(sent.group_leaves, "feed_list", feed_list_kernel, x, list);
        case ExchangePass::pack_values: return launcher.over(sent.group_leaves, "pack", pack_kernel, x);
        case ExchangePass::message_scales:
            return launcher.over(sent.group_count / kWarps + 1, "message_scales", message_scales_kernel, x);
        case ExchangePass::clear_result: return launcher.fill(x.own.result, 0xff, size_t(sent.message_bytes));
        case ExchangePass::serve: return launcher.over(sent.segment_leaves, "serve", serve_kernel, x);
        case ExchangePass::result_scales:
            return launcher.over(sent.segment_count / kWarps + 1, "result_scales", result_scales_kernel, x);
        case ExchangePass::decode: return launcher.over(all.group_leaves, "decode", decode_kernel, x, list);
        case ExchangePass::clear_gaps:
            if (all.group_count != 0) launcher.over(all.group_count / kThreads + 1, "clear_gaps", clear_gaps_kernel, x);
            return;
        case ExchangePass::copy_list: return launcher.over(all.group_leaves, "copy_list", copy_list_kernel, x, list);
        case ExchangePass::pack_slice: return launcher.over(sent.group_leaves, "feed_slice", feed_slice_kernel, x);
        case ExchangePass::average_slice:
            return launcher.over(x.node.numel / (kThreads * 4) + 1, "mean_slice", mean_slice_kernel, x);
        }
    }
};

} // namespace dsopt::gpu
