// SPDX-License-Identifier: Apache-2.0
// Kernels of the forms that the engine uses, for tests of the emulation.
#pragma once
#include "launch.h"
#include <cstdint>

namespace sample {

struct Addresses { // near the size limit of kernel arguments
    float *data[4000];
    int count;
};

cudaError_t add(const float *x, const float *y, float *sum, int64_t n, cudaStream_t stream);
/// Multiplies x by `factor`, 16 bytes at a time where possible.
cudaError_t scale(float *x, float factor, int64_t n, cudaStream_t stream);
/// Sums squares in one launch: each block sums, and the last block adds up the sums in order. `ticket` is 0 before and
/// after.
cudaError_t sum_squares(const float *x, int64_t n, double *partial, unsigned *ticket, double *result,
                        cudaStream_t stream);
/// Sets bit i of word w to x[32 w + i] >= 0. Bits past the end are 0.
cudaError_t sign_pack(const float *x, uint32_t *words, int64_t n, cudaStream_t stream);
/// Counts in 64 bins, first in dynamic shared memory.
cudaError_t histogram(const uint8_t *x, int64_t n, unsigned *bins, cudaStream_t stream);
/// Adds 1 to the first float at each address.
cudaError_t increment_all(const Addresses &addresses, cudaStream_t stream);

} // namespace sample
