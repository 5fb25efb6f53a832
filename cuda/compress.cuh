// SPDX-License-Identifier: Apache-2.0
// 1-bit compression with error feedback, compress.h: the kept sums of a rank to rows of bits, rows of all ranks to a
// row of results, results back to values. A block has a leaf at a time, in shared memory, so that it is summed up in
// the order that is part of the result and read once.
#pragma once
#include "device/compress.h"
#include "launcher.cuh"
#include "lists.cuh"

namespace dsopt::gpu {

/// A CompressLayout in device memory. Parts, and segments of the own chunk, are cut into leaves like tensors.
struct DeviceLayout {
    const CompressLayout::Unit *units;
    const CompressLayout::Part *parts;
    const CompressLayout::Segment *segments;
    const int64_t *part_leaf, *segment_leaf; // running numbers, one more than there are
    const int32_t *first_part, *slots;       // of every chunk: its scales in a row are those of that many parts
    int64_t row_bytes, row_scales, worker_numel, server_numel, slice;
    int32_t part_count, segment_count, ranks, rank, node_ranks;
};

/// ExchangeBuffers as kernels see them: `layout` is the host's, and what they need of it is in device memory.
struct DeviceExchange : ExchangeBuffers {
    DeviceLayout own, all;        // in two levels the own slice, and the whole list; otherwise the same
    const int32_t *worker_active; // `active` of the worker's elements
    const float *values;          // the mean itself, where nothing is compressed

    __device__ __forceinline__ bool skipped() const { return skip != nullptr && *skip != 0; }
    __device__ __forceinline__ float *worker_scales() const { return worker + own.worker_numel; }
    __device__ __forceinline__ float *server_scales() const { return server + own.server_numel; }
    __device__ __forceinline__ char *row(char *rows, int64_t index) const { return rows + index * own.row_bytes; }
    __device__ __forceinline__ static float *scales(char *row) { return reinterpret_cast<float *>(row); }
    __device__ __forceinline__ uint8_t *bits(char *row) const {
        return reinterpret_cast<uint8_t *>(row) + own.row_scales * 4;
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
    return fold_lanes(count);
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

/// What of a leaf of a part is in the tensor; the rest is padding.
__device__ __forceinline__ int real_elements(const dsopt_tensor &tensor, const Leaf &leaf) {
    const int64_t left = tensor.numel - leaf.begin;
    return left < 0 ? 0 : left < leaf.n ? int(left) : leaf.n;
}

constexpr int kTurns = 2;
/// Two leaves in shared memory, in turns. The squares of a leaf are added by one warp, in 32 chains that cannot be split
/// without another order of additions. So the other warps go on to the next leaf meanwhile, and the warps take turns at
/// adding. Whoever passes a barrier behind filling a tile knows that the adder of the other one is done: it filled, too.
struct TileTurns {
    float *at;
    int turn = 0;
    __device__ __forceinline__ float *tile() const { return at + turn % kTurns * kLeaf; }
    __device__ __forceinline__ bool has_turn(int offset) const {
        return int(threadIdx.x / 32) == (turn + offset) % kWarps;
    }
};
/// The sum of squares of the leaf in the tile, whose first element is the `begin`-th of the own ones, and the number of
/// those that take part, by two warps.
__device__ __forceinline__ void sum_leaf(const DeviceExchange &x, const TileTurns &turns, int64_t begin, int n,
                                         int64_t leaf) {
    const bool lead = threadIdx.x % 32 == 0;
    if (turns.has_turn(0)) {
        const double sum = fold_lanes(add_squares(turns.tile(), n));
        if (lead) x.sums[leaf] = sum;
    } else if (turns.has_turn(kWarps / 2)) {
        const int32_t count = count_active(x.worker_active, begin, n);
        if (lead) x.counts[leaf] = count;
    }
}

/// write(i, bits) by one thread for each 32 of the n signs in `tile` from the i-th one on: a byte for eight of them,
/// most significant bit first, the first byte lowest. Bits behind the end are 1. A warp has 512 neighbours, and lane l
/// the l-th 32 of them, so that all are written at once.
template <class Write> __device__ __forceinline__ void pack_signs(const float *tile, int n, const Write &write) {
    constexpr int words = int(kLeaf) / kThreads; // a warp
    const int lane = int(threadIdx.x % 32), begin = int(threadIdx.x / 32) * words * 32;
    unsigned own = 0;
    for (int k = 0; k < words && begin + k * 32 < n; ++k) {
        const int i = begin + k * 32 + lane;
        const unsigned word = __ballot_sync(0xffffffffu, i >= n || !(tile[i] < 0));
        if (lane == k) own = __byte_perm(__brev(word), 0, 0x0123);
    }
    if (lane < words && begin + lane * 32 < n) write(begin + lane * 32, own);
}
/// Bytes of such a word that hold any of `n` signs, at once where that is possible.
__device__ __forceinline__ void write_signs(uint8_t *to, unsigned bits, int n) {
    if (n >= 32 && reinterpret_cast<uintptr_t>(to) % 4 == 0)
        *reinterpret_cast<uint32_t *>(to) = bits;
    else
        for (int k = 0; k < 4 && k * 8 < n; ++k) to[k] = uint8_t(bits >> (8 * k));
}

/// The leaf of kept sums in the tile, which begins at `worker`: its signs to the rows, its sums to where those of `leaf`
/// are. For a whole block; the other tile is next.
__device__ inline void pack_leaf(const DeviceExchange &x, int32_t part, int64_t worker, int n, TileTurns &turns,
                                 int64_t leaf) {
    __syncthreads();
    const CompressLayout::Unit unit = x.own.units[x.own.parts[part].unit];
    pack_signs(turns.tile(), n, [&](int i, unsigned bits) INLINED {
        InChunk where(unit, worker + i);
        const bool whole = where.at + 32 <= unit.chunk; // chunks begin at whole bytes
        for (int k = 0; k < 32 && i + k < n; k += 8, where.move(unit, 8)) {
            uint8_t *const to = x.bits(x.row(x.send, where.chunk)) + (unit.server + where.at) / 8;
            if (whole) return write_signs(to, bits, n - i);
            write_signs(to, bits >> k, 8);
        }
    });
    sum_leaf(x, turns, worker, n, leaf);
    ++turns.turn;
}

/// body(part, where, leaf) for every leaf of the block's share of the parts.
template <class Body> __device__ __forceinline__ void for_part_leaves(const DeviceLayout &layout, const Body &body) {
    const int64_t leaves = layout.part_leaf[layout.part_count];
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t part = find_stretch(layout.part_leaf, layout.part_count, leaf);
        body(part, Leaf(layout.parts[part].numel, leaf - layout.part_leaf[part]), leaf);
    }
}

/// fill(part, where, worker, tile) for the block's share of the leaves of the own parts: it puts the kept sums from the
/// `worker`-th on to the tile. Each leaf is then packed.
template <class Fill> __device__ __forceinline__ void pack_parts(const DeviceExchange &x, const Fill &fill) {
    __shared__ float tiles[kTurns * kLeaf];
    TileTurns turns{tiles};
    if (x.skipped()) return;
    for_part_leaves(x.own, [&](int32_t part, const Leaf &where, int64_t leaf) INLINED {
        const int64_t worker = x.own.parts[part].begin + where.begin;
        fill(part, where, worker, turns.tile());
        pack_leaf(x, part, worker, where.n, turns, leaf);
    });
}

/// The kept sums of V neighbours: new values and what is owed. Zero where `active` says that one takes no part.
template <int V>
__device__ __forceinline__ Pack<V> new_sums(const Pack<V> &x, const Pack<V> &kept, float scale, uint32_t active) {
    Pack<V> y;
    unrolled<V>([&](int k) INLINED { y.at[k] = (active >> k) & 1u ? x.at[k] + error_of(kept.at[k], scale) : 0.0f; });
    return y;
}

/// Kept sums that are there already.
__global__ void __launch_bounds__(kThreads) pack_kernel(GRID_CONSTANT const DeviceExchange x) {
    begin_kernel(true);
    pack_parts(x, [&](int32_t, const Leaf &where, int64_t worker, float *tile) INLINED {
        for (int k = int(threadIdx.x); k < where.n; k += kThreads) tile[k] = x.worker[worker + k];
    });
}

/// A list, a tensor a part, to kept sums and rows.
__global__ void __launch_bounds__(kThreads)
    feed_list_kernel(GRID_CONSTANT const DeviceExchange x, const dsopt_tensor *list) {
    begin_kernel(true);
    pack_parts(x, [&](int32_t part, const Leaf &where, int64_t worker, float *tile) INLINED {
        const float scale = x.worker_scales()[part];
        const float *values = static_cast<const float *>(list[part].data);
        const int real = real_elements(list[part], where);
        for_packs(real, all_aligned(values, x.worker), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> value = load<V>(values, where.begin + i);
            const Pack<V> sum = new_sums(value, load<V>(x.worker, worker + i), scale, ~0u);
            to_tile(sum, tile + i);
            store(sum, x.worker, worker + i);
        });
        for (int i = real + int(threadIdx.x); i < where.n; i += kThreads)
            tile[i] = x.worker[worker + i] = error_of(x.worker[worker + i], scale);
    });
}

/// The scale of what leaves [begin, end) hold, by a warp; in all of its lanes.
__device__ __forceinline__ float scale_of(const DeviceExchange &x, int64_t begin, int64_t end) {
    const LeafFold<true> by{threadIdx.x % 32 == 0};
    const double sum = by.sum(x.sums + begin, int32_t(end - begin));
    return rms_of(
        sum, by.number(int32_t(end - begin), [&](int32_t leaf) INLINED { return int64_t(x.counts[begin + leaf]); }));
}

/// Scales of all parts, to where they are kept and to the rows of the chunks in which the part has elements.
__global__ void __launch_bounds__(kThreads, 4) row_scales_kernel(GRID_CONSTANT const DeviceExchange x) {
    begin_kernel();
    const DeviceLayout &layout = x.own;
    if (x.skipped()) return;
    const int lane = int(threadIdx.x % 32);
    for (int64_t i = grid_warp(); i < layout.part_count; i += grid_warps()) {
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
    for (int64_t cell = grid_thread(); cell < cells; cell += grid_threads()) {
        const int64_t d = cell / layout.row_scales, slot = cell - d * layout.row_scales;
        if (slot >= layout.slots[d] || layout.parts[layout.first_part[d] + slot].numel == 0)
            DeviceExchange::scales(x.row(x.send, d))[slot] = 0;
    }
}

constexpr int kRanksAtOnce = 8; // whose bits serve_kernel asks for side by side, as far as there are registers

/// The own chunk: the mean of what all ranks sent, in rank order, and what is owed, to the kept sums and the bits of
/// the result.
__global__ void __launch_bounds__(kThreads) serve_kernel(GRID_CONSTANT const DeviceExchange x) {
    begin_kernel(true);
    __shared__ float tiles[kTurns * kLeaf];
    TileTurns turns{tiles};
    const DeviceLayout &layout = x.own;
    if (x.skipped()) return;
    const float share = 1.0f / float(layout.ranks);
    const int64_t leaves = layout.segment_leaf[layout.segment_count];
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t index = find_stretch(layout.segment_leaf, layout.segment_count, leaf);
        const CompressLayout::Segment segment = layout.segments[index];
        const Leaf where(segment.numel, leaf - layout.segment_leaf[index]);
        const int64_t slot = segment.part - layout.first_part[layout.rank], server = segment.server + where.begin;
        const float scale = x.server_scales()[slot];
        float *const tile = turns.tile();
        for_packs(where.n, all_aligned(x.server), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> old = load<V>(x.server, server + i);
            Pack<V> sum{};
            const uint8_t *bits_at = x.bits(x.recv) + (server + i) / 8;
            const char *scale_at = x.recv + slot * 4;
            for (int first = 0; first < layout.ranks; first += kRanksAtOnce) {
                unsigned bits[kRanksAtOnce];
                float values[kRanksAtOnce];
                unrolled<kRanksAtOnce>([&](int r) INLINED {
                    bits[r] = *bits_at;
                    values[r] = *reinterpret_cast<const float *>(scale_at);
                    // The last rank is read again in place of those that are not there: no load waits for a branch.
                    const int64_t next = first + r + 1 < layout.ranks ? layout.row_bytes : 0;
                    bits_at += next;
                    scale_at += next;
                });
                unrolled<kRanksAtOnce>([&](int r) INLINED {
                    const bool there = first + r < layout.ranks;
                    const float value = values[r] * share;
                    unrolled<V>([&](int k) INLINED {
                        const float signed_value = (bits[r] << (i % 8) >> (7 - k)) & 1u ? value : -value;
                        const float added = first + r == 0 ? signed_value : sum.at[k] + signed_value;
                        sum.at[k] = there ? added : sum.at[k];
                    });
                });
            }
            const uint32_t active = active_from(x.worker_active, segment.begin + where.begin + i);
            sum = new_sums(sum, old, scale, active);
            to_tile(sum, tile + i);
            store(sum, x.server, server + i);
        });
        __syncthreads();
        pack_signs(tile, where.n, [&](int i, unsigned bits) INLINED {
            write_signs(x.bits(x.result) + (server + i) / 8, bits, where.n - i);
        });
        sum_leaf(x, turns, segment.begin + where.begin, where.n, leaf);
        ++turns.turn;
    }
}

__global__ void __launch_bounds__(kThreads, 4) result_scales_kernel(GRID_CONSTANT const DeviceExchange x) {
    begin_kernel();
    const DeviceLayout &layout = x.own;
    if (x.skipped()) return;
    float *row = DeviceExchange::scales(x.result);
    const int32_t first = layout.first_part[layout.rank];
    for (int64_t i = grid_warp(); i < layout.segment_count; i += grid_warps()) {
        const float scale = scale_of(x, layout.segment_leaf[i], layout.segment_leaf[i + 1]);
        if (threadIdx.x % 32 != 0) continue;
        const int32_t slot = layout.segments[i].part - first;
        x.server_scales()[slot] = scale;
        row[slot] = scale;
    }
    for (int64_t slot = grid_thread(); slot < layout.row_scales; slot += grid_threads())
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
    unrolled<V>([&](int k) INLINED { y.at[k] = (bits >> (7 - k)) & 1u ? scale : -scale; });
    return y;
}
template <int V>
__device__ __forceinline__ Pack<V> mean_of(const DeviceExchange &x, char *rows, int32_t part, int64_t worker) {
    if (x.values != nullptr) return load<V>(x.values, worker);
    const CompressLayout::Unit &unit = x.all.units[x.all.parts[part].unit];
    return mean_at<V>(x, rows, part, unit, InChunk(unit, worker));
}

__global__ void __launch_bounds__(kThreads)
    decode_kernel(GRID_CONSTANT const DeviceExchange x, const dsopt_tensor *list) {
    begin_kernel();
    for_part_leaves(x.all, [&](int32_t part, const Leaf &leaf, int64_t) INLINED {
        const int64_t worker = x.all.parts[part].begin + leaf.begin;
        const CompressLayout::Unit unit = x.all.units[x.all.parts[part].unit];
        const InChunk first(unit, worker);
        const int real = real_elements(list[part], leaf);
        for_packs(real, all_aligned(list[part].data, x.values), [&]<int V>(Width<V>, int i) INLINED {
            InChunk where = first;
            where.move(unit, i);
            Pack<V> y =
                x.values != nullptr ? load<V>(x.values, worker + i) : mean_at<V>(x, x.results, part, unit, where);
            const uint32_t active = active_from(x.active, worker + i);
            unrolled<V>([&](int k) INLINED { y.at[k] = (active >> k) & 1u ? y.at[k] : 0.0f; });
            store(y, static_cast<float *>(list[part].data), leaf.begin + i);
        });
    });
}

/// Two levels: zeros between tensors of the message, and behind the last one.
__global__ void __launch_bounds__(kThreads) clear_gaps_kernel(GRID_CONSTANT const DeviceExchange x) {
    begin_kernel();
    const DeviceLayout &layout = x.all;
    for (int64_t i = grid_thread(); i + 1 < layout.part_count; i += grid_threads())
        for (int64_t k = layout.parts[i].begin + layout.parts[i].numel; k < layout.parts[i + 1].begin; ++k)
            x.message[k] = 0;
    const CompressLayout::Part last = layout.parts[layout.part_count - 1];
    for (int64_t k = last.begin + last.numel + grid_thread(); k < layout.worker_numel; k += grid_threads())
        x.message[k] = 0;
}

/// A list to the message.
__global__ void __launch_bounds__(kThreads)
    fill_message_kernel(GRID_CONSTANT const DeviceExchange x, const dsopt_tensor *list) {
    begin_kernel();
    for_part_leaves(x.all, [&](int32_t part, const Leaf &where, int64_t) INLINED {
        const float *values = static_cast<const float *>(list[part].data) + where.begin;
        float *to = x.message + x.all.parts[part].begin + where.begin;
        for (int k = int(threadIdx.x); k < where.n; k += kThreads) to[k] = values[k];
    });
}

/// V neighbours of the own slice: the mean of what the ranks of the node sent, in rank order.
template <int V> __device__ __forceinline__ Pack<V> mean_of_slices(const DeviceExchange &x, int64_t i) {
    const float share = 1.0f / float(x.own.node_ranks);
    Pack<V> sum = load<V>(x.slices, i);
    for (int rank = 1; rank < x.own.node_ranks; ++rank) {
        const Pack<V> other = load<V>(x.slices + rank * x.own.slice, i); // slices are multiples of 32 elements
        unrolled<V>([&](int k) INLINED { sum.at[k] += other.at[k]; });
    }
    unrolled<V>([&](int k) INLINED { sum.at[k] *= share; });
    return sum;
}

/// That mean and what is owed to the kept sums, and their bits to the rows.
__global__ void __launch_bounds__(kThreads) feed_slice_kernel(GRID_CONSTANT const DeviceExchange x) {
    begin_kernel(true);
    pack_parts(x, [&](int32_t part, const Leaf &where, int64_t worker, float *tile) INLINED {
        const float scale = x.worker_scales()[part];
        for_packs(where.n, all_aligned(x.slices, x.worker), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> mean = mean_of_slices<V>(x, worker + i);
            const uint32_t active = active_from(x.worker_active, worker + i); // `worker`: a multiple of 32
            const Pack<V> sum = new_sums(mean, load<V>(x.worker, worker + i), scale, active);
            to_tile(sum, tile + i);
            store(sum, x.worker, worker + i);
        });
    });
}

/// One node: the mean is all, and goes to the first of the slices.
__global__ void __launch_bounds__(kThreads) mean_slice_kernel(GRID_CONSTANT const DeviceExchange x) {
    begin_kernel();
    for (int64_t i = grid_thread() * 4; i < x.own.slice; i += grid_threads() * 4)
        store(mean_of_slices<4>(x, i), x.slices, i);
}

/// A layout as bytes for the device, each array on its own line. In two levels the slice's, with the whole list's
/// behind it.
class LayoutImage {
public:
    static size_t bytes(const CompressLayout &layout) {
        return own_bytes(layout) + (layout.has_levels() ? own_bytes(*layout.whole) : 0);
    }
    /// To memory that is zero.
    static void write(const CompressLayout &layout, char *to) {
        const size_t own = for_arrays(layout, [&](auto, const auto &array, size_t at) {
            if (!array.empty()) std::memcpy(to + at, array.data(), array.size() * sizeof array[0]);
        });
        if (layout.has_levels()) write(*layout.whole, to + own);
    }
    static DeviceLayout view(const CompressLayout &layout, const void *memory) {
        DeviceLayout view{.row_bytes = layout.row_bytes(),
                          .row_scales = layout.row_scales,
                          .worker_numel = layout.worker_numel,
                          .server_numel = layout.server_numel,
                          .slice = layout.slice,
                          .part_count = int32_t(layout.parts.size()),
                          .segment_count = int32_t(layout.own_segments().size()),
                          .ranks = layout.ranks,
                          .rank = layout.rank,
                          .node_ranks = layout.node_ranks};
        for_arrays(layout, [&](auto member, const auto &array, size_t at) {
            view.*member = reinterpret_cast<decltype(array.data())>(static_cast<const char *>(memory) + at);
        });
        return view;
    }
    static DeviceLayout view_all(const CompressLayout &layout, const void *memory) {
        return layout.has_levels() ? view(*layout.whole, static_cast<const char *>(memory) + own_bytes(layout))
                                   : view(layout, memory);
    }

private:
    /// visit(member of DeviceLayout, vector, where its bytes begin). Returns the bytes of all.
    template <class Visit> static size_t for_arrays(const CompressLayout &layout, const Visit &visit) {
        Offsets offsets;
        const auto each = [&](auto member, const auto &array) {
            visit(member, array, offsets.add(array.size() * sizeof array[0]));
        };
        each(&DeviceLayout::units, layout.units);
        each(&DeviceLayout::parts, layout.parts);
        each(&DeviceLayout::segments, layout.own_segments());
        each(&DeviceLayout::part_leaf, layout.part_leaf);
        each(&DeviceLayout::segment_leaf, layout.segment_leaf);
        each(&DeviceLayout::first_part, layout.first_part);
        each(&DeviceLayout::slots, layout.slots);
        return offsets.bytes();
    }
    static size_t own_bytes(const CompressLayout &layout) {
        return for_arrays(layout, [](auto, const auto &, size_t) {});
    }
};

/// `table`: the layout in device memory, as LayoutImage has it.
inline DeviceExchange device_exchange(const ExchangeBuffers &buffers, const void *table) {
    const CompressLayout &layout = *buffers.layout;
    return {buffers, LayoutImage::view(layout, table), LayoutImage::view_all(layout, table), buffers.own_active(),
            layout.is_exact() ? buffers.message : nullptr};
}

// Which kernels run, in which order. Lists are in device memory.

/// Bits between tensors are 1, too.
inline void clear_rows(char *rows, int64_t bytes, const Launcher &launcher) {
    launcher.fill(rows, 0xff, size_t(bytes));
}
inline void end_rows(const DeviceExchange &x, const Launcher &launcher) {
    launcher.over(x.own.part_count / kWarps + 1, "row_scales", row_scales_kernel, x);
}
inline void clear_gaps(const DeviceExchange &x, const Launcher &launcher) {
    if (x.all.part_count != 0) launcher.over(x.all.part_count / kThreads + 1, "clear_gaps", clear_gaps_kernel, x);
}
/// To rows, or with two levels to the message.
inline void feed_list(const DeviceExchange &x, const Launcher &launcher, const dsopt_tensor *list) {
    if (x.layout->has_levels()) {
        clear_gaps(x, launcher);
        return launcher.over(x.layout->whole->part_leaf.back(), "fill_message", fill_message_kernel, x, list);
    }
    clear_rows(x.send, x.layout->rows_bytes(), launcher);
    launcher.over(x.layout->part_leaf.back(), "feed_list", feed_list_kernel, x, list);
    end_rows(x, launcher);
}
/// What the ranks of the node sent to the own slice of the mean, and that to rows.
inline void feed_slice(const DeviceExchange &x, const Launcher &launcher, const dsopt_tensor *) {
    if (x.layout->is_exact())
        return launcher.over(x.own.slice / (kThreads * 4) + 1, "mean_slice", mean_slice_kernel, x);
    clear_rows(x.send, x.layout->rows_bytes(), launcher);
    launcher.over(x.layout->part_leaf.back(), "feed_slice", feed_slice_kernel, x);
    end_rows(x, launcher);
}
inline void serve_rows(const DeviceExchange &x, const Launcher &launcher, const dsopt_tensor *) {
    clear_rows(x.result, x.own.row_bytes, launcher);
    launcher.over(x.layout->segment_leaf.back(), "serve", serve_kernel, x);
    launcher.over(x.own.segment_count / kWarps + 1, "result_scales", result_scales_kernel, x);
}
inline void decode_list(const DeviceExchange &x, const Launcher &launcher, const dsopt_tensor *list) {
    launcher.over(x.layout->all().part_leaf.back(), "decode", decode_kernel, x, list);
}

} // namespace dsopt::gpu
