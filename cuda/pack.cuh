// SPDX-License-Identifier: Apache-2.0
// The host's part of compression: which kernels run, in which order.
#pragma once
#include "table.cuh"

namespace dsopt::gpu {

/// `layout`: in device memory, as LayoutImage has it.
inline DeviceExchange device_exchange(const ExchangeBuffers &exchange, const void *layout) {
    const CompressLayout &of = *exchange.layout;
    return {.layout = LayoutImage::view(of, layout),
            .all = LayoutImage::view_all(of, layout),
            .worker = exchange.worker,
            .server = exchange.server,
            .active = exchange.active,
            .own_active = exchange.own_active(),
            .message = exchange.message,
            .slices = exchange.slices,
            .values = of.is_exact() ? exchange.message : nullptr,
            .slice = of.slice,
            .node_ranks = of.node_ranks,
            .send = exchange.send,
            .recv = exchange.recv,
            .result = exchange.result,
            .results = exchange.results,
            .sums = exchange.sums,
            .counts = exchange.counts,
            .skip = exchange.skip};
}

/// Bits between tensors are 1, too.
inline void clear_rows(char *rows, int64_t bytes, cudaStream_t stream) {
    if (bytes != 0) check(cudaMemsetAsync(rows, 0xff, size_t(bytes), stream), "cudaMemsetAsync");
}
inline void end_rows(const DeviceExchange &x, const Launcher &launcher) {
    check(::gpu::launch("row_scales", row_scales_kernel, launcher.blocks_for(x.layout.part_count / kWarps + 1),
                        kThreads, 0, launcher.stream, x),
          "row_scales");
}
inline void clear_gaps(const DeviceExchange &x, const Launcher &launcher) {
    if (x.all.part_count == 0) return;
    check(::gpu::launch("clear_gaps", clear_gaps_kernel, launcher.blocks_for(x.all.part_count / kThreads + 1), kThreads,
                        0, launcher.stream, x),
          "clear_gaps");
}
/// What the ranks of the node sent to the own slice of the mean, and that to rows.
inline void pack_slice(const CompressLayout &layout, const DeviceExchange &x, const Launcher &launcher) {
    if (layout.is_exact()) {
        check(::gpu::launch("mean_slice", mean_slice_kernel, launcher.blocks_for(layout.slice / (kThreads * 4) + 1),
                            kThreads, 0, launcher.stream, x),
              "mean_slice");
        return;
    }
    clear_rows(x.send, layout.row_bytes() * layout.ranks, launcher.stream);
    check(::gpu::launch("feed_slice", feed_slice_kernel, launcher.blocks_for(layout.part_leaf.back()), kThreads, 0,
                        launcher.stream, x),
          "feed_slice");
    end_rows(x, launcher);
}
inline void serve_rows(const CompressLayout &layout, const DeviceExchange &x, const Launcher &launcher) {
    clear_rows(x.result, layout.row_bytes(), launcher.stream);
    check(::gpu::launch("serve", serve_kernel, launcher.blocks_for(layout.segment_leaf.back()), kThreads, 0,
                        launcher.stream, x),
          "serve");
    check(::gpu::launch("result_scales", result_scales_kernel, launcher.blocks_for(x.layout.segment_count / kWarps + 1),
                        kThreads, 0, launcher.stream, x),
          "result_scales");
}

} // namespace dsopt::gpu
