// SPDX-License-Identifier: Apache-2.0
// low_precision_codecs and low_precision_maps: the storage formats of src/rules/formats.h. Codes, scales and what is read
// back must be equal. low_precision_import: states of other libraries, whose levels differ by some units in the last
// place.
#include "cases.h"
#include "layout.h"
#include "loss_scale.h"
#include "rules/formats.h"
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace replay {
namespace {

using namespace dsopt;

std::vector<float> floats_of(const Tensor &tensor) {
    std::vector<float> values(size_t(tensor.numel));
    std::memcpy(values.data(), tensor.data, values.size() * sizeof(float));
    return values;
}
template <class T> void expect_equal(Comparison &comparison, const std::string &name, const std::vector<T> &got) {
    comparison.whole(comparison.output(name, {int64_t(got.size())}), {got.begin(), got.end()}, exact_rule);
}

template <class Format>
void compare_blocks(Comparison &comparison, const std::string &name, const std::vector<float> &x) {
    const auto count = int64_t(x.size());
    std::vector<uint8_t> codes(x.size());
    std::vector<float> scales(size_t(blocks_of(count))), read(x.size());
    for (int64_t i = 0; i < count; i += kBlock) {
        const int64_t n = std::min(kBlock, count - i);
        float &scale = scales[size_t(i / kBlock)];
        store_block<Format>(x.data() + i, n, codes.data() + i, &scale);
        load_block<Format>(codes.data() + i, scale, n, read.data() + i);
    }
    expect_equal(comparison, name, codes);
    expect_equal(comparison, name + "_scale", scales);
    expect_equal(comparison, name + "_read", read);
}

void compare_bf16(Comparison &comparison, const std::string &name, const std::vector<uint16_t> &stored) {
    std::vector<float> read;
    for (const uint16_t value : stored) read.push_back(bf16_to_f32(value));
    expect_equal(comparison, name, read);
    expect_equal(comparison, name + "_read", read);
}

/// The engine's key of a parameter.
uint64_t tensor_key(uint64_t seed, const std::string &name) {
    for (const char c : name) seed = mix64(seed ^ uint8_t(c)) + 1;
    return seed;
}

void compare_split(Comparison &comparison) {
    const Tensor &split_x = comparison.output("split_x", comparison.file().find("split_x")->shape);
    (void)comparison.input("split_x", DSOPT_DTYPE_I32, split_x.shape);
    std::vector<float> weights;
    std::vector<int32_t> joined;
    std::vector<int16_t> remainders;
    for (const float x : floats_of(split_x)) {
        const SplitMaster split = split_master(x);
        weights.push_back(bf16_to_f32(split.weight));
        remainders.push_back(int16_t(split.remainder));
        joined.push_back(int32_t(bits_of(join_master(split))));
    }
    expect_equal(comparison, "split_weight", weights);
    expect_equal(comparison, "split_remainder", remainders);
    expect_equal(comparison, "split_joined", joined);
}

template <class Format> void compare_levels(Comparison &comparison, const std::string &name, int count) {
    std::vector<float> levels;
    for (int code = 0; code < count; ++code) levels.push_back(Format::level(Format::map(), uint8_t(code)));
    if (count == 128) levels.back() = std::numeric_limits<float>::quiet_NaN(); // never stored
    expect_equal(comparison, name, levels);
}
void compare_constants(Comparison &comparison, const std::string &ending, const DynamicMap &map) {
    const auto compare = [&](const char *letter, const uint32_t *bits, int count) {
        std::vector<float> values;
        for (int i = 0; i < count; ++i) values.push_back(float_of(bits[i]));
        expect_equal(comparison, letter + ending, values);
    };
    compare("A_", map.first, 8);
    compare("C_", map.distance, 8);
    compare("L_", map.begin, 8);
    compare("I_", map.inverse, 8);
    compare("E_", map.end, 7);
}

void expect_close(Comparison &comparison, const std::string &name, const std::vector<float> &got) {
    comparison.whole(comparison.output(name, {int64_t(got.size())}), {got.begin(), got.end()}, {Rule::relative, 3e-7});
}

/// Reads the codes and scales of a moment.
template <class Format> void compare_state(Comparison &comparison, const std::string &name, int32_t dtype) {
    const Tensor *const recorded = comparison.file().find(name);
    if (recorded == nullptr) fail("tensor %s is missing", name.c_str());
    const Tensor &codes = comparison.input(name, dtype, recorded->shape);
    const std::vector<float> scales =
        floats_of(comparison.input(name + "_scale", DSOPT_DTYPE_F32, {blocks_of(codes.numel)}));
    std::vector<float> values(size_t(codes.numel));
    for (int64_t i = 0; i < codes.numel; i += kBlock)
        load_block<Format>(codes.data + i, scales[size_t(i / kBlock)], std::min(kBlock, codes.numel - i),
                           values.data() + i);
    expect_close(comparison, name + "_value", values);
    if (dtype != DSOPT_DTYPE_U8) return;
    std::vector<float> levels;
    for (int code = 0; code < 256; ++code) levels.push_back(Format::level(Format::map(), uint8_t(code)));
    expect_close(comparison, name + "_map", levels);
}

} // namespace

void replay_low_precision_import(const Case &recorded) {
    Comparison &comparison = recorded.comparison;
    const Tensor *const codes = comparison.file().find("exp_avg");
    if (codes == nullptr) fail("tensor exp_avg is missing");
    (void)read_steps(recorded.file);
    (void)comparison.input("param", DSOPT_DTYPE_F32, codes->shape);
    if (codes->dtype == DSOPT_DTYPE_F8_E4M3) {
        compare_state<E4M3>(comparison, "exp_avg", DSOPT_DTYPE_F8_E4M3);
        compare_state<E4M3>(comparison, "exp_avg_sq", DSOPT_DTYPE_F8_E4M3);
    } else {
        compare_state<Q8>(comparison, "exp_avg", DSOPT_DTYPE_U8);
        compare_state<Q8Squares>(comparison, "exp_avg_sq", DSOPT_DTYPE_U8);
    }
}

void replay_low_precision_codecs(const Case &recorded) {
    GoldenFile &file = recorded.file;
    Comparison &comparison = recorded.comparison;
    const Tensor *const x_tensor = file.find("x");
    if (x_tensor == nullptr || file.find("split_x") == nullptr) fail("tensor x or split_x is missing");
    const std::vector<float> x = floats_of(comparison.input("x", DSOPT_DTYPE_F32, x_tensor->shape));
    std::vector<float> magnitudes;
    for (const float value : x) magnitudes.push_back(std::abs(value));

    compare_blocks<E4M3>(comparison, "e4m3", x);
    compare_blocks<Q8>(comparison, "q8_signed", x);
    compare_blocks<Q8Squares>(comparison, "q8_unsigned", magnitudes);

    const uint64_t key =
        moment_key(tensor_key(uint64_t(file.integer("rounding_seed")), file.text("tensor")),
                   file.integer("kind") == 1 ? MomentKind::gradient : MomentKind::square, file.integer("step"));
    const int64_t offset = file.integer("offset");
    std::vector<uint16_t> nearest, random;
    for (size_t i = 0; i < x.size(); ++i) {
        nearest.push_back(f32_to_bf16(x[i]));
        const float rounded = round_stochastic_bf16(x[i], random_bits(key, uint64_t(offset) + i));
        random.push_back(uint16_t(bits_of(rounded) >> 16));
    }
    compare_bf16(comparison, "bf16", nearest);
    compare_bf16(comparison, "bf16_random", random);
    compare_split(comparison);
}

void replay_low_precision_maps(const Case &recorded) {
    Comparison &comparison = recorded.comparison;
    compare_levels<E4M3>(comparison, "e4m3", 128);
    compare_levels<Q8>(comparison, "levels_signed", 256);
    compare_levels<Q8Squares>(comparison, "levels_unsigned", 256);
    compare_constants(comparison, "signed", signed_map());
    compare_constants(comparison, "unsigned", unsigned_map());
    expect_equal(comparison, "half_first", std::vector<float>{float_of(Q8::kHalfOfFirst)});
    expect_equal(comparison, "negative", std::vector<float>{float_of(Q8::kNegative)});
}

} // namespace replay
