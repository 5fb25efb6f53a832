// SPDX-License-Identifier: Apache-2.0
// dynamic_loss_scaler and fp16_scale_rule: only the loss scalers, with recorded overflows as input.
#include "cases.h"
#include "engine.h"
#include "layout.h"
#include "loss_scale.h"

namespace replay {
namespace {

void replay(const Case &recorded, const dsopt_scaler_desc &desc, bool has_hysteresis) {
    Comparison &comparison = recorded.comparison;
    expect_one_rank(recorded.file);
    const int64_t steps = read_steps(recorded.file);
    const Tensor &overflow = comparison.input("overflow", DSOPT_DTYPE_U8, {steps});
    ScaleRecord scale(recorded.file, comparison, 0, steps);
    const Tensor *hysteresis = nullptr, *raised = nullptr;
    if (has_hysteresis) {
        hysteresis = &comparison.output("cur_hysteresis", {steps});
        raised = &comparison.output("raised", {steps});
    }

    const Engine engine(recorded.backend);
    Scaler scaler(engine, desc);
    Array flag(engine, DSOPT_DTYPE_I32, 1);
    int32_t failures = 0;
    for (int64_t t = 0; t < steps; ++t) {
        const int32_t given = overflow.value(t) != 0;
        flag.upload(&given);
        scaler.update(flag);
        const dsopt_scaler_info info = scaler.info();
        scale.compare(t, info);
        if (hysteresis != nullptr) comparison.row(*hysteresis, t, {double(info.hysteresis)}, exact_rule);
        if (raised != nullptr) comparison.row(*raised, t, {double(info.failures - failures)}, exact_rule);
        failures = info.failures;
    }
}

} // namespace

void replay_dynamic_loss_scaler(const Case &recorded) {
    GoldenFile &file = recorded.file;
    dsopt_scaler_desc desc = dynamic_scale(file, DSOPT_PROFILE_DYNAMIC);
    desc.factor = positive(file, "scale_factor"); // required: it is a constructor argument of the original
    desc.hysteresis = positive_int(file, "delayed_shift");
    const bool refill = file.flag("consecutive_hysteresis");
    if (refill && desc.hysteresis > 1) desc.flags |= DSOPT_SCALER_REFILL; // a budget of one is never used up
    if (!file.flag("raise_error_at_min_scale")) desc.flags |= DSOPT_SCALER_KEEP_AT_MIN;
    replay(recorded, desc, true);
}

void replay_fp16_scale_rule(const Case &recorded) {
    GoldenFile &file = recorded.file;
    const int32_t profile = read_wrapper(file);
    (void)file.integer("delayed_shift_ignored"); // the case tests that the original ignores it
    if (file.flag("dynamic")) return replay(recorded, dynamic_scale(file, profile), false);
    for (const char *key : {"min_scale", "scale_window"}) // not used by a static scale
        if (file.has(key) && file.text(key) != "None") (void)file.number(key);
    replay(recorded, static_scale(profile, positive(file, "init_scale")), false);
}

} // namespace replay
