// SPDX-License-Identifier: Apache-2.0
// Between the two passes: is the step taken, what are gradients divided by, which step is it for each tensor, where
// does the loss scale go. A handful of scalars; the CUDA backend runs the same functions in one thread, so the host
// never has to look.
#pragma once
#include "device/plan.h"
#include "rules/all.h"
#include <functional>

namespace dsopt {

/// Sums of squares of gradients as given: a row a group and one more for all of them, a column for dense parameters and
/// one for each expert comm. Behind them, what ranks agree on: how many have a reason to skip.
struct NormTable {
    double *at;
    int64_t groups, classes;
    DSOPT_HD static constexpr int64_t size(int64_t groups, int64_t classes) { return (groups + 1) * classes + 1; }
    DSOPT_HD double &square(int64_t group, int64_t type) const { return at[group * classes + type]; }
    DSOPT_HD double &of_all(int64_t type) const { return square(groups, type); }
    DSOPT_HD double &reasons() const { return at[(groups + 1) * classes]; }
    DSOPT_HD double total(int64_t group) const {
        double sum = 0;
        for (int64_t type = 0; type < classes; ++type) sum += square(group, type);
        return sum;
    }
};

/// What is done to the table between the exchanges of reduce_norms. Where it is on a device, one thread does it there.
struct NormMove {
    /// take: copy a column and the number of reasons to skip into the message. put: copy them back. mean: divide the
    /// squares by `ranks`.
    enum Kind : uint8_t { take, put, mean } kind;
    NormTable table;
    double *message;
    int64_t column;
    double ranks;
    DSOPT_HD void operator()() const {
        if (kind == mean) {
            for (int64_t i = 0; i < NormTable::size(table.groups, table.classes) - 1; ++i) table.at[i] /= ranks;
            return;
        }
        for (int64_t g = 0; g <= table.groups + 1; ++g) {
            double &cell = g <= table.groups ? table.square(g, column) : table.reasons();
            (kind == take ? message[g] : cell) = kind == take ? cell : message[g];
        }
    }
};
enum class Place;
/// Ranks add up their parts: experts' columns over their comms, then everything over the model ranks; the reasons to
/// skip travel along, and go over the data ranks as well. `message` has room for groups + 2 and is where the table is;
/// run(move) does a move there.
void reduce_norms(const StepPlan &plan, const NormTable &table, double *message, Place place,
                  const std::function<void(const NormMove &)> &run);
bool has_peers(const CommSet &comms);
/// All comms of several ranks work in device memory.
bool peers_on_device(const CommSet &comms);

DSOPT_HD bool is_finite(double value) { return value - value == 0; }

DSOPT_HD double fold_leaves(const double *sums, const TensorJob &job) {
    double sum = 0;
    for (int64_t leaf = job.first_leaf; leaf < job.first_leaf + leaves_of(job.numel); ++leaf) sum += sums[leaf];
    return sum;
}

/// Between LAMB's sweeps model ranks add up shard_sums, and in compressed steps take the largest of shard_factors.
/// `frozen`: of the tensors whose variance is, which go by themselves. False: there are none, and nobody sends anything.
bool has_shards(const StepPlan &plan, bool frozen);
void add_up_shards(const StepPlan &plan, bool frozen);

/// Whether a LAMB tensor takes part in the step, with any of its shards.
DSOPT_HD bool moves_trust(const StepPlan &plan, const TensorJob &job) {
    return job.trust_slot < 0 ? job.present : plan.shard_sums[job.trust_slot].shards != 0;
}
/// From the sums of all shards, on every model rank alike.
DSOPT_HD void take_shared_trust(const StepPlan &plan, int64_t i) {
    const TensorJob &job = plan.jobs[i];
    if (job.trust_slot < 0 || !moves_trust(plan, job)) return;
    const Hyper &hyper = plan.groups[job.group];
    const ShardSums &sums = plan.shard_sums[job.trust_slot];
    plan.trust_ratio[i] = trust_ratio(sums.weights, sums.updates, hyper.min_trust, hyper.max_trust);
}

/// The last line of dsopt_tensors_norm: `value` is the sum of squares, or the largest magnitude.
DSOPT_HD void finish_norm(dsopt_norm_result &result, int32_t kind, double value, double max_norm) {
    result.norm = kind == DSOPT_NORM_MAX ? value : sqrt(value);
    const double coefficient = max_norm > 0 ? max_norm / (result.norm + 1e-6) : 1.0;
    result.coefficient = coefficient < 1 ? float(coefficient) : 1.0f;
}

/// A value of a row of dsopt_step.hyper, or what the host has where the row says NaN.
DSOPT_HD double row_or(const float *row, int place, double host) {
    const float value = row[place];
    return value == value ? double(value) : host;
}

/// Hyper-parameters of a group with what the caller has in backend memory.
DSOPT_HD Hyper given_hyper(const StepPlan &plan, int64_t group) {
    Hyper hyper = plan.groups[group];
    if (plan.lr != nullptr) hyper.lr = double(plan.lr[group]);
    if (plan.hyper != nullptr) {
        const float *row = plan.hyper + group * DSOPT_HYPER_FLOATS;
        hyper.lr = row_or(row, DSOPT_HYPER_LR, hyper.lr);
        hyper.beta1 = row_or(row, DSOPT_HYPER_BETA1, hyper.beta1);
        hyper.beta2 = row_or(row, DSOPT_HYPER_BETA2, hyper.beta2);
        hyper.eps = row_or(row, DSOPT_HYPER_EPS, hyper.eps);
        hyper.weight_decay = row_or(row, DSOPT_HYPER_WEIGHT_DECAY, hyper.weight_decay);
        hyper.max_norm = row_or(row, DSOPT_HYPER_GROUP_MAX_NORM, hyper.max_norm);
        hyper.momentum = row_or(row, DSOPT_HYPER_MOMENTUM, hyper.momentum);
    }
    return hyper;
}
/// The same as the step uses them. Every reader of them comes through here.
DSOPT_HD Hyper hyper_of(const StepPlan &plan, int64_t group) {
    Hyper hyper = given_hyper(plan, group);
    if (plan.dry) hyper.lr = 0;
    return hyper;
}
DSOPT_HD double max_norm_of(const StepPlan &plan) {
    return plan.hyper != nullptr ? row_or(plan.hyper, DSOPT_HYPER_MAX_NORM, plan.max_norm) : plan.max_norm;
}

DSOPT_HD bool is_not_negative(double value) { return value >= 0 && is_finite(value); }
DSOPT_HD bool is_beta(double value) { return value >= 0 && value < 1; }

/// False if backend memory has a hyper-parameter that dsopt_optimizer_set would refuse, or one without effect. What the
/// host has was checked when it was set.
DSOPT_HD bool hypers_are_valid(const StepPlan &plan) {
    if (plan.lr == nullptr && plan.hyper == nullptr) return true;
    bool valid = true;
    for (int64_t g = 0; g < plan.group_count; ++g) {
        const Hyper hyper = given_hyper(plan, g);
        const uint32_t fields = fields_of(hyper.rule);
        const bool has_momentum = fields & kMomentum;
        valid = valid && is_not_negative(hyper.lr) && (fields & kBeta1 ? is_beta(hyper.beta1) : hyper.beta1 == 0) &&
                (fields & kBeta2 ? is_beta(hyper.beta2) : hyper.beta2 == 0) &&
                (fields & kEps ? is_not_negative(hyper.eps) : hyper.eps == 0) && is_not_negative(hyper.weight_decay) &&
                is_not_negative(hyper.max_norm) && is_not_negative(hyper.momentum) &&
                (hyper.momentum != 0) == has_momentum;
        if (plan.hyper == nullptr) continue;
        const float *row = plan.hyper + g * DSOPT_HYPER_FLOATS, of_all = row[DSOPT_HYPER_MAX_NORM];
        // Clipping that the host has not switched on: gradients are not read for it.
        valid = valid && (hyper.max_norm == 0 || plan.groups[g].max_norm > 0);
        const bool clips = of_all < 0 || of_all > 0;
        valid = valid && (!clips || (g == 0 && is_not_negative(of_all) && plan.max_norm > 0));
    }
    return valid;
}

/// What gradients are divided by before clipping must be a number of fp32, as must 1 by it.
DSOPT_HD bool can_divide_by(double scale) {
    return scale > 0 && is_finite(double(float(scale))) && is_finite(double(float(1.0 / scale)));
}
/// In one of the two orders of events the step divides by the scale that it comes with, in the other one by the next.
DSOPT_HD bool scale_is_valid(const StepPlan &plan) {
    const double given = plan.grad_scale != nullptr ? double(*plan.grad_scale) : 1.0;
    if (!(given > 0)) return false; // with another negative one it would be positive again
    if (plan.scaler == nullptr) return can_divide_by(given);
    return *plan.loss_scale > 0 && can_divide_by(given * double(*plan.loss_scale)) && scale_can_be_used(*plan.scaler) &&
           can_divide_by(given * double(scale_in_use(*plan.scaler)));
}

/// Why this rank would skip the step, before norms are known. An OR of DSOPT_SKIP_...
DSOPT_HD int32_t reasons_to_skip(const StepPlan &plan, const Outcome &outcome) {
    int32_t reasons = 0;
    if (plan.skip_nonfinite && outcome.nonfinite != 0) reasons |= DSOPT_SKIP_GRADIENTS;
    // Given norms are this rank's: the others have to hear of them.
    for (int64_t g = 0; plan.skip_nonfinite && plan.grad_norms != nullptr && g < plan.group_count; ++g)
        if (!is_not_negative(double(plan.grad_norms[g]))) reasons |= DSOPT_SKIP_NORM;
    if (!scale_is_valid(plan)) reasons |= DSOPT_SKIP_SCALE;
    if (!hypers_are_valid(plan)) reasons |= DSOPT_SKIP_HYPER;
    if (plan.skip != nullptr && *plan.skip != 0) reasons |= DSOPT_SKIP_CALLER;
    return reasons;
}
/// The same for the outcome, and for the table as ranks add it up: how many of them have a reason.
DSOPT_HD void note_reasons(const StepPlan &plan, const NormTable &table, Outcome &outcome) {
    outcome.reasons = reasons_to_skip(plan, outcome);
    table.reasons() = outcome.reasons != 0;
}

/// Adds up what pass 1 left: the leaves of every tensor in order, then tensors in list order; that order is part of the
/// result.
DSOPT_HD void fold_gradients(const StepPlan &plan, const NormTable &table, Outcome &outcome) {
    for (int64_t i = 0; i < NormTable::size(table.groups, table.classes); ++i) table.at[i] = 0;
    outcome.nonfinite = 0;
    outcome.first_bad = -1;
    outcome.kind = 0;
    if (plan.read_gradients)
        for (int64_t i = 0; i < plan.count; ++i) {
            const TensorJob &job = plan.jobs[i];
            if (!job.present || job.grad == nullptr) continue;
            int64_t bad = 0, nans = 0;
            for (int64_t leaf = job.first_leaf; leaf < job.first_leaf + leaves_of(job.numel); ++leaf) {
                bad += plan.bad[leaf] & 0xffff;
                nans += plan.bad[leaf] >> 32;
            }
            if (job.in_norm) {
                const double squares = fold_leaves(plan.sums_a, job);
                table.square(job.group, job.expert) += squares;
                table.of_all(job.expert) += squares;
            }
            outcome.nonfinite += bad;
            if (bad != 0 && outcome.first_bad < 0) {
                outcome.first_bad = i;
                outcome.kind = nans != 0 ? 2 : 1;
            }
        }
    note_reasons(plan, table, outcome);
}

/// Norms that the caller already had, in place of pass 1. A negative or non-finite one means overflow.
DSOPT_HD void take_given_norms(const StepPlan &plan, const NormTable &table) {
    for (int64_t g = 0; g < table.groups; ++g) {
        const double norm = plan.grad_norms[g];
        table.square(g, 0) = norm < 0 ? NAN : norm * norm;
        table.of_all(0) += table.square(g, 0);
    }
}

/// The square of a norm as the original's wrappers have it: taken in fp32, and -1 in place of what is not finite there.
DSOPT_HD double wrapper_square(double squares) { return squares <= 3.4028234663852886e38 ? squares : 1.0; }

/// True if the step is taken. Writes one divisor a group, moves the scaler, and says what happened.
DSOPT_HD bool decide(const StepPlan &plan, const NormTable &table, Outcome &outcome) {
    const bool have_norms = plan.read_gradients || plan.grad_norms != nullptr;
    const bool wrapped = plan.wrapper != Wrapper::none;
    double total = table.total(table.groups);
    bool skip = table.reasons() != 0;
    // Through the ranks of an expert comm a rank hears of its own reason too.
    const bool echoes = plan.comms.expert_count != 0 && outcome.reasons != 0;
    if (!echoes && table.reasons() > double(outcome.reasons != 0)) outcome.reasons |= DSOPT_SKIP_PEER;
    if (!wrapped && plan.skip_nonfinite && have_norms && !is_finite(total)) {
        outcome.reasons |= DSOPT_SKIP_NORM;
        skip = true;
    }

    // The original moves the scale before it divides by it; the standard divides by the scale that backward used.
    const double used = plan.scaler != nullptr ? double(*plan.loss_scale) : 1.0;
    const bool moves = plan.scaler != nullptr && !(plan.scaler_rules.flags & DSOPT_SCALER_SHARED);
    if (plan.scaler != nullptr && skip) plan.scaler->recorded = 1;
    if (moves) scaler_transition(plan.scaler_rules, *plan.scaler, skip);
    const double next = plan.scaler != nullptr ? double(scale_in_use(*plan.scaler)) : 1.0;
    if (moves) *plan.loss_scale = float(next);
    const double scale = (wrapped ? next : used) * (plan.grad_scale != nullptr ? double(*plan.grad_scale) : 1.0);

    if (wrapped && have_norms) { // one norm a group there
        total = 0;
        for (int64_t g = 0; g < table.groups; ++g) {
            double experts =
                0; // summed by itself: a difference to the dense part would be NaN where that is not finite
            for (int64_t type = 1; plan.wrapper == Wrapper::fused && type < table.classes; ++type)
                experts += table.square(g, type);
            total += wrapper_square(table.square(g, 0)) + (experts != 0 ? wrapper_square(experts) : 0.0);
        }
    }
    const double norm = sqrt(total);
    for (int64_t g = 0; g < table.groups; ++g) {
        const double all = clip_divisor(scale, norm, max_norm_of(plan));
        const double own = clip_divisor(scale, sqrt(table.total(g)), hyper_of(plan, g).max_norm);
        plan.divisors[g] = own > all ? own : all;
    }
    const double shown = plan.wrapper == Wrapper::unfused ? 1.0 : scale; // that wrapper reports the scaled norm
    double experts = 0;
    for (int64_t type = 1; type < table.classes; ++type) experts += table.of_all(type);
    outcome.skipped = skip;
    outcome.grad_norm = have_norms ? norm / shown : NAN;
    outcome.dense_norm = have_norms ? sqrt(table.of_all(0)) / shown : NAN;
    outcome.expert_norm = have_norms ? sqrt(experts) / shown : NAN;
    outcome.weight_norm = outcome.update_norm = NAN;
    outcome.scale_used = used;
    outcome.divisor = skip ? 0.0 : table.groups != 0 ? plan.divisors[0] : scale;
    outcome.total_skipped += skip;
    outcome.skipped_in_row = skip ? outcome.skipped_in_row + 1 : 0;
    return !skip;
}

/// Steps of group `g`, tensors [begin, end). Standard mode counts each tensor that has a gradient by itself.
///
/// The original's fused Adam counts in the state of the last tensor of the group that has a gradient, once for every
/// parameter dtype present, in the order f16, bf16, f32, and uses that count for all tensors of the dtype; compat mode
/// does the same. Under a wrapper the group is one fp32 tensor there, so every tensor has the count.
DSOPT_HD void advance_group(const StepPlan &plan, int64_t g, int64_t begin, int64_t end) {
    const Hyper hyper = hyper_of(plan, g);
    if (!hyper.compat || sweeps_of(hyper.rule) == 2 || plan.wrapper != Wrapper::none) {
        Scalars scalars{};
        int64_t step = -1; // the one that `scalars` is for: tensors of a group mostly step together
        for (int64_t i = begin; i < end; ++i) {
            if (!plan.jobs[i].present) continue;
            if (++plan.step[i] != step) {
                step = plan.step[i];
                scalars = make_scalars(hyper, step, plan.divisors[g], plan.max_value);
            }
            plan.scalars[i] = scalars;
        }
        return;
    }
    int64_t last = -1;
    for (int64_t i = begin; i < end; ++i)
        if (plan.jobs[i].present) last = i;
    for (int place = 0; place < 3; ++place) {
        const Dtype dtype = place == 0 ? Dtype::f16 : place == 1 ? Dtype::bf16 : Dtype::f32;
        bool counted = false;
        Scalars scalars{};
        for (int64_t i = begin; i < end; ++i) {
            if (!plan.jobs[i].present || plan.jobs[i].weight_type != dtype) continue;
            if (!counted) scalars = make_scalars(hyper, ++plan.step[last], plan.divisors[g], plan.max_value);
            counted = true;
            plan.scalars[i] = scalars;
        }
    }
}

/// Factor for a tensor's sum of update^2. LAMB sums the update before it is multiplied by lr and trust ratio.
DSOPT_HD double update_weight(const StepPlan &plan, int64_t i) {
    if (sweeps_of(plan.groups[plan.jobs[i].group].rule) == 1) return 1;
    const double factor = double(plan.scalars[i].lr) * double(plan.trust_ratio[i]);
    return factor * factor;
}

/// Weight and update norm from the sums that pass 2 left.
DSOPT_HD void fold_updates(const StepPlan &plan, Outcome &outcome) {
    double weights = 0, updates = 0;
    for (int64_t i = 0; i < plan.count; ++i) {
        const TensorJob &job = plan.jobs[i];
        if (!job.present || job.numel == 0) continue;
        weights += fold_leaves(plan.sums_a, job);
        updates += update_weight(plan, i) * fold_leaves(plan.sums_b, job);
    }
    outcome.weight_norm = sqrt(weights);
    outcome.update_norm = sqrt(updates);
}

DSOPT_HD void write_report(const StepPlan &plan, const Outcome &outcome, float *report) {
    for (int i = 0; i < DSOPT_REPORT_FLOATS; ++i) report[i] = 0;
    report[DSOPT_REPORT_SKIPPED] = float(outcome.skipped);
    report[DSOPT_REPORT_GRAD_NORM] = float(outcome.grad_norm);
    report[DSOPT_REPORT_WEIGHT_NORM] = float(outcome.weight_norm);
    report[DSOPT_REPORT_UPDATE_NORM] = float(outcome.update_norm);
    report[DSOPT_REPORT_NONFINITE] = float(outcome.nonfinite);
    report[DSOPT_REPORT_FIRST_BAD] = float(outcome.first_bad);
    report[DSOPT_REPORT_DIVISOR] = float(outcome.divisor);
    report[DSOPT_REPORT_SCALE_USED] = float(outcome.scale_used);
    report[DSOPT_REPORT_SCALE_NEXT] = plan.scaler != nullptr ? *plan.loss_scale : 1.0f;
    report[DSOPT_REPORT_EXPERT_NORM] = float(outcome.expert_norm);
    report[DSOPT_REPORT_SKIPPED_IN_ROW] = plan.scaler != nullptr ? float(plan.scaler->skipped_in_row) : 0.0f;
    report[DSOPT_REPORT_REASONS] = float(outcome.reasons);
    for (int i = 0; i < DSOPT_REPORT_FLOATS; ++i)
        if ((plan.flags & kNoNan) && report[i] != report[i]) report[i] = -1;
}

} // namespace dsopt
