// SPDX-License-Identifier: Apache-2.0
// What the ranks of a step agree on: norms and whether to skip, between the passes; sums that trust ratios follow from,
// between the passes of LAMB.
#pragma once
#include "step/drive.h"

namespace dsopt {

/// Ranks add up their norms: experts' columns over their comms, then everything over the model ranks; the reasons to
/// skip travel along, and go over the data ranks as well. On the device if all comms work there, else through
/// StepRun::host_norms, and then the host waits.
void agree_on_norms(const StepRun &run);
/// Memory of the comms for that.
void reserve_norms(const StepRun &run);

/// Bytes of the largest all-reduce with which ranks compare what they are about to do.
constexpr int64_t kComparedBytes = 8192;

/// Returns true if tensors are sharded over model ranks: of those whose variance is frozen, which have loops of their
/// own, or of the others. If so, their sums become zeros: what takes no part counts with them.
bool begin_shards(const StepRun &run, bool frozen);
/// Model ranks add up their sums, and of frozen tensors take the largest factor.
void agree_on_shards(const StepRun &run, bool frozen);

/// dsopt_tensors_norm.
void norm_over_ranks(const Context &context, Comm *comm, const dsopt_tensor *list, int64_t count, int32_t kind,
                     double max_norm, dsopt_norm_result *result, void *stream);

} // namespace dsopt
