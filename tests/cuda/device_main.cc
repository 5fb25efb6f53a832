// SPDX-License-Identifier: Apache-2.0
// Exits with the status for "skipped" if no GPU can be used.
#include <cstdio>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

int main(int argc, char **argv) {
    testing::InitGoogleTest(&argc, argv);
    int devices = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0) {
        std::printf("no CUDA device: %s\n", cudaGetErrorString(error));
        return 77;
    }
    return RUN_ALL_TESTS();
}
