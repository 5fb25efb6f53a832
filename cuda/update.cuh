// SPDX-License-Identifier: Apache-2.0
// What the kernels of pass 2 share with those of the 1-bit family: the tensor of a leaf in shared memory, packs of its
// arrays, and where new weights go.
#pragma once
#include "reduce.cuh"
#include "rules/all.h"
#include "rules/rounding.h"

namespace dsopt::gpu {

/// What a block has in shared memory of the tensor whose leaf it is at.
struct SharedTensor {
    TensorJob job;
    Scalars scalars; // of `group` at `step`: neighbouring tensors often have the same
    float trust;
    int64_t step;
    int32_t tensor, group;
    Rule rule;
    bool aligned; // all arrays of the job
};

__device__ inline void find_scalars(const DevicePlan &d, int32_t tensor, SharedTensor &s) {
    const StepPlan &plan = d.plan;
    const int32_t group = plan.jobs[tensor].group;
    const int64_t step = step_of(plan, plan.jobs[tensor]);
    if (plan.trust_ratio != nullptr) s.trust = plan.trust_ratio[tensor];
    s.rule = plan.groups[group].rule;
    if (s.step == step && s.group == group) return;
    const double divisor = d.decided ? plan.divisors[group] : 1.0;
    s.scalars = make_scalars(hyper_of(plan, group), step, divisor, plan.limits.max_value);
    s.step = step;
    s.group = group;
}

/// True if all arrays of a tensor can be read and written by fours.
__device__ __forceinline__ bool all_aligned(const TensorJob &job) {
    uintptr_t all = 0;
    unrolled<kSlots>([&](int k) INLINED { all |= reinterpret_cast<uintptr_t>(job.data[k]); });
    return (all & 15) == 0;
}

/// body(leaf, tensor, where) for the block's leaves, with the tensor's job in shared memory and its scalars found;
/// thread 0 then calls find(tensor), too. As long as the tensor is the same nobody waits for the others.
template <class Find, class Body>
__device__ __forceinline__ void for_shared_leaves(const DevicePlan &d, SharedTensor &s, const Find &find,
                                                  const Body &body) {
    if (threadIdx.x == 0) s.tensor = s.group = -1, s.step = -1, s.trust = 1;
    __syncthreads();
    for_leaves_by_block(d, [&](uint32_t leaf, int32_t tensor) INLINED {
        if (tensor != s.tensor) {
            __syncthreads(); // all are done with the one before
            constexpr unsigned words = sizeof(TensorJob) / sizeof(uint64_t);
            static_assert(words * sizeof(uint64_t) == sizeof(TensorJob) && words <= 32);
            if (threadIdx.x < words)
                reinterpret_cast<uint64_t *>(&s.job)[threadIdx.x] =
                    reinterpret_cast<const uint64_t *>(d.plan.jobs + tensor)[threadIdx.x];
            if (threadIdx.x == 0) {
                const TensorJob &job = d.plan.jobs[tensor];
                s.tensor = tensor;
                s.aligned = all_aligned(job);
                find_scalars(d, tensor, s);
                find(tensor);
            }
            __syncthreads();
        }
        body(leaf, tensor, Leaf(s.job, leaf));
    });
}

/// A step that nobody had to decide about is skipped for these reasons alone.
__device__ inline bool skipped(const DevicePlan &d) {
    if (d.decided) return d.plan.control->skip != 0;
    return d.plan.given.skip != nullptr && *d.plan.given.skip != 0;
}

/// Where a leaf's values go for its sums, when they are wanted. One behind the other.
struct Tiles {
    float *a, *b; // old weight; change, or LAMB's update
};

template <int V> __device__ __forceinline__ Pack<V> fetch_gradient(const TensorJob &job, int64_t i) {
    return job.grad() ? fetch<V>(job.grad(), i) : Pack<V>{};
}

/// What a rule reads of V neighbours: first as it is in memory, so that all of it is under way before the first load is
/// waited for.
template <int V> struct Inputs {
    Pack<V> g, p, moment[kMoments], own; // the last one is the 1-bit family's
    /// What is not there is zero, of any format.
    __device__ __forceinline__ void widen_all(const TensorJob &job) {
        g = widen(g, job.grad().format);
        p = widen(p, job.weight().format);
        unrolled<kMoments>([&](int k) INLINED { moment[k] = widen(moment[k], job.moment(k).format); });
    }
    template <int Count> __device__ __forceinline__ void store_moments(const TensorJob &job, int64_t i) const {
        unrolled<Count>([&](int k) INLINED { store(moment[k], job.moment(k), i); });
    }
};
/// A rule without a moment has neither registers nor traffic for it.
template <int V, int Moments, bool Gradient = true>
__device__ __forceinline__ Inputs<V> load_inputs(const TensorJob &job, int64_t i) {
    Inputs<V> t{};
    if constexpr (Gradient) t.g = fetch_gradient<V>(job, i);
    t.p = fetch<V>(job.weight(), i);
    unrolled<Moments>([&](int k) INLINED { t.moment[k] = fetch<V>(job.moment(k), i); });
    t.widen_all(job);
    return t;
}
/// call(moment...) for the k-th neighbour.
template <int Count, int V, class Call>
__device__ __forceinline__ void with_moments_of(Inputs<V> &t, int k, const Call &call) {
    [&]<int... M>(std::integer_sequence<int, M...>) INLINED { call(t.moment[M].at[k]...); }
    (std::make_integer_sequence<int, Count>{});
}

/// The new weights of a pack: rounded at random if so wanted, then to where they go. `old` is for the delta.
template <int V>
__device__ __forceinline__ void publish(const StepPlan &plan, const SharedTensor &s, Pack<V> &p, const Pack<V> &old,
                                        int64_t i) {
    const TensorJob &job = s.job;
    if (job.stochastic) {
        const uint64_t key = rounding_key(job.random_key, s.step);
        unrolled<V>([&](int k) INLINED {
            p.at[k] = round_stochastic_bf16(p.at[k], random_bits(key, uint64_t(job.range.begin + i + k)));
        });
    }
    if (!(plan.flags & DSOPT_STEP_OUT_ONLY) || job.has_master) store(p, job.weight(), i);
    if (job.copy()) store(p, job.copy(), i);
    if (job.out()) store(plan.flags & DSOPT_STEP_DELTA ? p - old : p, job.out(), i);
    if (job.zeroes) store(Pack<V>{}, job.grad(), i);
}

/// Both sums of a leaf; the tiles may be written again when it returns.
__device__ __forceinline__ void sum_tiles(const DevicePlan &d, uint32_t leaf, int n, const Tiles &tiles) {
    __syncthreads();
    sum_tiles<2>(tiles.a, n,
                 [&](int k, double sum) INLINED { (k == 0 ? d.plan.leaf.sums_a : d.plan.leaf.sums_b)[leaf] = sum; });
}

} // namespace dsopt::gpu
