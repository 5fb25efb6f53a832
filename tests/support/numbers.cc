// SPDX-License-Identifier: Apache-2.0
#include "numbers.h"

namespace test {
namespace {

/// Layout of a 16-bit format. `special` is the exponent field of infinity and NaN.
struct Format {
    int fraction_bits, bias, special;
    explicit Format(int32_t dtype) : fraction_bits(dtype == DSOPT_DTYPE_F16 ? 10 : 7) {
        const int exponent_bits = 15 - fraction_bits;
        bias = (1 << (exponent_bits - 1)) - 1;
        special = (1 << exponent_bits) - 1;
    }
};

} // namespace

float to_fp32(uint16_t bits, int32_t dtype) {
    if (dtype == DSOPT_DTYPE_BF16) { // the upper half of an fp32
        return (bits & 0x7fffu) > 0x7f80u ? std::nanf("") : float_of(uint32_t(bits) << 16);
    }
    const Format format(dtype);
    const int exponent = bits >> format.fraction_bits & format.special;
    const int fraction = bits & ((1 << format.fraction_bits) - 1);
    const double sign = bits >> 15 ? -1 : 1;
    if (exponent == format.special) return fraction ? std::nanf("") : float(sign * double(kInf));
    if (exponent == 0) return float(sign * std::ldexp(fraction, 1 - format.bias - format.fraction_bits));
    return float(sign *
                 std::ldexp((1 << format.fraction_bits) + fraction, exponent - format.bias - format.fraction_bits));
}

uint16_t to_nearest_16_bits(float value, int32_t dtype) {
    const Format format(dtype);
    const int sign = int(bits_of(value) >> 31) << 15;
    if (std::isnan(value)) {
        const int payload = int(bits_of(value) >> (23 - format.fraction_bits)) & ((1 << format.fraction_bits) - 1);
        return uint16_t(sign | format.special << format.fraction_bits | 1 << (format.fraction_bits - 1) | payload);
    }
    const double x = std::fabs(double(value));
    if (x == 0) return uint16_t(sign);
    if (std::isinf(x)) return uint16_t(sign | format.special << format.fraction_bits);
    const int exponent = std::max(std::ilogb(x), 1 - format.bias);
    // In units of the last place. The addition below handles a carry into the next binade, or from the subnormals.
    const auto units = int64_t(std::nearbyint(std::ldexp(x, format.fraction_bits - exponent)));
    const int64_t magnitude = (int64_t(exponent + format.bias - 1) << format.fraction_bits) + units;
    return uint16_t(sign | std::min(magnitude, int64_t(format.special) << format.fraction_bits));
}

float rounded(float value, int32_t dtype) {
    return size_of(dtype) == 2 ? to_fp32(to_nearest_16_bits(value, dtype), dtype) : value;
}

float loaded(const void *from, int32_t dtype) {
    uint16_t half = 0;
    float value = 0;
    if (size_of(dtype) == 2) {
        std::memcpy(&half, from, 2);
        return to_fp32(half, dtype);
    }
    std::memcpy(&value, from, 4);
    return value;
}

std::vector<float> Random::floats(size_t n, double low, double high) {
    std::vector<float> values(n);
    for (float &value : values) value = float(uniform(low, high));
    return values;
}

void store(void *to, int32_t dtype, float value) {
    if (size_of(dtype) == 2) {
        const uint16_t half = to_nearest_16_bits(value, dtype);
        std::memcpy(to, &half, 2);
    } else {
        std::memcpy(to, &value, 4);
    }
}

} // namespace test
