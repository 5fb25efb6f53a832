// SPDX-License-Identifier: Apache-2.0
// Device code of 1-bit compression with error feedback, device/compress.h: packs a rank's compensated values into
// messages, and decompresses results. A block has one leaf at a time in shared memory, packs its signs and sums its
// squares.
#pragma once
#include "device/compress.h"
#include "reduce.cuh"

namespace dsopt::gpu {

/// Returns the number of active elements of [begin, begin + n). `begin` is a multiple of 32. Computed by a warp.
__device__ __forceinline__ int32_t count_active(const int32_t *active, int64_t begin, int n) {
    if (active == nullptr) return n;
    int32_t count = 0;
    for (int i = int(threadIdx.x % 32) * 32; i < n; i += 32 * 32) {
        const uint32_t word = active_from(active, begin + i);
        count += __popc(n - i < 32 ? word & ((1u << (n - i)) - 1) : word);
    }
    return fold_lanes(count);
}

/// Position of an element in a unit: its chunk, and its offset in the chunk. move() finds the positions of neighbours
/// without a division.
struct ChunkPosition {
    int64_t chunk, offset;
    __device__ __forceinline__ ChunkPosition(const CompressLayout::Unit &unit, int64_t worker) :
        chunk((worker - unit.begin) / unit.chunk),
        offset(worker - unit.begin - chunk * unit.chunk) {}
    __device__ __forceinline__ void move(const CompressLayout::Unit &unit, int64_t elements) {
        for (offset += elements; offset >= unit.chunk; offset -= unit.chunk) ++chunk;
    }
};

/// Returns the number of elements of a scale group's leaf that are in the tensor; the rest is padding.
__device__ __forceinline__ int unpadded_elements(const dsopt_tensor &tensor, const Leaf &leaf) {
    const int64_t left = tensor.numel - leaf.begin;
    return left < 0 ? 0 : left < leaf.n ? int(left) : leaf.n;
}

/// Stores the sum of squares of the leaf in the tile, and the number of its active elements. `begin`: index of its
/// first element among the worker's. The tile may be overwritten after the call.
__device__ __forceinline__ void sum_leaf(const Compression &local, const float *tile, int64_t begin, int n,
                                         int64_t leaf) {
    if (threadIdx.x / 32 == kWarps - 1) { // this warp has no lane of the sum
        const int32_t count = count_active(local.active, begin, n);
        if (threadIdx.x % 32 == 0) local.counts[leaf] = count;
    }
    sum_tiles<1>(tile, n, [&](int, double sum) INLINED { local.sums[leaf] = sum; });
}

/// Calls write(i, bits), in one thread, for each word of 32 of the n signs in `tile`, from the i-th on. A byte has
/// eight signs, most significant bit first; the first byte is the lowest. Bits after the end are 1. A warp packs 512
/// neighbours, and lane l writes the l-th word, so that all words are written at once.
template <class Write> __device__ __forceinline__ void pack_signs(const float *tile, int n, const Write &write) {
    constexpr int words = int(kLeaf) / kThreads; // per warp
    const int lane = int(threadIdx.x % 32), begin = int(threadIdx.x / 32) * words * 32;
    unsigned own_word = 0;
    for (int k = 0; k < words && begin + k * 32 < n; ++k) {
        const int i = begin + k * 32 + lane;
        const unsigned word = __ballot_sync(0xffffffffu, i >= n || !(tile[i] < 0));
        if (lane == k) own_word = __byte_perm(__brev(word), 0, 0x0123);
    }
    if (lane < words && begin + lane * 32 < n) write(begin + lane * 32, own_word);
}
/// Writes the bytes of a word of signs that contain any of the first `n` signs, in one store if possible.
__device__ __forceinline__ void write_signs(uint8_t *to, unsigned bits, int n) {
    if (n >= 32 && reinterpret_cast<uintptr_t>(to) % 4 == 0)
        *reinterpret_cast<uint32_t *>(to) = bits;
    else
        for (int k = 0; k < 4 && k * 8 < n; ++k) to[k] = uint8_t(bits >> (8 * k));
}

/// Sets bits [begin, end), whole words, to 1.
__device__ __forceinline__ void fill_words(uint8_t *bits, int64_t begin, int64_t end) {
    for (int64_t k = begin / 8; k < end / 8; k += 4) *reinterpret_cast<uint32_t *>(bits + k) = ~0u;
}
/// Sets the bits at the end of a message that belong to no group to 1: the bits of elements from `begin` on, a multiple
/// of 32 if there are such elements, and the padding of the message. `first`, `stride`: index of the calling thread, and
/// number of threads.
__device__ __forceinline__ void fill_message(const CompressLayout &layout, char *message, int64_t begin, int64_t first,
                                             int64_t stride) {
    uint8_t *const bits = layout.bits(message);
    const int64_t end = layout.message_bytes - layout.message_scales * 4;
    for (int64_t k = begin / 8 + first * 4; k < layout.server_numel / 8; k += stride * 4)
        *reinterpret_cast<uint32_t *>(bits + k) = ~0u;
    for (int64_t k = layout.server_numel / 8 + first; k < end; k += stride) bits[k] = 0xff;
}

/// Packs the signs of the leaf of compensated values in the tile into the messages, and stores its sum and count.
/// `worker`: index of its first element. Called by a whole block.
__device__ inline void pack_leaf(const Compression &local, int32_t group, int64_t worker, int n, const float *tile,
                                 int64_t leaf) {
    __syncthreads();
    const CompressLayout::Unit unit = local.layout.groups[group].unit;
    const auto written = int(local.layout.bits_of_elements(n));
    pack_signs(tile, n, [&](int i, unsigned bits) INLINED {
        ChunkPosition where(unit, worker + i);
        const bool whole = where.offset + 32 <= unit.chunk; // chunks begin at whole bytes
        for (int k = 0; k < 32 && i + k < n; k += 8, where.move(unit, 8)) {
            uint8_t *const to = local.layout.bits(local.message_to(where.chunk)) + (unit.server + where.offset) / 8;
            if (whole) return write_signs(to, bits, written - i);
            write_signs(to, bits >> k, 8);
        }
    });
    sum_leaf(local, tile, worker, n, leaf);
}

/// Calls body(group, where, leaf) for every leaf of the scale groups that belongs to this block.
template <class Body> __device__ __forceinline__ void for_group_leaves(const CompressLayout &layout, const Body &body) {
    const int64_t leaves = layout.group_leaf[layout.group_count]; // from memory: fewer registers than the argument
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t group = find_range(layout.group_leaf, layout.group_count, leaf);
        body(group, Leaf(layout.groups[group].numel, leaf - layout.group_leaf[group]), leaf);
    }
}

/// For every leaf of the scale groups that belongs to this block: calls fill(group, where, worker, tile), which stores
/// the compensated values from index `worker` on to the tile, and then packs the leaf.
template <class Fill> __device__ __forceinline__ void pack_groups(const Compression &local, const Fill &fill) {
    __shared__ float tile[kLeaf];
    if (local.skipped()) return;
    for_group_leaves(local.layout, [&](int32_t group, const Leaf &where, int64_t leaf) INLINED {
        const int64_t worker = local.layout.groups[group].begin + where.begin;
        fill(group, where, worker, tile);
        pack_leaf(local, group, worker, where.n, tile, leaf);
    });
}

/// Returns the compensated values of V neighbours: new values plus the residual, or 0 where the bit of `active` is 0.
template <int V>
__device__ __forceinline__ Pack<V> compensate(const Pack<V> &x, const Pack<V> &last, float scale, uint32_t active) {
    Pack<V> y;
    unrolled<V>([&](int k) INLINED { y.at[k] = (active >> k) & 1u ? x.at[k] + error_of(last.at[k], scale) : 0.0f; });
    return y;
}

/// Returns the mean of V neighbours of a scale group, from results. For V = 4 or 8 their bits are in one byte.
template <int V>
__device__ __forceinline__ Pack<V> mean_at(const ListMean &mean, const char *results, int32_t group,
                                           const CompressLayout::Unit &unit, const ChunkPosition &position) {
    const char *message = results + position.chunk * mean.layout.message_bytes;
    const float scale = CompressLayout::scales(message)[group - mean.layout.chunks[position.chunk].first_group];
    const int64_t bit = unit.server + position.offset;
    const unsigned bits = unsigned(mean.layout.bits(message)[bit / 8]) << (bit % 8);
    Pack<V> y;
    unrolled<V>([&](int k) INLINED { y.at[k] = (bits >> (7 - k)) & 1u ? scale : -scale; });
    return y;
}
template <int V>
__device__ __forceinline__ Pack<V> mean_of(const ListMean &mean, const char *results, int32_t group, int64_t worker) {
    if (mean.values != nullptr) return load<V>(mean.values, worker);
    const CompressLayout::Unit &unit = mean.layout.groups[group].unit;
    return mean_at<V>(mean, results, group, unit, ChunkPosition(unit, worker));
}

} // namespace dsopt::gpu
