// SPDX-License-Identifier: Apache-2.0
// 1-bit compression on the CPU: work is cut at leaves, so bits do not depend on the number of threads.
#pragma once
#include "compress.h"
#include "cpu/onebit_kernels.h"

namespace dsopt::cpu {

MeanView view_of(const Exchange &exchange, int32_t part);
void feed(const OneBitKernels &kernels, const Exchange &exchange, const dsopt_tensor *list, int64_t count,
          const Parallel &parallel);
/// Elements that are no tensor's: they owe something all the same.
void feed_padding(const OneBitKernels &kernels, const Exchange &exchange, const int64_t *used, const float *values);
void pack(const OneBitKernels &kernels, const Exchange &exchange, const Parallel &parallel);
void serve(const OneBitKernels &kernels, const Exchange &exchange, const Parallel &parallel);
void decode(const OneBitKernels &kernels, const Exchange &exchange, const dsopt_tensor *list, int64_t count,
            const Parallel &parallel);
void errors(const OneBitKernels &kernels, const Exchange &exchange, float *worker, float *server);

} // namespace dsopt::cpu
