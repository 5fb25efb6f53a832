// SPDX-License-Identifier: Apache-2.0
#include "optimizer/group.h"
#include "rules/all.h"
#include <cmath>
#include <cstring>
#include <string>

namespace dsopt {
namespace {

void check_range(const char *name, double value, GroupField::Range range) {
    switch (range) {
    case GroupField::below_one: return require(value >= 0 && value < 1, name, value, "in [0, 1)");
    case GroupField::not_negative:
        return require(std::isfinite(float(value)) && value >= 0, name, value, "finite in fp32 and not negative");
    case GroupField::finite: return require(std::isfinite(float(value)), name, value, "finite in fp32");
    case GroupField::count: return require(value >= 1 && value < INT32_MAX, name, value, "in [1, 2^31 - 1)");
    }
}

[[noreturn]] void refuse_field(const char *name, const RuleInfo &info, const char *only_in = nullptr) {
    throw Error(DSOPT_ERR_UNSUPPORTED, "%s has no effect in %s%s%s", name, info.name,
                only_in != nullptr ? ": it is for " : "", only_in != nullptr ? only_in : "");
}
void check_field(const GroupField &field, double value, const RuleInfo &info) {
    if (has_field(info, field)) return check_range(field.name, value, field.range);
    if (value != 0) refuse_field(field.name, info, field.only_in);
}
void check_int(const GroupInt &field, int32_t value, const RuleInfo &info) {
    if (!(info.fields & field.field)) {
        if (value != 0) refuse_field(field.name, info, field.only_in);
        return;
    }
    const std::string name = std::string("dsopt_group.") + field.name;
    require_in(field.low, field.high, name.c_str(), value);
}

/// Checks the formats of the moments, for a group that is valid otherwise.
void check_formats(const dsopt_group &group, const RuleInfo &info, bool compat) {
    if (!has_formats(group)) return;
    const MomentList &moments = moments_of(group);
    const struct {
        const char *field;
        int32_t format;
        bool squares;
    } formats[] = {{"exp_avg_format", group.exp_avg_format, false},
                   {"exp_avg_sq_format", group.exp_avg_sq_format, true}};
    for (const auto &[field, format, squares] : formats) {
        if (format == DSOPT_MOMENT_F32) continue;
        const FormatInfo &record = kMomentFormats[format];
        const char *const name = record.name;
        if (is_onebit(group.algorithm))
            throw Error(DSOPT_ERR_UNSUPPORTED, "%s is %s: the moments of %s are F32", field, name, info.name);
        if (compat) throw Error(DSOPT_ERR_UNSUPPORTED, "%s is %s: formats need standard mode", field, name);
        const MomentInfo *moment = nullptr;
        for (int k = 0; k < moments.count; ++k)
            if (moments.info[k].squares == squares) moment = &moments.info[k];
        if (moment == nullptr)
            throw Error(DSOPT_ERR_UNSUPPORTED, "%s has no effect in %s%s", field, info.name,
                        group.algorithm == DSOPT_ALGORITHM_SGD && !squares ? " without momentum" : "");
        if (squares && record.not_squares != nullptr)
            throw Error(DSOPT_ERR_UNSUPPORTED, "%s is %s: %s %s", field, name, moment->name, record.not_squares);
        if (has_scales(record.of(squares)) && *moment->scale_name == 0)
            throw Error(DSOPT_ERR_UNSUPPORTED, "%s is %s: a sum of squares would stop growing", field, name);
    }
}

} // namespace

const RuleInfo &info_of(int32_t algorithm) {
    for (const RuleInfo *info : kRules)
        if (info->algorithm == algorithm) return *info;
    throw Error(DSOPT_ERR_ARGUMENT, "dsopt_group.algorithm is %d, which this library does not know", algorithm);
}

dsopt_group default_group(int32_t algorithm) {
    dsopt_group group{};
    group.algorithm = algorithm;
    info_of(algorithm).defaults(group);
    return group;
}

Facts facts_of(const dsopt_group &group) {
    const auto flag = [&](int32_t bit) { return (group.flags & bit) != 0; };
    const bool is_muon = is_matrix_rule(group.algorithm);
    return algorithm_fact(group.algorithm)
        .add(facts::standard_only, !info_of(group.algorithm).compat)
        .add(facts::exp_avg_format, group.exp_avg_format != DSOPT_MOMENT_F32)
        .add(facts::exp_avg_sq_format, group.exp_avg_sq_format != DSOPT_MOMENT_F32)
        .add(facts::no_bias_correction, flag(DSOPT_GROUP_NO_BIAS_CORRECTION))
        .add(facts::eps_uncorrected, flag(DSOPT_GROUP_EPS_UNCORRECTED))
        .add(facts::max_norm, group.max_norm > 0)
        .add(facts::nesterov, flag(DSOPT_GROUP_NESTEROV))
        .add(facts::momentum, group.momentum != 0)
        .add(facts::dampening, group.dampening != 0)
        .add(facts::ns_preset, group.ns_schedule != DSOPT_NS_CONSTANT)
        .add(facts::ns_triple, group.ns_a != 0 || group.ns_b != 0 || group.ns_c != 0)
        .add(facts::corrected_muon, is_muon && !flag(DSOPT_GROUP_NO_BIAS_CORRECTION));
}

Facts algorithm_fact(int32_t algorithm) {
    return Facts()
        .add(facts::onebit_adam, algorithm == DSOPT_ALGORITHM_ONEBIT_ADAM)
        .add(facts::zero_one_adam, algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM)
        .add(facts::onebit_lamb, algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB)
        .add(facts::lamb, algorithm == DSOPT_ALGORITHM_LAMB)
        .add(facts::muon, is_matrix_rule(algorithm));
}

void check_group(const dsopt_group &group, const Facts &optimizer) {
    require_in(DSOPT_MOMENT_F32, kLastMomentFormat, "dsopt_group.exp_avg_format", group.exp_avg_format);
    require_in(DSOPT_MOMENT_F32, kLastMomentFormat, "dsopt_group.exp_avg_sq_format", group.exp_avg_sq_format);
    const RuleInfo &info = info_of(group.algorithm);
    const bool compat = optimizer.has(facts::compat);
    int32_t unknown = group.flags;
    for (const GroupFlag &flag : kGroupFlags) unknown &= ~flag.flag;
    if (unknown != 0) throw Error(DSOPT_ERR_ARGUMENT, "dsopt_group.flags has unknown bits: 0x%x", group.flags);
    for (const GroupFlag &flag : kGroupFlags)
        if (group.flags & flag.flag & ~info.flags) refuse_field(flag.name, info);
    for (const GroupField &field : kGroupFields) check_field(field, value_of(field, group), info);
    for (const GroupInt &field : kGroupInts) check_int(field, group.*field.value, info);
    if (info.check != nullptr) info.check(group, compat);
    check_options<At::group>(facts_of(group) | optimizer, {.algorithm = info.name});
    check_formats(group, info, compat);
}

Rule formula_of(const dsopt_group &group, bool compat) { return info_of(group.algorithm).formula(group, compat); }

const MomentList &moments_of(const dsopt_group &group) {
    const MomentList *moments = nullptr;
    visit(formula_of(group, false), [&](auto formula) { moments = &decltype(formula)::type::moments; });
    return *moments;
}

Format format_of(const MomentInfo &moment, const dsopt_group &group) {
    return kMomentFormats[moment.squares ? group.exp_avg_sq_format : group.exp_avg_format].of(moment.squares);
}

const MomentInfo *first_difference(const MomentList &a, const MomentList &b) {
    for (int k = 0; k < kMoments; ++k) {
        const MomentInfo &x = a.info[k], &y = b.info[k];
        if (std::strcmp(x.name, y.name) != 0) return *x.name != 0 ? &x : &y;
    }
    return nullptr;
}

bool has_trust_ratio(const dsopt_group &group) { return (info_of(group.algorithm).fields & kTrust) != 0; }

const GroupField *find_field(int32_t key) {
    for (const GroupField &field : kGroupFields)
        if (field.key != 0 && field.key == key) return &field;
    return nullptr;
}
const GroupInt *find_int(int32_t key) {
    for (const GroupInt &field : kGroupInts)
        if (field.key == key) return &field;
    return nullptr;
}
const GroupFlag *find_flag(int32_t key) {
    for (const GroupFlag &flag : kGroupFlags)
        if (flag.key != 0 && flag.key == key) return &flag;
    return nullptr;
}

} // namespace dsopt
