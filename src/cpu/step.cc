// SPDX-License-Identifier: Apache-2.0
#include "cpu/step.h"
#include <algorithm>

namespace dsopt::cpu {
namespace {

/// Bytes that an element of a tensor moves, the ruler along which a list is cut.
int64_t bytes_of(const TensorJob &job) {
    int64_t bytes = 2 * int64_t(dtype_size(job.weight_type)) + int64_t(dtype_size(job.grad_type));
    for (const Moment &moment : job.moment)
        if (moment.data != nullptr) bytes += 2 * int64_t(dtype_size(moment.type));
    if (job.copy != nullptr) bytes += int64_t(dtype_size(job.copy_type));
    if (job.out != nullptr) bytes += int64_t(dtype_size(job.out_type));
    return bytes;
}

} // namespace

Step::Step(const StepPlan &plan, const Kernels &kernels, const OneBitKernels &onebit) :
    plan_(plan),
    kernels_(kernels),
    cut_(
        plan.count, static_cast<int64_t *>(plan.extra), plan.chunk, plan.parallel,
        [&](int64_t i) { return bytes_of(plan.jobs[i]); }, [&](int64_t i) { return plan.jobs[i].numel; }),
    streaming_(leaves_caches(cut_.bytes())) {
    if (plan.onebit != nullptr) onebit_.emplace(plan, kernels, onebit, cut_, static_cast<const SpanSource &>(*this));
    if (!plan.timing) return;
    std::fill(std::begin(plan.outcome->ms), std::end(plan.outcome->ms), 0.0);
    last_mark_ = Clock::now();
}

void Step::mark(int phase) {
    if (!plan_.timing) return;
    const auto now = Clock::now();
    if (phase >= 0) plan_.outcome->ms[phase] += std::chrono::duration<double, std::milli>(now - last_mark_).count();
    last_mark_ = now;
}

Span Step::span_of(int64_t i, int64_t begin, int64_t end) const {
    return {.job = &plan_.jobs[i],
            .scalars = &plan_.scalars[i],
            .begin = begin,
            .end = end,
            .flags = plan_.flags,
            .sums = plan_.report_norms,
            .sums_a = plan_.sums_a,
            .sums_b = plan_.sums_b,
            .trust = plan_.trust_ratio != nullptr ? plan_.trust_ratio[i] : 1.0f,
            .step = plan_.step[i] + 1,
            .streaming = streaming_};
}

/// Loops of the 1-bit family update the tensor, or nobody does.
bool Step::is_elsewhere(int64_t i) const { return onebit_ && onebit_->owns(i); }

void Step::inspect(bool) {
    if (plan_.read_gradients)
        cut_.run([&](int64_t i) { return plan_.jobs[i].numel; },
                 [&](int64_t i, int64_t begin, int64_t end) {
                     const TensorJob &job = plan_.jobs[i];
                     if (!job.present || job.grad == nullptr) return;
                     const int64_t leaf = job.first_leaf + begin / kLeaf;
                     kernels_.inspect(job.grad, job.grad_type, begin, end, plan_.sums_a, plan_.bad, nullptr, leaf);
                     // The original takes the experts' part of the norm from their weights. What is bad stays the
                     // gradient's.
                     if (plan_.wrapper == Wrapper::fused && job.expert != 0)
                         kernels_.squares(job.weight, job.weight_type, begin, end, plan_.sums_a, leaf);
                 });
    fold_gradients(plan_, table(), plan_.control->found);
}

void Step::decide() {
    if (decide_step(plan_, table()))
        for_stretches(plan_,
                      [&](int64_t begin, int64_t end, int32_t group) { make_all_scalars(plan_, begin, end, group); });
}

void Step::update() {
    const bool skipped = is_skipped();
    cut_.run([&](int64_t i) { return plan_.jobs[i].numel; },
             [&](int64_t i, int64_t begin, int64_t end) {
                 const TensorJob &job = plan_.jobs[i];
                 const Rule rule = plan_.groups[job.group].rule;
                 const Span span = span_of(i, begin, end);
                 const bool elsewhere = is_elsewhere(i);
                 if (skipped || !job.present || (elsewhere && plan_.onebit->stage == Stage::dry))
                     kernels_.unchanged(span);
                 else if (elsewhere)
                     return;
                 else if (sweeps_of(rule) == 2)
                     kernels_.lamb_moments(rule, span);
                 else
                     kernels_.update(rule, span);
             });
    if (skipped || !plan_.has_lamb) return;
    for (int64_t i = 0; i < plan_.count; ++i) {
        const TensorJob &job = plan_.jobs[i];
        if (job.present && sweeps_of(plan_.groups[job.group].rule) == 2 && !is_elsewhere(i))
            find_trust(plan_, i, fold_leaves(plan_.sums_a, job), fold_leaves(plan_.sums_b, job));
    }
}

void Step::update_weights(bool shared) {
    if (is_skipped()) return;
    for (int64_t i = 0; shared && i < plan_.count; ++i) take_shared_trust(plan_, i);
    cut_.run([&](int64_t i) { return plan_.jobs[i].numel; },
             [&](int64_t i, int64_t begin, int64_t end) {
                 const Rule rule = plan_.groups[plan_.jobs[i].group].rule;
                 if (plan_.jobs[i].present && sweeps_of(rule) == 2 && !is_elsewhere(i))
                     kernels_.lamb_weights(rule, span_of(i, begin, end));
             });
}

void Step::finish() {
    if (!is_skipped()) {
        for (int64_t i = 0; i < plan_.count; ++i) plan_.step[i] += counts_alone(plan_, i);
        for_stretches(plan_,
                      [&](int64_t begin, int64_t end, int32_t group) { count_together(plan_, begin, end, group); });
        if (plan_.report_norms) fold_updates(plan_, *plan_.outcome);
    }
    if (plan_.report != nullptr) write_report(plan_, *plan_.outcome, plan_.report);
}

} // namespace dsopt::cpu
