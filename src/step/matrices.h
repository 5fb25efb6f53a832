// SPDX-License-Identifier: Apache-2.0
// Passes over matrices, and the exchange of their results between ranks that matrices are partitioned among.
#pragma once
#include "step/drive.h"

namespace dsopt {

/// Updates the tensors of Passes::matrix. A failed exchange leaves their weights as they were, and moved momenta.
void update_matrices(const StepRun &run, StepKernels &kernels);
/// Reserves memory of the comm for update_matrices().
void reserve_matrices(const StepRun &run);

} // namespace dsopt
