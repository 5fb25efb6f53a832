// SPDX-License-Identifier: Apache-2.0
// The 1-bit family in an optimizer: 1-bit Adam (Tang et al. 2021), 0/1 Adam (Lu et al. 2022), 1-bit LAMB
// (Li et al. 2021). Layout of parameters in exchanges, state tensors of the family, and access to the schedule.
#pragma once
#include "exchange/exchange.h"
#include "optimizer/param.h"
#include "optimizer/state_table.h"
#include "rules/onebit_family.h"
#include <optional>

namespace dsopt {

/// Layout of an optimizer's parameters in exchanges. It depends on groups, parameters and ranks only.
struct OneBitSetup {
    ScheduleRules rules{};
    TrustRules trust{};
    OwnedLayout layout;
    // One entry per parameter, as in OneBitJob.
    std::vector<int64_t> worker;
    std::vector<int32_t> scale_group;
    bool compresses = false; // there is more than one rank or, with a node comm, more than one node
    ExchangeUse use = ExchangeUse::step;
    int32_t trust_slots = 0; // number of parameters in exchanges that have a trust slot

    OneBitSetup(const std::vector<dsopt_group> &groups, const std::vector<Param> &params,
                const dsopt_optimizer_desc &desc, DataRank local);
    /// Copies the rules from the groups.
    void set_rules(const std::vector<dsopt_group> &groups, bool compat);
};

/// The plan of one step and its exchange, to which the plan points.
struct PlannedOneBit : NotCopied {
    OneBitPlan plan{};
    Exchange exchange;
};

inline bool is_exchanged(const dsopt_group &group) {
    return is_onebit(group.algorithm) && !(group.flags & DSOPT_GROUP_NON_FREEZE);
}

/// Throws if `first` and `other`, both of the family, cannot be in the same optimizer.
void check_family(const dsopt_group &first, const dsopt_group &other);
/// Checks all groups of the family against the first one. Returns the first one, NULL if there is none.
const dsopt_group *check_family(const std::vector<dsopt_group> &groups);

/// The 1-bit family in an optimizer. In methods `state` is the optimizer's table, and `list` has all state tensors: the
/// optimizer's own, or a caller's.
class OneBit {
public:
    OneBit(const Context &context, const std::vector<dsopt_group> &groups, const std::vector<Param> &params,
           const dsopt_optimizer_desc &desc, DataRank local) :
        context_(context),
        desc_(desc),
        setup_(groups, params, desc, local) {}
    const OneBitSetup &setup() const { return setup_; }
    void set_rules(const std::vector<dsopt_group> &groups) { setup_.set_rules(groups, setup_.rules.compat); }

    /// Adds the family's state tensors of a parameter; add_state() adds those of the whole optimizer.
    static void add_param_state(const Param &param, int64_t index, const dsopt_group &group,
                                const dsopt_optimizer_desc &desc, StateTable &state);
    void add_state(int64_t groups, int64_t params, StateTable &state) const;

    /// Fills `planned`, which must not be moved afterwards, and `jobs`. `engine_schedule`: the schedule in `list` is
    /// the engine's.
    void plan(const StateTable &state, const dsopt_tensor *list, OneBitJob *jobs, void *workspace, double *factors,
              bool engine_schedule, void *stream, PlannedOneBit &planned) const;
    /// Returns the schedule, from which the host chooses the stage of a step. On a device in standard mode every call
    /// counts, so the host counts steps itself and need not wait. The host waits for `stream` and reads the schedule in
    /// compat mode, where only the device knows if the last step was skipped, and if the schedule is not the engine's.
    ScheduleState read_schedule(const void *data, bool engine_schedule, void *stream) const;
    /// Counts a step in the host's copy of the schedule. Must be called after a step with the engine's schedule.
    void count_step(const OneBitPlan &plan) const;
    /// True if the next read_schedule() of the engine's schedule does not wait.
    bool knows_schedule() const { return host_schedule_.has_value(); }
    /// Drops the host's copy of the schedule. Must be called when the schedule's memory may have been written to.
    void invalidate_schedule() const { host_schedule_.reset(); }

    /// Returns the reduction of gradients in a call, DSOPT_REDUCTION_...; `call`: its number, 0 = the next call.
    /// `wrapper_made_first_call`: the original's wrapper makes the first call when it is constructed.
    int32_t next_reduction(const StateTable &state, int64_t call, bool wrapper_made_first_call) const;
    /// Decodes exp_avg_bits to exp_avg, if the momentum is there (DSOPT_OPTIMIZER_MOMENTUM_BITS). Before
    /// this and the next two methods, the caller must have waited for work that uses the state. They are synchronous.
    void decode_momentum(const StateTable &state, const std::vector<Param> &params) const;
    /// Compat mode, after a load: resets the state that the original does not load, and decides again if the variance
    /// is frozen.
    void reset_as_original_load(const StateTable &state) const;
    /// Writes the residuals of an error buffer, and scales of 0, to host memory.
    void export_errors(const StateTable &state, const StateEntry &entry, float *host) const;

private:
    const Context &context_;
    const dsopt_optimizer_desc desc_;
    OneBitSetup setup_;
    // The host's copy of the schedule. Mutable: `apply` resets it if its list has the schedule's memory.
    mutable std::optional<ScheduleState> host_schedule_;
};

} // namespace dsopt
