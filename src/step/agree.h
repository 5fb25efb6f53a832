// SPDX-License-Identifier: Apache-2.0
// What the ranks of a step agree on: norms and whether to skip, between the passes; sums that trust ratios follow from,
// between the sweeps of LAMB.
#pragma once
#include "device/device.h"
#include "step/ranks.h"

namespace dsopt {

/// Ranks add up their parts: experts' columns over their comms, then everything over the model ranks; the reasons to
/// skip travel along, and go over the data ranks as well. On the device if all comms work there, else through `host`,
/// which has room for norms_size(), and then the host waits.
void agree_on_norms(const StepPlan &plan, const CommSet &comms, const Device &device, StepLoops &loops, double *host);
/// Of a NormTable with a message behind it.
constexpr int64_t norms_size(int64_t groups, int64_t classes) { return NormTable::size(groups, classes) + groups + 2; }

/// Whether there are tensors that are sharded over model ranks, of those whose variance is frozen, which have loops of
/// their own, or of the others.
bool has_shards(const StepPlan &plan, bool frozen);
/// Model ranks add up shard_sums, and of frozen ones take the largest of shard_factors.
void agree_on_shards(const StepPlan &plan, const CommSet &comms, bool frozen);

/// dsopt_tensors_norm.
void norm_over_ranks(const Context &context, Comm *comm, const dsopt_tensor *list, int64_t count, int32_t kind,
                     double max_norm, dsopt_norm_result *result, void *stream);

} // namespace dsopt
