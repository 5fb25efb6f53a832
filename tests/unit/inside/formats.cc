// SPDX-License-Identifier: Apache-2.0
// Formats of moments and masters, src/rules/formats.h, compared with arithmetic in double. Every kernel is compared
// with these functions.
#include "rules/formats.h"
#include "support/harness.h"
#include <cmath>
#include <random>
#include <thread>

using namespace test;

namespace inside_formats_tests {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kStride = 257;
#else
constexpr uint64_t kStride = 1;
#endif

// ------------------------------------------------------------------------------------------------------------ masters
#if defined(__clang__)
#define OPTIMIZED
#else
#define OPTIMIZED __attribute__((optimize("O3")))
#endif
/// Returns the first fp32 number, as bits, whose halves are wrong, or 2^32. Optimized: it visits 2^32 numbers.
OPTIMIZED uint64_t first_wrong_split(uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; i += kStride) {
        const auto bits = uint32_t(i);
        const dsopt::SplitMaster split = dsopt::split_master(dsopt::float_of(bits));
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const uint32_t joined = dsopt::bits_of(dsopt::join_master(split));
        const uint32_t expected = nan ? (bits | 0x400000u) & 0xffff0000u : bits;
        const uint32_t half_away = nan ? expected >> 16 : (bits + 0x8000u) >> 16;
        if (joined != expected || split.weight != half_away) return i;
    }
    return uint64_t(1) << 32;
}

LABEL(slow);
TEST(SplitMaster, RestoresEveryNumberAndKeepsNan) {
    const uint64_t half = uint64_t(1) << 31;
    uint64_t lower = 0;
    std::thread thread([&] { lower = first_wrong_split(0, half); });
    const uint64_t upper = first_wrong_split(half, 2 * half);
    thread.join();
    EXPECT_EQ(lower, 2 * half) << std::hex << lower;
    EXPECT_EQ(upper, 2 * half) << std::hex << upper;
}

TEST(SplitMaster, RoundsLikeBf16ExceptOnTies) {
    std::mt19937 random(1);
    for (int i = 0; i < 1000000; ++i) {
        const float x = dsopt::float_of(uint32_t(random()));
        if (std::isnan(x)) continue;
        const dsopt::SplitMaster split = dsopt::split_master(x);
        if (split.remainder != 0x8000) { ASSERT_EQ(split.weight, dsopt::f32_to_bf16(x)) << x; }
    }
}

TEST(SplitMaster, IsTheWeightWithoutARemainder) {
    for (uint32_t weight = 0; weight < 65536; ++weight)
        ASSERT_EQ(dsopt::bits_of(dsopt::join_master({uint16_t(weight), 0})), weight << 16);
}

// ----------------------------------------------------------------------------------------------------------- rounding
TEST(MomentKey, DiffersByKindStepAndTensorAndFromWeights) {
    std::set<uint64_t> keys;
    for (const uint64_t tensor : {dsopt::mix64(1), dsopt::mix64(2), dsopt::mix64(3)})
        for (int64_t step = 1; step < 100; ++step) {
            keys.insert(dsopt::rounding_key(tensor, step));
            for (const auto kind : {dsopt::MomentKind::gradient, dsopt::MomentKind::square})
                keys.insert(dsopt::moment_key(tensor, kind, step));
        }
    EXPECT_EQ(keys.size(), 3u * 99 * 3);
}

// The first momentum is the gradient. Its key is that of the parameter's name and of the seed.
TEST(MomentKey, RoundsElementsByTheirIndexInTheWholeTensor) {
    for (const int64_t offset : {int64_t(0), int64_t(1) << 31, (int64_t(1) << 31) + 256, (int64_t(1) << 40) + 512}) {
        dsopt_group group = make_group(DSOPT_ALGORITHM_SGD, 0); // without decay
        group.momentum = 0.9;
        group.exp_avg_format = DSOPT_MOMENT_BF16_RANDOM;
        dsopt_optimizer_desc desc = optimizer_desc();
        desc.seed = 7;
        const Context context = make_context();
        Trainer trainer(context, desc, group, {{Array(DSOPT_DTYPE_F32, 700, 1), "w", 0, 0, offset}});
        Array gradient(DSOPT_DTYPE_F32, 700, 0);
        gradient.fill(5);
        must(trainer.step({gradient}));
        const uint64_t key = dsopt::moment_key(dsopt::mix64(7 ^ uint64_t('w')) + 1, dsopt::MomentKind::gradient, 1);
        const std::vector<uint16_t> stored = exported<uint16_t>(trainer.opt(), 0, "momentum_buffer");
        for (size_t i = 0; i < 700; ++i)
            ASSERT_EQ(dsopt::bf16_to_f32(stored[i]),
                      dsopt::round_stochastic_bf16(gradient[i], dsopt::random_bits(key, uint64_t(offset) + i)))
                << offset << ' ' << i;
    }
}

// ------------------------------------------------------------------------------------------------------------- levels
template <class Format> std::vector<float> levels_of() {
    std::vector<float> levels;
    for (int code = 0; code < 256; ++code) levels.push_back(Format::level(Format::map(), uint8_t(code)));
    return levels;
}

TEST(E4M3, HasTheValuesOfItsFields) {
    for (int code = 0; code < 256; ++code) {
        const int exponent = code >> 3 & 15, fraction = code & 7;
        if ((code & 0x7f) == 0x7f) continue; // NaN of the format, which is never stored
        const double magnitude =
            exponent == 0 ? std::ldexp(fraction / 8.0, -6) : std::ldexp(1 + fraction / 8.0, exponent - 7);
        EXPECT_EQ(dsopt::bits_of(dsopt::E4M3::level(uint8_t(code))),
                  dsopt::bits_of(float(code & 0x80 ? -magnitude : magnitude)))
            << code;
    }
}

TEST(E4M3, StoresItsLevels) {
    for (int code = 0; code < 256; ++code)
        if ((code & 0x7f) != 0x7f) { EXPECT_EQ(dsopt::E4M3::code(dsopt::E4M3::level(uint8_t(code))), code); }
}

/// Returns the nearest level, of two the one with the even code.
uint8_t nearest_e4m3(double y) {
    int best = 0;
    for (int code = 1; code < 127; ++code) {
        const double distance = std::fabs(std::fabs(y) - double(dsopt::E4M3::level(uint8_t(code)))),
                     least = std::fabs(std::fabs(y) - double(dsopt::E4M3::level(uint8_t(best))));
        if (distance < least || (distance == least && code % 2 == 0)) best = code;
    }
    return uint8_t(best | (std::signbit(y) ? 0x80 : 0));
}

TEST(E4M3, RoundsEveryBf16NumberToNearestEven) {
    for (uint32_t i = 0; i < 65536; ++i) {
        const float y = dsopt::bf16_to_f32(uint16_t(i));
        if (!(std::fabs(y) <= 448)) continue;
        ASSERT_EQ(dsopt::E4M3::code(y), nearest_e4m3(y)) << y;
    }
}

TEST(E4M3, RoundsNeighboursOfMidpointsToNearest) {
    for (int code = 0; code < 126; ++code) {
        const float middle = (dsopt::E4M3::level(uint8_t(code)) + dsopt::E4M3::level(uint8_t(code + 1))) / 2;
        for (const float y : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, kInfinity)}) {
            ASSERT_EQ(dsopt::E4M3::code(y), nearest_e4m3(y)) << y;
            ASSERT_EQ(dsopt::E4M3::code(-y), nearest_e4m3(-y)) << y;
        }
    }
}

/// Levels of the dynamic map from its definition in double: decade d has `count` midpoints of equal parts of
/// [0.1, 1] * 10^(d - 6).
std::vector<double> dynamic_map(bool is_signed) {
    std::vector<double> levels{0, 1};
    for (int d = 0; d < 7; ++d) {
        const int count = (is_signed ? 1 : 2) << d;
        for (int j = 0; j < count; ++j) {
            const double level = std::pow(10, d - 6) * (0.1 + 0.9 * (j + 0.5) / count);
            levels.push_back(level);
            if (is_signed) levels.push_back(-level);
        }
    }
    std::sort(levels.begin(), levels.end());
    return levels;
}

template <class Format> void expect_dynamic_map(bool is_signed) {
    const std::vector<double> expected = dynamic_map(is_signed);
    ASSERT_EQ(expected.size(), is_signed ? 256u : 257u - 1);
    const std::vector<float> levels = levels_of<Format>();
    for (size_t code = 0; code < 256; ++code)
        EXPECT_NEAR(levels[code], expected[code], 2e-7 * std::fabs(expected[code])) << code;
    EXPECT_TRUE(std::is_sorted(levels.begin(), levels.end()));
    EXPECT_EQ(levels[255], 1.0f);
}
TEST(Q8, HasTheLevelsOfTheDynamicMap) { expect_dynamic_map<dsopt::Q8>(true); }
TEST(Q8Squares, HasTheLevelsOfTheDynamicMap) { expect_dynamic_map<dsopt::Q8Squares>(false); }

/// Checks the codes of every level and of numbers around it and around the middles of two levels.
template <class Format> void expect_nearest_levels() {
    const std::vector<float> levels = levels_of<Format>();
    for (size_t code = 0; code < 256; ++code) {
        ASSERT_EQ(Format::code_of(Format::map(), levels[code], 1), code);
        if (code == 255) break;
        const float low = levels[code], high = levels[code + 1];
        for (int k = 0; k <= 1000; ++k) {
            const float y = low + (high - low) * (float(k) / 1000);
            const int stored = Format::code_of(Format::map(), y, 1);
            const double down = std::fabs(double(y) - low), up = std::fabs(high - double(y));
            if (std::fabs(down - up) < 1e-5 * (double(high) - low)) {
                ASSERT_TRUE(stored == int(code) || stored == int(code) + 1) << y;
            } else if (std::is_same_v<Format, dsopt::Q8Squares> && code == 0 && y > 0) {
                ASSERT_EQ(stored, 1) << y; // a number above 0 is not stored as 0
            } else {
                ASSERT_EQ(stored, int(down < up ? code : code + 1)) << y;
            }
        }
    }
}
TEST(Q8, StoresTheNearestLevel) { expect_nearest_levels<dsopt::Q8>(); }
TEST(Q8Squares, StoresTheNearestLevel) { expect_nearest_levels<dsopt::Q8Squares>(); }

// ------------------------------------------------------------------------------------------------------------- blocks
struct Block {
    std::vector<uint8_t> codes;
    float scale = -1;
    std::vector<float> values; // what is read
};
template <class Format> Block stored(const std::vector<float> &x) {
    Block block{std::vector<uint8_t>(x.size(), 99), -1, std::vector<float>(x.size())};
    dsopt::store_block<Format>(x.data(), int64_t(x.size()), block.codes.data(), &block.scale);
    dsopt::load_block<Format>(block.codes.data(), block.scale, int64_t(x.size()), block.values.data());
    return block;
}

template <class Format> class BlockFormat : public testing::Test {};
using BlockFormats = testing::Types<dsopt::E4M3, dsopt::Q8, dsopt::Q8Squares>;
TYPED_TEST_SUITE(BlockFormat, BlockFormats);

TYPED_TEST(BlockFormat, StoresZerosAsZeroBytes) {
    for (const size_t n : {1, 255, 256})
        for (const float zero : {0.0f, -0.0f}) {
            const Block block = stored<TypeParam>(std::vector<float>(n, zero));
            EXPECT_EQ(block.codes, std::vector<uint8_t>(n, 0));
            EXPECT_EQ(dsopt::bits_of(block.scale), 0u);
            for (const float value : block.values) EXPECT_EQ(value, 0);
        }
}

TYPED_TEST(BlockFormat, StoresNanForAWholeBlockWithInfOrNan) {
    for (const float bad : {kInfinity, kNan, -kNan}) {
        std::vector<float> x(200, 1.5f);
        x[77] = bad;
        const Block block = stored<TypeParam>(x);
        EXPECT_EQ(block.codes, std::vector<uint8_t>(200, 0));
        EXPECT_EQ(dsopt::bits_of(block.scale), 0x7fc00000u);
        for (const float value : block.values) EXPECT_TRUE(std::isnan(value));
    }
}

TYPED_TEST(BlockFormat, KeepsTheLargestElementAndStaysFinite) {
    for (const float top : {std::numeric_limits<float>::max(), 1e30f, 1.0f, 1e-30f, 0x1p-100f}) {
        const Block block = stored<TypeParam>({top, top / 4, 0});
        EXPECT_NEAR(block.values[0] / top, 1, 3e-7);
        EXPECT_TRUE(std::isfinite(block.values[0]));
        EXPECT_EQ(block.values[2], 0);
    }
}

TYPED_TEST(BlockFormat, StoresDenormalsWithAFiniteScale) {
    const Block block = stored<TypeParam>({0x1p-149f, 0x1p-130f, 0x1p-110f});
    EXPECT_GE(block.scale, 0x1p-110f);
    for (const float value : block.values) EXPECT_TRUE(std::isfinite(value));
    const Block mixed = stored<TypeParam>({0x1p-149f, 1e30f});
    EXPECT_NEAR(mixed.values[1] / 1e30f, 1, 3e-7);
}

TEST(Q8, StoresTheLargestElementOfEachSignExactly) {
    const Block block = stored<dsopt::Q8>({-3, 0.5f, -0.001f});
    EXPECT_EQ(block.codes[0], 0);
    EXPECT_NEAR(block.values[0], -3, 1e-6);
    const Block positive = stored<dsopt::Q8>({3, -2.9f});
    EXPECT_EQ(positive.codes[0], 255);
    EXPECT_EQ(positive.values[0], 3);
    const Block largest = stored<dsopt::Q8>({-std::numeric_limits<float>::max()});
    EXPECT_TRUE(std::isfinite(largest.scale));
}

TEST(Q8Squares, NeverStoresAPositiveNumberAsZero) {
    for (const float small : {0x1p-149f, 1e-40f, 1e-30f, 1e-12f}) {
        const Block block = stored<dsopt::Q8Squares>({1, small, 0});
        EXPECT_EQ(block.codes[1], 1);
        EXPECT_GT(block.values[1], 0);
        EXPECT_EQ(block.codes[2], 0);
    }
}

TEST(BlocksOf, CountsTheLastShortBlock) {
    EXPECT_EQ(dsopt::blocks_of(0), 0);
    EXPECT_EQ(dsopt::blocks_of(1), 1);
    EXPECT_EQ(dsopt::blocks_of(256), 1);
    EXPECT_EQ(dsopt::blocks_of(257), 2);
    EXPECT_EQ(dsopt::blocks_of((int64_t(1) << 31) + 256), (int64_t(1) << 23) + 1);
}

} // namespace inside_formats_tests
