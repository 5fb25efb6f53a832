// SPDX-License-Identifier: Apache-2.0
// The CUDA execution model on an ordinary CPU, for tests. A kernel source that uses only declarations of this file and
// of cuda_runtime.h compiles unchanged with a host compiler, and runs with all blocks, warps, barriers and collectives.
//
// A CUDA thread is a fiber. The fibers of a block share one OS thread and are switched only where a thread has to wait,
// so a kernel without barriers and collectives costs no switch at all.
//
//   provided  threadIdx, blockIdx, blockDim, gridDim, __shared__, dynamic shared memory (DYNAMIC_SHARED of launch.h),
//             __syncthreads[_count|_and|_or], __syncwarp, __shfl*_sync, votes, reductions, integer atomics, fences,
//             vector types, cached loads and stores, bit and rounding intrinsics (cuda_emu_math.h)
//   missing   fused multiply-add and approximate intrinsics, float atomics (the engine's bits must not depend on them
//             or on an order), grid-wide barriers, inline PTX, textures, clusters, __activemask
//
// Stricter than a device: a thread that has returned does not count as arrived at a barrier, and the mask of a
// collective must include its caller.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <math.h>
#include <type_traits>
#include <vector>

#define CUDA_EMU 1

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_EMU_ASAN 1
#endif
#endif
// One block at a time runs on an OS thread, so __shared__ memory is thread-local. The address sanitizer puts red zones
// around ordinary statics only; with it, one block at a time runs in the whole process.
#ifdef CUDA_EMU_ASAN
#define __shared__ static
#else
#define __shared__ static __thread
#endif

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

// The fastest model of thread-local storage, also in a shared library: every kernel reads these variables.
#define CUDA_EMU_TLS __attribute__((tls_model("initial-exec")))
extern __thread uint3 threadIdx CUDA_EMU_TLS;
extern __thread uint3 blockIdx CUDA_EMU_TLS;
extern __thread dim3 blockDim CUDA_EMU_TLS;
extern __thread dim3 gridDim CUDA_EMU_TLS;
constexpr int warpSize = 32;

namespace cuemu {

/// A store by a thread of a block; the stores of each thread are in program order.
struct Store {
    const char *kernel;
    unsigned block, thread;
    uintptr_t address;
    unsigned bytes;
};
struct Options {
    unsigned workers = 1; // OS threads that run the blocks of a grid; 1 under the address sanitizer
    // 0: natural order. Otherwise blocks, threads and wake-ups are permuted, in the same way for the same seed.
    uint64_t seed = 0;
    unsigned capability = 90; // of the device; kernels use instructions of later devices only with it
    // If set, cached stores (__stwb) are appended here; with one worker only.
    std::vector<Store> *stores = nullptr;
};
/// Options are read from CUEMU_WORKERS, CUEMU_SEED and CUEMU_CAPABILITY at first use. They may change only while no kernel runs.
Options &options();

/// Returns the first violation of the execution model since clear_error(), or "": a deadlock, a divergent collective, a
/// trap.
const char *last_error();
void clear_error();

struct Launch {
    const char *name;
    dim3 grid, block;
    size_t shared;
    bool early = false; // may begin before the preceding kernel of the stream has ended
};
/// Runs every block of a grid; `body` is called once per CUDA thread. Returns false if the execution model was
/// violated. `triggered` becomes true if a thread allowed the next kernel to begin.
bool run_grid(const Launch &launch, void (*body)(const void *), const void *argument, bool &triggered);
/// A grid that was launched early and runs in two parts. The constructor returns when all threads of the first `blocks`
/// blocks wait for the preceding kernel. Until then these blocks may access the same device memory as the thread that
/// calls the constructor, and all blocks later the same as the thread that calls finish().
class EarlyGrid {
public:
    EarlyGrid(const Launch &launch, void (*body)(const void *), const void *argument, size_t blocks);
    ~EarlyGrid(); // without finish(): the grid is abandoned
    EarlyGrid(const EarlyGrid &) = delete;
    EarlyGrid &operator=(const EarlyGrid &) = delete;
    /// Called when the preceding kernel has ended. Runs the rest, as run_grid() does.
    bool finish(bool &triggered);

private:
    struct State;
    State *state_;
};

enum class Op : uint8_t {
    syncwarp,
    shfl_idx,
    shfl_up,
    shfl_down,
    shfl_xor,
    ballot,
    add_u32,
    min_u32,
    max_u32,
    and_u32,
    or_u32,
    xor_u32
};
enum class Vote { none, count, all, any };
uint64_t warp_op(Op op, uint32_t mask, uint64_t in, int argument, int width);
int block_barrier(bool predicate, Vote vote);
void *dynamic_shared();
void fence();
void note_atomic(const void *address);
void note_store(const void *address, size_t bytes);
void wait_for_previous();
void trigger_successor();
[[noreturn]] void trap(const char *why);

template <class T> inline uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T> inline T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

/// True for types that a shuffle can move: one or two registers.
template <class T> constexpr bool shuffled = std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);
template <class T> inline T shuffle(Op op, unsigned mask, T value, int argument, int width) {
    static_assert(shuffled<T>, "shuffles move arithmetic types of 4 and 8 bytes");
    return from_bits<T>(warp_op(op, mask, to_bits(value), argument, width));
}

/// Relaxed, as on the device: plain stores of another thread become visible only after fences or a barrier.
template <class T, class F> inline T modify(T *address, F next) {
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(address, &old, next(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    note_atomic(address);
    return old;
}

} // namespace cuemu

inline void __syncthreads() { cuemu::block_barrier(false, cuemu::Vote::none); }
inline int __syncthreads_count(int p) { return cuemu::block_barrier(p != 0, cuemu::Vote::count); }
inline int __syncthreads_and(int p) { return cuemu::block_barrier(p != 0, cuemu::Vote::all); }
inline int __syncthreads_or(int p) { return cuemu::block_barrier(p != 0, cuemu::Vote::any); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cuemu::warp_op(cuemu::Op::syncwarp, mask, 0, 0, 32); }

template <class T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return cuemu::shuffle(cuemu::Op::shfl_idx, mask, value, lane, width);
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cuemu::shuffle(cuemu::Op::shfl_up, mask, value, int(delta), width);
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return cuemu::shuffle(cuemu::Op::shfl_down, mask, value, int(delta), width);
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return cuemu::shuffle(cuemu::Op::shfl_xor, mask, value, lanes, width);
}

inline unsigned __ballot_sync(unsigned mask, int p) {
    return unsigned(cuemu::warp_op(cuemu::Op::ballot, mask, p != 0, 0, 32));
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v) {
    return unsigned(cuemu::warp_op(cuemu::Op::add_u32, mask, v, 0, 32));
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned v) {
    return unsigned(cuemu::warp_op(cuemu::Op::min_u32, mask, v, 0, 32));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned v) {
    return unsigned(cuemu::warp_op(cuemu::Op::max_u32, mask, v, 0, 32));
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned v) {
    return unsigned(cuemu::warp_op(cuemu::Op::and_u32, mask, v, 0, 32));
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned v) {
    return unsigned(cuemu::warp_op(cuemu::Op::or_u32, mask, v, 0, 32));
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned v) {
    return unsigned(cuemu::warp_op(cuemu::Op::xor_u32, mask, v, 0, 32));
}

/// Every thread of a kernel that was launched early must call this before it accesses memory, and before barriers and
/// collectives. In other kernels the call does nothing.
inline void cudaGridDependencySynchronize() { cuemu::wait_for_previous(); }
/// Allows the next kernel to begin. The fake runtime does not wait for this to start a kernel that is launched early,
/// and refuses other work as the successor.
inline void cudaTriggerProgrammaticLaunchCompletion() { cuemu::trigger_successor(); }

inline void __trap() { cuemu::trap("__trap()"); }

// The thread sanitizer orders blocks by these and atomics, as the device does: "the last block finishes" needs a fence
// before the ticket is drawn and another after it. A ticket that all blocks draw must also be reset by an atomic
// (atomicInc() does both): the draws come after the fences, so nothing orders them before a plain store.
inline void __threadfence() { cuemu::fence(); }
inline void __threadfence_block() { cuemu::fence(); }
inline void __threadfence_system() { cuemu::fence(); }

// Overloads, as in nvcc; none for floating-point types.
#define CUDA_EMU_ATOMICS(T)                                                                                            \
    inline T atomicAdd(T *p, T v) {                                                                                    \
        return cuemu::modify(p, [v](T old) {                                                                           \
            __builtin_add_overflow(old, v, &old); /* wraps, signed or not */                                           \
            return old;                                                                                                \
        });                                                                                                            \
    }                                                                                                                  \
    inline T atomicMax(T *p, T v) {                                                                                    \
        return cuemu::modify(p, [v](T old) { return old > v ? old : v; });                                             \
    }                                                                                                                  \
    inline T atomicMin(T *p, T v) {                                                                                    \
        return cuemu::modify(p, [v](T old) { return old < v ? old : v; });                                             \
    }                                                                                                                  \
    inline T atomicOr(T *p, T v) {                                                                                     \
        return cuemu::modify(p, [v](T old) { return old | v; });                                                       \
    }                                                                                                                  \
    inline T atomicAnd(T *p, T v) {                                                                                    \
        return cuemu::modify(p, [v](T old) { return old & v; });                                                       \
    }                                                                                                                  \
    inline T atomicExch(T *p, T v) {                                                                                   \
        return cuemu::modify(p, [v](T) { return v; });                                                                 \
    }                                                                                                                  \
    inline T atomicCAS(T *p, T expected, T v) {                                                                        \
        return cuemu::modify(p, [expected, v](T old) { return old == expected ? v : old; });                           \
    }
CUDA_EMU_ATOMICS(int)
CUDA_EMU_ATOMICS(unsigned)
CUDA_EMU_ATOMICS(unsigned long long)
#undef CUDA_EMU_ATOMICS
inline unsigned atomicInc(unsigned *p, unsigned last) {
    return cuemu::modify(p, [last](unsigned old) { return old >= last ? 0u : old + 1; });
}

#include "cuda_emu_math.h"
