// SPDX-License-Identifier: Apache-2.0
// State tensors: what there can be, one of them, and all those of an optimizer.
#pragma once
#include "base/dtype.h"
#include "base/range.h"
#include "device/context.h"
#include "rules/rule.h"
#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

namespace dsopt {

enum class StateKind : uint8_t {
    // of a parameter
    master,
    first_moment, // and those after it: moment_kind(). They have the names that the rule gives them.
    last_moment = first_moment + kMoments - 1,
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

constexpr StateKind moment_kind(int k) { return StateKind(int(StateKind::first_moment) + k); }

/// What becomes of a tensor of the whole optimizer when parameters are added.
enum class Growth : uint8_t {
    reset,    // it is set back
    carried,  // it keeps its contents
    per_param // it has one element per parameter, and keeps those that are there
};

/// What a kind of state tensor is, beside what steps do with it.
struct StateRecord {
    const char *name;  // in dsopt_state_info and in checkpoints; of moments see StateEntry::name
    int32_t reset = 0; // DSOPT_RESET_..., which set it back
    Growth growth = Growth::reset;
    int32_t dtype = DSOPT_DTYPE_F32; // of moments see Registry::add_param_state()
    int32_t flags = 0;               // DSOPT_STATE_...
};
constexpr StateRecord record_of(StateKind kind) {
    constexpr int32_t moments = DSOPT_RESET_MOMENTS, counters = DSOPT_RESET_COUNTERS, errors = DSOPT_RESET_ERRORS;
    constexpr int32_t f32 = DSOPT_DTYPE_F32, i32 = DSOPT_DTYPE_I32, local = DSOPT_STATE_RANK_LOCAL;
    if (kind > StateKind::first_moment && kind < StateKind::last_moment) kind = StateKind::first_moment;
    switch (kind) {
    case StateKind::master: return {"master", DSOPT_RESET_MASTERS, Growth::reset, f32, DSOPT_STATE_FROM_PARAM};
    case StateKind::first_moment:
    case StateKind::last_moment: return {"moment", moments};
    case StateKind::grad_accum: return {"grad_accum", DSOPT_RESET_GRADS};
    case StateKind::anchor: return {"anchor", moments, Growth::reset, f32, local};
    case StateKind::momentum_accumulator: return {"momentum_accumulator", moments, Growth::reset, f32, local};
    case StateKind::exp_avg_sq_fresh: return {"exp_avg_sq_fresh", moments};
    case StateKind::mask: return {"mask"}; // the caller's
    case StateKind::worker_error: return {"worker_error", errors, Growth::reset, f32, local};
    case StateKind::server_error: return {"server_error", errors, Growth::reset, f32, local};
    case StateKind::active: return {"active", moments | counters, Growth::carried, i32}; // whose variance is not 0
    case StateKind::exp_avg_bits: return {"exp_avg_bits", counters, Growth::reset, i32};
    case StateKind::schedule: return {"schedule", counters, Growth::carried, i32};
    case StateKind::lr_sum: return {"lr_sum", counters, Growth::carried, i32};
    case StateKind::trust_average: return {"trust_average", counters, Growth::per_param};
    case StateKind::trust_factor: return {"trust_factor", counters, Growth::per_param};
    case StateKind::trust_scaling: return {"trust_scaling", counters, Growth::per_param};
    case StateKind::trust_weight: return {"trust_weight", counters, Growth::per_param};
    case StateKind::exp_avg_pad: return {"exp_avg_pad", counters};
    case StateKind::loss_scale: return {"loss_scale"}; // the scaler is its own
    case StateKind::scaler: return {"scaler", 0, Growth::reset, i32};
    case StateKind::trust_ratio: return {"trust_ratio", counters, Growth::per_param};
    case StateKind::step: return {"step", counters, Growth::per_param, i32};
    }
    return {""};
}

/// One state tensor: the range of its parameter that it covers. `data` is NULL until allocated or bound.
struct StateEntry : Range {
    StateKind kind;
    int64_t param; // -1: of the whole optimizer
    int32_t dtype;
    int32_t flags;
    void *data = nullptr;
    const MomentInfo *moment = nullptr; // of its rule, if it is one
    int64_t generation = 0;             // of `data`, as in dsopt_state_info
    const char *name() const { return moment != nullptr ? moment->name : record_of(kind).name; }
    size_t bytes() const { return size_t(numel) * dtype_size(dtype); }
    dsopt_tensor tensor() const { return {data, numel, dtype, 0}; }
    bool is_error() const { return kind == StateKind::worker_error || kind == StateKind::server_error; }
    bool of_scaler() const { return kind == StateKind::loss_scale || kind == StateKind::scaler; }
    bool per_param() const { return record_of(kind).growth == Growth::per_param; }
    /// exp_avg_bits is not saved: exp_avg is, decoded first.
    bool saved() const { return kind != StateKind::exp_avg_bits; }
};

/// The engine's memory for a tensor of the whole optimizer, with room for parameters to come.
struct OwnBlock {
    void *data = nullptr;
    size_t capacity = 0;
    int64_t generation = 0;     // of the tensor while it is here; 0: it is elsewhere
    std::optional<size_t> kept; // bytes of contents that go on in the tensor which takes its place
    /// Bytes of another block, for a tensor that has outgrown this one: geometric, so that all of them together take
    /// memory in proportion to the last one.
    size_t grown(size_t bytes) const { return std::max(bytes, capacity + capacity / 2); }
};

/// All state tensors of an optimizer: those of its parameters, then those of the whole. They are found by parameter and
/// kind. What the engine owns of their memory is here, too: none is freed, callers have pointers.
class StateTable {
public:
    static constexpr int64_t kOptimizer = -1; // in place of a parameter

    /// Tensors of a parameter follow one another, and those of the optimizer follow all parameters'.
    void add(const StateEntry &entry) {
        const auto owner = size_t(entry.param + 1);
        if (owner >= places_.size()) places_.resize(owner + 1);
        list_.push_back(entry.tensor());
        entries_.push_back(entry);
        missing_ += entry.data == nullptr;
        places_[owner][size_t(entry.kind)] = int32_t(entries_.size());
        if (owner == 0) own_numel_[size_t(entry.kind)] = entry.numel;
    }
    /// As its record has it. Memory that it has from the start is never replaced by the engine.
    void add(StateKind kind, int64_t param, int64_t numel, void *data = nullptr) {
        const StateRecord record = record_of(kind);
        add({whole_range(numel), kind, param, record.dtype, record.flags, data, nullptr, data != nullptr});
    }
    /// Memory of the i-th tensor, which it did not have before.
    void place(size_t i, void *data) { place(i, data, ++generations_); }
    /// The same in its block. Where it has been there all the time, its generation stays.
    void place_in_block(size_t i) {
        OwnBlock &at = block(entries_[i].kind);
        if (at.generation == 0) at.generation = ++generations_;
        place(i, at.data, at.generation);
    }
    OwnBlock &block(StateKind kind) { return blocks_[size_t(kind)]; }
    const OwnBlock &block(StateKind kind) const { return blocks_[size_t(kind)]; }
    /// Memory for tensors to be placed in. After reserve_arena() it does not fail.
    void reserve_arena() { arenas_.reserve(arenas_.size() + 1); }
    char *add_arena(Memory arena) {
        arenas_.push_back(std::move(arena));
        return static_cast<char *>(arenas_.back().data());
    }
    /// Those of the whole optimizer, which are the last ones.
    std::vector<StateEntry> of_optimizer() const {
        auto first = entries_.end();
        while (first != entries_.begin() && (first - 1)->param < 0) --first;
        return {first, entries_.end()};
    }
    /// Leaves the tensors of the first `params` parameters and no others.
    void truncate(int64_t params) noexcept {
        while (!entries_.empty() && (entries_.back().param < 0 || entries_.back().param >= params)) {
            missing_ -= entries_.back().data == nullptr;
            entries_.pop_back();
        }
        list_.resize(entries_.size()); // one more where add() failed
        if (places_.size() > size_t(params + 1)) places_.resize(size_t(params + 1));
        places_[0] = {};
    }

    /// Returns the tensor's index in lists of all state tensors; -1: there is none.
    int64_t index_of(StateKind kind, int64_t param = kOptimizer) const {
        const auto owner = size_t(param + 1);
        return owner < places_.size() ? places_[owner][size_t(kind)] - 1 : -1;
    }
    const StateEntry *find(StateKind kind, int64_t param = kOptimizer) const {
        const int64_t at = index_of(kind, param);
        return at >= 0 ? &entries_[size_t(at)] : nullptr;
    }
    /// Returns the tensor in such a list.
    const dsopt_tensor *find(const dsopt_tensor *list, StateKind kind, int64_t param = kOptimizer) const {
        const int64_t at = index_of(kind, param);
        return at >= 0 ? list + at : nullptr;
    }
    /// Returns the only dimension of a tensor of the whole optimizer. The pointer stays valid when entries move, as
    /// dsopt_state_info.dims promises.
    const int64_t *own_dims(StateKind kind) const { return &own_numel_[size_t(kind)]; }
    /// Its memory in such a list; NULL: there is no such tensor.
    template <class T> T *data(const dsopt_tensor *list, StateKind kind, int64_t param = kOptimizer) const {
        const dsopt_tensor *const tensor = find(list, kind, param);
        return tensor != nullptr ? static_cast<T *>(tensor->data) : nullptr;
    }
    /// True if the tensor of the whole optimizer in such a list is in the table's own memory.
    bool names_own(const dsopt_tensor *list, StateKind kind) const {
        const int64_t at = index_of(kind);
        return at >= 0 && list[at].data == entries_[size_t(at)].data;
    }
    const std::vector<dsopt_tensor> &list() const { return list_; }
    /// Every tensor has memory, those of the whole optimizer included.
    bool is_complete() const { return missing_ == 0 && index_of(StateKind::step) >= 0; }

    size_t size() const { return entries_.size(); }
    bool empty() const { return entries_.empty(); }
    const StateEntry &operator[](size_t i) const { return entries_[i]; }
    auto begin() const { return entries_.begin(); }
    auto end() const { return entries_.end(); }

private:
    static constexpr size_t kKinds = size_t(StateKind::step) + 1;
    using Places = std::array<int32_t, kKinds>; // one more than the index; 0: there is none

    void place(size_t i, void *data, int64_t generation) {
        missing_ += int64_t(data == nullptr) - int64_t(entries_[i].data == nullptr);
        entries_[i].data = list_[i].data = data;
        entries_[i].generation = generation;
    }

    std::vector<StateEntry> entries_;
    std::vector<dsopt_tensor> list_;                      // the same as a list, such as calls bring
    std::vector<Places> places_ = std::vector<Places>(1); // of the optimizer, then of each parameter
    std::array<int64_t, kKinds> own_numel_{};
    std::array<OwnBlock, kKinds> blocks_;
    std::vector<Memory> arenas_;
    int64_t missing_ = 0;     // tensors without memory
    int64_t generations_ = 0; // given to memory so far
};

} // namespace dsopt
