// SPDX-License-Identifier: Apache-2.0
// 1-bit compression on the CPU: work is cut at leaves, so bits do not depend on the number of threads.
#pragma once
#include "compress.h"
#include "cpu/onebit_kernels.h"

namespace dsopt::cpu {

MeanView view_of(const Exchange &exchange, int32_t part);
/// From the list's tensors to rows, in one pass: a leaf is packed while it is in the first-level cache.
void feed_and_pack(const OneBitKernels &kernels, const Exchange &exchange, const dsopt_tensor *list,
                   const Parallel &parallel);
/// Before any leaf is packed, one leaf of the kept sums, and when all are.
void begin_rows(const Exchange &exchange);
void pack_leaf(const OneBitKernels &kernels, const Exchange &exchange, int64_t part, int64_t leaf,
               const Owed *owed = nullptr);
void end_rows(const Exchange &exchange);
void pack(const OneBitKernels &kernels, const Exchange &exchange, const Parallel &parallel);
/// Two levels: zeros between tensors of the message; the list's values; and from what came of the own slice to rows.
void clear_gaps(const Exchange &exchange);
void fill_message(const Exchange &exchange, const dsopt_tensor *list, const Parallel &parallel);
void pack_slice(const OneBitKernels &kernels, const Exchange &exchange, const Parallel &parallel);
void serve(const OneBitKernels &kernels, const Exchange &exchange, const Parallel &parallel);
void decode(const OneBitKernels &kernels, const Exchange &exchange, const dsopt_tensor *list, int64_t count,
            const Parallel &parallel);

} // namespace dsopt::cpu
