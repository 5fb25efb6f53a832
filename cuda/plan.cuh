// SPDX-License-Identifier: Apache-2.0
// Positions in a step, for kernels: leaves and their tensors, the last block, sums of lanes.
#pragma once
#include "device/decide.h"
#include "device_plan.h"
#include "rules/onebit.h"
#include "vec.cuh"

namespace dsopt::gpu {

/// True in exactly one block of the grid, the last to arrive, to which the writes of all other blocks are visible:
/// docs/last-block.md.
__device__ __forceinline__ bool last_block(uint32_t *ticket) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence(); // orders this block's writes before its ticket
        last = atomicAdd(ticket, 1u) + 1 == gridDim.x;
        if (last) atomicExch(ticket, 0u);
        __threadfence(); // orders the last block's reads after all tickets
    }
    __syncthreads();
    return last;
}
/// Like last_block(ticket), for a kernel that distributes its leaves dynamically.
__device__ __forceinline__ bool last_block(StepFlags::Blocks &blocks) {
    const bool last = last_block(&blocks.done);
    if (last && threadIdx.x == 0) atomicExch(&blocks.distributed, 0u);
    return last;
}

/// Elements of the index-th leaf of a tensor, or of another range that is partitioned into leaves.
struct Leaf {
    int64_t begin;
    int n;
    __device__ __forceinline__ Leaf(int64_t numel, int64_t index) :
        begin(index * kLeaf),
        n(int(numel - begin < kLeaf ? numel - begin : kLeaf)) {}
    __device__ __forceinline__ Leaf(const TensorJob &job, uint32_t position) :
        Leaf(job.range.numel, int64_t(int32_t(position) - job.position)) {}
};
/// Returns the index of a leaf of the range among the leaves of all tensors. It is computed again where it is needed,
/// which saves a register in the loop of a step.
__device__ __forceinline__ int64_t leaf_index(const TensorJob &job, const Leaf &where) {
    return job.first_leaf + where.begin / kLeaf;
}

/// Calls body(position, tensor) for every gridDim.x-th leaf, in a block. The tensor of the next leaf is loaded in
/// advance.
template <class Body> __device__ __forceinline__ void for_leaves_by_block(const DevicePlan &d, const Body &body) {
    const int32_t *const tensor_of = d.tensor_of_leaf + d.first_position;
    int32_t next = blockIdx.x < d.leaves ? tensor_of[blockIdx.x] : 0;
    for (uint32_t leaf = blockIdx.x; leaf < d.leaves; leaf += gridDim.x) {
        const int32_t tensor = next;
        if (leaf + gridDim.x < d.leaves) next = tensor_of[leaf + gridDim.x];
        body(d.first_position + leaf, tensor);
    }
}

/// Dynamic distribution of leaves over blocks or warps. The first `fixed` leaves of each are fixed; an atomic counter
/// assigns further leaves in the order of requests. Multiprocessors do not have the same bandwidth, and with a static
/// distribution the slowest would determine the kernel's time. The distribution does not change a bit of the result.
struct LeafDistribution {
    uint32_t *distributed; // NULL: every leaf is fixed
    /// Returns the leaf after `last`, the latest leaf of this block or warp. `all`: number of blocks or warps.
    __device__ __forceinline__ uint32_t after(uint32_t last, uint32_t all, uint32_t fixed) const {
        return distributed != nullptr ? fixed * all + atomicAdd(distributed, 1u) : last + all;
    }
};

/// Calls body(position, tensor) for the leaves of a warp, distributed dynamically. During a call, the tensor of the
/// next leaf and the index of the leaf after it are being loaded.
template <class Body>
__device__ __forceinline__ void for_leaves_by_warp(const DevicePlan &d, const LeafDistribution &distribution,
                                                   const Body &body) {
    const uint32_t warps = gridDim.x * kWarps, first = blockIdx.x * kWarps + threadIdx.x / 32;
    const auto tensor_of = [&](uint32_t leaf)
                               INLINED { return leaf < d.leaves ? d.tensor_of_leaf[d.first_position + leaf] : 0; };
    uint32_t leaf = first, next = first + warps;
    int32_t tensor = tensor_of(leaf);
    while (leaf < d.leaves) {
        const int32_t next_tensor = tensor_of(next);
        const uint32_t after_next =
            threadIdx.x % 32 == 0 && next < d.leaves ? distribution.after(next, warps, 2) : UINT32_MAX;
        body(d.first_position + leaf, tensor);
        leaf = next;
        tensor = next_tensor;
        next = __shfl_sync(0xffffffffu, after_next, 0);
    }
}

/// Adds the upper half of the lanes to the lower half, five times. Returns the sum in all lanes.
template <class T> __device__ __forceinline__ T fold_lanes(T sum) {
    for (int width = 16; width != 0; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    return sum;
}
/// Returns the largest value of a warp, in all lanes.
template <class T> __device__ __forceinline__ T largest_of_lanes(T value) {
    for (int width = 16; width != 0; width /= 2)
        value = larger_factor(value, __shfl_xor_sync(0xffffffffu, value, width));
    return value;
}

/// Returns the index of the last of `count` ranges, at least one, that begins at or before `index`. The first range
/// begins at 0, and an empty range begins where the next one does. Called by a warp, which tests 32 ranges at once.
template <class Index> __device__ __forceinline__ Index find_range(const int64_t *first, Index count, int64_t index) {
    Index low = 0;
    while (count > 1) {
        const Index each = (count + 31) / 32, range = Index(threadIdx.x % 32) * each;
        const unsigned begun = __ballot_sync(0xffffffffu, range < count && first[low + range] <= index);
        const Index passed = Index(31 - __clz(int(begun))) * each;
        low += passed;
        count = count - passed < each ? count - passed : each;
    }
    return low;
}

} // namespace dsopt::gpu
