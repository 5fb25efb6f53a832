// SPDX-License-Identifier: Apache-2.0
// The table of tensors and groups of a step.
#pragma once
#include "optimizer/plan.h"

namespace dsopt {

/// Returns the gradient of a parameter in a call; NULL if it has none.
const dsopt_tensor *gradient_of(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state,
                                size_t i);
/// Returns the memory of a whole parameter in a call.
inline void *memory_of_param(const Optimizer &optimizer, const StepRequest &request, size_t i) {
    return request.step.params != nullptr ? request.step.params[i].data : optimizer.params()[i].data;
}
/// Returns the ranks over which the engine averages a gradient in a step.
inline Averages averages_in(const StepRequest &request, const Participation &participation, Stage stage) {
    return request.initial ? Averages::none : participation.averages(stage);
}
inline Stage stage_of(const OneBitPlan *onebit) { return onebit != nullptr ? onebit->stage : Stage::full; }
/// True if every rank of a node needs the node's mean of every gradient: in local steps of 0/1 Adam.
inline bool needs_all_of_node(const OneBitPlan &onebit) { return makes_local_step(onebit); }

/// Fills the entry of a tensor in the table, as plan_tables() does outside compat mode.
void plan_job(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state, float *means,
              Stage stage, size_t i, TensorJob &job);
/// Sets the address of a gradient that differs in nothing else. Means of gradients are always at the same address.
void set_gradient_address(const Optimizer &optimizer, const dsopt_tensor &gradient, size_t i, TensorJob &job);
/// Fills the tables of tensors and groups, except for what StepRequest::reuse says is there. `means`: memory for means
/// of gradients.
void plan_tables(const Optimizer &optimizer, const StepRequest &request, const dsopt_tensor *state, float *means,
                 const OneBitPlan *onebit, const StepTable &table);
/// Fills StepPlan::slice_jobs: the ranges of `table.jobs` that are in this rank's slice.
void plan_slice_jobs(const Optimizer &optimizer, const StepRequest &request, const OneBitPlan &onebit,
                     const StepTable &table);

} // namespace dsopt
