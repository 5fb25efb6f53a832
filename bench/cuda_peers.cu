// SPDX-License-Identifier: Apache-2.0
#include "cuda_peers.h"
#include "launch.h"
#include <algorithm>
#include <cmath>

namespace bench {
namespace {

constexpr int kTensors = 36, kBlocks = 320, kThreads = 512, kPerThread = 4;
constexpr int64_t kChunk = 65536;

struct Batch {
    float *arrays[4][kTensors];
    int64_t numel[kTensors];
    int chunk_of_block[kBlocks];
    unsigned char tensor_of_block[kBlocks];
};

struct Constants {
    float lr, beta1, beta2, eps, decay, c1, c2;
};

__global__ void __launch_bounds__(kThreads) chunked_adamw(GRID_CONSTANT const Batch batch, Constants c) {
    const int tensor = batch.tensor_of_block[blockIdx.x];
    const int64_t begin = batch.chunk_of_block[blockIdx.x] * kChunk, left = batch.numel[tensor] - begin;
    const int64_t n = left < kChunk ? left : kChunk;
    const float *const g = batch.arrays[0][tensor] + begin;
    float *const p = batch.arrays[1][tensor] + begin;
    float *const m = batch.arrays[2][tensor] + begin;
    float *const v = batch.arrays[3][tensor] + begin;
    for (int64_t i = threadIdx.x; i < n; i += int64_t(kThreads) * kPerThread) {
        float gs[kPerThread], ps[kPerThread], ms[kPerThread], vs[kPerThread];
#pragma unroll
        for (int k = 0; k < kPerThread; ++k) {
            const int64_t element = i + int64_t(k) * kThreads;
            const bool exists = element < n;
            gs[k] = exists ? g[element] : 0;
            ps[k] = exists ? p[element] : 0;
            ms[k] = exists ? m[element] : 0;
            vs[k] = exists ? v[element] : 0;
        }
#pragma unroll
        for (int k = 0; k < kPerThread; ++k) {
            ms[k] = c.beta1 * ms[k] + (1 - c.beta1) * gs[k];
            vs[k] = c.beta2 * vs[k] + (1 - c.beta2) * gs[k] * gs[k];
            ps[k] = ps[k] - c.lr * ((ms[k] / c.c1) / (sqrtf(vs[k] / c.c2) + c.eps) + c.decay * ps[k]);
        }
#pragma unroll
        for (int k = 0; k < kPerThread; ++k) {
            const int64_t element = i + int64_t(k) * kThreads;
            if (element >= n) continue;
            p[element] = ps[k];
            m[element] = ms[k];
            v[element] = vs[k];
        }
    }
}

} // namespace

void ChunkedAdamW::add(float *grad, float *param, float *exp_avg, float *exp_avg_sq, int64_t numel) {
    tensors_.push_back({{grad, param, exp_avg, exp_avg_sq}, numel});
}

cudaError_t ChunkedAdamW::run(int64_t step, cudaStream_t stream) const {
    Constants c{1e-3f, 0.9f, 0.999f, 1e-8f, 0.01f, 0, 0};
    c.c1 = float(1 - std::pow(0.9, double(step)));
    c.c2 = float(1 - std::pow(0.999, double(step)));
    Batch batch{};
    int tensors = 0, blocks = 0;
    const auto flush = [&] {
        const dsopt::gpu::Launch launch{"chunked_adamw", unsigned(blocks), unsigned(kThreads), 0, stream};
        const cudaError_t error = blocks == 0 ? cudaSuccess : launch(chunked_adamw, batch, c);
        tensors = blocks = 0;
        return error;
    };
    for (const Tensor &tensor : tensors_) {
        const int64_t chunks = (tensor.numel + kChunk - 1) / kChunk;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            if (chunk == 0 || tensors == 0) { // also after a flush within the tensor
                for (int k = 0; k < 4; ++k) batch.arrays[k][tensors] = tensor.arrays[k];
                batch.numel[tensors++] = tensor.numel;
            }
            batch.tensor_of_block[blocks] = static_cast<unsigned char>(tensors - 1);
            batch.chunk_of_block[blocks++] = int(chunk);
            if (blocks == kBlocks || (tensors == kTensors && chunk + 1 == chunks))
                if (const cudaError_t error = flush(); error != cudaSuccess) return error;
        }
    }
    return flush();
}

} // namespace bench
