// SPDX-License-Identifier: Apache-2.0
// Folds the results of leaves in one block, in the order of rules/lane_sum.h: a lane of a warp is a lane of the sum.
#pragma once
#include "plan.cuh"
#include "rules/lane_sum.h"

namespace dsopt::gpu {

// Indices are 32-bit here to save registers: a list has fewer than 2^31 leaves, and so have its tensors.

constexpr int32_t kFewLeaves = 8; // with fewer leaves, one thread is faster than a warp

constexpr int kAhead = 16; // loads in flight per lane: the latency of a load equals that of about 40 additions

/// Returns value(0) + value(1) + ... + value(count - 1), computed by a warp, in all of its lanes.
template <class Value> __device__ __forceinline__ double add_by_warp(int32_t count, const Value &value) {
    double sum = 0;
    int32_t i = int32_t(threadIdx.x % 32);
    for (; i + 32 * (kAhead - 1) < count; i += 32 * kAhead) {
        double values[kAhead];
        unrolled<kAhead>([&](int k) INLINED { values[k] = value(i + 32 * k); });
        unrolled<kAhead>([&](int k) INLINED { sum += values[k]; });
    }
#pragma unroll 4
    for (; i < count; i += 32) sum += value(i);
    return fold_lanes(sum);
}

/// Folds the results of a tensor's leaves: any number by a warp, fewer than kFewLeaves by one thread.
template <bool Warp> struct LeafFold {
    bool lead; // true in the thread that stores the result
    static constexpr int32_t stride = Warp ? 32 : 1;
    __device__ __forceinline__ static int32_t first() { return Warp ? int32_t(threadIdx.x % 32) : 0; }
    __device__ __forceinline__ double sum(const double *values, int32_t count) const {
        const auto value = [&](int32_t leaf) INLINED { return values[leaf]; };
        if constexpr (Warp)
            return add_by_warp(count, value);
        else
            return add_few<kFewLeaves>(count, value);
    }
    template <class Count> __device__ __forceinline__ int64_t sum_counts(int32_t count, const Count &count_of) const {
        int64_t all = 0;
        for (int32_t leaf = first(); leaf < count; leaf += stride) all += count_of(leaf);
        return Warp ? fold_lanes(all) : all;
    }
    __device__ __forceinline__ double max(const double *factors, int32_t count) const {
        double largest = 0;
        for (int32_t leaf = first(); leaf < count; leaf += stride) largest = larger_factor(largest, factors[leaf]);
        return Warp ? largest_of_lanes(largest) : largest;
    }
};

/// Calls body(tensor, leaves, fold) for every tensor of a list: in one thread if leaves_in(tensor) < kFewLeaves, else
/// in a warp. Neighbours in the list are processed by different warps, because large tensors are often adjacent. A
/// thread loads the leaf counts of several tensors at once.
template <class Leaves, class Body>
__device__ __forceinline__ void for_tensors(int32_t count, const Leaves &leaves_in, const Body &body) {
    constexpr int ahead = 4;
    const int32_t first = int32_t(threadIdx.x % 32) * kWarps + int32_t(threadIdx.x / 32);
    for (int32_t base = 0; base < count; base += ahead * kThreads) {
        int32_t leaves[ahead];
        unrolled<ahead>([&](int k) INLINED {
            const int32_t i = base + k * kThreads + first;
            leaves[k] = i < count ? leaves_in(i) : -1;
        });
#pragma unroll 1 // one copy of the body
        for (int32_t begin = base; begin < base + ahead * kThreads && begin < count; begin += kThreads) {
            const int32_t its_leaves = leaves[0];
            unrolled<ahead - 1>([&](int k) INLINED { leaves[k] = leaves[k + 1]; });
            if (its_leaves >= 0 && its_leaves < kFewLeaves) body(begin + first, its_leaves, LeafFold<false>{true});
            unsigned many = __ballot_sync(0xffffffffu, its_leaves >= kFewLeaves);
            for (; many != 0; many &= many - 1) {
                const int lane = __ffs(int(many)) - 1;
                body(begin + lane * kWarps + int32_t(threadIdx.x / 32), __shfl_sync(0xffffffffu, its_leaves, lane),
                     LeafFold<true>{threadIdx.x % 32 == 0});
            }
        }
    }
}

/// The same for the tensors of a step.
template <class Body> __device__ __forceinline__ void for_tensors(const DevicePlan &d, const Body &body) {
    for_tensors(
        int32_t(d.plan.count), [&](int32_t i) INLINED { return d.tensor_leaves[i]; }, body);
}

/// Combines the counts of a block's threads, and returns the result in all of them. Called at most once between two
/// barriers of a kernel.
__device__ inline NonFinite over_block(const NonFinite &found) {
    __shared__ int64_t counts[kWarps], firsts[kWarps];
    const int64_t count = fold_lanes(found.count), first = -largest_of_lanes(-found.first);
    if (threadIdx.x % 32 == 0) counts[threadIdx.x / 32] = count, firsts[threadIdx.x / 32] = first;
    __syncthreads();
    NonFinite all;
    for (int warp = 0; warp < kWarps; ++warp) {
        all.count += counts[warp];
        all.first = firsts[warp] < all.first ? firsts[warp] : all.first;
    }
    return all;
}

} // namespace dsopt::gpu
