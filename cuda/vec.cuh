// SPDX-License-Identifier: Apache-2.0
// Loads and stores elements of any float dtype as fp32. If arrays are aligned to 16 bytes, one access of 16 bytes, or
// of 8 bytes for 16-bit elements, processes four neighbours, so a warp accesses whole sectors. Otherwise an access
// processes one element.
#pragma once
#include "device/plan.h"
#include "launch.h"

namespace dsopt::gpu {

/// Resident blocks per multiprocessor of kernels that read and write several arrays. For capability 12.0 and later
/// (consumer devices) the compiler spills with 64 registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 4;
#endif

// Indices of a thread and of its warp in the grid, and the numbers of threads and warps, for grid-stride kernels.
__device__ __forceinline__ int64_t grid_thread() { return int64_t(blockIdx.x) * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t grid_threads() { return int64_t(gridDim.x) * kThreads; }
__device__ __forceinline__ int64_t grid_warp() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; }
__device__ __forceinline__ int64_t grid_warps() { return int64_t(gridDim.x) * kWarps; }

/// Returns threadIdx.x, read again at each call: values that a loop over leaves derives from it are recomputed for each
/// leaf. Else the compiler keeps them in registers, which the loop over elements needs.
__device__ __forceinline__ unsigned thread_read_here() {
#if defined(__CUDA_ARCH__)
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
#else
    return threadIdx.x;
#endif
}

/// Keeps the compiler from using registers for values that are in shared memory.
__device__ __forceinline__ void forget_shared() {
#if defined(__CUDA_ARCH__)
    asm volatile("" ::: "memory");
#endif
}

/// Calls body(0), body(1), ... body(Count - 1), unrolled: arrays that are indexed by the argument stay in registers.
template <int Count, class Body> __device__ __forceinline__ void unrolled(const Body &body) {
#pragma unroll
    for (int k = 0; k < Count; ++k) body(k);
}

/// V neighbours, 4 or 1.
template <int V> struct Pack { float at[V]; };
template <int V> using Width = std::integral_constant<int, V>; // passes V to a lambda

template <int V> __device__ __forceinline__ Pack<V> operator-(const Pack<V> &a, const Pack<V> &b) {
    Pack<V> y;
    unrolled<V>([&](int k) INLINED { y.at[k] = a.at[k] - b.at[k]; });
    return y;
}

/// Tells the compiler that a pointer is global. Pointers from a table in memory are generic for the compiler, which
/// then emits slower instructions.
template <class T> __device__ __forceinline__ T *global(T *pointer) {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(pointer));
#endif
    return pointer;
}

/// Stores `value` with __stwb, which the compiler does not optimise. It would otherwise split a wide store, and keep a
/// whole job in registers because it knows that the store does not change the job.
template <class T> __device__ __forceinline__ void store_as_is(T *to, const T &value) { __stwb(to, value); }

/// Copies a word of 4 or 8 bytes from global to shared memory, without a register from capability 8.0 on. Complete for
/// this thread after wait_for_copies().
template <class Word> __device__ __forceinline__ void copy_async(Word *shared, const Word *from) {
    static_assert(sizeof(Word) == 4 || sizeof(Word) == 8);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
                 "l"(from), "n"(int(sizeof(Word)))
                 : "memory");
#else
    __builtin_memcpy(shared, from, sizeof(Word)); // the words may be parts of other types
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/// True if all of these arrays are aligned to 16 bytes, for accesses of four elements. NULL counts as aligned.
template <class... P> __device__ __forceinline__ bool all_aligned(const P *...data) {
    return ((reinterpret_cast<uintptr_t>(data) | ...) & 15) == 0;
}

/// Returns the number of elements in one access of 16 bytes.
__device__ __forceinline__ int elements_per_load(Dtype format) {
    switch (format) {
    case Dtype::f32: return 4;
    case Dtype::f16:
    case Dtype::bf16: return 8;
    }
    __builtin_unreachable();
}

/// Loads elements [i, i + V) in the format of memory, i a multiple of V: fp32, or 16-bit elements, two per word.
/// Nothing here uses the loaded values, so that several loads are in flight before convert_to_f32() waits for the
/// first.
template <int V> __device__ __forceinline__ Pack<V> fetch(const Slot &slot, int64_t i) {
    switch (slot.format) {
    case Dtype::f32: {
        const float *const from = global(static_cast<const float *>(slot.data) + i);
        if constexpr (V == 1)
            return {{*from}};
        else {
            const float4 f = *reinterpret_cast<const float4 *>(from);
            return {{f.x, f.y, f.z, f.w}};
        }
    }
    case Dtype::f16:
    case Dtype::bf16: {
        const uint16_t *const from = global(static_cast<const uint16_t *>(slot.data) + i);
        if constexpr (V == 1)
            return {{float_of(*from)}};
        else {
            const uint2 q = *reinterpret_cast<const uint2 *>(from);
            return {{float_of(q.x), float_of(q.y), 0, 0}};
        }
    }
    }
    __builtin_unreachable();
}
// These functions convert one element of a 16-bit format.
__device__ __forceinline__ float half_to_f32(uint16_t half, Dtype format) {
    switch (format) {
    case Dtype::f16: return F16::load(half);
    case Dtype::bf16: return BF16::load(half);
    case Dtype::f32: break;
    }
    __builtin_unreachable();
}
__device__ __forceinline__ uint32_t f32_to_half(float value, Dtype format) {
    switch (format) {
    case Dtype::f16: return F16::store(value);
    case Dtype::bf16: return BF16::store(value);
    case Dtype::f32: break;
    }
    __builtin_unreachable();
}
/// Converts to fp32.
template <int V> __device__ __forceinline__ Pack<V> convert_to_f32(const Pack<V> &x, Dtype format) {
    if (format == Dtype::f32) return x;
    Pack<V> y;
    unrolled<V>([&](int k) INLINED { y.at[k] = half_to_f32(uint16_t(bits_of(x.at[k / 2]) >> (k % 2 * 16)), format); });
    return y;
}
__device__ __forceinline__ float4 float4_of(const Pack<4> &x) {
    return make_float4(x.at[0], x.at[1], x.at[2], x.at[3]);
}
__device__ __forceinline__ Slot floats(const float *data) { return {const_cast<float *>(data), Dtype::f32}; }
template <int V> __device__ __forceinline__ Pack<V> load(const Slot &slot, int64_t i) {
    return convert_to_f32(fetch<V>(slot, i), slot.format);
}
template <int V> __device__ __forceinline__ Pack<V> load(const float *data, int64_t i) {
    return fetch<V>(floats(data), i);
}

template <int V> __device__ __forceinline__ void store(const Pack<V> &x, const Slot &slot, int64_t i) {
    switch (slot.format) {
    case Dtype::f32: {
        float *const to = global(static_cast<float *>(slot.data) + i);
        if constexpr (V == 1)
            store_as_is(to, x.at[0]);
        else
            store_as_is(reinterpret_cast<float4 *>(to), float4_of(x));
        return;
    }
    case Dtype::f16:
    case Dtype::bf16: {
        uint16_t *const to = global(static_cast<uint16_t *>(slot.data) + i);
        const auto half = [&](int k) INLINED { return f32_to_half(x.at[k], slot.format); };
        if constexpr (V == 1)
            store_as_is(to, uint16_t(half(0)));
        else
            store_as_is(reinterpret_cast<uint2 *>(to), uint2{half(0) | half(1) << 16, half(2) | half(3) << 16});
        return;
    }
    }
    __builtin_unreachable();
}
template <int V> __device__ __forceinline__ void store(const Pack<V> &x, float *data, int64_t i) {
    store(x, floats(data), i);
}

/// Stores what fetch() loaded from memory of the same format, without a conversion.
template <int V> __device__ __forceinline__ void store_fetched(const Pack<V> &x, const Slot &slot, int64_t i) {
    if (slot.format == Dtype::f32) return store(x, slot, i);
    uint16_t *const to = global(static_cast<uint16_t *>(slot.data) + i);
    if constexpr (V == 1)
        store_as_is(to, uint16_t(bits_of(x.at[0])));
    else
        store_as_is(reinterpret_cast<uint2 *>(to), uint2{bits_of(x.at[0]), bits_of(x.at[1])});
}

/// Stores to shared memory.
template <int V> __device__ __forceinline__ void to_tile(const Pack<V> &x, float *tile) {
    unrolled<V>([&](int k) INLINED { tile[k] = x.at[k]; });
}

/// Calls body(Width<V>, i) for i in [0, n), over the threads of a block: V = 4 neighbours at a time if the arrays are
/// `aligned`, and V = 1 after them.
template <class Body> __device__ __forceinline__ void for_packs(int n, bool aligned, const Body &body) {
    const int whole = aligned ? n / 4 * 4 : 0;
    for (int i = int(threadIdx.x) * 4; i < whole; i += kThreads * 4) body(Width<4>{}, i);
    for (int i = whole + int(threadIdx.x); i < n; i += kThreads) body(Width<1>{}, i);
}

} // namespace dsopt::gpu
