// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/sizes.h"
#include "device/onebit_plan.h"

namespace dsopt {

/// What the host tells a device of tensors and groups, in one block of memory, so that it can be compared and copied as
/// a whole. Each table begins on its own line.
struct StepTable {
    TensorJob *jobs;
    Hyper *groups;
    OneBitJob *onebit = nullptr; // NULL without the family
    size_t bytes;

    /// `memory` NULL: only to know the bytes.
    StepTable(void *memory, const StepShape &shape) {
        Pieces pieces(memory);
        pieces.take(jobs, shape.tensors);
        pieces.take(groups, shape.groups);
        if (shape.onebit) pieces.take(onebit, shape.tensors);
        bytes = pieces.bytes();
    }
};

} // namespace dsopt
