// SPDX-License-Identifier: Apache-2.0
// What one step is, as every backend reads it: plain data, nothing owned.
#pragma once
#include "base/parallel.h"
#include "base/range.h"
#include "rules/lane_sum.h"
#include "rules/loss_scale.h"
#include "rules/scalars.h"
#include <type_traits>

namespace dsopt {

/// All reductions are cut into leaves of this many elements from each tensor's start, whatever the thread count.
constexpr int64_t kLeaf = 4096;
DSOPT_HD constexpr int64_t leaves_of(int64_t numel) { return (numel + kLeaf - 1) / kLeaf; }

/// The leaves of a tensor of `numel` elements, whose sums are folded. `first` is the number of the first one among the
/// leaves of all tensors.
struct TensorLeaves {
    int64_t first, numel;
    DSOPT_HD int64_t count() const { return leaves_of(numel); }
    DSOPT_HD int64_t end() const { return first + count(); }
};

/// How an array of a step is stored. Kernels load and store it through the codec of its format: visit(Dtype).
struct Slot {
    void *data; // NULL: the step has no such array
    Dtype format;
    explicit DSOPT_HD operator bool() const { return data != nullptr; }
};
DSOPT_HD Slot slot_of(const dsopt_tensor &tensor) { return {tensor.data, Dtype(tensor.dtype)}; }
/// The arrays of a tensor in a step. Those of the rule's state begin at kMoment, in the order of its MomentList.
enum SlotIndex : uint8_t {
    kGrad,   // no array, but `present`: zeros
    kWeight, // what the rule updates: the master, or the parameter itself
    kCopy,   // the low-precision parameter of a master
    kOut,
    kMoment
};
constexpr int kSlots = kMoment + kMoments;

/// Which kernels update a tensor in a step.
enum class Owner : uint8_t {
    none,     // none: it has no gradient, or this step leaves its algorithm out. Outputs are written all the same.
    update,   // StepLoops
    exchange, // OneBitLoops
};

/// One tensor of a step.
struct TensorJob {
    void *data[kSlots];
    uint64_t random_key; // the tensor's key, for stochastic rounding: in front of range.begin, one load on CUDA
    // Kernels loop over the range, which begins with a leaf of the registered tensor, and sums are folded over all of
    // that tensor. These are equal today. CUDA kernels rely on it: they visit every leaf of the step, and the map from
    // leaves to tensors has only leaves of ranges.
    Range range;         // of the tensor of that name: the elements of `data`
    int64_t first_leaf;  // of the range
    TensorLeaves leaves; // of the registered tensor
    int32_t group;
    int32_t expert;     // 0 = dense
    int32_t trust_slot; // of StepPlan::shards; -1: no other rank has a part in its trust ratio
    /// Index of the tensor whose entry of StepPlan::step this one counts in; this is its step number
    /// step[counter] + ordinal.
    int32_t counter;
    uint8_t ordinal;
    uint8_t advance;                     // what its own count gains by a step that is taken
    Owner owner;                         // none unless `present`
    bool present;                        // takes part in this step
    bool has_master;                     // its weight is one
    bool in_norm;                        // its squares count on this rank
    bool stochastic;                     // bf16 weights without a master are rounded at random
    bool zeroes;                         // its gradient is set to zero once it has been read
    Dtype formats[(kSlots + 7) / 8 * 8]; // of the slots, then zeros: tables of jobs are compared byte by byte

    DSOPT_HD Slot slot(int index) const { return {data[index], formats[index]}; }
    DSOPT_HD Slot grad() const { return slot(kGrad); }
    DSOPT_HD Slot weight() const { return slot(kWeight); }
    DSOPT_HD Slot copy() const { return slot(kCopy); }
    DSOPT_HD Slot out() const { return slot(kOut); }
    DSOPT_HD Slot moment(int k) const { return slot(kMoment + k); }
    void set(int index, Slot slot) {
        data[index] = slot.data;
        formats[index] = slot.format;
    }
};
static_assert(std::has_unique_object_representations_v<TensorJob> && sizeof(TensorJob) <= 144);

/// Sums that model ranks add up for a LAMB tensor that is sharded over them.
struct ShardSums {
    double weights, updates; // of squares; in compressed steps of 1-bit LAMB of the update without and with decay
    double shards;           // that take part in the step; none: the trust ratio stays
};
/// Of all such tensors, one slot each.
struct ShardTable {
    ShardSums *sums;
    int64_t count;     // 0 where no tensor is sharded, or they all are on one rank
    int64_t exchanged; // of these, the tensors that OneBitLoops update in this step
    /// 1-bit LAMB, behind the sums: of every slot the largest counts.
    DSOPT_HD double *factors() const { return reinterpret_cast<double *>(sums + count); }
    size_t bytes() const { return size_t(count) * (sizeof(ShardSums) + sizeof(double)); }
};

/// Sums of squares of gradients as given: a row for each group and one for all of them, a column for dense parameters
/// and one for each expert comm. Behind them, what ranks agree on: how many have a reason to skip.
struct NormTable {
    double *at;
    int64_t groups, classes;
    DSOPT_HD int64_t cells() const { return (groups + 1) * classes; }
    DSOPT_HD int64_t size() const { return cells() + 1; }
    DSOPT_HD double &square(int64_t group, int64_t type) const { return at[group * classes + type]; }
    DSOPT_HD double &of_all(int64_t type) const { return square(groups, type); }
    DSOPT_HD double &reasons() const { return at[cells()]; }
    /// Of a row; from column 1 on: of the experts.
    DSOPT_HD double total(int64_t group, int64_t first = 0) const {
        double sum = 0;
        for (int64_t type = first; type < classes; ++type) sum += square(group, type);
        return sum;
    }
    /// Behind the table: what agree_on_norms() sends of it, a column and the reasons.
    DSOPT_HD double *message() const { return at + size(); }
    int64_t message_size() const { return groups + 2; }
    int64_t size_with_message() const { return size() + message_size(); }
    /// Behind the message: kLanes for each cell, for fold_gradients().
    double *lanes() const { return at + size_with_message(); }
    int64_t size_with_lanes() const { return size_with_message() + cells() * kLanes; }
};

/// The original's fp16 wrappers, whose order of events compat mode follows.
enum class Wrapper : uint8_t { none, fused, unfused };

/// What pass 1 found on this rank, and why the rank would skip the step.
struct Found {
    int64_t nonfinite, first_bad;
    int32_t kind;    // of what is not finite in the first bad tensor: 0 nothing, 1 Inf, 2 NaN
    int32_t reasons; // DSOPT_SKIP_...
};

/// What a step tells, in backend memory. Written by the step, read by the host when it asks. Its reasons are those for
/// which it was skipped.
struct Outcome : Found {
    int64_t total_skipped, skipped_in_row; // of dsopt_optimizer_step; carried on from step to step
    double grad_norm, dense_norm, expert_norm, weight_norm, update_norm, divisor, scale_used;
    double ms[DSOPT_MS_PHASES];
    int32_t skipped;
    int32_t reserved;
};

/// Words that the loops of a step share, in backend memory.
struct Control {
    // Of a device, for each kernel that has a last block: blocks that are done, and leaves that are taken. The last
    // block sets them back to 0.
    struct Blocks {
        uint32_t done, taken;
    } inspect, update, update_weights;
    int32_t skip; // nonzero: the step changes nothing
    int32_t reserved;
    Found found;
};

/// Scalars that the caller has in backend memory, as in dsopt_step; NULL = not given.
struct GivenScalars {
    const float *lr, *hyper, *grad_scale, *grad_norms;
    const int32_t *skip;
    bool any() const {
        return lr != nullptr || hyper != nullptr || grad_scale != nullptr || grad_norms != nullptr || skip != nullptr;
    }
};

/// The scaler of a step, in backend memory; all NULL without one.
struct PlannedScaler {
    float *scale;
    ScalerState *state;
    ScalerRules rules;
};

/// Gradients are clipped to these.
struct Limits {
    double max_norm; // 0 = off
    float max_value; // INFINITY = off
};

class StepCache;
struct OwnedLayout;

/// The memory of a step has sizes that follow from these numbers.
struct StepShape {
    int64_t tensors, groups, leaves;
    bool onebit;                 // with a group of the 1-bit family
    const OwnedLayout *exchange; // NULL: no other ranks
};

/// How much of a call is that of the call before it.
enum class Repeats : uint8_t {
    nothing,        // that is known
    all_but_places, // of gradients, which are as many, and of the same types
    all
};

/// How a step runs. What it does to tensors does not follow from this.
struct Execution {
    void *stream;
    Parallel parallel;
    int64_t chunk; // elements that a thread takes at once, at least
    void *extra;   // workspace of the device, Loops::extra_bytes(shape) long
    StepShape shape;
    StepCache *cache; // what the device keeps between steps; NULL in `apply`
    bool timing;
    Repeats repeats; // tables of tensors and groups, and what of them is in `extra`, from the last step in `cache`
};

struct OneBitPlan;

/// What a step does, by the options of the optimizer.
struct StepPolicy {
    Wrapper wrapper;
    bool read_gradients; // pass 1: count non-finite elements, sum squares
    bool skip_nonfinite;
    bool report_norms;
    bool reduces; // there is a group whose rule has Passes::reduced
    bool dry;     // learning rates are 0
};

/// What the leaves of all tensors leave, one of each a leaf.
struct LeafResults {
    double *sums_a, *sums_b;
    int64_t *bad; // non-finite elements, and those that are NaN times 2^32
};

/// Everything that the loops of one step need; nothing here is owned. `jobs` and `groups` are in host memory
/// (StepTable), all else is in the backend's.
struct StepPlan {
    TensorJob *jobs; // StepTable: what else there is of it is behind them
    int64_t count;
    const Hyper *groups;
    int64_t group_count;
    /// DSOPT_STEP_... OUT_ONLY: `weight` is read only, `copy` is NULL; with a master only the copy is left alone.
    uint32_t flags;
    StepPolicy policy;
    Limits limits;
    GivenScalars given;
    PlannedScaler scaler;
    int32_t *step;            // one count per tensor: see TensorJob::counter
    const OneBitPlan *onebit; // of the 1-bit family, or NULL
    float *trust_ratio;       // one a tensor, or NULL
    float *report;            // or NULL
    Outcome *outcome;
    Execution how;
    // Workspace, cut by StepMemory.
    Control *control;
    Scalars *scalars; // one a tensor
    double *divisors; // one a group
    NormTable norms;
    LeafResults leaf;
    ShardTable shards;
};

} // namespace dsopt
