// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsopt {

/// What a device keeps for one optimizer between steps, such as tables in its memory.
class StepCache {
public:
    virtual ~StepCache() = default;
    /// Adds the times of the phases of the last step, which is over.
    virtual void add_phase_times(double *ms) const = 0;
};

} // namespace dsopt
