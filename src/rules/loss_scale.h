// SPDX-License-Identifier: Apache-2.0
// The state machine of the loss scale. Its state is in backend memory and is updated there, so no step waits for it.
#pragma once
#include "base/dtype.h"
#include "dsopt.h"
#include "rules/count.h"
#include <cfloat>

namespace dsopt {

struct ScalerRules {
    double factor, min, max; // max: HUGE_VAL = none
    int32_t window, hysteresis;
    uint32_t flags; // DSOPT_SCALER_STATIC, _REFILL, _FAIL_AT_MIN, _GROWTH_AT_WINDOW
};

/// State tensor "scaler", as 12 I32 words.
struct ScalerState {
    DoubleWords dynamic; // the scale of the state machine
    DoubleWords forced;  // used while overridden
    int32_t updates, last_overflow, hysteresis, failures, overridden, recorded, skipped_in_row, reserved;
};
static_assert(sizeof(ScalerState) == 12 * sizeof(int32_t) && alignof(ScalerState) == alignof(int32_t));

/// True if the scale is positive and finite in fp32: Inf would turn gradients of zero into NaN, 0 would divide by zero.
DSOPT_HD bool is_loss_scale(double scale) { return float(scale) > 0 && scale <= double(FLT_MAX); }
/// Largest scale that is reached by growth: a power of two, so that division of gradients by it does not round.
constexpr double kLargestGrown = 0x1p127;

/// Returns the scale that the backward pass multiplies by, at most FLT_MAX. The state is in double as in the original,
/// and words in the caller's memory may have any value.
DSOPT_HD float scale_in_use(const ScalerState &s) {
    const double scale = s.overridden ? s.forced : s.dynamic;
    return scale < double(FLT_MAX) ? float(scale) : FLT_MAX;
}

/// False if the scale of the state is not positive, as in words that no transition has written.
DSOPT_HD bool scale_can_be_used(const ScalerState &s) { return s.overridden ? s.forced > 0 : s.dynamic > 0; }

/// Repairs a scale after an overflow: a corrupted scale becomes the smallest one, and a scale above FLT_MAX becomes
/// FLT_MAX. A corrupted override is cleared. A static scale stays unchanged.
DSOPT_HD void restore_scale(const ScalerRules &rules, ScalerState &s) {
    if (s.overridden && !(s.forced > 0 && s.forced <= double(FLT_MAX))) {
        s.overridden = 0;
        s.forced = 0;
    }
    if (rules.flags & DSOPT_SCALER_STATIC) return;
    if (!(s.dynamic > 0)) s.dynamic = rules.min > 0 ? rules.min : 1;
    if (!(s.dynamic <= double(FLT_MAX))) s.dynamic = double(FLT_MAX);
}

/// Returns the larger scale after a window without overflow.
DSOPT_HD double grown_scale(const ScalerRules &rules, double scale) {
    const double grown = scale * rules.factor < rules.max ? scale * rules.factor : rules.max;
    if (grown <= kLargestGrown) return grown;
    return scale > kLargestGrown && scale <= double(FLT_MAX) ? scale : kLargestGrown;
}

/// Counts an update. At the end of their range `updates` and `last_overflow` are reduced by whole windows: only their
/// difference matters.
DSOPT_HD void count_update(const ScalerRules &rules, ScalerState &s) {
    if (s.updates == INT32_MAX) {
        const int64_t good = (int64_t(s.updates) - s.last_overflow - 1) % rules.window;
        s.last_overflow = -1;
        s.updates = int32_t(good < INT32_MAX - rules.window ? good + rules.window : good);
    }
    s.updates = saturating_increment(s.updates);
}

/// Makes one transition, as DeepSpeed's DynamicLossScaler does. The state machine inside its wrappers is the same
/// without hysteresis.
DSOPT_HD void scaler_transition(const ScalerRules &rules, ScalerState &s, bool overflow) {
    s.skipped_in_row = overflow ? saturating_increment(s.skipped_in_row) : 0;
    s.recorded = 0;
    if (overflow) restore_scale(rules, s);
    if (s.overridden) return;
    if (rules.flags & DSOPT_SCALER_STATIC) {
        count_update(rules, s);
        return;
    }
    if (overflow) {
        if (s.hysteresis > 1) {
            --s.hysteresis;
        } else {
            if ((rules.flags & DSOPT_SCALER_FAIL_AT_MIN) && s.dynamic == rules.min) {
                s.failures = saturating_increment(s.failures);
                return; // the original throws here, before it counts
            }
            s.dynamic = s.dynamic / rules.factor > rules.min ? s.dynamic / rules.factor : rules.min;
        }
        s.last_overflow = s.updates;
    } else {
        if (rules.flags & DSOPT_SCALER_REFILL) s.hysteresis = rules.hysteresis;
        const int64_t good = int64_t(s.updates) - s.last_overflow - 1; // steps since the last overflow, before this one
        const bool grow = rules.flags & DSOPT_SCALER_GROWTH_AT_WINDOW ? (good + 1) % rules.window == 0
                                                                      : good > 0 && good % rules.window == 0;
        if (grow) {
            s.hysteresis = rules.hysteresis;
            s.dynamic = grown_scale(rules, s.dynamic);
        }
    }
    count_update(rules, s);
}

} // namespace dsopt
