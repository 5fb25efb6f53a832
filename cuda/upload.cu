// SPDX-License-Identifier: Apache-2.0
// Copies words from kernel arguments to device memory, and computes the maps from leaves to tensors.
#include "kernels.h"
#include "table.h"
#include "vec.cuh"

namespace dsopt::gpu {

__global__ void __launch_bounds__(kThreads)
    store_words_kernel(const PdlArgument<uint64_t *> argument, GRID_CONSTANT const Bytes bytes, const int count) {
    uint64_t *const to = argument.begin_kernel();
    for (int i = int(threadIdx.x); i < count; i += kThreads) to[i] = bytes.words[i];
}

__global__ void __launch_bounds__(kThreads)
    patch_kernel(const PdlArgument<uint64_t *> argument, GRID_CONSTANT const Patch patch) {
    uint64_t *const table = argument.begin_kernel();
    for (int i = int(threadIdx.x); i < patch.count; i += kThreads) table[patch.offsets[i]] = patch.words[i];
}

__global__ void __launch_bounds__(kThreads)
    map_kernel(const PdlArgument<const TensorJob *> argument, const LeafMap map, int32_t *cell, const int64_t count) {
    const TensorJob *const jobs = argument.begin_kernel();
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
        for (int64_t leaf = threadIdx.x; leaf < leaves_of(jobs[i].range.numel); leaf += kThreads)
            map.tensor_of_leaf[jobs[i].position + leaf] = int32_t(i);
        if (threadIdx.x != 0 || map.tensor_leaves == nullptr) continue;
        map.tensor_leaves[i] = int32_t(jobs[i].leaves.count());
        if (jobs[i].leaves.numel == 0) cell[i] = -1;
    }
}

void store_words(uint64_t *to, const Bytes &bytes, int count, const Launcher &launcher) {
    launcher.launch_block("put", store_words_kernel, to, bytes, count);
}
void patch_words(uint64_t *table, const Patch &patch, const Launcher &launcher) {
    launcher.launch_block("patch", patch_kernel, table, patch);
}
void map_leaves(const TensorJob *jobs, const LeafMap &map, int32_t *cell, int64_t count, const Launcher &launcher) {
    launcher.launch_grid(count, "map", map_kernel, jobs, map, cell, count);
}

void load_upload_kernels(KernelLoader &load) { load(store_words_kernel, patch_kernel, map_kernel); }

} // namespace dsopt::gpu
