// SPDX-License-Identifier: Apache-2.0
// Between the two passes: is the step taken, what are gradients divided by, which step is it for each tensor. A handful of
// scalars; the CUDA backend runs the same functions in one thread, so that the host never has to look.
#pragma once
#include "step_plan.h"

namespace dsopt {

/// What pass 1 found. `squares` of a group are of its gradients as given.
struct GradientStats {
    double total_squares = 0;
    int64_t nonfinite = 0;
    int64_t first_bad = -1;
};

DSOPT_HD bool is_finite(double value) { return value - value == 0; }

/// Sums the leaves of every tensor in order, then tensors in list order; that order is part of the result.
/// `group_squares` has one entry a group.
DSOPT_HD GradientStats fold_gradients(const StepPlan &plan, double *group_squares) {
    GradientStats stats;
    for (int64_t g = 0; g < plan.group_count; ++g) group_squares[g] = 0;
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        if (job.grad == nullptr) continue;
        double squares = 0;
        int64_t bad = 0;
        for (int64_t leaf = job.first_leaf; leaf < job.first_leaf + leaves_of(job.numel); ++leaf) {
            squares += plan.sums_a[leaf];
            bad += plan.bad[leaf];
        }
        group_squares[job.group] += squares;
        stats.total_squares += squares;
        stats.nonfinite += bad;
        if (bad != 0 && stats.first_bad < 0) stats.first_bad = i;
    }
    return stats;
}

/// Norms that the caller already had, in place of pass 1. A negative or non-finite one means overflow.
DSOPT_HD GradientStats given_norms(const StepPlan &plan, double *group_squares) {
    GradientStats stats;
    for (int64_t g = 0; g < plan.group_count; ++g) {
        const double norm = plan.grad_norms[g];
        group_squares[g] = norm < 0 ? NAN : norm * norm;
        stats.total_squares += group_squares[g];
    }
    return stats;
}

/// True if the step is taken. Writes one divisor a group and what the step tells about its gradients.
DSOPT_HD bool decide(const StepPlan &plan, const GradientStats &stats, const double *group_squares, double *divisors,
                     Outcome &outcome) {
    const bool have_norms = plan.read_gradients || plan.grad_norms != nullptr;
    const double scale = plan.grad_scale != nullptr ? double(*plan.grad_scale) : 1.0;
    const double norm = sqrt(stats.total_squares);
    bool skip = plan.skip != nullptr && *plan.skip != 0;
    if (plan.skip_nonfinite && have_norms)
        skip = skip || stats.nonfinite != 0 || !is_finite(stats.total_squares) || !(scale > 0) || !is_finite(scale);
    for (int64_t g = 0; g < plan.group_count; ++g) {
        const double all = clip_divisor(scale, norm, plan.max_norm);
        const double own = clip_divisor(scale, sqrt(group_squares[g]), plan.groups[g].max_norm);
        divisors[g] = own > all ? own : all;
    }
    outcome.skipped = skip;
    outcome.nonfinite = stats.nonfinite;
    outcome.first_bad = stats.first_bad;
    outcome.grad_norm = have_norms ? norm / scale : NAN;
    outcome.weight_norm = outcome.update_norm = NAN;
    outcome.divisor = plan.group_count != 0 ? divisors[0] : scale;
    if (skip) {
        outcome.divisor = 0;
        ++outcome.total_skipped;
        ++outcome.skipped_in_row;
    } else {
        outcome.skipped_in_row = 0;
    }
    return !skip;
}

/// Steps of group `g`, tensors [begin, end). Standard mode counts each tensor that has a gradient by itself.
///
/// The original's fused Adam counts in the state of the last tensor of the group that has a gradient, once for every parameter
/// dtype present, in the order f16, bf16, f32, and uses that count for all tensors of the dtype; compat mode does the same.
DSOPT_HD void advance_group(const StepPlan &plan, int64_t g, int64_t begin, int64_t end, double divisor) {
    const Hyper &hyper = plan.groups[g];
    const double lr = plan.lr != nullptr ? double(plan.lr[g]) : hyper.lr;
    if (!hyper.compat || is_lamb(hyper.rule)) {
        Scalars scalars{};
        int64_t step = -1; // the one that `scalars` is for: tensors of a group mostly step together
        for (int64_t i = begin; i < end; ++i) {
            if (plan.jobs[i].grad == nullptr) continue;
            if (++plan.step[i] != step) {
                step = plan.step[i];
                scalars = make_scalars(hyper, lr, step, divisor);
            }
            plan.scalars[i] = scalars;
        }
        return;
    }
    int64_t last = -1;
    for (int64_t i = begin; i < end; ++i)
        if (plan.jobs[i].grad != nullptr) last = i;
    const Dtype order[] = {Dtype::f16, Dtype::bf16, Dtype::f32};
    for (const Dtype dtype : order) {
        bool counted = false;
        Scalars scalars{};
        for (int64_t i = begin; i < end; ++i) {
            if (plan.jobs[i].grad == nullptr || plan.jobs[i].weight_type != dtype) continue;
            if (!counted) scalars = make_scalars(hyper, lr, ++plan.step[last], divisor);
            counted = true;
            plan.scalars[i] = scalars;
        }
    }
}

DSOPT_HD void write_report(const Outcome &outcome, float *report) {
    for (int i = 0; i < DSOPT_REPORT_FLOATS; ++i) report[i] = 0;
    report[DSOPT_R_SKIPPED] = float(outcome.skipped);
    report[DSOPT_R_GRAD_NORM] = float(outcome.grad_norm);
    report[DSOPT_R_WEIGHT_NORM] = float(outcome.weight_norm);
    report[DSOPT_R_UPDATE_NORM] = float(outcome.update_norm);
    report[DSOPT_R_NONFINITE] = float(outcome.nonfinite);
    report[DSOPT_R_FIRST_BAD] = float(outcome.first_bad);
    report[DSOPT_R_DIVISOR] = float(outcome.divisor);
}

} // namespace dsopt
