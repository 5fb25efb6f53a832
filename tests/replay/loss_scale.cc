// SPDX-License-Identifier: Apache-2.0
#include "loss_scale.h"

namespace replay {

int32_t read_wrapper(GoldenFile &file) {
    const std::string &name = file.text("wrapper");
    if (name == "fused") return DSOPT_PROFILE_FUSED;
    if (name == "unfused") return DSOPT_PROFILE_UNFUSED;
    fail("metadata wrapper: '%s' is neither fused nor unfused", name.c_str());
}

double positive(GoldenFile &file, const std::string &key) {
    const double value = file.number(key);
    if (!(value > 0)) fail("metadata %s: %g is not above 0", key.c_str(), value);
    return value;
}

int32_t positive_int(GoldenFile &file, const std::string &key) {
    const int64_t value = file.integer(key);
    if (value < 1 || value > INT32_MAX) fail("metadata %s: %lld is not in [1, 2^31)", key.c_str(), (long long)value);
    return int32_t(value);
}

dsopt_scaler_desc dynamic_scale(GoldenFile &file, int32_t profile) {
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.profile = profile;
    if (file.text("init_scale") != "None") desc.init = positive(file, "init_scale");
    if (file.text("min_scale") != "None") desc.min = positive(file, "min_scale");
    if (file.text("scale_window") != "None") desc.window = positive_int(file, "scale_window");
    if (file.has("scale_factor")) desc.factor = positive(file, "scale_factor");
    return desc;
}

dsopt_scaler_desc static_scale(int32_t profile, double scale) {
    DSOPT_NEW(dsopt_scaler_desc, desc);
    desc.profile = profile;
    desc.flags = DSOPT_SCALER_STATIC;
    desc.init = scale;
    return desc;
}

ScaleRecord::ScaleRecord(const GoldenFile &file, Comparison &comparison, int64_t rank, int64_t steps) :
    comparison_(comparison),
    scale_(comparison.output(file.name_of("loss_scale", rank), {steps})),
    updates_(comparison.output(file.name_of("cur_iter", rank), {steps})),
    last_overflow_(comparison.output(file.name_of("last_overflow_iter", rank), {steps})) {}

void ScaleRecord::compare(int64_t t, const dsopt_scaler_info &info) {
    comparison_.row(scale_, t, {info.dynamic}, exact_rule);
    comparison_.row(updates_, t, {double(info.updates)}, exact_rule);
    comparison_.row(last_overflow_, t, {double(info.last_overflow)}, exact_rule);
}

} // namespace replay
