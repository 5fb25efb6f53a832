// SPDX-License-Identifier: Apache-2.0
// Muon: options, blocks of a tensor, keys, and refusals. Its numbers are a case of bindings/conformance.
#include "support.h"

namespace muon_tests {

dsopt::muon exact() {
    dsopt::muon group;
    group.lr = 0.02;
    group.ns_dtype = dsopt::dtype::f32;
    return group;
}
/// Returns the weights after three steps of a group with one parameter of 4 x 6.
std::vector<float> trained(const dsopt::muon &group, const dsopt::param &like) {
    std::vector<float> w = values(24, 1);
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    dsopt::param param = like;
    param.tensor = dsopt::view(w);
    opt.add_group(group, {param});
    for (std::uint32_t s = 0; s < 3; ++s) {
        std::vector<float> g = values(24, 100 + s);
        opt.step({dsopt::view(g)});
    }
    return w;
}
dsopt::param shaped(std::vector<std::int64_t> dims, std::int64_t rows = 0, std::int64_t cols = 0) {
    dsopt::param param;
    param.name = "w";
    param.dims = std::move(dims);
    param.rows = rows, param.cols = cols;
    return param;
}

TEST(CppMuon, BlocksAreMatricesOfTheirOwn) {
    // Two blocks of 2 x 6, registered as one tensor and as two.
    const std::vector<float> whole = trained(exact(), shaped({2, 2, 6}, 2, 6));
    EXPECT_EQ(whole, trained(exact(), shaped({}, 2, 6)));
    EXPECT_NE(whole, trained(exact(), shaped({4, 6})));
    std::vector<float> w = values(24, 1);
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    opt.add_group(exact(), {{dsopt::view(w.data(), 12), "a", {2, 6}}, {dsopt::view(w.data() + 12, 12), "b", {2, 6}}});
    for (std::uint32_t s = 0; s < 3; ++s) {
        std::vector<float> g = values(24, 100 + s);
        opt.step({dsopt::view(g.data(), 12), dsopt::view(g.data() + 12, 12)});
    }
    EXPECT_EQ(whole, w);
    dsopt::param tall = shaped({12, 2});
    const std::vector<float> outputs = trained(exact(), tall);
    tall.rows_are_inputs = true;
    EXPECT_NE(outputs, trained(exact(), tall)); // another factor of lr
}

TEST(CppMuon, OptionsChangeTheStep) {
    const std::vector<float> plain = trained(exact(), shaped({4, 6}));
    const auto changes = [&](const char *what, const dsopt::muon &group) {
        EXPECT_NE(plain, trained(group, shaped({4, 6}))) << what;
    };
    dsopt::muon group = exact();
    group.nesterov = false, changes("nesterov", group);
    group = exact(), group.bias_correction = true, changes("bias_correction", group);
    group = exact(), group.ns_steps = 3, changes("ns_steps", group);
    group = exact(), group.ns_coefficients = {2, -1.5, 0.5}, changes("ns_coefficients", group);
    group = exact(), group.ns_schedule = dsopt::ns_schedule::you, changes("you", group);
    group = exact(), group.ns_schedule = dsopt::ns_schedule::polar_express, changes("polar_express", group);
    group = exact(), group.adjust = dsopt::adjust::match_rms_adamw, changes("match_rms_adamw", group);
    group = exact(), group.adjust = dsopt::adjust::spectral_unclamped, changes("spectral_unclamped", group);
    group = exact(), group.ns_coefficients = {3.4445, -4.775, 2.0315};
    EXPECT_EQ(plain, trained(group, shaped({4, 6})));
    group = exact(), group.adjust = dsopt::adjust::none; // of 4 outputs and 6 inputs the original factor is 1
    EXPECT_EQ(plain, trained(group, shaped({4, 6})));
}

TEST(CppMuon, HyperParametersAreReadAndSet) {
    dsopt::context ctx;
    dsopt::optimizer opt(ctx);
    opt.add_group(dsopt::muon{});
    using dsopt::key;
    EXPECT_EQ(opt.get(key::ns_a), 3.4445);
    EXPECT_EQ(opt.get(key::ns_steps), 5);
    EXPECT_EQ(opt.get(key::ns_dtype), DSOPT_DTYPE_BF16);
    opt.set(key::momentum, 0.9);
    opt.set(key::ns_steps, 3);
    opt.set(key::ns_b, -4.5);
    opt.set(key::adjust, static_cast<double>(dsopt::adjust::none));
    EXPECT_EQ(opt.get(key::momentum), 0.9);
    EXPECT_EQ(opt.get(key::ns_steps), 3);
    EXPECT_EQ(opt.get(key::ns_b), -4.5);
    EXPECT_EQ(opt.get(key::adjust), DSOPT_ADJUST_NONE);
    opt.set(key::ns_schedule, static_cast<double>(dsopt::ns_schedule::you));
    EXPECT_EQ(opt.get(key::ns_schedule), DSOPT_NS_YOU);
    EXPECT_EQ(opt.get(key::ns_c), 0);
    EXPECT_REFUSED(opt.set(key::ns_dtype, DSOPT_DTYPE_F32), dsopt::unsupported_error, "ns_dtype");
    EXPECT_REFUSED(opt.set(key::momentum, 1), dsopt::argument_error, "momentum");
}

TEST(CppMuon, RefusesWhatItCannotStep) {
    std::vector<float> w(24);
    dsopt::context ctx;
    const auto add = [&](const auto &group, dsopt::param param) {
        dsopt::optimizer opt(ctx);
        param.tensor = dsopt::view(w);
        opt.add_group(group, {param});
    };
    EXPECT_REFUSED(add(exact(), shaped({2, 2, 6})), dsopt::argument_error, "'w' has 3 dims and no rows and cols");
    EXPECT_REFUSED(add(exact(), shaped({4, 6}, 3, 6)), dsopt::argument_error, "cannot be cut");
    EXPECT_REFUSED(add(exact(), shaped({4, 6}, 2)), dsopt::argument_error, "both must be above 0");
    EXPECT_REFUSED(add(dsopt::adamw{}, shaped({4, 6}, 2, 6)), dsopt::unsupported_error, "has no effect in adamw");
    dsopt::param inputs = shaped({4, 6});
    inputs.rows_are_inputs = true;
    EXPECT_REFUSED(add(dsopt::adamw{}, inputs), dsopt::unsupported_error, "ROWS_ARE_INPUTS");
    dsopt::muon group;
    group.ns_schedule = dsopt::ns_schedule::you, group.ns_coefficients = {2, -1.5, 0.5};
    EXPECT_REFUSED(add(group, shaped({4, 6})), dsopt::unsupported_error, "preset");
    group = {}, group.nesterov = false, group.bias_correction = true;
    EXPECT_REFUSED(add(group, shaped({4, 6})), dsopt::unsupported_error, "bias correction has no effect");
    group = {}, group.ns_dtype = dsopt::dtype::i32;
    EXPECT_REFUSED(add(group, shaped({4, 6})), dsopt::argument_error, "ns_dtype");
    dsopt::optimizer_options options;
    options.split_matrices = true;
    EXPECT_REFUSED(dsopt::optimizer(ctx, options), dsopt::unsupported_error, "SPLIT_MATRICES");
}

} // namespace muon_tests
