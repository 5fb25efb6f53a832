// SPDX-License-Identifier: Apache-2.0
// Contexts of the CUDA driver: all memory, streams and events of the engine belong to the primary context, whichever
// context is current in the calling thread. Only on the emulated device, which refuses their use in other contexts.
#include "backend_optimizer.h"
#include "noop_comm.h"
#include <barrier>
#include <filesystem>
#include <memory>
#include <optional>

using namespace cuda_test;

namespace cuda_contexts_tests {

class CudaContexts : public Cuda {
protected:
    static dsopt_context *make_context(int device) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = DSOPT_BACKEND_CUDA;
        context_desc.device = device;
        dsopt_context *context = nullptr;
        EXPECT_OK(dsopt_context_create(&context_desc, &context));
        return context;
    }
    /// Runs body() in a thread that has selected no device.
    template <class Body> static void in_new_thread(const Body &body) { std::thread(body).join(); }
    static cudaStream_t make_stream() {
        cudaStream_t stream = nullptr;
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        return stream;
    }
    static Setting with_all_resources(dsopt_context *context) {
        Setting s;
        s.algorithm = DSOPT_ALGORITHM_LAMB;
        s.context = context;
        s.scaler = true;
        s.desc.max_norm = 1;
        s.desc.skip_budget = 5;                // needs page-locked memory
        s.desc.flags = DSOPT_OPTIMIZER_TIMING; // needs events
        return s;
    }
};

/// A stream of a context that is current in another thread.
class ForeignStream {
public:
    ForeignStream() :
        thread_([this] {
            const fakert::Context context(0);
            EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
            barrier_.arrive_and_wait();
            barrier_.arrive_and_wait();
            EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
        }) {
        barrier_.arrive_and_wait();
    }
    ~ForeignStream() {
        barrier_.arrive_and_wait();
        thread_.join();
    }
    ForeignStream(const ForeignStream &) = delete;
    ForeignStream &operator=(const ForeignStream &) = delete;
    cudaStream_t get() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
    std::barrier<> barrier_{2};
    std::thread thread_;
};

std::string path_of(const char *name) {
    return (std::filesystem::temp_directory_path() / (std::string(name) + std::to_string(getpid()))).string();
}

TEST_F(CudaContexts, DestroyCreatesNoContextOnDevice0) {
    dsopt_context *context = nullptr;
    std::unique_ptr<BackendOptimizer> side;
    dsopt_comm *comm = nullptr;
    in_new_thread([&] {
        ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
        context = make_context(1);
        side = std::make_unique<BackendOptimizer>(true, with_all_resources(context));
        side->fill_gradients(0);
        ASSERT_OK(side->step());
        ASSERT_OK(dsopt_zero_grad(context, side->gradients.data(), int64_t(side->gradients.size()), DSOPT_ZERO_FILL,
                                  nullptr)); // uses blocks of the pools
        DSOPT_NEW(dsopt_comm_table, table);  // in host memory: gradients are staged
        table.ranks = 2;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
        table.all_gather = table.all_to_all = [](void *, const void *, void *, int64_t, void *) { return 0; };
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        ASSERT_OK(dsopt_comm_create(context, &desc, &comm));
        ASSERT_OK(dsopt_comm_all_reduce(comm, side->gradients.data(), int64_t(side->gradients.size()), DSOPT_OP_SUM,
                                        nullptr));
    });
    const std::string path = path_of("dsopt-contexts");
    in_new_thread([&] {
        EXPECT_OK(dsopt_optimizer_save(side->optimizer, path.c_str(), nullptr));
        EXPECT_OK(dsopt_optimizer_load(side->optimizer, path.c_str(), nullptr));
        EXPECT_FALSE(fakert::has_context(0)) << "after a checkpoint";
        dsopt_optimizer_destroy(std::exchange(side->optimizer, nullptr));
        EXPECT_FALSE(fakert::has_context(0)) << "after the optimizer";
        dsopt_scaler_destroy(std::exchange(side->scaler, nullptr));
        EXPECT_FALSE(fakert::has_context(0)) << "after the scaler";
        dsopt_comm_destroy(comm);
        EXPECT_FALSE(fakert::has_context(0)) << "after the comm";
        dsopt_context_destroy(context);
        EXPECT_FALSE(fakert::has_context(0)) << "after the context";
    });
    std::filesystem::remove(path);
    in_new_thread([&] {
        ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
        side.reset();
    });
}

TEST_F(CudaContexts, CallsUsePrimaryContextWhileAnotherIsCurrent) {
    const cudaStream_t stream = make_stream();
    BackendOptimizer reference(true, with_all_resources(nullptr));
    reference.fill_gradients(0);
    for (int t = 0; t < 3; ++t) ASSERT_OK(step_on(reference, stream));
    const auto expected = reference.all_bytes();
    // In the second round, the dsopt context is created and the first step taken while another context is current.
    for (const bool in_other_context : {false, true}) {
        SCOPED_TRACE(in_other_context);
        dsopt_context *context = nullptr;
        std::optional<fakert::Context> other(std::in_place, 0);
        if (in_other_context) context = make_context(0);
        other.reset();
        if (!in_other_context) context = make_context(0);
        std::unique_ptr<BackendOptimizer> side = std::make_unique<BackendOptimizer>(true, with_all_resources(context));
        side->fill_gradients(0);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        for (int t = 0; t < 3; ++t) {
            if ((t % 2 == 0) == in_other_context) other.emplace(0);
            ASSERT_OK(step_on(*side, stream));
            DSOPT_NEW(dsopt_report, report);
            ASSERT_OK(dsopt_optimizer_report(side->optimizer, &report));
            other.reset();
        }
        EXPECT_TRUE(same(side->all_bytes(), expected));
        const std::string path = path_of("dsopt-contexts");
        dsopt_scaler *scaler = nullptr;
        other.emplace(0);
        EXPECT_OK(dsopt_optimizer_save(side->optimizer, path.c_str(), nullptr)); // calls without a stream
        EXPECT_OK(dsopt_optimizer_load(side->optimizer, path.c_str(), nullptr));
        EXPECT_OK(dsopt_scaler_create(context, nullptr, &scaler));
        EXPECT_OK(dsopt_scaler_set(scaler, DSOPT_SCALE_VALUE, 4, stream));
        dsopt_scaler_destroy(scaler);
        other.reset();
        std::filesystem::remove(path);
        EXPECT_TRUE(same(side->all_bytes(), expected));
        other.emplace(0);
        dsopt_optimizer_destroy(std::exchange(side->optimizer, nullptr));
        dsopt_scaler_destroy(std::exchange(side->scaler, nullptr));
        dsopt_context_destroy(context);
        other.reset();
    }
    ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

/// Makes every kind of call that has a stream, and returns the results.
std::vector<dsopt_status> calls_on(BackendOptimizer &side, dsopt_comm *comm, cudaStream_t stream) {
    const auto count = int64_t(side.gradients.size());
    dsopt_tensor *const grads = side.gradients.data();
    const dsopt_tensor *const scale = side.gradients.data(); // of one element
    dsopt_step step = side.arguments();
    step.stream = stream;
    size_t bytes = 0;
    BackendOptimizer::must(dsopt_optimizer_workspace(side.optimizer, &bytes));
    const Bytes workspace(true, bytes, 0), result(true, sizeof(dsopt_norm_result), 0), word(true, 4, 0);
    std::vector<dsopt_tensor> params(side.gradients), state = side.state();
    for (size_t i = 0; i < params.size(); ++i) params[i].data = side.params[i].data();
    dsopt_step apply = step;
    apply.params = params.data();
    apply.state = state.data();
    apply.state_count = int64_t(state.size());
    apply.workspace = workspace.data();
    apply.workspace_bytes = bytes;
    const Bytes factor(true, 4, 0), words(true, 48, 0);
    const dsopt_tensor scaler_state[] = {{factor.data(), 1, DSOPT_DTYPE_F32, 0},
                                         {words.data(), 12, DSOPT_DTYPE_I32, 0}};
    DSOPT_NEW(dsopt_compressed, exchange);
    exchange.tensors = grads;
    exchange.count = count;
    int64_t worker = 0, server = 0;
    BackendOptimizer::must(dsopt_compressed_sizes(comm, &exchange, &worker, &server, &exchange.workspace_bytes));
    const Bytes worker_error(true, size_t(worker) * sizeof(float), 0),
        server_error(true, size_t(server) * sizeof(float), 0), messages(true, exchange.workspace_bytes, 0);
    exchange.worker_error = reinterpret_cast<float *>(worker_error.data());
    exchange.server_error = reinterpret_cast<float *>(server_error.data());
    exchange.workspace = messages.data();
    exchange.stream = stream;
    return {dsopt_optimizer_step(side.optimizer, &step),
            dsopt_optimizer_apply(side.optimizer, &apply),
            dsopt_optimizer_init_state(side.optimizer, params.data(), count, state.data(), apply.state_count, stream),
            dsopt_scaler_init_state(side.scaler, scaler_state, 2, stream),
            dsopt_scaler_update_arrays(side.scaler, scaler_state, 2, nullptr, stream),
            dsopt_scaler_set(side.scaler, DSOPT_SCALE_VALUE, 4, stream),
            dsopt_compressed_allreduce(comm, &exchange),
            dsopt_compressed_errors(comm, &exchange, nullptr, nullptr),
            dsopt_optimizer_accumulate(side.optimizer, grads, count, stream),
            dsopt_optimizer_reset(side.optimizer, DSOPT_RESET_MOMENTS, stream),
            dsopt_scaler_update(side.scaler, nullptr, stream),
            dsopt_optimizer_next_reduction_on_device(side.optimizer, nullptr, reinterpret_cast<int32_t *>(word.data()),
                                                     stream),
            dsopt_scaler_scale_loss(side.scaler, scale, stream),
            dsopt_zero_grad(side.context, grads, count, DSOPT_ZERO_FILL, stream),
            dsopt_tensors_norm(side.context, grads, count, DSOPT_NORM_L2, 0, nullptr,
                               reinterpret_cast<dsopt_norm_result *>(result.data()), stream),
            dsopt_tensors_axpby(side.context, nullptr, grads, 1, params.data(), count, stream),
            dsopt_tensors_clamp(side.context, grads, count, 1, stream),
            dsopt_comm_all_reduce(comm, grads, count, DSOPT_OP_SUM, stream)};
}

TEST_F(CudaContexts, RejectStreamsOfOtherContextsAndDevices) {
    Setting s;
    s.scaler = true;
    s.desc.flags = DSOPT_OPTIMIZER_ACCUMULATE;
    BackendOptimizer side(true, s);
    side.fill_gradients(0);
    ASSERT_OK(side.step());
    const NoOpComm noop(0);
    const auto before = side.all_bytes();
    const auto expect_refused = [&](cudaStream_t stream, const char *words) {
        for (const dsopt_status status : calls_on(side, noop.comm, stream)) EXPECT_EQ(status, DSOPT_ERR_DEVICE);
        EXPECT_NE(std::string(dsopt_last_error()).find(words), std::string::npos) << dsopt_last_error();
    };
    const ForeignStream foreign;
    expect_refused(foreign.get(), "the stream does not belong to the primary CUDA context of device 0");
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    const cudaStream_t other_device_stream = make_stream();
    expect_refused(other_device_stream, "the stream does not belong to the primary CUDA context of device 0");
    ASSERT_OK(side.step()); // NULL is the default stream of the optimizer's device
    ASSERT_EQ(cudaStreamDestroy(other_device_stream), cudaSuccess);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_FALSE(same(side.all_bytes(), before));
    const auto after = side.all_bytes();
    {
        const fakert::Context other(0);
        EXPECT_EQ(side.step(), DSOPT_ERR_DEVICE);
        EXPECT_NE(std::string(dsopt_last_error()).find("the default stream"), std::string::npos) << dsopt_last_error();
    }
    EXPECT_TRUE(same(side.all_bytes(), after));
    DSOPT_NEW(dsopt_comm_info, info);
    ASSERT_OK(dsopt_comm_query(noop.comm, &info));
    EXPECT_EQ(info.status, DSOPT_OK);
    for (const dsopt_status status : calls_on(side, noop.comm, nullptr)) EXPECT_EQ(status, DSOPT_OK);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_F(CudaContexts, AcceptGreenContextStreamsIfDriverSupportsThem) {
    for (const int driver : {12040, 13000}) {
        fakert::Config config = fakert::config_from_environment();
        config.driver = config.runtime = driver;
        fakert::reset(config);
        BackendOptimizer side(true, {});
        side.fill_gradients(0);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const cudaStream_t green = fakert::green_stream();
        EXPECT_EQ(step_on(side, green), driver < 12050 ? DSOPT_ERR_DEVICE : DSOPT_OK) << dsopt_last_error();
        EXPECT_EQ(cudaStreamDestroy(green), cudaSuccess);
    }
}

TEST_F(CudaContexts, RejectedStreamIsMismatchOnOtherRanks) {
    const Ranks group(2);
    const ForeignStream foreign;
    group.run([&](int rank) {
        Setting s;
        s.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM;
        s.desc.flags = DSOPT_OPTIMIZER_CHECK_RANKS;
        BackendOptimizer side(true, s, &group, rank);
        side.fill_gradients(0);
        EXPECT_EQ(step_on(side, rank == 1 ? foreign.get() : nullptr), rank == 1 ? DSOPT_ERR_DEVICE : DSOPT_ERR_MISMATCH)
            << dsopt_last_error();
        EXPECT_OK(side.step());
    });
}

} // namespace cuda_contexts_tests
