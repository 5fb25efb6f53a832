// SPDX-License-Identifier: Apache-2.0
// Gradients that the engine averages itself, in fp32 over all data-parallel ranks (DSOPT_OPTIMIZER_AVERAGES).
//
// The mean of W ranks is the sum in rank order, which begins with rank 0's value, times 1 / W in fp32. With two levels
// the ranks of a node are added up in order, then the nodes. So the bits do not depend on the provider of the comms, on
// sharding or on the dtype of messages: gradients travel in their own dtype, and widening is exact.
#pragma once
#include "step/drive.h"

namespace dsopt {

/// Averages StepRows::averaged and averaged_in_node. The means are in the gradients of the jobs, or of StepPlan::slice_jobs: F32
/// arrays that have the elements of the job's range.
void average_gradients(const StepRun &run);
/// Averages the gradients of one bucket. `packed`: from pack_bucket(), or NULL.
void average_bucket(const StepRun &run, int bucket, const char *packed);
/// Copies the gradients of a bucket to packed_bytes() bytes, after which they are not needed any more. Uses
/// StepRows::lists.
void pack_bucket(const StepRun &run, int bucket, char *to);
int64_t packed_bytes(const StepRun &run, int bucket);
/// Reserves memory of the comms for this function.
void reserve_average(const StepRun &run);

} // namespace dsopt
