// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW, and apex's first fused Adam. The functors update one element. They unscale `g`, the caller's
// gradient.
#pragma once
#include "rules/scalars.h"

namespace dsopt {

/// The running means that Adam and LAMB keep of gradients and of their squares.
inline constexpr MomentList kMeans{
    2, {{"exp_avg", "exp_avg_scale"}, {"exp_avg_sq", "exp_avg_sq_scale", /*squares=*/true}}};
inline constexpr uint32_t kAdamFields = kBeta1 | kBeta2 | kEps | kBiasCorrection;

/// Updates both running means with an unscaled gradient.
template <class F> DSOPT_HD void update_moments(const Scalars &s, F g, F &m, F &v) {
    m = s.beta1 * m + s.a1 * g;
    v = s.beta2 * v + (s.a2 * g) * g;
}

/// Kingma and Ba 2015 with L2 decay, or Loshchilov and Hutter 2019 with decoupled decay, with one division and one
/// square root: the bias corrections are factors of the step size and of the root. lr wd p is subtracted together with
/// the step. A factor 1 - lr wd, rounded to fp32, would change all weights by an error in the same direction in every
/// step.
template <bool Decoupled> struct Adam {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = kAdamFields | kStepSize;
    static constexpr MomentList moments = kMeans;
    Scalars s; // lr = lr / c1
    template <class F> DSOPT_HD void operator()(F g, F &p, F &m, F &v) const {
        g = unscale(s, g);
        if (!Decoupled) g = g + s.wd * p;
        update_moments(s, g, m, v);
        const F change = s.lr * (m / (square_root(v) * s.inverse_root + s.eps));
        p = p - (Decoupled ? change + s.lr_wd * p : change);
    }
};

/// The same rule in the original's order of operations, which determines the bits of the result: both moments are
/// divided by their correction first, then root, sum with eps, quotient.
template <bool Decoupled> struct AdamCompat {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = kAdamFields;
    static constexpr MomentList moments = kMeans;
    Scalars s;
    template <class F> DSOPT_HD void operator()(F g, F &p, F &m, F &v) const {
        g = unscale(s, g);
        if (!Decoupled) g = g + s.wd * p;
        update_moments(s, g, m, v);
        F update = (m / s.c1) / (square_root(v / s.c2) + s.eps);
        if (Decoupled) update = update + s.wd * p;
        p = p - s.lr * update;
    }
};

/// Returns the update that LAMB, the legacy Adam and the 1-bit family share: the quotient of moments without bias
/// correction, with decay added.
template <bool EpsInside, class F> DSOPT_HD F plain_update(const Scalars &s, F p, F m, F v) {
    const F denominator = EpsInside ? square_root(v + s.eps) : square_root(v) + s.eps;
    return m / denominator + s.wd * p;
}

template <bool EpsInside> struct LegacyAdam {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = kAdamFields | kFoldedCorrection;
    static constexpr MomentList moments = kMeans;
    Scalars s; // lr = lr * sqrt(c2) / c1
    template <class F> DSOPT_HD void operator()(F g, F &p, F &m, F &v) const {
        update_moments(s, unscale(s, g), m, v);
        p = p - s.lr * plain_update<EpsInside>(s, p, m, v);
    }
};

inline void adam_defaults(dsopt_group &group) {
    group.lr = 1e-3;
    group.beta1 = 0.9;
    group.beta2 = 0.999;
    group.eps = 1e-8;
}
/// Sets the weight decay of torch.optim.AdamW. Without weight decay, AdamW would be Adam.
inline void adamw_defaults(dsopt_group &group) {
    adam_defaults(group);
    group.weight_decay = 0.01;
}
template <Rule Standard, Rule Compat> Rule by_mode(const dsopt_group &, bool compat) {
    return compat ? Compat : Standard;
}
constexpr RuleInfo adam_record(int32_t algorithm, const char *name, void (*defaults)(dsopt_group &),
                               Rule (*formula)(const dsopt_group &, bool)) {
    return {.algorithm = algorithm,
            .name = name,
            .fields = kAdamFields,
            .flags = DSOPT_GROUP_NO_BIAS_CORRECTION | DSOPT_GROUP_EPS_UNCORRECTED,
            .compat = true,
            .counts_per_group = true,
            .defaults = defaults,
            .formula = formula};
}
inline constexpr RuleInfo kAdam =
    adam_record(DSOPT_ALGORITHM_ADAM, "adam", adam_defaults, by_mode<Rule::adam, Rule::adam_compat>);
inline constexpr RuleInfo kAdamW =
    adam_record(DSOPT_ALGORITHM_ADAMW, "adamw", adamw_defaults, by_mode<Rule::adamw, Rule::adamw_compat>);
inline constexpr RuleInfo kLegacyAdam{.algorithm = DSOPT_ALGORITHM_ADAM_LEGACY,
                                      .name = "adam_legacy",
                                      .fields = kAdamFields,
                                      .flags = DSOPT_GROUP_NO_BIAS_CORRECTION | DSOPT_GROUP_EPS_INSIDE_SQRT,
                                      .compat = true,
                                      .counts_per_group = true,
                                      .defaults = adam_defaults,
                                      .formula = by_eps<Rule::legacy, Rule::legacy_eps_inside>};

} // namespace dsopt
