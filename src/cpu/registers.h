// SPDX-License-Identifier: Apache-2.0
// Vector registers of floats, with conversion of 16-bit types on loads and rounding on stores. Included by files that
// are compiled once per instruction set, so everything is local to the including file.
#pragma once
#include "base/dtype.h"
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#define DSOPT_HAS_REGISTERS 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#define DSOPT_HAS_REGISTERS 1
#else
#define DSOPT_HAS_REGISTERS 0 // without fp16 conversion instructions, loops over floats are as fast
#endif

#if DSOPT_HAS_REGISTERS
namespace dsopt::cpu {
namespace {

// `Packed`: the elements of a register in 16 bits each.
#if defined(__AVX512F__)
constexpr int kWide = 16;
using Packed = __m256i;
#elif defined(__AVX2__)
constexpr int kWide = 8;
using Packed = __m128i;
#else
constexpr int kWide = 4;
using Packed = uint16x4_t;
#endif
/// Sixteen registers do not hold both the constants of a rule and those of rounding to bf16.
constexpr bool kFewRegisters = kWide == 8;
typedef float Floats __attribute__((vector_size(kWide * 4)));
typedef uint32_t Words __attribute__((vector_size(kWide * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWide * 2)));

template <class T> DSOPT_HD T read(const void *from) {
    T value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

#if defined(__AVX512F__) // masked: gcc 12 warns about its own header otherwise
DSOPT_HD Floats as_f32(__m256i x, BF16) { return Floats(Words(_mm512_maskz_cvtepu16_epi32(0xffff, x)) << 16); }
DSOPT_HD Floats as_f32(__m256i x, F16) { return Floats(_mm512_maskz_cvtph_ps(0xffff, x)); }
#endif
#if defined(__AVX2__)
DSOPT_HD __m256 as_f32(__m128i x, BF16) { return __m256(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
DSOPT_HD __m256 as_f32(__m128i x, F16) { return _mm256_cvtph_ps(x); }
// Converts the first four elements.
DSOPT_HD __m128 as_f32x4(__m128i x, BF16) { return __m128(_mm_slli_epi32(_mm_cvtepu16_epi32(x), 16)); }
DSOPT_HD __m128 as_f32x4(__m128i x, F16) { return _mm_cvtph_ps(x); }
#else
DSOPT_HD Floats as_f32(uint16x4_t x, BF16) { return Floats(__builtin_convertvector(Halves(x), Words) << 16); }
DSOPT_HD Floats as_f32(uint16x4_t x, F16) { return Floats(vcvt_f32_f16(vreinterpret_f16_u16(x))); }
#endif

DSOPT_HD Floats load(const float *from, F32) { return read<Floats>(from); }
template <class Tag> DSOPT_HD Floats load(const uint16_t *from, Tag tag) {
    return Floats(as_f32(read<Packed>(from), tag));
}

/// Rounds a register to the storage type.
DSOPT_HD Floats rounded(Floats x, F32) { return x; }
DSOPT_HD Halves rounded(Floats x, F16) {
#if defined(__AVX512F__)
    return Halves(_mm512_maskz_cvtps_ph(0xffff, __m512(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    return Halves(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT));
#else
    return Halves(vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(x))));
#endif
}
/// Returns the upper half of each word.
DSOPT_HD Halves upper_halves(Words word) {
#if defined(__AVX512F__)
    typedef uint16_t Pairs __attribute__((vector_size(64)));
    return __builtin_shufflevector(Pairs(word), Pairs(word), 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__) // packing works within each half of the register
    const __m256i halves = __m256i(word >> 16), packed = _mm256_packus_epi32(halves, halves);
    return Halves(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0xd8)));
#else
    return __builtin_convertvector(word >> 16, Halves);
#endif
}
DSOPT_HD Halves rounded(Floats x, BF16) { // as f32_to_bf16()
    const Words bits = Words(x), even = bits + ((bits >> 16) & 1) + 0x7fff;
    return upper_halves(x == x ? even : bits | 0x400000);
}

/// `by_instruction`: the processor has an instruction for bf16. The instruction treats subnormals as zeros, so a
/// register that holds a subnormal is rounded without it. The test requires that denormals are not flushed: see
/// DefaultFloatEnvironment.
template <class Tag> DSOPT_HD auto rounded(Floats x, Tag tag, [[maybe_unused]] bool by_instruction) {
#if defined(__AVX512F__)
    constexpr int kSubnormal = 0x20;
    if constexpr (std::is_same_v<Tag, BF16>)
        if (by_instruction && _mm512_fpclass_ps_mask(__m512(x), kSubnormal) == 0) {
            Halves halves;
            // Assembly, which the compiler does not move before the test: this code also runs on processors without the
            // instruction.
            asm volatile("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(x));
            return halves;
        }
#endif
    return rounded(x, tag);
}

template <class Register> DSOPT_HD void write(Register x, void *to) { __builtin_memcpy(to, &x, sizeof x); }
/// Writes with a non-temporal store. `to` is aligned to the register's size.
template <class Register> DSOPT_HD void write_streaming(Register x, void *to) {
#if defined(__AVX2__)
    if constexpr (sizeof x == 64) {
#if defined(__AVX512F__)
        _mm512_stream_ps(static_cast<float *>(to), __m512(x));
#endif
    } else if constexpr (sizeof x == 32)
        _mm256_stream_si256(static_cast<__m256i *>(to), __m256i(x));
    else
        _mm_stream_si128(static_cast<__m128i *>(to), __m128i(x));
#else
    write(x, to);
#endif
}

/// All lanes of a register are in memory.
struct AllLanes {};
template <class T, class Tag> DSOPT_HD Floats load(const T *from, Tag tag, AllLanes) { return load(from, tag); }
template <class Register> DSOPT_HD void write(Register x, void *to, AllLanes) { write(x, to); }
#if defined(__AVX512F__)
#define DSOPT_HAS_MASKS 1
/// The first `count` lanes are in memory. Other lanes are loaded as zeros; their memory is neither read nor written.
struct FirstLanes {
    __mmask16 mask;
    explicit FirstLanes(int64_t count) : mask(__mmask16((1u << count) - 1)) {}
};
DSOPT_HD Floats load(const float *from, F32, FirstLanes lanes) {
    return Floats(_mm512_maskz_loadu_ps(lanes.mask, from));
}
template <class Tag> DSOPT_HD Floats load(const uint16_t *from, Tag tag, FirstLanes lanes) {
    return as_f32(_mm256_maskz_loadu_epi16(lanes.mask, from), tag);
}
DSOPT_HD void write(Floats x, void *to, FirstLanes lanes) { _mm512_mask_storeu_ps(to, lanes.mask, __m512(x)); }
DSOPT_HD void write(Halves x, void *to, FirstLanes lanes) { _mm256_mask_storeu_epi16(to, lanes.mask, __m256i(x)); }
#else
#define DSOPT_HAS_MASKS 0
#endif

} // namespace
} // namespace dsopt::cpu
#endif

// Names of the kernel table of each instruction set.
#define DSOPT_JOIN_(a, b) a##b
#define DSOPT_JOIN(a, b) DSOPT_JOIN_(a, b)
#define DSOPT_TEXT_(x) #x
#define DSOPT_TEXT(x) DSOPT_TEXT_(x)
