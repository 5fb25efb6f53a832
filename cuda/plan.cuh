// SPDX-License-Identifier: Apache-2.0
// A step as kernels see it.
#pragma once
#include "device/decide.h"
#include "vec.cuh"

namespace dsopt::gpu {

constexpr int kThreads = 256; // a block
constexpr int kWarps = kThreads / 32;

/// What the update does with tensors that go into exchanges of the 1-bit family.
enum class Elsewhere : uint8_t {
    no,   // updates them like others
    yes,  // nothing: kernels of the 1-bit family update them
    idle, // leaves them as they are
};

/// By value into every kernel. The pointers of `plan` are device pointers here.
struct DevicePlan {
    StepPlan plan;
    uint32_t leaves;
    const int32_t *tensor_of_leaf;
    double *tensor_squares; // one a tensor
    double *tensor_updates; // one a tensor
    int32_t *tensor_cell;   // one a tensor: where its squares count in the table of norms, -1 = nowhere
    Elsewhere elsewhere;
    bool decided;  // a kernel before the update has decided; else the update finds its own few scalars
    bool together; // tensors of a group count together (compat mode): scalars are made with the decision
};

/// True for exactly one block of the grid, the last one to come, with everything that the others wrote in sight.
__device__ __forceinline__ bool last_block(uint32_t *ticket) {
    __shared__ bool last;
    __threadfence(); // what this thread wrote is visible before the ticket is drawn
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) + 1 == gridDim.x;
        if (last) atomicExch(ticket, 0u);
    }
    __syncthreads();
    if (last) __threadfence();
    return last;
}

/// Sum of squares of one leaf in shared memory by one warp, in the order that is part of the result: lane l takes
/// elements l, l + 32, ... one after the other, and five folds add the upper half of the lanes to the lower one.
__device__ __forceinline__ double add_squares(const float *x, int n, double sum) {
    for (int i = threadIdx.x % 32; i < n; i += 32) sum += double(x[i]) * double(x[i]);
    return sum;
}
__device__ __forceinline__ double fold_lanes(double sum) {
    for (int width = 16; width != 0; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    return sum; // in all lanes
}

} // namespace dsopt::gpu
