// SPDX-License-Identifier: Apache-2.0
// Optimizer's part for the 1-bit family: groups, layout of the exchange, what a step needs.
#include "optimizer/onebit.h"
#include "comm/comm.h"
#include "device/backend.h"
#include "optimizer/optimizer.h"
#include <algorithm>
#include <cstring>

namespace dsopt {
ScheduleRules schedule_rules(const dsopt_group &group, bool compat) {
    return {group.algorithm,          group.freeze_step,
            group.var_interval_steps, group.local_interval_steps,
            group.max_local_interval, compat};
}

OneBitSetup make_onebit_setup(const std::vector<dsopt_group> &groups, const std::vector<Param> &params,
                              const dsopt_optimizer_desc &desc, int rank, int ranks, int node_ranks) {
    const bool compat = desc.compat == DSOPT_COMPAT_DEEPSPEED;
    OneBitSetup setup;
    const dsopt_group *first = nullptr;
    for (const dsopt_group &group : groups) {
        if (!is_onebit(group.algorithm)) continue;
        if (first == nullptr) first = &group;
        if (group.algorithm != first->algorithm)
            throw Error(DSOPT_ERR_UNSUPPORTED, "an optimizer has one algorithm of the 1-bit family, not two");
        const ScheduleRules rules = schedule_rules(group, compat), others = schedule_rules(*first, compat);
        if (rules.freeze_step != others.freeze_step || rules.var_interval_steps != others.var_interval_steps ||
            rules.local_interval_steps != others.local_interval_steps ||
            rules.max_local_interval != others.max_local_interval)
            throw Error(DSOPT_ERR_ARGUMENT,
                        "freeze_step and the intervals must be the same in all groups of the 1-bit family");
        if (group.trust_beta != first->trust_beta || group.trust_threshold != first->trust_threshold ||
            group.trust_min_change != first->trust_min_change || group.trust_max_change != first->trust_max_change)
            throw Error(DSOPT_ERR_ARGUMENT, "trust_beta, _threshold, _min_change and _max_change must be the same in "
                                            "all groups of 1-bit LAMB");
    }
    if (first == nullptr) return setup;
    setup.rules = schedule_rules(*first, compat);
    setup.compresses = ranks > 1;
    const bool lamb = first->algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
    const bool masters = desc.masters == DSOPT_MASTERS_FLAT;
    std::vector<int64_t> numels; // of parts
    int32_t group = -1;
    for (const Param &param : params) {
        const dsopt_group &g = groups[size_t(param.group)];
        const bool goes = goes_into_exchanges(g);
        if (!goes && compat && !is_onebit(g.algorithm))
            throw Error(DSOPT_ERR_UNSUPPORTED, "the original's 1-bit optimizers have one algorithm in all groups");
        setup.mean.push_back(-1);
        if (setup.compresses && (!goes || (desc.flags & DSOPT_OPTIMIZER_AVERAGES))) {
            setup.mean.back() = setup.mean_numel;
            setup.mean_numel += padded_numel(node_ranks, param.numel);
        }
        if (!goes || !setup.compresses) {
            setup.worker.push_back(-1);
            setup.part.push_back(0);
            continue;
        }
        // The original compresses what its optimizer sees as a tensor: the flat master of a group, in LAMB everything.
        const bool joins = compat && !numels.empty() && (lamb || (masters && param.has_master && param.group == group));
        group = param.group;
        if (!joins) { numels.push_back(0); }
        setup.part.push_back(int32_t(numels.size()) - 1);
        setup.worker.push_back(numels.back()); // within the part; its place is added below
        numels.back() += param.numel;
    }
    if (node_ranks > 1) {
        const int nodes = ranks / node_ranks;
        setup.layout = CompressLayout::two_level(nodes, rank % nodes, node_ranks, rank / nodes, numels);
        if (setup.layout.whole->worker_numel < setup.mean_numel) setup.mean_scratch = setup.mean_numel;
    } else if (setup.compresses)
        setup.layout =
            compat ? CompressLayout::padded(ranks, rank, numels) : CompressLayout::bucket(ranks, rank, numels);
    for (size_t i = 0; i < params.size(); ++i)
        if (setup.worker[i] >= 0) setup.worker[i] += setup.layout.all().parts[size_t(setup.part[i])].begin;
    return setup;
}

/// Which stage a step is in is the host's to know. Where memory is a device's it keeps count: in standard mode every
/// call counts. In compat mode only the device knows whether the last step was taken, so the host waits for it, as it
/// does where the state is not the engine's.
ScheduleState Optimizer::read_schedule(const void *data, const KnownSchedule *known, void *stream) const {
    ScheduleState state;
    const Backend &backend = context_->backend();
    if (known != nullptr && known->valid) return known->state;
    if (!backend.is_host()) (void)backend.finished(stream); // refuses a stream that is being captured
    backend.copy_to_host(&state, data, sizeof state, stream);
    return state;
}

PlannedOneBit Optimizer::plan_onebit(const dsopt_tensor *state, OneBitJob *jobs, void *workspace, double *factors,
                                     const KnownSchedule *known, void *stream) const {
    const OneBitSetup &setup = *onebit_;
    const auto find = [&]<class T>(StateKind kind, T *) {
        const dsopt_tensor *tensor = find_state(state, kind);
        return tensor != nullptr ? static_cast<T *>(tensor->data) : nullptr;
    };
    const auto floats = [&](StateKind kind) { return find(kind, static_cast<float *>(nullptr)); };
    const auto words = [&](StateKind kind) { return find(kind, static_cast<int32_t *>(nullptr)); };
    PlannedOneBit planned;
    auto *const schedule = find(StateKind::schedule, static_cast<ScheduleState *>(nullptr));
    const ScheduleState now = read_schedule(schedule, known, stream);
    if (setup.compresses)
        planned.buffers =
            ExchangeBuffers(setup.layout, floats(StateKind::worker_error), floats(StateKind::server_error), workspace);
    planned.buffers.active = words(StateKind::active);
    const dsopt_group &own =
        *std::find_if(groups_.begin(), groups_.end(), [](const auto &group) { return is_onebit(group.algorithm); });
    planned.plan = {
        .jobs = jobs,
        .buffers = nullptr, // the caller's copy
        .rules = setup.rules,
        .trust = {own.trust_beta, own.trust_threshold, own.trust_min_change, own.trust_max_change, setup.rules.compat},
        .now = now,
        .stage = stage_of(setup.rules, now),
        .compat = setup.rules.compat,
        .exchanges = setup.compresses,
        .schedule = schedule,
        .lr_sum = words(StateKind::lr_sum),
        .trust_average = floats(StateKind::trust_average),
        .trust_factor = floats(StateKind::trust_factor),
        .trust_scaling = floats(StateKind::trust_scaling),
        .trust_weight = floats(StateKind::trust_weight),
        .factors = factors,
        .active = words(StateKind::active),
        .padding = floats(StateKind::exp_avg_pad),
        .momentum = reinterpret_cast<char *>(words(StateKind::exp_avg_bits))};
    for (size_t i = 0; i < params_.size(); ++i) {
        const Param &param = params_[i];
        const dsopt_group &group = groups_[size_t(param.group)];
        const auto own = [&](StateKind kind) -> void * {
            const dsopt_tensor *const tensor = find_state(state, param, kind);
            return tensor != nullptr ? tensor->data : nullptr;
        };
        OneBitJob job{};
        job.worker = setup.worker[i];
        job.part = setup.part[i];
        job.averaged = !goes_into_exchanges(group);
        job.anchor = static_cast<float *>(own(StateKind::anchor));
        job.drift = static_cast<float *>(own(StateKind::momentum_accumulator));
        job.fresh = static_cast<float *>(own(StateKind::exp_avg_sq_fresh));
        job.mask = static_cast<const float *>(own(StateKind::mask));
        jobs[i] = job;
    }
    return planned;
}

/// Jobs whose gradients the engine averages in this step.
void Optimizer::plan_means(const OneBitPlan &onebit, TensorJob *jobs, float *mean, GradientMeans &means,
                           void *stream) const {
    const bool all = onebit.stage == Stage::full && (desc_.flags & DSOPT_OPTIMIZER_AVERAGES);
    const bool some = onebit.stage == Stage::dry ? onebit.compat : onebit.stage != Stage::full;
    for (size_t i = 0; i < params_.size(); ++i) {
        const int64_t at = onebit_->mean[i];
        if (at < 0 || jobs[i].numel == 0 || !(all || (some && onebit.jobs[i].averaged))) continue;
        means.add(jobs[i], mean + at, padded_numel(node_ranks(), jobs[i].numel), context_->backend(), stream);
    }
}

void Optimizer::write_reduction(const dsopt_tensor *schedule, int32_t *reduction, void *stream) const {
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    if (reduction == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "reduction is NULL");
    if (reinterpret_cast<uintptr_t>(reduction) % sizeof *reduction != 0)
        throw Error(DSOPT_ERR_ALIGNMENT, "reduction is at %p, not aligned to 4 bytes", static_cast<void *>(reduction));
    const StateEntry *const entry = find_entry(StateKind::schedule);
    if ((schedule != nullptr) != (entry != nullptr))
        throw Error(DSOPT_ERR_ARGUMENT,
                    entry != nullptr ? "schedule is NULL" : "schedule is given, and no group is of the 1-bit family");
    if (entry != nullptr) check_state_tensor(*schedule, *entry, true);
    context_->backend().write_reduction(entry != nullptr ? onebit_->rules : ScheduleRules{},
                                        entry != nullptr ? static_cast<const ScheduleState *>(schedule->data) : nullptr,
                                        reduction, stream);
}

dsopt_schedule_info Optimizer::decode_schedule(const int32_t *words) const {
    if (!onebit_) throw Error(DSOPT_ERR_UNSUPPORTED, "no group is of the 1-bit family: there is no schedule");
    ScheduleState state;
    std::memcpy(&state, words, sizeof state);
    dsopt_schedule_info info{};
    info.step = state.step;
    info.frozen = state.frozen;
    info.var_interval = state.var_interval;
    info.var_counter = state.var_counter;
    info.local_interval = state.local_interval;
    info.local_counter = state.local_counter;
    info.momentum_in_bits = state.momentum_in_bits;
    info.reduction = next_reduction_of(onebit_->rules, &state);
    return info;
}

int32_t Optimizer::next_reduction(int64_t call) const {
    if (groups_.empty()) throw Error(DSOPT_ERR_STATE, "the optimizer has no groups yet");
    if (call < 0 || call > INT32_MAX)
        throw Error(DSOPT_ERR_ARGUMENT, "call is %lld, not in [0, 2^31)", static_cast<long long>(call));
    if (!onebit_) return DSOPT_REDUCTION_FULL;
    ScheduleState state{};
    if (call == 0) {
        const StateEntry *const entry = find_entry(StateKind::schedule);
        if (entry != nullptr && entry->data != nullptr) state = read_schedule(entry->data, &known_schedule_, nullptr);
        // What the original's wrapper does when it is made, the engine does when its state is first needed.
        if (state.step == 0 && wrapper() != Wrapper::none) state.step = 1;
        return reduction_of(stage_of(onebit_->rules, state));
    }
    if (onebit_->rules.compat)
        throw Error(DSOPT_ERR_UNSUPPORTED, "in compat mode skipped calls do not count: only the next call is known");
    for (int64_t i = 1; i < call; ++i) (void)advance_schedule(onebit_->rules, state);
    return reduction_of(stage_of(onebit_->rules, state));
}

void Optimizer::settle_momentum() {
    if (!(desc_.flags & DSOPT_OPTIMIZER_MOMENTUM_BITS) || !onebit_) return;
    const StateEntry *const bits = find_entry(StateKind::exp_avg_bits);
    const StateEntry *const schedule = find_entry(StateKind::schedule);
    if (bits == nullptr || bits->data == nullptr || schedule->data == nullptr) return;
    const Backend &backend = context_->backend();
    ScheduleState state;
    backend.copy_to_host(&state, schedule->data, sizeof state, nullptr);
    if (state.momentum_in_bits == 0) return;
    ExchangeBuffers exchange(onebit_->layout, nullptr, nullptr, nullptr);
    exchange.results = static_cast<char *>(bits->data);
    exchange.active = static_cast<const int32_t *>(find_entry(StateKind::active)->data);
    std::vector<dsopt_tensor> moments; // in standard mode a part is a parameter
    for (size_t i = 0; i < params_.size(); ++i) {
        if (onebit_->worker[i] < 0) continue;
        moments.push_back(state_[size_t(params_[i].state[StateKind::first_moment])].tensor());
        if (moments.back().data == nullptr && params_[i].numel != 0)
            throw Error(DSOPT_ERR_STATE, "exp_avg of '%s' has no memory for the momentum in exp_avg_bits",
                        params_[i].name.c_str());
    }
    backend.compress_decode(exchange, moments.data(), int64_t(moments.size()), context_->parallel(), nullptr);
    state.momentum_in_bits = 0;
    backend.copy_from_host(schedule->data, &state, sizeof state, nullptr);
    state_changed();
}

void Optimizer::forget_like_original() {
    if (!onebit_ || !onebit_->rules.compat) return;
    const Backend &backend = context_->backend();
    const bool zero_one = onebit_->rules.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM;
    ScheduleState schedule;
    const StateEntry &entry = *find_entry(StateKind::schedule);
    backend.copy_to_host(&schedule, entry.data, sizeof schedule, nullptr);
    ScheduleState kept{};
    kept.step = schedule.step;
    // 0/1 Adam writes the answer to an attribute that nothing reads.
    kept.frozen = !zero_one && schedule.step >= onebit_->rules.freeze_step;
    backend.copy_from_host(entry.data, &kept, sizeof kept, nullptr);
    for (const StateEntry &other : state_) {
        const auto is = [&](StateKind kind) { return other.kind == kind; };
        if (other.is_error() || is(StateKind::exp_avg_pad) || is(StateKind::momentum_accumulator) ||
            is(StateKind::lr_sum) || (other.is_trust() && kept.frozen == 0))
            backend.clear(other.data, other.bytes(), nullptr);
    }
}

void Optimizer::export_entry(const StateEntry &entry, void *host) const {
    if (entry.numel == 0) return; // `host` may be NULL
    const bool worker = entry.kind == StateKind::worker_error;
    if (!entry.is_error()) {
        context_->backend().copy_to_host(host, entry.data, entry.bytes(), nullptr);
        return;
    }
    auto *data = static_cast<float *>(entry.data), *out = static_cast<float *>(host);
    const ExchangeBuffers exchange(onebit_->layout, worker ? data : nullptr, worker ? nullptr : data, nullptr);
    owed_errors(context_->backend(), exchange, worker ? out : nullptr, worker ? nullptr : out);
    // With scales of zero the errors stand for themselves.
    const int64_t elements = worker ? onebit_->layout.worker_numel : onebit_->layout.server_numel;
    std::memset(out + elements, 0, size_t(entry.numel - elements) * sizeof(float));
    const StateEntry *const active = find_entry(StateKind::active);
    if (active == nullptr) return;
    // What takes no part is kept at 0 and owes nothing, though the others' scale says so.
    std::vector<int32_t> words(size_t(active->numel));
    context_->backend().copy_to_host(words.data(), active->data, active->bytes(), nullptr);
    const auto leave_out = [&](float *errors, int64_t element, int64_t count) {
        for (int64_t i = 0; i < count; ++i, ++element)
            if (!takes_part(words.data(), element)) errors[i] = 0;
    };
    if (worker)
        for (const CompressLayout::Part &part : onebit_->layout.parts)
            leave_out(out + part.begin, onebit_->layout.slice_begin + part.begin, part.numel);
    else
        for (const CompressLayout::Segment &segment : onebit_->layout.own_segments())
            leave_out(out + segment.server, onebit_->layout.slice_begin + segment.begin, segment.numel);
}

} // namespace dsopt
