// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "base/sizes.h"
#include "device/matrix_plan.h"
#include "device/onebit_plan.h"

namespace dsopt {

/// Tables of tensors and groups from the host to a device, in one block of memory that is compared and copied as a
/// whole. Each table begins on its own cache line.
struct StepTable {
    TensorJob *jobs;
    Hyper *groups;
    OneBitJob *onebit = nullptr;      // NULL without the 1-bit family
    TensorJob *slice_jobs = nullptr;  // NULL unless StepShape::has_slice_jobs
    MatrixJob *matrix_jobs = nullptr; // NULL without matrices, as the next two
    MatrixBatch *matrix_batches = nullptr;
    MatrixPlace *matrix_places = nullptr; // NULL unless matrices are partitioned among ranks
    size_t bytes;

    /// `memory` NULL: only computes `bytes`.
    StepTable(void *memory, const StepShape &shape) {
        Arena arena(memory);
        arena.take(jobs, shape.tensors);
        arena.take(groups, shape.groups);
        if (shape.onebit) arena.take(onebit, shape.tensors);
        if (shape.has_slice_jobs) arena.take(slice_jobs, shape.tensors);
        if (shape.matrices != nullptr) {
            arena.take(matrix_jobs, shape.matrices->jobs);
            arena.take(matrix_batches, shape.matrices->batches);
            if (shape.matrices->split) arena.take(matrix_places, shape.matrices->matrices);
        }
        bytes = arena.bytes();
    }
};

} // namespace dsopt
