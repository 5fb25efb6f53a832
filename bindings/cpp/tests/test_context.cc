// SPDX-License-Identifier: Apache-2.0
// Lists without an optimizer.
#include "model.h"

namespace context_tests {

TEST(CppContext, OperatesOnListsWithoutOptimizer) {
    dsopt::context ctx;
    std::vector<float> x = {3, -4}, y = {1, 1};
    std::vector<dsopt::f16> half(2);
    dsopt::tensor list[] = {dsopt::view(x)};
    dsopt_norm_result found;
    dsopt::norm_options options;
    options.max_norm = 2.5;
    ctx.norm(list, &found, options);
    EXPECT_EQ(found.norm, 5);
    EXPECT_NEAR(found.coefficient, 0.5, 1e-6);
    options.kind = dsopt::norm_kind::max;
    ctx.norm(list, &found, options);
    EXPECT_EQ(found.norm, 4);
    const float two = 2;
    ctx.axpby(&two, list, 1, {dsopt::view(y)});
    EXPECT_EQ(y, (std::vector<float>{7, -7}));
    const std::vector<float> constant = {1, 2};
    ctx.axpby(nullptr, {dsopt::read_only(constant)}, 0, {dsopt::view(half)});
    EXPECT_EQ(half[0], dsopt::f16{0x3c00});
    ctx.clamp(list, 3.5);
    EXPECT_EQ(x, (std::vector<float>{3, -3.5}));
    ctx.zero_grad(list);
    EXPECT_EQ(x, (std::vector<float>{0, 0}));
    EXPECT_EQ(list[0].data, x.data());
    ctx.set_to_none(list);
    EXPECT_EQ(list[0].data, nullptr);
    ctx.zero_grad({});
    EXPECT_REFUSED(ctx.axpby(nullptr, list, 0, {}), dsopt::argument_error, "y has 0 entries");
    EXPECT_REFUSED(ctx.clamp({dsopt::view(y)}, 0), dsopt::argument_error, "limit");
    EXPECT_REFUSED(ctx.norm({dsopt::view(y)}, nullptr), dsopt::argument_error, "result");
}

TEST(CppContext, ReportsItsThreads) {
    dsopt::context_options options;
    options.threads = 3;
    const dsopt::context_info info = dsopt::context(options).info();
    EXPECT_EQ(info.threads, 3);
    EXPECT_EQ(info.backend, DSOPT_BACKEND_CPU);
    EXPECT_GT(dsopt::context().info().threads, 0);
}

} // namespace context_tests
