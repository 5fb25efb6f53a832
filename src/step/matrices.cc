// SPDX-License-Identifier: Apache-2.0
#include "step/matrices.h"

namespace dsopt {
namespace {

bool is_split(const StepRun &run) { return run.plan.matrices != nullptr && run.plan.matrices->places != nullptr; }

} // namespace

void update_matrices(const StepRun &run, StepKernels &kernels) {
    MatrixStepKernels &local = *kernels.matrices();
    const MatrixPlan &plan = *run.plan.matrices;
    const bool split = is_split(run);
    // Gaps, matrices without a gradient and skipped steps: zeros are sent.
    if (split) run.context.device().clear(plan.row, size_t(plan.row_bytes), run.plan.execution.stream);
    for (int64_t batch = 0; batch < plan.counts.batches; ++batch) {
        local.run(MatrixPass::form, batch);
        local.run(MatrixPass::orthogonalize, batch);
        local.run(split ? MatrixPass::send : MatrixPass::apply, batch);
    }
    if (!split) return;
    kernels.mark(DSOPT_MS_BASIC_STEP);
    run.comms.matrices()->all_gather(plan.row, plan.rows, plan.row_bytes, run.plan.execution.stream, Place::backend);
    kernels.mark(DSOPT_MS_EXCHANGE);
    for (int64_t batch = 0; batch < plan.counts.batches; ++batch) {
        local.run(MatrixPass::take, batch);
        local.run(MatrixPass::apply, batch);
    }
}

void reserve_matrices(const StepRun &run) {
    if (is_split(run))
        run.comms.matrices()->reserve({.all_gather = run.plan.matrices->row_bytes}, run.plan.execution.stream,
                                      Place::backend);
}

} // namespace dsopt
