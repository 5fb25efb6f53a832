// SPDX-License-Identifier: Apache-2.0
// Between the passes of a step with comms: ranks agree on norms and on whether to skip; between LAMB's
// sweeps, on what trust ratios follow from.
#pragma once
#include "comm/comm.h"
#include "device/decide.h"
#include "launch.h"
#include "runtime.h"
#include <vector>

namespace dsopt::gpu {

__global__ void move_norms_kernel(const NormMove move) { move(); }

/// Ranks add up their norms: on the device if their comms work there, otherwise through the host, which waits.
inline void agree_on_norms(const StepPlan &plan, cudaStream_t stream) {
    const size_t cells = size_t(NormTable::size(plan.group_count, plan.classes()));
    if (peers_on_device(plan.comms))
        return reduce_norms(plan, NormTable{plan.norms, plan.group_count, plan.classes()}, plan.norms + cells,
                            Place::backend, [&](const NormMove &move) {
                                check(::gpu::launch("move_norms", move_norms_kernel, 1, 1, 0, stream, move), "norms");
                            });
    if (capturing(stream)) throw Error(DSOPT_ERR_STATE, "this comm goes through the host and cannot be captured");
    std::vector<double> host(cells + size_t(plan.group_count) + 2);
    check(cudaMemcpyAsync(host.data(), plan.norms, cells * sizeof(double), cudaMemcpyDeviceToHost, stream), "norms");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    reduce_norms(plan, NormTable{host.data(), plan.group_count, plan.classes()}, host.data() + cells, Place::host,
                 [](const NormMove &move) { move(); });
    check(cudaMemcpyAsync(plan.norms, host.data(), cells * sizeof(double), cudaMemcpyHostToDevice, stream), "norms");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

/// Before shards are written: what takes no part counts with zeros.
inline void clear_shards(const StepPlan &plan, cudaStream_t stream) {
    check(cudaMemsetAsync(plan.shard_sums, 0, shard_bytes(plan.shard_count), stream), "cudaMemsetAsync");
}
/// `skip`: the decision, on the device.
inline void agree_on_shards(const StepPlan &plan, const int32_t *skip, bool frozen, cudaStream_t stream) {
    if (!plan.comms.model->on_device()) {
        // The host waits here all the same, and as on the CPU sends nothing for a step that is skipped.
        int32_t skipped = 0;
        check(cudaMemcpyAsync(&skipped, skip, sizeof skipped, cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
        check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        if (skipped != 0) return;
    }
    add_up_shards(plan, frozen);
}

} // namespace dsopt::gpu
