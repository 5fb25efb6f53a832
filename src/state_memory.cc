// SPDX-License-Identifier: Apache-2.0
// Memory of state tensors and parameters: allocated, bound, checked, set back to its starting values.
#include "optimizer.h"
#include <algorithm>

namespace dsopt {
namespace {

long long ll(int64_t value) { return static_cast<long long>(value); }

} // namespace

const char *Optimizer::owner_of(const StateEntry &entry) const {
    return entry.param < 0 ? "the optimizer" : params_[size_t(entry.param)].name.c_str();
}

const void *Optimizer::memory_of(const StateEntry &entry) const {
    return entry.param < 0 ? nullptr : params_[size_t(entry.param)].data;
}

void Optimizer::initialize(const StateEntry &entry, const void *source, void *data, void *stream) const {
    const Backend &backend = context_->backend();
    if (!(entry.flags & DSOPT_STATE_FROM_PARAM)) {
        backend.clear(data, entry.bytes(), stream);
        return;
    }
    const Param &param = params_[size_t(entry.param)];
    if (entry.numel == 0) return;
    if (source == nullptr)
        throw Error(DSOPT_ERR_STATE, "the master of '%s' starts as a copy of the parameter, which has no memory yet",
                    param.name.c_str());
    const dsopt_tensor from{const_cast<void *>(source), entry.numel, param.dtype, 0},
        to{data, entry.numel, DSOPT_DTYPE_F32, 0};
    backend.axpby({}, &from, 0, &to, 1, context_->parallel(), stream);
}

void Optimizer::ensure_state(const dsopt_tensor *params, void *stream, bool masters_follow) {
    if (!state_.empty() && state_list_.size() == state_.size())
        return; // made when everything had memory, dropped on any change
    constexpr size_t line = 64;
    const auto rounded = [](size_t bytes) { return (bytes + line - 1) / line * line; };
    const auto is_flat = [&](const StateEntry &entry) {
        return desc_.masters == DSOPT_MASTERS_FLAT && (entry.flags & DSOPT_STATE_FROM_PARAM);
    };
    // Flat masters first, those of a group one behind the other; then the rest, each on its own cache line.
    std::vector<size_t> place(state_.size());
    size_t bytes = 0;
    bool missing = false;
    int32_t group = -1;
    for (size_t i = 0; i < state_.size(); ++i) {
        if (state_[i].data != nullptr || !is_flat(state_[i])) continue;
        const int32_t owner = params_[size_t(state_[i].param)].group;
        if (owner != group) bytes = rounded(bytes);
        group = owner;
        place[i] = bytes;
        bytes += state_[i].bytes();
        missing = true;
    }
    for (size_t i = 0; i < state_.size(); ++i) {
        if (state_[i].data != nullptr || is_flat(state_[i])) continue;
        place[i] = bytes = rounded(bytes);
        bytes += state_[i].bytes();
        missing = true;
    }
    if (missing) {
        state_changed();
        Memory arena(context_, std::max(rounded(bytes), line), stream);
        std::vector<StateEntry> allocated = state_;
        bool counters = false;
        for (size_t i = 0; i < allocated.size(); ++i) {
            StateEntry &entry = allocated[i];
            if (entry.data != nullptr) continue;
            entry.data = static_cast<char *>(arena.data()) + place[i];
            const bool own = entry.param < 0 || params == nullptr;
            if (!masters_follow || !(entry.flags & DSOPT_STATE_FROM_PARAM))
                initialize(entry, own ? memory_of(entry) : params[entry.param].data, entry.data, stream);
            counters = counters || entry.per_param();
        }
        std::vector<dsopt_tensor> list = list_of(allocated);
        const bool initial_step = counters && wrapper() != Wrapper::none && !masters_follow;
        if (initial_step) ensure_workspace(stream);
        memory_.reserve(memory_.size() + 1);
        // From here on nothing can fail for want of memory: either all of it was there or nothing has changed. But the
        // caller's pool can.
        memory_.push_back(std::move(arena));
        state_.swap(allocated);
        state_list_.swap(list);
        if (initial_step) {
            try {
                take_initial_step(stream);
            } catch (...) { // by the next use it is still to be taken
                state_.swap(allocated);
                state_list_.clear();
                memory_.pop_back();
                throw;
            }
        }
    } else
        state_list_ = list_of(state_);
}

std::vector<dsopt_tensor> Optimizer::list_of(const std::vector<StateEntry> &state) {
    std::vector<dsopt_tensor> list;
    list.reserve(state.size());
    for (const StateEntry &entry : state) list.push_back(entry.tensor());
    return list;
}

void Optimizer::check_state_list(const dsopt_tensor *list, int64_t count, bool required) const {
    if (list == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "the state list is NULL");
    if (count != int64_t(state_.size()))
        throw Error(DSOPT_ERR_SHAPE, "the state list has %lld entries, this optimizer has %zu", ll(count),
                    state_.size());
    for (size_t i = 0; i < state_.size(); ++i) {
        const StateEntry &entry = state_[i];
        const Label label{entry.name(), owner_of(entry)};
        check_tensor(list[i], label);
        if (list[i].dtype != entry.dtype)
            throw Error(DSOPT_ERR_DTYPE, "%s '%s' has dtype %d, must be %d", label.role, label.name, list[i].dtype,
                        entry.dtype);
        check_numel(list[i], entry.numel, label);
        if (required && list[i].data == nullptr && entry.numel != 0)
            throw Error(DSOPT_ERR_ARGUMENT, "%s '%s' has no memory", label.role, label.name);
    }
}

void Optimizer::bind_params(const dsopt_tensor *list, int64_t count) {
    if (count != int64_t(params_.size()))
        throw Error(DSOPT_ERR_SHAPE, "the list has %lld parameters, registered are %zu", ll(count), params_.size());
    if (count > 0 && list == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "the list of parameters is NULL");
    std::vector<Interval> intervals;
    for (size_t i = 0; i < params_.size(); ++i) {
        const Label label{"parameter", params_[i].name.c_str()};
        check_float_tensor(list[i], label);
        if (list[i].dtype != params_[i].dtype)
            throw Error(DSOPT_ERR_DTYPE, "parameter '%s' has dtype %d, registered is %d", label.name, list[i].dtype,
                        params_[i].dtype);
        check_numel(list[i], params_[i].numel, label);
        intervals.push_back(interval_of(list[i], label));
    }
    for (const StateEntry &entry : state_)
        if (entry.data != nullptr) intervals.push_back(interval_of(entry.tensor(), {entry.name(), owner_of(entry)}));
    check_overlap(intervals);
    for (size_t i = 0; i < params_.size(); ++i) params_[i].data = list[i].data;
}

void Optimizer::bind_state(const dsopt_tensor *list, int64_t count) {
    check_state_list(list, count, false);
    settle_momentum();
    std::vector<Interval> intervals;
    for (const Param &param : params_)
        intervals.push_back(interval_of({param.data, param.numel, param.dtype, 0}, {"parameter", param.name.c_str()}));
    std::vector<StateEntry> bound = state_;
    for (size_t i = 0; i < bound.size(); ++i) {
        if (list[i].data != nullptr) bound[i].data = list[i].data;
        if (bound[i].data == nullptr) continue;
        intervals.push_back(interval_of(bound[i].tensor(), {bound[i].name(), owner_of(bound[i])}));
    }
    check_overlap(intervals);
    state_.swap(bound);
    state_list_.clear();
    state_changed();
}

void Optimizer::reset(uint32_t what, void *stream) {
    constexpr uint32_t known =
        DSOPT_RESET_MASTERS | DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS | DSOPT_RESET_GRADS | DSOPT_RESET_ERRORS;
    if (what & ~known) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_reset: unknown parts 0x%x", what);
    const auto part_of = [](const StateEntry &entry) -> uint32_t {
        if (entry.flags & DSOPT_STATE_FROM_PARAM) return DSOPT_RESET_MASTERS;
        if (entry.kind == StateKind::grad_accum) return DSOPT_RESET_GRADS;
        if (entry.kind == StateKind::mask) return 0; // the caller's
        if (entry.param >= 0) return DSOPT_RESET_MOMENTS;
        if (entry.kind == StateKind::active) return DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS; // no variance
        if (entry.is_error()) return DSOPT_RESET_ERRORS;
        return entry.of_scaler() ? 0 : DSOPT_RESET_COUNTERS; // the scaler is its own
    };
    if (what & DSOPT_RESET_MASTERS)
        for (const Param &param : params_)
            if (param.has_master && param.numel != 0 && param.data == nullptr)
                throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to make its master from",
                            param.name.c_str());
    settle_momentum(); // which counters tell
    for (const StateEntry &entry : state_)
        if (entry.data != nullptr && (what & part_of(entry))) initialize(entry, memory_of(entry), entry.data, stream);
    state_changed();
    if (what & DSOPT_RESET_COUNTERS) {
        calls_ = 0;
        change_outcome([](Outcome &outcome) { outcome.total_skipped = outcome.skipped_in_row = 0; });
    }
    if (what & DSOPT_RESET_GRADS)
        for (Param &param : params_) param.accumulated = false;
}

} // namespace dsopt
