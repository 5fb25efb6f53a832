// SPDX-License-Identifier: Apache-2.0
// The loss-scale machine. It lives in backend memory and moves there, so no step waits for it.
#pragma once
#include "dsopt.h"
#include "hd.h"
#include <cfloat>
#include <string.h>

namespace dsopt {

struct ScalerRules {
    double factor, min, max; // max: HUGE_VAL = none
    int32_t window, hysteresis;
    uint32_t flags; // DSOPT_SCALER_STATIC, _REFILL, _FAIL_AT_MIN, _GROWTH_AT_WINDOW
};

/// A double in memory that is aligned for I32 only, as state that a caller owns may be.
struct DoubleWords {
    int32_t words[2];
    DSOPT_HD operator double() const {
        double value;
        memcpy(&value, words, sizeof value);
        return value;
    }
    DSOPT_HD DoubleWords &operator=(double value) {
        memcpy(words, &value, sizeof value);
        return *this;
    }
};

/// State tensor "scaler", as 12 I32 words.
struct ScalerState {
    DoubleWords dynamic; // the machine's own value
    DoubleWords forced;  // used while overridden
    int32_t updates, last_overflow, hysteresis, failures, overridden, recorded, skipped_in_row, reserved;
};
static_assert(sizeof(ScalerState) == 12 * sizeof(int32_t) && alignof(ScalerState) == alignof(int32_t));

/// The float that backward multiplies by. The machine counts in double as the original does, and may grow past what
/// fp32 holds; a scale of Inf would turn gradients of zero into NaN.
DSOPT_HD float scale_in_use(const ScalerState &s) {
    const double scale = s.overridden ? s.forced : s.dynamic;
    return scale < double(FLT_MAX) ? float(scale) : FLT_MAX;
}

DSOPT_HD void shrink(const ScalerRules &rules, ScalerState &s) {
    s.dynamic = s.dynamic / rules.factor > rules.min ? s.dynamic / rules.factor : rules.min;
}

/// One transition (DeepSpeed's DynamicLossScaler and the machine inside its wrappers, which is the same without
/// hysteresis).
DSOPT_HD void scaler_transition(const ScalerRules &rules, ScalerState &s, bool overflow) {
    s.skipped_in_row = overflow ? s.skipped_in_row + 1 : 0;
    s.recorded = 0;
    if (s.overridden) return;
    if (rules.flags & DSOPT_SCALER_STATIC) {
        ++s.updates;
        return;
    }
    if (overflow) {
        if (s.hysteresis > 1) {
            --s.hysteresis;
        } else {
            if ((rules.flags & DSOPT_SCALER_FAIL_AT_MIN) && s.dynamic == rules.min) {
                ++s.failures;
                return; // the original throws here, before it counts
            }
            shrink(rules, s);
        }
        s.last_overflow = s.updates;
    } else {
        if (rules.flags & DSOPT_SCALER_REFILL) s.hysteresis = rules.hysteresis;
        const int32_t good = s.updates - s.last_overflow - 1; // steps since the last overflow, before this one
        const bool grow = rules.flags & DSOPT_SCALER_GROWTH_AT_WINDOW ? (good + 1) % rules.window == 0
                                                                      : good > 0 && good % rules.window == 0;
        if (grow) {
            s.hysteresis = rules.hysteresis;
            s.dynamic = s.dynamic * rules.factor < rules.max ? s.dynamic * rules.factor : rules.max;
        }
    }
    ++s.updates;
}

} // namespace dsopt
