// SPDX-License-Identifier: Apache-2.0
// What the phases of a step's preparation hand on: request.cc checks, plan.cc plans, rank_check.cc compares with other
// ranks, step.cc runs.
#pragma once
#include "optimizer/optimizer.h"

namespace dsopt {

/// A call after checking.
struct StepRequest {
    const dsopt_step &step;
    uint32_t flags;                     // those of `step`, and what follows from them
    bool initial = false;               // the original's step on zero gradients when a wrapper is made
    bool remembers = false;             // outcome, counters and cache are the engine's: not in dsopt_optimizer_apply
    bool own_schedule = false;          // and so is the schedule
    Repeats repeats = Repeats::nothing; // of the last step, whose tables are still there
    char *host = nullptr;               // the engine's for StepMemory::host_bytes; NULL: some of the pool
    bool *met = nullptr;                // set once the ranks have compared what they do
};
/// StepRequest::flags of a call.
uint32_t flags_of(const dsopt_step &step);
/// `functional`: dsopt_optimizer_apply.
void check_step(const Optimizer &optimizer, const dsopt_step &step, bool functional);

/// What must be zero before the first step in a workspace: its first two pieces.
constexpr size_t kZeroedBytes = round_up(sizeof(Control)) + sizeof(Outcome);

/// The memory of one step, cut into pieces that begin on lines of their own. Their order depends on nothing except
/// parameters and groups, so sizes are constant. What the host writes comes behind the rest where backend memory is
/// host memory, and in memory of its own otherwise.
struct StepMemory {
    Control *control;
    Outcome *outcome; // of calls that bring none
    Scalars *scalars;
    double *divisors, *norms, *sums_a, *sums_b;
    int64_t *bad;
    ShardSums *shards;
    char *extra;
    double *factors;
    char *exchange;
    float *mean;
    size_t bytes;
    // The host's.
    char *table;
    dsopt_tensor *lists;
    double *host_norms;
    size_t host_bytes; // 0 where it comes behind the rest

    /// Both NULL: for the sizes.
    StepMemory(const Optimizer &optimizer, void *workspace, void *host);
};

StepShape shape_of(const Optimizer &optimizer);
/// `state`: a list of all state tensors. Fills the tables of tensors and groups.
StepPlan make_plan(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                   const StepMemory &memory, const StepTable &table, const OneBitPlan *onebit);
/// DSOPT_CONTEXT_CHECK_POINTERS.
void check_pointers(const Optimizer &optimizer, const StepPlan &plan);

/// DSOPT_OPTIMIZER_CHECK_RANKS: whether every step is compared.
bool checks_ranks(const Optimizer &optimizer);
/// `lists_only`: the lists of parameters and nothing of the step. `remembers`: calls are counted, as in
/// dsopt_optimizer_step. Throws MISMATCH naming what differs.
void check_ranks(const Optimizer &optimizer, const StepPlan &plan, bool lists_only, bool remembers);
/// In place of check_ranks() where this rank takes no part: the others must not wait for it.
void refuse_to_ranks(const Optimizer &optimizer, void *stream) noexcept;

} // namespace dsopt
