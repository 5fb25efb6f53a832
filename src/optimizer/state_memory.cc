// SPDX-License-Identifier: Apache-2.0
// Memory of state tensors and parameters: allocated, bound, checked, set back to its starting values.
#include "base/sizes.h"
#include "base/struct_io.h"
#include "optimizer/contents.h"
#include <algorithm>

namespace dsopt {
namespace {

const char *owner_of(const Optimizer &optimizer, const StateEntry &entry) {
    return entry.param < 0 ? "the optimizer" : optimizer.params()[size_t(entry.param)].name.c_str();
}

/// By copies, each twice as long as the last one. The first one comes from the host's stack.
void fill(const Device &device, const dsopt_tensor &tensor, float value, void *stream) {
    const size_t total = size_t(tensor.numel) * sizeof value;
    float block[256];
    for (float &element : block) element = value;
    if (total == 0) return;
    if (!device.is_host()) (void)device.finished(stream); // refuses a stream that is being captured
    size_t done = std::min(total, sizeof block);
    device.enqueue_copy(tensor.data, block, done, stream);
    for (; done < total; done += std::min(done, total - done))
        device.enqueue_copy(static_cast<char *>(tensor.data) + done, tensor.data, std::min(done, total - done), stream);
}

} // namespace

void Optimizer::initialize(const StateEntry &entry, const dsopt_tensor *params, void *data, void *stream) const {
    const Device &device = context_->device();
    if (!(entry.flags & DSOPT_STATE_FROM_PARAM)) {
        device.clear(data, entry.bytes(), stream);
        if (entry.moment == nullptr || entry.moment->start == nullptr) return;
        const double start = groups_[size_t(params_[size_t(entry.param)].group)].*entry.moment->start;
        if (start != 0) fill(device, {data, entry.numel, entry.dtype, 0}, float(start), stream);
        return;
    }
    const Param &param = params_[size_t(entry.param)];
    if (entry.numel == 0) return;
    void *const source = params != nullptr ? params[entry.param].data : param.data;
    if (source == nullptr)
        throw Error(DSOPT_ERR_STATE, "the master of '%s' starts as a copy of the parameter, which has no memory yet",
                    param.name.c_str());
    const dsopt_tensor from{source, entry.numel, param.dtype, 0}, to{data, entry.numel, DSOPT_DTYPE_F32, 0};
    device.loops().axpby({}, &from, 0, &to, 1, context_->parallel(), stream);
}

void Optimizer::wait_for_tensors() const {
    wait_for_calls();
    context_->device().wait_for_default_stream();
}

void Optimizer::decode_momentum() {
    if (!onebit_ || state_.find(StateKind::exp_avg_bits) == nullptr) return;
    wait_for_tensors();
    onebit_->decode_momentum(state_, params_);
}

void Optimizer::prepare_for_host() {
    wait_for_tensors();
    ensure_state(nullptr, nullptr);
    decode_momentum();
    context_->device().wait_for_default_stream();
}

void Optimizer::ensure_state(const dsopt_tensor *params, void *stream, bool masters_follow) {
    if (!state_.empty() && state_list_.size() == state_.size())
        return; // made when everything had memory, dropped on any change
    // Flat masters first, those of a group one behind the other; then the rest, each on its own cache line.
    constexpr int32_t apart = INT32_MAX;
    const auto flat_group = [&](size_t i) {
        const bool flat = desc_.masters == DSOPT_MASTERS_FLAT && (state_[i].flags & DSOPT_STATE_FROM_PARAM);
        return flat ? params_[size_t(state_[i].param)].group : apart;
    };
    constexpr size_t in_block = SIZE_MAX; // in place of an offset: the tensor's block has room
    std::vector<size_t> missing, offsets;
    for (size_t i = 0; i < state_.size(); ++i)
        if (state_[i].data == nullptr) missing.push_back(i);
    std::stable_sort(missing.begin(), missing.end(), [&](size_t a, size_t b) { return flat_group(a) < flat_group(b); });
    std::vector<dsopt_tensor> list = state_.list();
    if (missing.empty()) {
        state_list_.swap(list);
        return;
    }
    size_t bytes = 0;
    const auto room_for = [&](const StateEntry &entry) {
        return entry.param < 0 ? own_blocks_[entry.kind].grown(entry.bytes()) : entry.bytes();
    };
    for (size_t k = 0; k < missing.size(); ++k) {
        const StateEntry &entry = state_[missing[k]];
        if (entry.param < 0 && own_blocks_[entry.kind].capacity >= entry.bytes() &&
            own_blocks_[entry.kind].data != nullptr) {
            offsets.push_back(in_block);
            continue;
        }
        const int32_t group = flat_group(missing[k]);
        if (k == 0 || group == apart || group != flat_group(missing[k - 1])) bytes = round_up(bytes);
        offsets.push_back(bytes);
        bytes += room_for(entry);
    }
    state_changed();
    Memory arena(context_, std::max(round_up(bytes), kLine), stream);
    bool counters = false;
    for (size_t k = 0; k < missing.size(); ++k) {
        const StateEntry &entry = state_[missing[k]];
        void *const data = list[missing[k]].data =
            offsets[k] == in_block ? own_blocks_[entry.kind].data : static_cast<char *>(arena.data()) + offsets[k];
        counters = counters || entry.per_param();
        if (!masters_follow || !(entry.flags & DSOPT_STATE_FROM_PARAM)) initialize(entry, params, data, stream);
    }
    const bool initial_step = counters && wrapper_ != Wrapper::none && !masters_follow;
    memory_.reserve(memory_.size() + 1);
    if (initial_step) {
        ensure_workspace(stream);
        // It moves parameters that are their own masters: nothing after it may fail.
        take_initial_step(params, list.data(), workspace_.data(), stream);
    }
    memory_.push_back(std::move(arena));
    for (size_t k = 0; k < missing.size(); ++k) {
        StateEntry &entry = state_[missing[k]];
        entry.data = list[missing[k]].data;
        entry.generation = ++generations_;
        if (entry.param >= 0) continue;
        OwnBlock &block = own_blocks_[entry.kind];
        if (offsets[k] != in_block) block = {entry.data, room_for(entry), 0};
        block.generation = entry.generation;
    }
    state_list_.swap(list);
    memory_map_.reset();
    last_step_.forget();
}

void Optimizer::init_state(const dsopt_tensor *params, int64_t count, const dsopt_tensor *state, int64_t state_count,
                           void *stream) const {
    check_groups(*this);
    if (params != nullptr || count != 0) check_length(params, count, params_.size(), "the list of parameters");
    check_state_list(*this, state, state_count, true);
    for (size_t i = 0; params != nullptr && i < params_.size(); ++i) check_param(params[i], params_[i]);
    const bool initial_step = wrapper_ != Wrapper::none;
    for (size_t i = 0; i < params_.size(); ++i) // wrappers move parameters that are their own masters
        if (params_[i].numel != 0 && (params_[i].has_master || initial_step) &&
            (params == nullptr || params[i].data == nullptr))
            throw Error(DSOPT_ERR_ARGUMENT, "parameter '%s' has no memory: its state starts from it",
                        params_[i].name.c_str());
    Memory workspace;
    const Enqueues work(pending(), stream);
    if (initial_step) {
        (void)context_->device().finished(stream); // refuses a stream that is being captured
        workspace = Memory(context_, workspace_bytes(), stream);
    }
    for (size_t i = 0; i < state_.size(); ++i) {
        const StateEntry &entry = state_[i];
        if (entry.kind == StateKind::scaler) // and the loss scale, which stands before it
            with_.scaler->init_state(state + i - 1, 2, stream);
        else if (entry.kind != StateKind::loss_scale)
            initialize(entry, params, state[i].data, stream);
    }
    const dsopt_tensor *const schedule = state_.find(state, StateKind::schedule);
    if (schedule != nullptr && schedule->data == state_[size_t(schedule - state)].data) state_changed();
    if (initial_step) take_initial_step(params, state, workspace.data(), stream);
}

void check_state_list(const Optimizer &optimizer, const dsopt_tensor *list, int64_t count, bool required) {
    const StateTable &state = optimizer.state();
    check_length(list, count, state.size(), "the state list");
    for (size_t i = 0; i < state.size(); ++i) check_state_tensor(optimizer, list[i], state[i], required);
}

void check_state_tensor(const Optimizer &optimizer, const dsopt_tensor &tensor, const StateEntry &entry,
                        bool required) {
    const Label label{entry.name(), owner_of(optimizer, entry)};
    check_like(tensor, entry.dtype, entry.numel, label);
    if (required && tensor.data == nullptr && entry.numel != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "%s '%s' has no memory", label.role, label.name);
}

/// Of parameters and state, or lists in their place; throws OVERLAP.
MemoryMap Optimizer::map_memory(const dsopt_tensor *params, const dsopt_tensor *state) const {
    MemoryMap map;
    const auto name_of = [&](int64_t param) { return names_.find(params_[size_t(param)].name)->c_str(); };
    for (size_t i = 0; i < params_.size(); ++i)
        map.add(params != nullptr ? params[i] : params_[i].tensor(), {"parameter", name_of(int64_t(i))});
    for (size_t i = 0; i < state_.size(); ++i)
        map.add(state != nullptr ? state[i] : state_[i].tensor(),
                {state_[i].name(), state_[i].param < 0 ? "the optimizer" : name_of(state_[i].param)});
    return map;
}

void Optimizer::bind_params(const dsopt_tensor *list, int64_t count) {
    check_length(list, count, params_.size(), "the list of parameters");
    bool moves = false;
    for (size_t i = 0; i < params_.size(); ++i) {
        check_param(list[i], params_[i]);
        moves = moves || (list[i].data != nullptr && list[i].data != params_[i].data);
    }
    // Unbinding must not fail for lack of memory, so overlaps are checked only where there are new addresses.
    if (moves) {
        settle();
        memory_map_ = map_memory(list, nullptr);
    } else {
        memory_map_.reset();
    }
    last_step_.forget();
    for (size_t i = 0; i < params_.size(); ++i) params_[i].data = list[i].data;
}

void Optimizer::bind_state(const dsopt_tensor *list, int64_t count) {
    settle();
    check_state_list(*this, list, count, false);
    wait_for_tensors();
    std::vector<char> words;
    for (size_t i = 0; i < state_.size(); ++i) {
        if (list[i].data == nullptr || state_[i].numel == 0 || !has_meaning(state_[i].kind)) continue;
        words.resize(state_[i].bytes());
        context_->device().copy(words.data(), list[i].data, words.size());
        check_contents(*this, state_[i], words.data(), "bound memory");
    }
    decode_momentum();
    std::vector<dsopt_tensor> bound = state_.list();
    for (size_t i = 0; i < bound.size(); ++i)
        if (list[i].data != nullptr) bound[i].data = list[i].data;
    memory_map_ = map_memory(nullptr, bound.data());
    for (size_t i = 0; i < bound.size(); ++i) { // callers hold pointers to dims of these
        if (state_[i].data != bound[i].data) state_[i].generation = ++generations_;
        state_[i].data = bound[i].data;
    }
    state_list_.clear();
    last_step_.forget();
    state_changed();
}

void Optimizer::reset(int32_t what, void *stream) {
    constexpr int32_t known =
        DSOPT_RESET_MASTERS | DSOPT_RESET_MOMENTS | DSOPT_RESET_COUNTERS | DSOPT_RESET_GRADS | DSOPT_RESET_ERRORS;
    if (what & ~known) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_reset: unknown parts 0x%x", what);
    if (what & DSOPT_RESET_MASTERS)
        for (const Param &param : params_)
            if (param.has_master && param.numel != 0 && param.data == nullptr)
                throw Error(DSOPT_ERR_STATE, "parameter '%s' has no memory to make its master from",
                            param.name.c_str());
    if ((what & DSOPT_RESET_COUNTERS) || state_.find(StateKind::exp_avg_bits) != nullptr) {
        (void)context_->device().finished(stream); // refuses a stream that is being captured
        wait_for_calls();
    }
    decode_momentum(); // which counters tell
    const Enqueues work(pending(), stream);
    for (const StateEntry &entry : state_)
        if (entry.data != nullptr && (what & record_of(entry.kind).reset))
            initialize(entry, nullptr, entry.data, stream);
    state_changed();
    if (what & DSOPT_RESET_COUNTERS) {
        calls_ = logged_skips_ = 0;
        outcome_.change(context_->device(),
                        [](Outcome &outcome) { outcome.total_skipped = outcome.skipped_in_row = 0; });
    }
    if (what & DSOPT_RESET_GRADS)
        for (Param &param : params_) param.accumulated = false;
}

} // namespace dsopt
