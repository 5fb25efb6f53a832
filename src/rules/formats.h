// SPDX-License-Identifier: Apache-2.0
// Formats in which moments and masters are stored between steps; within a step they are fp32. Every operation is fp32
// and rounded separately, so host and device store the same bits, except for the payload of a NaN.
#pragma once
#include "base/dtype.h"
#include "rules/rounding.h"
#include <initializer_list>
#include <iterator>

namespace dsopt {

/// Formats of moments. The first three are those of gradients and weights (Dtype), those from e4m3 on have scales.
enum class Format : uint8_t {
    f32 = DSOPT_DTYPE_F32,
    f16 = DSOPT_DTYPE_F16, // compat mode only
    bf16 = DSOPT_DTYPE_BF16,
    bf16_random,
    e4m3,
    q8,
    q8_squares
};
/// True for formats whose elements are codes, with a scale per block.
DSOPT_HD constexpr bool has_scales(Format format) { return format >= Format::e4m3; }
/// Returns the dtype of the stored elements.
DSOPT_HD constexpr int32_t dtype_of(Format format) {
    switch (format) {
    case Format::f32: return DSOPT_DTYPE_F32;
    case Format::f16: return DSOPT_DTYPE_F16;
    case Format::bf16:
    case Format::bf16_random: return DSOPT_DTYPE_BF16;
    case Format::e4m3: return DSOPT_DTYPE_F8_E4M3;
    case Format::q8:
    case Format::q8_squares: break;
    }
    return DSOPT_DTYPE_U8;
}
/// Returns the size of an element in bytes, without its part of a scale.
DSOPT_HD constexpr int64_t size_of(Format format) { return format == Format::f32 ? 4 : has_scales(format) ? 1 : 2; }
/// Returns the dtype from and to which a format without scales is converted.
DSOPT_HD constexpr Dtype plain_dtype(Format format) {
    return format == Format::bf16_random ? Dtype::bf16 : Dtype(format);
}

/// The record of a value of enum dsopt_moment.
struct FormatInfo {
    int32_t moment;                    // DSOPT_MOMENT_...
    const char *name;                  // in messages
    const char *key;                   // in the metadata of checkpoints
    Format gradients;                  // of means of gradients
    Format squares;                    // of means and sums of squares
    const char *not_squares = nullptr; // why squares cannot have it, a predicate of the moment; NULL: they can
    constexpr Format of(bool are_squares) const { return are_squares ? squares : gradients; }
};
/// By enum dsopt_moment.
inline constexpr FormatInfo kMomentFormats[] = {
    {DSOPT_MOMENT_F32, "F32", "f32", Format::f32, Format::f32},
    {DSOPT_MOMENT_BF16, "BF16", "bf16", Format::bf16, Format::bf16,
     "could not follow small changes if rounded to nearest; BF16_RANDOM can"},
    {DSOPT_MOMENT_BF16_RANDOM, "BF16_RANDOM", "bf16_random", Format::bf16_random, Format::bf16_random},
    {DSOPT_MOMENT_E4M3, "E4M3", "e4m3", Format::e4m3, Format::e4m3, "has a wider range"},
    {DSOPT_MOMENT_Q8, "Q8", "q8", Format::q8, Format::q8_squares},
};
constexpr int32_t kLastMomentFormat = std::end(kMomentFormats)[-1].moment;

/// Number of consecutive elements of a tensor that share a scale in E4M3 and Q8. The last block may be shorter.
constexpr int64_t kBlock = 256;
DSOPT_HD constexpr int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// ---------------------------------------------------------------------------------------------- stochastic rounding
/// What a moment is a running mean of.
enum class MomentKind : uint8_t { gradient = 1, square = 2 };

/// Returns the key of a tensor's moment in a step: random numbers independent of those of weights and other moments.
DSOPT_HD uint64_t moment_key(uint64_t tensor_key, MomentKind kind, int64_t step) {
    return rounding_key(mix64(tensor_key ^ (0x100u + uint64_t(kind))), step);
}

// -------------------------------------------------------------------------------------------- bf16 weight, remainder
/// An fp32 master as a bf16 weight and the lower 16 bits of the master.
struct SplitMaster {
    uint16_t weight, remainder;
};
/// Rounds the upper 16 bits half away from zero, so that join() needs no other bits. The weight differs from
/// f32_to_bf16() on ties only. A NaN becomes quiet and has remainder 0, so no carry reaches its weight.
DSOPT_HD SplitMaster split_master(float master) {
    const uint32_t bits = bits_of(master);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {uint16_t(nan ? bits >> 16 | 0x40u : (bits >> 16) + (bits >> 15 & 1u)), uint16_t(nan ? 0u : bits)};
}
/// Returns the master: exact for finite values and infinities. With remainder 0 it is the weight. No master is split into
/// a zero and a remainder of 2^15 or more. The caller may have set that weight to zero, below which there is no upper half.
DSOPT_HD float join_master(SplitMaster split) {
    const bool zero = (split.weight & 0x7fffu) == 0;
    const uint32_t upper = uint32_t(split.weight) - (zero ? 0 : uint32_t(split.remainder) >> 15);
    return float_of(upper << 16 | split.remainder);
}

// ------------------------------------------------------------------------------------------------------------ blocks
constexpr uint32_t kInfBits = 0x7f800000u;
/// 2^-100. No scale is derived from less, so its reciprocal is finite.
constexpr uint32_t kLeastTop = 0x0d800000u;

/// Returns the larger of `top` and the magnitude of `x`. Magnitudes are compared as integers: the order of the elements
/// does not matter, and a NaN is larger than infinity.
DSOPT_HD uint32_t larger_magnitude(uint32_t top, float x) {
    const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
    return magnitude > top ? magnitude : top;
}

/// How the elements of a block are stored: code(x * factor), and read: level(code) * scale.
struct BlockScale {
    float scale;
    float factor;
    bool zeros; // all codes are 0, because the block is all zeros (scale 0) or has an Inf or NaN (scale NaN)
};
DSOPT_HD BlockScale scale_without_codes(uint32_t top) { return {float_of(top == 0 ? 0u : 0x7fc00000u), 0, true}; }
DSOPT_HD bool has_codes(uint32_t top) { return top != 0 && top < kInfBits; }

/// Format of OCP FP8 E4M3: 3 bits of fraction, exponent bias 7, no infinity, largest value 448.
struct E4M3 {
    static constexpr float kLargest = 448;
    /// Rounds to nearest, ties to even. |y| is at most 448 and its rounding error.
    DSOPT_HD static uint8_t code(float y) {
        const uint32_t bits = bits_of(y), magnitude = bits & 0x7fffffffu;
        // Below 2^-6 adding 2^14 aligns the subnormal to the end of the fraction, and the addition rounds.
        const uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u;
        const uint32_t normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - 960u;
        return uint8_t((magnitude < 0x3c800000u ? subnormal : normal) | (bits >> 24 & 0x80u));
    }
    /// Exact. The multiplication by 2^120 re-biases the exponent and normalizes subnormals.
    DSOPT_HD static constexpr float level(uint8_t code) {
        const float magnitude = float_of(uint32_t(code & 0x7fu) << 20) * float_of(0x7b800000u /* 2^120 */);
        return float_of(bits_of(magnitude) | uint32_t(code & 0x80u) << 24);
    }
    /// `top`: largest magnitude of the block. `positive`, `negative`: unused.
    DSOPT_HD static BlockScale scale(uint32_t top, float, float) {
        if (!has_codes(top)) return scale_without_codes(top);
        const float t = float_of(top > kLeastTop ? top : kLeastTop);
        return {t / kLargest, kLargest / t, false};
    }
    struct Map {}; // it has no table
    DSOPT_HD static constexpr Map map() { return {}; }
    DSOPT_HD static uint8_t code_of(const Map &, float x, float factor) { return code(x * factor); }
    DSOPT_HD static constexpr float level(const Map &, uint8_t code) { return level(code); }
};

/// Constants of an 8-bit dynamic map (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"), computed in
/// double and rounded once. Decade d = 0 ... 6 has equidistant levels: level j is first[d] + distance[d] * j. Entry 7 is
/// the level 1.0.
struct DynamicMap {
    uint32_t first[8], distance[8];
    uint32_t inverse[8]; // levels of decade d per unit
    uint32_t end[8];     // larger magnitudes belong to a later decade
    uint32_t begin[8];   // lower ends of the decades
};
/// Returns the map of signed numbers: 2^d levels of each sign in decade d, and 0. There is no level -1.0.
DSOPT_HD constexpr DynamicMap signed_map() {
    return {{0x3513a3b6, 0x365a1a93, 0x37b24207, 0x3923d70a, 0x3aa7ef9e, 0x3c3ae148, 0x3ddb3333, 0x3f800000},
            {0x35719787, 0x3696feb5, 0x37bcbe62, 0x38ebedfa, 0x3a1374bc, 0x3b3851ec, 0x3c666666, 0},
            {0x4987a239, 0x4859038e, 0x472d9c72, 0x460ae38e, 0x44de38e4, 0x43b1c71c, 0x428e38e4, 0},
            {0x35ff0381, 0x37734507, 0x39007358, 0x3a91d14e, 0x3c2d0e56, 0x3dd28f5c, 0x3f7f199a, kInfBits},
            {0x33d6bf95, 0x358637bd, 0x3727c5ac, 0x38d1b717, 0x3a83126f, 0x3c23d70a, 0x3dcccccd, 0}};
}
/// Returns the map of numbers that are not negative: 2^(d+1) levels in decade d, and 0.
DSOPT_HD constexpr DynamicMap unsigned_map() {
    return {{0x34ae7ba9, 0x360e9b39, 0x3783126f, 0x3906594b, 0x3a958106, 0x3c2f5c29, 0x3dd40000, 0x3f800000},
            {0x34f19787, 0x3616feb5, 0x373cbe62, 0x386bedfa, 0x399374bc, 0x3ab851ec, 0x3be66666, 0},
            {0x4a07a239, 0x48d9038e, 0x47ad9c72, 0x468ae38e, 0x455e38e4, 0x4431c71c, 0x430e38e4, 0},
            {0x35c29d9f, 0x374d8559, 0x38e94ee4, 0x3a8a71de, 0x3c2872b0, 0x3dcfae14, 0x3f7f8ccd, kInfBits},
            {0x33d6bf95, 0x358637bd, 0x3727c5ac, 0x38d1b717, 0x3a83126f, 0x3c23d70a, 0x3dcccccd, 0}};
}

/// A magnitude's position in a map.
struct MapPosition {
    int decade;
    int32_t level; // in its decade
};
/// Returns the nearest level of the magnitude's decade. `levels`: number of levels of decade 0.
DSOPT_HD MapPosition position_in(const DynamicMap &map, int levels, float magnitude) {
    int d = 0;
    for (int k = 0; k < 7; ++k) d += magnitude > float_of(map.end[k]);
    const int32_t last = (levels << d) - 1;
    const auto j = d == 7 ? 0 : int32_t((magnitude - float_of(map.begin[d])) * float_of(map.inverse[d]));
    return {d, j < 0 ? 0 : j > last ? last : j};
}
DSOPT_HD constexpr float level_of(const DynamicMap &map, int decade, int32_t level) {
    const float offset = float_of(map.distance[decade]) * float(level);
    return float_of(map.first[decade]) + offset;
}
/// Index of the highest bit of a number from 1 to 256.
DSOPT_HD constexpr int highest_bit(uint32_t x) {
#if defined(__CUDA_ARCH__)
    return 31 - __clz(int(x));
#else
    return 31 - __builtin_clz(x);
#endif
}

/// 8-bit dynamic map of signed numbers, with the codes of bitsandbytes and torchao. `map`: signed_map(), where the
/// caller has it.
struct Q8 {
    using Map = DynamicMap;
    static constexpr uint32_t kHalfOfFirst = 0x3493a3b6; // half of the smallest positive level
    static constexpr uint32_t kNegative = 0x3f80e809;    // reciprocal of the largest negative level
    DSOPT_HD static constexpr DynamicMap map() { return signed_map(); }
    /// |x * factor| is at most 1 and its rounding error. Code 127 is 0.
    DSOPT_HD static uint8_t code_of(const DynamicMap &map, float x, float factor) {
        const float y = x * factor, magnitude = float_of(bits_of(y) & 0x7fffffffu);
        const MapPosition at = position_in(map, 1, magnitude);
        const int32_t q = magnitude > float_of(kHalfOfFirst) ? (1 << at.decade) + at.level : 0;
        return uint8_t(bits_of(y) >> 31 ? 127 - (q < 127 ? q : 127) : 127 + q);
    }
    DSOPT_HD static constexpr float level(const DynamicMap &map, uint8_t code) {
        const int32_t z = int32_t(code) - 127, n = z < 0 ? -z : z;
        if (n == 0) return 0;
        const int d = highest_bit(uint32_t(n));
        const float magnitude = level_of(map, d, n - (1 << d));
        return z < 0 ? -magnitude : magnitude;
    }
    /// `positive`, `negative`: the largest element and the largest negated element, at least 0. Both become levels, so
    /// the running mean of a steady gradient of either sign reaches that gradient. A finite block stays finite.
    DSOPT_HD static BlockScale scale(uint32_t top, float positive, float negative) {
        if (!has_codes(top)) return scale_without_codes(top);
        const float for_negative = float_of(kNegative) * negative;
        float t = positive > for_negative ? positive : for_negative;
        t = t > float_of(kLeastTop) ? t : float_of(kLeastTop);
        t = t < float_of(kInfBits - 1) ? t : float_of(kInfBits - 1);
        return {t, 1 / t, false};
    }
};

/// 8-bit dynamic map of numbers that are not negative: moments of squared gradients. `map`: unsigned_map(), where the
/// caller has it.
struct Q8Squares {
    using Map = DynamicMap;
    DSOPT_HD static constexpr DynamicMap map() { return unsigned_map(); }
    DSOPT_HD static constexpr float level(const DynamicMap &map, uint8_t code) {
        if (code == 0) return 0;
        const uint32_t n = uint32_t(code) + 1;
        const int highest = highest_bit(n);
        return level_of(map, highest - 1, int32_t(n) - (1 << highest));
    }
    DSOPT_HD static BlockScale scale(uint32_t top, float, float) {
        if (!has_codes(top)) return scale_without_codes(top);
        const float t = float_of(top > kLeastTop ? top : kLeastTop);
        return {t, 1 / t, false};
    }
    /// A number above 0 never becomes code 0, also if x * factor underflows: a second moment of 0 next to a first
    /// moment that is not 0 would make the update 1 / eps times too large.
    DSOPT_HD static uint8_t code_of(const DynamicMap &map, float x, float factor) {
        const MapPosition at = position_in(map, 2, float_of(bits_of(x * factor) & 0x7fffffffu));
        return uint8_t(x > 0 ? (2 << at.decade) + at.level - 1 : 0);
    }
};

/// All codecs.
template <class... Codec> struct CodecList {};
using Codecs = CodecList<E4M3, Q8, Q8Squares>;

/// Calls `f` with the codec of a format that has scales.
template <class F> DSOPT_HD constexpr void visit_codec(Format format, const F &f) {
    switch (format) {
    case Format::e4m3: f(E4M3{}); return;
    case Format::q8: f(Q8{}); return;
    case Format::q8_squares: f(Q8Squares{}); return;
    default: break;
    }
    __builtin_unreachable();
}
/// False if a record is not at the index of its enumerator, or the facts about a Format contradict each other. Does not
/// compile if a format with scales has no codec in visit_codec().
constexpr bool formats_are_consistent() {
    for (size_t i = 0; i < std::size(kMomentFormats); ++i)
        for (const Format format : {kMomentFormats[i].gradients, kMomentFormats[i].squares}) {
            int codecs = 0;
            if (has_scales(format)) visit_codec(format, [&](auto) { ++codecs; });
            if (kMomentFormats[i].moment != int32_t(i) || codecs != int(has_scales(format)) ||
                size_of(format) != int64_t(dtype_size(dtype_of(format))))
                return false;
        }
    return true;
}
static_assert(formats_are_consistent());

/// Stores a block of n elements, 1 to kBlock. The reference for the kernels of every device.
template <class Format> void store_block(const float *x, int64_t n, uint8_t *codes, float *scale) {
    static constexpr auto map = Format::map();
    uint32_t top = 0;
    float positive = 0, negative = 0;
    for (int64_t i = 0; i < n; ++i) {
        top = larger_magnitude(top, x[i]);
        positive = x[i] > positive ? x[i] : positive;
        negative = -x[i] > negative ? -x[i] : negative;
    }
    const BlockScale by = Format::scale(top, positive, negative);
    for (int64_t i = 0; i < n; ++i) codes[i] = by.zeros ? uint8_t(0) : Format::code_of(map, x[i], by.factor);
    *scale = by.scale;
}
template <class Format> void load_block(const uint8_t *codes, float scale, int64_t n, float *x) {
    static constexpr auto map = Format::map();
    for (int64_t i = 0; i < n; ++i) x[i] = Format::level(map, codes[i]) * scale;
}

} // namespace dsopt
