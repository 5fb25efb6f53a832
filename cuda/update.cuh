// SPDX-License-Identifier: Apache-2.0
// What the kernels of pass 2 share with those of the 1-bit family: the tensor of a leaf in shared memory, packs of its
// arrays, and where new weights go.
#pragma once
#include "reduce.cuh"
#include "rules/all.h"
#include "rules/rounding.h"

namespace dsopt::gpu {

/// The leaves that follow the one at which a block is, by round: in round r the block works on a leaf, copies the job
/// of the tensor of leaf r + 1, loads the index of the tensor of leaf r + 2, and takes leaf r + 3. So a tensor costs a
/// block no wait for its table, which long lists drive out of the L2 cache.
struct LeavesAhead {
    static constexpr unsigned rounds = 4, words = sizeof(TensorJob) / sizeof(uint64_t);
    static_assert(words * sizeof(uint64_t) == sizeof(TensorJob) && words <= 32);
    uint32_t leaf[rounds]; // counted from the last one if DevicePlan::backwards
    int32_t tensor[rounds];
    uint64_t job[words]; // of the next tensor
};

/// Formats of a tensor's arrays for which loops are compiled. any: each array's format is read from the job. f32: all
/// are fp32. f16, bf16: gradient, copy and output have 16 bits, weights and moments are fp32, as in mixed precision.
enum class FormatSet : uint8_t { any, f32, f16, bf16 };
/// The arrays of a job in the formats of such a set, which the compiler knows.
template <FormatSet Set> struct KnownSlots {
    static constexpr Dtype low = Set == FormatSet::f16 ? Dtype::f16 : Set == FormatSet::bf16 ? Dtype::bf16 : Dtype::f32;
    const TensorJob &job;
    __device__ __forceinline__ Slot slot(int index, Dtype known) const {
        return {job.data[index], Set == FormatSet::any ? job.formats[index] : known};
    }
    __device__ __forceinline__ Slot grad() const { return slot(kGrad, low); }
    __device__ __forceinline__ Slot weight() const { return slot(kWeight, Dtype::f32); }
    __device__ __forceinline__ Slot copy() const { return slot(kCopy, low); }
    __device__ __forceinline__ Slot out() const { return slot(kOut, low); }
    __device__ __forceinline__ Slot moment(int k) const { return slot(kMoment + k, Dtype::f32); }
};
/// bf16 weights without a master are rounded at random, and no set but `any` has those.
template <class Slots> constexpr bool kRoundsAtRandom = true;
template <FormatSet Set> constexpr bool kRoundsAtRandom<KnownSlots<Set>> = Set == FormatSet::any;
/// The set that all arrays of a job are of; those that are not there are of any format.
__device__ inline FormatSet formats_of(const TensorJob &job) {
    const Dtype low = job.grad() ? job.grad().format : Dtype::f32;
    bool known = true;
    unrolled<kSlots>([&](int k) INLINED {
        const bool is_low = k == kGrad || k == kCopy || k == kOut;
        known = known && (!job.slot(k) || job.formats[k] == (is_low ? low : Dtype::f32));
    });
    if (!known) return FormatSet::any;
    return low == Dtype::f32 ? FormatSet::f32 : low == Dtype::f16 ? FormatSet::f16 : FormatSet::bf16;
}

/// What a block has in shared memory of the tensor whose leaf it is at.
struct SharedTensor {
    TensorJob job;
    Scalars scalars; // of `group` at `step`: neighbouring tensors often have the same
    float trust;
    int64_t step;
    int32_t tensor, group;
    Rule rule;
    bool aligned;      // all arrays of the job
    FormatSet formats; // of its arrays
    LeavesAhead ahead; // in here so that one register has the address of all
};

__device__ inline void find_scalars(const DevicePlan &d, int32_t tensor, SharedTensor &s) {
    const StepPlan &plan = d.plan;
    const int32_t group = s.job.group;
    const int64_t step = step_of(plan, s.job);
    if (plan.trust_ratio != nullptr) s.trust = plan.trust_ratio[tensor];
    if (s.step == step && s.group == group) return;
    const double divisor = d.decided ? plan.divisors[group] : 1.0;
    s.scalars = make_scalars(hyper_of(plan, group), step, divisor, plan.limits.max_value);
    s.rule = plan.groups[group].rule;
    s.step = step;
    s.group = group;
}

/// True if all arrays of a tensor can be read and written by fours.
__device__ __forceinline__ bool all_aligned(const TensorJob &job) {
    uintptr_t all = 0;
    unrolled<kSlots>([&](int k) INLINED { all |= reinterpret_cast<uintptr_t>(job.data[k]); });
    return (all & 15) == 0;
}

__device__ __forceinline__ uint32_t leaf_at(const DevicePlan &d, uint32_t position) {
    return d.backwards ? d.leaves - 1 - position : position;
}

/// body(where) for the leaves of the block, distributed dynamically, with the tensor's job in shared memory and its
/// scalars found; thread 0 then calls find(tensor), too.
template <class Find, class Body>
__device__ __forceinline__ void for_shared_leaves(const DevicePlan &d, const LeafDistribution &distribution,
                                                  SharedTensor &s, const Find &find, const Body &body) {
    LeavesAhead &ahead = s.ahead;
    constexpr unsigned rounds = LeavesAhead::rounds;
    const auto copy_job = [&](int32_t tensor) INLINED {
        const unsigned word = thread_read_here();
        if (word < LeavesAhead::words)
            copy_async<8>(ahead.job + word, reinterpret_cast<const uint64_t *>(d.plan.jobs + tensor) + word);
    };
    const auto load_tensor = [&](unsigned round) INLINED {
        const uint32_t position = ahead.leaf[round % rounds];
        if (position < d.leaves) copy_async<4>(&ahead.tensor[round % rounds], d.tensor_of_leaf + leaf_at(d, position));
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
        const uint32_t leaf = leaf_at(d, ahead.leaf[round % rounds]);
        const int32_t tensor = ahead.tensor[round % rounds];
        if (tensor != s.tensor) {
            __syncthreads(); // all have compared, and the copies of warp 0 are complete
            if (threadIdx.x < 32) {
                if (threadIdx.x < LeavesAhead::words)
                    reinterpret_cast<uint64_t *>(&s.job)[threadIdx.x] = ahead.job[threadIdx.x];
                __syncwarp();
                if (threadIdx.x == 1) { // another thread than the one below, which needs all of its registers
                    s.aligned = all_aligned(s.job);
                    s.formats = formats_of(s.job);
                }
                __syncwarp();
                if (threadIdx.x == 0) {
                    s.tensor = tensor;
                    find_scalars(d, tensor, s);
                    find(tensor);
                }
            }
            __syncthreads();
        }
        uint32_t taken = 0;
        if (threadIdx.x < 32) {
            if (threadIdx.x == 0) {
                const uint32_t last = ahead.leaf[(round + 2) % rounds];
                taken = last < d.leaves ? distribution.after(last, gridDim.x, 3) : UINT32_MAX;
                load_tensor(round + 2);
            }
            if (ahead.leaf[(round + 1) % rounds] < d.leaves && ahead.tensor[(round + 1) % rounds] != tensor)
                copy_job(ahead.tensor[(round + 1) % rounds]);
        }
        body(Leaf(s.job, leaf));
        if (threadIdx.x == 0) ahead.leaf[(round + 3) % rounds] = taken;
        wait_for_copies();
        __syncthreads();
    }
}

/// A step that nobody had to decide about is skipped for these reasons alone.
__device__ inline bool skipped(const DevicePlan &d) {
    if (d.decided) return d.plan.control->skip != 0;
    return d.plan.given.skip != nullptr && *d.plan.given.skip != 0;
}

/// Where a leaf's values go for its sums, when they are wanted. The two tiles are contiguous.
struct Tiles {
    float *a, *b; // old weight; change, or LAMB's update
};

// `slots`: a TensorJob, or its KnownSlots.
template <int V, class Slots> __device__ __forceinline__ Pack<V> fetch_gradient(const Slots &slots, int64_t i) {
    return slots.grad() ? fetch<V>(slots.grad(), i) : Pack<V>{};
}

/// What a rule reads of V neighbours: first as it is in memory, so that all of it is under way before the first load is
/// waited for.
template <int V> struct Inputs {
    Pack<V> g, p, moment[kMoments], own; // the last one is the 1-bit family's
    /// What is not there is zero, of any format.
    template <class Slots> __device__ __forceinline__ void widen_all(const Slots &slots) {
        g = widen(g, slots.grad().format);
        p = widen(p, slots.weight().format);
        unrolled<kMoments>([&](int k) INLINED { moment[k] = widen(moment[k], slots.moment(k).format); });
    }
    template <int Count, class Slots>
    __device__ __forceinline__ void store_moments(const Slots &slots, int64_t i) const {
        unrolled<Count>([&](int k) INLINED { store(moment[k], slots.moment(k), i); });
    }
};
/// A rule without a moment has neither registers nor traffic for it.
template <int V, int Moments, bool Gradient = true, class Slots>
__device__ __forceinline__ Inputs<V> load_inputs(const Slots &slots, int64_t i) {
    Inputs<V> t{};
    if constexpr (Gradient) t.g = fetch_gradient<V>(slots, i);
    t.p = fetch<V>(slots.weight(), i);
    unrolled<Moments>([&](int k) INLINED { t.moment[k] = fetch<V>(slots.moment(k), i); });
    t.widen_all(slots);
    return t;
}
/// call(moment...) for the k-th neighbour.
template <int Count, int V, class Call>
__device__ __forceinline__ void with_moments_of(Inputs<V> &t, int k, const Call &call) {
    [&]<int... M>(std::integer_sequence<int, M...>) INLINED { call(t.moment[M].at[k]...); }
    (std::make_integer_sequence<int, Count>{});
}

/// The new weights of a pack: rounded at random if so wanted, then to where they go. `old` is for the delta.
template <int V, class Slots>
__device__ __forceinline__ void publish(const StepPlan &plan, const SharedTensor &s, const Slots &slots, Pack<V> &p,
                                        const Pack<V> &old, int64_t i) {
    const TensorJob &job = s.job;
    if (kRoundsAtRandom<Slots> && job.stochastic) {
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

/// The number of a leaf among those of all tensors. Made of what is there: one register less in the loop of a step.
__device__ __forceinline__ int64_t leaf_number(const TensorJob &job, const Leaf &where) {
    return job.first_leaf + where.begin / kLeaf;
}

/// Both sums of a leaf; the tiles may be written again when it returns.
__device__ __forceinline__ void sum_tiles(const StepPlan &plan, const TensorJob &job, const Leaf &where,
                                          const Tiles &tiles) {
    __syncthreads();
    sum_tiles<2>(tiles.a, where.n, [&](int k, double sum) INLINED {
        (k == 0 ? plan.leaf.sums_a : plan.leaf.sums_b)[leaf_number(job, where)] = sum;
    });
}

} // namespace dsopt::gpu
