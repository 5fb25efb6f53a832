// SPDX-License-Identifier: Apache-2.0
// Both ways to step on the same problem: an optimizer with state, and caller's memory that is passed to
// dsopt_optimizer_apply.
#pragma once
#include "caller_memory.h"
#include "onebit.h"
#include <ostream>

namespace test {

/// Algorithms that have a compat mode.
inline constexpr int32_t kBothModes[] = {
    DSOPT_ALGORITHM_ADAM,        DSOPT_ALGORITHM_ADAMW,         DSOPT_ALGORITHM_LAMB,       DSOPT_ALGORITHM_ADAM_LEGACY,
    DSOPT_ALGORITHM_ONEBIT_ADAM, DSOPT_ALGORITHM_ZERO_ONE_ADAM, DSOPT_ALGORITHM_ONEBIT_LAMB};
inline bool has_compat(int32_t algorithm) {
    return std::find(std::begin(kBothModes), std::end(kBothModes), algorithm) != std::end(kBothModes);
}
inline std::vector<int32_t> all_algorithms() {
    std::vector<int32_t> list(std::begin(kStandardRules), std::end(kStandardRules));
    list.insert(list.end(), std::begin(kFamily), std::end(kFamily));
    return list;
}
inline bool is_onebit(int32_t algorithm) { return algorithm >= DSOPT_ALGORITHM_ONEBIT_ADAM; }
inline bool is_lamb(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_LAMB || algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
}

/// Types of the parameters: all F32, or a mixture with and without masters.
enum class DtypeMix { f32, no_master, per_tensor, flat };

/// Settings from which an optimizer can be created several times.
struct OptimizerSettings {
    int32_t algorithm = DSOPT_ALGORITHM_ADAMW;
    int32_t compat = DSOPT_COMPAT_NONE;
    DtypeMix kind = DtypeMix::f32;
    bool scaled = false;
    int ranks = 1;
    double max_norm = 0, group_norm = 0;
    int64_t freeze_step = 3;
    std::vector<size_t> sizes = {700, 0, 33, 4097, 5};

    bool has_masters() const { return kind == DtypeMix::per_tensor || kind == DtypeMix::flat; }
    bool wrapped() const { return compat == DSOPT_COMPAT_DEEPSPEED && has_masters(); }
    std::string name() const {
        const std::string text = name_of(algorithm);
        const char *const kinds[] = {"F32", "NoMaster", "PerTensor", "Flat"};
        return text + (compat ? "Compat" : "") + kinds[int(kind)] + (scaled ? "Scaled" : "") +
               (ranks > 1 ? "Ranks" + std::to_string(ranks) : "");
    }
};

inline void PrintTo(const OptimizerSettings &settings, std::ostream *out) { *out << settings.name(); }

/// Returns the initial weights.
inline std::vector<Array> weights_of(const OptimizerSettings &settings) {
    constexpr int32_t mixture[] = {DSOPT_DTYPE_F16, DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F32};
    Random random(17);
    std::vector<Array> list;
    for (size_t i = 0; i < settings.sizes.size(); ++i)
        list.emplace_back(settings.kind == DtypeMix::f32 ? int32_t(DSOPT_DTYPE_F32) : mixture[i % 4],
                          random.floats(settings.sizes[i]));
    return list;
}
inline std::vector<Array> gradients_of(const OptimizerSettings &settings, int rank, int64_t call) {
    constexpr int32_t mixture[] = {DSOPT_DTYPE_F32, DSOPT_DTYPE_BF16, DSOPT_DTYPE_F16};
    Random random(uint64_t(1000 * call + rank));
    std::vector<Array> list;
    for (size_t i = 0; i < settings.sizes.size(); ++i)
        list.emplace_back(settings.kind == DtypeMix::f32 ? int32_t(DSOPT_DTYPE_F32) : mixture[(i + 1) % 3],
                          random.floats(settings.sizes[i], -1, 1.2));
    return list;
}

/// Creates an optimizer with two groups of different hyper-parameters. `with_memory` false: each call passes the
/// parameters' memory.
inline Optimizer make_optimizer(const Context &ctx, const OptimizerSettings &settings,
                                const std::vector<Array> &weights, bool with_memory, dsopt_scaler *scaler = nullptr,
                                dsopt_comm *comm = nullptr) {
    DSOPT_NEW(dsopt_optimizer_desc, desc);
    desc.compat = settings.compat;
    desc.flags = (settings.kind == DtypeMix::no_master ? DSOPT_OPTIMIZER_NO_MASTER : 0) |
                 (is_onebit(settings.algorithm) && settings.ranks > 1 ? DSOPT_OPTIMIZER_AVERAGES : 0);
    desc.masters = settings.kind == DtypeMix::flat ? DSOPT_MASTERS_FLAT : DSOPT_MASTERS_PER_TENSOR;
    desc.max_norm = settings.max_norm;
    desc.scaler = scaler;
    desc.data = comm;
    Optimizer opt = make_optimizer(ctx, desc);
    const size_t half = (weights.size() + 1) / 2;
    for (const bool second : {false, true}) {
        dsopt_group group = is_onebit(settings.algorithm)
                                ? group_for(settings.algorithm, settings.freeze_step, 1e-2, 0.1)
                                : group_of(settings.algorithm, 1e-2, 0.1);
        group.max_norm = settings.group_norm;
        if (settings.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) group.local_interval_steps = 2;
        if (second) group.lr = 2e-2, group.weight_decay = 0.05;
        if (second && group.beta1 != 0) group.beta1 = 0.8;
        if (second && settings.algorithm == DSOPT_ALGORITHM_SGD) group.momentum = 0.8; // the first group has no state
        if (second && settings.algorithm == DSOPT_ALGORITHM_ADAGRAD) group.initial_accumulator_value = 0.1;
        std::vector<dsopt_param> params;
        for (size_t i = second ? half : 0; i < (second ? weights.size() : half); ++i) {
            dsopt_param param{};
            param.tensor = weights[i].tensor();
            if (!with_memory) param.tensor.data = nullptr;
            params.push_back(param);
        }
        must(dsopt_optimizer_add_group(opt.get(), &group, params.data(), int64_t(params.size())));
    }
    return opt;
}

/// Returns the raw bytes of the engine's own state and of parameters. All of it must be allocated.
inline Snapshot raw_snapshot(const dsopt_optimizer *opt, const std::vector<Array> &weights) {
    Snapshot all;
    for (size_t i = 0; i < weights.size(); ++i) all["param " + std::to_string(i)] = weights[i].text();
    for (const dsopt_state_info &info : state_of(opt))
        all[key_of(info)] = device_text(info.tensor.data, size_t(info.tensor.numel) * size_of(info.tensor.dtype));
    return all;
}

/// An optimizer that steps by dsopt_optimizer_step or by dsopt_optimizer_apply, with one interface for tests.
class Stepper {
public:
    /// `pure`: step() calls dsopt_optimizer_apply. `passed`: each call passes the parameters' memory.
    Stepper(const Context &ctx, const OptimizerSettings &settings, bool pure, bool passed = false,
            const CommId *id = nullptr, int rank = 0) :
        weights_(weights_of(settings)),
        passed_(passed) {
        if (settings.scaled) scaler = make_scaler(ctx, 64, 2);
        if (settings.ranks > 1) comm_ = local_comm(ctx, *id, rank, settings.ranks);
        handle = make_optimizer(ctx, settings, weights_, !pure && !passed, scaler.get(), comm_.get());
        if (!pure) return;
        caller_memory = std::make_unique<CallerMemory>(opt(), weights_);
        must(caller_memory->init());
    }
    dsopt_optimizer *opt() const { return handle.get(); }
    dsopt_status step(const std::vector<Array> &grads, const std::function<void(dsopt_step &)> &change = {}) {
        if (caller_memory) return caller_memory->apply(grads, change);
        const std::vector<dsopt_tensor> list = list_of(grads), params = list_of(weights_);
        DSOPT_NEW(dsopt_step, step);
        step.grads = list.data();
        step.count = int64_t(list.size());
        if (passed_) step.params = params.data();
        if (change) change(step);
        return dsopt_optimizer_step(opt(), &step);
    }
    Snapshot snapshot() const { return caller_memory ? caller_memory->snapshot() : raw_snapshot(opt(), weights_); }
    /// Makes the engine allocate its own state, with the values before the first step.
    void allocate() const {
        const int64_t last = int64_t(state_of(opt()).size()) - 1;
        std::vector<int32_t> steps(weights_.size());
        must(dsopt_optimizer_export(opt(), last, steps.data(), steps.size() * 4));
    }

    Scaler scaler;
    Optimizer handle;
    std::unique_ptr<CallerMemory> caller_memory;

private:
    Comm comm_;
    std::vector<Array> weights_;
    bool passed_;
};

/// Runs body(rank, context, two ids) on one thread per rank.
inline void with_settings(const OptimizerSettings &settings,
                          const std::function<void(int, const Context &, const CommId *)> &body) {
    if (settings.ranks == 1) return body(0, make_context(1), nullptr);
    const CommId ids[2] = {new_id(), new_id()};
    run_ranks(settings.ranks, [&](int rank) { body(rank, make_context(1), ids); });
}

} // namespace test
