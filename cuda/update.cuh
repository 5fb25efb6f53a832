// SPDX-License-Identifier: Apache-2.0
// Pass 2: one read-modify-write of everything, all tensors, groups and rules in one launch. LAMB takes a second sweep
// for the weights, once the trust ratios are known.
#pragma once
#include "fold.cuh"
#include "rules/all.h"
#include "rules/rounding.h"

namespace dsopt::gpu {

/// Scalars of a tensor, found by thread 0 and kept while neighbouring leaves share group and step.
struct SharedScalars {
    Scalars scalars;
    float trust;
    int64_t step;
    int32_t group;
    Rule rule;
};

__device__ inline void find_scalars(const DevicePlan &d, int32_t tensor, SharedScalars &s) {
    const StepPlan &plan = d.plan;
    const TensorJob &job = plan.jobs[tensor];
    const int64_t step = int64_t(plan.step[tensor]) + 1;
    if (plan.trust_ratio != nullptr) s.trust = plan.trust_ratio[tensor];
    s.rule = plan.groups[job.group].rule;
    if (d.together) {
        s.scalars = plan.scalars[tensor];
        s.step = step;
        return;
    }
    if (s.step == step && s.group == job.group) return;
    const double divisor = d.decided ? plan.divisors[job.group] : 1.0;
    s.scalars = make_scalars(hyper_of(plan, job.group), step, divisor, plan.limits.max_value);
    s.step = step;
    s.group = job.group;
}

/// A step that nobody had to decide about is skipped for these reasons alone.
__device__ inline bool skipped(const DevicePlan &d) {
    if (d.decided) return d.plan.control->skip != 0;
    return d.plan.given.skip != nullptr && *d.plan.given.skip != 0;
}

/// A tensor that kernels of the 1-bit family update, or nobody does.
__device__ __forceinline__ bool elsewhere(const DevicePlan &d, const TensorJob &job) {
    return job.onebit && d.elsewhere != Elsewhere::no;
}

/// Where a leaf's values go for its sums, when they are wanted.
struct Rooms {
    float *a, *b; // old weight; change, or LAMB's update
};

template <int V, bool Halves = false>
__device__ __forceinline__ Pack<V> load_gradient(const TensorJob &job, int64_t i) {
    if (job.grad != nullptr) return load<V, Halves>(job.grad, job.grad_type, i, aligned16(job.grad));
    Pack<V> zero;
#pragma unroll
    for (int k = 0; k < V; ++k) zero.at[k] = 0;
    return zero;
}
template <int V> __device__ __forceinline__ Pack<V> load_weight(const TensorJob &job, int64_t i) {
    return load<V>(job.weight, job.weight_type, i, aligned16(job.weight));
}
template <int V, bool Halves = false> __device__ __forceinline__ void zero_gradient(const TensorJob &job, int64_t i) {
    Pack<V> zero;
#pragma unroll
    for (int k = 0; k < V; ++k) zero.at[k] = 0;
    store<V, Halves>(zero, job.grad, job.grad_type, i, aligned16(job.grad));
}

/// The new weights of a pack: rounded at random if so wanted, then to where they go. `old` is for the delta.
template <int V, bool Halves = false>
__device__ __forceinline__ void publish(const StepPlan &plan, const TensorJob &job, const SharedScalars &s, Pack<V> &p,
                                        const Pack<V> &old, int64_t i) {
    if (job.stochastic) {
        const uint64_t key = rounding_key(job.random_key, s.step);
#pragma unroll
        for (int k = 0; k < V; ++k)
            p.at[k] = round_stochastic_bf16(p.at[k], random_bits(key, uint64_t(job.offset + i + k)));
    }
    if (!(plan.flags & kOutOnly) || job.has_master) store(p, job.weight, job.weight_type, i, aligned16(job.weight));
    if (job.copy != nullptr) store<V, Halves>(p, job.copy, job.copy_type, i, aligned16(job.copy));
    if (job.out != nullptr) {
        Pack<V> x = p;
        if (plan.flags & kDelta) {
#pragma unroll
            for (int k = 0; k < V; ++k) x.at[k] = p.at[k] - old.at[k];
        }
        store<V, Halves>(x, job.out, job.out_type, i, aligned16(job.out));
    }
    if (job.zeroes) zero_gradient<V, Halves>(job, i);
}

template <int V> __device__ __forceinline__ Pack<V> load_moment(const Moment &moment, int64_t i) {
    return load<V>(moment.data, moment.type, i, aligned16(moment.data));
}
template <int V> __device__ __forceinline__ void store_moment(const Pack<V> &x, const Moment &moment, int64_t i) {
    store(x, moment.data, moment.type, i, aligned16(moment.data));
}

/// With the moments that a rule has.
template <class R> __device__ __forceinline__ void update_one(const R &rule, float g, float &p, float &m, float &v) {
    static_assert(R::moments.count >= 0 && R::moments.count <= kMoments);
    if constexpr (R::moments.count == 0)
        rule(g, p);
    else if constexpr (R::moments.count == 1)
        rule(g, p, m);
    else
        rule(g, p, m, v);
}

/// A rule without a moment has neither registers nor traffic for it.
template <class R, int V>
__device__ __forceinline__ void update_pack(const StepPlan &plan, const TensorJob &job, const SharedScalars &s,
                                            int64_t i, int place, const Rooms &rooms) {
    const Pack<V> g = load_gradient<V>(job, i);
    Pack<V> p = load_weight<V>(job, i);
    Pack<V> m, v;
    if constexpr (R::moments.count > 0) m = load_moment<V>(job.moment[0], i);
    if constexpr (R::moments.count > 1) v = load_moment<V>(job.moment[1], i);
    const Pack<V> old = p;
#pragma unroll
    for (int k = 0; k < V; ++k) update_one(R{s.scalars}, g.at[k], p.at[k], m.at[k], v.at[k]);
    if constexpr (R::moments.count > 0) store_moment(m, job.moment[0], i);
    if constexpr (R::moments.count > 1) store_moment(v, job.moment[1], i);
    publish(plan, job, s, p, old, i);
    if (plan.report_norms) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
            rooms.a[place + k] = old.at[k];
            rooms.b[place + k] = p.at[k] - old.at[k];
        }
    }
}

template <class R, int V>
__device__ __forceinline__ void lamb_moments_pack(const TensorJob &job, const SharedScalars &s, int64_t i, int place,
                                                  const Rooms &rooms) {
    const Pack<V> g = load_gradient<V>(job, i), p = load_weight<V>(job, i);
    Pack<V> m = load_moment<V>(job.moment[0], i);
    Pack<V> v = load_moment<V>(job.moment[1], i);
#pragma unroll
    for (int k = 0; k < V; ++k) {
        const float u = typename R::Moments{s.scalars}(g.at[k], p.at[k], m.at[k], v.at[k]);
        rooms.a[place + k] = p.at[k];
        rooms.b[place + k] = u;
    }
    store_moment(m, job.moment[0], i);
    store_moment(v, job.moment[1], i);
}

template <int V>
__device__ __forceinline__ void lamb_weights_pack(const StepPlan &plan, const TensorJob &job, const SharedScalars &s,
                                                  int64_t i) {
    Pack<V> p = load_weight<V>(job, i);
    const Pack<V> m = load_moment<V>(job.moment[0], i);
    const Pack<V> v = load_moment<V>(job.moment[1], i);
    const Pack<V> old = p;
#pragma unroll
    for (int k = 0; k < V; ++k)
        visit(s.rule, [&](auto formula) {
            using R = typename decltype(formula)::type;
            if constexpr (R::sweeps == 2) typename R::Weights{s.scalars, s.trust}(p.at[k], m.at[k], v.at[k]);
        });
    publish(plan, job, s, p, old, i);
}

/// A tensor that stays as it is: outputs and zeroed gradients all the same.
template <int V> __device__ __forceinline__ void unchanged_pack(const StepPlan &plan, const TensorJob &job, int64_t i) {
    if (job.out != nullptr) {
        Pack<V> x = load_weight<V>(job, i);
        if (plan.flags & kDelta) {
#pragma unroll
            for (int k = 0; k < V; ++k) x.at[k] = 0;
        }
        store(x, job.out, job.out_type, i, aligned16(job.out));
    }
    if (job.zeroes) zero_gradient<V>(job, i);
}

/// body(V, i, place): packs of V elements while they last, then single ones.
template <int V, class Body> __device__ __forceinline__ void for_packs(int64_t begin, int n, const Body &body) {
    for (int place = int(threadIdx.x) * V; place + V <= n; place += kThreads * V)
        body(std::integral_constant<int, V>{}, begin + place, place);
    for (int place = n / V * V + int(threadIdx.x); place < n; place += kThreads)
        body(std::integral_constant<int, 1>{}, begin + place, place);
}

/// Both sums of a leaf, by two warps.
__device__ inline void sum_rooms(const DevicePlan &d, uint32_t leaf, int n, const Rooms &rooms) {
    __syncthreads();
    const int warp = int(threadIdx.x / 32);
    if (warp < 2) {
        const double sum = fold_lanes(add_squares(warp == 0 ? rooms.a : rooms.b, n, 0));
        if (threadIdx.x % 32 == 0) (warp == 0 ? d.plan.sums_a : d.plan.sums_b)[leaf] = sum;
    }
}

/// By the last block of the last kernel: counters, the report.
__device__ inline void finish(const DevicePlan &d, bool skip) {
    const StepPlan &plan = d.plan;
    if (!skip)
        for (int64_t i = threadIdx.x; i < plan.count; i += kThreads) count_step(plan, i);
    if (!skip && plan.report_norms && plan.count != 0) { // as fold_updates() adds them up
        for_tensors(
            int32_t(plan.count), [&](int32_t i) { return int32_t(leaves_of(plan.jobs[i].numel)); },
            [&](int32_t i, int32_t leaves, auto by) {
                const TensorJob &job = plan.jobs[i];
                const bool counts = job.present && leaves != 0;
                const double weights = counts ? by.sum(plan.sums_a + job.first_leaf, leaves) : 0.0;
                if (by.lead) d.tensor_squares[i] = weights;
                const double updates = counts ? by.sum(plan.sums_b + job.first_leaf, leaves) : 0.0;
                if (by.lead) d.tensor_updates[i] = counts ? update_weight(plan, i) * updates : 0.0;
            });
        __syncthreads();
        if (threadIdx.x < 32) { // back to where they are from: held in registers, they would be spilled
            const double weights = add_by_warp(int32_t(plan.count), [&](int32_t i) { return d.tensor_squares[i]; });
            if (threadIdx.x == 0) d.tensor_squares[0] = weights;
            const double updates = add_by_warp(int32_t(plan.count), [&](int32_t i) { return d.tensor_updates[i]; });
            if (threadIdx.x == 0) d.tensor_updates[0] = updates;
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (!skip && d.together)
        for_stretches(plan,
                      [&](int64_t begin, int64_t end, int32_t group) { count_together(plan, begin, end, group); });
    if (!d.decided) {
        fold_nothing(plan);
        decide(plan);
    }
    if (!skip && plan.report_norms) {
        d.plan.outcome->weight_norm = plan.count != 0 ? sqrt(d.tensor_squares[0]) : 0.0;
        d.plan.outcome->update_norm = plan.count != 0 ? sqrt(d.tensor_updates[0]) : 0.0;
    }
    write_report(plan);
}

/// V: elements a thread has in hand, 4 where everything is fp32, 8 where a 16-byte access must hold 16-bit elements.
template <int V> __global__ void __launch_bounds__(kThreads, V == 4 ? 4 : 3) update_kernel(const DevicePlan d) {
    DYNAMIC_SHARED(float, room);
    __shared__ SharedScalars s;
    const StepPlan &plan = d.plan;
    const Rooms rooms{room, room + kLeaf};
    if (threadIdx.x == 0) s.group = -1, s.step = -1, s.trust = 1;
    for (uint32_t leaf = blockIdx.x; leaf < d.leaves; leaf += gridDim.x) {
        const int32_t tensor = d.tensor_of_leaf[leaf];
        const TensorJob &job = plan.jobs[tensor];
        const int64_t begin = (leaf - job.first_leaf) * kLeaf;
        const int n = int(job.numel - begin < kLeaf ? job.numel - begin : kLeaf);
        if (skipped(d) || !job.present ||
            (job.onebit && d.elsewhere == Elsewhere::idle)) { // asked anew each time: one register less in the loop
            for_packs<V>(begin, n,
                         [&](auto width, int64_t i, int) { unchanged_pack<decltype(width)::value>(plan, job, i); });
            continue;
        }
        if (elsewhere(d, job)) continue;
        __syncthreads();
        if (threadIdx.x == 0) find_scalars(d, tensor, s);
        __syncthreads();
        visit(s.rule, [&](auto formula) {
            using R = typename decltype(formula)::type;
            for_packs<V>(begin, n, [&](auto width, int64_t i, int place) {
                constexpr int W = decltype(width)::value;
                if constexpr (R::sweeps == 2)
                    lamb_moments_pack<R, W>(job, s, i, place, rooms);
                else
                    update_pack<R, W>(plan, job, s, i, place, rooms);
            });
        });
        if (sweeps_of(s.rule) == 2 || plan.report_norms) sum_rooms(d, leaf, n, rooms);
    }
    if (!last_block(&d.plan.control->ticket[1])) return;
    const bool skip = skipped(d);
    if (!plan.has_lamb) {
        finish(d, skip);
        return;
    }
    if (skip) return;
    for_tensors(
        int32_t(plan.count), [&](int32_t i) { return int32_t(leaves_of(plan.jobs[i].numel)); },
        [&](int32_t i, int32_t leaves, auto by) {
            const TensorJob &job = plan.jobs[i];
            if (!job.present || sweeps_of(plan.groups[job.group].rule) == 1 || elsewhere(d, job)) return;
            const double weights = by.sum(plan.sums_a + job.first_leaf, leaves),
                         updates = by.sum(plan.sums_b + job.first_leaf, leaves);
            if (by.lead) find_trust(plan, i, weights, updates);
        });
}

/// Trust ratios of sharded tensors, once the model ranks have added up their sums. Those of a skipped step are zeros.
__global__ void __launch_bounds__(kThreads, 4) shared_trust_kernel(const DevicePlan d) {
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < d.plan.count; i += int64_t(gridDim.x) * kThreads)
        take_shared_trust(d.plan, i);
}

template <int V> __global__ void __launch_bounds__(kThreads, V == 4 ? 4 : 3) lamb_weights_kernel(const DevicePlan d) {
    __shared__ SharedScalars s;
    const StepPlan &plan = d.plan;
    const bool skip = skipped(d);
    if (threadIdx.x == 0) s.group = -1, s.step = -1;
    for (uint32_t leaf = blockIdx.x; leaf < d.leaves && !skip; leaf += gridDim.x) {
        const int32_t tensor = d.tensor_of_leaf[leaf];
        const TensorJob &job = plan.jobs[tensor];
        const Rule rule = plan.groups[job.group].rule;
        if (!job.present || sweeps_of(rule) == 1 || elsewhere(d, job)) continue;
        const int64_t begin = (leaf - job.first_leaf) * kLeaf;
        const int n = int(job.numel - begin < kLeaf ? job.numel - begin : kLeaf);
        __syncthreads();
        if (threadIdx.x == 0) {
            find_scalars(d, tensor, s);
            if (leaf == job.first_leaf) plan.scalars[tensor] = s.scalars; // fold_updates() wants the factor
        }
        __syncthreads();
        for_packs<V>(begin, n,
                     [&](auto width, int64_t i, int) { lamb_weights_pack<decltype(width)::value>(plan, job, s, i); });
    }
    if (last_block(&d.plan.control->ticket[2])) finish(d, skip);
}

} // namespace dsopt::gpu
