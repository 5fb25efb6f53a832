// SPDX-License-Identifier: Apache-2.0
// Warm calls on lists of any length allocate nothing, and a first step that cannot allocate has sent nothing.
#include "support/warm.h"

using namespace test;

namespace {

const Memory &host() {
    static const Memory memory = host_memory();
    return memory;
}

class WarmCalls : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Tensors, WarmCalls, testing::Values(1, 31, 32, 10000),
                         [](const auto &info) { return std::to_string(info.param); });

TEST_P(WarmCalls, AllocateNothingWithoutOtherRanks) {
    expect_no_news_in_warm_calls(DSOPT_BACKEND_CPU, host(), GetParam(), 5);
}
TEST_P(WarmCalls, AllocateNothingInStepsThatAverageGradients) {
    expect_no_news_in_averaging_steps(DSOPT_BACKEND_CPU, host(), GetParam(), 8);
}

TEST(FirstStep, HasSentNothingWhenAnAllocationFails) {
    for (const int32_t algorithm : kFamily)
        for (const uint32_t flags : {0u, uint32_t(DSOPT_OPTIMIZER_AVERAGES)}) {
            SCOPED_TRACE(name_of(algorithm));
            expect_first_step_repeatable(DSOPT_BACKEND_CPU, host(), algorithm, flags);
        }
}

} // namespace
