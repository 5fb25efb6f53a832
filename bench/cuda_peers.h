// SPDX-License-Identifier: Apache-2.0
// Other ways to launch the same update, for bench_cuda.
#pragma once
#include <cstdint>
#include <cuda_runtime.h>
#include <vector>

namespace bench {

/// AdamW on fp32 tensors as apex's multi-tensor launcher does it: chunks of 65,536 elements, at most 36 tensors and 320
/// blocks of 512 threads in a launch, the addresses in the launch's arguments, four elements of 32 bits a thread.
class ChunkedAdamW {
public:
    void add(float *grad, float *param, float *exp_avg, float *exp_avg_sq, int64_t numel);
    /// One step; `step` counts from 1.
    cudaError_t run(int64_t step, cudaStream_t stream) const;

private:
    struct Tensor {
        float *at[4];
        int64_t numel;
    };
    std::vector<Tensor> tensors_;
};

} // namespace bench
