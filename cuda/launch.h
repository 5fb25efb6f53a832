// SPDX-License-Identifier: Apache-2.0
// How the host starts a kernel, and what nvcc and the emulation of CUDA on the CPU (tests/emulation) spell differently,
// so that both compile the same sources. No <<<>>> anywhere.
#pragma once
#include <cuda_runtime.h>
#include <tuple>
#include <type_traits>
#include <utility>

/// Before a const parameter of a kernel that is big: threads read it where the launch put it.
#define GRID_CONSTANT __grid_constant__

/// Behind the parameters of a lambda in a kernel. One that is called would have what it captures in local memory.
#define INLINED __attribute__((always_inline))

/// In a kernel: `T *name`, the shared memory whose size the launch says.
#if defined(CUDA_EMU)
#define DYNAMIC_SHARED(T, name) T *const name = static_cast<T *>(cuemu::dynamic_shared())
#else
#define DYNAMIC_SHARED(T, name)                                                                                        \
    extern __shared__ __align__(16) unsigned char gpu_dynamic_shared[];                                                \
    T *const name = reinterpret_cast<T *>(gpu_dynamic_shared)
#endif

namespace dsopt::gpu {

constexpr int kThreads = 256; // a block
constexpr int kWarps = kThreads / 32;

/// Puts one run of `kernel` into `stream`. The arguments are converted to what the kernel takes and copied now. `name`
/// is for tests, which list what was launched. `early`, for code compiled for capability 9.0 or more: blocks may start
/// while the preceding kernel still runs, and the kernel must begin with begin_kernel().
template <class... P, class... A>
cudaError_t launch(const char *name, bool early, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared,
                   cudaStream_t stream, A &&...arguments) {
    static_assert(sizeof...(P) == sizeof...(A), "the kernel takes another number of arguments");
    static_assert((std::is_convertible_v<A, P> && ...), "the kernel takes other types");
#if defined(CUDA_EMU)
    return fakert::launch(name, kernel, grid, block, shared, stream, early, std::forward<A>(arguments)...);
#else
    static_cast<void>(name);
    std::tuple<P...> values(std::forward<A>(arguments)...);
    return std::apply(
        [&](P &...value) {
            void *addresses[sizeof...(P) + 1] = {const_cast<void *>(static_cast<const void *>(&value))...};
            cudaLaunchAttribute attribute{};
            attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attribute.val.programmaticStreamSerializationAllowed = 1;
            cudaLaunchConfig_t config{};
            config.gridDim = grid;
            config.blockDim = block;
            config.dynamicSmemBytes = shared;
            config.stream = stream;
            config.attrs = &attribute;
            config.numAttrs = early ? 1 : 0;
            return cudaLaunchKernelExC(&config, reinterpret_cast<const void *>(kernel), addresses);
        },
        values);
#endif
}

} // namespace dsopt::gpu
