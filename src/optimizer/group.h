// SPDX-License-Identifier: Apache-2.0
// Functions of groups that use the records of algorithms: defaults, checks, hyper-parameters by key.
#pragma once
#include "rules/formats.h"
#include "rules/options.h"
#include "rules/rule.h"

namespace dsopt {

/// Throws DSOPT_ERR_ARGUMENT for an unknown algorithm.
const RuleInfo &info_of(int32_t algorithm);
/// Returns every field as dsopt_group_init sets it, except `size`.
dsopt_group default_group(int32_t algorithm);
/// Throws if the group is invalid, or does not go with the facts of its optimizer.
void check_group(const dsopt_group &group, const Facts &optimizer);
/// Returns the facts of a group, for options.h; algorithm_fact() those of its algorithm alone.
Facts facts_of(const dsopt_group &group);
Facts algorithm_fact(int32_t algorithm);

/// Returns the formula of a group; moments_of() returns its moments, which are the same in both modes.
Rule formula_of(const dsopt_group &group, bool compat);
const MomentList &moments_of(const dsopt_group &group);
/// Returns the format of a moment in a group. The group was checked.
Format format_of(const MomentInfo &moment, const dsopt_group &group);
/// True if a format of the group is not F32.
inline bool has_formats(const dsopt_group &group) {
    return group.exp_avg_format != DSOPT_MOMENT_F32 || group.exp_avg_sq_format != DSOPT_MOMENT_F32;
}
/// Returns a moment that is in only one of the two lists, NULL if there is none.
const MomentInfo *first_difference(const MomentList &a, const MomentList &b);
bool has_trust_ratio(const dsopt_group &group);

/// True if rules of this algorithm have the hyper-parameter.
inline bool has_field(const RuleInfo &info, const GroupField &field) {
    return field.field == 0 || (info.fields & field.field) != 0;
}
/// Returns NULL if no numeric hyper-parameter has this key.
const GroupField *find_field(int32_t key);
/// Returns NULL if no integer has this key.
const GroupInt *find_int(int32_t key);
/// Returns NULL if no flag has this key.
const GroupFlag *find_flag(int32_t key);

} // namespace dsopt
