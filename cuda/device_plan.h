// SPDX-License-Identifier: Apache-2.0
// The plan of a step for kernels.
#pragma once
#include "device/plan.h"

namespace dsopt::gpu {

/// What the last block of a pass does after it, in place of kernels of their own.
enum class Tail : uint8_t { none, fold, fold_and_decide, trust, finish };

/// Passed by value to every kernel. The pointers of `plan` are device pointers here.
struct DevicePlan {
    StepPlan plan;
    uint32_t leaves; // that kernels visit, from `first_position` on
    uint32_t first_position;
    const int32_t *tensor_of_leaf; // by position: TensorJob::position
    // One entry per tensor.
    const int32_t *tensor_leaves; // number of leaves; neighbouring threads read neighbouring words (coalesced)
    double *tensor_squares;
    double *tensor_updates;
    int32_t *tensor_cell; // index of its cell in the table of norms, -1 = none
    bool backwards;       // last leaf first: a pass begins with data that are in the L2 cache since the previous pass
    bool decided;         // a kernel before the update makes the decision; else Tail::finish makes it
    Tail tail;            // of the kernel that gets this plan
};

} // namespace dsopt::gpu
