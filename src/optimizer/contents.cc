// SPDX-License-Identifier: Apache-2.0
#include "optimizer/contents.h"
#include <cmath>
#include <cstring>

namespace dsopt {
namespace {

/// The words of one state tensor, and checks whose messages begin with `where`.
struct StateWords {
    const StateEntry &entry;
    const void *words;
    dsopt_status status;
    const char *where;
    template <class T> T read(int64_t index) const {
        T value;
        std::memcpy(&value, static_cast<const char *>(words) + size_t(index) * sizeof value, sizeof value);
        return value;
    }
    void in_range(const char *field, int64_t value, int64_t least, int64_t most) const {
        if (value < least || value > most)
            throw Error(status, "%s: %s of 'optimizer.%s' is %lld, not in [%lld, %lld]", where, field, entry.name(),
                        ll(value), ll(least), ll(most));
    }
    void scale(const char *field, double value) const {
        if (!is_loss_scale(value))
            throw Error(status, "%s: %s of 'optimizer.%s' is no loss scale: %g", where, field, entry.name(), value);
    }
    void finite(const char *field, int64_t index, double value) const {
        if (!std::isfinite(value))
            throw Error(status, "%s: %s %lld of 'optimizer.%s' is %g", where, field, ll(index), entry.name(), value);
    }
};

void check_schedule(const StateWords &words, bool has_bits) {
    const auto s = words.read<ScheduleState>(0);
    words.in_range("step", s.step, 0, INT32_MAX);
    words.in_range("frozen", s.frozen, 0, 1);
    words.in_range("var_interval", s.var_interval, 0, INT32_MAX);
    words.in_range("var_counter", s.var_counter, 0, INT32_MAX);
    words.in_range("local_interval", s.local_interval, 0, INT32_MAX);
    words.in_range("local_counter", s.local_counter, 0, INT32_MAX);
    words.in_range("momentum_in_bits", s.momentum_in_bits, 0, has_bits);
}

void check_scaler(const StateWords &words, const ScalerRules &rules) {
    const auto s = words.read<ScalerState>(0);
    words.scale("the scale", s.dynamic);
    words.in_range("overridden", s.overridden, 0, 1);
    if (s.overridden != 0) words.scale("the override", s.forced);
    words.in_range("updates", s.updates, 0, INT32_MAX);
    words.in_range("last_overflow", s.last_overflow, -1, INT32_MAX);
    words.in_range("hysteresis", s.hysteresis, 1, rules.hysteresis);
    words.in_range("failures", s.failures, 0, INT32_MAX);
    words.in_range("skipped_in_row", s.skipped_in_row, 0, INT32_MAX);
}

} // namespace

bool needs_check(StateKind kind) {
    return kind == StateKind::schedule || kind == StateKind::lr_sum || kind == StateKind::loss_scale ||
           kind == StateKind::scaler || kind == StateKind::step;
}

void check_contents(const Optimizer &optimizer, const StateEntry &entry, const void *contents, const char *where,
                    dsopt_status status, const ScalerRules *rules) {
    const StateWords words{entry, contents, status, where};
    if (entry.kind == StateKind::schedule)
        // A file has the decoded momentum.
        check_schedule(words, status != DSOPT_ERR_FORMAT && optimizer.state().find(StateKind::exp_avg_bits) != nullptr);
    if (entry.kind == StateKind::scaler)
        check_scaler(words, rules != nullptr ? *rules : optimizer.attachments().scaler->rules());
    if (entry.kind == StateKind::loss_scale) words.scale("the value", double(words.read<float>(0)));
    if (entry.kind == StateKind::lr_sum)
        for (int64_t i = 0; i < entry.numel / 2; ++i) words.finite("group", i, words.read<double>(i));
    if (entry.kind != StateKind::step) return;
    for (int64_t i = 0; i < entry.numel; ++i) {
        if (words.read<int32_t>(i) >= 0) continue;
        const std::string field = "the counter of '" + optimizer.params()[size_t(i)].name + "'";
        words.in_range(field.c_str(), words.read<int32_t>(i), 0, INT32_MAX);
    }
}

} // namespace dsopt
