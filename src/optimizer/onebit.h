// SPDX-License-Identifier: Apache-2.0
// The 1-bit family: 1-bit Adam (Tang et al. 2021), 0/1 Adam (Lu et al. 2022), 1-bit LAMB (Li et al. 2021). What their
// steps need beyond those of other optimizers.
#pragma once
#include "exchange/exchange.h"
#include "rules/onebit.h"
#include "rules/onebit_family.h"
#include "rules/schedule.h"

namespace dsopt {

/// One tensor, beside its TensorJob.
struct OneBitJob {
    float *drift;      // 0/1 Adam: the way since ranks last agreed, or where that was
    float *fresh;      // 1-bit LAMB: the variance as it would be
    const float *mask; // or NULL
    int64_t worker;    // place of its first element among the worker's; -1: never compressed
    int32_t part;
    bool averaged;       // in exchange steps the engine averages its gradient
    uint8_t reserved[3]; // no padding, as in TensorJob
};
static_assert(sizeof(OneBitJob) == 40);

/// How the parameters of an optimizer go into exchanges; made when groups are added.
struct OneBitSetup {
    ScheduleRules rules{};
    CompressLayout layout;
    std::vector<int64_t> worker; // of every parameter, as in OneBitJob
    std::vector<int32_t> part;
    std::vector<int64_t> used; // elements of every part that are some parameter's; the rest is padding
    std::vector<int64_t> mean; // place of its averaged gradient in workspace, -1 = it has none
    int64_t mean_numel = 0;
    int64_t mean_scratch = 0; // behind them for sum_over_ranks(), where an exchange has no room as long
    bool compresses = false;  // more than one rank
};

/// One step.
struct OneBitPlan {
    const OneBitSetup *setup;
    const OneBitJob *jobs; // in host memory
    ScheduleState now;     // before the step
    Stage stage;           // which follows from it
    bool compat;
    Comm *comm, *node;       // as in CommSet
    Exchange exchange;       // with setup->compresses
    ScheduleState *schedule; // in backend memory, like all that follows
    const Context *context;
    int32_t *lr_sum; // a double a group; 0/1 Adam
    // One a tensor; 1-bit LAMB. The last one: what momenta are multiplied with before they are sent (compat mode), or
    // the weight that the average is a sum of (standard mode).
    float *trust_average, *trust_factor, *scaling;
    int32_t *active; // standard mode: whose variance is not 0, as Exchange::active
    float *padding;  // 1-bit LAMB of the original: the tail of its flat momentum
    char *momentum;  // exp_avg_bits, or NULL
    TrustRules trust;
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
