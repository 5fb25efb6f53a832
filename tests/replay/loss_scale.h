// SPDX-License-Identifier: Apache-2.0
// The recorded loss scale, which bare scalers and the fp16 wrappers have in common.
#pragma once
#include "compare.h"
#include "golden_file.h"

namespace replay {

/// Loss scales are powers of two, or must be the same double in any case.
constexpr Rule exact_rule{Rule::exact, 0};

/// Returns the metadata `wrapper`: DSOPT_PROFILE_FUSED or DSOPT_PROFILE_UNFUSED, the profile of the wrapper's scaler.
int32_t read_wrapper(GoldenFile &file);

/// Describes a dynamic scaler, from `init_scale`, `min_scale`, `scale_window` and, if recorded, `scale_factor`. "None"
/// is the profile's default.
dsopt_scaler_desc dynamic_scale(GoldenFile &file, int32_t profile);
dsopt_scaler_desc static_scale(int32_t profile, double scale);

/// Reads a number above 0. The engine treats 0 as the default, so replaying a recorded 0 would use another value.
double positive(GoldenFile &file, const std::string &key);
/// Same for a 32-bit field.
int32_t positive_int(GoldenFile &file, const std::string &key);

/// The recorded loss scale of one rank, in every kind of record.
class ScaleRecord {
public:
    ScaleRecord(const GoldenFile &file, Comparison &comparison, int64_t rank, int64_t steps);
    void compare(int64_t t, const dsopt_scaler_info &info);

private:
    Comparison &comparison_;
    const Tensor &scale_, &updates_, &last_overflow_;
};

} // namespace replay
