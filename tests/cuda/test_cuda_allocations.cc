// SPDX-License-Identifier: Apache-2.0
// On the emulated device a warm step allocates nothing on the host, even if the addresses in its lists change in each
// call.
#include "backend_optimizer.h"
#include "support/allocations.h"

using namespace cuda_test;

namespace cuda_allocations_tests {

TEST(CudaWarmStep, AllocatesNoHostMemoryWhenListsMove) {
    test::NewCounter::is_ignored = fakert::in_runtime_call;
    std::vector<Setting> settings = format_settings();
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ONEBIT_ADAM,
                                    DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        settings.emplace_back();
        settings.back().algorithm = algorithm;
    }
    settings.emplace_back();
    settings.back().algorithm = DSOPT_ALGORITHM_MUON; // of the first group; the second one is AdamW's
    settings.back().group_flags = DSOPT_GROUP_NESTEROV | DSOPT_GROUP_NO_BIAS_CORRECTION;
    settings.back().matrices = {{24, 40}, {24, 40}};
    settings.back().sizes = {24 * 40, 2 * 24 * 40, 7, 4097, 33};
    for (Setting &setting : settings) {
        SCOPED_TRACE(test::name_of(setting.algorithm) + ' ' + std::to_string(setting.first_format));
        begin_test();
        {
            setting.scaler = true;
            setting.desc.max_norm = 1;
            setting.change = [](dsopt_group &group, int index) {
                if (index == 1 && group.algorithm == DSOPT_ALGORITHM_MUON)
                    BackendOptimizer::must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
                if (group.freeze_step != 0) group.freeze_step = 3;
                if (group.max_local_interval == 0) return;
                group.var_interval_steps = 1;
                group.local_interval_steps = group.max_local_interval = 2;
            };
            BackendOptimizer side(true, setting);
            side.fill_gradients(0);
            std::vector<Bytes> copies;
            std::vector<dsopt_tensor> moved = side.gradients;
            for (size_t i = 0; i < moved.size(); ++i) {
                copies.emplace_back(true, side.grads[i].bytes(), 0);
                copies.back().set(side.grads[i].get());
                moved[i].data = copies.back().data();
            }
            for (int call = 0; call < 12; ++call) {
                dsopt_step step = side.arguments();
                // The same list twice, then other pointers: all of them or one.
                if (call % 4 >= 2) step.grads = moved.data();
                if (call % 6 == 5) std::swap(moved[4].data, side.gradients[4].data);
                test::NewCounter::calls = 0;
                dsopt_status status;
                {
                    const test::CountScope armed;
                    status = dsopt_optimizer_step(side.optimizer, &step);
                }
                ASSERT_OK(status);
                const int64_t allocations = test::NewCounter::calls;
                if (call == 0) {
                    EXPECT_GT(allocations, 0) << "the counter does not see allocations";
                } else {
                    EXPECT_EQ(allocations, 0) << "call " << call;
                }
            }
        }
        end_test();
    }
    test::NewCounter::is_ignored = nullptr;
}

class CudaWarmCalls : public testing::TestWithParam<size_t> {
protected:
    void SetUp() override {
        begin_test();
        allow_many_blocks();
        test::NewCounter::is_ignored = fakert::in_runtime_call;
    }
    void TearDown() override {
        test::NewCounter::is_ignored = nullptr;
        end_test();
    }
};
INSTANTIATE_TEST_SUITE_P(Tensors, CudaWarmCalls, testing::Values(1, 31, 32, 2000),
                         [](const auto &info) { return std::to_string(info.param); });

TEST_P(CudaWarmCalls, AllocateNoHostMemoryOnOneRank) {
    test::expect_no_allocations_in_warm_calls(DSOPT_BACKEND_CUDA, memory_of(true), GetParam(),
                                              GetParam() > 100 ? 2 : 5);
}
TEST_P(CudaWarmCalls, AllocateNoHostMemoryInAveragingSteps) {
    test::expect_no_allocations_in_averaging_steps(DSOPT_BACKEND_CUDA, memory_of(true), GetParam(),
                                                   GetParam() > 100 ? 3 : 8);
}

TEST(CudaFirstStep, SendsNothingIfAllocationFails) {
    begin_test();
    test::NewCounter::is_ignored = fakert::in_runtime_call;
    test::expect_first_step_repeatable(DSOPT_BACKEND_CUDA, memory_of(true), DSOPT_ALGORITHM_ONEBIT_ADAM,
                                       DSOPT_OPTIMIZER_AVERAGES);
    test::NewCounter::is_ignored = nullptr;
    end_test();
}

} // namespace cuda_allocations_tests
