// SPDX-License-Identifier: Apache-2.0
// Steps of the 1-bit family: the kernels of each stage, and the communication between them.
#pragma once
#include "step/drive.h"

namespace dsopt {

/// Exchanges, and updates the tensors that go into exchanges. In standard mode a skipped step exchanges, too, and
/// drops the result, so that the host need not wait for the decision. In compat mode the host waits for it, and a
/// skipped step sends nothing.
void update_onebit(const StepRun &run, StepKernels &kernels);
/// Reserves memory of the comms for update_onebit().
void reserve_onebit(const StepRun &run);
/// Advances counters and schedule, and freezes the variance when it is due. Must be called after everything else of the
/// step.
void end_onebit(const StepRun &run, StepKernels &kernels);

} // namespace dsopt
