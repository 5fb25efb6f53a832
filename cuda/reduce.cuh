// SPDX-License-Identifier: Apache-2.0
// Sums of squares of the elements of a leaf, in the order of rules/lane_sum.h: by a warp that reads the leaf from
// memory, or by a block that has it in shared memory. Counts of non-finite elements, by a warp.
#pragma once
#include "fold.cuh"

namespace dsopt::gpu {

__device__ __forceinline__ double plus_square(double sum, float x) {
    const double exact = x;
#if defined(__CUDA_ARCH__)
    return __fma_rn(exact, exact, sum); // the same bits: the square of a float is exact in double
#else
    return sum + exact * exact;
#endif
}

/// Four lanes of a leaf, in each thread of a warp.
struct LeafSquares {
    double lane[4] = {};
    __device__ __forceinline__ void add(int k, float x) { lane[k] = plus_square(lane[k], x); }
    __device__ __forceinline__ void add(const Pack<4> &x) {
        unrolled<4>([&](int k) INLINED { add(k, x.at[k]); });
    }
    /// Returns the sum in all threads of the warp.
    __device__ __forceinline__ double fold() const {
        return fold_lanes(add_neighbours(lane[0], lane[1], lane[2], lane[3]));
    }
};

constexpr int kBytesInFlight = 64; // of a thread's loads

/// Returns the sum of squares of n elements from `begin` on, at most a leaf. Computed by one warp; the sum is in all of
/// its lanes. Each thread adds the squares of the four neighbours that it loads from each row of 128 elements.
__device__ __forceinline__ double leaf_squares(const Slot &slot, int64_t begin, int n) {
    LeafSquares sum;
    const int first = int(threadIdx.x % 32) * 4, whole = all_aligned(slot.data) ? n / 4 * 4 : 0;
    visit(slot.format, [&](auto tag) INLINED {
        using Tag = decltype(tag);
        constexpr int rows = kBytesInFlight / int(4 * sizeof(typename Tag::storage));
        const Slot known{slot.data, Tag::format};
        const auto add_rows = [&](int i, auto all) INLINED {
            Pack<4> row[rows];
            unrolled<rows>([&](int k) INLINED {
                const int element = i + k * kLeafLanes;
                row[k] = all || element < whole ? fetch<4>(known, begin + element) : Pack<4>{}; // zeros change no sum
            });
            unrolled<rows>([&](int k) INLINED { sum.add(convert_to_f32(row[k], Tag::format)); });
        };
        int i = first;
        for (; i - first + rows * kLeafLanes <= whole; i += rows * kLeafLanes) add_rows(i, std::true_type{});
        if (i < whole) add_rows(i, std::false_type{});
        // Single elements: after the last group of four, or of an array that is not aligned.
        for (i = whole / kLeafLanes * kLeafLanes + first; i < n; i += kLeafLanes)
            unrolled<4>([&](int k) INLINED {
                if (i + k >= whole && i + k < n) sum.add(k, load<1>(known, begin + i + k).at[0]);
            });
    });
    return sum.fold();
}

/// Calls store(k, sum) in one thread for each of `Tiles` leaves of n elements in shared memory, the k-th at tiles + k *
/// kLeaf. Called by a whole block, after a barrier. Each thread has one lane. The values of a lane come from several
/// warps, because all warps of the block share each leaf, so that short lists occupy all multiprocessors. The tiles may
/// be overwritten after the call.
template <int Tiles, class Store>
__device__ __forceinline__ void sum_tiles(const float *tiles, int n, const Store &store) {
    static_assert(Tiles * kLeafLanes <= kThreads);
    __shared__ double sums[Tiles][kLanes];
    const unsigned thread = thread_read_here(), k = thread / kLeafLanes, lane = thread % kLeafLanes;
    if (k < Tiles) {
        double sum = 0;
        constexpr int ahead = 8; // values that are loaded at once; zeros after the end change no sum
        for (unsigned i = lane; i < unsigned(n); i += ahead * kLeafLanes) {
            float x[ahead];
            unrolled<ahead>([&](int a) INLINED {
                const unsigned element = i + unsigned(a) * kLeafLanes;
                x[a] = element < unsigned(n) ? tiles[k * kLeaf + element] : 0.0f;
            });
            unrolled<ahead>([&](int a) INLINED { sum = plus_square(sum, x[a]); });
        }
        // Adds four neighbouring lanes, as add_neighbours(): the order of two summands does not change a bit.
        for (int width = 1; width <= 2; width *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
        if (lane % 4 == 0) sums[k][lane / 4] = sum;
    }
    __syncthreads();
    if (k < Tiles && lane < kLanes) {
        const double sum = fold_lanes(sums[k][lane]);
        if (lane == 0) store(int(k), sum);
    }
}

/// Returns the number of non-finite elements of a leaf, plus 2^32 times the number of NaNs. Only called if the sum of
/// squares is not finite.
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
