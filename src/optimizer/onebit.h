// SPDX-License-Identifier: Apache-2.0
// The 1-bit family: 1-bit Adam (Tang et al. 2021), 0/1 Adam (Lu et al. 2022), 1-bit LAMB (Li et al. 2021). What their
// steps need beyond those of other optimizers.
#pragma once
#include "device/onebit_plan.h"
#include "exchange/exchange.h"
#include "rules/onebit_family.h"

namespace dsopt {

/// How the parameters of an optimizer go into exchanges; made when groups are added.
struct OneBitSetup {
    ScheduleRules rules{};
    CompressLayout layout;
    std::vector<int64_t> worker; // of every parameter, as in OneBitJob
    std::vector<int32_t> part;
    std::vector<int64_t> mean; // place of its averaged gradient in workspace, -1 = it has none
    int64_t mean_numel = 0;
    int64_t mean_scratch = 0; // behind them for sum_over_ranks(), where an exchange has no room as long
    bool compresses = false;  // more than one rank
};

/// One step.
struct PlannedOneBit {
    OneBitPlan plan{};
    ExchangeBuffers buffers;
};

/// The schedule as the host knows it without asking the backend's memory.
struct KnownSchedule {
    bool valid = false;
    ScheduleState state{};
};

ScheduleRules schedule_rules(const dsopt_group &group, bool compat);

inline bool goes_into_exchanges(const dsopt_group &group) {
    return is_onebit(group.algorithm) && !(group.flags & DSOPT_GROUP_NON_FREEZE);
}

} // namespace dsopt
