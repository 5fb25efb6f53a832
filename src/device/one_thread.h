// SPDX-License-Identifier: Apache-2.0
// Functions on a few scalars in backend memory. One thread of the device calls each of them, in stream order. A new
// function is a struct and an alternative of OneThreadFunction; devices need no change.
#pragma once
#include "device/decide.h"
#include "rules/loss_scale.h"
#include "rules/schedule.h"
#include <variant>

namespace dsopt {

/// One transition of a scaler, with the overflow at `overflow` or, if NULL, the overflow that steps recorded.
struct UpdateScaler {
    static constexpr const char *name = "update_scaler";
    ScalerRules rules;
    ScalerState *state;
    float *scale;
    const int32_t *overflow;
    DSOPT_HD void operator()() const {
        scaler_transition(rules, *state, overflow != nullptr ? *overflow != 0 : state->recorded != 0);
        *scale = scale_in_use(*state);
    }
};

/// Writes a scaler's state and its scale.
struct WriteScaler {
    static constexpr const char *name = "write_scaler";
    ScalerState value;
    ScalerState *state;
    float *scale;
    DSOPT_HD void operator()() const {
        *state = value;
        *scale = scale_in_use(value);
    }
};

/// Writes the next step's reduction of gradients, DSOPT_REDUCTION_... `schedule` NULL: without the 1-bit family.
struct WriteReduction {
    static constexpr const char *name = "write_reduction";
    ScheduleRules rules;
    const ScheduleState *schedule;
    int32_t *reduction;
    DSOPT_HD void operator()() const { *reduction = next_reduction_of(rules, schedule); }
};

using OneThreadFunction = std::variant<NormMove, UpdateScaler, WriteScaler, WriteReduction>;

} // namespace dsopt
