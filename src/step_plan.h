// SPDX-License-Identifier: Apache-2.0
// What one step is, as every backend reads it: plain data, nothing owned.
#pragma once
#include "parallel.h"
#include "rules/scalars.h"

namespace dsopt {

/// All reductions are cut into leaves of this many elements from each tensor's start, whatever the thread count.
constexpr int64_t kLeaf = 4096;
constexpr int64_t leaves_of(int64_t numel) { return (numel + kLeaf - 1) / kLeaf; }

/// One tensor of a step. `weight` is what the rule updates: the master, or the parameter itself.
struct TensorJob {
    void *grad;   // NULL: no gradient, the tensor is left alone
    void *weight;
    void *m, *v;
    void *copy;   // low-precision parameter beside a master, or NULL
    void *out;    // or NULL
    int64_t numel;
    int64_t first_leaf;
    int32_t group;
    Dtype grad_type, weight_type, state_type, copy_type, out_type;
    bool has_master; // `weight` is one
};

enum StepFlag : uint32_t {
    kZeroGrads = DSOPT_STEP_ZERO_GRADS,
    kOutOnly = DSOPT_STEP_OUT_ONLY, // `weight` is read only, `copy` is NULL; with a master only the copy is left alone
    kDelta = DSOPT_STEP_DELTA,
};

/// What a step tells, in backend memory. Written by the step, read by the host when it asks.
struct Outcome {
    int32_t skipped;
    int32_t reserved;
    int64_t nonfinite, first_bad;
    int64_t total_skipped, skipped_in_row; // of dsopt_optimizer_step; carried on from step to step
    double grad_norm, weight_norm, update_norm, divisor;
};

/// Everything that one step needs. Arrays are in memory that the backend reads; nothing here is owned.
struct StepPlan {
    TensorJob *jobs;
    int64_t count;
    const Hyper *groups;
    int64_t group_count;
    uint32_t flags;
    bool read_gradients; // pass 1: count non-finite elements, sum squares
    bool skip_nonfinite;
    bool report_norms;
    bool has_lamb;
    bool compat;
    double max_norm;
    const float *lr, *grad_scale, *grad_norms; // device scalars or NULL
    const int32_t *skip;
    int32_t *step;      // one counter a tensor
    float *trust_ratio; // one a tensor, or NULL
    float *report;      // or NULL
    Outcome *outcome;   // or NULL
    // Workspace, sized by workspace_layout().
    Scalars *scalars;       // one a tensor
    double *divisors;       // one a group, then the sums of squares a group
    int64_t *cost;          // count + 1: running sum of bytes, the ruler along which the list is cut
    double *sums_a, *sums_b; // one a leaf
    int64_t *bad;           // non-finite elements, one a leaf
    void *stream;
    Parallel parallel;
    int64_t chunk;
};

} // namespace dsopt
