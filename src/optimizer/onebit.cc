// SPDX-License-Identifier: Apache-2.0
#include "optimizer/onebit.h"
#include "device/context.h"
#include "optimizer/group.h"
#include <algorithm>
#include <cstring>

namespace dsopt {
namespace {

ScheduleRules schedule_rules(const dsopt_group &group, bool compat) {
    return {group.algorithm,          group.freeze_step,
            group.var_interval_steps, group.local_interval_steps,
            group.max_local_interval, compat};
}

TrustRules trust_rules(const dsopt_group &group, bool compat) {
    return {group.trust_beta, group.trust_threshold, group.trust_min_change, group.trust_max_change, compat};
}

} // namespace

void check_family(const dsopt_group &first, const dsopt_group &other) {
    check_options<At::groups>(algorithm_fact(first.algorithm) | algorithm_fact(other.algorithm));
    for (const GroupField &field : kGroupFields)
        if (field.saved_with == kSchedule && value_of(field, first) != value_of(field, other))
            throw Error(DSOPT_ERR_ARGUMENT, "%s must be the same in all groups of the 1-bit family", field.name);
}

const dsopt_group *check_family(const std::vector<dsopt_group> &groups) {
    const dsopt_group *first = nullptr;
    for (const dsopt_group &group : groups) {
        if (!is_onebit(group.algorithm)) continue;
        if (first == nullptr) first = &group;
        check_family(*first, group);
    }
    return first;
}

void OneBitSetup::set_rules(const std::vector<dsopt_group> &groups, bool compat) {
    const dsopt_group *const first = check_family(groups);
    if (first == nullptr) return;
    rules = schedule_rules(*first, compat);
    trust = trust_rules(*first, compat);
}

OneBitSetup::OneBitSetup(const std::vector<dsopt_group> &groups, const std::vector<Param> &params,
                         const dsopt_optimizer_desc &desc, DataRank local) {
    const bool compat = desc.compat == DSOPT_COMPAT_DEEPSPEED;
    set_rules(groups, compat);
    compresses = local.ranks > local.node_ranks;
    if (desc.flags & DSOPT_OPTIMIZER_SHARD_NODE && local.node_ranks > 1) use = ExchangeUse::sharded_step;
    const bool lamb = rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
    const bool masters = desc.masters == DSOPT_MASTERS_FLAT;
    std::vector<int64_t> numels;  // of scale groups
    std::vector<bool> compressed; // standard mode, in which a scale group is a parameter
    int32_t group = -1;
    for (const Param &param : params) {
        const bool exchanged = is_exchanged(groups[size_t(param.group)]);
        if (exchanged && param.trust_slot >= 0) ++trust_slots;
        if (!compresses || (!exchanged && compat)) {
            worker.push_back(-1);
            scale_group.push_back(0);
            continue;
        }
        // The original compresses each tensor of its optimizer: the flat master of a group; in LAMB all parameters
        // together.
        const bool joins = compat && !numels.empty() && (lamb || (masters && param.has_master && param.group == group));
        group = param.group;
        if (!joins) numels.push_back(0);
        scale_group.push_back(int32_t(numels.size()) - 1);
        worker.push_back(exchanged ? numels.back() : -1); // within the scale group, whose begin is added below
        numels.back() += param.numel;
        if (!compat) compressed.push_back(exchanged);
    }
    if (compresses) layout = layout_for(local, compat, numels, compressed);
    for (size_t i = 0; i < params.size(); ++i)
        if (worker[i] >= 0) worker[i] += layout.whole.groups[scale_group[i]].begin;
}

void OneBit::add_param_state(const Param &param, int64_t index, const dsopt_group &group,
                             const dsopt_optimizer_desc &desc, StateTable &state) {
    if (!is_onebit(group.algorithm)) return;
    if (group.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
        state.add(desc.compat == DSOPT_COMPAT_NONE ? StateKind::anchor : StateKind::momentum_accumulator, index,
                  param.numel);
    if (group.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB) state.add(StateKind::exp_avg_sq_fresh, index, param.numel);
    if (param.flags & DSOPT_PARAM_MASKED) state.add(StateKind::mask, index, param.numel);
}

void OneBit::add_state(int64_t groups, int64_t params, StateTable &state) const {
    const auto add = [&](StateKind kind, int64_t numel) { state.add(kind, StateTable::kOptimizer, numel); };
    const OwnedLayout &layout = setup_.layout;
    const bool compat = setup_.rules.compat;
    if (setup_.compresses) {
        const Exchange sizes(layout, nullptr, nullptr, nullptr, nullptr, setup_.use);
        add(StateKind::worker_error, layout.slice.worker_floats());
        add(StateKind::server_error, layout.slice.server_floats());
        // Of sharded state, that of the slice: it differs between the ranks of a node.
        const int32_t flags = setup_.use == ExchangeUse::sharded_step ? DSOPT_STATE_RANK_LOCAL : 0;
        const auto add_bits = [&](StateKind kind, int64_t words) {
            state.add({whole_range(words), kind, StateTable::kOptimizer, DSOPT_DTYPE_I32, flags});
        };
        if (!compat) add_bits(StateKind::active, sizes.active_words());
        if (desc_.flags & DSOPT_OPTIMIZER_MOMENTUM_BITS)
            add_bits(StateKind::exp_avg_bits, sizes.mean.layout.messages_bytes() / 4);
    }
    add(StateKind::schedule, sizeof(ScheduleState) / 4);
    if (setup_.rules.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM) add(StateKind::lr_sum, 2 * groups);
    if (setup_.rules.algorithm != DSOPT_ALGORITHM_ONEBIT_LAMB) return;
    for (const StateKind kind : {StateKind::trust_average, StateKind::trust_factor,
                                 compat ? StateKind::trust_scaling : StateKind::trust_weight})
        add(kind, params);
    if (compat && setup_.compresses && layout.whole.group_count != 0)
        add(StateKind::exp_avg_pad, layout.whole.worker_numel - layout.whole.groups[0].used);
}

ScheduleState OneBit::read_schedule(const void *data, bool engine_schedule, void *stream) const {
    ScheduleState state;
    const Device &device = context_.device();
    if (engine_schedule && host_schedule_) return *host_schedule_;
    if (!device.is_host()) (void)device.finished(stream); // refuses a stream that is being captured
    device.enqueue_copy(&state, data, sizeof state, stream);
    device.wait(stream);
    return state;
}

void OneBit::count_step(const OneBitPlan &plan) const {
    if (plan.rules.compat || context_.device().is_host()) return;
    host_schedule_ = plan.now;
    (void)advance_schedule(setup_.rules, *host_schedule_);
}

void OneBit::plan(const StateTable &state, const dsopt_tensor *list, OneBitJob *jobs, void *workspace, double *factors,
                  bool engine_schedule, void *stream, PlannedOneBit &planned) const {
    const auto floats = [&](StateKind kind) { return state.data<float>(list, kind); };
    auto *const schedule = state.data<ScheduleState>(list, StateKind::schedule);
    const ScheduleState now = read_schedule(schedule, engine_schedule, stream);
    const Stage stage = stage_of(setup_.rules, now);
    auto *const active = state.data<int32_t>(list, StateKind::active);
    // An empty tensor of the caller has no memory, one of the engine has an address. A step must treat both the same.
    const StateEntry *const bits = state.find(StateKind::exp_avg_bits);
    const bool has_bits = bits != nullptr && bits->numel != 0;
    if (setup_.compresses)
        planned.exchange = Exchange(setup_.layout, floats(StateKind::worker_error), floats(StateKind::server_error),
                                    active, workspace, setup_.use);
    planned.plan = {.jobs = jobs,
                    .exchange = &planned.exchange,
                    .rules = setup_.rules,
                    .trust = setup_.trust,
                    .now = now,
                    .stage = stage,
                    .feed = feed_of(setup_.rules, stage),
                    .has_peers = setup_.compresses,
                    .feed_steps = !setup_.compresses || !setup_.layout.has_levels(),
                    .sharded = setup_.use == ExchangeUse::sharded_step,
                    .schedule = schedule,
                    .lr_sum = state.data<DoubleWords>(list, StateKind::lr_sum),
                    .trust_average = floats(StateKind::trust_average),
                    .trust_factor = floats(StateKind::trust_factor),
                    .trust_scaling = floats(StateKind::trust_scaling),
                    .trust_weight = floats(StateKind::trust_weight),
                    .factors = factors,
                    .active = active,
                    .padding = floats(StateKind::exp_avg_pad),
                    .momentum = has_bits ? state.data<char>(list, StateKind::exp_avg_bits) : nullptr};
    for (size_t i = 0; i < setup_.worker.size(); ++i) {
        const auto of_param = [&](StateKind kind) { return state.data<float>(list, kind, int64_t(i)); };
        jobs[i] = {.anchor = of_param(StateKind::anchor),
                   .drift = of_param(StateKind::momentum_accumulator),
                   .fresh_variance = of_param(StateKind::exp_avg_sq_fresh),
                   .mask = of_param(StateKind::mask),
                   .worker = setup_.worker[i],
                   .scale_group = setup_.scale_group[i],
                   .reserved = {}};
    }
}

int32_t OneBit::next_reduction(const StateTable &state, int64_t call, bool wrapper_made_first_call) const {
    ScheduleState now{};
    if (call == 0) {
        const void *const data = state.find(StateKind::schedule)->data;
        if (data != nullptr) now = read_schedule(data, true, nullptr);
        // The original's wrapper takes its first step when it is constructed, the engine when state is first needed.
        if (now.step == 0 && wrapper_made_first_call) now.step = 1;
    } else if (setup_.rules.compat) {
        throw Error(DSOPT_ERR_UNSUPPORTED, "in compat mode skipped calls do not count: only the next call is known");
    } else {
        now = schedule_before(setup_.rules, int32_t(call));
    }
    return reduction_of(stage_of(setup_.rules, now));
}

void OneBit::decode_momentum(const StateTable &table, const std::vector<Param> &params) const {
    const StateEntry *const bits = table.find(StateKind::exp_avg_bits);
    const StateEntry *const schedule = table.find(StateKind::schedule);
    if (bits == nullptr || bits->data == nullptr || schedule->data == nullptr) return;
    const Device &device = context_.device();
    ScheduleState state;
    device.copy(&state, schedule->data, sizeof state);
    if (state.momentum_in_bits == 0) return;
    Exchange exchange(setup_.layout, nullptr, nullptr,
                      static_cast<const int32_t *>(table.find(StateKind::active)->data), nullptr, setup_.use);
    exchange.mean.results = static_cast<char *>(bits->data);
    std::vector<dsopt_tensor> moments; // in standard mode a scale group is a parameter
    for (size_t i = 0; i < params.size(); ++i) {
        moments.push_back({});
        if (setup_.worker[i] < 0) continue;
        moments.back() = table.find(StateKind::first_moment, int64_t(i))->tensor();
        if (moments.back().data == nullptr && moments.back().numel != 0)
            throw Error(DSOPT_ERR_STATE, "exp_avg of '%s' has no memory for the momentum in exp_avg_bits",
                        params[i].name.c_str());
    }
    device.kernels().run_exchange(exchange, moments.data(), int64_t(moments.size()), context_.parallel(), nullptr,
                                  [](ExchangeKernels &kernels) { kernels.run(ExchangePass::decode); });
    state.momentum_in_bits = 0;
    device.enqueue_copy(schedule->data, &state, sizeof state, nullptr);
    device.wait_for_default_stream();
    invalidate_schedule();
}

void OneBit::reset_as_original_load(const StateTable &table) const {
    if (!setup_.rules.compat) return;
    const Device &device = context_.device();
    ScheduleState schedule;
    const StateEntry &entry = *table.find(StateKind::schedule);
    device.copy(&schedule, entry.data, sizeof schedule);
    ScheduleState reset{};
    reset.step = schedule.step;
    // The original's 0/1 Adam writes this decision to an attribute that nothing reads.
    reset.frozen = setup_.rules.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM && schedule.step >= setup_.rules.freeze_step;
    device.copy(entry.data, &reset, sizeof reset);
    const auto is_reset = [&](StateKind kind) {
        switch (kind) {
        case StateKind::worker_error:
        case StateKind::server_error:
        case StateKind::exp_avg_pad:
        case StateKind::momentum_accumulator:
        case StateKind::lr_sum: return true;
        case StateKind::trust_average:
        case StateKind::trust_factor:
        case StateKind::trust_scaling: return reset.frozen == 0;
        default: return false;
        }
    };
    for (const StateEntry &other : table)
        if (is_reset(other.kind)) device.clear(other.data, other.bytes(), nullptr);
    device.wait_for_default_stream();
}

void OneBit::export_errors(const StateTable &table, const StateEntry &entry, float *out) const {
    const bool worker = entry.kind == StateKind::worker_error;
    auto *data = static_cast<float *>(entry.data);
    const StateEntry *const active = table.find(StateKind::active);
    const Exchange exchange(setup_.layout, worker ? data : nullptr, worker ? nullptr : data,
                            active != nullptr ? static_cast<const int32_t *>(active->data) : nullptr, nullptr,
                            setup_.use);
    read_residuals(context_.device(), exchange, worker ? out : nullptr, worker ? nullptr : out);
    // With scales of 0 the values in the buffer are the residuals themselves.
    const int64_t elements = worker ? setup_.layout.slice.worker_numel : setup_.layout.slice.server_numel;
    std::memset(out + elements, 0, size_t(entry.numel - elements) * sizeof(float));
}

} // namespace dsopt
