// SPDX-License-Identifier: Apache-2.0
// Tests that only the emulated device allows: the cost of a step in launches, waits, copies and memory, and that the
// engine survives a failure of every runtime call.
#include "backend_optimizer.h"
#include "noop_comm.h"
#include <algorithm>
#include <barrier>
#include <unistd.h>

using namespace cuda_test;

namespace cuda_costs_tests {

using CudaStepCost = Cuda;
using CudaCheckpoint = Cuda;
using CudaRuntimeFaults = Cuda;

std::vector<std::string> launches(BackendOptimizer &side) {
    fakert::mark();
    EXPECT_EQ(side.step(), DSOPT_OK) << dsopt_last_error();
    return fakert::launched_kernels();
}

TEST_F(CudaStepCost, UnchangedListsNeedNoWaitAllocationOrUpload) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(3000, 5);
    s.desc.max_norm = 1;
    BackendOptimizer side(true, s);
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    for (int t = 0; t < 3; ++t) {
        EXPECT_EQ(launches(side), (std::vector<std::string>{"inspect", "update", "count"}));
        const fakert::Counters c = fakert::counters();
        EXPECT_EQ(c.host_waits + c.device_allocations + c.copies_to_device + c.copies_to_host + c.host_allocations, 0);
    }
    ASSERT_OK(dsopt_optimizer_set(side.optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.5));
    EXPECT_EQ(launches(side), (std::vector<std::string>{"patch", "inspect", "update", "count"}));
    EXPECT_EQ(fakert::counters().copies_to_device, 0);
}

/// A separate kernel advances the step counts if there are more than 1,024 tensors.
TEST_F(CudaStepCost, AdamIsOneLaunchAndClippedLambThree) {
    allow_many_blocks();
    for (const size_t count : {size_t(1), size_t(100), size_t(1024), size_t(1025), size_t(5000)}) {
        const auto with_counts = [&](std::vector<std::string> kernels) {
            if (count > 1024) kernels.push_back("count");
            return kernels;
        };
        Setting s;
        s.sizes.assign(count, 3);
        {
            BackendOptimizer adam(true, s);
            ASSERT_OK(adam.step());
            EXPECT_EQ(launches(adam), with_counts({"update"}));
        }
        s.algorithm = DSOPT_ALGORITHM_LAMB;
        s.desc.max_norm = 1;
        BackendOptimizer lamb(true, s);
        lamb.fill_gradients(1);
        ASSERT_OK(lamb.step());
        EXPECT_EQ(launches(lamb), with_counts({"inspect", "update", "update_weights"}));
    }
}

TEST_F(CudaStepCost, ShardedLambAddsOneLaunch) {
    allow_many_blocks();
    for (const bool sharded : {false, true}) {
        const Ranks group(2);
        std::barrier barrier(2);
        std::vector<std::string> seen, wanted;
        for (int rank = 0; rank < 2; ++rank) {
            for (const char *name : {"fold", "decide", "update", "update_weights"}) wanted.push_back(name);
            if (sharded) wanted.push_back("shared_trust");
        }
        group.run([&](int rank) {
            Setting s;
            s.algorithm = DSOPT_ALGORITHM_LAMB;
            s.sizes.assign(300, 3);
            s.param_flags = sharded ? DSOPT_PARAM_MODEL_PARALLEL : 0;
            s.model = &group;
            s.model_rank = rank;
            BackendOptimizer side(true, s);
            side.fill_gradients(1);
            ASSERT_OK(side.step());
            barrier.arrive_and_wait();
            if (rank == 0) fakert::mark();
            barrier.arrive_and_wait();
            ASSERT_OK(side.step());
            barrier.arrive_and_wait();
            if (rank == 0) seen = fakert::launched_kernels();
            barrier.arrive_and_wait();
        });
        std::sort(seen.begin(), seen.end()); // two ranks launch concurrently
        std::sort(wanted.begin(), wanted.end());
        EXPECT_EQ(seen, wanted);
    }
}

TEST_F(CudaStepCost, PatchesFewPointersAndUploadsMany) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(2000, 4);
    BackendOptimizer side(true, s);
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    std::swap(side.gradients[0].data, side.gradients[1].data);
    EXPECT_EQ(launches(side), (std::vector<std::string>{"patch", "update", "count"}));
    EXPECT_EQ(fakert::counters().copies_to_device, 0);
    for (size_t i = 0; i + 1 < side.gradients.size(); i += 2)
        std::swap(side.gradients[i].data, side.gradients[i + 1].data);
    EXPECT_EQ(launches(side), (std::vector<std::string>{"update", "count"}));
    EXPECT_EQ(fakert::counters().copies_to_device, 1);
    EXPECT_EQ(fakert::counters().host_waits, 0);
}

/// Returns settings in which 1-bit steps begin after two steps.
Setting onebit(int32_t algorithm, size_t count) {
    Setting s;
    s.algorithm = algorithm;
    s.sizes.assign(count, 40);
    s.change = [](dsopt_group &group, int) {
        group.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
        group.freeze_step = 2;
        if (group.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) group.local_interval_steps = group.max_local_interval = 2;
    };
    return s;
}

TEST_F(CudaStepCost, OneBitStageNeedsNoWaitOrAllocation) {
    allow_many_blocks();
    const std::vector<std::string> adam{"decide", "apply_mean", "update", "end_onebit"},
        lamb{"decide", "begin_onebit",   "onebit_lamb_moments", "onebit_trust", "onebit_lamb_weights",
             "update", "update_weights", "end_onebit"},
        local{"decide", "begin_onebit", "local", "update", "end_onebit"},
        sync{"decide", "begin_onebit", "feed", "apply_mean", "update", "end_onebit"};
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        BackendOptimizer side(true, onebit(algorithm, 300));
        side.fill_gradients(0);
        for (int t = 0; t < 4; ++t) ASSERT_OK(side.step());
        for (int t = 0; t < 4; ++t) {
            const auto &expected = algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM   ? adam
                                   : algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB ? lamb
                                   : t % 2 == 0                               ? local
                                                                              : sync;
            EXPECT_EQ(launches(side), expected) << t;
            const fakert::Counters c = fakert::counters();
            EXPECT_EQ(c.host_waits + c.device_allocations + c.copies_to_device + c.copies_to_host + c.host_allocations,
                      0);
        }
    }
}

TEST_F(CudaStepCost, OneBitLaunchesDoNotDependOnTensorCount) {
    allow_many_blocks();
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        std::vector<std::string> seen[2];
        for (const bool many : {false, true}) {
            const Ranks group(2);
            std::barrier barrier(2);
            group.run([&](int rank) {
                BackendOptimizer side(true, onebit(algorithm, many ? 600 : 1), &group, rank);
                side.fill_gradients(rank);
                for (int t = 0; t < 3; ++t) ASSERT_OK(side.step());
                barrier.arrive_and_wait();
                if (rank == 0) fakert::mark();
                barrier.arrive_and_wait();
                ASSERT_OK(side.step());
                barrier.arrive_and_wait();
                if (rank == 0) seen[many] = fakert::launched_kernels();
            });
            std::sort(seen[many].begin(), seen[many].end()); // two ranks launch concurrently
        }
        EXPECT_EQ(seen[0], seen[1]);
        EXPECT_LE(seen[0].size(), 2 * 13u);
    }
}

TEST_F(CudaStepCost, StreamOrderedTableNeedsNoWaitAndCanBeCaptured) {
    allow_many_blocks();
    for (const uint32_t flags : {uint32_t(0), uint32_t(DSOPT_COMM_FLAG_ENQUEUE)}) {
        const NoOpComm noop(flags);
        Setting s;
        s.desc.max_norm = 1;
        s.desc.data = s.desc.model = noop.comm;
        s.context = noop.context;
        BackendOptimizer side(true, s);
        side.fill_gradients(0);
        ASSERT_OK(side.step());
        EXPECT_EQ(launches(side), (std::vector<std::string>{"inspect", "decide", "update"}));
        const fakert::Counters c = fakert::counters();
        EXPECT_EQ(c.host_waits + c.device_allocations + c.copies_to_device + c.copies_to_host, 0);

        cudaStream_t stream = nullptr;
        cudaGraph_t graph = nullptr;
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
        dsopt_step step = side.arguments();
        step.stream = stream;
        EXPECT_EQ(dsopt_optimizer_step(side.optimizer, &step), flags != 0 ? DSOPT_OK : DSOPT_ERR_STATE);
        EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        if (flags != 0) {
            EXPECT_EQ(fakert::nodes(graph),
                      (std::vector<std::string>{"kernel inspect", "kernel decide", "kernel update"}));
        }
        (void)cudaGraphDestroy(graph);
        (void)cudaStreamDestroy(stream);
        ASSERT_OK(side.step()); // the comm stays usable, also after a refused capture
    }
}

TEST_F(CudaCheckpoint, SavesTensorsOfAnySizeThroughTwoBuffers) {
    Setting s;
    s.sizes = {3, 1500000, 2000001}; // pieces of 4 MiB and tails
    const std::string path = testing::TempDir() + "/dsopt-cuda-costs-" + std::to_string(getpid()) + ".safetensors";
    BackendOptimizer device(true, s);
    ASSERT_OK(device.step());
    fakert::mark();
    ASSERT_OK(dsopt_optimizer_save(device.optimizer, path.c_str(), nullptr));
    EXPECT_LE(fakert::counters().host_allocations, 2);
    (void)std::remove(path.c_str());
}

TEST_F(CudaRuntimeFaults, DoNotCrashOrHang) {
    const auto scenario = [] { // stops at the first failure
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        dsopt_context *context = nullptr;
        dsopt_optimizer *optimizer = nullptr;
        dsopt_status status = dsopt_context_create(&context_desc, &context);
        float *memory = nullptr;
        if (status == DSOPT_OK && cudaMalloc(reinterpret_cast<void **>(&memory), 200 * sizeof(float)) != cudaSuccess)
            status = DSOPT_ERR_NOMEM;
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.max_norm = 1;
        if (status == DSOPT_OK) status = dsopt_optimizer_create(context, &desc, &optimizer);
        dsopt_group group;
        dsopt_param param{};
        param.tensor = {memory, 100, DSOPT_DTYPE_F32, 0};
        dsopt_tensor grad{memory + 100, 100, DSOPT_DTYPE_F32, 0};
        if (status == DSOPT_OK) status = dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_LAMB);
        if (status == DSOPT_OK) status = dsopt_optimizer_add_group(optimizer, &group, &param, 1);
        DSOPT_NEW(dsopt_step, step);
        step.grads = &grad;
        step.count = 1;
        for (int t = 0; t < 2 && status == DSOPT_OK; ++t) status = dsopt_optimizer_step(optimizer, &step);
        float moments[100];
        if (status == DSOPT_OK) status = dsopt_optimizer_export(optimizer, 0, moments, sizeof moments);
        if (status == DSOPT_OK) status = dsopt_zero_grad(context, &grad, 1, DSOPT_ZERO_FILL, nullptr);
        dsopt_optimizer_destroy(optimizer);
        dsopt_context_destroy(context);
        (void)cudaFree(memory);
        return status;
    };
    fakert::Config config = fakert::config_from_environment();
    fakert::reset(config);
    ASSERT_EQ(scenario(), DSOPT_OK) << dsopt_last_error();
    const long calls = fakert::calls();
    ASSERT_GT(calls, 20);
    for (long n = 0; n < calls; ++n) {
        config.fail_call = n;
        fakert::reset(config);
        (void)scenario(); // a free that fails at the end returns no status
    }
    fakert::reset();
    EXPECT_EQ(scenario(), DSOPT_OK);
}

} // namespace cuda_costs_tests
