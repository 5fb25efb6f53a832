// SPDX-License-Identifier: Apache-2.0
// Selects the device of the tests of the CUDA backend: the emulated one, or with ON_A_GPU the first device of the CUDA
// runtime.
#pragma once
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#ifndef ON_A_GPU
#include "fakert.h"
#endif

namespace cuda_test {

inline void begin_test() {
#ifndef ON_A_GPU
    fakert::reset();
#endif
}
inline void end_test() {
#ifdef ON_A_GPU
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "cudaGetLastError() reports an error of the engine";
#else
    EXPECT_EQ(fakert::late_loads(), std::vector<std::string>()) << "loaded at their first launch";
    EXPECT_EQ(fakert::live_objects(), 0) << "device memory, streams or events were not released";
    fakert::reset();
#endif
}

/// Disables page protection, because with thousands of blocks of device memory it would take the emulator minutes.
inline void allow_many_blocks() {
#ifndef ON_A_GPU
    fakert::Config config = fakert::config_from_environment();
    config.protect = false;
    fakert::reset(config);
#endif
}

/// Copies to the device and waits, for all streams. cudaMemcpy() alone may return while small pageable copies are
/// pending, and non-blocking streams would not wait for them.
inline void to_device(void *to, const void *from, size_t bytes) {
    EXPECT_EQ(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

} // namespace cuda_test
