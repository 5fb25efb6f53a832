// SPDX-License-Identifier: Apache-2.0
// The list of phases of a step.
#pragma once
#include "comm/comm.h"
#include "device/phases.h"
#include "device/plan.h"
#include "step/rows.h"
#include <string>

namespace dsopt {

class PhaseList {
public:
    void add(Phase phase) { phases_[count_++] = phase; }
    void add_if(bool condition, Phase phase) {
        if (condition) add(phase);
    }
    bool has(Phase phase) const;
    Phases all() const { return {phases_, count_}; }
    bool operator==(const PhaseList &) const = default;

private:
    Phase phases_[std::size(kPhases)]{}; // each occurs at most once
    size_t count_ = 0;
};

/// Returns the phases of a step. They follow from its plan, from the comms and from `rows` (NULL: ranks exchange no rows).
PhaseList phases_of(const StepPlan &plan, const StepRows *rows, const CommSet &comms);
/// Returns the names of the phases, in order, with the comms over which they communicate.
std::string to_text(const PhaseList &phases, const StepPlan &plan, const CommSet &comms);

} // namespace dsopt
