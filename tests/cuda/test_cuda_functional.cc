// SPDX-License-Identifier: Apache-2.0
// The functional form on the device: same bits as on the CPU and as in step mode, on lists of the caller. Also which of
// its calls can be captured in a graph.
#include "side.h"

using namespace cuda_test;

namespace {

/// An optimizer with everything that dsopt_optimizer_apply reads and writes. State is aligned only to its elements.
class Pure : public Side {
public:
    Pure(bool device, const Setting &setting, const Ranks *ranks = nullptr, int rank = 0) :
        Side(device, setting, ranks, rank),
        device_(device) {
        for (const dsopt_tensor &tensor : Side::state()) {
            const size_t size = size_of(tensor.dtype);
            lists_.emplace_back(device, size_t(tensor.numel) * size, size);
            lists_.back().set(std::vector<char>(size_t(tensor.numel) * size, char(0xee)));
            list.push_back({lists_.back().data(), tensor.numel, tensor.dtype, 0});
        }
        size_t bytes = 0;
        good(dsopt_optimizer_workspace(optimizer, &bytes));
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
    dsopt_step pure_arguments() {
        dsopt_step step = arguments();
        step.params = weights.data();
        step.state = list.data();
        step.state_count = int64_t(list.size());
        step.workspace = workspace_[0].data();
        step.workspace_bytes = workspace_[0].get().size();
        return step;
    }
    dsopt_status apply() {
        const dsopt_step step = pure_arguments();
        return dsopt_optimizer_apply(optimizer, &step);
    }
    /// Returns the raw bytes of state and parameters.
    std::vector<std::vector<char>> raw() const {
        std::vector<std::vector<char>> all;
        for (const Bytes &bytes : lists_) all.push_back(bytes.get());
        for (const Bytes &bytes : params) all.push_back(bytes.get());
        return all;
    }
    /// Returns the raw bytes of the engine's own state.
    std::vector<std::vector<char>> own() {
        std::vector<std::vector<char>> all;
        for (const dsopt_tensor &tensor : Side::state()) {
            std::vector<char> bytes(size_t(tensor.numel) * size_of(tensor.dtype));
            if (device_)
                EXPECT_EQ(cudaMemcpy(bytes.data(), tensor.data, bytes.size(), cudaMemcpyDeviceToHost), cudaSuccess);
            else if (!bytes.empty())
                std::memcpy(bytes.data(), tensor.data, bytes.size());
            all.push_back(std::move(bytes));
        }
        for (const Bytes &bytes : params) all.push_back(bytes.get());
        return all;
    }
    const dsopt_tensor *find(const char *name) const {
        for (size_t i = 0; i < list.size(); ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            good(dsopt_optimizer_state(optimizer, int64_t(i), &info));
            if (info.param < 0 && std::strcmp(info.name, name) == 0) return &list[i];
        }
        return nullptr;
    }
    std::vector<int32_t> words(const char *name) const {
        const dsopt_tensor *tensor = find(name);
        std::vector<int32_t> words(size_t(tensor->numel));
        if (device_)
            EXPECT_EQ(cudaMemcpy(words.data(), tensor->data, words.size() * 4, cudaMemcpyDeviceToHost), cudaSuccess);
        else
            std::memcpy(words.data(), tensor->data, words.size() * 4);
        return words;
    }
    std::vector<dsopt_tensor> list, weights;

private:
    static constexpr int32_t kDtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};
    bool device_;
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

    /// Compares initial values and steps: on the CPU, on the device, and in the device's step mode.
    static void expect_same_bits(const Setting &s, int count, int bad_step) {
        SCOPED_TRACE("algorithm " + std::to_string(s.algorithm) + ", compat " + std::to_string(s.desc.compat) +
                     ", ranks " + std::to_string(count) + (s.mixed ? ", mixed" : ""));
        constexpr int steps = 8;
        std::vector<std::vector<std::vector<std::vector<char>>>> results[3];
        for (int kind = 0; kind < 3; ++kind) {
            results[kind].resize(size_t(count));
            const Ranks ranks(count);
            ranks.run([&](int rank) {
                Pure side(kind != 0, s, count > 1 ? &ranks : nullptr, rank);
                const auto look = [&] { results[kind][size_t(rank)].push_back(kind == 2 ? side.own() : side.raw()); };
                if (kind == 2) {
                    std::vector<int32_t> counters(s.sizes.size());
                    ASSERT_OK(dsopt_optimizer_export(side.optimizer, int64_t(side.list.size()) - 1, counters.data(),
                                                     counters.size() * 4));
                } else {
                    ASSERT_OK(side.init());
                }
                look();
                for (int t = 0; t < steps; ++t) {
                    side.fill_gradients(t + 20 * rank, t == bad_step && rank == count - 1 ? 4 : -1);
                    side.gradients[3].data = t == 2 ? nullptr : side.grads[3].data();
                    const dsopt_status status = kind == 2 ? side.step() : side.apply();
                    EXPECT_EQ(status, DSOPT_OK) << dsopt_last_error();
                    if (status != DSOPT_OK) return;
                    look();
                }
            });
        }
        for (size_t rank = 0; rank < size_t(count); ++rank)
            for (int kind = 1; kind < 3; ++kind) {
                ASSERT_EQ(results[0][rank].size(), results[kind][rank].size());
                for (size_t t = 0; t < results[0][rank].size(); ++t)
                    ASSERT_TRUE(same(results[0][rank][t], results[kind][rank][t]))
                        << (kind == 2 ? "step" : "apply") << " after " << t << ", rank " << rank;
            }
    }
};

TEST_F(CudaFunctional, StartsFromInitStateAndHasTheBitsOfTheCpu) {
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ADAM_LEGACY})
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
            for (const bool masters : {false, true}) {
                Setting s = setting(algorithm, compat, masters);
                s.scaler = masters;
                s.desc.masters = algorithm == DSOPT_ALGORITHM_LAMB && masters ? DSOPT_MASTERS_FLAT : 0;
                expect_same_bits(s, 1, masters ? 4 : -1);
            }
}

TEST_F(CudaFunctional, StartsTheOneBitFamilyFromInitStateAndHasTheBitsOfTheCpu) {
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
            for (const int ranks : {1, 2}) {
                Setting s = setting(algorithm, compat, ranks == 2 || compat == DSOPT_COMPAT_DEEPSPEED);
                s.scaler = s.mixed;
                s.desc.masters = ranks == 1 ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
                expect_same_bits(s, ranks, s.scaler ? 5 : -1);
            }
}

TEST_F(CudaFunctional, ScalerOnArraysMovesAsTheHandleDoes) {
    struct {
        int32_t profile, flags, window, hysteresis;
    } const rows[] = {{DSOPT_PROFILE_DEFAULT, 0, 3, 0},
                      {DSOPT_PROFILE_UNFUSED, DSOPT_SCALER_GROWTH_AT_WINDOW, 2, 0},
                      {DSOPT_PROFILE_DYNAMIC, DSOPT_SCALER_REFILL, 4, 2},
                      {DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_SHARED, 2, 3},
                      {DSOPT_PROFILE_DEFAULT, DSOPT_SCALER_STATIC, 0, 0}};
    DSOPT_NEW(dsopt_context_desc, where);
    where.backend = DSOPT_BACKEND_CUDA;
    dsopt_context *context = nullptr;
    ASSERT_OK(dsopt_context_create(&where, &context));
    for (const auto &row : rows) {
        DSOPT_NEW(dsopt_scaler_desc, desc);
        desc.profile = row.profile;
        desc.flags = row.flags;
        desc.window = row.window;
        desc.hysteresis = row.hysteresis;
        desc.init = 4;
        dsopt_scaler *handle = nullptr, *other = nullptr;
        ASSERT_OK(dsopt_scaler_create(context, &desc, &handle));
        ASSERT_OK(dsopt_scaler_create(context, &desc, &other));
        {
            // Words at an offset of 4 from an aligned address.
            Bytes scale(true, 4, 4), words(true, 48, 4), overflow(true, 4, 0);
            const dsopt_tensor list[] = {{scale.data(), 1, DSOPT_DTYPE_F32, 0}, {words.data(), 12, DSOPT_DTYPE_I32, 0}};
            ASSERT_OK(dsopt_scaler_init_state(other, list, 2, nullptr));
            for (int i = 0; i < 40; ++i) {
                const int32_t bad = i % 7 == 3 || i % 11 > 8;
                overflow.set({reinterpret_cast<const char *>(&bad), reinterpret_cast<const char *>(&bad + 1)});
                const auto *flag = i % 5 == 4 ? nullptr : reinterpret_cast<const int32_t *>(overflow.data());
                ASSERT_OK(dsopt_scaler_update(handle, flag, nullptr));
                ASSERT_OK(dsopt_scaler_update_arrays(other, list, 2, flag, nullptr));
                int32_t host[12];
                std::memcpy(host, words.get().data(), sizeof host);
                DSOPT_NEW(dsopt_scaler_info, wanted);
                DSOPT_NEW(dsopt_scaler_info, got);
                ASSERT_OK(dsopt_scaler_query(handle, &wanted));
                ASSERT_OK(dsopt_scaler_decode(host, &got));
                ASSERT_EQ(std::memcmp(&wanted, &got, sizeof got), 0) << i;
                float on_device = 0;
                std::memcpy(&on_device, scale.get().data(), 4);
                ASSERT_EQ(double(on_device), wanted.scale) << i;
            }
            DSOPT_NEW(dsopt_scaler_info, untouched);
            ASSERT_OK(dsopt_scaler_query(other, &untouched));
            EXPECT_EQ(untouched.updates, 0);
            EXPECT_EQ(untouched.scale, 4);
        }
        dsopt_scaler_destroy(handle);
        dsopt_scaler_destroy(other);
    }
    dsopt_context_destroy(context);
}

TEST_F(CudaFunctional, TellsTheReductionOfTheNextCall) {
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED}) {
            Setting s = setting(algorithm, compat, compat != DSOPT_COMPAT_NONE);
            s.sizes = {7, 40};
            Pure pure(true, s), stepping(true, s);
            ASSERT_OK(pure.init());
            Bytes answer(true, 4, 0), skip(true, 4, 0);
            for (int call = 1; call <= 20; ++call) {
                int32_t wanted = -1, got = -2;
                ASSERT_OK(dsopt_optimizer_next_reduction(stepping.optimizer, compat == DSOPT_COMPAT_NONE ? call : 0,
                                                         &wanted));
                ASSERT_OK(dsopt_optimizer_next_reduction_on_device(
                    pure.optimizer, pure.find("schedule"), reinterpret_cast<int32_t *>(answer.data()), nullptr));
                std::memcpy(&got, answer.get().data(), 4);
                ASSERT_EQ(got, wanted) << call;
                DSOPT_NEW(dsopt_schedule_info, info);
                ASSERT_OK(dsopt_schedule_decode(pure.optimizer, pure.words("schedule").data(), &info));
                EXPECT_EQ(info.reduction, wanted) << call;
                const int32_t skips = call % 6 == 3;
                skip.set({reinterpret_cast<const char *>(&skips), reinterpret_cast<const char *>(&skips + 1)});
                for (Pure *side : {&pure, &stepping}) {
                    side->fill_gradients(call);
                    dsopt_step step = side == &pure ? side->pure_arguments() : side->arguments();
                    step.skip = reinterpret_cast<const int32_t *>(skip.data());
                    ASSERT_OK(side == &pure ? dsopt_optimizer_apply(side->optimizer, &step)
                                            : dsopt_optimizer_step(side->optimizer, &step));
                }
            }
            EXPECT_TRUE(same(pure.raw(), stepping.own()));
        }
    Pure plain(true, setting(DSOPT_ALGORITHM_ADAM, DSOPT_COMPAT_NONE));
    Bytes answer(true, 4, 0);
    ASSERT_OK(dsopt_optimizer_next_reduction_on_device(plain.optimizer, nullptr,
                                                       reinterpret_cast<int32_t *>(answer.data()), nullptr));
    EXPECT_EQ(answer.get()[0], DSOPT_REDUCTION_FULL);
}

TEST_F(CudaFunctional, ReadsRowsOfHyperParametersLikeTheCpu) {
    for (const int32_t algorithm :
         {DSOPT_ALGORITHM_ADAM, DSOPT_ALGORITHM_ADAM_LEGACY, DSOPT_ALGORITHM_LAMB, DSOPT_ALGORITHM_ONEBIT_ADAM,
          DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB})
        for (const int32_t compat : {DSOPT_COMPAT_NONE, DSOPT_COMPAT_DEEPSPEED})
            for (const bool pure : {false, true}) {
                SCOPED_TRACE("algorithm " + std::to_string(algorithm) + ", compat " + std::to_string(compat));
                Setting s = setting(algorithm, compat);
                s.desc.max_norm = 5;
                s.scaler = true;
                s.change = [](dsopt_group &g, int) {
                    setting(g.algorithm, 0).change(g, 0);
                    g.max_norm = 3;
                };
                Pure host(false, s), device(true, s);
                for (int t = 0; t < 10; ++t) {
                    float rows[2][DSOPT_HYPER_FLOATS];
                    for (auto &row : rows)
                        for (float &value : row) value = NAN;
                    rows[0][DSOPT_HYPER_LR] = 1e-3f * float(t);
                    rows[1][DSOPT_HYPER_BETA1] = 0.5f + 0.04f * float(t);
                    rows[1][DSOPT_HYPER_BETA2] = 0.99f;
                    rows[0][DSOPT_HYPER_EPS] = 1e-4f;
                    rows[1][DSOPT_HYPER_WEIGHT_DECAY] = 0.1f * float(t % 3);
                    if (t % 2) rows[1][DSOPT_HYPER_GROUP_MAX_NORM] = 0.5f;
                    if (t % 3) rows[0][DSOPT_HYPER_MAX_NORM] = 0.25f;
                    if (t == 0) rows[1][DSOPT_HYPER_LR] = -1;
                    if (t == 4) rows[1][DSOPT_HYPER_MAX_NORM] = 1;
                    if (t == 5) rows[0][DSOPT_HYPER_FLOATS - 1] = 1;
                    if (t == 6) rows[0][DSOPT_HYPER_BETA1] = 1;
                    const bool bad = t == 0 || (t >= 4 && t <= 6);
                    std::vector<char> reports[2];
                    for (Pure *side : {&host, &device}) {
                        if (pure && t == 0) { ASSERT_OK(side->init()); }
                        side->fill_gradients(t);
                        Bytes at(side == &device, sizeof rows, 4), report(side == &device, 4 * DSOPT_REPORT_FLOATS, 0);
                        at.set({reinterpret_cast<const char *>(rows), reinterpret_cast<const char *>(rows + 2)});
                        dsopt_step step = pure ? side->pure_arguments() : side->arguments();
                        step.hyper = reinterpret_cast<const float *>(at.data());
                        step.report = reinterpret_cast<float *>(report.data());
                        step.flags |= DSOPT_STEP_NO_NAN;
                        ASSERT_OK(pure ? dsopt_optimizer_apply(side->optimizer, &step)
                                       : dsopt_optimizer_step(side->optimizer, &step));
                        reports[side == &device] = report.get();
                        float values[DSOPT_REPORT_FLOATS];
                        std::memcpy(values, reports[side == &device].data(), sizeof values);
                        EXPECT_EQ(values[DSOPT_REPORT_SKIPPED], bad) << t;
                        EXPECT_EQ(int(values[DSOPT_REPORT_REASONS]), bad ? DSOPT_SKIP_HYPER : 0) << t;
                        for (const float value : values) EXPECT_FALSE(std::isnan(value)) << t;
                    }
                    ASSERT_TRUE(reports[0] == reports[1]) << t;
                    ASSERT_TRUE(pure ? same(host.raw(), device.raw()) : same(host.everything(), device.everything()))
                        << t;
                }
            }
}

// ------------------------------------------------------------------------------------------------------------ capture
TEST_F(CudaFunctional, CapturesInitStateATransitionAndTheReduction) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_LAMB}) {
        Setting s = setting(algorithm, DSOPT_COMPAT_NONE, true);
        s.scaler = true;
        Pure plain(true, s), graph(true, s);
        ASSERT_OK(plain.init());
        const bool family = is_onebit(algorithm);
        Bytes answer(true, 4, 0);
        const Captured captured([&](cudaStream_t stream) {
            ASSERT_OK(graph.init(stream));
            ASSERT_OK(dsopt_scaler_update_arrays(graph.scaler, graph.find("loss_scale"), 2, nullptr, stream));
            ASSERT_OK(dsopt_optimizer_next_reduction_on_device(graph.optimizer,
                                                               family ? graph.find("schedule") : nullptr,
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

TEST_F(CudaFunctional, CapturesAListOf100000Tensors) {
    constexpr int64_t count = 100000;
    std::vector<char> results[2];
    for (const bool device : {false, true}) {
        DSOPT_NEW(dsopt_context_desc, where);
        where.backend = device ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU;
        dsopt_context *context = nullptr;
        dsopt_optimizer *optimizer = nullptr;
        Side::good(dsopt_context_create(&where, &context));
        Side::good(dsopt_optimizer_create(context, nullptr, &optimizer));
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
        Side::good(dsopt_group_init(&group, sizeof group, DSOPT_ALGORITHM_ADAMW));
        Side::good(dsopt_optimizer_add_group(optimizer, &group, params.data(), count));
        int64_t states = 0;
        Side::good(dsopt_optimizer_state_count(optimizer, &states));
        size_t bytes = 0, workspace_bytes = 0;
        std::vector<size_t> offsets;
        for (int64_t i = 0; i < states; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            Side::good(dsopt_optimizer_state(optimizer, i, &info));
            state.push_back(info.tensor);
            offsets.push_back(bytes);
            bytes += (size_t(info.tensor.numel) * size_of(info.tensor.dtype) + 7) / 8 * 8;
        }
        Side::good(dsopt_optimizer_workspace(optimizer, &workspace_bytes));
        const Bytes memory(device, bytes, 0), workspace(device, workspace_bytes, 0);
        for (size_t i = 0; i < state.size(); ++i) state[i].data = memory.data() + offsets[i];
        Side::good(dsopt_optimizer_init_state(optimizer, param_list.data(), int64_t(param_list.size()), state.data(),
                                              states, nullptr));
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

TEST_F(CudaFunctional, StepsWithStateOfTheCallerAfterTheEngineMadeItsOwn) {
    Setting s;
    s.param = s.grad = DSOPT_DTYPE_F16;
    s.scaler = true;
    s.desc.compat = DSOPT_COMPAT_DEEPSPEED;
    s.desc.masters = DSOPT_MASTERS_PER_TENSOR;
    Pure host(false, s), device(true, s);
    for (int t = 0; t < 2; ++t) {
        for (Pure *side : {&host, &device}) {
            side->fill_gradients(t);
            if (t == 0) { ASSERT_OK(side->init()); }
            dsopt_step step = side->arguments();
            step.state = side->list.data();
            step.state_count = int64_t(side->list.size());
            ASSERT_OK(dsopt_optimizer_step(side->optimizer, &step));
        }
        ASSERT_TRUE(same(host.raw(), device.raw())) << t;
        // The engine's own state starts with a step on zero gradients, in the workspace of the steps.
        if (t == 0)
            for (Pure *side : {&host, &device}) (void)side->everything();
    }
}

TEST_F(CudaFunctional, RefusesToCaptureTheStepOnZeroGradientsAndChangesNothing) {
    for (const int32_t algorithm : {DSOPT_ALGORITHM_ADAMW, DSOPT_ALGORITHM_ONEBIT_ADAM}) {
        Pure side(true, setting(algorithm, DSOPT_COMPAT_DEEPSPEED, true));
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

} // namespace
