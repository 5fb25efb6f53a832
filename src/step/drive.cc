// SPDX-License-Identifier: Apache-2.0
#include "step/drive.h"
#include "step/agree.h"
#include "step/onebit.h"

namespace dsopt {

void drive(const StepRun &run) {
    const Device &device = run.context.device();
    const Execution &how = run.plan.how;
    if (run.means != nullptr) run.means->average(run.context, run.comms, run.mean_scratch, how);
    device.loops().run_step(run.plan, [&](StepLoops &loops) {
        const bool agrees = has_peers(run.comms);
        loops.mark(-1);
        loops.inspect(agrees);
        loops.mark(DSOPT_MS_OVERFLOW_CHECK);
        if (agrees) agree_on_norms(run, loops);
        loops.mark(DSOPT_MS_COMPUTE_NORM);
        loops.decide();
        loops.mark(DSOPT_MS_UNSCALE_AND_CLIP);
        if (loops.onebit() != nullptr) update_onebit(run, loops);
        // Everything of rules with two sweeps happens in the order sums, trust ratios, weights.
        const bool shards = begin_shards(run, false);
        loops.update();
        if (shards) agree_on_shards(run, false);
        if (run.plan.has_lamb) loops.update_weights(shards);
        if (loops.onebit() != nullptr) end_onebit(run, loops);
        loops.finish();
        loops.mark(DSOPT_MS_BASIC_STEP);
    });
    if (run.means != nullptr && (run.plan.flags & DSOPT_STEP_ZERO_GRADS)) run.means->zero_originals(device, how);
}

} // namespace dsopt
