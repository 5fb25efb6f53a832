// SPDX-License-Identifier: Apache-2.0
#include "optimizer/step_memory.h"
#include "device/step_table.h"
#include "optimizer/matrices.h"
#include "optimizer/onebit.h"
#include "optimizer/registry.h"
#include "optimizer/shard.h"
#include <algorithm>

namespace dsopt {

namespace {

StepShape shape_of(const Registry &registry, const OneBit *onebit, const RankParts *parts, const Matrices *matrices) {
    const std::vector<Param> &params = registry.params;
    const bool shards = parts != nullptr && parts->sharding() != Sharding::none;
    const bool compresses = onebit != nullptr && onebit->setup().compresses;
    return {.tensors = int64_t(params.size()),
            .groups = int64_t(registry.groups.size()),
            .leaves = params.empty() ? 0 : params.back().leaves().end(),
            .onebit = onebit != nullptr,
            .has_slice_jobs = compresses && onebit->setup().layout.has_levels() && !shards,
            .exchange = compresses ? &onebit->setup().layout : nullptr,
            .matrices = matrices != nullptr ? &matrices->counts() : nullptr,
            .table_bytes = 0};
}

} // namespace

StepSizes sizes_of(const Registry &registry, const dsopt_optimizer_desc &desc, const Context &context,
                   const OneBit *onebit, const RankParts *parts, const Matrices *matrices) {
    const DeviceKernels &kernels = context.device().kernels();
    StepSizes sizes;
    StepShape &shape = sizes.shape = shape_of(registry, onebit, parts, matrices);
    shape.table_bytes = StepTable(nullptr, shape).bytes;
    const NormTable norms{nullptr, shape.groups, 1 + desc.expert_count};
    const bool lamb = onebit != nullptr && onebit->setup().rules.algorithm == DSOPT_ALGORITHM_ONEBIT_LAMB;
    sizes.on_host = context.device().is_host();
    sizes.norms = norms.size_with_lanes();
    sizes.host_norms = sizes.on_host ? 0 : norms.size_with_message();
    sizes.factors = lamb ? shape.leaves : 0;
    sizes.shards = ShardTable{nullptr, registry.trust_slots, 0}.bytes();
    sizes.device_workspace = kernels.device_workspace_bytes(shape);
    if (shape.exchange != nullptr) sizes.exchange = Exchange::workspace_bytes(*shape.exchange, onebit->setup().use);
    if (parts != nullptr) {
        sizes.mean = parts->mean_numel();
        sizes.staging = parts->layout().staging_bytes();
        sizes.lists = shape.tensors;
        sizes.pieces = 2 * parts->layout().max_pieces();
    }
    if (matrices != nullptr) {
        sizes.matrix_row = matrices->row_bytes();
        sizes.matrix_rows = matrices->row_bytes() * matrices->ranks();
        for (const MatrixBatch &batch : matrices->batches()) {
            const auto [workspace, scratch] = kernels.matrix_sizes(batch, context.parallel().threads);
            sizes.matrices = std::max(sizes.matrices, workspace);
            sizes.matrix_scratch = std::max(sizes.matrix_scratch, scratch);
        }
        if (sizes.matrix_scratch != 0) sizes.matrix_scratch += kCacheLine; // its memory has any alignment
    }
    Arena arena(nullptr), host_arena(nullptr);
    StepMemory().partition(sizes, arena, sizes.on_host ? arena : host_arena);
    sizes.workspace_bytes = arena.bytes();
    sizes.host_bytes = host_arena.bytes();
    return sizes;
}

void StepMemory::partition(const StepSizes &sizes, Arena &arena, Arena &host_arrays) {
    const StepShape &shape = sizes.shape;
    arena.take(control, 1);
    arena.take(outcome, 1);
    arena.take(scalars, shape.tensors);
    arena.take(divisors, shape.groups);
    arena.take(norms, sizes.norms);
    arena.take(sums_a, shape.leaves);
    arena.take(sums_b, shape.leaves);
    arena.take(bad, shape.leaves);
    arena.take(factors, sizes.factors);
    arena.take_bytes(shards, sizes.shards);
    arena.take_bytes(device_workspace, sizes.device_workspace);
    arena.take_bytes(exchange, sizes.exchange);
    arena.take(mean, sizes.mean);
    for (char *&staged : staging) arena.take(staged, sizes.staging);
    arena.take_bytes(matrices, sizes.matrices);
    arena.take(matrix_row, sizes.matrix_row);
    arena.take(matrix_rows, sizes.matrix_rows);
    host_arrays.take_bytes(table, shape.table_bytes);
    for (dsopt_tensor **list : {&weights, &averaged, &averaged_in_node, &gradients})
        host_arrays.take(*list, sizes.lists);
    host_arrays.take(pieces, sizes.pieces);
    host_arrays.take(host_norms, sizes.host_norms);
}

} // namespace dsopt
