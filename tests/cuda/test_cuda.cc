// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: graphs, checkpoints that both backends read, long lists. On the emulated device or on a GPU.
#include "backend_optimizer.h"
#include <array>
#include <thread>
#include <unistd.h>

using namespace cuda_test;

namespace cuda_tests {

using CudaGraph = Cuda;
using CudaCheckpoint = Cuda;
using CudaReduction = Cuda;
using CudaCheckPointers = Cuda;

TEST_F(CudaGraph, ReplaysMatchPlainStepsWithNewLrAndOverflow) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        Setting s;
        s.algorithm = algorithm;
        s.param = s.grad = DSOPT_DTYPE_F16;
        s.scaler = true;
        s.desc.max_norm = 1;
        BackendOptimizer plain(true, s), graph(true, s);
        cudaStream_t stream;
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        float *lr;
        ASSERT_EQ(cudaMalloc(reinterpret_cast<void **>(&lr), 2 * sizeof *lr), cudaSuccess);
        const auto set_lr = [&](int t) {
            const float values[] = {1e-3f * float(t % 7 + 1), 2e-3f};
            to_device(lr, values, sizeof values);
        };
        const auto run = [&](BackendOptimizer &side) {
            dsopt_step step = side.arguments();
            step.stream = stream;
            step.lr = lr;
            ASSERT_EQ(dsopt_optimizer_step(side.optimizer, &step), DSOPT_OK) << dsopt_last_error();
        };
        cudaGraph_t recorded = nullptr;
        cudaGraphExec_t replay = nullptr;
        for (int t = 0; t < 101; ++t) {
            for (BackendOptimizer *side : {&plain, &graph}) side->fill_gradients(t, t == 50 ? 7 : -1);
            set_lr(t);
            run(plain);
            if (t == 0) {
                run(graph); // creates tables
                ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
                run(graph);
                ASSERT_EQ(cudaStreamEndCapture(stream, &recorded), cudaSuccess);
                ASSERT_EQ(cudaGraphInstantiate(&replay, recorded, 0), cudaSuccess);
            } else {
                ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
            }
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        }
        EXPECT_TRUE(same(plain.all_bytes(), graph.all_bytes()));
        DSOPT_NEW(dsopt_report, report);
        ASSERT_OK(dsopt_optimizer_report(graph.optimizer, &report));
        EXPECT_GE(report.skipped, 1);
        EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
        EXPECT_EQ(cudaGraphDestroy(recorded), cudaSuccess);
        EXPECT_EQ(cudaFree(lr), cudaSuccess);
        EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
}

TEST_F(CudaGraph, ReplayUsesListsAndLrOfCapture) {
    Setting s;
    BackendOptimizer side(true, s), reference(false, s);
    cudaStream_t stream;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    const auto arguments = [&] {
        dsopt_step step = side.arguments();
        step.stream = stream;
        return step;
    };
    for (BackendOptimizer *each : {&side, &reference}) each->fill_gradients(1);
    dsopt_step step = arguments();
    ASSERT_OK(dsopt_optimizer_step(side.optimizer, &step));
    ASSERT_OK(reference.step());
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_OK(dsopt_optimizer_step(side.optimizer, &step));
    cudaGraph_t recorded = nullptr;
    cudaGraphExec_t replay = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &recorded), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&replay, recorded, 0), cudaSuccess);
    // A plain step with another learning rate and one gradient less; the graph must not see either change.
    for (BackendOptimizer *each : {&side, &reference}) {
        each->gradients[4].data = nullptr;
        ASSERT_OK(dsopt_optimizer_set(each->optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.25));
    }
    step = arguments();
    ASSERT_OK(dsopt_optimizer_step(side.optimizer, &step));
    ASSERT_OK(reference.step());
    ASSERT_EQ(cudaGraphLaunch(replay, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    reference.gradients[4].data = reference.grads[4].data();
    ASSERT_OK(dsopt_optimizer_set(reference.optimizer, 0, DSOPT_KEY_LR, 1e-3));
    ASSERT_OK(dsopt_optimizer_set(reference.optimizer, 1, DSOPT_KEY_LR, 2e-3));
    ASSERT_OK(reference.step());
    EXPECT_TRUE(same(side.all_bytes(), reference.all_bytes()));
    // A second capture needs a plain step with the current lists.
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_OK(dsopt_optimizer_step(side.optimizer, &step));
    cudaGraph_t second = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &second), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(second), cudaSuccess);
    EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(recorded), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST_F(CudaGraph, RejectsCaptureBeforeFirstStep) {
    BackendOptimizer side(true, Setting{});
    side.fill_gradients(0);
    const Captured captured([&](cudaStream_t stream) { EXPECT_EQ(step_on(side, stream), DSOPT_ERR_STATE); });
    ASSERT_OK(side.step()); // the capture is still valid, and the optimizer is unchanged
}

TEST_F(CudaGraph, PlainStepUsesNewListsAfterUnreplayedCapture) {
    Setting s;
    BackendOptimizer side(true, s), reference(false, s);
    for (BackendOptimizer *each : {&side, &reference}) {
        each->fill_gradients(1);
        ASSERT_OK(each->step());
        each->gradients[3].data = each->grads[7].data(); // a longer tensor
        each->gradients[8].data = nullptr;
        ASSERT_OK(dsopt_optimizer_set(each->optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 0.25));
    }
    const Captured captured([&](cudaStream_t stream) { EXPECT_OK(step_on(side, stream)); });
    for (int t = 0; t < 2; ++t) {
        for (BackendOptimizer *each : {&side, &reference}) ASSERT_OK(each->step());
        ASSERT_TRUE(same(side.all_bytes(), reference.all_bytes()));
    }
    captured.replay();
    ASSERT_OK(reference.step());
    EXPECT_TRUE(same(side.all_bytes(), reference.all_bytes()));
}

TEST_F(CudaGraph, OfAShorterListStepsItsParametersAfterAdditions) {
    for (const bool clips : {false, true}) {
        SCOPED_TRACE(clips ? "two passes" : "one pass");
        Setting s;
        s.desc.max_norm = clips ? 0.5 : 0;
        BackendOptimizer side(true, s), reference(false, s);
        for (BackendOptimizer *each : {&side, &reference}) {
            each->fill_gradients(0);
            ASSERT_OK(each->step());
        }
        const Captured captured([&](cudaStream_t stream) { EXPECT_OK(step_on(side, stream)); });
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); // the plain step was on another stream
        std::vector<Bytes> added;
        for (const bool group : {true, false}) {
            added.emplace_back(true, 5000 * sizeof(float), 0);
            added.back().set(std::vector<char>(5000 * sizeof(float)));
            dsopt_param param{};
            param.tensor = {added.back().data(), 5000, DSOPT_DTYPE_F32, 0};
            if (group) {
                const dsopt_group settings = test::group_of(DSOPT_ALGORITHM_LAMB);
                ASSERT_OK(dsopt_optimizer_add_group(side.optimizer, &settings, &param, 1));
            } else {
                ASSERT_OK(dsopt_optimizer_add_params(side.optimizer, &param, 1));
            }
            captured.replay();
            ASSERT_OK(reference.step());
            for (size_t i = 0; i < side.params.size(); ++i)
                ASSERT_EQ(side.params[i].get(), reference.params[i].get()) << "parameter " << i;
        }
        std::vector<dsopt_tensor> gradients = side.gradients; // plain steps use the longer list
        for (const Bytes &data : added) gradients.push_back({data.data(), 5000, DSOPT_DTYPE_F32, 0});
        dsopt_step step = side.arguments();
        step.grads = gradients.data();
        step.count = int64_t(gradients.size());
        ASSERT_OK(dsopt_optimizer_step(side.optimizer, &step));
        captured.replay();
    }
}

TEST_F(CudaGraph, CapturesListWithAllPointersChanged) {
    allow_many_blocks();
    Setting s;
    s.sizes.assign(3000, 4);
    BackendOptimizer side(true, s), reference(false, s);
    for (BackendOptimizer *each : {&side, &reference}) {
        each->fill_gradients(0);
        ASSERT_OK(each->step());
        for (size_t i = 0; i + 1 < each->gradients.size(); i += 2)
            std::swap(each->gradients[i].data, each->gradients[i + 1].data);
    }
    const Captured captured([&](cudaStream_t stream) { EXPECT_OK(step_on(side, stream)); });
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); // the plain steps were on another stream
    captured.replay();
    ASSERT_OK(reference.step());
    EXPECT_TRUE(same(side.all_bytes(), reference.all_bytes()));
}

// Numbers for rounding at random come from counters on the device, so a replay draws those of its own step.
TEST_F(CudaGraph, ReplaysStepsOnLowPrecisionState) {
    for (const Setting &s : format_settings()) {
        SCOPED_TRACE(test::name_of(s.algorithm) + std::to_string(s.first_format) + std::to_string(s.second_format));
        BackendOptimizer side(true, s), reference(false, s);
        for (BackendOptimizer *each : {&side, &reference}) {
            each->fill_gradients(0);
            ASSERT_OK(each->step());
        }
        const Captured captured([&](cudaStream_t stream) { EXPECT_OK(step_on(side, stream)); });
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); // the plain step was on another stream
        for (int t = 1; t <= 3; ++t) {
            for (BackendOptimizer *each : {&side, &reference}) each->fill_gradients(t);
            captured.replay();
            ASSERT_OK(reference.step());
            EXPECT_TRUE(same(side.all_bytes(), reference.all_bytes())) << t;
        }
    }
}

TEST_F(CudaCheckpoint, ConvertsMomentsOnBothBackends) {
    Setting s;
    s.algorithm = DSOPT_ALGORITHM_LION;
    s.param = s.grad = DSOPT_DTYPE_BF16;
    s.desc.masters = DSOPT_MASTERS_REMAINDER;
    s.sizes = {3, 1500001, 0, 4096}; // pieces of 2^20 elements and tails
    const std::string path = testing::TempDir() + "/dsopt-cuda-" + std::to_string(getpid()) + ".safetensors";
    DSOPT_NEW(dsopt_io, io);
    io.flags = DSOPT_IO_CONVERT | DSOPT_IO_PARAMS;
    for (const auto &[saved, loaded] :
         {std::pair{DSOPT_MOMENT_Q8, DSOPT_MOMENT_E4M3}, {DSOPT_MOMENT_E4M3, DSOPT_MOMENT_F32}}) {
        s.first_format = saved;
        BackendOptimizer source(true, s);
        source.fill_gradients(0);
        ASSERT_OK(source.step());
        DSOPT_NEW(dsopt_io, with_params);
        with_params.flags = DSOPT_IO_PARAMS;
        ASSERT_OK(dsopt_optimizer_save(source.optimizer, path.c_str(), &with_params));
        s.first_format = loaded;
        BackendOptimizer device(true, s), host(false, s);
        for (BackendOptimizer *side : {&device, &host}) {
            ASSERT_OK(dsopt_optimizer_load(side->optimizer, path.c_str(), &io));
            side->fill_gradients(1);
        }
        EXPECT_TRUE(same(device.all_bytes(), host.all_bytes()));
        EXPECT_EQ(device.params[1].get(), source.params[1].get());
        for (BackendOptimizer *side : {&device, &host}) ASSERT_OK(side->step());
        EXPECT_TRUE(same(device.all_bytes(), host.all_bytes()));
    }
    (void)std::remove(path.c_str());
}

TEST_F(CudaCheckpoint, LoadsOnBothBackends) {
    Setting s;
    s.param = s.grad = DSOPT_DTYPE_BF16;
    s.scaler = true;
    s.sizes = {3, 1500000, 4096, 0, 2000001}; // pieces of 4 MiB and tails
    const std::string path = testing::TempDir() + "/dsopt-cuda-" + std::to_string(getpid()) + ".safetensors";
    BackendOptimizer device(true, s), host(false, s), again(true, s);
    for (BackendOptimizer *side : {&device, &host}) {
        side->fill_gradients(0);
        ASSERT_OK(side->step());
    }
    ASSERT_OK(dsopt_optimizer_save(device.optimizer, path.c_str(), nullptr));
    DSOPT_NEW(dsopt_io, io);
    ASSERT_OK(dsopt_optimizer_load(again.optimizer, path.c_str(), &io));
    ASSERT_OK(dsopt_optimizer_load(host.optimizer, path.c_str(), &io));
    // All three continue identically.
    for (BackendOptimizer *side : {&device, &again, &host}) {
        side->fill_gradients(1);
        ASSERT_OK(side->step());
    }
    EXPECT_TRUE(same(device.all_bytes(), host.all_bytes()));
    EXPECT_TRUE(same(device.all_bytes(), again.all_bytes()));
    (void)std::remove(path.c_str());
}

TEST_F(CudaReduction, MatchesCpuOnLongListsAndLargeTensors) {
    allow_many_blocks();
    Setting s;
    s.sizes.clear();
    for (int i = 0; i < 300; ++i) // zero leaves, and counts around the number that one thread adds
        s.sizes.push_back(i % 50 == 0 ? 0 : i % 37 == 5 ? 4096 * 7 + i : i % 41 == 3 ? 4096 * (7 + i / 8) + i : i % 9);
    s.desc.max_norm = 0.5;
    s.desc.flags = DSOPT_OPTIMIZER_REPORT_NORMS;
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB}) {
        s.algorithm = algorithm;
        expect_same_bits(s, "a long list");
    }
    BackendOptimizer host(false, s), device(true, s);
    dsopt_norm_result results[2][2] = {};
    for (BackendOptimizer *side : {&host, &device}) {
        const bool on_device = side == &device;
        Bytes bytes(on_device, sizeof results[0], 0);
        auto *result = reinterpret_cast<dsopt_norm_result *>(bytes.data());
        const auto count = int64_t(side->gradients.size());
        side->fill_gradients(1);
        ASSERT_OK(dsopt_tensors_norm(side->context, side->gradients.data(), count, DSOPT_NORM_MAX, 0, nullptr, result,
                                     nullptr));
        ASSERT_OK(dsopt_tensors_norm(side->context, side->gradients.data(), count, DSOPT_NORM_L2, 0, nullptr,
                                     result + 1, nullptr));
        const std::vector<char> out = bytes.get();
        std::memcpy(results[on_device], out.data(), sizeof results[0]);
    }
    for (int k = 0; k < 2; ++k) {
        EXPECT_GT(results[0][k].norm, 1);
        EXPECT_EQ(results[0][k].norm, results[1][k].norm);
    }
}

TEST_F(CudaCheckPointers, NamesTensorOnAnotherDevice) {
    int devices = 0;
    ASSERT_EQ(cudaGetDeviceCount(&devices), cudaSuccess);
    if (devices < 2) GTEST_SKIP() << "one device";
    Setting s;
    BackendOptimizer side(true, s);
    DSOPT_NEW(dsopt_context_desc, context_desc);
    context_desc.backend = DSOPT_BACKEND_CUDA;
    context_desc.device = 1;
    context_desc.flags = DSOPT_CONTEXT_CHECK_POINTERS;
    dsopt_context *context = nullptr;
    ASSERT_OK(dsopt_context_create(&context_desc, &context));
    dsopt_optimizer *optimizer = nullptr;
    ASSERT_OK(dsopt_optimizer_create(context, nullptr, &optimizer));
    dsopt_group group;
    ASSERT_OK(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
    dsopt_param param{};
    param.tensor = {side.params[1].data(), 7, DSOPT_DTYPE_F32, 0};
    param.name = "elsewhere";
    ASSERT_OK(dsopt_optimizer_add_group(optimizer, &group, &param, 1));
    DSOPT_NEW(dsopt_step, step);
    step.grads = &side.gradients[1];
    step.count = 1;
    EXPECT_EQ(dsopt_optimizer_step(optimizer, &step), DSOPT_ERR_DEVICE);
    EXPECT_NE(std::string(dsopt_last_error()).find("elsewhere"), std::string::npos) << dsopt_last_error();
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0) << "the caller's device was not restored";
    dsopt_optimizer_destroy(optimizer);
    dsopt_context_destroy(context);
}

} // namespace cuda_tests
