// SPDX-License-Identifier: Apache-2.0
// Groups, parameters, and what state tensors there are. Hyper-parameters are in hyper.cc, the state's memory is in
// state_memory.cc, the step itself in step.cc.
#include "optimizer/optimizer.h"
#include "base/sizes.h"
#include "base/struct_io.h"
#include "rules/group.h"
#include <algorithm>
#include <cstring>

namespace dsopt {

Optimizer::Optimizer(std::shared_ptr<const Context> context, const dsopt_optimizer_desc &desc,
                     Attachments attachments) :
    context_(std::move(context)),
    desc_(desc),
    with_(std::move(attachments)),
    logged_scale_(with_.scaler ? with_.scaler->unused_scale() : 1) {
    if (desc.compat != DSOPT_COMPAT_NONE && desc.compat != DSOPT_COMPAT_DEEPSPEED)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.compat is %d, which this library does not know",
                    desc.compat);
    constexpr int32_t known = DSOPT_OPTIMIZER_NO_MASTER | DSOPT_OPTIMIZER_REPORT_NORMS |
                              DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING | DSOPT_OPTIMIZER_ACCUMULATE |
                              DSOPT_OPTIMIZER_TIMING | DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_CHECK_RANKS |
                              DSOPT_OPTIMIZER_MOMENTUM_BITS;
    if (desc.flags & ~known)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_optimizer_desc.flags has unknown bits: 0x%x", desc.flags);
    if ((desc.flags & DSOPT_OPTIMIZER_MOMENTUM_BITS) && compat())
        throw Error(DSOPT_ERR_UNSUPPORTED, "DSOPT_OPTIMIZER_MOMENTUM_BITS is for standard mode");
    require_in(DSOPT_NONFINITE_AUTO, DSOPT_NONFINITE_APPLY, "dsopt_optimizer_desc.nonfinite", desc.nonfinite);
    require_in(DSOPT_MASTERS_PER_TENSOR, DSOPT_MASTERS_FLAT, "dsopt_optimizer_desc.masters", desc.masters);
    check_max_norm(desc.max_norm, "dsopt_optimizer_desc.max_norm");
    check_max_value(desc.max_value, "dsopt_optimizer_desc.max_value");
    require(desc.skip_budget >= 0, "dsopt_optimizer_desc.skip_budget", desc.skip_budget, "not negative");
    const bool no_master = desc.flags & DSOPT_OPTIMIZER_NO_MASTER,
               random = desc.flags & DSOPT_OPTIMIZER_STOCHASTIC_ROUNDING;
    if (random && !no_master)
        throw Error(DSOPT_ERR_UNSUPPORTED, "STOCHASTIC_ROUNDING has no effect with masters: it needs NO_MASTER");
    if (random && compat()) throw Error(DSOPT_ERR_UNSUPPORTED, "the original has no stochastic rounding");
    if ((desc.flags & DSOPT_OPTIMIZER_CHECK_RANKS) && !with_.data && !with_.node)
        throw Error(DSOPT_ERR_UNSUPPORTED, "CHECK_RANKS has no effect without dsopt_optimizer_desc.data");
    if (!random && desc.seed != 0)
        throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_optimizer_desc.seed has no effect without STOCHASTIC_ROUNDING");
    if (no_master && desc.masters != DSOPT_MASTERS_PER_TENSOR)
        throw Error(DSOPT_ERR_UNSUPPORTED, "dsopt_optimizer_desc.masters has no effect with NO_MASTER");
    if (compat() && with_.scaler && with_.scaler->rules().hysteresis > 1)
        throw Error(DSOPT_ERR_UNSUPPORTED,
                    "the original's wrappers ignore hysteresis: a scaler with one needs standard mode");
    if (check_node(with_.data.get(), with_.node.get(), desc.compat) == nullptr) with_.node.reset();
    for (const auto &comm : with_.experts) experts_.push_back(comm.get());
    if (with_.scaler) scaler_token_ = with_.scaler->attach();
    // A scaler is moved by steps of all its optimizers: they share what is waited for.
    pending_ = with_.scaler ? with_.scaler->pending() : context_->device().make_pending_work();
}

Optimizer::~Optimizer() {
    // Before memory goes, which waits for the device: their last owner ends what a peer that is gone holds up there.
    experts_.clear();
    for (auto *comm : {&with_.data, &with_.model, &with_.node}) comm->reset();
    with_.experts.clear();
}

void check_groups(const Optimizer &optimizer) {
    if (optimizer.groups().empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
}

void Optimizer::add_group(const dsopt_group &group, const dsopt_param *params, int64_t count) {
    check_group(group, compat());
    grow(&group, params, count);
}
void Optimizer::add_params(const dsopt_param *params, int64_t count) {
    check_groups(*this);
    grow(nullptr, params, count);
}

/// Behind the registered parameters. `named_groups`: they say to which of the groups they go; else all of them go to
/// the last one.
void Optimizer::append_params(const dsopt_param *given, int64_t count, bool named_groups, Added &added) {
    if (count < 0) throw Error(DSOPT_ERR_ARGUMENT, "count of parameters is %lld", ll(count));
    if (count > 0 && given == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "params is NULL, count is %lld", ll(count));
    if (count > INT32_MAX - int64_t(params_.size()))
        throw Error(DSOPT_ERR_SHAPE, "%zu and %lld parameters are more than 2^31", params_.size(), ll(count));
    // The original has one trust ratio a shard, and its groups are in one piece.
    const bool shares_trust = !compat() && with_.model && with_.model->ranks() > 1;
    std::vector<bool> used(compat() && named_groups ? groups_.size() : 0);
    if (!used.empty())
        for (const Param &param : params_) used[size_t(param.group)] = true;
    for (int64_t i = 0; i < count; ++i) {
        const auto index = int64_t(params_.size());
        const int32_t group = named_groups ? given[i].group : int32_t(groups_.size()) - 1;
        if (!named_groups && given[i].group != 0)
            throw Error(DSOPT_ERR_ARGUMENT,
                        "dsopt_param.group of parameter %lld is %d: in dsopt_optimizer_add_group it must be 0",
                        ll(index), given[i].group);
        if (group < 0 || size_t(group) >= groups_.size())
            throw Error(DSOPT_ERR_ARGUMENT, "dsopt_param.group of parameter %lld is %d, there are %zu groups",
                        ll(index), group, groups_.size());
        Param param = make_param(given[i], index, group, desc_);
        const auto [name, is_new] = added.names.insert(param.name);
        if (!is_new || names_.contains(param.name))
            throw Error(DSOPT_ERR_ARGUMENT, "two parameters are called '%s'", param.name.c_str());
        const Label label{"parameter", name->c_str()};
        memory_map_->check(param.tensor(), label);
        added.memory.add(param.tensor(), label);
        // The original's wrappers step once when they are made, with all that a group has then.
        if (named_groups && compat() && !state_list_.empty())
            throw Error(DSOPT_ERR_STATE,
                        "in compat mode parameters come before the state is made: add a group for '%s'",
                        param.name.c_str());
        if (!used.empty()) {
            if (used[size_t(group)] && params_.back().group != group)
                throw Error(DSOPT_ERR_UNSUPPORTED,
                            "parameter '%s' goes to group %d, whose others do not stand before it: in compat mode the "
                            "parameters of a group follow one another",
                            param.name.c_str(), group);
            used[size_t(group)] = true;
        }
        param.first_leaf = index == 0 ? 0 : params_.back().first_leaf + leaves_of(params_.back().numel);
        // Each size is legal; their sums must be, too, in bytes of all state and workspace.
        if (param.first_leaf + leaves_of(param.numel) > (int64_t(1) << 44))
            throw Error(DSOPT_ERR_SHAPE, "with parameter '%s' the optimizer has more than 2^56 elements",
                        param.name.c_str());
        const bool shared =
            shares_trust && (param.flags & DSOPT_PARAM_MODEL_PARALLEL) && has_trust(groups_[size_t(group)]);
        param.trust_slot = shared ? trust_slots_++ : -1;
        if (param.has_master && compat())
            wrapper_ = desc_.masters == DSOPT_MASTERS_FLAT ? Wrapper::fused : Wrapper::unfused;
        params_.push_back(std::move(param));
    }
}

/// Its state tensors, in the order of the table in dsopt.h.
void Optimizer::add_param_state(int64_t index) {
    const Param &param = params_[size_t(index)];
    const dsopt_group &group = groups_[size_t(param.group)];
    if (param.has_master) state_.add(StateKind::master, index, param.numel);
    // The original keeps moments in the dtype of what it updates; halves lose the second moment there.
    const int32_t type = compat() && (desc_.flags & DSOPT_OPTIMIZER_NO_MASTER) ? param.dtype : DSOPT_DTYPE_F32;
    const MomentList &moments = moments_of(group);
    for (int k = 0; k < moments.count; ++k)
        state_.add({moment_kind(k), index, type, 0, param.numel, nullptr, &moments.at[k]});
    if (desc_.flags & DSOPT_OPTIMIZER_ACCUMULATE) state_.add(StateKind::grad_accum, index, param.numel);
    OneBit::add_param_state(param, index, group, desc_, state_);
}

/// The state tensors of the whole optimizer, in the order of the table in dsopt.h.
void Optimizer::add_own_state(const OneBit *onebit) {
    const auto count = int64_t(params_.size());
    const auto add = [&](StateKind kind, int64_t numel, void *data = nullptr) {
        state_.add(kind, StateTable::kOptimizer, numel, data);
        if (data != nullptr) state_[state_.size() - 1].generation = 1;
    };
    if (onebit != nullptr) onebit->add_state(int64_t(groups_.size()), count, state_);
    if (with_.scaler) {
        add(StateKind::loss_scale, 1, with_.scaler->scale());
        add(StateKind::scaler, sizeof(ScalerState) / 4, with_.scaler->state());
    }
    const auto with_trust = [](const dsopt_group &group) { return has_trust(group); };
    if (std::any_of(groups_.begin(), groups_.end(), with_trust)) add(StateKind::trust_ratio, count);
    add(StateKind::step, count);
}

/// The first group of the 1-bit family, or -1. Throws what the last group and the new parameters cannot have with it.
int64_t Optimizer::find_family(size_t first_new) const {
    const bool joins = is_onebit(groups_.back().algorithm);
    if (family_ < 0 && !joins) {
        if (desc_.flags & (DSOPT_OPTIMIZER_AVERAGES | DSOPT_OPTIMIZER_MOMENTUM_BITS))
            throw Error(DSOPT_ERR_UNSUPPORTED, "%s is for the 1-bit family, whose first group comes first",
                        desc_.flags & DSOPT_OPTIMIZER_AVERAGES ? "DSOPT_OPTIMIZER_AVERAGES"
                                                               : "DSOPT_OPTIMIZER_MOMENTUM_BITS");
        return -1;
    }
    if (desc_.flags & DSOPT_OPTIMIZER_REPORT_NORMS)
        throw Error(DSOPT_ERR_UNSUPPORTED, "REPORT_NORMS is not there for the 1-bit family");
    const int64_t family = family_ >= 0 ? family_ : int64_t(groups_.size()) - 1;
    if (joins) check_family(groups_[size_t(family)], groups_.back(), compat());
    for (size_t i = family_ >= 0 ? first_new : 0; compat() && i < params_.size(); ++i)
        if (!is_onebit(groups_[size_t(params_[i].group)].algorithm))
            throw Error(DSOPT_ERR_UNSUPPORTED, "the original's 1-bit optimizers have one algorithm in all groups");
    return family;
}

/// What the tensors of the whole optimizer hold that grow with its lists: all but what starts anew, on the host.
Optimizer::Kept Optimizer::keep_contents(const std::vector<StateEntry> &own) const {
    Kept kept;
    for (const StateEntry &entry : own) {
        if (entry.data == nullptr || entry.of_scaler() || record_of(entry.kind).growth == Growth::anew) continue;
        if (kept.empty()) wait_for_tensors();
        std::vector<char> &contents = kept[entry.kind];
        contents.resize(entry.bytes());
        context_->device().copy(contents.data(), entry.data, contents.size());
    }
    return kept;
}

/// Throws STATE for a parameter that would go into exchanges whose variance is frozen.
void Optimizer::check_not_frozen(size_t first_new, const Kept &kept) const {
    ScheduleState now{};
    if (const auto schedule = kept.find(StateKind::schedule); schedule != kept.end())
        std::memcpy(&now, schedule->second.data(), sizeof now);
    for (size_t i = first_new; now.frozen && i < params_.size(); ++i)
        if (goes_into_exchanges(groups_[size_t(params_[i].group)]))
            throw Error(DSOPT_ERR_STATE, "the variance is frozen: '%s' would have none, and never move",
                        params_[i].name.c_str());
}

/// Into the tensors of the lists as they are now, in place where there is room. Each is still there: groups only come,
/// and no option changes which tensors an algorithm has.
void Optimizer::carry_contents() {
    if (kept_.empty()) return;
    const Device &device = context_->device();
    const auto fits = [&](StateKind kind) { return state_.find(kind)->bytes() <= own_blocks_[kind].capacity; };
    size_t bytes = 0;
    for (const auto &[kind, contents] : kept_)
        if (!fits(kind)) bytes += round_up(own_blocks_[kind].grown(state_.find(kind)->bytes()));
    if (bytes != 0) {
        memory_.reserve(memory_.size() + 1);
        memory_.emplace_back(context_, bytes, nullptr);
        char *at = static_cast<char *>(memory_.back().data());
        for (const auto &[kind, contents] : kept_) {
            if (fits(kind)) continue;
            OwnBlock &block = own_blocks_[kind];
            block = {at, block.grown(state_.find(kind)->bytes()), 0};
            at += round_up(block.capacity);
        }
    }
    device.wait_for_default_stream(); // refuses one that cannot be used now
    for (const auto &[kind, contents] : kept_) {
        StateEntry &entry = state_[size_t(state_.slot(kind))];
        OwnBlock &block = own_blocks_[kind];
        device.clear(block.data, entry.bytes(), nullptr);
        device.enqueue_copy(block.data, contents.data(), contents.size(), nullptr);
        if (block.generation == 0) block.generation = ++generations_;
        entry.data = block.data;
        entry.generation = block.generation;
    }
    device.wait_for_default_stream();
    kept_.clear();
    memory_map_.reset();
}

/// Everything that can fail comes before the live lists stay as they have become: a failure puts them back.
void Optimizer::grow(const dsopt_group *group, const dsopt_param *given, int64_t count) {
    decode_momentum(); // its rows are those of the list as it is
    if (!memory_map_) memory_map_ = map_memory(nullptr, nullptr);
    const size_t old_groups = groups_.size(), old_params = params_.size();
    const Wrapper old_wrapper = wrapper_;
    const int32_t old_slots = trust_slots_;
    const std::vector<StateEntry> own = state_.of_optimizer(); // these follow the parameters' and grow with them
    Kept kept = keep_contents(own);                            // empty also where an earlier group's are in kept_
    int64_t family = -1;
    Added added;
    try {
        if (group != nullptr) groups_.push_back(*group);
        append_params(given, count, group == nullptr, added);
        family = find_family(old_params);
        check_not_frozen(old_params, kept.empty() ? kept_ : kept);
        state_.truncate(int64_t(old_params));
        for (size_t i = old_params; i < params_.size(); ++i) add_param_state(int64_t(i));
    } catch (...) {
        state_.truncate(int64_t(old_params));
        for (const StateEntry &entry : own) state_.add(entry);
        params_.erase(params_.begin() + int64_t(old_params), params_.end());
        groups_.resize(old_groups);
        wrapper_ = old_wrapper;
        trust_slots_ = old_slots;
        throw;
    }
    family_ = family;
    onebit_.reset();
    if (!kept.empty()) kept_.swap(kept);
    settled_.store(false, std::memory_order_release);
    names_.merge(added.names);
    memory_map_->merge(added.memory);
    for (const StateEntry &entry : own) { // what starts again, and what was bound, is elsewhere from now on
        const auto block = own_blocks_.find(entry.kind);
        const bool stays = record_of(entry.kind).growth != Growth::anew && entry.data != nullptr;
        if (block != own_blocks_.end() && (entry.data != block->second.data || !stays)) block->second.generation = 0;
    }
    const auto has_memory = [](const StateEntry &entry) { return entry.data != nullptr && !entry.of_scaler(); };
    if (std::any_of(own.begin(), own.end(), has_memory)) memory_map_.reset(); // that is not the optimizer's any more
    workspace_ = Memory();
    cache_.reset(); // it describes that
    last_step_.forget();
    lists_compared_ = false;
    state_list_.clear();
}

void Optimizer::settle() {
    if (settled_.load(std::memory_order_acquire)) return;
    const std::lock_guard lock(settling_);
    if (settled_.load(std::memory_order_relaxed)) return;
    try {
        std::unique_ptr<OneBit> onebit;
        if (family_ >= 0) onebit = std::make_unique<OneBit>(*context_, groups_, params_, desc_, data_rank());
        add_own_state(onebit.get());
        carry_contents();
        onebit_ = std::move(onebit);
    } catch (...) {
        state_.truncate(int64_t(params_.size()));
        throw;
    }
    settled_.store(true, std::memory_order_release);
}

void Optimizer::restore(Restored restored) {
    groups_.swap(restored.groups);
    last_step_.forget();
    if (onebit_) onebit_->follow(groups_);
    desc_.max_norm = restored.max_norm;
    desc_.max_value = restored.max_value;
    calls_ = restored.calls;
    resharded_from_ = restored.resharded_from;
    for (size_t i = 0; i < restored.accumulated.size(); ++i) params_[i].accumulated = restored.accumulated[i] == '1';
    state_changed();
}

void Optimizer::accumulate(const dsopt_tensor *grads, int64_t count, void *stream) {
    if (!(desc_.flags & DSOPT_OPTIMIZER_ACCUMULATE))
        throw Error(DSOPT_ERR_UNSUPPORTED, "the optimizer was made without DSOPT_OPTIMIZER_ACCUMULATE");
    check_length(grads, count, params_.size(), "the list of gradients");
    for (size_t i = 0; i < params_.size(); ++i)
        if (grads[i].data != nullptr) check_beside(grads[i], params_[i], "gradient of");
    const Enqueues work(pending(), stream);
    call_list_.reserve(state_.size());
    ensure_state(nullptr, stream);
    call_list_.resize(params_.size());
    for (size_t i = 0; i < params_.size(); ++i)
        call_list_[i] = *state_.find(state_list_.data(), StateKind::grad_accum, int64_t(i));
    context_->device().loops().axpby({}, grads, 1, call_list_.data(), count, context_->parallel(), stream);
    for (size_t i = 0; i < params_.size(); ++i)
        params_[i].accumulated = params_[i].accumulated || grads[i].data != nullptr;
}

} // namespace dsopt
