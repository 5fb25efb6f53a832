// SPDX-License-Identifier: Apache-2.0
// Packing of operands into panels of words, and rounding of results, eight elements at a time. Included by files that
// are compiled once per instruction set, so everything is local to the including file.
#pragma once
#include "cpu/registers.h"
#include "rules/muon.h"

namespace dsopt::cpu {
namespace {

typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));
typedef float Four __attribute__((vector_size(16)));
typedef double FourDoubles __attribute__((vector_size(32)));

DSOPT_HD int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T> DSOPT_HD T load_as(const void *from) {
    T value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}
template <class T> DSOPT_HD void store_as(T value, void *to) { __builtin_memcpy(to, &value, sizeof value); }

DSOPT_HD Eight load_eight(const float *from, F32) { return load_as<Eight>(from); }
template <class Tag> DSOPT_HD Eight load_eight(const uint16_t *from, Tag tag) {
#if defined(__AVX2__)
    return Eight(as_f32(load_as<__m128i>(from), tag));
#else
    Eight x{};
    for (int k = 0; k < 8; ++k) x[k] = tag.load(from[k]);
    return x;
#endif
}

/// Bits of the least magnitude that is not rounded to zero: kLeastInput of bf16, and of fp16 its least subnormal, which
/// is larger. -0 becomes +0.
constexpr uint16_t least_magnitude(BF16) { return uint16_t(__builtin_bit_cast(uint32_t, kLeastInput) >> 16); }
constexpr uint16_t least_magnitude(F16) { return 1; }

DSOPT_HD EightHalves rounded_eight(Eight x, BF16) {
    const EightWords bits = EightWords(x), even = bits + ((bits >> 16) & 1) + 0x7fff;
    return __builtin_convertvector((x == x ? even : bits | 0x400000) >> 16, EightHalves);
}
DSOPT_HD EightHalves rounded_eight(Eight x, F16) {
#if defined(__AVX2__)
    return EightHalves(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT));
#else
    EightHalves halves{};
    for (int k = 0; k < 8; ++k) halves[k] = F16::store(x[k]);
    return halves;
#endif
}
/// Stores rd(x).
DSOPT_HD void store_eight(Eight x, float *to, F32) { store_as(x, to); }
template <class Tag> DSOPT_HD void store_eight(Eight x, uint16_t *to, Tag tag) {
    const EightHalves halves = rounded_eight(x, tag);
    store_as((halves & 0x7fff) >= least_magnitude(tag) ? halves : EightHalves{}, to);
}
/// Returns x * scale: the product in double, rounded once.
DSOPT_HD float scaled(float x, double scale) { return float(double(x) * scale); }
DSOPT_HD Eight scaled(Eight x, double scale) {
    const Four low = __builtin_shufflevector(x, x, 0, 1, 2, 3), high = __builtin_shufflevector(x, x, 4, 5, 6, 7);
    const Four a = __builtin_convertvector(__builtin_convertvector(low, FourDoubles) * scale, Four);
    const Four b = __builtin_convertvector(__builtin_convertvector(high, FourDoubles) * scale, Four);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}
DSOPT_HD void store_one(float x, float *to, F32) { *to = x; }
template <class Tag> DSOPT_HD void store_one(float x, uint16_t *to, Tag tag) {
    const uint16_t half = tag.store(x);
    *to = (half & 0x7fff) >= least_magnitude(tag) ? half : uint16_t(0);
}
template <class Tag> void store_row(const float *x, typename Tag::storage *to, int64_t count, Tag tag) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) store_eight(load_as<Eight>(x + i), to + i, tag);
    for (; i < count; ++i) store_one(x[i], to + i, tag);
}

DSOPT_HD void transpose(Eight (&x)[8]) {
    Eight y[8], z[8];
    for (int k = 0; k < 8; k += 2) {
        y[k] = __builtin_shufflevector(x[k], x[k + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        y[k + 1] = __builtin_shufflevector(x[k], x[k + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int k = 0; k < 8; k += 4)
        for (int h = 0; h < 2; ++h) {
            z[k + 2 * h] = __builtin_shufflevector(y[k + h], y[k + h + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            z[k + 2 * h + 1] = __builtin_shufflevector(y[k + h], y[k + h + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int k = 0; k < 4; ++k) {
        x[k] = __builtin_shufflevector(z[k], z[k + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        x[k + 4] = __builtin_shufflevector(z[k], z[k + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/// Words of a panel that hold one element each, as fp32. `from` is the first element of a word, `next` the distance to
/// the next one of the chain.
template <class Tag> struct Singles {
    using tag = Tag;
    using T = typename Tag::storage;
    static constexpr int64_t elements = 1; // per word
    /// Returns the words of eight adjacent chains. `whole`: all elements of the words exist.
    DSOPT_HD static Eight across(const T *from, int64_t, bool) { return load_eight(from, Tag{}); }
    /// Returns eight adjacent words of one chain.
    DSOPT_HD static Eight along(const T *from) { return load_eight(from, Tag{}); }
    DSOPT_HD static float one(const T *from, int64_t, bool) { return Tag::load(*from); }
};

/// Words that hold two bf16 elements: the first one of the chain in the upper half. The second one is 0 at the end of a
/// chain of odd length.
struct Pairs {
    using tag = BF16;
    using T = uint16_t;
    static constexpr int64_t elements = 2;
    DSOPT_HD static EightWords words(const T *from) {
        return __builtin_convertvector(load_as<EightHalves>(from), EightWords);
    }
    DSOPT_HD static Eight across(const T *from, int64_t next, bool whole) {
        return Eight(words(from) << 16 | (whole ? words(from + next) : EightWords{}));
    }
    DSOPT_HD static Eight along(const T *from) {
        const auto pairs = load_as<EightWords>(from);
        return Eight(pairs << 16 | pairs >> 16);
    }
    DSOPT_HD static float one(const T *from, int64_t next, bool whole) {
        return float_of(uint32_t(*from) << 16 | (whole ? from[next] : 0u));
    }
};

/// Packs the chains of `Width` adjacent columns, of which `columns` exist: each row of `from` has one element of each
/// chain. Columns that do not exist repeat other elements; their results are not stored. `available`: elements from
/// `from` to the end of the matrix. Up to seven words after the panel are overwritten.
template <class Words, int Width>
void pack_columns(const typename Words::T *from, int64_t stride, int64_t length, int64_t columns, int64_t available,
                  float *panel) {
    available -= (Words::elements - 1) * stride;
    for (int64_t k = 0; k < length; k += Words::elements, from += Words::elements * stride, panel += Width) {
        const bool whole = k + Words::elements <= length;
        for (int64_t i = 0; i < Words::elements; ++i) __builtin_prefetch(from + i * stride + Width, 0, 2);
        for (int c = 0; c < Width; c += 8)
            if (c > 0 && c >= columns)
                store_as(load_as<Eight>(panel + c - 8), panel + c);
            else if (k * stride + c + 8 <= available)
                store_as(Words::across(from + c, stride, whole), panel + c);
            else
                for (int i = c; i < c + 8; ++i) panel[i] = Words::one(from + smaller(i, columns - 1), stride, whole);
    }
}
/// Packs the chains of `Width` adjacent rows, of which `rows` exist: each row of `from` is a chain. Rows that do not
/// exist repeat the last one. Up to seven words after the panel are overwritten.
template <class Words, int Width>
void pack_rows(const typename Words::T *from, int64_t stride, int64_t length, int64_t rows, float *panel) {
    // In descending order: where eight words overlap with the next step of the chains, that step is stored later.
    for (int r = (Width - 1) / 8 * 8; r >= 0; r -= 8) {
        const typename Words::T *row[8];
        for (int i = 0; i < 8; ++i) row[i] = from + smaller(r + i, rows - 1) * stride;
        float *to = panel + r;
        int64_t k = 0;
        for (; k + 8 * Words::elements <= length; k += 8 * Words::elements, to += 8 * Width) {
            Eight x[8];
            for (int i = 0; i < 8; ++i) x[i] = Words::along(row[i] + k);
            transpose(x);
            for (int i = 0; i < 8; ++i) store_as(x[i], to + i * Width);
        }
        for (; k < length; k += Words::elements, to += Width)
            for (int i = 0; i < 8; ++i) to[i] = Words::one(row[i] + k, 1, k + Words::elements <= length);
    }
}

} // namespace
} // namespace dsopt::cpu
