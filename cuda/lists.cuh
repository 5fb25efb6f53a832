// SPDX-License-Identifier: Apache-2.0
// Lists without an optimizer. Tensors travel in kernel arguments, which allocates nothing; norms alone, whose last block
// reads the whole list, have it in device memory.
#pragma once
#include "reduce.cuh"

namespace dsopt::gpu {

/// A list in device memory, cut into leaves like everything else.
struct DeviceList {
    const dsopt_tensor *x;
    const int64_t *first_leaf; // count + 1
    int64_t count;
    int64_t leaves;
};

/// Up to N tensors of a list, or pairs of two lists, by value into a kernel.
template <int N> struct ListBatch {
    int64_t first_leaf[N + 1]; // running numbers
    void *x[N];
    void *y[N]; // the same memory as x where there is one list
    int64_t numel[N];
    Dtype x_type[N], y_type[N];
    int32_t count;
    int64_t leaves() const { return first_leaf[count]; }
};
// Short lists take the small one, because a launch copies its arguments. The large one is below the 32,764 bytes that a
// kernel may take.
constexpr int kFewTensors = 16, kManyTensors = 512;
static_assert(sizeof(ListBatch<kManyTensors>) < 20000);

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

/// A tensor of a batch, or a pair.
struct ListTensor {
    Slot x, y;
};

/// body(Width<V>, tensor, i) for the block's share of a batch's elements, V neighbours from the i-th one of a tensor on.
template <int N, class Body>
__device__ __forceinline__ void for_list_packs(const ListBatch<N> &list, const Body &body) {
    // The search reads another number in each thread, for which arguments are slow.
    __shared__ int64_t first_leaf[N + 1];
    for (int i = int(threadIdx.x); i <= list.count; i += kThreads) first_leaf[i] = list.first_leaf[i];
    __syncthreads();
    for (int64_t leaf = blockIdx.x; leaf < first_leaf[list.count]; leaf += gridDim.x) {
        const int32_t tensor = find_stretch(first_leaf, list.count, leaf);
        const ListTensor at{{list.x[tensor], list.x_type[tensor]}, {list.y[tensor], list.y_type[tensor]}};
        const Leaf where(list.numel[tensor], leaf - first_leaf[tensor]);
        for_packs(where.n, all_aligned(at.x.data, at.y.data),
                  [&](auto width, int i) INLINED { body(width, at, where.begin + i); });
    }
}

template <int N> __global__ void __launch_bounds__(kThreads) zero_kernel(GRID_CONSTANT const ListBatch<N> list) {
    begin_kernel();
    for_list_packs(list, [&]<int V>(Width<V>, const ListTensor &at, int64_t i) INLINED { store(Pack<V>{}, at.y, i); });
}

/// The factor of x is at `factor`, or else `value`.
template <int N>
__global__ void __launch_bounds__(kThreads)
    axpby_kernel(GRID_CONSTANT const ListBatch<N> list, const float *factor, const float value, const float b) {
    begin_kernel();
    const float a = factor != nullptr ? *factor : value;
    for_list_packs(list, [&]<int V>(Width<V>, const ListTensor &at, int64_t i) INLINED {
        Pack<V> v = fetch<V>(at.x, i), old{};
        if (b != 0) old = fetch<V>(at.y, i);
        v = widen(v, at.x.format);
        old = widen(old, at.y.format);
        unrolled<V>([&](int k) INLINED { v.at[k] = b != 0 ? a * v.at[k] + b * old.at[k] : a * v.at[k]; });
        store(v, at.y, i);
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
template <int N>
__global__ void __launch_bounds__(kThreads) clamp_kernel(GRID_CONSTANT const ListBatch<N> list, const float limit) {
    begin_kernel();
    for_list_packs(list, [&]<int V>(Width<V>, const ListTensor &at, int64_t i) INLINED {
        Pack<V> v = load<V>(at.y, i);
        unrolled<V>([&](int k) INLINED { v.at[k] = clamped(v.at[k], limit); });
        store(v, at.y, i);
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
    norm_kernel(GRID_CONSTANT const DeviceList list, const NormParts parts, const int32_t kind, const bool raw,
                const double max_norm, dsopt_norm_result *result) {
    begin_kernel();
    __shared__ __align__(16) float tiles[kWarps][kTile];
    const int lane = int(threadIdx.x % 32);
    for (int64_t leaf = grid_warp(); leaf < list.leaves; leaf += grid_warps()) {
        const int64_t i = find_stretch(list.first_leaf, list.count, leaf);
        const dsopt_tensor &x = list.x[i];
        const auto [begin, n] = Leaf(x.numel, leaf - list.first_leaf[i]);
        const double squares = leaf_squares(slot_of(x), begin, n, tiles[threadIdx.x / 32]);
        const int64_t bad = is_finite(squares) ? 0 : leaf_nonfinite(slot_of(x), begin, n);
        uint32_t most = 0; // magnitudes compare as integers, and a NaN is above them all
        if (kind == DSOPT_NORM_MAX) {
            for (int k = lane; k < n; k += 32)
                most = larger_factor(most, bits_of(load<1>(slot_of(x), begin + k).at[0]) & 0x7fffffffu);
            most = largest_of_lanes(most);
        }
        if (lane == 0) {
            parts.squares[leaf] = squares;
            parts.bad[leaf] = bad & 0xffff;
            parts.largest[leaf] = float_of(most);
        }
    }
    if (!last_block(parts.ticket)) return;
    NonFinite found;
    for_tensors(
        int32_t(list.count), [&](int32_t i) INLINED { return int32_t(list.first_leaf[i + 1] - list.first_leaf[i]); },
        [&](int32_t i, int32_t leaves, auto by) INLINED {
            const double sum = by.sum(parts.squares + list.first_leaf[i], leaves);
            if (by.lead) parts.sums[i] = sum;
            const int64_t *bad = parts.bad + list.first_leaf[i];
            const int64_t here =
                is_finite(sum) ? 0 : by.number(leaves, [&](int32_t leaf) INLINED { return bad[leaf]; });
            found.add(i, by.lead ? here : 0, false);
        });
    uint32_t most = 0;
    for (int64_t leaf = threadIdx.x; kind == DSOPT_NORM_MAX && leaf < list.leaves; leaf += kThreads)
        most = larger_factor(most, bits_of(parts.largest[leaf]));
    found = over_block(found); // a barrier too
    __syncthreads();
    most = uint32_t(-over_block(NonFinite{0, -int64_t(most)}).first);
    if (threadIdx.x >= 32) return;
    const double total = add_by_warp(int32_t(list.count), [&](int32_t i) INLINED { return parts.sums[i]; });
    if (threadIdx.x != 0) return;
    *result = norm_result(kind, raw, total, double(float_of(most)), found, max_norm);
}

} // namespace dsopt::gpu
