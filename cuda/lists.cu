// SPDX-License-Identifier: Apache-2.0
// Lists without an optimizer. Tensors are passed in kernel arguments, which needs no allocation. Norms have the list in
// device memory, because their last block reads the whole list.
#include "kernels.h"
#include "reduce.cuh"

namespace dsopt::gpu {

/// A list in device memory, partitioned into leaves.
struct DeviceList {
    const dsopt_tensor *x;
    const int64_t *first_leaf; // count + 1 entries
    int64_t count;
    int64_t leaves;
};

/// Up to N tensors of a list, or N pairs of tensors of two lists, passed by value to a kernel.
template <int N> struct ListBatch {
    int64_t first_leaf[N + 1]; // prefix sums of leaf counts
    void *x[N];
    void *y[N]; // the same as x for operations on one list
    int64_t numel[N];
    Dtype x_type[N], y_type[N];
    int32_t count;
    int64_t leaves() const { return first_leaf[count]; }
};
// Short lists use the small batch, because a launch copies its arguments. The large batch is below the limit of 32,764
// bytes of kernel arguments.
constexpr int kFewTensors = 16, kManyTensors = 512;
static_assert(sizeof(ListBatch<kManyTensors>) < 20000);

/// A tensor of a batch, or a pair.
struct ListTensor {
    Slot x, y;
};

/// Calls body(Width<V>, tensor, i) for the leaves of a batch that belong to this block: V neighbours of a tensor, from
/// element i on.
template <int N, class Body>
__device__ __forceinline__ void for_list_packs(const ListBatch<N> &list, const Body &body) {
    // In the search each thread reads a different entry, for which kernel arguments (constant memory) are slow.
    __shared__ int64_t first_leaf[N + 1];
    for (int i = int(threadIdx.x); i <= list.count; i += kThreads) first_leaf[i] = list.first_leaf[i];
    __syncthreads();
    for (int64_t leaf = blockIdx.x; leaf < first_leaf[list.count]; leaf += gridDim.x) {
        const int32_t tensor = find_range(first_leaf, list.count, leaf);
        const ListTensor pair{{list.x[tensor], list.x_type[tensor]}, {list.y[tensor], list.y_type[tensor]}};
        const Leaf where(list.numel[tensor], leaf - first_leaf[tensor]);
        for_packs(where.n, all_aligned(pair.x.data, pair.y.data),
                  [&](auto width, int i) INLINED { body(width, pair, where.begin + i); });
    }
}

template <int N>
__global__ void __launch_bounds__(kThreads) zero_kernel(GRID_CONSTANT const PdlArgument<ListBatch<N>> argument) {
    const ListBatch<N> &list = argument.begin_kernel();
    for_list_packs(list,
                   [&]<int V>(Width<V>, const ListTensor &pair, int64_t i) INLINED { store(Pack<V>{}, pair.y, i); });
}

/// The factor of x is *factor or, if `factor` is NULL, `value`.
template <int N>
__global__ void __launch_bounds__(kThreads) axpby_kernel(GRID_CONSTANT const PdlArgument<ListBatch<N>> argument,
                                                         const float *factor, const float value, const float b) {
    const ListBatch<N> &list = argument.begin_kernel();
    const float a = factor != nullptr ? *factor : value;
    for_list_packs(list, [&]<int V>(Width<V>, const ListTensor &pair, int64_t i) INLINED {
        Pack<V> v = fetch<V>(pair.x, i), old{};
        if (b != 0) old = fetch<V>(pair.y, i);
        v = convert_to_f32(v, pair.x.format);
        old = convert_to_f32(old, pair.y.format);
        unrolled<V>([&](int k) INLINED { v.at[k] = b != 0 ? a * v.at[k] + b * old.at[k] : a * v.at[k]; });
        store(v, pair.y, i);
    });
}

/// Sums rows in order. Each thread has the elements of all rows, in any dtype.
template <int N>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(GRID_CONSTANT const PdlArgument<ListBatch<N>> argument, const SumRows rows) {
    const ListBatch<N> &list = argument.begin_kernel();
    for_list_packs(list, [&]<int V>(Width<V>, const ListTensor &pair, int64_t i) INLINED {
        Pack<V> sum = load<V>(pair.x, i);
        Slot next = pair.x;
        for (int row = 1; row < rows.count; ++row) {
            next.data = static_cast<char *>(next.data) + rows.stride;
            const Pack<V> x = load<V>(next, i);
            unrolled<V>([&](int k) INLINED { sum.at[k] += x.at[k]; });
        }
        unrolled<V>([&](int k) INLINED { sum.at[k] *= rows.share; });
        store(sum, pair.y, i);
    });
}

__device__ __forceinline__ float clamped(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}
template <int N>
__global__ void __launch_bounds__(kThreads)
    clamp_kernel(GRID_CONSTANT const PdlArgument<ListBatch<N>> argument, const float limit) {
    const ListBatch<N> &list = argument.begin_kernel();
    for_list_packs(list, [&]<int V>(Width<V>, const ListTensor &pair, int64_t i) INLINED {
        Pack<V> v = load<V>(pair.y, i);
        unrolled<V>([&](int k) INLINED { v.at[k] = clamped(v.at[k], limit); });
        store(v, pair.y, i);
    });
}

/// Writes the norm of a list without elements.
__global__ void no_norm_kernel(const PdlArgument<dsopt_norm_result *> argument) {
    dsopt_norm_result *const result = argument.begin_kernel();
    *result = {.norm = 0, .coefficient = 1, .reserved = 0, .nonfinite = 0, .first_bad = -1};
}

template <int N>
__global__ void __launch_bounds__(kThreads) copy_kernel(GRID_CONSTANT const PdlArgument<ListBatch<N>> argument) {
    const ListBatch<N> &list = argument.begin_kernel();
    for_list_packs(list, [&]<int V>(Width<V>, const ListTensor &pair, int64_t i)
                             INLINED { store_fetched(fetch<V>(pair.x, i), pair.y, i); });
}

/// Partial results of dsopt_tensors_norm, one entry per leaf.
struct NormParts {
    double *squares;
    int64_t *bad;
    float *largest;
    double *sums; // one per tensor
    uint32_t *ticket;
};

__global__ void __launch_bounds__(kThreads, 4)
    norm_kernel(GRID_CONSTANT const PdlArgument<DeviceList> argument, const NormParts parts, const int32_t kind,
                const bool raw, const double max_norm, dsopt_norm_result *result) {
    const DeviceList &list = argument.begin_kernel();
    const int lane = int(threadIdx.x % 32);
    for (int64_t leaf = grid_warp(); leaf < list.leaves; leaf += grid_warps()) {
        const int64_t i = find_range(list.first_leaf, list.count, leaf);
        const dsopt_tensor &x = list.x[i];
        const auto [begin, n] = Leaf(x.numel, leaf - list.first_leaf[i]);
        const double squares = leaf_squares(slot_of(x), begin, n);
        const int64_t bad = is_finite(squares) ? 0 : leaf_nonfinite(slot_of(x), begin, n);
        uint32_t largest = 0; // magnitudes are compared as integers, in which NaNs are the largest
        if (kind == DSOPT_NORM_MAX) {
            for (int k = lane; k < n; k += 32)
                largest = larger_factor(largest, bits_of(load<1>(slot_of(x), begin + k).at[0]) & 0x7fffffffu);
            largest = largest_of_lanes(largest);
        }
        if (lane == 0) {
            parts.squares[leaf] = squares;
            parts.bad[leaf] = bad & 0xffff;
            parts.largest[leaf] = float_of(largest);
        }
    }
    if (!last_block(parts.ticket)) return;
    NonFinite found;
    for_tensors(
        int32_t(list.count), [&](int32_t i) INLINED { return int32_t(list.first_leaf[i + 1] - list.first_leaf[i]); },
        [&](int32_t i, int32_t leaves, auto fold) INLINED {
            const double sum = fold.sum(parts.squares + list.first_leaf[i], leaves);
            if (fold.lead) parts.sums[i] = sum;
            const int64_t *bad = parts.bad + list.first_leaf[i];
            const int64_t bad_count =
                is_finite(sum) ? 0 : fold.sum_counts(leaves, [&](int32_t leaf) INLINED { return bad[leaf]; });
            found.add(i, fold.lead ? bad_count : 0, false);
        });
    uint32_t largest = 0;
    for (int64_t leaf = threadIdx.x; kind == DSOPT_NORM_MAX && leaf < list.leaves; leaf += kThreads)
        largest = larger_factor(largest, bits_of(parts.largest[leaf]));
    found = over_block(found); // includes a barrier
    __syncthreads();
    largest = uint32_t(-over_block(NonFinite{0, -int64_t(largest)}).first);
    if (threadIdx.x >= 32) return;
    const double total = add_by_warp(int32_t(list.count), [&](int32_t i) INLINED { return parts.sums[i]; });
    if (threadIdx.x != 0) return;
    *result = norm_result(kind, raw, total, double(float_of(largest)), found, max_norm);
}

template <int N, class Launch>
void in_batches_of(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, const Launch &launch) {
    ListBatch<N> batch;
    batch.count = 0;
    batch.first_leaf[0] = 0;
    const auto flush = [&] {
        if (batch.count != 0) launch(batch);
        batch.count = 0;
    };
    for (int64_t i = 0; i < count; ++i) {
        if (x[i].data == nullptr || y[i].data == nullptr || x[i].numel == 0) continue;
        const int32_t index = batch.count++;
        batch.first_leaf[index + 1] = batch.first_leaf[index] + leaves_of(x[i].numel);
        batch.x[index] = x[i].data;
        batch.y[index] = y[i].data;
        batch.numel[index] = x[i].numel;
        batch.x_type[index] = Dtype(x[i].dtype);
        batch.y_type[index] = Dtype(y[i].dtype);
        if (batch.count == N) flush();
    }
    flush();
}
/// Calls launch(batch) for the tensors that have data in both lists, in batches that fit in kernel arguments.
template <class Launch>
void in_batches(const dsopt_tensor *x, const dsopt_tensor *y, int64_t count, const Launch &launch) {
    if (count <= kFewTensors) return in_batches_of<kFewTensors>(x, y, count, launch);
    in_batches_of<kManyTensors>(x, y, count, launch);
}

template <int N> void launch(const Zero &, const Launcher &launcher, const ListBatch<N> &batch) {
    launcher.launch_grid(batch.leaves(), "zero", zero_kernel<N>, batch);
}
template <int N> void launch(const Axpby &op, const Launcher &launcher, const ListBatch<N> &batch) {
    launcher.launch_grid(batch.leaves(), "axpby", axpby_kernel<N>, batch, op.a.data, op.a.value, op.b);
}
template <int N> void launch(const Clamp &op, const Launcher &launcher, const ListBatch<N> &batch) {
    launcher.launch_grid(batch.leaves(), "clamp", clamp_kernel<N>, batch, op.limit);
}
template <int N> void launch(const Copy &, const Launcher &launcher, const ListBatch<N> &batch) {
    launcher.launch_grid(batch.leaves(), "copy", copy_kernel<N>, batch);
}
template <int N> void launch(const SumRows &op, const Launcher &launcher, const ListBatch<N> &batch) {
    launcher.launch_grid(batch.leaves(), "sum_rows", sum_rows_kernel<N>, batch, op);
}
void for_elements(const ElementOp &op, const dsopt_tensor *x, const dsopt_tensor *y, int64_t count,
                  const Launcher &launcher) {
    std::visit(
        [&](const auto &operation) {
            in_batches(x, y, count, [&](const auto &batch) { launch(operation, launcher, batch); });
        },
        op);
}
/// Memory of a list's norm: the list, which is uploaded, and the results of leaves and tensors.
struct NormMemory {
    int64_t *first_leaf;
    dsopt_tensor *tensors;
    NormParts parts;
    size_t image, bytes;

    /// `memory` NULL: only computes the bytes.
    NormMemory(void *memory, int64_t count, int64_t leaves) {
        Arena arena(memory);
        arena.take(first_leaf, count + 1);
        arena.take(tensors, count);
        image = arena.bytes();
        arena.take(parts.squares, leaves);
        arena.take(parts.bad, leaves);
        arena.take(parts.largest, leaves);
        arena.take(parts.sums, count);
        arena.take(parts.ticket, 1);
        bytes = arena.bytes();
    }
};

void norm(const dsopt_tensor *list, int64_t count, int32_t kind, double max_norm, bool raw, dsopt_norm_result *result,
          const Launcher &launcher) {
    int64_t leaves = 0;
    for (int64_t i = 0; i < count; ++i) leaves += list[i].data != nullptr ? leaves_of(list[i].numel) : 0;
    if (leaves == 0) return launcher.launch_thread("no_norm", no_norm_kernel, result);
    const size_t bytes = NormMemory(nullptr, count, leaves).bytes;
    const Scratch scratch(launcher.device.scratch, bytes, launcher.stream);
    const NormMemory memory(scratch.get(), count, leaves);
    launcher.upload(scratch.get(), memory.image, [&](char *to) {
        const NormMemory image(to, count, leaves);
        for (int64_t i = 0; i < count; ++i)
            image.first_leaf[i + 1] = image.first_leaf[i] + (list[i].data != nullptr ? leaves_of(list[i].numel) : 0);
        std::memcpy(image.tensors, list, size_t(count) * sizeof *list);
    });
    const DeviceList device_list{memory.tensors, memory.first_leaf, count, leaves};
    const NormParts &parts = memory.parts;
    launcher.fill(parts.ticket, 0, sizeof *parts.ticket);
    launcher.launch_grid(leaves / kWarps + 1, "norm", norm_kernel, device_list, parts, kind, raw, max_norm, result);
}

void load_list_kernels(KernelLoader &load) {
    load(zero_kernel<kFewTensors>, zero_kernel<kManyTensors>, axpby_kernel<kFewTensors>, axpby_kernel<kManyTensors>,
         clamp_kernel<kFewTensors>, clamp_kernel<kManyTensors>, copy_kernel<kFewTensors>, copy_kernel<kManyTensors>,
         sum_rows_kernel<kFewTensors>, sum_rows_kernel<kManyTensors>, no_norm_kernel, norm_kernel);
}

} // namespace dsopt::gpu
