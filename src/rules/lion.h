// SPDX-License-Identifier: Apache-2.0
// Lion (Chen et al. 2023) as in the paper and in optax.lion.
#pragma once
#include "rules/scalars.h"

namespace dsopt {

struct Lion {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = kBeta1 | kBeta2;
    static constexpr MomentList moments{1, {{"exp_avg", "exp_avg_scale"}}};
    Scalars s;
    template <class F> DSOPT_HD void operator()(F g, F &p, F &m) const {
        g = unscale(s, g);
        const F c = s.beta1 * m + s.a1 * g;
        const F sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c; // the sign of 0 is 0, NaN stays NaN
        p = p - s.lr * (sign + s.wd * p);
        m = s.beta2 * m + s.a2 * g;
    }
};

inline void lion_defaults(dsopt_group &group) {
    group.lr = 1e-4;
    group.beta1 = 0.9;
    group.beta2 = 0.99;
}
inline constexpr RuleInfo kLion{.algorithm = DSOPT_ALGORITHM_LION,
                                .name = "lion",
                                .fields = kBeta1 | kBeta2,
                                .defaults = lion_defaults,
                                .formula = always<Rule::lion>};

} // namespace dsopt
