// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW, and apex's first fused Adam. One element each; `g` is as given, unscaled here.
#pragma once
#include "rules/scalars.h"

namespace dsopt {

/// Kingma and Ba 2015 with L2 decay, or Loshchilov and Hutter 2019 with decoupled decay. The order of operations is
/// part of the result: both moments are divided by their correction first, then root, sum with eps, quotient.
template <bool Decoupled> struct Adam {
    Scalars s;
    DSOPT_HD void operator()(float g, float &p, float &m, float &v) const {
        g = unscale(s, g);
        if (!Decoupled) g = g + s.wd * p;
        m = s.beta1 * m + s.a1 * g;
        v = s.beta2 * v + (s.a2 * g) * g;
        float update = (m / s.c1) / (sqrtf(v / s.c2) + s.eps);
        if (Decoupled) update = update + s.wd * p;
        p = p - s.lr * update;
    }
};

/// The quotient that LAMB and the legacy Adam share: moments without bias correction, decay added.
template <bool EpsInside> DSOPT_HD float plain_update(const Scalars &s, float p, float m, float v) {
    const float denominator = EpsInside ? sqrtf(v + s.eps) : sqrtf(v) + s.eps;
    return m / denominator + s.wd * p;
}

template <bool EpsInside> struct LegacyAdam {
    Scalars s; // lr = lr * sqrt(c2) / c1
    DSOPT_HD void operator()(float g, float &p, float &m, float &v) const {
        g = unscale(s, g);
        m = s.beta1 * m + s.a1 * g;
        v = s.beta2 * v + (s.a2 * g) * g;
        p = p - s.lr * plain_update<EpsInside>(s, p, m, v);
    }
};

} // namespace dsopt
