// SPDX-License-Identifier: Apache-2.0
// Positions in a step, for kernels: leaves and their tensors, the last block, sums of lanes.
#pragma once
#include "device/decide.h"
#include "device_plan.h"
#include "rules/onebit.h"
#include "vec.cuh"

namespace dsopt::gpu {

/// True for exactly one block of the grid, the last one to come, with everything that the others wrote in sight:
/// docs/last-block.md.
__device__ __forceinline__ bool last_block(uint32_t *ticket) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); // what this block wrote comes before its ticket
        last = atomicAdd(ticket, 1u) + 1 == gridDim.x;
        if (last) atomicExch(ticket, 0u);
        __threadfence(); // and what the last block reads after all tickets
    }
    __syncthreads();
    return last;
}
/// The same for a kernel that distributes its leaves dynamically.
__device__ __forceinline__ bool last_block(Control::Blocks &blocks) {
    const bool last = last_block(&blocks.done);
    if (last && threadIdx.x == 0) atomicExch(&blocks.taken, 0u);
    return last;
}

/// The elements that the index-th leaf of a tensor, or of anything else that is cut like one, has.
struct Leaf {
    int64_t begin;
    int n;
    __device__ __forceinline__ Leaf(int64_t numel, int64_t index) :
        begin(index * kLeaf),
        n(int(numel - begin < kLeaf ? numel - begin : kLeaf)) {}
    __device__ __forceinline__ Leaf(const TensorJob &job, uint32_t leaf) :
        Leaf(job.range.numel, leaf - job.first_leaf) {}
};

/// body(leaf, tensor) for every gridDim.x-th leaf, by a block. Which tensor the next one is of is read ahead.
template <class Body> __device__ __forceinline__ void for_leaves_by_block(const DevicePlan &d, const Body &body) {
    int32_t next = blockIdx.x < d.leaves ? d.tensor_of_leaf[blockIdx.x] : 0;
    for (uint32_t leaf = blockIdx.x; leaf < d.leaves; leaf += gridDim.x) {
        const int32_t tensor = next;
        if (leaf + gridDim.x < d.leaves) next = d.tensor_of_leaf[leaf + gridDim.x];
        body(leaf, tensor);
    }
}

/// Dynamic distribution of leaves over blocks or warps: the first `given` of each are fixed, further ones come from a
/// counter in the order in which they are asked for. Multiprocessors do not get the same bandwidth, and with a fixed
/// share the slowest one would end the kernel. Which block works on a leaf changes no bit.
struct LeafDistribution {
    uint32_t *taken; // NULL: every leaf is fixed
    /// The leaf behind `last`, which is the last one of this block or warp so far, of `all` that there are.
    __device__ __forceinline__ uint32_t after(uint32_t last, uint32_t all, uint32_t given) const {
        return taken != nullptr ? given * all + atomicAdd(taken, 1u) : last + all;
    }
};

/// body(leaf, tensor) for the leaves of a warp, distributed dynamically. The next leaf is known, and its tensor and the
/// leaf behind it are asked for, while the warp works on one.
template <class Body>
__device__ __forceinline__ void for_leaves_by_warp(const DevicePlan &d, const LeafDistribution &distribution,
                                                   const Body &body) {
    const uint32_t warps = gridDim.x * kWarps, first = blockIdx.x * kWarps + threadIdx.x / 32;
    const auto tensor_of = [&](uint32_t leaf) INLINED { return leaf < d.leaves ? d.tensor_of_leaf[leaf] : 0; };
    uint32_t leaf = first, next = first + warps;
    int32_t tensor = tensor_of(leaf);
    while (leaf < d.leaves) {
        const int32_t next_tensor = tensor_of(next);
        const uint32_t behind =
            threadIdx.x % 32 == 0 && next < d.leaves ? distribution.after(next, warps, 2) : UINT32_MAX;
        body(leaf, tensor);
        leaf = next;
        tensor = next_tensor;
        next = __shfl_sync(0xffffffffu, behind, 0);
    }
}

/// Five folds add the upper half of the lanes to the lower one; the sum is in all of them.
template <class T> __device__ __forceinline__ T fold_lanes(T sum) {
    for (int width = 16; width != 0; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    return sum;
}
/// In all lanes, too.
template <class T> __device__ __forceinline__ T largest_of_lanes(T value) {
    for (int width = 16; width != 0; width /= 2)
        value = larger_factor(value, __shfl_xor_sync(0xffffffffu, value, width));
    return value;
}

/// The last of `count` stretches, at least one, that begins at `at` or before; the first one begins at 0. Empty ones
/// begin where the next one does. By a warp, which looks at 32 of them at once.
template <class Index> __device__ __forceinline__ Index find_stretch(const int64_t *first, Index count, int64_t at) {
    Index low = 0;
    while (count > 1) {
        const Index each = (count + 31) / 32, mine = Index(threadIdx.x % 32) * each;
        const unsigned begun = __ballot_sync(0xffffffffu, mine < count && first[low + mine] <= at);
        const Index skipped = Index(31 - __clz(int(begun))) * each;
        low += skipped;
        count = count - skipped < each ? count - skipped : each;
    }
    return low;
}

} // namespace dsopt::gpu
