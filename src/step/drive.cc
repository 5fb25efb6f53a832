// SPDX-License-Identifier: Apache-2.0
#include "step/drive.h"
#include "exchange/exchange.h"
#include "step/agree.h"
#include "step/onebit.h"

namespace dsopt {
namespace {

/// Reserves memory of the comms for every collective of a step.
void reserve_messages(const StepRun &run) {
    const StepPlan &plan = run.plan;
    void *const stream = plan.execution.stream;
    const auto [data, model, experts, expert_count, node] = run.comms;
    for (Comm *comm : {data, node})
        if (comm != nullptr) comm->reserve({.all_reduce = run.compared_bytes}, stream, Place::host);
    reserve_norms(run);
    if (model != nullptr && plan.shards.count != 0)
        model->reserve({.all_reduce = int64_t(plan.shards.bytes())}, stream, Place::backend);
    if (run.parts != nullptr) reserve_parts(run);
    if (run.means != nullptr) reserve_sum(data, node, run.means->longest(), stream);
    if (plan.onebit != nullptr && plan.onebit->exchanges)
        reserve_exchange(data, node, *plan.onebit->exchange->layout, stream);
}

/// Runs pass 1 on this rank's parts and folds the results of all ranks.
void inspect_parts(const StepRun &run, StepKernels &kernels) {
    clear_sums(run, /*counts=*/true);
    kernels.inspect(Fold::none);
    if (run.plan.policy.read_gradients) complete_leaves(run, run.plan.leaf.sums_a);
    kernels.fold_gradients();
}

/// Runs Passes::elementwise and Passes::reduced, in which sums are followed by factors, then by weights.
void update(const StepRun &run, StepKernels &kernels) {
    const StepPolicy &policy = run.plan.policy;
    const bool shards = clear_shard_sums(run, false),
               completes = policy.parts && (policy.reduces || policy.report_norms);
    if (completes) clear_sums(run, /*counts=*/false);
    kernels.update();
    if (completes)
        for (double *sums : {run.plan.leaf.sums_a, run.plan.leaf.sums_b}) complete_leaves(run, sums);
    if (policy.parts && policy.reduces) kernels.find_trust();
    if (shards) all_reduce_shards(run, false);
    if (policy.reduces) kernels.update_weights(shards);
}

void run_phases(const StepRun &run, StepKernels &kernels) {
    if (run.means != nullptr) run.means->average(run.context, run.comms, run.mean_scratch, run.plan.execution);
    const bool agrees = has_peers(run.comms);
    kernels.mark(-1);
    if (run.parts != nullptr)
        inspect_parts(run, kernels);
    else
        kernels.inspect(agrees ? Fold::table : Fold::decide);
    kernels.mark(DSOPT_MS_OVERFLOW_CHECK);
    if (agrees) all_reduce_norms(run);
    kernels.mark(DSOPT_MS_COMPUTE_NORM);
    kernels.decide();
    kernels.mark(DSOPT_MS_UNSCALE_AND_CLIP);
    if (kernels.onebit() != nullptr) update_onebit(run, kernels);
    update(run, kernels);
    if (kernels.onebit() != nullptr) end_onebit(run, kernels);
    if (run.parts != nullptr) kernels.finish();
    kernels.mark(DSOPT_MS_BASIC_STEP);
    if (run.parts == nullptr) return;
    gather_weights(run);
    kernels.mark(DSOPT_MS_EXCHANGE);
}

} // namespace

void drive(const StepRun &run) {
    const Device &device = run.context.device();
    const auto &[data, model, experts, expert_count, node] = run.comms;
    const bool alone = data == nullptr && model == nullptr && expert_count == 0 && node == nullptr;
    device.kernels().run_step(run.plan, [&](StepKernels &kernels) {
        if (alone) return run_phases(run, kernels);
        reserve_messages(run);
        run.compare();
        unusable_on_failure(run.comms, [&] { run_phases(run, kernels); });
    });
    const Execution &execution = run.plan.execution;
    if (run.means != nullptr && (run.plan.flags & DSOPT_STEP_ZERO_GRADS)) run.means->zero_originals(device, execution);
    if (run.zeroed != nullptr) device.kernels().zero(run.zeroed, run.plan.count, execution.parallel, execution.stream);
}

} // namespace dsopt
