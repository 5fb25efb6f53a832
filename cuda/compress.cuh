// SPDX-License-Identifier: Apache-2.0
// 1-bit compression with error feedback, compress.h: the kept sums of a rank to rows of bits, rows of all ranks to a
// row of results, results back to values. A block has a leaf at a time, in shared memory, so that it is summed up in
// the order that is part of the result and read once.
#pragma once
#include "base/sizes.h"
#include "device/compress.h"
#include "fold.cuh"
#include "lists.cuh"
#include "rules/onebit.h"
#include <cstring>

namespace dsopt::gpu {

/// A CompressLayout in device memory. Parts, and segments of the own chunk, are cut into leaves like tensors.
struct DeviceLayout {
    const CompressLayout::Unit *units;
    const CompressLayout::Part *parts;
    const CompressLayout::Segment *segments;
    const int64_t *part_leaf, *segment_leaf; // running numbers, one more than there are
    const int32_t *first_part, *slots;       // of every chunk: its scales in a row are those of that many parts
    int64_t row_bytes, row_scales, worker_numel, server_numel;
    int32_t part_count, segment_count, ranks, rank;

    __device__ __forceinline__ int64_t part_leaves() const { return part_leaf[part_count]; }
    __device__ __forceinline__ int64_t segment_leaves() const { return segment_leaf[segment_count]; }
};

/// ExchangeBuffers as kernels see them.
struct DeviceExchange {
    DeviceLayout layout, all; // in two levels the own slice, and the whole list; otherwise the same
    float *worker, *server;
    const int32_t *active, *own_active; // of the list, of the worker's elements
    float *message, *slices;            // two levels
    const float *values;                // the mean itself, where nothing is compressed
    int64_t slice;
    int32_t node_ranks;
    char *send, *recv, *result, *results;
    double *sums;
    int32_t *counts;
    const int32_t *skip; // NULL, or where it says that nothing is to change

    __device__ __forceinline__ bool skipped() const { return skip != nullptr && *skip != 0; }
    __device__ __forceinline__ float *worker_scales() const { return worker + layout.worker_numel; }
    __device__ __forceinline__ float *server_scales() const { return server + layout.server_numel; }
    __device__ __forceinline__ char *row(char *rows, int64_t index) const { return rows + index * layout.row_bytes; }
    __device__ __forceinline__ static float *scales(char *row) { return reinterpret_cast<float *>(row); }
    __device__ __forceinline__ uint8_t *bits(char *row) const {
        return reinterpret_cast<uint8_t *>(row) + layout.row_scales * 4;
    }
};

/// By one warp: how many of a stretch take part. It begins at a whole word.
__device__ __forceinline__ int32_t count_active(const int32_t *active, int64_t begin, int n) {
    if (active == nullptr) return n;
    int32_t count = 0;
    for (int at = int(threadIdx.x % 32) * 32; at < n; at += 32 * 32) {
        const uint32_t word = active_from(active, begin + at);
        count += __popc(n - at < 32 ? word & ((1u << (n - at)) - 1) : word);
    }
    for (int width = 16; width != 0; width /= 2) count += __shfl_xor_sync(0xffffffffu, count, width);
    return count;
}

/// Where an element of a unit is: its chunk, and its place there. Neighbours are found without dividing again.
struct InChunk {
    int64_t chunk, at;
    __device__ __forceinline__ InChunk(const CompressLayout::Unit &unit, int64_t worker) :
        chunk((worker - unit.begin) / unit.chunk),
        at(worker - unit.begin - chunk * unit.chunk) {}
    __device__ __forceinline__ void move(const CompressLayout::Unit &unit, int64_t by) {
        for (at += by; at >= unit.chunk; at -= unit.chunk) ++chunk;
    }
};

/// The leaf of kept sums in `room`, which begins at `worker`: its bits to the rows, its sum of squares and the number
/// of those that take part to place `leaf`. For a whole block, between barriers.
__device__ inline void pack_room(const DeviceExchange &x, int32_t part, int64_t worker, int n, const float *room,
                                 int64_t leaf) {
    const CompressLayout::Unit unit = x.layout.units[x.layout.parts[part].unit];
    const int warp = int(threadIdx.x / 32), lane = int(threadIdx.x % 32);
    const InChunk first(unit, worker);
    for (int begin = warp * 32; begin < n; begin += kThreads) {
        // Most significant bit first; bits behind the end are 1.
        const unsigned word = __ballot_sync(0xffffffffu, begin + lane >= n || !(room[begin + lane] < 0));
        if (lane >= 4 || begin + lane * 8 >= n) continue;
        InChunk place = first;
        place.move(unit, begin + lane * 8); // chunks begin at whole bytes
        x.bits(x.row(x.send, place.chunk))[(unit.server + place.at) / 8] = uint8_t(__brev(word >> (lane * 8) << 24));
    }
    if (warp == 0) {
        const double sum = fold_lanes(add_squares(room, n, 0));
        if (lane == 0) x.sums[leaf] = sum;
    } else if (warp == 1) {
        const int32_t count = count_active(x.own_active, worker, n);
        if (lane == 0) x.counts[leaf] = count;
    }
}

/// body(part, begin, n, leaf) for every leaf of the block's share of the parts.
template <class Body> __device__ __forceinline__ void for_part_leaves(const DeviceLayout &layout, const Body &body) {
    const int64_t leaves = layout.part_leaves();
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t part = find_stretch(layout.part_leaf, layout.part_count, leaf);
        const int64_t begin = (leaf - layout.part_leaf[part]) * kLeaf, rest = layout.parts[part].numel - begin;
        body(part, begin, int(rest < kLeaf ? rest : kLeaf), leaf);
    }
}

/// Kept sums that are there already.
__global__ void __launch_bounds__(kThreads) pack_kernel(const DeviceExchange x) {
    __shared__ float room[kLeaf];
    if (x.skipped()) return;
    for_part_leaves(x.layout, [&](int32_t part, int64_t begin, int n, int64_t leaf) {
        const int64_t worker = x.layout.parts[part].begin + begin;
        __syncthreads();
        for (int k = int(threadIdx.x); k < n; k += kThreads) room[k] = x.worker[worker + k];
        __syncthreads();
        pack_room(x, part, worker, n, room, leaf);
    });
}

/// A list, a tensor a part, to kept sums and rows.
__global__ void __launch_bounds__(kThreads) feed_list_kernel(const DeviceExchange x, const dsopt_tensor *list) {
    __shared__ float room[kLeaf];
    for_part_leaves(x.layout, [&](int32_t part, int64_t begin, int n, int64_t leaf) {
        const int64_t worker = x.layout.parts[part].begin + begin;
        const float scale = x.worker_scales()[part];
        const float *values = static_cast<const float *>(list[part].data);
        float *kept = x.worker + worker;
        const int64_t left = list[part].numel - begin; // the rest is padding
        const int real = left < 0 ? 0 : left < n ? int(left) : n;
        const bool vector = aligned16(kept) && aligned16(values);
        __syncthreads();
        const int whole = vector ? real / 4 * 4 : 0;
        for (int k = int(threadIdx.x) * 4; k < whole; k += kThreads * 4) {
            const Pack<4> value = load<4>(values, Dtype::f32, begin + k, true);
            Pack<4> sum = load<4>(kept, Dtype::f32, k, true);
#pragma unroll
            for (int j = 0; j < 4; ++j) room[k + j] = sum.at[j] = value.at[j] + error_of(sum.at[j], scale);
            store(sum, kept, Dtype::f32, k, true);
        }
        for (int k = whole + int(threadIdx.x); k < n; k += kThreads) {
            const float owed = error_of(kept[k], scale);
            room[k] = kept[k] = k < real ? values[begin + k] + owed : owed;
        }
        __syncthreads();
        pack_room(x, part, worker, n, room, leaf);
    });
}

/// The scale of what leaves [begin, end) hold, by a warp; in all of its lanes.
__device__ __forceinline__ float scale_of(const DeviceExchange &x, int64_t begin, int64_t end) {
    const ByWarp by{threadIdx.x % 32 == 0};
    const double sum = by.sum(x.sums + begin, int32_t(end - begin));
    return rms_of(sum, by.number(int32_t(end - begin), [&](int32_t leaf) { return int64_t(x.counts[begin + leaf]); }));
}

/// Scales of all parts, to where they are kept and to the rows of the chunks in which the part has elements.
__global__ void __launch_bounds__(kThreads, 4) row_scales_kernel(const DeviceExchange x) {
    const DeviceLayout &layout = x.layout;
    if (x.skipped()) return;
    const int lane = int(threadIdx.x % 32);
    for (int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; i < layout.part_count;
         i += int64_t(gridDim.x) * kWarps) {
        const float scale = scale_of(x, layout.part_leaf[i], layout.part_leaf[i + 1]);
        if (lane == 0) x.worker_scales()[i] = scale;
        const CompressLayout::Part part = layout.parts[i];
        if (part.numel == 0) continue;
        const CompressLayout::Unit unit = layout.units[part.unit];
        const int64_t first = InChunk(unit, part.begin).chunk, last = InChunk(unit, part.begin + part.numel - 1).chunk;
        for (int64_t d = first + lane; d <= last; d += 32)
            DeviceExchange::scales(x.row(x.send, d))[i - layout.first_part[d]] = scale;
    }
    // Places in rows that no part has.
    const int64_t cells = layout.row_scales * layout.ranks;
    for (int64_t cell = int64_t(blockIdx.x) * kThreads + threadIdx.x; cell < cells;
         cell += int64_t(gridDim.x) * kThreads) {
        const int64_t d = cell / layout.row_scales, slot = cell - d * layout.row_scales;
        if (slot >= layout.slots[d] || layout.parts[layout.first_part[d] + slot].numel == 0)
            DeviceExchange::scales(x.row(x.send, d))[slot] = 0;
    }
}

/// The own chunk: the mean of what all ranks sent, in rank order, and what is owed, to the kept sums and the bits of
/// the result. A thread has eight elements, a byte of every row.
__global__ void __launch_bounds__(kThreads) serve_kernel(const DeviceExchange x) {
    __shared__ float room[kLeaf];
    const DeviceLayout &layout = x.layout;
    if (x.skipped()) return;
    const int64_t leaves = layout.segment_leaves();
    const float share = 1.0f / float(layout.ranks);
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t i = find_stretch(layout.segment_leaf, layout.segment_count, leaf);
        const CompressLayout::Segment segment = layout.segments[i];
        const int64_t begin = (leaf - layout.segment_leaf[i]) * kLeaf, rest = segment.numel - begin;
        const int n = int(rest < kLeaf ? rest : kLeaf);
        const int64_t slot = segment.part - layout.first_part[layout.rank];
        const float scale = x.server_scales()[slot];
        float *kept = x.server + segment.server + begin;
        const int64_t byte = (segment.server + begin) / 8;
        const bool vector = aligned16(kept);
        __syncthreads();
        for (int k = int(threadIdx.x) * 8; k < n; k += kThreads * 8) {
            Pack<8> sum{};
            for (int rank = 0; rank < layout.ranks; ++rank) {
                char *row = x.row(x.recv, rank);
                const unsigned bits = x.bits(row)[byte + k / 8];
                const float value = DeviceExchange::scales(row)[slot] * share;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float signed_value = (bits >> (7 - j)) & 1u ? value : -value;
                    sum.at[j] = rank == 0 ? signed_value : sum.at[j] + signed_value;
                }
            }
            const int here = n - k < 8 ? n - k : 8;
            Pack<8> old{};
            if (here == 8)
                old = load<8>(kept, Dtype::f32, k, vector);
            else
                for (int j = 0; j < here; ++j) old.at[j] = kept[k + j];
            const uint32_t active = active_from(x.own_active, segment.begin + begin + k);
            unsigned result = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float value = sum.at[j] + error_of(old.at[j], scale);
                old.at[j] = j < here && ((active >> j) & 1u) ? value : 0.0f;
                result |= unsigned(j >= here || !(old.at[j] < 0)) << (7 - j);
                if (j < here) room[k + j] = old.at[j];
            }
            if (here == 8)
                store(old, kept, Dtype::f32, k, vector);
            else
                for (int j = 0; j < here; ++j) kept[k + j] = old.at[j];
            x.bits(x.result)[byte + k / 8] = uint8_t(result);
        }
        __syncthreads();
        const int warp = int(threadIdx.x / 32);
        if (warp == 0) {
            const double sum = fold_lanes(add_squares(room, n, 0));
            if (threadIdx.x == 0) x.sums[leaf] = sum;
        } else if (warp == 1) {
            const int32_t count = count_active(x.own_active, segment.begin + begin, n);
            if (threadIdx.x % 32 == 0) x.counts[leaf] = count;
        }
    }
}

__global__ void __launch_bounds__(kThreads, 4) result_scales_kernel(const DeviceExchange x) {
    const DeviceLayout &layout = x.layout;
    if (x.skipped()) return;
    float *row = DeviceExchange::scales(x.result);
    const int32_t first = layout.first_part[layout.rank];
    for (int32_t i = int32_t(blockIdx.x) * kWarps + int32_t(threadIdx.x / 32); i < layout.segment_count;
         i += int32_t(gridDim.x) * kWarps) {
        const float scale = scale_of(x, layout.segment_leaf[i], layout.segment_leaf[i + 1]);
        if (threadIdx.x % 32 != 0) continue;
        const int32_t slot = layout.segments[i].part - first;
        x.server_scales()[slot] = scale;
        row[slot] = scale;
    }
    for (int64_t slot = int64_t(blockIdx.x) * kThreads + threadIdx.x; slot < layout.row_scales;
         slot += int64_t(gridDim.x) * kThreads)
        if (slot >= layout.slots[layout.rank] || layout.parts[first + slot].numel == 0) row[slot] = 0;
}

/// The mean of V neighbours of a part, from rows of results. For V = 4 or 8 their bits are in one byte.
template <int V>
__device__ __forceinline__ Pack<V> mean_at(const DeviceExchange &x, char *rows, int32_t part,
                                           const CompressLayout::Unit &unit, const InChunk &place) {
    char *row = x.row(rows, place.chunk);
    const float scale = DeviceExchange::scales(row)[part - x.all.first_part[place.chunk]];
    const int64_t bit = unit.server + place.at;
    const unsigned bits = unsigned(x.bits(row)[bit / 8]) << (bit % 8);
    Pack<V> y;
#pragma unroll
    for (int k = 0; k < V; ++k) y.at[k] = (bits >> (7 - k)) & 1u ? scale : -scale;
    return y;
}
template <int V>
__device__ __forceinline__ Pack<V> mean_of(const DeviceExchange &x, char *rows, int32_t part, int64_t worker) {
    if (x.values != nullptr) return load<V>(x.values, Dtype::f32, worker, aligned16(x.values));
    const CompressLayout::Unit &unit = x.all.units[x.all.parts[part].unit];
    return mean_at<V>(x, rows, part, unit, InChunk(unit, worker));
}

__global__ void __launch_bounds__(kThreads) decode_kernel(const DeviceExchange x, const dsopt_tensor *list) {
    for_part_leaves(x.all, [&](int32_t part, int64_t begin, int n, int64_t) {
        const int64_t worker = x.all.parts[part].begin + begin, left = list[part].numel - begin;
        const int real = left < 0 ? 0 : left < n ? int(left) : n;
        void *to = list[part].data;
        const bool vector = aligned16(to);
        const CompressLayout::Unit unit = x.all.units[x.all.parts[part].unit];
        const InChunk first(unit, worker);
        const auto value = [&](auto width, int k) {
            constexpr int W = decltype(width)::value;
            InChunk place = first;
            place.move(unit, k);
            Pack<W> y = x.values != nullptr ? load<W>(x.values, Dtype::f32, worker + k, aligned16(x.values))
                                            : mean_at<W>(x, x.results, part, unit, place);
            const uint32_t active = active_from(x.active, worker + k);
#pragma unroll
            for (int j = 0; j < W; ++j) y.at[j] = (active >> j) & 1u ? y.at[j] : 0.0f;
            return y;
        };
        for (int k = int(threadIdx.x) * 8; k + 8 <= real; k += kThreads * 8)
            store(value(std::integral_constant<int, 8>{}, k), to, Dtype::f32, begin + k, vector);
        for (int k = real / 8 * 8 + int(threadIdx.x); k < real; k += kThreads)
            store_one(value(std::integral_constant<int, 1>{}, k).at[0], to, Dtype::f32, begin + k);
    });
}

/// Two levels: zeros between tensors of the message, and behind the last one.
__global__ void __launch_bounds__(kThreads) clear_gaps_kernel(const DeviceExchange x) {
    const DeviceLayout &layout = x.all;
    const int64_t threads = int64_t(gridDim.x) * kThreads, own = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    for (int64_t i = own; i + 1 < layout.part_count; i += threads)
        for (int64_t k = layout.parts[i].begin + layout.parts[i].numel; k < layout.parts[i + 1].begin; ++k)
            x.message[k] = 0;
    const CompressLayout::Part last = layout.parts[layout.part_count - 1];
    for (int64_t k = last.begin + last.numel + own; k < layout.worker_numel; k += threads) x.message[k] = 0;
}

/// A list to the message.
__global__ void __launch_bounds__(kThreads) fill_message_kernel(const DeviceExchange x, const dsopt_tensor *list) {
    for_part_leaves(x.all, [&](int32_t part, int64_t begin, int n, int64_t) {
        const float *values = static_cast<const float *>(list[part].data) + begin;
        float *to = x.message + x.all.parts[part].begin + begin;
        for (int k = int(threadIdx.x); k < n; k += kThreads) to[k] = values[k];
    });
}

/// V neighbours of the own slice: the mean of what the ranks of the node sent, in rank order.
template <int V> __device__ __forceinline__ Pack<V> mean_of_slices(const DeviceExchange &x, int64_t i) {
    const float share = 1.0f / float(x.node_ranks);
    const bool vector = aligned16(x.slices); // slices are multiples of 32 elements
    Pack<V> sum = load<V>(x.slices, Dtype::f32, i, vector);
    for (int rank = 1; rank < x.node_ranks; ++rank) {
        const Pack<V> other = load<V>(x.slices + rank * x.slice, Dtype::f32, i, vector);
#pragma unroll
        for (int k = 0; k < V; ++k) sum.at[k] += other.at[k];
    }
#pragma unroll
    for (int k = 0; k < V; ++k) sum.at[k] *= share;
    return sum;
}

/// That mean and what is owed to the kept sums, and their bits to the rows.
__global__ void __launch_bounds__(kThreads) feed_slice_kernel(const DeviceExchange x) {
    __shared__ float room[kLeaf];
    if (x.skipped()) return;
    for_part_leaves(x.layout, [&](int32_t part, int64_t begin, int n, int64_t leaf) {
        const int64_t worker = x.layout.parts[part].begin + begin; // a multiple of 32
        const float scale = x.worker_scales()[part];
        const bool vector = aligned16(x.worker);
        __syncthreads();
        const auto take = [&](auto width, int k) {
            constexpr int W = decltype(width)::value;
            const Pack<W> mean = mean_of_slices<W>(x, worker + k);
            Pack<W> sum = load<W>(x.worker, Dtype::f32, worker + k, vector);
            const uint32_t active = active_from(x.own_active, worker + k);
#pragma unroll
            for (int j = 0; j < W; ++j) {
                const float value = mean.at[j] + error_of(sum.at[j], scale);
                room[k + j] = sum.at[j] = (active >> j) & 1u ? value : 0.0f;
            }
            store(sum, x.worker, Dtype::f32, worker + k, vector);
        };
        for (int k = int(threadIdx.x) * 4; k + 4 <= n; k += kThreads * 4) take(std::integral_constant<int, 4>{}, k);
        for (int k = n / 4 * 4 + int(threadIdx.x); k < n; k += kThreads) take(std::integral_constant<int, 1>{}, k);
        __syncthreads();
        pack_room(x, part, worker, n, room, leaf);
    });
}

/// One node: the mean is all, and goes to the first of the slices.
__global__ void __launch_bounds__(kThreads) mean_slice_kernel(const DeviceExchange x) {
    const bool vector = aligned16(x.slices);
    for (int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4; i < x.slice;
         i += int64_t(gridDim.x) * kThreads * 4)
        store(mean_of_slices<4>(x, i), x.slices, Dtype::f32, i, vector);
}

/// A layout as bytes for the device, and where its parts are in them.
class LayoutImage {
public:
    /// In two levels of the slice, with the whole list's behind it.
    static size_t bytes(const CompressLayout &layout) {
        return Places(layout).bytes + (layout.has_levels() ? Places(*layout.whole).bytes : 0);
    }
    static void write(const CompressLayout &layout, char *to) {
        const Places at(layout);
        std::memset(to, 0, at.bytes);
        const auto put = [&](size_t place, const auto &values) {
            if (!values.empty()) std::memcpy(to + place, values.data(), values.size() * sizeof values[0]);
        };
        put(at.units, layout.units);
        put(at.parts, layout.parts);
        put(at.segments, layout.own_segments());
        put(at.part_leaf, layout.part_leaf);
        put(at.segment_leaf, layout.segment_leaf);
        put(at.first_part, layout.first_part);
        std::vector<int32_t> slots;
        for (const auto &segments : layout.chunks)
            slots.push_back(segments.empty() ? 0 : segments.back().part - segments.front().part + 1);
        slots.resize(layout.first_part.size());
        put(at.slots, slots);
        if (layout.has_levels()) write(*layout.whole, to + at.bytes);
    }
    static DeviceLayout view_all(const CompressLayout &layout, const void *memory) {
        return layout.has_levels() ? view(*layout.whole, static_cast<const char *>(memory) + Places(layout).bytes)
                                   : view(layout, memory);
    }
    static DeviceLayout view(const CompressLayout &layout, const void *memory) {
        const Places at(layout);
        const char *base = static_cast<const char *>(memory);
        return {.units = reinterpret_cast<const CompressLayout::Unit *>(base + at.units),
                .parts = reinterpret_cast<const CompressLayout::Part *>(base + at.parts),
                .segments = reinterpret_cast<const CompressLayout::Segment *>(base + at.segments),
                .part_leaf = reinterpret_cast<const int64_t *>(base + at.part_leaf),
                .segment_leaf = reinterpret_cast<const int64_t *>(base + at.segment_leaf),
                .first_part = reinterpret_cast<const int32_t *>(base + at.first_part),
                .slots = reinterpret_cast<const int32_t *>(base + at.slots),
                .row_bytes = layout.row_bytes(),
                .row_scales = layout.row_scales,
                .worker_numel = layout.worker_numel,
                .server_numel = layout.server_numel,
                .part_count = int32_t(layout.parts.size()),
                .segment_count = int32_t(layout.own_segments().size()),
                .ranks = layout.ranks,
                .rank = layout.rank};
    }

private:
    struct Places {
        size_t units, parts, segments, part_leaf, segment_leaf, first_part, slots, bytes;
        explicit Places(const CompressLayout &layout) {
            size_t at = 0;
            const auto place = [&](size_t size) {
                const size_t offset = at;
                at += round_up(size);
                return offset;
            };
            units = place(layout.units.size() * sizeof(CompressLayout::Unit));
            parts = place(layout.parts.size() * sizeof(CompressLayout::Part));
            segments = place(layout.own_segments().size() * sizeof(CompressLayout::Segment));
            part_leaf = place(layout.part_leaf.size() * sizeof(int64_t));
            segment_leaf = place(layout.segment_leaf.size() * sizeof(int64_t));
            first_part = place(layout.first_part.size() * sizeof(int32_t));
            slots = place(layout.first_part.size() * sizeof(int32_t));
            bytes = at;
        }
    };
};

} // namespace dsopt::gpu
