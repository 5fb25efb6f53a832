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
    if (run.means != nullptr) reserve_sum(data, node, run.means->longest(), stream);
    if (plan.onebit != nullptr && plan.onebit->exchanges)
        reserve_exchange(data, node, *plan.onebit->exchange->layout, stream);
}

void run_phases(const StepRun &run, StepKernels &kernels) {
    if (run.means != nullptr) run.means->average(run.context, run.comms, run.mean_scratch, run.plan.execution);
    const bool agrees = has_peers(run.comms);
    kernels.mark(-1);
    kernels.inspect(agrees);
    kernels.mark(DSOPT_MS_OVERFLOW_CHECK);
    if (agrees) all_reduce_norms(run);
    kernels.mark(DSOPT_MS_COMPUTE_NORM);
    kernels.decide();
    kernels.mark(DSOPT_MS_UNSCALE_AND_CLIP);
    if (kernels.onebit() != nullptr) update_onebit(run, kernels);
    // For Passes::reduced: sums, then factors, then weights.
    const bool shards = clear_shard_sums(run, false);
    kernels.update();
    if (shards) all_reduce_shards(run, false);
    if (run.plan.policy.reduces) kernels.update_weights(shards);
    if (kernels.onebit() != nullptr) end_onebit(run, kernels);
    kernels.mark(DSOPT_MS_BASIC_STEP);
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
    if (run.means != nullptr && (run.plan.flags & DSOPT_STEP_ZERO_GRADS))
        run.means->zero_originals(device, run.plan.execution);
}

} // namespace dsopt
