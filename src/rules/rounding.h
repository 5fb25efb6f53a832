// SPDX-License-Identifier: Apache-2.0
// Stochastic rounding to bf16. The random number of an element is a function of seed, parameter name, step and the
// element's index in its tensor: nothing is stored, and the bits are the same for any sharding.
#pragma once
#include "base/dtype.h"

namespace dsopt {

/// 64-bit finaliser of MurmurHash3 (Appleby, public domain): one changed input bit changes half of the output bits.
DSOPT_HD uint64_t mix64(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

/// Returns the key of a tensor in a step.
DSOPT_HD uint64_t rounding_key(uint64_t tensor_key, int64_t step) {
    return mix64(tensor_key + uint64_t(step) * 0x9e3779b97f4a7c15ull);
}

/// The part of random_bits() that elements with the same upper 32 bits of their index share.
struct RandomRow {
    uint32_t low, high; // of the key
    DSOPT_HD RandomRow(uint64_t key, uint64_t element) :
        low(uint32_t(key)),
        high(uint32_t(key >> 32) ^ (uint32_t(element >> 32) * 0xc2b2ae3du)) {}
    /// Uses 32-bit operations only, which vectorise. `element`: the lower 32 bits of its index; a number or a vector.
    template <class W> DSOPT_HD W bits(W element) const {
        W h = element * 0x9e3779b1u + low;
        h ^= h >> 16;
        h *= 0x85ebca6bu;
        h ^= high;
        h ^= h >> 13;
        h *= 0xc2b2ae35u;
        return (h ^ (h >> 16)) & 0xffffu;
    }
};
/// Returns 16 random bits for an element.
DSOPT_HD uint32_t random_bits(uint64_t key, uint64_t element) {
    return RandomRow(key, element).bits(uint32_t(element));
}

/// Returns the bf16 number below or above `value`, as a float. Inf and NaN are converted by f32_to_bf16().
DSOPT_HD float round_stochastic_bf16(float value, uint32_t random) {
    const uint32_t bits = bits_of(value);
    const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return finite ? float_of((bits + random) & 0xffff0000u) : bf16_to_f32(f32_to_bf16(value));
}

} // namespace dsopt
