// SPDX-License-Identifier: Apache-2.0
// Lists without an optimizer: one launch for all tensors.
#pragma once
#include "reduce.cuh"

namespace dsopt::gpu {

/// A list in device memory, cut into leaves like everything else.
struct DeviceList {
    const dsopt_tensor *x, *y; // the same where there is one list only
    const int64_t *first_leaf; // count + 1
    int64_t count;
    int64_t leaves;
};

/// A list as kernels take it. One tensor travels in the arguments: nothing is allocated or uploaded for it.
struct ListArgument {
    DeviceList list; // without pointers: of the one that follows
    dsopt_tensor x, y;
    int64_t first_leaf[2];
    __device__ __forceinline__ DeviceList view() const {
        return list.x != nullptr ? list : DeviceList{&x, &y, first_leaf, 1, first_leaf[1]};
    }
};

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

/// body(Width<V>, x, y, i) for the block's share of a list's elements, V neighbours from the i-th one of a tensor on.
template <class Body> __device__ __forceinline__ void for_list_packs(const ListArgument &argument, const Body &body) {
    const DeviceList list = argument.view();
    for (int64_t leaf = blockIdx.x; leaf < list.leaves; leaf += gridDim.x) {
        const int64_t tensor = find_stretch(list.first_leaf, list.count, leaf);
        const dsopt_tensor x = list.x[tensor], y = list.y[tensor];
        const Leaf where(x.numel, leaf - list.first_leaf[tensor]);
        for_packs(where.n, all_aligned(x.data, y.data),
                  [&](auto width, int i) INLINED { body(width, x, y, where.begin + i); });
    }
}

__global__ void __launch_bounds__(kThreads) zero_kernel(GRID_CONSTANT const ListArgument list) {
    begin_kernel();
    for_list_packs(list, [&]<int V>(Width<V>, const dsopt_tensor &x, const dsopt_tensor &, int64_t i)
                             INLINED { store(Pack<V>{}, x.data, Dtype(x.dtype), i); });
}

/// The factor of x is at `factor`, or else `value`.
__global__ void __launch_bounds__(kThreads)
    axpby_kernel(GRID_CONSTANT const ListArgument list, const float *factor, const float value, const float b) {
    begin_kernel();
    const float a = factor != nullptr ? *factor : value;
    for_list_packs(list, [&]<int V>(Width<V>, const dsopt_tensor &x, const dsopt_tensor &y, int64_t i) INLINED {
        Pack<V> v = fetch<V>(x.data, Dtype(x.dtype), i), old{};
        if (b != 0) old = fetch<V>(y.data, Dtype(y.dtype), i);
        v = widen(v, Dtype(x.dtype));
        old = widen(old, Dtype(y.dtype));
        unrolled<V>([&](int k) INLINED { v.at[k] = b != 0 ? a * v.at[k] + b * old.at[k] : a * v.at[k]; });
        store(v, y.data, Dtype(y.dtype), i);
    });
}

/// y may be the first of the rows.
__global__ void __launch_bounds__(kThreads)
    add_up_rows_kernel(const float *rows, const int64_t stride, const int count, const int64_t n, float *y) {
    begin_kernel();
    for (int64_t i = grid_thread(); i < n; i += grid_threads()) {
        float sum = rows[i];
        for (int row = 1; row < count; ++row) sum += rows[row * stride + i];
        y[i] = sum;
    }
}

__device__ __forceinline__ float clamped(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}
__global__ void __launch_bounds__(kThreads) clamp_kernel(GRID_CONSTANT const ListArgument list, const float limit) {
    begin_kernel();
    for_list_packs(list, [&]<int V>(Width<V>, const dsopt_tensor &x, const dsopt_tensor &, int64_t i) INLINED {
        Pack<V> v = load<V>(x.data, Dtype(x.dtype), i);
        unrolled<V>([&](int k) INLINED { v.at[k] = clamped(v.at[k], limit); });
        store(v, x.data, Dtype(x.dtype), i);
    });
}

/// The norm of nothing, until there is more.
__global__ void no_norm_kernel(dsopt_norm_result *result) {
    begin_kernel();
    *result = {.norm = 0, .coefficient = 1, .reserved = 0, .nonfinite = 0, .first_bad = -1};
}

/// Partial results of dsopt_tensors_norm, one a leaf.
struct NormParts {
    double *squares;
    int64_t *bad;
    float *largest;
    double *sums; // one a tensor
    uint32_t *ticket;
};

__global__ void __launch_bounds__(kThreads, 3)
    norm_kernel(GRID_CONSTANT const ListArgument argument, const NormParts parts, const int32_t kind, const bool raw,
                const double max_norm, dsopt_norm_result *result) {
    begin_kernel();
    const DeviceList list = argument.view();
    __shared__ __align__(16) float tiles[kWarps][kTile];
    const int lane = int(threadIdx.x % 32);
    for (int64_t leaf = grid_warp(); leaf < list.leaves; leaf += grid_warps()) {
        const int64_t i = find_stretch(list.first_leaf, list.count, leaf);
        const dsopt_tensor &x = list.x[i];
        const auto [begin, n] = Leaf(x.numel, leaf - list.first_leaf[i]);
        const double squares = leaf_squares(x.data, Dtype(x.dtype), begin, n, tiles[threadIdx.x / 32]);
        const int64_t bad = is_finite(squares) ? 0 : leaf_nonfinite(x.data, Dtype(x.dtype), begin, n);
        uint32_t most = 0; // magnitudes compare as integers, and a NaN is above them all
        if (kind == DSOPT_NORM_MAX) {
            for (int k = lane; k < n; k += 32)
                most = larger_factor(most, bits_of(load<1>(x.data, Dtype(x.dtype), begin + k).at[0]) & 0x7fffffffu);
            most = largest_of_lanes(most);
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
        int32_t(list.count), [&](int32_t i) INLINED { return int32_t(list.first_leaf[i + 1] - list.first_leaf[i]); },
        [&](int32_t i, int32_t leaves, auto by) INLINED {
            const double sum = by.sum(parts.squares + list.first_leaf[i], leaves);
            if (by.lead) parts.sums[i] = sum;
            const int64_t *bad = parts.bad + list.first_leaf[i];
            const int64_t here =
                is_finite(sum) ? 0 : by.number(leaves, [&](int32_t leaf) INLINED { return bad[leaf]; });
            if (here != 0 && i < first) first = i;
            if (by.lead) nonfinite += here;
        });
    uint32_t most = 0;
    for (int64_t leaf = threadIdx.x; kind == DSOPT_NORM_MAX && leaf < list.leaves; leaf += kThreads)
        most = larger_factor(most, bits_of(parts.largest[leaf]));
    const BlockResult found = over_block(nonfinite, first); // a barrier too
    __syncthreads();
    most = uint32_t(-over_block(0, -int64_t(most)).least);
    if (threadIdx.x >= 32) return;
    const double total = add_by_warp(int32_t(list.count), [&](int32_t i) INLINED { return parts.sums[i]; });
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
