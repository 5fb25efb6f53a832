// SPDX-License-Identifier: Apache-2.0
// 1-bit compression with error feedback, and the rules of the optimizers that use it. One element each.
#pragma once
#include "rules/scalars.h"

namespace dsopt {

/// The value that a bit stands for. Zeros of both signs and NaN count as positive, everywhere.
DSOPT_HD float signed_scale(float scale, float of) { return of < 0 ? -scale : scale; }
/// The residual of a compensated value, which error feedback adds to the next message.
DSOPT_HD float error_of(float kept, float scale) { return kept - signed_scale(scale, kept); }

/// Returns the scale of a scale group: its signs times the scale have its mean square.
DSOPT_HD float rms_of(double squares, int64_t numel) {
    return numel == 0 ? 0.0f : float(sqrt(squares) / sqrt(double(numel)));
}

/// A bit for each element, lowest first: it takes part. NULL: all do. Returns those of `element` and of the elements
/// behind it up to the end of the word.
DSOPT_HD uint32_t active_from(const int32_t *active, int64_t element) {
    return active == nullptr ? 0xffffffffu : uint32_t(active[element / 32]) >> (element % 32);
}
DSOPT_HD bool takes_part(const int32_t *active, int64_t element) { return (active_from(active, element) & 1u) != 0; }

/// A bit of such an array.
DSOPT_HD bool has_variance(float v) { return v != 0; }

/// What a rank brings to the exchange of a step.
enum class Feed : uint8_t {
    momentum, // 1-bit Adam: the momentum with the own gradient in it
    scaled,   // 1-bit LAMB: that, brought to the same size in all tensors
    gradient, // 0/1 Adam while the variance still moves
    distance, // 0/1 Adam afterwards: how far the weights went since ranks last agreed, in units of the momentum
};
/// What becomes of the mean.
struct OneBitScalars {
    float scaling; // 1-bit LAMB: brings momenta of all tensors to the same size
    float lr_sum;  // 0/1 Adam: learning rates since ranks last agreed
    bool drops;    // 0/1 Adam of the original on one rank: the momentum does not see the gradient
    /// Standard mode: `track` is the anchor, the weights on which ranks last agreed. Compat mode: it is the drift, the
    /// way since then.
    bool anchored;
};

/// True for an element that gradients and means change. In standard mode an element whose variance is 0 when it freezes
/// stays as it is: a sign has no zero, and would be divided by eps.
DSOPT_HD bool moves(const OneBitScalars &o, float v) { return !o.anchored || has_variance(v); }

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

/// Adam's step with a variance that stays: the same order as in plain_update().
DSOPT_HD float frozen_update(const Scalars &s, float p, float m, float v) {
    const float update = m / (sqrtf(v) + s.eps);
    return s.wd > 0 ? update + s.wd * p : update;
}

/// After the exchange, with `y` the mean that all ranks have.
DSOPT_HD void take_mean(Feed feed, const Scalars &s, const OneBitScalars &o, float y, float &p, float &m, float v,
                        float &track) {
    if (!moves(o, v)) y = 0;
    if (feed == Feed::distance) {
        if (o.lr_sum != 0) m = -(y / o.lr_sum); // no rate at all: nobody moved, the momentum stays
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

/// 1-bit LAMB after the exchange: the momentum, the variance as it would have gone on, and the update, of which norms
/// are taken. `factor` is how much smaller that variance would have made a step.
struct LambUpdate {
    float without_decay, update, factor;
};
DSOPT_HD LambUpdate lamb_take_mean(const Scalars &s, const OneBitScalars &o, float y, float mask, float p, float &m,
                                   float v, float &fresh) {
    const float old = m;
    if (!moves(o, v)) y = 0;
    m = y / o.scaling * mask;
    const float gradient = (m - old * s.beta1) / s.a1;
    fresh = s.beta2 * fresh + (s.a2 * gradient) * gradient;
    const float denominator = sqrtf(v) + s.eps;
    const float without_decay = m / denominator;
    return {without_decay, s.wd > 0 ? without_decay + s.wd * p : without_decay, denominator / (sqrtf(fresh) + s.eps)};
}

/// 1-bit LAMB: how trust ratios go on when nobody knows the gradient's mean any more.
struct TrustRules {
    double beta, threshold, min_change, max_change;
    bool compat;

    bool operator==(const TrustRules &) const = default;
};
/// The running mean that compressed steps go on with. In the original it begins at 0 and a ratio of exactly 1 does not
/// count; here it is divided by `weight`, the sum of the weights of its ratios, when it is used. NULL in compat mode.
DSOPT_HD void average_trust(const TrustRules &rules, double ratio, float &average, float *weight) {
    if (rules.compat && ratio == 1) return;
    average = float(rules.beta * average + (1 - rules.beta) * ratio);
    if (weight != nullptr) *weight = float(rules.beta * *weight + (1 - rules.beta));
}
/// The trust ratio of a compressed step. `factor`: the largest of the tensor. `without`, `with`: sums of squares of the
/// update, without and with decay. `last` is the factor of the step before, and becomes this one's.
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
/// The largest of two factors, of which NaN is the largest.
template <class T> DSOPT_HD T larger_factor(T most, T other) { return other > most || other != other ? other : most; }

/// For an exchange of the largest ones, which may lose a NaN: to frozen_trust() infinity is the same.
DSOPT_HD double factor_to_send(double factor) { return factor != factor ? double(INFINITY) : factor; }

/// 0/1 Adam between exchanges: a step by this rank alone.
DSOPT_HD void local_step(const Scalars &s, const OneBitScalars &o, float g, float &p, float &m, float v, float &track) {
    m = s.beta1 * m + s.a1 * (moves(o, v) ? unscale(s, g) : 0.0f);
    const float change = -s.lr * frozen_update(s, p, m, v);
    p = p + change;
    if (!o.anchored) track = track + change;
}

} // namespace dsopt
