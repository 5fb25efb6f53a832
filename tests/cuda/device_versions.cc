// SPDX-License-Identifier: Apache-2.0
// Prints one line: name, compute capability, CUDA version of the driver and of the runtime, and bus address of the
// first GPU; or, with status 1, the reason why the runtime can use none. scripts/gpu.sh compiles this file with nvcc
// alone before it builds anything, because with a driver that is older than the static runtime every test is skipped.
#include <cstdio>
#include <cuda_runtime.h>

int main() {
    int driver = 0, runtime = 0, devices = 0;
    (void)cudaDriverGetVersion(&driver); // 0: no driver
    (void)cudaRuntimeGetVersion(&runtime);
    const auto major = [](int version) { return version / 1000; };
    const auto minor = [](int version) { return version % 1000 / 10; };
    cudaError_t error = cudaGetDeviceCount(&devices);
    if (error == cudaSuccess && devices == 0) error = cudaErrorNoDevice;
    cudaDeviceProp device{};
    char bus[32] = "";
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&device, 0);
    if (error == cudaSuccess) error = cudaDeviceGetPCIBusId(bus, int(sizeof bus), 0);
    if (error != cudaSuccess) {
        if (driver == 0)
            std::printf("no CUDA driver was found");
        else
            std::printf("the driver supports CUDA %d.%d", major(driver), minor(driver));
        std::printf(", the toolkit's runtime is of CUDA %d.%d: %s, %s\n", major(runtime), minor(runtime),
                    cudaGetErrorName(error), cudaGetErrorString(error));
        return 1;
    }
    std::printf("%s, %d.%d, %d.%d, %d.%d, %s\n", device.name, device.major, device.minor, major(driver), minor(driver),
                major(runtime), minor(runtime), bus);
}
