// SPDX-License-Identifier: Apache-2.0
#include "step/onebit.h"
#include "exchange/exchange.h"
#include "step/agree.h"

namespace dsopt {
namespace {

/// Waits for the decision and returns true if the step is skipped.
bool is_skipped(const StepRun &run) {
    const Device &device = run.context.device();
    int32_t skip = 0;
    device.enqueue_copy(&skip, &run.plan.control->skip, sizeof skip, run.plan.how.stream);
    device.wait(run.plan.how.stream);
    return skip != 0;
}

/// Exchanges the values of this rank, so that every rank has the results.
void feed_and_exchange(const StepRun &run, StepLoops &loops) {
    OneBitLoops &own = *loops.onebit();
    const OneBitPlan &plan = *run.plan.onebit;
    if (!plan.exchanges) {
        if (plan.feed == Feed::distance) own.run(OneBitPass::feed); // it also takes the local step
        return;
    }
    prepare_exchange(own, *plan.exchange, [&] {
        own.run(OneBitPass::feed);
        if (!plan.rules.compat) return; // packed by `feed`, or with two levels after the exchange in the node
        own.run(OneBitPass::feed_padding);
        own.run(ExchangePass::pack_values);
    });
    loops.mark(DSOPT_MS_COMPRESS);
    exchange(run.comms.data, run.comms.node, own, *plan.exchange, run.plan.how.stream);
    loops.mark(DSOPT_MS_EXCHANGE);
}

void update_adam(const StepRun &run, StepLoops &loops) {
    const OneBitPlan &plan = *run.plan.onebit;
    feed_and_exchange(run, loops);
    loops.onebit()->run(OneBitPass::take);
    if (plan.momentum != nullptr) loops.onebit()->run(OneBitPass::keep_results);
    if (plan.exchanges) loops.mark(DSOPT_MS_DECOMPRESS);
}

void update_lamb(const StepRun &run, StepLoops &loops) {
    OneBitLoops &own = *loops.onebit();
    const OneBitPlan &plan = *run.plan.onebit;
    if (plan.rules.compat && run.plan.count != 0) {
        own.run(OneBitPass::momentum_squares);
        own.decide(OneBitDecision::scale_momenta);
    }
    feed_and_exchange(run, loops);
    if (plan.padding != nullptr) own.run(OneBitPass::take_padding);
    own.run(OneBitPass::lamb_moments);
    const bool shards = begin_shards(run, true);
    own.decide(OneBitDecision::trust);
    if (shards) {
        agree_on_shards(run, true);
        own.decide(OneBitDecision::shared_trust);
    }
    own.run(OneBitPass::lamb_weights);
    if (plan.exchanges) loops.mark(DSOPT_MS_DECOMPRESS);
}

} // namespace

void update_onebit(const StepRun &run, StepLoops &loops) {
    const OneBitPlan &plan = *run.plan.onebit;
    if (plan.trust_factor != nullptr || steps_alone(plan)) loops.onebit()->decide(OneBitDecision::begin);
    if (plan.stage == Stage::dry || plan.stage == Stage::full) return; // nothing goes into an exchange
    if (plan.rules.compat && plan.exchanges && is_skipped(run)) return;
    if (plan.stage == Stage::local) return loops.onebit()->run(OneBitPass::local);
    return plan.feed == Feed::scaled ? update_lamb(run, loops) : update_adam(run, loops);
}

void end_onebit(const StepRun &run, StepLoops &loops) {
    const OneBitPlan &plan = *run.plan.onebit;
    ScheduleState next = plan.now; // in compat mode: if the step is taken
    const bool froze = advance_schedule(plan.rules, next);
    OneBitLoops &own = *loops.onebit();
    own.decide(OneBitDecision::end);
    // Only if an exchange follows, because this pass reads the whole variance.
    if (plan.stage == Stage::full && plan.active != nullptr && stage_of(plan.rules, next) != Stage::full)
        own.run(OneBitPass::find_active);
    if (!froze) return;
    // The original makes no copies of the variance if it was resumed past the freeze.
    const bool late = plan.rules.compat && next.step != plan.rules.freeze_step;
    const bool copies = plan.rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB && !late;
    own.run(copies ? OneBitPass::freeze_variance : OneBitPass::freeze);
}

} // namespace dsopt
