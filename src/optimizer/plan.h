// SPDX-License-Identifier: Apache-2.0
// Data of the phases in which a step is prepared: request.cc checks the call, plan.cc makes the plan, rank_check.cc
// compares it with other ranks, step.cc runs it.
#pragma once
#include "optimizer/optimizer.h"
#include <optional>

namespace dsopt {

/// A call whose arguments were checked.
struct StepRequest {
    const dsopt_step &step;
    uint32_t flags;                    // flags of `step`, and flags that they imply
    bool initial = false;              // the original's step on zero gradients when a wrapper is constructed
    bool stateful = false;             // outcome, counters and cache are the engine's: not in dsopt_optimizer_apply
    bool engine_schedule = false;      // the schedule is the engine's, too
    Reuse reuse = Reuse::nothing;      // the tables of the last step that are reused
    char *host = nullptr;              // the engine's memory for StepMemory::host_bytes; NULL: memory of the pool
    bool buckets_are_averaged = false; // before the step
    bool is_part = false;              // it is the plan of dsopt_optimizer_ready
    bool *ranks_compared = nullptr;    // is set to true when this rank begins to compare its step with other ranks
};
/// Returns StepRequest::flags of a call.
uint32_t flags_of(const dsopt_step &step);
/// Throws if an argument of the call is wrong. `functional`: the call is dsopt_optimizer_apply.
void check_step(const Optimizer &optimizer, const dsopt_step &step, bool functional);

/// True if steps read gradients before they update, unless the caller has computed their norms.
bool inspects_gradients(const Optimizer &optimizer);
/// True if the lists of two calls differ in an address at most, and the new address is legal.
bool differs_in_address(const dsopt_tensor &now, const dsopt_tensor &before);
/// Fills the tables of tensors and groups, and returns the plan. `state`: a list of all state tensors.
StepPlan make_plan(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                   const StepMemory &memory, const StepTable &table, const OneBitPlan *onebit,
                   const MatrixPlan *matrices);
/// Fills the lists of a step in which ranks exchange rows. `plan`: of the step.
StepRows plan_rows(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                   const StepMemory &memory, const StepPlan &plan);
/// Throws DEVICE if a tensor of the step is not in memory of the context's device (DSOPT_CONTEXT_CHECK_POINTERS).
void check_pointers(const Optimizer &optimizer, const StepRequest &request, const StepPlan &plan);

/// What ranks compare at one point of a step.
struct Compared {
    bool lists = true; // parameters and options
    bool calls = true; // number of calls, schedule, stage, gradients that are present
    bool sums = true;  // sums of parts that ranks complete together
    enum class Of : uint8_t { all, in_buckets, others } of = Of::all; // parameters among `gradients`
    TensorInterval gradients{0, 0};                                   // whose dtypes are compared
};

/// A step that is planned in its memory: what drive() needs.
struct Optimizer::Planned : NotCopied {
    /// `state`: a list of all state tensors.
    Planned(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state, void *workspace);
    /// `compare`: as in StepRun.
    StepRun run(const Optimizer &optimizer, FunctionRef<void()> compare, int64_t compared_bytes) const;

    HostScratch scratch, matrix_scratch;
    StepMemory memory;
    StepTable table;
    CommSet ranks;
    PlannedOneBit onebit;
    MatrixPlan matrices{};
    StepPlan plan;
    std::optional<StepRows> rows;
    PhaseList phases;
};

/// True if ranks compare every step: DSOPT_OPTIMIZER_CHECK_RANKS with several ranks.
bool checks_ranks(const Optimizer &optimizer);
/// Compares the step with those of the other ranks. Throws MISMATCH naming the difference. `rows`: of the step, or
/// NULL. `counts`: calls are counted, as in dsopt_optimizer_step.
void check_ranks(const Optimizer &optimizer, const StepPlan &plan, const PhaseList &phases, const StepRows *rows,
                 const Compared &compared, bool counts = true);
/// Reports to the other ranks that this rank refused its step. Must be called in place of check_ranks(), in which the
/// other ranks wait for this rank.
void report_refusal(const Optimizer &optimizer, void *stream) noexcept;

} // namespace dsopt
