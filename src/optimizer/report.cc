// SPDX-License-Identifier: Apache-2.0
// The outcome of the last steps, and the next step's reduction of gradients.
#include "base/struct_io.h"
#include "optimizer/optimizer.h"
#include <cmath>
#include <cstdio>
#include <cstring>

namespace dsopt {

namespace {

Outcome no_outcome() {
    Outcome outcome{};
    outcome.first_bad = -1;
    outcome.grad_norm = outcome.dense_norm = outcome.expert_norm = outcome.weight_norm = outcome.update_norm = NAN;
    outcome.scale_used = 1;
    return outcome;
}

} // namespace

void LastOutcome::make(const std::shared_ptr<const Context> &context, void *stream) {
    if (data() != nullptr) return;
    const Device &device = context->device();
    (void)device.finished(stream); // refuses a stream that is being captured
    Memory memory(context, sizeof(Outcome), stream);
    if (!device.is_host()) mirror_ = device.host_buffer(sizeof(Outcome));
    const Outcome first = no_outcome();
    if (mirror_) std::memcpy(mirror_.get(), &first, sizeof first);
    device.enqueue_copy(memory.data(), &first, sizeof first, stream);
    memory_ = std::move(memory);
}

Outcome LastOutcome::read(const Device &device) const {
    Outcome outcome = no_outcome();
    if (data() == nullptr) return outcome;
    device.copy(&outcome, data(), sizeof outcome);
    return outcome;
}

void LastOutcome::change(const Device &device, void (*change)(Outcome &)) {
    if (data() == nullptr) return;
    Outcome outcome = read(device);
    change(outcome);
    device.copy(data(), &outcome, sizeof outcome);
    if (mirror_) std::memcpy(mirror_.get(), &outcome, sizeof outcome);
}

void LastOutcome::enqueue_copy(const Device &device, void *stream) const {
    if (mirror_) device.enqueue_copy(mirror_.get(), data(), sizeof(Outcome), stream);
}

dsopt_report Optimizer::report() const {
    dsopt_report r{};
    wait_for_calls();
    const Outcome outcome = outcome_.read(context_->device());
    r.calls = calls_;
    r.skipped = outcome.total_skipped;
    r.skipped_in_row = outcome.skipped_in_row;
    r.nonfinite = outcome.nonfinite;
    r.first_bad = outcome.first_bad;
    if (outcome.first_bad >= 0) r.first_bad_name = params()[size_t(outcome.first_bad)].name.c_str();
    r.last_skipped = outcome.skipped;
    r.kind = outcome.kind;
    r.reasons = outcome.reasons;
    r.loss_scale = attachments_.scaler ? attachments_.scaler->info().scale : 1;
    r.scale_used = outcome.scale_used;
    r.grad_norm = outcome.grad_norm;
    r.dense_norm = outcome.dense_norm;
    r.expert_norm = outcome.expert_norm;
    r.weight_norm = outcome.weight_norm;
    r.update_norm = outcome.update_norm;
    r.divisor = outcome.divisor;
    std::memcpy(r.ms, outcome.ms, sizeof r.ms);
    if (of_steps_.cache) of_steps_.cache->add_phase_times(r.ms);
    r.resharded_from = resharded_from_;
    for (const StateEntry &entry : state()) r.state_bytes += int64_t(entry.bytes());
    r.workspace_bytes = groups().empty() ? 0 : int64_t(workspace_bytes());
    return r;
}

void Optimizer::log_changes(const dsopt_report &report) {
    const int64_t skips = report.skipped - logged_.skipped;
    const double before = logged_.loss_scale != 0 ? logged_.loss_scale : report.loss_scale;
    const bool scale_changed = report.loss_scale != before && !(std::isnan(report.loss_scale) && std::isnan(before));
    char skipped[64] = "", scale[96] = "";
    if (skips > 0)
        std::snprintf(skipped, sizeof skipped, "%lld %s skipped since the last report%s", ll(skips),
                      skips == 1 ? "step was" : "steps were", scale_changed ? "; " : "");
    if (scale_changed)
        std::snprintf(scale, sizeof scale, "the loss scale changed from %.10g to %.10g", before, report.loss_scale);
    logged_.skipped = report.skipped;
    logged_.loss_scale = report.loss_scale;
    if (skips > 0 || scale_changed) context_->log(DSOPT_LOG_INFO, "call %lld: %s%s", ll(report.calls), skipped, scale);
}

void write_reduction(const Optimizer &optimizer, const dsopt_tensor *schedule, int32_t *reduction, void *stream) {
    check_groups(optimizer);
    not_null(reduction, "reduction");
    check_aligned(reduction, sizeof *reduction, "reduction");
    const StateEntry *const entry = optimizer.state().find(StateKind::schedule);
    if ((schedule != nullptr) != (entry != nullptr))
        throw Error(DSOPT_ERR_ARGUMENT,
                    entry != nullptr ? "schedule is NULL" : "schedule is given, and no group is of the 1-bit family");
    if (entry != nullptr) check_state_tensor(optimizer, *schedule, *entry, true);
    const Enqueues work(optimizer.pending(), stream);
    const WriteReduction function{entry != nullptr ? optimizer.onebit()->setup().rules : ScheduleRules{},
                                  entry != nullptr ? static_cast<const ScheduleState *>(schedule->data) : nullptr,
                                  reduction};
    optimizer.context().device().kernels().run_in_one_thread(function, stream);
}

dsopt_schedule_info decode_schedule(const Optimizer &optimizer, const int32_t *words) {
    if (optimizer.onebit() == nullptr)
        throw Error(DSOPT_ERR_UNSUPPORTED, "no group is of the 1-bit family: there is no schedule");
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
    info.reduction = next_reduction_of(optimizer.onebit()->setup().rules, &state);
    return info;
}

int32_t next_reduction(const Optimizer &optimizer, int64_t call) {
    check_groups(optimizer);
    if (call < 0 || call > INT32_MAX) throw Error(DSOPT_ERR_ARGUMENT, "call is %lld, not in [0, 2^31)", ll(call));
    if (optimizer.onebit() == nullptr) return DSOPT_REDUCTION_FULL;
    const bool reads = call == 0 && optimizer.state().find(StateKind::schedule)->data != nullptr;
    if (reads && !optimizer.onebit()->knows_schedule()) optimizer.wait_for_tensors();
    return optimizer.onebit()->next_reduction(optimizer.state(), call, optimizer.wrapper() != Wrapper::none);
}

} // namespace dsopt
