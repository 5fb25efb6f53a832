// SPDX-License-Identifier: Apache-2.0
// A step of the 1-bit family as devices read it: 1-bit Adam (Tang et al. 2021), 0/1 Adam (Lu et al. 2022), 1-bit LAMB
// (Li et al. 2021). The functions that update the family's counters are here, shared by all devices.
#pragma once
#include "device/compress.h"
#include "device/decide.h"
#include "rules/onebit.h"
#include "rules/schedule.h"

namespace dsopt {

/// Data of a tensor of the family, in addition to its TensorJob.
struct OneBitJob {
    float *anchor;         // 0/1 Adam, standard mode: the weights at the last synchronisation; or NULL
    float *drift;          // 0/1 Adam, compat mode: change of the weights since the last synchronisation; or NULL
    float *fresh_variance; // 1-bit LAMB: state tensor "exp_avg_sq_fresh", the estimate of the unfrozen variance
    const float *mask;     // state tensor "mask", or NULL
    int64_t worker;        // index of the registered tensor in the list's vector; -1: never compressed
    int32_t scale_group;
    uint8_t reserved[4]; // no padding, as in TensorJob

    /// Returns the array that 0/1 Adam has in either mode: anchor or drift.
    DSOPT_HD float *track() const { return anchor != nullptr ? anchor : drift; }
};
static_assert(sizeof(OneBitJob) == 48);

/// One step of the family. Pointers are to backend memory, except `jobs` and `exchange` in the host's plan.
struct OneBitPlan {
    const OneBitJob *jobs;
    const Exchange *exchange; // set if `has_peers`
    ScheduleRules rules;
    TrustRules trust;
    ScheduleState now; // state before the step, as known to the host
    Stage stage;       // derived from `now`
    Feed feed;         // derived from the stage and the algorithm
    bool has_peers;    // there are other ranks or, with two levels, other nodes
    bool feed_steps;   // Feed::distance: OneBitPass::feed also makes the local step
    bool sharded;      // state is sharded: ranks complete the sums of leaves
    ScheduleState *schedule;
    DoubleWords *lr_sum; // one per group; 0/1 Adam
    // One entry per tensor; 1-bit LAMB.
    float *trust_average, *trust_factor;
    float *trust_scaling; // compat mode: factor of momenta before they are sent; or NULL
    float *trust_weight;  // standard mode: sum of the weights of the ratios in trust_average; or NULL
    double *factors;      // one per leaf; 1-bit LAMB: the largest factor of the leaf
    int32_t *active;      // standard mode: bits of the elements whose variance is not 0, as ListMean::active
    float *padding;       // 1-bit LAMB of the original: the padding of its flat momentum
    char *momentum;       // exp_avg_bits, or NULL
};

/// Returns the feed of a stage in which tensors go into exchanges.
inline Feed feed_of(const ScheduleRules &rules, Stage stage) {
    if (stage == Stage::local || stage == Stage::sync) return Feed::distance;
    switch (rules.algorithm) {
    case DSOPT_ALGORITHM_ZERO_ONE_ADAM: return Feed::gradient;
    case DSOPT_ALGORITHM_ONEBIT_LAMB: return Feed::scaled;
    default: return Feed::momentum;
    }
}
/// True if OneBitPass::feed also packs the compensated values: a scale group is then one tensor, whose values are
/// packed while they are in registers or cache. `onebit`: the host's plan.
inline bool feed_also_packs(const OneBitPlan &onebit) { return onebit.has_peers && !onebit.rules.compat; }

/// Returns the scalars that rules use in addition to Scalars, for a tensor of the exchange.
DSOPT_HD OneBitScalars onebit_scalars(const OneBitPlan &onebit, int64_t tensor, int32_t group) {
    return {onebit.trust_scaling != nullptr ? onebit.trust_scaling[tensor] : 1.0f,
            onebit.lr_sum != nullptr ? float(onebit.lr_sum[group]) : 0.0f,
            onebit.rules.compat && !onebit.has_peers && onebit.feed == Feed::gradient, !onebit.rules.compat};
}

// The family's counters. begin_...() runs before the exchange of a step that is taken, end_...() after everything else.

DSOPT_HD bool makes_local_step(const OneBitPlan &onebit) {
    return onebit.stage == Stage::local || onebit.stage == Stage::sync;
}

DSOPT_HD void begin_tensor(const OneBitPlan &onebit, int64_t i) {
    if (onebit.trust_factor != nullptr && onebit.trust_factor[i] == 0) onebit.trust_factor[i] = 1;
}
DSOPT_HD void begin_group(const StepPlan &plan, const OneBitPlan &onebit, int64_t g) {
    if (makes_local_step(onebit)) onebit.lr_sum[g] = onebit.lr_sum[g] + hyper_of(plan, g).lr;
}

// The original's 1-bit LAMB has one scale for all tensors. So each tensor's momentum is first scaled to the same root
// mean square, which is the mean over tensors. The factors are computed once and then kept.

DSOPT_HD bool has_momentum_scaling(const OneBitPlan &onebit) { return onebit.trust_scaling[0] != 0; }
template <class Fold>
DSOPT_HD void find_momentum_rms(const StepPlan &plan, const OneBitPlan &onebit, int64_t i, const Fold &fold) {
    const TensorJob &job = plan.jobs[i];
    const double squares = fold.sum(plan.leaf.sums_a + job.leaves.first, int32_t(job.leaves.count()));
    if (fold.lead) onebit.trust_scaling[i] = rms_of(squares, job.leaves.numel);
}
/// Returns the contribution of a tensor to the mean of the root mean squares.
DSOPT_HD double share_of_mean_rms(const StepPlan &plan, const OneBitPlan &onebit, int64_t i) {
    return double(onebit.trust_scaling[i]) / double(plan.count);
}
DSOPT_HD void scale_momentum(const OneBitPlan &onebit, int64_t i, double mean) {
    float &scaling = onebit.trust_scaling[i];
    scaling = scaling > 0 ? float(mean / double(scaling)) : 1.0f;
}

/// True if the step that freezes the variance stores anchors and copies. In standard mode a skipped step does so, too,
/// because skipped calls count.
DSOPT_HD bool freezes(const OneBitPlan &onebit, bool skipped) { return !onebit.rules.compat || !skipped; }
/// True if the step that freezes the variance zeroes the residuals: afterwards another quantity is exchanged.
DSOPT_HD bool clears_residuals(const OneBitPlan &onebit, const ListMean &mean) {
    return onebit.has_peers && mean.values == nullptr;
}

/// Computes the trust ratio of a tensor in a compressed step, from this rank's sums or the sums over model ranks.
DSOPT_HD void store_frozen_trust_ratio(const StepPlan &plan, const OneBitPlan &onebit, int64_t i, double factor,
                                       double without, double with) {
    plan.trust_ratio[i] =
        frozen_trust(onebit.trust, factor, without, with, hyper_of(plan, plan.jobs[i].group).weight_decay > 0,
                     onebit.trust_average[i], onebit.trust_weight != nullptr ? onebit.trust_weight[i] : 1.0f,
                     onebit.trust_factor[i]);
}
/// Computes the trust ratio of a tensor from the results of its leaves. If the tensor is sharded, stores its sums for
/// the all-reduce over model ranks instead. `fold`: as for find_trust().
template <class Fold>
DSOPT_HD void find_frozen_trust(const StepPlan &plan, const OneBitPlan &onebit, int64_t i, const Fold &fold) {
    const TensorJob &job = plan.jobs[i];
    if (job.owner != Owner::exchange) return;
    const auto leaves = int32_t(job.leaves.count());
    const double factor = fold.max(onebit.factors + job.leaves.first, leaves),
                 without = fold.sum(plan.leaf.sums_a + job.leaves.first, leaves),
                 with = fold.sum(plan.leaf.sums_b + job.leaves.first, leaves);
    if (!fold.lead) return;
    const int32_t slot = job.trust_slot;
    if (slot < 0) return store_frozen_trust_ratio(plan, onebit, i, factor, without, with);
    plan.shards.sums[slot] = {without, with, 1};
    plan.shards.factors()[slot] = replace_nan_by_infinity(factor);
}
/// Computes the trust ratio of a sharded tensor from the sums over model ranks.
DSOPT_HD void store_shared_frozen_trust_ratio(const StepPlan &plan, const OneBitPlan &onebit, int64_t i) {
    const int32_t slot = plan.jobs[i].trust_slot;
    if (slot < 0 || !updates_trust(plan, plan.jobs[i])) return;
    const ShardSums &sums = plan.shards.sums[slot];
    store_frozen_trust_ratio(plan, onebit, i, plan.shards.factors()[slot], sums.weights, sums.updates);
}

DSOPT_HD void end_tensor(const StepPlan &plan, const OneBitPlan &onebit, int64_t i) {
    if (onebit.stage != Stage::full || onebit.trust_average == nullptr) return;
    if (!updates_trust(plan, plan.jobs[i]) || !has_trust(plan.groups[plan.jobs[i].group].rule)) return;
    average_trust(onebit.trust, plan.trust_ratio[i], onebit.trust_average[i],
                  onebit.trust_weight != nullptr ? onebit.trust_weight + i : nullptr);
}
DSOPT_HD void end_group(const OneBitPlan &onebit, int64_t g) {
    if (onebit.stage == Stage::sync) onebit.lr_sum[g] = 0;
}
/// Advances the schedule, except in a skipped step of compat mode: the original does not count such a step.
DSOPT_HD void end_schedule(const OneBitPlan &onebit, bool taken) {
    if (taken && onebit.stage == Stage::exchange && onebit.momentum != nullptr) onebit.schedule->momentum_in_bits = 1;
    if (taken || !onebit.rules.compat) (void)advance_schedule(onebit.rules, *onebit.schedule);
}

} // namespace dsopt
