// SPDX-License-Identifier: Apache-2.0
// Kernel launches, and macros for constructs that differ between nvcc and the emulation of CUDA on the CPU
// (tests/emulation), so that both compile the same sources. <<<>>> is not used.
#pragma once
#include <cuda_runtime.h>
#include <tuple>
#include <type_traits>
#include <utility>

/// Goes before a large const parameter of a kernel: threads read it in parameter memory, without a local copy.
#define GRID_CONSTANT __grid_constant__

/// Goes after the parameters of a lambda in a kernel. A lambda that is not inlined has its captures in local memory.
#define INLINED __attribute__((always_inline))

/// Like INLINED, but on devices only: a host compiler takes minutes for a function with the loops of all rules and
/// formats.
#if defined(CUDA_EMU)
#define INLINED_ON_DEVICE __attribute__((noinline))
#else
#define INLINED_ON_DEVICE INLINED
#endif

/// In a kernel: declares `T *name`, the dynamic shared memory, whose size the launch sets.
#if defined(CUDA_EMU)
#define DYNAMIC_SHARED(T, name) T *const name = static_cast<T *>(cuemu::dynamic_shared())
#else
#define DYNAMIC_SHARED(T, name)                                                                                        \
    extern __shared__ __align__(16) unsigned char gpu_dynamic_shared[];                                                \
    T *const name = reinterpret_cast<T *>(gpu_dynamic_shared)
#endif

namespace dsopt::gpu {

constexpr int kThreads = 256; // per block
constexpr int kWarps = kThreads / 32;

/// First parameter of a kernel that may be launched early (PDL). The kernel reads the value only through
/// begin_kernel().
template <class T> class PdlArgument {
public:
    PdlArgument(const T &value, bool triggers) : value_(value), triggers_(triggers) {}
    /// The first statement of such a kernel. Returns when the writes of the preceding kernel are visible.
    __device__ __forceinline__ const T &begin_kernel() const {
#if defined(CUDA_EMU) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
        cudaGridDependencySynchronize();
        if (triggers_) cudaTriggerProgrammaticLaunchCompletion();
#endif
        return value_;
    }

private:
    T value_;
    bool triggers_;
};

template <class... P> constexpr bool kTakesPdlArgument = false;
template <class T, class... P> constexpr bool kTakesPdlArgument<PdlArgument<T>, P...> = true;

/// Programmatic dependent launch (PDL), only for code that was compiled for capability 9.0 or more.
struct Pdl {
    bool early = false;    // blocks may start before the preceding kernel has ended
    bool triggers = false; // blocks of the next kernel, which is launched early, may start before this one has ended
};

/// Launch configuration of a kernel. `name` is for tests, which list the kernels that were launched.
struct Launch {
    const char *name;
    dim3 grid, block;
    size_t shared; // bytes of dynamic shared memory per block
    cudaStream_t stream;

    /// Launches a kernel that starts when the preceding one has ended. The arguments are converted to the kernel's
    /// parameters and copied now.
    template <class... P, class... A> cudaError_t operator()(void (*kernel)(P...), A &&...arguments) const {
        return enqueue(false, kernel, std::forward<A>(arguments)...);
    }
    /// Launches a kernel, early if `pdl.early`: the kernel itself then waits for the preceding kernel.
    template <class T, class... P, class... A>
    cudaError_t operator()(Pdl pdl, void (*kernel)(PdlArgument<T>, P...), const std::type_identity_t<T> &first,
                           A &&...others) const {
        return enqueue(pdl.early, kernel, PdlArgument<T>(first, pdl.triggers), std::forward<A>(others)...);
    }

    template <class... P, class... A>
    cudaError_t operator()(Pdl, void (*)(P...), A &&...) const requires(!kTakesPdlArgument<P...>) {
        static_assert(kTakesPdlArgument<P...>, "a kernel that may be launched early takes a PdlArgument first");
        return cudaSuccess;
    }

private:
    template <class... P, class... A> cudaError_t enqueue(bool early, void (*kernel)(P...), A &&...arguments) const {
        static_assert(sizeof...(P) == sizeof...(A), "the kernel takes another number of arguments");
        static_assert((std::is_convertible_v<A, P> && ...), "the kernel takes other types");
#if defined(CUDA_EMU)
        return fakert::launch(name, kernel, grid, block, shared, stream, early, std::forward<A>(arguments)...);
#else
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
};

} // namespace dsopt::gpu
