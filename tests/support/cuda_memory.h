// SPDX-License-Identifier: Apache-2.0
// Memory of the current device, real or emulated.
#pragma once
#include "memory.h"
#include <cuda_runtime.h>
#include <stdexcept>
#include <string>

namespace test {

/// Returns device memory. `stream` NULL: no work on the memory is pending when it is read or written.
inline Memory cuda_memory(cudaStream_t stream) {
    const auto good = [](cudaError_t error, const char *what) {
        if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
    };
    const auto copy = [good, stream](void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
        if (stream != nullptr) good(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); // a step may be pending
        if (bytes != 0) good(cudaMemcpy(to, from, bytes, kind), "cudaMemcpy");
#ifdef ON_A_GPU
        // cudaMemcpy() alone may return while small pageable copies are pending, and non-blocking streams would not
        // wait for them.
        if (stream == nullptr) good(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
#endif
    };
    Memory memory;
    memory.allocate = [good](size_t bytes) {
        void *data = nullptr;
        good(cudaMalloc(&data, bytes + 1), "cudaMalloc");
        return data;
    };
    memory.release = [](void *data) { (void)cudaFree(data); };
    memory.write = [copy](void *to, const void *from, size_t bytes) { copy(to, from, bytes, cudaMemcpyHostToDevice); };
    memory.read = [copy](void *to, const void *from, size_t bytes) { copy(to, from, bytes, cudaMemcpyDeviceToHost); };
    memory.stream = stream;
    return memory;
}

} // namespace test
