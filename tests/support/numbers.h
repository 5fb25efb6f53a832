// SPDX-License-Identifier: Apache-2.0
// An independent implementation of the storage types, from the definition of each format, and random numbers that are
// the same on every machine. Depends on no test framework.
#pragma once
#include "dsopt.h"
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace test {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// Returns the bytes of an element.
inline size_t size_of(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_F64: return 8;
    case DSOPT_DTYPE_F32:
    case DSOPT_DTYPE_I32: return 4;
    case DSOPT_DTYPE_U8:
    case DSOPT_DTYPE_F8_E4M3: return 1;
    }
    return 2;
}
/// True for the dtypes of parameters and gradients.
inline bool is_float(int32_t dtype) {
    return dtype == DSOPT_DTYPE_F32 || dtype == DSOPT_DTYPE_F16 || dtype == DSOPT_DTYPE_BF16;
}
inline std::string dtype_name(int32_t dtype) {
    switch (dtype) {
    case DSOPT_DTYPE_F64: return "F64";
    case DSOPT_DTYPE_F32: return "F32";
    case DSOPT_DTYPE_I32: return "I32";
    case DSOPT_DTYPE_F16: return "F16";
    case DSOPT_DTYPE_I16: return "I16";
    case DSOPT_DTYPE_U8: return "U8";
    case DSOPT_DTYPE_F8_E4M3: return "F8_E4M3";
    }
    return "BF16";
}
inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

/// Converts a 16-bit pattern to fp32.
float to_fp32(uint16_t bits, int32_t dtype);
/// Converts to the nearest 16-bit pattern, ties to even, with arithmetic in double. A NaN keeps sign and upper payload
/// and becomes quiet.
uint16_t to_nearest_16_bits(float value, int32_t dtype);
/// Returns `value` rounded to `dtype`.
float rounded(float value, int32_t dtype);
/// Loads one element of F32 or of a 16-bit type as fp32.
float loaded(const void *from, int32_t dtype);
void store(void *to, int32_t dtype, float value);

/// True if a sanitizer is active. Tests then leave out repetitions of one path, which take ten times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
inline constexpr bool kSanitized = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
inline constexpr bool kSanitized = false;
#endif

/// splitmix64.
class Random {
public:
    explicit Random(uint64_t seed = 1) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    int below(int n) { return int(next() % uint64_t(n)); }
    double uniform(double low = 0, double high = 1) { return low + (high - low) * double(next() >> 11) * 0x1p-53; }
    std::vector<float> floats(size_t n, double low = -1, double high = 1);
    /// Returns a number with uniform sign and fraction and a uniform binary exponent in [low, high].
    float number(int low, int high) {
        const uint64_t r = next();
        const double fraction = 1 + double(r & 0x7fffffu) / 0x800000;
        return float(std::ldexp(r >> 63 ? -fraction : fraction, low + int((r >> 32) % uint64_t(high - low + 1))));
    }

private:
    uint64_t state_;
};

} // namespace test
