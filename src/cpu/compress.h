// SPDX-License-Identifier: Apache-2.0
// 1-bit compression on the CPU: work is cut at leaves, so bits do not depend on the number of threads.
#pragma once
#include "cpu/onebit_kernels.h"
#include "device/compress.h"

namespace dsopt::cpu {

/// Inline: a step calls it for each tensor.
inline MeanView view_of(const ExchangeBuffers &exchange, int32_t part) {
    const CompressLayout &layout = exchange.layout->all();
    const CompressLayout::Unit &unit = layout.units[size_t(layout.parts[size_t(part)].unit)];
    const bool exact = exchange.layout->is_exact();
    return {.rows = exact ? nullptr : exchange.results,
            .row_bytes = layout.row_bytes(),
            .row_scales = layout.row_scales,
            .first_part = layout.first_part.data(),
            .begin = unit.begin,
            .chunk = unit.chunk,
            .server = unit.server,
            .part = part,
            .values = exact ? exchange.message : nullptr};
}

/// From the list's tensors to rows, in one pass: a leaf is packed while it is in the first-level cache.
void feed_and_pack(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const dsopt_tensor *list,
                   const Parallel &parallel);
/// To be called before any leaf is packed.
void begin_rows(const ExchangeBuffers &exchange);
/// Packs one leaf of the kept sums.
void pack_leaf(const OneBitKernels &kernels, const ExchangeBuffers &exchange, int64_t part, int64_t leaf,
               const Owed *owed = nullptr);
/// To be called when all leaves are packed.
void end_rows(const ExchangeBuffers &exchange);
/// After begin_rows(): packs all leaves, then end_rows().
void pack(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const Parallel &parallel);
/// Two levels: zeros between the tensors of the message.
void clear_gaps(const ExchangeBuffers &exchange);
/// Two levels: the list's values to the message.
void fill_message(const ExchangeBuffers &exchange, const dsopt_tensor *list, const Parallel &parallel);
/// Two levels: from this rank's slice, as the node sent it, to the rows to send.
void pack_slice(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const Parallel &parallel);
void serve(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const Parallel &parallel);
/// `streaming`: the list is longer than the caches.
void decode(const OneBitKernels &kernels, const ExchangeBuffers &exchange, const dsopt_tensor *list, bool streaming,
            const Parallel &parallel);

} // namespace dsopt::cpu
