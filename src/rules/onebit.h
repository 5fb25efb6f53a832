// SPDX-License-Identifier: Apache-2.0
// 1-bit compression with error feedback, and the formulas of the optimizers that use it, per element or per tensor.
#pragma once
#include "rules/scalars.h"

namespace dsopt {

/// Returns `scale` with the sign of `value`: the decoded value. Zeros of both signs and NaN count as positive, on all
/// devices.
DSOPT_HD float signed_scale(float scale, float value) { return value < 0 ? -scale : scale; }
/// Returns the residual of a compensated value, which error feedback adds to the next value before it is sent.
DSOPT_HD float error_of(float value, float scale) { return value - signed_scale(scale, value); }

/// Returns the scale of a scale group: signs times the scale have the same mean square as the group.
DSOPT_HD float rms_of(double squares, int64_t numel) {
    return numel == 0 ? 0.0f : float(sqrt(squares) / sqrt(double(numel)));
}

/// Returns the bits of `element` and of the elements after it up to the end of the word. `active` has one bit per
/// element, lowest first: 1 = the element takes part. NULL: all elements take part.
DSOPT_HD uint32_t active_from(const int32_t *active, int64_t element) {
    return active == nullptr ? 0xffffffffu : uint32_t(active[element / 32]) >> (element % 32);
}
DSOPT_HD bool is_active(const int32_t *active, int64_t element) { return (active_from(active, element) & 1u) != 0; }

/// Returns the bit of an element in `active`.
DSOPT_HD bool has_variance(float v) { return v != 0; }

/// The values that a rank adds to an exchange.
enum class Feed : uint8_t {
    momentum, // 1-bit Adam: the momentum, updated with this rank's gradient
    scaled,   // 1-bit LAMB: the updated momentum, scaled to the same root mean square in all tensors
    gradient, // 0/1 Adam until the variance is frozen
    distance, // 0/1 Adam afterwards: change of the weights since the last synchronisation, in units of the momentum
};
/// Scalars of the family's formulas for one tensor, in addition to Scalars.
struct OneBitScalars {
    float scaling; // 1-bit LAMB: factor that scales the momenta of all tensors to the same root mean square
    float lr_sum;  // 0/1 Adam: sum of the learning rates since the last synchronisation
    bool drops;    // 0/1 Adam of the original on one rank: the momentum ignores the gradient
    /// True in standard mode: `track` is the anchor, the weights after the last synchronisation. False in compat mode:
    /// `track` is the drift, the change of the weights since then.
    bool anchored;
};

/// True for an element that gradients and means change. In standard mode an element whose variance is 0 when the
/// variance freezes stays unchanged: a decoded value is never 0, and would be divided by eps.
DSOPT_HD bool is_updated(const OneBitScalars &o, float v) { return !o.anchored || has_variance(v); }

DSOPT_HD float feed_value(Feed feed, const Scalars &s, const OneBitScalars &o, float g, float p, float m, float v,
                          float track) {
    switch (feed) {
    case Feed::momentum: return s.beta1 * m + s.a1 * unscale(s, g);
    case Feed::scaled: return (s.beta1 * m + s.a1 * unscale(s, g)) * o.scaling;
    case Feed::gradient: return unscale(s, g);
    case Feed::distance: break;
    }
    return (o.anchored ? p - track : track) * (sqrtf(v) + s.eps);
}

/// Returns Adam's update with a frozen variance, in the same order of operations as plain_update().
DSOPT_HD float frozen_update(const Scalars &s, float p, float m, float v) {
    const float update = m / (sqrtf(v) + s.eps);
    return s.wd > 0 ? update + s.wd * p : update;
}

/// Updates moments and weights after the exchange. `y`: the mean, which is identical on all ranks.
DSOPT_HD void apply_mean(Feed feed, const Scalars &s, const OneBitScalars &o, float y, float &p, float &m, float v,
                         float &track) {
    if (!is_updated(o, v)) y = 0;
    if (feed == Feed::distance) {
        if (o.lr_sum != 0) m = -(y / o.lr_sum); // lr_sum 0: no weights changed, m stays
        const float common = o.anchored ? track : p - track;
        p = common + y / (sqrtf(v) + s.eps);
        track = o.anchored ? p : 0;
        return;
    }
    if (feed == Feed::gradient)
        m = o.drops ? m : s.beta1 * m + s.a1 * y;
    else
        m = y;
    p = p + -s.lr * frozen_update(s, p, m, v);
}

/// 1-bit LAMB after the exchange: lamb_apply_mean() updates the momentum and `fresh_variance`, the estimate of the
/// unfrozen variance, and returns the update without and with decay, whose norms are needed. `factor` is the ratio of a
/// step with the unfrozen variance to a step with the frozen variance.
struct LambUpdate {
    float without_decay, update, factor;
};
DSOPT_HD LambUpdate lamb_apply_mean(const Scalars &s, const OneBitScalars &o, float y, float mask, float p, float &m,
                                    float v, float &fresh_variance) {
    const float old = m;
    if (!is_updated(o, v)) y = 0;
    m = y / o.scaling * mask;
    const float gradient = (m - old * s.beta1) / s.a1;
    fresh_variance = s.beta2 * fresh_variance + (s.a2 * gradient) * gradient;
    const float denominator = sqrtf(v) + s.eps;
    const float without_decay = m / denominator;
    return {without_decay, s.wd > 0 ? without_decay + s.wd * p : without_decay,
            denominator / (sqrtf(fresh_variance) + s.eps)};
}

/// 1-bit LAMB: constants of the trust ratio in compressed steps, in which no rank has the mean gradient.
struct TrustRules {
    double beta, threshold, min_change, max_change;
    bool compat;

    bool operator==(const TrustRules &) const = default;
};
/// Updates the running mean of the trust ratio, which compressed steps use. In the original the mean begins at 0, and a
/// ratio of exactly 1 does not count. In standard mode the mean is divided by `weight`, the sum of the weights of its
/// terms, when it is used. `weight` is NULL in compat mode.
DSOPT_HD void average_trust(const TrustRules &rules, double ratio, float &average, float *weight) {
    if (rules.compat && ratio == 1) return;
    average = float(rules.beta * average + (1 - rules.beta) * ratio);
    if (weight != nullptr) *weight = float(rules.beta * *weight + (1 - rules.beta));
}
/// Returns the trust ratio of a compressed step. `factor`: the tensor's largest factor. `without`, `with`: sums of
/// squares of the update, without and with decay. `last`: the factor of the last step; is set to the factor of this
/// step.
DSOPT_HD float frozen_trust(const TrustRules &rules, double factor, double without, double with, bool decays,
                            float average, float weight, float &last) {
    if (decays) {
        const double ratio = fmin(1.0, sqrt(without) / sqrt(with));
        factor = factor * ratio + (1 - ratio);
    }
    const double before = last;
    factor = fmax(fmin(factor, rules.max_change), rules.min_change);
    factor = fmin(factor, before * (1 + rules.threshold));
    factor = fmax(factor, before * (1 - rules.threshold));
    last = float(factor);
    const double mean = !rules.compat && weight > 0 ? double(average) / double(weight) : double(average);
    return float(mean * factor);
}
/// Returns the larger of two factors. NaN counts as the largest.
template <class T> DSOPT_HD T larger_factor(T largest, T other) {
    return other > largest || other != other ? other : largest;
}

/// Replaces NaN by infinity for an all-reduce of the maximum, which may drop a NaN. frozen_trust() treats both the
/// same.
DSOPT_HD double replace_nan_by_infinity(double factor) { return factor != factor ? double(INFINITY) : factor; }

/// Makes a local step of 0/1 Adam, between exchanges, with this rank's gradient only.
DSOPT_HD void local_step(const Scalars &s, const OneBitScalars &o, float g, float &p, float &m, float v, float &track) {
    m = s.beta1 * m + s.a1 * (is_updated(o, v) ? unscale(s, g) : 0.0f);
    const float change = -s.lr * frozen_update(s, p, m, v);
    p = p + change;
    if (!o.anchored) track = track + change;
}

} // namespace dsopt
