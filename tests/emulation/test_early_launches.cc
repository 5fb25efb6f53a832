// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launches in the fake runtime. A kernel that is launched early runs up to its wait before the
// preceding kernel runs. A kernel may trigger the launch of its successor only if the successor is launched early.
#include "fakert.h"
#include "launch.h"
#include <gtest/gtest.h>

using namespace fakert;
using dsopt::gpu::Launch;
using dsopt::gpu::Pdl;
using dsopt::gpu::PdlArgument;

namespace {

/// Records of the kernels, in host memory.
struct Log {
    unsigned begun = 0, begun_before_end = 0, ended = 0;
};
__global__ void waiting_kernel(const PdlArgument<int> argument) { (void)argument.begin_kernel(); }
__global__ void counting_kernel(const PdlArgument<Log *> argument, Log *log) {
    atomicAdd(&log->begun, 1u); // before the wait, which is valid because no preceding kernel writes it
    atomicAdd(&argument.begin_kernel()->ended, 1u);
}
__global__ void reading_kernel(Log *log) { log->begun_before_end = atomicAdd(&log->begun, 0u); }
__global__ void trapping_kernel() { __trap(); }

constexpr unsigned kBlocks = 8, kThreads = 64; // of counting_kernel

class EarlyLaunches : public testing::Test {
protected:
    void SetUp() override {
        Config config;
        config.mode = Mode::lazy;
        reset(config);
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    }
    void TearDown() override { reset(); }
    cudaError_t launch(Pdl pdl) const { return Launch{"waiting", 2, 32, 0, stream_}(pdl, waiting_kernel, 0); }
    cudaError_t read() { return Launch{"reading", 1, 1, 0, stream_}(reading_kernel, log_); }
    cudaError_t count() {
        return Launch{"counting", kBlocks, kThreads, 0, stream_}({.early = true}, counting_kernel, log_, log_);
    }

    unsigned begun() const { return __atomic_load_n(&log_->begun, __ATOMIC_RELAXED); } // while the kernel runs

    cudaStream_t stream_ = nullptr;
    Log test_log_, *log_ = &test_log_;
};

TEST_F(EarlyLaunches, RunUpToWaitBeforePrecedingKernel) {
    for (int round = 0; round < 2; ++round) { // the first round runs more blocks early
        *log_ = {};
        ASSERT_EQ(read(), cudaSuccess);
        ASSERT_EQ(count(), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        EXPECT_GE(log_->begun_before_end, kThreads);
        EXPECT_EQ(log_->begun, kBlocks * kThreads);
        EXPECT_EQ(log_->ended, kBlocks * kThreads);
    }
}
TEST_F(EarlyLaunches, RunInGraphs) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_EQ(read(), cudaSuccess);
    for (int k = 0; k < 3; ++k) ASSERT_EQ(count(), cudaSuccess);
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
    for (int round = 0; round < 2; ++round) {
        *log_ = {};
        ASSERT_EQ(cudaGraphLaunch(exec, stream_), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
        EXPECT_GE(log_->begun_before_end, kThreads);
        EXPECT_EQ(log_->ended, 3 * kBlocks * kThreads);
    }
}
TEST_F(EarlyLaunches, AreAbandonedOnReset) {
    static Log lasting; // for the thread sanitizer, the end of the test does not happen after an abandoned kernel
    log_ = &lasting;
    cudaEvent_t event = nullptr;
    ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    ASSERT_EQ(read(), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
    ASSERT_EQ(count(), cudaSuccess);
    ASSERT_EQ(cudaEventSynchronize(event), cudaSuccess);
    EXPECT_GE(begun(), kThreads);
    reset();
    EXPECT_EQ(log_->ended, 0u);
}
TEST_F(EarlyLaunches, AreAbandonedIfPrecedingKernelFails) {
    static Log lasting; // for the thread sanitizer, the end of the test does not happen after an abandoned kernel
    log_ = &lasting;
    ASSERT_EQ((Launch{"trapping", 1, 1, 0, stream_}(trapping_kernel)), cudaSuccess);
    ASSERT_EQ(count(), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorLaunchFailure);
    EXPECT_GE(begun(), kThreads);
    EXPECT_EQ(log_->ended, 0u);
}
TEST_F(EarlyLaunches, AreRejectedBelowCapabilityOrPtx90) {
    EXPECT_EQ(launch({.early = true}), cudaSuccess);
    EXPECT_EQ(counters().early_launches, 1);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    Config config;
    config.capability = 89;
    reset(config);
    stream_ = nullptr;
    EXPECT_EQ(launch({.early = true}), cudaErrorInvalidValue);
    config.capability = 90;
    config.ptx = 80;
    reset(config);
    EXPECT_EQ(launch({.early = true}), cudaErrorInvalidValue);
    cudaFuncAttributes attributes;
    EXPECT_EQ(cudaFuncGetAttributes(&attributes, waiting_kernel), cudaSuccess);
    EXPECT_EQ(attributes.ptxVersion, 80);
}
TEST_F(EarlyLaunches, FollowKernelsThatTrigger) {
    cudaEvent_t event = nullptr;
    ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
    ASSERT_EQ(launch({.triggers = true}), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
    ASSERT_EQ(launch({.early = true}), cudaSuccess);
    EXPECT_EQ(triggering_kernels(), std::vector<std::string>{}); // no kernel has run yet
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    EXPECT_EQ(triggering_kernels(), std::vector<std::string>{"waiting"});
}
TEST_F(EarlyLaunches, AreRequiredAfterKernelsThatTrigger) {
    ASSERT_EQ(launch({.triggers = true}), cudaSuccess);
    ASSERT_EQ(launch({}), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorLaunchFailure);
}

} // namespace
