// SPDX-License-Identifier: Apache-2.0
// Adagrad (Duchi et al. 2011) as in torch.optim.Adagrad; with eps inside the root as in optax.adagrad.
#pragma once
#include "rules/scalars.h"

namespace dsopt {

template <bool EpsInside> struct Adagrad {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = kEps | kLrDecay;
    static constexpr MomentList moments{1, {{"sum", "", /*squares=*/true, &dsopt_group::initial_accumulator_value}}};
    Scalars s; // lr = lr / (1 + (t - 1) lr_decay)
    template <class F> DSOPT_HD void operator()(F g, F &p, F &sum) const {
        g = unscale(s, g) + s.wd * p;
        sum = sum + g * g;
        if (EpsInside)
            p = p - s.lr * (sum == 0 ? 0.0f : g / square_root(sum + s.eps)); // eps may be 0
        else
            p = p - s.lr * (g / (square_root(sum) + s.eps));
    }
};

inline void adagrad_defaults(dsopt_group &group) {
    group.lr = 1e-2;
    group.eps = 1e-10;
}
inline void check_adagrad(const dsopt_group &group, bool) {
    if (group.initial_accumulator_value > 3.4028234663852886e38)
        throw Error(DSOPT_ERR_ARGUMENT, "initial_accumulator_value is %g, which fp32 does not hold",
                    group.initial_accumulator_value);
}
inline constexpr RuleInfo kAdagrad{.algorithm = DSOPT_ALGORITHM_ADAGRAD,
                                   .name = "adagrad",
                                   .fields = kEps | kLrDecay,
                                   .flags = DSOPT_GROUP_EPS_INSIDE_SQRT,
                                   .defaults = adagrad_defaults,
                                   .check = check_adagrad,
                                   .formula = by_eps<Rule::adagrad, Rule::adagrad_eps_inside>};

} // namespace dsopt
