// SPDX-License-Identifier: Apache-2.0
// Between the passes of a step with comms: ranks agree on norms and on whether to skip.
#pragma once
#include "comm.h"
#include "device.h"
#include "launch.h"
#include "rules/decide.h"
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

} // namespace dsopt::gpu
