// SPDX-License-Identifier: Apache-2.0
// What the 1-bit family adds to an optimizer: 1-bit Adam (Tang et al. 2021), 0/1 Adam (Lu et al. 2022), 1-bit LAMB
// (Li et al. 2021). How parameters go into exchanges, what state there is for it, and where the schedule is.
#pragma once
#include "exchange/exchange.h"
#include "optimizer/param.h"
#include "optimizer/state_table.h"
#include "rules/onebit_family.h"
#include "step/average.h"
#include <optional>

namespace dsopt {

/// How the parameters of an optimizer go into exchanges; follows from groups, parameters and ranks.
struct OneBitSetup {
    ScheduleRules rules{};
    TrustRules trust{};
    OwnedLayout layout;
    // Of every parameter, as in OneBitJob.
    std::vector<int64_t> worker;
    std::vector<int32_t> scale_group;
    std::vector<int64_t> mean; // where its averaged gradient is in the workspace, -1 = it has none
    int64_t mean_numel = 0;
    int64_t mean_scratch = 0; // behind them for sum_over_ranks(), where the exchange's own memory is too short for it
    bool compresses = false;  // more than one rank
    int32_t trust_slots = 0;  // of parameters that go into exchanges

    OneBitSetup(const std::vector<dsopt_group> &groups, const std::vector<Param> &params,
                const dsopt_optimizer_desc &desc, DataRank own);
    /// The rules are those of the groups.
    void follow(const std::vector<dsopt_group> &groups, bool compat);
};

/// One step.
struct PlannedOneBit {
    OneBitPlan plan{};
    Exchange exchange;
};

inline bool goes_into_exchanges(const dsopt_group &group) {
    return is_onebit(group.algorithm) && !(group.flags & DSOPT_GROUP_NON_FREEZE);
}

/// Throws what `other` may not be beside `first`, both of the family.
void check_family(const dsopt_group &first, const dsopt_group &other, bool compat);
/// The same of all groups. Returns the first of the family, NULL if there is none.
const dsopt_group *check_family(const std::vector<dsopt_group> &groups, bool compat);

/// In methods `state` is the optimizer's table, and `list` a list of all its tensors, its own or a caller's.
class OneBit {
public:
    OneBit(const Context &context, const std::vector<dsopt_group> &groups, const std::vector<Param> &params,
           const dsopt_optimizer_desc &desc, DataRank own) :
        context_(context),
        desc_(desc),
        setup_(groups, params, desc, own) {}
    const OneBitSetup &setup() const { return setup_; }
    void follow(const std::vector<dsopt_group> &groups) { setup_.follow(groups, setup_.rules.compat); }

    /// State tensors of a parameter, and of the whole optimizer, beside those of other rules.
    static void add_param_state(const Param &param, int64_t index, const dsopt_group &group,
                                const dsopt_optimizer_desc &desc, StateTable &state);
    void add_state(int64_t groups, int64_t params, StateTable &state) const;

    /// Fills `planned`, which must stay where it is, and `jobs`. `own`: the schedule in `list` is the engine's.
    void plan(const StateTable &state, const dsopt_tensor *list, OneBitJob *jobs, void *workspace, double *factors,
              bool own, void *stream, PlannedOneBit &planned) const;
    /// True if the engine averages the gradient of this parameter in this step.
    bool averages(const OneBitPlan &plan, size_t param) const;
    /// Adds all such parameters to `means`, and their jobs get the averaged gradients.
    void plan_means(const OneBitPlan &plan, TensorJob *jobs, float *mean, GradientMeans &means, void *stream) const;

    /// Which stage a step is in is the host's to know. Where memory is a device's it keeps count: in standard mode
    /// every call counts. In compat mode only the device knows whether the last step was taken, so the host waits for
    /// it, as it does where the state is not the engine's.
    ScheduleState read_schedule(const void *data, bool own, void *stream) const;
    /// After a step with the engine's schedule.
    void count_step(const OneBitPlan &plan) const;
    /// The next read_schedule() of the engine's own does not wait.
    bool knows_schedule() const { return known_.has_value(); }
    /// The memory may have been written to.
    void forget_schedule() const { known_.reset(); }

    /// True once the ranks have compared their lists of parameters in a step.
    bool lists_compared() const { return lists_compared_; }
    void set_lists_compared() { lists_compared_ = true; }

    /// What the next calls do with gradients, DSOPT_REDUCTION_...; `first_call_is_spent`: by a wrapper that was made.
    int32_t next_reduction(const StateTable &state, int64_t call, bool first_call_is_spent) const;
    /// exp_avg becomes what it stands for, also with DSOPT_OPTIMIZER_MOMENTUM_BITS. After work that uses the state, for
    /// which the caller has waited; done when it returns. The same holds for the two below.
    void decode_momentum(const StateTable &state, const std::vector<Param> &params) const;
    /// After a load: what the original forgets or decides again there.
    void forget_like_original(const StateTable &state) const;
    /// Errors as what they stand for, to host memory.
    void export_errors(const StateTable &state, const StateEntry &entry, float *host) const;

private:
    const Context &context_;
    const dsopt_optimizer_desc desc_;
    OneBitSetup setup_;
    bool lists_compared_ = false;
    mutable std::optional<ScheduleState> known_; // `apply` may be given the memory that it is about
};

} // namespace dsopt
