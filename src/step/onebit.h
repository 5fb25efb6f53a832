// SPDX-License-Identifier: Apache-2.0
// Steps of the 1-bit family: which loops run in a stage, and what goes over the wire between them.
#pragma once
#include "step/drive.h"

namespace dsopt {

class OneBitDriver {
public:
    OneBitDriver(const StepRun &run, StepLoops &steps) :
        run_(run),
        family_(*run.plan.onebit),
        steps_(steps),
        loops_(*steps.onebit()) {}

    /// What tensors that go into exchanges get, once the step is decided. In standard mode a skipped step makes its
    /// exchange, too, and drops the result: no rank waits to find out. In compat mode the host waits, and nothing is
    /// sent.
    void update();
    /// After everything else of the step.
    void end();

private:
    void feed_and_exchange(Feed feed);
    void update_adam(Feed feed);
    void update_lamb();

    const StepRun &run_;
    const OneBitPlan &family_;
    StepLoops &steps_;
    OneBitLoops &loops_; // of the family
};

} // namespace dsopt
