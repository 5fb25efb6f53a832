// SPDX-License-Identifier: Apache-2.0
// What the last steps came to.
#include "optimizer/optimizer.h"
#include <cmath>
#include <cstring>

namespace dsopt {

Outcome Optimizer::no_outcome() {
    Outcome outcome{};
    outcome.first_bad = -1;
    outcome.grad_norm = outcome.dense_norm = outcome.expert_norm = outcome.weight_norm = outcome.update_norm = NAN;
    outcome.scale_used = 1;
    return outcome;
}

const Outcome *Optimizer::last_known() const {
    return static_cast<const Outcome *>(context_->device().is_host() ? outcome_memory_.data() : mirror_.get());
}

void Optimizer::change_outcome(void (*change)(Outcome &)) {
    if (outcome_memory_.data() == nullptr) return;
    const Device &device = context_->device();
    device.synchronize();
    Outcome outcome;
    device.copy(&outcome, outcome_memory_.data(), sizeof outcome);
    change(outcome);
    device.copy(outcome_memory_.data(), &outcome, sizeof outcome);
    if (mirror_.get() != nullptr) std::memcpy(mirror_.get(), &outcome, sizeof outcome);
}

dsopt_report Optimizer::report() const {
    dsopt_report r{};
    Outcome outcome = no_outcome();
    if (outcome_memory_.data() != nullptr) {
        context_->device().synchronize();
        context_->device().copy(&outcome, outcome_memory_.data(), sizeof outcome);
    }
    r.calls = calls_;
    r.skipped = outcome.total_skipped;
    r.skipped_in_row = outcome.skipped_in_row;
    r.nonfinite = outcome.nonfinite;
    r.first_bad = outcome.first_bad;
    if (outcome.first_bad >= 0) r.first_bad_name = params_[size_t(outcome.first_bad)].name.c_str();
    r.last_skipped = outcome.skipped;
    r.kind = outcome.kind;
    r.reasons = outcome.reasons;
    r.loss_scale = with_.scaler ? with_.scaler->info().scale : 1;
    r.scale_used = outcome.scale_used;
    r.grad_norm = outcome.grad_norm;
    r.dense_norm = outcome.dense_norm;
    r.expert_norm = outcome.expert_norm;
    r.weight_norm = outcome.weight_norm;
    r.update_norm = outcome.update_norm;
    r.divisor = outcome.divisor;
    std::memcpy(r.ms, outcome.ms, sizeof r.ms);
    if (cache_) cache_->add_phase_times(r.ms);
    r.resharded_from = resharded_from_;
    for (const StateEntry &entry : state_) r.state_bytes += int64_t(entry.bytes());
    r.workspace_bytes = groups_.empty() ? 0 : int64_t(workspace_bytes());
    return r;
}

} // namespace dsopt
