// SPDX-License-Identifier: Apache-2.0
// Types and intrinsics of one CUDA thread: vectors, cached loads and stores, bits, conversions, rounding. Part of
// cuda_emu.h.
#pragma once
#include "cuda_emu.h"
#include <limits>

#define CUDA_EMU_VECTOR2(type, element)                                                                                \
    struct alignas(2 * sizeof(element)) type {                                                                         \
        element x, y;                                                                                                  \
    };                                                                                                                 \
    inline type make_##type(element x, element y) { return {x, y}; }
#define CUDA_EMU_VECTOR4(type, element)                                                                                \
    struct alignas(4 * sizeof(element)) type {                                                                         \
        element x, y, z, w;                                                                                            \
    };                                                                                                                 \
    inline type make_##type(element x, element y, element z, element w) { return {x, y, z, w}; }
CUDA_EMU_VECTOR4(uchar4, unsigned char)
CUDA_EMU_VECTOR2(ushort2, unsigned short)
CUDA_EMU_VECTOR4(ushort4, unsigned short)
CUDA_EMU_VECTOR2(int2, int)
CUDA_EMU_VECTOR4(int4, int)
CUDA_EMU_VECTOR2(uint2, unsigned)
CUDA_EMU_VECTOR4(uint4, unsigned)
CUDA_EMU_VECTOR2(float2, float)
CUDA_EMU_VECTOR4(float4, float)
CUDA_EMU_VECTOR2(double2, double)
CUDA_EMU_VECTOR2(ulonglong2, unsigned long long)
#undef CUDA_EMU_VECTOR2
#undef CUDA_EMU_VECTOR4

namespace cuemu {

/// Traps on a misaligned access, as a device does and the host's processor may not.
template <class T> inline T *aligned(T *p) {
    if (reinterpret_cast<uintptr_t>(p) % alignof(T)) trap("misaligned address");
    return p;
}
/// Saturates, and converts NaN to 0, as the device's conversions do; plain C++ leaves both undefined.
template <class I, class F> inline I saturate(F value) {
    using Limits = std::numeric_limits<I>;
    if (value != value) return 0;
    if (value >= std::ldexp(F(1), Limits::digits)) return Limits::max();
    return value <= F(Limits::min()) ? Limits::min() : I(value);
}

inline float with_device_nan(float value) { return value == value ? value : from_bits<float>(0x7fffffffu); }

} // namespace cuemu

// Caching hints have no effect here, but the alignment that the access needs is checked.
template <class T> inline T __ldg(const T *p) { return *cuemu::aligned(p); }
template <class T> inline T __ldca(const T *p) { return *cuemu::aligned(p); }
template <class T> inline T __ldcg(const T *p) { return *cuemu::aligned(p); }
template <class T> inline T __ldcs(const T *p) { return *cuemu::aligned(p); }
/// Arithmetic of a GPU produces only one NaN. Arithmetic of the host produces others, which a store replaces by it.
inline void __stwb(float *p, float value) {
    cuemu::note_store(p, sizeof *p);
    *cuemu::aligned(p) = cuemu::with_device_nan(value);
}
inline void __stwb(float4 *p, float4 value) {
    cuemu::note_store(p, sizeof *p);
    *cuemu::aligned(p) = {cuemu::with_device_nan(value.x), cuemu::with_device_nan(value.y),
                          cuemu::with_device_nan(value.z), cuemu::with_device_nan(value.w)};
}
template <class T> inline void __stwb(T *p, std::type_identity_t<T> value) {
    cuemu::note_store(p, sizeof *p);
    *cuemu::aligned(p) = value;
}
template <class T> inline void __stcg(T *p, std::type_identity_t<T> value) { *cuemu::aligned(p) = value; }
template <class T> inline void __stcs(T *p, std::type_identity_t<T> value) { *cuemu::aligned(p) = value; }

// A hint to nvcc that a pointer from a table does not point to shared memory. Nothing is checked.
inline unsigned __isGlobal(const void *) { return 1; }
#define __builtin_assume(condition) static_cast<void>(0)

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= (v >> i & 1u) << (31 - i);
    return reversed;
}

/// Selects four of the eight bytes of y and x (x is the lower half), by the lowest digits of `selector`.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> (selector >> (4 * i) & 7u) * 8 & 0xffu) << (8 * i);
    return result;
}

inline int __float_as_int(float v) { return cuemu::from_bits<int>(cuemu::to_bits(v)); }
inline unsigned __float_as_uint(float v) { return cuemu::from_bits<unsigned>(cuemu::to_bits(v)); }
inline float __int_as_float(int v) { return cuemu::from_bits<float>(cuemu::to_bits(v)); }
inline float __uint_as_float(unsigned v) { return cuemu::from_bits<float>(cuemu::to_bits(v)); }
inline long long __double_as_longlong(double v) { return cuemu::from_bits<long long>(cuemu::to_bits(v)); }
inline double __longlong_as_double(long long v) { return cuemu::from_bits<double>(cuemu::to_bits(v)); }
inline int __double2hiint(double v) { return int(cuemu::to_bits(v) >> 32); }
inline int __double2loint(double v) { return int(uint32_t(cuemu::to_bits(v))); }

inline int __float2int_rn(float v) { return cuemu::saturate<int>(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return cuemu::saturate<int>(std::trunc(v)); }
inline int __float2int_rd(float v) { return cuemu::saturate<int>(std::floor(v)); }
inline int __float2int_ru(float v) { return cuemu::saturate<int>(std::ceil(v)); }
inline unsigned __float2uint_rn(float v) { return cuemu::saturate<unsigned>(std::nearbyint(v)); }
inline unsigned __float2uint_rz(float v) { return cuemu::saturate<unsigned>(std::trunc(v)); }
inline long long __float2ll_rn(float v) { return cuemu::saturate<long long>(std::nearbyint(v)); }
inline long long __float2ll_rz(float v) { return cuemu::saturate<long long>(std::trunc(v)); }
inline int __double2int_rn(double v) { return cuemu::saturate<int>(std::nearbyint(v)); }
inline int __double2int_rz(double v) { return cuemu::saturate<int>(std::trunc(v)); }
inline long long __double2ll_rn(double v) { return cuemu::saturate<long long>(std::nearbyint(v)); }
inline long long __double2ll_rz(double v) { return cuemu::saturate<long long>(std::trunc(v)); }
inline float __double2float_rn(double v) { return float(v); }
inline float __int2float_rn(int v) { return float(v); }
inline float __uint2float_rn(unsigned v) { return float(v); }
inline float __ll2float_rn(long long v) { return float(v); }
inline double __ll2double_rn(long long v) { return double(v); }

// Each operation is rounded separately, like the plain operators under -ffp-contract=off.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
