// SPDX-License-Identifier: Apache-2.0
// Storage types and their conversions to and from fp32. Host and device give the same bits, except for the payload of a
// NaN.
#pragma once
#include "base/hd.h"
#include "base/status.h"
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dsopt {

enum class Dtype : uint8_t { f32 = DSOPT_DTYPE_F32, f16 = DSOPT_DTYPE_F16, bf16 = DSOPT_DTYPE_BF16 };

/// A dtype that occurs only in safetensors files: no tensor of the ABI has it.
constexpr int32_t kI64 = 102;

/// A dtype of the ABI, of state tensors or of files.
struct DtypeInfo {
    int32_t dtype;
    size_t size;
    const char *name; // in files and messages
};
inline constexpr DtypeInfo kDtypes[] = {
    {DSOPT_DTYPE_F32, 4, "F32"}, {DSOPT_DTYPE_F16, 2, "F16"},         {DSOPT_DTYPE_BF16, 2, "BF16"},
    {DSOPT_DTYPE_I32, 4, "I32"}, {DSOPT_DTYPE_F64, 8, "F64"},         {DSOPT_DTYPE_I16, 2, "I16"},
    {DSOPT_DTYPE_U8, 1, "U8"},   {DSOPT_DTYPE_F8_E4M3, 1, "F8_E4M3"}, {kI64, 8, "I64"}};
/// Returns the size of an element in bytes; 0 for an unknown dtype.
constexpr size_t dtype_size(int32_t dtype) {
    for (const DtypeInfo &info : kDtypes)
        if (info.dtype == dtype) return info.size;
    return 0;
}
/// Returns NULL for an unknown dtype.
constexpr const char *dtype_name(int32_t dtype) {
    for (const DtypeInfo &info : kDtypes)
        if (info.dtype == dtype) return info.name;
    return nullptr;
}
constexpr bool is_float_dtype(int32_t dtype) {
    return dtype == DSOPT_DTYPE_F32 || dtype == DSOPT_DTYPE_F16 || dtype == DSOPT_DTYPE_BF16;
}

// The builtin behind std::bit_cast: an out-of-line copy of the function itself, from a file that is compiled for one
// instruction set, could be the copy that the linker keeps for all.
DSOPT_HD constexpr uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
DSOPT_HD constexpr float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

/// A double in memory that is aligned to 4 bytes only, such as I32 state in memory of the caller.
struct DoubleWords {
    int32_t words[2];
    DSOPT_HD operator double() const { return __builtin_bit_cast(double, *this); }
    DSOPT_HD DoubleWords &operator=(double value) { return *this = __builtin_bit_cast(DoubleWords, value); }
};

DSOPT_HD float bf16_to_f32(uint16_t value) { return float_of(uint32_t(value) << 16); }

// On a GPU each of these conversions is one instruction; that to bfloat16 from capability 8.0 on.

/// Rounds to nearest, ties to even. A NaN keeps its upper payload bits and becomes quiet, so it cannot round to
/// infinity.
DSOPT_HD uint16_t f32_to_bf16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint16_t result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#else
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return uint16_t(((bits & 0x7fffffffu) > 0x7f800000u ? (bits | 0x00400000u) : rounded) >> 16);
#endif
}

/// Exact. The multiplication by 2^112 re-biases the exponent and normalises subnormals in one rounding-free operation.
DSOPT_HD float f16_to_f32(uint16_t value) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value));
    return result;
#elif defined(__aarch64__)
    return float(__builtin_bit_cast(__fp16, value)); // one instruction with the same result, which gcc vectorises
#else
    const uint32_t magnitude = uint32_t(value & 0x7fffu) << 13;
    const float scaled = float_of(magnitude) * float_of(0x77800000u /* 2^112 */);
    const uint32_t nonfinite = magnitude | 0x7f800000u;
    const uint32_t quiet = magnitude > 0x0f800000u ? 0x00400000u : 0u;
    const uint32_t bits = magnitude >= 0x0f800000u ? (nonfinite | quiet) : bits_of(scaled);
    return float_of(bits | (uint32_t(value & 0x8000u) << 16));
#endif
}

/// Rounds to nearest, ties to even. Overflow becomes infinity. A NaN keeps its upper payload bits and becomes quiet.
DSOPT_HD uint16_t f32_to_f16(float value) {
#if defined(__CUDA_ARCH__)
    uint16_t result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#elif defined(__aarch64__)
    return __builtin_bit_cast(uint16_t, __fp16(value));
#else
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 adding 0.5 aligns the subnormal's bits to the end of the fraction, and the addition rounds them.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    const uint32_t large = magnitude > 0x7f800000u ? nan : 0x7c00u;
    return uint16_t(sign | (magnitude >= 0x477ff000u ? large : finite));
#endif
}

/// Storage tags: the storage type, dtype and fp32 conversions of an array's elements.
struct F32 {
    using storage = float;
    static constexpr Dtype format = Dtype::f32;
    DSOPT_HD static float load(float value) { return value; }
    DSOPT_HD static float store(float value) { return value; }
};
struct F16 {
    using storage = uint16_t;
    static constexpr Dtype format = Dtype::f16;
    DSOPT_HD static float load(uint16_t value) { return f16_to_f32(value); }
    DSOPT_HD static uint16_t store(float value) { return f32_to_f16(value); }
};
struct BF16 {
    using storage = uint16_t;
    static constexpr Dtype format = Dtype::bf16;
    DSOPT_HD static float load(uint16_t value) { return bf16_to_f32(value); }
    DSOPT_HD static uint16_t store(float value) { return f32_to_bf16(value); }
};

/// Calls `f` with the storage tag of a dtype. No default: -Werror=switch finds what a new dtype must touch.
template <class F> DSOPT_HD constexpr void visit(Dtype dtype, F &&f) {
    switch (dtype) {
    case Dtype::f32: f(F32{}); return;
    case Dtype::f16: f(F16{}); return;
    case Dtype::bf16: f(BF16{}); return;
    }
}
constexpr size_t dtype_size(Dtype dtype) {
    size_t size = 0;
    visit(dtype, [&](auto tag) { size = sizeof(typename decltype(tag)::storage); });
    return size;
}

} // namespace dsopt
