// SPDX-License-Identifier: Apache-2.0
// The update rules in double precision, written from their formulas, with the terms that a rounding error analysis
// needs.
#pragma once
#include "dsopt.h"
#include <algorithm>
#include <cmath>
#include <vector>

namespace test {

/// Returns the spacing of fp32 numbers at x.
inline double ulp(double x) { return std::ldexp(1.0, (x == 0 ? -126 : std::max(std::ilogb(x), -126)) - 23); }
/// Half of the spacing at 1: the largest relative error of one rounding.
constexpr double kRounding = 0x1p-24;

struct ReferenceState {
    std::vector<double> p, m, v;
};

/// One step. The `size` of a number is the sum of the absolute values of its terms: rounding errors are relative to
/// `size` if terms cancel.
struct ReferenceStep {
    ReferenceState now;
    std::vector<double> update, size; // p_old - p_new
    std::vector<double> roundings;    // maximum error of the update, in unit roundings of `size`
    std::vector<double> m_budget, v_budget;
    double weight_norm = 0, update_norm = 0, trust = 1; // update_norm: of LAMB's update before lr and trust
};

/// Bounds of each rule's rounding errors, in units. An operation and a hyper-parameter rounded to fp32 count one unit
/// each. A sum of positive terms has the larger error of its terms and one unit more. A square root halves the error.
///   m: beta1 m and a1 g are 2 units each, their sum is 3.     v: 4.     sqrt(v) 3, + eps 4; sqrt(v + eps) 4.
///      The 4 ulp that the specification allows are at least 4 units.
///   AdamW:  sqrt(v) 3, by sqrt(c2) 5, + eps 6; quotient 10; times lr/c1 12; + lr wd p 13.
///           In compat mode m/c1 5; sqrt(v/c2) 4, + eps 5; quotient 11; + wd p 12; times lr 14.
///           With EPS_UNCORRECTED the same: eps is divided by sqrt(c2) in double before its one rounding.
///   Adam:   the gradient itself is a sum with 3 units of |g| + |wd p|, so m is 6, v 10 and the quotient 14 and more:
///           see below.
///   legacy: quotient 3 + 4 + 1 = 8; + wd p 9; times the step size 11.
///   LAMB:   update 9 as before; the trust ratio has the error of the norm, at most 9 units of the norm of the sizes,
///           and 1; times the step size 3 more.
/// 14 units of 2^-24 are below the 8 * 2^-23 that the design allows for AdamW. The budget of the test adds one ULP of p
/// for the last subtraction, of which half is used.
inline ReferenceStep reference_step(const dsopt_group &group, const ReferenceState &old,
                                    const std::vector<double> &gradient, int64_t step) {
    const bool corrected = !(group.flags & DSOPT_GROUP_NO_BIAS_CORRECTION);
    const bool inside = group.flags & DSOPT_GROUP_EPS_INSIDE_SQRT;
    const bool uncorrected = group.flags & DSOPT_GROUP_EPS_UNCORRECTED;
    const double c1 = corrected ? 1 - std::pow(group.beta1, double(step)) : 1;
    const double c2 = corrected ? 1 - std::pow(group.beta2, double(step)) : 1;
    const double wd = group.weight_decay;
    const size_t n = old.p.size();
    ReferenceStep result;
    result.now = old;
    std::vector<double> direction(n), size(n);
    for (auto *list : {&result.update, &result.size, &result.roundings, &result.m_budget, &result.v_budget})
        list->resize(n);
    double weights = 0, updates = 0, sizes = 0;
    for (size_t i = 0; i < n; ++i) {
        const double p = old.p[i];
        double g = gradient[i], g_size = std::fabs(g);
        if (group.algorithm == DSOPT_ALGORITHM_ADAM) {
            g += wd * p;
            g_size += std::fabs(wd * p);
        }
        const double m = result.now.m[i] = group.beta1 * old.m[i] + (1 - group.beta1) * g;
        const double v = result.now.v[i] = group.beta2 * old.v[i] + (1 - group.beta2) * g * g;
        const double m_size = std::fabs(group.beta1 * old.m[i]) + (1 - group.beta1) * g_size;
        const double v_size = group.beta2 * old.v[i] + (1 - group.beta2) * g_size * g_size;
        const bool l2 = group.algorithm == DSOPT_ALGORITHM_ADAM;
        // As documented in dsopt.h: sqrt(c2)/c1 is outside, and eps is added to sqrt(v) itself.
        const double size_of_step = uncorrected ? std::sqrt(c2) / c1 : 1 / c1;
        const double denominator = (uncorrected ? std::sqrt(v) : std::sqrt(v / c2)) + group.eps;
        result.m_budget[i] = std::max(4 * ulp(m_size), (l2 ? 6 : 3) * kRounding * m_size);
        result.v_budget[i] = std::max(4 * ulp(v_size), (l2 ? 10 : 4) * kRounding * v_size);
        switch (group.algorithm) {
        case DSOPT_ALGORITHM_ADAM: {
            direction[i] = size_of_step * m / denominator;
            size[i] = size_of_step * m_size / denominator;
            // If g and wd p cancel, v has twice their relative error, and the root has it once.
            const double cancelled = v > 0 ? 3 * (1 - group.beta2) * std::fabs(g) * g_size / v : 0;
            result.roundings[i] = 17 + cancelled;
            break;
        }
        case DSOPT_ALGORITHM_ADAMW: {
            direction[i] = size_of_step * m / denominator + wd * p;
            size[i] = size_of_step * m_size / denominator + std::fabs(wd * p);
            result.roundings[i] = 14;
            break;
        }
        default: {
            const double plain = inside ? std::sqrt(v + group.eps) : std::sqrt(v) + group.eps;
            direction[i] = m / plain + wd * p;
            size[i] = m_size / plain + std::fabs(wd * p);
            result.roundings[i] = 11;
        }
        }
        weights += p * p;
        updates += direction[i] * direction[i];
        sizes += size[i] * size[i];
    }
    result.weight_norm = std::sqrt(weights);
    result.update_norm = std::sqrt(updates);
    double factor = group.lr;
    if (group.algorithm == DSOPT_ALGORITHM_LAMB || group.algorithm == DSOPT_ALGORITHM_ADAM_LEGACY)
        factor *= std::sqrt(c2) / c1;
    if (group.algorithm == DSOPT_ALGORITHM_LAMB) {
        if (weights != 0 && updates != 0)
            result.trust =
                std::max(std::min(result.weight_norm / result.update_norm, group.max_trust), group.min_trust);
        factor *= result.trust;
        for (double &roundings : result.roundings) roundings = 13 + (updates > 0 ? 9 * std::sqrt(sizes / updates) : 0);
    }
    for (size_t i = 0; i < n; ++i) {
        result.update[i] = factor * direction[i];
        result.size[i] = factor * size[i];
        result.now.p[i] = old.p[i] - result.update[i];
    }
    return result;
}

/// Returns the hyper-parameters rounded to fp32, as the original's kernels use them.
inline dsopt_group rounded_to_float(dsopt_group group) {
    for (double dsopt_group::*field : {&dsopt_group::lr, &dsopt_group::beta1, &dsopt_group::beta2, &dsopt_group::eps,
                                       &dsopt_group::weight_decay, &dsopt_group::min_trust, &dsopt_group::max_trust})
        group.*field = double(float(group.*field));
    return group;
}

} // namespace test
