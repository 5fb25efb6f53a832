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
    double *tensor_squares; // one a tensor
    double *tensor_updates; // one a tensor
    int32_t *tensor_cell;   // one a tensor: where its squares count in the table of norms, -1 = nowhere
    bool decided;           // a kernel before the update has decided; else the update finds its own few scalars
};

} // namespace dsopt::gpu
