// SPDX-License-Identifier: Apache-2.0
// Description of one step for all backends: plain data that owns nothing.
#pragma once
#include "base/parallel.h"
#include "base/range.h"
#include "rules/formats.h"
#include "rules/lane_sum.h"
#include "rules/loss_scale.h"
#include "rules/scalars.h"
#include <type_traits>

namespace dsopt {

/// Number of elements of a leaf. Every reduction is partitioned into leaves from each tensor's start, for any thread
/// count.
constexpr int64_t kLeaf = 4096;
DSOPT_HD constexpr int64_t leaves_of(int64_t numel) { return (numel + kLeaf - 1) / kLeaf; }

/// Leaves of a tensor of `numel` elements, whose sums are folded. `first` is the index of the first leaf among the
/// leaves of all tensors.
struct TensorLeaves {
    int64_t first, numel;
    DSOPT_HD int64_t count() const { return leaves_of(numel); }
    DSOPT_HD int64_t end() const { return first + count(); }
};

/// An array of a step and its format. Kernels load and store it through the codec of its format: visit(Dtype).
struct Slot {
    void *data; // NULL: the step has no such array
    Dtype format;
    explicit DSOPT_HD operator bool() const { return data != nullptr; }
};
DSOPT_HD Slot slot_of(const dsopt_tensor &tensor) { return {tensor.data, Dtype(tensor.dtype)}; }
/// A moment of a step, in any format.
struct Moment {
    void *data;   // NULL: the rule has no such moment
    float *scale; // one per block; NULL if the format has none
    Format format;
    explicit DSOPT_HD operator bool() const { return data != nullptr; }
};
/// Arrays of a tensor in a step. The arrays of the rule's state begin at kMoment, in the order of its MomentList.
enum SlotIndex : uint8_t {
    kGrad,   // NULL with `present`: the gradient is zero
    kWeight, // the array that the rule updates: the master, or the parameter itself, with or without a remainder
    kCopy,   // the low-precision parameter of a master
    kOut,
    kMoment
};
constexpr int kSlots = kMoment + kMoments;

/// The kernels that update a tensor in a step.
enum class Owner : uint8_t {
    none,     // not updated: no gradient, or the step does not include its algorithm. Outputs are still written.
    update,   // StepKernels
    exchange, // OneBitStepKernels
    matrix,   // MatrixStepKernels
};

/// One tensor of a step.
struct TensorJob {
    void *data[kSlots];
    float *scale[kMoments]; // of moments whose format has scales
    uint16_t *remainder;    // lower halves of masters whose rounded upper halves are weight(); NULL: none
    uint64_t random_key;    // the tensor's key, for stochastic rounding; adjacent to range.begin: one load on CUDA
    // Kernels process the range, which begins at a leaf of the registered tensor, and sums are folded over all leaves
    // of that tensor. The range is the whole tensor unless other ranks have the other elements, because state is sharded.
    Range range;         // elements of the registered tensor that are in `data`
    int32_t first_leaf;  // index of the range's first leaf
    int32_t position;    // of that leaf among the leaves that passes of this rank visit
    TensorLeaves leaves; // of the registered tensor
    int32_t group;
    int32_t expert;     // 0 = dense
    int32_t trust_slot; // slot in StepPlan::shards; -1: the trust ratio does not depend on other ranks
    /// Index of the entry of StepPlan::step that counts this tensor's steps: its step number is step[counter] +
    /// ordinal.
    int32_t counter;
    uint8_t ordinal;
    uint8_t advance;                          // added to StepPlan::step[index of this tensor] by a step that is taken
    Owner owner;                              // none unless `present`
    bool present;                             // takes part in this step
    bool has_master;                          // its weight is a master, or becomes one together with the remainder
    bool in_norm;                             // its squares are added to the norm on this rank
    bool stochastic;                          // bf16 weights without a master: stochastic rounding
    bool zeroes;                              // its gradient is set to zero once it has been read
    Format formats[(kSlots + 8) / 8 * 8 - 1]; // of the slots; no padding: tables of jobs are compared byte by byte
    /// It has a remainder, or a moment in a format other than F32. Loops over fp32 moments do not apply.
    bool stored;

    /// Moments may have this form unless `stored`.
    DSOPT_HD Slot slot(int index) const { return {data[index], Dtype(formats[index])}; }
    /// Returns the index of the range's first element in the registered tensor.
    DSOPT_HD int64_t begin() const { return (first_leaf - leaves.first) * kLeaf; }
    DSOPT_HD Slot grad() const { return slot(kGrad); }
    DSOPT_HD Slot weight() const { return slot(kWeight); }
    DSOPT_HD Slot copy() const { return slot(kCopy); }
    DSOPT_HD Slot out() const { return slot(kOut); }
    DSOPT_HD Slot moment(int k) const { return slot(kMoment + k); }
    DSOPT_HD Moment stored_moment(int k) const { return {data[kMoment + k], scale[k], formats[kMoment + k]}; }
    void set(int index, Slot slot) {
        data[index] = slot.data;
        formats[index] = Format(slot.format);
    }
};
static_assert(std::has_unique_object_representations_v<TensorJob> && sizeof(TensorJob) <= 184);

/// Sums of a LAMB tensor that is sharded over model ranks, which all-reduce them.
struct ShardSums {
    double weights,
        updates;   // sums of squares; in compressed steps of 1-bit LAMB, those of the update without and with decay
    double shards; // number of shards that take part in the step; 0: the trust ratio is unchanged
};
/// Sums of all such tensors, one slot per tensor.
struct ShardTable {
    ShardSums *sums;
    int64_t count;     // 0 if no tensor is sharded, or all shards are on one rank
    int64_t exchanged; // number of slots whose tensors OneBitStepKernels updates in this step
    /// 1-bit LAMB: one factor per slot, after the sums. The all-reduce takes the largest factor of each slot.
    DSOPT_HD double *factors() const { return reinterpret_cast<double *>(sums + count); }
    size_t bytes() const { return size_t(count) * (sizeof(ShardSums) + sizeof(double)); }
};

/// Sums of squares of gradients before unscaling: one row per group and a last row over all groups; one column for
/// dense parameters and one per expert comm. The table is followed by a value that ranks agree on: the number of ranks
/// with a reason to skip.
struct NormTable {
    double *values;
    int64_t groups, classes;
    DSOPT_HD int64_t cells() const { return (groups + 1) * classes; }
    DSOPT_HD int64_t size() const { return cells() + 1; }
    DSOPT_HD double &square(int64_t group, int64_t type) const { return values[group * classes + type]; }
    DSOPT_HD double &over_groups(int64_t type) const { return square(groups, type); }
    DSOPT_HD double &reasons() const { return values[cells()]; }
    /// Returns the sum of a row, from column `first` on. `first` = 1: experts only.
    DSOPT_HD double total(int64_t group, int64_t first = 0) const {
        double sum = 0;
        for (int64_t type = first; type < classes; ++type) sum += square(group, type);
        return sum;
    }
    /// Returns the message of all_reduce_norms(), which is after the table: a column and the reasons.
    DSOPT_HD double *message() const { return values + size(); }
    int64_t message_size() const { return groups + 2; }
    int64_t size_with_message() const { return size() + message_size(); }
    /// Returns kLanes lanes per cell, after the message, for fold_gradients().
    double *lanes() const { return values + size_with_message(); }
    int64_t size_with_lanes() const { return size_with_message() + cells() * kLanes; }
};

/// The original's fp16 wrappers, whose order of operations compat mode follows.
enum class Wrapper : uint8_t { none, fused, unfused };

/// Results of pass 1 on this rank, and this rank's reasons to skip the step.
struct InspectResult {
    int64_t nonfinite, first_bad;
    int32_t kind;    // of the non-finite elements in the first bad tensor: 0 none, 1 Inf, 2 NaN
    int32_t reasons; // DSOPT_SKIP_...
};

/// Results of a step, in backend memory. Written by the step, read by the host on request. `reasons` are those for
/// which the step was skipped.
struct Outcome : InspectResult {
    int64_t total_skipped, skipped_in_row; // of dsopt_optimizer_step; kept from step to step
    double grad_norm, dense_norm, expert_norm, weight_norm, update_norm, divisor, scale_used;
    double ms[DSOPT_MS_PHASES];
    int32_t skipped;
    int32_t reserved;
};

/// Words that the kernels of a step share, in backend memory.
struct StepFlags {
    // Devices: for each kernel with a last block, the number of finished blocks, and the number of leaves that have
    // been distributed dynamically. The last block resets both to 0.
    struct Blocks {
        uint32_t done, distributed;
    } inspect, update, update_weights;
    int32_t skip; // nonzero: the step changes nothing
    int32_t reserved;
    InspectResult found;
};

/// Scalars that the caller has in backend memory, as in dsopt_step; NULL = not given.
struct CallerScalars {
    const float *lr, *hyper, *grad_scale, *grad_norms;
    const int32_t *skip;
    bool any() const {
        return lr != nullptr || hyper != nullptr || grad_scale != nullptr || grad_norms != nullptr || skip != nullptr;
    }
};

/// The scaler of a step, in backend memory; all NULL without a scaler.
struct PlannedScaler {
    float *scale;
    ScalerState *state;
    ScalerRules rules;
};

/// Limits to which gradients are clipped.
struct Limits {
    double max_norm; // 0 = off
    float max_value; // INFINITY = off
};

class StepCache;
struct MatrixCounts;
struct MatrixPlan;
struct OwnedLayout;

/// Numbers that determine the sizes of a step's memory.
struct StepShape {
    int64_t tensors, groups, leaves;
    bool onebit;                  // there is a group of the 1-bit family
    bool has_slice_jobs;          // StepPlan::slice_jobs may be set
    const OwnedLayout *exchange;  // NULL: no other ranks
    const MatrixCounts *matrices; // NULL: no rule has Passes::matrix
    size_t table_bytes;           // of the StepTable
};

/// The part of a call's plan that is identical to the previous call's plan.
enum class Reuse : uint8_t {
    nothing,           // nothing is known to be identical
    all_but_addresses, // all except the addresses of gradients; their number and types are the same
    all
};

/// How a step runs. The results do not depend on this.
struct Execution {
    void *stream;
    Parallel parallel;
    int64_t chunk;          // minimum number of elements that a thread processes at once
    void *device_workspace; // workspace of the device, of DeviceKernels::device_workspace_bytes(shape) bytes
    StepShape shape;
    StepCache *cache; // data that the device keeps between steps; NULL in `apply`
    bool timing;
    /// States which tables of tensors and groups, and which data that `device_workspace` derives from them, are
    /// identical to those of the last step in `cache`.
    Reuse reuse;
};

struct OneBitPlan;

/// Options of the optimizer that determine what a step does.
struct StepPolicy {
    Wrapper wrapper;
    bool read_gradients; // pass 1: count non-finite elements, sum squares
    bool skip_nonfinite;
    bool report_norms;
    bool reduces; // there is a group whose rule has Passes::reduced
    bool stored;  // there is a tensor with TensorJob::stored
    bool early;   // nothing decides about the step: DSOPT_OPTIMIZER_EARLY_UPDATE
    bool plain;   // there is a tensor without, or no tensor at all
    bool dry;     // learning rates are 0
};

/// Results of the leaves of all tensors, one entry per leaf.
struct LeafResults {
    double *sums_a, *sums_b;
    int64_t *bad; // number of non-finite elements, plus 2^32 times the number of NaNs
};
/// Everything that the kernels of one step need; owns nothing. `jobs` and `groups` are in host memory (StepTable),
/// everything else is in backend memory.
struct StepPlan {
    TensorJob *jobs; // begins a StepTable, whose other arrays follow
    /// The 1-bit family in two levels, unless state is sharded: jobs whose ranges are in this rank's slice, with the
    /// node's gradients, for pass 1 and OneBitPass::feed. NULL: `jobs`.
    TensorJob *slice_jobs;
    int64_t count;
    const Hyper *groups;
    int64_t group_count;
    /// DSOPT_STEP_... With OUT_ONLY, copy() is NULL, and weight() is written only if it is a master.
    uint32_t flags;
    StepPolicy policy;
    Limits limits;
    CallerScalars caller;
    PlannedScaler scaler;
    int32_t *step;              // one count per tensor: see TensorJob::counter
    const OneBitPlan *onebit;   // plan of the 1-bit family, or NULL
    const MatrixPlan *matrices; // or NULL
    float *trust_ratio;         // one per tensor, or NULL
    float *report;              // or NULL
    Outcome *outcome;
    Execution execution;
    // Workspace, partitioned by StepMemory.
    StepFlags *control;
    Scalars *scalars; // one per tensor
    double *divisors; // one per group
    NormTable norms;
    LeafResults leaf;
    /// Number of leaves of the ranges of `jobs`, without those of matrices in sharded state, which come last and which
    /// only their own passes and pass 1 visit; and number of the leaves that pass 1 and OneBitPass::feed visit.
    int64_t visited, inspected;
    ShardTable shards;
};

} // namespace dsopt
