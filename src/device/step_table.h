// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/sizes.h"
#include "device/onebit_plan.h"

namespace dsopt {

/// Tables of tensors and groups from the host to a device, in one block of memory that is compared and copied as a
/// whole. Each table begins on its own cache line.
struct StepTable {
    TensorJob *jobs;
    Hyper *groups;
    OneBitJob *onebit = nullptr; // NULL without the 1-bit family
    TensorJob *fed = nullptr;    // NULL unless StepShape::feeds_slice
    size_t bytes;

    /// `memory` NULL: only computes `bytes`.
    StepTable(void *memory, const StepShape &shape) {
        Arena arena(memory);
        arena.take(jobs, shape.tensors);
        arena.take(groups, shape.groups);
        if (shape.onebit) arena.take(onebit, shape.tensors);
        if (shape.feeds_slice) arena.take(fed, shape.tensors);
        bytes = arena.bytes();
    }
};

} // namespace dsopt
