// SPDX-License-Identifier: Apache-2.0
// Reads and sets hyper-parameters by key.
#include "optimizer/group.h"
#include "optimizer/optimizer.h"
#include "rules/muon.h"
#include "rules/options.h"
#include <cmath>

namespace dsopt {
namespace {

/// True for a key of the whole optimizer, false for a key of groups.
bool is_optimizer_key(int32_t key, int32_t group) {
    if (key != DSOPT_KEY_MAX_NORM && key != DSOPT_KEY_MAX_VALUE && key != DSOPT_KEY_SKIP_BUDGET &&
        key != DSOPT_KEY_CALLS)
        return false;
    if (group != DSOPT_ALL_GROUPS)
        throw Error(DSOPT_ERR_ARGUMENT, "key %d is of the optimizer: group must be DSOPT_ALL_GROUPS, not %d", key,
                    group);
    return true;
}

[[noreturn]] void refuse_change(const char *name) {
    throw Error(DSOPT_ERR_UNSUPPORTED, "%s of a group cannot change", name);
}
[[noreturn]] void refuse_value(const RuleInfo &info, const char *name) {
    throw Error(DSOPT_ERR_UNSUPPORTED, "%s has no %s", info.name, name);
}

dsopt_group changed_group(dsopt_group group, int32_t key, double value) {
    const auto set_flag = [&](int32_t flag, bool on) {
        if (value != 0 && value != 1) throw Error(DSOPT_ERR_ARGUMENT, "key %d takes 0 or 1, not %g", key, value);
        group.flags = on ? group.flags | flag : group.flags & ~flag;
    };
    const RuleInfo &info = info_of(group.algorithm);
    if (const GroupField *const field = find_field(key)) {
        if (field->whole != nullptr) {
            if (!has_field(info, *field)) refuse_value(info, field->name);
            require(value >= 1 && value < INT32_MAX && std::floor(value) == value, field->name, value,
                    "a whole number in [1, 2^31 - 1)");
            group.*field->whole = int64_t(value);
        } else
            group.*field->value = value;
    } else if (const GroupInt *const whole = find_int(key)) {
        if (!whole->settable) refuse_change(whole->name);
        if (!(info.fields & whole->field)) refuse_value(info, whole->name);
        require(value >= whole->low && value <= whole->high && std::floor(value) == value, whole->name, value,
                "one of its whole numbers");
        if (key == DSOPT_KEY_NS_SCHEDULE && int32_t(value) != group.ns_schedule)
            set_ns_schedule(group, int32_t(value));
        else
            group.*whole->value = int32_t(value);
    } else if (const GroupFlag *const flag = find_flag(key))
        set_flag(flag->flag, value == 1);
    else if (key == DSOPT_KEY_BIAS_CORRECTION && !(info.fields & kBiasCorrection)) {
        if (value != 0) refuse_value(info, "bias correction");
    } else if (key == DSOPT_KEY_BIAS_CORRECTION)
        set_flag(DSOPT_GROUP_NO_BIAS_CORRECTION, value == 0);
    else if (key == DSOPT_KEY_ALGORITHM)
        refuse_change("the algorithm");
    else
        throw Error(DSOPT_ERR_ARGUMENT, "key %d is no hyper-parameter", key);
    return group;
}

} // namespace

void check_max_norm(double value, const char *field) {
    require(std::isfinite(float(value)) && value >= 0, field, value, "finite in fp32 and not negative");
}
void check_max_value(double value, const char *field) {
    const bool clips = std::isfinite(value) && value > 0 && float(value) > 0;
    require(value == 0 || clips, field, value, "0, or finite and above 0 in fp32");
}

void Optimizer::set(int32_t group, int32_t key, double value) {
    if (desc_.flags & DSOPT_OPTIMIZER_EARLY_UPDATE) check_nothing_ready();
    if (is_optimizer_key(key, group)) {
        const bool whole = value >= 0 && std::floor(value) == value;
        if (key == DSOPT_KEY_MAX_NORM) {
            check_max_norm(value, "max_norm");
            check_options<At::optimizer>(facts_of(desc_).add(facts::max_norm, value > 0));
            desc_.max_norm = value;
        } else if (key == DSOPT_KEY_MAX_VALUE) {
            check_max_value(value, "max_value");
            desc_.max_value = value;
        } else if (key == DSOPT_KEY_SKIP_BUDGET) {
            require(whole && value <= INT32_MAX, "skip budget", value, "a whole number in [0, 2^31)");
            check_options<At::optimizer>(facts_of(desc_).add(facts::skip_budget, value > 0));
            wait_for_calls(); // a step in flight would overwrite the count
            outcome_.change(context_->device(), [](Outcome &outcome) { outcome.skipped_in_row = 0; });
            desc_.skip_budget = int32_t(value); // last: a call that fails changes nothing
        } else {
            require(whole && value <= double(kMaxCalls), "calls", value, "a whole number in [0, 2^53]");
            calls_ = int64_t(value);
        }
        return;
    }
    if (group != DSOPT_ALL_GROUPS && (group < 0 || size_t(group) >= groups().size()))
        throw Error(DSOPT_ERR_ARGUMENT, "group %d of %zu", group, groups().size());
    check_groups(*this);
    if (key == DSOPT_KEY_FREEZE_STEP && group != DSOPT_ALL_GROUPS && is_onebit(groups()[size_t(group)].algorithm))
        throw Error(DSOPT_ERR_ARGUMENT, "freeze_step is the same in all groups: use DSOPT_ALL_GROUPS");
    const size_t first = group == DSOPT_ALL_GROUPS ? 0 : size_t(group);
    const size_t last = group == DSOPT_ALL_GROUPS ? groups().size() : first + 1;
    const auto takes = [&](const dsopt_group &other) { // freeze_step skips groups outside the 1-bit family
        return key != DSOPT_KEY_FREEZE_STEP || group != DSOPT_ALL_GROUPS || registry_->family < 0 ||
               is_onebit(other.algorithm);
    };
    for (size_t i = first; i < last; ++i) {
        if (!takes(groups()[i])) continue;
        const dsopt_group changed = changed_group(groups()[i], key, value);
        check_group(changed, facts_of(desc_));
        if (const MomentInfo *const moment = first_difference(moments_of(groups()[i]), moments_of(changed)))
            throw Error(DSOPT_ERR_UNSUPPORTED,
                        "key %d of group %zu cannot become %g: state tensor %s is there with one of the values only",
                        key, i, value, moment->name);
    }
    std::vector<dsopt_group> &changing = registry_.change().groups;
    for (size_t i = first; i < last; ++i)
        if (takes(changing[i])) changing[i] = changed_group(changing[i], key, value);
    if (derived_.onebit && key == DSOPT_KEY_FREEZE_STEP)
        derived_.onebit->set_rules(groups()); // last: it checks every group
}

double Optimizer::get(int32_t group, int32_t key) const {
    if (is_optimizer_key(key, group))
        return key == DSOPT_KEY_MAX_NORM    ? desc_.max_norm
               : key == DSOPT_KEY_MAX_VALUE ? desc_.max_value
               : key == DSOPT_KEY_CALLS     ? double(calls_)
                                            : double(desc_.skip_budget);
    check_groups(*this);
    const size_t index = group == DSOPT_ALL_GROUPS ? 0 : size_t(group);
    if (group < DSOPT_ALL_GROUPS || index >= groups().size())
        throw Error(DSOPT_ERR_ARGUMENT, "group %d of %zu", group, groups().size());
    const dsopt_group &g = groups()[index];
    const RuleInfo &info = info_of(g.algorithm);
    if (const GroupFlag *const flag = find_flag(key)) return (g.flags & flag->flag) != 0;
    if (key == DSOPT_KEY_ALGORITHM) return g.algorithm;
    if (key == DSOPT_KEY_BIAS_CORRECTION)
        return (info.fields & kBiasCorrection) && !(g.flags & DSOPT_GROUP_NO_BIAS_CORRECTION);
    const GroupField *const field = find_field(key);
    const GroupInt *const whole = find_int(key);
    if (field == nullptr && whole == nullptr) throw Error(DSOPT_ERR_ARGUMENT, "key %d is no hyper-parameter", key);
    if (field != nullptr ? !has_field(info, *field) : !(info.fields & whole->field))
        throw Error(DSOPT_ERR_UNSUPPORTED, "group %zu is %s, which has no %s", index, info.name,
                    field != nullptr ? field->name : whole->name);
    return field != nullptr ? value_of(*field, g) : g.*whole->value;
}

} // namespace dsopt
