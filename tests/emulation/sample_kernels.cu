// SPDX-License-Identifier: Apache-2.0
#include "sample_kernels.h"

namespace sample {
namespace {

constexpr unsigned kThreads = 64;

__device__ int64_t first() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ int64_t stride() { return int64_t(gridDim.x) * blockDim.x; }

__global__ void __launch_bounds__(kThreads)
    add_kernel(const float *__restrict__ x, const float *__restrict__ y, float *__restrict__ sum, int64_t n) {
    for (int64_t i = first(); i < n; i += stride()) sum[i] = x[i] + y[i];
}

__global__ void __launch_bounds__(kThreads) scale_kernel(float *x, float factor, int64_t n) {
    float4 *const vectors = reinterpret_cast<float4 *>(x);
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(x));
#endif
    for (int64_t i = first(); i < n / 4; i += stride()) {
        float4 v = __ldcs(&vectors[i]);
        v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
        __stcs(&vectors[i], v);
    }
    const int64_t tail = n / 4 * 4 + first();
    if (tail < n) x[tail] *= factor;
}

__device__ double block_sum(double value) { // always in the same order of additions; the result is in thread 0
    __shared__ double warps[kThreads / 32];
    for (int lanes = 16; lanes; lanes >>= 1) value += __shfl_down_sync(0xffffffffu, value, unsigned(lanes));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
    if (threadIdx.x == 0)
        for (const double warp : warps) sum += warp;
    __syncthreads(); // the next call writes to it again
    return sum;
}

__global__ void __launch_bounds__(kThreads)
    sum_squares_kernel(const float *x, int64_t n, double *partial, unsigned *ticket, double *result) {
    __shared__ bool last;
    double sum = 0;
    for (int64_t i = first(); i < n; i += stride()) sum += double(x[i]) * double(x[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    sum = 0;
    for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *result = sum;
}

__global__ void __launch_bounds__(kThreads) sign_pack_kernel(const float *x, uint32_t *words, int64_t n) {
    const int64_t warps = stride() / 32;
    for (int64_t w = first() / 32; w < (n + 31) / 32; w += warps) {
        const int64_t i = w * 32 + threadIdx.x % 32;
        const unsigned word = __ballot_sync(0xffffffffu, i < n && x[i] >= 0);
        if (threadIdx.x % 32 == 0) words[w] = word;
    }
}

__global__ void __launch_bounds__(kThreads) histogram_kernel(const uint8_t *x, int64_t n, unsigned *bins) {
    DYNAMIC_SHARED(unsigned, counts);
    for (unsigned b = threadIdx.x; b < 64; b += blockDim.x) counts[b] = 0;
    __syncthreads();
    for (int64_t i = first(); i < n; i += stride()) atomicAdd(&counts[x[i] & 63], 1u);
    __syncthreads();
    for (unsigned b = threadIdx.x; b < 64; b += blockDim.x) atomicAdd(&bins[b], counts[b]);
}

__global__ void increment_kernel(GRID_CONSTANT const Addresses addresses) {
    for (int64_t i = first(); i < addresses.count; i += stride()) *addresses.data[i] += 1;
}

unsigned blocks(int64_t n) { return n < 1 ? 1 : n > 8 * kThreads ? 8 : unsigned((n + kThreads - 1) / kThreads); }

} // namespace

cudaError_t add(const float *x, const float *y, float *sum, int64_t n, cudaStream_t stream) {
    return dsopt::gpu::Launch{"add", blocks(n), kThreads, 0, stream}(add_kernel, x, y, sum, n);
}
cudaError_t scale(float *x, float factor, int64_t n, cudaStream_t stream) {
    return dsopt::gpu::Launch{"scale", blocks(n / 4), kThreads, 0, stream}(scale_kernel, x, factor, n);
}
cudaError_t sum_squares(const float *x, int64_t n, double *partial, unsigned *ticket, double *result,
                        cudaStream_t stream) {
    return dsopt::gpu::Launch{"sum_squares", blocks(n), kThreads, 0, stream}(sum_squares_kernel, x, n, partial, ticket,
                                                                             result);
}
cudaError_t sign_pack(const float *x, uint32_t *words, int64_t n, cudaStream_t stream) {
    return dsopt::gpu::Launch{"sign_pack", blocks(n), kThreads, 0, stream}(sign_pack_kernel, x, words, n);
}
cudaError_t histogram(const uint8_t *x, int64_t n, unsigned *bins, cudaStream_t stream) {
    return dsopt::gpu::Launch{"histogram", blocks(n), kThreads, 64 * sizeof(unsigned), stream}(histogram_kernel, x, n,
                                                                                               bins);
}
cudaError_t increment_all(const Addresses &addresses, cudaStream_t stream) {
    return dsopt::gpu::Launch{"increment", 2, kThreads, 0, stream}(increment_kernel, addresses);
}

} // namespace sample
