// SPDX-License-Identifier: Apache-2.0
// Loss scales.
#include "model.h"
#include <limits>

namespace scaler_tests {

TEST(CppScaler, HalvesScaleIfAStepIsSkipped) {
    Model model;
    dsopt::context ctx;
    dsopt::scaler_options scaling;
    scaling.init = 1024;
    scaling.window = 1;
    dsopt::scaler scaler(ctx, scaling);
    dsopt::optimizer_options options;
    options.scaler = &scaler;
    options.skip_budget = 2;
    dsopt::optimizer opt(ctx, options);
    opt.add_group(rule(), model.params);
    EXPECT_EQ(*scaler.device_scale(), 1024);
    float loss = 3;
    scaler.scale_loss(dsopt::view(&loss, 1));
    EXPECT_EQ(loss, 3072);
    model.g[2][4000] = std::numeric_limits<float>::infinity();
    opt.step(model.grads);
    EXPECT_EQ(scaler.info().scale, 512);
    EXPECT_EQ(scaler.info().skipped_in_row, 1);
    const dsopt_report report = opt.report();
    EXPECT_EQ(report.skipped, 1);
    EXPECT_STREQ(report.first_bad_name, "c");
    expect_same(model, Model());
    opt.step(model.grads);
    EXPECT_REFUSED(opt.step(model.grads), dsopt::state_error, "budget");
    scaler.set(64);
    EXPECT_EQ(scaler.info().dynamic, 64);
    scaler.set_override(8);
    EXPECT_EQ(scaler.info().scale, 8);
    scaler.clear_override();
    EXPECT_EQ(scaler.info().scale, 64);
    EXPECT_REFUSED(scaler.set(-1), dsopt::argument_error, "loss scale");
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::state_error, "scaler");
    opt.set(dsopt::key::skip_budget, 0);
    scaler.detach();
    dsopt::optimizer next(ctx, options);
    EXPECT_REFUSED(opt.step(model.grads), dsopt::state_error, "detached");
}

TEST(CppScaler, UpdateArraysMatchesUpdate) {
    dsopt::context ctx;
    dsopt::scaler_options scaling;
    scaling.init = 1024;
    scaling.hysteresis = 2;
    scaling.shared = true;
    dsopt::scaler scaler(ctx, scaling);
    float scale = 0;
    std::int32_t words[12] = {};
    const dsopt::tensor state[] = {dsopt::view(&scale, 1), dsopt::view(words)};
    scaler.init_state(state);
    EXPECT_EQ(scale, 1024);
    const std::int32_t overflow = 1;
    for (int i = 0; i < 3; ++i) {
        scaler.update(&overflow);
        scaler.update_arrays(state, &overflow);
        const dsopt::scaler_info by_itself = scaler.info(), on_arrays = dsopt::scaler::decode(words);
        EXPECT_EQ(by_itself.scale, on_arrays.scale);
        EXPECT_EQ(by_itself.scale, scale);
        EXPECT_EQ(by_itself.hysteresis, on_arrays.hysteresis);
        EXPECT_EQ(by_itself.updates, i + 1);
    }
    EXPECT_EQ(scale, 256);
    EXPECT_REFUSED(dsopt::scaler::decode(dsopt::span<const std::int32_t>(words, 8)), dsopt::argument_error, "words");
    EXPECT_REFUSED(scaler.init_state({state, 1}), dsopt::argument_error, "");
}

TEST(CppScaler, AcceptsEveryOption) {
    dsopt::context ctx;
    dsopt::scaler_options options;
    options.profile = dsopt::profile::dynamic;
    EXPECT_EQ(dsopt::scaler(ctx, options).info().scale, 4294967296.);
    options.keep_at_min = true;
    options.fail_at_min = true;
    EXPECT_REFUSED(dsopt::scaler(ctx, options), dsopt::argument_error, "KEEP_AT_MIN");
    options = {};
    options.fixed = true;
    EXPECT_EQ(dsopt::scaler(ctx, options).info().scale, 1);
    options = {};
    options.factor = 0.5;
    EXPECT_REFUSED(dsopt::scaler(ctx, options), dsopt::argument_error, "factor");
    options = {};
    options.min = 8, options.max = 4;
    EXPECT_REFUSED(dsopt::scaler(ctx, options), dsopt::argument_error, "m");
    options = {};
    options.refill = true, options.growth_at_window = true, options.hysteresis = 3, options.window = 5;
    EXPECT_EQ(dsopt::scaler(ctx, options).info().hysteresis, 3);
}

} // namespace scaler_tests
