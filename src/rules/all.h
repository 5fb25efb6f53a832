// SPDX-License-Identifier: Apache-2.0
// The list of all rules, with their records and formulas.
#pragma once
#include "rules/adagrad.h"
#include "rules/adam.h"
#include "rules/lamb.h"
#include "rules/lion.h"
#include "rules/muon.h"
#include "rules/onebit_family.h"
#include "rules/sgd.h"

namespace dsopt {

inline constexpr const RuleInfo *kRules[] = {
    &kAdam, &kAdamW, &kLamb, &kLegacyAdam, &kOneBitAdam, &kZeroOneAdam, &kOneBitLamb, &kSgd, &kAdagrad, &kLion, &kMuon};

/// The tag that visit() passes for a formula.
template <class T> struct Formula { using type = T; };

/// Calls `f` with the Formula of a rule. No default: -Werror=switch finds what a new formula must touch.
template <class F> DSOPT_HD constexpr void visit(Rule rule, F &&f) {
    switch (rule) {
    case Rule::adam: f(Formula<Adam<false>>{}); return;
    case Rule::adamw: f(Formula<Adam<true>>{}); return;
    case Rule::adam_compat: f(Formula<AdamCompat<false>>{}); return;
    case Rule::adamw_compat: f(Formula<AdamCompat<true>>{}); return;
    case Rule::lamb: f(Formula<Lamb<false>>{}); return;
    case Rule::lamb_eps_inside: f(Formula<Lamb<true>>{}); return;
    case Rule::legacy: f(Formula<LegacyAdam<false>>{}); return;
    case Rule::legacy_eps_inside: f(Formula<LegacyAdam<true>>{}); return;
    case Rule::sgd: f(Formula<Sgd>{}); return;
    case Rule::sgd_momentum: f(Formula<SgdMomentum<false>>{}); return;
    case Rule::sgd_nesterov: f(Formula<SgdMomentum<true>>{}); return;
    case Rule::adagrad: f(Formula<Adagrad<false>>{}); return;
    case Rule::adagrad_eps_inside: f(Formula<Adagrad<true>>{}); return;
    case Rule::lion: f(Formula<Lion>{}); return;
    case Rule::muon: f(Formula<Muon<false>>{}); return;
    case Rule::muon_nesterov: f(Formula<Muon<true>>{}); return;
    }
}

DSOPT_HD constexpr Passes passes_of(Rule rule) {
    Passes passes = Passes::elementwise;
    visit(rule, [&](auto formula) { passes = decltype(formula)::type::passes; });
    return passes;
}
DSOPT_HD constexpr uint32_t fields_of(Rule rule) {
    uint32_t fields = 0;
    visit(rule, [&](auto formula) { fields = decltype(formula)::type::fields; });
    return fields;
}

/// True for formulas that multiply an update by a trust ratio, in compressed steps of 1-bit LAMB too.
DSOPT_HD bool has_trust(Rule rule) { return (fields_of(rule) & kTrust) != 0; }
/// Returns the factor of a tensor from its sums of squares, for a formula with Passes::reduced.
DSOPT_HD float factor_of(const Hyper &hyper, double weights, double updates) {
    float factor = 1;
    visit(hyper.rule, [&](auto formula) {
        using R = typename decltype(formula)::type;
        if constexpr (R::passes == Passes::reduced) factor = R::factor(hyper, weights, updates);
    });
    return factor;
}

/// Returns the scalars of a group's formula in a step. `step` includes this update.
DSOPT_HD Scalars make_scalars(const Hyper &hyper, int64_t step, double divisor, float limit) {
    return make_scalars(hyper, fields_of(hyper.rule), step, divisor, limit);
}

} // namespace dsopt
