// SPDX-License-Identifier: Apache-2.0
// Reading and writing a few neighbouring elements of any float dtype as fp32: 16 bytes at a time where the address
// allows it.
#pragma once
#include "base/dtype.h"
#include "launch.h"

namespace dsopt::gpu {

template <int V> struct Pack { float at[V]; };

/// Addresses that come out of a table in memory look generic to the compiler; told that they are global, it emits the
/// faster instructions.
template <class T> __device__ __forceinline__ T *global(T *pointer) {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(pointer));
#endif
    return pointer;
}

/// A 16-byte store that stays one: the compiler would find that the branch for unaligned arrays stores the same values,
/// merge the two, and keep the narrow one.
template <class T> __device__ __forceinline__ void store16(T *to, const T &value) {
#if defined(__CUDA_ARCH__)
    __stwb(to, value);
#else
    *to = value;
#endif
}

__device__ __forceinline__ bool aligned16(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

/// Elements [i, i + V), i a multiple of V. `vector`: the array begins at a multiple of 16 bytes. `Halves`: four 16-bit
/// elements go by one access, too; for kernels that have no registers left for eight.
template <int V, bool Halves = false>
__device__ __forceinline__ Pack<V> load(const void *data, Dtype type, int64_t i, bool vector) {
    Pack<V> x;
    if (type == Dtype::f32) {
        const float *from = global(static_cast<const float *>(data) + i);
        if (V % 4 == 0 && vector) {
#pragma unroll
            for (int k = 0; k + 3 < V; k += 4) {
                const float4 f = *reinterpret_cast<const float4 *>(from + k);
                x.at[k] = f.x, x.at[k + 1] = f.y, x.at[k + 2] = f.z, x.at[k + 3] = f.w;
            }
        } else {
#pragma unroll
            for (int k = 0; k < V; ++k) x.at[k] = from[k];
        }
        return x;
    }
    const uint16_t *from = global(static_cast<const uint16_t *>(data) + i);
    uint16_t half[V];
    if (vector && V == 8) {
        const uint4 q = *reinterpret_cast<const uint4 *>(from);
        const uint32_t word[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int k = 0; k < V; ++k) half[k] = uint16_t(word[k / 2 % 4] >> (k % 2 * 16));
    } else if (Halves && vector && V == 4) {
        const uint2 q = *reinterpret_cast<const uint2 *>(from);
        const uint32_t word[2] = {q.x, q.y};
#pragma unroll
        for (int k = 0; k < V; ++k) half[k] = uint16_t(word[k / 2 % 2] >> (k % 2 * 16));
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) half[k] = from[k];
    }
#pragma unroll
    for (int k = 0; k < V; ++k) x.at[k] = type == Dtype::f16 ? f16_to_f32(half[k]) : bf16_to_f32(half[k]);
    return x;
}

template <int V, bool Halves = false>
__device__ __forceinline__ void store(const Pack<V> &x, void *data, Dtype type, int64_t i, bool vector) {
    if (type == Dtype::f32) {
        float *to = global(static_cast<float *>(data) + i);
        if (V % 4 == 0 && vector) {
#pragma unroll
            for (int k = 0; k + 3 < V; k += 4)
                store16(reinterpret_cast<float4 *>(to + k),
                        make_float4(x.at[k], x.at[k + 1], x.at[k + 2], x.at[k + 3]));
        } else {
#pragma unroll
            for (int k = 0; k < V; ++k) to[k] = x.at[k];
        }
        return;
    }
    uint16_t *to = global(static_cast<uint16_t *>(data) + i);
    uint16_t half[V];
#pragma unroll
    for (int k = 0; k < V; ++k) half[k] = type == Dtype::f16 ? f32_to_f16(x.at[k]) : f32_to_bf16(x.at[k]);
    if (vector && V == 8) {
        uint32_t word[4] = {};
#pragma unroll
        for (int k = 0; k < V; ++k) word[k / 2 % 4] |= uint32_t(half[k]) << (k % 2 * 16);
        store16(reinterpret_cast<uint4 *>(to), uint4{word[0], word[1], word[2], word[3]});
    } else if (Halves && vector && V == 4) {
        uint32_t word[2] = {};
#pragma unroll
        for (int k = 0; k < V; ++k) word[k / 2 % 2] |= uint32_t(half[k]) << (k % 2 * 16);
        store16(reinterpret_cast<uint2 *>(to), uint2{word[0], word[1]});
    } else {
#pragma unroll
        for (int k = 0; k < V; ++k) to[k] = half[k];
    }
}

/// One element: the tail of a tensor.
__device__ __forceinline__ float load_one(const void *data, Dtype type, int64_t i) {
    return load<1>(data, type, i, false).at[0];
}
__device__ __forceinline__ void store_one(float x, void *data, Dtype type, int64_t i) {
    store<1>(Pack<1>{{x}}, data, type, i, false);
}

} // namespace dsopt::gpu
