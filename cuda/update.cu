// SPDX-License-Identifier: Apache-2.0
// Pass 2: one read-modify-write of all arrays, with all tensors, groups and rules in one launch. Passes::reduced needs
// a second launch for the weights, after the trust ratios are known.
#include "kernels.h"
#include "update.cuh"

namespace dsopt::gpu {

/// Calls body(Width<V>, slots, i) for i in [0, n), like for_packs(). In the loop over groups of four the formats of the
/// arrays are compile-time constants.
template <class Body> __device__ __forceinline__ void for_known_packs(const SharedTensor &s, int n, const Body &body) {
    const int whole = s.aligned ? n / 4 * 4 : 0;
    const auto fours = [&]<FormatSet Set>(std::integral_constant<FormatSet, Set>) INLINED_ON_DEVICE {
        const KnownSlots<Set> slots{s.job};
        for (int i = int(threadIdx.x) * 4; i < whole; i += kThreads * 4) body(Width<4>{}, slots, i);
    };
    switch (s.formats) {
    case FormatSet::any: fours(std::integral_constant<FormatSet, FormatSet::any>{}); break;
    case FormatSet::f32: fours(std::integral_constant<FormatSet, FormatSet::f32>{}); break;
    case FormatSet::f16: fours(std::integral_constant<FormatSet, FormatSet::f16>{}); break;
    case FormatSet::bf16: fours(std::integral_constant<FormatSet, FormatSet::bf16>{}); break;
    }
    for (int i = whole + int(threadIdx.x); i < n; i += kThreads) body(Width<1>{}, s.job, i);
}

/// Updates V neighbours of a leaf, from element i on.
template <class R, int V, class Slots>
__device__ __forceinline__ void update_pack(const StepPlan &plan, const SharedTensor &s, const Slots &slots,
                                            const Leaf &where, int i, const Tiles &tiles) {
    Inputs<V> t = load_inputs<V, R::moments.count>(slots, where.begin + i);
    const Pack<V> old = t.p;
    unrolled<V>([&](int k) INLINED {
        with_moments_of<R::moments.count>(t, k,
                                          [&](auto &...each) INLINED { R{s.scalars}(t.g.at[k], t.p.at[k], each...); });
    });
    t.template store_moments<R::moments.count>(slots, where.begin + i);
    store_weights(plan, s, slots, t.p, old, where.begin + i);
    if (plan.policy.report_norms) {
        to_tile(old, tiles.a + i);
        to_tile(t.p - old, tiles.b + i);
    }
}

template <class R, int V, class Slots>
__device__ __forceinline__ void first_pass_pack(const SharedTensor &s, const Slots &slots, const Leaf &where, int i,
                                                const Tiles &tiles) {
    Inputs<V> t = load_inputs<V, R::moments.count>(slots, where.begin + i);
    unrolled<V>([&](int k) INLINED {
        tiles.a[i + k] = t.p.at[k];
        with_moments_of<R::moments.count>(t, k, [&](auto &...each) INLINED {
            tiles.b[i + k] = typename R::Moments{s.scalars}(t.g.at[k], t.p.at[k], each...);
        });
    });
    t.template store_moments<R::moments.count>(slots, where.begin + i);
}

template <class R, int V>
__device__ __forceinline__ void second_pass_pack(const StepPlan &plan, const SharedTensor &s, int64_t i) {
    Inputs<V> t = load_inputs<V, R::moments.count, false>(s.job, i);
    const Pack<V> old = t.p;
    unrolled<V>([&](int k) INLINED {
        with_moments_of<R::moments.count>(t, k, [&](auto &...each) INLINED {
            typename R::Weights{s.scalars, s.trust}(t.p.at[k], each...);
        });
    });
    store_weights(plan, s, s.job, t.p, old, i);
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

__global__ void __launch_bounds__(kThreads, kBlocks)
    update_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    DYNAMIC_SHARED(float, memory);
    __shared__ SharedTensor s;
    const StepPlan &plan = d.plan;
    const Tiles tiles{memory, memory + kLeaf};
    for_shared_leaves(
        d, {&plan.control->update.distributed}, s, [](int32_t) {},
        [&](const Leaf &where) INLINED {
            if (skipped(d) || s.job.owner == Owner::none) // tested in each iteration: one register less in the loop
                return for_packs(where.n, s.aligned, [&]<int V>(Width<V>, int i) INLINED {
                    unchanged_pack<V>(plan, s.job, where.begin + i);
                });
            if (s.job.owner != Owner::update) return;
            visit(s.rule, [&](auto formula) INLINED {
                using R = typename decltype(formula)::type;
                for_known_packs(s, where.n, [&]<int V>(Width<V>, const auto &slots, int i) INLINED {
                    if constexpr (R::passes == Passes::reduced) {
                        first_pass_pack<R, V>(s, slots, where, i, tiles);
                    } else {
                        static_assert(R::passes == Passes::elementwise);
                        update_pack<R, V>(plan, s, slots, where, i, tiles);
                    }
                });
            });
            if (passes_of(s.rule) == Passes::reduced || plan.policy.report_norms) sum_tiles(plan, s.job, where, tiles);
        });
    if (!last_block(plan.control->update)) return;
    const bool skip = skipped(d);
    if (!plan.policy.reduces) {
        finish(d, skip);
        return;
    }
    if (skip) return;
    for_tensors(d, [&](int32_t i, int32_t, auto fold) INLINED { find_trust(plan, i, fold); });
}

/// Computes the trust ratios of sharded tensors, after model ranks have all-reduced their sums. In a skipped step the
/// sums are zeros.
__global__ void __launch_bounds__(kThreads, 4)
    shared_trust_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    for (int64_t i = grid_thread(); i < d.plan.count; i += grid_threads()) store_shared_trust_ratio(d.plan, i);
}

__global__ void __launch_bounds__(kThreads, 4)
    update_weights_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    __shared__ SharedTensor s;
    const StepPlan &plan = d.plan;
    const bool skip = skipped(d);
    if (!skip)
        for_shared_leaves(
            d, {&plan.control->update_weights.distributed}, s, [](int32_t) {},
            [&](const Leaf &where) INLINED {
                if (!is_reduced(s.job, s.rule)) return;
                if (threadIdx.x == 0 && where.begin == 0) plan.scalars[s.tensor] = s.scalars; // for update_weight()
                visit(s.rule, [&](auto formula) INLINED {
                    using R = typename decltype(formula)::type;
                    if constexpr (R::passes == Passes::reduced)
                        for_packs(where.n, s.aligned, [&]<int V>(Width<V>, int i) INLINED {
                            second_pass_pack<R, V>(plan, s, where.begin + i);
                        });
                });
            });
    if (last_block(plan.control->update_weights)) finish(d, skip);
}

/// Runs after the last kernel of a step: advances the counts of many tensors.
__global__ void __launch_bounds__(kThreads) count_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    if (!skipped(d)) count_steps(d.plan, grid_thread(), grid_threads());
}
void count(const DevicePlan &d, const Launcher &launcher) {
    if (has_count_kernel(d.plan)) launcher.launch_grid(d.plan.count / kThreads + 1, "count", count_kernel, d);
}

void update(const DevicePlan &d, const Launcher &launcher) {
    const size_t tiles = d.plan.policy.reduces || d.plan.policy.report_norms ? 2 * kTileBytes : 0;
    const StepPlan &plan = d.plan;
    // The sums of shards are all-reduced after this kernel.
    const Next next =
        kernel_if(plan.policy.reduces ? plan.shards.count == plan.shards.exchanged : has_count_kernel(plan));
    launcher.launch_grid({d.leaves, tiles}, {"update", next}, update_kernel, d);
    if (!plan.policy.reduces) count(d, launcher);
}
void share_trust(const DevicePlan &d, const Launcher &launcher) {
    launcher.launch_grid(d.plan.count / kThreads + 1, {"shared_trust", Next::kernel}, shared_trust_kernel, d);
}
void update_weights(const DevicePlan &d, const Launcher &launcher) {
    launcher.launch_grid(d.leaves, {"update_weights", kernel_if(has_count_kernel(d.plan))}, update_weights_kernel, d);
    count(d, launcher);
}

void load_update_kernels(KernelLoader &load) {
    load(update_kernel, shared_trust_kernel, update_weights_kernel, count_kernel);
}

} // namespace dsopt::gpu
