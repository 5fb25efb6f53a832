// SPDX-License-Identifier: Apache-2.0
// The loss-scale machine. It lives in backend memory and moves there, so no step waits for it.
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
    DoubleWords dynamic; // the machine's own value
    DoubleWords forced;  // used while overridden
    int32_t updates, last_overflow, hysteresis, failures, overridden, recorded, skipped_in_row, reserved;
};
static_assert(sizeof(ScalerState) == 12 * sizeof(int32_t) && alignof(ScalerState) == alignof(int32_t));

/// A scale that fp32 holds: one of Inf would turn gradients of zero into NaN, one of 0 divides by zero.
DSOPT_HD bool is_loss_scale(double scale) { return float(scale) > 0 && scale <= double(FLT_MAX); }
/// The largest that a scale grows to: a power of two, so that it goes on to divide gradients without rounding.
constexpr double kLargestGrown = 0x1p127;

/// The float that backward multiplies by. The machine counts in double as the original does, and a caller's words may
/// hold anything.
DSOPT_HD float scale_in_use(const ScalerState &s) {
    const double scale = s.overridden ? s.forced : s.dynamic;
    return scale < double(FLT_MAX) ? float(scale) : FLT_MAX;
}

/// False for words that no transition leaves behind, such as zeros or those of another array.
DSOPT_HD bool scale_can_be_used(const ScalerState &s) { return s.overridden ? s.forced > 0 : s.dynamic > 0; }

/// After an overflow: words that were spoilt become the smallest scale, and one that has left the doubles comes back.
/// A static scale is the caller's to know.
DSOPT_HD void restore_scale(const ScalerRules &rules, ScalerState &s) {
    if (s.overridden && !(s.forced > 0 && s.forced <= double(FLT_MAX))) {
        s.overridden = 0;
        s.forced = 0;
    }
    if (rules.flags & DSOPT_SCALER_STATIC) return;
    if (!(s.dynamic > 0)) s.dynamic = rules.min > 0 ? rules.min : 1;
    if (!(s.dynamic <= double(FLT_MAX))) s.dynamic = double(FLT_MAX);
}

/// The larger scale after a window without overflow.
DSOPT_HD double grown_scale(const ScalerRules &rules, double scale) {
    const double grown = scale * rules.factor < rules.max ? scale * rules.factor : rules.max;
    if (grown <= kLargestGrown) return grown;
    return scale > kLargestGrown && scale <= double(FLT_MAX) ? scale : kLargestGrown;
}

/// At the end of their range both counts go back by whole windows: only what lies between them matters.
DSOPT_HD void count_update(const ScalerRules &rules, ScalerState &s) {
    if (s.updates == INT32_MAX) {
        const int64_t good = (int64_t(s.updates) - s.last_overflow - 1) % rules.window;
        s.last_overflow = -1;
        s.updates = int32_t(good < INT32_MAX - rules.window ? good + rules.window : good);
    }
    s.updates = one_more(s.updates);
}

/// One transition (DeepSpeed's DynamicLossScaler and the machine inside its wrappers, which is the same without
/// hysteresis).
DSOPT_HD void scaler_transition(const ScalerRules &rules, ScalerState &s, bool overflow) {
    s.skipped_in_row = overflow ? one_more(s.skipped_in_row) : 0;
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
                s.failures = one_more(s.failures);
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
