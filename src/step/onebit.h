// SPDX-License-Identifier: Apache-2.0
// Steps of the 1-bit family: which loops run in a stage, and what goes over the wire between them.
#pragma once
#include "step/drive.h"

namespace dsopt {

class OneBitDriver {
public:
    OneBitDriver(const StepRun &run, StepLoops &loops) :
        run_(run),
        plan_(run.plan),
        one_(*run.plan.onebit),
        loops_(loops),
        own_(*loops.onebit()) {}

    /// What tensors that go into exchanges get, once the step is decided. In standard mode a skipped step makes its
    /// exchange, too, and drops the result: no rank waits to find out. In compat mode the host waits, and nothing is
    /// sent.
    void exchange();
    /// After everything else of the step.
    void end();

private:
    void send(Feed feed);
    void through(Feed feed);
    void lamb();

    const StepRun &run_;
    const StepPlan &plan_;
    const OneBitPlan &one_;
    StepLoops &loops_;
    OneBitLoops &own_;
};

} // namespace dsopt
