// SPDX-License-Identifier: Apache-2.0
// LAMB (You et al. 2020) in two sweeps: the moments and both norms, then the weights. The update is formed again in the
// second sweep from the new moments and the old weight, which is cheaper than storing it.
#pragma once
#include "rules/adam.h"

namespace dsopt {

template <bool EpsInside> struct LambMoments {
    Scalars s;
    /// Returns the update, whose norm the trust ratio needs.
    DSOPT_HD float operator()(float g, float p, float &m, float &v) const {
        g = unscale(s, g);
        m = s.beta1 * m + s.a1 * g;
        v = s.beta2 * v + (s.a2 * g) * g;
        return plain_update<EpsInside>(s, p, m, v);
    }
};

template <bool EpsInside> struct LambWeights {
    Scalars s;
    float trust;
    DSOPT_HD void operator()(float &p, float m, float v) const {
        p = p - (s.lr * trust) * plain_update<EpsInside>(s, p, m, v);
    }
};

} // namespace dsopt
