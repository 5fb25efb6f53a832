// SPDX-License-Identifier: Apache-2.0
// Launching kernels without the launch syntax, so that the same sources compile for tests on the CPU (tests/emulation).
#pragma once
#include <cuda_runtime.h>
#include <tuple>
#include <utility>
#define GRID_CONSTANT __grid_constant__
#define DYNAMIC_SHARED(T, name)                                                                                        \
    extern __shared__ __align__(16) unsigned char dynamic_shared[];                                                    \
    T *name = reinterpret_cast<T *>(dynamic_shared)
namespace gpu {
template <class... P, class... A>
cudaError_t launch(const char *, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, A &&...args) {
    static_assert(sizeof...(P) == sizeof...(A), "wrong number of kernel arguments");
    std::tuple<P...> held(static_cast<P>(std::forward<A>(args))...);
    return std::apply(
        [&](P &...p) {
            void *pointers[sizeof...(P) + 1] = {const_cast<void *>(static_cast<const void *>(&p))...};
            return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, block, pointers, shared_bytes, stream);
        },
        held);
}
} // namespace gpu
