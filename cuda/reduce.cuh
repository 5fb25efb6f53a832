// SPDX-License-Identifier: Apache-2.0
// Squares and finiteness of the elements of a leaf, by a warp.
#pragma once
#include "fold.cuh"

namespace dsopt::gpu {

constexpr int kTile = 1024;  // elements that a warp has in shared memory
constexpr int kInFlight = 4; // 16-byte loads of a thread that are under way at once

/// n elements from `begin` on, at most a tile, to shared memory as fp32, by a warp.
__device__ __forceinline__ void fill_tile(const Slot &slot, int64_t begin, int n, float *tile) {
    const int lane = threadIdx.x % 32;
    int done = 0;
    if (all_aligned(slot.data)) {
        const int each = wide_elements(slot.format),
                  wide = n / each; // elements of 16 bytes, and how many such there are
        const uint4 *from =
            global(reinterpret_cast<const uint4 *>(static_cast<const char *>(slot.data) + begin * (16 / each)));
        for (int first = lane; first < wide; first += 32 * kInFlight) {
            uint4 raw[kInFlight] = {};
#pragma unroll
            for (int k = 0; k < kInFlight; ++k)
                if (first + 32 * k < wide) raw[k] = from[first + 32 * k];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                if (first + 32 * k >= wide) break;
                float *to = tile + (first + 32 * k) * each;
                const Pack<4> low{{float_of(raw[k].x), float_of(raw[k].y), float_of(raw[k].z), float_of(raw[k].w)}};
                *reinterpret_cast<float4 *>(to) = float4_of(widen(low, slot.format));
                if (each == 8)
                    *reinterpret_cast<float4 *>(to + 4) =
                        float4_of(widen(Pack<4>{{float_of(raw[k].z), float_of(raw[k].w), 0, 0}}, slot.format));
            }
        }
        done = wide * each;
    }
    for (int i = done + lane; i < n; i += 32) tile[i] = load<1>(slot, begin + i).at[0];
}

/// n elements from `begin` on, at most a leaf, by one warp; the sum is in all of its lanes.
__device__ __forceinline__ double leaf_squares(const Slot &slot, int64_t begin, int n, float *tile) {
    double sum = 0;
    for (int at = 0; at < n; at += kTile) {
        const int here = n - at < kTile ? n - at : kTile;
        fill_tile(slot, begin + at, here, tile);
        __syncwarp();
        sum = add_squares(tile, here, sum);
        __syncwarp();
    }
    return fold_lanes(sum);
}

/// Non-finite elements of a leaf, NaNs times 2^32 on top. Only called where the sum of squares says that there are
/// some.
__device__ inline int64_t leaf_nonfinite(const Slot &slot, int64_t begin, int n) {
    unsigned bad = 0, nans = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        const uint32_t bits = bits_of(load<1>(slot, begin + i).at[0]) & 0x7fffffffu;
        bad += bits >= 0x7f800000u;
        nans += bits > 0x7f800000u;
    }
    return int64_t(fold_lanes(bad)) + (int64_t(fold_lanes(nans)) << 32);
}

} // namespace dsopt::gpu
