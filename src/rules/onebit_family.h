// SPDX-License-Identifier: Apache-2.0
// The records of the algorithms that exchange one bit per element. Steps without an exchange run AdamW's formula
// without bias correction (in compat mode the legacy Adam's), or LAMB's. The formulas of the other steps are in
// onebit.h, the schedule is in schedule.h.
#pragma once
#include "rules/lamb.h"

namespace dsopt {

inline bool is_onebit(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM || algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ||
           algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
}

inline constexpr uint32_t kOneBitFields = kBeta1 | kBeta2 | kEps | kSchedule;

inline void onebit_adam_defaults(dsopt_group &group) {
    adam_defaults(group);
    group.freeze_step = 100000;
}
inline constexpr RuleInfo kOneBitAdam{.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM,
                                      .name = "onebit_adam",
                                      .fields = kOneBitFields,
                                      .flags = DSOPT_GROUP_NO_BIAS_CORRECTION | DSOPT_GROUP_NON_FREEZE,
                                      .compat = true,
                                      .defaults = onebit_adam_defaults,
                                      .formula = by_mode<Rule::adamw, Rule::legacy>};

inline void zero_one_adam_defaults(dsopt_group &group) {
    onebit_adam_defaults(group);
    group.var_interval_steps = 16;
    group.local_interval_steps = 32678; // sic: the original's number, probably meant to be 2^15
    group.max_local_interval = 16;
}
inline constexpr RuleInfo kZeroOneAdam{.algorithm = DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                       .name = "zero_one_adam",
                                       .fields = kOneBitFields | kIntervals,
                                       .flags = DSOPT_GROUP_NO_BIAS_CORRECTION,
                                       .compat = true,
                                       .defaults = zero_one_adam_defaults,
                                       .formula = by_mode<Rule::adamw, Rule::legacy>};

inline void onebit_lamb_defaults(dsopt_group &group) {
    lamb_defaults(group);
    group.freeze_step = 100000;
    group.trust_beta = 0.9;
    group.trust_threshold = 0.1;
    group.trust_min_change = 0.5;
    group.trust_max_change = 4;
}
inline void check_onebit_lamb(const dsopt_group &group, bool compat) {
    check_lamb(group, compat);
    require(group.trust_min_change <= group.trust_max_change, "trust_min_change", group.trust_min_change,
            "in [0, trust_max_change]");
}
inline constexpr RuleInfo kOneBitLamb{.algorithm = DSOPT_ALGORITHM_ONEBIT_LAMB,
                                      .name = "onebit_lamb",
                                      .fields = kOneBitFields | kTrust | kTrustMean,
                                      .flags = DSOPT_GROUP_NO_BIAS_CORRECTION,
                                      .compat = true,
                                      .defaults = onebit_lamb_defaults,
                                      .check = check_onebit_lamb,
                                      .formula = always<Rule::lamb>};

} // namespace dsopt
