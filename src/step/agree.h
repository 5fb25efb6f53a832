// SPDX-License-Identifier: Apache-2.0
// Reductions over the ranks of a step: norms and reasons to skip, between the passes; sums for trust ratios, between
// the passes of LAMB.
#pragma once
#include "step/drive.h"

namespace dsopt {

/// True if a comm has other ranks, with which steps agree.
bool has_peers(const CommSet &comms);
/// All-reduces the table of norms: experts' columns over the expert comms, then the whole table over the model ranks.
/// The number of ranks with a reason to skip is part of the table, and is all-reduced over the data ranks, too. The
/// table stays on the device if all comms can reduce there; otherwise it goes through StepRun::host_norms, and the host
/// waits.
void all_reduce_norms(const StepRun &run);
/// Reserves memory of the comms for all_reduce_norms().
void reserve_norms(const StepRun &run);

/// Bytes of the largest all-reduce with which ranks compare what they are about to do.
constexpr int64_t kComparedBytes = 8192;

/// Zeroes the sums of tensors that are sharded over the model ranks, so that absent shards contribute 0.
void clear_shard_sums(const StepRun &run);
/// All-reduces these sums over the model ranks. `frozen`: of tensors with a frozen variance, which OneBitStepKernels
/// update, together with the largest factors; otherwise of all other tensors.
void all_reduce_shards(const StepRun &run, bool frozen);
/// Reserves memory of the comm for all_reduce_shards().
void reserve_shards(const StepRun &run);

/// Implements dsopt_tensors_norm.
void norm_over_ranks(const Context &context, Comm *comm, const dsopt_tensor *list, int64_t count, int32_t kind,
                     double max_norm, dsopt_norm_result *result, void *stream);

} // namespace dsopt
