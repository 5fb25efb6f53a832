// SPDX-License-Identifier: Apache-2.0
// Memory of state tensors and parameters: allocated, bound, checked, set back to its starting values.
#include "base/sizes.h"
#include "optimizer/optimizer.h"
#include <algorithm>

namespace dsopt {
namespace {

/// Of the same entries. They stay where they are: callers hold dsopt_state_info.dims.
void swap_memory(StateTable &a, StateTable &b) {
    for (size_t i = 0; i < a.size(); ++i) std::swap(a[i].data, b[i].data);
}

} // namespace

const char *Optimizer::owner_of(const StateEntry &entry) const {
    return entry.param < 0 ? "the optimizer" : params_[size_t(entry.param)].name.c_str();
}

const void *Optimizer::memory_of(const StateEntry &entry) const {
    return entry.param < 0 ? nullptr : params_[size_t(entry.param)].data;
}

double Optimizer::start_of(const StateEntry &entry) const {
    if (entry.moment == nullptr || entry.moment->start == nullptr) return 0;
    return groups_[size_t(params_[size_t(entry.param)].group)].*entry.moment->start;
}

/// By copies, each twice as long as the last one.
void Optimizer::fill(const dsopt_tensor &tensor, float value, void *stream) const {
    const Device &device = context_->device();
    const size_t total = size_t(tensor.numel) * sizeof value;
    float block[256];
    for (float &element : block) element = value;
    if (total == 0) return;
    if (!device.is_host()) (void)device.finished(stream); // refuses a stream that is being captured
    size_t done = std::min(total, sizeof block);
    device.copy(tensor.data, block, done);
    for (; done < total; done += std::min(done, total - done))
        device.copy(static_cast<char *>(tensor.data) + done, tensor.data, std::min(done, total - done));
}

void Optimizer::initialize(const StateEntry &entry, const void *source, void *data, void *stream) const {
    const Device &device = context_->device();
    if (!(entry.flags & DSOPT_STATE_FROM_PARAM)) {
        const double start = start_of(entry);
        device.clear(data, entry.bytes(), stream);
        if (start != 0) fill({data, entry.numel, entry.dtype, 0}, float(start), stream);
        return;
    }
    const Param &param = params_[size_t(entry.param)];
    if (entry.numel == 0) return;
    if (source == nullptr)
        throw Error(DSOPT_ERR_STATE, "the master of '%s' starts as a copy of the parameter, which has no memory yet",
                    param.name.c_str());
    const dsopt_tensor from{const_cast<void *>(source), entry.numel, param.dtype, 0},
        to{data, entry.numel, DSOPT_DTYPE_F32, 0};
    device.loops().axpby({}, &from, 0, &to, 1, context_->parallel(), stream);
}

void Optimizer::ensure_state(const dsopt_tensor *params, void *stream, bool masters_follow) {
    if (!state_.empty() && state_list_.size() == state_.size())
        return; // made when everything had memory, dropped on any change
    const auto is_flat = [&](const StateEntry &entry) {
        return desc_.masters == DSOPT_MASTERS_FLAT && (entry.flags & DSOPT_STATE_FROM_PARAM);
    };
    // Flat masters first, those of a group one behind the other; then the rest, each on its own cache line.
    std::vector<size_t> place(state_.size()), flat;
    const auto group_of = [&](size_t i) { return params_[size_t(state_[i].param)].group; };
    for (size_t i = 0; i < state_.size(); ++i)
        if (state_[i].data == nullptr && is_flat(state_[i])) flat.push_back(i);
    std::stable_sort(flat.begin(), flat.end(), [&](size_t a, size_t b) { return group_of(a) < group_of(b); });
    size_t bytes = 0;
    bool missing = !flat.empty();
    for (size_t k = 0; k < flat.size(); ++k) {
        if (k != 0 && group_of(flat[k]) != group_of(flat[k - 1])) bytes = round_up(bytes);
        place[flat[k]] = bytes;
        bytes += state_[flat[k]].bytes();
    }
    for (size_t i = 0; i < state_.size(); ++i) {
        if (state_[i].data != nullptr || is_flat(state_[i])) continue;
        place[i] = bytes = round_up(bytes);
        bytes += state_[i].bytes();
        missing = true;
    }
    if (missing) {
        state_changed();
        Memory arena(context_, std::max(round_up(bytes), kLine), stream);
        StateTable allocated = state_;
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
        swap_memory(state_, allocated);
        state_list_.swap(list);
        if (initial_step) {
            try {
                take_initial_step(params, state_list_.data(), workspace_.data(), stream);
            } catch (...) { // by the next use it is still to be taken
                swap_memory(state_, allocated);
                state_list_.clear();
                memory_.pop_back();
                throw;
            }
        }
    } else
        state_list_ = list_of(state_);
}

void Optimizer::init_state(const dsopt_tensor *params, const dsopt_tensor *state, int64_t count, void *stream) const {
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    check_state_list(state, count, true);
    for (size_t i = 0; params != nullptr && i < params_.size(); ++i) check_param(params[i], params_[i]);
    const bool initial_step = wrapper() != Wrapper::none;
    for (size_t i = 0; i < params_.size(); ++i) // wrappers move parameters that are their own masters
        if (params_[i].numel != 0 && (params_[i].has_master || initial_step) &&
            (params == nullptr || params[i].data == nullptr))
            throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has no memory: its state starts from it",
                        params_[i].name.c_str());
    Memory workspace;
    if (initial_step) {
        (void)context_->device().finished(stream); // refuses a stream that is being captured
        workspace = Memory(context_, workspace_bytes(), stream);
    }
    for (size_t i = 0; i < state_.size(); ++i) {
        const StateEntry &entry = state_[i];
        if (entry.kind == StateKind::scaler) // and the loss scale, which stands before it
            with_.scaler->init_state(state + i - 1, 2, stream);
        else if (entry.kind != StateKind::loss_scale)
            initialize(entry, entry.param >= 0 && params != nullptr ? params[entry.param].data : nullptr, state[i].data,
                       stream);
    }
    const dsopt_tensor *const schedule = state_.find(state, StateKind::schedule);
    if (schedule != nullptr && schedule->data == state_[size_t(schedule - state)].data) state_changed();
    if (initial_step) take_initial_step(params, state, workspace.data(), stream);
}

void Optimizer::settle_momentum() {
    if (onebit_) onebit_->settle_momentum(state_, params_);
}
void Optimizer::forget_like_original() {
    if (onebit_) onebit_->forget_like_original(state_);
}
void Optimizer::export_entry(const StateEntry &entry, void *host) const {
    if (entry.numel == 0) return; // `host` may be NULL
    if (entry.is_error()) return onebit_->export_errors(state_, entry, static_cast<float *>(host));
    context_->device().copy(host, entry.data, entry.bytes());
}

const int64_t *Optimizer::dims_of(const StateEntry &entry, int32_t &count) const {
    count = entry.param >= 0 ? int32_t(params_[size_t(entry.param)].dims.size()) : 1;
    return entry.param >= 0 ? params_[size_t(entry.param)].dims.data() : &entry.numel;
}

std::vector<dsopt_tensor> Optimizer::list_of(const StateTable &state) {
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
    for (size_t i = 0; i < state_.size(); ++i) check_state_tensor(list[i], state_[i], required);
}

void Optimizer::check_state_tensor(const dsopt_tensor &tensor, const StateEntry &entry, bool required) const {
    const Label label{entry.name(), owner_of(entry)};
    check_tensor(tensor, label);
    check_dtype(tensor, entry.dtype, label);
    check_numel(tensor, entry.numel, label);
    if (required && tensor.data == nullptr && entry.numel != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "%s '%s' has no memory", label.role, label.name);
}

void Optimizer::check_param(const dsopt_tensor &given, const Param &param) const {
    const Label label{"parameter", param.name.c_str()};
    check_float_tensor(given, label);
    check_dtype(given, param.dtype, label);
    check_numel(given, param.numel, label);
}

void Optimizer::bind_params(const dsopt_tensor *list, int64_t count) {
    if (count != int64_t(params_.size()))
        throw Error(DSOPT_ERR_SHAPE, "the list has %lld parameters, registered are %zu", ll(count), params_.size());
    if (count > 0 && list == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "the list of parameters is NULL");
    std::vector<Interval> intervals;
    for (size_t i = 0; i < params_.size(); ++i) {
        check_param(list[i], params_[i]);
        intervals.push_back(interval_of(list[i], {"parameter", params_[i].name.c_str()}));
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
    StateTable bound = state_;
    for (size_t i = 0; i < bound.size(); ++i) {
        if (list[i].data != nullptr) bound[i].data = list[i].data;
        if (bound[i].data == nullptr) continue;
        intervals.push_back(interval_of(bound[i].tensor(), {bound[i].name(), owner_of(bound[i])}));
    }
    check_overlap(intervals);
    swap_memory(state_, bound);
    state_list_.clear();
    state_changed();
}

void Optimizer::reset(int32_t what, void *stream) {
    constexpr int32_t known =
        DSOPT_RESET_MASTERS | DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS | DSOPT_RESET_GRADS | DSOPT_RESET_ERRORS;
    if (what & ~known) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_reset: unknown parts 0x%x", what);
    const auto part_of = [](const StateEntry &entry) -> int32_t {
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
