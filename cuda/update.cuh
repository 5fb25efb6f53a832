// SPDX-License-Identifier: Apache-2.0
// Code that the kernels of pass 2 share with the kernels of the 1-bit family: the tensor of a leaf in shared memory,
// packs of its arrays, and stores of new weights.
#pragma once
#include "reduce.cuh"
#include "rules/all.h"
#include "rules/rounding.h"

namespace dsopt::gpu {

/// Software pipeline of a block's leaves. In round r the block processes leaf r, copies the job of the tensor of leaf r
/// + 1, loads the tensor index of leaf r + 2, and receives the index of leaf r + 3. So a block does not wait for the
/// table of jobs, which long lists evict from the L2 cache.
struct LeavesAhead {
    static constexpr unsigned rounds = 4, words = sizeof(TensorJob) / sizeof(uint64_t);
    static_assert(words * sizeof(uint64_t) == sizeof(TensorJob) && words <= 32);
    uint32_t leaf[rounds]; // counted from the last leaf if DevicePlan::backwards
    int32_t tensor[rounds];
    uint64_t job[words]; // of the next tensor
};

/// Formats of a tensor's arrays for which loops are compiled. any: each array's format is read from the job. f32: all
/// are fp32. f16, bf16: gradient, copy and output have 16 bits, weights and moments are fp32, as in mixed precision.
enum class FormatSet : uint8_t { any, f32, f16, bf16 };
/// The arrays of a job, with the formats of such a set as compile-time constants.
template <FormatSet Set> struct KnownSlots {
    static constexpr Dtype low = Set == FormatSet::f16 ? Dtype::f16 : Set == FormatSet::bf16 ? Dtype::bf16 : Dtype::f32;
    const TensorJob &job;
    __device__ __forceinline__ Slot slot(int index, Dtype known) const {
        return {job.data[index], Set == FormatSet::any ? Dtype(job.formats[index]) : known};
    }
    __device__ __forceinline__ Slot grad() const { return slot(kGrad, low); }
    __device__ __forceinline__ Slot weight() const { return slot(kWeight, Dtype::f32); }
    __device__ __forceinline__ Slot copy() const { return slot(kCopy, low); }
    __device__ __forceinline__ Slot out() const { return slot(kOut, low); }
    __device__ __forceinline__ Slot moment(int k) const { return slot(kMoment + k, Dtype::f32); }
};
/// True if a tensor may need stochastic rounding. Only bf16 weights without a master need it, and only the set `any`
/// has such weights.
template <class Slots> constexpr bool kRoundsStochastically = true;
template <FormatSet Set> constexpr bool kRoundsStochastically<KnownSlots<Set>> = Set == FormatSet::any;
/// Returns the set that matches the formats of all arrays of a job; a missing array matches any format.
__device__ inline FormatSet formats_of(const TensorJob &job) {
    const Dtype low = job.grad() ? job.grad().format : Dtype::f32;
    bool known = true;
    unrolled<kSlots>([&](int k) INLINED {
        const bool is_low = k == kGrad || k == kCopy || k == kOut;
        known = known && (!job.slot(k) || job.formats[k] == Format(is_low ? low : Dtype::f32));
    });
    if (!known) return FormatSet::any;
    return low == Dtype::f32 ? FormatSet::f32 : low == Dtype::f16 ? FormatSet::f16 : FormatSet::bf16;
}

/// Data of the tensor of a block's current leaf, in shared memory.
struct SharedTensor {
    TensorJob job;
    Hyper hyper;     // of `group`
    Scalars scalars; // for `group` and `step`, which neighbouring tensors often share
    float trust;
    int64_t step;
    int32_t tensor, group;
    Rule rule;
    bool aligned;      // all arrays of the job are aligned
    FormatSet formats; // of its arrays
    LeavesAhead ahead; // a member, so that one register has the address of all shared data
};

__device__ inline void find_scalars(const DevicePlan &d, int32_t tensor, SharedTensor &s) {
    const StepPlan &plan = d.plan;
    const int32_t group = s.job.group;
    const int64_t step = step_of(plan, s.job);
    if (plan.trust_ratio != nullptr) s.trust = plan.trust_ratio[tensor];
    if (s.step == step && s.group == group) return;
    const double divisor = d.decided ? plan.divisors[group] : 1.0;
    s.hyper = hyper_of(plan, group);
    forget_shared(); // in registers its numbers would be spilled
    s.scalars = make_scalars(s.hyper, step, divisor, plan.limits.max_value);
    s.rule = plan.groups[group].rule;
    s.step = step;
    s.group = group;
}

/// True if all arrays of a tensor are aligned to 16 bytes, for accesses of four elements.
__device__ __forceinline__ bool all_aligned(const TensorJob &job) {
    uintptr_t all = 0;
    unrolled<kSlots>([&](int k) INLINED { all |= reinterpret_cast<uintptr_t>(job.data[k]); });
    all |= reinterpret_cast<uintptr_t>(job.remainder);
    return (all & 15) == 0;
}

/// Sets how the arrays of a tensor are loaded.
__device__ __forceinline__ void find_layout(SharedTensor &s) {
    s.aligned = all_aligned(s.job);
    s.formats = formats_of(s.job);
}

/// Returns the position of the index-th leaf of a pass.
__device__ __forceinline__ uint32_t position_at(const DevicePlan &d, uint32_t index) {
    return d.first_position + (d.backwards ? d.leaves - 1 - index : index);
}

/// Calls body(where) for this block's leaves, distributed dynamically, with the tensor's job and scalars in `s`. For a
/// new tensor, thread 0 also calls find(tensor).
template <class Find, class Body>
__device__ __forceinline__ void for_shared_leaves(const DevicePlan &d, const LeafDistribution &distribution,
                                                  SharedTensor &s, const Find &find, const Body &body) {
    LeavesAhead &ahead = s.ahead;
    constexpr unsigned rounds = LeavesAhead::rounds;
    const auto copy_job = [&](int32_t tensor) INLINED {
        const unsigned word = thread_read_here();
        if (word < LeavesAhead::words)
            copy_async(ahead.job + word, reinterpret_cast<const uint64_t *>(d.plan.jobs + tensor) + word);
    };
    const auto load_tensor = [&](unsigned round) INLINED {
        const uint32_t index = ahead.leaf[round % rounds];
        if (index < d.leaves) copy_async(&ahead.tensor[round % rounds], d.tensor_of_leaf + position_at(d, index));
    };
    if (threadIdx.x == 0) {
        s.tensor = s.group = -1, s.step = -1, s.trust = 1;
        for (unsigned round = 0; round < 3; ++round) ahead.leaf[round] = blockIdx.x + round * gridDim.x;
        load_tensor(0);
        load_tensor(1);
        wait_for_copies();
    }
    __syncthreads();
    if (ahead.leaf[0] < d.leaves) copy_job(ahead.tensor[0]);
    wait_for_copies();
    for (unsigned round = 0; ahead.leaf[round % rounds] < d.leaves; ++round) {
        const uint32_t position = position_at(d, ahead.leaf[round % rounds]);
        const int32_t tensor = ahead.tensor[round % rounds];
        if (tensor != s.tensor) {
            __syncthreads(); // all threads have compared, and the copies of warp 0 are complete
            if (threadIdx.x < 32) {
                if (threadIdx.x < LeavesAhead::words)
                    reinterpret_cast<uint64_t *>(&s.job)[threadIdx.x] = ahead.job[threadIdx.x];
                __syncwarp();
                if (threadIdx.x == 1) find_layout(s); // not thread 0, which needs all of its registers below
                __syncwarp();
                if (threadIdx.x == 0) {
                    s.tensor = tensor;
                    find_scalars(d, tensor, s);
                    find(tensor);
                }
            }
            __syncthreads();
        }
        uint32_t new_leaf = 0;
        if (threadIdx.x < 32) {
            if (threadIdx.x == 0) {
                const uint32_t last = ahead.leaf[(round + 2) % rounds];
                new_leaf = last < d.leaves ? distribution.after(last, gridDim.x, 3) : UINT32_MAX;
                load_tensor(round + 2);
            }
            if (ahead.leaf[(round + 1) % rounds] < d.leaves && ahead.tensor[(round + 1) % rounds] != tensor)
                copy_job(ahead.tensor[(round + 1) % rounds]);
        }
        body(Leaf(s.job, position));
        if (threadIdx.x == 0) ahead.leaf[(round + 3) % rounds] = new_leaf;
        wait_for_copies();
        __syncthreads();
    }
}

/// True if the step is skipped. In a step without a decision kernel, CallerScalars::skip is the only reason.
__device__ inline bool skipped(const DevicePlan &d) {
    if (d.decided) return d.plan.control->skip != 0;
    return d.plan.caller.skip != nullptr && *d.plan.caller.skip != 0;
}

/// Shared memory for a leaf's values, which sum_tiles() sums. Used only in steps that need sums. The two tiles are
/// contiguous.
struct Tiles {
    float *a, *b; // old weight; change, or LAMB's update
};

// `slots`: a TensorJob, or its KnownSlots.
template <int V, class Slots> __device__ __forceinline__ Pack<V> fetch_gradient(const Slots &slots, int64_t i) {
    return slots.grad() ? fetch<V>(slots.grad(), i) : Pack<V>{};
}

/// Inputs of a rule for V neighbours. Loaded in the format of memory first, so that all loads are in flight before the
/// first conversion waits.
template <int V> struct Inputs {
    Pack<V> g, p, moment[kMoments], onebit; // `onebit`: an array of the 1-bit family
    /// Converts everything to fp32. A missing array is zero in any format.
    template <class Slots> __device__ __forceinline__ void convert_all(const Slots &slots) {
        g = convert_to_f32(g, slots.grad().format);
        p = convert_to_f32(p, slots.weight().format);
        unrolled<kMoments>([&](int k) INLINED { moment[k] = convert_to_f32(moment[k], slots.moment(k).format); });
    }
    template <int Count, class Slots>
    __device__ __forceinline__ void store_moments(const Slots &slots, int64_t i) const {
        unrolled<Count>([&](int k) INLINED { store(moment[k], slots.moment(k), i); });
    }
};
/// Loads the inputs of a rule. A moment that the rule does not have costs neither registers nor memory traffic.
template <int V, int Moments, bool Gradient = true, class Slots>
__device__ __forceinline__ Inputs<V> load_inputs(const Slots &slots, int64_t i) {
    Inputs<V> t{};
    if constexpr (Gradient) t.g = fetch_gradient<V>(slots, i);
    t.p = fetch<V>(slots.weight(), i);
    unrolled<Moments>([&](int k) INLINED { t.moment[k] = fetch<V>(slots.moment(k), i); });
    t.convert_all(slots);
    return t;
}
/// Calls call(moment...) for the k-th neighbour.
template <int Count, int V, class Call>
__device__ __forceinline__ void with_moments_of(Inputs<V> &t, int k, const Call &call) {
    [&]<int... M>(std::integer_sequence<int, M...>) INLINED { call(t.moment[M].at[k]...); }
    (std::make_integer_sequence<int, Count>{});
}

/// Rounds the new weights of a pack stochastically if required, and stores them to weight, copy and output. Zeroes the
/// gradient if required. `old`: the previous weights, for DSOPT_STEP_DELTA.
template <int V, class Slots>
__device__ __forceinline__ void store_weights(const StepPlan &plan, const SharedTensor &s, const Slots &slots,
                                              Pack<V> &p, const Pack<V> &old, int64_t i) {
    const TensorJob &job = s.job;
    if (kRoundsStochastically<Slots> && job.stochastic) {
        const uint64_t key = rounding_key(job.random_key, s.step);
        unrolled<V>([&](int k) INLINED {
            p.at[k] = round_stochastic_bf16(p.at[k], random_bits(key, uint64_t(job.range.begin + i + k)));
        });
    }
    if (!(plan.flags & DSOPT_STEP_OUT_ONLY) || job.has_master) store(p, slots.weight(), i);
    if (job.copy()) store(p, slots.copy(), i);
    if (job.out()) store(plan.flags & DSOPT_STEP_DELTA ? p - old : p, slots.out(), i);
    if (job.zeroes) store(Pack<V>{}, slots.grad(), i);
}

/// Stores both sums of a leaf. The tiles may be overwritten after the call.
__device__ __forceinline__ void sum_tiles(const StepPlan &plan, const TensorJob &job, const Leaf &where,
                                          const Tiles &tiles) {
    __syncthreads();
    sum_tiles<2>(tiles.a, where.n, [&](int k, double sum) INLINED {
        (k == 0 ? plan.leaf.sums_a : plan.leaf.sums_b)[leaf_index(job, where)] = sum;
    });
}

/// Handles V neighbours of a tensor that the step does not update: writes the output and zeroes the gradient, if
/// requested.
template <int V> __device__ __forceinline__ void unchanged_pack(const StepPlan &plan, const TensorJob &job, int64_t i) {
    if (job.out()) store(plan.flags & DSOPT_STEP_DELTA ? Pack<V>{} : load<V>(job.weight(), i), job.out(), i);
    if (job.zeroes) store(Pack<V>{}, job.grad(), i);
}

/// Advances the counts of all tensors. `first`, `stride`: index of the calling thread and number of threads, in a block
/// or in the grid. Processes four tensors at a time, so that their loads overlap.
__device__ __forceinline__ void count_steps(const StepPlan &plan, int64_t first, int64_t stride) {
    for (; first < plan.count; first += 4 * stride) {
        int32_t advance[4];
        unrolled<4>([&](int k) INLINED {
            const int64_t i = first + k * stride;
            advance[k] = i < plan.count ? plan.jobs[i].advance : 0;
        });
        unrolled<4>([&](int k) INLINED { advance_count(plan, first + k * stride, advance[k]); });
    }
}
/// Calls body(formula) with the formula of a rule of this kind of passes; nothing for other rules.
template <Passes Kind, class Body> __device__ __forceinline__ void visit_rule(Rule rule, const Body &body) {
    visit(rule, [&](auto formula) INLINED {
        if constexpr (decltype(formula)::type::passes == Kind) body(formula);
    });
}

/// True if a separate kernel advances the counts: in a step of 10,000 tensors, one block would take ten rounds of loads
/// from the table of jobs, one after the other.
__host__ __device__ __forceinline__ bool has_count_kernel(const StepPlan &plan) { return plan.count > 4 * kThreads; }

/// Runs in the last block of the last kernel: advances the counters of few tensors, computes norms and writes the
/// report.
__device__ inline void finish(const DevicePlan &d, bool skip) {
    const StepPlan &plan = d.plan;
    if (!skip && !has_count_kernel(plan)) count_steps(plan, threadIdx.x, kThreads);
    if (!skip && plan.policy.report_norms && plan.count != 0) { // in the order of fold_updates()
        for_tensors(d, [&](int32_t i, int32_t leaves, auto fold) INLINED {
            const TensorJob &job = plan.jobs[i];
            const bool counts = job.present && leaves != 0;
            const double weights = counts ? fold.sum(plan.leaf.sums_a + job.leaves.first, leaves) : 0.0;
            if (fold.lead) d.tensor_squares[i] = weights;
            const double updates = counts ? fold.sum(plan.leaf.sums_b + job.leaves.first, leaves) : 0.0;
            if (fold.lead) d.tensor_updates[i] = counts ? update_weight(plan, i) * updates : 0.0;
        });
        __syncthreads();
        if (threadIdx.x < 32) { // stored to memory: in registers the sums would be spilled
            const LeafFold<true> fold{threadIdx.x == 0};
            const double weights = fold.sum(d.tensor_squares, int32_t(plan.count));
            if (fold.lead) d.tensor_squares[0] = weights;
            const double updates = fold.sum(d.tensor_updates, int32_t(plan.count));
            if (fold.lead) d.tensor_updates[0] = updates;
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (!d.decided) {
        clear_norms(plan);
        decide(plan);
    }
    if (!skip && plan.policy.report_norms) {
        d.plan.outcome->weight_norm = plan.count != 0 ? sqrt(d.tensor_squares[0]) : 0.0;
        d.plan.outcome->update_norm = plan.count != 0 ? sqrt(d.tensor_updates[0]) : 0.0;
    }
    write_report(plan);
}

/// Runs in the last block of the last kernel of pass 2.
__device__ inline void end_update(const DevicePlan &d) {
    if (d.tail == Tail::none) return;
    const bool skip = skipped(d);
    if (d.tail == Tail::finish) return finish(d, skip);
    if (skip) return;
    for_tensors(d, [&](int32_t i, int32_t, auto fold) INLINED { find_trust(d.plan, i, fold); });
}

} // namespace dsopt::gpu
