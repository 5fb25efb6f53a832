// SPDX-License-Identifier: Apache-2.0
// AdEMAMix (Pagliardini et al. 2024) with a constant alpha: Adam with a second, slower mean of the gradients. Only for
// tests: a rule with three moments and one more beta than any that ships, alone and with the trust ratio of LAMB.
#pragma once
#include "rules/adam.h"

namespace dsopt {

inline constexpr MomentList kThreeMoments{3,
                                          {{"exp_avg", "exp_avg_scale"},
                                           {"exp_avg_sq", "exp_avg_sq_scale", /*squares=*/true},
                                           {"exp_avg_slow", "exp_avg_slow_scale"}}};
constexpr float kAlpha = 5;

template <class F> DSOPT_HD F ademamix_update(const Scalars &s, F p, F m, F v, F slow) {
    return (m / s.c1 + kAlpha * slow) / (square_root(v) * s.inverse_root + s.eps) + s.wd * p;
}

struct AdEmaMix {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = kAdamFields | kBeta3;
    static constexpr MomentList moments = kThreeMoments;
    Scalars s;
    template <class F> DSOPT_HD void operator()(F g, F &p, F &m, F &v, F &slow) const {
        g = unscale(s, g);
        update_moments(s, g, m, v);
        slow = s.beta3 * slow + s.a3 * g;
        p = p - s.lr * ademamix_update(s, p, m, v, slow);
    }
};

struct AdEmaMixTrust {
    static constexpr Passes passes = Passes::reduced;
    static constexpr uint32_t fields = kAdamFields | kBeta3 | kTrust;
    static constexpr MomentList moments = kThreeMoments;
    static DSOPT_HD float factor(const Hyper &hyper, double weights, double updates) {
        return trust_ratio(weights, updates, hyper.min_trust, hyper.max_trust);
    }
    struct Moments {
        Scalars s;
        template <class F> DSOPT_HD void take_gradient(F g, F &m, F &v, F &slow) const {
            g = unscale(s, g);
            update_moments(s, g, m, v);
            slow = s.beta3 * slow + s.a3 * g;
        }
        template <class F> DSOPT_HD F update(F p, F m, F v, F slow) const { return ademamix_update(s, p, m, v, slow); }
        template <class F> DSOPT_HD F operator()(F g, F p, F &m, F &v, F &slow) const {
            take_gradient(g, m, v, slow);
            return update(p, m, v, slow);
        }
    };
    struct Weights {
        Scalars s;
        float trust;
        template <class F> DSOPT_HD void operator()(F &p, F m, F v, F slow) const {
            p = p - (s.lr * trust) * ademamix_update(s, p, m, v, slow);
        }
    };
};

inline void ademamix_defaults(dsopt_group &group) {
    adam_defaults(group);
    group.beta3 = 0.9999;
}
inline void ademamix_trust_defaults(dsopt_group &group) {
    ademamix_defaults(group);
    group.min_trust = 0.01;
    group.max_trust = 10;
}
inline constexpr RuleInfo kAdEmaMix{.algorithm = DSOPT_ALGORITHM_ADEMAMIX,
                                    .name = "ademamix",
                                    .fields = kAdamFields | kBeta3,
                                    .flags = DSOPT_GROUP_NO_BIAS_CORRECTION,
                                    .defaults = ademamix_defaults,
                                    .formula = always<Rule::ademamix>};
inline constexpr RuleInfo kAdEmaMixTrust{.algorithm = DSOPT_ALGORITHM_ADEMAMIX_TRUST,
                                         .name = "ademamix_trust",
                                         .fields = kAdamFields | kBeta3 | kTrust,
                                         .flags = DSOPT_GROUP_NO_BIAS_CORRECTION,
                                         .defaults = ademamix_trust_defaults,
                                         .formula = always<Rule::ademamix_trust>};

} // namespace dsopt
