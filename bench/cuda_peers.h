// SPDX-License-Identifier: Apache-2.0
// The same update with another launcher, for bench_cuda.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>
#include <vector>

namespace bench {

/// AdamW on fp32 tensors in the form of apex's multi-tensor launcher: chunks of 65,536 elements, at most 36 tensors and
/// 320 blocks of 512 threads per launch, addresses in the kernel's arguments, and four fp32 elements per thread.
class ChunkedAdamW {
public:
    void add(float *grad, float *param, float *exp_avg, float *exp_avg_sq, int64_t numel);
    /// Enqueues one step; `step` counts from 1.
    cudaError_t run(int64_t step, cudaStream_t stream) const;

private:
    struct Tensor {
        float *arrays[4];
        int64_t numel;
    };
    std::vector<Tensor> tensors_;
};

} // namespace bench
