// SPDX-License-Identifier: Apache-2.0
// Lists without an optimizer: one launch for all tensors.
#pragma once
#include "reduce.cuh"

namespace dsopt::gpu {

/// A list in device memory, cut into leaves like everything else.
struct DeviceList {
    const dsopt_tensor *x, *y; // y only for axpby
    const int64_t *first_leaf; // count + 1
    int64_t count;
    int64_t leaves;
};

/// The last of `count` stretches, at least one, that begins at `at` or before. Empty ones begin where the next one
/// does.
template <class Index> __device__ __forceinline__ Index find_stretch(const int64_t *first, Index count, int64_t at) {
    Index low = 0, high = count;
    while (high - low > 1) {
        const Index middle = low + (high - low) / 2;
        if (first[middle] <= at)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/// body(tensor, begin, n) for every leaf of the block's share.
template <class Body> __device__ __forceinline__ void for_leaves(const DeviceList &list, const Body &body) {
    for (int64_t leaf = blockIdx.x; leaf < list.leaves; leaf += gridDim.x) {
        const int64_t i = find_stretch(list.first_leaf, list.count, leaf), begin = (leaf - list.first_leaf[i]) * kLeaf;
        body(i, begin, int(list.x[i].numel - begin < kLeaf ? list.x[i].numel - begin : kLeaf));
    }
}

__global__ void __launch_bounds__(kThreads) zero_kernel(const DeviceList list) {
    for_leaves(list, [&](int64_t i, int64_t begin, int n) {
        const dsopt_tensor &x = list.x[i];
        const bool vector = aligned16(x.data);
        for (int k = int(threadIdx.x) * 8; k + 8 <= n; k += kThreads * 8)
            store(Pack<8>{}, x.data, Dtype(x.dtype), begin + k, vector);
        for (int k = n / 8 * 8 + int(threadIdx.x); k < n; k += kThreads)
            store_one(0, x.data, Dtype(x.dtype), begin + k);
    });
}

__device__ __forceinline__ void axpby(const DeviceList &list, const float a, const float b) {
    for_leaves(list, [&](int64_t i, int64_t begin, int n) {
        const dsopt_tensor &x = list.x[i], &y = list.y[i];
        const bool x16 = aligned16(x.data), y16 = aligned16(y.data);
        const Dtype from = Dtype(x.dtype), to = Dtype(y.dtype);
        for (int k = int(threadIdx.x) * 8; k + 8 <= n; k += kThreads * 8) {
            Pack<8> v = load<8>(x.data, from, begin + k, x16);
            if (b != 0) {
                const Pack<8> old = load<8>(y.data, to, begin + k, y16);
#pragma unroll
                for (int j = 0; j < 8; ++j) v.at[j] = a * v.at[j] + b * old.at[j];
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) v.at[j] = a * v.at[j];
            }
            store(v, y.data, to, begin + k, y16);
        }
        for (int k = n / 8 * 8 + int(threadIdx.x); k < n; k += kThreads) {
            const float v = a * load_one(x.data, from, begin + k);
            store_one(b != 0 ? v + b * load_one(y.data, to, begin + k) : v, y.data, to, begin + k);
        }
    });
}
__global__ void __launch_bounds__(kThreads)
    axpby_kernel(const DeviceList list, const float *factor, const float value, const float b) {
    axpby(list, factor != nullptr ? *factor : value, b);
}
/// A list of one in the arguments: nothing is allocated or uploaded, so a stream that is being captured takes it too.
struct OnePair {
    dsopt_tensor x, y;
    int64_t first_leaf[2];
};
__global__ void __launch_bounds__(kThreads)
    axpby_one_kernel(GRID_CONSTANT const OnePair pair, const float *factor, const float value, const float b) {
    axpby({&pair.x, &pair.y, pair.first_leaf, 1, pair.first_leaf[1]}, factor != nullptr ? *factor : value, b);
}

/// y may be the first of the rows.
__global__ void __launch_bounds__(kThreads)
    add_up_rows_kernel(const float *rows, const int64_t stride, const int count, const int64_t n, float *y) {
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < n; i += int64_t(gridDim.x) * kThreads) {
        float sum = rows[i];
        for (int row = 1; row < count; ++row) sum += rows[row * stride + i];
        y[i] = sum;
    }
}

__device__ __forceinline__ float clamped(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}
__global__ void __launch_bounds__(kThreads) clamp_kernel(const DeviceList list, const float limit) {
    for_leaves(list, [&](int64_t i, int64_t begin, int n) {
        const dsopt_tensor &x = list.x[i];
        const bool vector = aligned16(x.data);
        const Dtype type = Dtype(x.dtype);
        for (int k = int(threadIdx.x) * 8; k + 8 <= n; k += kThreads * 8) {
            Pack<8> v = load<8>(x.data, type, begin + k, vector);
#pragma unroll
            for (int j = 0; j < 8; ++j) v.at[j] = clamped(v.at[j], limit);
            store(v, x.data, type, begin + k, vector);
        }
        for (int k = n / 8 * 8 + int(threadIdx.x); k < n; k += kThreads)
            store_one(clamped(load_one(x.data, type, begin + k), limit), x.data, type, begin + k);
    });
}

/// The norm of nothing, until there is more.
__global__ void no_norm_kernel(dsopt_norm_result *result) {
    result->norm = 0;
    result->coefficient = 1;
    result->reserved = 0;
    result->nonfinite = 0;
    result->first_bad = -1;
}

/// Partial results of dsopt_tensors_norm, one a leaf.
struct NormParts {
    double *squares;
    int64_t *bad;
    float *largest;
    double *sums; // one a tensor
    uint32_t *ticket;
};

__global__ void __launch_bounds__(kThreads)
    norm_kernel(const DeviceList list, const NormParts parts, const int32_t kind, const bool raw, const double max_norm,
                dsopt_norm_result *result) {
    __shared__ float room[kWarps][kStage];
    const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    for (int64_t leaf = int64_t(blockIdx.x) * kWarps + warp; leaf < list.leaves; leaf += int64_t(gridDim.x) * kWarps) {
        const int64_t i = find_stretch(list.first_leaf, list.count, leaf), begin = (leaf - list.first_leaf[i]) * kLeaf;
        const dsopt_tensor &x = list.x[i];
        const int n = int(x.numel - begin < kLeaf ? x.numel - begin : kLeaf);
        const double squares = leaf_squares(x.data, Dtype(x.dtype), begin, n, room[warp]);
        const double all = __shfl_sync(0xffffffffu, squares, 0);
        const int64_t bad = is_finite(all) ? 0 : leaf_nonfinite(x.data, Dtype(x.dtype), begin, n);
        uint32_t most = 0; // magnitudes compare as integers, and a NaN is above them all
        if (kind == DSOPT_NORM_MAX) {
            for (int k = lane; k < n; k += 32) {
                const uint32_t magnitude = bits_of(load_one(x.data, Dtype(x.dtype), begin + k)) & 0x7fffffffu;
                most = magnitude > most ? magnitude : most;
            }
            for (int width = 16; width != 0; width /= 2) {
                const uint32_t other = __shfl_down_sync(0xffffffffu, most, unsigned(width));
                most = other > most ? other : most;
            }
        }
        if (lane == 0) {
            parts.squares[leaf] = squares;
            parts.bad[leaf] = bad & 0xffff;
            parts.largest[leaf] = float_of(most);
        }
    }
    if (!last_block(parts.ticket)) return;
    int64_t nonfinite = 0, first = INT64_MAX;
    for_tensors(
        int32_t(list.count), [&](int32_t i) { return int32_t(list.first_leaf[i + 1] - list.first_leaf[i]); },
        [&](int32_t i, int32_t leaves, auto by) {
            const double sum = by.sum(parts.squares + list.first_leaf[i], leaves);
            if (by.lead) parts.sums[i] = sum;
            const int64_t *bad = parts.bad + list.first_leaf[i];
            const int64_t here = by.number(leaves, [&](int32_t leaf) { return bad[leaf]; });
            if (here != 0 && i < first) first = i;
            if (by.lead) nonfinite += here;
        });
    uint32_t most = 0;
    for (int64_t leaf = threadIdx.x; leaf < list.leaves; leaf += kThreads) {
        const uint32_t magnitude = bits_of(parts.largest[leaf]);
        most = magnitude > most ? magnitude : most;
    }
    const BlockResult found = over_block(nonfinite, first); // a barrier too
    __syncthreads();
    most = uint32_t(-over_block(0, -int64_t(most)).least);
    if (threadIdx.x >= 32) return;
    const double total = add_by_warp(int32_t(list.count), [&](int32_t i) { return parts.sums[i]; });
    if (threadIdx.x != 0) return;
    dsopt_norm_result r{};
    r.nonfinite = found.sum;
    r.first_bad = found.least == INT64_MAX ? -1 : found.least;
    const double value = kind == DSOPT_NORM_MAX ? double(float_of(most)) : total;
    if (raw)
        r.norm = value; // ranks add theirs before the root is taken
    else
        finish_norm(r, kind, value, max_norm);
    *result = r;
}

} // namespace dsopt::gpu
