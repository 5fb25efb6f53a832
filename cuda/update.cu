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
            if (s.job.stored) return;
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
                    } else if constexpr (R::passes == Passes::elementwise) {
                        update_pack<R, V>(plan, s, slots, where, i, tiles);
                    }
                });
            });
            if (passes_of(s.rule) == Passes::reduced || plan.policy.report_norms) sum_tiles(plan, s.job, where, tiles);
        });
    if (last_block(plan.control->update)) end_update(d);
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
                if (s.job.stored || !is_reduced(s.job, s.rule)) return;
                if (threadIdx.x == 0 && where.begin == 0) plan.scalars[s.tensor] = s.scalars; // for update_weight()
                visit(s.rule, [&](auto formula) INLINED {
                    using R = typename decltype(formula)::type;
                    if constexpr (R::passes == Passes::reduced)
                        for_packs(where.n, s.aligned, [&]<int V>(Width<V>, int i) INLINED {
                            second_pass_pack<R, V>(plan, s, where.begin + i);
                        });
                });
            });
    if (last_block(plan.control->update_weights) && d.tail == Tail::finish) finish(d, skip);
}

/// Computes trust ratios from sums that ranks have completed, in one block.
__global__ void __launch_bounds__(kThreads, 4) find_trust_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    const StepPlan &plan = d.plan;
    if (skipped(d)) return;
    for_tensors(d, [&](int32_t i, int32_t, auto fold) INLINED { find_trust(plan, i, fold); });
    // For update_weight(): this rank may have nothing of a tensor.
    for (int64_t i = threadIdx.x; plan.policy.report_norms && i < plan.count; i += kThreads) {
        const TensorJob &job = plan.jobs[i];
        plan.scalars[i] = make_scalars(hyper_of(plan, job.group), step_of(plan, job), plan.divisors[job.group],
                                       plan.limits.max_value);
    }
}
/// Completes a step whose end is not that of the update, in one block.
__global__ void __launch_bounds__(kThreads, 4) finish_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    finish(d, skipped(d));
}

/// Runs after the last kernel of a step: advances the counts of many tensors.
__global__ void __launch_bounds__(kThreads) count_kernel(GRID_CONSTANT const PdlArgument<DevicePlan> argument) {
    const DevicePlan &d = argument.begin_kernel();
    if (!skipped(d)) count_steps(d.plan, grid_thread(), grid_threads());
}
void count(const DevicePlan &d, Next next, const Launcher &launcher) {
    launcher.launch_grid(d.plan.count / kThreads + 1, {"count", next}, count_kernel, d);
}

/// Launches a pass: plain(d, next) for tensors without TensorJob::stored and stored(d, next) for those with it, the last
/// of which has the tail, and the kernel that counts the steps of many tensors if the tail ends the step.
template <class Plain, class Stored>
void launch_pass(const DevicePlan &d, Next next, const Launcher &launcher, const Plain &plain, const Stored &stored) {
    const StepPolicy &policy = d.plan.policy;
    const bool ends_step = d.tail == Tail::finish && has_count_kernel(d.plan);
    const Next after_pass = ends_step ? Next::kernel : next;
    if (policy.plain && policy.stored) {
        DevicePlan first = d;
        first.tail = Tail::none;
        plain(first, Next::kernel);
    } else if (policy.plain) {
        plain(d, after_pass);
    }
    if (policy.stored) stored(d, after_pass, launcher);
    if (ends_step) count(d, next, launcher);
}

void update(const DevicePlan &d, Next next, const Launcher &launcher) {
    const size_t tiles = d.plan.policy.reduces || d.plan.policy.report_norms ? 2 * kTileBytes : 0;
    launch_pass(
        d, next, launcher,
        [&](const DevicePlan &plain, Next after) {
            launcher.launch_grid({plain.leaves, tiles}, {"update", after}, update_kernel, plain);
        },
        update_stored);
}
void update_weights(const DevicePlan &d, Next next, const Launcher &launcher) {
    launch_pass(
        d, next, launcher,
        [&](const DevicePlan &plain, Next after) {
            launcher.launch_grid(plain.leaves, {"update_weights", after}, update_weights_kernel, plain);
        },
        update_stored_weights);
}
void find_trust(const DevicePlan &d, Next next, const Launcher &launcher) {
    launcher.launch_block({"find_trust", next}, find_trust_kernel, d);
}
void find_shared_trust(const DevicePlan &d, Next next, const Launcher &launcher) {
    launcher.launch_grid(d.plan.count / kThreads + 1, {"shared_trust", next}, shared_trust_kernel, d);
}
void finish(const DevicePlan &d, Next next, const Launcher &launcher) {
    const bool counts = has_count_kernel(d.plan);
    launcher.launch_block({"finish", counts ? Next::kernel : next}, finish_kernel, d);
    if (counts) count(d, next, launcher);
}

void load_update_kernels(KernelLoader &load) {
    load(update_kernel, shared_trust_kernel, update_weights_kernel, find_trust_kernel, finish_kernel, count_kernel);
}

} // namespace dsopt::gpu
