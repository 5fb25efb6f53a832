// SPDX-License-Identifier: Apache-2.0
// Words from kernel arguments to device memory, and the map from leaves to tensors.
#include "kernels.h"
#include "table.h"
#include "vec.cuh"

namespace dsopt::gpu {

__global__ void __launch_bounds__(kThreads)
    put_kernel(const PdlArgument<uint64_t *> argument, GRID_CONSTANT const Bytes bytes, const int count) {
    uint64_t *const to = argument.begin_kernel();
    for (int i = int(threadIdx.x); i < count; i += kThreads) to[i] = bytes.words[i];
}

__global__ void __launch_bounds__(kThreads)
    patch_kernel(const PdlArgument<uint64_t *> argument, GRID_CONSTANT const Patch patch) {
    uint64_t *const table = argument.begin_kernel();
    for (int i = int(threadIdx.x); i < patch.count; i += kThreads) table[patch.at[i]] = patch.words[i];
}

__global__ void __launch_bounds__(kThreads)
    map_kernel(const PdlArgument<const TensorJob *> argument, int32_t *tensor_of_leaf, const int64_t count) {
    const TensorJob *const jobs = argument.begin_kernel();
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x)
        for (int64_t leaf = threadIdx.x; leaf < leaves_of(jobs[i].range.numel); leaf += kThreads)
            tensor_of_leaf[jobs[i].first_leaf + leaf] = int32_t(i);
}

void put_words(uint64_t *to, const Bytes &bytes, int count, const Launcher &launcher) {
    launcher.block("put", put_kernel, to, bytes, count);
}
void patch_words(uint64_t *table, const Patch &patch, const Launcher &launcher) {
    launcher.block("patch", patch_kernel, table, patch);
}
void map_leaves(const TensorJob *jobs, int32_t *tensor_of_leaf, int64_t count, const Launcher &launcher) {
    launcher.over(count, "map", map_kernel, jobs, tensor_of_leaf, count);
}

void load_upload_kernels(KernelLoader &load) { load(put_kernel, patch_kernel, map_kernel); }

} // namespace dsopt::gpu
