// SPDX-License-Identifier: Apache-2.0
// One step: check the lists, make the plan, hand it to the driver.
#include "base/sizes.h"
#include "optimizer/step_parts.h"
#include <algorithm>
#include <cstring>

namespace dsopt {

void Optimizer::run(const Arguments &arguments, const dsopt_tensor *state, void *memory,
                    const OfEngine *of_engine) const {
    const Device &device = context_->device();
    void *const stream = arguments.step.stream;
    const Layout place = layout();
    char *const workspace = static_cast<char *>(memory) + slack_of(memory);
    const HostScratch scratch(host_scratch_, device.is_host() ? 0 : place.host_bytes);
    char *const host = device.is_host() ? workspace : scratch.data();
    const auto floats = [&](size_t offset) { return reinterpret_cast<float *>(workspace + offset); };
    if (of_engine == nullptr) device.clear(workspace + place.shared, sizeof(SharedWords), stream);

    const StepTable table = StepTable::at(host + place.table, shape());
    const bool own_schedule = onebit_ && of_engine != nullptr && of_engine->own_schedule;
    PlannedOneBit onebit;
    if (onebit_) {
        onebit = onebit_->plan(state_, state, groups_, params_, table.onebit, workspace + place.exchange,
                               reinterpret_cast<double *>(workspace + place.factors), own_schedule, stream);
        onebit.plan.buffers = &onebit.buffers;
    }
    const int32_t slots = plan_jobs(arguments, state, onebit_ ? &onebit.plan : nullptr, table.jobs);
    plan_groups(table.groups);
    StepPlan plan = make_plan(arguments, state, workspace, place, table, of_engine);
    plan.shards.count = slots;
    if (onebit_) {
        plan.onebit = &onebit.plan;
        // In the call that the original spends on nothing, moments of groups that are not frozen do move.
        plan.dry = onebit.plan.stage == Stage::dry;
    }
    if (context_->checks_pointers()) check_pointers(plan);
    if (arguments.met != nullptr && checks_ranks()) {
        *arguments.met = true;
        check_ranks(plan, false, of_engine != nullptr);
    } else if (of_engine != nullptr && !lists_compared_ && onebit_ && onebit_->setup().compresses)
        check_ranks(plan, true, true); // other lists would be other messages

    const CommSet ranks = arguments.initial ? CommSet{} : comms();
    const bool averages = onebit_ && onebit_->setup().mean_numel != 0 && !arguments.initial;
    GradientMeans means(reinterpret_cast<dsopt_tensor *>(host + place.lists), plan.count);
    if (averages) onebit_->plan_means(onebit.plan, table.jobs, floats(place.mean), means, stream);
    if (own_schedule) onebit_->forget_schedule(); // should it fail
    drive({.context = *context_,
           .plan = plan,
           .comms = ranks,
           .host_norms = reinterpret_cast<double *>(host + place.host_norms),
           .means = averages ? &means : nullptr,
           .mean_scratch = onebit_ && onebit_->setup().mean_scratch != 0
                               ? floats(place.mean) + onebit_->setup().mean_numel
                               : onebit.buffers.slices,
           .zeroes_originals = (arguments.flags & DSOPT_STEP_ZERO_GRADS) != 0});
    if (of_engine != nullptr && mirror_ && desc_.skip_budget > 0)
        device.enqueue_copy(mirror_.get(), plan.outcome, sizeof(Outcome), stream);
    if (own_schedule) onebit_->count_step(onebit.plan);
}

/// The original's wrappers take one step of the base optimizer on zero gradients when they are made: counters become 1
/// and decay is applied to the masters, not to the parameters.
void Optimizer::take_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace,
                                  void *stream) const {
    dsopt_step step{};
    step.stream = stream;
    run({step, params, nullptr, 0, context_->parallel(), true}, state, workspace, nullptr);
}

void Optimizer::step(const dsopt_step &step) {
    bool met = false;
    try {
        take_step(step, met);
    } catch (...) {
        if (checks_ranks() && !met) refuse_to_ranks(step.stream);
        throw;
    }
}

void Optimizer::apply(const dsopt_step &step) const {
    bool met = false;
    try {
        take_apply(step, met);
    } catch (...) {
        if (checks_ranks() && !met) refuse_to_ranks(step.stream);
        throw;
    }
}

void Optimizer::take_step(const dsopt_step &step, bool &met) {
    // What has arrived of earlier steps; nobody waits for it, but ranks must come to the same answer.
    if (desc_.skip_budget > 0 && mirror_ && has_peers(comms())) {
        (void)context_->device().finished(step.stream); // refuses a stream that is being captured
        context_->device().synchronize();
    }
    if (const Outcome *known = last_known();
        known != nullptr && desc_.skip_budget > 0 && known->skipped_in_row >= desc_.skip_budget)
        throw Error(DSOPT_ERR_SKIPS,
                    "%lld steps in a row were skipped, the budget is %d; the last one found %lld non-finite "
                    "elements",
                    ll(known->skipped_in_row), desc_.skip_budget, ll(known->nonfinite));
    check_scaler();
    Arguments arguments = check_step(step, false);
    arguments.met = &met;
    if (step.workspace != nullptr || step.workspace_bytes != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.workspace is for dsopt_optimizer_apply");
    bool complete = false; // the caller's list covers everything: the engine needs no memory of its own
    if (step.state != nullptr) {
        check_state_list(step.state, step.state_count, false);
        complete = true;
        for (size_t i = 0; i < state_.size(); ++i)
            complete = complete && (step.state[i].data != nullptr || state_[i].numel == 0);
    } else if (step.state_count != 0) {
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.state_count is %lld without state", ll(step.state_count));
    }
    ensure_workspace(step.stream);
    const dsopt_tensor *state = step.state;
    if (!complete) {
        ensure_state(step.params, step.stream);
        state = state_list_.data();
        if (step.state != nullptr) {
            call_list_ = state_list_;
            for (size_t i = 0; i < call_list_.size(); ++i)
                if (step.state[i].data != nullptr) call_list_[i] = step.state[i];
            state = call_list_.data();
        }
    }
    const bool own = step.state == nullptr || state_.find(step.state, StateKind::schedule) == nullptr ||
                     state_.find(step.state, StateKind::schedule)->data == nullptr;
    if (complete || !own) state_changed(); // the list may name the engine's own memory
    const OfEngine of_engine{&outcome_memory_, !complete && own};
    run(arguments, state, workspace_.data(), &of_engine);
    lists_compared_ = true;
    ++calls_;
    if (arguments.flags & DSOPT_STEP_ACCUMULATED)
        for (Param &param : params_) param.accumulated = false;
}

void Optimizer::take_apply(const dsopt_step &step, bool &met) const {
    Arguments arguments = check_step(step, true);
    arguments.met = &met;
    check_state_list(step.state, step.state_count, true);
    const size_t bytes = layout().bytes, needed = bytes + slack_of(step.workspace);
    if (bytes != 0 && (step.workspace == nullptr || step.workspace_bytes < needed))
        throw Error(DSOPT_ERR_WORKSPACE, "dsopt_step.workspace has %zu bytes, %zu are needed",
                    step.workspace == nullptr ? size_t(0) : step.workspace_bytes, needed);
    check_scaler();
    const dsopt_tensor *const schedule = state_.find(step.state, StateKind::schedule);
    if (schedule != nullptr && schedule->data == state_[size_t(schedule - step.state)].data) state_changed();
    run(arguments, step.state, step.workspace, nullptr);
}

void Optimizer::ensure_workspace(void *stream) {
    const Device &device = context_->device();
    if (workspace_.data() == nullptr) {
        Memory workspace(context_, std::max<size_t>(workspace_bytes(), 64), stream);
        device.clear(static_cast<char *>(workspace.data()) + slack_of(workspace.data()) + layout().shared,
                     sizeof(SharedWords), stream);
        workspace_ = std::move(workspace);
    }
    if (!cache_) cache_ = device.loops().make_cache();
    call_list_.reserve(state_.size());
    if (outcome_memory_.data() != nullptr) return;
    Memory outcome(context_, sizeof(Outcome), stream);
    if (!device.is_host()) mirror_ = device.host_buffer(sizeof(Outcome));
    const Outcome first = no_outcome();
    if (mirror_.get() != nullptr) std::memcpy(mirror_.get(), &first, sizeof first);
    device.copy(outcome.data(), &first, sizeof first);
    outcome_memory_ = std::move(outcome);
}

} // namespace dsopt
