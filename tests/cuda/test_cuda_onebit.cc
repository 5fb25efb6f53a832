// SPDX-License-Identifier: Apache-2.0
// The 1-bit family on the device: the host knows the stage of the next step (full or compressed).
#include "backend_optimizer.h"

using namespace cuda_test;

namespace cuda_onebit_tests {

class CudaOneBit : public Cuda {
protected:
    /// Sizes around multiples of a 32-bit word and of a leaf.
    static Setting setting(int32_t algorithm) {
        Setting s;
        s.algorithm = algorithm;
        s.sizes = {7, 0, 4097, 33, 9000, 31};
        s.change = plain;
        return s;
    }
    static void plain(dsopt_group &g, int) {
        g.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
        g.freeze_step = 4;
        if (g.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
            g.var_interval_steps = 2;
            g.local_interval_steps = 2;
            g.max_local_interval = 4;
        }
    }
    static const char *name_of(int32_t algorithm) {
        return algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM     ? "1-bit Adam"
               : algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ? "0/1 Adam"
                                                            : "1-bit LAMB";
    }
    static constexpr int32_t kOneBitFamily[] = {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                                DSOPT_ALGORITHM_ONEBIT_LAMB};
};

TEST_F(CudaOneBit, ReadsStageAfterCounterReset) {
    for (const int32_t algorithm : kOneBitFamily) {
        SCOPED_TRACE(name_of(algorithm));
        Setting s = setting(algorithm);
        BackendOptimizer device(true, s), host(false, s);
        for (BackendOptimizer *side : {&device, &host}) {
            for (int t = 0; t < 6; ++t) {
                side->fill_gradients(t);
                ASSERT_OK(side->step());
            }
            ASSERT_OK(dsopt_optimizer_reset(side->optimizer, DSOPT_RESET_COUNTERS, nullptr));
            int32_t reduction = -1;
            ASSERT_OK(dsopt_optimizer_next_reduction(side->optimizer, 0, &reduction));
            EXPECT_EQ(reduction, DSOPT_REDUCTION_FULL);
            for (int t = 0; t < 6; ++t) {
                side->fill_gradients(t);
                ASSERT_OK(side->step());
            }
        }
        EXPECT_TRUE(same(host.all_bytes(), device.all_bytes()));
    }
}

TEST_F(CudaOneBit, ReportsZeroTimesWithoutOtherRanks) {
    for (const int32_t algorithm : kOneBitFamily) {
        Setting s = setting(algorithm);
        s.desc.flags = DSOPT_OPTIMIZER_TIMING;
        BackendOptimizer side(true, s);
        for (int t = 0; t < 9; ++t) {
            side.fill_gradients(t);
            ASSERT_OK(side.step());
            DSOPT_NEW(dsopt_report, report);
            ASSERT_OK(dsopt_optimizer_report(side.optimizer, &report));
            for (const int phase : {DSOPT_MS_COMPRESS, DSOPT_MS_EXCHANGE, DSOPT_MS_DECOMPRESS})
                EXPECT_EQ(report.ms[phase], 0) << "there is no exchange";
        }
    }
}

TEST_F(CudaOneBit, ReadsStageAfterStepsWithStateList) {
    for (const int32_t algorithm : kOneBitFamily)
        for (const bool applies : {false, true}) {
            SCOPED_TRACE(std::string(name_of(algorithm)) + (applies ? ", apply" : ", step"));
            Setting s = setting(algorithm);
            BackendOptimizer device(true, s), host(false, s);
            for (BackendOptimizer *side : {&device, &host}) {
                size_t bytes = 0;
                ASSERT_OK(dsopt_optimizer_workspace(side->optimizer, &bytes));
                const Bytes workspace(side == &device, bytes + 256, 0);
                for (int t = 0; t < 9; ++t) {
                    side->fill_gradients(t);
                    dsopt_step step = side->arguments();
                    std::vector<dsopt_tensor> state, params;
                    if (t >= 1 && t <= 5) { // before and after the freeze
                        state = side->state();
                        step.state = state.data();
                        step.state_count = int64_t(state.size());
                    }
                    if (step.state != nullptr && applies) {
                        for (size_t i = 0; i < side->params.size(); ++i)
                            params.push_back({side->params[i].data(), side->gradients[i].numel, s.param, 0});
                        step.params = params.data();
                        step.workspace_bytes = bytes;
                        step.workspace =
                            workspace.data() + (256 - reinterpret_cast<uintptr_t>(workspace.data()) % 256) % 256;
                        ASSERT_OK(dsopt_optimizer_apply(side->optimizer, &step));
                    } else {
                        ASSERT_OK(dsopt_optimizer_step(side->optimizer, &step));
                    }
                }
            }
            EXPECT_TRUE(same(host.all_bytes(), device.all_bytes()));
        }
}

TEST_F(CudaOneBit, RejectsCapture) {
    BackendOptimizer side(true, setting(DSOPT_ALGORITHM_ONEBIT_ADAM));
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    dsopt_step step = side.arguments();
    step.stream = stream;
    EXPECT_EQ(dsopt_optimizer_step(side.optimizer, &step), DSOPT_ERR_STATE);
    EXPECT_NE(std::string(dsopt_last_error()).find("captured"), std::string::npos) << dsopt_last_error();
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    ASSERT_OK(side.step());
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

} // namespace cuda_onebit_tests
