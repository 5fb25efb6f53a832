// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace dsopt {

/// Data that a device keeps for one optimizer between steps, such as tables in its memory.
class StepCache {
public:
    virtual ~StepCache() = default;
    /// Adds the phase times of the last step, which has completed, to `ms`.
    virtual void add_phase_times(double *ms) const = 0;
};

} // namespace dsopt
