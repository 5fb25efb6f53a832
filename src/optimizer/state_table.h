// SPDX-License-Identifier: Apache-2.0
// State tensors: their kinds, one state tensor, and the table of all state tensors of an optimizer.
#pragma once
#include "base/dtype.h"
#include "base/range.h"
#include "device/context.h"
#include "rules/formats.h"
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
    remainder,
    first_moment, // the first of kMoments kinds, see moment_kind(); their names are in the rule's record
    last_moment = first_moment + kMoments - 1,
    first_scale, // of the first moment; see scale_kind()
    last_scale = first_scale + kMoments - 1,
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
constexpr StateKind scale_kind(int k) { return StateKind(int(StateKind::first_scale) + k); }
/// Returns the kind of a moment's scales.
constexpr StateKind scale_of(StateKind moment) { return scale_kind(int(moment) - int(StateKind::first_moment)); }
/// True for a separate master, and for a remainder: files have the same tensor for both.
constexpr bool is_master(StateKind kind) { return kind == StateKind::master || kind == StateKind::remainder; }
constexpr bool is_scale(StateKind kind) { return kind >= StateKind::first_scale && kind <= StateKind::last_scale; }

/// What happens to a tensor of the whole optimizer when parameters are added.
enum class Growth : uint8_t {
    reset,    // it gets its starting values
    carried,  // it keeps its contents, and new elements are zeros
    per_param // it has one element per parameter, and keeps the existing elements
};

/// Properties of a kind of state tensor.
struct StateRecord {
    const char *name;  // in dsopt_state_info and in checkpoints; for moments and scales see StateEntry::name()
    int32_t reset = 0; // flags DSOPT_RESET_... that reset it
    Growth growth = Growth::reset;
    int32_t dtype = DSOPT_DTYPE_F32; // for moments see Registry::add_param_state()
    int32_t flags = 0;               // DSOPT_STATE_...
};
constexpr StateRecord record_of(StateKind kind) {
    constexpr int32_t moments = DSOPT_RESET_MOMENTS, counters = DSOPT_RESET_COUNTERS, errors = DSOPT_RESET_ERRORS;
    constexpr int32_t f32 = DSOPT_DTYPE_F32, i16 = DSOPT_DTYPE_I16, i32 = DSOPT_DTYPE_I32;
    constexpr int32_t local = DSOPT_STATE_RANK_LOCAL;
    if (kind > StateKind::first_moment && kind <= StateKind::last_scale) kind = StateKind::first_moment;
    switch (kind) {
    case StateKind::master: return {"master", DSOPT_RESET_MASTERS, Growth::reset, f32, DSOPT_STATE_FROM_PARAM};
    case StateKind::remainder: return {"remainder", DSOPT_RESET_MASTERS, Growth::reset, i16};
    case StateKind::first_moment:
    case StateKind::last_moment:
    case StateKind::first_scale:
    case StateKind::last_scale: return {"moment", moments};
    case StateKind::grad_accum: return {"grad_accum", DSOPT_RESET_GRADS};
    case StateKind::anchor: return {"anchor", moments, Growth::reset, f32, local};
    case StateKind::momentum_accumulator: return {"momentum_accumulator", moments, Growth::reset, f32, local};
    case StateKind::exp_avg_sq_fresh: return {"exp_avg_sq_fresh", moments};
    case StateKind::mask: return {"mask"}; // filled by the caller
    case StateKind::worker_error: return {"worker_error", errors, Growth::reset, f32, local};
    case StateKind::server_error: return {"server_error", errors, Growth::reset, f32, local};
    case StateKind::active: return {"active", moments | counters, Growth::carried, i32}; // bits: variance is not 0
    case StateKind::exp_avg_bits: return {"exp_avg_bits", counters, Growth::reset, i32};
    case StateKind::schedule: return {"schedule", counters, Growth::carried, i32};
    case StateKind::lr_sum: return {"lr_sum", counters, Growth::carried, i32};
    case StateKind::trust_average: return {"trust_average", counters, Growth::per_param};
    case StateKind::trust_factor: return {"trust_factor", counters, Growth::per_param};
    case StateKind::trust_scaling: return {"trust_scaling", counters, Growth::per_param};
    case StateKind::trust_weight: return {"trust_weight", counters, Growth::per_param};
    case StateKind::exp_avg_pad: return {"exp_avg_pad", counters};
    case StateKind::loss_scale: return {"loss_scale"}; // reset by the scaler only
    case StateKind::scaler: return {"scaler", 0, Growth::reset, i32};
    case StateKind::trust_ratio: return {"trust_ratio", counters, Growth::per_param};
    case StateKind::step: return {"step", counters, Growth::per_param, i32};
    }
    return {""};
}

/// One state tensor: the range of its parameter that it covers. `data` is NULL until allocated or bound.
struct StateEntry : Range {
    StateKind kind;
    int64_t param; // -1: the whole optimizer's
    int32_t dtype;
    int32_t flags;
    void *data = nullptr;
    const MomentInfo *moment = nullptr; // its record in the rule, if it is a moment or has the scales of a moment
    int64_t generation = 0;             // of `data`, as in dsopt_state_info
    const char *name() const {
        if (moment == nullptr) return record_of(kind).name;
        return is_scale(kind) ? moment->scale_name : moment->name;
    }
    /// Returns the number of the parameter's elements per element, as in dsopt_state_info.
    int32_t block() const { return param < 0 ? 0 : is_scale(kind) ? int32_t(kBlock) : 1; }
    size_t bytes() const { return size_t(numel) * dtype_size(dtype); }
    dsopt_tensor tensor() const { return {data, numel, dtype, 0}; }
    bool is_error() const { return kind == StateKind::worker_error || kind == StateKind::server_error; }
    bool of_scaler() const { return kind == StateKind::loss_scale || kind == StateKind::scaler; }
    bool per_param() const { return record_of(kind).growth == Growth::per_param; }
    /// False for exp_avg_bits, which is not saved: it is decoded to exp_avg first.
    bool saved() const { return kind != StateKind::exp_avg_bits; }
};

/// The engine's memory for a tensor of the whole optimizer, with room for parameters that are added later.
struct EngineBlock {
    void *data = nullptr;
    size_t capacity = 0;
    int64_t generation = 0;     // of the tensor while it is in this block; 0: it is elsewhere
    std::optional<size_t> kept; // bytes of kept contents, for the tensor that replaces this one
    /// Returns the capacity of the next block, for a tensor that does not fit into this one. Growth is geometric, so
    /// the total size of all blocks is proportional to that of the last one.
    size_t grown(size_t bytes) const { return std::max(bytes, capacity + capacity / 2); }
};

/// All state tensors of an optimizer: first those of its parameters, then those of the whole optimizer. They are found
/// by parameter and kind. The table also owns the engine's memory for them, and frees it only when the table is
/// destroyed, because callers have pointers to it.
class StateTable {
public:
    static constexpr int64_t kOptimizer = -1; // in place of a parameter's index

    /// Appends a tensor. The tensors of a parameter are contiguous; those of the whole optimizer come last.
    void add(const StateEntry &entry) {
        const auto owner = size_t(entry.param + 1);
        if (owner >= indices_.size()) indices_.resize(owner + 1);
        list_.push_back(entry.tensor());
        entries_.push_back(entry);
        missing_ += entry.data == nullptr;
        indices_[owner][size_t(entry.kind)] = int32_t(entries_.size());
        if (owner == 0) flat_numel_[size_t(entry.kind)] = entry.numel;
    }
    /// Appends a tensor with dtype and flags of its record. The engine never replaces the memory `data`.
    void add(StateKind kind, int64_t param, int64_t numel, void *data = nullptr) {
        const StateRecord record = record_of(kind);
        add({whole_range(numel), kind, param, record.dtype, record.flags, data, nullptr, data != nullptr});
    }
    /// Limits the i-th tensor, which has no memory yet, to a part of its parameter.
    void set_part(size_t i, const Range &part) {
        static_cast<Range &>(entries_[i]) = part;
        list_[i].numel = part.numel;
        entries_[i].flags |= DSOPT_STATE_SHARDED;
    }
    /// Sets the memory of the i-th tensor, which must be other memory than before.
    void set_memory(size_t i, void *data) { set_memory(i, data, ++generations_); }
    /// Sets the memory of the i-th tensor to its block. The generation stays if the tensor was in the block before.
    void set_memory_to_block(size_t i) {
        EngineBlock &engine_block = block(entries_[i].kind);
        if (engine_block.generation == 0) engine_block.generation = ++generations_;
        set_memory(i, engine_block.data, engine_block.generation);
    }
    EngineBlock &block(StateKind kind) { return blocks_[size_t(kind)]; }
    const EngineBlock &block(StateKind kind) const { return blocks_[size_t(kind)]; }
    /// Reserves an entry for add_arena(), which then does not throw. An arena is memory of one or several tensors.
    void reserve_arena() { arenas_.reserve(arenas_.size() + 1); }
    char *add_arena(Memory arena) {
        arenas_.push_back(std::move(arena));
        return static_cast<char *>(arenas_.back().data());
    }
    /// Returns the tensors of the whole optimizer, which are the last ones.
    std::vector<StateEntry> of_optimizer() const {
        auto first = entries_.end();
        while (first != entries_.begin() && (first - 1)->param < 0) --first;
        return {first, entries_.end()};
    }
    /// Removes all tensors except those of the first `params` parameters.
    void truncate(int64_t params) noexcept {
        while (!entries_.empty() && (entries_.back().param < 0 || entries_.back().param >= params)) {
            missing_ -= entries_.back().data == nullptr;
            entries_.pop_back();
        }
        list_.resize(entries_.size()); // it has one entry more if add() failed
        if (indices_.size() > size_t(params + 1)) indices_.resize(size_t(params + 1));
        indices_[0] = {};
    }

    /// Returns the tensor's index in lists of all state tensors; -1: there is none.
    int64_t index_of(StateKind kind, int64_t param = kOptimizer) const {
        const auto owner = size_t(param + 1);
        return owner < indices_.size() ? indices_[owner][size_t(kind)] - 1 : -1;
    }
    const StateEntry *find(StateKind kind, int64_t param = kOptimizer) const {
        const int64_t index = index_of(kind, param);
        return index >= 0 ? &entries_[size_t(index)] : nullptr;
    }
    /// Returns the tensor's entry in a list of all state tensors; NULL: there is none.
    const dsopt_tensor *find(const dsopt_tensor *list, StateKind kind, int64_t param = kOptimizer) const {
        const int64_t index = index_of(kind, param);
        return index >= 0 ? list + index : nullptr;
    }
    /// Returns the only dimension of a tensor of the whole optimizer. The pointer stays valid when entries move, as
    /// dsopt_state_info.dims promises.
    const int64_t *flat_dims(StateKind kind) const { return &flat_numel_[size_t(kind)]; }
    /// Returns the tensor's memory in a list of all state tensors; NULL: there is no such tensor.
    template <class T> T *data(const dsopt_tensor *list, StateKind kind, int64_t param = kOptimizer) const {
        const dsopt_tensor *const tensor = find(list, kind, param);
        return tensor != nullptr ? static_cast<T *>(tensor->data) : nullptr;
    }
    /// True if a list of all state tensors has the table's own memory for a tensor of the whole optimizer.
    bool uses_engine_memory(const dsopt_tensor *list, StateKind kind) const {
        const int64_t index = index_of(kind);
        return index >= 0 && list[index].data == entries_[size_t(index)].data;
    }
    const std::vector<dsopt_tensor> &list() const { return list_; }
    /// True if every tensor has memory, including those of the whole optimizer.
    bool is_complete() const { return missing_ == 0 && index_of(StateKind::step) >= 0; }

    size_t size() const { return entries_.size(); }
    bool empty() const { return entries_.empty(); }
    const StateEntry &operator[](size_t i) const { return entries_[i]; }
    auto begin() const { return entries_.begin(); }
    auto end() const { return entries_.end(); }

private:
    static constexpr size_t kKinds = size_t(StateKind::step) + 1;
    using Indices = std::array<int32_t, kKinds>; // one more than the index; 0: there is none

    void set_memory(size_t i, void *data, int64_t generation) {
        missing_ += int64_t(data == nullptr) - int64_t(entries_[i].data == nullptr);
        entries_[i].data = list_[i].data = data;
        entries_[i].generation = generation;
    }

    std::vector<StateEntry> entries_;
    std::vector<dsopt_tensor> list_;                         // the same tensors, as callers pass lists
    std::vector<Indices> indices_ = std::vector<Indices>(1); // of the optimizer, then of each parameter
    std::array<int64_t, kKinds> flat_numel_{};
    std::array<EngineBlock, kKinds> blocks_;
    std::vector<Memory> arenas_;
    int64_t missing_ = 0;     // number of tensors without memory
    int64_t generations_ = 0; // the last generation that was assigned
};

} // namespace dsopt
