// SPDX-License-Identifier: Apache-2.0
// Scalars that a step computes once per tensor, in double, from the hyper-parameters and the integer step.
#pragma once
#include "base/dtype.h"
#include "rules/rule.h"
#include <math.h>

namespace dsopt {

/// Everything that a formula reads in addition to tensors. Multiplication by `inverse` unscales and clips a gradient.
struct Scalars {
    float lr;           // includes the bias correction if the formula has kFoldedCorrection or kStepSize
    float beta1, beta2; // decay of the moments; Muon: of the momentum, and its weight in Nesterov's mixture
    float a1, a2;       // weights of the gradient in the same places: 1 - beta, or 1 - dampening
    float eps, wd;
    float lr_wd;        // learning rate times weight decay, without bias correction
    float c1, c2;       // bias corrections; 1 if there is none
    float inverse_root; // 1 / sqrt(c2)
    float inverse;
    bool first;  // this is the tensor's first step
    float limit; // unscaled gradients are clipped to [-limit, limit]; INFINITY = off
};

// Formulas are templates over the type F of one element of each array: float, or a vector register of several floats,
// on which the operators and ?: work element by element.

template <class F> DSOPT_HD F square_root(F x) {
    if constexpr (sizeof(F) == sizeof(float)) {
        return sqrtf(x);
    } else {
        for (unsigned i = 0; i < sizeof(F) / sizeof(float); ++i) x[i] = sqrtf(x[i]); // one instruction
        return x;
    }
}

/// Returns the unscaled and clipped gradient. NaN stays NaN.
template <class F> DSOPT_HD F unscale(const Scalars &s, F g) {
    g = g * s.inverse;
    if constexpr (sizeof(F) > sizeof(float)) // with a branch the compiler would not vectorise a loop over floats
        if (__builtin_expect(s.limit == INFINITY, 1)) return g;
    g = g > s.limit ? s.limit : g;
    return g < -s.limit ? -s.limit : g;
}

/// Returns base^n by repeated squaring: the same bits on host and device, which pow() does not guarantee.
DSOPT_HD double power(double base, int64_t n) {
    double result = 1;
    for (; n > 0; n >>= 1, base *= base)
        if (n & 1) result *= base;
    return result;
}

/// Returns the scalars of a step. `step` includes this update. `fields`: an OR of Field, of the formula. Compat mode
/// first rounds the betas to fp32, as the original kernels do.
/// Least eps in the formulas. With 0 an element without a gradient so far would become 0 / 0. Added to a root this changes
/// no other quotient, because the root of the least fp32 number is 2^-74.5.
inline constexpr float kLeastEps = 0x1p-126f;

DSOPT_HD Scalars make_scalars(const Hyper &hyper, uint32_t fields, int64_t step, double divisor, float limit) {
    const bool dampens = fields & kDampening; // SGD: a1 does not depend on the momentum
    const double first_decay = fields & kMomentum ? hyper.momentum : hyper.beta1;
    const double beta1 = hyper.compat ? double(float(first_decay)) : first_decay;
    const double beta2 = hyper.compat ? double(float(hyper.beta2)) : hyper.beta2;
    Scalars s;
    s.beta1 = float(beta1);
    s.beta2 = float(beta2);
    s.a1 = hyper.compat ? 1.0f - s.beta1 : float(1.0 - (dampens ? hyper.dampening : beta1));
    s.a2 = hyper.compat ? 1.0f - s.beta2 : float(1.0 - beta2);
    s.wd = float(hyper.weight_decay);
    const double c1 = hyper.bias_correction ? 1.0 - power(beta1, step) : 1.0;
    const double c2 = hyper.bias_correction ? 1.0 - power(beta2, step) : 1.0;
    const double root = sqrt(c2);
    s.lr_wd = float(hyper.lr * hyper.weight_decay);
    s.c1 = float(c1);
    s.c2 = float(c2);
    s.inverse_root = float(1.0 / root);
    // sqrt(c2)/c1 m / (sqrt(v) + eps) is (m/c1) / (sqrt(v/c2) + eps/sqrt(c2)): the formula stays the same.
    s.eps = float(hyper.eps_uncorrected ? hyper.eps / root : hyper.eps);
    if (s.eps < kLeastEps) s.eps = kLeastEps;
    s.inverse = float(1.0 / divisor);
    s.limit = limit;
    s.first = step == 1;
    s.lr = float(hyper.lr);
    if (fields & kMatrix) {
        s.beta2 = float(hyper.bias_correction ? beta1 / (1.0 - power(beta1, step + 1)) : beta1);
        s.a2 = float(hyper.bias_correction ? (1.0 - beta1) / c1 : 1.0 - beta1);
    }
    if (fields & kFoldedCorrection) {
        if (hyper.compat)
            s.lr = s.lr * sqrtf(s.c2) / s.c1;
        else if (hyper.bias_correction)
            s.lr = float(hyper.lr * root / c1);
    }
    if (fields & kStepSize) s.lr = float(hyper.lr / c1);
    if (fields & kLrDecay) s.lr = float(hyper.lr / (1.0 + double(step - 1) * hyper.lr_decay));
    return s;
}

/// Returns the trust ratio of LAMB from the sums of squares; 1 if a norm is 0. NaN stays NaN.
DSOPT_HD float trust_ratio(double weight_squares, double update_squares, double lower, double upper) {
    const double weight = sqrt(weight_squares), update = sqrt(update_squares);
    if (weight == 0 || update == 0) return 1.0f;
    double ratio = weight / update;
    if (ratio > upper) ratio = upper;
    if (ratio < lower) ratio = lower;
    return float(ratio);
}

/// Returns the divisor of gradients: their scale, times the clip coefficient if that is above 1. `scaled_norm` is the
/// norm of the gradients before they are unscaled.
DSOPT_HD double clip_divisor(double scale, double scaled_norm, double max_norm) {
    if (!(max_norm > 0)) return scale;
    const double coefficient = (scaled_norm / scale + 1e-6) / max_norm;
    return coefficient > 1 ? coefficient * scale : scale;
}

} // namespace dsopt
