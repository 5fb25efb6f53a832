// SPDX-License-Identifier: Apache-2.0
// Steps of one library for bench_against, compiled against the header of that library: see against.h.
#include "against.h"
#include "dsopt_dl.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using against::Case;
using against::Dtype;
using against::Rule;
using against::Shared;

constexpr int kRanks = 8;
constexpr int kWarmSteps = 16; // reaches the compressed stage, and ends the trial of prefetching (cpu/prefetch.h)

// Values of constants may differ between commits too.
int32_t algorithm_of(Rule rule) {
    switch (rule) {
    case Rule::adamw: return DSOPT_ALGORITHM_ADAMW;
    case Rule::lamb: return DSOPT_ALGORITHM_LAMB;
    case Rule::sgd: return DSOPT_ALGORITHM_SGD;
    case Rule::lion: return DSOPT_ALGORITHM_LION;
    case Rule::adagrad: return DSOPT_ALGORITHM_ADAGRAD;
    case Rule::onebit_adam: return DSOPT_ALGORITHM_ONEBIT_ADAM;
    }
    std::abort();
}
int32_t dtype_of(Dtype dtype) {
    switch (dtype) {
    case Dtype::f32: return DSOPT_DTYPE_F32;
    case Dtype::f16: return DSOPT_DTYPE_F16;
    case Dtype::bf16: return DSOPT_DTYPE_BF16;
    }
    std::abort();
}
std::vector<dsopt_tensor> tensors(const std::vector<against::Tensor> &list, Dtype dtype) {
    std::vector<dsopt_tensor> all;
    for (const against::Tensor &entry : list) {
        dsopt_tensor tensor = {};
        tensor.data = entry.data;
        tensor.numel = entry.numel;
        tensor.dtype = dtype_of(dtype);
        all.push_back(tensor);
    }
    return all;
}

class Engine final : public against::Engine {
public:
    explicit Engine(const char *library) {
        if (const char *problem = dsopt_dl_load(&dl_, library)) {
            std::fprintf(stderr, "%s: %s\n", library, problem);
            std::exit(1);
        }
    }
    ~Engine() override {
        dl_.dsopt_optimizer_destroy(optimizer_);
        dl_.dsopt_comm_destroy(comm_);
        dl_.dsopt_scaler_destroy(scaler_);
        dl_.dsopt_context_destroy(context_);
        dsopt_dl_unload(&dl_);
    }
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    /// Returns false if the library does not know the algorithm.
    bool open(const Case &config, Shared &shared) {
        dsopt_group group;
        if (dl_.dsopt_group_init(&group, sizeof group, algorithm_of(config.rule)) != DSOPT_OK) return false;
        group.momentum = config.momentum;
        group.weight_decay = 0.01;
        if (config.exchanges) group.freeze_step = 1;
        check(dl_.dsopt_context_create(nullptr, &context_));
        DSOPT_NEW(dsopt_optimizer_desc, desc);
        if (config.dtype != Dtype::f32) {
            DSOPT_NEW(dsopt_scaler_desc, scaling);
            scaling.init = 1024;
            scaling.window = 1 << 30; // no growth, which would make moments denormal
            check(dl_.dsopt_scaler_create(context_, &scaling, &scaler_));
            desc.scaler = scaler_;
            desc.max_norm = 1;
        }
        if (config.exchanges) desc.data = make_comm();
        check(dl_.dsopt_optimizer_create(context_, &desc, &optimizer_));
        std::vector<dsopt_param> params;
        for (const dsopt_tensor &tensor : tensors(shared.params, config.dtype)) {
            dsopt_param param = {};
            param.tensor = tensor;
            params.push_back(param);
        }
        check(dl_.dsopt_optimizer_add_group(optimizer_, &group, params.data(), int64_t(params.size())));
        bind_state(shared);
        grads_ = tensors(shared.grads, config.dtype);
        outs_ = tensors(shared.outs, config.dtype);
        step_ = dsopt_step();
        step_.size = sizeof step_;
        step_.grads = grads_.data();
        step_.count = int64_t(grads_.size());
        if (config.delta) {
            step_.out = outs_.data();
            step_.flags = DSOPT_STEP_DELTA;
        }
        for (int i = 0; i < kWarmSteps; ++i) step();
        return true;
    }
    void step() override { check(dl_.dsopt_optimizer_step(optimizer_, &step_)); }

private:
    void check(dsopt_status status) const {
        if (status == DSOPT_OK) return;
        std::fprintf(stderr, "%s: %s\n", dl_.dsopt_status_name(status), dl_.dsopt_last_error());
        std::exit(1);
    }
    /// Binds state tensors that have as many elements as their parameter to the shared memory. The engine allocates the
    /// others.
    void bind_state(Shared &shared) {
        int64_t count = 0;
        check(dl_.dsopt_optimizer_state_count(optimizer_, &count));
        std::vector<dsopt_tensor> state;
        for (int64_t i = 0; i < count; ++i) {
            DSOPT_NEW(dsopt_state_info, info);
            check(dl_.dsopt_optimizer_state(optimizer_, i, &info));
            const bool fits = info.param >= 0 && info.tensor.numel == shared.params[size_t(info.param)].numel &&
                              std::strstr(info.name, "error") == nullptr;
            const size_t bytes = info.tensor.dtype == DSOPT_DTYPE_F16 || info.tensor.dtype == DSOPT_DTYPE_BF16 ? 2 : 4;
            info.tensor.data = fits ? shared.state_memory(info.name, size_t(info.param), bytes) : nullptr;
            state.push_back(info.tensor);
        }
        check(dl_.dsopt_optimizer_bind(optimizer_, DSOPT_BIND_STATE, state.data(), count));
    }
    /// Creates a comm of one rank whose peers all send the same data as this rank.
    dsopt_comm *make_comm() {
        DSOPT_NEW(dsopt_comm_table, table);
        table.ranks = kRanks;
        table.all_reduce = [](void *, const void *, void *, int64_t, int32_t, int32_t, void *) { return 0; };
        table.all_to_all = table.all_gather = [](void *, const void *send, void *recv, int64_t bytes, void *) {
            for (int rank = 0; rank < kRanks; ++rank)
                std::memcpy(static_cast<char *>(recv) + rank * bytes, send, size_t(bytes));
            return 0;
        };
        DSOPT_NEW(dsopt_comm_desc, desc);
        desc.kind = DSOPT_COMM_KIND_TABLE;
        desc.table = &table;
        check(dl_.dsopt_comm_create(context_, &desc, &comm_));
        return comm_;
    }

    dsopt_dl dl_;
    dsopt_context *context_ = nullptr;
    dsopt_scaler *scaler_ = nullptr;
    dsopt_comm *comm_ = nullptr;
    dsopt_optimizer *optimizer_ = nullptr;
    std::vector<dsopt_tensor> grads_, outs_;
    dsopt_step step_ = {};
};

} // namespace

extern "C" __attribute__((visibility("default"))) against::Engine *against_open(const char *library, const Case &config,
                                                                                Shared &shared) {
    auto *const engine = new Engine(library);
    if (engine->open(config, shared)) return engine;
    delete engine;
    return nullptr;
}
