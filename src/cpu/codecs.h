// SPDX-License-Identifier: Apache-2.0
// Codecs of rules/formats.h on vector registers, with the bits of load_block() and store_block(). Included by files that
// are compiled once per instruction set, so everything is local to the including file.
#pragma once
#include "cpu/registers.h"
#include "rules/formats.h"

namespace dsopt::cpu {
namespace {

// Codecs of elements [begin, n) of a block without registers.

/// The levels of all codes.
template <class Codec> struct Levels {
    float of[256] = {};
    constexpr Levels() {
        for (int code = 0; code < 256; ++code) of[code] = Codec::level(Codec::map(), uint8_t(code));
    }
};
template <class Codec> inline constexpr Levels<Codec> kLevels{};

template <class Codec> void load_codes(const uint8_t *codes, float scale, int64_t begin, int64_t n, float *x) {
    for (int64_t i = begin; i < n; ++i) x[i] = kLevels<Codec>.of[codes[i]] * scale;
}
template <class Codec>
void store_codes(const float *x, const BlockScale &by, int64_t begin, int64_t n, uint8_t *codes) {
    static constexpr auto map = Codec::map();
    for (int64_t i = begin; i < n; ++i) codes[i] = Codec::code_of(map, x[i], by.factor);
}
/// position_in() without tables, which would be gathers in a vectorised loop. Returns 2^h + j, where decade 0 has
/// `levels` levels.
inline int32_t level_number(const DynamicMap &map, int32_t levels, float magnitude) {
    float first = float_of(map.begin[0]), inverse = float_of(map.inverse[0]);
    for (int k = 0; k < 7; ++k) {
        const bool above = magnitude > float_of(map.end[k]);
        first = above ? float_of(map.begin[k + 1]) : first;
        inverse = above ? float_of(map.inverse[k + 1]) : inverse;
        levels = above ? 2 * levels : levels;
    }
    int32_t j = int32_t((magnitude - first) * inverse);
    j = j < 0 ? 0 : j;
    return levels + (j < levels - 1 ? j : levels - 1);
}
template <>
inline void store_codes<Q8>(const float *x, const BlockScale &by, int64_t begin, int64_t n, uint8_t *codes) {
    static constexpr DynamicMap map = Q8::map();
    const float factor = by.factor;
    for (int64_t i = begin; i < n; ++i) {
        const float y = x[i] * factor, magnitude = float_of(bits_of(y) & 0x7fffffffu);
        const int32_t number = level_number(map, 1, magnitude), negative = int32_t(bits_of(y)) >> 31;
        int32_t q = magnitude > float_of(Q8::kHalfOfFirst) ? number : 0;
        q = q < negative + 128 ? q : negative + 128;
        codes[i] = uint8_t((q ^ negative) - negative + 127);
    }
}
template <>
inline void store_codes<Q8Squares>(const float *x, const BlockScale &by, int64_t begin, int64_t n, uint8_t *codes) {
    static constexpr DynamicMap map = Q8Squares::map();
    const float factor = by.factor;
    for (int64_t i = begin; i < n; ++i) {
        const int32_t number = level_number(map, 2, float_of(bits_of(x[i] * factor) & 0x7fffffffu));
        codes[i] = uint8_t(x[i] > 0 ? number - 1 : 0);
    }
}

#if DSOPT_HAS_REGISTERS

typedef int32_t Integers __attribute__((vector_size(kWide * 4)));

inline Words broadcast(uint32_t bits) { return Words{} + bits; }
inline Floats broadcast(float value) { return Floats{} + value; }

/// Loads kWide codes as words.
DSOPT_HD Words load_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    return Words(_mm512_maskz_cvtepu8_epi32(0xffff, read<__m128i>(from)));
#elif defined(__AVX2__)
    return Words(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
#else
    typedef uint8_t Bytes __attribute__((vector_size(kWide)));
    return __builtin_convertvector(read<Bytes>(from), Words);
#endif
}
/// Stores words from 0 to 255 as bytes.
DSOPT_HD void store_bytes(Words x, uint8_t *to) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, __m512i(x));
    __builtin_memcpy(to, &bytes, sizeof bytes);
#elif defined(__AVX2__)
    const __m128i halves =
        _mm_packus_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1));
    const __m128i bytes = _mm_packus_epi16(halves, halves);
    __builtin_memcpy(to, &bytes, 8);
#else
    typedef uint8_t Bytes __attribute__((vector_size(kWide)));
    const Bytes bytes = __builtin_convertvector(x, Bytes);
    __builtin_memcpy(to, &bytes, sizeof bytes);
#endif
}

/// As round_stochastic_bf16().
DSOPT_HD Halves rounded_at_random(Floats x, Words random) {
    const Words bits = Words(x);
    const Words nonfinite = x == x ? bits : bits | 0x400000;
    return upper_halves((bits & 0x7f800000u) != 0x7f800000u ? bits + random : nonfinite);
}
/// As join_master(), of 16-bit elements in the upper halves of words.
DSOPT_HD Floats joined(Words weights, Words remainders) {
    const Words borrow = (weights & 0x7fffffff) != 0 ? (remainders >> 31) << 16 : Words{};
    return Floats((weights - borrow) | remainders >> 16);
}
/// As split_master().
struct SplitMasters {
    Halves weights, remainders;
    DSOPT_HD explicit SplitMasters(Floats masters) {
        const Words bits = Words(masters);
        weights = upper_halves(masters == masters ? bits + ((bits & 0x8000) << 1) : bits | 0x400000);
        remainders = upper_halves(masters == masters ? bits << 16 : Words{});
    }
};

/// A table of eight words, from which each lane selects by the lower three bits of its index.
class Table {
public:
    explicit Table(const uint32_t (&words)[8]) {
#if defined(__AVX512F__)
        table_ = _mm512_maskz_broadcast_i64x4(0xff, read<__m256i>(words));
#elif defined(__AVX2__)
        table_ = read<__m256i>(words);
#else
        for (int k = 0; k < 2; ++k) table_.val[k] = vld1q_u8(reinterpret_cast<const uint8_t *>(words + 4 * k));
#endif
    }
    DSOPT_HD Words operator[](Words index) const {
#if defined(__AVX512F__)
        return Words(_mm512_maskz_permutexvar_epi32(0xffff, __m512i(index), table_));
#elif defined(__AVX2__)
        return Words(_mm256_permutevar8x32_epi32(table_, __m256i(index)));
#else
        const Words bytes = (index & 7) * 0x04040404u + 0x03020100u;
        return Words(vqtbl2q_u8(table_, uint8x16_t(bytes)));
#endif
    }

private:
#if defined(__AVX512F__)
    __m512i table_;
#elif defined(__AVX2__)
    __m256i table_;
#else
    uint8x16x2_t table_;
#endif
};

/// Codecs of registers: level() returns what code_of() stands for, before the multiplication by the scale.
template <class Codec> struct RegisterCodec;

template <> struct RegisterCodec<E4M3> {
    DSOPT_HD Floats level(Words code) const {
        const Floats magnitude = Floats((code & 0x7f) << 20) * float_of(0x7b800000u /* 2^120 */);
        return Floats(Words(magnitude) | (code & 0x80) << 24);
    }
    DSOPT_HD Words code_of(Floats x, Floats factor) const {
        const Words bits = Words(x * factor), magnitude = bits & 0x7fffffffu;
        const Words subnormal = Words(Floats(magnitude) + 16384.0f) - 0x46800000u;
        const Words normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1)) >> 20) - 960;
        return (Integers(magnitude) < 0x3c800000 ? subnormal : normal) | (bits >> 24 & 0x80);
    }
};

/// The position of a magnitude in a dynamic map, see position_in().
struct RegisterMap {
    explicit RegisterMap(const DynamicMap &map) :
        first(map.first),
        distance(map.distance),
        inverse(map.inverse),
        begin(map.begin) {
        for (int k = 0; k < 7; ++k) end[k] = broadcast(float_of(map.end[k]));
    }
    /// Level 2^h + j of decade `index`; `n` is that number.
    DSOPT_HD Floats level(Floats n, Words exponent, Words index) const {
        const Floats j = n - Floats(exponent);
        return Floats(first[index]) + Floats(distance[index]) * j;
    }
    /// Returns j, at most `last`.
    DSOPT_HD Integers position(Floats magnitude, Integers &decade) const {
        decade = Integers{};
        for (int k = 0; k < 7; ++k) decade -= magnitude > end[k];
        const Floats offset = (magnitude - Floats(begin[Words(decade)])) * Floats(inverse[Words(decade)]);
        const Integers j = __builtin_convertvector(offset, Integers);
        return j < 0 ? Integers{} : j;
    }
    const Table first, distance, inverse, begin;
    Floats end[7];
};
DSOPT_HD Integers smaller(Integers a, Integers b) { return a < b ? a : b; }
constexpr uint32_t kExponent = 0x7f800000u;

template <> struct RegisterCodec<Q8> {
    const RegisterMap map{Q8::map()};
    DSOPT_HD Floats level(Words code) const {
        const Integers z = Integers(code) - 127, negative = z >> 31;
        const Integers count = (z ^ negative) - negative;
        const Floats n = __builtin_convertvector(count, Floats);
        const Words exponent = Words(n) & kExponent;
        const Floats magnitude = map.level(n, exponent, (exponent >> 23) + 1);
        return Floats((count == 0 ? Words{} : Words(magnitude)) | (Words(negative) & 0x80000000u));
    }
    DSOPT_HD Words code_of(Floats x, Floats factor) const {
        const Words y = Words(x * factor);
        const Floats magnitude = Floats(y & 0x7fffffffu);
        Integers decade, j = map.position(magnitude, decade);
        const Integers levels = (Integers{} + 1) << decade, negative = Integers(y) >> 31;
        Integers q = levels + smaller(j, levels - 1);
        q = magnitude > float_of(Q8::kHalfOfFirst) ? q : Integers{};
        q = smaller(q, negative + 128);
        return Words((q ^ negative) - negative + 127);
    }
};

template <> struct RegisterCodec<Q8Squares> {
    const RegisterMap map{Q8Squares::map()};
    DSOPT_HD Floats level(Words code) const {
        const Floats n = __builtin_convertvector(Integers(code) + 1, Floats);
        const Words exponent = Words(n) & kExponent;
        const Floats magnitude = map.level(n, exponent, exponent >> 23);
        return code == 0 ? Floats{} : magnitude;
    }
    DSOPT_HD Words code_of(Floats x, Floats factor) const {
        const Floats magnitude = Floats(Words(x * factor) & 0x7fffffffu);
        Integers decade, j = map.position(magnitude, decade);
        const Integers levels = (Integers{} + 2) << decade;
        const Integers q = levels + smaller(j, levels - 1) - 1;
        return Words(x > 0 ? q : Integers{});
    }
};

/// Largest magnitudes of the elements without and with a sign, as integers.
struct Extremes {
    Words positive{}, negative{};
    DSOPT_HD void add(Floats x) {
        const Words bits = Words(x), magnitude = bits & 0x7fffffffu;
        const Integers sign = Integers(bits) >> 31;
        const Words with = magnitude & Words(sign), without = magnitude & ~Words(sign);
        positive = without > positive ? without : positive;
        negative = with > negative ? with : negative;
    }
    static int32_t largest(Words x) {
        uint32_t most = 0;
        for (int k = 0; k < kWide; ++k) most = x[k] > most ? x[k] : most;
        return int32_t(most);
    }
};
#endif

/// Loads a block of n elements.
template <class Codec> void load_stored_block(const uint8_t *codes, float scale, int64_t n, float *x) {
    int64_t i = 0;
#if DSOPT_HAS_REGISTERS
    const RegisterCodec<Codec> codec;
    for (; i + kWide <= n; i += kWide) write(codec.level(load_bytes(codes + i)) * scale, x + i);
#endif
    if (i < n) load_codes<Codec>(codes, scale, i, n, x);
}

/// Stores a block of n elements, at most kBlock.
template <class Codec> void store_stored_block(const float *x, int64_t n, uint8_t *codes, float *scale) {
    int64_t i = 0;
    int32_t positive = 0, negative = 0;
#if DSOPT_HAS_REGISTERS
    Extremes extremes;
    for (; i + kWide <= n; i += kWide) extremes.add(load(x + i, F32{}));
    positive = Extremes::largest(extremes.positive);
    negative = Extremes::largest(extremes.negative);
#endif
    for (; i < n; ++i) { // signed integers, which vectorise
        const auto bits = int32_t(bits_of(x[i])), magnitude = bits & 0x7fffffff;
        const int32_t with = bits < 0 ? magnitude : 0, without = bits < 0 ? 0 : magnitude;
        positive = without > positive ? without : positive;
        negative = with > negative ? with : negative;
    }
    const auto top = uint32_t(positive > negative ? positive : negative);
    const BlockScale by = Codec::scale(top, float_of(uint32_t(positive)), float_of(uint32_t(negative)));
    *scale = by.scale;
    if (by.zeros) {
        __builtin_memset(codes, 0, size_t(n));
        return;
    }
    i = 0;
#if DSOPT_HAS_REGISTERS
    const RegisterCodec<Codec> codec;
    const Floats factor = broadcast(by.factor);
    for (; i + kWide <= n; i += kWide) store_bytes(codec.code_of(load(x + i, F32{}), factor), codes + i);
#endif
    store_codes<Codec>(x, by, i, n, codes);
}

} // namespace
} // namespace dsopt::cpu
