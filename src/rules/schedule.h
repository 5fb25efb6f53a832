// SPDX-License-Identifier: Apache-2.0
// The schedule of the 1-bit family: a few integers, identical on all ranks, that determine the stage of a step.
#pragma once
#include "base/hd.h"
#include "dsopt.h"
#include "rules/count.h"

namespace dsopt {

struct ScheduleRules {
    int32_t algorithm; // DSOPT_ALGORITHM_ONEBIT_ADAM, _ZERO_ONE_ADAM, _ONEBIT_LAMB
    int64_t freeze_step;
    int64_t var_interval_steps;   // 0/1 Adam: variance updates until their interval doubles
    int64_t local_interval_steps; // 0/1 Adam: steps until the interval between synchronisations doubles
    int64_t max_local_interval;
    bool compat; // the first call is dry, the last full step has number freeze_step

    bool operator==(const ScheduleRules &) const = default;
};

/// State tensor "schedule", as 8 I32 words.
struct ScheduleState {
    int32_t step;   // number of calls; in compat mode number of executed steps
    int32_t frozen; // 1: the variance does not change any more
    int32_t var_interval, var_counter, local_interval, local_counter; // intervals: 0 = not begun, which means 1
    int32_t momentum_in_bits;                                         // 1: exp_avg_bits has the momentum
    int32_t reserved;
};
static_assert(sizeof(ScheduleState) == 8 * sizeof(int32_t));

/// What a step does.
enum class Stage : uint8_t {
    dry,      // compat mode: counts, and does nothing else
    full,     // gradients are averaged in full precision, the variance is updated
    exchange, // ranks exchange one bit per element
    local,    // 0/1 Adam: a step of this rank without communication
    sync,     // 0/1 Adam: a local step, then an exchange after which the ranks have identical weights again
};

DSOPT_HD int32_t at_least_one(int32_t interval) { return interval > 0 ? interval : 1; }

DSOPT_HD Stage stage_of(const ScheduleRules &rules, const ScheduleState &s) {
    if (rules.compat && s.step == 0) return Stage::dry;
    const int64_t t = int64_t(s.step) + 1; // 64 bits: the caller's words may have any value
    if (rules.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) return s.frozen ? Stage::exchange : Stage::full;
    if (!s.frozen) return t % at_least_one(s.var_interval) == 0 ? Stage::full : Stage::exchange;
    return t % at_least_one(s.local_interval) == 0 ? Stage::sync : Stage::local;
}

/// Returns what happens to the gradients of a step in this stage, DSOPT_REDUCTION_...
DSOPT_HD int32_t reduction_of(Stage stage) {
    if (stage == Stage::dry || stage == Stage::full) return DSOPT_REDUCTION_FULL;
    return stage == Stage::local ? DSOPT_REDUCTION_LOCAL : DSOPT_REDUCTION_COMPRESSED;
}
/// Returns what happens to the gradients of the next step. `schedule` NULL: no group is of the 1-bit family.
DSOPT_HD int32_t next_reduction_of(const ScheduleRules &rules, const ScheduleState *schedule) {
    return schedule != nullptr ? reduction_of(stage_of(rules, *schedule)) : DSOPT_REDUCTION_FULL;
}

/// Advances the schedule after a step. Returns true if this step froze the variance: error feedback must then be reset,
/// because later exchanges are of another quantity.
DSOPT_HD bool advance_schedule(const ScheduleRules &rules, ScheduleState &s) {
    const Stage stage = stage_of(rules, s);
    s.step = saturating_increment(s.step);
    if (stage == Stage::dry) return false;
    const int64_t last =
        rules.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM && rules.compat ? rules.freeze_step + 1 : rules.freeze_step;
    if (stage == Stage::local || stage == Stage::sync) {
        s.local_counter = saturating_increment(s.local_counter);
        if (s.local_counter >= rules.local_interval_steps) {
            s.local_counter = 0;
            const int64_t twice = 2 * int64_t(at_least_one(s.local_interval));
            s.local_interval = int32_t(twice < rules.max_local_interval ? twice : rules.max_local_interval);
        }
        return false;
    }
    if (rules.algorithm == DSOPT_ALGORITHM_ZERO_ONE_ADAM && stage == Stage::full) {
        s.var_counter = saturating_increment(s.var_counter);
        if (s.var_counter >= rules.var_interval_steps) {
            s.var_counter = 0;
            // An interval that ends after the freeze is never completed, and must not overflow.
            const int32_t now = at_least_one(s.var_interval);
            s.var_interval = now < (1 << 29) ? 2 * now : now;
        }
    }
    if (s.frozen || s.step < last) return false;
    s.frozen = 1;
    return true;
}

/// Returns the schedule before call number `call` in standard mode, the same as advance_schedule() after each earlier
/// call. Iterates over the doublings of the intervals, of which there are at most about sixty.
inline ScheduleState schedule_before(const ScheduleRules &rules, int32_t call) {
    ScheduleState s{};
    const int64_t taken = int64_t(call) - 1, frozen_at = rules.freeze_step > 1 ? rules.freeze_step : 1;
    s.step = int32_t(taken);
    s.frozen = taken >= frozen_at;
    if (rules.algorithm != DSOPT_ALGORITHM_ZERO_ONE_ADAM) return s;
    // Until the freeze, var_counter counts every var_interval-th step.
    const int64_t unfrozen = s.frozen ? frozen_at : taken;
    const int64_t counts = rules.var_interval_steps > 1 ? rules.var_interval_steps : 1;
    for (int64_t step = 0; step < unfrozen;) {
        const int64_t interval = at_least_one(s.var_interval);
        const int64_t doubled = (step / interval + counts - s.var_counter) * interval;
        // `counts` and `interval` are below 2^31, so `doubled` does not overflow.
        if (doubled > unfrozen) {
            s.var_counter += int32_t(unfrozen / interval - step / interval);
            break;
        }
        step = doubled;
        s.var_counter = 0;
        s.var_interval = int32_t(interval < (1 << 29) ? 2 * interval : interval);
    }
    // After the freeze, local_counter counts every step.
    const int64_t local = taken - unfrozen, steps = rules.local_interval_steps > 1 ? rules.local_interval_steps : 1;
    s.local_counter = int32_t(local % steps);
    for (int64_t doublings = local / steps; doublings > 0 && s.local_interval != rules.max_local_interval;
         --doublings) {
        const int64_t twice = 2 * int64_t(at_least_one(s.local_interval));
        s.local_interval = int32_t(twice < rules.max_local_interval ? twice : rules.max_local_interval);
    }
    return s;
}

} // namespace dsopt
