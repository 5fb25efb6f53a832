// SPDX-License-Identifier: Apache-2.0
#include "step/onebit.h"
#include "exchange/exchange.h"
#include "step/agree.h"

namespace dsopt {
namespace {

/// Waits for the decision.
bool is_skipped(const StepRun &run) {
    const Device &device = run.context.device();
    int32_t skip = 0;
    device.enqueue_copy(&skip, &run.plan.control->skip, sizeof skip, run.plan.how.stream);
    device.wait(run.plan.how.stream);
    return skip != 0;
}

void feed_and_exchange(const StepRun &run, StepLoops &loops, Feed feed) {
    loops.onebit()->feed(feed);
    if (!run.plan.onebit->exchanges) return;
    const Execution &how = run.plan.how;
    loops.mark(DSOPT_MS_COMPRESS);
    exchange(run.context, run.comms.data, run.comms.node, loops.onebit()->buffers(), how.parallel, how.stream);
    loops.mark(DSOPT_MS_EXCHANGE);
}

void update_adam(const StepRun &run, StepLoops &loops, Feed feed) {
    feed_and_exchange(run, loops, feed);
    loops.onebit()->take(feed);
    if (run.plan.onebit->exchanges) loops.mark(DSOPT_MS_DECOMPRESS);
}

void update_lamb(const StepRun &run, StepLoops &loops) {
    OneBitLoops &own = *loops.onebit();
    if (run.plan.onebit->rules.compat) own.scale_momenta();
    feed_and_exchange(run, loops, Feed::scaled);
    own.lamb_moments();
    const bool shards = begin_shards(run, true);
    own.lamb_trust();
    if (shards) {
        agree_on_shards(run, true);
        own.lamb_shared_trust();
    }
    own.lamb_weights();
    if (run.plan.onebit->exchanges) loops.mark(DSOPT_MS_DECOMPRESS);
}

} // namespace

void update_onebit(const StepRun &run, StepLoops &loops) {
    const OneBitPlan &plan = *run.plan.onebit;
    if (plan.trust_factor != nullptr || steps_alone(plan)) loops.onebit()->begin();
    if (plan.stage == Stage::dry || plan.stage == Stage::full) return; // nothing goes into an exchange
    if (plan.rules.compat && plan.exchanges && is_skipped(run)) return;
    if (plan.stage == Stage::local) return loops.onebit()->local();
    if (plan.stage == Stage::sync) return update_adam(run, loops, Feed::distance);
    switch (plan.rules.algorithm) {
    case DSOPT_ALGORITHM_ZERO_ONE_ADAM: return update_adam(run, loops, Feed::gradient);
    case DSOPT_ALGORITHM_ONEBIT_LAMB: return update_lamb(run, loops);
    default: return update_adam(run, loops, Feed::momentum);
    }
}

void end_onebit(const StepRun &run, StepLoops &loops) {
    const OneBitPlan &plan = *run.plan.onebit;
    ScheduleState next = plan.now; // in compat mode: if the step is taken
    const bool froze = advance_schedule(plan.rules, next);
    loops.onebit()->end();
    // Only where an exchange follows: this reads the whole variance.
    if (plan.stage == Stage::full && plan.active != nullptr && stage_of(plan.rules, next) != Stage::full)
        loops.onebit()->find_active();
    // The original forgets the copies when it was resumed past the freeze.
    const bool late = plan.rules.compat && next.step != plan.rules.freeze_step;
    if (froze) loops.onebit()->freeze(plan.rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB && !late);
}

} // namespace dsopt
