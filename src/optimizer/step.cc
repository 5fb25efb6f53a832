// SPDX-License-Identifier: Apache-2.0
// One step: checks the lists, makes the plan, passes it to the driver.
#include "base/sizes.h"
#include "base/struct_io.h"
#include "optimizer/plan.h"
#include "optimizer/ready.h"
#include "rules/options.h"
#include "step/agree.h"
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace dsopt {

namespace {

static_assert(sizeof(dsopt_tensor) == 24, "no padding: lists are compared byte by byte");

/// Returns the call without the addresses of its lists and without its stream, for a comparison byte by byte.
dsopt_step without_addresses(dsopt_step step) {
    static constexpr dsopt_tensor not_null{};
    for (const dsopt_tensor **list : {&step.grads, &step.params, &step.out, &step.state})
        if (*list != nullptr) *list = &not_null;
    step.stream = nullptr;
    return step;
}

bool same_list(const dsopt_tensor *now, const std::vector<dsopt_tensor> &before, int64_t count) {
    return now == nullptr || count == 0 || std::memcmp(now, before.data(), size_t(count) * sizeof *now) == 0;
}

void copy_list(std::vector<dsopt_tensor> &to, const dsopt_tensor *from, int64_t count) {
    if (from != nullptr && count != 0) std::memcpy(to.data(), from, size_t(count) * sizeof *from);
}

/// True if the lists differ in addresses only, and the new addresses are legal.
bool differs_in_addresses(const dsopt_tensor *now, const std::vector<dsopt_tensor> &before, int64_t count) {
    bool may = now != nullptr;
    for (int64_t i = 0; i < count && may; ++i) may = differs_in_address(now[i], before[size_t(i)]);
    return may;
}

/// Returns the plan of the matrices. `scratch`: memory of any alignment, NULL if none is needed.
MatrixPlan plan_matrices(const Optimizer &optimizer, const StepRequest &request, const StepMemory &memory,
                         const StepTable &table, char *scratch) {
    MatrixPlan plan = optimizer.matrices()->plan(optimizer.groups(), table, request.reuse != Reuse::nothing);
    plan.row = memory.matrix_row;
    plan.rows = memory.matrix_rows;
    plan.workspace = memory.matrices;
    if (scratch != nullptr) plan.scratch = scratch + (0 - uintptr_t(scratch)) % kCacheLine;
    return plan;
}

/// Runs a step. With DSOPT_OPTIMIZER_CHECK_RANKS: if it fails before the ranks compare their steps, reports this to the
/// other ranks.
template <class F> void run_or_report(Optimizer &optimizer, const dsopt_step *step, bool stateful, F &&body) {
    void *stream = nullptr; // of an unreadable dsopt_step: the default stream of the device
    bool ranks_compared = false;
    try {
        const dsopt_step known = read_struct(not_null(step, "step"), "dsopt_step");
        stream = known.stream;
        optimizer.finalize_groups();
        optimizer.context().device().check_stream(stream);
        body(known, ranks_compared);
    } catch (...) {
        if (!stateful) {
            if (checks_ranks(optimizer) && !ranks_compared) report_refusal(optimizer, stream);
            throw;
        }
        const CommUser user(&optimizer);
        if (checks_ranks(optimizer) && !ranks_compared && optimizer.may_report_refusal())
            report_refusal(optimizer, stream);
        optimizer.end_failed_step();
        throw;
    }
}

/// Returns the aligned part of a workspace.
char *aligned(void *workspace) { return static_cast<char *>(workspace) + alignment_padding(workspace); }

} // namespace

bool differs_in_address(const dsopt_tensor &now, const dsopt_tensor &before) {
    return now.numel == before.numel && now.dtype == before.dtype && now.reserved == before.reserved &&
           (now.data != nullptr) == (before.data != nullptr) &&
           // of an absent tensor no other field was checked, and its dtype may be 0
           (now.data == nullptr || reinterpret_cast<uintptr_t>(now.data) % dtype_size(now.dtype) == 0);
}

Optimizer::Planned::Planned(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                            void *workspace) :
    scratch(optimizer.host_scratch_, request.host ? 0 : optimizer.sizes().host_bytes),
    matrix_scratch(optimizer.matrix_scratch_, request.is_part ? 0 : optimizer.sizes().matrix_scratch),
    memory(optimizer.sizes(), aligned(workspace), request.host ? request.host : scratch.data()),
    table(memory.table, optimizer.sizes().shape),
    ranks(request.initial ? CommSet{} : optimizer.comms()) {
    if (!request.stateful) optimizer.context().device().clear(memory.control, kZeroedBytes, request.step.stream);
    const OneBit *const family = optimizer.onebit();
    if (family != nullptr)
        family->plan(optimizer.state(), state, table.onebit, memory.exchange, memory.factors, request.engine_schedule,
                     request.step.stream, onebit);
    const bool has_matrices = optimizer.matrices() != nullptr && !request.is_part;
    if (has_matrices) matrices = plan_matrices(optimizer, request, memory, table, matrix_scratch.data());
    plan = make_plan(optimizer, request, state, memory, table, family != nullptr ? &onebit.plan : nullptr,
                     has_matrices ? &matrices : nullptr);
    if (request.stateful) {
        plan.outcome = optimizer.outcome_.data();
        plan.execution.cache = optimizer.of_steps_.cache.get();
    }
    if (optimizer.context().checks_pointers() && !request.is_part) check_pointers(optimizer, request, plan);
    if (optimizer.parts() != nullptr && !request.initial)
        rows.emplace(plan_rows(optimizer, request, state, memory, plan));
    phases = phases_of(plan, rows ? &*rows : nullptr, ranks);
}

StepRun Optimizer::Planned::run(const Optimizer &optimizer, FunctionRef<void()> compare, int64_t compared_bytes) const {
    return {.context = optimizer.context(),
            .plan = plan,
            .phases = phases,
            .compare = compare,
            .compared_bytes = compared_bytes,
            .comms = ranks,
            .host_norms = memory.host_norms,
            .rows = rows ? &*rows : nullptr,
            .zeroed = rows && (plan.flags & DSOPT_STEP_ZERO_GRADS) ? memory.gradients : nullptr,
            .parts = {}};
}

void Optimizer::run(const StepRequest &request, const dsopt_tensor *state, void *workspace) const {
    const Planned planned(*this, request, state, workspace);
    const StepPlan &plan = planned.plan;
    const PhaseList &phases = planned.phases;
    if (request.stateful && context_->logs(DSOPT_LOG_TRACE) && std::exchange(of_steps_.logged, phases) != phases)
        context_->log(DSOPT_LOG_TRACE, "phases of a step: %s", to_text(phases, plan, planned.ranks).c_str());
    const bool engine_schedule = onebit() != nullptr && request.engine_schedule;
    if (engine_schedule) onebit()->invalidate_schedule(); // in case the step fails
    const bool checks = request.ranks_compared != nullptr && checks_ranks(*this);
    const bool checks_lists = !checks && request.stateful && derived_.sends_lists() && !of_steps_.lists_compared;
    const bool in_parts =
        request.stateful && ready_ && ready_->planned && (ready_->begun || request.buckets_are_averaged);
    ReadyGradients *const ready = in_parts ? ready_.get() : nullptr;
    const auto compare = [&] {
        if (request.stateful && ready_) ready_->ended = true;
        if (checks) *request.ranks_compared = true;
        if (checks || checks_lists)
            check_ranks(*this, plan, phases, planned.rows ? &*planned.rows : nullptr,
                        {.lists = !request.buckets_are_averaged,
                         .calls = checks,
                         .of = request.buckets_are_averaged ? Compared::Of::others : Compared::Of::all,
                         .gradients = {0, plan.count}},
                        request.stateful);
    };
    StepRun run = planned.run(*this, compare, checks || checks_lists ? kComparedBytes : 0);
    if (ready != nullptr) {
        const std::optional<Phase> phase = request.buckets_are_averaged ? ready->buckets->phase() : phase_of_parts();
        if (phase) run.parts = StepParts{*phase, ready->left()};
    }
    drive(run);
    if (request.stateful && desc_.skip_budget > 0) outcome_.enqueue_copy(context_->device(), request.step.stream);
    if (engine_schedule) onebit()->count_step(planned.onebit.plan);
}

/// The original's wrappers take one step of the base optimizer on zero gradients when they are constructed: counters
/// become 1, and decay is applied to the masters, not to the parameters.
void Optimizer::run_initial_step(const dsopt_tensor *params, const dsopt_tensor *state, void *workspace,
                                 void *stream) const {
    dsopt_step step{};
    step.params = params;
    step.stream = stream;
    run({step, 0, /*initial=*/true}, state, workspace);
}

void Optimizer::step(const dsopt_step *step) {
    run_or_report(*this, step, true,
                  [&](const dsopt_step &known, bool &ranks_compared) { execute_step(known, ranks_compared); });
}
void Optimizer::apply(const dsopt_step *step) {
    run_or_report(*this, step, false,
                  [&](const dsopt_step &known, bool &ranks_compared) { execute_apply(known, ranks_compared); });
}

void Optimizer::execute_step(const dsopt_step &step, bool &ranks_compared) {
    const bool in_parts = step.flags & DSOPT_STEP_READY;
    if (!in_parts) check_nothing_ready();
    const dsopt_step whole = in_parts ? complete_ready(step) : step;
    if (in_parts) order_after_calls(step.stream);
    execute_whole_step(whole, ranks_compared);
    if (ready_) ready_->clear();
}

void Optimizer::execute_whole_step(const dsopt_step &step, bool &ranks_compared) {
    check_skip_budget(step.stream);
    check_scaler();
    const Reuse reuse = reuse_of(step);
    if (reuse == Reuse::nothing) check_call(step);
    const Enqueues work(pending(), step.stream);
    ensure_workspace(step.stream);
    bool engine_schedule = false;
    const dsopt_tensor *const state = find_state(step, &engine_schedule);
    const StepRequest request{.step = step,
                              .flags = flags_of(step),
                              .stateful = true,
                              .engine_schedule = engine_schedule,
                              .reuse = reuse,
                              .host = of_steps_.call.tables.data(),
                              .buckets_are_averaged = exchanges_buckets(),
                              .ranks_compared = &ranks_compared};
    const CommUser user(this);
    if (exchanges_buckets()) finish_buckets(step); // reads tables of the last step
    of_steps_.call.version = 0;                    // in case the step fails
    run(request, state, of_steps_.workspace.data());
    store_call(request);
    count_call(step);
}

/// Throws SKIPS if the skip budget is used up. Uses the outcomes that have arrived on the host. It waits for the other
/// outcomes only if ranks must come to the same result; such steps are in no graph.
void Optimizer::check_skip_budget(void *stream) const {
    if (desc_.skip_budget <= 0) return;
    if (outcome_.is_copied() && has_peers(comms())) {
        (void)context_->device().finished(stream); // refuses a stream that is being captured
        wait_for_calls(/*replays=*/false);
    }
    const Outcome *const known = outcome_.known();
    if (known != nullptr && known->skipped_in_row >= desc_.skip_budget)
        throw Error(DSOPT_ERR_SKIPS,
                    "%lld steps in a row were skipped, the budget is %d; the last one found %lld non-finite "
                    "elements",
                    ll(known->skipped_in_row), desc_.skip_budget, ll(known->nonfinite));
}

/// Compares the call with the last call, and returns which of its tables can be reused. Lists are compared with the
/// last call's lists and not with the tables, which occupy five times as many cache lines.
Reuse Optimizer::reuse_of(const dsopt_step &step) {
    const CallMemory &last = of_steps_.call;
    if (last.version != registry_.version()) return Reuse::nothing;
    const dsopt_step call = without_addresses(step);
    if (std::memcmp(&call, &last.call, sizeof call) != 0 || !same_list(step.params, last.params, step.count) ||
        !same_list(step.out, last.out, step.count) || !same_list(step.state, last.state, step.state_count))
        return Reuse::nothing;
    if (same_list(step.grads, last.grads, step.count)) return Reuse::all;
    return differs_in_addresses(step.grads, last.grads, step.count) ? Reuse::all_but_addresses : Reuse::nothing;
}

/// Checks a call that differs from the last call.
void Optimizer::check_call(const dsopt_step &step) const {
    check_step(*this, step, false);
    if (step.workspace != nullptr || step.workspace_bytes != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.workspace is for dsopt_optimizer_apply");
    if (step.state != nullptr)
        check_state_list(*this, step.state, step.state_count, false);
    else if (step.state_count != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dsopt_step.state_count is %lld without state", ll(step.state_count));
}

/// Returns the state list of a call: the caller's tensors, and for all others the optimizer's, which are allocated if
/// necessary. Sets `engine_schedule` to true if the schedule is the optimizer's.
const dsopt_tensor *Optimizer::find_state(const dsopt_step &step, bool *engine_schedule) {
    const auto has_memory = [&](size_t i) { return step.state[i].data != nullptr || state()[i].numel == 0; };
    bool complete = step.state != nullptr; // the engine needs no memory of its own
    for (size_t i = 0; i < state().size() && complete; ++i) complete = has_memory(i);
    const bool uses_engine_schedule =
        step.state == nullptr || state().data<void>(step.state, StateKind::schedule) == nullptr;
    *engine_schedule = uses_engine_schedule && !complete;
    if (!complete) ensure_state(step.params, step.stream);
    if (!*engine_schedule) state_changed(); // the list may name the engine's own memory
    if (complete) return step.state;
    if (step.state == nullptr) return state().list().data();
    std::vector<dsopt_tensor> &list = of_steps_.call.all_state;
    for (size_t i = 0; i < state().size(); ++i)
        list[i] = step.state[i].data != nullptr ? step.state[i] : state().list()[i];
    return list.data();
}

/// Stores the call for reuse_of(), unless its jobs change from step to step, as with the 1-bit family and with
/// accumulated gradients.
void Optimizer::store_call(const StepRequest &request) {
    if (onebit() != nullptr || (request.flags & DSOPT_STEP_ACCUMULATED) || context_->checks_pointers()) return;
    const dsopt_step &step = request.step;
    CallMemory &last = of_steps_.call;
    if (request.reuse == Reuse::nothing) {
        last.call = without_addresses(step);
        copy_list(last.params, step.params, step.count);
        copy_list(last.out, step.out, step.count);
        copy_list(last.state, step.state, step.state_count);
    }
    if (request.reuse != Reuse::all) copy_list(last.grads, step.grads, step.count);
    last.version = registry_.version();
}

void Optimizer::count_call(const dsopt_step &step) {
    of_steps_.lists_compared = true;
    calls_ = std::min(calls_ + 1, kMaxCalls);
    if (step.flags & DSOPT_STEP_ACCUMULATED)
        for (Param &param : registry_.change().params) param.accumulated = false;
}

void Optimizer::execute_apply(const dsopt_step &step, bool &ranks_compared) const {
    if (step.flags & DSOPT_STEP_READY) check_options<At::step>({facts::ready, facts::functional});
    check_step(*this, step, true);
    check_state_list(*this, step.state, step.state_count, true);
    const size_t needed = sizes().workspace_bytes + alignment_padding(step.workspace);
    if (step.workspace == nullptr || step.workspace_bytes < needed)
        throw Error(DSOPT_ERR_WORKSPACE, "dsopt_step.workspace has %zu bytes, %zu are needed",
                    step.workspace == nullptr ? size_t(0) : step.workspace_bytes, needed);
    check_scaler();
    if (state().uses_engine_memory(step.state, StateKind::schedule)) state_changed();
    const Enqueues work(pending(), step.stream);
    run({.step = step, .flags = flags_of(step), .ranks_compared = &ranks_compared}, step.state, step.workspace);
}

void Optimizer::ensure_workspace(void *stream) {
    const Device &device = context_->device();
    if (of_steps_.workspace.data() == nullptr) {
        Memory workspace(context_, workspace_bytes(), stream);
        device.clear(static_cast<char *>(workspace.data()) + alignment_padding(workspace.data()), kZeroedBytes, stream);
        CallMemory &call = of_steps_.call;
        for (auto *list : {&call.grads, &call.params, &call.out}) list->resize(params().size());
        for (auto *list : {&call.state, &call.all_state}) list->resize(state().size());
        call.tables.resize(sizes().host_bytes);
        of_steps_.workspace = std::move(workspace);
    }
    if (!of_steps_.cache) of_steps_.cache = device.kernels().make_cache();
    outcome_.make(context_, stream);
}

} // namespace dsopt
