// SPDX-License-Identifier: Apache-2.0
// The memory of one step, and its sizes.
#pragma once
#include "device/context.h"
#include "device/plan.h"

namespace dsopt {

class Matrices;
class OneBit;
class RankParts;
struct Registry;

/// Bytes that must be zero before the first step in a workspace: StepFlags and Outcome, which come first.
constexpr size_t kZeroedBytes = round_up(sizeof(StepFlags)) + sizeof(Outcome);

/// Sizes of the memory of a step. They follow from groups, parameters, options and ranks, so they are computed once.
struct StepSizes {
    StepShape shape{};
    // Numbers of elements of StepMemory's arrays with the same names.
    int64_t norms = 0, factors = 0, mean = 0, staging = 0, matrix_row = 0, matrix_rows = 0, host_norms = 0;
    int64_t lists = 0; // of each list of tensors
    int64_t pieces = 0;
    // Numbers of bytes.
    size_t shards = 0, device_workspace = 0, exchange = 0, matrices = 0;
    bool on_host = false; // backend memory is host memory
    // Sums of the above.
    size_t workspace_bytes = 0, host_bytes = 0; // host_bytes: 0 if backend memory is host memory
    /// Bytes of MatrixPlan::scratch. It is not in the workspace, whose size is part of programs that may run on other
    /// machines (JAX's).
    size_t matrix_scratch = 0;
};

/// Returns the sizes of a step. The last three arguments may be NULL, as in Derived.
StepSizes sizes_of(const Registry &registry, const dsopt_optimizer_desc &desc, const Context &context,
                   const OneBit *onebit, const RankParts *parts, const Matrices *matrices);

/// The memory of one step, partitioned into arrays that are aligned to kCacheLine. Arrays that the host writes come last
/// if backend memory is host memory; otherwise they are in a separate block.
struct StepMemory {
    StepFlags *control;
    Outcome *outcome; // used unless StepRequest::stateful
    Scalars *scalars;
    double *divisors, *norms, *sums_a, *sums_b;
    int64_t *bad;
    ShardSums *shards;
    char *device_workspace;
    double *factors;
    char *exchange;
    float *mean;
    char *staging[2];                          // StepRows::staging
    char *matrices, *matrix_row, *matrix_rows; // of MatrixPlan
    // Written by the host.
    char *table;
    dsopt_tensor *weights, *averaged, *averaged_in_node, *pieces; // StepRows
    dsopt_tensor *gradients;                                      // StepRun::zeroed
    double *host_norms;

    /// `workspace` and `host` have the sizes' workspace_bytes and host_bytes.
    StepMemory(const StepSizes &sizes, void *workspace, void *host) {
        Arena arena(workspace), host_arena(host);
        partition(sizes, arena, sizes.on_host ? arena : host_arena);
    }

private:
    friend StepSizes sizes_of(const Registry &registry, const dsopt_optimizer_desc &desc, const Context &context,
                              const OneBit *onebit, const RankParts *parts, const Matrices *matrices);
    StepMemory() = default;
    void partition(const StepSizes &sizes, Arena &arena, Arena &host_arrays);
};

} // namespace dsopt
