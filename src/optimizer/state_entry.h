// SPDX-License-Identifier: Apache-2.0
// State tensors: what there can be, and one of them.
#pragma once
#include "base/dtype.h"
#include "dsopt.h"
#include "rules/rule.h"
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

namespace dsopt {

enum class StateKind : uint8_t {
    // of a parameter
    master,
    first_moment, // these two have the names that the rule gives them
    second_moment,
    grad_accum,
    anchor,
    momentum_accumulator,
    exp_avg_sq_fresh,
    mask,
    // of the whole optimizer
    worker_error,
    server_error,
    active,
    exp_avg_bits,
    schedule,
    lr_sum,
    trust_average,
    trust_factor,
    trust_scaling,
    trust_weight,
    exp_avg_pad,
    loss_scale,
    scaler,
    trust_ratio,
    step
};

constexpr StateKind kLastOfParam = StateKind::mask;
constexpr StateKind kMomentKinds[] = {StateKind::first_moment, StateKind::second_moment};
static_assert(std::size(kMomentKinds) == size_t(kMoments));

/// As in dsopt_state_info and in checkpoints; of moments see StateEntry::name.
constexpr const char *name_of(StateKind kind) {
    switch (kind) {
    case StateKind::master: return "master";
    case StateKind::first_moment:
    case StateKind::second_moment: return "moment";
    case StateKind::grad_accum: return "grad_accum";
    case StateKind::anchor: return "anchor";
    case StateKind::momentum_accumulator: return "momentum_accumulator";
    case StateKind::exp_avg_sq_fresh: return "exp_avg_sq_fresh";
    case StateKind::mask: return "mask";
    case StateKind::worker_error: return "worker_error";
    case StateKind::server_error: return "server_error";
    case StateKind::active: return "active";
    case StateKind::exp_avg_bits: return "exp_avg_bits";
    case StateKind::schedule: return "schedule";
    case StateKind::lr_sum: return "lr_sum";
    case StateKind::trust_average: return "trust_average";
    case StateKind::trust_factor: return "trust_factor";
    case StateKind::trust_scaling: return "trust_scaling";
    case StateKind::trust_weight: return "trust_weight";
    case StateKind::exp_avg_pad: return "exp_avg_pad";
    case StateKind::loss_scale: return "loss_scale";
    case StateKind::scaler: return "scaler";
    case StateKind::trust_ratio: return "trust_ratio";
    case StateKind::step: return "step";
    }
    return "";
}

/// One state tensor. `data` is NULL until allocated or bound.
struct StateEntry {
    StateKind kind;
    int64_t param; // -1: of the whole optimizer
    int32_t dtype;
    int32_t flags;
    int64_t numel;
    void *data = nullptr;
    const MomentInfo *moment = nullptr; // of its rule, if it is one
    const char *name() const { return moment != nullptr ? moment->name : name_of(kind); }
    size_t bytes() const { return size_t(numel) * dtype_size(dtype); }
    dsopt_tensor tensor() const { return {data, numel, dtype, 0}; }
    bool is_error() const { return kind == StateKind::worker_error || kind == StateKind::server_error; }
    bool of_scaler() const { return kind == StateKind::loss_scale || kind == StateKind::scaler; }
    bool is_trust() const { // of 1-bit LAMB
        return kind == StateKind::trust_average || kind == StateKind::trust_factor ||
               kind == StateKind::trust_scaling || kind == StateKind::trust_weight;
    }
    /// One element a parameter.
    bool per_param() const { return is_trust() || kind == StateKind::trust_ratio || kind == StateKind::step; }
    /// Keeps its contents when groups are added; so does what has one element a parameter.
    bool carried() const {
        return per_param() || kind == StateKind::schedule || kind == StateKind::lr_sum || kind == StateKind::active;
    }
    /// exp_avg_bits is not saved: exp_avg is, decoded first.
    bool saved() const { return kind != StateKind::exp_avg_bits; }
};

/// Where the state tensors of one parameter stand in the list of all, by kind.
class StateSlots {
public:
    StateSlots() { at_.fill(-1); }
    void set(StateKind kind, int64_t index) { at_[size_t(kind)] = index; }
    /// -1: the parameter has none.
    int64_t operator[](StateKind kind) const { return at_[size_t(kind)]; }

private:
    std::array<int64_t, size_t(kLastOfParam) + 1> at_;
};

} // namespace dsopt
