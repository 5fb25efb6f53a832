// SPDX-License-Identifier: Apache-2.0
// Groups by their records: defaults, checks, hyper-parameters by key.
#pragma once
#include "rules/rule.h"

namespace dsopt {

/// Throws DSOPT_ERR_ARGUMENT for an algorithm that there is not.
const RuleInfo &info_of(int32_t algorithm);
/// Every field as dsopt_group_init gives it, `size` aside.
dsopt_group default_group(int32_t algorithm);
void check_group(const dsopt_group &group, bool compat);

/// The formula that a group runs, and the moments that it keeps, which are the same in both modes.
Rule formula_of(const dsopt_group &group, bool compat);
const MomentList &moments_of(const dsopt_group &group);
/// Which one is in one of the two lists only, NULL if none.
const MomentInfo *first_difference(const MomentList &a, const MomentList &b);
bool has_trust(const dsopt_group &group);

/// NULL if no hyper-parameter that is a number has this key.
const GroupField *find_field(int32_t key);
/// NULL if no flag has this key.
const GroupFlag *find_flag(int32_t key);

} // namespace dsopt
