// SPDX-License-Identifier: Apache-2.0
// Decisions between the two passes: if the step is taken, the divisors of gradients, the step number of each tensor,
// and the next loss scale. These functions process a few scalars. The CUDA backend runs the same functions in one
// thread, so the host does not wait for the device.
#pragma once
#include "device/plan.h"
#include "rules/all.h"

namespace dsopt {

/// An operation on the table of norms between the all-reduces of all_reduce_norms(). If the table is on a device, one
/// thread of the device runs it.
struct NormMove {
    static constexpr const char *name = "move_norms";
    /// to_message: copies a column and the number of ranks with a reason to skip into the message. from_message: copies
    /// them back. mean: divides the squares by `ranks`.
    enum Kind : uint8_t { to_message, from_message, mean } kind;
    NormTable table;
    int64_t column; // for to_message and from_message
    double ranks;   // for mean
    DSOPT_HD void operator()() const {
        for (int64_t i = 0; kind == mean && i < table.cells(); ++i) table.values[i] /= ranks;
        for (int64_t g = 0; kind != mean && g <= table.groups + 1; ++g) {
            double &cell = g <= table.groups ? table.square(g, column) : table.reasons();
            double &sent = table.message()[g];
            (kind == to_message ? sent : cell) = kind == to_message ? cell : sent;
        }
    }
};
DSOPT_HD bool is_finite(double value) { return value - value == 0; }

inline double fold_leaves(const double *sums, const TensorLeaves &leaves) {
    return add_in_lanes(leaves.count(), [&](int64_t leaf) { return sums[leaves.first + leaf]; });
}

/// True if any shard of a LAMB tensor takes part in the step.
DSOPT_HD bool updates_trust(const StepPlan &plan, const TensorJob &job) {
    return job.trust_slot < 0 ? job.present : plan.shards.sums[job.trust_slot].shards != 0;
}
/// Computes the trust ratio of a tensor, from this rank's sums of squares or the sums over model ranks.
DSOPT_HD void store_trust_ratio(const StepPlan &plan, int64_t i, double weights, double updates) {
    plan.trust_ratio[i] = factor_of(plan.groups[plan.jobs[i].group], weights, updates);
}
/// True for a tensor that the passes of Passes::reduced update. `rule`: rule of its group.
DSOPT_HD bool is_reduced(const TensorJob &job, Rule rule) {
    return job.owner == Owner::update && passes_of(rule) == Passes::reduced;
}
/// Computes the trust ratio of a tensor of Passes::reduced from the sums of its leaves. If the tensor is sharded,
/// stores the sums for the all-reduce over model ranks instead. `fold` adds up leaves, with one or several threads;
/// fold.lead is true in the thread that stores the result.
template <class Fold> DSOPT_HD void find_trust(const StepPlan &plan, int64_t i, const Fold &fold) {
    const TensorJob &job = plan.jobs[i];
    if (!is_reduced(job, plan.groups[job.group].rule)) return;
    const auto leaves = int32_t(job.leaves.count());
    const double weights = fold.sum(plan.leaf.sums_a + job.leaves.first, leaves),
                 updates = fold.sum(plan.leaf.sums_b + job.leaves.first, leaves);
    if (!fold.lead) return;
    const int32_t slot = job.trust_slot;
    if (slot < 0) return store_trust_ratio(plan, i, weights, updates);
    plan.shards.sums[slot] = {weights, updates, 1};
}
/// Computes the trust ratio from the sums of all shards. Every model rank computes the same value.
DSOPT_HD void store_shared_trust_ratio(const StepPlan &plan, int64_t i) {
    const TensorJob &job = plan.jobs[i];
    if (job.trust_slot < 0 || !updates_trust(plan, job)) return;
    const ShardSums &sums = plan.shards.sums[job.trust_slot];
    store_trust_ratio(plan, i, sums.weights, sums.updates);
}

/// Non-finite elements of a list of tensors.
struct NonFinite {
    int64_t count = 0;
    // 2 * index of the first tensor with a non-finite element, plus 1 if any of its elements is a NaN
    int64_t first = INT64_MAX;
    DSOPT_HD void add(int64_t tensor, int64_t bad, bool has_nans) {
        count += bad;
        if (bad != 0) add_tensor(tensor, has_nans);
    }
    /// The same for a tensor of which this rank has a part, with `bad` elements. `squares`: the sum over the tensor.
    DSOPT_HD void add_part(int64_t tensor, int64_t bad, double squares) {
        count += bad;
        if (!is_finite(squares)) add_tensor(tensor, squares != squares);
    }
    DSOPT_HD void add_tensor(int64_t tensor, bool has_nans) {
        const int64_t found = tensor * 2 + has_nans;
        if (found < first) first = found;
    }
    DSOPT_HD int64_t first_tensor() const { return first == INT64_MAX ? -1 : first / 2; }
    /// Returns InspectResult::kind.
    DSOPT_HD int32_t kind() const { return first == INT64_MAX ? 0 : first % 2 != 0 ? 2 : 1; }
};

/// Computes a norm and its clipping coefficient. `value`: the sum of squares, or the largest magnitude.
DSOPT_HD void finish_norm(dsopt_norm_result &result, int32_t kind, double value, double max_norm) {
    result.norm = kind == DSOPT_NORM_MAX ? value : sqrt(value);
    const double coefficient = max_norm > 0 ? max_norm / (result.norm + 1e-6) : 1.0;
    result.coefficient = coefficient < 1 ? float(coefficient) : 1.0f;
}
/// Returns the result of dsopt_tensors_norm. `raw`: ranks combine their values before finish_norm().
DSOPT_HD dsopt_norm_result norm_result(int32_t kind, bool raw, double squares, double largest, const NonFinite &found,
                                       double max_norm) {
    dsopt_norm_result result{};
    const double value = kind == DSOPT_NORM_MAX ? largest : squares;
    result.nonfinite = found.count;
    result.first_bad = found.first_tensor();
    if (raw)
        result.norm = value;
    else
        finish_norm(result, kind, value, max_norm);
    return result;
}

/// Returns a value of a row of dsopt_step.hyper, or the host's value if the row has a NaN.
DSOPT_HD double row_or(const float *row, int column, double host) {
    const float value = row[column];
    return value == value ? double(value) : host;
}

/// Returns the hyper-parameters of a group, in which values from backend memory replace the host's.
DSOPT_HD Hyper caller_hyper(const StepPlan &plan, int64_t group) {
    Hyper hyper = plan.groups[group];
    if (plan.caller.lr != nullptr) hyper.lr = double(plan.caller.lr[group]);
    if (plan.caller.hyper != nullptr) {
        const float *row = plan.caller.hyper + group * DSOPT_HYPER_FLOATS;
        for_group_fields([&](auto index) {
            constexpr GroupField field = kGroupFields[index];
            if constexpr (field.hyper_index >= 0)
                hyper.*field.hyper = row_or(row, field.hyper_index, hyper.*field.hyper);
        });
    }
    return hyper;
}
/// Returns the hyper-parameters that the step uses. All code reads them through this function.
DSOPT_HD Hyper hyper_of(const StepPlan &plan, int64_t group) {
    Hyper hyper = caller_hyper(plan, group);
    if (plan.policy.dry) hyper.lr = 0;
    return hyper;
}
DSOPT_HD double max_norm_of(const StepPlan &plan) {
    const double host = plan.limits.max_norm;
    return plan.caller.hyper != nullptr ? row_or(plan.caller.hyper, DSOPT_HYPER_MAX_NORM, host) : host;
}

DSOPT_HD bool is_not_negative(double value) { return value >= 0 && is_finite(value); }
DSOPT_HD bool is_beta(double value) { return value >= 0 && value < 1; }

/// False if backend memory has a hyper-parameter that dsopt_optimizer_set rejects, or one without effect that is not 0.
/// The host's values were checked when they were set.
DSOPT_HD bool hypers_are_valid(const StepPlan &plan) {
    if (plan.caller.lr == nullptr && plan.caller.hyper == nullptr) return true;
    bool valid = true;
    for (int64_t g = 0; g < plan.group_count; ++g) {
        const Hyper hyper = caller_hyper(plan, g);
        const uint32_t fields = fields_of(hyper.rule);
        for_group_fields([&](auto index) {
            constexpr GroupField field = kGroupFields[index];
            if constexpr (field.hyper_index >= 0) {
                const double value = hyper.*field.hyper;
                const bool has_effect = field.field == 0 || (fields & field.field) != 0;
                const bool in_range = field.range == GroupField::below_one ? is_beta(value) : is_not_negative(value);
                valid = valid && (has_effect ? in_range : value == 0);
            }
        });
        // The formula that the host chose depends on whether the momentum is 0.
        valid = valid && (hyper.momentum != 0) == ((fields & kMomentum) != 0);
        if (fields & kMatrix) valid = valid && matrix_hypers_are_valid(hyper.momentum, hyper.eps);
        if (plan.caller.hyper == nullptr) continue;
        const float *row = plan.caller.hyper + g * DSOPT_HYPER_FLOATS, max_norm = row[DSOPT_HYPER_MAX_NORM];
        for (int index = kHyperEntries; index < DSOPT_HYPER_FLOATS; ++index)
            valid = valid && row_or(row, index, 0) == 0;
        // Clipping that the host has not enabled is invalid, because the step then does not compute norms.
        valid = valid && (hyper.max_norm == 0 || plan.groups[g].max_norm > 0);
        const bool clips = max_norm < 0 || max_norm > 0;
        valid = valid && (!clips || (g == 0 && is_not_negative(max_norm) && plan.limits.max_norm > 0));
    }
    return valid;
}

/// True if the divisor of gradients before clipping, and its reciprocal, are finite in fp32.
DSOPT_HD bool can_divide_by(double scale) {
    return scale > 0 && is_finite(double(float(scale))) && is_finite(double(float(1.0 / scale)));
}
/// True if the current and the next loss scale are valid. A step with a wrapper divides by the next scale, other steps
/// divide by the current scale.
DSOPT_HD bool scale_is_valid(const StepPlan &plan) {
    const double given = plan.caller.grad_scale != nullptr ? double(*plan.caller.grad_scale) : 1.0;
    if (!(given > 0)) return false; // the product with another negative factor would be positive
    if (plan.scaler.state == nullptr) return can_divide_by(given);
    return *plan.scaler.scale > 0 && can_divide_by(given * double(*plan.scaler.scale)) &&
           scale_can_be_used(*plan.scaler.state) && can_divide_by(given * double(scale_in_use(*plan.scaler.state)));
}

/// Records this rank's reasons to skip the step, before norms are known. The table receives 1 if there is a reason: the
/// all-reduce counts the ranks that have one.
DSOPT_HD void record_reasons(const StepPlan &plan) {
    InspectResult &found = plan.control->found;
    int32_t reasons = 0;
    if (plan.policy.skip_nonfinite && found.first_bad >= 0) reasons |= DSOPT_SKIP_GRADIENTS;
    // The caller's norms are this rank's: an invalid norm is a reason that other ranks receive.
    for (int64_t g = 0; plan.policy.skip_nonfinite && plan.caller.grad_norms != nullptr && g < plan.group_count; ++g)
        if (!is_not_negative(double(plan.caller.grad_norms[g]))) reasons |= DSOPT_SKIP_NORM;
    if (!scale_is_valid(plan)) reasons |= DSOPT_SKIP_SCALE;
    if (!hypers_are_valid(plan)) reasons |= DSOPT_SKIP_HYPER;
    if (plan.caller.skip != nullptr && *plan.caller.skip != 0) reasons |= DSOPT_SKIP_CALLER;
    found.reasons = reasons;
    plan.norms.reasons() = reasons != 0;
}

/// True for a tensor whose gradient pass 1 reads.
DSOPT_HD bool is_inspected(const TensorJob &job) { return job.present && job.grad(); }
/// True if pass 1 sums the squares of the tensor's weights: the original's fused wrapper computes the experts' norm
/// from weights. Non-finite elements are still those of the gradient.
DSOPT_HD bool sums_weights(const StepPlan &plan, const TensorJob &job) {
    return plan.policy.wrapper == Wrapper::fused && job.expert != 0;
}
/// Returns the cell of the table to which the squares of an inspected tensor are added; -1: none. The squares are also
/// added to the cell of the last row, over all groups, in the same column.
DSOPT_HD int64_t norm_cell(const NormTable &table, const TensorJob &job) {
    return job.in_norm ? job.group * table.classes + job.expert : -1;
}
DSOPT_HD void record_nonfinite(const StepPlan &plan, const NonFinite &all) {
    InspectResult &found = plan.control->found;
    found.nonfinite = all.count;
    found.first_bad = all.first_tensor();
    found.kind = all.kind();
    record_reasons(plan);
}

/// Zeroes the table of norms and records reasons to skip, for a step without pass 1.
DSOPT_HD void clear_norms(const StepPlan &plan) {
    for (int64_t i = 0; i < plan.norms.cells(); ++i) plan.norms.values[i] = 0;
    record_nonfinite(plan, {});
}

/// Folds the results of pass 1: the leaves of every tensor, then the tensors of every cell of the table. Tensor i of
/// the list is in lane i % kLanes. Tensors of other cells count as zeros. `completed`: other ranks have completed the sums
/// of squares, but not the counts of non-finite elements.
inline void fold_gradients(const StepPlan &plan, bool completed) {
    clear_norms(plan);
    if (!plan.policy.read_gradients) return;
    const NormTable &table = plan.norms;
    NonFinite found;
    double *const lanes = table.lanes();
    const int64_t cells = table.cells();
    for (int64_t i = 0; i < cells * kLanes; ++i) lanes[i] = 0;
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        if (!is_inspected(job)) continue;
        int64_t bad = 0, nans = 0;
        for (int64_t leaf = job.leaves.first; leaf < job.leaves.end(); ++leaf) {
            bad += plan.leaf.bad[leaf] & 0xffff;
            nans += plan.leaf.bad[leaf] >> 32;
        }
        const int64_t cell = norm_cell(table, job);
        const double squares = cell >= 0 || completed ? fold_leaves(plan.leaf.sums_a, job.leaves) : 0.0;
        if (cell >= 0)
            for (const int64_t index : {cell, table.groups * table.classes + cell % table.classes})
                lanes[index * kLanes + i % kLanes] += squares;
        if (completed)
            found.add_part(i, bad, squares);
        else
            found.add(i, bad, nans != 0);
    }
    for (int64_t cell = 0; cell < cells; ++cell) table.values[cell] = fold_lanes<kLanes>(lanes + cell * kLanes);
    record_nonfinite(plan, found);
}

/// Stores the caller's norms to the table, in place of pass 1. A negative or non-finite norm means overflow.
DSOPT_HD void store_given_norms(const StepPlan &plan) {
    const NormTable &table = plan.norms;
    for (int64_t g = 0; g < table.groups; ++g) {
        const double norm = plan.caller.grad_norms[g];
        table.square(g, 0) = norm < 0 ? NAN : norm * norm;
        table.over_groups(0) += table.square(g, 0);
    }
}

/// Returns the square of a norm as in the original's wrappers: computed in fp32, with a norm of -1 if that is not
/// finite.
DSOPT_HD double wrapper_square(double squares) { return squares <= 3.4028234663852886e38 ? squares : 1.0; }

/// Returns true if the step is taken. Writes one divisor per group, updates the scaler and records the outcome.
DSOPT_HD bool decide(const StepPlan &plan) {
    const NormTable &table = plan.norms;
    Outcome &outcome = *plan.outcome;
    static_cast<InspectResult &>(outcome) = plan.control->found;
    const bool have_norms = plan.policy.read_gradients || plan.caller.grad_norms != nullptr;
    const bool wrapped = plan.policy.wrapper != Wrapper::none;
    double total = table.total(table.groups);
    bool skip = table.reasons() != 0;
    // With expert comms, the count of ranks with a reason may include this rank several times.
    const bool may_count_itself = table.classes > 1 && outcome.reasons != 0;
    if (!may_count_itself && table.reasons() > double(outcome.reasons != 0)) outcome.reasons |= DSOPT_SKIP_PEER;
    if (!wrapped && plan.policy.skip_nonfinite && have_norms && !is_finite(total)) {
        outcome.reasons |= DSOPT_SKIP_NORM;
        skip = true;
    }

    // The original updates the scale before it divides by it; standard mode divides by the scale of the backward pass.
    const double used = plan.scaler.state != nullptr ? double(*plan.scaler.scale) : 1.0;
    const bool updates_scale = plan.scaler.state != nullptr && !(plan.scaler.rules.flags & DSOPT_SCALER_SHARED);
    if (plan.scaler.state != nullptr && skip) plan.scaler.state->recorded = 1;
    if (updates_scale) scaler_transition(plan.scaler.rules, *plan.scaler.state, skip);
    const double next = plan.scaler.state != nullptr ? double(scale_in_use(*plan.scaler.state)) : 1.0;
    if (updates_scale) *plan.scaler.scale = float(next);
    const double scale =
        (wrapped ? next : used) * (plan.caller.grad_scale != nullptr ? double(*plan.caller.grad_scale) : 1.0);

    if (wrapped && have_norms) { // the original has one norm per group
        total = 0;
        for (int64_t g = 0; g < table.groups; ++g) {
            // Summed separately: subtracting the dense sum from the total would give NaN if the dense sum is not
            // finite.
            const double experts = plan.policy.wrapper == Wrapper::fused ? table.total(g, 1) : 0.0;
            total += wrapper_square(table.square(g, 0)) + (experts != 0 ? wrapper_square(experts) : 0.0);
        }
    }
    const double norm = sqrt(total);
    for (int64_t g = 0; g < table.groups; ++g) {
        const double all = clip_divisor(scale, norm, max_norm_of(plan));
        const double local = clip_divisor(scale, sqrt(table.total(g)), hyper_of(plan, g).max_norm);
        plan.divisors[g] = local > all ? local : all;
    }
    const double reported_scale =
        plan.policy.wrapper == Wrapper::unfused ? 1.0 : scale; // the unfused wrapper reports the scaled norm
    outcome.skipped = skip;
    outcome.grad_norm = have_norms ? norm / reported_scale : NAN;
    outcome.dense_norm = have_norms ? sqrt(table.over_groups(0)) / reported_scale : NAN;
    outcome.expert_norm = have_norms ? sqrt(table.total(table.groups, 1)) / reported_scale : NAN;
    outcome.weight_norm = outcome.update_norm = NAN;
    outcome.scale_used = used;
    outcome.divisor = skip ? 0.0 : table.groups != 0 ? plan.divisors[0] : scale;
    outcome.total_skipped += skip;
    outcome.skipped_in_row = skip ? outcome.skipped_in_row + 1 : 0;
    return !skip;
}

/// True if the plan alone requires a decision before the update. If ranks agree on norms, a decision is also required.
DSOPT_HD bool needs_decision(const StepPlan &plan) {
    return plan.policy.read_gradients || plan.caller.grad_norms != nullptr || plan.caller.grad_scale != nullptr ||
           plan.caller.lr != nullptr || plan.caller.hyper != nullptr || plan.scaler.state != nullptr ||
           plan.onebit != nullptr;
}

/// Returns the number of the tensor's step, counted from 1. Counts advance at the end of the step, after everything
/// that can fail.
DSOPT_HD int64_t step_of(const StepPlan &plan, const TensorJob &job) {
    return int64_t(plan.step[job.counter]) + job.ordinal;
}
/// Computes the scalars of the tensors [first, end) that take part in the step.
inline void make_scalars_of(const StepPlan &plan, int64_t first, int64_t end) {
    Scalars scalars{};
    // Group and step of `scalars`, which the next tensor mostly shares.
    int32_t group = -1;
    int64_t step = -1;
    for (int64_t i = first; i < end; ++i) {
        const TensorJob &job = plan.jobs[i];
        if (!job.present) continue;
        if (job.group != group || step_of(plan, job) != step) {
            group = job.group;
            step = step_of(plan, job);
            scalars = make_scalars(hyper_of(plan, group), step, plan.divisors[group], plan.limits.max_value);
        }
        plan.scalars[i] = scalars;
    }
}
/// Adds TensorJob::advance to the count of a tensor, after a step that was taken.
DSOPT_HD void advance_count(const StepPlan &plan, int64_t i, int32_t advance) {
    if (advance != 0) plan.step[i] = saturating_add(plan.step[i], advance);
}

/// Makes the decision of a step, once the table has the values that ranks agree on. Writes StepFlags::skip.
DSOPT_HD bool decide_step(const StepPlan &plan) {
    if (plan.caller.grad_norms != nullptr) store_given_norms(plan);
    const bool taken = decide(plan);
    plan.control->skip = !taken;
    return taken;
}

/// Returns the factor for a tensor's sum of update^2. Passes::reduced sums the update before it is multiplied by lr and
/// trust ratio.
DSOPT_HD double update_weight(const StepPlan &plan, int64_t i) {
    if (passes_of(plan.groups[plan.jobs[i].group].rule) != Passes::reduced) return 1;
    const double factor = double(plan.scalars[i].lr) * double(plan.trust_ratio[i]);
    return factor * factor;
}

/// Computes the weight norm and the update norm from the sums of pass 2.
inline void fold_updates(const StepPlan &plan) {
    double weights[kLanes] = {}, updates[kLanes] = {};
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        if (!job.present || job.leaves.numel == 0) continue;
        weights[i % kLanes] += fold_leaves(plan.leaf.sums_a, job.leaves);
        updates[i % kLanes] += update_weight(plan, i) * fold_leaves(plan.leaf.sums_b, job.leaves);
    }
    plan.outcome->weight_norm = sqrt(fold_lanes<kLanes>(weights));
    plan.outcome->update_norm = sqrt(fold_lanes<kLanes>(updates));
}

/// Writes the report if the caller requested it.
DSOPT_HD void write_report(const StepPlan &plan) {
    const Outcome &outcome = *plan.outcome;
    float *const report = plan.report;
    if (report == nullptr) return;
    for (int i = 0; i < DSOPT_REPORT_FLOATS; ++i) report[i] = 0;
    report[DSOPT_REPORT_SKIPPED] = float(outcome.skipped);
    report[DSOPT_REPORT_GRAD_NORM] = float(outcome.grad_norm);
    report[DSOPT_REPORT_WEIGHT_NORM] = float(outcome.weight_norm);
    report[DSOPT_REPORT_UPDATE_NORM] = float(outcome.update_norm);
    report[DSOPT_REPORT_NONFINITE] = float(outcome.nonfinite);
    report[DSOPT_REPORT_FIRST_BAD] = float(outcome.first_bad);
    report[DSOPT_REPORT_DIVISOR] = float(outcome.divisor);
    report[DSOPT_REPORT_SCALE_USED] = float(outcome.scale_used);
    report[DSOPT_REPORT_SCALE_NEXT] = plan.scaler.state != nullptr ? *plan.scaler.scale : 1.0f;
    report[DSOPT_REPORT_EXPERT_NORM] = float(outcome.expert_norm);
    report[DSOPT_REPORT_SKIPPED_IN_ROW] =
        plan.scaler.state != nullptr ? float(plan.scaler.state->skipped_in_row) : 0.0f;
    report[DSOPT_REPORT_REASONS] = float(outcome.reasons);
    for (int i = 0; i < DSOPT_REPORT_FLOATS; ++i)
        if ((plan.flags & DSOPT_STEP_NO_NAN) && report[i] != report[i]) report[i] = -1;
}

} // namespace dsopt
