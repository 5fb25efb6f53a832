// SPDX-License-Identifier: Apache-2.0
#include "step/onebit.h"
#include "exchange/exchange.h"
#include "step/agree.h"
#include "step/gather.h"

namespace dsopt {
namespace {

/// Waits for the decision and returns true if the step is skipped.
bool is_skipped(const StepRun &run) {
    const Device &device = run.context.device();
    int32_t skip = 0;
    device.enqueue_copy(&skip, &run.plan.control->skip, sizeof skip, run.plan.execution.stream);
    device.wait(run.plan.execution.stream);
    return skip != 0;
}

/// Exchanges the values of this rank, so that every rank has the results.
void feed_and_exchange(const StepRun &run, StepKernels &kernels) {
    OneBitStepKernels &local = *kernels.onebit();
    const OneBitPlan &plan = *run.plan.onebit;
    if (!plan.has_peers) {
        if (plan.feed == Feed::distance) local.run(OneBitPass::feed); // it also takes the local step
        return;
    }
    // With two levels a rank feeds its slice, but without sharded state it moves all weights.
    if (plan.feed == Feed::distance && !plan.feed_steps) local.run(OneBitPass::local);
    pack_messages(local, [&] {
        local.run(OneBitPass::feed);
        if (!plan.rules.compat) return; // packed by `feed`
        local.run(OneBitPass::feed_padding);
        local.run(ExchangePass::pack_values);
    });
    kernels.mark(DSOPT_MS_COMPRESS);
    const Exchange &buffers = *plan.exchange;
    void *const stream = run.plan.execution.stream;
    exchange_messages(*run.comms.data, local, buffers.local, stream);
    if (run.comms.node != nullptr && buffers.use == ExchangeUse::step)
        run.comms.node->all_gather(buffers.local.results, buffers.mean.results, buffers.local.layout.messages_bytes(),
                                   stream, Place::backend);
    kernels.mark(DSOPT_MS_EXCHANGE);
}

void update_adam(const StepRun &run, StepKernels &kernels) {
    const OneBitPlan &plan = *run.plan.onebit;
    feed_and_exchange(run, kernels);
    kernels.onebit()->run(OneBitPass::apply_mean);
    if (plan.momentum != nullptr) kernels.onebit()->run(OneBitPass::store_results);
    if (plan.has_peers) kernels.mark(DSOPT_MS_DECOMPRESS);
}

void update_lamb(const StepRun &run, StepKernels &kernels) {
    OneBitStepKernels &local = *kernels.onebit();
    const OneBitPlan &plan = *run.plan.onebit;
    if (plan.rules.compat && run.plan.count != 0) {
        local.run(OneBitPass::momentum_squares);
        local.decide(OneBitDecision::scale_momenta);
    }
    feed_and_exchange(run, kernels);
    if (plan.padding != nullptr) local.run(OneBitPass::decompress_padding);
    const LeafResults &leaf = run.plan.leaf;
    for (double *results : {leaf.sums_a, leaf.sums_b, plan.factors})
        if (plan.sharded) clear_leaves(run, results);
    local.run(OneBitPass::lamb_moments);
    for (double *results : {leaf.sums_a, leaf.sums_b, plan.factors}) // a factor has one owner, like a sum
        if (plan.sharded) complete_leaves(run, results);
    const bool shards = run.plan.shards.exchanged != 0;
    if (shards) clear_shard_sums(run);
    local.decide(OneBitDecision::trust);
    if (shards) {
        all_reduce_shards(run, true);
        local.decide(OneBitDecision::shared_trust);
    }
    local.run(OneBitPass::lamb_weights);
    if (plan.has_peers) kernels.mark(DSOPT_MS_DECOMPRESS);
}

} // namespace

void update_onebit(const StepRun &run, StepKernels &kernels) {
    const OneBitPlan &plan = *run.plan.onebit;
    if (plan.rules.compat && plan.has_peers && is_skipped(run)) return;
    if (plan.stage == Stage::local) return kernels.onebit()->run(OneBitPass::local);
    return plan.feed == Feed::scaled ? update_lamb(run, kernels) : update_adam(run, kernels);
}

void reserve_onebit(const StepRun &run) {
    const OneBitPlan &plan = *run.plan.onebit;
    if (plan.has_peers)
        reserve_exchange(run.comms.data, run.comms.node, *plan.exchange->layout, plan.exchange->use,
                         run.plan.execution.stream);
    if (plan.sharded) reserve_leaves(run);
    if (run.plan.shards.exchanged != 0) reserve_shards(run);
}

void end_onebit(const StepRun &run, StepKernels &kernels) {
    const OneBitPlan &plan = *run.plan.onebit;
    ScheduleState next = plan.now; // in compat mode: if the step is taken
    const bool froze = advance_schedule(plan.rules, next);
    OneBitStepKernels &local = *kernels.onebit();
    local.decide(OneBitDecision::end);
    // Only if an exchange follows, because this pass reads the whole variance.
    if (plan.stage == Stage::full && plan.active != nullptr && stage_of(plan.rules, next) != Stage::full)
        local.run(OneBitPass::find_active);
    if (!froze) return;
    // The original makes no copies of the variance if it was resumed past the freeze.
    const bool late = plan.rules.compat && next.step != plan.rules.freeze_step;
    const bool copies = plan.rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB && !late;
    local.run(copies ? OneBitPass::freeze_variance : OneBitPass::freeze);
}

} // namespace dsopt
