// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent as in torch.optim.SGD: decay as L2, momentum with dampening, Nesterov.
#pragma once
#include "rules/scalars.h"

namespace dsopt {

/// SGD without momentum, which has no state.
struct Sgd {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = 0;
    static constexpr MomentList moments{0, {}};
    Scalars s;
    template <class F> DSOPT_HD void operator()(F g, F &p) const {
        g = unscale(s, g) + s.wd * p;
        p = p - s.lr * g;
    }
};

/// At a tensor's first step, the momentum buffer becomes the gradient itself.
template <bool Nesterov> struct SgdMomentum {
    static constexpr Passes passes = Passes::elementwise;
    static constexpr uint32_t fields = kMomentum | kDampening;
    static constexpr MomentList moments{1, {{"momentum_buffer", "momentum_buffer_scale"}}};
    Scalars s;
    template <class F> DSOPT_HD void operator()(F g, F &p, F &m) const {
        g = unscale(s, g) + s.wd * p;
        m = s.first ? g : s.beta1 * m + s.a1 * g;
        p = p - s.lr * (Nesterov ? g + s.beta1 * m : m);
    }
};

inline void check_sgd(const dsopt_group &group, bool) {
    const bool nesterov = group.flags & DSOPT_GROUP_NESTEROV;
    if (group.dampening > 1) throw Error(DSOPT_ERR_ARGUMENT, "dampening is %g, must be in [0, 1]", group.dampening);
    if (nesterov && group.momentum != 0 && group.dampening != 0)
        throw Error(DSOPT_ERR_ARGUMENT, "dampening is %g, must be 0 with nesterov", group.dampening);
}
inline Rule sgd_formula(const dsopt_group &group, bool) {
    if (group.momentum == 0) return Rule::sgd;
    return group.flags & DSOPT_GROUP_NESTEROV ? Rule::sgd_nesterov : Rule::sgd_momentum;
}
inline constexpr RuleInfo kSgd{.algorithm = DSOPT_ALGORITHM_SGD,
                               .name = "sgd",
                               .fields = kMomentum | kDampening,
                               .flags = DSOPT_GROUP_NESTEROV,
                               .defaults = [](dsopt_group &group) { group.lr = 1e-3; },
                               .check = check_sgd,
                               .formula = sgd_formula};

} // namespace dsopt
