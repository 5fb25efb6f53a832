// SPDX-License-Identifier: Apache-2.0
#include "step/drive.h"
#include "exchange/exchange.h"
#include "step/agree.h"
#include "step/average.h"
#include "step/gather.h"
#include "step/matrices.h"
#include "step/onebit.h"

namespace dsopt {
namespace {

bool averages(const StepRun &run) {
    return run.rows != nullptr && (run.rows->averaged != nullptr || run.rows->averaged_in_node != nullptr);
}

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
    if (plan.policy.completes) reserve_gather(run);
    if (averages(run)) reserve_average(run);
    reserve_matrices(run);
    if (plan.onebit != nullptr && plan.onebit->exchanges)
        reserve_exchange(data, node, *plan.onebit->exchange->layout, plan.onebit->exchange->use, stream);
}

/// Runs pass 1 on this rank's parts and folds the results of all ranks.
void inspect_parts(const StepRun &run, StepKernels &kernels) {
    for (void *results : {static_cast<void *>(run.plan.leaf.sums_a), static_cast<void *>(run.plan.leaf.bad)})
        clear_leaves(run, results);
    kernels.inspect(Fold::none);
    if (run.plan.policy.read_gradients) complete_leaves(run, run.plan.leaf.sums_a);
    kernels.fold_gradients();
}

/// Runs Passes::elementwise, Passes::matrix and Passes::reduced, in which sums are followed by factors, then by weights.
void update(const StepRun &run, StepKernels &kernels) {
    const StepPolicy &policy = run.plan.policy;
    const LeafResults &leaf = run.plan.leaf;
    const bool shards = clear_shard_sums(run, false),
               completes = policy.parts && (policy.reduces || policy.report_norms);
    for (double *sums : {leaf.sums_a, leaf.sums_b})
        if (completes) clear_leaves(run, sums);
    kernels.update();
    if (kernels.matrices() != nullptr) update_matrices(run, kernels);
    for (double *sums : {leaf.sums_a, leaf.sums_b})
        if (completes) complete_leaves(run, sums);
    if (policy.parts && policy.reduces) kernels.find_trust();
    if (shards) all_reduce_shards(run, false);
    if (policy.reduces) kernels.update_weights(shards);
}

void run_phases(const StepRun &run, StepKernels &kernels) {
    const bool parts = run.plan.policy.parts;
    const bool agrees = has_peers(run.comms);
    kernels.mark(-1);
    if (averages(run)) {
        average_gradients(run);
        kernels.mark(DSOPT_MS_EXCHANGE);
    }
    if (run.plan.policy.completes)
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
    if (run.plan.policy.ends_later) kernels.finish();
    kernels.mark(DSOPT_MS_BASIC_STEP);
    if (!parts) return;
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
    if (run.zeroed != nullptr) device.kernels().zero(run.zeroed, run.plan.count, execution.parallel, execution.stream);
}

} // namespace dsopt
