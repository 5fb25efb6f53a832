// SPDX-License-Identifier: Apache-2.0
// The records of the algorithms that exchange one bit per element. Steps without an exchange run the formulas of AdamW
// and LAMB; what the others do is in onebit.h, and when in schedule.h.
#pragma once
#include "rules/lamb.h"

namespace dsopt {

inline bool is_onebit(int32_t algorithm) {
    return algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM || algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM ||
           algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
}

/// Fields that only this family has. Of every group: where the algorithm does not use them they must be 0.
void check_onebit_fields(const dsopt_group &group);

inline constexpr uint32_t kOneBitFields = kBeta1 | kBeta2 | kEps;

inline constexpr RuleInfo kOneBitAdam{.algorithm = DSOPT_ALGORITHM_ONEBIT_ADAM,
                                      .name = "onebit_adam",
                                      .fields = kOneBitFields,
                                      .flags = DSOPT_GROUP_NO_BIAS_CORRECTION | DSOPT_GROUP_NON_FREEZE,
                                      .compat = true,
                                      .defaults =
                                          [](dsopt_group &group) {
                                              adam_defaults(group);
                                              group.freeze_step = 100000;
                                          },
                                      .check = [](const dsopt_group &, bool) {},
                                      .formula = [](const dsopt_group &) { return Rule::adamw; }};
inline constexpr RuleInfo kZeroOneAdam{.algorithm = DSOPT_ALGORITHM_ZERO_ONE_ADAM,
                                       .name = "zero_one_adam",
                                       .fields = kOneBitFields,
                                       .flags = DSOPT_GROUP_NO_BIAS_CORRECTION,
                                       .compat = true,
                                       .defaults =
                                           [](dsopt_group &group) {
                                               adam_defaults(group);
                                               group.freeze_step = 100000;
                                               group.var_interval_steps = 16;
                                               group.local_interval_steps =
                                                   32678; // sic: the original's number, probably meant to be 2^15
                                               group.max_local_interval = 16;
                                           },
                                       .check = [](const dsopt_group &, bool) {},
                                       .formula = [](const dsopt_group &) { return Rule::adamw; }};
inline constexpr RuleInfo kOneBitLamb{.algorithm = DSOPT_ALGORITHM_ONEBIT_LAMB,
                                      .name = "onebit_lamb",
                                      .fields = kOneBitFields | kTrust,
                                      .flags = DSOPT_GROUP_NO_BIAS_CORRECTION,
                                      .compat = true,
                                      .defaults =
                                          [](dsopt_group &group) {
                                              lamb_defaults(group);
                                              group.freeze_step = 100000;
                                              group.trust_beta = 0.9;
                                              group.trust_threshold = 0.1;
                                              group.trust_min_change = 0.5;
                                              group.trust_max_change = 4;
                                          },
                                      .check = check_lamb,
                                      .formula = [](const dsopt_group &) { return Rule::lamb; }};

} // namespace dsopt
