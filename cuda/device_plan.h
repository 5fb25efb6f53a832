// SPDX-License-Identifier: Apache-2.0
// A step as kernels see it.
#pragma once
#include "device/plan.h"

namespace dsopt::gpu {

/// By value into every kernel. The pointers of `plan` are device pointers here.
struct DevicePlan {
    StepPlan plan;
    uint32_t leaves;
    const int32_t *tensor_of_leaf;
    // One a tensor.
    const int32_t *tensor_leaves; // how many it has: a table in which neighbouring threads read neighbouring words
    double *tensor_squares;
    double *tensor_updates;
    int32_t *tensor_cell; // where its squares count in the table of norms, -1 = nowhere
    bool backwards;       // the last leaf first: a pass begins with what the one before left in the L2 cache
    bool decided;         // a kernel before the update has decided; else the update finds its own few scalars
};

} // namespace dsopt::gpu
