// SPDX-License-Identifier: Apache-2.0
// Pass 1: squares and finiteness of every gradient in one read, then, in the last block, the decision.
#pragma once
#include "fold.cuh"

namespace dsopt::gpu {

constexpr int kStage = 1024; // elements that a warp has in shared memory

/// A stretch of an array into shared memory as floats.
__device__ __forceinline__ void stage(const void *data, Dtype type, int64_t begin, int n, float *to) {
    const int lane = threadIdx.x % 32;
    const bool vector = aligned16(data);
    int i = lane * 8;
#pragma unroll 4
    for (; i + 8 <= n; i += 32 * 8) {
        const Pack<8> x = load<8>(data, type, begin + i, vector);
#pragma unroll
        for (int k = 0; k < 8; ++k) to[i + k] = x.at[k];
    }
    for (int k = n / 8 * 8 + lane; k < n; k += 32) to[k] = load_one(data, type, begin + k);
}

/// Leaf `leaf` of an array of `numel` elements by one warp; the result is lane 0's.
__device__ __forceinline__ double leaf_squares(const void *data, Dtype type, int64_t begin, int n, float *room) {
    double sum = 0;
    for (int at = 0; at < n; at += kStage) {
        const int here = n - at < kStage ? n - at : kStage;
        stage(data, type, begin + at, here, room);
        __syncwarp();
        sum = add_squares(room, here, sum);
        __syncwarp();
    }
    return fold_lanes(sum);
}

/// Non-finite elements of a leaf, NaNs times 2^32 on top. Only called where the sum of squares says that there are
/// some.
__device__ inline int64_t leaf_nonfinite(const void *data, Dtype type, int64_t begin, int n) {
    unsigned bad = 0, nans = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        const uint32_t bits = bits_of(load_one(data, type, begin + i)) & 0x7fffffffu;
        bad += bits >= 0x7f800000u;
        nans += bits > 0x7f800000u;
    }
    for (int width = 16; width != 0; width /= 2) {
        bad += __shfl_down_sync(0xffffffffu, bad, unsigned(width));
        nans += __shfl_down_sync(0xffffffffu, nans, unsigned(width));
    }
    return int64_t(bad) + (int64_t(nans) << 32);
}

/// The same result as fold_gradients(), with tensors and then the cells of the table side by side.
__device__ inline void fold_on_block(const DevicePlan &d) {
    const StepPlan &plan = d.plan;
    const NormTable &table = plan.norms;
    int64_t nonfinite = 0, first = INT64_MAX; // the least of: place of a tensor with one, doubled, and 1 more for a NaN
    for_tensors(
        int32_t(plan.count), [&](int32_t i) { return int32_t(leaves_of(plan.jobs[i].numel)); },
        [&](int32_t i, int32_t leaves, auto by) {
            const TensorJob &job = plan.jobs[i];
            const bool read = plan.read_gradients && job.present && job.grad != nullptr;
            double squares = 0;
            if (read) {
                squares = by.sum(plan.sums_a + job.first_leaf, leaves);
                const int64_t *bad = plan.bad + job.first_leaf;
                const int64_t here = by.number(leaves, [&](int32_t leaf) { return bad[leaf] & 0xffff; });
                if (here != 0) { // all lanes of a warp agree
                    const int64_t nans = by.number(leaves, [&](int32_t leaf) { return bad[leaf] >> 32; });
                    const int64_t found = int64_t(i) * 2 + (nans != 0);
                    first = found < first ? found : first;
                    nonfinite += by.lead ? here : 0;
                }
            }
            if (by.lead) {
                d.tensor_squares[i] = squares;
                d.tensor_cell[i] = read && job.in_norm ? int32_t(job.group * table.classes + job.expert) : -1;
            }
        });
    const BlockResult found = over_block(nonfinite, first); // a barrier too
    const int32_t classes = int32_t(table.classes), own_cells = int32_t(table.groups) * classes;
    for (int32_t cell = int32_t(threadIdx.x / 32); cell < own_cells + classes; cell += kWarps) {
        const double sum = add_by_warp(int32_t(plan.count), [&](int32_t i) {
            const int32_t own = d.tensor_cell[i];
            // The last row is over all groups.
            const bool in = own >= 0 && (cell < own_cells ? own == cell : own % classes == cell - own_cells);
            return in ? d.tensor_squares[i] : 0.0;
        });
        if (threadIdx.x % 32 == 0) table.at[cell] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    Found &seen = plan.control->found;
    seen.nonfinite = found.sum;
    seen.first_bad = found.least == INT64_MAX ? -1 : found.least / 2;
    seen.kind = found.least == INT64_MAX ? 0 : found.least % 2 != 0 ? 2 : 1;
    note_reasons(plan);
}

/// By one thread, between the passes.
__device__ inline void decide_on_thread(const DevicePlan &d) {
    if (!decide_step(d.plan) || !d.together) return;
    for_stretches(d.plan,
                  [&](int64_t begin, int64_t end, int32_t group) { make_all_scalars(d.plan, begin, end, group); });
}

/// Blocks per multiprocessor, as many as are launched: with a fourth one, 64 registers would be too few for the
/// decision, and on some devices shared memory would have no room.
constexpr int kInspectBlocks = 3;
__global__ void __launch_bounds__(kThreads, kInspectBlocks) inspect_kernel(const DevicePlan d, const bool decides) {
    __shared__ float room[kWarps][kStage];
    const StepPlan &plan = d.plan;
    const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    for (uint32_t leaf = blockIdx.x * kWarps + warp; leaf < d.leaves; leaf += gridDim.x * kWarps) {
        const TensorJob &job = plan.jobs[d.tensor_of_leaf[leaf]];
        if (!job.present || job.grad == nullptr) continue;
        const int64_t begin = (leaf - job.first_leaf) * kLeaf;
        const int n = int(job.numel - begin < kLeaf ? job.numel - begin : kLeaf);
        double squares = leaf_squares(job.grad, job.grad_type, begin, n, room[warp]);
        const double all = __shfl_sync(0xffffffffu, squares, 0);
        const int64_t bad = is_finite(all) ? 0 : leaf_nonfinite(job.grad, job.grad_type, begin, n);
        // The original takes the experts' part of the norm from their weights. What is bad stays the gradient's.
        if (plan.wrapper == Wrapper::fused && job.expert != 0)
            squares = leaf_squares(job.weight, job.weight_type, begin, n, room[warp]);
        if (lane == 0) {
            plan.sums_a[leaf] = squares;
            plan.bad[leaf] = bad;
        }
    }
    if (!last_block(&d.plan.control->ticket[0])) return;
    fold_on_block(d);
    if (threadIdx.x == 0 && decides && d.decided) decide_on_thread(d);
}

/// The table alone, before ranks add theirs.
__global__ void __launch_bounds__(kThreads, 1) fold_kernel(const DevicePlan d) { fold_on_block(d); }

/// The decision alone: gradients are not read, or ranks had to add up their norms in between.
__global__ void __launch_bounds__(kThreads, 1) decide_kernel(const DevicePlan d, const bool fold) {
    if (fold) fold_on_block(d);
    __syncthreads();
    if (threadIdx.x == 0) decide_on_thread(d);
}

} // namespace dsopt::gpu
