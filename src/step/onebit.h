// SPDX-License-Identifier: Apache-2.0
// Steps of the 1-bit family: which loops run in a stage, and what goes over the wire between them.
#pragma once
#include "step/drive.h"

namespace dsopt {

/// What tensors that go into exchanges get, once the step is decided. In standard mode a skipped step makes its
/// exchange, too, and drops the result: no rank waits to find out. In compat mode the host waits, and nothing is sent.
void update_onebit(const StepRun &run, StepLoops &loops);
/// After everything else of the step.
void end_onebit(const StepRun &run, StepLoops &loops);

} // namespace dsopt
