// SPDX-License-Identifier: Apache-2.0
// An optimizer with its lists on the CPU or on a CUDA device, and the values that tests compare. Sources that include
// this header are compiled twice: with the emulated device, and with the CUDA runtime for a GPU.
#pragma once
#include "dsopt.h"
#include "runtime.h"
#include "support/cuda_memory.h"
#include "support/expect.h"
#include "support/handles.h"
#include "support/numbers.h"
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <gtest/gtest.h>
#include <string>
#include <thread>
#include <vector>

namespace cuda_test {

using test::size_of;
using test::store;

inline const test::Memory &memory_of(bool device) {
    static const test::Memory host = test::host_memory(), on_device = test::cuda_memory(nullptr);
    return device ? on_device : host;
}

/// Replaces every NaN by one bit pattern, because devices may produce different NaNs.
inline void canonicalize_nans(std::vector<char> &values, int32_t dtype) {
    const auto canonicalize = [&](auto exponent, auto all) {
        using Word = decltype(all);
        for (size_t offset = 0; offset + sizeof(Word) <= values.size(); offset += sizeof(Word)) {
            Word word;
            std::memcpy(&word, &values[offset], sizeof word);
            if (Word(word & Word(~(Word(1) << (sizeof(Word) * 8 - 1)))) > exponent)
                std::memcpy(&values[offset], &all, sizeof all);
        }
    };
    if (dtype == DSOPT_DTYPE_F32) canonicalize(uint32_t(0x7f800000), uint32_t(0x7fffffff));
    if (dtype == DSOPT_DTYPE_F16) canonicalize(uint16_t(0x7c00), uint16_t(0x7fff));
    if (dtype == DSOPT_DTYPE_BF16) canonicalize(uint16_t(0x7f80), uint16_t(0x7fff));
}

/// Bytes on the host or on the device.
class Bytes : public test::Block {
public:
    Bytes(bool device, size_t bytes, size_t shift) : Block(memory_of(device), bytes, shift) {}
    void set(const std::vector<char> &from) const { Block::set(static_cast<const void *>(from.data())); }
    std::vector<char> get() const {
        const std::string all = text();
        return {all.begin(), all.end()};
    }
};

struct Ranks;
struct Setting {
    int32_t algorithm = DSOPT_ALGORITHM_ADAMW;
    int32_t param = DSOPT_DTYPE_F32, grad = DSOPT_DTYPE_F32;
    dsopt_optimizer_desc desc{};
    uint32_t group_flags = 0;
    bool scaler = false;
    uint32_t step_flags = 0;
    int32_t out = 0; // dtype; 0: none
    bool shifted = false;
    bool mixed = false; // the dtypes alternate among tensors
    std::vector<int64_t> sizes{1, 7, 0, 1023, 4095, 4096, 4097, 9000, 33};
    uint32_t param_flags = 0;
    std::vector<std::array<int64_t, 2>> matrices{};          // rows and cols of the first parameters
    const Ranks *model = nullptr;                            // ranks of the model comm
    int model_rank = 0;                                      // this rank among them
    void (*change)(dsopt_group &group, int index) = nullptr; // called before each of the two groups is added
    dsopt_context *context = nullptr;                        // NULL: the optimizer creates its own
    int32_t first_format = 0, second_format = 0;             // of the moments, enum dsopt_moment
};

/// Ranks that are threads of this process.
struct Ranks {
    int count = 1;
    test::CommId id = test::new_id();
    explicit Ranks(int ranks) : count(ranks) {}
    dsopt_comm *join(dsopt_context *context, int rank) const {
        const dsopt_comm_desc desc = test::local_desc(id, rank, count);
        dsopt_comm *comm = nullptr;
        EXPECT_OK(dsopt_comm_create(context, &desc, &comm));
        return comm;
    }
    void run(const std::function<void(int rank)> &body) const { test::run_ranks(count, body); }
    static void run(int count, const std::function<void(int rank)> &body) { test::run_ranks(count, body); }
};

/// Nodes of ranks: the comms of two levels.
struct Nodes {
    int per_node, nodes;
    std::deque<Ranks> inside; // by node: the ranks of that node
    std::deque<Ranks> across; // by rank in its node: the ranks of that number in all nodes
    Nodes(int ranks_per_node, int node_count) : per_node(ranks_per_node), nodes(node_count) {
        for (int node = 0; node < nodes; ++node) inside.emplace_back(per_node);
        for (int rank = 0; rank < per_node; ++rank) across.emplace_back(nodes);
    }
    int count() const { return per_node * nodes; }
};

/// An optimizer with its lists, on one of the two backends.
class BackendOptimizer {
public:
    BackendOptimizer(bool device, const Setting &setting, const Ranks *ranks = nullptr, int rank = 0,
                     const Ranks *node_ranks = nullptr, int node_rank = 0) :
        setting_(setting) {
        DSOPT_NEW(dsopt_context_desc, context_desc);
        context_desc.backend = device ? DSOPT_BACKEND_CUDA : DSOPT_BACKEND_CPU;
        context = setting.context;
        if (context == nullptr) must(dsopt_context_create(&context_desc, &context));
        dsopt_optimizer_desc desc = setting.desc;
        desc.size = sizeof desc;
        if (setting.scaler) {
            DSOPT_NEW(dsopt_scaler_desc, scaler_desc);
            scaler_desc.init = 8;
            scaler_desc.window = 2;
            must(dsopt_scaler_create(context, &scaler_desc, &scaler));
            desc.scaler = scaler;
        }
        if (ranks != nullptr) desc.data = comm = ranks->join(context, rank);
        if (setting.model != nullptr) desc.model = model = setting.model->join(context, setting.model_rank);
        if (node_ranks != nullptr) desc.node = node = node_ranks->join(context, node_rank);
        must(dsopt_optimizer_create(context, &desc, &optimizer));
        const int32_t dtypes[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_F16, DSOPT_DTYPE_BF16};
        std::vector<dsopt_param> list;
        for (size_t i = 0; i < setting.sizes.size(); ++i) {
            const int64_t n = setting.sizes[i];
            const int32_t param = setting.mixed ? dtypes[i % 3] : setting.param,
                          grad = setting.mixed ? dtypes[i / 3 % 3] : setting.grad;
            const size_t shift = setting.shifted && i % 2 ? 1 : 0; // in elements
            params.emplace_back(device, size_t(n) * size_of(param), shift * size_of(param));
            grads.emplace_back(device, size_t(n) * size_of(grad), shift * size_of(grad));
            std::vector<char> p(size_t(n) * size_of(param));
            for (int64_t k = 0; k < n; ++k) store(&p[size_t(k) * size_of(param)], param, std::sin(float(k + n)) * 0.5f);
            params.back().set(p);
            dsopt_param entry{};
            entry.tensor = {params.back().data(), n, param, 0};
            entry.flags = setting.param_flags;
            if (i < setting.matrices.size()) entry.rows = setting.matrices[i][0], entry.cols = setting.matrices[i][1];
            list.push_back(entry);
            gradients.push_back({grads.back().data(), n, grad, 0});
            param_types.push_back(param);
            if (setting.out != 0) {
                outs.emplace_back(device, size_t(n) * size_of(setting.out), 0);
                outputs.push_back({outs.back().data(), n, setting.out, 0});
            }
        }
        const size_t half = list.size() / 2;
        dsopt_group group;
        must(dsopt_group_init(&group, sizeof group, setting.algorithm));
        group.flags = setting.group_flags;
        group.weight_decay = 0.1;
        group.exp_avg_format = setting.first_format;
        group.exp_avg_sq_format = setting.second_format;
        if (setting.change != nullptr) setting.change(group, 0);
        must(dsopt_optimizer_add_group(optimizer, &group, list.data(), int64_t(half)));
        group.lr = 2e-3;
        group.beta1 = 0.8;
        group.weight_decay = 0;
        if (setting.change != nullptr) setting.change(group, 1);
        must(dsopt_optimizer_add_group(optimizer, &group, list.data() + half, int64_t(list.size() - half)));
    }
    ~BackendOptimizer() {
        dsopt_optimizer_destroy(optimizer);
        dsopt_scaler_destroy(scaler);
        dsopt_comm_destroy(comm);
        dsopt_comm_destroy(node);
        dsopt_comm_destroy(model);
        if (setting_.context == nullptr) dsopt_context_destroy(context);
    }

    /// Fills gradients with values for step `t`. `bad`: index of a tensor whose last element is not finite; -1: none.
    void fill_gradients(int t, int bad = -1) {
        for (size_t i = 0; i < gradients.size(); ++i) {
            const int32_t dtype = gradients[i].dtype;
            std::vector<char> g(size_t(gradients[i].numel) * size_of(dtype));
            for (int64_t k = 0; k < gradients[i].numel; ++k)
                store(&g[size_t(k) * size_of(dtype)], dtype, std::cos(float(3 * k + 7 * t)) + 0.1f);
            if (bad == int(i) && !g.empty()) store(&g[g.size() - size_of(dtype)], dtype, t % 2 ? INFINITY : NAN);
            grads[i].set(g);
        }
    }
    dsopt_step arguments() {
        DSOPT_NEW(dsopt_step, step);
        step.grads = gradients.data();
        step.count = int64_t(gradients.size());
        step.flags = setting_.step_flags;
        if (!outputs.empty()) step.out = outputs.data();
        return step;
    }
    dsopt_status step() {
        const dsopt_step arguments_ = arguments();
        return dsopt_optimizer_step(optimizer, &arguments_);
    }
    /// Returns the current addresses of the state.
    std::vector<dsopt_tensor> state() {
        std::vector<dsopt_tensor> list;
        int64_t count = 0;
        must(dsopt_optimizer_state_count(optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must(dsopt_optimizer_state(optimizer, i, &info));
            list.push_back(info.tensor);
        }
        return list;
    }
    /// Returns everything that a step changes, and its report.
    std::vector<std::vector<char>> all_bytes() {
        std::vector<std::vector<char>> all;
        int64_t count = 0;
        must(dsopt_optimizer_state_count(optimizer, &count));
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            must(dsopt_optimizer_state(optimizer, i, &info));
            std::vector<char> host(size_t(info.tensor.numel) * size_of(info.tensor.dtype));
            must(dsopt_optimizer_export(optimizer, i, host.data(), host.size()));
            canonicalize_nans(host, info.tensor.dtype);
            all.push_back(std::move(host));
        }
        for (size_t k = 0; k < params.size(); ++k) {
            all.push_back(params[k].get());
            canonicalize_nans(all.back(), param_types[k]);
            all.push_back(grads[k].get());
            canonicalize_nans(all.back(), gradients[k].dtype);
            if (outs.empty()) continue;
            all.push_back(outs[k].get());
            canonicalize_nans(all.back(), setting_.out);
        }
        DSOPT_NEW(dsopt_report, report);
        must(dsopt_optimizer_report(optimizer, &report));
        const double numbers[] = {double(report.skipped),   double(report.skipped_in_row),
                                  double(report.nonfinite), double(report.first_bad),
                                  double(report.kind),      report.loss_scale,
                                  report.grad_norm,         report.dense_norm,
                                  report.weight_norm,       report.update_norm,
                                  report.divisor,           report.scale_used};
        for (const double number : numbers) {
            const double plain = std::isnan(number) ? 12345.0 : number;
            all.emplace_back(reinterpret_cast<const char *>(&plain), reinterpret_cast<const char *>(&plain + 1));
        }
        return all;
    }
    static void must(dsopt_status status) { ASSERT_OK(status); }

    dsopt_context *context = nullptr;
    dsopt_scaler *scaler = nullptr;
    dsopt_comm *comm = nullptr, *node = nullptr, *model = nullptr;
    dsopt_optimizer *optimizer = nullptr;
    std::vector<Bytes> params, grads, outs;
    std::vector<dsopt_tensor> gradients, outputs;
    std::vector<int32_t> param_types;

private:
    Setting setting_;
};

/// Compares arrays. The message names only the first array and byte that differ, because the arrays would fill pages.
inline testing::AssertionResult same(const std::vector<std::vector<char>> &a, const std::vector<std::vector<char>> &b) {
    if (a.size() != b.size()) return testing::AssertionFailure() << a.size() << " and " << b.size() << " arrays";
    for (size_t i = 0; i < a.size(); ++i)
        if (a[i] != b[i]) {
            size_t k = 0;
            while (k < a[i].size() && k < b[i].size() && a[i][k] == b[i][k]) ++k;
            double x = 0, y = 0;
            if (a[i].size() == 8 && b[i].size() == 8) std::memcpy(&x, a[i].data(), 8), std::memcpy(&y, b[i].data(), 8);
            return testing::AssertionFailure()
                   << "array " << i << " of " << a.size() << " at byte " << k << " of " << a[i].size() << " (" << x
                   << " and " << y << " if it is a number of the report)";
        }
    return testing::AssertionSuccess();
}

/// A captured call, with its own stream; releases everything on destruction.
class Captured {
public:
    template <class Call> explicit Captured(const Call &call) {
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
        EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        call(stream_);
        EXPECT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
        EXPECT_EQ(cudaGraphInstantiate(&exec_, graph_, 0), cudaSuccess);
    }
    ~Captured() {
        (void)cudaGraphExecDestroy(exec_);
        (void)cudaGraphDestroy(graph_);
        (void)cudaStreamDestroy(stream_);
    }
    Captured(const Captured &) = delete;
    Captured &operator=(const Captured &) = delete;
    void launch(cudaStream_t stream) const { EXPECT_EQ(cudaGraphLaunch(exec_, stream), cudaSuccess); }
    void replay() const {
        launch(stream_);
        EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    }

private:
    cudaStream_t stream_ = nullptr;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t exec_ = nullptr;
};

/// Settings with every format of moments, and with remainders.
inline std::vector<Setting> format_settings() {
    std::vector<Setting> all;
    const auto add = [&](int32_t algorithm, int32_t first, int32_t second, int32_t masters) {
        Setting s;
        s.algorithm = algorithm;
        s.param = s.grad = DSOPT_DTYPE_BF16;
        s.first_format = first;
        s.second_format = second;
        s.desc.masters = masters;
        s.desc.max_norm = 1;
        s.desc.seed = 3;
        all.push_back(s);
    };
    add(DSOPT_ALGORITHM_ADAMW, DSOPT_MOMENT_E4M3, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MASTERS_REMAINDER);
    add(DSOPT_ALGORITHM_ADAMW, DSOPT_MOMENT_Q8, DSOPT_MOMENT_Q8, DSOPT_MASTERS_PER_TENSOR);
    add(DSOPT_ALGORITHM_LAMB, DSOPT_MOMENT_BF16, DSOPT_MOMENT_Q8, DSOPT_MASTERS_REMAINDER);
    add(DSOPT_ALGORITHM_LION, DSOPT_MOMENT_BF16_RANDOM, DSOPT_MOMENT_F32, DSOPT_MASTERS_PER_TENSOR);
    add(DSOPT_ALGORITHM_ADAMW, DSOPT_MOMENT_F32, DSOPT_MOMENT_F32, DSOPT_MASTERS_REMAINDER);
    return all;
}

inline dsopt_status step_on(BackendOptimizer &side, cudaStream_t stream) {
    dsopt_step step = side.arguments();
    step.stream = stream;
    return dsopt_optimizer_step(side.optimizer, &step);
}

class Cuda : public testing::Test {
protected:
    void SetUp() override { begin_test(); }
    void TearDown() override { end_test(); }
};

inline void expect_same_bits(const Setting &setting, const char *what) {
    SCOPED_TRACE(what);
    BackendOptimizer host(false, setting), device(true, setting);
    for (int t = 0; t < 5; ++t) {
        for (BackendOptimizer *side : {&host, &device}) {
            side->fill_gradients(t, t == 2 ? 5 : -1);
            if (t == 3) side->gradients[3].data = nullptr;
            if (t == 4) side->gradients[3].data = side->grads[3].data();
            ASSERT_OK(dsopt_optimizer_set(side->optimizer, DSOPT_ALL_GROUPS, DSOPT_KEY_LR, 1e-3 * (t + 1)));
            ASSERT_OK(side->step());
        }
        ASSERT_TRUE(same(host.all_bytes(), device.all_bytes())) << "step " << t;
    }
}

} // namespace cuda_test
