// SPDX-License-Identifier: Apache-2.0
// Kernels in the forms that the engine uses, for the tests of the emulation.
#pragma once
#include "launch.h"
#include <cstdint>

namespace sample {

struct Addresses { // near the limit of what a kernel takes by value
    float *data[4000];
    int count;
};

cudaError_t add(const float *x, const float *y, float *sum, int64_t n, cudaStream_t stream);
/// x *= factor, 16 bytes at a time where it can.
cudaError_t scale(float *x, float factor, int64_t n, cudaStream_t stream);
/// One launch: every block sums, the last one adds the sums up in order. `ticket` is 0, and is again afterwards.
cudaError_t sum_squares(const float *x, int64_t n, double *partial, unsigned *ticket, double *result,
                        cudaStream_t stream);
/// Bit i of word w: x[32 w + i] >= 0. Bits past the end are 0.
cudaError_t sign_pack(const float *x, uint32_t *words, int64_t n, cudaStream_t stream);
/// 64 bins, in dynamic shared memory first.
cudaError_t histogram(const uint8_t *x, int64_t n, unsigned *bins, cudaStream_t stream);
/// Adds 1 to the first float behind every address.
cudaError_t increment_all(const Addresses &addresses, cudaStream_t stream);

} // namespace sample
