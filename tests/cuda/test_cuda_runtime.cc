// SPDX-License-Identifier: Apache-2.0
// Calls of the CUDA runtime other than work on a stream: primary contexts, captures of other threads, kernel images,
// memory. Only on the emulated device, which counts them.
#include "backend_optimizer.h"
#include "captures.h"
#include "support/fork.h"
#include <algorithm>
#include <memory>

using namespace cuda_test;

namespace cuda_runtime_tests {

using CudaStep = Cuda;
using CudaZeroGrad = Cuda;
using CudaContextCreate = Cuda;
using CudaLists = Cuda;
using CudaRuntimeFaults = Cuda;

TEST_F(CudaStep, KeepsCapturesOfOtherThreadsValid) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(3000, 4); // more pointers than kernel arguments hold: tables are uploaded
    BackendOptimizer side(true, s), reference(true, s);
    for (BackendOptimizer *each : {&side, &reference}) each->fill_gradients(0);
    const auto steps = [](BackendOptimizer &on) {
        for (int t = 0; t < 3; ++t) {
            for (size_t i = 0; i + 1 < on.gradients.size(); i += 2)
                std::swap(on.gradients[i].data, on.gradients[i + 1].data);
            ASSERT_OK(on.step());
        }
        ASSERT_OK(
            dsopt_zero_grad(on.context, on.gradients.data(), int64_t(on.gradients.size()), DSOPT_ZERO_FILL, nullptr));
    };
    during_global_capture([&] { steps(side); });
    steps(reference);
    EXPECT_TRUE(same(side.all_bytes(), reference.all_bytes()));
}

TEST_F(CudaStep, KeepsCapturesValidWhileHostWaitsForRanks) {
    const Ranks group(2);
    std::unique_ptr<BackendOptimizer> sides[2];
    group.run([&](int rank) {
        Setting s;
        s.sizes = {5, 4100};
        s.desc.max_norm = 1;
        sides[rank] = std::make_unique<BackendOptimizer>(true, s, &group, rank);
        sides[rank]->fill_gradients(0);
    });
    during_global_capture([&] {
        group.run([&](int rank) {
            for (int t = 0; t < 2; ++t) EXPECT_OK(sides[rank]->step());
        });
    });
    group.run([&](int rank) { sides[rank].reset(); });
}

TEST_F(CudaZeroGrad, CreatesNoContextOnOtherDevice) {
    DSOPT_NEW(dsopt_context_desc, context_desc);
    context_desc.backend = DSOPT_BACKEND_CUDA;
    context_desc.device = 1;
    dsopt_context *context = nullptr;
    void *memory = nullptr;
    ASSERT_OK(dsopt_context_create(&context_desc, &context));
    std::thread([&] {
        EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
        EXPECT_EQ(cudaMalloc(&memory, 4000), cudaSuccess);
    }).join();
    std::thread([&] { // device 0 is current in a new thread
        dsopt_tensor tensor{memory, 1000, DSOPT_DTYPE_F32, 0};
        EXPECT_OK(dsopt_zero_grad(context, &tensor, 1, DSOPT_ZERO_FILL, nullptr));
        int current = -1;
        EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
        EXPECT_EQ(current, 0) << "the caller's device was not restored";
    })
        .join();
    EXPECT_TRUE(fakert::has_context(1));
    EXPECT_FALSE(fakert::has_context(0));
    EXPECT_EQ(cudaFree(memory), cudaSuccess);
    dsopt_context_destroy(context);
}

/// Returns the text with which no context is made, because something is missing.
std::string refusal(const fakert::Config &config) {
    fakert::reset(config);
    DSOPT_NEW(dsopt_context_desc, context_desc);
    context_desc.backend = DSOPT_BACKEND_CUDA;
    dsopt_context *context = nullptr;
    EXPECT_EQ(dsopt_context_create(&context_desc, &context), DSOPT_ERR_MISSING);
    EXPECT_EQ(context, nullptr);
    return dsopt_last_error();
}

TEST_F(CudaContextCreate, ReportsMissingCodeForDevice) {
    fakert::Config config = fakert::config_from_environment();
    config.images = false;
    const std::string text = refusal(config);
    EXPECT_NE(text.find("CUDA device 0 has compute capability 9.0, and this build has code for 7.5, 8.0. "),
              std::string::npos)
        << text;
}

TEST_F(CudaContextCreate, ReportsMissingAndOldDrivers) {
    const std::pair<int, const char *> cases[] = {
        {0,
         "no CUDA device can be used here: there is no CUDA driver (libcuda.so.1), or one before CUDA 12; this build "
         "needs one for CUDA 13.0 or later"},
        {12080,
         "no CUDA device can be used here: the driver is for CUDA 12.8, and this build needs one for CUDA 13.0 or "
         "later: update the driver, or build from source with a CUDA toolkit of the driver's version, 12.5 or "
         "later"}};
    fakert::Config config = fakert::config_from_environment();
    for (const auto &[driver, text] : cases) {
        config.driver = driver;
        EXPECT_EQ(refusal(config), text);
    }
    config = fakert::config_from_environment();
    config.devices = 0;
    EXPECT_EQ(refusal(config), "no CUDA device can be used here: the CUDA driver finds no device");
}

TEST_F(CudaStep, UsesDependentLaunchIfCodeSupportsIt) {
    // The PTX version matters: code of an older version, compiled by the driver, does not wait.
    struct Case {
        int capability, ptx;
        bool early;
    };
    std::vector<std::vector<char>> first;
    for (const Case &c :
         {Case{75, 75, false}, Case{80, 80, false}, Case{90, 90, true}, Case{90, 80, false}, Case{110, 80, false}}) {
        SCOPED_TRACE(testing::Message() << "capability " << c.capability << ", PTX " << c.ptx);
        fakert::Config config = fakert::config_from_environment();
        config.capability = c.capability;
        config.ptx = c.ptx;
        fakert::reset(config);
        Setting s;
        s.algorithm = DSOPT_ALGORITHM_LAMB;
        s.desc.max_norm = 1;
        BackendOptimizer side(true, s);
        for (int t = 0; t < 2; ++t) {
            side.fill_gradients(t);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            fakert::mark();
            ASSERT_OK(side.step());
        }
        EXPECT_EQ(fakert::counters().kernel_launches, 3);
        EXPECT_EQ(fakert::counters().early_launches, c.early ? 2 : 0);
        if (first.empty()) first = side.all_bytes();
        EXPECT_TRUE(same(side.all_bytes(), first));
    }
}

TEST_F(CudaStep, DoesNotTriggerBeforeShardCollective) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const bool sharded : {false, true}) {
            const bool onebit = algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
            const char *const sums = onebit ? "onebit_trust" : "update";
            SCOPED_TRACE(testing::Message() << sums << (sharded ? ", sharded" : ""));
            const Ranks group(2);
            std::barrier barrier(2);
            std::vector<std::string> names;
            group.run([&](int rank) {
                Setting s;
                s.algorithm = algorithm;
                s.param_flags = sharded ? DSOPT_PARAM_MODEL_PARALLEL : 0;
                s.model = &group;
                s.model_rank = rank;
                s.change = [](dsopt_group &g, int) {
                    if (g.algorithm != DSOPT_ALGORITHM_ONEBIT_LAMB) return;
                    g.flags = DSOPT_GROUP_NO_BIAS_CORRECTION;
                    g.freeze_step = 2;
                };
                BackendOptimizer side(true, s);
                side.fill_gradients(1);
                for (int t = 0; t < 3; ++t) EXPECT_OK(side.step()); // the other rank waits at the barrier
                EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                barrier.arrive_and_wait();
                if (rank == 0) fakert::mark();
                barrier.arrive_and_wait();
                EXPECT_OK(side.step());
                EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                barrier.arrive_and_wait();
                if (rank == 0) names = fakert::triggering_kernels();
                barrier.arrive_and_wait();
            });
            EXPECT_EQ(std::count(names.begin(), names.end(), sums), sharded ? 0 : 2);
            EXPECT_NE(names, std::vector<std::string>{});
        }
}

TEST_F(CudaContextCreate, AcceptsFailedOccupancyQuery) {
    fakert::Config config = fakert::config_from_environment();
    config.occupancy_shared = 20000; // less than two tiles of a leaf
    fakert::reset(config);
    Setting s;
    s.algorithm = DSOPT_ALGORITHM_LAMB;
    expect_same_bits(s, "LAMB");
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "cudaGetLastError() reports an error of the engine";
}

TEST_F(CudaStep, RejectsDefaultStreamDuringBlockingCapture) {
    fakert::Config config = fakert::config_from_environment();
    config.fail_function = "cuStreamGetCtx";
    config.fail_call = 0;
    config.fail_with = cudaErrorStreamCaptureImplicit;
    fakert::reset(config);
    BackendOptimizer side(true, {});
    EXPECT_EQ(side.step(), DSOPT_ERR_STATE);
    EXPECT_NE(std::string(dsopt_last_error()).find("cudaStreamNonBlocking"), std::string::npos) << dsopt_last_error();
    EXPECT_OK(side.step());
}

TEST_F(CudaZeroGrad, ReusesMemoryForGrowingLists) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(400, 4);
    BackendOptimizer side(true, s);
    fakert::mark();
    for (int64_t count = 2; count <= 400; ++count) {
        ASSERT_OK(dsopt_zero_grad(side.context, side.gradients.data(), count, DSOPT_ZERO_FILL, nullptr));
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    // Tables have 100 to 20,000 bytes: 9 powers of two, on the device and on the host.
    EXPECT_LE(fakert::counters().device_allocations, 10);
    EXPECT_LE(fakert::counters().host_allocations, 10);
    EXPECT_EQ(fakert::counters().device_frees, 0) << "a free waits for the whole device";
}

TEST_F(CudaZeroGrad, PreservesLastErrorOfCaller) {
    BackendOptimizer side(true, {});
    const auto zero = [&] {
        return dsopt_zero_grad(side.context, side.gradients.data(), int64_t(side.gradients.size()), DSOPT_ZERO_FILL,
                               nullptr);
    };
    EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
    ASSERT_OK(zero()); // allocates a block
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
}

// dsopt_build_info queries the driver, which initializes it.
TEST_F(CudaContextCreate, ReportsForkAfterDriverInitialization) {
    const std::string info = dsopt_build_info();
    EXPECT_NE(info.find("\"cuda_driver\": \"13.0\", \"cuda_devices\": [\"9.0\""), std::string::npos) << info;
    EXPECT_TRUE(test::passes_in_child([](const auto &expect) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        dsopt_context *context = nullptr;
        context_desc.backend = DSOPT_BACKEND_CUDA;
        expect(dsopt_context_create(&context_desc, &context) == DSOPT_ERR_MISSING);
        expect(context == nullptr);
        expect(std::strstr(dsopt_last_error(), "fork()") != nullptr);
        context_desc.backend = DSOPT_BACKEND_CPU;
        expect(dsopt_context_create(&context_desc, &context) == DSOPT_OK);
        dsopt_context_destroy(context);
    }));
}

TEST_F(CudaLists, CanBeCapturedAndAllocateOnlyOnce) {
    Setting s;
    s.shifted = true;
    BackendOptimizer side(true, s), reference(true, s);
    for (BackendOptimizer *each : {&side, &reference}) each->fill_gradients(1);
    const auto work = [](BackendOptimizer &on, cudaStream_t stream) {
        const auto count = int64_t(on.gradients.size());
        std::vector<dsopt_tensor> weights = on.gradients;
        for (size_t i = 0; i < weights.size(); ++i) weights[i].data = on.params[i].data();
        EXPECT_OK(dsopt_tensors_axpby(on.context, nullptr, on.gradients.data(), 0.5f, weights.data(), count, stream));
        EXPECT_OK(dsopt_tensors_clamp(on.context, weights.data(), count, 0.75, stream));
        EXPECT_OK(dsopt_zero_grad(on.context, on.gradients.data(), count, DSOPT_ZERO_FILL, stream));
    };
    const Captured captured([&](cudaStream_t stream) { work(side, stream); });
    captured.replay();
    work(reference, nullptr);
    EXPECT_TRUE(same(side.all_bytes(), reference.all_bytes()));
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    fakert::mark();
    for (int t = 0; t < 3; ++t) {
        work(reference, nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    const fakert::Counters c = fakert::counters();
    EXPECT_EQ(c.device_allocations + c.host_allocations + c.device_frees, 0);
}

/// Makes calls on one context and returns the resulting parameters. A call that fails is repeated once.
class RepeatingCaller {
public:
    std::vector<float> run() {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        dsopt_context *context = nullptr;
        dsopt_optimizer *optimizer = nullptr;
        float *memory = nullptr;
        repeat_if_failed([&] { return dsopt_context_create(&context_desc, &context); });
        repeat_if_failed([&] {
            return cudaMalloc(reinterpret_cast<void **>(&memory), 2 * kBytes) == cudaSuccess ? DSOPT_OK
                                                                                             : DSOPT_ERR_NOMEM;
        });
        std::vector<float> values(2 * kCount * kTensors);
        for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(float(i));
        repeat_if_failed([&] { return copy(memory, values.data(), 2 * kBytes); });
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        desc.max_norm = 1;
        repeat_if_failed([&] { return dsopt_optimizer_create(context, &desc, &optimizer); });
        dsopt_group group;
        std::vector<dsopt_param> params(kTensors);
        std::vector<dsopt_tensor> grads;
        for (size_t i = 0; i < kTensors; ++i) {
            params[i] = {};
            params[i].tensor = {memory + i * kCount, int64_t(kCount), DSOPT_DTYPE_F32, 0};
            grads.push_back({memory + (kTensors + i) * kCount, int64_t(kCount), DSOPT_DTYPE_F32, 0});
        }
        BackendOptimizer::must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
        repeat_if_failed(
            [&] { return dsopt_optimizer_add_group(optimizer, &group, params.data(), int64_t(kTensors)); });
        DSOPT_NEW(dsopt_step, step);
        step.grads = grads.data();
        step.count = int64_t(kTensors);
        for (int t = 0; t < 3; ++t) {
            if (t == 1) std::swap(grads[0].data, grads[1].data); // patches the table
            repeat_if_failed([&] { return dsopt_optimizer_step(optimizer, &step); });
        }
        DSOPT_NEW(dsopt_report, report);
        repeat_if_failed([&] { return dsopt_optimizer_report(optimizer, &report); });
        EXPECT_EQ(report.calls, 3);
        repeat_if_failed([&] { return dsopt_zero_grad(context, grads.data(), 7, DSOPT_ZERO_FILL, nullptr); });
        repeat_if_failed([&] { return copy(values.data(), memory, 2 * kBytes); });
        dsopt_optimizer_destroy(optimizer);
        dsopt_context_destroy(context);
        (void)cudaFree(memory);
        return values;
    }
    int failures = 0;

private:
    static constexpr size_t kTensors = 320, kCount = 5, kBytes = kTensors * kCount * sizeof(float);
    static dsopt_status copy(void *to, const void *from, size_t bytes) {
        return cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess ? DSOPT_OK : DSOPT_ERR_BACKEND;
    }
    template <class Call> void repeat_if_failed(const Call &call) {
        if (call() == DSOPT_OK) return;
        ++failures;
        const dsopt_status status = call();
        ASSERT_EQ(status, DSOPT_OK) << dsopt_last_error();
    }
};

TEST_F(CudaRuntimeFaults, AllowRepeatedCallToSucceed) {
    fakert::Config config = fakert::config_from_environment();
    config.protect = false;
    fakert::reset(config);
    const std::vector<float> expected = RepeatingCaller().run();
    for (const char *function : {"cuCtxPushCurrent",         "cudaDeviceGetAttribute",
                                 "cudaEventSynchronize",     "cudaDriverGetVersion",
                                 "cudaEventCreate",          "cudaEventRecord",
                                 "cudaFuncGetAttributes",    "cudaGetDriverEntryPointByVersion",
                                 "cudaLaunchKernel",         "cudaMalloc",
                                 "cudaMallocHost",           "cudaMemcpyAsync",
                                 "cudaMemsetAsync",          "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
                                 "cudaStreamCreate",         "cudaStreamIsCapturing",
                                 "cudaStreamSynchronize",    "cudaThreadExchangeStreamCaptureMode",
                                 "cuDevicePrimaryCtxRetain", "cuStreamGetCtx",
                                 "cudaStreamQuery"}) {
        fakert::reset(config);
        (void)RepeatingCaller().run();
        const long calls = fakert::calls(function);
        ASSERT_GT(calls, 0) << function;
        int failures = 0;
        for (long n = 0; n < calls; ++n) {
            constexpr long kFirst = test::kSanitized ? 2 : 4;
            if (n == kFirst && calls > 3 * kFirst) n = calls - 2 * kFirst; // the calls in between are similar
            SCOPED_TRACE(std::string(function) + " fails the " + std::to_string(n + 1) + "th time");
            fakert::Config failing = config;
            failing.fail_function = function;
            failing.fail_call = n;
            fakert::reset(failing);
            RepeatingCaller scenario;
            ASSERT_EQ(scenario.run(), expected);
            ASSERT_LE(scenario.failures, 1);
            failures += scenario.failures;
        }
        EXPECT_GT(failures, 0) << function;
    }
}

} // namespace cuda_runtime_tests
