// SPDX-License-Identifier: Apache-2.0
// Pass 2: one read-modify-write of everything, all tensors, groups and rules in one launch. Passes::reduced takes a
// second one for the weights, once the factors are known.
#pragma once
#include "fold.cuh"
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

/// Where a leaf's values go for its sums, when they are wanted.
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
            p.at[k] = round_stochastic_bf16(p.at[k], random_bits(key, uint64_t(job.offset + i + k)));
        });
    }
    if (!(plan.flags & DSOPT_STEP_OUT_ONLY) || job.has_master) store(p, job.weight(), i);
    if (job.copy()) store(p, job.copy(), i);
    if (job.out()) store(plan.flags & DSOPT_STEP_DELTA ? p - old : p, job.out(), i);
    if (job.zeroes) store(Pack<V>{}, job.grad(), i);
}

/// V neighbours of a leaf from its i-th one on.
template <class R, int V>
__device__ __forceinline__ void update_pack(const StepPlan &plan, const SharedTensor &s, const Leaf &where, int i,
                                            const Tiles &tiles) {
    Inputs<V> t = load_inputs<V, R::moments.count>(s.job, where.begin + i);
    const Pack<V> old = t.p;
    unrolled<V>([&](int k) INLINED {
        with_moments_of<R::moments.count>(t, k,
                                          [&](auto &...each) INLINED { R{s.scalars}(t.g.at[k], t.p.at[k], each...); });
    });
    t.template store_moments<R::moments.count>(s.job, where.begin + i);
    publish(plan, s, t.p, old, where.begin + i);
    if (plan.policy.report_norms) {
        to_tile(old, tiles.a + i);
        to_tile(t.p - old, tiles.b + i);
    }
}

template <class R, int V>
__device__ __forceinline__ void first_pass_pack(const SharedTensor &s, const Leaf &where, int i, const Tiles &tiles) {
    Inputs<V> t = load_inputs<V, R::moments.count>(s.job, where.begin + i);
    unrolled<V>([&](int k) INLINED {
        tiles.a[i + k] = t.p.at[k];
        with_moments_of<R::moments.count>(t, k, [&](auto &...each) INLINED {
            tiles.b[i + k] = typename R::Moments{s.scalars}(t.g.at[k], t.p.at[k], each...);
        });
    });
    t.template store_moments<R::moments.count>(s.job, where.begin + i);
}

template <int V>
__device__ __forceinline__ void second_pass_pack(const StepPlan &plan, const SharedTensor &s, int64_t i) {
    Inputs<V> t = load_inputs<V, kReducedMoments, false>(s.job, i);
    const Pack<V> old = t.p;
    unrolled<V>([&](int k) INLINED {
        visit(s.rule, [&](auto formula) INLINED {
            using R = typename decltype(formula)::type;
            if constexpr (R::passes == Passes::reduced)
                with_moments_of<R::moments.count>(t, k, [&](auto &...each) INLINED {
                    typename R::Weights{s.scalars, s.trust}(t.p.at[k], each...);
                });
        });
    });
    publish(plan, s, t.p, old, i);
}

/// A tensor that stays as it is: outputs and zeroed gradients all the same.
template <int V> __device__ __forceinline__ void unchanged_pack(const StepPlan &plan, const TensorJob &job, int64_t i) {
    if (job.out()) store(plan.flags & DSOPT_STEP_DELTA ? Pack<V>{} : load<V>(job.weight(), i), job.out(), i);
    if (job.zeroes) store(Pack<V>{}, job.grad(), i);
}

/// Both sums of a leaf, by two warps; the tiles may be written again when it returns.
__device__ inline void sum_tiles(const DevicePlan &d, uint32_t leaf, int n, const Tiles &tiles) {
    __syncthreads();
    const int warp = int(threadIdx.x / 32);
    if (warp < 2) {
        const double sum = fold_lanes(add_squares(warp == 0 ? tiles.a : tiles.b, n));
        if (threadIdx.x % 32 == 0) (warp == 0 ? d.plan.leaf.sums_a : d.plan.leaf.sums_b)[leaf] = sum;
    }
    __syncthreads();
}

/// Counts of all tensors. Four at a time, whose loads overlap.
__device__ inline void count_steps(const StepPlan &plan) {
    for (int64_t first = threadIdx.x; first < plan.count; first += 4 * kThreads) {
        int32_t advance[4];
        unrolled<4>([&](int k) INLINED {
            const int64_t i = first + k * kThreads;
            advance[k] = i < plan.count ? plan.jobs[i].advance : 0;
        });
        unrolled<4>([&](int k) INLINED {
            int32_t &step = plan.step[first + k * kThreads];
            if (advance[k] != 0) step = more(step, advance[k]);
        });
    }
}

/// By the last block of the last kernel: counters, the report.
__device__ inline void finish(const DevicePlan &d, bool skip) {
    const StepPlan &plan = d.plan;
    if (!skip) count_steps(plan);
    if (!skip && plan.policy.report_norms && plan.count != 0) { // as fold_updates() adds them up
        for_tensors(plan, [&](int32_t i, int32_t leaves, auto by) INLINED {
            const TensorJob &job = plan.jobs[i];
            const bool counts = job.present && leaves != 0;
            const double weights = counts ? by.sum(plan.leaf.sums_a + job.first_leaf, leaves) : 0.0;
            if (by.lead) d.tensor_squares[i] = weights;
            const double updates = counts ? by.sum(plan.leaf.sums_b + job.first_leaf, leaves) : 0.0;
            if (by.lead) d.tensor_updates[i] = counts ? update_weight(plan, i) * updates : 0.0;
        });
        __syncthreads();
        if (threadIdx.x < 32) { // back to where they are from: held in registers, they would be spilled
            const LeafFold<true> by{threadIdx.x == 0};
            const double weights = by.sum(d.tensor_squares, int32_t(plan.count));
            if (by.lead) d.tensor_squares[0] = weights;
            const double updates = by.sum(d.tensor_updates, int32_t(plan.count));
            if (by.lead) d.tensor_updates[0] = updates;
        }
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    if (!d.decided) {
        fold_nothing(plan);
        decide(plan);
    }
    if (!skip && plan.policy.report_norms) {
        d.plan.outcome->weight_norm = plan.count != 0 ? sqrt(d.tensor_squares[0]) : 0.0;
        d.plan.outcome->update_norm = plan.count != 0 ? sqrt(d.tensor_updates[0]) : 0.0;
    }
    write_report(plan);
}

/// Resident blocks per multiprocessor. On consumer devices of the last generation the compiler spills with 64
/// registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kUpdateBlocks = 3;
#else
constexpr int kUpdateBlocks = 4;
#endif
__global__ void __launch_bounds__(kThreads, kUpdateBlocks) update_kernel(GRID_CONSTANT const DevicePlan d) {
    begin_kernel(d.plan.policy.reduces && d.plan.shards.count == 0); // sums of shards go into a collective
    DYNAMIC_SHARED(float, memory);
    __shared__ SharedTensor s;
    const StepPlan &plan = d.plan;
    const Tiles tiles{memory, memory + kLeaf};
    for_shared_leaves(
        d, s, [](int32_t) {},
        [&](uint32_t leaf, int32_t, const Leaf &where) INLINED {
            if (skipped(d) || s.job.owner == Owner::none) // asked anew each time: one register less in the loop
                return for_packs(where.n, s.aligned, [&]<int V>(Width<V>, int i) INLINED {
                    unchanged_pack<V>(plan, s.job, where.begin + i);
                });
            if (s.job.owner != Owner::update) return;
            visit(s.rule, [&](auto formula) INLINED {
                using R = typename decltype(formula)::type;
                for_packs(where.n, s.aligned, [&]<int V>(Width<V>, int i) INLINED {
                    if constexpr (R::passes == Passes::reduced)
                        first_pass_pack<R, V>(s, where, i, tiles);
                    else
                        update_pack<R, V>(plan, s, where, i, tiles);
                });
            });
            if (passes_of(s.rule) == Passes::reduced || plan.policy.report_norms) sum_tiles(d, leaf, where.n, tiles);
        });
    if (!last_block(&d.plan.control->ticket[1])) return;
    const bool skip = skipped(d);
    if (!plan.policy.reduces) {
        finish(d, skip);
        return;
    }
    if (skip) return;
    for_tensors(plan, [&](int32_t i, int32_t leaves, auto by) INLINED {
        const TensorJob &job = plan.jobs[i];
        if (job.owner != Owner::update || passes_of(plan.groups[job.group].rule) != Passes::reduced) return;
        const double weights = by.sum(plan.leaf.sums_a + job.first_leaf, leaves),
                     updates = by.sum(plan.leaf.sums_b + job.first_leaf, leaves);
        if (by.lead) find_trust(plan, i, weights, updates);
    });
}

/// Trust ratios of sharded tensors, once the model ranks have added up their sums. Those of a skipped step are zeros.
__global__ void __launch_bounds__(kThreads, 4) shared_trust_kernel(GRID_CONSTANT const DevicePlan d) {
    begin_kernel(true);
    for (int64_t i = grid_thread(); i < d.plan.count; i += grid_threads()) take_shared_trust(d.plan, i);
}

__global__ void __launch_bounds__(kThreads, 4) update_weights_kernel(GRID_CONSTANT const DevicePlan d) {
    begin_kernel();
    __shared__ SharedTensor s;
    const StepPlan &plan = d.plan;
    const bool skip = skipped(d);
    if (!skip)
        for_shared_leaves(
            d, s, [](int32_t) {},
            [&](uint32_t, int32_t tensor, const Leaf &where) INLINED {
                if (s.job.owner != Owner::update || passes_of(s.rule) != Passes::reduced) return;
                if (threadIdx.x == 0 && where.begin == 0) plan.scalars[tensor] = s.scalars; // for update_weight()
                for_packs(where.n, s.aligned,
                          [&]<int V>(Width<V>, int i) INLINED { second_pass_pack<V>(plan, s, where.begin + i); });
            });
    if (last_block(&d.plan.control->ticket[2])) finish(d, skip);
}

} // namespace dsopt::gpu
