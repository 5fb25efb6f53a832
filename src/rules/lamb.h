// SPDX-License-Identifier: Apache-2.0
// LAMB (You et al. 2020) in two passes: the moments and both norms, then the weights. The second pass computes the
// update again from the new moments and the old weight, which is cheaper than storing the update.
#pragma once
#include "rules/adam.h"

namespace dsopt {

template <bool EpsInside> struct Lamb {
    static constexpr Passes passes = Passes::reduced;
    static constexpr uint32_t fields = kAdamFields | kFoldedCorrection | kTrust;
    static constexpr MomentList moments = kMeans;
    static DSOPT_HD float factor(const Hyper &hyper, double weights, double updates) {
        return trust_ratio(weights, updates, hyper.min_trust, hyper.max_trust);
    }
    struct Moments {
        Scalars s;
        template <class F> DSOPT_HD void take_gradient(F g, F &m, F &v) const {
            update_moments(s, unscale(s, g), m, v);
        }
        /// Returns the update, whose norm the trust ratio needs.
        template <class F> DSOPT_HD F update(F p, F m, F v) const { return plain_update<EpsInside>(s, p, m, v); }
        /// Both: for fp32 moments. Other moments are stored and loaded in between, because the second pass loads them.
        template <class F> DSOPT_HD F operator()(F g, F p, F &m, F &v) const {
            take_gradient(g, m, v);
            return update(p, m, v);
        }
    };
    struct Weights {
        Scalars s;
        float trust;
        template <class F> DSOPT_HD void operator()(F &p, F m, F v) const {
            p = p - (s.lr * trust) * plain_update<EpsInside>(s, p, m, v);
        }
    };
};

inline void lamb_defaults(dsopt_group &group) {
    adam_defaults(group);
    group.min_trust = 0.01;
    group.max_trust = 10;
}
inline void check_lamb(const dsopt_group &group, bool) {
    if (group.min_trust > group.max_trust)
        throw Error(DSOPT_ERR_ARGUMENT, "min_trust is %g, must be in [0, max_trust], which is %g", group.min_trust,
                    group.max_trust);
}
inline constexpr RuleInfo kLamb{.algorithm = DSOPT_ALGORITHM_LAMB,
                                .name = "lamb",
                                .fields = kAdamFields | kTrust,
                                .flags = DSOPT_GROUP_NO_BIAS_CORRECTION | DSOPT_GROUP_EPS_INSIDE_SQRT,
                                .compat = true,
                                .defaults = lamb_defaults,
                                .check = check_lamb,
                                .formula = by_eps<Rule::lamb, Rule::lamb_eps_inside>};

} // namespace dsopt
