// SPDX-License-Identifier: Apache-2.0
// The loss scale as recorded, which bare scalers and the fp16 wrappers have in common.
#pragma once
#include "compare.h"
#include "golden_file.h"

namespace replay {

/// Loss scales are powers of two in disguise, or have to be the same double all the same.
constexpr Rule exact_rule{Rule::exact, 0};

/// Metadata `wrapper`: DSOPT_PROFILE_FUSED or DSOPT_PROFILE_UNFUSED, the profile of the scaler inside it.
int32_t read_wrapper(GoldenFile &file);

/// A scaler that moves, from `init_scale`, `min_scale`, `scale_window` and, where it is recorded, `scale_factor`.
/// "None" is the profile's default.
dsopt_scaler_desc dynamic_scale(GoldenFile &file, int32_t profile);
dsopt_scaler_desc static_scale(int32_t profile, double scale);

/// A number above 0. The engine takes 0 for the default, so a recorded 0 would be replayed as something else.
double positive(GoldenFile &file, const std::string &key);
/// The same for a field of 32 bits.
int32_t positive_int(GoldenFile &file, const std::string &key);

/// What every record of a loss scale has, on one rank.
class ScaleRecord {
public:
    ScaleRecord(const GoldenFile &file, Comparison &comparison, int64_t rank, int64_t steps);
    void compare(int64_t t, const dsopt_scaler_info &info);

private:
    Comparison &comparison_;
    const Tensor &scale_, &updates_, &last_overflow_;
};

} // namespace replay
