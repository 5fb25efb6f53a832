// SPDX-License-Identifier: Apache-2.0
// One step: check the lists, make the plan, hand it to the driver.
#include "base/sizes.h"
#include "optimizer/plan.h"
#include "step/agree.h"
#include <algorithm>

namespace dsopt {

namespace {

/// With DSOPT_OPTIMIZER_CHECK_RANKS: a rank whose call fails before the ranks have compared tells the others.
template <class F> void with_refusal(const Optimizer &optimizer, void *stream, F &&body) {
    bool met = false;
    try {
        body(met);
    } catch (...) {
        if (checks_ranks(optimizer) && !met) refuse_to_ranks(optimizer, stream);
        throw;
    }
}

} // namespace

void Optimizer::run(const StepRequest &request, const dsopt_tensor *state, void *workspace) const {
    const Device &device = context_->device();
    void *const stream = request.step.stream;
    char *const begin = static_cast<char *>(workspace) + slack_of(workspace);
    HostScratch scratch(host_scratch_, request.host ? 0 : StepMemory(*this, nullptr, nullptr).host_bytes);
    const StepMemory memory(*this, begin, request.host ? request.host : scratch.data());
    if (!request.remembers) device.clear(memory.control, kZeroedBytes, stream);

    const StepTable table(memory.table, shape_of(*this));
    const bool own_schedule = onebit_ && request.own_schedule;
    PlannedOneBit onebit;
    if (onebit_)
        onebit_->plan(state_, state, table.onebit, memory.exchange, memory.factors, own_schedule,
                      stream, onebit);
    StepPlan plan = make_plan(*this, request, state, memory, table, onebit_ ? &onebit.plan : nullptr);
    if (request.remembers) {
        plan.outcome = outcome_.data();
        plan.how.cache = cache_.get();
    }
    if (context_->checks_pointers()) check_pointers(*this, plan);

    const CommSet ranks = request.initial ? CommSet{} : comms();
    const bool averages = onebit_ && onebit_->setup().mean_numel != 0 && !request.initial;
    GradientMeans means(memory.lists, plan.count);
    if (averages) onebit_->plan_means(onebit.plan, table.jobs, memory.mean, means, stream);
    if (own_schedule) onebit_->forget_schedule(); // should it fail
    const bool checks = request.met != nullptr && checks_ranks(*this);
    const bool checks_lists = // other lists would be other messages
        !checks && request.remembers && !lists_compared_ && onebit_ && onebit_->setup().compresses;
    const auto compare = [&] {
        if (checks) *request.met = true;
        if (checks || checks_lists) check_ranks(*this, plan, checks_lists, request.remembers);
    };
    drive({.context = *context_,
           .plan = plan,
           .compare = compare,
           .compared_bytes = checks || checks_lists ? kComparedBytes : 0,
           .comms = ranks,
           .host_norms = memory.host_norms,
           .means = averages ? &means : nullptr,
           .mean_scratch = onebit_ && onebit_->setup().mean_scratch != 0 ? memory.mean + onebit_->setup().mean_numel
                                                                         : onebit.buffers.slices});
    if (request.remembers && desc_.skip_budget > 0) outcome_.enqueue_copy(device, stream);
    if (own_schedule) onebit_->count_step(onebit.plan);
}

/// The original's wrappers take one step of the base optimizer on zero gradients when they are made: counters become 1
/// and decay is applied to the masters, not to the parameters.
void Optimizer::take_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace,
                                  void *stream) const {
    dsopt_step step{};
    step.params = params;
    step.stream = stream;
    run({step, 0, /*initial=*/true}, state, workspace);
}

void Optimizer::step(const dsopt_step &step) {
    with_refusal(*this, step.stream, [&](bool &met) {
        context_->device().check_stream(step.stream);
        take_step(step, met);
    });
}
void Optimizer::apply(const dsopt_step &step) const {
    with_refusal(*this, step.stream, [&](bool &met) {
        context_->device().check_stream(step.stream);
        take_apply(step, met);
    });
}

void Optimizer::take_step(const dsopt_step &step, bool &met) {
    // Uses the results of earlier steps that have arrived. The host waits for the others only if ranks must come to the
    // same answer; such steps are in no graph.
    if (desc_.skip_budget > 0 && outcome_.is_copied() && has_peers(comms())) {
        (void)context_->device().finished(step.stream); // refuses a stream that is being captured
        wait_for_calls(/*replays=*/false);
    }
    const Outcome *const known = outcome_.known();
    if (known != nullptr && desc_.skip_budget > 0 && known->skipped_in_row >= desc_.skip_budget)
        throw Error(DSOPT_ERR_SKIPS,
                    "%lld steps in a row were skipped, the budget is %d; the last one found %lld non-finite "
                    "elements",
                    ll(known->skipped_in_row), desc_.skip_budget, ll(known->nonfinite));
    check_scaler();
    const Repeats repeats = last_step_.repeats(step);
    const bool is_new = repeats == Repeats::nothing;
    StepRequest request{step, is_new ? check_step(*this, step, false) : last_step_.request_flags()};
    request.met = &met;
    request.repeats = repeats;
    if (step.workspace != nullptr || step.workspace_bytes != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.workspace is for dsopt_optimizer_apply");
    bool complete = false; // the caller's list covers everything: the engine needs no memory of its own
    if (step.state != nullptr) {
        if (is_new) check_state_list(*this, step.state, step.state_count, false);
        complete = true;
        for (size_t i = 0; i < state_.size(); ++i)
            complete = complete && (step.state[i].data != nullptr || state_[i].numel == 0);
    } else if (step.state_count != 0) {
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.state_count is %lld without state", ll(step.state_count));
    }
    const Enqueues work(pending(), step.stream);
    ensure_workspace(step.stream);
    const dsopt_tensor *state = step.state;
    if (!complete) {
        ensure_state(step.params, step.stream);
        if (step.state != nullptr && is_new) {
            call_list_ = state_list_;
            for (size_t i = 0; i < call_list_.size(); ++i)
                if (step.state[i].data != nullptr) call_list_[i] = step.state[i];
        }
        state = step.state != nullptr ? call_list_.data() : state_list_.data();
    }
    const bool own = step.state == nullptr || state_.data<void>(step.state, StateKind::schedule) == nullptr;
    if (complete || !own) state_changed(); // the list may name the engine's own memory
    request.remembers = true;
    request.host = host_memory_.data();
    last_step_.forget(); // should it fail
    request.own_schedule = !complete && own;
    run(request, state, workspace_.data());
    // Jobs of the 1-bit family and accumulated gradients differ from step to step.
    if (!onebit_ && !(request.flags & DSOPT_STEP_ACCUMULATED) && !context_->checks_pointers())
        last_step_.keep(step, request.flags, repeats);
    lists_compared_ = true;
    calls_ = std::min(calls_ + 1, kMostCalls);
    if (request.flags & DSOPT_STEP_ACCUMULATED)
        for (Param &param : params_) param.accumulated = false;
}

void Optimizer::take_apply(const dsopt_step &step, bool &met) const {
    StepRequest request{step, check_step(*this, step, true)};
    request.met = &met;
    check_state_list(*this, step.state, step.state_count, true);
    const size_t bytes = StepMemory(*this, nullptr, nullptr).bytes, needed = bytes + slack_of(step.workspace);
    if (step.workspace == nullptr || step.workspace_bytes < needed)
        throw Error(DSOPT_ERR_WORKSPACE, "dsopt_step.workspace has %zu bytes, %zu are needed",
                    step.workspace == nullptr ? size_t(0) : step.workspace_bytes, needed);
    check_scaler();
    const dsopt_tensor *const schedule = state_.find(step.state, StateKind::schedule);
    if (schedule != nullptr && schedule->data == state_[size_t(schedule - step.state)].data) state_changed();
    const Enqueues work(pending(), step.stream);
    run(request, step.state, step.workspace);
}

void Optimizer::ensure_workspace(void *stream) {
    const Device &device = context_->device();
    if (workspace_.data() == nullptr) {
        Memory workspace(context_, workspace_bytes(), stream);
        device.clear(static_cast<char *>(workspace.data()) + slack_of(workspace.data()), kZeroedBytes, stream);
        host_memory_.resize(StepMemory(*this, nullptr, nullptr).host_bytes);
        workspace_ = std::move(workspace);
    }
    if (!cache_) cache_ = device.loops().make_cache();
    call_list_.reserve(state_.size());
    outcome_.make(context_, stream);
}

} // namespace dsopt
