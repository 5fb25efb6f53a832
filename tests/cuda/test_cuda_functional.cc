// SPDX-License-Identifier: Apache-2.0
// The functional form (docs/functional.md) on the device: capture in graphs, and steps on memory of the caller.
#include "backend_optimizer.h"

using namespace cuda_test;

namespace cuda_functional_tests {

/// An optimizer with all memory that dsopt_optimizer_apply reads and writes. State is aligned only to its elements.
class FunctionalOptimizer : public BackendOptimizer {
public:
    FunctionalOptimizer(bool device, const Setting &setting, const Ranks *ranks = nullptr, int rank = 0) :
        BackendOptimizer(device, setting, ranks, rank) {
        for (const dsopt_tensor &tensor : BackendOptimizer::state()) {
            const size_t size = size_of(tensor.dtype);
            lists_.emplace_back(device, size_t(tensor.numel) * size, size);
            lists_.back().set(std::vector<char>(size_t(tensor.numel) * size, char(0xee)));
            list.push_back({lists_.back().data(), tensor.numel, tensor.dtype, 0});
        }
        size_t bytes = 0;
        must(dsopt_optimizer_workspace(optimizer, &bytes));
        workspace_.emplace_back(device, bytes, 3);
        for (size_t i = 0; i < params.size(); ++i) {
            const int32_t dtype = setting.mixed ? kDtypes[i % 3] : setting.param;
            weights.push_back({params[i].data(), gradients[i].numel, dtype, 0});
        }
    }
    dsopt_status init(cudaStream_t stream = nullptr) {
        return dsopt_optimizer_init_state(optimizer, weights.data(), int64_t(weights.size()), list.data(),
                                          int64_t(list.size()), stream);
    }
    dsopt_step apply_arguments() {
        dsopt_step step = arguments();
        step.params = weights.data();
        step.state = list.data();
        step.state_count = int64_t(list.size());
        step.workspace = workspace_[0].data();
        step.workspace_bytes = workspace_[0].get().size();
        return step;
    }
    dsopt_status apply() {
        const dsopt_step step = apply_arguments();
        return dsopt_optimizer_apply(optimizer, &step);
    }
    /// Returns the raw bytes of state and parameters.
    std::vector<std::vector<char>> raw() const {
        std::vector<std::vector<char>> all;
        for (const Bytes &bytes : lists_) all.push_back(bytes.get());
        for (const Bytes &bytes : params) all.push_back(bytes.get());
        return all;
    }
    const dsopt_tensor *find(const char *name) const {
        for (size_t i = 0; i < list.size(); ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must(dsopt_optimizer_state(optimizer, int64_t(i), &info));
            if (info.param < 0 && std::strcmp(info.name, name) == 0) return &list[i];
        }
        return nullptr;
    }
    std::vector<dsopt_tensor> list, weights;

private:
    static constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};
    std::vector<Bytes> lists_, workspace_;
};

class CudaFunctional : public Cuda {
protected:
    static Setting setting(int32_t algorithm, int32_t compat, bool masters = false) {
        Setting s;
        s.algorithm = algorithm;
        s.sizes = {7, 0, 4097, 33, 65};
        s.desc.compat = compat;
        s.mixed = masters;
        s.desc.max_norm = masters || compat == DSOPT_COMPAT_NONE ? 5 : 0;
        s.change = [](dsopt_group &g, int) {
            if (!is_onebit(g.algorithm)) return;
            g.freeze_step = 3;
            if (g.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) {
                g.var_interval_steps = 2;
                g.local_interval_steps = 2;
                g.max_local_interval = 4;
            }
        };
        return s;
    }
    static bool is_onebit(int32_t algorithm) { return algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM; }
};

// ------------------------------------------------------------------------------------------------------------ capture
TEST_F(CudaFunctional, CapturesInitStateScalerAndNextReduction) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        Setting s = setting(algorithm, DSOPT_COMPAT_NONE, true);
        s.scaler = true;
        FunctionalOptimizer plain(true, s), graph(true, s);
        ASSERT_OK(plain.init());
        const bool onebit = is_onebit(algorithm);
        Bytes answer(true, 4, 0);
        const Captured captured([&](cudaStream_t stream) {
            ASSERT_OK(graph.init(stream));
            ASSERT_OK(dsopt_scaler_update_arrays(graph.scaler, graph.find("loss_scale"), 2, nullptr, stream));
            ASSERT_OK(dsopt_optimizer_next_reduction_on_device(graph.optimizer,
                                                               onebit ? graph.find("schedule") : nullptr,
                                                               reinterpret_cast<int32_t *>(answer.data()), stream));
        });
        ASSERT_OK(dsopt_scaler_update_arrays(plain.scaler, plain.find("loss_scale"), 2, nullptr, nullptr));
        for (int i = 0; i < 2; ++i) {
            captured.replay();
            EXPECT_TRUE(same(plain.raw(), graph.raw()));
            EXPECT_EQ(answer.get()[0], DSOPT_REDUCTION_FULL);
            ASSERT_OK(graph.apply());
            EXPECT_FALSE(same(plain.raw(), graph.raw()));
            for (size_t k = 0; k < graph.params.size(); ++k) graph.params[k].set(plain.params[k].get());
        }
    }
}

TEST_F(CudaFunctional, CapturesApplyOnLowPrecisionState) {
    for (const Setting &s : format_settings()) {
        SCOPED_TRACE(std::to_string(s.algorithm) + ' ' + std::to_string(s.first_format));
        FunctionalOptimizer host(false, s), graph(true, s);
        ASSERT_OK(host.init());
        const Captured init([&](cudaStream_t stream) { ASSERT_OK(graph.init(stream)); });
        init.replay();
        dsopt_step step = graph.apply_arguments();
        const Captured apply([&](cudaStream_t stream) {
            step.stream = stream;
            ASSERT_OK(dsopt_optimizer_apply(graph.optimizer, &step));
        });
        for (int t = 0; t < 3; ++t) {
            for (FunctionalOptimizer *side : {&host, &graph}) side->fill_gradients(t);
            ASSERT_OK(host.apply());
            apply.replay();
            EXPECT_TRUE(same(host.raw(), graph.raw())) << t;
        }
    }
}

TEST_F(CudaFunctional, Captures100000Tensors) {
    constexpr int64_t count = 100000;
    std::vector<char> results[2];
    for (const bool device : {false, true}) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = device ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU;
        dsopt_context *context = nullptr;
        dsopt_optimizer *optimizer = nullptr;
        BackendOptimizer::must(dsopt_context_create(&context_desc, &context));
        BackendOptimizer::must(dsopt_optimizer_create(context, nullptr, &optimizer));
        std::vector<float> values(count);
        for (int64_t i = 0; i < count; ++i) values[size_t(i)] = std::sin(float(i));
        const Bytes weights(device, count * sizeof(float), 0), grads(device, count * sizeof(float), 0);
        const auto *const raw = reinterpret_cast<const char *>(values.data());
        for (const Bytes *list : {&weights, &grads}) list->set({raw, raw + count * sizeof(float)});
        std::vector<dsopt_param> params(count);
        std::vector<dsopt_tensor> param_list, grad_list, state;
        for (size_t i = 0; i < size_t(count); ++i) {
            param_list.push_back({weights.data() + i * sizeof(float), 1, DSOPT_DTYPE_F32, 0});
            grad_list.push_back({grads.data() + i * sizeof(float), 1, DSOPT_DTYPE_F32, 0});
            params[i] = {};
            params[i].tensor = param_list.back();
        }
        dsopt_group group;
        BackendOptimizer::must(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
        BackendOptimizer::must(dsopt_optimizer_add_group(optimizer, &group, params.data(), count));
        int64_t states = 0;
        BackendOptimizer::must(dsopt_optimizer_state_count(optimizer, &states));
        size_t bytes = 0, workspace_bytes = 0;
        std::vector<size_t> offsets;
        for (int64_t i = 0; i < states; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            BackendOptimizer::must(dsopt_optimizer_state(optimizer, i, &info));
            state.push_back(info.tensor);
            offsets.push_back(bytes);
            bytes += (size_t(info.tensor.numel) * size_of(info.tensor.dtype) + 7) / 8 * 8;
        }
        BackendOptimizer::must(dsopt_optimizer_workspace(optimizer, &workspace_bytes));
        const Bytes memory(device, bytes, 0), workspace(device, workspace_bytes, 0);
        for (size_t i = 0; i < state.size(); ++i) state[i].data = memory.data() + offsets[i];
        BackendOptimizer::must(dsopt_optimizer_init_state(optimizer, param_list.data(), int64_t(param_list.size()),
                                                          state.data(), states, nullptr));
        DSOPT_NEW(dsopt_step, step);
        step.params = param_list.data();
        step.grads = grad_list.data();
        step.count = count;
        step.state = state.data();
        step.state_count = states;
        step.workspace = workspace.data();
        step.workspace_bytes = workspace_bytes;
        if (device) {
            const Captured captured([&](cudaStream_t stream) {
                step.stream = stream;
                EXPECT_OK(dsopt_optimizer_apply(optimizer, &step));
            });
            EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess); // the state was created on another stream
            captured.replay();
        } else {
            EXPECT_OK(dsopt_optimizer_apply(optimizer, &step));
        }
        results[device] = weights.get();
        dsopt_optimizer_destroy(optimizer);
        dsopt_context_destroy(context);
    }
    EXPECT_TRUE(same({results[0]}, {results[1]}));
}

TEST_F(CudaFunctional, StepUsesCallerStateAfterEngineAllocatedState) {
    Setting s;
    s.param = s.grad = DSOPT_DTYPE_F16;
    s.scaler = true;
    s.desc.compat = DSOPT_COMPAT_DEEPSPEED;
    s.desc.masters = DSOPT_MASTERS_PER_TENSOR;
    FunctionalOptimizer host(false, s), device(true, s);
    for (int t = 0; t < 2; ++t) {
        for (FunctionalOptimizer *side : {&host, &device}) {
            side->fill_gradients(t);
            if (t == 0) { ASSERT_OK(side->init()); }
            dsopt_step step = side->arguments();
            step.state = side->list.data();
            step.state_count = int64_t(side->list.size());
            ASSERT_OK(dsopt_optimizer_step(side->optimizer, &step));
        }
        ASSERT_TRUE(same(host.raw(), device.raw())) << t;
        // all_bytes() makes the engine allocate state, which begins with a step on zero gradients. That step uses the
        // same workspace as the steps here.
        if (t == 0)
            for (FunctionalOptimizer *side : {&host, &device}) (void)side->all_bytes();
    }
}

TEST_F(CudaFunctional, RejectsCaptureOfInitialZeroGradientStep) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM}) {
        FunctionalOptimizer side(true, setting(algorithm, DSOPT_COMPAT_DEEPSPEED, true));
        const auto before = side.raw();
        const Captured captured([&](cudaStream_t stream) {
            EXPECT_EQ(side.init(stream), DSOPT_ERR_STATE);
            EXPECT_NE(std::string(dsopt_last_error()).find("captured"), std::string::npos) << dsopt_last_error();
        });
        captured.replay(); // replays an empty graph
        EXPECT_TRUE(same(before, side.raw()));
        ASSERT_OK(side.init());
        EXPECT_FALSE(same(before, side.raw()));
    }
}

} // namespace cuda_functional_tests
