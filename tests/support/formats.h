// SPDX-License-Identifier: Apache-2.0
// Groups whose moments are stored in low precision, and their state as fp32.
#pragma once
#include "harness.h"
#include <ostream>

namespace test {

/// Formats of the two kinds of moments, enum dsopt_moment.
struct Formats {
    int32_t first, second;
};
inline constexpr const char *kFormatNames[] = {"F32", "Bf16", "Bf16Random", "E4M3", "Q8"};

/// A rule with formats. Moments that the rule does not have are F32.
struct FormatCase {
    int32_t algorithm;
    Formats formats;
    std::string name() const {
        return name_of(algorithm) + kFormatNames[formats.first] +
               (formats.second != DSOPT_MOMENT_F32 ? kFormatNames[formats.second] : "");
    }
    dsopt_group group(double lr = 1e-2, double weight_decay = 0.1) const {
        dsopt_group group = group_of(algorithm, lr, weight_decay);
        group.exp_avg_format = formats.first;
        group.exp_avg_sq_format = formats.second;
        if (algorithm == DSOPT_ALGORITHM_SGD) group.momentum = 0.9;
        return group;
    }
    /// Names of the moments.
    std::vector<std::string> moments() const {
        switch (algorithm) {
        case DSOPT_ALGORITHM_SGD: return {"momentum_buffer"};
        case DSOPT_ALGORITHM_LION: return {"exp_avg"};
        case DSOPT_ALGORITHM_ADAGRAD: return {"sum"};
        default: return {"exp_avg", "exp_avg_sq"};
        }
    }
    friend void PrintTo(const FormatCase &c, std::ostream *out) { *out << c.name(); }
};
inline std::string format_case_name(const testing::TestParamInfo<FormatCase> &info) { return info.param.name(); }

/// Every rule with every format of its moments, except F32 alone.
inline std::vector<FormatCase> all_format_cases() {
    std::vector<FormatCase> cases;
    const auto add = [&](int32_t algorithm, std::vector<int32_t> first, std::vector<int32_t> second) {
        for (const int32_t a : first)
            for (const int32_t b : second)
                if (a != DSOPT_MOMENT_F32 || b != DSOPT_MOMENT_F32) cases.push_back({algorithm, {a, b}});
    };
    const std::vector<int32_t> all = {DSOPT_MOMENT_F32, DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_E4M3,
                                      DSOPT_MOMENT_Q8};
    add(DSOPT_ALGORITHM_ADAMW, all, {DSOPT_MOMENT_F32, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_Q8});
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAM_LEGACY, DSOPT_ALGORITHM_LAMB}) {
        add(algorithm, {DSOPT_MOMENT_BF16, DSOPT_MOMENT_E4M3}, {DSOPT_MOMENT_BF16_RANDOM});
        add(algorithm, {DSOPT_MOMENT_Q8}, {DSOPT_MOMENT_Q8});
    }
    add(DSOPT_ALGORITHM_SGD, all, {DSOPT_MOMENT_F32});
    add(DSOPT_ALGORITHM_LION, all, {DSOPT_MOMENT_F32});
    add(DSOPT_ALGORITHM_ADAGRAD, {DSOPT_MOMENT_F32}, {DSOPT_MOMENT_BF16_RANDOM});
    return cases;
}
/// A few cases with every format.
inline std::vector<FormatCase> few_format_cases() {
    return {{DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_BF16, DSOPT_MOMENT_BF16_RANDOM}},
            {DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM}},
            {DSOPT_ALGORITHM_ADAMW, {DSOPT_MOMENT_Q8, DSOPT_MOMENT_Q8}},
            {DSOPT_ALGORITHM_LAMB, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_Q8}},
            {DSOPT_ALGORITHM_SGD, {DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_F32}}};
}

/// Returns a state tensor as fp32.
inline std::vector<float> f32_state(dsopt_optimizer *opt, int64_t param, const std::string &name) {
    const int64_t index = state_index(opt, param, name);
    std::vector<float> values(size_t(state_info(opt, index).tensor.numel));
    must(dsopt_optimizer_export_f32(opt, index, values.data(), int64_t(values.size())));
    return values;
}
inline bool has_state(const dsopt_optimizer *opt, int64_t param, const std::string &name) {
    for (const dsopt_state_info &info : state_of(opt))
        if (info.param == param && info.name == name) return true;
    return false;
}

/// A seed, and masters of 16-bit parameters.
inline dsopt_optimizer_desc format_desc(int32_t masters = DSOPT_MASTERS_PER_TENSOR, uint64_t seed = 5) {
    dsopt_optimizer_desc desc = optimizer_desc();
    desc.seed = seed;
    desc.masters = masters;
    return desc;
}

/// Sizes around every edge: empty, single, a block, a leaf.
inline const std::vector<int64_t> kFormatSizes = {0, 1, 7, 255, 256, 257, 511, 4095, 4096, 4097};

} // namespace test
