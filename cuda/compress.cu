// SPDX-License-Identifier: Apache-2.0
// Kernels of 1-bit compression with error feedback, device/compress.h. They compress a rank's compensated values to
// messages, reduce the messages of all ranks to a result, and decompress results.
#include "compress.cuh"
#include "kernels.h"

namespace dsopt::gpu {

/// Packs compensated values that are already complete.
__global__ void __launch_bounds__(kThreads, kBlocks)
    pack_values_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument) {
    const Exchange &exchange = argument.begin_kernel();
    pack_groups(exchange.local, [&](int32_t, const Leaf &where, int64_t worker, float *tile) INLINED {
        for (int k = int(threadIdx.x); k < where.n; k += kThreads) tile[k] = exchange.local.worker[worker + k];
    });
}

/// Adds a list, one tensor per scale group, to the residual, and packs the compensated values into messages.
__global__ void __launch_bounds__(kThreads, kBlocks)
    pack_list_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument, const dsopt_tensor *list) {
    const Exchange &exchange = argument.begin_kernel();
    const Compression &local = exchange.local;
    pack_groups(local, [&](int32_t group, const Leaf &where, int64_t worker, float *tile) INLINED {
        const float scale = local.worker_scales()[group];
        const float *values = static_cast<const float *>(list[group].data);
        float *const compensated = local.worker + worker;
        const int real = unpadded_elements(list[group], where);
        for_packs(real, all_aligned(values, compensated), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> value = load<V>(values, where.begin + i);
            const Pack<V> sum = compensate(value, load<V>(compensated, i), scale, ~0u);
            to_tile(sum, tile + i);
            store(sum, compensated, i);
        });
        for (int i = real + int(threadIdx.x); i < where.n; i += kThreads)
            tile[i] = compensated[i] = error_of(compensated[i], scale);
    });
}

/// Returns the scale of leaves [begin, end). Computed by a warp; the result is in all of its lanes.
__device__ __forceinline__ float scale_of(const Compression &local, int64_t begin, int64_t end) {
    const LeafFold<true> fold{threadIdx.x % 32 == 0};
    const double sum = fold.sum(local.sums + begin, int32_t(end - begin));
    return rms_of(sum, fold.sum_counts(int32_t(end - begin),
                                       [&](int32_t leaf) INLINED { return int64_t(local.counts[begin + leaf]); }));
}

/// Computes the scales of all groups. Stores them with the compensated values, and in the messages of the chunks that
/// have elements of the group.
__global__ void __launch_bounds__(kThreads, 4)
    message_scales_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument) {
    const Exchange &exchange = argument.begin_kernel();
    const Compression &local = exchange.local;
    const CompressLayout &layout = local.layout;
    if (local.skipped()) return;
    const int lane = int(threadIdx.x % 32);
    for (int64_t i = grid_warp(); i < layout.group_count; i += grid_warps()) {
        const float scale = scale_of(local, layout.group_leaf[i], layout.group_leaf[i + 1]);
        if (lane == 0) local.worker_scales()[i] = scale;
        const CompressLayout::ScaleGroup group = layout.groups[i];
        if (group.numel == 0) continue;
        const int64_t first = ChunkPosition(group.unit, group.begin).chunk,
                      last = ChunkPosition(group.unit, group.begin + group.numel - 1).chunk;
        for (int64_t d = first + lane; d <= last; d += 32)
            CompressLayout::scales(local.message_to(d))[i - layout.chunks[d].first_group] = scale;
    }
    // Fills the bits and scales of messages that belong to no group. Bits up to the next whole word are those of a leaf.
    for (int64_t i = grid_thread(); layout.whole_words && !layout.has_holes && i + 1 < layout.group_count;
         i += grid_threads()) {
        const CompressLayout::ScaleGroup group = layout.groups[i], next = layout.groups[i + 1];
        const int64_t begin = round_up(group.end(), 32);
        if (next.numel == 0 || begin >= next.begin) continue;
        const ChunkPosition where(group.unit, begin);
        fill_words(layout.bits(local.message_to(where.chunk)), where.offset, where.offset + next.begin - begin);
    }
    for (int64_t d = 0; d < layout.ranks; ++d) {
        const int64_t used = layout.whole_words ? layout.used_numel - d * layout.server_numel : layout.server_numel;
        fill_message(layout, local.message_to(d), used < 0 ? 0 : used, grid_thread(), grid_threads());
    }
    const int64_t cells = layout.message_scales * layout.ranks;
    for (int64_t cell = grid_thread(); cell < cells; cell += grid_threads()) {
        const int64_t d = cell / layout.message_scales, slot = cell - d * layout.message_scales;
        if (slot >= layout.chunks[d].scales || layout.groups[layout.chunks[d].first_group + slot].numel == 0)
            CompressLayout::scales(local.message_to(d))[slot] = 0;
    }
}

// Number of ranks whose bits a thread of reduce_messages_kernel loads at once; limited by registers.
constexpr int kRanksAtOnce = 8;

/// Adds the mean of all ranks' messages, in rank order, to the residual of this rank's chunk; stores the compensated
/// values and packs the result.
__global__ void __launch_bounds__(kThreads, kBlocks)
    reduce_messages_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument) {
    const Exchange &exchange = argument.begin_kernel();
    __shared__ float tile[kLeaf];
    const Compression &local = exchange.local;
    const CompressLayout &layout = local.layout;
    if (local.skipped()) return;
    const float share = 1.0f / float(layout.ranks);
    const int64_t leaves = layout.segment_leaf[layout.segment_count]; // as in for_group_leaves()
    for (int64_t leaf = blockIdx.x; leaf < leaves; leaf += gridDim.x) {
        const int32_t index = find_range(layout.segment_leaf, layout.segment_count, leaf);
        const CompressLayout::Segment segment = layout.segments[index];
        const Leaf where(segment.numel, leaf - layout.segment_leaf[index]);
        const int64_t server = segment.server + where.begin;
        const float scale = local.server_scales()[index];
        for_packs(where.n, all_aligned(local.server), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> old = load<V>(local.server, server + i);
            Pack<V> sum{};
            const uint8_t *bits_of_rank = layout.bits(local.recv) + (server + i) / 8;
            const char *scale_of_rank = local.recv + int64_t(index) * 4;
            for (int first = 0; first < layout.ranks; first += kRanksAtOnce) {
                unsigned bits[kRanksAtOnce];
                float values[kRanksAtOnce];
                unrolled<kRanksAtOnce>([&](int r) INLINED {
                    bits[r] = *bits_of_rank;
                    values[r] = *reinterpret_cast<const float *>(scale_of_rank);
                    // After the last rank, the last rank's bits are loaded again, so that no load depends on a branch.
                    const int64_t next = first + r + 1 < layout.ranks ? layout.message_bytes : 0;
                    bits_of_rank += next;
                    scale_of_rank += next;
                });
                unrolled<kRanksAtOnce>([&](int r) INLINED {
                    const bool exists = first + r < layout.ranks;
                    const float value = values[r] * share;
                    unrolled<V>([&](int k) INLINED {
                        const float signed_value = (bits[r] << (i % 8) >> (7 - k)) & 1u ? value : -value;
                        const float added = first + r == 0 ? signed_value : sum.at[k] + signed_value;
                        sum.at[k] = exists ? added : sum.at[k];
                    });
                });
            }
            const uint32_t active = active_from(local.active, segment.begin + where.begin + i);
            sum = compensate(sum, old, scale, active);
            to_tile(sum, tile + i);
            store(sum, local.server, server + i);
        });
        __syncthreads();
        pack_signs(tile, where.n, [&](int i, unsigned bits) INLINED {
            write_signs(layout.bits(local.result) + (server + i) / 8, bits, int(layout.bits_of_elements(where.n)) - i);
        });
        sum_leaf(local, tile, segment.begin + where.begin, where.n, leaf);
    }
}

__global__ void __launch_bounds__(kThreads, 4)
    result_scales_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument) {
    const Exchange &exchange = argument.begin_kernel();
    const Compression &local = exchange.local;
    const CompressLayout &layout = local.layout;
    if (local.skipped()) return;
    float *const scales = CompressLayout::scales(local.result);
    for (int64_t i = grid_warp(); i < layout.segment_count; i += grid_warps()) {
        const float scale = scale_of(local, layout.segment_leaf[i], layout.segment_leaf[i + 1]);
        if (threadIdx.x % 32 == 0) local.server_scales()[i] = scales[i] = scale;
    }
    for (int64_t i = layout.segment_count + grid_thread(); i < layout.message_scales; i += grid_threads())
        scales[i] = 0;
    for (int64_t i = grid_thread(); layout.whole_words && !layout.has_holes && i + 1 < layout.segment_count;
         i += grid_threads()) {
        const CompressLayout::Segment segment = layout.segments[i], next = layout.segments[i + 1];
        if (next.numel != 0)
            fill_words(layout.bits(local.result), round_up(segment.server + segment.numel, 32), next.server);
    }
    fill_message(layout, local.result, layout.server_used_words(), grid_thread(), grid_threads());
}

__global__ void __launch_bounds__(kThreads)
    decode_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument, const dsopt_tensor *list) {
    const Exchange &exchange = argument.begin_kernel();
    const ListMean &mean = exchange.mean;
    for_group_leaves(mean.layout, [&](int32_t group, const Leaf &leaf, int64_t) INLINED {
        const int64_t worker = mean.layout.groups[group].begin + leaf.begin;
        const CompressLayout::Unit unit = mean.layout.groups[group].unit;
        const ChunkPosition first(unit, worker);
        const int real = unpadded_elements(list[group], leaf);
        for_packs(real, all_aligned(list[group].data, mean.values), [&]<int V>(Width<V>, int i) INLINED {
            ChunkPosition where = first;
            where.move(unit, i);
            Pack<V> y = mean.values != nullptr ? load<V>(mean.values, worker + i)
                                               : mean_at<V>(mean, mean.results, group, unit, where);
            const uint32_t active = active_from(mean.active, worker + i);
            unrolled<V>([&](int k) INLINED { y.at[k] = (active >> k) & 1u ? y.at[k] : 0.0f; });
            store(y, static_cast<float *>(list[group].data), leaf.begin + i);
        });
    });
}

/// Two levels: zeroes the vector between tensors and after the last one.
__global__ void __launch_bounds__(kThreads) clear_gaps_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument) {
    const Exchange &exchange = argument.begin_kernel();
    const CompressLayout &layout = exchange.mean.layout;
    float *const vector = exchange.node.vector;
    for (int64_t i = grid_thread(); i + 1 < layout.group_count; i += grid_threads())
        for (int64_t k = layout.groups[i].begin + layout.groups[i].numel; k < layout.groups[i + 1].begin; ++k)
            vector[k] = 0;
    const CompressLayout::ScaleGroup last = layout.groups[layout.group_count - 1];
    for (int64_t k = last.begin + last.numel + grid_thread(); k < layout.worker_numel; k += grid_threads())
        vector[k] = 0;
}

/// Copies a list to the vector.
__global__ void __launch_bounds__(kThreads)
    copy_list_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument, const dsopt_tensor *list) {
    const Exchange &exchange = argument.begin_kernel();
    for_group_leaves(exchange.mean.layout, [&](int32_t group, const Leaf &where, int64_t) INLINED {
        const float *values = static_cast<const float *>(list[group].data) + where.begin;
        float *to = exchange.node.vector + exchange.mean.layout.groups[group].begin + where.begin;
        for (int k = int(threadIdx.x); k < where.n; k += kThreads) to[k] = values[k];
    });
}

/// Returns the mean, in rank order, of V elements of this rank's slice over the ranks of the node.
template <int V> __device__ __forceinline__ Pack<V> mean_of_slices(const NodeSlices &node, int64_t i) {
    const float share = 1.0f / float(node.ranks);
    Pack<V> sum = load<V>(node.slices, i);
    for (int rank = 1; rank < node.ranks; ++rank) {
        const Pack<V> other = load<V>(node.slices + rank * node.numel, i); // slices are multiples of 32 elements
        unrolled<V>([&](int k) INLINED { sum.at[k] += other.at[k]; });
    }
    unrolled<V>([&](int k) INLINED { sum.at[k] *= share; });
    return sum;
}

/// Adds the mean of slices to the residual, stores the compensated values and packs them into messages.
__global__ void __launch_bounds__(kThreads, 3) pack_slice_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument) {
    const Exchange &exchange = argument.begin_kernel();
    const Compression &local = exchange.local;
    pack_groups(local, [&](int32_t group, const Leaf &where, int64_t worker, float *tile) INLINED {
        const float scale = local.worker_scales()[group];
        for_packs(where.n, all_aligned(exchange.node.slices, local.worker), [&]<int V>(Width<V>, int i) INLINED {
            const Pack<V> mean = mean_of_slices<V>(exchange.node, worker + i);
            const uint32_t active = active_from(local.active, worker + i); // `worker`: a multiple of 32
            const Pack<V> sum = compensate(mean, load<V>(local.worker, worker + i), scale, active);
            to_tile(sum, tile + i);
            store(sum, local.worker, worker + i);
        });
    });
}

/// One node: the mean of slices is the result. Stores it to the first slice.
__global__ void __launch_bounds__(kThreads) average_slice_kernel(GRID_CONSTANT const PdlArgument<Exchange> argument) {
    const Exchange &exchange = argument.begin_kernel();
    for (int64_t i = grid_thread() * 4; i < exchange.node.numel; i += grid_threads() * 4)
        store(mean_of_slices<4>(exchange.node, i), exchange.node.slices, i);
}

// Label::next follows the order of passes in src/exchange/exchange.cc.
void run_pass(ExchangePass pass, const Exchange &exchange, const dsopt_tensor *list, const Launcher &launcher) {
    const CompressLayout &compressed = exchange.local.layout, &all = exchange.mean.layout;
    switch (pass) {
    case ExchangePass::clear_messages: // without holes, unused bits are written with tensors' bits or with the scales
        if (compressed.has_holes) launcher.fill(exchange.local.send, 0xff, size_t(compressed.messages_bytes()));
        return;
    case ExchangePass::pack_list:
        return launcher.launch_grid(compressed.group_leaves, {"pack_list", Next::kernel}, pack_list_kernel, exchange,
                                    list);
    case ExchangePass::pack_values:
        return launcher.launch_grid(compressed.group_leaves, {"pack_values", Next::kernel}, pack_values_kernel,
                                    exchange);
    case ExchangePass::message_scales:
        return launcher.launch_grid(compressed.group_count / kWarps + 1, "message_scales", message_scales_kernel,
                                    exchange);
    case ExchangePass::clear_result:
        if (compressed.has_holes) launcher.fill(exchange.local.result, 0xff, size_t(compressed.message_bytes));
        return;
    case ExchangePass::reduce_messages:
        return launcher.launch_grid(compressed.segment_leaves, {"reduce_messages", Next::kernel},
                                    reduce_messages_kernel, exchange);
    case ExchangePass::result_scales:
        return launcher.launch_grid(compressed.segment_count / kWarps + 1, "result_scales", result_scales_kernel,
                                    exchange);
    case ExchangePass::decode: return launcher.launch_grid(all.group_leaves, "decode", decode_kernel, exchange, list);
    case ExchangePass::clear_gaps:
        if (all.group_count != 0)
            launcher.launch_grid(all.group_count / kThreads + 1, "clear_gaps", clear_gaps_kernel, exchange);
        return;
    case ExchangePass::copy_list:
        return launcher.launch_grid(all.group_leaves, "copy_list", copy_list_kernel, exchange, list);
    case ExchangePass::pack_slice:
        return launcher.launch_grid(compressed.group_leaves, {"pack_slice", Next::kernel}, pack_slice_kernel, exchange);
    case ExchangePass::average_slice:
        return launcher.launch_grid(exchange.node.numel / (kThreads * 4) + 1, "average_slice", average_slice_kernel,
                                    exchange);
    }
}

void run_exchange(const Exchange &buffers, const dsopt_tensor *list, int64_t count, const Launcher &launcher,
                  FunctionRef<void(ExchangeKernels &)> body) {
    class Run final : public ExchangeKernels {
    public:
        Run(const Exchange &exchange, const dsopt_tensor *list, const Launcher &launcher) :
            exchange_(exchange),
            list_(list),
            launcher_(launcher) {}
        void run(ExchangePass pass) override { run_pass(pass, exchange_, list_, launcher_); }

    private:
        const Exchange exchange_;
        const dsopt_tensor *const list_;
        const Launcher &launcher_;
    };
    const size_t layout = buffers.layout->bytes, tensors = size_t(count) * sizeof(dsopt_tensor);
    const Scratch memory(launcher.device.scratch, layout + tensors, launcher.stream); // until the work is done
    launcher.upload(memory.get(), layout + tensors, [&](char *to) {
        std::memcpy(to, buffers.layout->block.get(), layout);
        if (count != 0) std::memcpy(to + layout, list, tensors);
    });
    const auto *const device_list = reinterpret_cast<const dsopt_tensor *>(memory.get() + layout);
    Run kernels(buffers.on_device(memory.get(), nullptr), device_list, launcher);
    body(kernels);
}

void load_compress_kernels(KernelLoader &load) {
    load(pack_values_kernel, pack_list_kernel, message_scales_kernel, reduce_messages_kernel, result_scales_kernel,
         decode_kernel, clear_gaps_kernel, copy_list_kernel, pack_slice_kernel, average_slice_kernel);
}

} // namespace dsopt::gpu
