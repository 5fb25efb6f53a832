// SPDX-License-Identifier: Apache-2.0
// Calls without a stream wait for the work of earlier calls, on all streams of those calls. They wait for nothing else
// on the device, so that captures of other threads stay valid. These tests need the emulated device, which runs work
// only when something waits for it, and refuses what CUDA refuses.
#include "backend_optimizer.h"
#include "captures.h"
#include "noop_comm.h"
#include <memory>
#include <unistd.h>

using namespace cuda_test;

namespace cuda_waits_tests {

constexpr cudaStreamCaptureMode kModes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                            cudaStreamCaptureModeRelaxed};

/// A stream that the default stream does not wait for.
class NonBlockingStream {
public:
    NonBlockingStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
    ~NonBlockingStream() { (void)cudaStreamDestroy(stream_); }
    NonBlockingStream(const NonBlockingStream &) = delete;
    NonBlockingStream &operator=(const NonBlockingStream &) = delete;
    operator cudaStream_t() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

class CudaWaits : public Cuda {
protected:
    static Setting mixed_precision() {
        Setting s;
        s.param = s.grad = DSOPT_DTYPE_F16;
        s.scaler = true;
        s.desc.max_norm = 1;
        s.sizes = {5, 4100};
        return s;
    }
    /// Settings of a rank that skips bad steps until the budget is used up.
    static Setting with_skip_budget(const NoOpComm &noop, int32_t budget) {
        Setting s;
        s.sizes = {5, 4100};
        s.desc.nonfinite = DSOPT_NONFINITE_SKIP;
        s.desc.skip_budget = budget;
        s.desc.data = s.desc.model = noop.comm;
        s.context = noop.context;
        return s;
    }
    static dsopt_report report_of(const BackendOptimizer &side) {
        DSOPT_NEW(dsopt_report, report);
        EXPECT_OK(dsopt_optimizer_report(side.optimizer, &report));
        return report;
    }
    static int64_t find(const BackendOptimizer &side, const char *name) {
        int64_t count = 0;
        EXPECT_OK(dsopt_optimizer_state_count(side.optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            EXPECT_OK(dsopt_optimizer_state(side.optimizer, i, &info));
            if (std::strcmp(info.name, name) == 0) return i;
        }
        ADD_FAILURE() << "no state tensor is named " << name;
        return 0;
    }
    static dsopt_tensor tensor_of(const BackendOptimizer &side, const char *name) {
        DSOPT_NEW(dsopt_state_info, info);
        EXPECT_OK(dsopt_optimizer_state(side.optimizer, find(side, name), &info));
        return info.tensor;
    }
    static std::vector<char> export_of(const BackendOptimizer &side, const char *name) {
        const dsopt_tensor tensor = tensor_of(side, name);
        std::vector<char> bytes(size_t(tensor.numel) * size_of(tensor.dtype));
        EXPECT_OK(dsopt_optimizer_export(side.optimizer, find(side, name), bytes.data(), bytes.size()));
        return bytes;
    }
    static std::string path() {
        return testing::TempDir() + "/dsopt-cuda-waits-" + std::to_string(getpid()) + ".safetensors";
    }
    /// Makes two steps and every call without a stream argument.
    static void call_everything(BackendOptimizer &side) {
        for (int t = 0; t < 2; ++t) ASSERT_OK(side.step());
        (void)report_of(side);
        int32_t reduction = 0;
        ASSERT_OK(dsopt_optimizer_next_reduction(side.optimizer, 0, &reduction));
        ASSERT_OK(dsopt_optimizer_save(side.optimizer, path().c_str(), nullptr));
        ASSERT_OK(dsopt_optimizer_load(side.optimizer, path().c_str(), nullptr));
        DSOPT_NEW(dsopt_io, no_masters);
        no_masters.flags = DSOPT_IO_NO_MASTERS;
        ASSERT_OK(dsopt_optimizer_load(side.optimizer, path().c_str(), &no_masters));
        const std::vector<char> step = export_of(side, "step");
        ASSERT_OK(dsopt_optimizer_import(side.optimizer, find(side, "step"), step.data(), step.size()));
        const std::vector<dsopt_tensor> state = side.state();
        ASSERT_OK(dsopt_optimizer_bind(side.optimizer, DSOPT_BIND_STATE, state.data(), int64_t(state.size())));
        ASSERT_OK(dsopt_optimizer_reset(side.optimizer, DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS, nullptr));
        if (side.scaler == nullptr) return;
        DSOPT_NEW(dsopt_scaler_info, info);
        ASSERT_OK(dsopt_scaler_query(side.scaler, &info));
        ASSERT_OK(dsopt_scaler_set(side.scaler, DSOPT_SCALE_VALUE, 4, nullptr));
    }
    void TearDown() override {
        (void)std::remove(path().c_str());
        Cuda::TearDown();
    }
};

TEST_F(CudaWaits, KeepCapturesOfOtherThreadsValid) {
    for (const cudaStreamCaptureMode mode : kModes) {
        SCOPED_TRACE(mode);
        Setting adagrad;
        adagrad.sizes = {5, 4100};
        adagrad.algorithm = DSOPT_ALGORITHM_ADAGRAD;
        adagrad.change = [](dsopt_group &group, int) {
            BackendOptimizer::must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAGRAD));
            group.initial_accumulator_value = 0.1;
        };
        for (const Setting &setting : {mixed_precision(), adagrad}) {
            BackendOptimizer side(true, setting);
            side.fill_gradients(0);
            during_capture(mode, cudaStreamNonBlocking, [&] { call_everything(side); });
        }
    }
}

TEST_F(CudaWaits, KeepCapturesValidInOneBitCalls) {
    for (const cudaStreamCaptureMode mode : kModes)
        for (const bool compat : {false, true}) {
            SCOPED_TRACE(mode);
            const NoOpComm noop(0);
            Setting s;
            s.sizes = {5, 4100};
            s.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM;
            s.desc.compat = compat ? DSOPT_COMPAT_DEEPSPEED : DSOPT_COMPAT_NONE;
            s.desc.flags = compat ? 0 : DSOPT_OPTIMIZER_MOMENTUM_BITS;
            s.desc.data = noop.comm;
            s.context = noop.context;
            s.change = [](dsopt_group &group, int) {
                group.flags = 0;
                group.freeze_step = 1;
            };
            BackendOptimizer side(true, s);
            side.fill_gradients(0);
            during_capture(mode, cudaStreamNonBlocking, [&] { call_everything(side); });
        }
}

TEST_F(CudaWaits, KeepCapturesValidInScalerCreate) {
    BackendOptimizer side(true, mixed_precision());
    for (const cudaStreamCaptureMode mode : kModes)
        during_capture(mode, cudaStreamNonBlocking, [&] {
            dsopt_scaler *scaler = nullptr;
            ASSERT_OK(dsopt_scaler_create(side.context, nullptr, &scaler));
            dsopt_scaler_destroy(scaler);
        });
}

TEST_F(CudaWaits, KeepCapturesValidWithSkipBudgetOfRanks) {
    for (const cudaStreamCaptureMode mode : kModes) {
        const NoOpComm noop(0);
        BackendOptimizer side(true, with_skip_budget(noop, 2));
        side.fill_gradients(0, 1);
        during_capture(mode, cudaStreamNonBlocking, [&] {
            for (int t = 0; t < 2; ++t) ASSERT_OK(side.step());
            ASSERT_EQ(side.step(), DSOPT_ERR_SKIPS) << "the step did not wait for the two steps before it";
        });
    }
}

TEST_F(CudaWaits, PrecedeAResetOfTheSkipCount) {
    const NoOpComm noop(0);
    BackendOptimizer side(true, with_skip_budget(noop, 3));
    side.fill_gradients(0, 1);
    for (int t = 0; t < 2; ++t) ASSERT_OK(side.step()); // not executed yet
    ASSERT_OK(dsopt_optimizer_set(side.optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_SKIP_BUDGET, 3));
    for (int t = 0; t < 3; ++t) ASSERT_OK(side.step()) << "skipped steps before the reset were counted";
    EXPECT_EQ(side.step(), DSOPT_ERR_SKIPS);
}

TEST_F(CudaWaits, KeepCapturesValidInAddParams) {
    Setting s;
    s.sizes = {5, 4100};
    BackendOptimizer side(true, s);
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    dsopt_param param{};
    param.tensor = {side.grads[0].data(), 5, DSOPT_DTYPE_F32, 0};
    during_capture(cudaStreamCaptureModeThreadLocal, cudaStreamNonBlocking, [&] {
        ASSERT_OK(dsopt_optimizer_add_params(side.optimizer, &param, 1));
        EXPECT_EQ(export_of(side, "step").size(), 3 * sizeof(int32_t));
    });
}

TEST_F(CudaWaits, KeepCapturesValidInCompressedErrors) {
    const NoOpComm noop(0);
    const Bytes tensor(true, 4000, 0);
    const dsopt_tensor list{tensor.data(), 1000, DSOPT_DTYPE_F32, 0};
    DSOPT_NEW(dsopt_compressed, args);
    args.tensors = &list;
    args.count = 1;
    int64_t worker = 0, server = 0;
    size_t workspace = 0;
    ASSERT_OK(dsopt_compressed_sizes(noop.comm, &args, &worker, &server, &workspace));
    const Bytes worker_error(true, size_t(worker) * 4, 0), server_error(true, size_t(server) * 4, 0),
        memory(true, workspace, 0);
    for (const Bytes *bytes : {&tensor, &worker_error, &server_error})
        bytes->set(std::vector<char>(bytes->get().size()));
    const NonBlockingStream stream;
    args.worker_error = reinterpret_cast<float *>(worker_error.data());
    args.server_error = reinterpret_cast<float *>(server_error.data());
    args.workspace = memory.data();
    args.workspace_bytes = workspace;
    args.stream = stream;
    std::vector<float> residuals(size_t(worker), 7.0f);
    during_capture(cudaStreamCaptureModeGlobal, cudaStreamNonBlocking, [&] {
        ASSERT_OK(dsopt_compressed_allreduce(noop.comm, &args));
        ASSERT_OK(dsopt_compressed_errors(noop.comm, &args, residuals.data(), nullptr));
    });
    EXPECT_EQ(residuals[0], 0);
}

// During a capture of a blocking stream, CUDA forbids any use of the default stream.
TEST_F(CudaWaits, KeepCapturesOfBlockingStreamsValid) {
    BackendOptimizer side(true, mixed_precision());
    side.fill_gradients(0);
    const NonBlockingStream stream;
    ASSERT_OK(step_on(side, stream));
    for (const cudaStreamCaptureMode mode : kModes) {
        during_capture(mode, cudaStreamDefault, [&] {
            ASSERT_OK(step_on(side, stream));
            (void)report_of(side);
            DSOPT_NEW(dsopt_scaler_info, info);
            ASSERT_OK(dsopt_scaler_query(side.scaler, &info));
            ASSERT_OK(dsopt_scaler_set(side.scaler, DSOPT_SCALE_VALUE, 4, stream));
            EXPECT_EQ(dsopt_scaler_set(side.scaler, DSOPT_SCALE_VALUE, 4, nullptr), DSOPT_ERR_STATE);
            EXPECT_EQ(dsopt_optimizer_save(side.optimizer, path().c_str(), nullptr), DSOPT_ERR_STATE);
            EXPECT_NE(std::string(dsopt_last_error()).find("cudaStreamNonBlocking"), std::string::npos);
            EXPECT_EQ(side.step(), DSOPT_ERR_STATE);
        });
        ASSERT_OK(side.step());
        (void)report_of(side);
    }
    ASSERT_OK(dsopt_optimizer_save(side.optimizer, path().c_str(), nullptr));
}

TEST_F(CudaWaits, ReportIncludesReplaysOnAnyStream) {
    BackendOptimizer side(true, mixed_precision());
    side.fill_gradients(0, 1);
    ASSERT_OK(side.step());
    ASSERT_EQ(report_of(side).skipped, 1);
    const Captured captured([&](cudaStream_t stream) { EXPECT_OK(step_on(side, stream)); });
    const NonBlockingStream other;
    int64_t steps = 1;
    for (int t = 0; t < 2; ++t) {
        captured.launch(other);
        EXPECT_EQ(report_of(side).skipped, ++steps);
        captured.launch(other);
        DSOPT_NEW(dsopt_scaler_info, info);
        ASSERT_OK(dsopt_scaler_query(side.scaler, &info));
        EXPECT_EQ(info.updates, ++steps);
    }
}

TEST_F(CudaWaits, SaveAndExportIncludeReplaysOnAnyStream) {
    Setting s;
    s.sizes = {5, 4100};
    BackendOptimizer side(true, s);
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    const Captured captured([&](cudaStream_t stream) { EXPECT_OK(step_on(side, stream)); });
    const NonBlockingStream other;
    captured.launch(other);
    int32_t steps[2];
    std::memcpy(steps, export_of(side, "step").data(), sizeof steps);
    EXPECT_EQ(steps[0], 2);
    captured.launch(other);
    ASSERT_OK(dsopt_optimizer_save(side.optimizer, path().c_str(), nullptr));
    captured.replay();
    ASSERT_OK(dsopt_optimizer_load(side.optimizer, path().c_str(), nullptr));
    std::memcpy(steps, export_of(side, "step").data(), sizeof steps);
    EXPECT_EQ(steps[0], 3);
}

TEST_F(CudaWaits, IncludeStepsOnEveryStream) {
    BackendOptimizer side(true, mixed_precision());
    side.fill_gradients(0, 1);
    const NonBlockingStream a, b;
    cudaEvent_t event = nullptr;
    ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    ASSERT_OK(step_on(side, a));
    ASSERT_EQ(cudaEventRecord(event, a), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(b, event, 0), cudaSuccess);
    ASSERT_OK(step_on(side, b));
    EXPECT_EQ(report_of(side).skipped, 2);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST_F(CudaWaits, IncludeAllOptimizersOfSharedScaler) {
    DSOPT_NEW(dsopt_context_desc, context_desc);
    context_desc.backend = DSOPT_BACKEND_CUDA;
    dsopt_context *context = nullptr;
    dsopt_scaler *scaler = nullptr;
    ASSERT_OK(dsopt_context_create(&context_desc, &context));
    DSOPT_NEW(dsopt_scaler_desc, scaler_desc);
    scaler_desc.flags = DSOPT_SCALER_SHARED;
    ASSERT_OK(dsopt_scaler_create(context, &scaler_desc, &scaler));
    {
        Setting s = mixed_precision();
        s.scaler = false;
        s.desc.scaler = scaler;
        s.context = context;
        constexpr int kMany = 20; // more streams than events
        std::vector<std::unique_ptr<BackendOptimizer>> sides;
        std::vector<std::unique_ptr<NonBlockingStream>> streams;
        for (int k = 0; k < kMany; ++k) {
            sides.push_back(std::make_unique<BackendOptimizer>(true, s));
            streams.push_back(std::make_unique<NonBlockingStream>());
            sides.back()->fill_gradients(0);
            ASSERT_OK(step_on(*sides.back(), *streams.back()));
        }
        constexpr size_t kRecorded = 9; // index of the word of "scaler" that records an overflow
        const auto recorded = [&](const BackendOptimizer &side) {
            int32_t words[12];
            std::memcpy(words, export_of(side, "scaler").data(), sizeof words);
            return words[kRecorded];
        };
        const auto synchronize = [&] {
            for (const auto &stream : streams) ASSERT_EQ(cudaStreamSynchronize(*stream), cudaSuccess);
        };
        synchronize();
        ASSERT_EQ(recorded(*sides[0]), 0);
        const long events = fakert::calls("cudaEventCreate");
        const Bytes other(true, 64, 0);
        for (int k = 0; k < kMany; ++k) {
            sides[size_t(k)]->fill_gradients(0, k == 0 ? 1 : -1);
            // Each query of an event runs one of these fills, so the engine's queries cannot complete the step.
            for (int t = 0; t < 100; ++t)
                ASSERT_EQ(cudaMemsetAsync(other.data(), 0, 64, *streams[size_t(k)]), cudaSuccess);
            ASSERT_OK(step_on(*sides[size_t(k)], *streams[size_t(k)]));
        }
        ASSERT_EQ(cudaStreamQuery(*streams[0]), cudaErrorNotReady);
        EXPECT_EQ(recorded(*sides.back()), 1) << "the export did not wait for the step of the first optimizer";
        EXPECT_EQ(fakert::calls("cudaEventCreate"), events);
        synchronize();
    }
    dsopt_scaler_destroy(scaler);
    dsopt_context_destroy(context);
}

TEST_F(CudaWaits, IncludeApplyOnOptimizerMemory) {
    Setting s;
    s.sizes = {5, 4100};
    BackendOptimizer side(true, s);
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    const std::vector<char> before = export_of(side, "step");
    const std::vector<dsopt_tensor> state = side.state();
    std::vector<dsopt_tensor> params;
    for (size_t i = 0; i < side.params.size(); ++i)
        params.push_back({side.params[i].data(), side.gradients[i].numel, DSOPT_DTYPE_F32, 0});
    size_t bytes = 0;
    ASSERT_OK(dsopt_optimizer_workspace(side.optimizer, &bytes));
    const Bytes workspace(true, bytes, 0);
    const NonBlockingStream stream;
    dsopt_step step = side.arguments();
    step.params = params.data();
    step.state = state.data();
    step.state_count = int64_t(state.size());
    step.workspace = workspace.data();
    step.workspace_bytes = bytes;
    step.stream = stream;
    ASSERT_OK(dsopt_optimizer_apply(side.optimizer, &step));
    EXPECT_NE(export_of(side, "step"), before);
}

TEST_F(CudaWaits, IncludeStepsWithoutRecordedEvent) {
    long record = -1;
    for (const bool fails : {false, true}) {
        fakert::Config config = fakert::config_from_environment();
        if (fails) {
            config.fail_function = "cudaEventRecord";
            config.fail_call = record;
        }
        fakert::reset(config);
        BackendOptimizer side(true, mixed_precision());
        side.fill_gradients(0, 1);
        const NonBlockingStream stream;
        ASSERT_OK(step_on(side, stream));
        record = fakert::calls("cudaEventRecord");
        ASSERT_OK(step_on(side, stream)) << "the step itself has not failed";
        EXPECT_EQ(fakert::calls("cudaEventRecord"), record + 1);
        EXPECT_EQ(report_of(side).skipped, 2);
        EXPECT_EQ(fakert::calls("cudaDeviceSynchronize"), fails ? 1 : 0);
    }
}

TEST_F(CudaWaits, IncludeDefaultStreamForTensorReads) {
    Setting s;
    s.sizes = {5};
    BackendOptimizer side(true, s);
    side.fill_gradients(0);
    const NonBlockingStream stream;
    ASSERT_OK(step_on(side, stream));
    const dsopt_tensor moment = tensor_of(side, "exp_avg");
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    ASSERT_EQ(cudaMemsetAsync(moment.data, 0x3f, 20, nullptr), cudaSuccess);
    EXPECT_EQ(export_of(side, "exp_avg"), std::vector<char>(20, 0x3f));
}

TEST_F(CudaWaits, ScalerSetRunsInStreamOrder) {
    BackendOptimizer side(true, mixed_precision());
    const Bytes copy(true, sizeof(float), 0);
    const NonBlockingStream stream;
    for (int t = 0; t < 10; ++t) // a query of the stream runs one of these fills
        ASSERT_EQ(cudaMemsetAsync(copy.data(), 0, sizeof(float), stream), cudaSuccess);
    ASSERT_EQ(
        cudaMemcpyAsync(copy.data(), dsopt_scaler_device_scale(side.scaler), sizeof(float), cudaMemcpyDefault, stream),
        cudaSuccess);
    ASSERT_OK(dsopt_scaler_set(side.scaler, DSOPT_SCALE_VALUE, 2, stream));
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    float value = 0;
    std::memcpy(&value, copy.get().data(), sizeof value);
    EXPECT_EQ(value, 8) << "the scale before dsopt_scaler_set()";
    const Captured captured([&](cudaStream_t captured_stream) {
        EXPECT_EQ(dsopt_scaler_set(side.scaler, DSOPT_SCALE_VALUE, 4, captured_stream), DSOPT_ERR_STATE);
    });
}

TEST_F(CudaWaits, ResetOfCountersRejectsCapture) {
    BackendOptimizer side(true, mixed_precision());
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    const Captured captured([&](cudaStream_t stream) {
        EXPECT_EQ(dsopt_optimizer_reset(side.optimizer, DSOPT_RESET_COUNTERS, stream), DSOPT_ERR_STATE);
    });
    ASSERT_OK(dsopt_optimizer_reset(side.optimizer, DSOPT_RESET_COUNTERS, nullptr));
}

TEST_F(CudaWaits, RecordOneEventPerCallOutsideCaptures) {
    BackendOptimizer side(true, mixed_precision());
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    const auto events = [](const auto &body) {
        const long created = fakert::calls("cudaEventCreate"), recorded = fakert::calls("cudaEventRecord");
        fakert::mark();
        body();
        EXPECT_EQ(fakert::calls("cudaEventCreate"), created);
        EXPECT_EQ(fakert::counters().host_waits + fakert::counters().host_queries, 0);
        return fakert::calls("cudaEventRecord") - recorded;
    };
    EXPECT_EQ(events([&] { ASSERT_OK(side.step()); }), 1);
    EXPECT_EQ(events([&] { ASSERT_OK(dsopt_scaler_update(side.scaler, nullptr, nullptr)); }), 1);
    EXPECT_EQ(events([&] { const Captured captured([&](cudaStream_t stream) { EXPECT_OK(step_on(side, stream)); }); }),
              0);
}

/// Returns a comm of two ranks in host memory. The other rank has the values of this one.
test::Comm doubling_comm(const test::Context &context) {
    DSOPT_NEW(dsopt_comm_table, table);
    table.ranks = 2;
    table.memory = DSOPT_MEMORY_HOST;
    table.all_reduce = [](void *, const void *send, void *recv, int64_t count, int32_t, int32_t, void *) {
        for (int64_t i = 0; i < count; ++i) static_cast<float *>(recv)[i] = 2 * static_cast<const float *>(send)[i];
        return 0;
    };
    return test::table_comm(context, table);
}

TEST_F(CudaWaits, CommInHostMemorySendsWhatThePendingWorkOfTheStreamWrites) {
    const test::Context context = test::make_context(test::context_desc(1, DSOPT_BACKEND_CUDA));
    const test::Comm comm = doubling_comm(context);
    const NonBlockingStream stream;
    for (const size_t numel : {size_t(5), size_t(1) << 18}) { // in a bucket, and alone
        SCOPED_TRACE(numel);
        const std::vector<float> before(numel, 1.0f), pending(numel, 3.0f);
        const Bytes data(true, numel * sizeof(float), 0), source(true, numel * sizeof(float), 0);
        data.Block::set(before.data());
        source.Block::set(pending.data());
        const dsopt_tensor list{data.data(), int64_t(numel), DSOPT_DTYPE_F32, 0};
        const auto copy = [&](const Bytes &to, const Bytes &from) {
            ASSERT_EQ(cudaMemcpyAsync(to.data(), from.data(), numel * sizeof(float), cudaMemcpyDefault, stream),
                      cudaSuccess);
        };
        copy(data, source);
        ASSERT_OK(dsopt_comm_all_reduce(comm.get(), &list, 1, DSOPT_OP_SUM, stream));
        copy(source, data); // work of the caller after the call
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        const std::vector<char> bytes = source.get();
        std::vector<float> sums(numel);
        std::memcpy(sums.data(), bytes.data(), bytes.size());
        EXPECT_EQ(sums, std::vector<float>(numel, 6.0f));
    }
}

TEST_F(CudaWaits, OnlyReportLogsSkippedSteps) {
    std::vector<std::string> lines;
    DSOPT_NEW(dsopt_context_desc, desc);
    desc.backend = DSOPT_BACKEND_CUDA;
    desc.log_level = DSOPT_LOG_INFO;
    desc.user = &lines;
    desc.log = [](void *user, int32_t, const char *text) {
        static_cast<std::vector<std::string> *>(user)->emplace_back(text);
    };
    const test::Context context = test::make_context(desc);
    lines.clear();
    Setting setting = mixed_precision();
    setting.context = context.get();
    BackendOptimizer side(true, setting); // the scale begins at 8 and grows after two good steps
    const NonBlockingStream stream;
    side.fill_gradients(0, 1);
    ASSERT_OK(step_on(side, stream));
    EXPECT_EQ(report_of(side).skipped, 1);
    ASSERT_EQ(lines, (std::vector<std::string>{"call 1: 1 step was skipped since the last report; "
                                               "the loss scale changed from 8 to 4"}));
    fakert::mark();
    for (int t = 0; t < 3; ++t) ASSERT_OK(step_on(side, stream));
    EXPECT_EQ(fakert::counters().host_waits + fakert::counters().host_queries, 0);
    EXPECT_EQ(lines.size(), 1u) << "a step logs nothing";
    (void)report_of(side);
    (void)report_of(side);
    EXPECT_EQ(lines.size(), 2u);
    EXPECT_EQ(lines.back(), "call 4: 3 steps were skipped since the last report; "
                            "the loss scale changed from 4 to 1");
}

} // namespace cuda_waits_tests
